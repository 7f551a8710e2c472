//! The reactor: what is observed goes in, effects come out. Plain functions over plain state: no socket, no async
//! and no clock (time comes with each call), so that every situation can be tested.
//!
//! Truth lies elsewhere: Slurm holds the allocations, each launcher holds what goes on in its job, and both are
//! told whole each time. What is kept here can be rebuilt from them; the journal adds what was *intended*.

use crate::journal::{Journal, JournalError, Resize};
use crate::resizes::{Resizes, Seen};
use crate::view::{self, SlurmView};
use pliant_model::resize::{Kind, State};
use pliant_model::{JobId, NodeName, OrderId, Reason, Seconds};
use pliant_policy::{Action, Plan};
use pliant_protocol::job::{JobStatus, Millis, Order, OrderStatus, SliceSpec};
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
    /// Look at Slurm soon: something there has changed by our doing.
    PollSoon,
}

/// Settings of the reactor.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Seconds that Slurm may take to allocate a slice.
    pub patience: Seconds,
    /// Seconds after which Slurm's last answer is too old to act on.
    pub stale_after: Seconds,
}

/// Seconds after which an order that the launcher has not taken up is sent again.
const RESEND: Seconds = 3;
/// Seconds beyond the grace after which pliantd cancels the slices itself.
const ENFORCE_AFTER: Seconds = 10;
/// Seconds without a launcher, or on nobody's list, after which a slice is cancelled.
const ORPHAN_AFTER: Seconds = 45;
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
    /// Registered jobs.
    pub jobs: BTreeMap<JobId, Job>,
    /// Connected agents.
    pub agents: BTreeMap<NodeName, Agent>,
    /// Why nothing is done about a job, as of the last decision.
    pub notes: BTreeMap<JobId, Reason>,
    /// Resizes under way.
    pub resizes: Resizes,
    /// The journal.
    pub journal: Journal,
    /// Whether the last write to the journal worked: no new resizes otherwise.
    pub durable: bool,
    fitting: BTreeMap<JobId, Seconds>,
    /// How often slices were taken back for a pending job, and when last.
    served: BTreeMap<JobId, (u32, Seconds)>,
    suspects: BTreeMap<JobId, Seconds>,
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
            jobs: BTreeMap::new(),
            agents: BTreeMap::new(),
            notes: BTreeMap::new(),
            resizes: Resizes::restore(&journal)?,
            journal,
            durable: true,
            fitting: BTreeMap::new(),
            served: BTreeMap::new(),
            suspects: BTreeMap::new(),
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
        self.view_at = Some((asked.mono, asked.wall_ms / 1000));
        self.confirm(now);
        self.drop_ended(now);
        self.sweep(now);
        if self.view.jobs.values().any(|j| waits_unjudged(j, now)) {
            // Slurm has not said yet why it waits: look again before the next regular time.
            self.out.push(Effect::PollSoon);
        }
        self.decide(now);
    }

    /// An agent has connected.
    pub fn on_agent(&mut self, node: NodeName, agent: Agent) {
        self.agents.insert(node, agent);
    }

    /// An agent's connection is closed.
    pub fn on_agent_gone(&mut self, node: &NodeName, now: Now) {
        self.agents.remove(node);
        for job in self.jobs.values_mut().filter(|j| j.node == *node && j.connected) {
            job.connected = false;
            job.heard = now.mono;
        }
    }

    /// A launcher tells its state.
    pub fn on_status(&mut self, node: NodeName, uid: u32, status: JobStatus, now: Now) {
        let base = status.base;
        if let Some(record) = self.view.jobs.get(&base).filter(|r| r.user_id != uid) {
            tracing::warn!(job = base.0, uid, owner = record.user_id, "status from another user's process ignored");
            return;
        }
        let before = self.jobs.remove(&base);
        if let Some(old) = before.as_ref().filter(|old| old.status.instance != status.instance) {
            let what = format!("the job was started again (instance {})", status.instance);
            self.end(old.status.base, State::Undone, &Reason::Failed { what }, now);
        }
        let was = before.as_ref().filter(|b| b.status.instance == status.instance);
        let news = was.is_none_or(|b| {
            (b.status.ready, b.status.generation, &b.status.order) != (status.ready, status.generation, &status.order)
                || b.status.slices != status.slices
                || !b.connected
        });
        let restored = self.resizes.of(base).is_some_and(|r| r.kind == Kind::Shrink);
        let job = Job {
            uid,
            node,
            connected: true,
            heard: now.mono,
            failures: was.map_or(0, |b| b.failures),
            retry_at: was.and_then(|b| b.retry_at),
            sent: was.map_or(0, |b| b.sent),
            enforce_at: match was {
                Some(b) => b.enforce_at,
                // Restored from the journal: its grace begins anew.
                None => restored.then_some(now.mono + status.grace + ENFORCE_AFTER),
            },
            status,
        };
        self.jobs.insert(base, job);
        self.reconcile(base, now);
        if !self.view.jobs.contains_key(&base) {
            self.out.push(Effect::PollSoon);
        } else if news {
            self.decide(now);
        }
    }

    /// A launcher's connection is closed.
    pub fn on_gone(&mut self, base: JobId, instance: &str, now: Now) {
        if let Some(job) = self.jobs.get_mut(&base).filter(|j| j.status.instance == instance) {
            job.connected = false;
            job.heard = now.mono;
            self.out.push(Effect::PollSoon);
        }
    }

    /// An agent has cancelled a slice.
    pub fn on_cancelled(&mut self, slice: JobId, reason: &Reason, now: Now) {
        let base = self.view.jobs.get(&slice).and_then(view::mark).map_or(slice, |m| m.base);
        let noted = self.journal.note(base, now.wall_ms, reason);
        self.durable_after(noted);
        self.out.push(Effect::PollSoon);
    }

    /// Every second.
    pub fn tick(&mut self, now: Now) {
        let fresh = self.fresh(now);
        let mut cancel = vec![];
        let mut resend = vec![];
        for r in self.resizes.iter() {
            let Some(job) = self.jobs.get_mut(&r.base) else {
                continue;
            };
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
        for (slice, base, reason) in cancel {
            self.cancel(slice, base, reason, now);
        }
    }

    /// Compares the open resize of a job with what its launcher says.
    fn reconcile(&mut self, base: JobId, now: Now) {
        let Some(job) = self.jobs.get(&base) else {
            return;
        };
        let status = job.status.clone();
        for done in &status.done {
            self.observe(&status, done, now);
        }
        if let Some(order) = &status.order {
            self.observe(&status, order, now);
        }
        let Some(open) = self.resizes.of(base) else {
            return;
        };
        let told = status.order.iter().chain(&status.done).any(|o| o.id == open.id);
        let waits_for_slurm = open.kind == Kind::Shrink && open.state == State::Released;
        if !told && open.state != State::Proposed && !waits_for_slurm {
            let found = format!("the launcher no longer knows the {} (it was {})", open.kind, open.state);
            self.end(base, State::Undone, &Reason::Recovered { found }, now);
        }
    }

    /// One resize as a launcher tells it: ours, or one that it began itself.
    fn observe(&mut self, status: &JobStatus, told: &OrderStatus, now: Now) {
        let base = status.base;
        if self.resizes.of(base).is_none_or(|r| r.id != told.id) && !self.adopt(status, told, now) {
            return;
        }
        let Some(open) = self.resizes.of(base) else {
            return;
        };
        let started = open.started_ms;
        let size = status.world.iter().map(|m| m.gpus).fold(0u32, u32::saturating_add);
        let final_size = matches!(told.state, State::Settled | State::Released).then_some(size);
        let took = now.wall_ms.saturating_sub(started) / 1000;
        let done = Reason::Done { took };
        let reason = if told.state == State::Settled { &done } else { &told.reason };
        let seen = Seen { reason, slices: &told.slices, after: final_size, times: &told.times, now_ms: now.wall_ms };
        let advanced = self.resizes.advance(base, told.state, &seen, &mut self.journal);
        let ended = self.durable_after(advanced).unwrap_or(false);
        let kind = told.kind;
        if let Some(job) = self.jobs.get_mut(&base) {
            match told.state {
                State::Undone if ended && kind == Kind::Grow => {
                    let wait = BACK_OFF.get(job.failures).or(BACK_OFF.last()).copied().unwrap_or(60);
                    job.failures += 1;
                    job.retry_at = Some(now.mono + wait);
                }
                State::Settled => (job.failures, job.retry_at) = (0, None),
                _ => {}
            }
        }
        if matches!(told.state, State::Released | State::Settled | State::Granted | State::Undone) {
            self.out.push(Effect::PollSoon);
        }
    }

    /// Takes up a resize that the launcher began itself (preemption, a lost slice). False: nothing to observe.
    fn adopt(&mut self, status: &JobStatus, told: &OrderStatus, now: Now) -> bool {
        let known = self.journal.knows(&told.id);
        if self.durable_after(known).unwrap_or(true) {
            return false;
        }
        if let Some(open) = self.resizes.of(status.base) {
            // One resize at a time: what the launcher has not taken up gives way to what is under way there.
            if open.state != State::Proposed {
                return false;
            }
            let found = format!("gave way to {} {}", told.kind, told.id);
            self.end(status.base, State::Undone, &Reason::Recovered { found }, now);
        }
        let size: u32 = status.world.iter().map(|m| m.gpus).sum();
        let going: u32 = status.slices.iter().filter(|s| told.slices.contains(&s.job)).map(|s| s.gpus).sum();
        let resize = Resize {
            id: told.id.clone(),
            base: status.base,
            instance: status.instance.clone(),
            kind: told.kind,
            state: State::Proposed,
            order: None,
            slices: told.slices.clone(),
            before: size,
            after: if told.kind == Kind::Shrink { size.saturating_sub(going) } else { size },
            started_ms: told.times.first().map_or(now.wall_ms, |(_, t)| *t),
        };
        let begun = self.resizes.begin(resize, &told.reason, &mut self.journal);
        self.durable_after(begun).is_some()
    }

    /// Shrinks end when Slurm no longer shows their slices.
    fn confirm(&mut self, now: Now) {
        let gone = |r: &&Resize| {
            r.kind == Kind::Shrink
                && r.state == State::Released
                && r.slices.iter().all(|s| self.view.active(*s).is_none())
        };
        let confirmed: Vec<(JobId, Millis)> =
            self.resizes.iter().filter(gone).map(|r| (r.base, r.started_ms)).collect();
        for (base, started) in confirmed {
            let took = now.wall_ms.saturating_sub(started) / 1000;
            self.end(base, State::Confirmed, &Reason::Done { took }, now);
        }
        if self.resizes.iter().any(|r| r.kind == Kind::Shrink && r.state == State::Released) {
            self.out.push(Effect::PollSoon);
        }
    }

    /// Jobs that Slurm shows as ended, or not at all any more, are forgotten.
    fn drop_ended(&mut self, now: Now) {
        let asked = self.view_at.map_or(0, |(at, _)| at);
        let ended = |id: &JobId, heard: Seconds| match self.view.jobs.get(id) {
            Some(record) => !view::holds(record),
            None => asked > heard + 5,
        };
        let gone: Vec<JobId> = self.jobs.iter().filter(|(id, j)| ended(id, j.heard)).map(|(id, _)| *id).collect();
        for base in gone {
            self.jobs.remove(&base);
            self.notes.remove(&base);
            self.end(base, State::Undone, &Reason::Failed { what: "the job has ended".into() }, now);
        }
        let orphaned: Vec<JobId> = self
            .resizes
            .iter()
            .filter(|r| !self.jobs.contains_key(&r.base) && self.view.active(r.base).is_none())
            .map(|r| r.base)
            .collect();
        for base in orphaned {
            let found = "the job had ended".to_owned();
            self.end(base, State::Undone, &Reason::Recovered { found }, now);
        }
    }

    /// Slices that nobody owns any more are cancelled, once two looks at Slurm agree.
    fn sweep(&mut self, now: Now) {
        let mut orphans: Vec<(JobId, JobId, bool)> = vec![];
        for (slice, mark, record) in self.view.slices() {
            let base_lives = self.view.active(mark.base).is_some_and(|b| b.user_id == record.user_id);
            let owner = self.jobs.get(&mark.base);
            let owned = owner.is_some_and(|j| {
                let listed = j.status.slices.iter().any(|s| s.job == slice);
                let coming = j.status.order.is_some();
                j.connected && j.status.instance == mark.instance && (listed || coming)
            });
            if !base_lives || !owned {
                orphans.push((slice, mark.base, base_lives));
            }
        }
        self.suspects.retain(|job, _| orphans.iter().any(|(o, ..)| o == job));
        for (slice, base, base_lives) in orphans {
            let since = *self.suspects.entry(slice).or_insert(now.mono);
            // Slurm says that the base is gone: sure at once. Otherwise the launcher may be about to connect.
            let base_ended = !base_lives && self.view.jobs.get(&base).is_some_and(|b| !view::holds(b));
            if base_ended || now.mono.saturating_sub(since) >= ORPHAN_AFTER {
                self.suspects.insert(slice, now.mono);
                self.cancel(slice, base, Reason::Orphan { slice }, now);
            }
        }
    }

    fn cancel(&mut self, slice: JobId, base: JobId, reason: Reason, now: Now) {
        let noted = self.journal.note(base, now.wall_ms, &reason);
        self.durable_after(noted);
        self.out.push(Effect::Cancel { slice, base, reason });
    }

    /// Cancelling through Slurm did not work: the agent of a node does it as root.
    pub fn cancel_by_agent(&mut self, slice: JobId, base: JobId, reason: Reason) {
        let node = self.view.jobs.get(&slice).and_then(|j| j.nodes.clone()).map(NodeName);
        let there = node.filter(|n| self.agents.contains_key(n)).or_else(|| self.agents.keys().next().cloned());
        match there {
            Some(node) => self.out.push(Effect::Agent(node, peer::ToAgent::Cancel { slice, base, reason })),
            None => tracing::warn!(slice = slice.0, "no right to cancel it and no agent connected: tried again later"),
        }
    }

    /// One round of decisions.
    fn decide(&mut self, now: Now) {
        let Some((as_of, _)) = self.view_at else {
            return;
        };
        let waits = |id: &JobId| self.view.jobs.get(id).is_some_and(|j| j.state == "PENDING");
        self.served.retain(|id, (_, last)| waits(id) && now.mono.saturating_sub(*last) < SERVED_FOR);
        let agents: BTreeSet<NodeName> = self.agents.keys().cloned().collect();
        let owned = |id: &JobId, j: &Job| self.view.active(*id).is_some_and(|r| r.user_id == j.uid);
        let jobs = self.jobs.iter().filter(|(id, j)| j.connected && owned(id, j));
        let known = view::Known {
            jobs: jobs.map(|(_, j)| (&j.status, j.retry_at)).collect(),
            resizes: &self.resizes,
            agents: &agents,
            fitting: &self.fitting,
            served: &self.served,
            wall_to_mono: i64::try_from(now.mono).unwrap_or(0) - i64::try_from(now.wall_ms / 1000).unwrap_or(0),
        };
        let cluster = view::cluster(&self.view, &known, as_of);
        let config = pliant_policy::Config { stale_after: self.settings.stale_after, ..Default::default() };
        let plan = pliant_policy::decide(&cluster, &config, now.mono);
        self.fitting =
            plan.fitting.iter().map(|job| (*job, self.fitting.get(job).copied().unwrap_or(now.mono))).collect();
        for job in &plan.served {
            let (times, _) = self.served.get(job).copied().unwrap_or_default();
            self.served.insert(*job, (times + 1, now.mono));
        }
        self.notes = plan.notes.clone();
        let silent = self.jobs.iter().filter(|(_, j)| !j.connected).map(|(id, _)| *id);
        self.notes.extend(silent.map(|id| (id, Reason::NoLauncher)));
        if self.durable {
            self.begin(plan, now);
        } else {
            // One small write tells whether the journal works again.
            let probe = self.journal.probe();
            self.durable_after(probe);
        }
    }

    fn begin(&mut self, plan: Plan, now: Now) {
        for action in plan.actions {
            let id = OrderId((self.next_id)());
            let (base, order, slices, reason) = match action {
                Action::Grow { base, slices, reason } => {
                    let specs = slices.into_iter().map(|(node, gpus)| SliceSpec { node, gpus }).collect();
                    let patience = self.settings.patience;
                    (base, Order::Grow { id, slices: specs, patience, reason: reason.clone() }, vec![], reason)
                }
                Action::Shrink { base, slices, reason } => {
                    let grace = self.jobs.get(&base).map_or(60, |j| j.status.grace);
                    let order = Order::Shrink { id, slices: slices.clone(), grace, reason: reason.clone() };
                    (base, order, slices, reason)
                }
            };
            self.order(base, order, slices, &reason, now);
        }
    }

    /// Makes an order durable, then sends it.
    fn order(&mut self, base: JobId, order: Order, slices: Vec<JobId>, reason: &Reason, now: Now) {
        let Some(job) = self.jobs.get_mut(&base) else {
            return;
        };
        let lent = |keep: fn(bool) -> bool| -> u32 {
            job.status.slices.iter().filter(|s| keep(slices.contains(&s.job))).map(|s| s.gpus).sum()
        };
        let before = job.status.base_gpus + lent(|_| true);
        let after = match &order {
            Order::Grow { slices, .. } => before + slices.iter().map(|s| s.gpus).sum::<u32>(),
            Order::Shrink { .. } => job.status.base_gpus + lent(|going| !going),
        };
        let resize = Resize {
            id: order.id().clone(),
            base,
            instance: job.status.instance.clone(),
            kind: order.kind(),
            state: State::Proposed,
            order: Some(order.clone()),
            slices,
            before,
            after,
            started_ms: now.wall_ms,
        };
        let begun = self.resizes.begin(resize, reason, &mut self.journal);
        if self.durable_after(begun).is_none() {
            return;
        }
        let Some(job) = self.jobs.get_mut(&base) else {
            return;
        };
        tracing::info!(job = base.0, kind = %order.kind(), from = before, to = after, order = %order.id(), "{reason}");
        job.sent = now.mono;
        job.enforce_at = (order.kind() == Kind::Shrink).then_some(now.mono + job.status.grace + ENFORCE_AFTER);
        let (node, instance) = (job.node.clone(), job.status.instance.clone());
        self.notes.insert(base, Reason::InFlight { order: order.id().clone() });
        self.out.push(Effect::Agent(node, peer::ToAgent::Order { base, instance, order }));
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
        && matches!(job.reason.as_deref(), None | Some("None"))
        && job.submit_time.is_some_and(young)
}
