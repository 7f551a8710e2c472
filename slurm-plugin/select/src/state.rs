// SPDX-License-Identifier: GPL-2.0-or-later
//! What the plugin has in slurmctld: the board, the ring, and what it remembers between calls.
//!
//! Nothing here waits: the lock is only ever tried (slurmctld's own locks keep the calls apart), and every file lies on a
//! tmpfs.

use pliant_protocol::board::{BoardReader, Event, PlaceRef, PlanRef, RingWriter, Signature, Told, Trusted, on_memory};
use pliant_protocol::config::{Config, Grow};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use slurm::select::job::Job;
use slurm::select::{layout, node};
use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::fs::File;
use std::hash::{Hash as _, Hasher};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Jobs whose record was told; more than are looked at between two changes of one.
const SEEN: usize = 4096;
/// Choices between their test and their start.
const EXPECTED: usize = 64;
/// The most places of a plan that are tried.
const PLACES: usize = 64;
/// A hard plan keeps a job waiting for so long at most, milliseconds.
const HARD_MS: u64 = 2_000;

static PLUGIN: Mutex<Option<Plugin>> = Mutex::new(None);

/// Everything, in slurmctld.
#[derive(Debug)]
pub struct Plugin {
    /// pliantd's plans.
    pub board: BoardReader,
    ring: Option<RingWriter>,
    /// Milliseconds that an elastic job waits for its plan.
    pub hold_ms: u64,
    /// Whether a bench measures.
    pub measure: bool,
    /// GPU jobs may be merged.
    pub in_place: bool,
    /// Whether the layout was looked at, and found right.
    checked: Option<bool>,
    seen: Vec<(u32, u64)>,
    /// Positions in the table of nodes by name.
    nodes: HashMap<String, usize>,
    expected: VecDeque<Expected>,
}

/// Positions of nodes in slurmctld's table, and GPUs by index. Empty: a node is not there.
pub type Place = Vec<(usize, u64)>;

/// A plan in slurmctld's terms.
#[derive(Clone, Debug)]
pub struct Planned {
    hard: bool,
    until_ms: u64,
    /// In order of preference.
    pub places: Vec<Place>,
}

/// A choice that a test has made for a job by its plan: node and GPUs.
#[derive(Clone, Debug)]
pub struct Expected {
    /// The job.
    pub job: u32,
    /// What was chosen.
    pub place: Place,
}

/// Begins; called once, in slurmctld. What is wrong comes back as lines for the log.
pub fn begin() -> Vec<String> {
    let mut lines = vec![];
    let path = std::env::var_os("PLIANT_CONFIG");
    let config = Config::find(path.as_deref().map(Path::new)).unwrap_or_else(|e| {
        lines.push(format!("{} (built-in settings are used)", first_line(&e.to_string())));
        Config::default()
    });
    let owner = slurm::select::uid_of(&config.daemon.user).unwrap_or_else(|| {
        lines.push(format!("there is no user {}: only plans of root are followed", config.daemon.user));
        0
    });
    let ring = ring(&config.select.ring).map_err(|e| lines.push(format!("no event ring, pliantd polls: {e}"))).ok();
    let plugin = Plugin {
        board: BoardReader::new(Trusted { path: config.select.board, owner }),
        ring,
        hold_ms: config.select.hold.min(2) * 1000,
        in_place: config.elastic.grow == Grow::InPlace,
        measure: std::env::var_os("PLIANT_SELECT_MEASURE").is_some(),
        checked: None,
        seen: vec![(0, 0); SEEN],
        nodes: HashMap::new(),
        expected: VecDeque::new(),
    };
    plugin.tell(&Event::Init { slurm: slurm::version(), idle: None });
    if let Ok(mut place) = PLUGIN.try_lock() {
        *place = Some(plugin);
    }
    lines
}

/// The ring's file: SlurmUser's own, with its whole space, so that no write to it can fail.
fn ring(path: &Path) -> Result<RingWriter, String> {
    let say = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
    if !on_memory(path) {
        return Err(say(&"does not lie on a tmpfs"));
    }
    // A file of its own each time: whoever reads the old one notices by its name.
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(say(&e)),
        _ => {}
    }
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o640)).map_err(|e| say(&e))?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, RingWriter::size()).map_err(|e| {
        let _ = std::fs::remove_file(path);
        say(&e)
    })?;
    let file = File::from(file);
    let inode = file.metadata().map(|m| m.ino()).unwrap_or(0);
    RingWriter::begin(file, now_ms() ^ inode.rotate_left(48)).map_err(|e| say(&e))
}

/// The plugin, unless this is no slurmctld, or another thread is in it.
pub fn plugin() -> Option<Guard> {
    let guard = match PLUGIN.try_lock() {
        Ok(guard) => guard,
        // A panic has closed the fence already; whoever gets here is a destructor.
        Err(TryLockError::Poisoned(guard)) => guard.into_inner(),
        Err(TryLockError::WouldBlock) => return None,
    };
    guard.is_some().then_some(Guard(guard))
}

/// The plugin for a call that hands over a job: also only where the layout is the one that this was built for.
pub fn plugin_for(job: *mut c_void) -> Option<Guard> {
    let mut guard = plugin()?;
    guard.fits(job).then_some(guard)
}

