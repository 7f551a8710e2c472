//! `pliant run` and the supervisor that it starts: the work is done by `pliant_launcher`.

use crate::args;
use anyhow::Context as _;
use pliant_launcher::RunOptions;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

/// Runs the command in the job; gives the exit code that `pliant_protocol::exit` describes.
///
/// # Errors
/// Only before anything is started.
pub fn run(run: args::Run, config: Option<&Path>) -> anyhow::Result<u8> {
    if let Some(config) = config.filter(|c| std::env::var_os("PLIANT_CONFIG").as_deref() != Some(c.as_os_str())) {
        return again(&run, config);
    }
    Ok(pliant_launcher::run(RunOptions { label: run.label, command: run.command }))
}

/// Starts this program anew with `--config` as the environment has it: the launcher, and every process that it starts,
/// look there.
fn again(run: &args::Run, config: &Path) -> anyhow::Result<u8> {
    let program = std::env::current_exe().context("own program")?;
    let config = std::path::absolute(config).with_context(|| format!("--config {}", config.display()))?;
    let label = run.label.then_some("--label");
    // Without --config, which would bring us back here.
    let failed =
        Command::new(&program).arg("run").args(label).arg("--").args(&run.command).env("PLIANT_CONFIG", config).exec();
    Err(failed).with_context(|| format!("start {} again", program.display()))
}
