// SPDX-License-Identifier: GPL-2.0-or-later
//! Slurm's records as pliantd reads them.

use pliant_protocol::bridge::{JobRecord, MinMemory, NodeRecord, PartitionRecord};
use slurm::client::{Job, Memory, Node, Partition};

fn memory(memory: Memory) -> MinMemory {
    match memory {
        Memory::PerNode(mib) => MinMemory::PerNode(mib),
        Memory::PerCpu(mib) => MinMemory::PerCpu(mib),
    }
}

pub fn job(job: &Job<'_>) -> JobRecord {
    let (state, flags) = job.state();
    JobRecord {
        job_id: job.job_id(),
        array_job_id: job.array_job_id(),
        array_task_id: job.array_task_id(),
        array_tasks: job.array_tasks(),
        het_job_id: job.het_job_id(),
        user_id: job.user_id(),
        user_name: job.user_name(),
        name: job.name(),
        comment: job.comment(),
        admin_comment: job.admin_comment(),
        account: job.account(),
        partition: job.partition(),
        qos: job.qos(),
        reservation: job.reservation(),
        features: job.features(),
        state,
        flags,
        reason: job.reason(),
        reason_detail: job.reason_detail(),
        priority: job.priority(),
        submit_time: job.submit_time(),
        eligible_time: job.eligible_time(),
        start_time: job.start_time(),
        end_time: job.end_time(),
        time_limit: job.time_limit(),
        unlimited: job.is_unlimited(),
        nodes: job.nodes(),
        num_nodes: job.num_nodes(),
        max_nodes: job.max_nodes(),
        num_cpus: job.num_cpus(),
        cpus_per_task: job.cpus_per_task(),
        num_tasks: job.num_tasks(),
        min_memory: job.min_memory().map(memory),
        tres_req: job.tres_req(),
        tres_alloc: job.tres_alloc(),
        tres_per_job: job.tres_per_job(),
        tres_per_node: job.tres_per_node(),
        tres_per_socket: job.tres_per_socket(),
        tres_per_task: job.tres_per_task(),
        cpus_per_tres: job.cpus_per_tres(),
        mem_per_tres: job.mem_per_tres(),
        gres_detail: job.gres_detail(),
        req_nodes: job.req_nodes(),
        exc_nodes: job.exc_nodes(),
        exclusive: job.is_exclusive(),
        batch: job.is_batch(),
        batch_host: job.batch_host(),
        alloc_node: job.alloc_node(),
        preempt_time: job.preempt_time(),
        restart_count: job.restart_count(),
        requeue: job.may_requeue(),
        nice: job.nice(),
        licenses: job.licenses(),
        dependency: job.dependency(),
        sched_nodes: job.sched_nodes(),
    }
}

/// `None` for an empty slot of the node table.
pub fn node(node: &Node<'_>) -> Option<NodeRecord> {
    let (state, flags) = node.state();
    Some(NodeRecord {
        name: node.name()?,
        addr: node.addr(),
        hostname: node.hostname(),
        port: node.port(),
        state,
        flags,
        cpus: node.cpus(),
        cpus_alloc: node.cpus_alloc(),
        real_memory: node.real_memory(),
        mem_alloc: node.mem_alloc(),
        gres: node.gres(),
        gres_used: node.gres_used(),
        features: node.features_active().or_else(|| node.features_available()),
        partitions: node.partitions(),
        reason: node.reason(),
        boot_time: node.boot_time(),
        slurmd_start_time: node.slurmd_start_time(),
        version: node.version(),
    })
}

/// `None` for a partition without a name, which Slurm has none of.
pub fn partition(partition: &Partition<'_>) -> Option<PartitionRecord> {
    Some(PartitionRecord {
        name: partition.name()?,
        nodes: partition.nodes(),
        state: partition.state(),
        default: partition.is_default(),
        max_time: partition.max_time(),
        default_time: partition.default_time(),
        max_nodes: partition.max_nodes(),
        preempt_mode: partition.preempt_mode(),
        grace_time: partition.grace_time(),
        priority_tier: partition.priority_tier(),
        def_memory: partition.def_memory().map(memory),
        def_cpu_per_gpu: partition.def_cpu_per_gpu(),
        def_mem_per_gpu: partition.def_mem_per_gpu(),
        allow_accounts: partition.allow_accounts(),
        allow_qos: partition.allow_qos(),
        allow_groups: partition.allow_groups(),
    })
}
