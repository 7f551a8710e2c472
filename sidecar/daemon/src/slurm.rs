//! The slurm port: pliantd's side of the bridge, a child process that links libslurm and may crash, hang or be
//! killed. It is started again with back-off; meanwhile the view only grows older.

use crate::view::{SlurmView, by_node};
use crate::{Input, now};
use anyhow::{Context as _, bail, ensure};
use pliant_model::{JobId, NodeName, Reason, Seconds};
use pliant_protocol::bridge::{Answer, Ask, JobRecord, Reply, Request};
use pliant_protocol::codec;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep, timeout};

/// How long the bridge may take for one answer. slurmctld may be busy; beyond this it is taken for hung.
const DEADLINE: Duration = Duration::from_secs(15);
/// Least time between two looks, whoever asks.
const LEAST_GAP: Duration = Duration::from_millis(500);
/// How long a full listing of jobs is good for, while the select plugin's events are followed.
const LIST_EVERY: Duration = Duration::from_secs(180);
/// Above so many single jobs a listing is cheaper for slurmctld.
const SINGLE: usize = 32;
/// How long an answer about partitions is used.
const PARTITIONS_EVERY: Duration = Duration::from_secs(60);
/// Longest wait between two attempts.
const MAX_BACK_OFF: Duration = Duration::from_secs(60);

/// What Slurm is to be asked, from the reactor to the port.
#[derive(Debug, Default)]
pub struct Wanted {
    soon: Notify,
    what: Mutex<What>,
}

#[derive(Debug, Default)]
struct What {
    /// Whether events are followed: then jobs are asked for one by one.
    following: bool,
    all: bool,
    jobs: BTreeSet<JobId>,
}

impl Wanted {
    /// Asks soon.
    pub fn ask(&self, all: bool, jobs: BTreeSet<JobId>) {
        let mut what = self.what();
        what.all |= all;
        what.jobs.extend(jobs);
        drop(what);
        self.soon.notify_one();
    }

    /// Events are followed, or no longer.
    pub fn follow(&self, following: bool) {
        let mut what = self.what();
        (what.following, what.all) = (following, true);
    }

    /// What is to be asked now; `None`: all jobs.
    fn take(&self, listed: Duration) -> Option<BTreeSet<JobId>> {
        let mut what = self.what();
        let jobs = std::mem::take(&mut what.jobs);
        let all = std::mem::take(&mut what.all);
        let single = what.following && !all && listed < LIST_EVERY && jobs.len() <= SINGLE;
        single.then_some(jobs)
    }

    fn what(&self) -> MutexGuard<'_, What> {
        self.what.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A slice to cancel.
#[derive(Debug)]
pub struct Cancel {
    /// The slice.
    pub slice: JobId,
    /// Its base.
    pub base: JobId,
    /// Why.
    pub reason: Reason,
}

/// How to run the bridge.
#[derive(Clone, Debug)]
pub struct Port {
    /// Its file.
    pub bridge: PathBuf,
    /// slurm.conf, where it is not Slurm's default.
    pub conf: PathBuf,
    /// Seconds between two looks.
    pub interval: Seconds,
}

/// Slurm's answer, and the single jobs that were asked for instead of all.
type Look = (SlurmView, Option<BTreeMap<JobId, Option<JobRecord>>>);
/// Names of partitions by node, and PriorityTier by partition.
type Partitions = (BTreeMap<NodeName, Vec<String>>, BTreeMap<String, u16>);

struct Bridge {
    // Dropping it kills the child.
    _child: Child,
    to: ChildStdin,
    from: ChildStdout,
    next: u64,
    partitions: Option<(Instant, Partitions)>,
}

impl Bridge {
    fn start(port: &Port) -> anyhow::Result<Bridge> {
        let mut command = Command::new(&port.bridge);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        if !port.conf.as_os_str().is_empty() {
            command.env("SLURM_CONF", &port.conf);
        }
        let mut child = command.spawn().with_context(|| format!("start the bridge {}", port.bridge.display()))?;
        let to = child.stdin.take().context("no stdin")?;
        let from = child.stdout.take().context("no stdout")?;
        Ok(Bridge { _child: child, to, from, next: 1, partitions: None })
    }

