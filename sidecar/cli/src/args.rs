//! The command line. Help, man pages and completions all come from these definitions.

use clap::{Args, Parser, Subcommand};
use pliant_model::JobId;
use std::path::PathBuf;

/// Elastic GPU jobs on Slurm
///
/// Runs the training of an elastic job (`pliant run`), and shows what Pliant does and why. Users see their own jobs;
/// root and the account of pliantd see all.
#[derive(Debug, Parser)]
#[command(name = "pliant", version, max_term_width = 100)]
pub struct Cli {
    /// Configuration file, if not that of PLIANT_CONFIG or /etc/pliant/pliant.toml
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a training command in a batch script, one process per GPU
    ///
    /// Starts CMD once per GPU of the job (torchrun: once per node) and again in each new world when GPUs come or go.
    /// Ends with the code of the first rank that fails, 128 + signal where a signal ended it.
    Run(Run),
    /// Show the state of pliantd
    Status(Show),
    /// List elastic jobs
    ///
    /// States (ST): CF starts, R trains, GR grows, SH shrinks, PD waits at zero GPUs, NC its launcher is not connected.
    Jobs(Show),
    /// Show what a job holds, why it does not grow, and what has happened to it
    Explain(Explain),
    /// List GPUs: what each does, who has it, and why it stands so
    ///
    /// Processes and jobs of others are shown to root and the account of pliantd only.
    Gpus(Gpus),
    /// Show, import, check and export the topology of nodes and cluster
    Topo(TopoArgs),
    /// Check the installation on this host, and what pliantd knows of the others
    ///
    /// Ends with 0 when nothing fails, with 1 otherwise.
    Doctor(Show),
    /// Work with the configuration file
    Config(ConfigArgs),
    /// Serve the ranks of one step (started by `pliant run`)
    #[command(hide = true)]
    Supervise,
    /// Write the man pages into a folder
    #[command(hide = true)]
    Man {
        /// Folder, made if needed
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
    /// Print completions for a shell
    #[command(hide = true)]
    Completions {
        /// Shell
        #[arg(value_name = "SHELL")]
        shell: clap_complete::Shell,
    },
}

/// `pliant run`
#[derive(Debug, Args)]
pub struct Run {
    /// Begin each line of output with the rank that wrote it
    #[arg(long)]
    pub label: bool,
    /// Command and its arguments
    #[arg(value_name = "CMD", required = true, trailing_var_arg = true)]
    pub command: Vec<String>,
}

/// How to show it.
#[derive(Clone, Copy, Debug, Default, Args)]
#[group(id = "form")]
pub struct Show {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Print no header line
    #[arg(long, conflicts_with = "json")]
    pub noheader: bool,
}

/// `pliant explain`
#[derive(Debug, Args)]
pub struct Explain {
    /// Job id, such as 12, or 12_3 for a task of an array; a slice is explained by its base
    #[arg(value_name = "JOB", value_parser = parse_job)]
    pub job: JobArg,
    /// How to show it.
    #[command(flatten)]
    pub show: Show,
}

/// `pliant gpus`
#[derive(Debug, Args)]
pub struct Gpus {
    /// Only the GPUs of these nodes, a hostlist such as n[0-3]
    #[arg(long, value_name = "NODES")]
    pub node: Option<String>,
    /// How to show it.
    #[command(flatten)]
    pub show: Show,
}

/// `pliant topo`
#[derive(Debug, Args)]
pub struct TopoArgs {
    /// What to do with it.
    #[command(subcommand)]
    pub command: Topo,
}

/// The commands of `pliant topo`.
#[derive(Debug, Subcommand)]
pub enum Topo {
    /// Draw the GPUs of a node and their links, or the switches and nodes of the cluster
    Show {
        /// Node [default: the cluster]
        #[arg(value_name = "NODE")]
        node: Option<String>,
        /// Also write the picture as SVG
        #[arg(long, value_name = "FILE")]
        svg: Option<PathBuf>,
        /// How to show it.
        #[command(flatten)]
        show: Show,
    },
    /// Read files and show what Pliant understands in them
    ///
    /// Takes captures of `nvidia-smi topo -m`, `nvidia-smi -L` and `rocm-smi --showtopo`, gres.conf, slurm.conf,
    /// topology.conf and topology.yaml, and what scontrol, squeue and sacct print as JSON, scontrol also as text; - is
    /// standard input.
    Import {
        /// Files
        #[arg(value_name = "FILE", required = true)]
        files: Vec<String>,
        /// Compare captures with what the agent of this node has measured
        #[arg(long, value_name = "NODE")]
        node: Option<String>,
        /// How to show it.
        #[command(flatten)]
        show: Show,
    },
    /// Check gres.conf, slurm.conf and the topology against each other and against the hardware
    ///
    /// Ends with 0 when nothing fails, with 1 otherwise.
    Check {
        /// Folder of Slurm's files [default: that of the slurm.conf in use]
        #[arg(long, value_name = "DIR")]
        conf: Option<PathBuf>,
        /// How to show it.
        #[command(flatten)]
        show: Show,
    },
    /// Write a file for Slurm from what was measured, to standard output
    Export {
        /// Which
        #[arg(value_name = "FILE")]
        what: TopoExport,
    },
}

/// What can be exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum TopoExport {
    /// gres.conf with Cores and Links.
    #[value(name = "gres.conf")]
    GresConf,
    /// topology.conf.
    #[value(name = "topology.conf")]
    TopologyConf,
    /// topology.yaml (Slurm 25.05 and later).
    #[value(name = "topology.yaml")]
    TopologyYaml,
}

/// `pliant config`
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// What to do with it.
    #[command(subcommand)]
    pub command: ConfigCommand,
}

/// The commands of `pliant config`.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Check a configuration file; an unknown key is an error
    Check {
        /// File [default: as for --config]
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
}

/// A job as typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobArg {
    /// Slurm's own id.
    Id(JobId),
    /// A task of an array, `12_3`: Slurm has to say its id.
    Task(String),
}

fn parse_job(text: &str) -> Result<JobArg, &'static str> {
    const EXPECTED: &str = "a job id such as 12, or 12_3 for a task of an array";
    let digits = |t: &str| !t.is_empty() && t.bytes().all(|b| b.is_ascii_digit());
    match text.split_once('_') {
        None if digits(text) => text.parse().map(JobArg::Id).map_err(|_| EXPECTED),
        Some((array, task)) if digits(array) && digits(task) => Ok(JobArg::Task(text.to_owned())),
        _ => Err(EXPECTED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn jobs_are_ids_or_tasks() {
        assert_eq!(parse_job("12"), Ok(JobArg::Id(JobId(12))));
        assert_eq!(parse_job("12_3"), Ok(JobArg::Task("12_3".into())));
        for bad in ["", "x", "-1", "12_", "_3", "12+0", "12_[1-3]", "4294967296"] {
            assert!(parse_job(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn everything_after_the_command_is_the_commands() {
        let words = ["pliant", "run", "--label", "--", "python", "train.py", "--label", "--json"];
        let Ok(Cli { command: Command::Run(run), .. }) = Cli::try_parse_from(words) else {
            panic!("not understood");
        };
        assert!(run.label);
        assert_eq!(run.command, ["python", "train.py", "--label", "--json"]);
        assert!(Cli::try_parse_from(["pliant", "run", "--"]).is_err());
        assert!(Cli::try_parse_from(["pliant", "run", "--lable", "python"]).is_err());
    }
}
