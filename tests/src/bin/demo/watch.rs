//! Looks at Slurm and at pliantd's journal all the time.

use crate::log::Log;
use crate::record::{Record, Role};
use pliant_lab::{Gpu, Job, Lab};
use pliant_model::JobId;
use pliant_tests::Training;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const PAUSE: Duration = Duration::from_millis(350);

/// What it remembers from one look to the next.
#[derive(Debug, Default)]
pub struct Watch {
    /// A job's GPUs are the same for all of its life.
    gpus: BTreeMap<JobId, BTreeSet<Gpu>>,
    /// Jobs that ran at the last look.
    running: BTreeMap<JobId, Role>,
    /// When that was.
    last: f64,
    /// Lines of the journal that were printed.
    seen: usize,
    /// Ranks in the last line of the training's log.
    ranks: u64,
}

impl Watch {
    /// Looks until told to stop, and once more then.
    pub fn run(mut self, lab: &Lab, record: &Record, elastic: &Training, stop: &AtomicBool) {
        loop {
            let last = stop.load(Ordering::Relaxed);
            self.look(lab, record);
            self.read_journal(lab, record, elastic);
            self.read_log(record, elastic);
            if last {
                return;
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// A look that fails is left out: the picture then has one sample less.
    fn look(&mut self, lab: &Lab, record: &Record) {
        let Ok(jobs) = lab.jobs() else { return };
        let at = record.now();
        let mut held = vec![];
        for job in &jobs {
            let Some(role) = record.role(job.id, &job.name) else {
                continue;
            };
            if job.state == "RUNNING" {
                let gpus = self.gpus_of(lab, job.id);
                held.extend(gpus.into_iter().map(|gpu| (gpu, job.id, role)));
            }
        }
        record.look(at, &held);
        self.follow(record, at, &jobs);
    }

    fn gpus_of(&mut self, lab: &Lab, job: JobId) -> BTreeSet<Gpu> {
        if let Some(known) = self.gpus.get(&job) {
            return known.clone();
        }
        let found = lab.gpus(job).unwrap_or_default();
        if !found.is_empty() {
            self.gpus.insert(job, found.clone());
        }
        found
    }

    /// Starts and ends of jobs; those of slices are in the journal.
    fn follow(&mut self, record: &Record, at: f64, jobs: &[Job]) {
        let mut running = BTreeMap::new();
        for job in jobs.iter().filter(|j| j.state == "RUNNING") {
            match record.role(job.id, &job.name) {
                None | Some(Role::Slice) => {}
                Some(role) => drop(running.insert(job.id, role)),
            }
        }
        let started = running.iter().filter(|(j, _)| !self.running.contains_key(j));
        let ended = self.running.iter().filter(|(j, _)| !running.contains_key(j));
        let lines = started.map(|l| (l, at, "runs")).chain(ended.map(|l| (l, self.last, "has ended")));
        for ((job, role), at, what) in lines {
            let text = format!("job {job} ({}) {what}", role.name());
            if *role == Role::Rigid {
                record.mark(at, &text);
            } else {
                record.say(at, &text);
            }
        }
        self.running = running;
        self.last = at;
    }

    fn read_journal(&mut self, lab: &Lab, record: &Record, elastic: &Training) {
        let Ok(history) = elastic.history(lab) else {
            return;
        };
        let fresh = history.get(self.seen..).unwrap_or_default();
        if fresh.is_empty() {
            return;
        }
        for event in fresh {
            record.event(event);
        }
        self.seen = history.len();
    }

    fn read_log(&mut self, record: &Record, elastic: &Training) {
        let Ok(log) = Log::read(elastic) else { return };
        let Some(world) = log.worlds.last() else {
            return;
        };
        if world.ranks != self.ranks {
            self.ranks = world.ranks;
            record.world(record.now(), world.ranks, world.first_step);
        }
    }
}
