//! pliantd, the daemon beside slurmctld: it observes, decides, journals and acts.
//!
//! One task owns the state ([`core::Core`]) and gets everything as [`Input`]s over one bounded channel; the tasks
//! around it speak to Slurm (through the bridge), to the agents and to `pliant`.
#![forbid(unsafe_code)]

mod admin;
mod agents;
mod answers;
mod board;
mod core;
mod hardware;
mod journal;
mod resizes;
mod ring;
mod slurm;
mod view;

use crate::core::placing::Written;
use crate::core::{Agent, Core, Effect, Now, Settings};
use anyhow::Context as _;
use clap::Parser;
use pliant_model::{JobId, NodeName};
use pliant_protocol::admin::{Reply, Request};
use pliant_protocol::board::Record;
use pliant_protocol::bridge::JobRecord;
use pliant_protocol::config::Config;
use pliant_protocol::peer::{FromAgent, ToAgent};
use pliant_protocol::slurm_files::{self, SlurmFiles};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::LazyLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

/// The daemon beside slurmctld that makes GPU jobs elastic.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Configuration file [default: /etc/pliant/pliant.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Everything that the state can be told.
#[derive(Debug)]
enum Input {
    /// Slurm has answered: about all jobs, or about nodes and these jobs only.
    View { view: Box<view::SlurmView>, jobs: Option<BTreeMap<JobId, Option<JobRecord>>>, asked: Now },
    /// The event ring is followed, or no longer.
    Ring(bool),
    /// Events of the ring are lost.
    Gap(u64),
    /// Events of the ring.
    Events(Vec<Record>),
    /// Slurm's files were read.
    Written(Box<Written>),
    /// A slice was cancelled, or not.
    CancelDone { cancel: slurm::Cancel, failed: Option<String> },
    /// An agent has connected.
    Agent { connection: u64, node: NodeName, agent: Agent, orders: mpsc::Sender<ToAgent> },
    /// It says something.
    FromAgent { connection: u64, message: Box<FromAgent> },
    /// Its connection is closed.
    AgentGone { connection: u64 },
    /// `pliant` asks.
    Admin { uid: u32, request: Request, back: oneshot::Sender<Reply> },
    /// The name of a user.
    Name { uid: u32, name: String },
    /// Whether we have operator rights.
    Operator(Option<bool>),
    /// A second has passed.
    Tick,
}

