//! Device cgroups (version 1): can this machine do it, and what a lab left there.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;

use crate::ports;
use crate::procs::Proc;
use crate::spec::Spec;
use crate::state::State;

/// Mount points of the version 1 controllers.
fn mounts() -> Vec<PathBuf> {
    let text = fs::read_to_string("/proc/mounts").unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let mut fields = line.split(' ');
            let (path, kind) = (fields.nth(1)?, fields.next()?);
            (kind == "cgroup").then(|| PathBuf::from(path))
        })
        .collect()
}

/// Fails, with what is missing, where Slurm's cgroup/v1 plugin cannot separate devices.
pub(crate) fn check() -> Result<()> {
    let mounts = mounts();
    for controller in ["devices", "freezer", "cpuset", "memory"] {
        let Some(path) = mounts.iter().find(|m| m.ends_with(controller)) else {
            bail!(
                "--cgroups: this machine does not mount the cgroup v1 controller '{controller}' \
                 (pure cgroup v2 machines are not supported by the lab): leave out --cgroups"
            );
        };
        let probe = path.join("pliant-lab-probe");
        let _ = fs::remove_dir(&probe);
        fs::create_dir(&probe).with_context(|| {
            format!(
                "--cgroups: cannot make a cgroup in {} (a container without rights?): leave out --cgroups",
                path.display()
            )
        })?;
        let _ = fs::remove_dir(&probe);
    }
    Ok(())
}

/// Directories of this lab's jobs in all controllers.
fn job_dirs(spec: &Spec) -> Vec<PathBuf> {
    let first = spec.first_job_id();
    let mut dirs = Vec::new();
    for mount in mounts() {
        for node in spec.node_names() {
            for uid in children(&mount.join(format!("slurm_{node}"))) {
                dirs.extend(children(&uid).into_iter().filter(|job| {
                    // Job ids of two labs are at least 5000 apart: four fixed ports, one node, 1000 ids per port.
                    name(job)
                        .strip_prefix("job_")
                        .and_then(|id| id.parse::<u32>().ok())
                        .is_some_and(|id| id >= first && id - first < 5000)
                }));
            }
        }
    }
    dirs
}

/// Processes that are still in a cgroup of this lab's jobs.
pub(crate) fn processes(spec: &Spec) -> Vec<Proc> {
    fn collect(dir: &Path, found: &mut Vec<Proc>) {
        let pids = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        found.extend(pids.lines().filter_map(|pid| Proc::of(pid.parse().ok()?)));
        children(dir).iter().for_each(|child| collect(child, found));
    }
    let mut found = Vec::new();
    for dir in job_dirs(spec) {
        // A suspended job is frozen and would not die of a signal.
        let _ = fs::write(dir.join("freezer.state"), "THAWED");
        collect(&dir, &mut found);
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// Removes the directories of this lab's jobs, and the nodes' directories when no other lab is up.
pub(crate) fn remove(spec: &Spec) {
    for dir in job_dirs(spec) {
        for proc in processes(spec) {
            proc.signal(Signal::KILL);
        }
        remove_tree(&dir);
    }
    let others =
        ports::labs().iter().any(|dir| *dir != spec.dir && State::load(dir).is_ok_and(|state| state.spec.cgroups));
    // The nodes' own directories are shared by all labs of this machine: the last one removes them.
    for mount in mounts().iter().filter(|_| !others) {
        for dir in children(mount) {
            let node = name(&dir).strip_prefix("slurm_n");
            if node.is_some_and(|n| n.parse::<u16>().is_ok()) {
                remove_tree(&dir);
            }
        }
    }
}

/// Removes a cgroup with the cgroups below it; a cgroup that still has processes stays.
fn remove_tree(dir: &Path) {
    for child in children(dir) {
        remove_tree(&child);
    }
    let _ = fs::remove_dir(dir);
}

fn children(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()).collect()
}

fn name(path: &Path) -> &str {
    path.file_name().and_then(|n| n.to_str()).unwrap_or_default()
}
