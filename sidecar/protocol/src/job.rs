//! The state of one elastic job as its launcher tells it, and the orders that it gets.
//!
//! Level-triggered: [`JobStatus`] is whole each time, so a lost connection, a restarted agent or a restarted
//! pliantd needs nothing but the next one. Orders are named by [`OrderId`] and may be repeated at will.

use pliant_model::range::MAX_GPUS;
use pliant_model::resize::{Kind, State};
use pliant_model::{GpuCount, GpuRange, JobId, Locality, Member, NodeName, OrderId, Reason, Seconds};
use serde::{Deserialize, Serialize};

/// Milliseconds since the Unix epoch.
pub type Millis = u64;

/// Everything about a job group that its launcher knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobStatus {
    /// The base's Slurm job.
    pub base: JobId,
    /// This run of the launcher, random: a requeued base is a new instance.
    pub instance: String,
    /// The command, for people; at most 200 characters.
    pub command: String,
    /// MIN, MAX, STEP.
    pub range: GpuRange,
    /// GPUs of the base (MIN).
    pub base_gpus: GpuCount,
    /// Nodes of the base.
    pub base_nodes: Vec<NodeName>,
    /// CPUs that a slice takes per GPU.
    pub cpus_per_gpu: u32,
    /// Partition.
    pub partition: String,
    /// GPU type, where the base names one.
    pub kind: Option<String>,
    /// Constraint, where it is one plain feature.
    pub feature: Option<String>,
    /// Where slices may be.
    pub locality: Locality,
    /// Grace of a notice in seconds.
    pub grace: Seconds,
    /// When Slurm ends the base (Unix time); `None`: no limit.
    pub ends_at: Option<Seconds>,
    /// Number of the present world, from 1; 0 before the first.
    pub generation: u32,
    /// The present world in the order of ranks.
    pub world: Vec<Member>,
    /// The ranks have finished a step (or the base waits at zero): a change can be asked for.
    pub ready: bool,
    /// Live slices.
    pub slices: Vec<SliceStatus>,
    /// The resize under way.
    pub order: Option<OrderStatus>,
    /// The last resizes that ended, oldest first, at most 8.
    pub done: Vec<OrderStatus>,
    /// What the script reported last.
    pub progress: Progress,
}

/// The most entries of a list in a status, but for the next two.
pub const MAX_ENTRIES: usize = 4096;
/// The most ended resizes in a status.
pub const MAX_DONE: usize = 8;
/// The most times of arrows of one resize; no kind has more arrows.
pub const MAX_TIMES: usize = 16;

impl JobStatus {
    /// Whether it can be worked with: it comes from a process of the user's, who may have written that herself.
    /// Counts are bounded so that sums of them cannot overflow.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self) -> Result<(), &'static str> {
        let count = |n: GpuCount| n <= MAX_GPUS;
        let range = &self.range;
        if range.step == 0 || range.max == 0 || !count(range.max) || range.min.is_some_and(|min| min > range.max) {
            return Err("its range is none");
        }
        if !count(self.base_gpus) || !count(self.cpus_per_gpu) || self.base_gpus > range.max {
            return Err("its counts do not fit its range");
        }
        let lists = [self.world.len(), self.slices.len(), self.base_nodes.len()];
        if lists.iter().any(|n| *n > MAX_ENTRIES) || self.done.len() > MAX_DONE {
            return Err("its lists are too long");
        }
        if self.order.iter().chain(&self.done).any(|o| o.slices.len() > MAX_ENTRIES || o.times.len() > MAX_TIMES) {
            return Err("its lists are too long");
        }
        let sane =
            self.world.iter().all(|m| count(m.gpus)) && self.slices.iter().all(|s| count(s.gpus) && count(s.cpus));
        if !sane {
            return Err("its slices hold more than any cluster has");
        }
        let long = |text: &str| text.len() > 1024;
        if long(&self.command) || long(&self.instance) || long(&self.partition) {
            return Err("its texts are too long");
        }
        Ok(())
    }
}

