//! Pending jobs take slices back.

use crate::{Action, Config, Free, Plan, Room};
use pliant_model::cluster::GpuDemand;
use pliant_model::{Cluster, Demand, GpuCount, Group, JobId, Node, NodeName, PendingJob, Reason, Seconds, Slice};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// A slice that could be released.
#[derive(Clone, Copy, Debug)]
struct Candidate<'a> {
    group: &'a Group,
    slice: &'a Slice,
}

/// What a pending job takes on one node once the slices are gone.
#[derive(Clone, Debug)]
struct Share<'a> {
    node: usize,
    gpus: GpuCount,
    cpus: u32,
    release: Vec<Candidate<'a>>,
}

/// The slices that could be released, in the order in which they go, and where they are.
#[derive(Debug)]
struct Lent<'a> {
    all: Vec<Candidate<'a>>,
    /// Indexes into `all`, by the index of the node.
    by_node: BTreeMap<usize, Vec<usize>>,
    /// Taken in this round.
    gone: BTreeSet<JobId>,
}

impl<'a> Lent<'a> {
    fn new(cluster: &'a Cluster) -> Self {
        let of = |group: &'a Group| group.slices.iter().map(move |slice| Candidate { group, slice });
        let mut all: Vec<_> = cluster.groups.iter().flat_map(of).filter(|c| !c.slice.leaving).collect();
        // Those that can be told at once, then those that have most; of one group the newest slice, and last the one
        // with rank 0.
        all.sort_by_key(|c| {
            (blocked(c.group), Reverse(c.group.staying()), c.group.base, c.slice.rank_zero, Reverse(c.slice.job))
        });
        let index: BTreeMap<&NodeName, usize> = cluster.nodes.iter().enumerate().map(|(i, n)| (&n.name, i)).collect();
        let mut by_node: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (i, c) in all.iter().enumerate() {
            if let Some(node) = index.get(&c.slice.node) {
                by_node.entry(*node).or_default().push(i);
            }
        }
        Lent { all, by_node, gone: BTreeSet::new() }
    }

    fn live(&self) -> impl Iterator<Item = Candidate<'a>> + '_ {
        self.all.iter().copied().filter(|c| !self.gone.contains(&c.slice.job))
    }

    fn on(&self, node: usize) -> Vec<Candidate<'a>> {
        let here = self.by_node.get(&node).into_iter().flatten().filter_map(|i| self.all.get(*i).copied());
        here.filter(|c| !self.gone.contains(&c.slice.job)).collect()
    }
}

/// What the pending jobs have taken in this round.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    /// Idle GPUs kept for them.
    pub kept: GpuCount,
    /// Groups that must give and cannot be told yet: nothing is lent to them meanwhile, nor to those that a pending
    /// job waits for together with them.
    pub waiting: BTreeSet<JobId>,
    shrinks: BTreeMap<JobId, (Vec<JobId>, Reason)>,
}

