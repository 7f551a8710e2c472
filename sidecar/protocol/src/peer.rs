//! Agents and pliantd, inside a Noise session that MUNGE credentials have bound to both ends (`secure`).

use crate::job::{JobStatus, Millis, Order};
use pliant_model::gpu::{GpuEvent, NodeGpus, Sample};
use pliant_model::{JobId, NodeName, Reason};
use serde::{Deserialize, Serialize};

/// What both sides call this kind of session in its credentials.
pub const PURPOSE: &str = "agent-session";

/// From an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromAgent {
    /// First of all.
    Hello {
        /// [`crate::VERSION`].
        version: u32,
        /// Software version.
        software: String,
        /// Its node.
        node: NodeName,
        /// Its clock.
        clock_ms: Millis,
        /// Facts for `pliant doctor`: name and value.
        facts: Vec<(String, String)>,
    },
    /// A job whose launcher is connected here, at each change and after a reconnect.
    Status {
        /// Uid of the launcher's process, proven.
        uid: u32,
        /// The job; `base` is proven.
        status: Box<JobStatus>,
    },
    /// The launcher's connection is closed.
    Gone {
        /// Which job.
        base: JobId,
        /// Which instance.
        instance: String,
    },
    /// The agent has cancelled a slice.
    Cancelled {
        /// The slice.
        slice: JobId,
        /// Why.
        reason: Reason,
    },
    /// The node's GPUs: after each Hello, and whenever something about them has changed.
    Gpus {
        /// All of them.
        gpus: Box<NodeGpus>,
    },
    /// What the GPUs do, every 10 s.
    Samples {
        /// One for each GPU that answers.
        samples: Vec<Sample>,
    },
    /// Something happened to a GPU, at once.
    Happened {
        /// What.
        event: Box<GpuEvent>,
    },
    /// Answer to Ping.
    Pong {
        /// Its clock.
        clock_ms: Millis,
    },
}

/// From pliantd.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToAgent {
    /// Answer to Hello.
    Welcome {
        /// [`crate::VERSION`].
        version: u32,
        /// Software version.
        software: String,
    },
    /// The agent is refused; the connection is closed.
    Refused {
        /// Why.
        reason: String,
    },
    /// For the launcher of a job.
    Order {
        /// Which job.
        base: JobId,
        /// Which instance.
        instance: String,
        /// The order.
        order: Order,
    },
    /// Cancel a slice, after checking with Slurm that the job bears a slice's mark of that base.
    Cancel {
        /// The slice.
        slice: JobId,
        /// Its base.
        base: JobId,
        /// Why.
        reason: Reason,
    },
    /// Every 10 s; an agent that hears nothing for 30 s connects anew.
    Ping,
}
