//! What Slurm's commands print, read offline: `scontrol show job` and `show node`, squeue and sacct as JSON of any
//! data_parser version, one JSON object a line, or scontrol's text. For diagnosis (`pliant topo import`); pliantd itself
//! asks libslurm.
//!
//! Only `gres_detail` says which GPUs a job holds: on clusters that do not track the GPU TRES, `tres_alloc` names none.

mod json;
mod text;

use pliant_model::{GpuCount, NodeName};

/// What was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dump {
    /// Jobs.
    pub jobs: Vec<DumpJob>,
    /// Nodes.
    pub nodes: Vec<DumpNode>,
    /// Slurm's own errors: with these, an empty list is "not found", never "none".
    pub errors: Vec<String>,
    /// Jobs that could not be read, and why: of them nothing may be concluded.
    pub unread: Vec<String>,
    /// Lines that could not be read.
    pub skipped: usize,
}

/// A job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DumpJob {
    /// Its id; 0 where the text does not say.
    pub id: u32,
    /// State and flags.
    pub state: Vec<String>,
    /// GPUs that it holds, by node.
    pub held: Vec<Held>,
    /// GPUs that it asks for; `None`: none named.
    pub wants: Option<GpuCount>,
    /// Time limit in minutes; `None`: none, or not said.
    pub time_limit_min: Option<u64>,
    /// Why it waits: one reason, whatever signs are in it.
    pub reason: Option<String>,
}

/// What a job holds on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// The node.
    pub node: NodeName,
    /// GPUs.
    pub gpus: GpuCount,
    /// GPUs by type; `None`: no type is named.
    pub kinds: Vec<(Option<String>, GpuCount)>,
    /// GRES indexes, where Slurm says them.
    pub indexes: Vec<u32>,
    /// CPUs, where the text says them.
    pub cpus: Option<u32>,
    /// Memory in MiB, where the text says it.
    pub memory_mib: Option<u64>,
}

/// A node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DumpNode {
    /// Its name.
    pub name: NodeName,
    /// State and flags.
    pub state: Vec<String>,
    /// GPUs that Slurm knows.
    pub gpus: GpuCount,
    /// GPUs in use.
    pub used: GpuCount,
    /// Their GRES indexes, where Slurm says them.
    pub used_indexes: Vec<u32>,
    /// Memory in use, MiB.
    pub memory_used_mib: Option<u64>,
    /// Why it is drained or down.
    pub reason: Option<String>,
}

/// The GPUs of a GRES text by type; a type of which there are none is left out.
fn kinds(gres: &str) -> Vec<(Option<String>, GpuCount)> {
    pliant_model::gres::gpus(gres).into_iter().filter(|g| g.count > 0).map(|g| (g.kind, g.count)).collect()
}

impl Dump {
    /// Whether something was asked for that Slurm does not have.
    pub fn not_found(&self) -> bool {
        self.jobs.is_empty() && self.nodes.is_empty() && !self.errors.is_empty()
    }
}

impl DumpJob {
    /// GPUs that it holds.
    pub fn gpus(&self) -> GpuCount {
        self.held.iter().map(|h| h.gpus).fold(0, GpuCount::saturating_add)
    }

    /// What it holds on a host, which may ask by its short name.
    pub fn on(&self, host: &str) -> Option<&Held> {
        let short = |n: &str| n.split('.').next().unwrap_or_default().to_owned();
        let exact = self.held.iter().find(|h| h.node.as_str() == host);
        exact.or_else(|| self.held.iter().find(|h| short(h.node.as_str()) == short(host)))
    }
}

impl DumpNode {
    /// Whether Slurm starts jobs there.
    pub fn schedulable(&self) -> bool {
        const UP: [&str; 9] = [
            "IDLE",
            "MIXED",
            "ALLOCATED",
            "COMPLETING",
            "PLANNED",
            "CLOUD",
            "DYNAMIC_NORM",
            "DYNAMIC_FUTURE",
            "POWERED_UP",
        ];
        // What is not known to be good (DRAIN, DOWN, UNKNOWN, `IDLE*`: does not answer) is not.
        !self.state.is_empty() && self.state.iter().all(|s| UP.contains(&s.to_ascii_uppercase().as_str()))
    }

    /// GPUs that a job could get now: none while the node drains, and none while it completes a job, whose processes may
    /// still sit on them.
    pub fn usable(&self) -> GpuCount {
        let completing = self.state.iter().any(|s| s.eq_ignore_ascii_case("COMPLETING"));
        if self.schedulable() && !completing { self.gpus.saturating_sub(self.used) } else { 0 }
    }
}

/// Why a text is not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct DumpError {
    /// Line, from 1; 0: the text as a whole.
    pub line: usize,
    /// What is wrong, and what to do.
    pub reason: String,
}

impl DumpError {
    fn new(line: usize, reason: impl Into<String>) -> Self {
        DumpError { line, reason: reason.into() }
    }
}

/// Whether a text looks like one of these.
pub fn is_dump(text: &str) -> bool {
    text.trim_start().starts_with('{') || text::is_scontrol(text) || text::glued(text).is_some()
}

/// Reads it, whichever it is.
///
/// # Errors
/// With line and reason.
pub fn read(text: &str) -> Result<Dump, DumpError> {
    if let Some(line) = text::glued(text) {
        let advice =
            "columns of fixed width run into each other here: use --json, or a separator (squeue -O 'JobID:|,…')";
        return Err(DumpError::new(line, advice));
    }
    if text.trim_start().starts_with('{') {
        return json::read(text);
    }
    text::read(text)
}
