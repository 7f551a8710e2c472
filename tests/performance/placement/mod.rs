//! Placement: the right values of every real capture, also under other names for its GPUs; how well jobs that come and
//! go are placed, beside other rules and the optimum; how long a choice takes.

pub mod boxes;
mod lab;
mod rules;
mod times;

use crate::report::Report;
use anyhow::{Result, ensure};
use boxes::Known;
use pliant_model::topology::NodeTopology;
use pliant_policy::placement::{GpuSet, Tables, Want};
use rules::Rule;

/// Relabellings of each capture.
const RELABELLED: u32 = 20;
/// Arrivals and departures on each box.
const EVENTS: u32 = 10_000;

/// Runs the bench.
pub fn run(report: &mut Report) -> Result<()> {
    let all = boxes::all()?;
    right_values(report, &all)?;
    for known in &all {
        come_and_go(report, known)?;
    }
    times::run(report)?;
    lab::run(report)
}

/// A fixed sequence of random numbers (xorshift): the same run each time.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Begins at a seed that is not 0.
    pub fn new(seed: u64) -> Self {
        Random(seed.max(1))
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from(self.0 >> 40).unwrap_or(0) % n.max(1)
    }

    /// 0 to n-1 in some order.
    pub fn order(&mut self, n: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            let j = self.below(u32::try_from(i + 1).unwrap_or(1)) as usize;
            all.swap(i, j);
        }
        all
    }
}

fn right_values(report: &mut Report, all: &[Known]) -> Result<()> {
    let (mut right, mut looked) = (0u32, 0u32);
    let mut random = Random::new(7);
    for known in all {
        let n = known.topology.gpus.len();
        for round in 0..=RELABELLED {
            let order = if round == 0 { (0..n).collect() } else { random.order(n) };
            let seen = if round == 0 { known.topology.clone() } else { known.relabelled(&order)? };
            let (good, of) = known.check(&seen, &order)?;
            right += good;
            looked += of;
        }
    }
    report.note("captures", "boxes", f64::from(u32::try_from(all.len())?), "boxes");
    report.note("captures", "values looked at", f64::from(looked), "values");
    report.at_least(
        "captures",
        "right values, as read and relabelled",
        100.0 * f64::from(right) / f64::from(looked),
        "%",
        100.0,
    );
    Ok(())
}

/// What one rule has got so far.
struct Run {
    rule: Rule,
    free: GpuSet,
    jobs: Vec<GpuSet>,
    reached: f64,
    optimum: f64,
    broken: f64,
}

fn come_and_go(report: &mut Report, known: &Known) -> Result<()> {
    let topology: &NodeTopology = &known.topology;
    let n = topology.gpus.len();
    if n < 3 {
        return Ok(()); // nothing to choose
    }
    let tables = Tables::new(topology)?;
    let all = GpuSet::first(n);
    let pairs = tables.groups(all, 2);
    let run = |rule| Run { rule, free: all, jobs: vec![], reached: 0.0, optimum: 0.0, broken: 0.0 };
    let mut runs = Rule::ALL.map(run);
    let mut random = Random::new(11);
    for _ in 0..EVENTS {
        let running = runs[0].jobs.len();
        let leaves = random.below(100) < 45 || runs[0].free.is_empty();
        let (which, gpus) = (random.below(u32::try_from(running)?) as usize, 1 + random.below(4));
        for r in &mut runs {
            if leaves && running > 0 {
                let job = r.jobs.swap_remove(which);
                r.free.0 |= job.0;
            } else if !leaves && r.free.len() >= gpus {
                let set = r.rule.choose(topology, &tables, r.free, gpus);
                ensure!(r.free.holds(set) && set.len() == gpus, "{:?} chose {set:?} of {:?}", r.rule, r.free);
                if gpus > 1 {
                    r.reached += f64::from(tables.bottleneck(set));
                    r.optimum += f64::from(optimum(&tables, r.free, gpus));
                }
                r.free = r.free.without(set);
                r.jobs.push(set);
            }
            let possible = (r.free.len() / 2).min(pairs);
            r.broken += f64::from(possible.saturating_sub(tables.groups(r.free, 2)));
        }
    }
    let name = &known.name;
    let ours = &runs[0];
    report.at_least(
        name,
        "bottleneck bandwidth over the optimum of each moment",
        ours.reached / ours.optimum,
        "ratio",
        0.98,
    );
    for other in &runs[1..] {
        let gain = ours.reached / other.reached;
        report.note(name, &format!("bottleneck bandwidth over that of {}", other.rule.name()), gain, "ratio");
        let (mine, theirs) = (ours.broken / f64::from(EVENTS), other.broken / f64::from(EVENTS));
        if topology.linked_pairs().is_empty() {
            // Near pairs over PCIe: a set of three with the better ring may break one.
            report.note(
                name,
                &format!("near pairs broken less those of {}", other.rule.name()),
                mine - theirs,
                "pairs",
            );
        } else {
            report.at_most(name, &format!("linked pairs broken; limit: {}", other.rule.name()), mine, "pairs", theirs);
        }
    }
    Ok(())
}

/// The best bottleneck of any set: every set is looked at.
fn optimum(tables: &Tables, free: GpuSet, gpus: u32) -> u32 {
    free.subsets(gpus).map(|s| tables.bottleneck(s)).max().unwrap_or(0)
}

/// Our own choice on a node.
fn ours(tables: &Tables, free: GpuSet, gpus: u32) -> GpuSet {
    tables.choose(free, &Want::gpus(gpus)).map(|c| c.set).unwrap_or_default()
}
