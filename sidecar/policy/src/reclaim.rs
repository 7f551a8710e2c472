//! Pending jobs take slices back.

use crate::{Action, Config, Free, Plan, Room};
use pliant_model::cluster::GpuDemand;
use pliant_model::{Cluster, Demand, GpuCount, Group, JobId, Node, PendingJob, Reason, Seconds, Slice};
use std::cmp::Reverse;
use std::collections::BTreeMap;

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

/// Serves the pending jobs in Slurm's order: what is idle is kept for those that can start, and slices are taken
/// back for those that could. Returns the number of idle GPUs kept.
pub(crate) fn take_back(
    cluster: &Cluster,
    config: &Config,
    now: Seconds,
    room: &mut Room,
    plan: &mut Plan,
) -> GpuCount {
    let mut kept = 0;
    let mut taken: BTreeMap<JobId, Vec<JobId>> = BTreeMap::new();
    let mut why: BTreeMap<JobId, Reason> = BTreeMap::new();
    for job in &cluster.pending {
        let since = job.fits_since.map(|t| now.saturating_sub(t)).filter(|s| *s > config.claim);
        if let Some(since) = since {
            plan.notes.insert(job.job, Reason::NotStarted { since });
            plan.fitting.push(job.job);
            continue;
        }
        let places: Vec<usize> = places(cluster, job);
        let free = |n: &usize| room.nodes.get(*n).map_or(0, |f| f.gpus);
        let idle: GpuCount = places.iter().map(free).fold(0, u32::saturating_add);
        let candidates = candidates(cluster, &taken);
        let Some(shares) = fit(cluster, room, &places, &job.demand, &candidates) else {
            let lent: GpuCount = candidates.iter().map(|c| c.slice.gpus).fold(0, u32::saturating_add);
            let reason = Reason::CannotFit { wants: job.demand.total_gpus(), reachable: idle.saturating_add(lent) };
            plan.notes.insert(job.job, reason);
            continue;
        };
        if job.served >= config.servings && shares.iter().any(|s| !s.release.is_empty()) {
            plan.notes.insert(job.job, Reason::ServedInVain { times: job.served });
            continue;
        }
        let mut release: Vec<Candidate<'_>> = shares.iter().flat_map(|s| s.release.iter().copied()).collect();
        keep_to_steps(&mut release, &candidates);
        if release.iter().any(|c| blocked(c.group)) {
            // The resize under way must end first; the job is served in a later round, nothing is lent meanwhile.
            kept += occupy(room, &shares, &[], cluster);
            continue;
        }
        let list = if release.is_empty() { &mut plan.fitting } else { &mut plan.served };
        list.push(job.job);
        kept += occupy(room, &shares, &release, cluster);
        for c in &release {
            taken.entry(c.group.base).or_default().push(c.slice.job);
            let of_group = release.iter().filter(|r| r.group.base == c.group.base).map(|r| r.slice.gpus).sum();
            let reason = Reason::PendingJob { job: job.job, wants: job.demand.total_gpus(), idle, taken: of_group };
            why.entry(c.group.base).or_insert(reason);
        }
    }
    for (base, slices) in taken {
        if let Some(reason) = why.remove(&base) {
            plan.actions.push(Action::Shrink { base, slices, reason });
        }
    }
    kept
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

fn candidates<'a>(cluster: &'a Cluster, taken: &BTreeMap<JobId, Vec<JobId>>) -> Vec<Candidate<'a>> {
    let free = |g: &Group, s: &Slice| !s.leaving && !taken.get(&g.base).is_some_and(|t| t.contains(&s.job));
    let of = |group: &'a Group| group.slices.iter().map(move |slice| Candidate { group, slice });
    let mut all: Vec<_> = cluster.groups.iter().flat_map(of).filter(|c| free(c.group, c.slice)).collect();
    // Those that have most give first; of one group the newest slice.
    all.sort_by_key(|c| (Reverse(c.group.staying()), c.group.base, c.slice.rank_zero, Reverse(c.slice.job)));
    all
}

