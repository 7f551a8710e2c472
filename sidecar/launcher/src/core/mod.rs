//! The launcher's decisions: events in, effects out; no process, file or clock. Time is an argument.
//!
//! A *unit* is one step with one supervisor: one per base node, one per slice. A *generation* is a world's processes
//! over the units. At most two are alive: the one that trains, and the next one that loads beside it. At most one
//! *change* is under way; further orders wait in a queue.

mod change;
mod ending;
mod generation;
mod loss;
mod orders;
mod status;
#[cfg(test)]
mod tests;
mod units;

pub use generation::{Generation, Rank};
pub use units::{Unit, UnitId, UnitState};

use change::Change;
use ending::Ending;
use pliant_model::{GpuCount, GpuRange, JobId, Locality, NodeName, Seconds};
use pliant_protocol::job::{JobStatus, Order, OrderStatus, Progress};
use pliant_protocol::local::ToAgent;
use pliant_protocol::step::{FromSupervisor, ToSupervisor};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Milliseconds of a clock that never goes back; where it starts does not matter.
pub type Millis = u64;

/// What the launcher knows about its job before anything runs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The base.
    pub base: JobId,
    /// This run of the launcher.
    pub instance: String,
    /// The command, for people.
    pub command: String,
    /// Whether `--elastic` was given; otherwise the world never changes by order.
    pub elastic: bool,
    /// MIN, MAX and STEP.
    pub range: GpuRange,
    /// Where slices may be.
    pub locality: Locality,
    /// Grace of a notice.
    pub grace: Seconds,
    /// The most that a measured save may raise it to.
    pub grace_max: Seconds,
    /// After how long a first world in which no rank has connected is one of a script without client.
    pub client_wait: Seconds,
    /// The base's nodes with their GPUs, the batch host first.
    pub nodes: Vec<(NodeName, GpuCount)>,
    /// CPUs of a slice per GPU.
    pub cpus_per_gpu: u32,
    /// Partition.
    pub partition: String,
    /// GPU type, where the base names one.
    pub kind: Option<String>,
    /// The constraint where it is one plain feature.
    pub feature: Option<String>,
    /// When Slurm ends the base, on the clock of the events.
    pub ends: Option<Millis>,
    /// Seconds that Slurm waits between SIGTERM and SIGKILL.
    pub kill_wait: Seconds,
    /// Unix time in milliseconds at zero of the clock of the events.
    pub unix_at_zero: Millis,
    /// Whether the command is torchrun: one process per node starts the ranks there.
    pub torchrun: bool,
}

/// A slice to ask Slurm for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Marks the request.
    pub token: String,
    /// On which node.
    pub node: NodeName,
    /// GPUs.
    pub gpus: GpuCount,
    /// CPUs.
    pub cpus: u32,
    /// How long Slurm may take.
    pub patience: Seconds,
    /// Seconds until the base ends; `None`: no limit.
    pub rest: Option<Seconds>,
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AskOutcome {
    /// Allocated.
    Granted {
        /// Its Slurm job.
        job: JobId,
        /// Where.
        node: NodeName,
        /// GPUs.
        gpus: GpuCount,
        /// CPUs that Slurm gave.
        cpus: u32,
        /// Slurm's GRES indexes; empty where Slurm tells none.
        indexes: Vec<u32>,
    },
    /// Not in time.
    Withdrawn {
        /// Seconds.
        waited: Seconds,
        /// Slurm's reason.
        slurm: String,
        /// Expected start, Unix time.
        expected_start: Option<Seconds>,
    },
    /// Refused, or Slurm did not answer.
    Refused {
        /// Slurm's words.
        slurm: String,
    },
}

/// Something that happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A supervisor has answered Hello.
    UnitUp {
        /// Which.
        unit: UnitId,
        /// Slurm's NodeAddr of its node.
        addr: String,
        /// Entries of its CUDA_VISIBLE_DEVICES.
        gpus: Vec<String>,
        /// Whether the node's agent knows it.
        agent: bool,
    },
    /// A supervisor says something else.
    UnitSays {
        /// Which.
        unit: UnitId,
        /// What.
        message: FromSupervisor,
    },
    /// Its srun has ended, or could not be started.
    UnitGone {
        /// Which.
        unit: UnitId,
        /// In words.
        why: String,
    },
    /// From pliantd.
    Order(Order),
    /// The connection to the agent of this node.
    Agent {
        /// It is there.
        connected: bool,
    },
    /// The agent's connection to pliantd.
    Daemon {
        /// It is there.
        connected: bool,
    },
    /// A request for a slice is decided.
    Asked {
        /// Which.
        token: String,
        /// How.
        outcome: AskOutcome,
    },
    /// Slurm has taken a slice back at our request.
    Released {
        /// Which.
        slice: JobId,
    },
    /// Slurm has answered a check; what it said came before.
    Checked {
        /// Which.
        number: u64,
    },
    /// Whether the base goes on after its SIGTERM.
    BaseGoesOn(bool),
    /// Slurm says that a slice has ended.
    SliceEnded {
        /// Which.
        slice: JobId,
        /// Its state.
        state: String,
    },
    /// Slurm is ending a slice: preemption, or scancel by somebody.
    Preempted {
        /// Which.
        slice: JobId,
        /// Seconds until it kills.
        grace: Seconds,
    },
    /// Slurm's time limit for the base, as of now.
    Ends {
        /// On the clock of the events.
        at: Option<Millis>,
    },
    /// A signal to the launcher itself.
    Signal(i32),
    /// Time has passed.
    Tick,
}

