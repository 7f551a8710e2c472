//! What the select plugin tells, and what Slurm answers about single jobs: the view is kept up to date between two
//! full listings.

use super::{Core, Effect, Now, gpus, waits_unjudged};
use crate::view::{self, SlurmView};
use pliant_model::{JobId, Seconds};
use pliant_protocol::board::{Event, Outcome, Record};
use pliant_protocol::bridge::JobRecord;
use std::collections::{BTreeMap, VecDeque};

/// Outcomes kept for `pliant explain`.
const OUTCOMES: usize = 1000;

/// How the plugin follows plans, since pliantd has started.
#[derive(Debug, Default)]
pub struct Steering {
    /// Whether the event ring is followed.
    pub following: bool,
    /// Why the plugin only delegates, where it does.
    pub idle: Option<String>,
    /// Starts with exactly the nodes and GPUs of the plan.
    pub honoured: u64,
    /// Starts otherwise, although there was a plan.
    pub missed: u64,
    /// Events lost.
    pub gaps: u64,
    /// Milliseconds from the submission of the last new job until it was known here.
    pub last_seen_after_ms: Option<u64>,
    /// The last outcome by job, oldest first.
    outcomes: VecDeque<(JobId, Outcome)>,
}

impl Steering {
    /// What became of the plan of a job.
    pub fn outcome(&self, job: JobId) -> Option<&Outcome> {
        self.outcomes.iter().rev().find(|(id, _)| *id == job).map(|(_, outcome)| outcome)
    }

    fn note(&mut self, job: JobId, outcome: Outcome) {
        self.outcomes.retain(|(id, _)| *id != job);
        self.outcomes.push_back((job, outcome));
        if self.outcomes.len() > OUTCOMES {
            self.outcomes.pop_front();
        }
    }
}

impl Core {
    /// The ring is followed from now on, or no longer; either way all is to be asked for.
    pub fn on_ring(&mut self, following: bool) {
        if self.steering.following != following {
            let how = if following { "followed" } else { "not there: Slurm is polled" };
            tracing::info!("the event ring of the select plugin is {how}");
        }
        self.steering.following = following;
        self.ask_all();
    }

    /// So many events are lost: all is to be asked for.
    pub fn on_gap(&mut self, lost: u64) {
        self.steering.gaps = self.steering.gaps.saturating_add(lost);
        tracing::warn!(lost, "events of the select plugin were lost: all jobs are listed");
        self.ask_all();
    }

    /// What happened inside slurmctld.
    pub fn on_events(&mut self, records: Vec<Record>, now: Now) {
        let mut changed = false;
        let first = records.first().map(|r| r.ms);
        for Record { ms, event } in records {
            changed |= self.happened(event, ms, now);
        }
        if changed {
            self.event_ms = self.event_ms.or(first);
            self.view_changed();
        }
    }

    fn happened(&mut self, event: Event, ms: u64, now: Now) -> bool {
        let Some(id) = event.job().map(JobId) else {
            match event {
                Event::Init { idle, .. } => self.steering.idle = idle,
                _ => self.ask_all(),
            }
            return false;
        };
        match event {
            Event::Seen { job, .. } => self.seen(id, *job, now),
            Event::Test { fits, outcome, .. } => self.tested(id, fits, outcome),
            Event::Begin { outcome, .. } => {
                match &outcome {
                    Some(Outcome::Honoured) => self.steering.honoured += 1,
                    // Without a plan there is nothing to miss; one that did not fit was told by the test.
                    Some(_) => self.steering.missed += 1,
                    None if self.steering.outcome(id).is_some() => self.steering.missed += 1,
                    None => {}
                }
                if let Some(outcome) = outcome {
                    self.steering.note(id, outcome);
                }
                false
            }
            Event::Start { nodes, gpus, cpus, .. } => self.started(id, nodes, gpus, cpus, ms),
            Event::Fini { .. } => {
                // Slurm may give its GPUs away; it counts until Slurm itself shows it ended.
                if let Some(job) = self.view.jobs.get_mut(&id).filter(|j| view::holds(j)) {
                    if !job.flags.iter().any(|f| f == "COMPLETING") {
                        job.flags.push("COMPLETING".into());
                    }
                    self.ask(id);
                    self.unplanned = true;
                }
                false
            }
            Event::Took { .. } => false,
            Event::Expand { from, .. } => {
                self.ask(JobId(from));
                self.ask(id);
                false
            }
            _ => {
                self.ask(id);
                false
            }
        }
    }