/// The cheapest way to let `demand` start on `places`: by the fewest GPUs taken back. `None`: there is none.
fn fit<'a>(
    cluster: &Cluster,
    room: &Room,
    places: &[usize],
    demand: &Demand,
    candidates: &[Candidate<'a>],
) -> Option<Vec<Share<'a>>> {
    let required = |n: &usize| cluster.nodes.get(*n).is_some_and(|node| demand.required.contains(&node.name));
    let on = |n: usize| {
        let name = cluster.nodes.get(n).map(|node| &node.name);
        candidates.iter().copied().filter(move |c| Some(&c.slice.node) == name).collect::<Vec<_>>()
    };
    let gpus = match demand.gpus {
        GpuDemand::PerNode(k) => k,
        // CPUs are all it wants: a node at a time.
        GpuDemand::Total(0) => 0,
        GpuDemand::Total(k) => return fit_total(cluster, room, places, demand, candidates, k),
    };
    let cpus = demand.cpus.div_ceil(demand.nodes_min.max(1));
    let mut options: Vec<Share<'a>> = vec![];
    for &n in places {
        let (node, free) = (cluster.nodes.get(n)?, room.nodes.get(n)?);
        if let Some(release) = cheapest_on(node, free, gpus, cpus, demand.exclusive, &on(n)) {
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
    release.iter().map(|c| c.slice.gpus).sum()
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
        let all_ours = node.gpus - node.gpus_free.min(node.gpus) <= cost(here) + free.gpus_coming;
        let cpus_ours: u32 = here.iter().map(|c| c.slice.cpus).sum();
        let whole =
            node.empty || (all_ours && node.cpus - node.cpus_free.min(node.cpus) <= cpus_ours + free.cpus_coming);
        return (whole && node.gpus >= gpus && free.gpus == node.gpus_free).then(|| here.to_vec());
    }
    let enough = |set: &[Candidate<'a>]| {
        let g = set.iter().map(|c| c.slice.gpus).fold(free.gpus + free.gpus_coming, u32::saturating_add);
        let c = set.iter().map(|c| c.slice.cpus).fold(free.cpus + free.cpus_coming, u32::saturating_add);
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
    candidates: &[Candidate<'a>],
    gpus: GpuCount,
) -> Option<Vec<Share<'a>>> {
    let place = |c: &Candidate<'_>| {
        places.iter().copied().find(|n| cluster.nodes.get(*n).is_some_and(|x| x.name == c.slice.node))
    };
    let free = |n: usize| room.nodes.get(n).map_or((0, 0), |f| (f.gpus + f.gpus_coming, f.cpus + f.cpus_coming));
    if demand.exclusive {
        return fit_whole_nodes(cluster, room, places, demand, candidates, gpus);
    }
    let places = &most_roomy(cluster, places, demand, candidates, &free);
    let (mut have, mut cpus) =
        places.iter().map(|n| free(*n)).fold((0u32, 0u32), |(g, c), (fg, fc)| (g + fg, c.saturating_add(fc)));
    let mut release: Vec<(usize, Candidate<'a>)> = vec![];
    let mut left: Vec<(usize, Candidate<'a>)> = candidates.iter().filter_map(|c| Some((place(c)?, *c))).collect();
    while have < gpus || cpus < demand.cpus {
        let missing = gpus.saturating_sub(have);
        // The smallest slice that covers what is missing, else the largest.
        let best = left.iter().enumerate().min_by_key(|(i, (_, c))| match c.slice.gpus.checked_sub(missing) {
            Some(surplus) => (0, surplus, *i),
            None => (1, missing - c.slice.gpus, *i),
        });
        let (at, _) = best?;
        let (node, c) = left.remove(at);
        have += c.slice.gpus;
        cpus = cpus.saturating_add(c.slice.cpus);
        release.push((node, c));
    }
    // What turned out not to be needed stays.
    let mut i = 0;
    while let Some((_, c)) = release.get(i) {
        if have - c.slice.gpus >= gpus && cpus - c.slice.cpus >= demand.cpus {
            have -= c.slice.gpus;
            cpus -= c.slice.cpus;
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
        let back = release.iter().filter(|(at, _)| *at == n).map(|(_, c)| c.slice.gpus).sum::<GpuCount>();
        free(n).0 + back
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
    cluster: &Cluster,
    places: &[usize],
    demand: &Demand,
    candidates: &[Candidate<'_>],
    free: &impl Fn(usize) -> (GpuCount, u32),
) -> Vec<usize> {
    let most = demand.nodes_max.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    let lent = |n: usize| -> GpuCount {
        let name = cluster.nodes.get(n).map(|node| &node.name);
        candidates.iter().filter(|c| Some(&c.slice.node) == name).map(|c| c.slice.gpus).sum()
    };
    let mut order = places.to_vec();
    order.sort_by_key(|n| (Reverse(free(*n).0 + lent(*n)), Reverse(free(*n).0), *n));
    order.truncate(most);
    order
}

fn fit_whole_nodes<'a>(
    cluster: &Cluster,
    room: &Room,
    places: &[usize],
    demand: &Demand,
    candidates: &[Candidate<'a>],
    gpus: GpuCount,
) -> Option<Vec<Share<'a>>> {
    let mut options: Vec<Share<'a>> = vec![];
    for &n in places {
        let (node, free) = (cluster.nodes.get(n)?, room.nodes.get(n)?);
        let here: Vec<_> = candidates.iter().copied().filter(|c| c.slice.node == node.name).collect();
        if let Some(release) = cheapest_on(node, free, 0, 0, true, &here) {
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
        have += s.gpus;
        shares.push(s);
    }
    (have >= gpus && shares.len() >= least).then_some(shares)
}

/// A group keeps to multiples of STEP above its base: where a release would leave it between two, more of its
/// slices go.
fn keep_to_steps<'a>(release: &mut Vec<Candidate<'a>>, candidates: &[Candidate<'a>]) {
    let mut bases: Vec<JobId> = release.iter().map(|c| c.group.base).collect();
    bases.sort_unstable();
    bases.dedup();
    for base in bases {
        loop {
            let of_base = |c: &&Candidate<'a>| c.group.base == base;
            let gone: GpuCount = release.iter().filter(of_base).map(|c| c.slice.gpus).sum();
            let Some(group) = release.iter().find(of_base).map(|c| c.group) else {
                break;
            };
            let lent = group.staying() - group.base_gpus - gone;
            let over = lent % group.range.step;
            if over == 0 {
                break;
            }
            let rest = |c: &&Candidate<'a>| of_base(c) && !release.iter().any(|r| r.slice.job == c.slice.job);
            let next = candidates.iter().filter(rest).min_by_key(|c| c.slice.gpus.abs_diff(over)).copied();
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
            free.gpus_coming += c.slice.gpus;
            free.cpus_coming = free.cpus_coming.saturating_add(c.slice.cpus);
        }
    }
    let mut kept = 0;
    for share in shares {
        let Some(free) = room.nodes.get_mut(share.node) else {
            continue;
        };
        let now = share.gpus.min(free.gpus);
        kept += now;
        free.gpus -= now;
        free.gpus_coming = free.gpus_coming.saturating_sub(share.gpus - now);
        let cpus_now = share.cpus.min(free.cpus);
        free.cpus -= cpus_now;
        free.cpus_coming = free.cpus_coming.saturating_sub(share.cpus - cpus_now);
    }
    kept
}
