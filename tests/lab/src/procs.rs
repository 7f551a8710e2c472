//! Processes: who is alive, who belongs to a lab, ending them by pid.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};

/// A process, told apart from a later one with the same pid by its start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Proc {
    /// Process id.
    pub pid: u32,
    /// Start time, clock ticks since boot (`/proc/PID/stat`, field 22).
    pub start: u64,
}

/// What `/proc/PID/stat` says.
#[derive(Debug, Clone)]
struct Stat {
    comm: String,
    state: char,
    ppid: u32,
    start: u64,
}

fn stat(pid: u32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold spaces and brackets: fields are counted from the last bracket.
    let open = text.find('(')?;
    let close = text.rfind(')')?;
    let comm = text.get(open + 1..close)?.to_owned();
    let fields: Vec<&str> = text.get(close + 1..)?.split_whitespace().collect();
    Some(Stat {
        comm,
        state: fields.first()?.chars().next()?,
        ppid: fields.get(1)?.parse().ok()?,
        start: fields.get(19)?.parse().ok()?,
    })
}

impl Proc {
    /// The process with this pid, if it lives.
    pub fn of(pid: u32) -> Option<Proc> {
        let stat = stat(pid)?;
        (!matches!(stat.state, 'Z' | 'X')).then_some(Proc { pid, start: stat.start })
    }

    /// Whether this very process still lives; a zombie does not.
    pub fn alive(self) -> bool {
        Proc::of(self.pid) == Some(self)
    }

    /// Sends a signal if this very process still lives; says whether it was sent.
    pub fn signal(self, signal: Signal) -> bool {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else {
            return false;
        };
        self.alive() && rustix::process::kill_process(pid, signal).is_ok()
    }

    /// Waits until it is gone; false when the time is over.
    pub fn wait_gone(self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        while self.alive() {
            if Instant::now() > end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }
}

/// All processes that belong to the lab in `dir`: started with its `SLURM_CONF` (services, job steps, jobs), slurmstepds
/// that hold its logs open, processes of `uids` that work below `dir`, and all children of these. The caller and its
/// parents are left out.
pub fn of_lab(dir: &Path, uids: &[u32]) -> Vec<Proc> {
    let all: BTreeMap<u32, Stat> = pids().into_iter().filter_map(|pid| Some((pid, stat(pid)?))).collect();
    let mut own = BTreeSet::new();
    let mut next = Some(std::process::id());
    while let Some(pid) = next.filter(|pid| own.insert(*pid)) {
        next = all.get(&pid).map(|s| s.ppid).filter(|p| *p > 1);
    }
    let needle = [b"SLURM_CONF=", dir.as_os_str().as_encoded_bytes(), b"/etc/slurm.conf"].concat();
    let mut found: BTreeSet<u32> = all
        .iter()
        .filter(|(pid, stat)| {
            has_env(**pid, &needle)
                || (stat.comm.starts_with("slurmstepd") && holds_below(**pid, dir))
                || (uids.contains(&uid(**pid)) && holds_below(**pid, dir))
        })
        .map(|(pid, _)| *pid)
        .collect();
    loop {
        let more: Vec<u32> = all
            .iter()
            .filter(|(pid, s)| found.contains(&s.ppid) && !found.contains(pid))
            .map(|(pid, _)| *pid)
            .collect();
        if more.is_empty() {
            break;
        }
        found.extend(more);
    }
    all.iter()
        .filter(|(pid, s)| found.contains(pid) && !own.contains(pid) && !matches!(s.state, 'Z' | 'X'))
        .map(|(pid, s)| Proc { pid: *pid, start: s.start })
        .collect()
}

/// The command line of a process, for messages.
pub fn describe(pid: u32) -> String {
    let raw = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&raw).replace('\0', " ").trim().chars().take(100).collect()
}

fn pids() -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect()
}

fn has_env(pid: u32, needle: &[u8]) -> bool {
    fs::read(format!("/proc/{pid}/environ")).is_ok_and(|env| env.split(|b| *b == 0).any(|var| var == needle))
}

fn uid(pid: u32) -> u32 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(format!("/proc/{pid}")).map_or(u32::MAX, |m| m.uid())
}

fn holds_below(pid: u32, dir: &Path) -> bool {
    let below = |path: &Path| fs::read_link(path).is_ok_and(|to| to.starts_with(dir));
    if below(Path::new(&format!("/proc/{pid}/cwd"))) {
        return true;
    }
    let Ok(fds) = fs::read_dir(format!("/proc/{pid}/fd")) else {
        return false;
    };
    fds.flatten().any(|fd| below(&fd.path()))
}