/// Something to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Start a step with a supervisor.
    StartUnit {
        /// Its name from now on.
        unit: UnitId,
        /// The slice; `None`: the base.
        slice: Option<JobId>,
        /// Where.
        node: NodeName,
        /// GPUs.
        gpus: GpuCount,
    },
    /// To a supervisor.
    Tell(UnitId, ToSupervisor),
    /// The supervisor does not go: end its srun.
    KillStep(UnitId),
    /// Ask Slurm for a slice.
    Ask(Ask),
    /// Withdraw all requests that are open.
    WithdrawAll,
    /// Give a slice back.
    Release(JobId),
    /// Ask Slurm how the slices and the base stand.
    Check {
        /// Comes back in [`Event::Checked`].
        number: u64,
        /// The slices.
        slices: Vec<JobId>,
    },
    /// The base got SIGTERM: ask Slurm whether it is being ended.
    AskBase,
    /// A slice got SIGTERM: ask Slurm what that means.
    AskPreemption(JobId),
    /// To the agent.
    Agent(ToAgent),
    /// One line for the user.
    Say(String),
    /// End with this code.
    Exit(u8),
}

/// See the module.
pub struct Core {
    settings: Settings,
    fresh: Box<dyn FnMut() -> String + Send>,
    now: Millis,
    out: Vec<Effect>,
    units: BTreeMap<UnitId, Unit>,
    next_unit: u32,
    started: bool,
    last_generation: u32,
    running: Option<Generation>,
    next: Option<Generation>,
    change: Option<Change>,
    queue: VecDeque<Order>,
    done: VecDeque<OrderStatus>,
    ending: Option<Ending>,
    failing: Option<ending::Failing>,
    releasing: BTreeSet<JobId>,
    open_asks: BTreeSet<String>,
    progress: Progress,
    progress_changed: bool,
    pace: status::Pace,
    agent: bool,
    daemon: Option<bool>,
    holds_sent: Option<Vec<String>>,
    status_sent: Option<JobStatus>,
    status_at: Millis,
    progress_at: Millis,
    ping_at: Millis,
    check_at: Millis,
    last_check: u64,
    ever_ran: bool,
    /// Whether the script uses the client; `None`: not known yet.
    client: Option<bool>,
    said: BTreeSet<&'static str>,
    forwarded: Option<(i32, Millis)>,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core")
            .field("units", &self.units)
            .field("running", &self.running)
            .field("next", &self.next)
            .field("change", &self.change)
            .field("ending", &self.ending)
            .finish_non_exhaustive()
    }
}

/// Between two signs of life to the supervisors.
const PING: Millis = 5_000;
/// The same after a SIGTERM of Slurm: a launcher that Slurm kills as well is missed at once.
const PING_AT_END: Millis = 400;
/// Between two looks at the slices.
const CHECK: Millis = 30_000;

impl Core {
    /// A launcher that has started nothing yet. `fresh` gives a new random word at each call.
    pub fn new(settings: Settings, fresh: Box<dyn FnMut() -> String + Send>) -> Self {
        Core {
            settings,
            fresh,
            now: 0,
            out: vec![],
            units: BTreeMap::new(),
            next_unit: 0,
            started: false,
            last_generation: 0,
            running: None,
            next: None,
            change: None,
            queue: VecDeque::new(),
            done: VecDeque::new(),
            ending: None,
            failing: None,
            releasing: BTreeSet::new(),
            open_asks: BTreeSet::new(),
            progress: Progress::default(),
            progress_changed: false,
            pace: status::Pace::default(),
            agent: false,
            daemon: None,
            holds_sent: None,
            status_sent: None,
            status_at: 0,
            progress_at: 0,
            ping_at: 0,
            check_at: 0,
            last_check: 0,
            ever_ran: false,
            client: None,
            said: BTreeSet::new(),
            forwarded: None,
        }
    }

    /// Starts the base's steps.
    pub fn start(&mut self, now: Millis) -> Vec<Effect> {
        self.now = now;
        self.ping_at = now + PING;
        self.check_at = now + CHECK;
        for (node, gpus) in self.settings.nodes.clone() {
            self.start_unit(None, node, gpus, 0, vec![], None);
        }
        std::mem::take(&mut self.out)
    }

