// SPDX-License-Identifier: GPL-2.0-or-later
//! Jobs as slurmctld tells them.

use super::{NICE_OFFSET, Number, names, non_zero, owned, records, texts, time};
use slurm_sys as sys;

records!(
    /// All jobs at one time.
    Jobs of Job, sys::job_info_msg_t, sys::slurm_job_info_t, job_array, sys::slurm_free_job_info_msg
);

/// One job of [`Jobs`].
#[derive(Clone, Copy)]
pub struct Job<'a>(pub(super) &'a sys::slurm_job_info_t);

/// Requested memory in MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Per node.
    PerNode(u64),
    /// Per allocated CPU.
    PerCpu(u64),
}

impl Memory {
    /// From Slurm's one number with a flag; `None`: none asked for.
    pub(super) fn of(value: u64) -> Option<Memory> {
        const PER_CPU: u64 = 1 << 63;
        let value = value.known()?;
        match (value & !PER_CPU, value & PER_CPU != 0) {
            (0, _) => None,
            (mib, true) => Some(Memory::PerCpu(mib)),
            (mib, false) => Some(Memory::PerNode(mib)),
        }
    }
}

impl std::fmt::Debug for Job<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Job({})", self.0.job_id)
    }
}

impl Job<'_> {
    texts! {
        /// Indices of array tasks that are not split off yet.
        array_tasks = array_task_str;
        /// User name.
        user_name = user_name;
        /// Job name.
        name = name;
        /// User's comment.
        comment = comment;
        /// Administrator's comment.
        admin_comment = admin_comment;
        /// Account.
        account = account;
        /// Partition, or several.
        partition = partition;
        /// QOS.
        qos = qos;
        /// Reservation.
        reservation = resv_name;
        /// Constraint.
        features = features;
        /// Allocated nodes.
        nodes = nodes;
        /// Requested TRES.
        tres_req = tres_req_str;
        /// Allocated TRES.
        tres_alloc = tres_alloc_str;
        /// TRES per job.
        tres_per_job = tres_per_job;
        /// TRES per node.
        tres_per_node = tres_per_node;
        /// TRES per socket.
        tres_per_socket = tres_per_socket;
        /// TRES per task.
        tres_per_task = tres_per_task;
        /// CPUs per TRES.
        cpus_per_tres = cpus_per_tres;
        /// Memory per TRES.
        mem_per_tres = mem_per_tres;
        /// Requested nodes.
        req_nodes = req_nodes;
        /// Excluded nodes.
        exc_nodes = exc_nodes;
        /// Node of the batch script.
        batch_host = batch_host;
        /// Submission host.
        alloc_node = alloc_node;
        /// Licences.
        licenses = licenses;
        /// Dependencies.
        dependency = dependency;
        /// Planned nodes.
        sched_nodes = sched_nodes;
        /// Longer text for the reason.
        reason_detail = state_desc;
    }

    /// Job id.
    pub fn job_id(&self) -> u32 {
        self.0.job_id
    }

    /// Array it belongs to.
    pub fn array_job_id(&self) -> Option<u32> {
        non_zero(self.0.array_job_id.known32())
    }

    /// Index in the array; `None` too for the record that stands for tasks that are not split off yet.
    pub fn array_task_id(&self) -> Option<u32> {
        self.array_job_id().and_then(|_| self.0.array_task_id.known32())
    }

    /// Leader of the heterogeneous job.
    pub fn het_job_id(&self) -> Option<u32> {
        non_zero(self.0.het_job_id.known32())
    }

    /// User.
    pub fn user_id(&self) -> u32 {
        self.0.user_id
    }

    /// Base state and flags.
    pub fn state(&self) -> (String, Vec<String>) {
        names::job_state(self.0.job_state)
    }

    /// Why it waits or ended.
    pub fn reason(&self) -> Option<String> {
        names::reason(u32::from(self.0.state_reason))
    }

    /// Priority; 0: held.
    pub fn priority(&self) -> Option<u32> {
        self.0.priority.known32()
    }

    /// Submission.
    pub fn submit_time(&self) -> Option<i64> {
        time(self.0.submit_time)
    }

    /// From when it may start.
    pub fn eligible_time(&self) -> Option<i64> {
        time(self.0.eligible_time)
    }

    /// Start.
    pub fn start_time(&self) -> Option<i64> {
        time(self.0.start_time)
    }

    /// End.
    pub fn end_time(&self) -> Option<i64> {
        time(self.0.end_time)
    }

    /// Preemption signal.
    pub fn preempt_time(&self) -> Option<i64> {
        time(self.0.preempt_time)
    }

    /// Minutes.
    pub fn time_limit(&self) -> Option<u32> {
        self.0.time_limit.known32()
    }

    /// Whether the time limit is UNLIMITED.
    pub fn is_unlimited(&self) -> bool {
        self.0.time_limit.is_infinite()
    }

    /// Nodes, allocated or least.
    pub fn num_nodes(&self) -> Option<u32> {
        non_zero(self.0.num_nodes.known32())
    }

    /// Most nodes.
    pub fn max_nodes(&self) -> Option<u32> {
        non_zero(self.0.max_nodes.known32())
    }

    /// CPUs, allocated or least.
    pub fn num_cpus(&self) -> Option<u32> {
        non_zero(self.0.num_cpus.known32())
    }

    /// CPUs per task.
    pub fn cpus_per_task(&self) -> Option<u32> {
        non_zero(self.0.cpus_per_task.known32())
    }

    /// Tasks.
    pub fn num_tasks(&self) -> Option<u32> {
        non_zero(self.0.num_tasks.known32())
    }

    /// Memory.
    pub fn min_memory(&self) -> Option<Memory> {
        Memory::of(self.0.pn_min_memory)
    }

    /// GRES by allocated node.
    pub fn gres_detail(&self) -> Vec<String> {
        let count = usize::try_from(self.0.gres_detail_cnt).unwrap_or(0);
        if self.0.gres_detail_str.is_null() {
            return vec![];
        }
        // SAFETY: gres_detail_cnt pointers, each null or a C string; a node without GRES keeps its place.
        (0..count).map(|i| unsafe { owned(*self.0.gres_detail_str.add(i)) }.unwrap_or_default()).collect()
    }

    /// Whether it shares its nodes with nobody.
    pub fn is_exclusive(&self) -> bool {
        self.0.shared == 0
    }

    /// Whether it has a batch script.
    pub fn is_batch(&self) -> bool {
        self.0.batch_flag != 0
    }

    /// Requeues so far.
    pub fn restart_count(&self) -> u32 {
        u32::from(self.0.restart_cnt)
    }

    /// Whether it may be requeued.
    pub fn may_requeue(&self) -> bool {
        self.0.requeue.known() == Some(1)
    }

    /// Nice value.
    pub fn nice(&self) -> i64 {
        i64::from(self.0.nice) - NICE_OFFSET
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_a_flag_and_no_zero() {
        assert_eq!(Memory::of(0), None);
        assert_eq!(Memory::of(u64::MAX - 1), None);
        assert_eq!(Memory::of(500), Some(Memory::PerNode(500)));
        assert_eq!(Memory::of((1 << 63) | 100), Some(Memory::PerCpu(100)));
        assert_eq!(Memory::of(1 << 63), None);
    }
}
