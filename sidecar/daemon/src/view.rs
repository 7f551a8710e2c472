//! From what Slurm and the launchers say to the [`Cluster`] that the decisions look at. No I/O, no clock.

use crate::resizes::Resizes;
use pliant_model::cluster::GpuDemand;
use pliant_model::gpu::GpuId;
use pliant_model::resize::Kind;
use pliant_model::{
    Cluster, Demand, GpuCount, Group, JobId, Node, NodeName, PendingJob, Seconds, Slice, gres, hostlist,
};
use pliant_protocol::bridge::{JobRecord, NodeRecord, PartitionRecord};
use pliant_protocol::job::{JobStatus, Order, SliceMark};
use std::collections::{BTreeMap, BTreeSet};

/// Slurm's answers of one look.
#[derive(Clone, Debug, Default)]
pub struct SlurmView {
    /// All jobs.
    pub jobs: BTreeMap<JobId, JobRecord>,
    /// All nodes.
    pub nodes: Vec<NodeRecord>,
    /// Partitions that start jobs, by node: a node's own record does not tell in every release.
    pub partitions: BTreeMap<NodeName, Vec<String>>,
    /// PriorityTier by partition.
    pub tiers: BTreeMap<String, u16>,
}

/// The partitions in state UP, by node. One that cannot be read is left out: nothing is lent there.
pub fn by_node(partitions: &[PartitionRecord]) -> BTreeMap<NodeName, Vec<String>> {
    let mut all: BTreeMap<NodeName, Vec<String>> = BTreeMap::new();
    for p in partitions.iter().filter(|p| p.state == "UP") {
        for node in p.nodes.as_deref().and_then(|n| hostlist::expand(n).ok()).unwrap_or_default() {
            all.entry(node).or_default().push(p.name.clone());
        }
    }
    all
}

impl SlurmView {
    /// A job that holds, or may still hold, resources.
    pub fn active(&self, job: JobId) -> Option<&JobRecord> {
        self.jobs.get(&job).filter(|j| holds(j))
    }

    /// The slices that have not ended, with their marks.
    pub fn slices(&self) -> impl Iterator<Item = (JobId, SliceMark, &JobRecord)> {
        self.jobs
            .iter()
            .filter(|(_, j)| holds(j) || j.state == "PENDING")
            .filter_map(|(id, j)| Some((*id, mark(j)?, j)))
    }
}

/// Whether a job holds resources: running, suspended, or completing.
pub fn holds(job: &JobRecord) -> bool {
    matches!(job.state.as_str(), "RUNNING" | "SUSPENDED") || job.flags.iter().any(|f| f == "COMPLETING")
}

/// The mark of a slice. Only a job that also bears the name of one counts: the comment is the user's.
pub fn mark(job: &JobRecord) -> Option<SliceMark> {
    let mark = SliceMark::parse(job.comment.as_deref()?)?;
    (job.name.as_deref() == Some(&pliant_protocol::job::slice_name(mark.base))).then_some(mark)
}

/// A registered job.
#[derive(Clone, Copy, Debug)]
pub struct Registered<'a> {
    /// As its launcher told it.
    pub status: &'a JobStatus,
    /// No growth before that time.
    pub retry_at: Option<Seconds>,
    /// Whether the resize that its launcher says is under way counts: not for ever.
    pub busy: bool,
    /// Nodes to leave out, until when.
    pub avoid: &'a BTreeMap<NodeName, Seconds>,
}