    /// Takes one event and says what is to be done.
    pub fn handle(&mut self, event: Event, now: Millis) -> Vec<Effect> {
        self.now = now;
        self.take(event);
        self.learn_client();
        self.advance();
        self.tell_agent();
        std::mem::take(&mut self.out)
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::UnitUp { unit, addr, gpus, agent } => self.unit_up(unit, addr, gpus, agent),
            Event::UnitSays { unit, message } => self.unit_says(unit, message),
            Event::UnitGone { unit, why } => self.unit_gone(unit, &why),
            Event::Order(order) => self.order(order),
            Event::Agent { connected } => {
                self.agent = connected;
                self.holds_sent = None;
                self.status_sent = None;
            }
            Event::Daemon { connected } => self.daemon(connected),
            Event::Asked { token, outcome } => self.asked(&token, outcome),
            Event::Released { slice } => self.released(slice),
            Event::Checked { number } => self.checked(number),
            Event::BaseGoesOn(goes_on) => self.base_goes_on(goes_on),
            Event::SliceEnded { slice, state } => self.slice_ended(slice, &state),
            Event::Preempted { slice, grace } => self.preempted(slice, grace),
            Event::Ends { at } => self.settings.ends = at,
            Event::Signal(signal) => self.signal(signal, None),
            Event::Tick => {}
        }
    }

    fn unit_says(&mut self, unit: UnitId, message: FromSupervisor) {
        match message {
            FromSupervisor::Hello { .. } => {}
            FromSupervisor::Agent { connected } => {
                if let Some(u) = self.units.get_mut(&unit) {
                    u.agent = connected;
                }
            }
            FromSupervisor::Port { generation, port } => self.port(generation, port),
            FromSupervisor::Ready { generation, rank, load_ms } => {
                self.rank(generation, rank, |r| r.ready = r.ready.or(Some(load_ms)));
            }
            FromSupervisor::Stepped { generation, rank } => {
                self.rank(generation, rank, |r| r.stepped = true);
            }
            FromSupervisor::Vote { generation, rank, boundary, accept, passed } => {
                self.rank(generation, rank, |r| {
                    r.vote = Some((boundary, accept));
                    r.passed = r.passed.max(passed);
                });
            }
            FromSupervisor::Left { generation, rank, .. } => {
                let now = self.now;
                self.rank(generation, rank, |r| r.left = Some(now));
            }
            FromSupervisor::Exited { generation, rank, code, signal } => self.exited(generation, rank, code, signal),
            FromSupervisor::NotStarted { generation, rank, error } => self.not_started(generation, rank, &error),
            FromSupervisor::Report { generation, rank: _, progress } => self.report(generation, progress),
            FromSupervisor::Signalled { signal } => self.signal(signal, Some(unit)),
        }
    }

    /// Does everything that is due; each step asks for another look, since it may make the next one due.
    fn advance(&mut self) {
        self.keep_alive();
        for _ in 0..32 {
            if self.ending.is_some() {
                self.advance_ending();
                return;
            }
            let went_on =
                self.advance_start() || self.advance_failing() || self.advance_change() || self.advance_idle();
            if !went_on {
                return;
            }
        }
    }

    fn keep_alive(&mut self) {
        if self.now >= self.ping_at {
            let told = |u: &Unit| u.terminated.is_some() && u.state == UnitState::Up;
            let hurry = self.ending.is_some() || self.units.values().any(told);
            self.ping_at = self.now + if hurry { PING_AT_END } else { PING };
            // Also to those whose Hello is still on its way: their supervisor listens from its start.
            let there: Vec<UnitId> = self.units.values().filter(|u| u.state != UnitState::Gone).map(|u| u.id).collect();
            self.out.extend(there.into_iter().map(|id| Effect::Tell(id, ToSupervisor::Ping)));
        }
        if self.now >= self.check_at {
            self.check_at = self.now + CHECK;
            self.check(self.slices());
        }
        let now = self.now;
        for unit in self.units.values_mut() {
            if unit.state != UnitState::Gone && unit.kill_at.is_some_and(|at| now >= at) {
                unit.kill_at = Some(now + 2_000);
                self.out.push(Effect::KillStep(unit.id));
            }
            if unit.release_at.is_some_and(|at| now >= at) {
                unit.release_at = None;
                self.out.extend(unit.slice.map(Effect::Release));
            }
        }
    }

    fn say(&mut self, text: String) {
        self.out.push(Effect::Say(text));
    }

    fn say_once(&mut self, key: &'static str, text: impl FnOnce() -> String) {
        if self.said.insert(key) {
            self.say(text());
        }
    }

    fn daemon(&mut self, connected: bool) {
        if self.daemon != Some(connected) {
            if !connected {
                self.say("pliantd is not reachable: going on with the GPUs that the job has".into());
            } else if self.daemon == Some(false) {
                self.say("pliantd is reachable again".into());
            }
        }
        self.daemon = Some(connected);
    }
}
