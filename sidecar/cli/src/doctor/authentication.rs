//! MUNGE, with the socket that Pliant and Slurm use, and the account of pliantd.

use super::{Host, fail, ok, output, warn};
use crate::command::command;
use pliant_protocol::admin::Finding;
use std::path::{Path, PathBuf};

/// The release that mends CVE-2026-25506, and the CVE, by which a distribution's backport is known.
const MENDED: (u32, u32, u32) = (0, 5, 18);
const CVE: &str = "CVE-2026-25506";
const CHANGELOG: &str = "/usr/share/doc/munge/changelog.Debian.gz";

/// The account, a round trip, the version.
pub fn check(host: &Host) -> Vec<Finding> {
    let socket = socket(&host.config.slurm.munge_socket, host.slurm.get("AuthInfo"));
    vec![account(&host.config.daemon.user), round_trip(socket.as_deref()), version()]
}

/// pliant.toml's socket, else that of slurm.conf, else libmunge's own.
fn socket(configured: &Path, auth_info: Option<&str>) -> Option<PathBuf> {
    if !configured.as_os_str().is_empty() {
        return Some(configured.to_owned());
    }
    auth_info?.split(',').find_map(|part| part.trim().strip_prefix("socket=")).map(PathBuf::from)
}

fn account(user: &str) -> Finding {
    match output(&mut command("getent", &["passwd", user]), b"") {
        Ok(_) => ok("account", user),
        Err(_) => fail(
            "account",
            format!("no account {user} (daemon.user)"),
            "create it on every host with the same uid: useradd --system pliant",
        ),
    }
}

fn round_trip(socket: Option<&Path>) -> Finding {
    let name = "MUNGE";
    let with_socket = |program, arguments: &[&str]| {
        let mut command = command(program, arguments);
        if let Some(path) = socket {
            command.arg("--socket").arg(path);
        }
        command
    };
    let credential = output(&mut with_socket("munge", &["--no-input"]), b"");
    match credential.and_then(|text| output(&mut with_socket("unmunge", &[]), text.as_bytes())) {
        Ok(_) => ok(name, format!("works{}", socket.map(|p| format!(" at {}", p.display())).unwrap_or_default())),
        Err(why) => fail(
            name,
            why,
            "start munged (systemctl status munge); slurm.munge_socket names its socket if it is not the usual one",
        ),
    }
}

fn version() -> Finding {
    let name = "MUNGE version";
    let shown = match output(&mut command("munge", &["--version"]), b"") {
        Ok(text) => text.lines().next().unwrap_or_default().trim().to_owned(),
        Err(why) => return fail(name, why, "install munge"),
    };
    let package = || {
        let changes = |mut c: std::process::Command| output(&mut c, b"").is_ok_and(|text| text.contains(CVE));
        changes(command("gzip", &["-dc", CHANGELOG])) || changes(command("rpm", &["-q", "--changelog", "munge"]))
    };
    judge(&shown, package)
}

/// By what `munge --version` says and whether the package names the CVE.
fn judge(shown: &str, backported: impl Fn() -> bool) -> Finding {
    let name = "MUNGE version";
    match numbers(shown) {
        Some(version) if version >= MENDED => ok(name, shown),
        Some(_) if backported() => ok(name, format!("{shown}, with its distribution's mend of {CVE}")),
        _ => warn(
            name,
            format!("{shown}: {CVE} (a local user can read the key) is not known to be mended"),
            "install munge 0.5.18, or your distribution's security update, then make a new key",
        ),
    }
}

/// `(0, 5, 15)` of `munge-0.5.15 (2022-06-22)`.
fn numbers(shown: &str) -> Option<(u32, u32, u32)> {
    let (_, version) = shown.split_ascii_whitespace().next()?.split_once('-')?;
    let mut parts = version.split('.').map(|p| p.parse().ok());
    Some((parts.next()??, parts.next()??, parts.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pliant_protocol::admin::Level;

    #[test]
    fn the_configured_socket_comes_first() {
        let none = Path::new("");
        assert_eq!(socket(Path::new("/a"), Some("socket=/b")), Some("/a".into()));
        assert_eq!(socket(none, Some("cred_expire=60,socket=/b")), Some("/b".into()));
        assert_eq!(socket(none, Some("cred_expire=60")), None);
        assert_eq!(socket(none, None), None);
    }

    #[test]
    fn old_versions_pass_only_with_the_mend() {
        for (shown, backported, level) in [
            ("munge-0.5.15 (2022-06-22)", false, Level::Warn),
            ("munge-0.5.15 (2022-06-22)", true, Level::Ok),
            ("munge-0.5.18 (2026-02-10)", false, Level::Ok),
            ("munge-0.6.0", false, Level::Ok),
            ("munge", true, Level::Warn),
        ] {
            assert_eq!(judge(shown, || backported).level, level, "{shown} {backported}");
        }
    }

    #[test]
    fn an_account_that_is_not_there_fails() {
        assert_eq!(account("root").level, Level::Ok);
        assert_eq!(account("no-such-account-1").level, Level::Fail);
    }
}
