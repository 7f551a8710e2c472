//! `pliant supervise`: one per step. Starts the ranks of each generation and outlives them; passes words between the
//! launcher (stdin, stdout) and the ranks (through the agent of the node); ends all when the launcher is silent.

mod liveness;
mod processes;
mod ranks;

use crate::agent::{Link, LinkEvent};
use crate::environment;
use crate::steps::{MAGIC, MAX_STEP_FRAME};
use crate::{signals, slurm};
use liveness::Liveness;
use pliant_model::NodeName;
use pliant_protocol::codec;
use pliant_protocol::local::{FromAgent, FromClient, Role, ToAgent, ToClient};
use pliant_protocol::step::{FromSupervisor, Setup, ToSupervisor};
use pliant_protocol::{VERSION, exit};
use ranks::{Port, Rank};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Ranks without a launcher have so long after SIGTERM.
const SOFT: Duration = Duration::from_secs(5);
/// How long Hello waits for the agent.
const AGENT: Duration = Duration::from_millis(1_500);
/// A rank's numbers go on at most so often.
const REPORTS: Duration = Duration::from_secs(1);

enum Happened {
    Launcher(Box<ToSupervisor>),
    LauncherGone,
    Agent(LinkEvent),
    Signal(i32),
}

/// Frames to the launcher, whole ones from any thread.
#[derive(Clone, Debug)]
struct ToLauncher(Arc<Mutex<io::Stdout>>);

impl ToLauncher {
    fn bytes(&self, bytes: &[u8]) {
        let mut out = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The launcher is gone where this fails: stdin tells that too.
        let _ = out.write_all(bytes).and_then(|()| out.flush());
    }

    fn say(&self, message: &FromSupervisor) {
        if let Ok(frame) = codec::encode(message) {
            self.bytes(&frame);
        }
    }
}

struct Supervisor {
    out: ToLauncher,
    tell: Sender<Happened>,
    setup: Option<Setup>,
    socket: String,
    node: String,
    step_env: Vec<environment::Var>,
    gpus: Vec<String>,
    link: Option<Link>,
    agent: bool,
    /// Set until Hello has been answered.
    hello_by: Option<Instant>,
    ports: BTreeMap<u32, Port>,
    ranks: Vec<Rank>,
    started: BTreeSet<u32>,
    /// The last word about a boundary of each generation, repeated to a rank that connects anew.
    word: BTreeMap<u32, ToClient>,
    reported: Option<Instant>,
    readers: Arc<AtomicUsize>,
    launcher: Liveness,
}

/// Runs until the launcher says Stop or is gone; gives the exit code of the step.
pub fn supervise() -> u8 {
    match start() {
        Ok(()) => exit::OK,
        Err(e) => {
            eprintln!("pliant supervise: {e}");
            exit::FAILURE
        }
    }
}

