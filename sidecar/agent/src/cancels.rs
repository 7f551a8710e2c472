//! Slices that are to be cancelled. Each is first looked at by its id; it is cancelled only if its owner and its mark
//! are those that are expected, and the entry stays until Slurm shows that the job has ended. A look or a
//! cancellation that fails or hangs concludes nothing and is tried again with back-off.
//!
//! Pure: time is passed in, commands are returned. At most one look or cancellation is under way.

use crate::slurm_text::{Job, Look};
use pliant_model::{JobId, Reason};
use std::collections::BTreeMap;
use std::time::Duration;

/// Time since the agent's start, from a clock that never jumps.
pub type Now = Duration;

/// From the first failure on: 1 s, 2 s, 4 s, … 30 s.
const BACK_OFF_MAX: Duration = Duration::from_secs(30);
/// After a cancellation: look again whether the job ends.
const CHECK_AFTER: Duration = Duration::from_secs(5);

/// Which job it has to be; `None` is not checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Want {
    /// Base in the mark.
    pub base: JobId,
    /// Instance in the mark.
    pub instance: Option<String>,
    /// Token in the mark.
    pub token: Option<String>,
    /// Owner.
    pub uid: Option<u32>,
}

impl Want {
    fn fits(&self, job: &Job) -> bool {
        let Some(mark) = &job.mark else { return false };
        mark.base == self.base
            && self.instance.as_ref().is_none_or(|i| *i == mark.instance)
            && self.token.as_ref().is_none_or(|t| *t == mark.token)
            && self.uid.is_none_or(|u| u == job.uid)
    }
}

/// What came of a look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Cancel it now (scancel); ends in [`Cancels::cancelled`].
    Cancel(JobId),
    /// It is over, or was never ours; the entry is gone.
    Ended,
    /// The job is not the one that was meant; the entry is gone.
    NotOurs,
    /// Nothing can be concluded yet.
    Later(String),
    /// The entry was withdrawn meanwhile.
    Withdrawn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waiting,
    Looking,
    Cancelling,
}

#[derive(Debug)]
struct Entry {
    want: Want,
    reason: Reason,
    /// For want of a renewal: a renewal takes it back.
    from_lease: bool,
    next_at: Now,
    failures: u32,
    stage: Stage,
    reported: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Cancels {
    entries: BTreeMap<JobId, Entry>,
    busy: bool,
}

impl Cancels {
    /// Adds a slice. One that is there already keeps its place; an order that is no matter of a lease goes over one
    /// that is.
    pub fn add(&mut self, slice: JobId, want: Want, reason: Reason, from_lease: bool, now: Now) {
        let entry =
            Entry { want, reason, from_lease, next_at: now, failures: 0, stage: Stage::Waiting, reported: false };
        match self.entries.get_mut(&slice) {
            Some(old) if old.from_lease && !from_lease && old.stage == Stage::Waiting && !old.reported => *old = entry,
            Some(_) => {}
            None => {
                self.entries.insert(slice, entry);
            }
        }
    }

    /// Takes back what was to be cancelled for want of a renewal, unless that has been done already.
    pub fn renewed(&mut self, slice: JobId) {
        let take = |e: &Entry| e.from_lease && !e.reported && e.stage != Stage::Cancelling;
        if self.entries.get(&slice).is_some_and(take) {
            self.entries.remove(&slice);
        }
    }

    /// Takes back everything that only a lease has put here.
    pub fn all_renewed(&mut self) {
        let slices: Vec<JobId> = self.entries.keys().copied().collect();
        for slice in slices {
            self.renewed(slice);
        }
    }

    /// Whether a slice is on the list.
    pub fn contains(&self, slice: JobId) -> bool {
        self.entries.contains_key(&slice)
    }

    /// The slice to look at (squeue by id), if one is due and no command is under way.
    pub fn next(&mut self, now: Now) -> Option<JobId> {
        if self.busy {
            return None;
        }
        let due = self.entries.iter_mut().filter(|(_, e)| e.next_at <= now).min_by_key(|(_, e)| e.next_at);
        let (slice, entry) = due?;
        entry.stage = Stage::Looking;
        self.busy = true;
        Some(*slice)
    }

    /// The end of a look. [`Outcome::Cancel`] has to be followed by the command and [`Cancels::cancelled`].
    pub fn looked(&mut self, slice: JobId, look: Look, now: Now) -> Outcome {
        self.busy = false;
        let Some(entry) = self.entries.get_mut(&slice).filter(|e| e.stage == Stage::Looking) else {
            return Outcome::Withdrawn;
        };
        entry.stage = Stage::Waiting;
        match look {
            Look::Failed(text) => {
                entry.retry(now);
                Outcome::Later(text)
            }
            Look::Gone => {
                self.entries.remove(&slice);
                Outcome::Ended
            }
            Look::Job(job) if !entry.want.fits(&job) => {
                self.entries.remove(&slice);
                Outcome::NotOurs
            }
            Look::Job(job) if job.is_over() => {
                self.entries.remove(&slice);
                Outcome::Ended
            }
            Look::Job(_) => {
                entry.stage = Stage::Cancelling;
                self.busy = true;
                Outcome::Cancel(slice)
            }
        }
    }

