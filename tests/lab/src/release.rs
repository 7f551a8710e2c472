//! A lab of another Slurm release than the host's: the whole program runs again inside a chroot that `./dev release`
//! has made, where that release is the native one. Nothing else of the lab knows of it.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::services::SYSTEM_PATH;

/// Set inside: the release.
const INSIDE: &str = "PLIANT_LAB_RELEASE";
/// The mounts that a lab needs from the host, the checkout besides.
const MOUNTS: &str = "/proc /sys /dev /tmp";

/// Slurm's release line on this host, such as `22.05`.
pub fn native() -> Result<String> {
    let (major, minor) = crate::build::slurm_version()?;
    Ok(format!("{major}.{minor:02}"))
}

/// Goes into the chroot of `release` and runs this program there anew; returns where the release is the native one.
pub fn enter(release: &str) -> Result<()> {
    let inside = std::env::var(INSIDE).is_ok_and(|r| r == release);
    if inside || native().is_ok_and(|n| n == release) {
        return Ok(());
    }
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    // Only returns when it fails.
    Err(command(release, &program)?.args(std::env::args_os().skip(1)).exec())
        .with_context(|| format!("cannot enter the chroot of Slurm {release}"))
}

/// A command that runs `program` in the chroot of `release`, with this process's environment and the same paths.
pub fn command(release: &str, program: &Path) -> Result<Command> {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let checkout = checkout.canonicalize().with_context(|| format!("{}", checkout.display()))?;
    let root = checkout.join(".cache/releases").join(release).join("root");
    if !root.join("usr/sbin/slurmctld").exists() {
        bail!("there is no root of Slurm {release} in {}: run `./dev release {release}`", root.display());
    }
    let shared = checkout.join("../shared");
    let target = program.parent().unwrap_or(Path::new("/")).to_owned();
    let mut binds: Vec<PathBuf> = vec![checkout.clone(), target];
    binds.extend(shared.canonicalize());
    // A mount namespace of its own: the mounts go with the last process in it. One of the lab's services may be that.
    let script = r#"set -e
        root=$1; mounts=$2; shift 2
        for at in $mounts; do mkdir -p "$root$at"; mount --rbind "$at" "$root$at"; done
        while [ "$1" != -- ]; do mkdir -p "$root$1"; mount --bind "$1" "$root$1"; shift; done
        shift
        cp /etc/hosts "$root/etc/hosts"
        dir=$PWD
        exec chroot "$root" /bin/sh -c 'cd "$0" 2>/dev/null || cd /; exec "$@"' "$dir" "$@"
    "#;
    let mut cmd = Command::new("unshare");
    cmd.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]).arg(&root).arg(MOUNTS);
    cmd.args(&binds).arg("--").arg(program);
    cmd.env(INSIDE, release).env("PLIANT_LAB_PLUGINS", plugins(&checkout, release));
    cmd.env("PATH", OsString::from(SYSTEM_PATH));
    Ok(cmd)
}

/// What is built for a release: plugins and bridge.
fn plugins(checkout: &Path, release: &str) -> PathBuf {
    checkout.join(".cache/releases").join(release).join("target/debug")
}
