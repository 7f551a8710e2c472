//! Drawings for the terminal.

use super::sources::Cluster;
use pliant_model::conf::index_list;
use pliant_model::topology::{Link, LinkKind, NodeTopology, Source, Switch};
use pliant_model::{NodeName, hostlist};
use std::fmt::Write as _;

/// A link as `nvidia-smi topo -m` writes it; NVS stands for links that a switch shares.
pub fn cell(link: &Link) -> String {
    let path = || link.path.map_or_else(|| "-".to_owned(), |p| p.to_string());
    match link.kind {
        LinkKind::Own => "X".into(),
        LinkKind::NvLink => format!("NV{}", link.count),
        LinkKind::NvSwitch => format!("NVS{}", link.count),
        LinkKind::Xgmi => format!("XGMI{}", link.count),
        LinkKind::Pcie => path(),
    }
}

fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |v| v.to_string())
}

/// The inside of a node: a matrix, domains, network cards, warnings and differences.
pub fn node(name: &NodeName, t: &NodeTopology, differences: &[String]) -> String {
    let n = t.gpus.len();
    let source = match t.source {
        Source::Agent => "measured by its agent",
        Source::Capture => "from a capture",
        Source::GresConf => "as gres.conf says",
    };
    let mut rows: Vec<Vec<String>> = vec![];
    let mut head = vec![String::new()];
    head.extend(t.gpus.iter().map(|g| g.name.clone()));
    head.extend(["NUMA", "CPUS", "NIC", "MODEL"].map(str::to_owned));
    rows.push(head);
    for (a, gpu) in t.gpus.iter().enumerate() {
        let mut row = vec![gpu.name.clone()];
        row.extend((0..n).map(|b| cell(&t.link(a, b))));
        row.push(or_dash(gpu.numa));
        row.push(if gpu.cpus.is_empty() { "-".into() } else { index_list::format(&gpu.cpus) });
        let nics = t.nearest_nics(a).into_iter().filter_map(|i| t.nics.get(i)).map(|n| n.device.as_str());
        let nics: Vec<&str> = nics.collect();
        row.push(if nics.is_empty() { "-".into() } else { nics.join(",") });
        let state = if gpu.lost {
            " LOST"
        } else if gpu.fabric_down {
            " FABRIC NOT READY"
        } else {
            ""
        };
        row.push(format!("{}{state}", gpu.model.as_deref().unwrap_or("-")));
        rows.push(row);
    }
    let mut out = format!("{name}: {n} GPUs, {source}\n\n{}", aligned(&rows));
    let domains: Vec<String> = t.domains().iter().filter(|d| d.len() > 1).map(|d| names(t, d)).collect();
    let linked = if domains.is_empty() { "none".to_owned() } else { domains.join("  ") };
    let _ = writeln!(out, "\nNVLink domains: {linked}");
    let no_peers = (0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b)));
    let no_peers = no_peers.filter(|(a, b)| t.link(*a, *b).peer_access == Some(false)).count();
    if no_peers > 0 {
        let _ = writeln!(out, "No peer access: {no_peers} pairs");
    }
    for text in &t.warnings {
        let _ = writeln!(out, "Warning: {text}");
    }
    for text in differences {
        let _ = writeln!(out, "Difference: {text}");
    }
    out
}

fn names(t: &NodeTopology, set: &[usize]) -> String {
    let name = |i: &usize| t.gpus.get(*i).map(|g| g.name.as_str());
    format!("{{{}}}", set.iter().filter_map(name).collect::<Vec<_>>().join(" "))
}

