//! How long things take.

use super::Random;
use crate::report::{Report, percentile};
use anyhow::{Context, Result};
use pliant_model::NodeName;
use pliant_model::conf::topology_conf;
use pliant_model::topology::{Gpu, Link, NodeTopology, Source, Switches};
use pliant_policy::placement::{Cells, GpuSet, Request, Tables, Want};
use std::fmt::Write as _;
use std::time::Instant;

const NODES: u32 = 12_500;
const PER_LEAF: u32 = 25;
const LEAVES_PER_SPINE: u32 = 20;

/// Runs this part.
pub fn run(report: &mut Report) -> Result<()> {
    let tables = Tables::new(&cube())?;
    one_node(report, &tables);
    many_nodes(report, &tables)?;
    tree(report)
}

/// Eight GPUs in a hybrid cube mesh.
fn cube() -> NodeTopology {
    let gpu = |i: u32| Gpu { name: format!("GPU{i}"), numa: Some(i / 4), ..Gpu::default() };
    let mut t = NodeTopology::unlinked(Source::Agent, (0..8).map(gpu).collect());
    let double = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)];
    let single = [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)];
    double.iter().for_each(|(a, b)| t.set_link(*a, *b, Link::nvlink(2, Some(2))));
    single.iter().for_each(|(a, b)| t.set_link(*a, *b, Link::nvlink(1, Some(2))));
    t
}

fn one_node(report: &mut Report, tables: &Tables) {
    let mut random = Random::new(3);
    let mut times = vec![];
    for _ in 0..20_000 {
        let free = GpuSet(random.below(256));
        let want = Want::gpus(1 + random.below(8));
        let begin = Instant::now();
        let choice = tables.choose(free, &want);
        times.push(begin.elapsed().as_secs_f64() * 1e6);
        std::hint::black_box(choice).ok();
    }
    report.at_most("a node of 8", "choice, p99 of 20,000", percentile(&times, 0.99), "us", 20.0);
    report.note("a node of 8", "choice, median", percentile(&times, 0.5), "us");
}

/// The text of a topology.conf with three levels.
fn tree_text(leaves: u32, hosts: u32) -> String {
    let mut text = String::new();
    let per = hosts / leaves;
    for leaf in 0..leaves {
        let last = if leaf + 1 == leaves { hosts - 1 } else { (leaf + 1) * per - 1 };
        let _ = writeln!(text, "SwitchName=leaf{leaf} Nodes=n[{}-{last}]", leaf * per);
    }
    let spines = leaves.div_ceil(LEAVES_PER_SPINE.max(leaves.div_ceil(16)));
    let each = leaves.div_ceil(spines);
    for spine in 0..spines {
        let last = ((spine + 1) * each).min(leaves) - 1;
        let _ = writeln!(text, "SwitchName=spine{spine} Switches=leaf[{}-{last}]", spine * each);
    }
    let _ = writeln!(text, "SwitchName=top Switches=spine[0-{}]", spines - 1);
    text
}

fn read(text: &str) -> Result<Switches> {
    Ok(topology_conf::parse("topology.conf", text, &mut |_| Err("no includes".into()))?)
}

fn many_nodes(report: &mut Report, tables: &Tables) -> Result<()> {
    let switches = read(&tree_text(NODES / PER_LEAF, NODES))?;
    let names: Vec<(NodeName, usize)> = (0..NODES).map(|n| (NodeName(format!("n{n}")), 0)).collect();
    let mut cells = Cells::new(&switches, vec![tables.clone()], &names);
    let mut random = Random::new(5);
    // 90 % of the GPUs are in use: four of five nodes whole, the others by halves and odd ones.
    for node in 0..names.len() {
        let free = match random.below(20) {
            0 => 0xff,
            1..=2 => random.below(256),
            _ => 0,
        };
        cells.set_free(node, GpuSet(free));
    }
    let sizes = [1, 2, 3, 4, 8, 16, 24, 64, 256];
    let mut times = vec![];
    for i in 0..3_000 {
        let gpus = sizes.get(i % sizes.len()).copied().unwrap_or(1);
        let begin = Instant::now();
        let placed = cells.choose(&Request { gpus, ..Request::default() });
        times.push(begin.elapsed().as_secs_f64() * 1e3);
        let placed = placed.context("no place")?;
        // Jobs come and go: the state changes between choices.
        if let Some((node, choice)) = placed.nodes.first() {
            let free = cells.free(*node);
            cells.set_free(*node, free.without(choice.set));
            let other = random.below(NODES) as usize;
            cells.set_free(other, GpuSet(cells.free(other).0 | choice.set.0));
        }
    }
    report.at_most("12,500 nodes of 8, 90 % full", "choice, p99 of 3,000", percentile(&times, 0.99), "ms", 2.0);
    report.note("12,500 nodes of 8, 90 % full", "choice, median", percentile(&times, 0.5), "ms");
    Ok(())
}

fn tree(report: &mut Report) -> Result<()> {
    let text = tree_text(512, 10_000);
    let begin = Instant::now();
    let switches = read(&text)?;
    let seconds = begin.elapsed().as_secs_f64();
    report.note("topology.conf", "switches", f64::from(u32::try_from(switches.switches.len())?), "switches");
    report.note("topology.conf", "hosts", f64::from(u32::try_from(switches.node_count())?), "hosts");
    report.at_most("topology.conf", "load", seconds, "s", 0.1);
    Ok(())
}
