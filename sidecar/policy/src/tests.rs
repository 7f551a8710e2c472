//! Builders, cases and invariants of the decisions.

use super::*;
use pliant_model::cluster::GpuDemand;
use pliant_model::gpu::GpuId;
use pliant_model::{Demand, GpuRange, Group, Locality, Node, OrderId, PendingJob, Slice};
use proptest::prelude::*;

const NOW: Seconds = 1_000;

fn node(name: &str, gpus: GpuCount, free: GpuCount) -> Node {
    Node {
        name: name.into(),
        gpus,
        gpus_free: free,
        cpus_free: free * 8,
        cpus: gpus * 8,
        usable: true,
        lendable: true,
        empty: free == gpus,
        partitions: vec!["gpu".into()],
        features: vec![],
        kind: None,
    }
}

fn group(base: u32, range: &str, base_gpus: GpuCount) -> Group {
    Group {
        base: JobId(base),
        range: range.parse::<GpuRange>().unwrap(),
        base_gpus,
        base_nodes: vec!["n0".into()],
        cpus_per_gpu: 1,
        partition: "gpu".into(),
        kind: None,
        feature: None,
        locality: Locality::Any,
        slices: vec![],
        ready: true,
        in_flight: None,
        retry_at: None,
        avoid: vec![],
        ends_at: None,
    }
}

fn lost(node: &Node) -> (GpuId, u32) {
    (GpuId { node: node.name.clone(), bus: "07:00.0".parse().unwrap(), uuid: "GPU-7".into() }, 3)
}

fn with(mut g: Group, slices: &[(u32, &str, GpuCount)]) -> Group {
    g.slices = slices
        .iter()
        .map(|(job, node, gpus)| Slice {
            job: JobId(*job),
            node: (*node).into(),
            gpus: *gpus,
            cpus: *gpus,
            leaving: false,
            rank_zero: false,
            lost: None,
        })
        .collect();
    g
}

/// `nodes` 0 means any number.
fn pending(job: u32, gpus: GpuDemand, nodes: u32) -> PendingJob {
    PendingJob {
        job: JobId(job),
        partitions: vec!["gpu".into()],
        tier: 1,
        priority: 1,
        demand: Demand {
            gpus,
            nodes_min: nodes,
            nodes_max: (nodes > 0).then_some(nodes),
            cpus: 1,
            exclusive: false,
            kind: None,
            feature: None,
            required: vec![],
            excluded: vec![],
        },
        fits_since: None,
        served: 0,
    }
}

fn total(job: u32, gpus: GpuCount) -> PendingJob {
    let mut p = pending(job, GpuDemand::Total(gpus), 0);
    p.demand.nodes_min = 1;
    p
}

fn cluster(nodes: Vec<Node>, pending: Vec<PendingJob>, groups: Vec<Group>) -> Cluster {
    Cluster { as_of: NOW, nodes, pending, groups }
}

fn run(c: &Cluster) -> Plan {
    decide(c, &Config::default(), NOW)
}

fn grown(plan: &Plan, base: u32) -> Vec<(String, GpuCount)> {
    let of = |a: &Action| match a {
        Action::Grow { base: b, slices, .. } if b.0 == base => Some(slices.clone()),
        _ => None,
    };
    plan.actions.iter().find_map(of).unwrap_or_default().into_iter().map(|(n, g)| (n.0, g)).collect()
}

fn shrunk(plan: &Plan, base: u32) -> Vec<u32> {
    let of = |a: &Action| match a {
        Action::Shrink { base: b, slices, .. } if b.0 == base => Some(slices.clone()),
        _ => None,
    };
    plan.actions.iter().find_map(of).unwrap_or_default().into_iter().map(|j| j.0).collect()
}

#[test]
fn a_job_grows_to_its_maximum_in_one_slice_on_a_fresh_node() {
    let c = cluster(vec![node("n0", 8, 6), node("n1", 8, 8)], vec![], vec![group(1, "2-8", 2)]);
    let plan = run(&c);
    assert_eq!(grown(&plan, 1), [("n1".to_owned(), 6)]);
}