/// Serves the pending jobs in Slurm's order: what is idle is kept for those that can start, and slices are taken
/// back for those that could.
pub(crate) fn take_back(cluster: &Cluster, config: &Config, now: Seconds, room: &mut Room, plan: &mut Plan) -> Taken {
    let mut taken = Taken::default();
    let mut lent = Lent::new(cluster);
    for job in cluster.pending.iter().take(config.depth) {
        let places = places(cluster, job);
        let free = |n: &usize| room.nodes.get(*n).map_or(0, |f| f.gpus);
        let idle: GpuCount = places.iter().map(free).fold(0, u32::saturating_add);
        let Some(shares) = fit(cluster, room, &places, &job.demand, &lent) else {
            let could: GpuCount = lent.live().map(|c| c.slice.gpus).fold(0, u32::saturating_add);
            let reason = Reason::CannotFit { wants: job.demand.total_gpus(), reachable: idle.saturating_add(could) };
            plan.notes.insert(job.job, reason);
            continue;
        };
        if let Some(reason) = in_vain(config, now, job, &shares, room, plan) {
            plan.notes.insert(job.job, reason);
            continue;
        }
        let mut release: Vec<Candidate<'_>> = shares.iter().flat_map(|s| s.release.iter().copied()).collect();
        keep_to_steps(&mut release, &lent);
        if release.iter().any(|c| blocked(c.group)) {
            // The resize under way must end first; the job is served in a later round.
            taken.waiting.extend(release.iter().map(|c| c.group.base));
            taken.kept += occupy(room, &shares, &[], cluster);
            continue;
        }
        if !release.is_empty() {
            plan.served.push(job.job);
        }
        taken.kept += occupy(room, &shares, &release, cluster);
        for c in &release {
            lent.gone.insert(c.slice.job);
            let of_group = cost(&release.iter().filter(|r| r.group.base == c.group.base).copied().collect::<Vec<_>>());
            let reason = Reason::PendingJob { job: job.job, wants: job.demand.total_gpus(), idle, taken: of_group };
            taken.shrinks.entry(c.group.base).or_insert((vec![], reason)).0.push(c.slice.job);
        }
    }
    for (base, (slices, reason)) in std::mem::take(&mut taken.shrinks) {
        plan.actions.push(Action::Shrink { base, slices, reason });
    }
    taken
}

/// Why a job that could be served is not: Slurm has let it wait on idle GPUs for too long, or has not started it
/// after slices had been taken back for it. The claim returns after ten times as long.
fn in_vain(
    config: &Config,
    now: Seconds,
    job: &PendingJob,
    shares: &[Share<'_>],
    room: &Room,
    plan: &mut Plan,
) -> Option<Reason> {
    let idle = |s: &Share<'_>| s.release.is_empty() && room.nodes.get(s.node).is_some_and(|f| f.gpus >= s.gpus);
    if shares.iter().all(idle) {
        let since = job.fits_since.map_or(0, |t| now.saturating_sub(t));
        if since <= config.claim.saturating_mul(10) {
            plan.fitting.push(job.job);
        }
        return (since > config.claim).then_some(Reason::NotStarted { since });
    }
    let taking = shares.iter().any(|s| !s.release.is_empty());
    (taking && job.served >= config.servings).then_some(Reason::ServedInVain { times: job.served })
}

/// A group that cannot be given an order in this round.
fn blocked(group: &Group) -> bool {
    group.in_flight.is_some()
}

/// Indexes of the nodes where a pending job may run.
fn places(cluster: &Cluster, job: &PendingJob) -> Vec<usize> {
    let d = &job.demand;
    let may = |n: &Node| {
        n.usable
            && n.partitions.iter().any(|p| job.partitions.contains(p))
            && !d.excluded.contains(&n.name)
            && d.kind.as_ref().is_none_or(|k| n.kind.as_ref() == Some(k))
            && d.feature.as_ref().is_none_or(|f| n.features.contains(f))
    };
    cluster.nodes.iter().enumerate().filter(|(_, n)| may(n)).map(|(i, _)| i).collect()
}

/// The cheapest way to let `demand` start on `places`: by the fewest GPUs taken back. `None`: there is none.
fn fit<'a>(
    cluster: &Cluster,
    room: &Room,
    places: &[usize],
    demand: &Demand,
    lent: &Lent<'a>,
) -> Option<Vec<Share<'a>>> {
    let required = |n: &usize| cluster.nodes.get(*n).is_some_and(|node| demand.required.contains(&node.name));
    let gpus = match demand.gpus {
        GpuDemand::PerNode(k) => k,
        // CPUs are all it wants: a node at a time.
        GpuDemand::Total(0) => 0,
        GpuDemand::Total(k) => return fit_total(cluster, room, places, demand, lent, k),
    };
    let cpus = demand.cpus.div_ceil(demand.nodes_min.max(1));
    let mut options: Vec<Share<'a>> = vec![];
    for &n in places {
        let (node, free) = (cluster.nodes.get(n)?, room.nodes.get(n)?);
        if let Some(release) = cheapest_on(node, free, gpus, cpus, demand.exclusive, &lent.on(n)) {
            // A job that wants whole nodes takes all of them, whatever it counts.
            let (gpus, cpus) = if demand.exclusive { (node.gpus, node.cpus) } else { (gpus, cpus) };
            options.push(Share { node: n, gpus, cpus, release });
        }
    }
    options.sort_by_key(|s| (!required(&s.node), cost(&s.release), hosts(&s.release), s.node));
    let wanted = usize::try_from(demand.nodes_min.max(1)).ok()?;
    options.truncate(wanted);
    let all_required =
        demand.required.iter().all(|r| options.iter().any(|s| cluster.nodes.get(s.node).is_some_and(|n| n.name == *r)));
    (options.len() == wanted && all_required).then_some(options)
}

