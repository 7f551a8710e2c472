//! The scenario file.

use serde::Deserialize;
use std::collections::BTreeMap;

/// What the file says.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Scenario {
    /// Number of the node, part of every UUID.
    pub node: u32,
    /// Version of the driver.
    pub driver: String,
    /// Version of NVML.
    pub nvml: String,
    /// CUDA version as NVML counts it: 12020 is 12.2.
    pub cuda: i32,
    /// What all GPUs have in common, and how they are joined.
    #[serde(rename = "box")]
    pub of_box: Box,
    /// Changes to single GPUs, by position.
    pub gpu: BTreeMap<String, Change>,
    /// Calls that fail.
    pub fail: Vec<Fail>,
    /// Functions that this version of the library does not have.
    pub missing: Vec<String>,
    /// Microseconds that a call takes; `default` for those not named.
    pub latency_us: BTreeMap<String, u64>,
    /// Xid errors; each is delivered once, in order.
    pub xid: Vec<Xid>,
}

/// `[box]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Box {
    /// GPUs.
    pub count: usize,
    /// Product name.
    pub name: String,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// PCI bus ids, one each.
    pub bus: Vec<String>,
    /// NUMA node of each; empty: one node.
    pub numa: Vec<u32>,
    /// CPUs of each NUMA node, by its number.
    pub cpus: BTreeMap<String, String>,
    /// Words of `nvidia-smi topo -m` between GPUs, a row each; empty: NODE within a NUMA node, SYS between.
    pub level: Vec<String>,
    /// NVLinks to each other GPU, a row each.
    pub nvlink: Vec<String>,
    /// Links of each GPU to NVSwitches.
    pub switch_links: u32,
    /// Generation of the links.
    pub nvlink_version: u32,
    /// Whether peers reach each other.
    pub peers: bool,
    /// Queries that these GPUs do not support, by the name of the call.
    pub unsupported: Vec<String>,
    /// Virtualization mode as NVML counts it: 0 none, 1 pass-through, 2 vGPU.
    pub virtualization: u32,
    /// State of the fabric: 0 not supported, 1 not started, 2 in progress, 3 completed.
    pub fabric_state: u32,
    /// UUID of the fabric, 32 hexadecimal digits.
    pub fabric_cluster: String,
    /// Clique in it.
    pub fabric_clique: u32,
}

/// `[gpu.N]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Change {
    /// Another product name.
    pub name: Option<String>,
    /// Other memory, MiB.
    pub memory_mib: Option<u64>,
    /// Another minor than its position.
    pub minor: Option<u32>,
    /// `error`: every call says that it is lost; `gone`: the driver lists it no more.
    pub lost: Option<String>,
    /// Percent; several follow each other second by second.
    pub utilisation: Vec<u32>,
    /// Memory in use, MiB.
    pub memory_used_mib: u64,
    /// Processes on it.
    pub processes: Vec<Process>,
    /// 0 default, 2 prohibited, 3 exclusive process.
    pub compute_mode: u32,
    /// Bits of clock throttle reasons.
    pub throttle: u64,
    /// mW.
    pub power_mw: Option<u32>,
    /// Degrees.
    pub temperature_c: Option<u32>,
    /// Uncorrected memory errors.
    pub ecc_uncorrected: u64,
    /// Corrected memory errors.
    pub ecc_corrected: u64,
    /// Retired pages.
    pub retired_pages: u32,
    /// Errors of each NVLink.
    pub nvlink_errors: u64,
    /// Links that are down, by number.
    pub links_down: Vec<u32>,
    /// MIG: enabled or not; `None`: this GPU has none.
    pub mig: Option<bool>,
    /// MIG instances.
    pub instances: Vec<Instance>,
    /// Fabric state of this GPU.
    pub fabric_state: Option<u32>,
}

/// A process on a GPU.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Process {
    /// Pid.
    pub pid: u32,
    /// Memory, MiB; `None`: not available.
    pub memory_mib: Option<u64>,
    /// GPU instance id of MIG.
    pub gpu_instance: Option<u32>,
}

/// A MIG instance.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Instance {
    /// `1g.5gb`
    pub profile: String,
    /// Memory, MiB.
    pub memory_mib: u64,
}

/// `[[fail]]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Fail {
    /// The call.
    pub call: String,
    /// Position of the GPU; `None`: all.
    pub device: Option<usize>,
    /// Number of NVML's error: 3 not supported, 15 GPU is lost, 999 unknown.
    pub error: u32,
}

/// `[[xid]]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Xid {
    /// Position of the GPU.
    pub device: usize,
    /// Number.
    pub code: u64,
}

