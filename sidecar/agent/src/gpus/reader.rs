//! NVML, read once a second in a thread of its own.
//!
//! Every query is optional: one that fails hides neither the device nor the other values. What a device does not
//! support is not asked again until the next inventory; an error that repeats is logged once, with its count later.

use super::inventory::{Look, merge};
use crate::shared::clock_ms;
use nvml_wrapper::Device;
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{
    Clock, ComputeMode as Mode, EccCounter, MemoryError, P2pCapabilitiesIndex, P2pStatus, PcieUtilCounter,
    RetirementCause, TemperatureSensor, TopologyLevel,
};
use nvml_wrapper::enum_wrappers::nv_link::ErrorCounter;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::event::EventSet;
use pliant_model::gpu::{
    BusId, ComputeMode, Fabric, Gpu, Happening, LinkPeer, MigInstance, NodeGpus, NvLink, Pair, Process, Sample,
};
use pliant_model::topology::Path;
use pliant_nvml::LinkEnd;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_ulong;
use std::path::{Path as File, PathBuf};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Between two looks.
const EVERY: Duration = Duration::from_secs(1);
/// Looks between two of what changes slowly or costs much.
const SLOW: u32 = 10;
/// Looks between two inventories.
const INVENTORY: u32 = 60;
/// Messages on their way to the agent.
const QUEUE: usize = 64;
/// 64-bit words for CPUs (4,096 of them) and for NUMA nodes.
const CPU_WORDS: usize = 64;
const NUMA_WORDS: usize = 4;
/// NVLinks that a GPU may have.
const LINKS: u32 = 18;
/// MIG instances that a GPU may have.
const INSTANCES: u32 = 8;
/// NVML's scope "NUMA node".
const SCOPE_NODE: u32 = 0;

/// What the thread tells.
#[derive(Debug)]
pub enum Seen {
    /// The GPUs, and what has happened to some since the last time.
    Inventory(Box<NodeGpus>, Vec<(String, Happening)>),
    /// What they do.
    Samples(Vec<Sample>),
    /// An Xid error.
    Xid {
        /// Where.
        bus: BusId,
        /// Its number.
        code: u64,
    },
}

/// Starts the thread; it ends with the receiver.
pub fn start(library: PathBuf) -> std::io::Result<mpsc::Receiver<Seen>> {
    let (seen, receiver) = mpsc::channel(QUEUE);
    std::thread::Builder::new().name("nvml".into()).stack_size(512 << 10).spawn(move || {
        let mut known = NodeGpus::default();
        while !seen.is_closed() {
            let opened = Nvml::builder().lib_path(library.as_os_str()).init();
            let why = match opened {
                Ok(nvml) => match serve(&nvml, &seen, &mut known) {
                    Some(why) => why,
                    None => return,
                },
                Err(e) => absent(&library, &e),
            };
            if known.absent.as_ref() != Some(&why) {
                tracing::info!("no GPU telemetry: {why}");
                known.absent = Some(why);
                if seen.blocking_send(Seen::Inventory(Box::new(known.clone()), vec![])).is_err() {
                    return;
                }
            }
            // A driver may be loaded later.
            for _ in 0..INVENTORY {
                std::thread::sleep(EVERY);
                if seen.is_closed() {
                    return;
                }
            }
        }
    })?;
    Ok(receiver)
}

fn absent(library: &File, e: &NvmlError) -> String {
    match e {
        NvmlError::LibloadingError(_) => format!("{} is not there", library.display()),
        other => other.to_string(),
    }
}

