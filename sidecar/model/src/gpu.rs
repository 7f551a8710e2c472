//! GPUs of a node as its agent reads them: what is fixed ([`NodeGpus`]), what changes each second ([`Sample`]) and
//! what happens ([`GpuEvent`]).
//!
//! Four numbers name a GPU and are all different: Slurm's GRES index, the device minor, NVML's index, CUDA's ordinal.
//! Identity is the UUID, or the PCI bus id. `None` always means "not available", and is never to be read as 0.

use crate::ids::{JobId, NodeName};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Milliseconds since the Unix epoch.
pub type Millis = u64;

/// A PCI bus id in one form: `00000000:07:00.0`, domain of 8 hex digits, lower case.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BusId(String);

/// A text that is no PCI bus id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no PCI bus id such as 0000:07:00.0")]
pub struct BusIdError(pub String);

impl BusId {
    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::str::FromStr for BusId {
    type Err = BusIdError;
    /// Takes a domain of 4 or 8 digits or none, any case, with or without `.function`.
    fn from_str(text: &str) -> Result<Self, BusIdError> {
        let bad = || BusIdError(text.chars().take(40).collect());
        let hex = |s: &str, most: usize| {
            let ok = !s.is_empty() && s.len() <= most && s.bytes().all(|b| b.is_ascii_hexdigit());
            ok.then(|| u32::from_str_radix(s, 16).ok()).flatten().ok_or_else(bad)
        };
        let parts: Vec<&str> = text.trim().split(':').collect();
        let (domain, bus, rest) = match parts.as_slice() {
            [bus, rest] => (0, hex(bus, 2)?, *rest),
            [domain, bus, rest] => (hex(domain, 8)?, hex(bus, 2)?, *rest),
            _ => return Err(bad()),
        };
        let (device, function) = rest.split_once('.').unwrap_or((rest, "0"));
        Ok(BusId(format!("{domain:08x}:{bus:02x}:{:02x}.{:x}", hex(device, 2)?, hex(function, 1)?)))
    }
}

impl TryFrom<String> for BusId {
    type Error = BusIdError;
    fn try_from(text: String) -> Result<Self, BusIdError> {
        text.parse()
    }
}

impl From<BusId> for String {
    fn from(id: BusId) -> String {
        id.0
    }
}

impl fmt::Display for BusId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Names one GPU of the cluster for good.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GpuId {
    /// Its node.
    pub node: NodeName,
    /// Where it sits.
    pub bus: BusId,
    /// NVML's UUID, `GPU-…`.
    pub uuid: String,
}

impl fmt::Display for GpuId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {} ({})", self.uuid, self.node, self.bus)
    }
}

/// What is fixed about the GPUs of a node, until one is lost, comes back, or is cut anew.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeGpus {
    /// The kernel's boot id.
    pub boot_id: String,
    /// Version of the NVIDIA driver; `None`: no driver, or it did not say.
    pub driver: Option<String>,
    /// Why no GPUs can be listed at all (library absent, driver not loaded); the list is empty then.
    pub absent: Option<String>,
    /// By bus id. A lost card stays in the list, marked.
    pub gpus: Vec<Gpu>,
    /// Each pair once, `a < b`; positions in `gpus`.
    pub pairs: Vec<Pair>,
    /// GRES indexes that gres.conf names and no device stands behind.
    #[serde(default)]
    pub missing: Vec<u32>,
    /// What does not agree between gres.conf and the hardware: one sentence each, for people.
    pub problems: Vec<String>,
}

/// A GPU as it is built in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// NVML's UUID.
    pub uuid: String,
    /// PCI bus id.
    pub bus: BusId,
    /// NVML's index (changes when another card is lost).
    pub nvml_index: u32,
    /// Device minor: N of `/dev/nvidiaN`.
    pub minor: Option<u32>,
    /// Slurm's GRES index on this node; `None`: gres.conf does not name this device.
    pub gres_index: Option<u32>,
    /// The `Type=` of its line in gres.conf.
    pub gres_type: Option<String>,
    /// Product name.
    pub model: Option<String>,
    /// Memory in MiB.
    pub memory_mib: Option<u64>,
    /// Whether MIG is enabled.
    pub mig: Option<bool>,
    /// MIG instances.
    pub instances: Vec<MigInstance>,
    /// Compute mode.
    pub compute_mode: Option<ComputeMode>,
    /// Whether an MPS server serves it.
    pub mps: Option<bool>,
    /// CPUs (Linux numbers) near it, ascending.
    pub cpus: Option<Vec<u32>>,
    /// NUMA node of those CPUs.
    pub numa: Option<u32>,
    /// Its NVLinks, those that exist.
    pub nvlinks: Vec<NvLink>,
    /// NVLink fabric (NVSwitch systems that need a fabric manager).
    pub fabric: Option<Fabric>,
    /// Set when the card has fallen off the bus or answers no more: why.
    pub lost: Option<String>,
}

