//! System users of the lab.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::ports::machine_lock;
use crate::spec::{LAB_USERS, PLIANT_USER, SLURM_USER};

/// A system user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Login name.
    pub name: String,
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
}

impl User {
    /// Looks a user up by name with `getent`.
    pub fn find(name: &str) -> Result<Option<User>> {
        let out = Command::new("getent")
            .args(["passwd", "--", name])
            .stdin(Stdio::null())
            .output()
            .context("cannot run getent (package libc-bin)")?;
        let text = String::from_utf8_lossy(&out.stdout);
        let fields: Vec<&str> = text.trim().split(':').collect();
        match fields.as_slice() {
            [found, _, uid, gid, ..] => Ok(Some(User {
                name: (*found).to_owned(),
                uid: uid.parse().with_context(|| format!("uid of {name}: '{uid}'"))?,
                gid: gid.parse().with_context(|| format!("gid of {name}: '{gid}'"))?,
            })),
            _ => Ok(None),
        }
    }

    /// Looks a user up who must exist.
    pub fn get(name: &str) -> Result<User> {
        User::find(name)?.with_context(|| format!("there is no user '{name}' on this machine"))
    }
}

/// Creates the users `pliant`, `pliant-lab-1`, `pliant-lab-2` where they are missing; needs root.
pub fn ensure() -> Result<()> {
    if User::find(SLURM_USER)?.is_none() {
        bail!("there is no user '{SLURM_USER}': install Slurm first (`./dev test` does it, or apt install slurmctld)");
    }
    let _lock = machine_lock()?;
    for name in LAB_USERS.iter().chain([&PLIANT_USER]) {
        if User::find(name)?.is_some() {
            continue;
        }
        let shell = if *name == PLIANT_USER { "/usr/sbin/nologin" } else { "/bin/bash" };
        let out = Command::new("useradd")
            .args([
                "--system",
                "--no-create-home",
                "--home-dir",
                "/nonexistent",
                "--user-group",
                "--shell",
                shell,
                name,
            ])
            .stdin(Stdio::null())
            .output()
            .context("cannot run useradd (package passwd)")?;
        if !out.status.success() {
            bail!("useradd {name}: {}", String::from_utf8_lossy(&out.stderr).trim());
        }
    }
    Ok(())
}
