//! What joins the nodes: a tree of switches, or blocks (racks with one NVLink domain) with their sizes.

use crate::ids::NodeName;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};

/// The most levels of switches.
pub const MAX_LEVELS: usize = 64;

/// The switches of a cluster, as topology.conf or topology.yaml gives them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Switches {
    /// In the order of the file.
    pub switches: Vec<Switch>,
    /// `BlockSizes` of a block topology, ascending: base block first; empty otherwise.
    pub block_sizes: Vec<u32>,
}

/// What a [`Switch`] is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SwitchKind {
    /// `SwitchName=`
    #[default]
    Switch,
    /// `BlockName=`
    Block,
}

/// A switch or a block.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Switch {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: SwitchKind,
    /// Nodes directly at it.
    pub nodes: Vec<NodeName>,
    /// Switches directly below it, by name.
    pub children: Vec<String>,
    /// Line in the file, from 1.
    pub line: usize,
}

/// Why switches make no topology.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SwitchError {
    /// Two of one name.
    #[error("line {line}: {name} is there already, at line {first}")]
    Duplicate {
        /// Second line.
        line: usize,
        /// First line.
        first: usize,
        /// The name.
        name: String,
    },
    /// A child that no line defines.
    #[error("line {line}: {name} names the switch {child}, which no line defines")]
    UnknownChild {
        /// Where.
        line: usize,
        /// Which switch.
        name: String,
        /// What it names.
        child: String,
    },
    /// A switch below itself.
    #[error("line {line}: {name} is below itself")]
    Cycle {
        /// Where.
        line: usize,
        /// Which.
        name: String,
    },
    /// More than [`MAX_LEVELS`] switches above each other.
    #[error("line {line}: {name} has more than {MAX_LEVELS} levels of switches above it")]
    TooDeep {
        /// Where.
        line: usize,
        /// Which.
        name: String,
    },
    /// A switch with two parents, or a node at two leaves.
    #[error("line {line}: {name} is at {first} already")]
    TwoParents {
        /// Where.
        line: usize,
        /// The child.
        name: String,
        /// Its first parent.
        first: String,
    },
    /// Neither nodes nor switches.
    #[error("line {line}: {name} has neither Nodes nor Switches")]
    Empty {
        /// Where.
        line: usize,
        /// Which.
        name: String,
    },
    /// Sizes of blocks without a block, or sizes that Slurm does not take.
    #[error("{0}")]
    Blocks(String),
}

impl Switches {
    /// Switches that are below no other.
    pub fn roots(&self) -> Vec<&Switch> {
        let below: std::collections::HashSet<&str> =
            self.switches.iter().flat_map(|s| s.children.iter().map(String::as_str)).collect();
        self.switches.iter().filter(|s| !below.contains(s.name.as_str())).collect()
    }

    /// Switches that have nodes.
    pub fn leaves(&self) -> impl Iterator<Item = &Switch> {
        self.switches.iter().filter(|s| !s.nodes.is_empty())
    }

    /// Nodes in all.
    pub fn node_count(&self) -> usize {
        self.leaves().map(|s| s.nodes.len()).sum()
    }

    /// For each node the switches above it, leaf first. Blocks: the block only.
    pub fn paths(&self) -> HashMap<&NodeName, Vec<&str>> {
        let parent: HashMap<&str, &str> =
            self.switches.iter().flat_map(|s| s.children.iter().map(move |c| (c.as_str(), s.name.as_str()))).collect();
        let mut paths = HashMap::new();
        for leaf in self.leaves() {
            let mut path = vec![leaf.name.as_str()];
            while let Some(up) = path.last().and_then(|n| parent.get(n)).filter(|_| path.len() <= self.switches.len()) {
                path.push(up);
            }
            paths.extend(leaf.nodes.iter().map(|n| (n, path.clone())));
        }
        paths
    }

    /// Names what is wrong: the first of duplicates, unknown children, cycles, two parents, emptiness, bad blocks.
    ///
    /// # Errors
    /// [`SwitchError`] with the line.
    pub fn check(&self) -> Result<(), SwitchError> {
        let mut by_name: HashMap<&str, &Switch> = HashMap::new();
        for s in &self.switches {
            if let Some(first) = by_name.insert(&s.name, s) {
                return Err(SwitchError::Duplicate { line: s.line, first: first.line, name: s.name.clone() });
            }
            if s.nodes.is_empty() && s.children.is_empty() {
                return Err(SwitchError::Empty { line: s.line, name: s.name.clone() });
            }
        }
        let mut parent: HashMap<&str, &Switch> = HashMap::new();
        for s in &self.switches {
            for child in &s.children {
                if !by_name.contains_key(child.as_str()) {
                    let (name, child) = (s.name.clone(), child.clone());
                    return Err(SwitchError::UnknownChild { line: s.line, name, child });
                }
                if let Some(first) = parent.insert(child, s) {
                    let (name, first) = (child.clone(), first.name.clone());
                    return Err(SwitchError::TwoParents { line: s.line, name, first });
                }
            }
        }
        self.check_cycles(&parent)?;
        let mut at: HashMap<&NodeName, &str> = HashMap::new();
        for s in &self.switches {
            for node in &s.nodes {
                if let Some(first) = at.insert(node, &s.name) {
                    return Err(SwitchError::TwoParents {
                        line: s.line,
                        name: node.0.clone(),
                        first: first.to_owned(),
                    });
                }
            }
        }
        self.check_blocks()
    }

