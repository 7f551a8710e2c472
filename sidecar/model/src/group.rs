//! A job group: the user's own job (the base) and the slices lent to it.

use crate::ids::{GpuCount, JobId, NodeName, OrderId, Seconds};
use crate::range::GpuRange;
use serde::{Deserialize, Serialize};

/// Where the GPUs of an elastic job may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Locality {
    /// Slices only on the nodes where the job already is; a base without GPUs stays on one node.
    Node,
    /// Slices on any node of the partition.
    #[default]
    Any,
}

impl std::str::FromStr for Locality {
    type Err = LocalityError;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        match s {
            "node" => Ok(Locality::Node),
            "any" => Ok(Locality::Any),
            _ => Err(LocalityError),
        }
    }
}

impl std::fmt::Display for Locality {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Locality::Node => "node",
            Locality::Any => "any",
        })
    }
}

/// A text that is neither `node` nor `any`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected node or any")]
pub struct LocalityError;

/// Part of a world: the ranks of one step on one node, one per GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The slice that holds the GPUs; `None`: the base.
    pub slice: Option<JobId>,
    /// Where.
    pub node: NodeName,
    /// GPUs, which is also the number of ranks.
    pub gpus: GpuCount,
}

/// A companion job of the same user, on one node, that can be given back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slice {
    /// Its Slurm job.
    pub job: JobId,
    /// Where.
    pub node: NodeName,
    /// GPUs it holds.
    pub gpus: GpuCount,
    /// CPUs it holds.
    pub cpus: u32,
    /// Whether it is on its way out already.
    pub leaving: bool,
    /// Whether rank 0 is there, and with it the store that the ranks meet at.
    pub rank_zero: bool,
    /// A lost GPU that it holds, with its GRES index.
    pub lost: Option<(crate::gpu::GpuId, u32)>,
}

/// An elastic job as the decisions see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// The base's Slurm job.
    pub base: JobId,
    /// MIN, MAX and STEP.
    pub range: GpuRange,
    /// GPUs of the base, which is MIN.
    pub base_gpus: GpuCount,
    /// Nodes of the base.
    pub base_nodes: Vec<NodeName>,
    /// CPUs that a slice takes for each GPU.
    pub cpus_per_gpu: u32,
    /// Partition of base and slices.
    pub partition: String,
    /// GPU type of the base's request, where one is named.
    pub kind: Option<String>,
    /// Feature that slices must have, where the base's constraint is one plain word.
    pub feature: Option<String>,
    /// Where slices may be.
    pub locality: Locality,
    /// Live slices.
    pub slices: Vec<Slice>,
    /// Whether its ranks run and have finished a step (or there are none yet and it waits for its first GPUs).
    pub ready: bool,
    /// The resize that is under way, if one is: one at a time.
    pub in_flight: Option<OrderId>,
    /// No growth before this time, since the last attempt was withdrawn.
    pub retry_at: Option<Seconds>,
    /// Nodes where Slurm has just refused it a slice: left out for a while.
    pub avoid: Vec<NodeName>,
    /// When Slurm will end the base; `None`: no limit.
    pub ends_at: Option<Seconds>,
}

impl Group {
    /// GPUs it trains on, those on their way out included.
    pub fn size(&self) -> GpuCount {
        self.slices.iter().map(|s| s.gpus).fold(self.base_gpus, GpuCount::saturating_add)
    }

    /// GPUs it will have once what is leaving has left.
    pub fn staying(&self) -> GpuCount {
        self.slices.iter().filter(|s| !s.leaving).map(|s| s.gpus).fold(self.base_gpus, GpuCount::saturating_add)
    }
}
