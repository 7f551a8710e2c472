//! `decide(&Cluster, &Config, now) -> Plan`: who gets idle GPUs, and which slices pending jobs take back.
//!
//! Pure: it knows no clock, file, socket, thread or async, so that the daemon, a replay and a property test run
//! the very same decisions. Deterministic: the same input gives the same plan.
//!
//! The policy of this module set is plain. `reclaim`: a pending job that waits for resources takes back, in
//! Slurm's order, the cheapest set of whole slices whose release lets it start; never a base, so no job falls
//! below MIN. `share`: what is idle after that goes to the elastic jobs evenly, within range and step.
#![forbid(unsafe_code)]

mod lost;
pub mod placement;
mod reclaim;
mod share;

use pliant_model::{Cluster, GpuCount, JobId, NodeName, Reason, Seconds};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the admin may set about decisions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Seconds after which Slurm's last answer is too old to act on.
    pub stale_after: Seconds,
    /// Seconds after which a pending job that could start and is not started by Slurm loses its claim on idle GPUs.
    pub claim: Seconds,
    /// How often slices are taken back for one pending job before it has to wait: Slurm may place jobs otherwise than
    /// we reckon, and then taking and lending would alternate for ever.
    pub servings: u32,
    /// How many pending jobs are looked at in a round, from the head of Slurm's queue.
    pub depth: usize,
    /// A job whose time limit is nearer than this is not grown, in seconds.
    pub ends_soon: Seconds,
}

impl Default for Config {
    fn default() -> Self {
        Config { stale_after: 40, claim: 120, servings: 3, depth: 200, ends_soon: 60 }
    }
}

/// One change to one job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// Lend these GPUs to a job.
    Grow {
        /// The job.
        base: JobId,
        /// Slices to ask for: node and GPUs.
        slices: Vec<(NodeName, GpuCount)>,
        /// Why.
        reason: Reason,
    },
    /// Take these slices back.
    Shrink {
        /// The job.
        base: JobId,
        /// Whole slices.
        slices: Vec<JobId>,
        /// Why.
        reason: Reason,
    },
}

impl Action {
    /// The job that it is about.
    pub fn base(&self) -> JobId {
        match self {
            Action::Grow { base, .. } | Action::Shrink { base, .. } => *base,
        }
    }
}

/// What is to be done, and why the rest is not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// At most one per job.
    pub actions: Vec<Action>,
    /// For each job (elastic or pending) about which nothing is done: why.
    pub notes: BTreeMap<JobId, Reason>,
    /// Pending jobs that could start on what is idle (or on its way back) by our reckoning.
    pub fitting: Vec<JobId>,
    /// Pending jobs for which slices are taken back in this round.
    pub served: Vec<JobId>,
}

/// Decides one round. `now` is in Unix seconds, like [`Cluster::as_of`].
pub fn decide(cluster: &Cluster, config: &Config, now: Seconds) -> Plan {
    let mut plan = Plan::default();
    let age = now.saturating_sub(cluster.as_of);
    if age > config.stale_after {
        for group in &cluster.groups {
            plan.notes.insert(group.base, Reason::StaleView { age });
        }
        return plan;
    }
    let mut room = Room::new(cluster);
    let taken = reclaim::take_back(cluster, config, now, &mut room, &mut plan);
    lost::replace(cluster, &mut plan);
    share::lend(cluster, config, now, &mut room, &taken, &mut plan);
    plan
}

/// What is free on each node while a plan is being made.
#[derive(Clone, Debug)]
pub(crate) struct Room {
    /// Index as in [`Cluster::nodes`].
    nodes: Vec<Free>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Free {
    /// GPUs idle now and not spoken for.
    gpus: GpuCount,
    /// CPUs idle now and not spoken for.
    cpus: u32,
    /// GPUs that slices on their way out will free, not spoken for.
    gpus_coming: GpuCount,
    /// CPUs likewise.
    cpus_coming: u32,
}

impl Room {
    fn new(cluster: &Cluster) -> Self {
        let mut coming: BTreeMap<&NodeName, (GpuCount, u32)> = BTreeMap::new();
        for slice in cluster.groups.iter().flat_map(|g| &g.slices).filter(|s| s.leaving) {
            let (gpus, cpus) = coming.entry(&slice.node).or_default();
            *gpus = gpus.saturating_add(slice.gpus);
            *cpus = cpus.saturating_add(slice.cpus);
        }
        let free = cluster.nodes.iter().map(|n| {
            let (gpus_coming, cpus_coming) = coming.get(&n.name).copied().filter(|_| n.usable).unwrap_or_default();
            let usable = u32::from(n.usable);
            Free { gpus: n.gpus_free * usable, cpus: n.cpus_free * usable, gpus_coming, cpus_coming }
        });
        Room { nodes: free.collect() }
    }
}

#[cfg(test)]
mod tests;
