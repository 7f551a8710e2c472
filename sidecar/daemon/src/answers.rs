//! What `pliant` gets to see. Users see their own jobs; root and pliantd's own account see all. "Not yours" and
//! "not there" are one answer.

use crate::core::{Core, Now};
use crate::view;
use pliant_model::gpu::NodeGpus;
use pliant_model::{JobId, NodeName, gres};
use pliant_protocol::admin::{Explanation, Finding, JobView, Level, Reply, Request, Select, Status};
use pliant_protocol::board::Outcome;

/// Who asks.
#[derive(Clone, Copy, Debug)]
pub struct Asker {
    /// Uid of the peer.
    pub uid: u32,
    /// Root, or pliantd's own account.
    pub privileged: bool,
}

/// Facts of the process itself.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    /// When it started, Unix seconds.
    pub since: u64,
    /// Operator rights in Slurm; `None`: unknown.
    pub operator: Option<bool>,
}

/// The most events that one answer holds.
const HISTORY: u32 = 1000;
/// A clock that is further off makes MUNGE credentials fail sooner or later.
const MAX_SKEW_MS: u64 = 10_000;

/// Answers a request.
pub fn answer(core: &Core, asker: Asker, request: &Request, process: Process, now: Now) -> Reply {
    match request {
        Request::Status => Reply::Status(status(core, process, now)),
        Request::Jobs => {
            let may = core.jobs.keys().filter(|id| core.jobs.get(id).is_some_and(|j| sees(asker, j.uid)));
            Reply::Jobs { jobs: may.filter_map(|id| job_view(core, *id)).collect() }
        }
        Request::Explain { job } => explain(core, asker, *job),
        Request::Gpus => crate::hardware::gpus(core, asker),
        Request::Hardware { node } => crate::hardware::hardware(core, node.as_ref()),
        Request::Doctor => Reply::Doctor { findings: findings(core, asker, process, now) },
    }
}

/// Whether the asker may see what belongs to a user.
pub fn sees(asker: Asker, uid: u32) -> bool {
    asker.privileged || asker.uid == uid
}

fn status(core: &Core, process: Process, now: Now) -> Status {
    let gpus = |n: &pliant_protocol::bridge::NodeRecord| n.gres.as_deref().map_or(0, gres::gpu_total);
    let used = |n: &pliant_protocol::bridge::NodeRecord| n.gres_used.as_deref().map_or(0, gres::gpu_total);
    let up = |n: &&pliant_protocol::bridge::NodeRecord| matches!(n.state.as_str(), "IDLE" | "MIXED" | "ALLOCATED");
    let with_gpus = core.view.nodes.iter().filter(|n| gpus(n) > 0).count();
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    Status {
        software: pliant_protocol::SOFTWARE.to_owned(),
        since: process.since,
        slurm_as_of: core.view_at.map(|(_, wall)| wall),
        fresh: core.fresh(now),
        operator: process.operator,
        agents: count(core.agents.len()),
        nodes: count(with_gpus),
        gpus: core.view.nodes.iter().map(gpus).sum(),
        gpus_idle: core.view.nodes.iter().filter(up).map(|n| gpus(n).saturating_sub(used(n))).sum(),
        gpus_lent: core.jobs.values().flat_map(|j| &j.status.slices).map(|s| s.gpus).fold(0, u32::saturating_add),
        jobs: count(core.jobs.len()),
        pending: count(core.view.jobs.values().filter(|j| view::waits(j)).count()),
        resizes: count(core.resizes.len()),
        select: Select {
            following: core.steering.following,
            idle: core.steering.idle.clone(),
            honoured: core.steering.honoured,
            missed: core.steering.missed,
            gaps: core.steering.gaps,
            plans: core.plans(),
        },
    }
}

fn job_view(core: &Core, base: JobId) -> Option<JobView> {
    let job = core.jobs.get(&base)?;
    Some(JobView {
        user: core.names.get(&job.uid).cloned().unwrap_or_else(|| job.uid.to_string()),
        status: job.status.clone(),
        connected: job.connected,
        now: core.notes.get(&base).cloned(),
    })
}

fn explain(core: &Core, asker: Asker, asked: JobId) -> Reply {
    let record = core.view.jobs.get(&asked);
    // A slice is explained by its base.
    let base = record.and_then(view::mark).map_or(asked, |m| m.base);
    let owner = core.jobs.get(&base).map(|j| j.uid).or_else(|| core.view.jobs.get(&base).map(|r| r.user_id));
    // Somebody else's job is not looked up at all; where Slurm has forgotten whose it was, only the privileged are told.
    if !owner.map_or(asker.privileged, |uid| sees(asker, uid)) {
        return Reply::NotFound;
    }
    let history = match core.journal.history(base, HISTORY) {
        Ok(history) => history,
        Err(e) => {
            return Reply::Error { text: e.to_string() };
        }
    };
    let placement = core.steering.outcome(base).map(placed);
    if owner.is_none() && history.is_empty() {
        return Reply::NotFound;
    }
    let now = core.notes.get(&base).cloned().into_iter().collect();
    Reply::Explain(Box::new(Explanation { job: base, view: job_view(core, base), now, placement, history }))
}

/// An outcome as a sentence.
fn placed(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Honoured => "placed as planned".into(),
        Outcome::Not(why) => format!("placed by Slurm, not as planned: {why}"),
        Outcome::Waits(why) => format!("waits for its planned place: {why}"),
    }
}

/// The line of slurm.conf that loads the select plugin.
const PLUGIN_DIR: &str = "put Pliant's directory first in PluginDir of slurm.conf: docs/admin/select.md";

