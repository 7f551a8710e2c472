//! Slurm's commands, each with a timeout after which its whole process group is killed.

use crate::proof::job_of_pidinfo;
use crate::slurm_text::{FORMAT, Job, Look, first_line, look, slices};
use pliant_model::JobId;
use pliant_protocol::job::slice_name;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::AsyncReadExt as _;
use tokio::process::{Child, Command};

/// How long any command may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The most output that is read, in bytes; a longer answer is a failure.
const MAX_OUTPUT: u64 = 4 << 20;
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/slurm/bin:/opt/slurm/sbin";

/// What a command left.
#[derive(Debug)]
pub struct Output {
    /// Exit code 0.
    pub ok: bool,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

/// Runs Slurm's commands for one node.
#[derive(Clone, Debug)]
pub struct Slurm {
    conf: Option<PathBuf>,
    node: String,
}

impl Slurm {
    /// `conf`: slurm.conf; empty: `SLURM_CONF`, or Slurm's own default.
    pub fn new(conf: PathBuf, node: &str) -> Slurm {
        let inherited = || std::env::var_os("SLURM_CONF").map(PathBuf::from);
        let conf = Some(conf).filter(|c| !c.as_os_str().is_empty()).or_else(inherited);
        Slurm { conf, node: node.to_owned() }
    }

