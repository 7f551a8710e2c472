//! Processes below the supervisor, found in /proc: a rank may leave its group and session, not its ancestry (we are
//! the subreaper).

use rustix::process::{Pid, Signal, getpid, kill_process};
use std::collections::BTreeMap;

/// Children by parent.
fn tree() -> BTreeMap<i32, Vec<i32>> {
    let mut tree: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in entries.filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok()) {
        if let Some(parent) = parent_of(pid) {
            tree.entry(parent).or_default().push(pid);
        }
    }
    tree
}

/// The parent of a process that has not ended.
fn parent_of(pid: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything, so from its end on.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    (state != "Z" && state != "X").then_some(parent)
}

fn descendants() -> Vec<i32> {
    let tree = tree();
    let mut found = vec![];
    let mut open = vec![getpid().as_raw_nonzero().get()];
    while let Some(pid) = open.pop() {
        for child in tree.get(&pid).into_iter().flatten() {
            if !found.contains(child) {
                found.push(*child);
                open.push(*child);
            }
        }
    }
    found
}

fn kill(pid: i32) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// Kills every process below this one; whether there was any.
pub fn kill_descendants() -> bool {
    let found = descendants();
    found.iter().for_each(|pid| kill(*pid));
    !found.is_empty()
}

/// Kills every process below this one that was started for a generation, by its environment.
pub fn kill_generation(generation: u32) {
    let mark = format!("PLIANT_JOB_GENERATION={generation}");
    let marked = |pid: &i32| {
        let env = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        env.split(|b| *b == 0).any(|v| v == mark.as_bytes())
    };
    descendants().iter().filter(|pid| marked(pid)).for_each(|pid| kill(*pid));
}