#[test]
fn idle_gpus_are_shared_evenly() {
    let groups = vec![group(1, "2-16", 2), group(2, "2-16", 2)];
    let plan = run(&cluster(vec![node("n0", 8, 4), node("n1", 8, 4)], vec![], groups));
    let sum = |b| grown(&plan, b).iter().map(|(_, g)| g).sum::<u32>();
    assert_eq!((sum(1), sum(2)), (4, 4));
}

#[test]
fn growth_keeps_to_range_and_step() {
    let plan = run(&cluster(vec![node("n0", 8, 7)], vec![], vec![group(1, "1-8:4", 1)]));
    assert_eq!(grown(&plan, 1), [("n0".to_owned(), 4)]);
    let plan = run(&cluster(vec![node("n0", 8, 3)], vec![], vec![group(1, "1-8:4", 1)]));
    assert_eq!(plan.notes[&JobId(1)], Reason::NoIdleGpus { idle: 3, kept: 0, step: 4 });
}

#[test]
fn a_pending_job_takes_back_only_what_it_needs() {
    let g = with(group(1, "2-14", 2), &[(11, "n1", 8), (12, "n0", 2), (13, "n0", 2)]);
    let c = cluster(vec![node("n0", 8, 2), node("n1", 8, 0)], vec![pending(5, GpuDemand::PerNode(4), 1)], vec![g]);
    let plan = run(&c);
    assert_eq!(shrunk(&plan, 1), [13], "the newest small slice beside the idle GPUs");
    assert!(matches!(plan.actions[0], Action::Shrink { reason: Reason::PendingJob { wants: 4, taken: 2, .. }, .. }));
}

#[test]
fn a_total_demand_over_nodes_takes_the_slice_that_comes_nearest() {
    let g = with(group(1, "2-8", 2), &[(11, "n1", 6)]);
    let nodes = vec![node("n0", 8, 6), node("n1", 8, 2), node("n2", 8, 8), node("n3", 8, 8)];
    let plan = run(&cluster(nodes, vec![total(5, 28)], vec![g]));
    assert_eq!(shrunk(&plan, 1), [11]);
}

#[test]
fn a_total_may_be_split_unevenly_over_its_nodes() {
    // 5 GPUs on two nodes: 2 idle beside the base, 3 of the 4 that are lent on the other node.
    let g = with(group(1, "2-6", 2), &[(11, "n1", 4)]);
    let mut p = pending(5, GpuDemand::Total(5), 2);
    p.demand.nodes_max = Some(2);
    let plan = run(&cluster(vec![node("n0", 4, 2), node("n1", 4, 0)], vec![p], vec![g]));
    assert_eq!(shrunk(&plan, 1), [11]);
}

#[test]
fn the_host_of_rank_zero_is_spared() {
    let mut g = with(group(1, "0-8", 0), &[(11, "n0", 4), (12, "n1", 4)]);
    g.slices[0].rank_zero = true;
    let c = cluster(vec![node("n0", 4, 0), node("n1", 4, 0)], vec![pending(5, GpuDemand::PerNode(4), 1)], vec![g]);
    assert_eq!(shrunk(&run(&c), 1), [12]);
}

#[test]
fn what_fits_is_kept_and_nothing_is_taken() {
    let g = with(group(1, "2-16", 2), &[(11, "n1", 4)]);
    let c = cluster(vec![node("n0", 8, 6), node("n1", 8, 4)], vec![total(5, 6)], vec![g]);
    let plan = run(&c);
    assert_eq!(plan.fitting, [JobId(5)]);
    assert!(shrunk(&plan, 1).is_empty());
    assert_eq!(grown(&plan, 1).iter().map(|(_, g)| g).sum::<u32>(), 4, "only what is left after the pending job");
}