    /// Runs a command. `Err`: it could not be started, hung, or wrote too much; text for the log.
    ///
    /// Its environment is nearly empty: variables such as SQUEUE_STATES or SLURM_CLUSTERS would change what it shows.
    pub async fn run(&self, program: &str, args: &[&str]) -> Result<Output, String> {
        let mut command = Command::new(program);
        let path = std::env::var_os("PATH").unwrap_or_else(|| PATH.into());
        command.args(args).env_clear().env("PATH", path).env("LC_ALL", "C").env("SLURMD_NODENAME", &self.node);
        if let Some(conf) = &self.conf {
            command.env("SLURM_CONF", conf);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.process_group(0).kill_on_drop(true);
        let mut child = command.spawn().map_err(|e| format!("{program}: {e}"))?;
        let group = child.id();
        match tokio::time::timeout(TIMEOUT, collect(&mut child)).await {
            Ok(Ok(output)) => Ok(output),
            Ok(Err(e)) => {
                kill(group, &mut child).await;
                Err(format!("{program}: {e}"))
            }
            Err(_) => {
                kill(group, &mut child).await;
                Err(format!("{program} has not answered in {} s", TIMEOUT.as_secs()))
            }
        }
    }

    /// One job by its id, ended ones too.
    pub async fn look(&self, id: JobId) -> Look {
        let text = id.to_string();
        match self.run("squeue", &["-h", "--all", "--states=all", "-j", &text, "-o", FORMAT]).await {
            Ok(o) => look(id, o.ok, &o.out, &o.err),
            Err(text) => Look::Failed(text),
        }
    }

    /// Ends a job.
    pub async fn cancel(&self, id: JobId) -> Result<(), String> {
        self.good("scancel", &[&id.to_string()]).await.map(drop)
    }

    /// The slices of a base by their job name, pending ones too.
    pub async fn find(&self, base: JobId) -> Result<Vec<Job>, String> {
        let name = format!("--name={}", slice_name(base));
        self.good("squeue", &["-h", "--all", "--states=all", &name, "-o", FORMAT]).await.map(|out| slices(&out))
    }

    /// The slices on this node.
    pub async fn sweep(&self) -> Result<Vec<Job>, String> {
        self.good("squeue", &["-h", "--all", "-w", &self.node, "-o", FORMAT]).await.map(|out| slices(&out))
    }

    /// slurmd's own look-up of a process; `None`: it knows of no job, or does not answer.
    pub async fn job_of(&self, pid: u32) -> Option<JobId> {
        job_of_pidinfo(&self.good("scontrol", &["pidinfo", &pid.to_string()]).await.ok()?)
    }

    /// What `pliant doctor` shows of this node.
    pub async fn facts(&self) -> Vec<(String, String)> {
        let version = self.good("slurmd", &["-V"]).await.map(|out| first_line(&out));
        let mut facts = vec![("slurmd".to_owned(), version.unwrap_or_else(|e| format!("unknown: {e}")))];
        let config = self.good("scontrol", &["show", "config"]).await;
        facts.extend(config_facts(config.as_deref()));
        facts
    }

    async fn good(&self, program: &str, args: &[&str]) -> Result<String, String> {
        let output = self.run(program, args).await?;
        if output.ok { Ok(output.out) } else { Err(format!("{program}: {}", first_line(&output.err))) }
    }
}

async fn collect(child: &mut Child) -> std::io::Result<Output> {
    let (Some(mut out), Some(mut err)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(std::io::Error::other("no pipes"));
    };
    // One that is too long ends both: the other end may never come to an end.
    let read = async |from: &mut (dyn tokio::io::AsyncRead + Unpin)| {
        let mut bytes = vec![];
        let length = from.take(MAX_OUTPUT).read_to_end(&mut bytes).await?;
        if u64::try_from(length).unwrap_or(MAX_OUTPUT) >= MAX_OUTPUT {
            return Err(std::io::Error::other("the answer is too long"));
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let (out, err) = tokio::try_join!(read(&mut out), read(&mut err))?;
    Ok(Output { ok: child.wait().await?.success(), out, err })
}

async fn kill(group: Option<u32>, child: &mut Child) {
    let pid = group.and_then(|g| i32::try_from(g).ok()).and_then(rustix::process::Pid::from_raw);
    if let Some(pid) = pid {
        let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::KILL);
    }
    // A process in an uninterruptible sleep must not hold up the agent.
    let _ = tokio::time::timeout(Duration::from_secs(2), child.wait()).await;
}

/// Facts from `scontrol show config`, which has the lines of cgroup.conf at its end.
fn config_facts(config: Result<&str, &String>) -> Vec<(String, String)> {
    let value = |key: &str| match config {
        Ok(text) => {
            let line = text.lines().find_map(|l| l.split_once('=').filter(|(k, _)| k.trim() == key));
            line.map_or_else(|| "unknown".to_owned(), |(_, v)| v.trim().to_owned())
        }
        Err(e) => format!("unknown: {e}"),
    };
    let task = value("TaskPlugin");
    let devices = match (task.split(',').any(|t| t.trim() == "task/cgroup"), value("ConstrainDevices").as_str()) {
        _ if config.is_err() => "unknown".to_owned(),
        (true, "yes") => "yes".to_owned(),
        (true, "unknown") => "unknown".to_owned(),
        _ => "no".to_owned(),
    };
    vec![
        ("device_cgroups".to_owned(), devices),
        ("task_plugin".to_owned(), task),
        ("proctrack".to_owned(), value("ProctrackType")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fact(config: &str, name: &str) -> String {
        config_facts(Ok(config)).into_iter().find(|(n, _)| n == name).unwrap().1
    }

    #[test]
    fn device_cgroups_need_the_plugin_and_the_constraint() {
        let with = "TaskPlugin              = task/affinity,task/cgroup\nCgroup Support Configuration:\nConstrainDevices        = yes\n";
        assert_eq!(fact(with, "device_cgroups"), "yes");
        assert_eq!(fact(&with.replace("yes", "no"), "device_cgroups"), "no");
        assert_eq!(fact("TaskPlugin = task/none\n", "device_cgroups"), "no");
        assert_eq!(fact("TaskPlugin = task/cgroup\n", "device_cgroups"), "unknown");
        let failed = "x".to_owned();
        assert_eq!(config_facts(Err(&failed))[0].1, "unknown");
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn commands_that_fail_are_told_apart() {
        let slurm = Slurm::new("/nonexistent/slurm.conf".into(), "n0");
        block_on(async {
            assert!(slurm.run("/nonexistent/squeue", &[]).await.unwrap_err().contains("/nonexistent/squeue"));
            let o = slurm.run("sh", &["-c", "echo $SLURMD_NODENAME $SLURM_CONF; echo no >&2; exit 3"]).await.unwrap();
            assert_eq!((o.ok, o.out.as_str(), o.err.as_str()), (false, "n0 /nonexistent/slurm.conf\n", "no\n"));
            assert!(slurm.run("sh", &["-c", "yes"]).await.unwrap_err().contains("too long"));
        });
    }

    #[test]
    fn a_command_that_hangs_is_killed_with_its_children() {
        let slurm = Slurm::new(PathBuf::new(), "n0");
        let pid = std::env::temp_dir().join(format!("pliant-agent-hang-{}", std::process::id()));
        let script = format!("sleep 1000 & echo $! > {}; wait", pid.display());
        let e = block_on(slurm.run("sh", &["-c", &script])).unwrap_err();
        assert_eq!(e, "sh has not answered in 10 s");
        let child: u32 = std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
        std::fs::remove_file(pid).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        assert!(!crate::proof::Processes::new("/proc", "n0").alive(child));
    }
}
