// SPDX-License-Identifier: GPL-2.0-or-later
//! In srun: a step of a job, or a job and its step.
//!
//! The environment of a salloc shell replays that job's options here, which is right: the step belongs to the job.

use crate::submit;
use pliant_plugin_core::environment;
use slurm::process;
use slurm::spank::Spank;
use std::ffi::c_int;

pub fn init(spank: &Spank) -> c_int {
    submit::register_options(spank);
    submit::read_twins();
    0
}

pub fn init_post_opt(spank: &Spank) -> c_int {
    if let Some(request) = submit::check(spank) {
        submit::hand_on(spank, &request);
        // srun hands job-control variables to slurmctld only; its tasks get its environment.
        for (name, value) in request.job_env() {
            process::set_env(&environment::carrier(name), &value);
        }
    }
    0
}
