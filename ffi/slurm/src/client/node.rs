// SPDX-License-Identifier: GPL-2.0-or-later
//! Nodes as slurmctld tells them.

use super::{Number, names, owned, records, texts, time};
use slurm_sys as sys;

records!(
    /// All nodes at one time.
    Nodes of Node, sys::node_info_msg_t, sys::node_info_t, node_array, sys::slurm_free_node_info_msg
);

/// One node of [`Nodes`].
#[derive(Clone, Copy)]
pub struct Node<'a>(&'a sys::node_info_t);

impl std::fmt::Debug for Node<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Node({:?})", self.name())
    }
}

impl Node<'_> {
    texts! {
        /// NodeName; `None` for a slot of the node table that is empty.
        name = name;
        /// NodeAddr.
        addr = node_addr;
        /// NodeHostName.
        hostname = node_hostname;
        /// GRES.
        gres = gres;
        /// GRES in use.
        gres_used = gres_used;
        /// Active features.
        features_active = features_act;
        /// Available features.
        features_available = features;
        /// Partitions that hold it.
        partitions = partitions;
        /// Why it is down or drained.
        reason = reason;
        /// Release of its slurmd.
        version = version;
    }

    /// Base state and flags.
    pub fn state(&self) -> (String, Vec<String>) {
        names::node_state(self.0.node_state)
    }

    /// Port of its slurmd.
    pub fn port(&self) -> Option<u16> {
        (self.0.port != 0).then_some(self.0.port)
    }

    /// CPUs that jobs may have.
    pub fn cpus(&self) -> u32 {
        let effective = self.0.cpus_efctv.known32().filter(|&n| n != 0);
        effective.unwrap_or(u32::from(self.0.cpus))
    }

    /// Memory in MiB.
    pub fn real_memory(&self) -> u64 {
        self.0.real_memory
    }

    /// CPUs that jobs have.
    #[cfg(node_alloc_fields)]
    pub fn cpus_alloc(&self) -> Option<u32> {
        self.0.alloc_cpus.known32()
    }

    /// Memory that jobs have, MiB.
    #[cfg(node_alloc_fields)]
    pub fn mem_alloc(&self) -> Option<u64> {
        self.0.alloc_memory.known()
    }

    /// CPUs that jobs have.
    #[cfg(not(node_alloc_fields))]
    pub fn cpus_alloc(&self) -> Option<u32> {
        let mut value: u16 = 0;
        self.select_data(sys::SELECT_NODEDATA_SUBCNT, std::ptr::from_mut(&mut value).cast()).then(|| u32::from(value))
    }

    /// Memory that jobs have, MiB.
    #[cfg(not(node_alloc_fields))]
    pub fn mem_alloc(&self) -> Option<u64> {
        // 64 bits in the select plugin, 32 in slurm.h's comment: zeroed, so that either reads right (little endian).
        let mut value: u64 = 0;
        self.select_data(sys::SELECT_NODEDATA_MEM_ALLOC, std::ptr::from_mut(&mut value).cast()).then_some(value)
    }

    #[cfg(not(node_alloc_fields))]
    fn select_data(&self, what: sys::select_nodedata_type, to: *mut std::ffi::c_void) -> bool {
        if self.0.select_nodeinfo.is_null() {
            return false;
        }
        // SAFETY: the record's own select data; `to` has the size that `what` asks for (slurm.h).
        let code =
            unsafe { sys::slurm_get_select_nodeinfo(self.0.select_nodeinfo, what, sys::NODE_STATE_ALLOCATED, to) };
        code == 0
    }

    /// Boot.
    pub fn boot_time(&self) -> Option<i64> {
        time(self.0.boot_time)
    }

    /// Start of its slurmd.
    pub fn slurmd_start_time(&self) -> Option<i64> {
        time(self.0.slurmd_start_time)
    }
}
