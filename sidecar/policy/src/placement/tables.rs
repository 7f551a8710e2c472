//! Choice inside a node, exact for up to 16 GPUs.

use super::{GpuSet, ring};
use pliant_model::GpuCount;
use pliant_model::topology::NodeTopology;
use std::collections::BTreeMap;
use std::fmt;

/// The most GPUs of a box whose subsets are all scored.
const MAX: usize = 16;
/// Sizes of groups that others will want whole.
const GROUPS: [u32; 3] = [2, 4, 8];
/// Beyond so many good groups of a size they are packed greedily: there is no choice to be wrong about.
const EXACT_GROUPS: usize = 2_000;

/// What a job wants on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Want {
    /// GPUs.
    pub gpus: GpuCount,
    /// Model, where one is named.
    pub model: Option<String>,
    /// GPUs that the same job holds there already.
    pub beside: GpuSet,
    /// Whether device cgroups separate those from the new ones: then no link to them counts.
    pub separated: bool,
    /// Whether the job spans nodes, so that the network card counts.
    pub spans: bool,
    /// Whether the job has fewer CPUs there than GPUs: a step then gets the GPUs near its CPUs only, so as few NUMA nodes
    /// as can be come before everything else.
    pub near: bool,
}

impl Want {
    /// So many, of any model, of a job that has none there.
    pub fn gpus(gpus: GpuCount) -> Want {
        Want { gpus, ..Want::default() }
    }
}

/// A choice with its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The GPUs.
    pub set: GpuSet,
    /// Why these.
    pub why: Why,
}

/// The numbers behind a choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Why {
    /// Bottleneck of the best ring through the set, MB/s; 0 for one GPU.
    pub bottleneck_mb_s: u32,
    /// Physical links inside it.
    pub links: u32,
    /// NUMA nodes that it is on.
    pub numa_nodes: u32,
    /// Well-linked groups of 2, 4 and 8 that are no longer whole.
    pub broken: [u32; 3],
    /// GPUs still free on the node.
    pub left: GpuCount,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bottleneck_mb_s {
            0 => f.write_str("one GPU")?,
            mb_s => write!(f, "ring of {}.{} GB/s, {} links", mb_s / 1000, mb_s % 1000 / 100, self.links)?,
        }
        write!(f, ", {} NUMA node(s)", self.numa_nodes)?;
        for (count, of) in self.broken.iter().zip(["pair", "quad", "group of 8"]).filter(|(n, _)| **n > 0) {
            write!(f, ", breaks {count} {of}(s)")?;
        }
        write!(f, ", leaves {} free", self.left)
    }
}

/// Why there is no choice.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoPlace {
    /// Too few.
    #[error("{want} GPUs wanted, {free} are free")]
    TooFew {
        /// Wanted.
        want: GpuCount,
        /// Free.
        free: GpuCount,
    },
    /// Enough, and not of one model: models are never mixed.
    #[error("{want} GPUs of one model wanted, of no model more than {most} are free")]
    Models {
        /// Wanted.
        want: GpuCount,
        /// The most of one model.
        most: GpuCount,
    },
    /// The fabric is not ready: single-GPU jobs only.
    #[error("{want} GPUs wanted, the NVLink fabric is not ready: single-GPU jobs only")]
    FabricDown {
        /// Wanted.
        want: GpuCount,
    },
    /// Enough, and not close enough together.
    #[error("{want} GPUs wanted {within}: {free} are free, not so many of them there")]
    Apart {
        /// Wanted.
        want: GpuCount,
        /// How close.
        within: &'static str,
        /// Free anywhere.
        free: GpuCount,
    },
    /// More GPUs than the tables hold.
    #[error("a node of {gpus} GPUs: more than {MAX} are not scored")]
    TooMany {
        /// On the node.
        gpus: usize,
    },
}

/// Every subset of one kind of box, scored.
#[derive(Clone, Debug)]
pub struct Tables {
    gpus: usize,
    /// Bottleneck of each set.
    ring: Vec<u32>,
    /// Rank of each set among those of its size by its own communication; higher is better.
    own: Vec<u32>,
    /// Good groups of 2, 4 and 8 that fit into a set side by side.
    packs: [Vec<u8>; 3],
    /// NUMA nodes of a set; the unknown count as one.
    numa: Vec<u8>,
    links: Vec<u32>,
    /// GPUs by model.
    models: BTreeMap<Option<String>, GpuSet>,
    /// In service.
    working: GpuSet,
    /// May be part of a job of several GPUs.
    joined: GpuSet,
    /// Distance to the nearest network card by GPU; 0 is nearest or not known.
    nic: Vec<u32>,
}

