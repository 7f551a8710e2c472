//! topology.yaml (Slurm 25.05 and later): a list of topologies, each a tree, blocks, or flat.

use super::topology_conf::checked;
use super::{ConfError, MAX_LINE};
use crate::hostlist;
use crate::topology::{Switch, SwitchKind, Switches};
use serde::Deserialize;

/// One topology of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Its name.
    pub name: String,
    /// Whether it holds for partitions that name none (`cluster_default`).
    pub default: bool,
    /// Its switches; none where it is flat.
    pub switches: Switches,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    topology: String,
    #[serde(default)]
    cluster_default: bool,
    tree: Option<Tree>,
    block: Option<Blocks>,
    #[serde(default)]
    flat: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tree {
    switches: Vec<RawSwitch>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSwitch {
    switch: String,
    children: Option<String>,
    nodes: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Blocks {
    #[serde(default)]
    block_sizes: Vec<u32>,
    blocks: Vec<RawBlock>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawBlock {
    block: String,
    nodes: Option<String>,
}

/// Reads topology.yaml and checks each of its topologies.
///
/// # Errors
/// With file, line (0 where the library does not tell) and reason.
pub fn parse(file: &str, text: &str) -> Result<Vec<Topology>, ConfError> {
    if let Some((i, _)) = text.lines().enumerate().find(|(_, l)| l.len() > MAX_LINE) {
        return Err(ConfError::new(file, i + 1, format!("longer than {MAX_LINE} bytes")));
    }
    if let Some((i, _)) = text.lines().enumerate().find(|(_, l)| l.contains("{{") || l.contains("{%")) {
        return Err(ConfError::new(file, i + 1, "an unrendered template: give the file that Slurm reads"));
    }
    let raw: Vec<Raw> = serde_saphyr::from_str(text).map_err(|e| {
        let line = e.location().map_or(0, |l| usize::try_from(l.line()).unwrap_or(0));
        ConfError::new(file, line, e.to_string().lines().next().unwrap_or_default().trim_end())
    })?;
    let mut all: Vec<Topology> = vec![];
    for raw in raw {
        if all.iter().any(|t| t.name == raw.topology) {
            return Err(ConfError::new(file, 0, format!("two topologies are named {}", raw.topology)));
        }
        let switches = match (raw.tree, raw.block, raw.flat) {
            (Some(tree), None, false) => tree_of(file, tree)?,
            (None, Some(blocks), false) => blocks_of(file, blocks)?,
            (None, None, true) => Switches::default(),
            _ => {
                let reason = format!("topology {}: exactly one of tree, block and flat", raw.topology);
                return Err(ConfError::new(file, 0, reason));
            }
        };
        let switches = checked(file, switches).map_err(|e| ConfError { line: 0, ..e })?;
        all.push(Topology { name: raw.topology, default: raw.cluster_default, switches });
    }
    Ok(all)
}

fn list(file: &str, of: &str, text: Option<&str>) -> Result<Vec<crate::NodeName>, ConfError> {
    hostlist::expand(text.unwrap_or_default()).map_err(|e| ConfError::new(file, 0, format!("{of}: {e}")))
}

fn tree_of(file: &str, tree: Tree) -> Result<Switches, ConfError> {
    let switch = |s: RawSwitch| -> Result<Switch, ConfError> {
        Ok(Switch {
            nodes: list(file, &s.switch, s.nodes.as_deref())?,
            children: list(file, &s.switch, s.children.as_deref())?.into_iter().map(|n| n.0).collect(),
            kind: SwitchKind::Switch,
            name: s.switch,
            line: 0,
        })
    };
    Ok(Switches { switches: tree.switches.into_iter().map(switch).collect::<Result<_, _>>()?, block_sizes: vec![] })
}

fn blocks_of(file: &str, blocks: Blocks) -> Result<Switches, ConfError> {
    let block = |b: RawBlock| -> Result<Switch, ConfError> {
        Ok(Switch {
            nodes: list(file, &b.block, b.nodes.as_deref())?,
            children: vec![],
            kind: SwitchKind::Block,
            name: b.block,
            line: 0,
        })
    };
    let switches = blocks.blocks.into_iter().map(block).collect::<Result<_, _>>()?;
    Ok(Switches { switches, block_sizes: blocks.block_sizes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_blocks_and_flat() {
        let text = "---\n- topology: t\n  cluster_default: true\n  tree:\n    switches:\n      - switch: top\n        children: s[1-2]\n      - switch: s1\n        nodes: n[1-3]\n      - switch: s2\n        nodes: n[4-6]\n- topology: b\n  block:\n    block_sizes:\n      - 4\n      - 16\n    blocks:\n      - block: b1\n        nodes: m[1-4]\n- topology: f\n  flat: true\n";
        let all = parse("t.yaml", text).unwrap();
        assert_eq!(all.iter().map(|t| (t.name.as_str(), t.default)).collect::<Vec<_>>(), [("t", true), ("b", false), ("f", false)]);
        assert_eq!(all.iter().map(|t| t.switches.node_count()).collect::<Vec<_>>(), [6, 4, 0]);
        assert_eq!(all[1].switches.block_sizes, [4, 16]);
    }

    #[test]
    fn damage_is_refused() {
        for (text, word) in [
            ("- topology: t\n  tree:\n    switches:\n      - switch: a\n        nodes: n[1-\n", "unbalanced"),
            ("- topology: t\n  tree:\n    switches:\n      - switch: a\n        children: b\n", "which no line defines"),
            ("- topology: t\n", "exactly one"),
            ("- topology: t\n  flat: true\n- topology: t\n  flat: true\n", "two topologies"),
            ("- topology: t\n  circle: 3\n", "circle"),
            ("- topology: {{ x }}\n", "template"),
            ("a: b", ""),
            ("- topology: [", ""),
        ] {
            let e = parse("t.yaml", text).unwrap_err().to_string();
            assert!(e.contains(word), "{text:?}: {e}");
        }
    }
}
