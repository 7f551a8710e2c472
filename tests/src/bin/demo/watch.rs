//! Looks at Slurm and at pliantd's journal all the time.

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
    /// What was last said of the rigid job.
    rigid: Option<(JobId, String)>,
    /// Lines of the journal that were printed.
    seen: usize,
}

impl Watch {
    /// Looks until told to stop, and once more then.
    pub fn run(mut self, lab: &Lab, record: &Record, elastic: &Training, stop: &AtomicBool) {
        loop {
            let last = stop.load(Ordering::Relaxed);
            self.look(lab, record);
            self.read_journal(lab, record, elastic);
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
        self.follow_rigid(record, at, &jobs);
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

    fn follow_rigid(&mut self, record: &Record, at: f64, jobs: &[Job]) {
        let now = jobs
            .iter()
            .find(|j| record.role(j.id, &j.name) == Some(Role::Rigid))
            .map(|j| (j.id, j.state.clone()));
        if now == self.rigid {
            return;
        }
        match (&now, &self.rigid) {
            (Some((id, state)), _) if state == "RUNNING" => {
                record.mark(at, &format!("job {id} (rigid) runs"));
            }
            (None, Some((id, _))) => record.mark(at, &format!("job {id} (rigid) has ended")),
            _ => {}
        }
        self.rigid = now;
    }

    fn read_journal(&mut self, lab: &Lab, record: &Record, elastic: &Training) {
        let Ok(history) = elastic.history(lab) else {
            return;
        };
        let fresh = history.get(self.seen..).unwrap_or_default();
        if fresh.is_empty() {
            return;
        }
        let progress = progress(lab, elastic);
        for event in fresh {
            record.event(event, &progress);
        }
        self.seen = history.len();
    }
}

/// `, step 120 of 640`, or nothing.
fn progress(lab: &Lab, elastic: &Training) -> String {
    let view = elastic.view(lab).ok().flatten();
    let progress = view.map(|v| v.status.progress).unwrap_or_default();
    match (progress.step, progress.total_steps) {
        (Some(step), Some(all)) => format!(", step {step} of {all}"),
        _ => String::new(),
    }
}
