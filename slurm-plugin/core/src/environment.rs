// SPDX-License-Identifier: GPL-2.0-or-later
//! The environment contract of an elastic job.
//!
//! The submitting command (sbatch, salloc, srun) checks what was typed and hands the *meaning* on in
//! `spank_job_control_setenv`, named as the job will see it (`PLIANT_JOB_*`). Slurm carries it as `SPANK_PLIANT_JOB_*` in
//! the job record (slurmctld, prolog, epilog) and as `SLURM_SPANK_PLIANT_JOB_*` in the job's environment; the latter
//! begins with `SLURM_`, so it arrives with `--export=NONE` too (measured on 22.05.8, where Slurm's own replay of the
//! options does not). slurmstepd turns it into `PLIANT_JOB_*` and takes the carriers away.
//!
//! So that a nested submission is a plain one, two things are taken away: in slurmstepd the carriers and the inputs,
//! in a submitting command (which is then a new job's) whatever an elastic job around it has left in the environment.

use pliant_protocol::options::{JOB_PREFIX, OPTIONS};

/// Put before a job-control variable by sbatch and salloc.
pub const CARRIER_PREFIX: &str = "SLURM_SPANK_";

/// `plugin_name` of the SPANK plugin, part of Slurm's names for replayed options.
pub const PLUGIN_NAME: &str = "pliant";

/// Name under which a job-control variable reaches slurmstepd.
pub fn carrier(name: &str) -> String {
    format!("{CARRIER_PREFIX}{name}")
}

/// Prefixes of what carries a request to slurmstepd or replays it to nested commands: job-control variables, and the two
/// forms in which Slurm itself stores used options.
pub fn replay_prefixes() -> [String; 3] {
    [
        carrier(JOB_PREFIX),
        carrier(&format!("_SLURM_SPANK_OPTION_{PLUGIN_NAME}_")),
        format!("_SLURM_SPANK_OPTION_{PLUGIN_NAME}_"),
    ]
}

/// The environment twins of the options.
pub fn inputs() -> impl Iterator<Item = &'static str> {
    OPTIONS.iter().map(|def| def.env)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_and_outputs_never_meet() {
        assert!(inputs().all(|name| !name.starts_with(JOB_PREFIX)));
        assert_eq!(carrier("PLIANT_JOB_ELASTIC"), "SLURM_SPANK_PLIANT_JOB_ELASTIC");
        assert_eq!(replay_prefixes()[1], "SLURM_SPANK__SLURM_SPANK_OPTION_pliant_");
    }
}
