//! pliantd: whether it answers, what it has found, and its way to Slurm.

use super::{Host, LIMIT, fail, ok, output, slurm, warn};
use crate::{client, command};
use pliant_protocol::admin::{Finding, Reply, Request};
use pliant_protocol::bridge::{self, Answer, Ask};
use pliant_protocol::{SOFTWARE, codec};

/// How pliantd is, and what it has found; nothing where it does not answer.
pub fn ask(host: &Host) -> (Finding, Vec<Finding>) {
    let name = "pliantd";
    let socket = &host.config.daemon.socket;
    let version = match client::ask(socket, &Request::Status) {
        Ok(Reply::Status(status)) => status.software,
        Ok(Reply::Error { text }) => {
            return (fail(name, text, "see its log (journalctl -u pliantd)"), vec![]);
        }
        Ok(_) => {
            return (fail(name, "gives answers to other questions", "install the same version"), vec![]);
        }
        Err(e) if host.is_controller() => {
            return (fail(name, e.to_string(), "systemctl enable --now pliantd"), vec![]);
        }
        Err(_) => {
            let found = format!("no {} on this host, which slurm.conf does not name as a controller", socket.display());
            return (warn(name, found, "run pliant doctor on the controller too"), vec![]);
        }
    };
    let found = format!("{version}, this pliant is {SOFTWARE}");
    let daemon = if version == SOFTWARE { ok(name, found) } else { warn(name, found, "install the same version") };
    match client::ask(socket, &Request::Doctor) {
        Ok(Reply::Doctor { findings }) => (daemon, findings),
        Ok(Reply::Error { text }) => (fail(name, text, "see its log (journalctl -u pliantd)"), vec![]),
        Ok(_) => (fail(name, "gives answers to other questions", "install the same version"), vec![]),
        Err(e) => (fail(name, e.to_string(), "see its log (journalctl -u pliantd)"), vec![]),
    }
}

/// The bridge, tried with a question that does not reach Slurm.
pub fn bridge(host: &Host) -> Finding {
    let name = "bridge";
    let path = &host.config.daemon.bridge;
    if !path.exists() {
        let found = format!("no {}", path.display());
        return if host.is_controller() {
            fail(name, found, "install Pliant's bridge package of this Slurm release, or set daemon.bridge")
        } else {
            ok(name, format!("{found}: only the controller needs it"))
        };
    }
    let question = match codec::encode(&bridge::Request { id: 1, ask: Ask::Ping }) {
        Ok(bytes) => bytes,
        Err(e) => return fail(name, e.to_string(), ""),
    };
    let program = path.to_string_lossy();
    match command::run(&mut host.slurm_command(&program, &[]), &question, LIMIT) {
        Ok(done) => match codec::read_frame::<bridge::Reply>(&mut done.stdout.as_slice(), codec::MAX_FRAME) {
            Ok(Some(bridge::Reply { id: 1, answer: Answer::Pong { slurm } })) => {
                pong(&program, &slurm, host.slurm.version())
            }
            _ => fail(
                name,
                format!("{program} gave no answer: {}", done.complaint()),
                "install the bridge that was built for the installed Slurm",
            ),
        },
        Err(command::CommandError::Io { source, .. }) if source.kind() == std::io::ErrorKind::PermissionDenied => {
            warn(name, format!("{program}: not yours to run"), "run pliant doctor as root")
        }
        Err(e) => fail(name, e.to_string(), "install the bridge that was built for the installed Slurm"),
    }
}

fn pong(program: &str, built_for: &str, slurmctld: Option<&str>) -> Finding {
    let name = "bridge";
    let found = format!("{program}, built for Slurm {built_for}");
    match slurmctld {
        Some(version) if slurm::release(version) != slurm::release(built_for) => fail(
            name,
            format!("{found}, slurmctld is {version}"),
            "install Pliant's bridge package of this Slurm release",
        ),
        _ => ok(name, found),
    }
}

/// Operator rights as slurmdbd has them; asked only where pliantd does not say.
pub fn operator(host: &Host) -> Finding {
    let name = "operator rights";
    let user = &host.config.daemon.user;
    if host.slurm.get("AccountingStorageType") != Some("accounting_storage/slurmdbd") {
        return warn(name, "unknown: no slurmdbd", "set up slurmdbd to give the account operator rights");
    }
    let asked = ["--noheader", "--parsable2", "show", "user", user, "format=adminlevel"];
    match output(&mut host.slurm_command("sacctmgr", &asked), b"") {
        Ok(text) if ["Operator", "Administrator"].contains(&text.trim()) => {
            ok(name, format!("{user}: {}", text.trim()))
        }
        Ok(_) => warn(
            name,
            format!("{user} has none: the agents cancel slices as root"),
            "sacctmgr add user pliant account=root adminlevel=operator (or modify user)",
        ),
        Err(why) => warn(name, why, "see whether slurmdbd runs"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pliant_protocol::admin::Level;

    #[test]
    fn the_bridge_must_fit_slurm() {
        assert_eq!(pong("b", "22.05.8", Some("22.05.11")).level, Level::Ok);
        assert_eq!(pong("b", "22.05.8", None).level, Level::Ok);
        assert_eq!(pong("b", "22.05.8", Some("24.11.5")).level, Level::Fail);
    }
}
