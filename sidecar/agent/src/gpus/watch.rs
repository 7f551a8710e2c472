//! Joins what NVML says with gres.conf and /proc, and tells the core.

use super::audit::{Audit, Facts};
use super::reader::{self, Seen};
use super::{identity, slurm_files};
use crate::shared::{Shared, clock_ms};
use pliant_model::NodeName;
use pliant_model::conf::index_list;
use pliant_model::gpu::{BusId, GpuEvent, GpuId, Happening, NodeGpus, Sample, xid_by_user};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;

/// Seconds between two reports of samples.
const REPORT: u64 = 10;

/// Where things are.
#[derive(Clone, Debug)]
pub struct Watch {
    /// NVML.
    pub library: PathBuf,
    /// slurm.conf; empty: Slurm's default.
    pub conf: PathBuf,
    /// This node.
    pub node: NodeName,
}

struct State {
    watch: Watch,
    boot_id: String,
    gpus: NodeGpus,
    audit: Audit,
    /// When each process was started and what was found of it then: but for its state, looked up once.
    processes: BTreeMap<u32, (u64, Facts)>,
    /// When samples were reported last, in seconds.
    reported: Option<u64>,
    /// Pids at the last report.
    pids: Vec<(String, u32)>,
}

/// Watches for ever.
pub async fn run(shared: Rc<Shared>, watch: Watch) {
    let mut seen = match reader::start(watch.library.clone()) {
        Ok(seen) => seen,
        Err(e) => {
            tracing::error!("no GPU telemetry: no thread for it: {e}");
            return;
        }
    };
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned();
    let mut state = State {
        watch,
        boot_id,
        gpus: NodeGpus::default(),
        audit: Audit::default(),
        processes: BTreeMap::new(),
        reported: None,
        pids: vec![],
    };
    while let Some(seen) = seen.recv().await {
        match seen {
            Seen::Inventory(gpus, happened) => state.inventory(&shared, *gpus, happened),
            Seen::Samples(samples) => state.samples(&shared, samples),
            Seen::Xid { bus, code } => state.xid(&shared, &bus, code),
        }
    }
}

impl State {
    fn inventory(&mut self, shared: &Rc<Shared>, mut gpus: NodeGpus, happened: Vec<(String, Happening)>) {
        gpus.boot_id.clone_from(&self.boot_id);
        let folder = slurm_files::folder(&self.watch.conf);
        let named = slurm_files::named(folder.as_deref(), &self.watch.node);
        identity::identify(&mut gpus, &named);
        if gpus != self.gpus {
            for problem in gpus.problems.iter().filter(|p| !self.gpus.problems.contains(p)) {
                tracing::warn!("{problem}");
            }
            self.gpus = gpus.clone();
            shared.with(|core, _| core.gpus(gpus));
        }
        for (uuid, what) in happened {
            self.happened(shared, &uuid, what);
        }
    }

    fn happened(&self, shared: &Rc<Shared>, uuid: &str, what: Happening) {
        let Some(gpu) = self.gpus.by_uuid(uuid) else { return };
        let id = GpuId { node: self.watch.node.clone(), bus: gpu.bus.clone(), uuid: gpu.uuid.clone() };
        tracing::warn!(gpu = %id, index = gpu.gres_index, "{what}");
        let event =
            GpuEvent { at_ms: clock_ms(), boot_id: self.boot_id.clone(), gpu: id, gres_index: gpu.gres_index, what };
        shared.with(|core, _| core.happened(event));
    }

    fn xid(&self, shared: &Rc<Shared>, bus: &BusId, code: u64) {
        let uuid = self.gpus.gpus.iter().find(|g| g.bus == *bus).map(|g| g.uuid.clone());
        if let Some(uuid) = uuid {
            self.happened(shared, &uuid, Happening::Xid { code, by_user: xid_by_user(code) });
        }
    }

    fn samples(&mut self, shared: &Rc<Shared>, mut samples: Vec<Sample>) {
        let pids: Vec<(String, u32)> =
            samples.iter().flat_map(|s| s.processes.iter().flatten().map(|p| (s.uuid.clone(), p.pid))).collect();
        let facts: BTreeMap<u32, Facts> =
            pids.iter().filter_map(|(_, pid)| Some((*pid, self.facts(shared, *pid)?))).collect();
        self.processes.retain(|pid, _| facts.contains_key(pid));
        let news = self.audit.look(&self.gpus, &mut samples, &|pid| facts.get(&pid).cloned());
        let now = shared.now().as_secs();
        if pids != self.pids || !news.is_empty() || self.reported.is_none_or(|at| now >= at + REPORT) {
            (self.pids, self.reported) = (pids, Some(now));
            shared.with(|core, _| core.samples(samples));
        }
        for (uuid, what) in news {
            self.happened(shared, &uuid, what);
        }
    }

    /// What /proc tells of a process; `None`: there is none.
    fn facts(&mut self, shared: &Shared, pid: u32) -> Option<Facts> {
        let of = &shared.processes;
        let (state, started) = of.stat(pid)?;
        if matches!(state, 'Z' | 'X') {
            return None;
        }
        if self.processes.get(&pid).is_none_or(|(at, _)| *at != started) {
            let uid = of.owner(pid)?;
            let job = of.job_of(pid, uid).ok().flatten().map(|(job, _)| job);
            let text = |name: &str| of.variable(pid, name).filter(|v| !v.is_empty());
            let gpus = text("SLURM_STEP_GPUS").or_else(|| text("SLURM_JOB_GPUS"));
            let gpus = gpus.and_then(|t| index_list::parse(&t).ok());
            let cpus = of.cpus(pid).unwrap_or_default();
            self.processes.insert(pid, (started, Facts { uid, job, state, cpus, gpus }));
        }
        self.processes.get(&pid).map(|(_, facts)| Facts { state, ..facts.clone() })
    }
}
