//! Elastic jobs on a real Slurm, as a user and an admin see them.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests fail the test")]

mod cases;
mod elastic;
mod gpus;
mod grow;
mod options;
mod select;
mod workspace;
