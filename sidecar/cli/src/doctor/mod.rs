//! `pliant doctor`: what can be seen from this host, and what pliantd knows of the others.
//!
//! Facts are gathered first ([`slurm`]); each check turns facts into one [`Finding`] with what was found and what to
//! do about it. A check that does not concern this host (the bridge on a login node) says so and passes.

mod authentication;
mod daemon;
mod plugin;
mod slurm;

use crate::command;
use pliant_protocol::admin::{Finding, Level};
use pliant_protocol::config::{Config, DEFAULT_PATH};
use slurm::Facts;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// For each outside command. Slurm's own commands give up on an absent slurmctld after several times ten seconds.
const LIMIT: Duration = Duration::from_secs(10);

/// What a check looks at.
struct Host {
    config: Config,
    slurm: Facts,
}

impl Host {
    /// A command of Slurm with the configuration that the checks are about.
    fn slurm_command(&self, program: &str, arguments: &[&str]) -> Command {
        slurm::command(&self.config, program, arguments)
    }

    /// Whether slurmctld, and with it pliantd, belongs on this host.
    fn is_controller(&self) -> bool {
        let own = rustix::system::uname();
        self.slurm.is_controller(&own.nodename().to_string_lossy())
    }
}

/// Makes all checks. The order is that in which an installation is built up.
pub fn examine(named: Option<&Path>) -> Vec<Finding> {
    let (config, first) = configuration(named);
    let slurm = slurm::gather(&config);
    let host = Host { config, slurm };
    let (daemon, told) = daemon::ask(&host);
    let mut all = vec![first];
    all.extend(slurm::check(&host.slurm));
    all.extend(plugin::check(&host));
    all.extend(authentication::check(&host));
    all.push(daemon::bridge(&host));
    if told.is_empty() {
        all.push(daemon::operator(&host));
    }
    all.push(daemon);
    all.extend(told);
    all
}

/// The file that counts, or the defaults where it is of no use, so that the other checks can still be made.
fn configuration(named: Option<&Path>) -> (Config, Finding) {
    let path = named.unwrap_or(Path::new(DEFAULT_PATH));
    if named.is_none() && !path.exists() {
        let found = format!("no {}: the defaults count", path.display());
        return (Config::default(), warn("configuration", found, "install pliant.toml, the same on every host"));
    }
    match Config::load(path) {
        Ok(config) => (config, ok("configuration", path.display().to_string())),
        Err(e) => (Config::default(), fail("configuration", e.to_string(), "correct it, then pliant config check")),
    }
}

fn finding(level: Level, check: &str, found: impl Into<String>, remedy: &str) -> Finding {
    Finding { check: check.to_owned(), host: None, level, found: found.into(), remedy: remedy.to_owned() }
}

fn ok(check: &str, found: impl Into<String>) -> Finding {
    finding(Level::Ok, check, found, "")
}

fn warn(check: &str, found: impl Into<String>, remedy: &str) -> Finding {
    finding(Level::Warn, check, found, remedy)
}

fn fail(check: &str, found: impl Into<String>, remedy: &str) -> Finding {
    finding(Level::Fail, check, found, remedy)
}

/// Runs a command and gives its output, or in one line why there is none.
fn output(command: &mut Command, input: &[u8]) -> Result<String, String> {
    match command::run(command, input, LIMIT) {
        Ok(done) if done.status.success() => Ok(done.text()),
        Ok(done) => {
            let (program, complaint) = (command.get_program().to_string_lossy(), done.complaint());
            Err(if complaint.starts_with(program.as_ref()) { complaint } else { format!("{program}: {complaint}") })
        }
        Err(e) => Err(e.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_default_is_noted_and_a_broken_file_fails() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pliant.toml");
        let (_, absent) = configuration(Some(&path));
        assert_eq!(absent.level, Level::Fail, "a named file has to be there");
        std::fs::write(&path, "[daemon]\npol_interval = 3\n").unwrap();
        let (config, broken) = configuration(Some(&path));
        assert_eq!(config, Config::default());
        assert!(broken.level == Level::Fail && broken.found.contains("did you mean"), "{broken:?}");
        std::fs::write(&path, "[daemon]\npoll_interval = 3\n").unwrap();
        assert_eq!(configuration(Some(&path)).1.level, Level::Ok);
    }
}
