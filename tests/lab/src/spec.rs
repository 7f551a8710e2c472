//! What a lab is made of, and where its files lie.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Users that every lab has; jobs run as these.
pub const LAB_USERS: [&str; 2] = ["pliant-lab-1", "pliant-lab-2"];
/// The account that pliantd runs as.
pub const PLIANT_USER: &str = "pliant";
/// Slurm's own user (`SlurmUser`), created by the distribution's package.
pub const SLURM_USER: &str = "slurm";
/// The account (in Slurm's sense) that all lab users belong to.
pub const ACCOUNT: &str = "lab";

/// TCP ports of one lab, all on 127.0.0.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ports {
    /// slurmctld.
    pub slurmctld: u16,
    /// slurmdbd.
    pub slurmdbd: u16,
    /// pliantd, for the agents.
    pub pliantd: u16,
    /// slurmd of `n0`; the others follow.
    pub slurmd: u16,
}

/// The process on whose life a lab depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// Its process id.
    pub pid: u32,
    /// Its start time in clock ticks since boot, so that a reused pid is told apart.
    pub start: u64,
}

/// Everything that decides what a lab looks like.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Spec {
    /// The lab's directory; all its files lie below.
    pub dir: PathBuf,
    /// Number of nodes, named `n0` to `n<nodes-1>`.
    pub nodes: u16,
    /// Simulated GPUs per node.
    pub gpus: u16,
    /// slurmdbd and a private MariaDB.
    pub accounting: bool,
    /// proctrack/cgroup, task/cgroup and `ConstrainDevices`.
    pub cgroups: bool,
    /// The plugin, pliantd and the agents.
    pub pliant: bool,
    /// The select plugin in front of Slurm's.
    #[serde(default)]
    pub select: bool,
    /// pliantd's poll interval, seconds.
    pub poll_interval: f64,
    /// GraceTime in seconds of a preemptible partition `low`, if there is one.
    pub preemption: Option<u32>,
    /// `KEY=VALUE` lines for slurm.conf; a known key is replaced, others are added.
    pub conf: Vec<String>,
    /// Further `PartitionName=` lines.
    pub partitions: Vec<String>,
    /// `section.key=value` for pliant.toml; the value is TOML, or a bare word that is then quoted.
    pub pliant_set: Vec<String>,
    /// `(service, variable, value)`: environment of services; the service may be `agent` for all agents.
    pub service_env: Vec<(String, String, String)>,
    /// The scenario of the simulated NVML of each node, copied as `gpus/<node>.toml`; `None`: no NVML.
    #[serde(default)]
    pub scenario: Option<PathBuf>,
    /// gres.conf as it is to be, instead of the lab's own; `{devices}` stands for the folder of the device files.
    #[serde(default)]
    pub gres: Option<String>,
    /// topology.conf, if there is to be one.
    #[serde(default)]
    pub topology: Option<String>,
    /// Where the built programs are (`target/debug`).
    pub target: PathBuf,
    /// Where plugins and bridge of this Slurm release are.
    #[serde(default)]
    pub plugins: PathBuf,
    /// Where the device nodes are (the lab's `dev`, or below /dev where the file system forbids devices).
    pub devices: PathBuf,
    /// Name of this machine as Slurm sees it.
    pub host: String,
    /// Ports.
    pub ports: Ports,
    /// The owner whose death ends the lab, if any.
    pub owner: Option<Owner>,
}

impl Spec {
    /// Names of all nodes.
    pub fn node_names(&self) -> Vec<String> {
        (0..self.nodes).map(|i| format!("n{i}")).collect()
    }

    /// CPUs of each node: at least 64, and at least 8 per GPU, even.
    pub fn cpus(&self) -> u32 {
        (u32::from(self.gpus) * 8).max(64)
    }

    /// `dir` joined with a path.
    pub fn path(&self, rel: impl AsRef<Path>) -> PathBuf {
        self.dir.join(rel)
    }

    /// slurm.conf.
    pub fn slurm_conf(&self) -> PathBuf {
        self.path("etc/slurm.conf")
    }

    /// pliant.toml.
    pub fn pliant_toml(&self) -> PathBuf {
        self.path("etc/pliant.toml")
    }

    /// The scenario file of a node's simulated NVML; may be changed while the lab runs.
    pub fn scenario_of(&self, node: &str) -> PathBuf {
        self.path(format!("gpus/{node}.toml"))
    }

    /// The lab's folder on a tmpfs, for what pliantd and slurmctld share.
    pub fn memory(&self) -> PathBuf {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        let name: String = self.dir.to_string_lossy().chars().map(plain).collect();
        PathBuf::from(format!("/dev/shm/pliant-lab{name}"))
    }

    /// The plan board.
    pub fn board(&self) -> PathBuf {
        self.memory().join("pliant/plan.board")
    }

    /// The event ring.
    pub fn ring(&self) -> PathBuf {
        self.memory().join("select/events.ring")
    }

    /// The log of a service.
    pub fn log(&self, service: &str) -> PathBuf {
        self.path(format!("log/{service}.log"))
    }

    /// First job id. Labs with cgroups share Slurm's cgroup directories (`slurm_n0/…`), so their job ids must differ.
    pub fn first_job_id(&self) -> u32 {
        if self.cgroups { (u32::from(self.ports.slurmctld) - 15_000) * 1000 + 1 } else { 1 }
    }
}
