//! The inside of a node.

use super::{Path, nvlink_mb_s};
use crate::gpu::{BusId, LinkPeer, NodeGpus};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Where a topology comes from. What is measured outranks what is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// `Links=` and `Cores=` of gres.conf.
    GresConf,
    /// A capture of `nvidia-smi topo -m` or `rocm-smi --showtopo`.
    Capture,
    /// The node's agent.
    Agent,
}

/// The GPUs of one node and what lies between them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeTopology {
    /// Where it comes from.
    pub source: Source,
    /// In the order of the source.
    pub gpus: Vec<Gpu>,
    /// `gpus.len()` squared, row by row, symmetric; the diagonal is [`Link::SELF`].
    pub links: Vec<Link>,
    /// Network cards, in the order of the source.
    pub nics: Vec<Nic>,
    /// What is missing or odd about the source: one sentence each (rows cut off, …).
    pub warnings: Vec<String>,
}

/// A GPU in a topology.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// As the source calls it: `GPU0`, or Slurm's GRES index from an agent.
    pub name: String,
    /// UUID, where the source has it.
    pub uuid: Option<String>,
    /// PCI bus id, where the source has it.
    pub bus: Option<BusId>,
    /// Slurm's GRES index, where the source has it.
    pub gres_index: Option<u32>,
    /// Product name or GRES type, where the source has it.
    pub model: Option<String>,
    /// NUMA node.
    pub numa: Option<u32>,
    /// Linux CPU numbers near it, ascending; empty: not known.
    pub cpus: Vec<u32>,
    /// Fabric and clique, where the GPU is part of a fabric that is ready.
    pub clique: Option<(String, u32)>,
    /// A fabric that is needed and not ready: the GPU serves single-GPU jobs only.
    pub fabric_down: bool,
    /// Whether it is out of service (lost).
    pub lost: bool,
}

/// What lies between two GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// The best kind.
    pub kind: LinkKind,
    /// Physical links that serve the pair: NVLink 2 (bonded), NVSwitch 12 (shared by all peers), PCIe 0.
    pub count: u32,
    /// Bandwidth of one direction, MB/s, for comparisons.
    pub mb_s: u32,
    /// PCIe path, where the source has it.
    pub path: Option<Path>,
    /// Whether peer access works; `None`: not known.
    pub peer_access: Option<bool>,
}

/// Kinds of links.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkKind {
    /// The GPU itself.
    Own,
    /// Point-to-point NVLink.
    NvLink,
    /// NVLink through a switch: the links are shared by all peers, never the sum over peers.
    NvSwitch,
    /// AMD's xGMI.
    Xgmi,
    /// PCIe.
    Pcie,
}

impl Link {
    /// A GPU to itself.
    pub const SELF: Link = Link { kind: LinkKind::Own, count: 0, mb_s: u32::MAX, path: None, peer_access: None };

    /// PCIe of a path.
    pub fn pcie(path: Path) -> Link {
        Link { kind: LinkKind::Pcie, count: 0, mb_s: path.mb_s(), path: Some(path), peer_access: None }
    }

    /// `count` bonded NVLinks of a generation.
    pub fn nvlink(count: u32, version: Option<u32>) -> Link {
        let mb_s = count.saturating_mul(nvlink_mb_s(version));
        Link { kind: LinkKind::NvLink, count, mb_s, path: None, peer_access: None }
    }

    /// Whether it is faster than PCIe: NVLink, NVSwitch or xGMI.
    pub fn is_linked(&self) -> bool {
        matches!(self.kind, LinkKind::NvLink | LinkKind::NvSwitch | LinkKind::Xgmi)
    }
}

/// A network card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nic {
    /// Column in the capture (`NIC0`, `mlx5_0`).
    pub name: String,
    /// Device from the NIC legend (`mlx5_bond_0`), or the column where it is a device already.
    pub device: String,
    /// Path from each GPU; `None`: not known.
    pub paths: Vec<Option<Path>>,
}

impl NodeTopology {
    /// No GPUs.
    pub fn empty(source: Source) -> NodeTopology {
        NodeTopology { source, gpus: vec![], links: vec![], nics: vec![], warnings: vec![] }
    }

    /// `n` GPUs that reach each other over PCIe between NUMA nodes, to be filled in.
    pub fn unlinked(source: Source, gpus: Vec<Gpu>) -> NodeTopology {
        let n = gpus.len();
        let at = |i: usize| if i / n == i % n { Link::SELF } else { Link::pcie(Path::Sys) };
        NodeTopology { source, links: (0..n * n).map(at).collect(), gpus, nics: vec![], warnings: vec![] }
    }