impl Gpu {
    /// A card of which no more is known than where it is.
    pub fn new(uuid: impl Into<String>, bus: BusId, nvml_index: u32) -> Gpu {
        Gpu {
            uuid: uuid.into(),
            bus,
            nvml_index,
            minor: None,
            gres_index: None,
            gres_type: None,
            model: None,
            memory_mib: None,
            mig: None,
            instances: vec![],
            compute_mode: None,
            mps: None,
            cpus: None,
            numa: None,
            nvlinks: vec![],
            fabric: None,
            lost: None,
        }
    }
}

/// A MIG instance (a compute instance that jobs can use).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigInstance {
    /// `MIG-…`
    pub uuid: String,
    /// Profile, `1g.5gb`.
    pub profile: Option<String>,
    /// GPU instance id.
    pub gpu_instance: Option<u32>,
    /// Compute instance id.
    pub compute_instance: Option<u32>,
    /// Memory in MiB.
    pub memory_mib: Option<u64>,
    /// Slurm's GRES index; `None`: not known.
    pub gres_index: Option<u32>,
}

/// Who may use a GPU at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ComputeMode {
    /// Any number of processes.
    Default,
    /// One process (MPS: its server).
    ExclusiveProcess,
    /// Nobody.
    Prohibited,
}

/// One physical NVLink.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvLink {
    /// Number on its GPU.
    pub link: u32,
    /// Whether it is up.
    pub active: bool,
    /// Generation; see [`crate::topology::nvlink_mb_s`].
    pub version: Option<u32>,
    /// What is at the other end.
    pub peer: LinkPeer,
}

/// The other end of an NVLink.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkPeer {
    /// Another GPU.
    Gpu(BusId),
    /// An NVSwitch: the links are shared by all peers behind it.
    Switch,
    /// Something else, or not said.
    Unknown,
}

/// State of a GPU in an NVLink fabric.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fabric {
    /// Whether registration is complete and without error. Until then only single-GPU jobs work.
    pub ready: bool,
    /// NVML's state and status, in words.
    pub state: String,
    /// UUID of the fabric (an NVL72 domain), hex; empty or all zero: none.
    pub cluster: String,
    /// Clique within it: GPUs with the same cluster and clique reach each other by NVLink, across nodes too.
    pub clique: u32,
}

/// Two GPUs of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pair {
    /// Position of one.
    pub a: u32,
    /// Position of the other.
    pub b: u32,
    /// How they reach each other over PCIe.
    pub path: Option<crate::topology::Path>,
    /// Whether peer access works (over whatever link).
    pub peer_access: Option<bool>,
}

/// What one look at a GPU shows. Every value is optional.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Which GPU.
    pub uuid: String,
    /// When.
    pub at_ms: Millis,
    /// Percent of time in which a kernel ran.
    pub utilisation: Option<u32>,
    /// Memory in use, MiB.
    pub memory_used_mib: Option<u64>,
    /// Processes on it (and on its MIG instances); `None`: not available.
    pub processes: Option<Vec<Process>>,
    /// SM clock, MHz.
    pub sm_clock_mhz: Option<u32>,
    /// Memory clock, MHz.
    pub memory_clock_mhz: Option<u32>,
    /// Why clocks are held down; empty: they are not.
    pub throttle: Option<Vec<String>>,
    /// Power draw, mW.
    pub power_mw: Option<u32>,
    /// Temperature, degrees Celsius.
    pub temperature_c: Option<u32>,
    /// Uncorrected memory errors since the driver was loaded.
    pub ecc_uncorrected: Option<u64>,
    /// Corrected memory errors since the driver was loaded.
    pub ecc_corrected: Option<u64>,
    /// Retired pages (or remapped rows).
    pub retired_pages: Option<u32>,
    /// PCIe throughput to the GPU, KB/s.
    pub pcie_rx_kb_s: Option<u32>,
    /// PCIe throughput from the GPU, KB/s.
    pub pcie_tx_kb_s: Option<u32>,
    /// NVLink errors (replay, recovery, CRC) summed over links.
    pub nvlink_errors: Option<u64>,
}

/// A process on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Pid on the host.
    pub pid: u32,
    /// Owner, where /proc tells.
    pub uid: Option<u32>,
    /// Its Slurm job, proven; `None`: it belongs to none, or that could not be told.
    pub job: Option<JobId>,
    /// Memory it holds, MiB.
    pub memory_mib: Option<u64>,
    /// State letter of /proc (`D`: does not die); `None`: there is no such process any more.
    pub state: Option<char>,
    /// UUID of the MIG instance, where it is on one.
    pub instance: Option<String>,
}