fn start() -> io::Result<()> {
    // Ranks that leave their session become our children, so that none outlives the step.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let (tell, happened) = mpsc::channel();
    let signals_to = tell.clone();
    signals::watch(true, move |signal| signals_to.send(Happened::Signal(signal)).is_ok())?;
    let launcher = tell.clone();
    std::thread::spawn(move || {
        let mut stdin = io::stdin().lock();
        while let Ok(Some(payload)) = codec::read_payload(&mut stdin, MAX_STEP_FRAME) {
            // A message of a later version is left alone; versions are compared at Hello.
            if let Ok(message) = codec::decode(&payload)
                && launcher.send(Happened::Launcher(Box::new(message))).is_err()
            {
                return;
            }
        }
        let _ = launcher.send(Happened::LauncherGone);
    });
    let vars = || std::env::vars_os().filter_map(|(n, v)| Some((n.into_string().ok()?, v.into_string().ok()?)));
    let get = |name: &str| std::env::var(name).ok();
    let mut me = Supervisor {
        out: ToLauncher(Arc::new(Mutex::new(io::stdout()))),
        tell,
        setup: None,
        socket: String::new(),
        node: get("SLURMD_NODENAME").unwrap_or_default(),
        step_env: environment::of_step(vars()),
        gpus: environment::gpus(get("CUDA_VISIBLE_DEVICES").as_deref()),
        link: None,
        agent: false,
        hello_by: None,
        ports: BTreeMap::new(),
        ranks: vec![],
        started: BTreeSet::new(),
        word: BTreeMap::new(),
        reported: None,
        readers: Arc::default(),
        launcher: Liveness::new(Instant::now()),
    };
    me.out.bytes(MAGIC);
    loop {
        let mut going_on = match happened.recv_timeout(Duration::from_millis(500)) {
            Ok(event) => me.take(event),
            Err(RecvTimeoutError::Timeout) => true,
            Err(RecvTimeoutError::Disconnected) => false,
        };
        // All that has arrived counts before the launcher is judged.
        while going_on && let Ok(event) = happened.try_recv() {
            going_on = me.take(event);
        }
        if me.hello_by.is_some_and(|at| me.agent || Instant::now() >= at) {
            me.answer_hello();
        }
        if !going_on {
            me.end_all();
            return Ok(());
        }
        if me.is_orphan() {
            me.end_as_orphan();
            return Ok(());
        }
    }
}

impl Supervisor {
    fn take(&mut self, event: Happened) -> bool {
        match event {
            Happened::Launcher(message) => {
                self.launcher.heard(Instant::now());
                return self.obey(*message);
            }
            Happened::LauncherGone => return false,
            Happened::Signal(signals::CHILD) => self.reap(),
            Happened::Signal(signal) => {
                if signal == signals::TERMINATE {
                    self.launcher.terminated(Instant::now());
                }
                self.out.say(&FromSupervisor::Signalled { signal });
            }
            Happened::Agent(LinkEvent::Up) => self.agent_is(true),
            Happened::Agent(LinkEvent::Down(_)) => {
                self.agent_is(false);
                if self.hello_by.is_some() {
                    self.answer_hello();
                }
            }
            Happened::Agent(LinkEvent::Frame(FromAgent::FromClient { rank, generation, message })) => {
                self.client_says(rank, generation, message);
            }
            Happened::Agent(LinkEvent::Frame(_)) => {}
        }
        true
    }

    /// Whether the launcher is gone.
    fn is_orphan(&mut self) -> bool {
        let slice = self.setup.as_ref().is_some_and(|s| s.slice.is_some());
        self.launcher.is_orphan(Instant::now(), slice)
    }

