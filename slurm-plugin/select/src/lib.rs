// SPDX-License-Identifier: GPL-2.0-or-later
//! `select_cons_tres.so`: lies in a directory of its own, first in slurm.conf's `PluginDir`, and stands in front of
//! Slurm's plugin of that name. Every call goes on to that one.
//!
//! * `exports`: what Slurm looks up; shims around the stock call.
//! * `steer`: our part of a test: nodes and GPUs of the plan, and what came of it.
//! * `events`: our part of the other calls: what is told to pliantd.
//! * `grow`: a GPU job merged into another one.
//! * `state`: the board, the ring and what is remembered between calls.
//!
//! **Failure policy.** No board, no ring, a foreign file, another layout, a panic: at most one line in slurmctld's log,
//! and the stock plugin's answer. In a process that is not slurmctld (before 25.05 all load select plugins) there is
//! nothing but the stock plugin.

mod events;
mod exports;
mod grow;
mod state;
mod steer;
