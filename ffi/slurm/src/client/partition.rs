// SPDX-License-Identifier: GPL-2.0-or-later
//! Partitions as slurmctld tells them.

use super::{Memory, Number, names, owned, records, texts};
use slurm_sys as sys;

records!(
    /// All partitions at one time.
    Partitions of Partition, sys::partition_info_msg_t, sys::partition_info_t, partition_array,
    sys::slurm_free_partition_info_msg
);

/// PART_FLAG_DEFAULT, asserted in slurm-sys/wrapper.h.
const FLAG_DEFAULT: u64 = 1;
/// JOB_DEF_CPU_PER_GPU and JOB_DEF_MEM_PER_GPU.
const JOB_DEF_CPU_PER_GPU: u16 = 1;
const JOB_DEF_MEM_PER_GPU: u16 = 2;

/// One partition of [`Partitions`].
#[derive(Clone, Copy)]
pub struct Partition<'a>(&'a sys::partition_info_t);

impl std::fmt::Debug for Partition<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Partition({:?})", self.name())
    }
}

impl Partition<'_> {
    texts! {
        /// Name.
        name = name;
        /// Nodes.
        nodes = nodes;
        /// Accounts that may use it.
        allow_accounts = allow_accounts;
        /// QOS that may use it.
        allow_qos = allow_qos;
        /// Groups that may use it.
        allow_groups = allow_groups;
    }

    /// UP, DOWN, DRAIN or INACTIVE.
    pub fn state(&self) -> String {
        names::partition_state(self.0.state_up)
    }

    /// Whether jobs go here that name none.
    pub fn is_default(&self) -> bool {
        u64::from(self.0.flags) & FLAG_DEFAULT != 0
    }

    /// Minutes.
    pub fn max_time(&self) -> Option<u32> {
        self.0.max_time.known32()
    }

    /// Minutes that a job gets which asks for none.
    pub fn default_time(&self) -> Option<u32> {
        self.0.default_time.known32()
    }

    /// Most nodes per job.
    pub fn max_nodes(&self) -> Option<u32> {
        self.0.max_nodes.known32()
    }

    /// Preemption mode; `None`: the cluster's.
    pub fn preempt_mode(&self) -> Option<String> {
        names::preempt_mode(self.0.preempt_mode)
    }

    /// Seconds of grace at preemption.
    pub fn grace_time(&self) -> u32 {
        self.0.grace_time.known32().unwrap_or(0)
    }

    /// Tier.
    pub fn priority_tier(&self) -> u16 {
        self.0.priority_tier
    }

    /// DefCpuPerGPU.
    pub fn def_cpu_per_gpu(&self) -> Option<u64> {
        self.job_default(JOB_DEF_CPU_PER_GPU)
    }

    /// DefMemPerGPU, MiB.
    pub fn def_mem_per_gpu(&self) -> Option<u64> {
        self.job_default(JOB_DEF_MEM_PER_GPU)
    }

    fn job_default(&self, kind: u16) -> Option<u64> {
        if self.0.job_defaults_list.is_null() {
            return None;
        }
        let mut found = None;
        // SAFETY: a list of job_defaults_t (slurm.h) that lives as long as the record; nothing changes it meanwhile.
        unsafe {
            let iterator = sys::slurm_list_iterator_create(self.0.job_defaults_list);
            while let Some(entry) = sys::slurm_list_next(iterator).cast::<sys::job_defaults_t>().as_ref() {
                if entry.type_ == kind {
                    found = entry.value.known();
                }
            }
            sys::slurm_list_iterator_destroy(iterator);
        }
        found
    }

    /// Default memory.
    pub fn def_memory(&self) -> Option<Memory> {
        Memory::of(self.0.def_mem_per_cpu)
    }
}
