//! The C functions. Names, arguments and layouts are NVML's (nvml.h, through nvml-wrapper-sys).
#![allow(non_snake_case, missing_docs, clippy::missing_safety_doc, reason = "NVML's own")]

use crate::state::{self, Error, State, Target, about, call, handle};
use nvml_wrapper_sys::bindings::*;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_ulonglong};
use std::time::{Duration, Instant};

const INVALID: Error = nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT;
const UNSUPPORTED: Error = nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED;
const TOO_SMALL: Error = nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE;
const NOT_FOUND: Error = nvmlReturn_enum_NVML_ERROR_NOT_FOUND;
/// What NVML writes for a memory size that it does not know.
const NOT_AVAILABLE: u64 = u64::MAX;

/// Writes through a pointer of the caller.
unsafe fn put<T>(to: *mut T, value: T) -> Result<(), Error> {
    if to.is_null() {
        return Err(INVALID);
    }
    // SAFETY: not null; the caller of NVML promises room for one value.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Writes a text with its NUL.
unsafe fn put_text(to: *mut c_char, length: c_uint, text: &str) -> Result<(), Error> {
    if to.is_null() {
        return Err(INVALID);
    }
    if text.len() >= length as usize {
        return Err(TOO_SMALL);
    }
    // SAFETY: not null, and the caller of NVML promises `length` bytes, of which text and NUL are fewer.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast::<u8>(), text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

/// Sets bits in the caller's words.
unsafe fn put_bits(to: *mut c_ulong, words: c_uint, bits: &[u32]) -> Result<(), Error> {
    if to.is_null() || words == 0 {
        return Err(INVALID);
    }
    // SAFETY: not null, and the caller of NVML promises `words` words.
    let set = unsafe { std::slice::from_raw_parts_mut(to, words as usize) };
    set.fill(0);
    for bit in bits {
        if let Some(word) = set.get_mut(*bit as usize / 64) {
            *word |= 1 << (bit % 64);
        }
    }
    Ok(())
}

/// A function about one device. The body may use `put` and its like: the pointers are the caller's, as in nvml.h.
macro_rules! device {
    ($name:ident($($arg:ident: $type:ty),*) |$state:pat_param, $target:ident| $body:expr) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(device: nvmlDevice_t, $($arg: $type),*) -> nvmlReturn_t {
            about(stringify!($name), device, |$state: &mut State, $target: Target| {
                // SAFETY: the arguments are as nvml.h wants them, by the contract of this C function.
                #[allow(unused_unsafe)]
                unsafe { $body }
            })
        }
    };
}

/// A function about no device.
macro_rules! system {
    ($name:ident($($arg:ident: $type:ty),*) |$state:ident| $body:expr) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> nvmlReturn_t {
            call(stringify!($name), |$state: &mut State| {
                // SAFETY: the arguments are as nvml.h wants them, by the contract of this C function.
                #[allow(unused_unsafe)]
                unsafe { $body }
            })
        }
    };
}