impl Tables {
    /// Scores a box.
    ///
    /// # Errors
    /// [`NoPlace::TooMany`]
    pub fn new(topology: &NodeTopology) -> Result<Tables, NoPlace> {
        let n = topology.gpus.len();
        if n > MAX {
            return Err(NoPlace::TooMany { gpus: n });
        }
        let ring = ring::bottlenecks(topology);
        let numa = numa_counts(topology);
        let sum = |value: &dyn Fn(usize, usize) -> u32| {
            let mut all = vec![0u32; 1 << n];
            for set in 1usize..1 << n {
                let low = usize::try_from(set.trailing_zeros()).unwrap_or(0);
                let rest = set & (set - 1);
                let added: u32 = (0..n).filter(|v| rest & (1 << v) != 0).map(|v| value(low, v)).sum();
                let before = all.get(rest).copied().unwrap_or(0);
                if let Some(a) = all.get_mut(set) {
                    *a = before.saturating_add(added);
                }
            }
            all
        };
        let total = sum(&|a, b| topology.link(a, b).mb_s / 100);
        let links = sum(&|a, b| topology.link(a, b).count);
        let own = ranks(&ring, &total, &numa);
        let packs = GROUPS.map(|size| pack(n, &own, size));
        let mut models: BTreeMap<Option<String>, GpuSet> = BTreeMap::new();
        for (i, g) in topology.gpus.iter().enumerate() {
            models.entry(g.model.clone()).or_default().0 |= 1 << i;
        }
        let those = |keep: &dyn Fn(&pliant_model::topology::Gpu) -> bool| {
            GpuSet::of(topology.gpus.iter().enumerate().filter(|(_, g)| keep(g)).map(|(i, _)| i))
        };
        let nearest = |g: usize| topology.nics.iter().filter_map(|nic| nic.paths.get(g).copied().flatten()).min();
        Ok(Tables {
            gpus: n,
            ring,
            own,
            packs,
            numa,
            links,
            models,
            working: those(&|g| !g.lost),
            joined: those(&|g| !g.lost && !g.fabric_down),
            nic: (0..n).map(|g| nearest(g).map_or(0, |p| 20_000 - p.mb_s())).collect(),
        })
    }

    /// GPUs of the box.
    pub fn len(&self) -> usize {
        self.gpus
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.gpus == 0
    }

    /// GPUs in service.
    pub fn working(&self) -> GpuSet {
        self.working
    }

    /// The model of a box that has one only; `Some(None)`: it is not known.
    pub fn single_model(&self) -> Option<&Option<String>> {
        self.models.keys().next().filter(|_| self.models.len() == 1)
    }

    /// Bottleneck of the best ring through a set, MB/s.
    pub fn bottleneck(&self, set: GpuSet) -> u32 {
        at(&self.ring, set)
    }

    /// Well-linked pairs (`size` 2), quads (4) or groups of 8 that fit into a set side by side.
    pub fn groups(&self, set: GpuSet, size: u32) -> u32 {
        let which = GROUPS.iter().position(|g| *g == size);
        which.and_then(|i| self.packs.get(i)).map_or(0, |p| u32::from(at(p, set)))
    }

    /// The best set among the free GPUs.
    ///
    /// # Errors
    /// Why there is none, with numbers.
    pub fn choose(&self, free: GpuSet, want: &Want) -> Result<Choice, NoPlace> {
        let working = GpuSet(free.0 & self.working.0).without(want.beside);
        let many = want.gpus > 1 || (!want.beside.is_empty() && !want.separated);
        let usable = if many { GpuSet(working.0 & self.joined.0) } else { working };
        let of_model = |(model, set): (&Option<String>, &GpuSet)| {
            let named = want.model.as_ref().is_none_or(|m| model.as_ref() == Some(m));
            // What the job holds already has a model, too.
            let same = want.beside.is_empty() || set.holds(want.beside);
            (named && same).then_some(GpuSet(usable.0 & set.0))
        };
        let candidates: Vec<GpuSet> = self.models.iter().filter_map(of_model).collect();
        // A lost card is nothing that remains for others.
        let free = GpuSet(free.0 & self.working.0);
        let best = candidates
            .iter()
            .flat_map(|set| set.subsets(want.gpus))
            .map(|set| (self.key(free, set, want), set))
            .max_by(|(a, x), (b, y)| a.cmp(b).then(y.0.cmp(&x.0)));
        match best.filter(|_| want.gpus > 0) {
            Some((_, set)) => Ok(Choice { set, why: self.why(free, set) }),
            None => Err(self.no_place(working, usable, &candidates, want)),
        }
    }

    fn no_place(&self, working: GpuSet, usable: GpuSet, candidates: &[GpuSet], want: &Want) -> NoPlace {
        let most = candidates.iter().map(|c| c.len()).max().unwrap_or(0);
        if working.len() < want.gpus || want.gpus == 0 {
            NoPlace::TooFew { want: want.gpus, free: working.len() }
        } else if usable.len() < want.gpus {
            NoPlace::FabricDown { want: want.gpus }
        } else if want.model.is_some() {
            NoPlace::TooFew { want: want.gpus, free: most }
        } else {
            NoPlace::Models { want: want.gpus, most }
        }
    }

    /// What a set is worth for a job; larger is better.
    pub(super) fn key(&self, free: GpuSet, set: GpuSet, want: &Want) -> (u8, u32, u32, u32) {
        let own = if want.separated { set } else { GpuSet(set.0 | want.beside.0) };
        let nic: u32 = if want.spans { set.iter().filter_map(|g| self.nic.get(g)).sum() } else { 0 };
        let near = if want.near { u8::MAX - at(&self.numa, own) } else { 0 };
        (near, at(&self.own, own), self.remaining(free.without(set)), u32::MAX - nic)
    }