    /// Every way up ends, and within [`MAX_LEVELS`]: so the work stays proportional to the number of switches.
    fn check_cycles(&self, parent: &HashMap<&str, &Switch>) -> Result<(), SwitchError> {
        for s in &self.switches {
            let up = |p: &&Switch| parent.get(p.name.as_str()).copied();
            if std::iter::successors(Some(s), up).nth(MAX_LEVELS).is_none() {
                continue;
            }
            let mut seen = std::collections::HashSet::new();
            let again = std::iter::successors(Some(s), up).find(|p| !seen.insert(p.name.as_str()));
            return Err(match again {
                Some(p) => SwitchError::Cycle { line: p.line, name: p.name.clone() },
                None => SwitchError::TooDeep { line: s.line, name: s.name.clone() },
            });
        }
        Ok(())
    }

    /// Slurm: sizes are multiples of the base block by powers of two, and there is a block.
    fn check_blocks(&self) -> Result<(), SwitchError> {
        let blocks = self.switches.iter().filter(|s| s.kind == SwitchKind::Block).count();
        let Some(base) = self.block_sizes.first() else {
            return Ok(());
        };
        if blocks == 0 {
            return Err(SwitchError::Blocks(format!(
                "BlockSizes={base} and no block: every BlockName line is missing"
            )));
        }
        let bad = self.block_sizes.iter().find(|s| **s == 0 || **s % (*base).max(1) != 0);
        match bad.or_else(|| self.block_sizes.iter().find(|s| !(**s / (*base).max(1)).is_power_of_two())) {
            Some(size) => {
                Err(SwitchError::Blocks(format!("BlockSizes: {size} is not the base size {base} times a power of two")))
            }
            None => Ok(()),
        }
    }

    /// Nodes that the topology names and the cluster does not have, and the reverse.
    pub fn unknown_nodes<'a>(&'a self, cluster: &'a [NodeName]) -> (Vec<&'a NodeName>, Vec<&'a NodeName>) {
        let known: BTreeMap<&NodeName, ()> = cluster.iter().map(|n| (n, ())).collect();
        let named: BTreeMap<&NodeName, ()> = self.leaves().flat_map(|s| &s.nodes).map(|n| (n, ())).collect();
        let unknown = named.keys().filter(|n| !known.contains_key(*n)).copied().collect();
        let missing = known.keys().filter(|n| !named.contains_key(*n)).copied().collect();
        (unknown, missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(lines: &[(&str, &[&str], &[&str])]) -> Switches {
        let switch = |(i, (name, nodes, children)): (usize, &(&str, &[&str], &[&str]))| Switch {
            name: (*name).into(),
            kind: SwitchKind::Switch,
            nodes: nodes.iter().map(|n| NodeName::from(*n)).collect(),
            children: children.iter().map(|c| (*c).to_owned()).collect(),
            line: i + 1,
        };
        Switches { switches: lines.iter().enumerate().map(switch).collect(), block_sizes: vec![] }
    }

    #[test]
    fn a_tree_has_roots_leaves_and_paths() {
        let t = tree(&[("s0", &["a", "b"], &[]), ("s1", &["c"], &[]), ("top", &[], &["s0", "s1"])]);
        assert_eq!(t.check(), Ok(()));
        assert_eq!(t.roots().iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["top"]);
        assert_eq!(t.node_count(), 3);
        assert_eq!(t.paths().get(&NodeName::from("c")), Some(&vec!["s1", "top"]));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let text = |t: &Switches| t.check().unwrap_err().to_string();
        assert_eq!(text(&tree(&[("s", &["a"], &[]), ("s", &["b"], &[])])), "line 2: s is there already, at line 1");
        assert!(text(&tree(&[("s", &[], &["x"])])).contains("names the switch x, which no line defines"));
        assert!(text(&tree(&[("a", &["n"], &["b"]), ("b", &[], &["a"])])).contains("below itself"));
        assert_eq!(
            text(&tree(&[("leaf", &["n"], &[]), ("a", &[], &["b", "leaf"]), ("b", &[], &["a"])])),
            "line 2: a is below itself"
        );
        assert!(text(&tree(&[("a", &["n"], &[]), ("b", &["n"], &[])])).contains("n is at a already"));
        assert!(text(&tree(&[("a", &[], &[])])).contains("neither"));
        assert!(text(&Switches { block_sizes: vec![20], ..Switches::default() }).contains("no block"));
    }

    #[test]
    fn a_chain_is_no_tree() {
        let switch = |i: usize| Switch {
            name: format!("s{i}"),
            nodes: vec![NodeName(format!("n{i}"))],
            children: (i > 0).then(|| format!("s{}", i - 1)).into_iter().collect(),
            line: i + 1,
            ..Switch::default()
        };
        let chain = |n| Switches { switches: (0..n).map(switch).collect(), block_sizes: vec![] };
        assert_eq!(chain(MAX_LEVELS).check(), Ok(()));
        assert!(matches!(chain(MAX_LEVELS + 1).check(), Err(SwitchError::TooDeep { line: 1, .. })));
        assert!(matches!(chain(60_000).check(), Err(SwitchError::TooDeep { .. })));
    }

    #[test]
    fn unknown_nodes_are_named_both_ways() {
        let t = tree(&[("s", &["a", "x"], &[])]);
        let cluster = [NodeName::from("a"), NodeName::from("b")];
        let (unknown, missing) = t.unknown_nodes(&cluster);
        assert_eq!((unknown, missing), (vec![&NodeName::from("x")], vec![&NodeName::from("b")]));
    }
}
