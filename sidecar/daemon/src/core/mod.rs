//! The reactor: what is observed goes in, effects come out. Plain functions over plain state: no socket, no async
//! and no clock (time comes with each call), so that every situation can be tested.
//!
//! Truth lies elsewhere: Slurm holds the allocations, each launcher holds what goes on in its job, and both are
//! told whole each time. What is kept here can be rebuilt from them; the journal adds what was *intended*.

mod decide;
mod enforce;
pub mod events;
pub mod gpus;
mod observe;
pub mod placing;
#[cfg(test)]
mod tests;

use crate::journal::{Journal, JournalError};
use crate::resizes::{Resizes, Seen};
use crate::view::{self, SlurmView};
use pliant_model::resize::{Kind, State};
use pliant_model::{JobId, NodeName, OrderId, Reason, Seconds};

use pliant_protocol::board::{Board, Key};
use pliant_protocol::job::{JobStatus, Millis};
use pliant_protocol::peer;
use std::collections::{BTreeMap, BTreeSet};

/// A point in time: what people read, and what intervals are measured by.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Milliseconds since the Unix epoch.
    pub wall_ms: Millis,
    /// Seconds of a clock that never jumps.
    pub mono: Seconds,
}

/// What is to be done outside.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Send this to the agent of a node.
    Agent(NodeName, peer::ToAgent),
    /// Cancel a slice.
    Cancel {
        /// The slice.
        slice: JobId,
        /// Its base.
        base: JobId,
        /// Why.
        reason: Reason,
    },
    /// Look at Slurm soon: something there has changed.
    PollSoon,
    /// Publish these plans for the select plugin; made upon an event of that time (Unix ms), if upon one.
    Plans(Board, Option<Millis>),
}

/// Settings of the reactor.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Seconds that Slurm may take to allocate a slice.
    pub patience: Seconds,
    /// Seconds after which Slurm's last answer is too old to act on.
    pub stale_after: Seconds,
    /// Most seconds of grace, whatever a launcher says.
    pub grace_max: Seconds,
    /// Most pending jobs with a plan of their own.
    pub depth: usize,
}

/// Seconds after which an order that the launcher has not taken up is sent again.
const RESEND: Seconds = 3;
/// Seconds beyond the grace after which pliantd cancels the slices itself.
const ENFORCE_AFTER: Seconds = 10;
/// Seconds without a launcher, or on nobody's list, after which a slice is cancelled.
const ORPHAN_AFTER: Seconds = 45;
/// Milliseconds after which an order that no launcher has taken up is given up: the view that it was made on is gone.
const ORDER_EXPIRES: Millis = 40_000;
/// Seconds beyond patience and grace after which a resize has ended for us, whatever its launcher says.
const RESIZE_EXPIRES: Seconds = 900;
/// Seconds for which a node that has refused a slice is left out for that job.
const AVOID_FOR: Seconds = 60;
/// Seconds after a release in which Slurm is looked at more often than usual.
const LOOK_CLOSER: Seconds = 30;
/// Seconds after which it is forgotten that slices were taken back for a pending job.
const SERVED_FOR: Seconds = 600;
/// Waiting times after the first, second, … withdrawn growth, in seconds.
const BACK_OFF: [Seconds; 5] = [5, 10, 20, 40, 60];

/// An elastic job that has registered.
#[derive(Debug)]
pub struct Job {
    /// As its launcher told it last.
    pub status: JobStatus,
    /// Owner, proven by the agent.
    pub uid: u32,
    /// The agent that its launcher is connected to.
    pub node: NodeName,
    /// Whether the launcher is connected.
    pub connected: bool,
    /// Since when it is not, or when it was last heard, in monotonic seconds.
    pub heard: Seconds,
    /// Growths withdrawn in a row.
    failures: usize,
    /// No growth before.
    retry_at: Option<Seconds>,
    /// When the open order was sent.
    sent: Seconds,
    /// When the slices of an open shrink are cancelled by force.
    enforce_at: Option<Seconds>,
    /// Ended resizes in its status that the journal is known to have: asked once, not with every status.
    journaled: BTreeSet<OrderId>,
    /// Nodes that have refused a slice, until when they are left out.
    avoid: BTreeMap<NodeName, Seconds>,
}

