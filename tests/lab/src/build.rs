//! The start of a lab.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::fs::{CWD, FileType, Mode, StatVfsMountFlags, makedev, mknodat, statvfs};

use crate::lab::Lab;
use crate::procs::Proc;
use crate::spec::{LAB_USERS, Owner, PLIANT_USER, Ports, SLURM_USER, Spec};
use crate::state::State;
use crate::users::{self, User};
use crate::{cgroups, conf, ports, services};

/// Linux's limit for the path of a unix socket is 107 bytes; the longest in a lab adds about 40 to its directory.
const DIR_LIMIT: usize = 64;

/// What a lab is to be made of; [`Builder::start`] brings it up.
#[derive(Debug, Clone)]
pub struct Builder {
    spec: Spec,
    dir: Option<PathBuf>,
    detached: bool,
}

impl Default for Builder {
    fn default() -> Self {
        let ports = Ports { slurmctld: 0, slurmdbd: 0, pliantd: 0, slurmd: 0 };
        Builder {
            spec: Spec {
                dir: PathBuf::new(),
                nodes: 4,
                gpus: 8,
                accounting: false,
                cgroups: false,
                pliant: true,
                select: true,
                poll_interval: 10.0,
                preemption: None,
                conf: Vec::new(),
                partitions: Vec::new(),
                pliant_set: Vec::new(),
                service_env: Vec::new(),
                scenario: None,
                gres: None,
                topology: None,
                target: PathBuf::new(),
                plugins: PathBuf::new(),
                devices: PathBuf::new(),
                host: String::new(),
                ports,
                owner: None,
            },
            dir: None,
            detached: false,
        }
    }
}

impl Builder {
    #[cfg(test)]
    pub(crate) fn spec_for_test(self) -> Spec {
        self.spec
    }

    /// Number of nodes (default 4).
    pub fn nodes(mut self, nodes: u16) -> Self {
        self.spec.nodes = nodes;
        self
    }

    /// Simulated GPUs per node (default 8).
    pub fn gpus(mut self, gpus: u16) -> Self {
        self.spec.gpus = gpus;
        self
    }

