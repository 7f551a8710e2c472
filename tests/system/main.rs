//! Elastic jobs on a real Slurm, as a user and an admin see them.
#![forbid(unsafe_code)]

mod elastic;
mod options;
mod workspace;