/// What the daemon knows besides Slurm's answer.
#[derive(Debug)]
pub struct Known<'a> {
    /// The registered jobs whose owner Slurm confirms.
    pub jobs: Vec<Registered<'a>>,
    /// Resizes under way.
    pub resizes: &'a Resizes,
    /// GPUs that running jobs hold, by node ([`used_by_jobs`]).
    pub used: &'a BTreeMap<NodeName, GpuCount>,
    /// Nodes with a connected agent.
    pub agents: &'a BTreeSet<NodeName>,
    /// Lost GPUs by node and GRES index.
    pub lost: &'a BTreeMap<NodeName, BTreeMap<u32, GpuId>>,
    /// Nodes where gres.conf names a GPU that is not there.
    pub missing: &'a BTreeSet<NodeName>,
    /// GPUs by node that Slurm shows free while something still sits on them.
    pub held: &'a BTreeMap<NodeName, GpuCount>,
    /// Pending jobs that could start, by our reckoning, and since when.
    pub fitting: &'a BTreeMap<JobId, Seconds>,
    /// How often slices were taken back for a pending job, and when last.
    pub served: &'a BTreeMap<JobId, (u32, Seconds)>,
    /// The time of the decision.
    pub now: Seconds,
    /// Added to Unix seconds to get the monotonic seconds that decisions count in.
    pub wall_to_mono: i64,
}

/// Builds the cluster of one decision. `as_of` is in monotonic seconds.
pub fn cluster(view: &SlurmView, known: &Known<'_>, as_of: Seconds) -> Cluster {
    let mut nodes: Vec<Node> = view.nodes.iter().map(|n| node(n, view, known.agents)).collect();
    for n in &mut nodes {
        // The nodes were asked for first: a job that has started since is in the jobs only.
        n.gpus_free = n.gpus_free.min(n.gpus.saturating_sub(known.used.get(&n.name).copied().unwrap_or(0)));
        n.gpus_free = n.gpus_free.saturating_sub(known.held.get(&n.name).copied().unwrap_or(0));
        // Slurm does not know of the loss, and could hand out just that GPU.
        n.lendable &= !known.lost.contains_key(&n.name) && !known.missing.contains(&n.name);
    }
    book_unseen(&mut nodes, view, known);
    let mut pending: Vec<PendingJob> = view.jobs.values().filter_map(|j| pending(j, view, known)).collect();
    pending.sort_by_key(|p| (std::cmp::Reverse((p.tier, p.priority)), p.job));
    let groups = known.jobs.iter().map(|j| group(j, view, known)).collect();
    Cluster { as_of, nodes, pending, groups }
}

/// Whether Slurm starts jobs on a node: up, and nothing about it says otherwise.
pub fn takes_jobs(n: &NodeRecord) -> bool {
    let bad = |f: &String| {
        matches!(
            f.as_str(),
            "DRAIN"
                | "DOWN"
                | "FAIL"
                | "NOT_RESPONDING"
                | "NO_RESPOND"
                | "MAINT"
                | "MAINTENANCE"
                | "REBOOT"
                | "REBOOT_REQUESTED"
                | "REBOOT_ISSUED"
                | "POWERED_DOWN"
                | "POWER_DOWN"
                | "POWERING_DOWN"
                | "POWERING_UP"
                | "RESERVED"
                | "INVALID_REG"
                | "POWER_DRAIN"
                | "UNDRAIN"
        )
    };
    matches!(n.state.as_str(), "IDLE" | "MIXED" | "ALLOCATED") && !n.flags.iter().any(bad)
}

fn node(n: &NodeRecord, view: &SlurmView, agents: &BTreeSet<NodeName>) -> Node {
    let name = NodeName(n.name.clone());
    let gpus = n.gres.as_deref().map_or(0, gres::gpu_total);
    let used = n.gres_used.as_deref().map_or(0, gres::gpu_total);
    let kinds: BTreeSet<String> =
        n.gres.as_deref().map(gres::gpus).unwrap_or_default().into_iter().filter_map(|g| g.kind).collect();
    let cpus_free = n.cpus_alloc.map_or(0, |used| n.cpus.saturating_sub(used));
    let words = |text: &Option<String>| {
        text.as_deref().unwrap_or("").split(',').filter(|w| !w.is_empty()).map(str::to_owned).collect()
    };
    Node {
        gpus,
        gpus_free: gpus.saturating_sub(used),
        cpus_free,
        cpus: n.cpus,
        usable: takes_jobs(n),
        lendable: agents.contains(&name),
        empty: n.state == "IDLE" && used == 0,
        partitions: view.partitions.get(&name).cloned().unwrap_or_default(),
        features: words(&n.features),
        kind: (kinds.len() == 1).then(|| kinds.into_iter().next()).flatten(),
        name,
    }
}