    async fn ask(&mut self, ask: Ask) -> anyhow::Result<Answer> {
        timeout(DEADLINE, self.exchange(ask)).await.context("the bridge did not answer in time")?
    }

    async fn exchange(&mut self, ask: Ask) -> anyhow::Result<Answer> {
        let id = self.next;
        self.next += 1;
        self.to.write_all(&codec::encode(&Request { id, ask })?).await?;
        self.to.flush().await?;
        let length = self.from.read_u32().await.context("the bridge has ended")?;
        let size = usize::try_from(length)?;
        ensure!((1..=codec::MAX_BRIDGE_FRAME).contains(&size), "the bridge announced {length} bytes");
        let mut payload = vec![0; size];
        self.from.read_exact(&mut payload).await?;
        let reply: Reply = codec::decode(&payload)?;
        ensure!(reply.id == id, "answer {} to question {id}", reply.id);
        Ok(reply.answer)
    }

    /// Partitions hardly ever change: asked for once a minute.
    async fn partitions(&mut self) -> anyhow::Result<Partitions> {
        if let Some((_, known)) = self.partitions.as_ref().filter(|(at, _)| at.elapsed() < PARTITIONS_EVERY) {
            return Ok(known.clone());
        }
        let found = match self.ask(Ask::Partitions).await? {
            Answer::Partitions { partitions, .. } => {
                let tiers = partitions.iter().map(|p| (p.name.clone(), p.priority_tier)).collect();
                (by_node(&partitions), tiers)
            }
            other => bail!("partitions: {}", refusal(&other)),
        };
        self.partitions = Some((Instant::now(), found.clone()));
        Ok(found)
    }

    /// Nodes first, then jobs: what starts in between is then counted twice rather than not at all. `only`: these jobs,
    /// of which Slurm may not know all.
    async fn look(&mut self, only: Option<&BTreeSet<JobId>>) -> anyhow::Result<Look> {
        let nodes = match self.ask(Ask::Nodes).await? {
            Answer::Nodes { nodes, .. } => nodes,
            other => bail!("nodes: {}", refusal(&other)),
        };
        let mut single = None;
        let mut jobs = BTreeMap::new();
        if let Some(only) = only {
            let mut found = BTreeMap::new();
            for id in only {
                found.insert(*id, self.jobs(Ask::Job { job: id.0 }).await?.into_iter().next());
            }
            single = Some(found);
        } else {
            jobs = self.jobs(Ask::Jobs).await?.into_iter().map(|j| (JobId(j.job_id), j)).collect();
        }
        let (partitions, tiers) = self.partitions().await?;
        Ok((SlurmView { partitions, tiers, jobs, nodes }, single))
    }