/// Columns as wide as they need to be; the last is open.
fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|v| v.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (value, width) in row.iter().zip(&widths) {
            let _ = write!(line, "{value:<width$} ");
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// The cluster as a tree.
pub fn cluster(c: &Cluster) -> String {
    let mut out = String::new();
    let roots = c.switches.roots();
    for root in &roots {
        branch(c, root, 0, &mut out);
    }
    let placed: std::collections::BTreeSet<&str> =
        c.switches.leaves().flat_map(|s| &s.nodes).map(NodeName::as_str).collect();
    let others: Vec<NodeName> =
        c.nodes.keys().filter(|n| !placed.contains(n.as_str())).map(|n| NodeName(n.clone())).collect();
    if !others.is_empty() {
        let _ = writeln!(out, "{}", if roots.is_empty() { "no switches known" } else { "at no switch" });
        nodes(c, &others, 1, &mut out);
    }
    if !c.switches.block_sizes.is_empty() {
        let sizes: Vec<String> = c.switches.block_sizes.iter().map(ToString::to_string).collect();
        let _ = writeln!(out, "block sizes: {}", sizes.join(", "));
    }
    for (domain, nodes) in &c.domains {
        let _ = writeln!(out, "NVLink domain {domain}: {}", hostlist::compress(nodes));
    }
    if out.is_empty() { "no nodes known\n".into() } else { out }
}

fn branch(c: &Cluster, s: &Switch, depth: usize, out: &mut String) {
    let _ = writeln!(out, "{:indent$}{}", "", s.name, indent = depth * 2);
    if !s.nodes.is_empty() {
        nodes(c, &s.nodes, depth + 1, out);
    }
    for child in &s.children {
        // A checked tree has no circles; its depth is bounded all the same.
        if let Some(child) = c.switches.switches.iter().find(|x| x.name == *child).filter(|_| depth < 64) {
            branch(c, child, depth + 1, out);
        }
    }
}

/// Nodes that have the same stand on one line.
fn nodes(c: &Cluster, all: &[NodeName], depth: usize, out: &mut String) {
    for line in c.lines(all) {
        let _ = writeln!(out, "{:indent$}{line}", "", indent = depth * 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pliant_model::topology::{Gpu, Path, SwitchKind, Switches};

    #[test]
    fn a_node_is_a_matrix() {
        let gpu = |i: usize| Gpu { name: format!("GPU{i}"), numa: Some(0), cpus: vec![0, 1, 2], ..Gpu::default() };
        let mut t = NodeTopology::unlinked(Source::Agent, (0..3).map(gpu).collect());
        t.set_link(0, 1, Link::nvlink(4, Some(3)));
        t.set_link(1, 2, Link { peer_access: Some(false), ..Link::pcie(Path::Node) });
        t.gpus[2].lost = true;
        let text = node(&"n1".into(), &t, &["GPU0-GPU1: x".into()]);
        let want = "n1: 3 GPUs, measured by its agent\n\n     GPU0 GPU1 GPU2 NUMA CPUS NIC MODEL\nGPU0 X    NV4  SYS  0    0-2  -   -\n\
                    GPU1 NV4  X    NODE 0    0-2  -   -\nGPU2 SYS  NODE X    0    0-2  -   - LOST\n\n\
                    NVLink domains: {GPU0 GPU1}\nNo peer access: 1 pairs\nDifference: GPU0-GPU1: x\n";
        assert_eq!(text, want);
    }

    #[test]
    fn a_cluster_is_a_tree() {
        let leaf = |name: &str, nodes: &str| Switch {
            name: name.into(),
            kind: SwitchKind::Switch,
            nodes: hostlist::expand(nodes).unwrap(),
            children: vec![],
            line: 0,
        };
        let top = Switch { name: "top".into(), children: vec!["s0".into(), "s1".into()], ..Switch::default() };
        let switches = Switches { switches: vec![leaf("s0", "n[0-1]"), leaf("s1", "n2"), top], block_sizes: vec![] };
        let names = ["n0", "n1", "n2", "login"];
        let nodes =
            names.iter().map(|n| ((*n).to_owned(), if *n == "login" { "no GPU" } else { "8 x a100" }.to_owned()));
        let c = Cluster { switches, nodes: nodes.collect(), domains: vec![("ab clique 1".into(), vec!["n0".into()])] };
        let want = "top\n  s0\n    n[0-1] (8 x a100)\n  s1\n    n2 (8 x a100)\nat no switch\n  login (no GPU)\n\
                    NVLink domain ab clique 1: n0\n";
        assert_eq!(cluster(&c), want);
    }
}
