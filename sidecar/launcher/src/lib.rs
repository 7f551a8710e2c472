//! `pliant run`: the launcher in the batch script, and the supervisor that it starts on each node of the job group.
//!
//! [`core`] decides; everything else does what it says: [`slurm`] asks and tells Slurm by its commands, `steps` holds
//! the srun children, [`agent`] the connection to the agent of the node, `output` what the ranks print,
//! `supervisor` is the other end of a step.
#![forbid(unsafe_code)]

pub mod agent;
pub mod base;
pub mod core;
pub mod environment;
mod output;
mod run;
mod signals;
pub mod slurm;
mod steps;
mod supervisor;
pub mod torchrun;

pub use run::{RunOptions, run};
pub use supervisor::supervise;