fn cost(release: &[Candidate<'_>]) -> GpuCount {
    release.iter().map(|c| c.slice.gpus).fold(0, GpuCount::saturating_add)
}

/// How many of them host rank 0 of their job, and with it the store that the ranks meet at. Of equal choices the one
/// that spares those is taken.
fn hosts(release: &[Candidate<'_>]) -> usize {
    release.iter().filter(|c| c.slice.rank_zero).count()
}

/// The cheapest set of slices of one node whose release leaves room for so many GPUs and CPUs.
fn cheapest_on<'a>(
    node: &Node,
    free: &Free,
    gpus: GpuCount,
    cpus: u32,
    exclusive: bool,
    here: &[Candidate<'a>],
) -> Option<Vec<Candidate<'a>>> {
    if exclusive {
        let all_ours = node.gpus - node.gpus_free.min(node.gpus) <= cost(here).saturating_add(free.gpus_coming);
        let cpus_ours = here.iter().map(|c| c.slice.cpus).fold(free.cpus_coming, u32::saturating_add);
        let whole = node.empty || (all_ours && node.cpus - node.cpus_free.min(node.cpus) <= cpus_ours);
        return (whole && node.gpus >= gpus && free.gpus == node.gpus_free).then(|| here.to_vec());
    }
    let enough = |set: &[Candidate<'a>]| {
        let g = set.iter().map(|c| c.slice.gpus).fold(free.gpus.saturating_add(free.gpus_coming), u32::saturating_add);
        let c = set.iter().map(|c| c.slice.cpus).fold(free.cpus.saturating_add(free.cpus_coming), u32::saturating_add);
        g >= gpus && c >= cpus
    };
    if enough(&[]) {
        return Some(vec![]);
    }
    // A node holds few slices; above 12 the first 12 are looked at.
    let here = here.get(..here.len().min(12)).unwrap_or_default();
    let sets = (1u32..1 << here.len())
        .map(|bits| here.iter().enumerate().filter(|(i, _)| bits >> i & 1 == 1).map(|(_, c)| *c).collect::<Vec<_>>());
    sets.filter(|set| enough(set)).min_by_key(|set| (cost(set), hosts(set), set.len()))
}

/// A demand counted over all nodes: nodes with most room first, then the slices whose size comes nearest.
fn fit_total<'a>(
    cluster: &Cluster,
    room: &Room,
    places: &[usize],
    demand: &Demand,
    lent: &Lent<'a>,
    gpus: GpuCount,
) -> Option<Vec<Share<'a>>> {
    let free = |n: usize| {
        room.nodes
            .get(n)
            .map_or((0, 0), |f| (f.gpus.saturating_add(f.gpus_coming), f.cpus.saturating_add(f.cpus_coming)))
    };
    if demand.exclusive {
        return fit_whole_nodes(cluster, room, places, demand, lent, gpus);
    }
    let places = &most_roomy(places, demand, lent, &free);
    let (mut have, mut cpus) = places
        .iter()
        .map(|n| free(*n))
        .fold((0u32, 0u32), |(g, c), (fg, fc)| (g.saturating_add(fg), c.saturating_add(fc)));
    let mut release: Vec<(usize, Candidate<'a>)> = vec![];
    // In the order in which slices go.
    let mut left: Vec<(usize, Candidate<'a>)> =
        places.iter().flat_map(|n| lent.on(*n).into_iter().map(move |c| (*n, c))).collect();
    let rank: BTreeMap<JobId, usize> = lent.live().enumerate().map(|(i, c)| (c.slice.job, i)).collect();
    left.sort_by_key(|(_, c)| rank.get(&c.slice.job).copied());
    while have < gpus || cpus < demand.cpus {
        let missing = gpus.saturating_sub(have);
        // The smallest slice that covers what is missing, else the largest.
        let best = left.iter().enumerate().min_by_key(|(i, (_, c))| match c.slice.gpus.checked_sub(missing) {
            Some(surplus) => (0, surplus, *i),
            None => (1, missing - c.slice.gpus, *i),
        });
        let (at, _) = best?;
        let (node, c) = left.remove(at);
        have = have.saturating_add(c.slice.gpus);
        cpus = cpus.saturating_add(c.slice.cpus);
        release.push((node, c));
    }
    // What turned out not to be needed stays.
    let mut i = 0;
    while let Some((_, c)) = release.get(i) {
        let rest = (have.saturating_sub(c.slice.gpus), cpus.saturating_sub(c.slice.cpus));
        if rest.0 >= gpus && rest.1 >= demand.cpus {
            (have, cpus) = rest;
            release.remove(i);
        } else {
            i += 1;
        }
    }
    spread(&free, places, demand, gpus, &release)
}

/// Assigns a total demand to nodes, those with most room first, within the limit on nodes.
fn spread<'a>(
    free: &impl Fn(usize) -> (GpuCount, u32),
    places: &[usize],
    demand: &Demand,
    gpus: GpuCount,
    release: &[(usize, Candidate<'a>)],
) -> Option<Vec<Share<'a>>> {
    let room_of = |n: usize| {
        let back = release.iter().filter(|(at, _)| *at == n).map(|(_, c)| c.slice.gpus);
        back.fold(free(n).0, GpuCount::saturating_add)
    };
    let mut order: Vec<usize> = places.to_vec();
    let releases = |n: usize| release.iter().any(|(at, _)| *at == n);
    // One node that is just large enough, as Slurm's best fit has it; else those with most room.
    let fits = |n: usize| demand.nodes_min == 1 && room_of(n) >= gpus;
    order.sort_by_key(|n| (!releases(*n), !fits(*n), if fits(*n) { room_of(*n) } else { 0 }, Reverse(room_of(*n)), *n));
    // Each of the least number of nodes gets one GPU first: Slurm may split unevenly, and must use them all.
    let least =
        usize::try_from(demand.nodes_min).unwrap_or(usize::MAX).min(usize::try_from(gpus).unwrap_or(usize::MAX));
    let one_each = |at: usize| GpuCount::from(at < least);
    let cpus_each = |g: GpuCount| if gpus == 0 { demand.cpus } else { demand.cpus.saturating_mul(g).div_ceil(gpus) };
    let firsts = GpuCount::try_from(order.iter().take(least).filter(|n| room_of(**n) > 0).count()).unwrap_or(0);
    let (mut missing, mut shares) = (gpus.saturating_sub(firsts), vec![]);
    for (at, n) in order.into_iter().enumerate() {
        let first = one_each(at).min(room_of(n));
        let take = first + (room_of(n) - first).min(missing);
        missing -= take - first;
        let of_node: Vec<_> = release.iter().filter(|(place, _)| *place == n).map(|(_, c)| *c).collect();
        if take > 0 || !of_node.is_empty() {
            shares.push(Share { node: n, gpus: take, cpus: cpus_each(take), release: of_node });
        }
    }
    let most = demand.nodes_max.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    (missing == 0 && shares.len() >= least && shares.len() <= most).then_some(shares)
}

/// Where the number of nodes is limited: those that can give most once all slices there are gone, and of equal ones
/// those with most idle.
fn most_roomy(
    places: &[usize],
    demand: &Demand,
    lent: &Lent<'_>,
    free: &impl Fn(usize) -> (GpuCount, u32),
) -> Vec<usize> {
    let most = demand.nodes_max.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    let mut order = places.to_vec();
    order.sort_by_cached_key(|n| (Reverse(free(*n).0.saturating_add(cost(&lent.on(*n)))), Reverse(free(*n).0), *n));
    order.truncate(most);
    order
}

fn fit_whole_nodes<'a>(
    cluster: &Cluster,
    room: &Room,
    places: &[usize],
    demand: &Demand,
    lent: &Lent<'a>,
    gpus: GpuCount,
) -> Option<Vec<Share<'a>>> {
    let mut options: Vec<Share<'a>> = vec![];
    for &n in places {
        let (node, free) = (cluster.nodes.get(n)?, room.nodes.get(n)?);
        if let Some(release) = cheapest_on(node, free, 0, 0, true, &lent.on(n)) {
            options.push(Share { node: n, gpus: node.gpus, cpus: node.cpus, release });
        }
    }
    options.sort_by_key(|s| (cost(&s.release), Reverse(s.gpus), s.node));
    let mut have = 0;
    let least = usize::try_from(demand.nodes_min).ok()?;
    let mut shares = vec![];
    for s in options {
        if have >= gpus && shares.len() >= least {
            break;
        }
        have = u32::saturating_add(have, s.gpus);
        shares.push(s);
    }
    (have >= gpus && shares.len() >= least).then_some(shares)
}

