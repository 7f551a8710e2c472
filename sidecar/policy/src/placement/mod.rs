//! Placement: which GPUs of a node, and which nodes, serve a job best and leave the most for others.
//!
//! Inside a node every subset is scored once per kind of box ([`Tables`]); a choice compares table entries. Between
//! nodes the switch tree is a tree of cells ([`Cells`]): a job goes into the smallest cell that holds it, the fullest
//! one first.
//!
//! The order of what counts, the first difference decides:
//! 1. the job's own communication: the bottleneck of the best ring through its GPUs, then the bandwidth of all their
//!    links together, then the number of NUMA nodes that they are on;
//! 2. what remains: groups of 8, 4 and 2 well-linked GPUs that stay whole;
//! 3. the distance to the network card, for a job that spans nodes;
//! 4. the lowest positions.

mod cells;
mod instances;
mod ring;
mod tables;
#[cfg(test)]
mod tests;

pub use cells::{Cells, Placement, Request, Scope};
pub use instances::{Instances, choose_instances};
pub use tables::{Choice, NoPlace, Tables, Want, Why};

/// A set of GPUs of one node, by position in its topology: bit i stands for GPU i.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuSet(pub u32);

impl GpuSet {
    /// The first `n` GPUs.
    pub fn first(n: usize) -> GpuSet {
        GpuSet(if n >= 32 { u32::MAX } else { (1 << n) - 1 })
    }

    /// Of these positions; beyond 31 there are none.
    pub fn of(positions: impl IntoIterator<Item = usize>) -> GpuSet {
        GpuSet(positions.into_iter().filter(|p| *p < 32).fold(0, |set, p| set | 1 << p))
    }

    /// How many.
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether all of `other` are in it.
    pub fn holds(self, other: GpuSet) -> bool {
        self.0 & other.0 == other.0
    }

    /// Those of it that are not in `other`.
    pub fn without(self, other: GpuSet) -> GpuSet {
        GpuSet(self.0 & !other.0)
    }

    /// Positions, ascending.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..32).filter(move |p| self.0 & (1 << p) != 0)
    }

    /// Its subsets of a size, lowest positions first.
    pub fn subsets(self, size: u32) -> Subsets {
        let members = self.len();
        let next = (size <= members).then(|| if size == 0 { 0 } else { (1u64 << size) - 1 });
        Subsets { of: self.0, size, members, next }
    }
}

/// See [`GpuSet::subsets`]. Counts in the members of the set (Gosper's method) and spreads the bits over them.
#[derive(Clone, Debug)]
pub struct Subsets {
    of: u32,
    size: u32,
    members: u32,
    next: Option<u64>,
}

impl Iterator for Subsets {
    type Item = GpuSet;

    fn next(&mut self) -> Option<GpuSet> {
        let now = self.next?;
        self.next = (self.size > 0)
            .then(|| {
                let low = now & now.wrapping_neg();
                let up = now + low;
                up | (((now ^ up) >> 2) / low)
            })
            .filter(|n| *n < 1 << self.members);
        let (mut rest, mut bits, mut out) = (self.of, now, 0);
        while bits != 0 {
            let lowest = rest & rest.wrapping_neg();
            if bits & 1 != 0 {
                out |= lowest;
            }
            rest ^= lowest;
            bits >>= 1;
        }
        Some(GpuSet(out))
    }
}
