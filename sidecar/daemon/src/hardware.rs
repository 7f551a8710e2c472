//! What `pliant gpus` and `pliant topo` get to see: every GPU with its state, job and reason.

use crate::answers::{Asker, sees};
use crate::core::Core;
use crate::view;
use pliant_model::gpu::{Gpu, GpuEvent, Happening, Sample};
use pliant_model::{JobId, NodeName, gres};
use pliant_protocol::admin::{GpuState, GpuView, NodeHardware, Reply};
use pliant_protocol::bridge::NodeRecord;

/// The most events in one answer.
const EVENTS: usize = 100;

/// Answers `Request::Hardware`.
pub fn hardware(core: &Core, node: Option<&NodeName>) -> Reply {
    let named = |n: &&NodeRecord| node.is_none_or(|name| name.as_str() == n.name);
    let of = |n: &NodeRecord| {
        let node = NodeName(n.name.clone());
        NodeHardware { gpus: core.hardware.nodes.get(&node).cloned(), node, gres: n.gres.clone() }
    };
    let nodes: Vec<NodeHardware> = core
        .view
        .nodes
        .iter()
        .filter(named)
        .filter(|n| node.is_some() || n.gres.as_deref().map_or(0, gres::gpu_total) > 0)
        .map(of)
        .collect();
    match node {
        Some(_) if nodes.is_empty() => Reply::NotFound,
        _ => Reply::Hardware { nodes },
    }
}

/// Answers `Request::Gpus`.
pub fn gpus(core: &Core, asker: Asker) -> Reply {
    let mut all = vec![];
    for record in &core.view.nodes {
        let count = record.gres.as_deref().map_or(0, gres::gpu_total);
        let node = NodeName(record.name.clone());
        let known = core.hardware.nodes.get(&node);
        let mut rows: Vec<(Option<u32>, Option<&Gpu>)> =
            (0..count).map(|i| (Some(i), known.and_then(|n| n.by_gres(i)))).collect();
        // Cards that gres.conf does not name, where an agent sees some.
        let beyond = |g: &&Gpu| g.gres_index.is_none_or(|i| i >= count);
        rows.extend(known.iter().flat_map(|n| &n.gpus).filter(beyond).map(|g| (None, Some(g))));
        let row = |(index, gpu)| Row { core, asker, record, node: &node, index, gpu }.view();
        all.extend(rows.into_iter().map(row));
    }
    let events = core.hardware.events.iter().rev().filter_map(|e| shown(core, asker, e)).take(EVENTS).collect();
    Reply::Gpus { gpus: all, events }
}

/// An event as the asker may see it: those about processes of others are left out.
fn shown(core: &Core, asker: Asker, event: &GpuEvent) -> Option<GpuEvent> {
    let (uid, job) = match &event.what {
        Happening::Outside { uid, job, .. } => (*uid, *job),
        Happening::Stuck { job, .. } | Happening::Far { job, .. } => (None, *job),
        _ => return Some(event.clone()),
    };
    let own = uid == Some(asker.uid) || job.is_some_and(|j| owner(core, j) == Some(asker.uid));
    (asker.privileged || own).then(|| event.clone())
}

fn owner(core: &Core, job: JobId) -> Option<u32> {
    core.view.jobs.get(&job).map(|j| j.user_id)
}

struct Row<'a> {
    core: &'a Core,
    asker: Asker,
    record: &'a NodeRecord,
    node: &'a NodeName,
    index: Option<u32>,
    gpu: Option<&'a Gpu>,
}

impl Row<'_> {
    fn view(&self) -> GpuView {
        let holder = self.index.and_then(|i| self.core.holders.of(self.node, i));
        let visible = holder.filter(|j| owner(self.core, *j).is_some_and(|uid| sees(self.asker, uid)));
        let base = visible.and_then(|j| self.core.view.jobs.get(&j)).and_then(view::mark).map(|m| m.base);
        let (state, reason) = self.state(holder);
        GpuView {
            node: self.node.clone(),
            index: self.index,
            gpu: self.gpu.cloned(),
            state,
            job: visible,
            base,
            reason,
            sample: self.sample(),
        }
    }

    /// State and why; the first that holds.
    fn state(&self, holder: Option<JobId>) -> (GpuState, String) {
        if let Some(why) = self.gpu.and_then(|g| g.lost.as_ref()) {
            return (GpuState::Lost, why.clone());
        }
        let known = self.core.hardware.nodes.get(self.node);
        if self.index.is_some_and(|i| known.is_some_and(|n| n.missing.contains(&i))) {
            return (GpuState::Lost, "gres.conf names it, and NVML has no such device".into());
        }
        if let Some(job) = holder {
            let slice = self.core.view.jobs.get(&job).is_some_and(|j| view::mark(j).is_some());
            return match slice {
                true => (GpuState::Lent, "lent to an elastic job".into()),
                false => (GpuState::Used, "allocated by Slurm".into()),
            };
        }
        if self.core.view_at.is_none() {
            return (GpuState::Unknown, "Slurm has not answered yet".into());
        }
        let Some(_) = self.index else {
            return (GpuState::Unavailable, "gres.conf does not name this device: Slurm gives it to nobody".into());
        };
        let used = self.record.gres_used.as_deref().map_or(0, gres::gpu_total);
        if used > 0 && !self.core.holders.names(self.node) {
            let why = "Slurm does not say which GPUs of the node are used (no File= in gres.conf)";
            return (GpuState::Unknown, why.into());
        }
        if let Some(why) = self.gpu.and_then(|g| self.core.hardware.occupied(self.node, g)) {
            // Whose process it is, is not told to others.
            let others = "processes or memory that no running job owns are still on it";
            return (GpuState::Held, if self.asker.privileged { why } else { others.into() });
        }
        if self.record.flags.iter().any(|f| f == "COMPLETING") {
            return (GpuState::Held, "the node still completes a job".into());
        }
        if !view::takes_jobs(self.record) {
            let flags = self.record.flags.join("+");
            let why =
                if flags.is_empty() { self.record.state.clone() } else { format!("{}+{flags}", self.record.state) };
            return (GpuState::Unavailable, format!("the node is {why}"));
        }
        let fabric = self.gpu.and_then(|g| g.fabric.as_ref()).filter(|f| !f.ready);
        let why = match (self.gpu, fabric) {
            (None, _) if self.core.agents.contains_key(self.node) => "idle; the agent has no such device",
            (None, _) => "idle; no agent on the node",
            (_, Some(_)) => "idle; its NVLink fabric is not ready: single-GPU jobs only",
            (_, None) => "idle",
        };
        (GpuState::Idle, why.into())
    }

    fn sample(&self) -> Option<Sample> {
        let gpu = self.gpu.filter(|g| g.lost.is_none())?;
        let mut sample = self.core.hardware.samples.get(self.node)?.get(&gpu.uuid)?.clone();
        if let Some(processes) = &mut sample.processes {
            let asker = self.asker;
            processes.retain(|p| asker.privileged || p.uid == Some(asker.uid));
        }
        Some(sample)
    }
}