    /// The end of a cancellation: `ok` is scancel's success. Gives the reason to report, once per slice.
    pub fn cancelled(&mut self, slice: JobId, ok: bool, now: Now) -> Option<Reason> {
        self.busy = false;
        let entry = self.entries.get_mut(&slice)?;
        entry.stage = Stage::Waiting;
        if !ok {
            entry.retry(now);
            return None;
        }
        let first = !std::mem::replace(&mut entry.reported, true);
        let reason = entry.reason.clone();
        entry.retry(now);
        entry.next_at = entry.next_at.max(now + CHECK_AFTER);
        first.then_some(reason)
    }
}

impl Entry {
    fn retry(&mut self, now: Now) {
        self.next_at = now + back_off(self.failures);
        self.failures = self.failures.saturating_add(1);
    }
}

/// 1 s, 2 s, 4 s, … 30 s.
pub fn back_off(failures: u32) -> Duration {
    Duration::from_secs(1 << failures.min(5)).min(BACK_OFF_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slurm_text::look;

    const S: JobId = JobId(12);

    fn at(seconds: u64) -> Now {
        Duration::from_secs(seconds)
    }

    fn want() -> Want {
        Want { base: JobId(7), instance: Some("ab".into()), token: None, uid: Some(999) }
    }

    fn shown(state: &str, uid: u32, base: u32, instance: &str) -> Look {
        look(S, true, &format!("12|{uid}|{state}|pliant base={base} instance={instance} token=t"), "")
    }

    fn with_one(from_lease: bool) -> Cancels {
        let mut c = Cancels::default();
        c.add(S, want(), Reason::Orphan { slice: S }, from_lease, at(0));
        assert_eq!(c.next(at(0)), Some(S));
        c
    }

    #[test]
    fn looked_at_cancelled_and_watched_until_it_has_ended() {
        let mut c = with_one(false);
        assert_eq!(c.next(at(0)), None, "one command at a time");
        assert_eq!(c.looked(S, shown("RUNNING", 999, 7, "ab"), at(1)), Outcome::Cancel(S));
        assert_eq!(c.next(at(1)), None);
        assert_eq!(c.cancelled(S, true, at(1)), Some(Reason::Orphan { slice: S }));
        assert_eq!(c.next(at(2)), None);
        assert_eq!(c.next(at(6)), Some(S));
        assert_eq!(c.looked(S, shown("RUNNING", 999, 7, "ab"), at(6)), Outcome::Cancel(S));
        assert_eq!(c.cancelled(S, true, at(6)), None, "reported once");
        assert_eq!(c.next(at(12)), Some(S));
        assert_eq!(c.looked(S, shown("COMPLETING", 999, 7, "ab"), at(12)), Outcome::Ended);
        assert!(!c.contains(S));
    }

    #[test]
    fn only_the_job_that_was_meant() {
        for (uid, base, instance) in [(1000, 7, "ab"), (999, 8, "ab"), (999, 7, "other")] {
            let mut c = with_one(false);
            assert_eq!(c.looked(S, shown("RUNNING", uid, base, instance), at(1)), Outcome::NotOurs);
            assert!(!c.contains(S));
        }
        let mut c = with_one(false);
        assert_eq!(c.looked(S, look(S, true, "12|999|RUNNING|mine", ""), at(1)), Outcome::NotOurs);
    }

    #[test]
    fn a_failed_answer_concludes_nothing_and_is_asked_again_later() {
        let mut c = with_one(false);
        let mut now = at(0);
        for pause in [1, 2, 4, 8, 16, 30, 30] {
            assert!(matches!(c.looked(S, Look::Failed("x".into()), now), Outcome::Later(_)));
            assert!(c.contains(S));
            assert_eq!(c.next(now + at(pause) - Duration::from_millis(1)), None);
            now += at(pause);
            assert_eq!(c.next(now), Some(S));
        }
        c.looked(S, shown("RUNNING", 999, 7, "ab"), now);
        assert_eq!(c.cancelled(S, false, now), None);
        assert!(c.contains(S) && c.next(now + at(30)).is_some());
    }

    #[test]
    fn a_renewal_takes_back_what_a_lease_began_and_nothing_else() {
        let mut c = with_one(true);
        c.renewed(S);
        assert_eq!(c.looked(S, shown("RUNNING", 999, 7, "ab"), at(1)), Outcome::Withdrawn);
        assert_eq!(c.next(at(9)), None);
        let mut c = with_one(false);
        c.all_renewed();
        assert_eq!(c.looked(S, shown("RUNNING", 999, 7, "ab"), at(1)), Outcome::Cancel(S));
    }

    #[test]
    fn a_failing_slice_does_not_hold_up_the_others() {
        let mut c = with_one(false);
        let other = JobId(13);
        c.add(other, want(), Reason::Orphan { slice: other }, false, at(1));
        c.looked(S, Look::Failed("x".into()), at(1));
        assert_eq!(c.next(at(1)), Some(other));
    }
}