/// Something that happened to a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuEvent {
    /// When.
    pub at_ms: Millis,
    /// The boot in which it happened.
    pub boot_id: String,
    /// Which GPU.
    pub gpu: GpuId,
    /// Slurm's GRES index of it.
    pub gres_index: Option<u32>,
    /// What.
    pub what: Happening,
}

/// What can happen to a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Happening {
    /// It has fallen off the bus, or answers no more.
    Lost {
        /// NVML's words.
        why: String,
    },
    /// It is back.
    Back,
    /// An Xid error of the driver.
    Xid {
        /// Its number (NVIDIA, "Xid Errors").
        code: u64,
        /// Whether an application's own fault causes it: no reason to take the GPU out of service.
        by_user: bool,
    },
    /// A process of a job on a GPU that its job does not hold, or of no job at all.
    Outside {
        /// The process.
        pid: u32,
        /// Its owner.
        uid: Option<u32>,
        /// Its job.
        job: Option<JobId>,
    },
    /// Memory is held and no live process owns it.
    Orphaned {
        /// MiB in use.
        memory_mib: u64,
    },
    /// A process that does not end: the GPU stays held.
    Stuck {
        /// The process.
        pid: u32,
        /// Its state letter.
        state: char,
        /// Its job.
        job: Option<JobId>,
    },
    /// A task runs on CPUs that are far from its GPU.
    Far {
        /// The process.
        pid: u32,
        /// Its job.
        job: Option<JobId>,
        /// CPUs near the GPU, as a list of ranges.
        near: String,
        /// CPUs that the task may use.
        task: String,
    },
    /// The clocks are held down.
    Throttled {
        /// Why.
        why: Vec<String>,
    },
    /// Uncorrected memory errors are more than before.
    Ecc {
        /// How many since the driver was loaded.
        uncorrected: u64,
    },
}

impl fmt::Display for Happening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |job: &Option<JobId>| job.map_or_else(|| "no job".to_owned(), |j| format!("job {j}"));
        match self {
            Happening::Lost { why } => write!(f, "lost: {why}"),
            Happening::Back => f.write_str("back in service"),
            Happening::Xid { code, by_user: true } => write!(f, "Xid {code}, caused by the application"),
            Happening::Xid { code, by_user: false } => write!(f, "Xid {code}"),
            Happening::Outside { pid, uid, job } => {
                let uid = uid.map_or_else(|| "unknown".to_owned(), |u| u.to_string());
                write!(f, "process {pid} of uid {uid} ({}) is outside its allocation", of(job))
            }
            Happening::Orphaned { memory_mib } => write!(f, "{memory_mib} MiB held, no running owner"),
            Happening::Stuck { pid, state, job } => {
                write!(f, "process {pid} of {} is in state {state} and holds the GPU", of(job))
            }
            Happening::Far { pid, job, near, task } => {
                write!(f, "process {pid} of {} runs on CPUs {task}, the GPU is near {near}", of(job))
            }
            Happening::Throttled { why } => write!(f, "clocks held down: {}", why.join(", ")),
            Happening::Ecc { uncorrected } => write!(f, "{uncorrected} uncorrected memory errors"),
        }
    }
}

/// Whether an Xid is the application's own fault: 13 (graphics engine exception), 31 (memory page fault) and 43
/// (GPU stopped processing) do not tell of broken hardware (NVIDIA, "Xid Errors").
pub fn xid_by_user(code: u64) -> bool {
    matches!(code, 13 | 31 | 43)
}

impl NodeGpus {
    /// The GPU with a GRES index of Slurm.
    pub fn by_gres(&self, index: u32) -> Option<&Gpu> {
        self.gpus.iter().find(|g| g.gres_index == Some(index))
    }

    /// The GPU with that UUID (or with a MIG instance of it).
    pub fn by_uuid(&self, uuid: &str) -> Option<&Gpu> {
        self.gpus.iter().find(|g| g.uuid == uuid || g.instances.iter().any(|i| i.uuid == uuid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_form_of_bus_ids() {
        for text in ["07:00.0", "0000:07:00.0", "00000000:07:00.0", "0:07:00", " 00000000:07:00.0"] {
            assert_eq!(text.parse::<BusId>().unwrap().as_str(), "00000000:07:00.0", "{text}");
        }
        assert_eq!("0000:AF:00.1".parse::<BusId>().unwrap().as_str(), "00000000:af:00.1");
        for bad in ["", "07", "0000:07:zz.0", "000000000:07:00.0", "a:b:c:d", "0000:070:00.0", "0:1:+2.0"] {
            assert!(bad.parse::<BusId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn faults_of_applications_are_told_apart() {
        assert!([13, 31, 43].into_iter().all(xid_by_user));
        assert!(![48, 63, 74, 79, 94, 95].into_iter().any(xid_by_user));
    }
}
