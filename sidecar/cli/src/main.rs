//! The command `pliant`: what Pliant does and why, for users; checks for administrators; and, inside a job, the
//! launcher (`pliant run`). No async: one question to pliantd, one answer, every wait with a limit.
#![forbid(unsafe_code)]

mod args;
mod client;
mod command;
mod doctor;
mod manual;
mod output;
mod run;
mod topo;

use anyhow::{Context as _, bail};
use args::{Cli, Command, ConfigArgs, ConfigCommand, Gpus, JobArg, Show};
use clap::Parser as _;
use pliant_model::{JobId, hostlist};
use pliant_protocol::admin::{Level, Reply, Request};
use pliant_protocol::config::{Config, DEFAULT_PATH};
use pliant_protocol::exit;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// How long Slurm may take to name a task of an array.
const SQUEUE_LIMIT: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            // Help and version come this way too. With nobody to read it, there is nobody to tell.
            let _ = e.print();
            return ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(exit::USAGE));
        }
    };
    match dispatch(cli) {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            let _ = writeln!(io::stderr(), "pliant: {}", told(&e));
            ExitCode::from(exit::FAILURE)
        }
    }
}

/// An error with its causes; what a message has said already is not said again.
fn told(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| match text.as_str() {
        "" => cause,
        said if said.contains(&cause) => text,
        said => format!("{said}: {cause}"),
    })
}

fn dispatch(cli: Cli) -> anyhow::Result<u8> {
    let environment = || std::env::var_os("PLIANT_CONFIG").filter(|v| !v.is_empty()).map(PathBuf::from);
    let named = cli.config.or_else(environment);
    let config = named.as_deref();
    match cli.command {
        Command::Run(run) => run::run(run, config),
        Command::Supervise => Ok(pliant_launcher::supervise()),
        Command::Status(show) => match ask(config, &Request::Status)? {
            Reply::Status(status) => print(&output::choose(show).status(&status)?),
            other => unexpected(other),
        },
        Command::Jobs(show) => match ask(config, &Request::Jobs)? {
            Reply::Jobs { jobs } => print(&output::choose(show).jobs(&jobs)?),
            other => unexpected(other),
        },
        Command::Explain(explain) => explained(config, &explain.job, explain.show),
        Command::Gpus(Gpus { node, show }) => gpus(config, node.as_deref(), show),
        Command::Topo(topo) => {
            let (text, code) = topo::run(topo.command, config)?;
            print(&text).map(|_| code)
        }
        Command::Doctor(show) => {
            let findings = doctor::examine(config);
            print(&output::choose(show).findings(&findings)?)?;
            let fails = findings.iter().any(|f| f.level == Level::Fail);
            Ok(if fails { exit::FAILURE } else { exit::OK })
        }
        Command::Config(ConfigArgs { command: ConfigCommand::Check { file } }) => {
            let path = file.or(named).unwrap_or_else(|| PathBuf::from(DEFAULT_PATH));
            Config::load(&path)?;
            print(&format!("{}: ok\n", path.display()))
        }
        Command::Man { dir } => manual::write(&dir).map(|()| exit::OK),
        Command::Completions { shell } => manual::completions(shell).map(|()| exit::OK),
    }
}

fn gpus(config: Option<&Path>, nodes: Option<&str>, show: Show) -> anyhow::Result<u8> {
    let wanted = nodes.map(|n| hostlist::expand(n).with_context(|| format!("--node={n}"))).transpose()?;
    match ask(config, &Request::Gpus)? {
        Reply::Gpus { mut gpus, mut events } => {
            if let Some(wanted) = wanted {
                if let Some(unknown) = wanted.iter().find(|n| !gpus.iter().any(|g| g.node == **n)) {
                    bail!(
                        "--node={}: node {unknown} has no GPU that Slurm or an agent knows",
                        nodes.unwrap_or_default()
                    );
                }
                gpus.retain(|g| wanted.contains(&g.node));
                events.retain(|e| wanted.contains(&e.gpu.node));
            }
            print(&output::choose(show).gpus(&gpus, &events)?)
        }
        other => unexpected(other),
    }
}

fn ask(config: Option<&Path>, request: &Request) -> anyhow::Result<Reply> {
    let config = Config::find(config)?;
    Ok(client::ask(&config.daemon.socket, request)?)
}

fn explained(config: Option<&Path>, asked: &JobArg, show: Show) -> anyhow::Result<u8> {
    let (job, typed) = match asked {
        JobArg::Id(id) => (*id, id.to_string()),
        JobArg::Task(task) => (task_id(config, task)?, task.clone()),
    };
    match ask(config, &Request::Explain { job })? {
        Reply::Explain(explanation) => print(&output::choose(show).explanation(&explanation)?),
        Reply::NotFound => bail!("job {typed}: not found, or not yours"),
        other => unexpected(other),
    }
}

/// The id that Slurm gave to a task of an array.
fn task_id(config: Option<&Path>, task: &str) -> anyhow::Result<JobId> {
    let mut squeue = command::command("squeue", &["--noheader", "--states=all", "--format=%A", "--jobs", task]);
    let conf = Config::find(config)?.slurm.conf;
    if !conf.as_os_str().is_empty() {
        squeue.env("SLURM_CONF", conf);
    }
    let done = command::run(&mut squeue, b"", SQUEUE_LIMIT)?;
    let text = done.text();
    match text.split_ascii_whitespace().collect::<Vec<_>>().as_slice() {
        [id] if done.status.success() => id.parse().with_context(|| format!("squeue names task {task} \"{id}\"")),
        [] if done.status.success() || done.stderr.contains("Invalid job id") => {
            bail!("job {task}: not found, or not yours")
        }
        _ => bail!("job {task}: squeue: {}", done.complaint()),
    }
}

fn unexpected(reply: Reply) -> anyhow::Result<u8> {
    match reply {
        Reply::Error { text } => bail!("pliantd: {text}"),
        _ => bail!(
            "pliantd gave an answer to another question: is it of the same version ({})?",
            pliant_protocol::SOFTWARE
        ),
    }
}

/// Prints; a reader that has seen enough (`| head`) is no error.
fn print(text: &str) -> anyhow::Result<u8> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(e).context("write to standard output"),
        _ => Ok(exit::OK),
    }
}
