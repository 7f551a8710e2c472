//! `pliant-lab`: a private real Slurm cluster on one machine.
#![forbid(unsafe_code)]

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use pliant_lab::{LAB_USERS, Lab, Owner, State};

const DEFAULT_DIR: &str = "/tmp/pliant-lab-default";

#[derive(Debug, Parser)]
#[command(name = "pliant-lab", version, about = "A private real Slurm cluster on one machine, with simulated GPUs")]
struct Cli {
    /// Slurm release of the lab, if not the host's own: 22.05, 24.11, 26.05 (made by `./dev release`)
    #[arg(long, global = true, value_name = "RELEASE")]
    release: Option<String>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Args)]
struct Dir {
    /// The lab's directory
    #[arg(long, default_value = DEFAULT_DIR)]
    dir: PathBuf,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a lab and wait until its nodes are idle
    Up(Up),
    /// Run a command in the lab as one of its users, in the user's home there
    Exec {
        #[command(flatten)]
        dir: Dir,
        /// The user: pliant-lab-1, pliant-lab-2, pliant, slurm, root
        #[arg(long = "as", default_value = LAB_USERS[0], value_name = "USER")]
        user: String,
        /// Run it in this directory instead
        #[arg(long)]
        cwd: Option<PathBuf>,
        /// The command
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        argv: Vec<String>,
    },
    /// Show a lab, or all labs if there is none in the default directory
    Status {
        #[command(flatten)]
        dir: Dir,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// End a lab and remove everything of it
    Down {
        #[command(flatten)]
        dir: Dir,
    },
    /// Start a service again: munged, mariadbd, slurmdbd, slurmctld, slurmd.n0, pliantd, agent.n0
    Start {
        #[command(flatten)]
        dir: Dir,
        /// The service
        service: String,
    },
    /// Kill a service with SIGKILL
    Kill {
        #[command(flatten)]
        dir: Dir,
        /// The service
        service: String,
    },
    /// End a service with SIGTERM and start it again
    Restart {
        #[command(flatten)]
        dir: Dir,
        /// The service
        service: String,
    },
    /// Run a program where `--release` is the native Slurm
    #[command(hide = true)]
    In {
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        argv: Vec<String>,
    },
    /// Wait for the death of a process, then end the lab (the lab starts this by itself)
    #[command(hide = true)]
    Guard {
        #[command(flatten)]
        dir: Dir,
        #[arg(long)]
        owner: u32,
        #[arg(long)]
        start: u64,
    },
}

#[derive(Debug, Args)]
struct Up {
    #[command(flatten)]
    dir: Dir,
    /// Number of nodes
    #[arg(long, default_value_t = 4)]
    nodes: u16,
    /// Simulated GPUs per node
    #[arg(long, default_value_t = 8)]
    gpus: u16,
    /// With slurmdbd and a private MariaDB; `pliant` becomes an operator
    #[arg(long)]
    accounting: bool,
    /// With proctrack/cgroup, task/cgroup and ConstrainDevices (cgroup v1)
    #[arg(long)]
    cgroups: bool,
    /// Plain Slurm: no plugin, no pliantd, no agents
    #[arg(long)]
    no_pliant: bool,
    /// Without the select plugin: Slurm chooses nodes and GPUs alone
    #[arg(long)]
    no_select: bool,
    /// pliantd's poll interval, seconds
    #[arg(long, default_value_t = 10.0, value_name = "SECS")]
    poll_interval: f64,
    /// A line of slurm.conf; repeatable
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// A further partition, `PartitionName=...`; repeatable
    #[arg(long, value_name = "LINE")]
    partition_line: Vec<String>,
    /// preempt/partition_prio with a second partition `low` of this GraceTime
    #[arg(long, value_name = "GRACE")]
    preemption: Option<u32>,
    /// A key of pliant.toml; repeatable
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pliant_set: Vec<String>,
    /// Scenario of the agents' simulated NVML (tests/fake-nvml/scenarios)
    #[arg(long, value_name = "FILE")]
    scenario: Option<PathBuf>,
    /// gres.conf to use; {devices} in it stands for the folder of the device files
    #[arg(long, value_name = "FILE")]
    gres_conf: Option<PathBuf>,
    /// End the lab when this process dies
    #[arg(long, value_name = "PID")]
    owner: Option<u32>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let entered = cli.release.as_deref().map_or(Ok(()), pliant_lab::release::enter);
    match entered.and_then(|()| run(cli.command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            eprintln!("pliant-lab: {err:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Up(args) => up(args),
        Command::Exec { dir, user, cwd, argv } => exec(&dir.dir, &user, cwd, &argv),
        Command::Status { dir, json } => status(&dir.dir, json),
        Command::Down { dir } => {
            pliant_lab::down(&dir.dir)?;
            println!("lab in {} ended", dir.dir.display());
            Ok(())
        }
        Command::Start { dir, service } => Lab::attach(&dir.dir)?.start(&service),
        Command::Kill { dir, service } => Lab::attach(&dir.dir)?.kill(&service),
        Command::Restart { dir, service } => Lab::attach(&dir.dir)?.restart(&service),
        Command::In { argv } => {
            let Some((program, args)) = argv.split_first() else { bail!("in: no command") };
            Err(std::process::Command::new(program).args(args).exec()).with_context(|| format!("cannot run {program}"))
        }
        Command::Guard { dir, owner, start } => pliant_lab::guard(&dir.dir, Owner { pid: owner, start }),
    }
}

fn up(args: Up) -> Result<()> {
    let begin = Instant::now();
    let mut builder = Lab::builder()
        .dir(&args.dir.dir)
        .nodes(args.nodes)
        .gpus(args.gpus)
        .accounting(args.accounting)
        .cgroups(args.cgroups)
        .pliant(!args.no_pliant)
        .select(!args.no_select)
        .poll_interval(args.poll_interval)
        .detached(args.owner)?;
    for line in args.set {
        builder = builder.conf_line(line);
    }
    for line in args.partition_line {
        builder = builder.partition_line(line);
    }
    for item in args.pliant_set {
        builder = builder.pliant_set(item);
    }
    if let Some(grace) = args.preemption {
        builder = builder.preemption(grace);
    }
    if let Some(file) = args.scenario {
        builder = builder.scenario(file);
    }
    if let Some(file) = args.gres_conf {
        let text = std::fs::read_to_string(&file).with_context(|| format!("--gres-conf {}", file.display()))?;
        builder = builder.gres_conf(text);
    }
    let lab = builder.start()?;
    println!(
        "lab in {}: {} nodes with {} GPUs, up after {:.1} s",
        lab.dir().display(),
        args.nodes,
        args.gpus,
        begin.elapsed().as_secs_f64()
    );
    Ok(())
}

fn exec(dir: &Path, user: &str, cwd: Option<PathBuf>, argv: &[String]) -> Result<()> {
    let lab = Lab::attach(dir)?;
    let Some((program, args)) = argv.split_first() else { bail!("exec: no command") };
    let mut cmd = lab.command(user, program)?;
    cmd.args(args).stdin(std::process::Stdio::inherit());
    if let Some(term) = std::env::var_os("TERM") {
        cmd.env("TERM", term);
    }
    if let Some(cwd) = cwd {
        cmd.current_dir(cwd);
    }
    // Only returns when it fails.
    Err(cmd.exec()).with_context(|| format!("cannot run {program} as {user} (is this root?)"))
}

fn status(dir: &Path, json: bool) -> Result<()> {
    if dir == Path::new(DEFAULT_DIR) && !dir.exists() {
        let labs = pliant_lab::labs();
        if labs.is_empty() {
            println!("no lab is up");
        }
        labs.iter().for_each(|lab| println!("{}", lab.display()));
        return Ok(());
    }
    let state = State::load(dir)?;
    if json {
        println!("{}", serde_json::to_string_pretty(&state).context("cannot write JSON")?);
        return Ok(());
    }
    let spec = &state.spec;
    let word = if state.ready { "up" } else { "starting or broken" };
    println!("lab in {}: {word}, {} nodes with {} GPUs", spec.dir.display(), spec.nodes, spec.gpus);
    println!("SLURM_CONF={}", spec.slurm_conf().display());
    println!("{:<14} {:>8}  STATE", "SERVICE", "PID");
    for (name, proc) in &state.services {
        println!("{name:<14} {:>8}  {}", proc.pid, if proc.alive() { "up" } else { "dead" });
    }
    Ok(())
}