    fn seen(&mut self, id: JobId, mut job: JobRecord, now: Now) -> bool {
        if let Some(known) = self.view.jobs.get(&id) {
            if known.state != "PENDING" {
                return false;
            }
            // What a test does not see is kept.
            (job.reason, job.array_tasks) = (known.reason.clone(), known.array_tasks.clone());
            job.qos.clone_from(&known.qos);
        } else {
            let since = job.submit_time.map_or(0, |t| t.unsigned_abs() * 1000);
            self.steering.last_seen_after_ms = Some(now.wall_ms.saturating_sub(since));
            tracing::debug!(job = id.0, "seen");
        }
        self.placer.remember(&job);
        if view::wants_gpus(&job) {
            self.unjudged.insert(id, now.mono);
        }
        self.view.jobs.insert(id, job);
        true
    }

    fn tested(&mut self, id: JobId, fits: bool, outcome: Option<Outcome>) -> bool {
        if let Some(outcome) = outcome {
            self.steering.note(id, outcome);
        }
        let Some(job) = self.view.jobs.get_mut(&id).filter(|j| j.state == "PENDING" && !fits) else { return false };
        self.unjudged.remove(&id);
        if matches!(job.reason.as_deref(), None | Some("None" | "Priority")) {
            job.reason = Some("Resources".into());
            return true;
        }
        false
    }

    fn started(&mut self, id: JobId, nodes: String, gpus: Vec<String>, cpus: u32, ms: u64) -> bool {
        self.unjudged.remove(&id);
        let Some(job) = self.view.jobs.get_mut(&id).filter(|j| j.array_tasks.is_none()) else {
            // A task of an array gets its id only now.
            self.ask(id);
            return false;
        };
        job.state = "RUNNING".into();
        job.reason = None;
        job.flags.retain(|f| f != "COMPLETING");
        let total: u32 = gpus.iter().map(|g| pliant_model::gres::gpu_total(g)).sum();
        job.tres_alloc = Some(format!("cpu={cpus},gres/gpu={total}"));
        (job.nodes, job.gres_detail, job.num_cpus) = (Some(nodes), gpus, Some(cpus));
        job.start_time = i64::try_from(ms / 1000).ok();
        // Time limit and the rest of what only Slurm knows.
        self.ask(id);
        true
    }

    /// Slurm's answer about nodes and single jobs; `None`: it does not know that job.
    pub fn on_look(&mut self, look: SlurmView, jobs: BTreeMap<JobId, Option<JobRecord>>, asked: Now, now: Now) {
        let mut view = std::mem::take(&mut self.view);
        for (id, record) in jobs {
            match record {
                Some(record) => drop(view.jobs.insert(id, record)),
                None => drop(view.jobs.remove(&id)),
            }
        }
        let SlurmView { nodes, partitions, tiers, .. } = look;
        self.on_view(SlurmView { nodes, partitions, tiers, jobs: view.jobs }, asked, now);
    }

    /// Jobs that Slurm has not judged for a while, and those that end: they are asked for one by one.
    pub(super) fn ask_unsure(&mut self, now: Now) {
        let unjudged: Vec<JobId> = self
            .unjudged
            .iter()
            .filter(|(_, since)| now.mono.saturating_sub(**since) >= UNJUDGED_FOR)
            .map(|(id, _)| *id)
            .collect();
        let ending = self.view.jobs.iter().filter(|(_, j)| j.flags.iter().any(|f| f == "COMPLETING"));
        let all: Vec<JobId> = ending.map(|(id, _)| *id).chain(unjudged).collect();
        for id in all {
            let waits = self.view.jobs.get(&id).is_some_and(|j| waits_unjudged(j, now));
            let ends = self.view.jobs.get(&id).is_some_and(view::holds);
            if waits || ends {
                self.ask(id);
            } else {
                self.unjudged.remove(&id);
            }
        }
    }

    /// Has Slurm asked about a job soon; without the ring all are asked for.
    pub(super) fn ask(&mut self, job: JobId) {
        self.asks.insert(job);
        self.out.push(Effect::PollSoon);
    }

    fn ask_all(&mut self) {
        self.ask_for_all = true;
        self.out.push(Effect::PollSoon);
    }

    /// What follows from other jobs in the view.
    pub(super) fn view_changed(&mut self) {
        self.used = view::used_by_jobs(&self.view);
        self.holders = gpus::Holders::of_view(&self.view);
        self.due = true;
        self.unplanned = true;
    }
}

/// Seconds after which a job that Slurm has not tried to start is asked for.
const UNJUDGED_FOR: Seconds = 2;
