//! topology.yaml (Slurm 25.05 and later): a list of topologies, each a tree, blocks, or flat.

use super::lines::template;
use super::topology_conf::checked;
use super::{ConfError, MAX_LINE, MAX_TEXT, short};
use crate::hostlist;
use crate::topology::{Switch, SwitchKind, Switches};
use serde::Deserialize;
use serde_saphyr::Spanned;
use std::collections::HashMap;

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
    topology: Spanned<String>,
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
    switch: Spanned<String>,
    children: Option<String>,
    nodes: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Blocks {
    #[serde(default)]
    block_sizes: Option<Spanned<Vec<u32>>>,
    blocks: Vec<RawBlock>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawBlock {
    block: Spanned<String>,
    nodes: Option<String>,
}

/// Reads topology.yaml and checks each of its topologies.
///
/// # Errors
/// With file, line and reason.
pub fn parse(file: &str, text: &str) -> Result<Vec<Topology>, ConfError> {
    // YAML counts a lone carriage return as a line; nobody else does.
    let last = text.lines().count();
    read(file, text).map_err(|e| ConfError { line: e.line.min(last), ..e })
}

fn read(file: &str, text: &str) -> Result<Vec<Topology>, ConfError> {
    if text.len() > MAX_TEXT {
        return Err(ConfError::new(file, 0, format!("longer than {MAX_TEXT} bytes")));
    }
    for (number, line) in text.lines().enumerate().map(|(i, l)| (i + 1, l)) {
        if line.len() > MAX_LINE {
            return Err(ConfError::new(file, number, format!("longer than {MAX_LINE} bytes")));
        }
        let bare = line.split(" #").next().filter(|l| !l.trim_start().starts_with('#')).unwrap_or_default();
        if let Some(mark) = template(bare) {
            let reason = format!("{mark} is an unrendered template: give the file that Slurm reads");
            return Err(ConfError::new(file, number, reason));
        }
    }
    let raw: Vec<Raw> = serde_saphyr::from_str(text).map_err(|e| {
        let line = e.location().map_or(0, |l| usize::try_from(l.line()).unwrap_or(0));
        ConfError::new(file, line, e.to_string().lines().next().unwrap_or_default().trim_end())
    })?;
    let mut reader = Reader { file, names: hostlist::MAX_NAMES };
    let mut lines: HashMap<String, usize> = HashMap::new();
    let mut all: Vec<Topology> = vec![];
    for raw in raw {
        let line = line_of(&raw.topology);
        let name = raw.topology.value;
        if let Some(first) = lines.insert(name.clone(), line) {
            return Err(ConfError::new(file, line, format!("{} is there already, at line {first}", short(&name))));
        }
        let switches = match (raw.tree, raw.block, raw.flat) {
            (Some(tree), None, false) => reader.tree(tree)?,
            (None, Some(blocks), false) => reader.blocks(blocks, line)?,
            (None, None, true) => Switches::default(),
            _ => {
                let reason = format!("topology {}: exactly one of tree, block and flat", short(&name));
                return Err(ConfError::new(file, line, reason));
            }
        };
        all.push(Topology { name, default: raw.cluster_default, switches });
    }
    Ok(all)
}

fn line_of<T>(of: &Spanned<T>) -> usize {
    usize::try_from(of.referenced.line()).unwrap_or(0)
}

struct Reader<'a> {
    file: &'a str,
    /// How many names the file may still stand for.
    names: usize,
}