    /// Ends the ranks, and in the base gives the slices back that nobody else would for a while.
    fn end_as_orphan(&mut self) {
        let base = self.setup.as_ref().filter(|s| s.slice.is_none()).map(|s| (s.base, s.instance.clone()));
        let release = base.map(|(base, instance)| std::thread::spawn(move || slurm::release_all(base, &instance)));
        self.signal(None, signals::TERMINATE);
        let until = Instant::now() + SOFT;
        while self.ranks.iter().any(|r| !r.ended) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
            self.reap();
        }
        self.end_all();
        if let Some(release) = release {
            let _ = release.join();
        }
    }

    fn obey(&mut self, message: ToSupervisor) -> bool {
        match message {
            ToSupervisor::Hello(setup) => self.hello(*setup),
            ToSupervisor::Ping => self.renew(),
            ToSupervisor::ReservePort { generation } => self.reserve(generation),
            ToSupervisor::Spawn(spawn) => self.spawn(&spawn),
            ToSupervisor::Start { generation } => {
                self.started.insert(generation);
                self.ports.remove(&generation);
                self.to_clients(generation, &ToClient::Start);
            }
            ToSupervisor::Propose { generation, boundary, grace, reason } => {
                self.boundary(generation, ToClient::Propose { boundary, grace, reason });
            }
            ToSupervisor::Commit { generation, boundary } => self.boundary(generation, ToClient::Commit { boundary }),
            ToSupervisor::Abort { generation, boundary } => self.boundary(generation, ToClient::Abort { boundary }),
            ToSupervisor::Signal { generation, signal } => self.signal(generation, signal),
            ToSupervisor::Stop => return false,
        }
        true
    }

    fn hello(&mut self, setup: Setup) {
        if setup.version != VERSION {
            eprintln!("pliant supervise: version {VERSION} on {}, the launcher has {}", self.node, setup.version);
        }
        self.socket = setup.agent.replace("%n", &self.node);
        if !self.socket.is_empty() {
            let tell = self.tell.clone();
            let up = move |event| tell.send(Happened::Agent(event)).is_ok();
            self.link = Some(Link::start(PathBuf::from(&self.socket), Role::Supervisor, up));
        }
        let wait = if self.link.is_some() { AGENT } else { Duration::ZERO };
        self.hello_by = Some(Instant::now() + wait);
        self.setup = Some(setup);
    }

    fn answer_hello(&mut self) {
        self.hello_by = None;
        self.renew();
        self.out.say(&FromSupervisor::Hello {
            version: VERSION,
            node: NodeName(self.node.clone()),
            gpus: self.gpus.clone(),
            agent: self.agent,
        });
    }

    fn agent_is(&mut self, connected: bool) {
        if self.agent != connected {
            self.agent = connected;
            if self.hello_by.is_none() {
                self.out.say(&FromSupervisor::Agent { connected });
                self.renew();
            }
        }
    }

    /// The launcher lives: so does the slice.
    fn renew(&self) {
        if let Some(setup) = self.setup.as_ref().filter(|s| s.slice.is_some()) {
            self.to_agent(&ToAgent::Lease { base: setup.base, instance: setup.instance.clone() });
        }
    }

    fn to_agent(&self, message: &ToAgent) {
        if let Some(link) = &self.link {
            link.send(message);
        }
    }

    fn to_client(&self, rank: u32, generation: u32, message: &ToClient) {
        self.to_agent(&ToAgent::ToClient { rank, generation, message: message.clone() });
    }

    fn to_clients(&self, generation: u32, message: &ToClient) {
        for (first, count) in self.ranks.iter().filter(|r| r.generation == generation).map(|r| (r.rank, r.covers)) {
            (first..first.saturating_add(count)).for_each(|rank| self.to_client(rank, generation, message));
        }
    }

    fn boundary(&mut self, generation: u32, message: ToClient) {
        self.to_clients(generation, &message);
        if matches!(message, ToClient::Abort { .. }) {
            self.word.remove(&generation);
        } else {
            self.word.insert(generation, message);
        }
    }

    fn client_says(&mut self, rank: u32, generation: u32, message: FromClient) {
        let Some(mine) =
            self.ranks.iter().find(|r| r.generation == generation && rank >= r.rank && rank - r.rank < r.covers)
        else {
            return;
        };
        match message {
            FromClient::Ready => {
                let load_ms = u64::try_from(mine.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
                self.out.say(&FromSupervisor::Ready { generation, rank, load_ms });
                if self.started.contains(&generation) {
                    self.to_client(rank, generation, &ToClient::Start);
                }
                if let Some(word) = self.word.get(&generation) {
                    self.to_client(rank, generation, word);
                }
            }
            FromClient::Stepped => self.out.say(&FromSupervisor::Stepped { generation, rank }),
            FromClient::Vote { boundary, accept, passed } => {
                self.out.say(&FromSupervisor::Vote { generation, rank, boundary, accept, passed });
            }
            FromClient::Left { boundary } => self.out.say(&FromSupervisor::Left { generation, rank, boundary }),
            FromClient::Report(progress) => {
                let lowest = self.ranks.iter().filter(|r| r.generation == generation).map(|r| r.rank).min();
                let due = self.reported.is_none_or(|at| at.elapsed() >= REPORTS);
                if lowest == Some(rank) && due {
                    self.reported = Some(Instant::now());
                    self.out.say(&FromSupervisor::Report { generation, rank, progress });
                }
            }
        }
    }
}
