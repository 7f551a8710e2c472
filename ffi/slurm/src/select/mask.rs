// SPDX-License-Identifier: GPL-2.0-or-later
//! GPUs and nodes kept from one stock call. Both guards put back what they took, on every path.
//!
//! For calls under slurmctld's write locks on jobs and nodes only: a test in RUN_NOW mode.

use super::bits;
use super::node::Gpus;
use slurm_sys::select as sys;
use std::ffi::c_void;

/// Free GPUs of one node that count as busy.
#[derive(Debug)]
pub struct BusyGpus {
    gpus: Gpus,
    taken: u64,
    topo: Vec<(usize, u64)>,
    types: Vec<(usize, u64)>,
}

impl BusyGpus {
    /// Marks those of `unwanted` that are free.
    pub fn mark(gpus: Gpus, unwanted: u64) -> BusyGpus {
        let taken = unwanted & gpus.all() & !gpus.busy();
        let state = gpus.state();
        // SAFETY: the state was found in its node's list; its arrays have the lengths that it says.
        let (topo, types) = unsafe {
            let topo = (0..usize::from((*state).topo_cnt)).map(|t| (t, held(state, t, taken))).filter(|(_, n)| *n > 0);
            let topo: Vec<(usize, u64)> = topo.collect();
            let of_type = |k: usize| -> u64 {
                let same = |t: usize| {
                    !(*state).topo_type_id.is_null() && *(*state).topo_type_id.add(t) == *(*state).type_id.add(k)
                };
                topo.iter().filter(|(t, _)| same(*t)).map(|(_, n)| *n).sum()
            };
            let known = if (*state).type_id.is_null() { 0 } else { usize::from((*state).type_cnt) };
            let types = (0..known).map(|k| (k, of_type(k))).filter(|(_, n)| *n > 0).collect();
            (topo, types)
        };
        let mask = BusyGpus { gpus, taken, topo, types };
        mask.apply(true);
        mask
    }

    fn apply(&self, busy: bool) {
        let state = self.gpus.state();
        let change = |n: &mut u64, by: u64| *n = if busy { n.saturating_add(by) } else { n.saturating_sub(by) };
        // SAFETY: as above; nothing else touches it during the call (module docs).
        unsafe {
            for bit in (0..64).filter(|b| self.taken & (1 << b) != 0) {
                if busy { bits::set((*state).gres_bit_alloc, bit) } else { bits::clear((*state).gres_bit_alloc, bit) }
            }
            change(&mut (*state).gres_cnt_alloc, u64::from(self.taken.count_ones()));
            for (t, n) in &self.topo {
                change(&mut *(*state).topo_gres_cnt_alloc.add(*t), *n);
            }
            for (k, n) in &self.types {
                change(&mut *(*state).type_cnt_alloc.add(*k), *n);
            }
        }
    }
}

impl Drop for BusyGpus {
    fn drop(&mut self) {
        self.apply(false);
    }
}

/// How many of `gpus` are in a record of the topology.
///
/// # Safety
/// The state of a node, and one of its records.
unsafe fn held(state: *mut sys::gres_node_state, record: usize, gpus: u64) -> u64 {
    // SAFETY: the caller's promise.
    unsafe {
        if (*state).topo_gres_bitmap.is_null() || (*state).topo_gres_cnt_alloc.is_null() {
            return 0;
        }
        u64::from((bits::word(*(*state).topo_gres_bitmap.add(record)) & gpus).count_ones())
    }
}

/// A bitmap of nodes, narrowed for one call.
#[derive(Debug)]
pub struct Nodes {
    map: *mut sys::bitstr_t,
    before: *mut sys::bitstr_t,
}

impl Nodes {
    /// Of the bitmap that slurmctld hands over; `None` for null.
    ///
    /// # Safety
    /// Null, or a bitmap of nodes that nobody else uses while this lives.
    pub unsafe fn from_callback(map: *mut c_void) -> Option<Nodes> {
        (!map.is_null()).then(|| Nodes { map: map.cast(), before: std::ptr::null_mut() })
    }

    /// Whether a node (position in the table) is offered.
    pub fn offers(&self, node: usize) -> bool {
        // SAFETY: a bitmap, as promised.
        unsafe { bits::test(self.map, node) }
    }

    /// The nodes in it.
    pub fn ones(&self) -> Vec<usize> {
        // SAFETY: as above.
        unsafe { bits::ones(self.map) }
    }

    /// Takes nodes out, for good.
    pub fn take_out(&self, nodes: &[usize]) {
        // SAFETY: as above.
        nodes.iter().for_each(|node| unsafe { bits::clear(self.map, *node) });
    }

    /// Leaves only these of the nodes that are offered.
    pub fn narrow(&mut self, to: &[usize]) {
        // SAFETY: as above; the copy is ours.
        unsafe {
            if self.before.is_null() {
                self.before = sys::slurm_bit_copy(self.map);
            }
            sys::slurm_bit_clear_all(self.map);
            for node in to.iter().filter(|n| bits::test(self.before, **n)) {
                bits::set(self.map, *node);
            }
        }
    }

    /// What was offered is there again.
    pub fn restore(&mut self) {
        if !self.before.is_null() {
            // SAFETY: the copy has the size of the map.
            unsafe { sys::slurm_bit_copybits(self.map, self.before) };
        }
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        if !self.before.is_null() {
            // SAFETY: our own copy, freed once.
            unsafe { sys::slurm_bit_free(&mut self.before) };
        }
    }
}
