//! `rocm-smi --showtopo`: blocks of weights, hops and link types, and the NUMA nodes.

use super::{CaptureError, MAX_GPUS};
use crate::topology::{Gpu, Link, LinkKind, NodeTopology, Path, Source, XGMI_MB_S};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Hops,
    Kind,
    Other,
}

/// A block of cells by row.
#[derive(Default)]
struct Table(Vec<(usize, Vec<String>)>);

/// Reads it.
///
/// # Errors
/// With the line and the reason.
pub fn topo(text: &str) -> Result<NodeTopology, CaptureError> {
    let (mut hops, mut kinds) = (Table::default(), Table::default());
    let mut numa: Vec<(usize, u32)> = vec![];
    let mut block = Block::Other;
    for (number, line) in text.lines().enumerate().map(|(i, l)| (i + 1, l.trim())) {
        if line.starts_with("==") {
            let title = line.trim_matches('=').trim();
            block = match title {
                t if t.starts_with("Hops between") => Block::Hops,
                t if t.starts_with("Link Type between") => Block::Kind,
                _ => Block::Other,
            };
        } else if let Some((gpu, node)) = numa_line(line) {
            numa.push((gpu, node));
        } else if let Some(cells) = row(line) {
            match block {
                Block::Hops => hops.0.push((number, cells)),
                Block::Kind => kinds.0.push((number, cells)),
                Block::Other => {}
            }
        }
    }
    let n = kinds.check("Link Type")?;
    if !hops.0.is_empty() && hops.check("Hops")? != n {
        return Err(CaptureError::new(hops.line(0), "the blocks Hops and Link Type are of different size"));
    }
    let mut topology = NodeTopology::unlinked(
        Source::Capture,
        (0..n).map(|i| Gpu { name: format!("GPU{i}"), ..Gpu::default() }).collect(),
    );
    for (gpu, node) in numa {
        if let Some(g) = topology.gpus.get_mut(gpu) {
            g.numa = Some(node);
        }
    }
    for a in 0..n {
        for b in a + 1..n {
            let (kind, back) = (kinds.cell(a, b), kinds.cell(b, a));
            let link = match kind {
                "XGMI" => {
                    // Over more than one hop the links in between are shared.
                    let hops = hops.cell(a, b).parse::<u32>().unwrap_or(1).max(1);
                    let mb_s = XGMI_MB_S / hops;
                    Link { kind: LinkKind::Xgmi, count: 1, mb_s, path: None, peer_access: None }
                }
                "PCIE" => Link::pcie(Path::Sys),
                other => {
                    return Err(CaptureError::new(kinds.line(a), format!("link type {other:?} of GPU{a} and GPU{b}")));
                }
            };
            if kind != back {
                return Err(CaptureError::new(
                    kinds.line(b),
                    format!("GPU{b} says {back} for GPU{a}, GPU{a} says {kind}"),
                ));
            }
            topology.set_link(a, b, link);
        }
    }
    Ok(topology)
}

impl Table {
    fn line(&self, row: usize) -> usize {
        self.0.get(row).map_or(0, |(line, _)| *line)
    }

    fn cell(&self, row: usize, column: usize) -> &str {
        self.0.get(row).and_then(|(_, cells)| cells.get(column)).map_or("", String::as_str)
    }

    /// Its size, where it is square.
    fn check(&self, name: &str) -> Result<usize, CaptureError> {
        let n = self.0.len();
        if n == 0 {
            return Err(CaptureError::new(0, format!("the block {name} is missing or empty")));
        }
        if n > MAX_GPUS {
            return Err(CaptureError::new(self.line(0), format!("more than {MAX_GPUS} GPUs")));
        }
        match self.0.iter().find(|(_, cells)| cells.len() != n) {
            Some((line, cells)) => {
                Err(CaptureError::new(*line, format!("{} cells in a block {name} of {n} rows", cells.len())))
            }
            None => Ok(n),
        }
    }
}

/// `GPU0   0   15`: the cells of a row. A header has GPUs in all places.
fn row(line: &str) -> Option<Vec<String>> {
    let mut words = line.split_whitespace();
    let label = words.next()?.strip_prefix("GPU")?;
    let cells: Vec<String> = words.map(str::to_owned).collect();
    let is_row = label.parse::<u32>().is_ok() && !cells.is_empty() && !cells.iter().any(|c| c.starts_with("GPU"));
    is_row.then_some(cells)
}

/// `GPU 0 : (Topology) Numa Node: 3`, with or without the blank in `GPU[0]`, `GPU 0`.
fn numa_line(line: &str) -> Option<(usize, u32)> {
    let (head, node) = line.split_once("Numa Node:")?;
    let digits: String = head.chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit).collect();
    Some((digits.parse().ok()?, node.trim().parse().ok()?))
}