static STARTED: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The time: wall clock for people, seconds since the start (plus one day, so that differences never fall below
/// zero) for intervals.
fn now() -> Now {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Now { wall_ms: u64::try_from(wall.as_millis()).unwrap_or(u64::MAX), mono: STARTED.elapsed().as_secs() + 86_400 }
}

fn random_id() -> String {
    let mut bytes = [0u8; 8];
    let read = File::open("/dev/urandom").and_then(|mut f| std::io::Read::read_exact(&mut f, &mut bytes));
    if read.is_err() {
        bytes = now().wall_ms.to_ne_bytes();
    }
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn main() -> anyhow::Result<()> {
    LazyLock::force(&STARTED);
    let arguments = Arguments::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    let config = Config::find(arguments.config.as_deref())?;
    let _scenario = cfg!(feature = "failpoints").then(fail::FailScenario::setup);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(run(config))
}

/// Holds the state directory: a second pliantd refuses to start.
fn lock(config: &Config) -> anyhow::Result<File> {
    let dir = &config.daemon.state_dir;
    std::fs::create_dir_all(dir).with_context(|| format!("make daemon.state_dir {}", dir.display()))?;
    let path = dir.join("lock");
    let file = File::create(&path).with_context(|| format!("open {}", path.display()))?;
    // One that was just killed may take a moment until its last thread is gone.
    let mut tries = 0;
    while let Err(e) = rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        tries += 1;
        if tries > 20 {
            return Err(e).with_context(|| format!("another pliantd uses {}", dir.display()));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(file)
}

async fn run(config: Config) -> anyhow::Result<()> {
    let _lock = lock(&config)?;
    let path = config.daemon.state_dir.join("journal.sqlite");
    let (journal, damaged) = journal::Journal::open_or_begin(&path, now().wall_ms)?;
    if let Some(aside) = damaged {
        tracing::error!("the journal was damaged: moved to {}, history is lost, no job is harmed", aside.display());
    }
    let settings = Settings {
        patience: config.daemon.patience,
        stale_after: config.daemon.stale_after,
        grace_max: config.elastic.grace_max,
        depth: config.select.depth,
    };
    let core = Core::new(settings, journal, random_id)?;
    let admin = admin::bind(&config.daemon.socket)?;
    let listener = tokio::net::TcpListener::bind(&config.daemon.listen)
        .await
        .with_context(|| format!("listen on daemon.listen {}", config.daemon.listen))?;
    let (inputs, mailbox) = mpsc::channel(1024);
    let (cancels, to_cancel) = mpsc::channel(256);
    let soon = Arc::new(slurm::Wanted::default());
    let me = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let munge = agents::Munge { socket: config.slurm.munge_socket.clone() };
    let port = slurm::Port {
        bridge: config.daemon.bridge.clone(),
        conf: config.slurm.conf.clone(),
        interval: config.daemon.poll_interval,
    };
    tokio::spawn(admin::serve(admin, inputs.clone()));
    tokio::spawn(agents::listen(listener, munge, me, inputs.clone()));
    tokio::spawn(slurm::run(port, Arc::clone(&soon), to_cancel, inputs.clone()));
    let (path, to) = (config.select.ring.clone(), inputs.clone());
    std::thread::Builder::new().name("ring".into()).spawn(move || ring::run(&path, &to)).context("start a thread")?;
    tokio::spawn(read_files(config.slurm.conf.clone(), inputs.clone()));
    tokio::spawn(watch_rights(config.slurm.conf.clone(), inputs.clone()));
    tokio::spawn(tick(inputs.clone()));
    tracing::info!("pliantd {} on {}", pliant_protocol::SOFTWARE, config.daemon.listen);
    let reactor = Reactor {
        core,
        connections: BTreeMap::new(),
        cancels,
        soon,
        board: board::BoardFile::new(config.select.board.clone(), now().wall_ms),
        operator: None,
        since: now().wall_ms / 1000,
        inputs,
        asked: BTreeSet::new(),
    };
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        () = reactor.run(mailbox) => {}
        _ = term.recv() => tracing::info!("ends on SIGTERM; jobs go on"),
        _ = int.recv() => tracing::info!("ends on SIGINT; jobs go on"),
    }
    let _ = std::fs::remove_file(&config.daemon.socket);
    Ok(())
}

async fn tick(inputs: mpsc::Sender<Input>) {
    let mut every = tokio::time::interval(Duration::from_secs(1));
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        if inputs.send(Input::Tick).await.is_err() {
            return;
        }
    }
}

/// Asks for our rights at the start and every ten minutes.
async fn watch_rights(conf: PathBuf, inputs: mpsc::Sender<Input>) {
    loop {
        if inputs.send(Input::Operator(slurm::operator(&conf).await)).await.is_err() {
            return;
        }
        tokio::time::sleep(Duration::from_secs(600)).await;
    }
}

/// Reads Slurm's own files at the start and every ten minutes: gres.conf says what lies inside nodes without an agent.
async fn read_files(conf: PathBuf, inputs: mpsc::Sender<Input>) {
    loop {
        let conf = conf.clone();
        let read = move || Written::of_files(&SlurmFiles::read(&slurm_files::folder(&conf)));
        if let Ok(written) = tokio::task::spawn_blocking(read).await
            && inputs.send(Input::Written(Box::new(written))).await.is_err()
        {
            return;
        }
        tokio::time::sleep(Duration::from_secs(600)).await;
    }
}

struct Reactor {
    core: Core,
    /// Connected agents by connection: a node that connects anew replaces its old connection.
    connections: BTreeMap<u64, (NodeName, mpsc::Sender<ToAgent>)>,
    cancels: mpsc::Sender<slurm::Cancel>,
    soon: Arc<slurm::Wanted>,
    board: board::BoardFile,
    operator: Option<bool>,
    since: u64,
    inputs: mpsc::Sender<Input>,
    /// Users whose name has been asked for.
    asked: BTreeSet<u32>,
}

impl Reactor {
    async fn run(mut self, mut mailbox: mpsc::Receiver<Input>) {
        while let Some(input) = mailbox.recv().await {
            self.take(input);
            // A burst of input costs one decision.
            for _ in 0..256 {
                let Ok(input) = mailbox.try_recv() else { break };
                self.take(input);
            }
            self.core.settle(now());
            for effect in self.core.take_effects() {
                self.act(effect);
            }
        }
    }

    fn take(&mut self, input: Input) {
        let now = now();
        match input {
            Input::View { view, jobs: None, asked } => self.core.on_view(*view, asked, now),
            Input::View { view, jobs: Some(jobs), asked } => self.core.on_look(*view, jobs, asked, now),
            Input::Ring(following) => {
                self.core.on_ring(following);
                self.soon.follow(following);
            }
            Input::Gap(lost) => self.core.on_gap(lost),
            Input::Events(records) => self.core.on_events(records, now),
            Input::Written(written) => self.core.placer.read(*written),
            Input::CancelDone { cancel, failed: Some(why) } => {
                tracing::info!(slice = cancel.slice.0, "not cancelled through Slurm ({why}), asking an agent");
                self.core.cancel_by_agent(cancel.slice, cancel.base, cancel.reason);
            }
            Input::CancelDone { cancel, .. } => self.soon.ask(false, [cancel.slice].into()),
            Input::Agent { connection, node, agent, orders } => {
                if self.connections.values().any(|(n, _)| *n == node) {
                    self.connections.retain(|_, (n, _)| *n != node);
                    self.core.on_agent_gone(&node, now);
                }
                self.connections.insert(connection, (node.clone(), orders));
                self.core.on_agent(node, agent);
            }
            Input::FromAgent { connection, message } => {
                let Some((node, _)) = self.connections.get(&connection) else {
                    return;
                };
                match *message {
                    FromAgent::Status { uid, status } => {
                        let node = node.clone();
                        self.look_up(uid);
                        self.core.on_status(node, uid, *status, now);
                    }
                    FromAgent::Gone { base, instance } => self.core.on_gone(base, &instance, now),
                    FromAgent::Cancelled { slice, reason } => self.core.on_cancelled(slice, &reason, now),
                    FromAgent::Gpus { gpus } => self.core.on_gpus(node.clone(), *gpus),
                    FromAgent::Samples { samples } => self.core.on_samples(node.clone(), samples),
                    FromAgent::Happened { event } => {
                        let node = node.clone();
                        self.core.on_happened(&node, *event, now);
                    }
                    FromAgent::Hello { .. } | FromAgent::Pong { .. } => {}
                }
            }
            Input::AgentGone { connection } => {
                if let Some((node, _)) = self.connections.remove(&connection) {
                    self.core.on_agent_gone(&node, now);
                }
            }
            Input::Admin { uid, request, back } => {
                let own = rustix::process::geteuid().as_raw();
                let asker = answers::Asker { uid, privileged: uid == 0 || uid == own };
                let process = answers::Process { since: self.since, operator: self.operator };
                let _ = back.send(answers::answer(&self.core, asker, &request, process, now));
            }
            Input::Name { uid, name } => drop(self.core.names.insert(uid, name)),
            Input::Operator(found) => self.operator = found,
            Input::Tick => {
                self.core.tick(now);
                self.board.renew(now.wall_ms);
            }
        }
    }

    /// Has the name of a user looked up, once: the answer may take its time (LDAP) and comes as an input.
    fn look_up(&mut self, uid: u32) {
        if self.asked.insert(uid) {
            let inputs = self.inputs.clone();
            tokio::spawn(async move {
                if let Some(name) = slurm::user_name(uid).await {
                    let _ = inputs.send(Input::Name { uid, name }).await;
                }
            });
        }
    }

    fn act(&mut self, effect: Effect) {
        match effect {
            Effect::Agent(node, message) => {
                let to = self.connections.values().find(|(n, _)| *n == node);
                if to.is_none_or(|(_, orders)| orders.try_send(message).is_err()) {
                    tracing::warn!(%node, "agent not connected or not reading: sent again later");
                }
            }
            Effect::Cancel { slice, base, reason } => {
                tracing::info!(slice = slice.0, job = base.0, "cancelled: {reason}");
                let cancel = slurm::Cancel { slice, base, reason };
                if self.operator == Some(true) {
                    let _ = self.cancels.try_send(cancel);
                } else {
                    self.core.cancel_by_agent(cancel.slice, cancel.base, cancel.reason);
                    for effect in self.core.take_effects() {
                        self.act(effect);
                    }
                }
            }
            Effect::PollSoon => {
                let (all, jobs) = self.core.take_asks();
                self.soon.ask(all, jobs);
            }
            Effect::Plans(board, event_ms) => {
                self.board.publish(&board, now().wall_ms);
                if let Some(at) = event_ms {
                    let after_event_ms = now().wall_ms.saturating_sub(at);
                    tracing::debug!(plans = board.plans.len(), after_event_ms, "published");
                }
            }
        }
    }
}