/// Takes off what is spoken for and Slurm's answer does not show yet: slices granted since, and those asked for.
fn book_unseen(nodes: &mut [Node], view: &SlurmView, known: &Known<'_>) {
    let mut book = |name: &NodeName, gpus: GpuCount, cpus: u32| {
        if let Some(n) = nodes.iter_mut().find(|n| n.name == *name) {
            n.gpus_free = n.gpus_free.saturating_sub(gpus);
            n.cpus_free = n.cpus_free.saturating_sub(cpus);
            n.empty = false;
        }
    };
    for Registered { status, .. } in &known.jobs {
        for s in status.slices.iter().filter(|s| view.active(s.job).is_none()) {
            book(&s.node, s.gpus, s.cpus);
        }
        let Some(Order::Grow { slices, .. }) = known.resizes.of(status.base).and_then(|r| r.order.as_ref()) else {
            continue;
        };
        let granted = |spec: &NodeName| {
            let of_order = known.resizes.of(status.base).map(|r| r.slices.as_slice()).unwrap_or_default();
            status.slices.iter().any(|s| s.node == *spec && of_order.contains(&s.job))
        };
        for spec in slices.iter().filter(|s| !granted(&s.node)) {
            book(&spec.node, spec.gpus, spec.gpus.saturating_mul(status.cpus_per_gpu));
        }
    }
}

fn group(job: &Registered<'_>, view: &SlurmView, known: &Known<'_>) -> Group {
    let status = job.status;
    let resize = known.resizes.of(status.base);
    let leaving = |job: JobId| resize.is_some_and(|r| r.kind == Kind::Shrink && r.slices.contains(&job));
    let mut slices: Vec<Slice> = status
        .slices
        .iter()
        .map(|s| Slice {
            job: s.job,
            node: s.node.clone(),
            gpus: s.gpus,
            cpus: s.cpus,
            leaving: s.leaving || leaving(s.job),
            rank_zero: status.world.first().is_some_and(|m| m.slice == Some(s.job)),
            lost: lost_of(s.job, &s.node, view, known),
        })
        .collect();
    // Released, and Slurm still shows it: its GPUs are on their way and not free yet.
    for job in resize.filter(|r| r.kind == Kind::Shrink).map(|r| r.slices.as_slice()).unwrap_or_default() {
        let known_here = slices.iter().any(|s| s.job == *job);
        if let (false, Some(record)) = (known_here, view.active(*job)) {
            slices.extend(slice_of(*job, record));
        }
    }
    let mono = |t: Seconds| {
        i64::try_from(t).ok().and_then(|t| t.checked_add(known.wall_to_mono)).map(|t| t.max(0).unsigned_abs())
    };
    Group {
        base: status.base,
        range: status.range,
        base_gpus: status.base_gpus,
        base_nodes: status.base_nodes.clone(),
        cpus_per_gpu: status.cpus_per_gpu,
        partition: status.partition.clone(),
        kind: status.kind.clone(),
        feature: status.feature.clone(),
        locality: status.locality,
        slices,
        ready: status.ready,
        in_flight: resize
            .map(|r| r.id.clone())
            .or_else(|| status.order.as_ref().filter(|_| job.busy).map(|o| o.id.clone())),
        retry_at: job.retry_at,
        avoid: job.avoid.iter().filter(|(_, until)| **until > known.now).map(|(n, _)| n.clone()).collect(),
        ends_at: status.ends_at.and_then(mono),
    }
}

/// A lost GPU that a slice holds, as Slurm says by its indexes.
fn lost_of(job: JobId, node: &NodeName, view: &SlurmView, known: &Known<'_>) -> Option<(GpuId, u32)> {
    let lost = known.lost.get(node)?;
    let indexes = gres::gpu_indexes(view.active(job)?.gres_detail.first()?);
    indexes.into_iter().find_map(|i| Some((lost.get(&i)?.clone(), i)))
}