fn select_finding(core: &Core) -> Finding {
    let s = &core.steering;
    let finding = |level, found: String, remedy: &str| Finding {
        check: "select plugin".into(),
        host: None,
        level,
        found,
        remedy: remedy.into(),
    };
    match (&s.idle, s.following) {
        (Some(why), _) => finding(
            Level::Fail,
            format!("only hands calls on: {why}"),
            "install the build for exactly this release of Slurm; jobs run as without it",
        ),
        (None, true) => {
            let told = format!("followed: {} jobs placed as planned, {} otherwise", s.honoured, s.missed);
            finding(Level::Ok, told, "")
        }
        (None, false) => finding(
            Level::Warn,
            "not heard of: Slurm chooses nodes and GPUs by itself, and is polled".into(),
            PLUGIN_DIR,
        ),
    }
}

fn findings(core: &Core, asker: Asker, process: Process, now: Now) -> Vec<Finding> {
    let finding = |check: &str, level, found: String, remedy: &str| Finding {
        check: check.to_owned(),
        host: None,
        level,
        found,
        remedy: remedy.to_owned(),
    };
    let mut all = vec![];
    all.push(match core.view_at {
        Some((at, _)) if core.fresh(now) => {
            finding("slurmctld", Level::Ok, format!("answered {} s ago", now.mono.saturating_sub(at)), "")
        }
        Some((at, _)) => finding(
            "slurmctld",
            Level::Fail,
            format!("last answered {} s ago", now.mono.saturating_sub(at)),
            "see pliantd's log, and `scontrol ping`; nothing is changed meanwhile",
        ),
        None => finding(
            "slurmctld",
            Level::Fail,
            "has not answered yet".into(),
            "see pliantd's log: does daemon.bridge in pliant.toml fit the installed Slurm?",
        ),
    });
    all.push(match process.operator {
        Some(true) => finding("operator rights", Level::Ok, "pliantd may cancel slices".into(), ""),
        Some(false) => finding(
            "operator rights",
            Level::Warn,
            "pliantd may not cancel slices itself; the agents do it as root".into(),
            "sacctmgr modify user pliant set adminlevel=operator",
        ),
        None => finding(
            "operator rights",
            Level::Warn,
            "no slurmdbd: pliantd can only ask, the agents cancel as root".into(),
            "set up slurmdbd to give the account operator rights",
        ),
    });
    all.push(if core.durable {
        finding("journal", Level::Ok, "takes writes".into(), "")
    } else {
        finding("journal", Level::Fail, "does not take writes: no new resizes".into(), "free space on daemon.state_dir")
    });
    all.push(select_finding(core));
    let nodes: Vec<NodeName> = core
        .view
        .nodes
        .iter()
        .filter(|n| n.gres.as_deref().map_or(0, gres::gpu_total) > 0)
        .map(|n| NodeName(n.name.clone()))
        .collect();
    let missing: Vec<&NodeName> = nodes.iter().filter(|n| !core.agents.contains_key(n)).collect();
    all.push(if missing.is_empty() {
        finding("agents", Level::Ok, format!("{} of {} GPU nodes connected", nodes.len(), nodes.len()), "")
    } else {
        finding(
            "agents",
            Level::Fail,
            format!("none on {}", pliant_model::hostlist::compress(missing)),
            "start pliant-agent there; no slices go to a node without one",
        )
    });
    if asker.privileged {
        all.extend(core.agents.iter().flat_map(|(node, agent)| agent_findings(node, agent)));
        all.extend(core.hardware.nodes.iter().flat_map(|(node, gpus)| gpu_findings(node, gpus)));
    }
    all
}

fn agent_findings(node: &NodeName, agent: &crate::core::Agent) -> Vec<Finding> {
    let finding = |check: &str, level, found: String, remedy: &str| Finding {
        check: check.to_owned(),
        host: Some(node.clone()),
        level,
        found,
        remedy: remedy.to_owned(),
    };
    let mut all = vec![];
    if agent.software != pliant_protocol::SOFTWARE {
        let found = format!("agent {}, pliantd {}", agent.software, pliant_protocol::SOFTWARE);
        all.push(finding("version", Level::Warn, found, "install the same version"));
    }
    if agent.skew_ms.unsigned_abs() > MAX_SKEW_MS {
        let found = format!("{} ms from pliantd's", agent.skew_ms);
        all.push(finding("clock", Level::Fail, found, "MUNGE needs clocks that agree: see chrony or ntp there"));
    }
    for (name, value) in &agent.facts {
        let devices = name == "device_cgroups" && value == "no";
        let remedy = if devices { "without ConstrainDevices=yes a job can open the GPUs of others" } else { "" };
        all.push(finding(name, if devices { Level::Warn } else { Level::Ok }, value.clone(), remedy));
    }
    all
}

fn gpu_findings(node: &NodeName, gpus: &NodeGpus) -> Vec<Finding> {
    let finding = |level, found: String, remedy: &str| Finding {
        check: "GPUs".into(),
        host: Some(node.clone()),
        level,
        found,
        remedy: remedy.into(),
    };
    let lost = gpus.gpus.iter().filter_map(|g| Some((g, g.lost.as_ref()?)));
    let mut all: Vec<Finding> = lost
        .map(|(g, why)| {
            let index = g.gres_index.map_or_else(|| "-".to_owned(), |i| i.to_string());
            let found = format!("GPU {index} ({}, {}) is lost: {why}", g.uuid, g.bus);
            finding(Level::Fail, found, "drain the node: Slurm may hand this GPU out; slices keep off the node")
        })
        .collect();
    let problems = gpus.problems.iter().map(|p| finding(Level::Warn, p.clone(), "see `pliant topo check`"));
    all.extend(problems);
    all.extend(gpus.absent.iter().map(|why| finding(Level::Warn, format!("no telemetry: {why}"), "")));
    all
}
