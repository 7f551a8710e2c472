//! What Pliant's parts say to each other: messages, versions, the codec, the option table and the configuration.
//!
//! | module | who | over |
//! |---|---|---|
//! | [`local`] | ranks, supervisors and the launcher <-> the agent of their node | Unix socket |
//! | [`step`] | the launcher <-> its supervisors | stdin and stdout of the step's srun |
//! | [`peer`] | agents <-> pliantd | TCP, in a Noise session (`secure`) |
//! | [`admin`] | `pliant` <-> pliantd | Unix socket |
//! | [`bridge`] | pliantd <-> pliant-slurm-bridge | stdin and stdout of the child |
//!
//! | [`board`] | pliantd <-> the select plugin inside slurmctld | two files on a tmpfs |
//!
//! All but the last are frames of the same kind ([`codec`]): a length and a JSON object.
#![forbid(unsafe_code)]

pub mod admin;
pub mod board;
pub mod bridge;
pub mod codec;
pub mod config;
pub mod dump;
pub mod exit;
pub mod job;
pub mod local;
pub mod options;
pub mod peer;
#[cfg(feature = "secure")]
pub mod secure;
pub mod slurm_files;
pub mod step;

/// Version of all message sets. A peer of another major version is refused with both versions named.
pub const VERSION: u32 = 1;

/// Version of the software, as shown to people.
pub const SOFTWARE: &str = env!("CARGO_PKG_VERSION");
