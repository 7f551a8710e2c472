//! pliant-agent: one on each node. It serves the Unix socket of the node's jobs, proves who is there, passes messages
//! between ranks, supervisors, launchers and pliantd, and cancels slices whose launcher is gone.
//!
//! [`core`] and what it uses (`ranks`, `launchers`, `leases`, `cancels`, `orphans`, `proof`, `slurm_text`, `limit`)
//! are plain functions of events and time. `gpus` reads NVML in a thread of its own. tokio is in `server`, `link`, `slurm`, `shared`, `outbox` and here: one thread.
#![forbid(unsafe_code)]

mod cancels;
mod core;
mod gpus;
mod launchers;
mod leases;
mod limit;
mod link;
mod orphans;
mod outbox;
mod proof;
mod ranks;
mod server;
mod shared;
mod slurm;
mod slurm_text;

use anyhow::{Context as _, ensure};
use clap::Parser;
use pliant_model::NodeName;
use pliant_protocol::config::Config;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// The node's part of Pliant: client socket, leases, connection to pliantd.
#[derive(Debug, Parser)]
#[command(name = "pliant-agent", version)]
struct Args {
    /// Configuration file [default: PLIANT_CONFIG, or /etc/pliant/pliant.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Slurm's name of this node [default: the host name up to its first dot]
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_env("PLIANT_LOG").unwrap_or_else(|_| "info".into());
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    log.with_ansi(false).init();
    let config = args.config.or_else(|| std::env::var_os("PLIANT_CONFIG").map(PathBuf::from));
    let config = Config::find(config.as_deref())?;
    let node = NodeName(args.node.map_or_else(host_name, Ok)?);
    let usable = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    ensure!(!node.0.is_empty() && node.0.chars().all(usable), "--node={node}: not a NodeName of Slurm");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let local = tokio::task::LocalSet::new();
    let result = local.block_on(&runtime, run(config, node));
    // A munged that hangs must not hold up the exit.
    drop(local);
    runtime.shutdown_timeout(Duration::from_millis(200));
    result
}

fn host_name() -> anyhow::Result<String> {
    let file = "/proc/sys/kernel/hostname";
    let name = std::fs::read_to_string(file).with_context(|| format!("{file}: name this node by --node"))?;
    Ok(name.trim().split('.').next().unwrap_or_default().to_owned())
}

async fn run(config: Config, node: NodeName) -> anyhow::Result<()> {
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    let path = PathBuf::from(config.agent.socket.replace("%n", node.as_str()));
    let (socket, listener) = server::Socket::bind(&path)?;
    tracing::info!("pliant-agent {} of node {node} serves {}", pliant_protocol::SOFTWARE, path.display());
    let watch = gpus::Watch { library: config.agent.nvml, conf: config.slurm.conf.clone(), node: node.clone() };
    let slurm = slurm::Slurm::new(config.slurm.conf, node.as_str());
    let shared = shared::Shared::new(node.clone(), slurm);
    let target = link::Target {
        address: config.agent.daemon,
        user: config.daemon.user,
        munge_socket: config.slurm.munge_socket,
        node,
    };
    tokio::task::spawn_local(server::serve(Rc::clone(&shared), listener));
    tokio::task::spawn_local(link::run(Rc::clone(&shared), target));
    tokio::task::spawn_local(gpus::run(Rc::clone(&shared), watch));
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    // After a stop, one tick tells of the whole pause; no burst of late ones follows.
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => shared.with(core::Core::tick),
            _ = term.recv() => break,
            _ = int.recv() => break,
        }
    }
    tracing::info!("ended by a signal");
    drop(socket);
    Ok(())
}
