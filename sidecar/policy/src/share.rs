//! Idle GPUs are lent to the elastic jobs, evenly.

use crate::reclaim::Taken;
use crate::{Action, Config, Plan, Room};
use pliant_model::{Cluster, GpuCount, Group, JobId, Locality, Node, NodeName, Reason, Seconds};
use std::collections::BTreeSet;

/// Shares what `room` still has among the groups that may grow, smallest first, one STEP at a time.
pub(crate) fn lend(cluster: &Cluster, config: &Config, now: Seconds, room: &mut Room, taken: &Taken, plan: &mut Plan) {
    let busy: Vec<JobId> = plan.actions.iter().map(Action::base).collect();
    let mut takers: Vec<(&Group, GpuCount)> = vec![];
    for group in cluster.groups.iter().filter(|g| !busy.contains(&g.base)) {
        let waits = taken.waiting.contains(&group.base).then_some(Reason::GivesSoon);
        match obstacle(group, config, now).or(waits) {
            Some(reason) => drop(plan.notes.insert(group.base, reason)),
            None => takers.push((group, 0)),
        }
    }
    let idle: GpuCount = room.nodes.iter().map(|f| f.gpus).sum();
    water_fill(cluster, room, &mut takers);
    let count = u32::try_from(takers.len()).unwrap_or(u32::MAX);
    // Largest first: it finds a whole node while there is one.
    takers.sort_by_key(|(g, more)| (std::cmp::Reverse(*more), g.base));
    for (group, more) in takers {
        let slices = place(cluster, room, group, more);
        let got: GpuCount = slices.iter().map(|(_, n)| n).sum();
        if got == 0 {
            let here: GpuCount = eligible(cluster, group).map(|(i, _)| free(room, i)).sum();
            let reason = Reason::NoIdleGpus { idle: here, kept: taken.kept, step: group.range.step };
            plan.notes.insert(group.base, reason);
            continue;
        }
        let from = group.size();
        let reason = Reason::IdleGpus { idle, takers: count, from, to: from + got };
        plan.actions.push(Action::Grow { base: group.base, slices, reason });
    }
}

/// Why a group cannot grow in this round, whatever is idle.
fn obstacle(group: &Group, config: &Config, now: Seconds) -> Option<Reason> {
    if let Some(order) = &group.in_flight {
        return Some(Reason::InFlight { order: order.clone() });
    }
    let size = group.size();
    if group.range.next(group.base_gpus, size).is_none() {
        return Some(Reason::AtMax { size, max: group.range.max });
    }
    if !group.ready {
        return Some(Reason::NotReady);
    }
    if let Some(left) = group.ends_at.map(|t| t.saturating_sub(now)).filter(|l| *l < config.ends_soon) {
        return Some(Reason::EndsSoon { left });
    }
    let left = group.retry_at.map(|t| t.saturating_sub(now)).filter(|l| *l > 0)?;
    Some(Reason::BackOff { left })
}

fn free(room: &Room, node: usize) -> GpuCount {
    room.nodes.get(node).map_or(0, |f| f.gpus)
}

/// The nodes where a group may have slices, with their index.
fn eligible<'a>(cluster: &'a Cluster, group: &'a Group) -> impl Iterator<Item = (usize, &'a Node)> {
    let near = |name: &NodeName| {
        let there = group.base_gpus > 0 && group.base_nodes.contains(name);
        let lent = group.slices.iter().any(|s| s.node == *name);
        there || lent || (group.base_gpus == 0 && group.slices.is_empty())
    };
    cluster.nodes.iter().enumerate().filter(move |(_, n)| {
        n.usable
            && n.lendable
            && n.partitions.contains(&group.partition)
            && group.kind.as_ref().is_none_or(|k| n.kind.as_ref() == Some(k))
            && !group.avoid.contains(&n.name)
            && group.feature.as_ref().is_none_or(|f| n.features.contains(f))
            && (group.locality == Locality::Any || near(&n.name))
    })
}

/// GPUs that a group could take on a node: idle ones with CPUs to go with them.
fn usable(room: &Room, group: &Group, node: usize) -> GpuCount {
    let Some(f) = room.nodes.get(node) else {
        return 0;
    };
    f.gpus.min(f.cpus.checked_div(group.cpus_per_gpu).unwrap_or(f.gpus))
}