#[test]
fn a_job_that_slurm_does_not_start_loses_its_claim() {
    let mut p = total(5, 6);
    p.fits_since = Some(NOW - 121);
    let plan = run(&cluster(vec![node("n0", 8, 6)], vec![p], vec![group(1, "2-16", 2)]));
    assert_eq!(plan.notes[&JobId(5)], Reason::NotStarted { since: 121 });
    assert_eq!(grown(&plan, 1), [("n0".to_owned(), 6)]);
}

#[test]
fn a_size_between_two_steps_grows_to_the_next() {
    let g = with(group(1, "2-14:4", 2), &[(11, "n1", 2)]);
    let plan = run(&cluster(vec![node("n0", 8, 6), node("n1", 8, 6)], vec![], vec![g]));
    assert_eq!(grown(&plan, 1).iter().map(|(_, g)| g).sum::<u32>(), 10);
}

#[test]
fn nothing_is_lent_to_a_job_that_must_give_soon() {
    // Job 5 needs the slices of both; job 1 is being resized.
    let mut a = with(group(1, "0-8", 0), &[(11, "n0", 4)]);
    a.in_flight = Some(OrderId("x".into()));
    let b = with(group(2, "0-16", 0), &[(12, "n1", 4)]);
    let mut big = pending(5, GpuDemand::PerNode(8), 2);
    big.demand.required = vec!["n0".into(), "n1".into()];
    let plan = run(&cluster(vec![node("n0", 8, 4), node("n1", 8, 4), node("n2", 8, 8)], vec![big], vec![a, b]));
    assert!(plan.actions.is_empty());
    assert_eq!(plan.notes[&JobId(2)], Reason::GivesSoon);
}

#[test]
fn what_cannot_fit_takes_nothing() {
    let g = with(group(1, "2-8", 2), &[(11, "n0", 4)]);
    let plan = run(&cluster(vec![node("n0", 8, 0)], vec![total(5, 7)], vec![g]));
    assert_eq!(plan.notes[&JobId(5)], Reason::CannotFit { wants: 7, reachable: 4 });
    assert!(plan.actions.is_empty());
}

#[test]
fn leaving_slices_are_not_taken_twice() {
    let mut g = with(group(1, "2-14", 2), &[(11, "n1", 8), (12, "n0", 4)]);
    g.slices[0].leaving = true;
    g.in_flight = Some(OrderId("a".into()));
    let c = cluster(vec![node("n0", 8, 2), node("n1", 8, 0)], vec![pending(5, GpuDemand::PerNode(8), 1)], vec![g]);
    let plan = run(&c);
    assert!(plan.actions.is_empty());
    assert!(plan.fitting.is_empty(), "it cannot start before they have left");
}

#[test]
fn a_release_leaves_whole_steps() {
    let g = with(group(1, "2-14:4", 2), &[(11, "n0", 2), (12, "n1", 2), (13, "n1", 4)]);
    let c = cluster(vec![node("n0", 8, 0), node("n1", 8, 0)], vec![pending(5, GpuDemand::PerNode(2), 1)], vec![g]);
    let mut out = shrunk(&run(&c), 1);
    out.sort_unstable();
    assert_eq!(out, [11, 12]);
}

#[test]
fn a_stale_view_changes_nothing() {
    let mut c = cluster(vec![node("n0", 8, 6)], vec![], vec![group(1, "2-8", 2)]);
    c.as_of = NOW - 41;
    let plan = run(&c);
    assert!(plan.actions.is_empty());
    assert_eq!(plan.notes[&JobId(1)], Reason::StaleView { age: 41 });
}

#[test]
fn an_exclusive_job_needs_a_node_that_holds_only_slices() {
    let mut p = pending(5, GpuDemand::PerNode(8), 1);
    p.demand.exclusive = true;
    let g = with(group(1, "2-10", 2), &[(11, "n1", 8)]);
    let mut n1 = node("n1", 8, 0);
    n1.cpus_free = 56;
    let plan = run(&cluster(vec![node("n0", 8, 6), n1], vec![p], vec![g]));
    assert_eq!(shrunk(&plan, 1), [11]);
}