impl Reader<'_> {
    fn list(&mut self, at: usize, of: &str, text: Option<&str>) -> Result<Vec<crate::NodeName>, ConfError> {
        let error = |reason: String| ConfError::new(self.file, at, format!("{}: {reason}", short(of)));
        let names = hostlist::expand(text.unwrap_or_default()).map_err(|e| error(e.to_string()))?;
        let left = self.names.checked_sub(names.len());
        self.names = left.ok_or_else(|| error(format!("the file has more than {} names", hostlist::MAX_NAMES)))?;
        Ok(names)
    }

    fn tree(&mut self, tree: Tree) -> Result<Switches, ConfError> {
        let mut all = Switches::default();
        for s in tree.switches {
            let line = line_of(&s.switch);
            let name = s.switch.value;
            let nodes = self.list(line, &name, s.nodes.as_deref())?;
            let children = self.list(line, &name, s.children.as_deref())?.into_iter().map(|n| n.0).collect();
            all.switches.push(Switch { name, kind: SwitchKind::Switch, nodes, children, line });
        }
        checked(self.file, all, 0)
    }

    fn blocks(&mut self, blocks: Blocks, at: usize) -> Result<Switches, ConfError> {
        let (sizes_at, block_sizes) = match blocks.block_sizes {
            Some(sizes) => (line_of(&sizes), sizes.value),
            None => (at, vec![]),
        };
        let mut all = Switches { switches: vec![], block_sizes };
        for b in blocks.blocks {
            let line = line_of(&b.block);
            let name = b.block.value;
            let nodes = self.list(line, &name, b.nodes.as_deref())?;
            all.switches.push(Switch { name, kind: SwitchKind::Block, nodes, children: vec![], line });
        }
        checked(self.file, all, sizes_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_blocks_and_flat() {
        let text = "---\n- topology: t\n  cluster_default: true\n  tree:\n    switches:\n      - switch: top\n        children: s[1-2]\n      - switch: s1\n        nodes: n[1-3]\n      - switch: s2\n        nodes: n[4-6]\n- topology: b\n  block:\n    block_sizes:\n      - 4\n      - 16\n    blocks:\n      - block: b1\n        nodes: m[1-4]\n- topology: f\n  flat: true\n";
        let all = parse("t.yaml", text).unwrap();
        assert_eq!(
            all.iter().map(|t| (t.name.as_str(), t.default)).collect::<Vec<_>>(),
            [("t", true), ("b", false), ("f", false)]
        );
        assert_eq!(all.iter().map(|t| t.switches.node_count()).collect::<Vec<_>>(), [6, 4, 0]);
        assert_eq!(all[1].switches.block_sizes, [4, 16]);
    }

    #[test]
    fn damage_is_refused_with_its_line() {
        for (text, line, word) in [
            ("- topology: t\n  tree:\n    switches:\n      - switch: a\n        nodes: n[1-\n", 4, "unbalanced"),
            ("- topology: t\n  tree:\n    switches:\n      - switch: a\n        children: b\n", 4, "no line defines"),
            ("- topology: t\n", 1, "exactly one"),
            ("- topology: t\n  flat: true\n- topology: t\n  flat: true\n", 3, "already, at line 1"),
            ("- topology: t\n  circle: 3\n", 2, "circle"),
            ("- topology: {{ x }}\n", 1, "template"),
            ("# {{ managed }}\n- topology: ${x}\n", 2, "template"),
            (
                "- topology: t\n  block:\n    block_sizes: [3, 7]\n    blocks:\n      - block: b\n        nodes: n\n",
                3,
                "power",
            ),
            ("- topology: t\n  tree: {switches: [{switch: a, nodes: 'n[0-65535],m'}]}\n", 2, "more than 65536"),
            ("- topology: \"a\\e[2J\\nb\"\n", 1, "topology a [2J b: exactly"),
            ("\r\r- topology: t\n", 1, "exactly one"),
            ("a: b", 1, ""),
            ("- topology: [", 1, ""),
        ] {
            let e = parse("t.yaml", text).unwrap_err();
            assert!(e.line == line && e.reason.contains(word), "{text:?}: {e}");
        }
    }

    #[test]
    fn aliases_do_not_multiply() {
        let mut text = "- topology: &a0 t\n  flat: true\n  x: &b0 [l, l, l, l, l, l, l, l, l, l]\n".to_owned();
        for i in 1..12 {
            text += &format!("  y{i}: &b{i} [{}]\n", vec![format!("*b{}", i - 1); 10].join(", "));
        }
        assert!(parse("t.yaml", &text).is_err());
    }

    #[test]
    fn carriage_returns_alone_are_refused() {
        // Found by fuzzing.
        assert!(parse("t.yaml", "\r\r-").unwrap_err().line <= 1);
    }
}
