//! What the select plugin tells.

use crate::bridge::JobRecord;
use serde::{Deserialize, Serialize};

/// What can be told.
pub trait Told: Serialize {
    /// The job that it is about.
    fn job(&self) -> Option<u32>;
}

impl Told for Event {
    fn job(&self) -> Option<u32> {
        Event::job(self)
    }
}

/// An event with its time, to be written.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Line<'a, T> {
    pub ms: u64,
    pub event: &'a T,
}

/// [`Event::Seen`] out of slurmctld's own texts: no memory is asked for while slurmctld waits. Fields as in [`JobRecord`],
/// those that a test can see; empty texts are left out.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(tag = "is", rename = "seen")]
#[allow(missing_docs, reason = "as in JobRecord")]
pub struct Sight<'a> {
    pub job: SeenJob<'a>,
    pub env: Vec<&'a str>,
}

impl Told for Sight<'_> {
    fn job(&self) -> Option<u32> {
        Some(self.job.job_id)
    }
}

/// See [`Sight`].
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[allow(missing_docs, reason = "as in JobRecord")]
pub struct SeenJob<'a> {
    pub job_id: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub array_job_id: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub array_task_id: Option<u32>,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub array_tasks: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub het_job_id: Option<u32>,
    pub user_id: u32,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub user_name: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub name: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub comment: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub account: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub partition: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub reservation: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub features: &'a str,
    pub state: &'a str,
    pub priority: u32,
    pub submit_time: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_limit: Option<u32>,
    pub num_nodes: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_nodes: Option<u32>,
    pub num_cpus: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus_per_task: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_tasks: Option<u32>,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub tres_req: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub tres_per_job: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub tres_per_node: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub tres_per_socket: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub tres_per_task: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub cpus_per_tres: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub req_nodes: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub exc_nodes: &'a str,
    pub exclusive: bool,
    pub batch: bool,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub alloc_node: &'a str,
    pub restart_count: u32,
    pub requeue: bool,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub licenses: &'a str,
}

/// An event with its time, as read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Milliseconds since the Unix epoch.
    pub ms: u64,
    /// What happened.
    pub event: Event,
}

/// What happened inside slurmctld.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Event {
    /// A slurmctld has begun; the first event of a ring.
    Init {
        /// Its release.
        slurm: String,
        /// `None`: plans are followed; else why the plugin only delegates.
        idle: Option<String>,
    },
    /// The first test of a job, or the first since its request has changed.
    Seen {
        /// As slurmctld has it, as far as a test can see.
        job: Box<JobRecord>,
        /// `spank_job_env`: the options of elastic jobs.
        env: Vec<String>,
    },
    /// Slurm has tried to start a job.
    Test {
        /// The job.
        job: u32,
        /// Whether it can start.
        fits: bool,
        /// What became of its plan, where there is one.
        outcome: Option<Outcome>,
    },
    /// Our part of a test, only while a bench measures.
    Took {
        /// The job.
        job: u32,
        /// CPU time of the thread, nanoseconds.
        cpu_ns: u64,
        /// Wall time, nanoseconds.
        wall_ns: u64,
    },
    /// A job is about to start; the choice is verified.
    Begin {
        /// The job.
        job: u32,
        /// What became of its plan, where there is one.
        outcome: Option<Outcome>,
    },
    /// A job has its resources.
    Start {
        /// The job.
        job: u32,
        /// Its nodes as a hostlist.
        nodes: String,
        /// GRES by node, in the order of `nodes`, such as `gpu:2(IDX:0-1)`.
        gpus: Vec<String>,
        /// Its CPUs.
        cpus: u32,
    },
    /// A job has lost a node.
    Resized {
        /// The job.
        job: u32,
    },
    /// A job was merged into another one.
    Expand {
        /// The job that is gone.
        from: u32,
        /// The job that has its resources now.
        to: u32,
        /// Why not, where it was refused.
        refused: Option<String>,
    },
    /// A job has given its resources back.
    Fini {
        /// The job.
        job: u32,
    },
    /// A job was suspended.
    Suspend {
        /// The job.
        job: u32,
    },
    /// A job goes on.
    Resume {
        /// The job.
        job: u32,
    },
    /// The table of nodes was made anew.
    NodeInit,
    /// slurm.conf was read again.
    Reconfigure,
    /// An event that was too long to be told.
    Large {
        /// The job that it is about; 0: none.
        job: u32,
    },
}

impl Event {
    /// The job that it is about.
    pub fn job(&self) -> Option<u32> {
        match self {
            Event::Seen { job, .. } => Some(job.job_id),
            Event::Test { job, .. }
            | Event::Took { job, .. }
            | Event::Begin { job, .. }
            | Event::Start { job, .. }
            | Event::Resized { job }
            | Event::Expand { to: job, .. }
            | Event::Fini { job }
            | Event::Suspend { job }
            | Event::Resume { job }
            | Event::Large { job } => Some(*job).filter(|j| *j != 0),
            Event::Init { .. } | Event::NodeInit | Event::Reconfigure => None,
        }
    }
}

/// What became of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The job gets exactly the nodes and GPUs of the plan.
    Honoured,
    /// Not, and why.
    Not(String),
    /// A hard plan keeps the job waiting.
    Waits(String),
}
