//! What has ended is forgotten, and what nobody owns any more is cancelled.

use super::{Core, Effect, Now, ORPHAN_AFTER};
use crate::journal::Resize;
use crate::view;
use pliant_model::resize::{Kind, State};
use pliant_model::{JobId, NodeName, Reason, Seconds};
use pliant_protocol::bridge::JobRecord;
use pliant_protocol::job::{Millis, SliceMark};
use pliant_protocol::peer;

impl Core {
    /// Shrinks end when Slurm no longer shows their slices.
    pub(super) fn confirm(&mut self, now: Now) {
        let gone = |r: &&Resize| {
            r.kind == Kind::Shrink
                && r.state == State::Released
                && r.slices.iter().all(|s| self.view.active(*s).is_none())
        };
        let confirmed: Vec<(JobId, Millis)> =
            self.resizes.iter().filter(gone).map(|r| (r.base, r.started_ms)).collect();
        for (base, started) in confirmed {
            let took = now.wall_ms.saturating_sub(started) / 1000;
            self.end(base, State::Confirmed, &Reason::Done { took }, now);
        }
        let released = |r: &Resize| r.kind == Kind::Shrink && r.state == State::Released;
        if now.mono < self.closer_until {
            let open: Vec<JobId> =
                self.resizes.iter().filter(|r| released(r)).flat_map(|r| r.slices.iter().copied()).collect();
            open.into_iter().for_each(|slice| self.ask(slice));
        }
    }

    /// Jobs that Slurm shows as ended, or not at all any more, are forgotten.
    pub(super) fn drop_ended(&mut self, now: Now) {
        let asked = self.view_at.map_or(0, |(at, _)| at);
        let ended = |id: &JobId, heard: Seconds| match self.view.jobs.get(id) {
            Some(record) => !view::holds(record),
            None => asked > heard + 5,
        };
        let gone: Vec<JobId> = self.jobs.iter().filter(|(id, j)| ended(id, j.heard)).map(|(id, _)| *id).collect();
        for base in gone {
            self.jobs.remove(&base);
            self.notes.remove(&base);
            self.end(base, State::Undone, &Reason::Failed { what: "the job has ended".into() }, now);
        }
        let orphaned: Vec<JobId> = self
            .resizes
            .iter()
            .filter(|r| !self.jobs.contains_key(&r.base) && self.view.active(r.base).is_none())
            .map(|r| r.base)
            .collect();
        for base in orphaned {
            let found = "the job had ended".to_owned();
            self.end(base, State::Undone, &Reason::Recovered { found }, now);
        }
    }

    /// Slices that nobody owns any more are cancelled, once they have been so for a while.
    ///
    /// Only who could speak for a slice can be missed: while the agent of the base's node is not connected, nothing is
    /// concluded from its silence, and the leases decide.
    pub(super) fn sweep(&mut self, now: Now) {
        let orphans: Vec<(JobId, JobId, bool)> = self
            .view
            .slices()
            .filter_map(|(slice, mark, record)| Some((slice, mark.base, self.orphan(slice, &mark, record)?)))
            .collect();
        self.suspects.retain(|job, _| orphans.iter().any(|(o, ..)| o == job));
        for (slice, base, sure) in orphans {
            let since = *self.suspects.entry(slice).or_insert(now.mono);
            if sure || now.mono.saturating_sub(since) >= ORPHAN_AFTER {
                self.suspects.insert(slice, now.mono);
                self.cancel(slice, base, Reason::Orphan { slice }, now);
            }
        }
    }

    /// `None`: it has an owner, or that cannot be told now. `Some(true)`: Slurm says that its base has ended.
    fn orphan(&self, slice: JobId, mark: &SliceMark, record: &JobRecord) -> Option<bool> {
        let Some(base) = self.view.active(mark.base).filter(|b| b.user_id == record.user_id) else {
            return Some(self.view.jobs.get(&mark.base).is_some_and(|b| !view::holds(b)));
        };
        let job = self.jobs.get(&mark.base);
        if let Some(job) = job.filter(|j| j.connected) {
            let known = job.status.slices.iter().any(|s| s.job == slice) || job.status.order.is_some();
            return (job.status.instance != mark.instance || !known).then_some(false);
        }
        let node = job.map(|j| j.node.clone()).or_else(|| base.batch_host.clone().map(NodeName));
        node.is_some_and(|n| self.agents.contains_key(&n)).then_some(false)
    }

    /// Cancels a slice: only a job that bears the mark of that base and belongs to its owner, as Slurm says.
    pub(super) fn cancel(&mut self, slice: JobId, base: JobId, reason: Reason, now: Now) {
        let owner = self.jobs.get(&base).map(|j| j.uid).or_else(|| self.view.jobs.get(&base).map(|b| b.user_id));
        let ours = self.view.jobs.get(&slice).is_some_and(|record| {
            view::mark(record).is_some_and(|m| m.base == base) && owner.is_none_or(|uid| uid == record.user_id)
        });
        if !ours {
            tracing::warn!(
                slice = slice.0,
                job = base.0,
                "not cancelled: Slurm does not show it as a slice of that job"
            );
            return;
        }
        let noted = self.journal.note(base, now.wall_ms, &reason);
        self.durable_after(noted);
        self.out.push(Effect::Cancel { slice, base, reason });
    }

    /// Cancelling through Slurm did not work: the agent of a node does it as root.
    pub fn cancel_by_agent(&mut self, slice: JobId, base: JobId, reason: Reason) {
        let node = self.view.jobs.get(&slice).and_then(|j| j.nodes.clone()).map(NodeName);
        let there = node.filter(|n| self.agents.contains_key(n)).or_else(|| self.agents.keys().next().cloned());
        match there {
            Some(node) => self.out.push(Effect::Agent(node, peer::ToAgent::Cancel { slice, base, reason })),
            None => tracing::warn!(slice = slice.0, "no right to cancel it and no agent connected: tried again later"),
        }
    }
}