impl Job {
    fn new(status: JobStatus, uid: u32, node: NodeName, now: Now, enforce_at: Option<Seconds>) -> Job {
        Job {
            status,
            uid,
            node,
            connected: true,
            heard: now.mono,
            failures: 0,
            retry_at: None,
            sent: 0,
            enforce_at,
            journaled: BTreeSet::new(),
            avoid: BTreeMap::new(),
        }
    }

    /// Whether a status says something that a decision looks at.
    fn differs(&self, status: &JobStatus) -> bool {
        let old = &self.status;
        !self.connected
            || (old.ready, old.generation, &old.order) != (status.ready, status.generation, &status.order)
            || old.slices != status.slices
    }
}

/// A connected agent.
#[derive(Clone, Debug)]
pub struct Agent {
    /// Software version.
    pub software: String,
    /// Its clock minus ours in milliseconds.
    pub skew_ms: i64,
    /// What it told for `pliant doctor`.
    pub facts: Vec<(String, String)>,
}

/// The whole state.
#[derive(Debug)]
pub struct Core {
    /// Settings.
    pub settings: Settings,
    /// Slurm's last answer.
    pub view: SlurmView,
    /// When it was asked for, in monotonic seconds and in Unix seconds.
    pub view_at: Option<(Seconds, Seconds)>,
    /// GPUs that its running jobs hold, by node: the same for every decision on this answer.
    used: BTreeMap<NodeName, u32>,
    /// Which job has which GPU, from the same answer.
    pub holders: gpus::Holders,
    /// Registered jobs.
    pub jobs: BTreeMap<JobId, Job>,
    /// Connected agents.
    pub agents: BTreeMap<NodeName, Agent>,
    /// Their GPUs.
    pub hardware: gpus::Hardware,
    /// Why nothing is done about a job, as of the last decision.
    pub notes: BTreeMap<JobId, Reason>,
    /// Resizes under way.
    pub resizes: Resizes,
    /// The journal.
    pub journal: Journal,
    /// Names of the jobs' owners, as far as they have been looked up.
    pub names: BTreeMap<u32, String>,
    /// Whether the last write to the journal worked: no new resizes otherwise.
    pub durable: bool,
    fitting: BTreeMap<JobId, Seconds>,
    /// How often slices were taken back for a pending job, and when last.
    served: BTreeMap<JobId, (u32, Seconds)>,
    suspects: BTreeMap<JobId, Seconds>,
    /// How the select plugin follows plans.
    pub steering: events::Steering,
    /// Makes the plans for it.
    pub placer: placing::Placer,
    /// The last plans.
    board: Option<Board>,
    /// Plans are to be made.
    unplanned: bool,
    /// The first event since the last plans, Unix ms.
    event_ms: Option<Millis>,
    /// Jobs that Slurm is to be asked about; all of them where `ask_for_all`.
    asks: BTreeSet<JobId>,
    ask_for_all: bool,
    /// Jobs that Slurm has not tried to start yet, since when.
    unjudged: BTreeMap<JobId, Seconds>,
    /// Until when Slurm is looked at more often, since slices have just been released.
    closer_until: Seconds,
    /// Something has changed since the last decision.
    due: bool,
    next_id: fn() -> String,
    out: Vec<Effect>,
}

impl Core {
    /// Starts from a journal; `next_id` gives random names for orders.
    ///
    /// # Errors
    /// When the journal cannot be read.
    pub fn new(settings: Settings, journal: Journal, next_id: fn() -> String) -> Result<Core, JournalError> {
        Ok(Core {
            settings,
            view: SlurmView::default(),
            view_at: None,
            used: BTreeMap::new(),
            holders: gpus::Holders::default(),
            jobs: BTreeMap::new(),
            agents: BTreeMap::new(),
            hardware: gpus::Hardware::default(),
            notes: BTreeMap::new(),
            resizes: Resizes::restore(&journal)?,
            journal,
            names: BTreeMap::new(),
            durable: true,
            fitting: BTreeMap::new(),
            served: BTreeMap::new(),
            suspects: BTreeMap::new(),
            steering: events::Steering::default(),
            placer: placing::Placer::default(),
            board: None,
            unplanned: false,
            event_ms: None,
            asks: BTreeSet::new(),
            ask_for_all: true,
            unjudged: BTreeMap::new(),
            closer_until: 0,
            due: false,
            next_id,
            out: vec![],
        })
    }

