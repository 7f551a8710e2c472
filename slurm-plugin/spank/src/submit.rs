// SPDX-License-Identifier: GPL-2.0-or-later
//! What sbatch, salloc and srun have in common.

use crate::{exports, state};
use pliant_plugin_core::args::PluginArgs;
use pliant_plugin_core::{environment, limits};
use pliant_protocol::options::{Key, OPTIONS, Request};
use slurm::process;
use slurm::spank::{self, OptionSpec, Spank};

/// Exit code of a submission that was stopped, as Slurm's own for a wrong option.
const EXIT_BAD_OPTION: i32 = 1;

/// Registers the options; Slurm wants that in every kind of process, or drops values on the way.
pub fn register_options(spank: &Spank) {
    for (number, def) in (0..).zip(&OPTIONS) {
        let spec = OptionSpec { name: def.name, value_name: def.value_name, usage: def.marked_help, number };
        if let Err(error) = spank.register_option(&spec, exports::option_callback) {
            spank::log_error(&format!("pliant: --{} is not available: {error}", def.name));
        }
    }
}

/// Notes the environment twins.
pub fn read_twins() {
    for def in &OPTIONS {
        if let Some(text) = std::env::var_os(def.env) {
            state::change(|typed| typed.set_env(def.key, &text.to_string_lossy()));
        }
    }
}

/// Checks what was typed. A wrong text ends the command here; `None`: a plain job.
pub fn check(spank: &Spank) -> Option<Request> {
    let typed = state::typed();
    // The usual case, a job that has nothing to do with Pliant, costs nothing.
    if OPTIONS.iter().all(|def| typed.get(def.key).is_none()) {
        return None;
    }
    let args = PluginArgs::parse(spank.args());
    let (limits, complaint) = limits::read(&args);
    match typed.meaning(&limits) {
        Err(error) => {
            spank::log_error(&format!("pliant: {error}"));
            process::exit_command(EXIT_BAD_OPTION)
        }
        Ok(None) => {
            // A step in a salloc shell replays that job's flags, about which salloc has said it.
            let nested = std::env::var_os("SLURM_JOB_ID").is_some();
            if let Some(def) = typed.without_effect().filter(|_| !nested) {
                let elastic = Key::Elastic.def().name;
                spank::log_notice(&format!("pliant: --{} has no effect without --{elastic}", def.name));
            }
            None
        }
        Ok(Some(request)) => {
            if let Some(text) = complaint {
                spank::log_notice(&format!("pliant: {text}"));
            }
            if !args.unknown.is_empty() {
                spank::log_notice(&format!("pliant: plugstack.conf: unknown arguments {:?} are ignored", args.unknown));
            }
            Some(request)
        }
    }
}

/// Hands the request on to slurmctld and to the job, and takes the twins out of the environment that the job inherits.
pub fn hand_on(spank: &Spank, request: &Request) {
    for (name, value) in request.job_env() {
        if let Err(error) = spank.job_control_setenv(name, &value) {
            spank::log_error(&format!("pliant: {name} does not reach the job: {error}"));
        }
    }
    environment::inputs().for_each(process::remove_env);
}
