//! What the agents tell about their GPUs, joined with what Slurm says of them.

use super::{Core, Now};
use crate::view::{self, SlurmView};
use pliant_model::gpu::{Gpu, GpuEvent, GpuId, Happening, NodeGpus, Process, Sample};
use pliant_model::{GpuCount, JobId, NodeName, Reason, gres};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Events kept for `pliant gpus`; the log has all.
const EVENTS: usize = 1000;

/// The GPUs of the nodes whose agents are connected.
#[derive(Debug, Default)]
pub struct Hardware {
    /// As last told.
    pub nodes: BTreeMap<NodeName, NodeGpus>,
    /// The last samples by UUID.
    pub samples: BTreeMap<NodeName, BTreeMap<String, Sample>>,
    /// Oldest first.
    pub events: VecDeque<GpuEvent>,
}

impl Hardware {
    /// Lost GPUs that Slurm knows, by node and GRES index.
    pub fn lost(&self) -> BTreeMap<NodeName, BTreeMap<u32, GpuId>> {
        let of = |name: &NodeName, n: &NodeGpus| -> BTreeMap<u32, GpuId> {
            let id = |g: &Gpu| GpuId { node: name.clone(), bus: g.bus.clone(), uuid: g.uuid.clone() };
            n.gpus.iter().filter(|g| g.lost.is_some()).filter_map(|g| Some((g.gres_index?, id(g)))).collect()
        };
        self.nodes.iter().map(|(name, n)| (name.clone(), of(name, n))).filter(|(_, lost)| !lost.is_empty()).collect()
    }

    /// Nodes where gres.conf names a GPU that is not there: Slurm could hand out just that one.
    pub fn missing(&self) -> BTreeSet<NodeName> {
        self.nodes.iter().filter(|(_, n)| !n.missing.is_empty()).map(|(name, _)| name.clone()).collect()
    }

    /// How many GPUs of each node Slurm shows as free while something still sits on them.
    pub fn held(&self, holders: &Holders) -> BTreeMap<NodeName, GpuCount> {
        let count = |(name, n): (&NodeName, &NodeGpus)| {
            let held = n.gpus.iter().filter(|g| {
                g.gres_index.is_some_and(|i| holders.of(name, i).is_none()) && self.occupied(name, g).is_some()
            });
            (name.clone(), GpuCount::try_from(held.count()).unwrap_or(0))
        };
        self.nodes.iter().map(count).filter(|(_, n)| *n > 0).collect()
    }

    /// What still sits on a GPU whatever Slurm says, one sentence: processes, or memory that nobody owns.
    pub fn occupied(&self, node: &NodeName, gpu: &Gpu) -> Option<String> {
        let sample = self.samples.get(node)?.get(&gpu.uuid)?;
        let processes = sample.processes.as_deref().unwrap_or_default();
        // Services of root (persistence daemon, MPS, DCGM) belong to no job and hold nobody up.
        let counts = |p: &&Process| p.state.is_some() && (p.job.is_some() || p.uid != Some(0));
        if let Some(p) = processes.iter().find(counts) {
            let state = if p.state == Some('D') { " in state D" } else { "" };
            let job = p.job.map(|j| format!(" of job {j}")).unwrap_or_default();
            return Some(format!("process {}{job}{state} is still on it", p.pid));
        }
        let orphaned = |e: &GpuEvent| matches!(e.what, Happening::Orphaned { .. }) && e.gpu.uuid == gpu.uuid;
        let memory = sample.memory_used_mib.filter(|m| *m > ORPHANED_MIB && sample.processes.is_some())?;
        self.events.iter().any(orphaned).then(|| format!("{memory} MiB are held and no process owns them"))
    }
}

/// Memory that a driver keeps for itself is below this, MiB.
const ORPHANED_MIB: u64 = 512;

/// Which job has which GPU, by GRES index, as Slurm says.
#[derive(Debug, Default)]
pub struct Holders(BTreeMap<NodeName, BTreeMap<u32, JobId>>);

impl Holders {
    /// From Slurm's answer: every job that holds resources.
    pub fn of_view(view: &SlurmView) -> Holders {
        Holders::of_jobs(view, |_| true)
    }

    /// Of the jobs that have not given anything back: what a job that ends has given back, Slurm may give away before it
    /// shows that job as ended.
    pub fn not_ending(view: &SlurmView) -> Holders {
        let ends = |id: &JobId| view.jobs.get(id).is_some_and(|j| j.flags.iter().any(|f| f == "COMPLETING"));
        Holders::of_jobs(view, |id| !ends(id))
    }

    fn of_jobs(view: &SlurmView, keep: impl Fn(&JobId) -> bool) -> Holders {
        let mut all: BTreeMap<NodeName, BTreeMap<u32, JobId>> = BTreeMap::new();
        for (id, node, detail) in view::gres_held(view).filter(|(id, ..)| keep(id)) {
            all.entry(node).or_default().extend(gres::gpu_indexes(detail).into_iter().map(|i| (i, id)));
        }
        Holders(all)
    }

    /// The job that has a GPU.
    pub fn of(&self, node: &NodeName, index: u32) -> Option<JobId> {
        self.0.get(node)?.get(&index).copied()
    }

    /// Whether Slurm names any index there: without `File=` in gres.conf it does not.
    pub fn names(&self, node: &NodeName) -> bool {
        self.0.get(node).is_some_and(|m| !m.is_empty())
    }
}

impl Core {
    /// An agent tells of its GPUs.
    pub fn on_gpus(&mut self, node: NodeName, gpus: NodeGpus) {
        self.due = true;
        self.unplanned = true;
        self.placer.forget();
        self.hardware.nodes.insert(node, gpus);
    }

    /// An agent tells what its GPUs do.
    pub fn on_samples(&mut self, node: NodeName, samples: Vec<Sample>) {
        let map: BTreeMap<String, Sample> = samples.into_iter().map(|s| (s.uuid.clone(), s)).collect();
        self.hardware.samples.insert(node, map);
    }

    /// Something happened to a GPU.
    pub fn on_happened(&mut self, node: &NodeName, event: GpuEvent, now: Now) {
        if event.gpu.node != *node {
            tracing::warn!(%node, "an event about a GPU of {} ignored", event.gpu.node);
            return;
        }
        let index = event.gres_index.map_or_else(|| "-".to_owned(), |i| i.to_string());
        tracing::warn!(%node, gpu = %event.gpu.uuid, index, "{}", event.what);
        let holder = event.gres_index.and_then(|i| self.holders.of(node, i));
        if let (Happening::Lost { .. }, Some(job)) = (&event.what, holder) {
            let base = self.view.jobs.get(&job).and_then(view::mark).map_or(job, |m| m.base);
            let gpu = event.gpu.clone();
            let reason = Reason::GpuLost { gpu, index: event.gres_index, slice: (base != job).then_some(job) };
            if self.jobs.contains_key(&base) {
                let noted = self.journal.note(base, now.wall_ms, &reason);
                self.durable_after(noted);
            }
        }
        self.due = true;
        self.hardware.events.push_back(event);
        while self.hardware.events.len() > EVENTS {
            self.hardware.events.pop_front();
        }
    }
}
