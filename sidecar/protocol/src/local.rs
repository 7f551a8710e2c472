//! The agent's Unix socket: ranks, supervisors and launchers of the jobs on its node.
//!
//! The agent proves who is there (SO_PEERCRED, and the Slurm job that the peer's process belongs to); nothing of
//! that is taken from the message. It then routes between the ranks of a job and the supervisor of the same Slurm
//! job on the same node, and between the launcher and pliantd. The first frame is [`ToAgent::Hello`].

use crate::job::{JobStatus, Order, Progress};
use pliant_model::{JobId, NodeName, Seconds};
use serde::{Deserialize, Serialize};

/// Who a peer says that it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum Role {
    /// A training process.
    Client {
        /// Its rank in the world of `generation`.
        rank: u32,
        /// The world that it was started for (PLIANT_JOB_GENERATION).
        generation: u32,
    },
    /// The supervisor of one step.
    Supervisor,
    /// `pliant run` in the base.
    Launcher {
        /// Its instance.
        instance: String,
    },
}

/// Frames to the agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToAgent {
    /// First of all.
    Hello {
        /// [`crate::VERSION`].
        version: u32,
        /// Version of the software, for people.
        #[serde(default)]
        software: String,
        /// Who.
        #[serde(flatten)]
        role: Role,
    },
    /// Launcher: the job as it is now. Sent after Welcome and at each change.
    Status(Box<JobStatus>),
    /// Supervisor of a slice: its launcher is alive (it has just pinged). Renews the lease of the proven job.
    Lease {
        /// The base that the slice belongs to.
        base: JobId,
        /// The launcher's instance.
        instance: String,
    },
    /// Launcher: slices it holds or is asking for; the agent of the base cancels them when the launcher is gone.
    Holds {
        /// Tokens of slices asked for or held.
        tokens: Vec<String>,
    },
    /// Supervisor: to one rank of its job.
    ToClient {
        /// The rank.
        rank: u32,
        /// Its world.
        generation: u32,
        /// What to tell it.
        message: ToClient,
    },
    /// Rank: to its supervisor.
    Client(FromClient),
}

/// Frames from the agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromAgent {
    /// The peer is known.
    Welcome {
        /// [`crate::VERSION`].
        version: u32,
        /// The Slurm job that its process belongs to.
        job: JobId,
        /// The agent's node.
        node: NodeName,
    },
    /// It is not; the connection is closed.
    Refused {
        /// Why, for people.
        reason: String,
    },
    /// Launcher: from pliantd.
    Order(Order),
    /// Launcher: whether the agent is connected to pliantd.
    Daemon {
        /// It is.
        connected: bool,
    },
    /// Supervisor: from one rank of its job.
    FromClient {
        /// The rank.
        rank: u32,
        /// Its world.
        generation: u32,
        /// What it says.
        message: FromClient,
    },
    /// Rank: from its supervisor.
    Client(ToClient),
}

/// From a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum FromClient {
    /// It is in `connect()`. Made by the agent out of the Hello, also after a reconnect.
    Ready,
    /// It has finished its first step of this world.
    Stepped,
    /// Answer to a proposal: `accept` promises to stop at that boundary and to wait there for commit or abort.
    Vote {
        /// The boundary proposed.
        boundary: u64,
        /// Promised; otherwise it is past it.
        accept: bool,
        /// Boundaries (calls of `should_leave()`) it has passed in this world.
        passed: u64,
    },
    /// `should_leave()` has returned true at this boundary.
    Left {
        /// Which.
        boundary: u64,
    },
    /// Numbers of the training.
    Report(Progress),
}

/// To a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum ToClient {
    /// `connect()` may return: the old world has ended. May be repeated.
    Start,
    /// The world changes: stop at the end of this iteration, if it is still ahead.
    Propose {
        /// Count of `should_leave()` calls at which to stop.
        boundary: u64,
        /// Seconds until the process is ended if it does not leave.
        grace: Seconds,
        /// Why, for people.
        reason: String,
    },
    /// All have promised: leave at that boundary.
    Commit {
        /// Which.
        boundary: u64,
    },
    /// Not all could: go on.
    Abort {
        /// Which.
        boundary: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wire_form_that_other_languages_rely_on() {
        let hello =
            ToAgent::Hello { version: 1, software: "0.1.0".into(), role: Role::Client { rank: 3, generation: 2 } };
        let text = serde_json::to_string(&hello).unwrap();
        assert_eq!(text, r#"{"type":"hello","version":1,"software":"0.1.0","role":"client","rank":3,"generation":2}"#);
        let vote = ToAgent::Client(FromClient::Vote { boundary: 12, accept: true, passed: 9 });
        let text = serde_json::to_string(&vote).unwrap();
        assert_eq!(text, r#"{"type":"client","say":"vote","boundary":12,"accept":true,"passed":9}"#);
        let report: ToAgent = serde_json::from_str(r#"{"type":"client","say":"report","step":5}"#).unwrap();
        assert_eq!(report, ToAgent::Client(FromClient::Report(Progress { step: Some(5), ..Progress::default() })));
        let propose = FromAgent::Client(ToClient::Propose { boundary: 9, grace: 60, reason: "x".into() });
        let text = serde_json::to_string(&propose).unwrap();
        assert_eq!(text, r#"{"type":"client","say":"propose","boundary":9,"grace":60,"reason":"x"}"#);
    }
}