fn opened(result: Result<(), Error>) -> nvmlReturn_t {
    result.err().unwrap_or(nvmlReturn_enum_NVML_SUCCESS)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> nvmlReturn_t {
    opened(state::open())
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> nvmlReturn_t {
    opened(state::open())
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> nvmlReturn_t {
    opened(state::close())
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(error: nvmlReturn_t) -> *const c_char {
    let text: &CStr = match error {
        0 => c"The operation was successful",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        13 => c"Function Not Found",
        15 => c"GPU is lost",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

system!(nvmlSystemGetDriverVersion(to: *mut c_char, length: c_uint) |s| put_text(to, length, &s.scenario.driver));
system!(nvmlSystemGetNVMLVersion(to: *mut c_char, length: c_uint) |s| put_text(to, length, &s.scenario.nvml));
system!(nvmlSystemGetCudaDriverVersion_v2(to: *mut c_int) |s| put(to, s.scenario.cuda));
system!(nvmlSystemGetCudaDriverVersion(to: *mut c_int) |s| put(to, s.scenario.cuda));
system!(nvmlDeviceGetCount_v2(to: *mut c_uint) |s| put(to, s.listed().len() as c_uint));
system!(nvmlDeviceGetHandleByIndex_v2(index: c_uint, to: *mut nvmlDevice_t) |s| {
    let position = s.listed().get(index as usize).map(|g| g.position).ok_or(INVALID)?;
    put(to, handle(position, None))
});
system!(nvmlDeviceGetHandleByUUID(uuid: *const c_char, to: *mut nvmlDevice_t) |s| {
    if uuid.is_null() {
        return Err(INVALID);
    }
    let wanted = CStr::from_ptr(uuid).to_string_lossy();
    let gpu = s.gpus.iter().find(|g| g.uuid == wanted).map(|g| handle(g.position, None));
    let instance = || s.gpus.iter().find_map(|g| {
        let at = (0..g.change.instances.len()).find(|i| instance_uuid(&g.uuid, *i) == wanted)?;
        Some(handle(g.position, Some(at)))
    });
    put(to, gpu.or_else(instance).ok_or(NOT_FOUND)?)
});
system!(nvmlDeviceGetHandleByPciBusId_v2(bus: *const c_char, to: *mut nvmlDevice_t) |s| {
    if bus.is_null() {
        return Err(INVALID);
    }
    let wanted = CStr::from_ptr(bus).to_string_lossy().to_ascii_uppercase();
    let same = |g: &&std::sync::Arc<crate::Gpu>| bus_id(g.bus, 8).ends_with(&wanted) || bus_id(g.bus, 4) == wanted;
    put(to, s.gpus.iter().find(same).map(|g| handle(g.position, None)).ok_or(NOT_FOUND)?)
});

fn bus_id((domain, bus, device): (u32, u32, u32), width: usize) -> String {
    format!("{domain:0width$X}:{bus:02X}:{device:02X}.0")
}

fn instance_uuid(gpu: &str, instance: usize) -> String {
    // The GPU's own digits behind another beginning, as unlike any other as they are.
    format!("MIG-{:08x}{}", instance + 1, gpu.get(12..).unwrap_or_default())
}

unsafe fn put_pci(to: *mut nvmlPciInfo_t, place: (u32, u32, u32)) -> Result<(), Error> {
    if to.is_null() {
        return Err(INVALID);
    }
    let mut info = nvmlPciInfo_t {
        busIdLegacy: [0; 16],
        domain: place.0,
        bus: place.1,
        device: place.2,
        pciDeviceId: 0x20b0_10de,
        pciSubSystemId: 0,
        busId: [0; 32],
    };
    for (to, from) in info.busId.iter_mut().zip(bus_id(place, 8).bytes()) {
        *to = from as c_char;
    }
    for (to, from) in info.busIdLegacy.iter_mut().zip(bus_id(place, 4).bytes()) {
        *to = from as c_char;
    }
    // SAFETY: as for the caller.
    unsafe { put(to, info) }
}

device!(nvmlDeviceGetName(to: *mut c_char, length: c_uint) |_, t| match t.instance {
    None => put_text(to, length, &t.gpu.name),
    Some(i) => {
        let profile = t.gpu.change.instances.get(i).map_or("", |i| &i.profile);
        put_text(to, length, &format!("{} MIG {profile}", t.gpu.name))
    }
});
device!(nvmlDeviceGetUUID(to: *mut c_char, length: c_uint) |_, t| match t.instance {
    None => put_text(to, length, &t.gpu.uuid),
    Some(i) => put_text(to, length, &instance_uuid(&t.gpu.uuid, i)),
});
device!(nvmlDeviceGetMinorNumber(to: *mut c_uint) |_, t| put(to, t.gpu.minor));
device!(nvmlDeviceGetIndex(to: *mut c_uint) |s, t| {
    let index = s.listed().iter().position(|g| g.position == t.gpu.position).ok_or(NOT_FOUND)?;
    put(to, index as c_uint)
});
device!(nvmlDeviceGetPciInfo_v3(to: *mut nvmlPciInfo_t) |_, t| put_pci(to, t.gpu.bus));

fn memory(t: &Target) -> (u64, u64) {
    match t.instance.and_then(|i| t.gpu.change.instances.get(i)) {
        Some(i) => (i.memory_mib << 20, 0),
        None => (t.gpu.memory, t.gpu.change.memory_used_mib << 20),
    }
}

device!(nvmlDeviceGetMemoryInfo(to: *mut nvmlMemory_t) |_, t| {
    let (total, used) = memory(&t);
    put(to, nvmlMemory_t { total, free: total - used.min(total), used })
});
device!(nvmlDeviceGetMemoryInfo_v2(to: *mut nvmlMemory_v2_t) |_, t| {
    let (total, used) = memory(&t);
    let reserved = total / 64;
    let version = if to.is_null() { return Err(INVALID) } else { (*to).version };
    put(to, nvmlMemory_v2_t { version, total, reserved, free: total.saturating_sub(used + reserved), used })
});
device!(nvmlDeviceGetUtilizationRates(to: *mut nvmlUtilization_t) |s, t| {
    if t.instance.is_some() {
        return Err(UNSUPPORTED); // as the real one says of MIG
    }
    let values = &t.gpu.change.utilisation;
    let gpu = values.get(s.second() % values.len().max(1)).copied().unwrap_or(0);
    put(to, nvmlUtilization_t { gpu, memory: gpu / 2 })
});

/// Fills the caller's list, or says how many there are.
unsafe fn put_processes<T>(
    t: &Target,
    count: *mut c_uint,
    infos: *mut T,
    make: impl Fn(&crate::scenario::Process, c_uint) -> T,
) -> Result<(), Error> {
    let on_it = |p: &&crate::scenario::Process| match t.instance {
        Some(i) => p.gpu_instance.is_some_and(|g| g as usize == i + 1),
        None => true,
    };
    let all: Vec<_> = t.gpu.change.processes.iter().filter(on_it).collect();
    if count.is_null() {
        return Err(INVALID);
    }
    // SAFETY: not null; the caller of NVML has set it to the room that there is in `infos`.
    let room = unsafe { count.read() } as usize;
    // SAFETY: not null.
    unsafe { count.write(all.len() as c_uint) };
    if all.len() > room || (infos.is_null() && !all.is_empty()) {
        return Err(TOO_SMALL);
    }
    for (i, p) in all.iter().enumerate() {
        // SAFETY: i is less than the room that the caller has promised.
        unsafe { infos.add(i).write(make(p, p.gpu_instance.unwrap_or(c_uint::MAX))) };
    }
    Ok(())
}

device!(nvmlDeviceGetComputeRunningProcesses_v3(count: *mut c_uint, infos: *mut nvmlProcessInfo_t) |_, t| {
    put_processes(&t, count, infos, |p, gpu_instance| nvmlProcessInfo_t {
        pid: p.pid,
        usedGpuMemory: p.memory_mib.map_or(NOT_AVAILABLE, |m| m << 20),
        gpuInstanceId: gpu_instance,
        computeInstanceId: if gpu_instance == c_uint::MAX { c_uint::MAX } else { 0 },
    })
});
device!(nvmlDeviceGetGraphicsRunningProcesses_v3(count: *mut c_uint, infos: *mut nvmlProcessInfo_t) |_, t| {
    let _ = (t, infos);
    put(count, 0)
});
device!(nvmlDeviceGetMPSComputeRunningProcesses_v3(count: *mut c_uint, infos: *mut nvmlProcessInfo_t) |_, t| {
    let _ = (t, infos);
    put(count, 0)
});
device!(nvmlDeviceGetClockInfo(kind: nvmlClockType_t, to: *mut c_uint) |_, _t| {
    put(to, if kind == nvmlClockType_enum_NVML_CLOCK_MEM { 1215 } else { 1410 })
});
device!(nvmlDeviceGetMaxClockInfo(kind: nvmlClockType_t, to: *mut c_uint) |_, _t| {
    put(to, if kind == nvmlClockType_enum_NVML_CLOCK_MEM { 1215 } else { 1530 })
});
device!(nvmlDeviceGetCurrentClocksThrottleReasons(to: *mut c_ulonglong) |_, t| put(to, t.gpu.change.throttle));
device!(nvmlDeviceGetCurrentClocksEventReasons(to: *mut c_ulonglong) |_, t| put(to, t.gpu.change.throttle));
device!(nvmlDeviceGetPowerUsage(to: *mut c_uint) |_, t| put(to, t.gpu.change.power_mw.unwrap_or(61_000)));
device!(nvmlDeviceGetTemperature(_sensor: nvmlTemperatureSensors_t, to: *mut c_uint) |_, t| {
    put(to, t.gpu.change.temperature_c.unwrap_or(34))
});
device!(nvmlDeviceGetTotalEccErrors(kind: nvmlMemoryErrorType_t, _counter: nvmlEccCounterType_t, to: *mut c_ulonglong) |_, t| {
    let uncorrected = kind == nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_UNCORRECTED;
    put(to, if uncorrected { t.gpu.change.ecc_uncorrected } else { t.gpu.change.ecc_corrected })
});
device!(nvmlDeviceGetRemappedRows(correctable: *mut c_uint, uncorrectable: *mut c_uint, pending: *mut c_uint, failed: *mut c_uint) |_, t| {
    put(correctable, 0)?;
    put(uncorrectable, t.gpu.change.retired_pages)?;
    put(pending, 0)?;
    put(failed, 0)
});
device!(nvmlDeviceGetPcieThroughput(counter: nvmlPcieUtilCounter_t, to: *mut c_uint) |_, _t| {
    put(to, if counter == nvmlPcieUtilCounter_enum_NVML_PCIE_UTIL_TX_BYTES { 1200 } else { 3400 })
});

/// A link by its number.
fn link(t: &Target, link: c_uint) -> Result<Option<usize>, Error> {
    if t.instance.is_some() || t.gpu.links.is_empty() {
        return Err(UNSUPPORTED);
    }
    t.gpu.links.get(link as usize).copied().ok_or(INVALID)
}

device!(nvmlDeviceGetNvLinkState(number: c_uint, to: *mut nvmlEnableState_t) |_, t| {
    link(&t, number)?;
    put(to, nvmlEnableState_t::from(!t.gpu.change.links_down.contains(&number)))
});
device!(nvmlDeviceGetNvLinkVersion(number: c_uint, to: *mut c_uint) |s, t| {
    link(&t, number)?;
    put(to, s.scenario.of_box.nvlink_version)
});
device!(nvmlDeviceGetNvLinkCapability(number: c_uint, _capability: nvmlNvLinkCapability_t, to: *mut c_uint) |_, t| {
    link(&t, number)?;
    put(to, 1)
});
device!(nvmlDeviceGetNvLinkRemotePciInfo_v2(number: c_uint, to: *mut nvmlPciInfo_t) |s, t| {
    match link(&t, number)? {
        Some(peer) => put_pci(to, s.gpus.get(peer).map(|g| g.bus).ok_or(NOT_FOUND)?),
        None => put_pci(to, (0, 0xf0 + number % 6, 0)),
    }
});
device!(nvmlDeviceGetNvLinkRemoteDeviceType(number: c_uint, to: *mut nvmlIntNvLinkDeviceType_t) |_, t| {
    let kind = match link(&t, number)? {
        Some(_) => nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU,
        None => nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH,
    };
    put(to, kind)
});
device!(nvmlDeviceGetNvLinkErrorCounter(number: c_uint, counter: nvmlNvLinkErrorCounter_t, to: *mut c_ulonglong) |_, t| {
    link(&t, number)?;
    put(to, if counter == 0 { t.gpu.change.nvlink_errors } else { 0 })
});
device!(nvmlDeviceGetP2PStatus(other: nvmlDevice_t, _index: nvmlGpuP2PCapsIndex_t, to: *mut nvmlGpuP2PStatus_t) |s, t| {
    let other = s.target(other)?;
    let reach = s.scenario.of_box.peers && other.gpu.position != t.gpu.position;
    put(to, if reach { 0 } else { nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_GPU_NOT_SUPPORTED })
});
device!(nvmlDeviceGetTopologyCommonAncestor(other: nvmlDevice_t, to: *mut nvmlGpuTopologyLevel_t) |s, t| {
    let other = s.target(other)?;
    put(to, s.scenario.level(&t.gpu, &other.gpu) as nvmlGpuTopologyLevel_t)
});
device!(nvmlDeviceGetCpuAffinity(words: c_uint, to: *mut c_ulong) |_, t| put_bits(to, words, &t.gpu.cpus));
device!(nvmlDeviceGetCpuAffinityWithinScope(words: c_uint, to: *mut c_ulong, _scope: nvmlAffinityScope_t) |_, t| {
    put_bits(to, words, &t.gpu.cpus)
});
device!(nvmlDeviceGetMemoryAffinity(words: c_uint, to: *mut c_ulong, _scope: nvmlAffinityScope_t) |_, t| {
    put_bits(to, words, &[t.gpu.numa])
});
device!(nvmlDeviceGetNumaNodeId(to: *mut c_uint) |_, t| {
    let _ = (to, t);
    Err(UNSUPPORTED) // of GPUs that are a NUMA node themselves
});
device!(nvmlDeviceGetMigMode(current: *mut c_uint, pending: *mut c_uint) |_, t| {
    let mode = c_uint::from(t.gpu.change.mig.filter(|_| t.instance.is_none()).ok_or(UNSUPPORTED)?);
    put(current, mode)?;
    put(pending, mode)
});
device!(nvmlDeviceGetMaxMigDeviceCount(to: *mut c_uint) |_, t| put(to, if t.gpu.change.mig.is_some() { 7 } else { 0 }));
device!(nvmlDeviceGetMigDeviceHandleByIndex(index: c_uint, to: *mut nvmlDevice_t) |_, t| {
    let there = t.gpu.change.mig == Some(true) && (index as usize) < t.gpu.change.instances.len();
    put(to, if there { handle(t.gpu.position, Some(index as usize)) } else { return Err(NOT_FOUND) })
});
device!(nvmlDeviceIsMigDeviceHandle(to: *mut c_uint) |_, t| put(to, c_uint::from(t.instance.is_some())));
device!(nvmlDeviceGetGpuInstanceId(to: *mut c_uint) |_, t| put(to, t.instance.ok_or(UNSUPPORTED)? as c_uint + 1));
device!(nvmlDeviceGetComputeInstanceId(to: *mut c_uint) |_, t| {
    t.instance.ok_or(UNSUPPORTED)?;
    put(to, 0)
});
device!(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(to: *mut nvmlDevice_t) |_, t| {
    t.instance.ok_or(INVALID)?;
    put(to, handle(t.gpu.position, None))
});
device!(nvmlDeviceGetComputeMode(to: *mut nvmlComputeMode_t) |_, t| put(to, t.gpu.change.compute_mode));
device!(nvmlDeviceGetVirtualizationMode(to: *mut nvmlGpuVirtualizationMode_t) |s, _t| {
    put(to, s.scenario.of_box.virtualization)
});

/// Cluster, clique and state of the fabric.
fn fabric(s: &State, t: &Target) -> ([u8; 16], c_uint, u8) {
    let b = &s.scenario.of_box;
    let mut cluster = [0; 16];
    for (i, byte) in cluster.iter_mut().enumerate() {
        *byte = b.fabric_cluster.get(2 * i..2 * i + 2).and_then(|h| u8::from_str_radix(h, 16).ok()).unwrap_or(0);
    }
    let state = t.gpu.change.fabric_state.unwrap_or(b.fabric_state);
    (cluster, b.fabric_clique, u8::try_from(state).unwrap_or(0))
}

device!(nvmlDeviceGetGpuFabricInfo(to: *mut nvmlGpuFabricInfo_t) |s, t| {
    let (clusterUuid, cliqueId, state) = fabric(s, &t);
    put(to, nvmlGpuFabricInfo_t { clusterUuid, status: 0, cliqueId, state })
});
device!(nvmlDeviceGetGpuFabricInfoV(to: *mut nvmlGpuFabricInfoV_t) |s, t| {
    let version = if to.is_null() { return Err(INVALID) } else { (*to).version };
    if version >> 24 != 2 {
        return Err(nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    }
    let (clusterUuid, cliqueId, state) = fabric(s, &t);
    let info = nvmlGpuFabricInfo_v2_t { version, clusterUuid, status: 0, cliqueId, state, healthMask: 2 };
    put(to.cast::<nvmlGpuFabricInfo_v2_t>(), info)
});
device!(nvmlDeviceGetSupportedEventTypes(to: *mut c_ulonglong) |_, t| {
    let _ = t;
    put(to, 8)
});
device!(nvmlDeviceRegisterEvents(_types: c_ulonglong, _set: nvmlEventSet_t) |_, t| {
    let _ = t;
    Ok(())
});
system!(nvmlEventSetCreate(to: *mut nvmlEventSet_t) |_s| put(to, 8 as nvmlEventSet_t));
system!(nvmlEventSetFree(_set: nvmlEventSet_t) |_s| Ok(()));

/// The next Xid error that was not delivered yet.
fn next_xid(s: &mut State) -> Result<nvmlEventData_t, Error> {
    let xid = s.scenario.xid.get(s.delivered).cloned().ok_or(nvmlReturn_enum_NVML_ERROR_TIMEOUT)?;
    s.delivered += 1;
    Ok(nvmlEventData_t {
        device: handle(xid.device, None),
        eventType: 8, // nvmlEventTypeXidCriticalError
        eventData: xid.code,
        gpuInstanceId: c_uint::MAX,
        computeInstanceId: c_uint::MAX,
    })
}

/// Looks every few milliseconds, and lets other calls in between.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetWait_v2(
    _set: nvmlEventSet_t,
    to: *mut nvmlEventData_t,
    timeout: c_uint,
) -> nvmlReturn_t {
    let until = Instant::now() + Duration::from_millis(timeout.into());
    // SAFETY: `to` is the caller's room for one event, by the contract of this C function.
    let look = |s: &mut State| next_xid(s).and_then(|event| unsafe { put(to, event) });
    let mut answer = call("nvmlEventSetWait_v2", look);
    while answer == nvmlReturn_enum_NVML_ERROR_TIMEOUT && Instant::now() < until {
        std::thread::sleep(until.saturating_duration_since(Instant::now()).min(Duration::from_millis(10)));
        answer = state::again(look);
    }
    answer
}