#[test]
fn locality_node_stays_with_the_job() {
    let mut g = group(1, "2-8", 2);
    g.locality = Locality::Node;
    let plan = run(&cluster(vec![node("n0", 8, 2), node("n1", 8, 8)], vec![], vec![g]));
    assert_eq!(grown(&plan, 1), [("n0".to_owned(), 2)]);
    let mut g = group(1, "0-8", 0);
    g.locality = Locality::Node;
    let plan = run(&cluster(vec![node("n0", 8, 3), node("n1", 8, 5)], vec![], vec![g]));
    assert_eq!(grown(&plan, 1), [("n1".to_owned(), 5)]);
}
#[test]
fn a_slice_with_a_lost_gpu_is_replaced_elsewhere() {
    let mut nodes = vec![node("n0", 8, 0), node("n1", 8, 4), node("n2", 8, 8)];
    nodes[1].lendable = false; // as the daemon says of a node with a lost GPU
    let mut g = with(group(1, "4-12:2", 4), &[(10, "n1", 4), (11, "n0", 2)]);
    g.slices[0].lost = Some(lost(&nodes[1]));
    let c = cluster(nodes, vec![], vec![g]);
    let plan = run(&c);
    let [Action::Shrink { base: JobId(1), slices, reason: Reason::GpuLost { slice, index, .. } }] = &plan.actions[..]
    else {
        panic!("{plan:?}");
    };
    assert_eq!((slices.as_slice(), *slice, *index), (&[JobId(10)][..], Some(JobId(10)), Some(3)));
    let next = run(&apply(&c, &plan));
    let [Action::Grow { slices, .. }] = &next.actions[..] else { panic!("{next:?}") };
    assert_eq!(slices, &[("n2".into(), 6)], "not where the card is missing");
}

#[test]
fn a_lost_gpu_takes_whole_steps() {
    let nodes = vec![node("n0", 8, 0), node("n1", 8, 0), node("n2", 8, 0)];
    let mut g = with(group(1, "2-14:4", 2), &[(10, "n1", 3), (11, "n1", 1), (12, "n2", 4)]);
    g.slices[0].lost = Some(lost(&nodes[1]));
    let plan = run(&cluster(nodes, vec![], vec![g]));
    let [Action::Shrink { slices, .. }] = &plan.actions[..] else { panic!("{plan:?}") };
    assert_eq!(slices, &[JobId(10), JobId(11)]);
}

prop_compose! {
    fn any_cluster()(
        free in proptest::collection::vec(0u32..=8, 2..5),
        jobs in proptest::collection::vec((0u32..3, 1u32..12, 1u32..5, proptest::collection::vec((0usize..5, proptest::bool::weighted(0.1)), 0..4), any::<bool>()), 0..4),
        wants in proptest::collection::vec((1u32..20, 0u32..3, any::<bool>()), 0..4),
    ) -> Cluster {
        let mut nodes: Vec<Node> = free.iter().enumerate().map(|(i, f)| node(&format!("n{i}"), 8, *f)).collect();
        let mut groups = vec![];
        let mut id = 100;
        for (i, (min, extra, step, slices, ready)) in jobs.into_iter().enumerate() {
            let mut g = group(u32::try_from(i).unwrap() + 1, &format!("{min}-{}:{step}", min + extra), min);
            g.ready = ready;
            g.base_nodes = vec![];
            for (at, broken) in slices {
                let n = at % nodes.len();
                let gpus = step.min(nodes[n].gpus_free);
                if gpus != step || g.size() + step > g.range.max { continue; }
                nodes[n].gpus_free -= gpus;
                nodes[n].cpus_free -= gpus;
                id += 1;
                g.slices.push(Slice { job: JobId(id), node: nodes[n].name.clone(), gpus, cpus: gpus, leaving: false, rank_zero: false, lost: broken.then(|| lost(&nodes[n])) });
                nodes[n].lendable &= !broken;
            }
            groups.push(g);
        }
        for n in &mut nodes { n.empty = n.gpus_free == n.gpus; }
        let pending = wants.into_iter().enumerate().map(|(i, (g, n, exclusive))| {
            let demand = if n == 0 { GpuDemand::Total(g) } else { GpuDemand::PerNode(g.min(8)) };
            let mut p = pending(u32::try_from(i).unwrap() + 50, demand, n);
            p.demand.nodes_min = n.max(1);
            p.demand.exclusive = exclusive;
            p
        }).collect();
        cluster(nodes, pending, groups)
    }
}