    /// What a free set is worth for others: groups of 8 before quads before pairs.
    pub(super) fn remaining(&self, free: GpuSet) -> u32 {
        let [pairs, quads, eights] = &self.packs;
        let of = |p: &Vec<u8>| u32::from(at(p, free));
        of(eights) << 16 | of(quads) << 8 | of(pairs)
    }

    /// The numbers behind a set.
    pub(super) fn why(&self, free: GpuSet, set: GpuSet) -> Why {
        let left = free.without(set);
        let mut broken = [0; 3];
        for (count, size) in broken.iter_mut().zip(GROUPS) {
            // A group that the job takes whole is used, not broken.
            let used = self.groups(set, size);
            *count = self.groups(free, size).saturating_sub(self.groups(left, size) + used);
        }
        Why {
            bottleneck_mb_s: if set.len() > 1 { self.bottleneck(set) } else { 0 },
            links: at(&self.links, set),
            numa_nodes: u32::from(at(&self.numa, set)),
            broken,
            left: left.len(),
        }
    }
}

fn at<T: Copy + Default>(table: &[T], set: GpuSet) -> T {
    usize::try_from(set.0).ok().and_then(|i| table.get(i)).copied().unwrap_or_default()
}

/// NUMA nodes of each set. Where the source names none, GPUs with the same CPUs count as one.
fn numa_counts(topology: &NodeTopology) -> Vec<u8> {
    let mut seen: Vec<(Option<u32>, &[u32])> = vec![];
    let of: Vec<u32> = topology
        .gpus
        .iter()
        .map(|g| {
            let place = (g.numa, if g.numa.is_some() { &[][..] } else { &g.cpus[..] });
            let at = seen.iter().position(|s| *s == place).unwrap_or_else(|| {
                seen.push(place);
                seen.len() - 1
            });
            1 << at
        })
        .collect();
    let mut nodes = vec![0u32; 1 << of.len()];
    for set in 1usize..nodes.len() {
        let low = usize::try_from(set.trailing_zeros()).unwrap_or(0);
        let before = nodes.get(set & (set - 1)).copied().unwrap_or(0);
        if let Some(n) = nodes.get_mut(set) {
            *n = before | of.get(low).copied().unwrap_or(0);
        }
    }
    nodes.into_iter().map(|n| u8::try_from(n.count_ones()).unwrap_or(u8::MAX)).collect()
}

/// Ranks all sets by (bottleneck, total, fewest NUMA nodes).
fn ranks(ring: &[u32], total: &[u32], numa: &[u8]) -> Vec<u32> {
    let score: Vec<(u32, u32, u8)> =
        ring.iter().zip(total).zip(numa).map(|((r, t), n)| (*r, *t, u8::MAX - n)).collect();
    let mut sorted = score.clone();
    sorted.sort_unstable();
    sorted.dedup();
    let rank = |s: &(u32, u32, u8)| sorted.binary_search(s).unwrap_or(0);
    score.iter().map(|s| u32::try_from(rank(s)).unwrap_or(u32::MAX)).collect()
}

/// For each set how many good groups of `size` fit into it side by side. Good groups are those with the best own rank
/// of their size in the whole box.
fn pack(n: usize, own: &[u32], size: u32) -> Vec<u8> {
    let mut packed = vec![0u8; 1 << n];
    let all = GpuSet::first(n);
    if all.len() < size {
        return packed;
    }
    let best = all.subsets(size).map(|s| at(own, s)).max().unwrap_or(0);
    let good: Vec<GpuSet> = all.subsets(size).filter(|s| at(own, *s) == best).collect();
    let by_low: Vec<Vec<u32>> =
        (0..n).map(|low| good.iter().map(|g| g.0).filter(|g| g.trailing_zeros() as usize == low).collect()).collect();
    let exact = good.len() <= EXACT_GROUPS;
    let mut witness = if exact { vec![] } else { vec![0u32; 1 << n] };
    for set in 1u32..1 << n {
        let rest = set & (set - 1);
        let mut most = at(&packed, GpuSet(rest));
        if exact {
            let here = by_low.get(set.trailing_zeros() as usize).into_iter().flatten().filter(|g| set & **g == **g);
            most = here.map(|g| 1 + at(&packed, GpuSet(set & !g))).fold(most, u8::max);
        } else {
            let is_good = set.count_ones() == size && at(own, GpuSet(set)) == best;
            let inside = (0..n).filter(|v| set & (1 << v) != 0).map(|v| at(&witness, GpuSet(set & !(1 << v))));
            let found = if is_good { set } else { inside.max().unwrap_or(0) };
            if let Some(w) = witness.get_mut(set as usize) {
                *w = found;
            }
            most = if found == 0 { 0 } else { 1 + at(&packed, GpuSet(set & !found)) };
        }
        if let Some(p) = packed.get_mut(set as usize) {
            *p = most;
        }
    }
    packed
}