fn slice_of(job: JobId, record: &JobRecord) -> Option<Slice> {
    let node = hostlist::expand(record.nodes.as_deref()?).ok()?.into_iter().next()?;
    let gpus = record.tres_alloc.as_deref().and_then(gres::tres_gpus);
    let detail: GpuCount = record.gres_detail.iter().map(|g| gres::gpu_total(g)).sum();
    Some(Slice {
        job,
        node,
        gpus: gpus.unwrap_or(detail),
        cpus: record.num_cpus.unwrap_or(0),
        leaving: true,
        rank_zero: false,
        lost: None,
    })
}

/// GPUs that running jobs hold, by node.
pub fn used_by_jobs(view: &SlurmView) -> BTreeMap<NodeName, GpuCount> {
    let mut used: BTreeMap<NodeName, GpuCount> = BTreeMap::new();
    for (_, node, detail) in gres_held(view) {
        let sum = used.entry(node).or_default();
        *sum = sum.saturating_add(gres::gpu_total(detail));
    }
    used
}

/// The GRES detail of every job that holds resources, node by node.
pub fn gres_held(view: &SlurmView) -> impl Iterator<Item = (JobId, NodeName, &str)> {
    view.jobs.iter().filter(|(_, j)| holds(j) && !j.gres_detail.is_empty()).flat_map(|(id, job)| {
        let nodes = job.nodes.as_deref().and_then(|n| hostlist::expand(n).ok()).unwrap_or_default();
        nodes.into_iter().zip(&job.gres_detail).map(|(node, detail)| (*id, node, detail.as_str()))
    })
}

/// Whether a job asks for GPUs.
pub fn wants_gpus(job: &JobRecord) -> bool {
    demand(job).total_gpus() > 0
}

/// Whether a job waits for resources and is no slice; all others take nothing.
pub fn waits(job: &JobRecord) -> bool {
    let waits = matches!(job.reason.as_deref(), Some("Resources" | "Priority"));
    let held = job.priority == Some(0);
    job.state == "PENDING" && waits && !held && job.het_job_id.is_none() && mark(job).is_none()
}

fn pending(job: &JobRecord, view: &SlurmView, known: &Known<'_>) -> Option<PendingJob> {
    if !waits(job) {
        return None;
    }
    let id = JobId(job.job_id);
    let partitions: Vec<String> = job.partition.as_deref()?.split(',').map(str::to_owned).collect();
    let tier = partitions.iter().filter_map(|p| view.tiers.get(p)).copied().max().unwrap_or(0);
    Some(PendingJob {
        job: id,
        partitions,
        tier,
        priority: job.priority.unwrap_or(0),
        demand: demand(job),
        fits_since: known.fitting.get(&id).copied(),
        served: known.served.get(&id).map_or(0, |(times, _)| *times),
    })
}

/// What a job asks for.
pub fn demand(job: &JobRecord) -> Demand {
    let count = |text: &Option<String>| text.as_deref().and_then(gres::tres_gpus);
    let nodes_min = job.num_nodes.unwrap_or(1).max(1);
    let per_task = count(&job.tres_per_task).map(|n| n.saturating_mul(job.num_tasks.unwrap_or(1).max(1)));
    let gpus = match (count(&job.tres_per_node), count(&job.tres_per_job)) {
        (Some(n), _) => GpuDemand::PerNode(n),
        (None, Some(n)) => GpuDemand::Total(n),
        (None, None) => GpuDemand::Total(per_task.or_else(|| count(&job.tres_req)).unwrap_or(0)),
    };
    let texts = [&job.tres_per_node, &job.tres_per_job, &job.tres_per_task, &job.tres_req];
    let names = |text: &Option<String>| text.as_deref().and_then(|t| hostlist::expand(t).ok()).unwrap_or_default();
    Demand {
        gpus,
        nodes_min,
        nodes_max: job.max_nodes.filter(|n| *n >= nodes_min),
        cpus: job.num_cpus.unwrap_or(0),
        exclusive: job.exclusive,
        kind: texts.iter().find_map(|t| t.as_deref().and_then(gres::tres_gpu_kind)),
        feature: job.features.as_deref().filter(|f| plain_word(f)).map(str::to_owned),
        required: names(&job.req_nodes),
        excluded: names(&job.exc_nodes),
    }
}

