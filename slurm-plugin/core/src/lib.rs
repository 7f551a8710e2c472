// SPDX-License-Identifier: GPL-2.0-or-later
//! What Pliant's Slurm plugins share. No I/O but one bounded configuration file, no thread, no Slurm call.
//!
//! * [`args`]: what an administrator writes behind the plugin's name in plugstack.conf.
//! * [`environment`]: which names carry an elastic job's request from the submitting command to the job, and which are
//!   taken away so that a nested submission is a plain one.
//! * [`limits`]: the part of pliant.toml that submission needs.
//!
//! **Failure policy.** A value that the user typed wrongly stops the submission with one line. Everything else (no
//! configuration, no sidecar, an argument that is not understood, a refused SPANK call, a panic) is at most one line,
//! and the job goes on as the plain Slurm job that its native flags describe.
#![forbid(unsafe_code)]

pub mod args;
pub mod environment;
pub mod limits;