    /// The lab's directory; it must not exist. Default: a new one below /tmp.
    pub fn dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.dir = Some(dir.into());
        self
    }

    /// slurmdbd with a private MariaDB; `pliant` becomes an operator.
    pub fn accounting(mut self, on: bool) -> Self {
        self.spec.accounting = on;
        self
    }

    /// Device cgroups; [`Builder::start`] fails where the machine cannot.
    pub fn cgroups(mut self, on: bool) -> Self {
        self.spec.cgroups = on;
        self
    }

    /// The plugin, pliantd and the agents (default: on).
    pub fn pliant(mut self, on: bool) -> Self {
        self.spec.pliant = on;
        self
    }

    /// The select plugin in front of Slurm's own (default: on where it is built and the lab has Pliant).
    pub fn select(mut self, on: bool) -> Self {
        self.spec.select = on;
        self
    }

    /// pliantd's poll interval in seconds (default 10).
    pub fn poll_interval(mut self, seconds: impl Into<f64>) -> Self {
        self.spec.poll_interval = seconds.into();
        self
    }

    /// A `KEY=VALUE` line of slurm.conf; a value of the lab's own for the same key is replaced.
    pub fn conf_line(mut self, line: impl Into<String>) -> Self {
        self.spec.conf.push(line.into());
        self
    }

    /// A further `PartitionName=…` line; the lab has the partition `gpu` over all nodes.
    pub fn partition_line(mut self, line: impl Into<String>) -> Self {
        self.spec.partitions.push(line.into());
        self
    }

    /// preempt/partition_prio with a second partition `low` over all nodes, whose jobs are cancelled after `grace`
    /// seconds when a job of `gpu` needs their place.
    pub fn preemption(mut self, grace: u32) -> Self {
        self.spec.preemption = Some(grace);
        self
    }

    /// `section.key=value` for pliant.toml.
    pub fn pliant_set(mut self, item: impl Into<String>) -> Self {
        self.spec.pliant_set.push(item.into());
        self
    }

    /// An environment variable of a service (`pliantd`, `agent.n0`, or `agent` for all of them).
    pub fn service_env(mut self, service: &str, key: &str, value: &str) -> Self {
        self.spec.service_env.push((service.to_owned(), key.to_owned(), value.to_owned()));
        self
    }

    /// The agents read a simulated NVML that this scenario file describes, each from its own copy.
    pub fn scenario(mut self, file: impl Into<PathBuf>) -> Self {
        self.spec.scenario = Some(file.into());
        self
    }

    /// The whole gres.conf; `{devices}` stands for the folder of the device files gpu0, gpu1, …. A `Type=` in it, one for
    /// all GPUs, is also said in slurm.conf.
    pub fn gres_conf(mut self, text: impl Into<String>) -> Self {
        self.spec.gres = Some(text.into());
        self
    }

    /// A topology.conf. It takes effect with the plugin: `conf_line("TopologyPlugin=topology/tree")`.
    pub fn topology_conf(mut self, text: impl Into<String>) -> Self {
        self.spec.topology = Some(text.into());
        self
    }

    /// The lab outlives this process and [`Lab`]'s drop; `owner` (a pid), if given, ends it by dying.
    pub fn detached(mut self, owner: Option<u32>) -> Result<Self> {
        self.detached = true;
        self.spec.owner = match owner {
            Some(pid) => {
                let proc = Proc::of(pid).with_context(|| format!("there is no process {pid} to own the lab"))?;
                Some(Owner { pid, start: proc.start })
            }
            None => None,
        };
        Ok(self)
    }

    /// Brings the lab up and waits until all nodes are idle. On a failure everything is taken down again, and the
    /// error carries the last lines of the log in question.
    pub fn start(mut self) -> Result<Lab> {
        if !rustix::process::geteuid().is_root() {
            bail!("the lab needs root (jobs run as several users): use sudo");
        }
        if self.spec.nodes == 0 || self.spec.nodes > 1024 {
            bail!("--nodes {}: must be 1 to 1024", self.spec.nodes);
        }
        if self.spec.gpus > 64 {
            bail!("--gpus {}: must be 0 to 64", self.spec.gpus);
        }
        if self.spec.cgroups {
            cgroups::check()?;
        }
        // Where Slurm's internal headers cannot be had there is no select plugin.
        self.spec.select &= self.spec.pliant && std::env::var_os("PLIANT_LAB_NO_SELECT").is_none();
        users::ensure()?;
        self.spec.target = target_dir()?;
        self.spec.plugins =
            std::env::var_os("PLIANT_LAB_PLUGINS").map_or_else(|| self.spec.target.clone(), PathBuf::from);
        self.spec.host = fs::read_to_string("/proc/sys/kernel/hostname")
            .context("cannot read the host name")?
            .trim()
            .split('.')
            .next()
            .unwrap_or_default()
            .to_owned();
        self.spec.dir = new_dir(self.dir.take())?;
        let dir = self.spec.dir.clone();
        match self.bring_up() {
            Ok(lab) => Ok(lab),
            // An owned lab that came far enough has ended itself by now.
            Err(err) if !dir.exists() => Err(err),
            Err(err) => match crate::down::down(&dir) {
                Ok(()) => Err(err),
                Err(more) => Err(err.context(format!("and its end failed: {more:#}"))),
            },
        }
    }

    fn bring_up(mut self) -> Result<Lab> {
        let spec = &mut self.spec;
        spec.ports = ports::reserve(&spec.dir, spec.nodes)?;
        if !self.detached {
            let pid = std::process::id();
            spec.owner = Proc::of(pid).map(|p| Owner { pid, start: p.start });
        }
        spec.devices = device_dir(&spec.dir)?;
        State { spec: spec.clone(), services: Default::default(), guard: None, ready: false }.store()?;
        let mut children = Vec::new();
        if spec.owner.is_some() {
            children.push(start_guard(spec)?);
        }
        make_dirs(spec)?;
        if spec.pliant {
            install_pliant(spec)?;
        }
        make_devices(spec)?;
        write_conf(spec)?;
        let lab = Lab::new(self.spec, children, !self.detached);
        // From here on `lab`'s drop would end it too, but the caller of this function needs its logs first.
        lab.start_all()?;
        State::update(lab.dir(), |state| state.ready = true)?;
        Ok(lab)
    }
}

/// The directory with the built programs: `PLIANT_LAB_TARGET`, else where this program comes from.
fn target_dir() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("PLIANT_LAB_TARGET") {
        return fs::canonicalize(&dir).with_context(|| format!("PLIANT_LAB_TARGET={}", Path::new(&dir).display()));
    }
    let exe = std::env::current_exe().context("cannot find this program's own path")?;
    let mut dir = exe.parent().unwrap_or(Path::new("/")).to_path_buf();
    if dir.ends_with("deps") {
        dir.pop();
    }
    Ok(dir)
}

fn new_dir(wanted: Option<PathBuf>) -> Result<PathBuf> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let dir = match wanted {
        Some(dir) => std::path::absolute(dir).context("--dir")?,
        None => {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            PathBuf::from(format!("/tmp/pliant-lab-{}-{count}", std::process::id()))
        }
    };
    let text = dir.to_string_lossy();
    if text.len() > DIR_LIMIT || text.chars().any(|c| c.is_whitespace() || "\"'#\\%=".contains(c)) {
        bail!("--dir {text}: must be at most {DIR_LIMIT} characters without blanks, quotes, # and %");
    }
    if dir.join("state.json").exists() {
        bail!("a lab is up in {text} already: `pliant-lab down --dir {text}` ends it, --dir DIR starts another one");
    }
    fs::create_dir_all(dir.parent().unwrap_or(Path::new("/"))).with_context(|| format!("cannot create {text}"))?;
    fs::create_dir(&dir).with_context(|| format!("cannot create {text} (it must not exist)"))?;
    fs::write(dir.join(".pliant-lab"), "").with_context(|| format!("cannot write below {text}"))?;
    fs::canonicalize(&dir).with_context(|| format!("cannot resolve {text}"))
}

