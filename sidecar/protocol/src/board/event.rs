//! What the select plugin tells.

use crate::bridge::JobRecord;
use serde::{Deserialize, Serialize};

/// An event with its time, to be written.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Told<'a> {
    /// Milliseconds since the Unix epoch.
    pub ms: u64,
    /// What happened.
    pub event: &'a Event,
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