/// The cluster after a plan has come about and every pending job that fits has started.
fn apply(c: &Cluster, plan: &Plan) -> Cluster {
    let mut next = c.clone();
    for p in next.pending.iter_mut().filter(|p| plan.served.contains(&p.job)) {
        p.served += 1;
    }
    for a in &plan.actions {
        match a {
            Action::Grow { base, slices, .. } => {
                let g = next.groups.iter_mut().find(|g| g.base == *base).unwrap();
                for (i, (name, gpus)) in slices.iter().enumerate() {
                    let n = next.nodes.iter_mut().find(|n| n.name == *name).unwrap();
                    n.gpus_free -= gpus;
                    n.cpus_free -= gpus;
                    n.empty = false;
                    let job = JobId(1000 + base.0 * 50 + u32::try_from(i + g.slices.len()).unwrap());
                    g.slices.push(Slice {
                        job,
                        node: name.clone(),
                        gpus: *gpus,
                        cpus: *gpus,
                        leaving: false,
                        rank_zero: false,
                        lost: None,
                    });
                }
            }
            Action::Shrink { base, slices, .. } => {
                let g = next.groups.iter_mut().find(|g| g.base == *base).unwrap();
                for s in g.slices.iter().filter(|s| slices.contains(&s.job)) {
                    let n = next.nodes.iter_mut().find(|n| n.name == s.node).unwrap();
                    n.gpus_free += s.gpus;
                    n.cpus_free += s.cpus;
                }
                g.slices.retain(|s| !slices.contains(&s.job));
            }
        }
    }
    next
}

proptest! {
    #[test]
    fn invariants_of_any_plan(c in any_cluster()) {
        let plan = run(&c);
        prop_assert_eq!(&plan, &run(&c), "deterministic");
        let mut seen = vec![];
        for a in &plan.actions {
            let base = match a { Action::Grow { base, .. } | Action::Shrink { base, .. } => *base };
            prop_assert!(!seen.contains(&base), "one change per job and round");
            seen.push(base);
        }
        let next = apply(&c, &plan); // subtracts checked: no GPU is lent twice
        for g in &next.groups {
            prop_assert!(g.size() >= g.base_gpus && g.size() <= g.range.max);
            prop_assert_eq!((g.size() - g.base_gpus) % g.range.step, 0);
        }
        for g in &c.groups {
            prop_assert!(seen.contains(&g.base) || plan.notes.contains_key(&g.base), "no decision without a reason");
        }
        if c.pending.is_empty() {
            prop_assert!(plan.actions.iter().all(|a| matches!(a, Action::Grow { .. } | Action::Shrink { reason: Reason::GpuLost { .. }, .. })), "nothing is taken for nobody");
        }
    }

    /// With the pending jobs still there (Slurm has not started them yet) the decisions come to rest: what was taken
    /// is not lent again and taken again.
    #[test]
    fn nothing_goes_back_and_forth(c in any_cluster()) {
        let mut now = c.clone();
        let mut rounds = 0;
        loop {
            let plan = run(&now);
            if plan.actions.is_empty() {
                break;
            }
            rounds += 1;
            prop_assert!(rounds <= 24, "still changing: {:?}", plan);
            now = apply(&now, &plan);
        }
    }
}
