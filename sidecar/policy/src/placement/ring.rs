//! The bottleneck of the best ring through each set of GPUs: what an all-reduce over a ring can reach.

use pliant_model::topology::NodeTopology;

/// For each set (as bits) the largest b such that some cyclic order of it has only links of at least b MB/s. One GPU:
/// `u32::MAX`; two: their link; none: 0.
///
/// Held and Karp's subsets: `reach[set][v]` is the best path from the set's lowest GPU through all of it to v.
pub(super) fn bottlenecks(topology: &NodeTopology) -> Vec<u32> {
    let n = topology.gpus.len();
    let link: Vec<u32> = (0..n * n).map(|i| topology.link(i / n.max(1), i % n.max(1)).mb_s).collect();
    let at = |a: usize, b: usize| link.get(a * n + b).copied().unwrap_or(0);
    let mut reach = vec![0u32; (1 << n) * n];
    let mut ring = vec![0u32; 1 << n];
    for set in 1usize..1 << n {
        let low = usize::try_from(set.trailing_zeros()).unwrap_or(0);
        let rest = set & !(1 << low);
        let mut best = if rest == 0 { u32::MAX } else { 0 };
        if let Some(r) = reach.get_mut(set * n + low).filter(|_| rest == 0) {
            *r = u32::MAX;
        }
        for v in (0..n).filter(|v| rest & (1 << v) != 0) {
            let before = set & !(1 << v);
            let mut path = 0;
            for u in (0..n).filter(|u| before & (1 << u) != 0 && (*u != low || before == 1 << low)) {
                path = path.max(reach.get(before * n + u).copied().unwrap_or(0).min(at(u, v)));
            }
            if let Some(r) = reach.get_mut(set * n + v) {
                *r = path;
            }
            best = best.max(path.min(at(v, low)));
        }
        if let Some(r) = ring.get_mut(set) {
            *r = best;
        }
    }
    ring
}
