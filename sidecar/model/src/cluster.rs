//! The cluster as the decisions see it: nodes with idle GPUs, and the pending jobs that want them.

use crate::ids::{GpuCount, JobId, NodeName, Seconds};
use serde::{Deserialize, Serialize};

/// A node of Slurm.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// NodeName.
    pub name: NodeName,
    /// GPUs that Slurm knows there.
    pub gpus: GpuCount,
    /// GPUs that no job holds.
    pub gpus_free: GpuCount,
    /// CPUs that no job holds.
    pub cpus_free: u32,
    /// CPUs in all.
    pub cpus: u32,
    /// Whether Slurm would start a job there: up, not drained, not completing, not reserved.
    pub usable: bool,
    /// Whether slices may go there: an agent is connected that keeps their leases.
    pub lendable: bool,
    /// Whether no job at all runs there (a job that asks for whole nodes needs that).
    pub empty: bool,
    /// Partitions it belongs to.
    pub partitions: Vec<String>,
    /// Features (constraints) it offers.
    pub features: Vec<String>,
    /// The GPU type, where the node has exactly one.
    pub kind: Option<String>,
}

/// How a job counts the GPUs that it asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GpuDemand {
    /// So many on each of its nodes (`--gres=gpu:N`, `--gpus-per-node=N`).
    PerNode(GpuCount),
    /// So many over all nodes (`--gpus=N`).
    Total(GpuCount),
}

/// What a pending job asks for, as far as GPUs and CPUs go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Demand {
    /// GPUs.
    pub gpus: GpuDemand,
    /// Least nodes, at least 1.
    pub nodes_min: u32,
    /// Most nodes; `None` is no limit.
    pub nodes_max: Option<u32>,
    /// CPUs in all, 0 where unknown.
    pub cpus: u32,
    /// Only whole nodes (`--exclusive`).
    pub exclusive: bool,
    /// GPU type, where one is named.
    pub kind: Option<String>,
    /// Feature that every node must offer, where the constraint is one plain word.
    pub feature: Option<String>,
    /// Nodes that must be part of it.
    pub required: Vec<NodeName>,
    /// Nodes that must not.
    pub excluded: Vec<NodeName>,
}

impl Demand {
    /// GPUs it holds at least once it runs.
    pub fn total_gpus(&self) -> GpuCount {
        match self.gpus {
            GpuDemand::PerNode(n) => n.saturating_mul(self.nodes_min),
            GpuDemand::Total(n) => n,
        }
    }
}

/// A pending job that waits for resources (reason Resources or Priority) and is no slice of ours.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingJob {
    /// Its id.
    pub job: JobId,
    /// The partitions it may run in.
    pub partitions: Vec<String>,
    /// The highest PriorityTier of its partitions: it comes before the priority in Slurm's order.
    pub tier: u16,
    /// Slurm's priority.
    pub priority: u32,
    /// What it asks for.
    pub demand: Demand,
    /// Since when, by our own reckoning, it could start and has not; the daemon keeps this between rounds.
    pub fits_since: Option<Seconds>,
    /// How often slices have been taken back for it lately; the daemon keeps this too.
    pub served: u32,
}

/// Everything that one decision looks at.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cluster {
    /// When Slurm gave this view.
    pub as_of: Seconds,
    /// All nodes.
    pub nodes: Vec<Node>,
    /// Pending jobs in Slurm's order: highest priority first, then the lower id.
    pub pending: Vec<PendingJob>,
    /// Elastic jobs whose launcher is registered.
    pub groups: Vec<crate::group::Group>,
}