/// Decides how many each gets, without deciding where: always the smallest that can still take a step.
fn water_fill(cluster: &Cluster, room: &Room, takers: &mut [(&Group, GpuCount)]) {
    let mut left: Vec<GpuCount> = (0..cluster.nodes.len()).map(|n| free(room, n)).collect();
    let nodes: Vec<Vec<usize>> = takers.iter().map(|(g, _)| eligible(cluster, g).map(|(i, _)| i).collect()).collect();
    let mut open: BTreeSet<(GpuCount, JobId, usize)> =
        takers.iter().enumerate().map(|(i, (g, _))| (g.size(), g.base, i)).collect();
    while let Some((size, base, at)) = open.pop_first() {
        let (Some((group, more)), Some(nodes)) = (takers.get_mut(at), nodes.get(at)) else { continue };
        let Some(next) = group.range.next(group.base_gpus, size) else { continue };
        let step = next - size;
        let reach = |n: &usize| left.get(*n).copied().unwrap_or(0).min(usable(room, group, *n));
        let one_node = group.locality == Locality::Node && group.size() == 0;
        let there =
            if one_node { nodes.iter().map(reach).max().unwrap_or(0) } else { up_to(step, nodes.iter().map(reach)) };
        if there < step {
            continue;
        }
        *more += step;
        open.insert((next, base, at));
        let mut missing = step;
        for n in nodes {
            let Some(l) = left.get_mut(*n) else { continue };
            let take = missing.min(*l);
            *l -= take;
            missing -= take;
            if missing == 0 {
                break;
            }
        }
    }
}

/// The sum, or `enough` as soon as that is reached.
fn up_to(enough: GpuCount, counts: impl Iterator<Item = GpuCount>) -> GpuCount {
    let mut sum: GpuCount = 0;
    for n in counts {
        sum = sum.saturating_add(n);
        if sum >= enough {
            return enough;
        }
    }
    sum
}

/// Chooses nodes for `more` GPUs: as few and as large slices as can be, on nodes where the job is not yet, best
/// fit first. Books them; what remains is cut back to a multiple of STEP.
fn place(cluster: &Cluster, room: &mut Room, group: &Group, more: GpuCount) -> Vec<(NodeName, GpuCount)> {
    let present = |name: &NodeName| {
        (group.base_gpus > 0 && group.base_nodes.contains(name)) || group.slices.iter().any(|s| s.node == *name)
    };
    let one_node = group.locality == Locality::Node && group.size() == 0;
    let mut chosen: Vec<(usize, GpuCount)> = vec![];
    let mut missing = more;
    while missing > 0 && (chosen.is_empty() || !one_node) {
        let spots = eligible(cluster, group)
            .map(|(i, n)| (i, usable(room, group, i), present(&n.name)))
            .filter(|(i, room, _)| *room > 0 && !chosen.iter().any(|(c, _)| c == i));
        let best = spots.min_by_key(|(i, room, present)| match room.checked_sub(missing) {
            Some(surplus) => (0, u32::from(*present), surplus, *i),
            None => (1, missing - room, u32::from(*present), *i),
        });
        let Some((node, fits, _)) = best else { break };
        let take = fits.min(missing);
        chosen.push((node, take));
        missing -= take;
    }
    // Back to whole steps: the last and smallest slices give.
    let lent = group.size().saturating_sub(group.base_gpus);
    let mut over = (lent + more - missing) % group.range.step.max(1);
    while over > 0 {
        let Some((_, last)) = chosen.last_mut() else {
            break;
        };
        let cut = over.min(*last);
        *last -= cut;
        over -= cut;
        if *last == 0 {
            chosen.pop();
        }
    }
    for (node, take) in &chosen {
        if let Some(f) = room.nodes.get_mut(*node) {
            f.gpus -= take;
            f.cpus = f.cpus.saturating_sub(take.saturating_mul(group.cpus_per_gpu));
        }
    }
    let name = |n: usize| cluster.nodes.get(n).map(|node| node.name.clone());
    chosen.into_iter().filter_map(|(n, take)| Some((name(n)?, take))).collect()
}
