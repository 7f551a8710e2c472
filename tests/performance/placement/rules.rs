//! Rules of others, to compare with.

use pliant_model::topology::NodeTopology;
use pliant_policy::placement::{GpuSet, Tables};
use std::collections::BTreeMap;

/// A rule by which GPUs of a node are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Pliant's.
    Ours,
    /// The lowest indexes.
    FirstFit,
    /// Slurm 22.05's: one GPU on each socket where the job has cores, then those best linked to them.
    Slurm2205,
    /// Slurm 24.05's and later: the same with the links sorted the other way round.
    Slurm2411,
}

impl Rule {
    /// Ours first.
    pub const ALL: [Rule; 4] = [Rule::Ours, Rule::FirstFit, Rule::Slurm2205, Rule::Slurm2411];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Rule::Ours => "Pliant",
            Rule::FirstFit => "first fit by index",
            Rule::Slurm2205 => "Slurm 22.05",
            Rule::Slurm2411 => "Slurm 24.11",
        }
    }

    /// Chooses. The job's one core is on the socket of the first free GPU.
    pub fn choose(self, topology: &NodeTopology, tables: &Tables, free: GpuSet, gpus: u32) -> GpuSet {
        let sockets = sockets(topology);
        let first = free.iter().min_by_key(|g| (sockets.get(*g).copied(), *g)).unwrap_or(0);
        let used = [sockets.get(first).copied().unwrap_or(0)];
        match self {
            Rule::Ours => super::ours(tables, free, gpus),
            Rule::FirstFit => GpuSet::of(free.iter().take(gpus as usize)),
            Rule::Slurm2205 => slurm(&links(topology), &sockets, &used, free, gpus, true),
            Rule::Slurm2411 => slurm(&links(topology), &sockets, &used, free, gpus, false),
        }
    }
}

/// `Links=` as an export of gres.conf has it: NVLinks, and 0 without.
fn links(topology: &NodeTopology) -> Vec<Vec<u32>> {
    let n = topology.gpus.len();
    (0..n).map(|a| (0..n).map(|b| topology.link(a, b).count).collect()).collect()
}

/// Sockets by NUMA node (or by CPUs where there is none).
fn sockets(topology: &NodeTopology) -> Vec<u32> {
    let mut seen: BTreeMap<(Option<u32>, Vec<u32>), u32> = BTreeMap::new();
    let key = |g: &pliant_model::topology::Gpu| (g.numa, if g.numa.is_some() { vec![] } else { g.cpus.clone() });
    for g in &topology.gpus {
        let next = u32::try_from(seen.len()).unwrap_or(0);
        seen.entry(key(g)).or_insert(next);
    }
    topology.gpus.iter().map(|g| seen.get(&key(g)).copied().unwrap_or(0)).collect()
}

/// Slurm's rule for `--gres=gpu:N` (`_set_node_bits` of select/cons_tres, 22.05): first one GPU on each socket where the
/// job has cores; the links of what is chosen so far to each free GPU are added up and scaled to at most 4; then
/// from the highest count down, GPUs of used sockets, then of the others. `best_first` false: as since 24.05, lowest
/// count first.
pub fn slurm(links: &[Vec<u32>], sockets: &[u32], used: &[u32], free: GpuSet, gpus: u32, best_first: bool) -> GpuSet {
    let mut chosen = GpuSet::default();
    let mut count = vec![0u32; sockets.len()];
    let socket = |g: usize| sockets.get(g).copied().unwrap_or(0);
    for s in used {
        let Some(first) = free.without(chosen).iter().find(|g| socket(*g) == *s).filter(|_| chosen.len() < gpus) else {
            continue;
        };
        chosen.0 |= 1 << first;
        for other in free.iter().filter(|o| *o != first) {
            if let Some(c) = count.get_mut(other) {
                *c += links.get(first).and_then(|l| l.get(other)).copied().unwrap_or(0);
            }
        }
    }
    let best = count.iter().copied().max().unwrap_or(0);
    let scale = if best > 4 { best.div_ceil(4) } else { 1 };
    count.iter_mut().for_each(|c| *c /= scale);
    let top = best / scale;
    for on_used in [true, false] {
        let mut levels: Vec<u32> = (0..=top).collect();
        if best_first {
            levels.reverse();
        }
        for level in levels {
            let at = |g: &usize| {
                let c = count.get(*g).copied().unwrap_or(0);
                let linked = if best_first { c >= level } else { c <= level };
                linked && used.contains(&socket(*g)) == on_used
            };
            let mut here: Vec<usize> = free.iter().filter(at).collect();
            here.sort_by_key(|g| (socket(*g), *g));
            for g in here {
                if chosen.len() < gpus {
                    chosen.0 |= 1 << g;
                }
            }
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strong_pairs_as_measured() {
        // design/slurm.md: strong pairs 0-3, 1-2, 4-7, 5-6; 22.05.8 gave linked pairs four times, 24.11.5 never.
        let strong = |a: usize, b: usize| u32::from(a ^ 3 == b) * 4;
        let links: Vec<Vec<u32>> = (0..8).map(|a| (0..8).map(|b| strong(a, b)).collect()).collect();
        let sockets = [0, 0, 0, 0, 1, 1, 1, 1];
        for (best_first, linked) in [(true, 4), (false, 0)] {
            let mut free = GpuSet::first(8);
            let mut pairs = 0;
            for _ in 0..4 {
                let first = free.iter().next().unwrap();
                let set = slurm(&links, &sockets, &[sockets[first]], free, 2, best_first);
                assert_eq!(set.len(), 2);
                free = free.without(set);
                let [a, b] = set.iter().collect::<Vec<_>>()[..] else { panic!() };
                pairs += u32::from(a ^ 3 == b);
            }
            assert_eq!(pairs, linked);
        }
    }
}
