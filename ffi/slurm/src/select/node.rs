// SPDX-License-Identifier: GPL-2.0-or-later
//! The table of nodes and the GPUs of a node. Read under slurmctld's own locks, which the calls of a select plugin hold.

use super::{bits, stock, str_of};
use slurm_sys::select as sys;
use std::ffi::{c_int, c_void};
use std::sync::LazyLock;

/// Marks a matrix of links that has been turned round; Slurm never looks at the diagonal.
const TURNED: c_int = -0x706c;

/// The table and its length, where the process has them: a client that links libslurm loads the plugin and has neither.
struct Table {
    records: *mut *mut *mut sys::node_record,
    count: *mut c_int,
}

// SAFETY: addresses of two variables of slurmctld, read in calls that hold its locks.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

static TABLE: LazyLock<Table> = LazyLock::new(|| Table {
    records: stock::of_process(c"node_record_table_ptr").cast(),
    count: stock::of_process(c"node_record_count").cast(),
});

/// How many nodes the table has; some of them may be unused.
pub fn count() -> usize {
    // SAFETY: a number that changes under the write lock of nodes only.
    let count = unsafe { TABLE.count.as_ref() }.copied().unwrap_or(0);
    usize::try_from(count).unwrap_or(0)
}

/// The name of a node; `None`: no such place in the table, or unused.
pub fn name(index: usize) -> Option<&'static str> {
    let node = record(index)?;
    // SAFETY: a record of the table; its name lives until the table is made anew, and is copied or compared at once.
    Some(unsafe { str_of((*node).name) }).filter(|n| !n.is_empty())
}

pub(super) fn record(index: usize) -> Option<*mut sys::node_record> {
    // SAFETY: the table has `count()` entries.
    unsafe {
        let table = TABLE.records.as_ref().copied().filter(|t| !t.is_null() && index < count())?;
        let node = *table.add(index);
        (!node.is_null()).then_some(node)
    }
}

/// The GPUs of a node, as slurmctld counts them.
#[derive(Clone, Copy, Debug)]
pub struct Gpus(*mut sys::gres_node_state);

impl Gpus {
    /// Of a node; `None`: it has none, or none with an index (no `File=` in gres.conf).
    pub fn of(index: usize) -> Option<Gpus> {
        let node = record(index)?;
        // SAFETY: a record of the table, and its own list.
        unsafe {
            let state = gres_of((*node).gres_list)?;
            let data: *mut sys::gres_node_state = (*state).gres_data.cast();
            (!data.is_null() && !(*data).gres_bit_alloc.is_null()).then_some(Gpus(data))
        }
    }

    pub(super) fn state(self) -> *mut sys::gres_node_state {
        self.0
    }

    /// How many.
    pub fn count(self) -> usize {
        // SAFETY: checked to be there when this was made.
        unsafe { bits::size((*self.0).gres_bit_alloc) }
    }

    /// All of them, by index.
    pub fn all(self) -> u64 {
        match self.count() {
            n @ 0..64 => (1 << n) - 1,
            _ => u64::MAX,
        }
    }

    /// Those that jobs hold.
    pub fn busy(self) -> u64 {
        // SAFETY: as above.
        unsafe { bits::word((*self.0).gres_bit_alloc) }
    }

    /// Whether slurmctld binds them to cores: else it names no index before a job has started.
    pub fn has_topology(self) -> bool {
        // SAFETY: as above.
        unsafe { (*self.0).topo_cnt > 0 }
    }

    /// Whether they have types.
    pub fn is_typed(self) -> bool {
        // SAFETY: as above.
        unsafe { (*self.0).type_cnt > 0 }
    }

    /// Turns the link counts round, so that Slurm's ascending sort (24.05 and later) begins with the best-linked GPUs.
    /// Whether they were not turned yet.
    pub fn turn_links(self) -> bool {
        // SAFETY: `links_cnt` is a square of `link_len` rows, or null.
        unsafe {
            let state = &mut *self.0;
            let n = usize::try_from(state.link_len).unwrap_or(0);
            if state.links_cnt.is_null() || n == 0 || (0..n).any(|i| (*state.links_cnt.add(i)).is_null()) {
                return false;
            }
            let cell = |a: usize, b: usize| (*state.links_cnt.add(a)).add(b);
            if *cell(0, 0) == TURNED {
                return false;
            }
            let pairs = || (0..n).flat_map(|a| (0..n).map(move |b| (a, b))).filter(|(a, b)| a != b);
            let most = pairs().map(|(a, b)| *cell(a, b)).max().unwrap_or(0).max(0);
            for (a, b) in pairs() {
                // At least 1: GPUs that are not candidates have 0 and come first, where Slurm skips them.
                *cell(a, b) = most.saturating_sub((*cell(a, b)).max(0)).saturating_add(1);
            }
            (0..n).for_each(|i| *cell(i, i) = TURNED);
            true
        }
    }
}

/// The GPU entry of a list of GRES.
///
/// # Safety
/// Null or a list of `gres_state`.
pub(super) unsafe fn gres_of(list: sys::pliant_list) -> Option<*mut sys::gres_state> {
    if list.is_null() {
        return None;
    }
    // SAFETY: the caller's promise; the callback looks at the entries of that list.
    let found = unsafe { sys::slurm_list_find_first(list, Some(is_gpu), std::ptr::null_mut()) };
    (!found.is_null()).then_some(found.cast())
}

pub(super) unsafe extern "C" fn is_gpu(entry: *mut c_void, _key: *mut c_void) -> c_int {
    let state: *mut sys::gres_state = entry.cast();
    // SAFETY: Slurm gives the entries of a list of `gres_state`.
    unsafe { c_int::from(!state.is_null() && str_of((*state).gres_name) == "gpu") }
}
