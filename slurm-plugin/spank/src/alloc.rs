// SPDX-License-Identifier: GPL-2.0-or-later
//! In sbatch, salloc and scrontab: a new job is submitted.

use crate::submit;
use pliant_plugin_core::environment;
use pliant_protocol::options::JOB_PREFIX;
use slurm::process;
use slurm::spank::Spank;
use std::ffi::c_int;

pub fn init(spank: &Spank) -> c_int {
    forget_outer_job();
    submit::register_options(spank);
    submit::read_twins();
    0
}

pub fn init_post_opt(spank: &Spank) -> c_int {
    if let Some(request) = submit::check(spank) {
        submit::hand_on(spank, &request);
    }
    0
}

/// Inside an elastic job the environment holds what belongs to that job. Slurm would replay its options here, after
/// `#SBATCH` lines and so with more weight than they have; and the new job would look elastic to what runs in it.
fn forget_outer_job() {
    let prefixes = environment::replay_prefixes();
    let names = prefixes.iter().map(String::as_str).chain([JOB_PREFIX]).flat_map(process::env_names);
    for name in names.collect::<Vec<_>>() {
        process::remove_env(&name);
    }
}