/// A slice as the launcher knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SliceStatus {
    /// Its Slurm job.
    pub job: JobId,
    /// Node.
    pub node: NodeName,
    /// GPUs.
    pub gpus: GpuCount,
    /// CPUs.
    pub cpus: u32,
    /// Part of the present world.
    pub joined: bool,
    /// On its way out.
    pub leaving: bool,
}

/// How far a resize is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrderStatus {
    /// Which. Resizes that the launcher began itself (preemption, a lost slice) have an id beginning with `l-`.
    pub id: OrderId,
    /// Grow or shrink.
    pub kind: Kind,
    /// The last arrow passed: up to `Settled` for a grow, up to `Released` for a shrink, or `Undone`.
    pub state: State,
    /// The slices that come or go.
    pub slices: Vec<JobId>,
    /// Why: of the order while it runs, of its end once it has ended.
    pub reason: Reason,
    /// When each arrow was passed.
    pub times: Vec<(State, Millis)>,
    /// Grow: the longest time from exec to the client's first word in the new world, all of whose processes are new in
    /// restart mode; `None` without a client.
    pub load_ms: Option<Millis>,
}

/// What a training script reports; all optional.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// Steps in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,
    /// Samples done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<u64>,
    /// Loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
}

// A loss is finite (the agent drops what is not), so that equality is total.
impl Eq for Progress {}

/// A slice to ask Slurm for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SliceSpec {
    /// On which node.
    pub node: NodeName,
    /// How many GPUs there.
    pub gpus: GpuCount,
}

/// What pliantd wants of a launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum Order {
    /// Ask Slurm for slices and take them into the world at one boundary. What is not allocated within
    /// `patience` seconds is withdrawn.
    Grow {
        /// Names it.
        id: OrderId,
        /// The slices.
        slices: Vec<SliceSpec>,
        /// How long Slurm may take.
        patience: Seconds,
        /// Why.
        reason: Reason,
    },
    /// Leave these slices at a boundary and give them back.
    Shrink {
        /// Names it.
        id: OrderId,
        /// The slices.
        slices: Vec<JobId>,
        /// Seconds until the ranks are ended if they do not leave.
        grace: Seconds,
        /// Why.
        reason: Reason,
    },
}

impl Order {
    /// Its name.
    pub fn id(&self) -> &OrderId {
        match self {
            Order::Grow { id, .. } | Order::Shrink { id, .. } => id,
        }
    }

    /// Which way.
    pub fn kind(&self) -> Kind {
        match self {
            Order::Grow { .. } => Kind::Grow,
            Order::Shrink { .. } => Kind::Shrink,
        }
    }

    /// Why.
    pub fn reason(&self) -> &Reason {
        match self {
            Order::Grow { reason, .. } | Order::Shrink { reason, .. } => reason,
        }
    }
}

/// The mark of a slice: its `--comment`, `pliant base=12 instance=… token=…`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceMark {
    /// The base it belongs to.
    pub base: JobId,
    /// The launcher's instance.
    pub instance: String,
    /// Unique for each request, looked up before it is repeated.
    pub token: String,
}

impl std::fmt::Display for SliceMark {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "pliant base={} instance={} token={}", self.base, self.instance, self.token)
    }
}

impl SliceMark {
    /// Reads the mark out of a job's comment; `None`: the job is no slice.
    pub fn parse(comment: &str) -> Option<SliceMark> {
        let mut words = comment.split_ascii_whitespace();
        if words.next()? != "pliant" {
            return None;
        }
        let mut get = |key: &str| words.next()?.strip_prefix(key)?.strip_prefix('=').map(str::to_owned);
        let base = get("base")?.parse().ok()?;
        Some(SliceMark { base, instance: get("instance")?, token: get("token")? })
    }
}

/// The job name of the slices of a base.
pub fn slice_name(base: JobId) -> String {
    format!("pliant-{base}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_survives_the_comment() {
        let mark = SliceMark { base: JobId(7), instance: "ab12".into(), token: "cd".into() };
        assert_eq!(SliceMark::parse(&mark.to_string()), Some(mark));
        for other in ["", "pliant", "pliant base=x instance=a token=b", "my job", "pliant instance=a base=7 token=b"] {
            assert_eq!(SliceMark::parse(other), None, "{other}");
        }
    }
}