/// Reads until the receiver is gone (`None`) or NVML works no more (why).
fn serve(nvml: &Nvml, seen: &mpsc::Sender<Seen>, known: &mut NodeGpus) -> Option<String> {
    let mut reader = Reader::new(nvml);
    let mut events: Option<EventSet<'_>> = None;
    let mut looks: u32 = 0;
    let mut next = Instant::now();
    loop {
        // Before the set is made anew with an inventory, so that none is lost with it.
        for (bus, code) in events.as_ref().map(xids).unwrap_or_default() {
            seen.blocking_send(Seen::Xid { bus, code }).ok()?;
        }
        let changed = nvml.device_count().map_or(true, |n| Some(n) != reader.listed);
        // A card that comes back is to be noticed soon.
        let every = if known.gpus.iter().any(|g| g.lost.is_some()) { SLOW } else { INVENTORY };
        if looks.is_multiple_of(every) || changed || reader.lost.is_some() {
            let why = reader.lost.take().unwrap_or_else(|| "not listed by the driver any more".into());
            match reader.inventory() {
                Ok(look) => {
                    let (all, happened) = merge(known, look, &why);
                    *known = all;
                    let told = Seen::Inventory(Box::new(known.clone()), happened);
                    seen.blocking_send(told).ok()?;
                    events = register(nvml);
                }
                Err(e) => return Some(e.to_string()),
            }
        }
        let (slow, begin) = (looks.is_multiple_of(SLOW), Instant::now());
        reader.calls = 0;
        let samples = reader.samples(slow);
        tracing::debug!(slow, calls = reader.calls, us = begin.elapsed().as_micros(), "looked at the GPUs");
        // A full queue: the agent is busy, and an older sample is as good as none.
        if let Err(mpsc::error::TrySendError::Closed(_)) = seen.try_send(Seen::Samples(samples)) {
            return None;
        }
        looks = looks.wrapping_add(1);
        next += EVERY;
        let now = Instant::now();
        if next <= now {
            next = now + EVERY; // NVML was slow: no burst follows
        }
        std::thread::sleep(next - now);
    }
}

/// An event set with the Xid errors of all GPUs that have them.
fn register(nvml: &Nvml) -> Option<EventSet<'_>> {
    let mut set = nvml.create_event_set().ok()?;
    for index in 0..nvml.device_count().ok()? {
        let Ok(device) = nvml.device_by_index(index) else { continue };
        set = match device.register_events(EventTypes::CRITICAL_XID_ERROR, set) {
            Ok(set) => set,
            Err(_) => nvml.create_event_set().ok()?, // the old one is gone; those before are lost with it
        };
    }
    Some(set)
}

/// What waits in the set; at most so many that a storm does not hold us up.
fn xids(set: &EventSet<'_>) -> Vec<(BusId, u64)> {
    let mut all = vec![];
    while let (Ok(event), true) = (set.wait(0), all.len() < 32) {
        let Some(XidError::Value(code)) = event.event_data else { continue };
        if let Some(bus) = event.device.pci_info().ok().and_then(|p| p.bus_id.parse().ok()) {
            all.push((bus, code));
        }
    }
    all
}

