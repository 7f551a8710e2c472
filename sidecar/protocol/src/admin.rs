//! `pliant` and pliantd. The uid that counts is the peer's (SO_PEERCRED).

use crate::job::{JobStatus, Millis};
use pliant_model::gpu::{GpuEvent, NodeGpus, Sample};
use pliant_model::resize::{Kind, State};
use pliant_model::{JobId, NodeName, OrderId, Reason, Seconds};
use serde::{Deserialize, Serialize};

/// One request a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub enum Request {
    /// State of the daemon.
    Status,
    /// The elastic jobs that the asker may see.
    Jobs,
    /// One job with its history.
    Explain {
        /// A base, a slice, or a pending job.
        job: JobId,
    },
    /// Every GPU with its state, job and reason. Jobs and processes of others are shown to root and pliantd's own user
    /// only.
    Gpus,
    /// What the agents know of the hardware, for `pliant topo`.
    Hardware {
        /// One node; `None`: all.
        node: Option<NodeName>,
    },
    /// Facts for `pliant doctor`; only root and pliantd's own user get those of other hosts.
    Doctor,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Reply {
    /// To Status.
    Status(Status),
    /// To Jobs.
    Jobs {
        /// By job id.
        jobs: Vec<JobView>,
    },
    /// To Explain.
    Explain(Box<Explanation>),
    /// To Gpus.
    Gpus {
        /// By node and bus id.
        gpus: Vec<GpuView>,
        /// Newest first, the last 100 that the asker may see.
        events: Vec<GpuEvent>,
    },
    /// To Hardware.
    Hardware {
        /// By node name.
        nodes: Vec<NodeHardware>,
    },
    /// To Doctor.
    Doctor {
        /// What was found.
        findings: Vec<Finding>,
    },
    /// Not there, or not the asker's: the same answer for both.
    NotFound,
    /// Anything else.
    Error {
        /// For people.
        text: String,
    },
}

/// State of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Software version.
    pub software: String,
    /// Up since (Unix time).
    pub since: Seconds,
    /// When Slurm last answered (Unix time); `None`: never yet.
    pub slurm_as_of: Option<Seconds>,
    /// Whether that is recent enough to act on.
    pub fresh: bool,
    /// Whether pliantd has operator rights in Slurm, as far as it knows.
    pub operator: Option<bool>,
    /// Connected agents.
    pub agents: u32,
    /// Nodes with GPUs in Slurm.
    pub nodes: u32,
    /// GPUs in all.
    pub gpus: u32,
    /// GPUs that no job holds, on usable nodes.
    pub gpus_idle: u32,
    /// GPUs in slices.
    pub gpus_lent: u32,
    /// Elastic jobs.
    pub jobs: u32,
    /// Pending jobs that wait for resources.
    pub pending: u32,
    /// Resizes under way.
    pub resizes: u32,
    /// The select plugin, as far as pliantd hears of it.
    pub select: Select,
}

/// How the select plugin follows plans, since pliantd has started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Select {
    /// Whether its events are followed; else Slurm is polled.
    pub following: bool,
    /// Why it only hands calls on, where it does.
    pub idle: Option<String>,
    /// Jobs started on exactly the nodes and GPUs of their plan.
    pub honoured: u64,
    /// Jobs started otherwise, although there was a plan.
    pub missed: u64,
    /// Events lost.
    pub gaps: u64,
    /// Plans on the board: of jobs, and of classes of requests.
    pub plans: (u32, u32),
}

/// One elastic job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobView {
    /// Owner.
    pub user: String,
    /// As the launcher tells it.
    pub status: JobStatus,
    /// Whether the launcher is connected.
    pub connected: bool,
    /// Why it does not grow (or what is under way), as of the last decision.
    pub now: Option<Reason>,
}

/// One GPU of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuView {
    /// Its node.
    pub node: NodeName,
    /// Slurm's GRES index; `None`: Slurm does not know it.
    pub index: Option<u32>,
    /// As the agent knows it; `None`: no agent, or it has no such device (the row comes from Slurm alone).
    pub gpu: Option<pliant_model::gpu::Gpu>,
    /// How it stands.
    pub state: GpuState,
    /// The job that Slurm has given it to; `None` also where that job is not the asker's to see.
    pub job: Option<JobId>,
    /// The base, where that job is a slice.
    pub base: Option<JobId>,
    /// Why it stands so, one sentence.
    pub reason: String,
    /// The last sample, without processes that are not the asker's to see.
    pub sample: Option<Sample>,
}

/// How a GPU stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GpuState {
    /// No job has it, and it may be used.
    Idle,
    /// A job has it.
    Used,
    /// It is a slice of an elastic job.
    Lent,
    /// Slurm shows it free and something still sits on it: a process that does not end, memory, or a job that completes.
    Held,
    /// Its node takes no jobs.
    Unavailable,
    /// The card is lost.
    Lost,
    /// Nothing is known: no agent and no answer of Slurm.
    Unknown,
}

/// What an agent knows of its node, and what Slurm says of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeHardware {
    /// The node.
    pub node: NodeName,
    /// As its agent told last; `None`: no agent is connected.
    pub gpus: Option<NodeGpus>,
    /// Slurm's `Gres` of the node.
    pub gres: Option<String>,
}

/// One line of a job's history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When.
    pub at_ms: Millis,
    /// The job.
    pub job: JobId,
    /// The resize, if it belongs to one.
    pub order: Option<OrderId>,
    /// Which way.
    pub kind: Option<Kind>,
    /// The arrow.
    pub state: Option<State>,
    /// GPUs before and after, where it changes them.
    pub gpus: Option<(u32, u32)>,
    /// Why.
    pub reason: Reason,
}

/// A job and why it is as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// Which.
    pub job: JobId,
    /// Set for an elastic job.
    pub view: Option<JobView>,
    /// Why things are as they are now.
    pub now: Vec<Reason>,
    /// What became of the plan of its nodes and GPUs, where the select plugin has told.
    #[serde(default)]
    pub placement: Option<String>,
    /// Oldest first; the last 1,000.
    pub history: Vec<Event>,
}

/// One finding of `doctor`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What was looked at.
    pub check: String,
    /// Where; `None`: this host.
    pub host: Option<NodeName>,
    /// How it stands.
    pub level: Level,
    /// What was found.
    pub found: String,
    /// What to do about it; empty where nothing is.
    pub remedy: String,
}

/// How a finding stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Works, with a limit that the text names.
    Warn,
    /// Does not work.
    Fail,
}
