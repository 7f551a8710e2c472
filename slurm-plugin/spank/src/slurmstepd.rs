// SPDX-License-Identifier: GPL-2.0-or-later
//! In slurmstepd: the environment of the batch script or of a step's tasks.

use crate::{state, submit};
use pliant_plugin_core::args::PluginArgs;
use pliant_plugin_core::environment;
use pliant_protocol::options::{GraceLimits, JOB_AGENT, JOB_ELASTIC, JOB_PREFIX, Request};
use slurm::spank::{self, Spank, SpankError, step};
use std::ffi::c_int;

/// slurmstepd's own environment names the node.
const NODE_NAME: &str = "SLURMD_NODENAME";

pub fn init(spank: &Spank) -> c_int {
    submit::register_options(spank);
    0
}

pub fn init_post_opt(spank: &Spank) -> c_int {
    if let Err(error) = environment_of_tasks(spank) {
        spank::log_error(&format!("pliant: the job's environment is incomplete: {error}"));
    }
    0
}

fn environment_of_tasks(spank: &Spank) -> Result<(), SpankError> {
    let step = spank.step_id();
    if step == Some(step::EXTERN) {
        return Ok(());
    }
    let request = request(spank);
    if step == Some(step::BATCH) {
        // A batch script's own job is the only one that may speak here: what is there came from an elastic job around
        // the sbatch, through a submission host without the plugin.
        unset(spank, spank.env_names(JOB_PREFIX))?;
    }
    // Also where a flag without effect was used: nothing of it is replayed to nested commands.
    for prefix in environment::replay_prefixes() {
        unset(spank, spank.env_names(&prefix))?;
    }
    let Some(request) = request else {
        // A step of an elastic job gets its environment from srun's, but the agent is this node's.
        return if spank.getenv(JOB_ELASTIC).is_some() { set_agent(spank) } else { Ok(()) };
    };
    unset(spank, environment::inputs().filter(|name| spank.getenv(name).is_some()).map(str::to_owned).collect())?;
    for (name, value) in request.job_env() {
        spank.setenv(name, &value)?;
    }
    set_agent(spank)
}

/// What the submitting command handed on; else what Slurm replayed, where that command had another plugin version.
fn request(spank: &Spank) -> Option<Request> {
    let carried = Request::from_job_env(|name| spank.getenv(&environment::carrier(name)));
    // Checked at submission; here nothing is refused, least of all a running job.
    let lenient = GraceLimits { max: u64::MAX, ..GraceLimits::default() };
    carried.or_else(|| state::typed().meaning(&lenient).ok().flatten())
}

fn set_agent(spank: &Spank) -> Result<(), SpankError> {
    let node = std::env::var(NODE_NAME).unwrap_or_default();
    spank.setenv(JOB_AGENT, &PluginArgs::parse(spank.args()).agent_socket_on(&node))
}

fn unset(spank: &Spank, names: Vec<String>) -> Result<(), SpankError> {
    names.iter().try_for_each(|name| spank.unsetenv(name))
}
