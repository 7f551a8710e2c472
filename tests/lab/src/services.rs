//! How each service is started.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::procs::Proc;
use crate::spec::{PLIANT_USER, Spec};
use crate::state::State;
use crate::users::User;

/// Directories where Debian keeps the daemons and tools.
pub(crate) const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A service's command line and user.
struct Service {
    argv: Vec<OsString>,
    user: Option<User>,
}

/// Builds the command line of a service: `munged`, `mariadbd`, `slurmdbd`, `slurmctld`, `slurmd.nX`, `pliantd`,
/// `agent.nX`.
fn service(spec: &Spec, name: &str, first: bool) -> Result<Service> {
    let dir = spec.dir.display();
    let mut user = None;
    let argv: Vec<String> = match name.split_once('.').map_or((name, ""), |(kind, node)| (kind, node)) {
        ("munged", "") => vec![
            "munged".into(),
            "--foreground".into(),
            "--force".into(),
            format!("--key-file={dir}/munge/munge.key"),
            format!("--socket={dir}/munge/munge.sock"),
            format!("--pid-file={dir}/munge/munged.pid"),
            format!("--log-file={dir}/log/munged.log"),
            format!("--seed-file={dir}/munge/munged.seed"),
            "--num-threads=8".into(),
        ],
        ("mariadbd", "") => crate::accounts::mariadbd(spec),
        ("slurmdbd", "") => vec!["slurmdbd".into(), "-D".into()],
        // -c only at the very first start: a restarted slurmctld has to find its jobs again.
        ("slurmctld", "") if first => vec!["slurmctld".into(), "-D".into(), "-c".into()],
        ("slurmctld", "") => vec!["slurmctld".into(), "-D".into()],
        ("slurmd", node) if is_node(spec, node) => {
            vec!["slurmd".into(), "-D".into(), "-N".into(), node.into()]
        }
        ("pliantd", "") => {
            user = Some(User::get(PLIANT_USER)?);
            vec![format!("{dir}/bin/pliantd"), "--config".into(), format!("{dir}/etc/pliant.toml")]
        }
        ("agent", node) if is_node(spec, node) => vec![
            format!("{dir}/bin/pliant-agent"),
            "--config".into(),
            format!("{dir}/etc/pliant.toml"),
            "--node".into(),
            node.into(),
        ],
        _ => bail!(
            "unknown service '{name}': munged, mariadbd, slurmdbd, slurmctld, slurmd.n0 ..., pliantd, agent.n0 ..."
        ),
    };
    Ok(Service { argv: argv.into_iter().map(Into::into).collect(), user })
}

fn is_node(spec: &Spec, node: &str) -> bool {
    spec.node_names().iter().any(|n| n == node)
}

/// The environment that every process of a lab gets.
pub(crate) fn environment(spec: &Spec, cmd: &mut Command) {
    cmd.env_clear();
    cmd.env("PATH", format!("{}/bin:{}:{SYSTEM_PATH}", spec.dir.display(), spec.target.display()));
    cmd.env("LANG", "C.UTF-8");
    cmd.env("SLURM_CONF", spec.slurm_conf());
    cmd.env("PLIANT_LAB_DIR", &spec.dir);
    if spec.pliant {
        cmd.env("PLIANT_CONFIG", spec.pliant_toml());
    }
    let python = spec.path("python");
    if python.is_dir() {
        cmd.env("PYTHONPATH", python);
    }
}

/// Starts a service in a session of its own and records it.
pub(crate) fn spawn(spec: &Spec, name: &str, env: &[(&str, &str)], first: bool) -> Result<Child> {
    let what = service(spec, name, first)?;
    // setsid of util-linux replaces itself by the program: the pid stays.
    let mut cmd = Command::new("setsid");
    cmd.args(&what.argv);
    environment(spec, &mut cmd);
    cmd.env("MYSQL_UNIX_PORT", spec.path("mysql/mysql.sock"));
    let (kind, node) = name.split_once('.').unwrap_or((name, ""));
    if kind == "agent" && spec.scenario.is_some() {
        cmd.env("PLIANT_FAKE_NVML", spec.scenario_of(node));
    }
    for (service, key, value) in &spec.service_env {
        if service == name || service == kind {
            cmd.env(key, value);
        }
    }
    cmd.envs(env.iter().copied());
    if let Some(user) = &what.user {
        cmd.uid(user.uid).gid(user.gid);
        cmd.env("HOME", &spec.dir).env("USER", &user.name).env("LOGNAME", &user.name);
    }
    let log = output_file(spec, name);
    let out = OpenOptions::new().create(true).append(true).open(&log);
    let out = out.with_context(|| format!("cannot open {}", log.display()))?;
    let err = out.try_clone().with_context(|| format!("cannot open {}", log.display()))?;
    cmd.current_dir(&spec.dir).stdin(Stdio::null()).stdout(out).stderr(err);
    let child = cmd.spawn().with_context(|| format!("cannot start {name}"))?;
    if let Some(proc) = Proc::of(child.id()) {
        State::update(&spec.dir, |state| {
            state.services.insert(name.to_owned(), proc);
        })?;
    }
    Ok(child)
}

/// Where stdout and stderr of a service go: its log, or a file beside it if the service writes its log itself.
fn output_file(spec: &Spec, name: &str) -> std::path::PathBuf {
    if name == "pliantd" || name.starts_with("agent.") { spec.log(name) } else { spec.path(format!("log/{name}.out")) }
}

/// The last lines that a service left, from its log and its output.
pub(crate) fn tail(spec: &Spec, name: &str, lines: usize) -> String {
    let mut text = String::new();
    let mut files = vec![spec.log(name), output_file(spec, name)];
    files.dedup();
    for file in files {
        let content = std::fs::read(&file).unwrap_or_default();
        let content = String::from_utf8_lossy(&content);
        let all: Vec<&str> = content.lines().collect();
        if all.is_empty() {
            continue;
        }
        text.push_str(&format!("--- {}\n", file.display()));
        for line in all.iter().skip(all.len().saturating_sub(lines)) {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

/// Copies a program or library into the lab, so that a rebuild does not disturb it and lab users reach it also where
/// the checkout lies below a closed directory.
pub(crate) fn install(from: &Path, to: &Path) -> Result<()> {
    let new = to.with_extension("new");
    let _ = std::fs::remove_file(&new);
    if std::fs::hard_link(from, &new).is_err() {
        std::fs::copy(from, &new).with_context(|| format!("cannot copy {} to {}", from.display(), new.display()))?;
    }
    std::fs::rename(&new, to).with_context(|| format!("cannot write {}", to.display()))
}