    /// What is to be done since the last call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.out)
    }

    /// Whether Slurm's last answer may be acted on.
    pub fn fresh(&self, now: Now) -> bool {
        self.view_at.is_some_and(|(at, _)| now.mono.saturating_sub(at) <= self.settings.stale_after)
    }

    /// Slurm has answered; `asked` is when it was asked.
    pub fn on_view(&mut self, view: SlurmView, asked: Now, now: Now) {
        self.view = view;
        self.view_changed();
        self.view_at = Some((asked.mono, asked.wall_ms / 1000));
        self.confirm(now);
        self.drop_ended(now);
        self.sweep(now);
        if self.steering.following {
            self.ask_unsure(now);
        } else if self.view.jobs.values().any(|j| waits_unjudged(j, now)) {
            // Slurm has not said yet why it waits: look again before the next regular time.
            self.out.push(Effect::PollSoon);
        }
    }

    /// What Slurm is to be asked about since the last call: single jobs, or all of them.
    pub fn take_asks(&mut self) -> (bool, BTreeSet<JobId>) {
        (std::mem::take(&mut self.ask_for_all), std::mem::take(&mut self.asks))
    }

    /// How many plans are on the board: of jobs, and of classes of requests.
    pub fn plans(&self) -> (u32, u32) {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let plans = self.board.as_ref().map(|b| b.plans.as_slice()).unwrap_or_default();
        let jobs = plans.iter().filter(|p| matches!(p.key, Key::Job(_))).count();
        (count(jobs), count(plans.len() - jobs))
    }

    /// Makes plans if something has changed, before anything else is decided: a job may start at any moment.
    pub fn plan(&mut self) {
        if !std::mem::take(&mut self.unplanned) || self.view_at.is_none() {
            return;
        }
        let holders = gpus::Holders::not_ending(&self.view);
        let seen =
            placing::Seen { view: &self.view, holders: &holders, hardware: &self.hardware, depth: self.settings.depth };
        let board = self.placer.board(seen);
        let event_ms = self.event_ms.take();
        if self.board.as_ref() != Some(&board) {
            self.out.push(Effect::Plans(board.clone(), event_ms));
            self.board = Some(board);
        }
    }

    /// Decides if something has changed; called when no more input is waiting, so that a burst of it costs one
    /// decision.
    pub fn settle(&mut self, now: Now) {
        self.plan();
        if std::mem::take(&mut self.due) {
            self.decide(now);
        }
    }

    /// An agent has connected.
    pub fn on_agent(&mut self, node: NodeName, agent: Agent) {
        self.agents.insert(node, agent);
    }

    /// An agent's connection is closed.
    pub fn on_agent_gone(&mut self, node: &NodeName, now: Now) {
        self.agents.remove(node);
        self.hardware.nodes.remove(node);
        self.hardware.samples.remove(node);
        for job in self.jobs.values_mut().filter(|j| j.node == *node && j.connected) {
            job.connected = false;
            job.heard = now.mono;
        }
    }

    /// A launcher tells its state.
    pub fn on_status(&mut self, node: NodeName, uid: u32, mut status: JobStatus, now: Now) {
        let base = status.base;
        if let Err(why) = status.check() {
            tracing::warn!(job = base.0, uid, "status ignored: {why}");
            return;
        }
        // The user's own pliant.toml may say otherwise; ours counts.
        status.grace = status.grace.min(self.settings.grace_max);
        if let Some(record) = self.view.jobs.get(&base).filter(|r| r.user_id != uid) {
            tracing::warn!(job = base.0, uid, owner = record.user_id, "status from another user's process ignored");
            return;
        }
        if self.jobs.get(&base).is_some_and(|j| j.status.instance != status.instance) {
            self.jobs.remove(&base);
            let what = format!("the job was started again (instance {})", status.instance);
            self.end(base, State::Undone, &Reason::Failed { what }, now);
        }
        let news = self.jobs.get(&base).is_none_or(|j| j.differs(&status));
        if let Some(job) = self.jobs.get_mut(&base) {
            (job.uid, job.node, job.connected, job.heard) = (uid, node, true, now.mono);
            job.journaled.retain(|id| status.done.iter().any(|o| o.id == *id));
            job.status = status;
        } else {
            // Restored from the journal: the grace of a shrink begins anew.
            let restored = self.resizes.of(base).is_some_and(|r| r.kind == Kind::Shrink);
            let enforce_at = restored.then_some(now.mono + status.grace + ENFORCE_AFTER);
            self.jobs.insert(base, Job::new(status, uid, node, now, enforce_at));
        }
        self.reconcile(base, now);
        if !self.view.jobs.contains_key(&base) {
            self.ask(base);
        } else if news {
            self.due = true;
        }
    }

    /// A launcher's connection is closed.
    pub fn on_gone(&mut self, base: JobId, instance: &str, now: Now) {
        if let Some(job) = self.jobs.get_mut(&base).filter(|j| j.status.instance == instance) {
            job.connected = false;
            job.heard = now.mono;
            self.ask(base);
        }
    }

    /// An agent has cancelled a slice.
    pub fn on_cancelled(&mut self, slice: JobId, reason: &Reason, now: Now) {
        let base = self.view.jobs.get(&slice).and_then(view::mark).map_or(slice, |m| m.base);
        let noted = self.journal.note(base, now.wall_ms, reason);
        self.durable_after(noted);
        self.ask(slice);
    }

    /// Every second.
    pub fn tick(&mut self, now: Now) {
        if self.steering.following {
            self.ask_unsure(now);
        }
        let fresh = self.fresh(now);
        let (mut cancel, mut resend, mut expired) = (vec![], vec![], vec![]);
        for r in self.resizes.iter() {
            let age = now.wall_ms.saturating_sub(r.started_ms);
            let limit = (self.settings.patience + self.settings.grace_max + RESIZE_EXPIRES) * 1000;
            if (r.state == State::Proposed && age > ORDER_EXPIRES) || (r.kind == Kind::Grow && age > limit) {
                expired.push((r.base, age / 1000));
                continue;
            }
            let Some(job) = self.jobs.get_mut(&r.base) else { continue };
            let unheard = r.state == State::Proposed && now.mono.saturating_sub(job.sent) >= RESEND;
            if let (true, true, Some(order)) = (job.connected, unheard, &r.order) {
                job.sent = now.mono;
                resend.push((job.node.clone(), r.base, r.instance.clone(), order.clone()));
            }
            let released = r.state >= State::Released;
            if r.kind == Kind::Shrink && fresh && !released && job.enforce_at.is_some_and(|t| now.mono >= t) {
                job.enforce_at = Some(now.mono + ENFORCE_AFTER);
                let reason = Reason::GraceOver { grace: job.status.grace };
                cancel.extend(r.slices.iter().map(|s| (*s, r.base, reason.clone())));
            }
        }
        for (node, base, instance, order) in resend {
            self.out.push(Effect::Agent(node, peer::ToAgent::Order { base, instance, order }));
        }
        for (base, age) in expired {
            self.end(base, State::Undone, &Reason::Failed { what: format!("not done after {age} s") }, now);
        }
        for (slice, base, reason) in cancel {
            self.cancel(slice, base, reason, now);
        }
    }

    /// Ends the open resize of a job, if there is one.
    fn end(&mut self, base: JobId, state: State, reason: &Reason, now: Now) {
        let seen = Seen { reason, slices: &[], after: None, times: &[], now_ms: now.wall_ms };
        let ended = self.resizes.advance(base, state, &seen, &mut self.journal);
        self.durable_after(ended);
        if let Some(job) = self.jobs.get_mut(&base) {
            job.enforce_at = None;
        }
    }

    /// Remembers whether the journal works; logs when that changes.
    fn durable_after<T>(&mut self, result: Result<T, JournalError>) -> Option<T> {
        match result {
            Ok(value) => {
                if !self.durable {
                    tracing::info!("the journal works again");
                }
                self.durable = true;
                Some(value)
            }
            Err(e) => {
                if self.durable {
                    tracing::error!("{e}: no new resizes until it works again");
                }
                self.durable = false;
                None
            }
        }
    }
}

/// Seconds after submission in which Slurm normally says why a job waits. Later it is merely far back in the queue.
const JUDGED_AFTER: Seconds = 15;

/// A job that has just come and that Slurm has not judged yet: no reason, or none that says what it waits for.
fn waits_unjudged(job: &pliant_protocol::bridge::JobRecord, now: Now) -> bool {
    let young = |t: i64| now.wall_ms / 1000 <= t.unsigned_abs() + JUDGED_AFTER;
    job.state == "PENDING"
        && job.priority != Some(0)
        && view::wants_gpus(job)
        && matches!(job.reason.as_deref(), None | Some("None"))
        && job.submit_time.is_some_and(young)
}
