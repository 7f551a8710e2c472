//! Slurm's GRES index -> `File=` of gres.conf -> device minor -> bus id and UUID. Each card by itself: one that is
//! missing shifts nobody else.

use pliant_model::conf::gres_conf::GresDevice;
use pliant_model::gpu::NodeGpus;
use std::collections::BTreeMap;

/// What gres.conf says of this node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Named {
    /// Devices in Slurm's order.
    pub devices: Vec<GresDevice>,
    /// Minors of their files, in the same order; `None`: the file has none.
    pub minors: Vec<Option<u32>>,
    /// Whether Slurm finds the devices itself.
    pub auto_detect: bool,
    /// What could not be read of it.
    pub problems: Vec<String>,
}

/// Sets GRES indexes, types and problems of `node`.
pub fn identify(node: &mut NodeGpus, named: &Named) {
    for gpu in &mut node.gpus {
        (gpu.gres_index, gpu.gres_type) = (None, None);
        gpu.instances.iter_mut().for_each(|i| i.gres_index = None);
    }
    node.problems.clone_from(&named.problems);
    node.missing.clear();
    if node.absent.is_some() {
        return;
    }
    if named.devices.is_empty() {
        if named.auto_detect {
            by_minor(node);
        } else if !node.gpus.is_empty() && named.problems.is_empty() {
            node.problems.push(format!("{} GPUs, and gres.conf names none for this node", node.gpus.len()));
        }
        return;
    }
    let mut taken: BTreeMap<u32, u32> = BTreeMap::new();
    for (device, minor) in named.devices.iter().zip(&named.minors) {
        let index = device.index;
        let file = device.file.as_deref().unwrap_or("no File=");
        let Some(minor) = minor else {
            node.problems.push(format!("GRES index {index} ({file}): no device number to be had from it"));
            continue;
        };
        let Some(gpu) = node.gpus.iter_mut().find(|g| g.minor == Some(*minor)) else {
            node.problems.push(format!("GRES index {index} ({file}, minor {minor}): NVML has no such device"));
            node.missing.push(index);
            continue;
        };
        let first = *taken.entry(*minor).or_insert(index);
        if gpu.mig == Some(true) {
            if let Some(instance) = gpu.instances.iter_mut().find(|i| i.gres_index.is_none()) {
                instance.gres_index = Some(index);
            } else {
                node.problems.push(format!("GRES index {index} ({file}): no MIG instance left for it"));
            }
        } else if first != index {
            node.problems.push(format!("GRES index {index} ({file}, minor {minor}): index {first} is the same device"));
            continue;
        }
        if first == index {
            (gpu.gres_index, gpu.gres_type) = (Some(index), device.kind.clone());
        }
        if let Some(why) = &gpu.lost {
            node.problems.push(format!("GRES index {index} ({file}): {} at {} is lost: {why}", gpu.uuid, gpu.bus));
        }
    }
    for gpu in node.gpus.iter().filter(|g| g.gres_index.is_none() && g.lost.is_none()) {
        let minor = gpu.minor.map_or_else(|| "unknown".to_owned(), |m| m.to_string());
        node.problems.push(format!("{} at {} (minor {minor}): gres.conf does not name it", gpu.uuid, gpu.bus));
    }
}

/// AutoDetect without `File=`: Slurm sorts the devices by their files, so by minor.
fn by_minor(node: &mut NodeGpus) {
    let mut order: Vec<(u32, usize)> = node.gpus.iter().enumerate().filter_map(|(i, g)| Some((g.minor?, i))).collect();
    order.sort_unstable();
    for (index, (_, at)) in order.into_iter().enumerate() {
        if let Some(gpu) = node.gpus.get_mut(at) {
            gpu.gres_index = u32::try_from(index).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpus::inventory::tests::gpu;
    use pliant_model::gpu::MigInstance;

    fn device(index: u32, file: &str) -> GresDevice {
        GresDevice {
            index,
            file: Some(file.into()),
            kind: None,
            cores: None,
            cores_are_cpus: false,
            links: None,
            line: 1,
        }
    }

    fn named(minors: &[u32]) -> Named {
        let devices = (0u32..).zip(minors).map(|(i, m)| device(i, &format!("/dev/nvidia{m}"))).collect();
        Named { devices, minors: minors.iter().map(|m| Some(*m)).collect(), ..Named::default() }
    }

    fn node(minors: &[u32]) -> NodeGpus {
        let gpus = minors.iter().map(|m| pliant_model::gpu::Gpu { minor: Some(*m), ..gpu(*m) }).collect();
        NodeGpus { gpus, ..NodeGpus::default() }
    }

    fn indexes(node: &NodeGpus) -> Vec<Option<u32>> {
        node.gpus.iter().map(|g| g.gres_index).collect()
    }

    #[test]
    fn index_and_minor_are_two_numbers() {
        let mut n = node(&[0, 1, 2, 3]);
        identify(&mut n, &named(&[2, 0, 3, 1]));
        assert_eq!(indexes(&n), [Some(1), Some(3), Some(0), Some(2)]);
        assert!(n.problems.is_empty());
    }

    #[test]
    fn a_missing_card_shifts_nobody() {
        let mut n = node(&[0, 1, 3]);
        identify(&mut n, &named(&[0, 1, 2, 3]));
        assert_eq!(indexes(&n), [Some(0), Some(1), Some(3)]);
        assert_eq!(n.missing, [2]);
        assert_eq!(n.problems, ["GRES index 2 (/dev/nvidia2, minor 2): NVML has no such device"]);
        let mut n = node(&[0, 1, 2, 3]);
        n.gpus[2].lost = Some("GPU is lost".into());
        identify(&mut n, &named(&[0, 1, 2, 3]));
        assert_eq!(indexes(&n), [Some(0), Some(1), Some(2), Some(3)]);
        assert!(n.problems[0].contains("GRES index 2") && n.problems[0].contains("GPU-2"), "{:?}", n.problems);
    }

    #[test]
    fn one_device_twice_and_one_not_named() {
        let mut n = node(&[0, 1]);
        identify(&mut n, &named(&[0, 0]));
        assert_eq!(indexes(&n), [Some(0), None]);
        assert!(n.problems[0].contains("index 0 is the same device"), "{:?}", n.problems);
        assert!(n.problems[1].contains("gres.conf does not name it"));
    }

    #[test]
    fn auto_detect_goes_by_minor() {
        let mut n = node(&[3, 1, 2]);
        identify(&mut n, &Named { auto_detect: true, ..Named::default() });
        assert_eq!(indexes(&n), [Some(2), Some(0), Some(1)]);
        let mut none = node(&[0]);
        identify(&mut none, &Named::default());
        assert!(none.problems[0].contains("gres.conf names none"));
    }

    #[test]
    fn mig_instances_share_a_device() {
        let mut n = node(&[0]);
        n.gpus[0].mig = Some(true);
        let instance = |k: u32| MigInstance {
            uuid: format!("MIG-{k}"),
            profile: None,
            gpu_instance: None,
            compute_instance: None,
            memory_mib: None,
            gres_index: None,
        };
        n.gpus[0].instances = vec![instance(0), instance(1)];
        identify(&mut n, &named(&[0, 0]));
        assert_eq!(n.gpus[0].instances.iter().map(|i| i.gres_index).collect::<Vec<_>>(), [Some(0), Some(1)]);
        assert!(n.problems.is_empty(), "{:?}", n.problems);
    }
}
