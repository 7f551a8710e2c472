//! `pliant topo export`: files for Slurm from what was measured.

use super::sources::Sources;
use anyhow::{bail, ensure};
use pliant_model::conf::gres_conf::Layout;
use pliant_model::conf::index_list;
use pliant_model::topology::{NodeTopology, Switch, SwitchKind, Switches};
use pliant_model::{NodeName, hostlist};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// Position of the GPU with a GRES index.
fn position(t: &NodeTopology, index: u32) -> Option<usize> {
    t.gpus.iter().position(|g| g.gres_index == Some(index))
}

/// The right `Links=` of a GPU of a node with `count` GPUs: NVLinks to each, -1 for itself, `None` to one that is not
/// measured. `None` as a whole: the GPU itself is not.
pub fn links_row(t: &NodeTopology, index: u32, count: usize) -> Option<Vec<Option<i64>>> {
    let own = position(t, index)?;
    let to = |other: usize| {
        let other = position(t, u32::try_from(other).ok()?)?;
        Some(if other == own { -1 } else { i64::from(t.link(own, other).count) })
    };
    Some((0..count).map(to).collect())
}

/// The right `Cores=` of a GPU: the cores of the CPUs near it. `None`: not measured, or beyond the node's cores.
pub fn cores_of(t: &NodeTopology, index: u32, layout: Layout) -> Option<Vec<u32>> {
    let gpu = t.gpus.get(position(t, index)?)?;
    let cores: BTreeSet<u32> = gpu.cpus.iter().map(|c| layout.core_of_cpu(*c)).collect();
    let cpus = layout.sockets.saturating_mul(layout.cores).saturating_mul(layout.threads);
    let fits = !cores.is_empty() && gpu.cpus.iter().all(|c| *c < cpus);
    fits.then(|| cores.into_iter().collect())
}

/// gres.conf: nodes with the same lines stand together.
pub fn gres_conf(sources: &Sources) -> anyhow::Result<String> {
    let hardware = sources.hardware.as_ref().map_err(|why| anyhow::anyhow!("nothing is measured: {why}"))?;
    let mut alike: BTreeMap<String, Vec<NodeName>> = BTreeMap::new();
    let (mut left_out, mut notes) = (vec![], vec![]);
    for h in hardware {
        let gpus = h.gpus.as_ref();
        if let Some(missing) = gpus.map(|g| &g.missing).filter(|m| !m.is_empty()) {
            // Without it the indexes of all that follow would change.
            let which = index_list::format(missing);
            notes.push(format!("{}: GPU {which} has no device: mend it or take it out of gres.conf first", h.node));
            continue;
        }
        if gpus.is_some_and(|g| g.gpus.iter().any(|g| g.mig == Some(true))) {
            notes.push(format!("{}: MIG is on, its lines are not written here", h.node));
            continue;
        }
        match sources.measured(&h.node).filter(|t| !t.gpus.is_empty()) {
            Some(t) => {
                let minors: Vec<Option<u32>> = h.gpus.iter().flat_map(|g| &g.gpus).map(|g| g.minor).collect();
                alike.entry(lines(sources, &h.node, &t, &minors)).or_default().push(h.node.clone());
            }
            None => left_out.push(h.node.clone()),
        }
    }
    ensure!(
        !alike.is_empty(),
        "nothing to write: {}",
        if notes.is_empty() { "no agent with GPUs is connected".to_owned() } else { notes.join("; ") }
    );
    let mut out = String::from("# Written by `pliant topo export gres.conf` from what the agents have measured.\n");
    if !left_out.is_empty() {
        let _ = writeln!(out, "# Not measured, and left out: {}", hostlist::compress(&left_out));
    }
    for note in notes {
        let _ = writeln!(out, "# Left out: {note}");
    }
    for (lines, nodes) in alike {
        let nodes = hostlist::compress(&nodes);
        for line in lines.lines() {
            let _ = writeln!(out, "NodeName={nodes} {line}");
        }
    }
    Ok(out)
}

/// The lines of one node, in the order of its GRES indexes; a GPU that has none yet comes by its minor.
fn lines(sources: &Sources, node: &NodeName, t: &NodeTopology, minors: &[Option<u32>]) -> String {
    let (devices, layout) = (sources.devices(node), sources.layout(node));
    let mut order: Vec<usize> = (0..t.gpus.len()).collect();
    let minor = |i: usize| minors.get(i).copied().flatten();
    order.sort_by_key(|i| (t.gpus.get(*i).and_then(|g| g.gres_index).unwrap_or(u32::MAX), minor(*i), *i));
    let mut named = t.clone();
    for (index, i) in order.iter().enumerate() {
        if let Some(g) = named.gpus.get_mut(*i) {
            g.gres_index = u32::try_from(index).ok();
        }
    }
    let mut out = String::new();
    for (index, i) in order.iter().enumerate() {
        let old = t.gpus.get(*i).and_then(|g| g.gres_index).and_then(|x| devices.iter().find(|d| d.index == x));
        let file = old.and_then(|d| d.file.clone());
        let file = file.unwrap_or_else(|| format!("/dev/nvidia{}", minor(*i).map_or(index, |m| m as usize)));
        let _ = write!(out, "Name=gpu");
        if let Some(kind) = old.and_then(|d| d.kind.as_ref()) {
            let _ = write!(out, " Type={kind}");
        }
        let _ = write!(out, " File={file}");
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        if let Some(cores) = cores_of(&named, index, layout) {
            let _ = write!(out, " Cores={}", index_list::format(&cores));
        }
        if let Some(row) = links_row(&named, index, order.len()).filter(|_| order.len() > 1) {
            let row: Vec<String> = row.iter().flatten().map(ToString::to_string).collect();
            let _ = write!(out, " Links={}", row.join(","));
        }
        out.push('\n');
    }
    out
}