struct Reader<'n> {
    nvml: &'n Nvml,
    /// Devices that NVML listed last.
    listed: Option<u32>,
    /// NVML index by bus id, with UUID.
    devices: BTreeMap<BusId, (u32, String)>,
    /// MIG is on, by bus id.
    mig: BTreeMap<BusId, Vec<(String, Option<u32>)>>,
    /// Links of each.
    links: BTreeMap<BusId, u32>,
    /// Not supported, as of the last inventory.
    silent: BTreeSet<(BusId, &'static str)>,
    /// Errors logged, with how often they came since.
    errors: BTreeMap<(&'static str, String), u32>,
    /// The last slow values.
    slow: BTreeMap<BusId, Sample>,
    /// A device has said that it is lost: in NVML's words.
    lost: Option<String>,
    /// Calls of this look.
    calls: u32,
}

impl<'n> Reader<'n> {
    fn new(nvml: &'n Nvml) -> Self {
        Reader {
            nvml,
            listed: None,
            devices: BTreeMap::new(),
            mig: BTreeMap::new(),
            links: BTreeMap::new(),
            silent: BTreeSet::new(),
            errors: BTreeMap::new(),
            slow: BTreeMap::new(),
            lost: None,
            calls: 0,
        }
    }

    /// Asks one thing of one device.
    fn ask<T>(&mut self, bus: &BusId, call: &'static str, f: impl FnOnce() -> Result<T, NvmlError>) -> Option<T> {
        if self.silent.contains(&(bus.clone(), call)) {
            return None;
        }
        self.calls += 1;
        match f() {
            Ok(value) => return Some(value),
            Err(NvmlError::NotSupported | NvmlError::FunctionNotFound | NvmlError::FailedToLoadSymbol(_)) => {
                self.silent.insert((bus.clone(), call));
            }
            Err(NvmlError::GpuLost) => self.lost = Some(NvmlError::GpuLost.to_string()),
            Err(e) => self.log(bus, call, &e.to_string()),
        }
        None
    }

    fn log(&mut self, bus: &BusId, call: &'static str, error: &str) {
        let count = self.errors.entry((call, error.to_owned())).or_default();
        if *count == 0 {
            tracing::warn!(gpu = %bus, "{call}: {error} (told once)");
        }
        *count = count.saturating_add(1);
    }

    /// All devices that answer.
    fn inventory(&mut self) -> Result<Look, NvmlError> {
        for ((call, error), count) in std::mem::take(&mut self.errors).into_iter().filter(|(_, n)| *n > 1) {
            tracing::warn!("{call}: {error}: {count} times since the last inventory");
            self.errors.insert((call, error), 1);
        }
        self.silent.clear();
        self.devices.clear();
        let count = self.nvml.device_count()?;
        self.listed = Some(count);
        let mut look = Look { driver: self.nvml.sys_driver_version().ok(), ..Look::default() };
        for index in 0..count {
            let Ok(device) = self.nvml.device_by_index(index) else { continue };
            // Without bus id and UUID there is no identity, and what it is cannot be told.
            let id = device.pci_info().and_then(|p| Ok((p, device.uuid()?)));
            let Ok((pci, uuid)) = id else { continue };
            let Ok(bus) = pci.bus_id.parse::<BusId>() else { continue };
            self.devices.insert(bus.clone(), (index, uuid.clone()));
            let gpu = self.gpu(&device, index, bus, uuid);
            look.gpus.push(gpu);
        }
        look.pairs = self.pairs();
        Ok(look)
    }

    fn gpu(&mut self, device: &Device<'_>, index: u32, bus: BusId, uuid: String) -> Gpu {
        let nvml = self.nvml;
        let mode = self.ask(&bus, "mig_mode", || device.mig_mode());
        let mig = mode.map(|m| m.current == 1);
        let instances = if mig == Some(true) { self.instances(device, &bus) } else { vec![] };
        let ids = instances.iter().map(|i| (i.uuid.clone(), i.gpu_instance)).collect();
        self.mig.insert(bus.clone(), if mig == Some(true) { ids } else { vec![] });
        let mps = self.ask(&bus, "mps", || pliant_nvml::mps_processes(nvml, device));
        let fabric = self.ask(&bus, "fabric", || pliant_nvml::fabric(nvml, device));
        Gpu {
            uuid,
            nvml_index: index,
            minor: self.ask(&bus, "minor_number", || device.minor_number()),
            gres_index: None,
            gres_type: None,
            model: self.ask(&bus, "name", || device.name()),
            memory_mib: self.ask(&bus, "memory_info", || device.memory_info()).map(|m| m.total >> 20),
            mig,
            instances,
            compute_mode: self.ask(&bus, "compute_mode", || device.compute_mode()).map(|m| match m {
                Mode::Default => ComputeMode::Default,
                Mode::Prohibited => ComputeMode::Prohibited,
                Mode::ExclusiveThread | Mode::ExclusiveProcess => ComputeMode::ExclusiveProcess,
            }),
            mps: mps.map(|n| n > 0),
            cpus: self.ask(&bus, "cpu_affinity", || device.cpu_affinity(CPU_WORDS)).map(|w| bits(&w)),
            numa: self
                .ask(&bus, "memory_affinity", || device.memory_affinity(NUMA_WORDS, SCOPE_NODE))
                .map(|w| bits(&w))
                .filter(|nodes| nodes.len() == 1)
                .and_then(|nodes| nodes.first().copied()),
            nvlinks: self.nvlinks(device, &bus),
            fabric: fabric.and_then(|f| fabric_of(&f)),
            lost: None,
            bus,
        }
    }

    fn instances(&mut self, device: &Device<'_>, bus: &BusId) -> Vec<MigInstance> {
        let most = self.ask(bus, "mig_device_count", || device.mig_device_count()).unwrap_or(0).min(INSTANCES);
        let mut all = vec![];
        for index in 0..most {
            // Indexes may have gaps.
            let Ok(instance) = device.mig_device_by_index(index) else { continue };
            let Some(uuid) = self.ask(bus, "mig uuid", || instance.uuid()) else { continue };
            let nvml = self.nvml;
            let ids = self.ask(bus, "mig ids", || pliant_nvml::instance_ids(nvml, &instance));
            let name = self.ask(bus, "mig name", || instance.name());
            all.push(MigInstance {
                uuid,
                profile: name.and_then(|n| n.split_once("MIG ").map(|(_, p)| p.to_owned())),
                gpu_instance: ids.map(|i| i.0),
                compute_instance: ids.map(|i| i.1),
                memory_mib: self.ask(bus, "mig memory", || instance.memory_info()).map(|m| m.total >> 20),
                gres_index: None,
            });
        }
        all
    }

    fn nvlinks(&mut self, device: &Device<'_>, bus: &BusId) -> Vec<NvLink> {
        let mut all = vec![];
        for link in 0..LINKS {
            let wrapper = device.link_wrapper_for(link);
            // The first link that is not there ends the list: InvalidArg, or NotSupported for all.
            let Ok(active) = wrapper.is_active() else { break };
            let kind = pliant_nvml::link_end(self.nvml, device, link).ok();
            let peer = match kind {
                Some(LinkEnd::Switch) => LinkPeer::Switch,
                Some(LinkEnd::Gpu) => {
                    let pci = wrapper.remote_pci_info().ok();
                    pci.and_then(|p| p.bus_id.parse().ok()).map_or(LinkPeer::Unknown, LinkPeer::Gpu)
                }
                _ => LinkPeer::Unknown,
            };
            all.push(NvLink { link, active, version: self.ask(bus, "nvlink version", || wrapper.version()), peer });
        }
        self.links.insert(bus.clone(), u32::try_from(all.len()).unwrap_or(0));
        all
    }

    fn pairs(&mut self) -> Vec<(BusId, BusId, Pair)> {
        let nvml = self.nvml;
        let devices: Vec<(BusId, u32)> = self.devices.iter().map(|(bus, (index, _))| (bus.clone(), *index)).collect();
        let mut all = vec![];
        for (i, (a, x)) in devices.iter().enumerate() {
            for (b, y) in devices.iter().skip(i + 1) {
                let (Ok(x), Ok(y)) = (nvml.device_by_index(*x), nvml.device_by_index(*y)) else { continue };
                let other = || nvml.device_by_index(y.index()?);
                let level = self.ask(a, "topology_common_ancestor", || x.topology_common_ancestor(other()?));
                let path = level.map(|l| match l {
                    TopologyLevel::Internal => Path::Internal,
                    TopologyLevel::Single => Path::Pix,
                    TopologyLevel::Multiple => Path::Pxb,
                    TopologyLevel::HostBridge => Path::Phb,
                    TopologyLevel::Node => Path::Node,
                    TopologyLevel::System => Path::Sys,
                });
                let status = self.ask(a, "p2p_status", || x.p2p_status(&y, P2pCapabilitiesIndex::Read));
                let peer_access = status.filter(|s| *s != P2pStatus::Unknown).map(|s| s == P2pStatus::Ok);
                all.push((a.clone(), b.clone(), Pair { a: 0, b: 0, path, peer_access }));
            }
        }
        all
    }

    /// One look at what the GPUs do; `slow`: also at what changes slowly or costs much.
    fn samples(&mut self, slow: bool) -> Vec<Sample> {
        let devices: Vec<(BusId, u32, String)> =
            self.devices.iter().map(|(bus, (index, uuid))| (bus.clone(), *index, uuid.clone())).collect();
        let mut all = vec![];
        for (bus, index, uuid) in devices {
            let Ok(device) = self.nvml.device_by_index(index) else { continue };
            if slow {
                let values = self.slow_values(&device, &bus);
                self.slow.insert(bus.clone(), values);
            }
            let utilisation = self.ask(&bus, "utilization_rates", || device.utilization_rates());
            let memory = self.ask(&bus, "memory_info", || device.memory_info());
            let processes = self.ask(&bus, "running_compute_processes", || device.running_compute_processes());
            let throttle = self.ask(&bus, "current_throttle_reasons", || device.current_throttle_reasons());
            let instances = self.mig.get(&bus);
            let base = self.slow.get(&bus).cloned().unwrap_or_default();
            all.push(Sample {
                uuid,
                at_ms: clock_ms(),
                // NVML gives no utilisation of a GPU that is cut into instances.
                utilisation: utilisation.map(|u| u.gpu).filter(|u| *u <= 100),
                memory_used_mib: memory.map(|m| m.used >> 20),
                processes: processes.map(|all| all.into_iter().map(|p| process(&p, instances)).collect()),
                throttle: throttle.map(held_down),
                ..base
            });
        }
        all
    }

    fn slow_values(&mut self, device: &Device<'_>, bus: &BusId) -> Sample {
        let nvml = self.nvml;
        let ecc = |kind| device.total_ecc_errors(kind, EccCounter::Volatile);
        let rows = self.ask(bus, "remapped_rows", || pliant_nvml::remapped_rows(nvml, device));
        let pages = || device.retired_pages(RetirementCause::DoubleBitEccError);
        let retired = rows.or_else(|| self.ask(bus, "retired_pages", pages).and_then(|p| u32::try_from(p.len()).ok()));
        Sample {
            sm_clock_mhz: self.ask(bus, "clock_info sm", || device.clock_info(Clock::SM)),
            memory_clock_mhz: self.ask(bus, "clock_info memory", || device.clock_info(Clock::Memory)),
            power_mw: self.ask(bus, "power_usage", || device.power_usage()),
            temperature_c: self.ask(bus, "temperature", || device.temperature(TemperatureSensor::Gpu)),
            ecc_uncorrected: self.ask(bus, "ecc uncorrected", || ecc(MemoryError::Uncorrected)),
            ecc_corrected: self.ask(bus, "ecc corrected", || ecc(MemoryError::Corrected)),
            retired_pages: retired,
            pcie_rx_kb_s: self.ask(bus, "pcie receive", || device.pcie_throughput(PcieUtilCounter::Receive)),
            pcie_tx_kb_s: self.ask(bus, "pcie send", || device.pcie_throughput(PcieUtilCounter::Send)),
            nvlink_errors: self.link_errors(device, bus),
            ..Sample::default()
        }
    }

    fn link_errors(&mut self, device: &Device<'_>, bus: &BusId) -> Option<u64> {
        let links = self.links.get(bus).copied().filter(|n| *n > 0)?;
        let counters = [ErrorCounter::DlReplay, ErrorCounter::DlRecovery, ErrorCounter::DlCrcFlit];
        let mut sum: Option<u64> = None;
        for link in 0..links {
            for counter in counters {
                let read = || device.link_wrapper_for(link).error_counter(counter);
                if let Some(n) = self.ask(bus, "nvlink errors", read) {
                    sum = Some(sum.unwrap_or(0).saturating_add(n));
                }
            }
        }
        sum
    }
}

fn process(
    p: &nvml_wrapper::struct_wrappers::device::ProcessInfo,
    instances: Option<&Vec<(String, Option<u32>)>>,
) -> Process {
    let on = |id| instances.into_iter().flatten().find(|(_, g)| *g == Some(id)).map(|(uuid, _)| uuid.clone());
    Process {
        pid: p.pid,
        uid: None,
        job: None,
        memory_mib: match p.used_gpu_memory {
            UsedGpuMemory::Unavailable => None,
            UsedGpuMemory::Used(bytes) => Some(bytes >> 20),
        },
        state: None,
        instance: p.gpu_instance_id.and_then(on),
    }
}

/// Reasons that mean trouble; an idle GPU and the settings of an admin do not.
fn held_down(reasons: ThrottleReasons) -> Vec<String> {
    let words = [
        (ThrottleReasons::HW_SLOWDOWN, "hardware slowdown"),
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, "hardware thermal slowdown"),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, "software thermal slowdown"),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power brake"),
    ];
    words.iter().filter(|(bit, _)| reasons.contains(*bit)).map(|(_, word)| (*word).to_owned()).collect()
}

/// `None`: the GPU needs no fabric manager.
fn fabric_of(f: &pliant_nvml::FabricInfo) -> Option<Fabric> {
    use pliant_nvml::FabricState::{Completed, InProgress, NotStarted, NotSupported, Unknown};
    let (ready, state) = match f.state {
        NotSupported => return None,
        NotStarted => (false, "not started".to_owned()),
        InProgress => (false, "in progress".to_owned()),
        Unknown => (false, "unknown to this version".to_owned()),
        Completed if f.status == 0 => (true, "completed".to_owned()),
        Completed => (false, format!("ended with NVML error {}", f.status)),
    };
    let cluster = f.cluster.iter().map(|b| format!("{b:02x}")).collect();
    Some(Fabric { ready, state, cluster, clique: f.clique })
}

/// Numbers of the bits that are set, ascending.
fn bits(words: &[c_ulong]) -> Vec<u32> {
    let of = |(word, bits): (u32, &c_ulong)| {
        let bits = *bits;
        (0..c_ulong::BITS).filter(move |b| bits & (1 << b) != 0).map(move |b| word * c_ulong::BITS + b)
    };
    (0u32..).zip(words).flat_map(of).collect()
}