/// A group keeps to multiples of STEP above its base: where a release would leave it between two, more of its
/// slices go.
fn keep_to_steps<'a>(release: &mut Vec<Candidate<'a>>, lent: &Lent<'a>) {
    let mut bases: Vec<JobId> = release.iter().map(|c| c.group.base).collect();
    bases.sort_unstable();
    bases.dedup();
    for base in bases {
        loop {
            let of_base = |c: &&Candidate<'a>| c.group.base == base;
            let gone = release.iter().filter(of_base).map(|c| c.slice.gpus).fold(0, GpuCount::saturating_add);
            let Some(group) = release.iter().find(of_base).map(|c| c.group) else {
                break;
            };
            let over = group.staying().saturating_sub(group.base_gpus).saturating_sub(gone) % group.range.step.max(1);
            if over == 0 {
                break;
            }
            let rest = |c: &&Candidate<'a>| of_base(c) && !release.iter().any(|r| r.slice.job == c.slice.job);
            let next = lent.live().filter(|c| rest(&c)).min_by_key(|c| c.slice.gpus.abs_diff(over));
            let Some(next) = next else { break };
            release.push(next);
        }
    }
}

/// Books what a pending job will take; returns how many idle GPUs that keeps from being lent.
fn occupy(room: &mut Room, shares: &[Share<'_>], release: &[Candidate<'_>], cluster: &Cluster) -> GpuCount {
    for c in release {
        let at = cluster.nodes.iter().position(|n| n.name == c.slice.node);
        if let Some(free) = at.and_then(|n| room.nodes.get_mut(n)) {
            free.gpus_coming = free.gpus_coming.saturating_add(c.slice.gpus);
            free.cpus_coming = free.cpus_coming.saturating_add(c.slice.cpus);
        }
    }
    let mut kept = 0;
    for share in shares {
        let Some(free) = room.nodes.get_mut(share.node) else {
            continue;
        };
        let now = share.gpus.min(free.gpus);
        kept = u32::saturating_add(kept, now);
        free.gpus -= now;
        free.gpus_coming = free.gpus_coming.saturating_sub(share.gpus - now);
        let cpus_now = share.cpus.min(free.cpus);
        free.cpus -= cpus_now;
        free.cpus_coming = free.cpus_coming.saturating_sub(share.cpus - cpus_now);
    }
    kept
}