/// The switches that Slurm's file has, or else a block for each NVLink domain that spans nodes.
fn switches(sources: &Sources) -> anyhow::Result<Switches> {
    match &sources.switches {
        Err(e) => bail!("{e}"),
        Ok(Some(switches)) if !switches.switches.is_empty() => return Ok(switches.clone()),
        Ok(_) => {}
    }
    let domains = sources.cluster().domains;
    let least = domains.iter().map(|(_, n)| n.len()).min().unwrap_or(0);
    ensure!(least > 1, "no topology is known: neither a file of Slurm nor an NVLink domain that spans nodes");
    let block = |(i, (_, nodes)): (usize, (String, Vec<NodeName>))| Switch {
        name: format!("nvl{}", i + 1),
        kind: SwitchKind::Block,
        nodes,
        children: vec![],
        line: 0,
    };
    let block_sizes = vec![u32::try_from(least)?];
    Ok(Switches { switches: domains.into_iter().enumerate().map(block).collect(), block_sizes })
}

/// topology.conf
pub fn topology_conf(sources: &Sources) -> anyhow::Result<String> {
    let all = switches(sources)?;
    let mut out = String::from("# Written by `pliant topo export topology.conf`.\n");
    for s in &all.switches {
        let key = if s.kind == SwitchKind::Block { "BlockName" } else { "SwitchName" };
        let _ = write!(out, "{key}={}", s.name);
        if !s.nodes.is_empty() {
            let _ = write!(out, " Nodes={}", hostlist::compress(&s.nodes));
        }
        if !s.children.is_empty() {
            let _ = write!(out, " Switches={}", children(s));
        }
        out.push('\n');
    }
    if !all.block_sizes.is_empty() {
        let _ = writeln!(out, "BlockSizes={}", sizes(&all, ","));
    }
    Ok(out)
}

fn children(s: &Switch) -> String {
    let names: Vec<NodeName> = s.children.iter().map(|c| NodeName(c.clone())).collect();
    hostlist::compress(&names)
}

fn sizes(all: &Switches, between: &str) -> String {
    all.block_sizes.iter().map(ToString::to_string).collect::<Vec<_>>().join(between)
}

/// topology.yaml, as Slurm reads it from 25.05 on.
pub fn topology_yaml(sources: &Sources) -> anyhow::Result<String> {
    let all = switches(sources)?;
    let blocks = all.switches.iter().any(|s| s.kind == SwitchKind::Block);
    let mut out = String::from(
        "# Written by `pliant topo export topology.yaml`.\n---\n- topology: default\n  cluster_default: true\n",
    );
    if blocks {
        let _ = writeln!(out, "  block:\n    block_sizes: [{}]\n    blocks:", sizes(&all, ", "));
    } else {
        out.push_str("  tree:\n    switches:\n");
    }
    for s in &all.switches {
        let _ = writeln!(out, "      - {}: {}", if blocks { "block" } else { "switch" }, s.name);
        if !s.children.is_empty() {
            let _ = writeln!(out, "        children: {}", children(s));
        }
        if !s.nodes.is_empty() {
            let _ = writeln!(out, "        nodes: {}", hostlist::compress(&s.nodes));
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pliant_model::conf::{topology_conf as read_conf, topology_yaml as read_yaml};

    fn with(text: &str) -> Sources {
        let switches = read_conf::parse("t", text, &mut |_| Err("no".into())).unwrap();
        Sources {
            folder: "/etc/slurm".into(),
            slurm: Err("none".into()),
            gres: Ok(None),
            switches: Ok(Some(switches)),
            hardware: Err("none".into()),
        }
    }

    #[test]
    fn what_is_written_reads_as_the_same() {
        for text in [
            "SwitchName=s0 Nodes=n[0-3]\nSwitchName=s1 Nodes=n[4-7]\nSwitchName=top Switches=s[0-1]\n",
            "BlockName=b0 Nodes=n[0-3]\nBlockName=b1 Nodes=n[4-7]\nBlockSizes=4,8\n",
        ] {
            let sources = with(text);
            let plain = |s: &Switches| {
                let of = |s: &Switch| (s.name.clone(), s.kind, s.nodes.clone(), s.children.clone());
                (s.switches.iter().map(of).collect::<Vec<_>>(), s.block_sizes.clone())
            };
            let before = plain(sources.switches.as_ref().unwrap().as_ref().unwrap());
            let conf = topology_conf(&sources).unwrap();
            assert_eq!(plain(&read_conf::parse("t", &conf, &mut |_| Err("no".into())).unwrap()), before, "{conf}");
            let yaml = topology_yaml(&sources).unwrap();
            let read = read_yaml::parse("t", &yaml).unwrap();
            assert!(read[0].default && plain(&read[0].switches) == before, "{yaml}");
        }
    }

    #[test]
    fn nothing_measured_is_said() {
        let mut sources = with("SwitchName=s0 Nodes=n0\n");
        assert!(gres_conf(&sources).unwrap_err().to_string().contains("nothing is measured"));
        sources.switches = Ok(None);
        assert!(topology_conf(&sources).unwrap_err().to_string().contains("no topology is known"));
    }
}
