//! The launcher and its supervisors, over stdin and stdout of the srun that started the supervisor.
//!
//! Slurm has authenticated both ends. A payload that begins with `{` is a JSON message; one that begins with a
//! zero byte is output of a rank: zero, stream (1 stdout, 2 stderr), rank as four bytes big endian, bytes.

use crate::codec::{self, CodecError};
use crate::job::Progress;
use pliant_model::{JobId, NodeName, Seconds};
use serde::{Deserialize, Serialize};

/// From the launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToSupervisor {
    /// First of all.
    Hello(Box<Setup>),
    /// The launcher is alive; sent every 5 s. Without one for 20 s the supervisor ends its ranks and itself.
    Ping,
    /// Find a free port for the store of this generation and keep it until the ranks are started.
    ReservePort {
        /// Which.
        generation: u32,
    },
    /// Start the ranks of a generation.
    Spawn(Spawn),
    /// Let the ranks of a generation that were started on hold go.
    Start {
        /// Which.
        generation: u32,
    },
    /// To all ranks of a generation.
    Propose {
        /// Which.
        generation: u32,
        /// See [`crate::local::ToClient::Propose`].
        boundary: u64,
        /// Seconds.
        grace: Seconds,
        /// Why.
        reason: String,
    },
    /// To all ranks of a generation.
    Commit {
        /// Which.
        generation: u32,
        /// Boundary.
        boundary: u64,
    },
    /// To all ranks of a generation.
    Abort {
        /// Which.
        generation: u32,
        /// Boundary.
        boundary: u64,
    },
    /// Send a signal to the ranks of a generation and their children.
    Signal {
        /// Which; `None`: all.
        generation: Option<u32>,
        /// Number.
        signal: i32,
    },
    /// End all ranks at once (SIGKILL) and exit.
    Stop,
}

/// What a supervisor needs to know once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// Must equal [`crate::VERSION`].
    pub version: u32,
    /// The base.
    pub base: JobId,
    /// The launcher's instance.
    pub instance: String,
    /// The slice that the step runs in; `None`: the base.
    pub slice: Option<JobId>,
    /// The command and its arguments.
    pub command: Vec<String>,
    /// Working directory.
    pub directory: String,
    /// Environment of the base's batch script; the step's own SLURM_* and GPU variables go over it.
    pub environment: Vec<(String, String)>,
    /// Whether the command is torchrun: one process per node, its world in PET_*.
    pub torchrun: bool,
    /// The agent's socket on that node, `%n` = node name.
    pub agent: String,
}

/// One generation on one supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spawn {
    /// Number of the world.
    pub generation: u32,
    /// Rank of its first process.
    pub first_rank: u32,
    /// Ranks on this supervisor; at most its GPUs.
    pub ranks: u32,
    /// Ranks in all.
    pub world_size: u32,
    /// Index of this supervisor among those with ranks.
    pub node_rank: u32,
    /// Supervisors with ranks.
    pub nodes: u32,
    /// Address of the host of rank 0.
    pub master_addr: String,
    /// Port there.
    pub master_port: u16,
    /// `connect()` waits for Start: the process loads while the old world still runs.
    pub hold: bool,
}

/// From a supervisor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromSupervisor {
    /// Answer to Hello.
    Hello {
        /// [`crate::VERSION`].
        version: u32,
        /// Its node.
        node: NodeName,
        /// Entries of CUDA_VISIBLE_DEVICES as Slurm set it; empty without GPUs.
        gpus: Vec<String>,
        /// Whether the agent of the node knows it.
        agent: bool,
    },
    /// Whether the agent of the node is connected; at each change.
    Agent {
        /// It is.
        connected: bool,
    },
    /// Answer to ReservePort.
    Port {
        /// Which generation.
        generation: u32,
        /// The port.
        port: u16,
    },
    /// A rank's client is in `connect()`.
    Ready {
        /// Generation.
        generation: u32,
        /// Rank.
        rank: u32,
        /// Milliseconds from exec.
        load_ms: u64,
    },
    /// A rank has finished its first step.
    Stepped {
        /// Generation.
        generation: u32,
        /// Rank.
        rank: u32,
    },
    /// A rank's answer to a proposal.
    Vote {
        /// Generation.
        generation: u32,
        /// Rank.
        rank: u32,
        /// Boundary proposed.
        boundary: u64,
        /// Promised.
        accept: bool,
        /// Boundaries passed.
        passed: u64,
    },
    /// A rank's `should_leave()` has returned true.
    Left {
        /// Generation.
        generation: u32,
        /// Rank.
        rank: u32,
        /// Boundary.
        boundary: u64,
    },
    /// A process has ended and been reaped; for torchrun `rank` is the first rank of the node.
    Exited {
        /// Generation.
        generation: u32,
        /// Rank.
        rank: u32,
        /// Exit code; `None`: a signal ended it.
        code: Option<i32>,
        /// The signal.
        signal: Option<i32>,
    },
    /// A process could not be started.
    NotStarted {
        /// Generation.
        generation: u32,
        /// Rank.
        rank: u32,
        /// The system's words.
        error: String,
    },
    /// Numbers of the training, from the lowest rank here, at most once a second.
    Report {
        /// Generation.
        generation: u32,
        /// Rank.
        rank: u32,
        /// The numbers.
        progress: Progress,
    },
    /// Slurm (scancel -s, --signal, preemption) has sent the step a signal.
    Signalled {
        /// Number.
        signal: i32,
    },
}

/// A frame of either kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Frame<T> {
    /// A message.
    Message(T),
    /// Output of a rank.
    Output {
        /// 1 stdout, 2 stderr.
        stream: u8,
        /// Rank.
        rank: u32,
        /// As written.
        bytes: Vec<u8>,
    },
}

/// Encodes output of a rank as a frame.
///
/// # Errors
/// When it is too long for a frame.
pub fn encode_output(stream: u8, rank: u32, bytes: &[u8]) -> Result<Vec<u8>, CodecError> {
    let mut payload = vec![0, stream];
    payload.extend_from_slice(&rank.to_be_bytes());
    payload.extend_from_slice(bytes);
    codec::frame(&payload)
}

/// Decodes a payload of either kind.
///
/// # Errors
/// When it is neither.
pub fn decode<T: serde::de::DeserializeOwned>(payload: &[u8]) -> Result<Frame<T>, CodecError> {
    if let [0, stream, a, b, c, d, bytes @ ..] = payload {
        let rank = u32::from_be_bytes([*a, *b, *c, *d]);
        return Ok(Frame::Output { stream: *stream, rank, bytes: bytes.to_vec() });
    }
    Ok(Frame::Message(codec::decode(payload)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_exact() {
        let bytes = [0u8, 255, b'{', b'\n'];
        let frame = encode_output(2, 7, &bytes).unwrap();
        let got = decode::<FromSupervisor>(&frame[4..]).unwrap();
        assert_eq!(got, Frame::Output { stream: 2, rank: 7, bytes: bytes.to_vec() });
    }
}