/// Access to the plugin for one part of a call.
#[derive(Debug)]
pub struct Guard(MutexGuard<'static, Option<Plugin>>);

impl std::ops::Deref for Guard {
    type Target = Plugin;
    #[allow(clippy::unwrap_used, reason = "a guard is made only where there is one; a panic is caught by the fence")]
    fn deref(&self) -> &Plugin {
        self.0.as_ref().unwrap()
    }
}

impl std::ops::DerefMut for Guard {
    #[allow(clippy::unwrap_used, reason = "as above")]
    fn deref_mut(&mut self) -> &mut Plugin {
        self.0.as_mut().unwrap()
    }
}

impl Plugin {
    fn fits(&mut self, job: *mut c_void) -> bool {
        if let Some(known) = self.checked {
            return known;
        }
        let found = layout::check(job);
        if let Err(why) = &found {
            slurm::select::log_info(&format!(
                "pliant: select plugin built for Slurm {} does not know this slurmctld ({why}): it only delegates",
                slurm::version()
            ));
            self.tell(&Event::Init { slurm: slurm::version(), idle: Some(why.clone()) });
        }
        self.checked = Some(found.is_ok());
        found.is_ok()
    }

    /// Tells pliantd, if there is a ring.
    pub fn tell(&self, event: &impl Told) {
        if let Some(ring) = &self.ring {
            // The space is there; a failure is a gap that the reader sees.
            let _ = ring.tell(now_ms(), event);
        }
    }

    /// Tells it together with what is told next, in the same call.
    pub fn tell_with_next(&self, event: &impl Told) {
        if let Some(ring) = &self.ring {
            let _ = ring.tell_with_next(now_ms(), event);
        }
    }

    /// Whether the record of a job is to be told: the first time, and after it has changed.
    pub fn is_news(&mut self, job: &Job<'_>) -> bool {
        let mut numbers = job.numbers();
        // It grows all the time, and says nothing about what the job asks for.
        numbers.priority = u32::from(numbers.priority == 0);
        let mut hasher = Quick::default();
        (numbers, job.partition()).hash(&mut hasher);
        let gpus = job.gpus();
        let counts = gpus.map(|g| (g.kind, g.per_job, g.per_node, g.per_socket, g.per_task));
        counts.hash(&mut hasher);
        let entry = (job.id(), hasher.finish());
        let slot = usize::try_from(job.id()).unwrap_or(0) % SEEN;
        match self.seen.get_mut(slot) {
            Some(known) if *known != entry => {
                *known = entry;
                true
            }
            _ => false,
        }
    }

    /// The plan of a job that counts now.
    pub fn plan_of_job(&mut self, job: u32, now: u64) -> Option<Planned> {
        Planned::of(&self.board, self.board.job(job)?, &mut self.nodes, now)
    }

    /// The plan of the first class that a request is of, if it counts now.
    pub fn plan_of_class(&mut self, request: &Signature<'_>, now: u64) -> Option<Planned> {
        Planned::of(&self.board, self.board.class(request)?, &mut self.nodes, now)
    }

    /// Remembers a choice until the job has started.
    pub fn expect(&mut self, expected: Expected) {
        self.expected.retain(|e| e.job != expected.job);
        if self.expected.len() >= EXPECTED {
            self.expected.pop_front();
        }
        self.expected.push_back(expected);
    }

    /// The choice for a job, if its plan was followed.
    pub fn expected(&self, job: u32) -> Option<&Expected> {
        self.expected.iter().find(|e| e.job == job)
    }

    /// No choice any more.
    pub fn forget(&mut self, job: u32) {
        self.expected.retain(|e| e.job != job);
    }

    /// A complaint about the board, for the log.
    pub fn complain(&mut self) {
        if let Some(text) = self.board.complaint() {
            slurm::select::log_info(&format!("pliant: plans are not followed: {text}"));
        }
    }
}

/// A hash of few instructions: nobody chooses what is hashed.
#[derive(Default)]
struct Quick(u64);

impl Hasher for Quick {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 29)
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let word = chunk.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
            self.write_u64(word);
        }
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(word.into());
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    }
}

impl Planned {
    fn of(board: &BoardReader, plan: PlanRef<'_>, nodes: &mut HashMap<String, usize>, now: u64) -> Option<Planned> {
        let mut place = |p: PlaceRef<'_>| -> Option<Place> {
            p.parts().map(|(node, gpus)| Some((position(nodes, board.node(node)?)?, gpus))).collect()
        };
        let places = plan.places().take(PLACES).map(|p| place(p).unwrap_or_default()).collect();
        (plan.until_ms > now).then_some(Planned { hard: plan.hard, until_ms: plan.until_ms, places })
    }

    /// Whether the job waits rather than goes elsewhere; not for long.
    pub fn is_hard(&self, now: u64) -> bool {
        self.hard && self.until_ms <= now.saturating_add(HARD_MS)
    }
}

/// The position of a node in slurmctld's table.
fn position(known: &mut HashMap<String, usize>, name: &str) -> Option<usize> {
    if let Some(at) = known.get(name).copied()
        && node::name(at) == Some(name)
    {
        return Some(at);
    }
    *known = (0..node::count()).filter_map(|i| Some((node::name(i)?.to_owned(), i))).collect();
    known.get(name).copied()
}

/// Milliseconds since the Unix epoch.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}
