//! A lab that is up.

use std::fs;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;

use crate::build::{Builder, START_LIMIT, install_pliant};
use crate::procs::Proc;
use crate::spec::{LAB_USERS, Spec};
use crate::state::State;
use crate::{accounts, services};

/// A lab that is up. Dropping it ends the lab, unless it was attached to or started detached.
#[derive(Debug)]
pub struct Lab {
    spec: Spec,
    /// Services that this process started; kept to be reaped.
    children: Mutex<Vec<Child>>,
    owned: bool,
}

impl Lab {
    /// Describes a new lab; see [`Builder`].
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Uses the lab that somebody else started in `dir`.
    pub fn attach(dir: &Path) -> Result<Lab> {
        Ok(Lab { spec: State::load(dir)?.spec, children: Mutex::default(), owned: false })
    }

    pub(crate) fn new(spec: Spec, children: Vec<Child>, owned: bool) -> Lab {
        Lab { spec, children: Mutex::new(children), owned }
    }

    /// What the lab is made of.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The lab's directory.
    pub fn dir(&self) -> &Path {
        &self.spec.dir
    }

    /// Node names, `n0` first.
    pub fn nodes(&self) -> Vec<String> {
        self.spec.node_names()
    }

    /// Name of a lab user: 0 or 1.
    pub fn user(&self, index: usize) -> &'static str {
        LAB_USERS.get(index).copied().unwrap_or("pliant-lab-1")
    }

    /// A user's home in the lab, where [`Lab::command`] runs programs.
    pub fn home(&self, user: &str) -> PathBuf {
        if LAB_USERS.contains(&user) { self.spec.path("home").join(user) } else { self.spec.dir.clone() }
    }

    /// A node's spool directory.
    pub fn spool(&self, node: &str) -> PathBuf {
        self.spec.path("spool").join(node)
    }

    /// The log of a service (`slurmctld`, `slurmd.n0`, `pliantd`, `agent.n0`, …).
    pub fn log(&self, service: &str) -> PathBuf {
        self.spec.log(service)
    }

    /// The socket of a node's agent.
    pub fn agent_socket(&self, node: &str) -> PathBuf {
        self.spec.path("run").join(node).join("agent.sock")
    }

    /// Names of all services, in the order of their start.
    pub fn services(&self) -> Vec<String> {
        let mut all = vec!["munged".to_owned()];
        if self.spec.accounting {
            all.extend(["mariadbd".to_owned(), "slurmdbd".to_owned()]);
        }
        all.push("slurmctld".to_owned());
        all.extend(self.nodes().iter().map(|n| format!("slurmd.{n}")));
        if self.spec.pliant {
            all.push("pliantd".to_owned());
            all.extend(self.nodes().iter().map(|n| format!("agent.{n}")));
        }
        all
    }

    /// The process of a service if it is alive.
    pub fn process(&self, service: &str) -> Option<Proc> {
        self.reap();
        State::load(self.dir()).ok()?.services.get(service).copied().filter(|p| p.alive())
    }

    /// Starts a service that is not running and waits until it answers. Pliant's programs are taken anew from the
    /// build directory first.
    pub fn start(&self, service: &str) -> Result<()> {
        self.start_with(service, &[])
    }

    /// Like [`Lab::start`] with additional environment variables, for this start only.
    pub fn start_with(&self, service: &str, env: &[(&str, &str)]) -> Result<()> {
        if self.process(service).is_some() {
            bail!("{service} is running already");
        }
        if service == "pliantd" || service.starts_with("agent.") {
            install_pliant(&self.spec)?;
        }
        self.spawn(service, env, false)?;
        self.wait_ready(service)
    }

    /// Kills a service (SIGKILL) and waits until it is gone.
    pub fn kill(&self, service: &str) -> Result<()> {
        self.end(service, Signal::KILL)
    }

    /// Ends a service with SIGTERM and waits until it is gone.
    pub fn stop(&self, service: &str) -> Result<()> {
        self.end(service, Signal::TERM)
    }

    /// Ends a service with SIGTERM and starts it again, with its state.
    pub fn restart(&self, service: &str) -> Result<()> {
        if self.process(service).is_some() {
            self.stop(service)?;
        }
        self.start(service)
    }

    /// Restarts slurmctld; it finds its jobs again.
    pub fn restart_slurmctld(&self) -> Result<()> {
        self.restart("slurmctld")
    }

    /// Sends a signal to a service, such as STOP and CONT.
    pub fn signal(&self, service: &str, signal: Signal) -> Result<()> {
        let proc = self.process(service).with_context(|| format!("{service} is not running"))?;
        if !proc.signal(signal) {
            bail!("{service} is gone");
        }
        Ok(())
    }

    /// Waits until `test` is true; the error names `what` and shows the ends of the main logs.
    pub fn wait_for(&self, limit: Duration, what: &str, mut test: impl FnMut() -> bool) -> Result<()> {
        self.wait_some(limit, what, || test().then_some(()))
    }

    /// Waits until `test` gives a value; see [`Lab::wait_for`].
    pub fn wait_some<T>(&self, limit: Duration, what: &str, mut test: impl FnMut() -> Option<T>) -> Result<T> {
        let end = Instant::now() + limit;
        loop {
            if let Some(value) = test() {
                return Ok(value);
            }
            if Instant::now() > end {
                bail!("not within {limit:?}: {what}\n{}", self.logs(15));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The last lines of the logs of slurmctld, `n0` and Pliant.
    pub fn logs(&self, lines: usize) -> String {
        ["slurmctld", "slurmd.n0", "pliantd", "agent.n0"]
            .iter()
            .map(|service| services::tail(&self.spec, service, lines))
            .collect()
    }

    /// Ends the lab now and says what went wrong, which a drop cannot.
    pub fn down(mut self) -> Result<()> {
        self.owned = false;
        let result = crate::down::down(&self.spec.dir);
        self.reap();
        result
    }

    pub(crate) fn start_all(&self) -> Result<()> {
        self.spawn("munged", &[], true)?;
        self.wait_ready("munged")?;
        if self.spec.accounting {
            let prepared = accounts::prepare(&self.spec)?;
            self.start_accounting()?;
            if !prepared.filled {
                accounts::register(&self.spec)
                    .with_context(|| format!("accounts\n{}", services::tail(&self.spec, "slurmdbd", 10)))?;
                self.stop("slurmdbd")?;
                self.stop("mariadbd")?;
                accounts::keep(&self.spec, &prepared)?;
                self.start_accounting()?;
            }
        }
        self.spawn("slurmctld", &[], true)?;
        self.wait_ready("slurmctld")?;
        for node in self.nodes() {
            self.spawn(&format!("slurmd.{node}"), &[], true)?;
        }
        self.wait_nodes()?;
        if self.spec.pliant {
            self.spawn("pliantd", &[], true)?;
            let agents: Vec<String> = self.nodes().iter().map(|n| format!("agent.{n}")).collect();
            for agent in &agents {
                self.spawn(agent, &[], true)?;
            }
            self.wait_ready("pliantd")?;
            for agent in &agents {
                self.wait_ready(agent)?;
            }
        }
        Ok(())
    }

    fn start_accounting(&self) -> Result<()> {
        for service in ["mariadbd", "slurmdbd"] {
            self.spawn(service, &[], true)?;
            self.wait_ready(service)?;
        }
        Ok(())
    }

    fn spawn(&self, service: &str, env: &[(&str, &str)], first: bool) -> Result<()> {
        // A socket that a killed predecessor left would look like a service that has come up.
        if let Some(socket) = self.socket(service) {
            let _ = fs::remove_file(socket);
        }
        let child = services::spawn(&self.spec, service, env, first)?;
        self.children().push(child);
        Ok(())
    }

    fn socket(&self, service: &str) -> Option<PathBuf> {
        match service.split_once('.') {
            Some(("agent", node)) => Some(self.agent_socket(node)),
            _ if service == "pliantd" => Some(self.spec.path("run/pliantd.sock")),
            _ if service == "munged" => Some(self.spec.path("munge/munge.sock")),
            _ if service == "mariadbd" => Some(self.spec.path("mysql/mysql.sock")),
            _ => None,
        }
    }

    fn port(&self, service: &str) -> Option<u16> {
        let ports = &self.spec.ports;
        match service {
            "slurmctld" => Some(ports.slurmctld),
            "slurmdbd" => Some(ports.slurmdbd),
            _ => {
                let node = service.strip_prefix("slurmd.n")?;
                Some(ports.slurmd + node.parse::<u16>().ok()?)
            }
        }
    }

    /// Waits until a service accepts connections; fails at once when it has ended.
    fn wait_ready(&self, service: &str) -> Result<()> {
        let end = Instant::now() + START_LIMIT;
        loop {
            let up = match (self.socket(service), self.port(service)) {
                (Some(socket), _) => UnixStream::connect(socket).is_ok(),
                (None, Some(port)) => TcpStream::connect(("127.0.0.1", port)).is_ok(),
                (None, None) => true,
            };
            if up {
                return Ok(());
            }
            if self.process(service).is_none() {
                bail!("{service} ended at once\n{}", services::tail(&self.spec, service, 20));
            }
            if Instant::now() > end {
                bail!("{service} does not answer after {START_LIMIT:?}\n{}", services::tail(&self.spec, service, 20));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until slurmctld shows every node idle.
    fn wait_nodes(&self) -> Result<()> {
        let end = Instant::now() + START_LIMIT + Duration::from_millis(500) * u32::from(self.spec.nodes);
        loop {
            let states = self.run("root", &["sinfo", "-h", "-N", "-p", "gpu", "-o", "%N %T"]).unwrap_or_default();
            let idle = states.lines().filter(|line| line.ends_with(" idle")).count();
            if idle == usize::from(self.spec.nodes) {
                return Ok(());
            }
            for node in self.nodes() {
                let service = format!("slurmd.{node}");
                if self.process(&service).is_none() {
                    bail!("{service} ended\n{}", services::tail(&self.spec, &service, 20));
                }
            }
            if Instant::now() > end {
                let logs = self.logs(15);
                bail!("only {idle} of {} nodes are idle:\n{states}\n{logs}", self.spec.nodes);
            }
            std::thread::sleep(Duration::from_millis(if self.spec.nodes > 16 { 200 } else { 50 }));
        }
    }

    fn end(&self, service: &str, signal: Signal) -> Result<()> {
        let Some(proc) = self.process(service) else { bail!("{service} is not running") };
        proc.signal(signal);
        if !proc.wait_gone(START_LIMIT) {
            bail!("{service} (pid {}) does not end\n{}", proc.pid, services::tail(&self.spec, service, 20));
        }
        self.reap();
        Ok(())
    }

    fn reap(&self) {
        self.children().retain_mut(|child| !matches!(child.try_wait(), Ok(Some(_))));
    }

    fn children(&self) -> MutexGuard<'_, Vec<Child>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        if std::thread::panicking() {
            eprintln!("lab in {}:\n{}", self.spec.dir.display(), self.logs(20));
        }
        if let Err(err) = crate::down::down(&self.spec.dir) {
            eprintln!("pliant-lab: {err:#}");
        }
        self.reap();
    }
}