/// A GPU, worked out.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// Position in the box.
    pub position: usize,
    /// UUID.
    pub uuid: String,
    /// Product name.
    pub name: String,
    /// Minor.
    pub minor: u32,
    /// Domain, bus, device.
    pub bus: (u32, u32, u32),
    /// NUMA node.
    pub numa: u32,
    /// CPUs near it.
    pub cpus: Vec<u32>,
    /// Memory in bytes.
    pub memory: u64,
    /// Each NVLink: the position of the other GPU, or `None` for a switch.
    pub links: Vec<Option<usize>>,
    /// The rest.
    pub change: Change,
}

impl Scenario {
    /// Reads it.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn parse(text: &str) -> Result<Scenario, String> {
        let scenario: Scenario = toml::from_str(text).map_err(|e| e.to_string())?;
        scenario.gpus()?;
        Ok(scenario)
    }

    /// Every GPU of the box, lost ones too.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn gpus(&self) -> Result<Vec<Gpu>, String> {
        let b = &self.of_box;
        if let Some(key) = self.gpu.keys().find(|k| k.parse::<usize>().ok().is_none_or(|n| n >= b.count)) {
            return Err(format!("[gpu.{key}]: there are {} GPUs", b.count));
        }
        (0..b.count).map(|i| self.gpu(i)).collect()
    }

    fn gpu(&self, i: usize) -> Result<Gpu, String> {
        let b = &self.of_box;
        let change = self.gpu.get(&i.to_string()).cloned().unwrap_or_default();
        let name = change.name.clone().unwrap_or_else(|| b.name.clone());
        let numa = b.numa.get(i).copied().unwrap_or(0);
        let text = b.bus.get(i).ok_or_else(|| format!("bus: none for GPU {i}"))?;
        let number = u32::try_from(i).unwrap_or(u32::MAX);
        Ok(Gpu {
            position: i,
            uuid: format!("GPU-{:08x}-{:04x}-4000-8000-{number:012x}", hash(&b.name), self.node),
            minor: change.minor.unwrap_or(number),
            bus: bus(text).ok_or_else(|| format!("bus: {text:?}"))?,
            numa,
            cpus: b.cpus.get(&numa.to_string()).map_or(Ok(vec![]), |t| list(t).ok_or(format!("cpus: {t:?}")))?,
            memory: change.memory_mib.unwrap_or(b.memory_mib) << 20,
            links: self.links(i)?,
            name,
            change,
        })
    }

    fn links(&self, i: usize) -> Result<Vec<Option<usize>>, String> {
        let b = &self.of_box;
        let mut links = vec![None; b.switch_links as usize];
        if let Some(row) = b.nvlink.get(i) {
            let cells: Vec<&str> = row.split_whitespace().collect();
            if cells.len() != b.count {
                return Err(format!("nvlink: row {i} has {} cells", cells.len()));
            }
            for (peer, cell) in cells.iter().enumerate().filter(|(_, c)| **c != "-") {
                let count: usize = cell.parse().map_err(|_| format!("nvlink: {cell:?} in row {i}"))?;
                links.extend(std::iter::repeat_n(Some(peer), count));
            }
        }
        Ok(links)
    }

    /// NVML's topology level between two GPUs.
    pub fn level(&self, a: &Gpu, b: &Gpu) -> u32 {
        let row = self.of_box.level.get(a.position);
        let word = row.and_then(|r| r.split_whitespace().nth(b.position));
        match word {
            Some("PSB") => 0,
            Some("PIX") => 10,
            Some("PXB") => 20,
            Some("PHB") => 30,
            Some("NODE") => 40,
            Some(_) => 50,
            None if a.numa == b.numa => 40,
            None => 50,
        }
    }
}

/// FNV-1a: a UUID must not differ from run to run.
fn hash(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |h, b| (h ^ u32::from(b)).wrapping_mul(0x0100_0193))
}

/// `0000:07:00.0`, the domain may be missing.
fn bus(text: &str) -> Option<(u32, u32, u32)> {
    let parts: Vec<&str> = text.split(':').collect();
    let hex = |t: &str| u32::from_str_radix(t, 16).ok();
    let (domain, bus, rest) = match parts.as_slice() {
        [bus, rest] => (0, hex(bus)?, *rest),
        [domain, bus, rest] => (hex(domain)?, hex(bus)?, *rest),
        _ => return None,
    };
    Some((domain, bus, hex(rest.split('.').next()?)?))
}

/// `0-3,8`
fn list(text: &str) -> Option<Vec<u32>> {
    let mut all = vec![];
    for part in text.split(',') {
        let (a, b) = part.split_once('-').unwrap_or((part, part));
        all.extend(a.trim().parse::<u32>().ok()?..=b.trim().parse().ok()?);
    }
    Some(all)
}