/// In the lab itself, or below /dev where the lab's file system forbids devices (Debian 13 mounts /tmp with nodev).
fn device_dir(dir: &Path) -> Result<PathBuf> {
    let flags = statvfs(dir).with_context(|| format!("statvfs {}", dir.display()))?.f_flag;
    if !flags.contains(StatVfsMountFlags::NODEV) {
        return Ok(dir.join("dev"));
    }
    let name: String = dir.to_string_lossy().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    Ok(PathBuf::from(format!("/dev/pliant-lab{name}")))
}

fn make_dirs(spec: &Spec) -> Result<()> {
    let slurm = User::get(SLURM_USER)?;
    let pliant = User::get(PLIANT_USER)?;
    let make = |rel: &str, owner: Option<&User>, mode: u32| -> Result<()> {
        let path = spec.path(rel);
        fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))
            .with_context(|| format!("chmod {}", path.display()))?;
        if let Some(user) = owner {
            chown(&path, Some(user.uid), Some(user.gid)).with_context(|| format!("chown {}", path.display()))?;
        }
        Ok(())
    };
    for (rel, owner, mode) in [
        ("", None, 0o755),
        ("etc", None, 0o755),
        ("munge", None, 0o755),
        ("bin", None, 0o755),
        ("lib", None, 0o755),
        ("spool", None, 0o755),
        ("home", None, 0o755),
        ("log", Some(&slurm), 0o755),
        ("state", Some(&slurm), 0o755),
        ("mysql", Some(&slurm), 0o750),
        ("run", Some(&pliant), 0o755),
        ("pliantd", Some(&pliant), 0o700),
    ] {
        make(rel, owner, mode)?;
    }
    make("gpus", None, 0o755)?;
    make("plugins", None, 0o755)?;
    for (folder, owner, mode) in [("pliant", &pliant, 0o755), ("select", &slurm, 0o2750)] {
        let path = spec.memory().join(folder);
        fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        // The ring's folder is SlurmUser's, and its group may read what lies in it.
        chown(&path, Some(owner.uid), Some(pliant.gid)).with_context(|| format!("chown {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))
            .with_context(|| format!("chmod {}", path.display()))?;
    }
    for node in spec.node_names() {
        make(&format!("spool/{node}"), None, 0o755)?;
        make(&format!("run/{node}"), None, 0o755)?;
    }
    for name in LAB_USERS {
        make(&format!("home/{name}"), Some(&User::get(name)?), 0o755)?;
    }
    Ok(())
}

/// Puts the plugin, the programs and the Python client into the lab, and says what is not built.
pub(crate) fn install_pliant(spec: &Spec) -> Result<()> {
    let of_release = ["pliant-slurm-bridge", "libspank_pliant.so"].map(|name| spec.plugins.join(name));
    let all = ["pliantd", "pliant-agent", "pliant"].map(|name| spec.target.join(name));
    let missing: Vec<String> =
        all.iter().chain(&of_release).filter(|p| !p.is_file()).map(|p| p.display().to_string()).collect();
    if !missing.is_empty() {
        bail!("not built: {}. Run `cargo build --workspace`, or give --no-pliant for plain Slurm", missing.join(", "));
    }
    for name in ["pliantd", "pliant-agent", "pliant"] {
        services::install(&spec.target.join(name), &spec.path("bin").join(name))?;
    }
    // What is built once for each Slurm release.
    services::install(&spec.plugins.join("pliant-slurm-bridge"), &spec.path("bin/pliant-slurm-bridge"))?;
    services::install(&spec.plugins.join("libspank_pliant.so"), &spec.path("lib/spank_pliant.so"))?;
    if spec.select {
        let built = spec.plugins.join("libselect_pliant.so");
        if !built.is_file() {
            bail!("{} is not built: run `./dev source`, then `cargo build --workspace`", built.display());
        }
        services::install(&built, &spec.path("plugins/select_cons_tres.so"))?;
    }
    if let Some(scenario) = &spec.scenario {
        install_scenario(spec, scenario)?;
    }
    let client = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../clients/python");
    let package = [client.join("src/pliant"), client.join("pliant")].into_iter().find(|dir| dir.is_dir());
    if let Some(package) = package {
        fs::create_dir_all(spec.path("python")).context("cannot create python in the lab")?;
        let out = Command::new("cp")
            .arg("-rT")
            .args([package.as_path(), spec.path("python/pliant").as_path()])
            .output()
            .context("cannot run cp")?;
        if !out.status.success() {
            bail!("cannot copy the Python client: {}", String::from_utf8_lossy(&out.stderr).trim());
        }
    }
    Ok(())
}

/// The simulated NVML, and for each node its own scenario, which names the node: no two GPUs of a cluster have one UUID.
fn install_scenario(spec: &Spec, scenario: &Path) -> Result<()> {
    services::install(&spec.target.join("libfake_nvml.so"), &spec.path("lib/libnvidia-ml.so.1"))?;
    let text = fs::read_to_string(scenario).with_context(|| format!("cannot read {}", scenario.display()))?;
    for (number, node) in spec.node_names().iter().enumerate() {
        let path = spec.scenario_of(node);
        if path.exists() {
            continue; // as a test has changed it
        }
        fs::write(&path, format!("node = {number}\n{text}"))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn make_devices(spec: &Spec) -> Result<()> {
    let dir = &spec.devices;
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    for gpu in 0..spec.gpus {
        let path = dir.join(format!("gpu{gpu}"));
        let mode = Mode::from_raw_mode(0o666);
        mknodat(CWD, &path, FileType::CharacterDevice, mode, makedev(195, gpu.into()))
            .with_context(|| format!("mknod {} (a container without CAP_MKNOD?)", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666))
            .with_context(|| format!("chmod {}", path.display()))?;
    }
    Ok(())
}

fn write_conf(spec: &Spec) -> Result<()> {
    let write = |rel: &str, text: &str, mode: u32| -> Result<PathBuf> {
        let path = spec.path(rel);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))
            .with_context(|| format!("chmod {}", path.display()))?;
        Ok(path)
    };
    write("etc/slurm.conf", &conf::slurm_conf(spec)?, 0o644)?;
    write("etc/gres.conf", &conf::gres_conf(spec), 0o644)?;
    if let Some(text) = &spec.topology {
        write("etc/topology.conf", text, 0o644)?;
    }
    write("etc/cgroup.conf", &conf::cgroup_conf(spec, slurm_version()?), 0o644)?;
    write("etc/plugstack.conf", &conf::plugstack_conf(spec), 0o644)?;
    write("etc/pliant.toml", &conf::pliant_toml(spec)?, 0o644)?;
    if spec.accounting {
        let slurm = User::get(SLURM_USER)?;
        let path = write("etc/slurmdbd.conf", &conf::slurmdbd_conf(spec), 0o600)?;
        chown(&path, Some(slurm.uid), Some(slurm.gid)).with_context(|| format!("chown {}", path.display()))?;
    }
    let mut key = [0u8; 128];
    std::io::Read::read_exact(&mut fs::File::open("/dev/urandom").context("/dev/urandom")?, &mut key)
        .context("/dev/urandom")?;
    let path = write("munge/munge.key", "", 0o600)?;
    fs::write(&path, key).with_context(|| format!("cannot write {}", path.display()))
}

/// Slurm's major and minor version.
pub(crate) fn slurm_version() -> Result<(u32, u32)> {
    let out = Command::new("slurmctld")
        .arg("-V")
        .env("PATH", services::SYSTEM_PATH)
        .output()
        .context("cannot run slurmctld (package slurmctld)")?;
    let text = String::from_utf8_lossy(&out.stdout);
    let mut parts = text.split_whitespace().last().unwrap_or_default().split('.').map(str::parse::<u32>);
    match (parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Ok((major, minor)),
        _ => bail!("cannot read Slurm's version from '{}'", text.trim()),
    }
}

/// Starts the process that ends the lab when its owner dies. It has a session of its own and none of the lab's
/// variables, so that neither the owner's end nor the lab's takes it by accident.
fn start_guard(spec: &Spec) -> Result<Child> {
    let Some(owner) = spec.owner else { bail!("no owner") };
    let program = spec.target.join("pliant-lab");
    if !program.is_file() {
        bail!("{} is not built: run `cargo build -p pliant-lab`", program.display());
    }
    let child = Command::new("setsid")
        .arg(&program)
        .args(["guard", "--owner", &owner.pid.to_string(), "--start", &owner.start.to_string(), "--dir"])
        .arg(&spec.dir)
        .env_clear()
        .env("PATH", services::SYSTEM_PATH)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("cannot start the lab's guard")?;
    let proc = Proc::of(child.id());
    // Until it is recorded, a lab that ends at once leaves the guard to see by itself that the directory is gone.
    State::update(&spec.dir, |state| state.guard = proc)?;
    Ok(child)
}

/// Time that a service gets to come up.
pub(crate) const START_LIMIT: Duration = Duration::from_secs(30);
