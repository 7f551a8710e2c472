//! Slurm's commands in a lab.

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use pliant_model::JobId;

use crate::lab::Lab;
use crate::services::environment;
use crate::spec::LAB_USERS;
use crate::users::User;

/// A job as squeue shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Job id (of array tasks: each task's own).
    pub id: JobId,
    /// State in full, such as `RUNNING`.
    pub state: String,
    /// Why it waits, such as `Resources`; `None` where it runs.
    pub reason: String,
    /// Owner.
    pub user: String,
    /// Partition.
    pub partition: String,
    /// Nodes as a hostlist; empty while it waits.
    pub nodes: String,
    /// Job name.
    pub name: String,
}

/// A GPU of the lab.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gpu {
    /// Node name.
    pub node: String,
    /// Slurm's GRES index; the device minor is the same in a lab.
    pub index: u32,
}

impl Lab {
    /// A command that runs as `user` with the lab's environment, in the user's home in the lab.
    pub fn command(&self, user: &str, program: &str) -> Result<Command> {
        let user = User::get(user)?;
        let mut cmd = Command::new(program);
        environment(self.spec(), &mut cmd);
        let home = self.home(&user.name);
        cmd.env("HOME", &home).env("USER", &user.name).env("LOGNAME", &user.name).env("SHELL", "/bin/bash");
        cmd.current_dir(home).stdin(Stdio::null());
        if user.uid != 0 {
            // As root, this drops the supplementary groups too.
            cmd.uid(user.uid).gid(user.gid);
        }
        Ok(cmd)
    }

    /// Runs a command to its end, 60 s at most, and gives what it printed; a failure carries what it wrote to stderr.
    pub fn run(&self, user: &str, argv: &[&str]) -> Result<String> {
        self.run_within(Duration::from_secs(60), user, argv)
    }

    /// Like [`Lab::run`] with a limit of its own (whole seconds, at least 1).
    pub fn run_within(&self, limit: Duration, user: &str, argv: &[&str]) -> Result<String> {
        let seconds = limit.as_secs().max(1);
        let mut cmd = self.command(user, "timeout")?;
        cmd.arg("--kill-after=2").arg(seconds.to_string()).args(argv);
        let out = cmd.output().with_context(|| format!("cannot run {argv:?}"))?;
        if !out.status.success() {
            let late =
                if out.status.code() == Some(124) { format!(", not done after {seconds} s") } else { String::new() };
            bail!("{argv:?} as {user}: {}{late}: {}", out.status, String::from_utf8_lossy(&out.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&out.stdout).into_owned())
    }

    /// Submits a batch job; `args` are sbatch's.
    pub fn sbatch(&self, user: &str, args: &[&str]) -> Result<JobId> {
        let argv: Vec<&str> = ["sbatch", "--parsable"].iter().chain(args).copied().collect();
        let out = self.run(user, &argv)?;
        let id = out.trim().split(';').next().unwrap_or_default();
        id.parse().map_err(|_| anyhow::anyhow!("sbatch printed '{}' instead of a job id", out.trim()))
    }

    /// All jobs that slurmctld still shows in squeue.
    pub fn jobs(&self) -> Result<Vec<Job>> {
        let out = self.run("root", &["squeue", "-h", "-a", "-r", "-o", "%A|%T|%r|%u|%P|%N|%j"])?;
        out.lines().map(|line| parse_job(line).with_context(|| format!("squeue's line '{line}'"))).collect()
    }

    /// A job, also for some minutes after its end (MinJobAge); `None` if slurmctld does not know it.
    pub fn job(&self, id: JobId) -> Result<Option<Job>> {
        let out = self.run("root", &["squeue", "-h", "-a", "-r", "-t", "all", "-o", "%A|%T|%r|%u|%P|%N|%j"])?;
        Ok(out.lines().filter_map(parse_job).find(|job| job.id == id))
    }

    /// State of a job, such as `RUNNING`; empty if slurmctld does not know it.
    pub fn job_state(&self, id: JobId) -> Result<String> {
        Ok(self.job(id)?.map(|job| job.state).unwrap_or_default())
    }

    /// Waits until a job has this state.
    pub fn wait_state(&self, id: JobId, state: &str, limit: Duration) -> Result<()> {
        let mut last = String::new();
        let found = self.wait_for(limit, &format!("job {id} becomes {state}"), || {
            last = self.job_state(id).unwrap_or_else(|err| format!("{err:#}"));
            last == state
        });
        found.with_context(|| format!("job {id} is '{last}'"))
    }

    /// The GPUs that a job holds, by node and index.
    pub fn gpus(&self, id: JobId) -> Result<BTreeSet<Gpu>> {
        let text = self.run("root", &["scontrol", "-d", "-o", "show", "job", &id.to_string()])?;
        let mut found = BTreeSet::new();
        let mut nodes = Vec::new();
        for word in text.split_whitespace() {
            if let Some(list) = word.strip_prefix("Nodes=") {
                nodes = pliant_model::hostlist::expand(list).with_context(|| format!("job {id}: {word}"))?;
            } else if let Some(gres) = word.strip_prefix("GRES=") {
                for node in &nodes {
                    let indexes = pliant_model::gres::gpu_indexes(gres);
                    found.extend(indexes.into_iter().map(|index| Gpu { node: node.to_string(), index }));
                }
            }
        }
        Ok(found)
    }

    /// Waits for the end of a job and gives its state, such as `COMPLETED`.
    pub fn wait_end(&self, id: JobId, limit: Duration) -> Result<String> {
        self.wait_some(limit, &format!("the end of job {id}"), || {
            let state = self.job_state(id).ok()?;
            let over = !["", "PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED"].contains(&state.as_str());
            over.then_some(state)
        })
    }

    /// Cancels all jobs and waits until no GPU is in use, for the next case of a test.
    pub fn clear(&self) -> Result<()> {
        for user in LAB_USERS {
            self.run("root", &["scancel", "-u", user])?;
        }
        self.wait_for(Duration::from_secs(60), "all jobs are gone", || self.jobs().is_ok_and(|jobs| jobs.is_empty()))
    }
}

fn parse_job(line: &str) -> Option<Job> {
    // The name comes last: it is the only field that may hold the separator.
    let mut fields = line.splitn(7, '|').map(str::to_owned);
    Some(Job {
        id: fields.next()?.parse().ok()?,
        state: fields.next()?,
        reason: fields.next()?,
        user: fields.next()?,
        partition: fields.next()?,
        nodes: fields.next()?,
        name: fields.next()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_name_may_hold_the_separator() {
        let job = parse_job("7|PENDING|Resources|pliant-lab-1|gpu||a|b").expect("job");
        assert_eq!((job.id, job.nodes.as_str(), job.name.as_str()), (JobId(7), "", "a|b"));
        assert_eq!(parse_job("x|y"), None);
    }
}
