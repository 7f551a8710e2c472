//! What gres.conf says about the inside of a node.

use super::{Gpu, Link, NodeTopology, Path, Source};
use crate::conf::gres_conf::{GresDevice, Layout};

impl NodeTopology {
    /// From `Links=` and `Cores=`: links are NVLinks of no known generation, a socket counts as a NUMA node. GPUs are in
    /// the order of Slurm's indexes.
    pub fn of_gres(devices: &[GresDevice], layout: Layout) -> NodeTopology {
        let gpu = |d: &GresDevice| Gpu {
            name: format!("GPU{}", d.index),
            gres_index: Some(d.index),
            model: d.kind.clone(),
            numa: d.sockets(layout).filter(|s| s.len() == 1).and_then(|s| s.first().copied()),
            ..Gpu::default()
        };
        let mut topology = NodeTopology::unlinked(Source::GresConf, devices.iter().map(gpu).collect());
        let n = devices.len();
        // gres.conf says nothing of PCIe.
        for (a, b) in (0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b))) {
            topology.set_link(a, b, Link { path: None, ..Link::pcie(Path::Sys) });
        }
        for (a, device) in devices.iter().enumerate() {
            for (b, count) in device.links.iter().flatten().enumerate().filter(|(b, _)| *b > a) {
                if let Some(count) = u32::try_from(*count).ok().filter(|c| *c > 0) {
                    topology.set_link(a, b, Link::nvlink(count, None));
                }
            }
        }
        topology
    }
}
