//! Text of `scontrol show node` and `scontrol show job -d`.

use super::{Dump, DumpError, DumpJob, DumpNode, Held, kinds};
use pliant_model::conf::index_list;
use pliant_model::{NodeName, gres, hostlist};

/// Whether it is scontrol's.
pub fn is_scontrol(text: &str) -> bool {
    let begins = |l: &str| ["JobId=", "NodeName=", "JOB_GRES="].iter().any(|k| l.trim_start().starts_with(k));
    text.lines().any(|l| begins(l) && !l.contains("File=") && !l.trim_start().starts_with("NodeName=DEFAULT"))
        && text.contains('=')
        && (text.contains("GRES=") || text.contains("State=") || text.contains("JobState="))
}

/// The line of a table of fixed columns in which two values run into each other.
pub fn glued(text: &str) -> Option<usize> {
    let mut lines = text.lines().enumerate();
    let (_, head) = lines.find(|(_, l)| !l.trim().is_empty())?;
    let title = |w: &str| w.len() > 1 && w.bytes().all(|b| b.is_ascii_uppercase() || b == b'_');
    let columns: Vec<usize> = starts(head);
    if columns.len() < 3 || !head.split_whitespace().all(title) {
        return None;
    }
    // A value that reaches to the beginning of the next column has been cut there.
    let full = |l: &str| {
        columns.iter().skip(1).any(|c| {
            let before = c.checked_sub(1).and_then(|b| l.as_bytes().get(b)).is_some_and(|b| *b != b' ');
            before && l.as_bytes().get(*c).is_some_and(|b| *b != b' ')
        })
    };
    lines.find(|(_, l)| full(l)).map(|(i, _)| i + 1)
}

/// Where words begin.
fn starts(line: &str) -> Vec<usize> {
    let mut at = vec![];
    let mut blank = true;
    for (i, b) in line.bytes().enumerate() {
        if b != b' ' && blank {
            at.push(i);
        }
        blank = b == b' ';
    }
    at
}

fn value<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    line.split_whitespace().find_map(|w| w.strip_prefix(key)?.strip_prefix('='))
}

/// Reads it.
pub fn read(text: &str) -> Result<Dump, DumpError> {
    if !is_scontrol(text) {
        let expected = "neither JSON nor text of `scontrol show job -d` or `scontrol show node`";
        return Err(DumpError::new(0, expected));
    }
    let mut dump = Dump::default();
    let mut in_node = false;
    for line in text.lines() {
        let start = line.trim_start();
        if start.starts_with("JobId=") || start.starts_with("JOB_GRES=") && dump.jobs.is_empty() {
            dump.jobs.push(DumpJob::default());
            in_node = false;
        } else if start.starts_with("NodeName=") {
            dump.nodes.push(DumpNode::default());
            in_node = true;
        }
        match (dump.jobs.last_mut(), dump.nodes.last_mut()) {
            (_, Some(node)) if in_node => of_node(line, node),
            (Some(job), _) => of_job(line, job, &mut dump.unread),
            _ => {}
        }
    }
    Ok(dump)
}

fn of_job(line: &str, job: &mut DumpJob, unread: &mut Vec<String>) {
    if let Some(id) = value(line, "JobId").and_then(|t| t.parse().ok()) {
        job.id = id;
    }
    if let Some(state) = value(line, "JobState") {
        job.state = vec![state.to_owned()];
    }
    // A part for each node or hostlist: on lines of their own, or (`-o`) all on one.
    let words: Vec<&str> = line.split_whitespace().collect();
    let begins: Vec<usize> =
        words.iter().enumerate().filter(|(_, w)| w.starts_with("Nodes=")).map(|(i, _)| i).collect();
    for (n, begin) in begins.iter().enumerate() {
        let end = begins.get(n + 1).copied().unwrap_or(words.len());
        part(&words.get(*begin..end).unwrap_or_default().join(" "), job, unread);
    }
}

fn part(text: &str, job: &mut DumpJob, unread: &mut Vec<String>) {
    let (Some(nodes), Some(gres)) = (value(text, "Nodes"), value(text, "GRES")) else { return };
    let count = |t: &str| index_list::parse(t).ok().and_then(|all| u32::try_from(all.len()).ok());
    let names = match hostlist::expand(nodes) {
        Ok(names) => names,
        Err(e) => return unread.push(format!("job {}: Nodes={nodes}: {e}", job.id)),
    };
    for node in names {
        job.held.push(Held {
            node,
            gpus: gres::gpu_total(gres),
            kinds: kinds(gres),
            indexes: gres::gpu_indexes(gres),
            cpus: value(text, "CPU_IDs").and_then(count),
            memory_mib: value(text, "Mem").and_then(gres::size_mib),
        });
    }
}

fn of_node(line: &str, node: &mut DumpNode) {
    if let Some(name) = value(line, "NodeName") {
        node.name = NodeName(name.to_owned());
    }
    if let Some(gres) = value(line, "Gres") {
        node.gpus = gres::gpu_total(gres);
    }
    if let Some(used) = value(line, "GresUsed") {
        (node.used, node.used_indexes) = (gres::gpu_total(used), gres::gpu_indexes(used));
    }
    if let Some(state) = value(line, "State") {
        node.state = state.split('+').map(str::to_owned).collect();
    }
    if let Some(memory) = value(line, "AllocMem") {
        node.memory_used_mib = gres::size_mib(memory);
    }
    if let Some(reason) = line.trim_start().strip_prefix("Reason=") {
        node.reason = Some(reason.to_owned());
    }
}
