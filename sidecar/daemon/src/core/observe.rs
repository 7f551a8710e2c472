//! What launchers tell about resizes, compared with what is open.

use super::{AVOID_FOR, BACK_OFF, Core, Effect, LOOK_CLOSER, Now};
use crate::journal::Resize;
use crate::resizes::Seen;
use crate::view;
use pliant_model::resize::{Kind, State};
use pliant_model::{JobId, NodeName, Reason};
use pliant_protocol::job::{JobStatus, Order, OrderStatus};

impl Core {
    /// Compares the open resize of a job with what its launcher says.
    pub(super) fn reconcile(&mut self, base: JobId, now: Now) {
        let Some(job) = self.jobs.get(&base) else { return };
        let status = job.status.clone();
        for done in &status.done {
            self.observe(&status, done, now);
        }
        if let Some(order) = &status.order {
            self.observe(&status, order, now);
        }
        let Some(open) = self.resizes.of(base) else { return };
        if open.instance != status.instance {
            let found = "the job had been started again".to_owned();
            self.end(base, State::Undone, &Reason::Recovered { found }, now);
            return;
        }
        let told = status.order.iter().chain(&status.done).any(|o| o.id == open.id);
        let waits_for_slurm = open.kind == Kind::Shrink && open.state == State::Released;
        if !told && open.state != State::Proposed && !waits_for_slurm {
            let found = format!("the launcher no longer knows the {} (it was {})", open.kind, open.state);
            self.end(base, State::Undone, &Reason::Recovered { found }, now);
        }
    }

    /// One resize as a launcher tells it: ours, or one that it began itself.
    pub(super) fn observe(&mut self, status: &JobStatus, told: &OrderStatus, now: Now) {
        let base = status.base;
        if self.resizes.of(base).is_none_or(|r| r.id != told.id) && !self.adopt(status, told, now) {
            return;
        }
        let Some(open) = self.resizes.of(base) else { return };
        let started = open.started_ms;
        let size = size_of(status);
        // What we asked for stays asked for; of what a launcher names, only its own slices count.
        let named: Vec<JobId> = match &open.order {
            Some(Order::Shrink { slices, .. }) => slices.clone(),
            _ => told.slices.iter().copied().filter(|s| self.may_be_slice(*s, base)).collect(),
        };
        let asked: Vec<NodeName> = match &open.order {
            Some(Order::Grow { slices, .. }) => slices.iter().map(|s| s.node.clone()).collect(),
            _ => vec![],
        };
        let final_size = matches!(told.state, State::Settled | State::Released).then_some(size);
        let took = now.wall_ms.saturating_sub(started) / 1000;
        let done = Reason::Done { took };
        let reason = if told.state == State::Settled { &done } else { &told.reason };
        let seen = Seen { reason, slices: &named, after: final_size, times: &told.times, now_ms: now.wall_ms };
        let advanced = self.resizes.advance(base, told.state, &seen, &mut self.journal);
        let ended = self.durable_after(advanced).unwrap_or(false);
        let kind = told.kind;
        if let Some(job) = self.jobs.get_mut(&base) {
            match told.state {
                State::Undone if ended && kind == Kind::Grow => {
                    let wait = BACK_OFF.get(job.failures).or(BACK_OFF.last()).copied().unwrap_or(60);
                    job.failures += 1;
                    job.retry_at = Some(now.mono + wait);
                    if refused(&told.reason) {
                        let until = now.mono + AVOID_FOR;
                        job.avoid.extend(asked.into_iter().map(|n| (n, until)));
                    }
                }
                State::Settled => {
                    (job.failures, job.retry_at) = (0, None);
                    job.avoid.clear();
                }
                State::Released => self.closer_until = now.mono + LOOK_CLOSER,
                _ => {}
            }
        }
        if matches!(told.state, State::Released | State::Settled | State::Granted | State::Undone) {
            named.iter().chain(&told.slices).for_each(|s| self.ask(*s));
            self.out.push(Effect::PollSoon);
        }
    }

    /// Takes up a resize that the launcher began itself (preemption, a lost slice). False: nothing to observe.
    pub(super) fn adopt(&mut self, status: &JobStatus, told: &OrderStatus, now: Now) -> bool {
        if self.jobs.get(&status.base).is_some_and(|j| j.journaled.contains(&told.id)) {
            return false;
        }
        let known = self.journal.knows(&told.id);
        let known = self.durable_after(known);
        if known == Some(true)
            && let Some(job) = self.jobs.get_mut(&status.base)
        {
            job.journaled.insert(told.id.clone());
        }
        if known.unwrap_or(true) {
            return false;
        }
        if let Some(open) = self.resizes.of(status.base) {
            // One resize at a time: what the launcher has not taken up gives way to what is under way there.
            if open.state != State::Proposed {
                return false;
            }
            let found = format!("gave way to {} {}", told.kind, told.id);
            self.end(status.base, State::Undone, &Reason::Recovered { found }, now);
        }
        let size = size_of(status);
        let going = status.slices.iter().filter(|s| told.slices.contains(&s.job)).map(|s| s.gpus);
        let going = going.fold(0, u32::saturating_add);
        let slices = told.slices.iter().copied().filter(|s| self.may_be_slice(*s, status.base)).collect();
        let resize = Resize {
            id: told.id.clone(),
            base: status.base,
            instance: status.instance.clone(),
            kind: told.kind,
            state: State::Proposed,
            order: None,
            slices,
            before: size,
            after: if told.kind == Kind::Shrink { size.saturating_sub(going) } else { size },
            started_ms: told.times.first().map_or(now.wall_ms, |(_, t)| *t),
        };
        let begun = self.resizes.begin(resize, &told.reason, &mut self.journal);
        self.durable_after(begun).is_some()
    }

    /// Whether a job that a launcher names may be a slice of `base`: Slurm does not know it yet, or says so.
    fn may_be_slice(&self, job: JobId, base: JobId) -> bool {
        self.view.jobs.get(&job).is_none_or(|record| view::mark(record).is_some_and(|m| m.base == base))
    }
}

fn size_of(status: &JobStatus) -> u32 {
    status.world.iter().map(|m| m.gpus).fold(0, u32::saturating_add)
}

/// Whether trying the same node again soon is of no use. Behind other jobs in the queue any node would do as badly.
fn refused(reason: &Reason) -> bool {
    match reason {
        Reason::Withdrawn { slurm, .. } => slurm.contains("Resources") || slurm.contains("ReqNodeNotAvail"),
        Reason::Refused { .. } => true,
        _ => false,
    }
}