    /// What lies between two GPUs, by position.
    pub fn link(&self, a: usize, b: usize) -> Link {
        let n = self.gpus.len();
        if a >= n || b >= n {
            return Link::pcie(Path::Sys);
        }
        self.links.get(a * n + b).copied().unwrap_or(Link::pcie(Path::Sys))
    }

    /// Sets both directions.
    pub fn set_link(&mut self, a: usize, b: usize, link: Link) {
        let n = self.gpus.len();
        for at in [a * n + b, b * n + a] {
            if let (true, Some(l)) = (a < n && b < n && a != b, self.links.get_mut(at)) {
                *l = link;
            }
        }
    }

    /// Pairs that are joined by NVLink or xGMI, by position, `a < b`.
    pub fn linked_pairs(&self) -> Vec<(usize, usize)> {
        let n = self.gpus.len();
        let all = (0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b)));
        all.filter(|(a, b)| self.link(*a, *b).is_linked()).collect()
    }

    /// Physical links of a GPU: the sum over peers for point-to-point links; behind a switch the links are shared, so
    /// the most to any one peer.
    pub fn physical_links(&self, gpu: usize) -> u32 {
        let others = (0..self.gpus.len()).filter(|o| *o != gpu).map(|o| self.link(gpu, o));
        let (mut direct, mut shared) = (0u32, 0u32);
        for l in others {
            match l.kind {
                LinkKind::NvSwitch => shared = shared.max(l.count),
                LinkKind::NvLink | LinkKind::Xgmi => direct = direct.saturating_add(l.count),
                LinkKind::Own | LinkKind::Pcie => {}
            }
        }
        direct.saturating_add(shared)
    }

    /// NVLink domains: sets of GPUs each of which reaches some other of the set by a link, largest first, by position.
    /// GPUs without a link are domains of one.
    pub fn domains(&self) -> Vec<Vec<usize>> {
        let n = self.gpus.len();
        let mut of: Vec<usize> = (0..n).collect();
        for (a, b) in self.linked_pairs() {
            let (Some(&x), Some(&y)) = (of.get(a), of.get(b)) else { continue };
            of.iter_mut().filter(|d| **d == x.max(y)).for_each(|d| *d = x.min(y));
        }
        let mut sets: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        of.into_iter().enumerate().for_each(|(gpu, d)| sets.entry(d).or_default().push(gpu));
        let mut all: Vec<Vec<usize>> = sets.into_values().collect();
        all.sort_by_key(|s| std::cmp::Reverse(s.len()));
        all
    }

    /// Nearest network cards of a GPU, by position in `nics`; empty: not known.
    pub fn nearest_nics(&self, gpu: usize) -> Vec<usize> {
        let path = |n: &Nic| n.paths.get(gpu).copied().flatten();
        let best = self.nics.iter().filter_map(path).min();
        self.nics.iter().enumerate().filter(|(_, n)| best.is_some() && path(n) == best).map(|(i, _)| i).collect()
    }

    /// Marks NVLinks as shared by a switch where they cannot be point to point: more links to all peers together than
    /// a GPU has. The most that any GPU has is 18 (NVLink 4 and 5); before, 12 (A100) and 6 (V100), and in a capture
    /// all peers of a switch show the same count.
    pub fn detect_switch(&mut self) {
        let n = self.gpus.len();
        for domain in self.domains().into_iter().filter(|d| d.len() > 2) {
            let counts: Vec<u32> = domain
                .iter()
                .flat_map(|a| domain.iter().filter(move |b| *b != a).map(move |b| (*a, *b)))
                .map(|(a, b)| self.link(a, b))
                .map(|l| if l.kind == LinkKind::NvLink { l.count } else { 0 })
                .collect();
            let Some(first) = counts.first().copied().filter(|c| *c > 0 && counts.iter().all(|k| k == c)) else {
                continue;
            };
            let peers = u32::try_from(domain.len() - 1).unwrap_or(u32::MAX);
            // NV4 to three peers is a mesh of the 12 links of an A100; NV12 to three peers is 36: a switch (or an
            // A100 board whose capture counts all links per peer: shared either way).
            let most = if first > 12 {
                18
            } else if first > 6 || domain.len() <= 4 {
                12
            } else {
                6
            };
            if first.saturating_mul(peers) > most {
                for a in 0..n {
                    for b in a + 1..n {
                        let l = self.link(a, b);
                        if domain.contains(&a) && domain.contains(&b) {
                            self.set_link(a, b, Link { kind: LinkKind::NvSwitch, ..l });
                        }
                    }
                }
            }
        }
    }

    /// The topology that an agent has measured. GPUs are in the order of [`NodeGpus::gpus`].
    pub fn of_agent(node: &NodeGpus) -> NodeTopology {
        let gpus = node.gpus.iter().map(|g| Gpu {
            name: g.gres_index.map_or_else(|| g.bus.to_string(), |i| format!("GPU{i}")),
            uuid: Some(g.uuid.clone()),
            bus: Some(g.bus.clone()),
            gres_index: g.gres_index,
            model: g.model.clone(),
            numa: g.numa,
            cpus: g.cpus.clone().unwrap_or_default(),
            clique: g.fabric.as_ref().filter(|f| f.ready && f.has_cluster()).map(|f| (f.cluster.clone(), f.clique)),
            fabric_down: g.fabric.as_ref().is_some_and(|f| !f.ready),
            lost: g.lost.is_some(),
        });
        let mut topology = NodeTopology::unlinked(Source::Agent, gpus.collect());
        topology.warnings.clone_from(&node.problems);
        for pair in &node.pairs {
            let (a, b) = (at(pair.a), at(pair.b));
            let pcie = Link::pcie(pair.path.unwrap_or(Path::Sys));
            let link = nvlinks(node, a, b).unwrap_or(pcie);
            topology.set_link(a, b, Link { path: pair.path, peer_access: pair.peer_access, ..link });
        }
        topology
    }
}