    async fn jobs(&mut self, ask: Ask) -> anyhow::Result<Vec<JobRecord>> {
        match self.ask(ask).await? {
            Answer::Jobs { jobs, .. } => Ok(jobs),
            other => bail!("jobs: {}", refusal(&other)),
        }
    }
}

fn refusal(answer: &Answer) -> String {
    match answer {
        Answer::Error { errno, text } => format!("{text} ({errno})"),
        other => format!("unexpected answer {other:?}").chars().take(200).collect(),
    }
}

/// Runs the port for ever: looks every interval and when `soon` is notified, and cancels what is asked for.
pub async fn run(port: Port, wanted: Arc<Wanted>, mut cancels: mpsc::Receiver<Cancel>, inputs: mpsc::Sender<Input>) {
    let interval = Duration::from_secs(port.interval);
    let mut bridge: Option<Bridge> = None;
    let mut failures = 0u32;
    let mut last = Instant::now() - interval;
    let mut listed: Option<Instant> = None;
    loop {
        let wait = match failures {
            0 => interval,
            n => (LEAST_GAP * 2u32.saturating_pow(n.min(6))).min(MAX_BACK_OFF),
        };
        tokio::select! {
            () = sleep(wait.saturating_sub(last.elapsed())) => {}
            () = wanted.soon.notified(), if failures == 0 => sleep(LEAST_GAP.saturating_sub(last.elapsed())).await,
            cancel = cancels.recv() => {
                let Some(cancel) = cancel else { return };
                let result = end(&port, &mut bridge, &cancel).await;
                let failed = result.err().map(|e| format!("{e:#}"));
                if inputs.send(Input::CancelDone { cancel, failed }).await.is_err() {
                    return;
                }
                continue;
            }
        }
        last = Instant::now();
        let asked = now();
        let only = wanted.take(listed.map_or(LIST_EVERY, |at| at.elapsed()));
        match look(&port, &mut bridge, only.as_ref()).await {
            Ok((view, jobs)) => {
                if jobs.is_none() {
                    listed = Some(last);
                    tracing::debug!("all jobs listed");
                }
                if failures > 0 {
                    tracing::info!("Slurm answers again");
                }
                failures = 0;
                if inputs.send(Input::View { view: Box::new(view), jobs, asked }).await.is_err() {
                    return;
                }
            }
            Err(e) => {
                if failures == 0 {
                    tracing::warn!("no answer from Slurm, its view grows stale: {e:#}");
                }
                failures = failures.saturating_add(1);
                bridge = None;
                listed = None;
            }
        }
    }
}

async fn look(port: &Port, bridge: &mut Option<Bridge>, only: Option<&BTreeSet<JobId>>) -> anyhow::Result<Look> {
    opened(port, bridge)?.look(only).await
}

fn opened<'a>(port: &Port, bridge: &'a mut Option<Bridge>) -> anyhow::Result<&'a mut Bridge> {
    if bridge.is_none() {
        *bridge = Some(Bridge::start(port)?);
    }
    bridge.as_mut().context("no bridge")
}

async fn end(port: &Port, bridge: &mut Option<Bridge>, cancel: &Cancel) -> anyhow::Result<()> {
    let reason = Some(cancel.reason.to_string());
    let ask = Ask::Cancel { job: cancel.slice.to_string(), signal: None, reason };
    let answer = opened(port, bridge)?.ask(ask).await;
    match answer {
        Ok(Answer::Done) => Ok(()),
        Ok(other) => bail!(refusal(&other)),
        Err(e) => {
            *bridge = None;
            Err(e)
        }
    }
}

/// Whether the account that we run as is an operator or administrator in Slurm; `None`: sacctmgr does not tell
/// (no slurmdbd).
pub async fn operator(conf: &std::path::Path) -> Option<bool> {
    let user = printed("id", &["-un"], conf).await?;
    let level =
        printed("sacctmgr", &["-nP", "show", "user", user.trim(), "format=adminlevel"], conf).await?.to_lowercase();
    Some(level.trim().starts_with("oper") || level.trim().starts_with("admin"))
}

/// The name of a user, from wherever the system has it.
pub async fn user_name(uid: u32) -> Option<String> {
    let line = printed("getent", &["passwd", &uid.to_string()], std::path::Path::new("")).await?;
    line.split(':').next().filter(|n| !n.is_empty()).map(str::to_owned)
}

/// What a command prints; `None` where it fails or takes more than 10 s.
async fn printed(program: &str, args: &[&str], conf: &std::path::Path) -> Option<String> {
    let mut command = Command::new(program);
    command.args(args).kill_on_drop(true).stdin(Stdio::null());
    if !conf.as_os_str().is_empty() {
        command.env("SLURM_CONF", conf);
    }
    let output = timeout(Duration::from_secs(10), command.output()).await.ok()?.ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}
