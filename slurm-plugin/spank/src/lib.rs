// SPDX-License-Identifier: GPL-2.0-or-later
//! `spank_pliant.so`: the options of elastic jobs.
//!
//! The file name says in which process code runs: `alloc` in sbatch, salloc and scrontab, `srun` in srun, `slurmd` in
//! slurmd, `slurmstepd` in the job's slurmstepd; `exports` holds what Slurm calls, each function behind the panic fence.
//! No network, no thread, no Slurm command; a job without `--elastic` is left exactly as it is.
//!
//! ```text
//! # /etc/slurm/plugstack.conf.d/pliant.conf
//! optional spank_pliant.so agent_socket=/run/pliant/agent.sock config=/etc/pliant/pliant.toml
//! ```
#![deny(clippy::indexing_slicing)]

mod alloc;
mod exports;
mod slurmd;
mod slurmstepd;
mod srun;
mod state;
mod submit;