/// One feature, and no expression of Slurm's constraint grammar.
fn plain_word(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(id: u32, state: &str) -> JobRecord {
        JobRecord {
            job_id: id,
            state: state.into(),
            partition: Some("gpu,low".into()),
            priority: Some(10),
            reason: Some("Resources".into()),
            num_nodes: Some(1),
            num_cpus: Some(4),
            ..JobRecord::default()
        }
    }

    #[test]
    fn gpus_are_counted_as_the_job_counts_them() {
        let mut j = job(1, "PENDING");
        j.tres_per_job = Some("gres:gpu:28".into());
        assert_eq!(demand(&j).gpus, GpuDemand::Total(28));
        j.tres_per_node = Some("gres:gpu:a100:4".into());
        assert_eq!((demand(&j).gpus, demand(&j).kind.as_deref()), (GpuDemand::PerNode(4), Some("a100")));
        let mut j = job(1, "PENDING");
        j.tres_per_task = Some("gres/gpu=2".into());
        j.num_tasks = Some(3);
        assert_eq!(demand(&j).gpus, GpuDemand::Total(6));
    }

    #[test]
    fn only_jobs_that_wait_for_resources_take_anything() {
        assert!(waits(&job(1, "PENDING")));
        assert!(!waits(&job(1, "RUNNING")));
        for reason in ["Dependency", "JobHeldUser", "QOSMaxGRESPerUser", "AssocGrpGRES", "BeginTime", "None"] {
            assert!(!waits(&JobRecord { reason: Some(reason.into()), ..job(1, "PENDING") }), "{reason}");
        }
        let slice = JobRecord {
            comment: Some("pliant base=7 instance=a token=b".into()),
            name: Some("pliant-7".into()),
            ..job(1, "PENDING")
        };
        assert!(!waits(&slice), "a pending slice is no demand");
        assert!(waits(&JobRecord { name: Some("mine".into()), ..slice }), "a comment alone makes no slice");
    }

    #[test]
    fn a_job_that_started_between_two_answers_is_counted() {
        let running = JobRecord {
            nodes: Some("n[0-1]".into()),
            gres_detail: vec!["gpu:4(IDX:0-3)".into(), "gpu:a100:2(IDX:0,2)".into()],
            ..job(1, "RUNNING")
        };
        let view = SlurmView { jobs: [(JobId(1), running)].into(), ..SlurmView::default() };
        assert_eq!(used_by_jobs(&view), [("n0".into(), 4), ("n1".into(), 2)].into());
    }

    #[test]
    fn nodes_count_what_slurm_says_is_used() {
        let n = NodeRecord {
            name: "n0".into(),
            state: "MIXED".into(),
            cpus: 64,
            cpus_alloc: Some(10),
            gres: Some("gpu:8(S:0-1)".into()),
            gres_used: Some("gpu:3(IDX:0-2)".into()),
            ..NodeRecord::default()
        };
        let agents = BTreeSet::from([NodeName::from("n0")]);
        let partitions = [PartitionRecord {
            name: "gpu".into(),
            nodes: Some("n[0-3]".into()),
            state: "UP".into(),
            ..PartitionRecord::default()
        }];
        let view = SlurmView { partitions: by_node(&partitions), ..SlurmView::default() };
        let got = node(&n, &view, &agents);
        assert_eq!(got.partitions, ["gpu"]);
        assert_eq!((got.gpus, got.gpus_free, got.cpus_free, got.usable, got.lendable), (8, 5, 54, true, true));
        let drained = NodeRecord { flags: vec!["DRAIN".into()], ..n };
        assert!(!node(&drained, &view, &agents).usable);
    }
}
