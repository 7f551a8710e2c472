//! Topology: cluster - block or spine - leaf switch - node - NVLink domain - socket/NUMA - GPU.
//!
//! [`NodeTopology`] is the inside of a node, whatever source it comes from (an agent, a capture of `nvidia-smi topo
//! -m`, `Links=` of gres.conf); [`Switches`] is what joins the nodes.

mod gres;
mod node;
mod switches;

pub use node::{Gpu, Link, LinkKind, Nic, NodeTopology, Source};
pub use switches::{MAX_LEVELS, Switch, SwitchError, SwitchKind, Switches};

use serde::{Deserialize, Serialize};

/// How two devices reach each other over PCIe; nearest first, so that `<` means nearer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Path {
    /// Two GPUs on one board (NVML's "internal").
    Internal,
    /// At most one PCIe bridge.
    Pix,
    /// Several PCIe bridges, no host bridge.
    Pxb,
    /// A PCIe host bridge.
    Phb,
    /// Several host bridges of one NUMA node.
    Node,
    /// Between NUMA nodes (old captures: SOC).
    Sys,
}

impl Path {
    /// The word of `nvidia-smi topo -m`; `SOC` of old drivers is SYS.
    pub fn parse(word: &str) -> Option<Path> {
        Some(match word {
            "PIX" => Path::Pix,
            "PXB" => Path::Pxb,
            "PHB" => Path::Phb,
            "NODE" => Path::Node,
            "SYS" | "SOC" => Path::Sys,
            _ => return None,
        })
    }

    /// Bandwidth of one direction in MB/s for comparisons: measured orders of magnitude on PCIe 3.0 x16, where only
    /// the ranking matters (any NVLink is above all of them).
    pub fn mb_s(self) -> u32 {
        match self {
            Path::Internal => 13_000,
            Path::Pix => 12_000,
            Path::Pxb => 11_000,
            Path::Phb => 10_000,
            Path::Node => 9_000,
            Path::Sys => 8_000,
        }
    }
}

impl std::fmt::Display for Path {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Path::Internal => "PSB",
            Path::Pix => "PIX",
            Path::Pxb => "PXB",
            Path::Phb => "PHB",
            Path::Node => "NODE",
            Path::Sys => "SYS",
        })
    }
}

/// Bandwidth of one NVLink in one direction, MB/s, by generation (NVIDIA: NVLink 1 20 GB/s, 2 to 4 25 GB/s, 5 50 GB/s).
/// An unknown generation counts as 25 GB/s.
pub fn nvlink_mb_s(version: Option<u32>) -> u32 {
    match version {
        Some(1) => 20_000,
        Some(5) => 50_000,
        _ => 25_000,
    }
}

/// Bandwidth of one xGMI link in one direction, MB/s (AMD: 50 GB/s on MI200).
pub const XGMI_MB_S: u32 = 50_000;