impl crate::gpu::Fabric {
    /// Whether it names a fabric.
    pub fn has_cluster(&self) -> bool {
        self.cluster.bytes().any(|b| b != b'0' && b != b'-')
    }
}

fn at(position: u32) -> usize {
    usize::try_from(position).unwrap_or(usize::MAX)
}

/// The NVLinks between two GPUs: those that end at each other, or else the smaller number of those that both have to
/// a switch.
fn nvlinks(node: &NodeGpus, a: usize, b: usize) -> Option<Link> {
    let (a, b) = (node.gpus.get(a)?, node.gpus.get(b)?);
    let up = |g: &crate::gpu::Gpu, to: &LinkPeer| {
        let links: Vec<_> = g.nvlinks.iter().filter(|l| l.active && l.peer == *to).map(|l| l.version).collect();
        (u32::try_from(links.len()).unwrap_or(u32::MAX), links.into_iter().flatten().min())
    };
    // Both ends say the same, unless one is lost and the other's links to it are down.
    let ((one, version), (other, older)) = (up(a, &LinkPeer::Gpu(b.bus.clone())), up(b, &LinkPeer::Gpu(a.bus.clone())));
    if one.max(other) > 0 {
        return Some(Link::nvlink(one.max(other), version.or(older)));
    }
    let ((from, version), (to, _)) = (up(a, &LinkPeer::Switch), up(b, &LinkPeer::Switch));
    let shared = from.min(to);
    (shared > 0).then(|| Link { kind: LinkKind::NvSwitch, ..Link::nvlink(shared, version) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh(n: usize, count: u32) -> NodeTopology {
        let gpus = (0..n).map(|i| Gpu { name: format!("GPU{i}"), ..Gpu::default() }).collect();
        let mut t = NodeTopology::unlinked(Source::Capture, gpus);
        for a in 0..n {
            for b in a + 1..n {
                t.set_link(a, b, Link::nvlink(count, None));
            }
        }
        t.detect_switch();
        t
    }

    #[test]
    fn a_switch_is_shared_and_a_mesh_is_not() {
        for (n, count, links, kind) in [
            (8, 12, 12, LinkKind::NvSwitch), // DGX A100
            (16, 6, 6, LinkKind::NvSwitch),  // DGX-2
            (8, 18, 18, LinkKind::NvSwitch), // HGX H100
            (4, 18, 18, LinkKind::NvSwitch), // islands of four
            (4, 12, 12, LinkKind::NvSwitch), // four A100 whose capture says NV12 to each
            (4, 4, 12, LinkKind::NvLink),    // four A100 in a mesh
            (2, 12, 12, LinkKind::NvLink),   // a bridged pair
        ] {
            let t = mesh(n, count);
            assert_eq!((t.physical_links(0), t.link(0, 1).kind), (links, kind), "{n} x NV{count}");
        }
    }

    #[test]
    fn domains_are_what_links_join() {
        let mut t = NodeTopology::unlinked(Source::Capture, (0..5).map(|_| Gpu::default()).collect());
        t.set_link(0, 3, Link::nvlink(2, Some(2)));
        t.set_link(3, 4, Link::nvlink(1, Some(2)));
        assert_eq!(t.domains(), [vec![0, 3, 4], vec![1], vec![2]]);
        assert_eq!(t.link(3, 0).mb_s, 50_000);
        assert_eq!(t.linked_pairs(), [(0, 3), (3, 4)]);
    }
}
