//! The end of a lab: nothing stays, whatever happened before.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

use crate::procs::{self, Proc};
use crate::spec::{LAB_USERS, Owner};
use crate::state::State;
use crate::users::User;
use crate::{cgroups, ports};

/// Ends the lab in `dir`: services, job steps, jobs, cgroups, device nodes, ports and the directory itself.
pub fn down(dir: &Path) -> Result<()> {
    let state = match State::load(dir) {
        Ok(state) => Some(state),
        // A lab that was killed while it wrote its first files; anything else is not ours to remove.
        Err(_) if dir.join(".pliant-lab").exists() => None,
        Err(err) => return Err(err),
    };
    let dir = &state.as_ref().map_or_else(|| dir.to_path_buf(), |s| s.spec.dir.clone());
    if let Some(state) = &state {
        let me = std::process::id();
        if let Some(guard) = state.guard.filter(|g| g.pid != me) {
            guard.signal(Signal::KILL);
        }
        for proc in state.services.values() {
            proc.signal(Signal::KILL);
        }
    }
    end_processes(dir, state.as_ref())?;
    if let Some(spec) = state.as_ref().map(|s| &s.spec) {
        if spec.cgroups {
            cgroups::remove(spec);
        }
        if !spec.devices.starts_with(dir) && spec.devices.starts_with("/dev") {
            let _ = fs::remove_dir_all(&spec.devices);
        }
        let _ = fs::remove_dir_all(spec.memory());
    }
    remove_dir(dir)?;
    ports::release(dir);
    Ok(())
}

fn end_processes(dir: &Path, state: Option<&State>) -> Result<()> {
    let uids: Vec<u32> =
        LAB_USERS.iter().filter_map(|name| User::find(name).ok().flatten()).map(|user| user.uid).collect();
    let end = Instant::now() + Duration::from_secs(15);
    loop {
        let mut left = procs::of_lab(dir, &uids);
        if let Some(spec) = state.map(|s| &s.spec).filter(|spec| spec.cgroups) {
            left.extend(cgroups::processes(spec));
        }
        if let Some(state) = state {
            left.extend(state.services.values().filter(|p| p.alive()));
        }
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() > end {
            let list: Vec<String> = left.iter().map(|p| format!("{} ({})", p.pid, procs::describe(p.pid))).collect();
            bail!("processes of the lab in {} do not end: {}", dir.display(), list.join(", "));
        }
        for proc in left {
            proc.signal(Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn remove_dir(dir: &Path) -> Result<()> {
    let mut tries = 0;
    while dir.exists() {
        match fs::remove_dir_all(dir) {
            Err(err) if tries >= 20 => {
                return Err(err).with_context(|| format!("cannot remove {}", dir.display()));
            }
            _ => {}
        }
        tries += 1;
        std::thread::sleep(Duration::from_millis(if tries > 1 { 50 } else { 0 }));
    }
    Ok(())
}

/// Waits until the owner dies, then ends the lab; returns early when the lab is gone by itself.
pub fn guard(dir: &Path, owner: Owner) -> Result<()> {
    let proc = Proc { pid: owner.pid, start: owner.start };
    let pid = i32::try_from(owner.pid).ok().and_then(Pid::from_raw);
    // With a pidfd the guard wakes at the owner's death; without one (old kernels) it looks every 200 ms.
    let pidfd = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    while proc.alive() {
        if !dir.exists() {
            return Ok(());
        }
        match &pidfd {
            Some(fd) => {
                let limit = Timespec { tv_sec: 1, tv_nsec: 0 };
                let _ = poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&limit));
            }
            None => std::thread::sleep(Duration::from_millis(200)),
        }
    }
    if dir.exists() { down(dir) } else { Ok(()) }
}
