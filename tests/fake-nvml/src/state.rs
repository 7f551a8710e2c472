//! What a process has opened: the scenario as last read, and the calls counted.

use crate::scenario::{Gpu, Scenario};
use nvml_wrapper_sys::bindings::*;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A failed call.
pub type Error = nvmlReturn_t;

/// The file, the counts, and who is open.
#[derive(Debug, Default)]
pub struct State {
    users: u32,
    stamp: Option<(i64, i64, u64)>,
    /// The scenario.
    pub scenario: Scenario,
    /// All GPUs of the box.
    pub gpus: Vec<Arc<Gpu>>,
    counts: BTreeMap<&'static str, u64>,
    /// Xid errors delivered.
    pub delivered: usize,
    begun: Option<Instant>,
}

/// What a handle stands for.
#[derive(Clone, Debug)]
pub struct Target {
    /// The GPU.
    pub gpu: Arc<Gpu>,
    /// Position of the MIG instance.
    pub instance: Option<usize>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// The state, whoever panicked before.
pub fn lock() -> MutexGuard<'static, Option<State>> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn file() -> Option<PathBuf> {
    std::env::var_os("PLIANT_FAKE_NVML").map(PathBuf::from)
}

impl State {
    /// Reads the file if it has changed. One that is not there is a driver that is not loaded; one with a mistake is
    /// told on stderr.
    fn refresh(&mut self) -> Result<(), Error> {
        let path = file().ok_or(nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED)?;
        let meta = std::fs::metadata(&path).map_err(|_| nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED)?;
        let stamp = Some((meta.mtime(), meta.mtime_nsec(), meta.ino()));
        if self.stamp == stamp {
            return Ok(());
        }
        let text = std::fs::read_to_string(&path).map_err(|_| nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED)?;
        match Scenario::parse(&text).and_then(|s| Ok((s.gpus()?, s))) {
            Ok((gpus, scenario)) => {
                (self.gpus, self.scenario, self.stamp) = (gpus.into_iter().map(Arc::new).collect(), scenario, stamp)
            }
            Err(why) => {
                eprintln!("fake NVML: {}: {why}", path.display());
                return Err(nvmlReturn_enum_NVML_ERROR_UNKNOWN);
            }
        }
        Ok(())
    }

    /// The GPUs that the driver lists.
    pub fn listed(&self) -> Vec<&Gpu> {
        self.gpus.iter().map(|g| &**g).filter(|g| g.change.lost.as_deref() != Some("gone")).collect()
    }

    /// Seconds since the first call, for values that change.
    pub fn second(&self) -> usize {
        usize::try_from(self.begun.map_or(0, |b| b.elapsed().as_secs())).unwrap_or(0)
    }

    /// What a handle stands for.
    pub fn target(&self, handle: nvmlDevice_t) -> Result<Target, Error> {
        let value = handle as usize;
        let (gpu, instance) = ((value >> 8).wrapping_sub(1), (value & 0xff).checked_sub(1));
        let gpu = self.gpus.get(gpu).ok_or(nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT)?;
        if gpu.change.lost.is_some() {
            return Err(nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST);
        }
        Ok(Target { gpu: Arc::clone(gpu), instance })
    }
}

/// The handle of a GPU or of an instance on it.
pub fn handle(gpu: usize, instance: Option<usize>) -> nvmlDevice_t {
    ((gpu + 1) << 8 | instance.map_or(0, |i| i + 1)) as nvmlDevice_t
}

/// `nvmlInit`
pub fn open() -> Result<(), Error> {
    let mut state = lock();
    let state = state.get_or_insert_with(State::default);
    state.refresh()?;
    state.users += 1;
    state.begun.get_or_insert_with(Instant::now);
    Ok(())
}

/// `nvmlShutdown`: the last one writes the counts of calls where `PLIANT_FAKE_NVML_COUNTS` says.
pub fn close() -> Result<(), Error> {
    let mut guard = lock();
    let state = guard.as_mut().filter(|s| s.users > 0).ok_or(nvmlReturn_enum_NVML_ERROR_UNINITIALIZED)?;
    state.users -= 1;
    if let Some(path) = std::env::var_os("PLIANT_FAKE_NVML_COUNTS") {
        let lines: String = state.counts.iter().map(|(name, n)| format!("{name} {n}\n")).collect();
        let _ = std::fs::write(path, lines);
    }
    Ok(())
}

/// One call: counted, as slow as the scenario says, refused where it says so.
pub fn call(name: &'static str, f: impl FnOnce(&mut State) -> Result<(), Error>) -> nvmlReturn_t {
    again(|state| {
        *state.counts.entry(name).or_default() += 1;
        let latency = &state.scenario.latency_us;
        let wait = latency.get(name).or_else(|| latency.get("default")).copied().unwrap_or(0);
        if wait > 0 {
            std::thread::sleep(Duration::from_micros(wait));
        }
        if state.scenario.missing.iter().any(|m| m == name) {
            return Err(nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND);
        }
        f(state)
    })
}

/// Another look within the same call, which is not counted: the scenario as it is now, and never a panic into C.
pub fn again(f: impl FnOnce(&mut State) -> Result<(), Error>) -> nvmlReturn_t {
    let once = std::panic::AssertUnwindSafe(|| {
        let mut guard = lock();
        let state = guard.as_mut().filter(|s| s.users > 0).ok_or(nvmlReturn_enum_NVML_ERROR_UNINITIALIZED)?;
        state.refresh()?;
        f(state)
    });
    match std::panic::catch_unwind(once) {
        Ok(Ok(())) => nvmlReturn_enum_NVML_SUCCESS,
        Ok(Err(error)) => error,
        Err(_) => nvmlReturn_enum_NVML_ERROR_UNKNOWN,
    }
}

/// A call about one device, which may be told to fail.
pub fn about(
    name: &'static str,
    device: nvmlDevice_t,
    f: impl FnOnce(&mut State, Target) -> Result<(), Error>,
) -> nvmlReturn_t {
    call(name, |state| {
        let target = state.target(device)?;
        let fails = |f: &&crate::scenario::Fail| f.call == name && f.device.is_none_or(|d| d == target.gpu.position);
        if let Some(fail) = state.scenario.fail.iter().find(fails) {
            return Err(fail.error);
        }
        if state.scenario.of_box.unsupported.iter().any(|u| u == name) {
            return Err(nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED);
        }
        f(state, target)
    })
}
