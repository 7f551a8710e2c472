//! What was seen: who held which GPU when, and what happened.

use pliant_lab::Gpu;
use pliant_model::JobId;
use pliant_model::resize::{Kind, State};
use pliant_protocol::admin::Event;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Part of a job in the demo.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// The elastic job's own GPUs.
    Base,
    /// GPUs lent to it.
    Slice,
    /// The same training at a fixed size.
    Fixed,
    /// The job that needs the GPUs.
    Rigid,
}

impl Role {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Role::Base => "elastic training",
            Role::Slice => "slice",
            Role::Fixed => "fixed training",
            Role::Rigid => "rigid",
        }
    }
}

/// A GPU in the hands of one job, from the first look that showed it to the last one. Seconds.
#[derive(Debug, Clone)]
pub struct Span {
    /// Which.
    pub gpu: Gpu,
    /// Whose.
    pub job: JobId,
    /// In which part.
    pub role: Role,
    /// From.
    pub start: f64,
    /// To.
    pub end: f64,
    open: bool,
}

/// Something worth a mark in the picture.
#[derive(Debug, Clone)]
pub struct Mark {
    /// Seconds.
    pub at: f64,
    /// What happened, and why.
    pub text: String,
}

/// Everything that was seen.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// Who held what.
    pub spans: Vec<Span>,
    /// In the order of their times.
    pub marks: Vec<Mark>,
    /// When the training's own log showed the first step of a world: seconds, and the number of its ranks.
    pub worlds: Vec<(f64, u64)>,
    /// Looks at Slurm.
    pub looks: u32,
    /// Looks that showed one GPU in two jobs.
    pub twice: u32,
    roles: BTreeMap<JobId, Role>,
}

/// Shared by the play and the watcher.
#[derive(Debug)]
pub struct Record {
    begin: Instant,
    begin_ms: u64,
    history: Mutex<History>,
}

impl Record {
    /// Time starts now.
    pub fn new() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Record {
            begin: Instant::now(),
            begin_ms: u64::try_from(wall.as_millis()).unwrap_or(0),
            history: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Seconds since the start.
    pub fn now(&self) -> f64 {
        self.begin.elapsed().as_secs_f64()
    }

    /// Prints one line of the timeline.
    pub fn say(&self, at: f64, text: &str) {
        println!("{at:7.1} s  {text}");
    }

    /// Prints a line and marks the picture.
    pub fn mark(&self, at: f64, text: &str) {
        self.say(at, text);
        let mut history = self.lock();
        let after = history.marks.partition_point(|m| m.at <= at);
        let text = text.to_owned();
        history.marks.insert(after, Mark { at, text });
    }

    /// Names the part of a job.
    pub fn cast(&self, job: JobId, role: Role) {
        self.lock().roles.insert(job, role);
    }

    /// The part of a job; a slice is known by its name.
    pub fn role(&self, job: JobId, name: &str) -> Option<Role> {
        let roles = &self.lock().roles;
        let base = name.strip_prefix("pliant-").and_then(|b| b.parse().ok());
        match base.and_then(|b: JobId| roles.get(&b)) {
            Some(Role::Base) => Some(Role::Slice),
            _ => roles.get(&job).copied(),
        }
    }

    /// One look at Slurm: who holds which GPU.
    pub fn look(&self, at: f64, held: &[(Gpu, JobId, Role)]) {
        let mut history = self.lock();
        history.looks += 1;
        let mut all: Vec<&Gpu> = held.iter().map(|(gpu, ..)| gpu).collect();
        all.sort();
        history.twice += u32::from(all.windows(2).any(|w| w.first() == w.last()));
        for span in history.spans.iter_mut().filter(|s| s.open) {
            span.open = held.iter().any(|(g, j, _)| *g == span.gpu && *j == span.job);
            if span.open {
                span.end = at;
            }
        }
        for (gpu, job, role) in held {
            let known = history.spans.iter().any(|s| s.open && s.gpu == *gpu && s.job == *job);
            if !known {
                history.spans.push(Span { gpu: gpu.clone(), job: *job, role: *role, start: at, end: at, open: true });
            }
        }
    }

    /// The training's log shows a step of a new world.
    pub fn world(&self, at: f64, ranks: u64, step: u64) {
        self.lock().worlds.push((at, ranks));
        self.say(at, &format!("  step {step} is the first on {ranks} GPUs, says the training's log"));
    }

    /// A line of pliantd's journal.
    pub fn event(&self, event: &Event) {
        let at = Duration::from_millis(event.at_ms.saturating_sub(self.begin_ms)).as_secs_f64();
        let (from, to) = event.gpus.unwrap_or_default();
        let reason = &event.reason;
        match (event.kind, event.state) {
            (Some(kind), Some(State::Proposed)) => {
                self.mark(at, &format!("{kind} {from} → {to}: {reason}"));
            }
            (Some(Kind::Grow), Some(State::Granted)) => {
                self.say(at, "  Slurm has allocated the slices; new ranks load while the old ones train")
            }
            (_, Some(State::Announced)) => self.say(at, "  the old ranks are asked to leave"),
            (Some(Kind::Shrink), Some(State::Drained)) => self.say(at, "  the old ranks have left"),
            (_, Some(state @ (State::Settled | State::Confirmed))) => {
                self.say(at, &format!("  {state}: {reason}"));
            }
            (_, Some(State::Undone)) => self.mark(at, &format!("undone: {reason}")),
            (None, _) => self.mark(at, &reason.to_string()),
            _ => {}
        }
    }

    /// What was seen so far.
    pub fn history(&self) -> History {
        self.lock().clone()
    }
}
