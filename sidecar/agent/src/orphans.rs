//! Slices of launchers that are gone: what each had asked for is looked up by the job name of its slices, pending
//! ones too, and given to [`crate::cancels`]. The look-up is repeated for a while after it first succeeded, since a
//! salloc that outlived its launcher may submit late.
//!
//! Pure: time is passed in.

use crate::cancels::{Now, Want, back_off};
use crate::slurm_text::Job;
use pliant_model::JobId;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How long a launcher has to connect again.
pub const RETURN: Duration = Duration::from_secs(20);
/// Time between two look-ups of one launcher's slices.
const AGAIN: Duration = Duration::from_secs(10);
/// How long after the first look-up that worked the last one is made.
const LAST: Duration = Duration::from_secs(60);
/// The most launchers that are remembered; the oldest is forgotten (pliantd's own sweep remains).
const MAX: usize = 1024;

/// One run of a launcher.
pub type Key = (JobId, String);

#[derive(Debug)]
struct Orphan {
    uid: u32,
    tokens: BTreeSet<String>,
    added: Now,
    next_at: Now,
    worked_at: Option<Now>,
    failures: u32,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Orphans {
    all: BTreeMap<Key, Orphan>,
    asked: Option<Key>,
}

impl Orphans {
    /// A launcher is gone for good.
    pub fn add(&mut self, key: Key, uid: u32, tokens: BTreeSet<String>, now: Now) {
        if tokens.is_empty() {
            return;
        }
        if self.all.len() >= MAX {
            let oldest = self.all.iter().min_by_key(|(_, o)| o.added).map(|(k, _)| k.clone());
            oldest.and_then(|k| self.all.remove(&k));
        }
        let orphan = Orphan { uid, tokens, added: now, next_at: now, worked_at: None, failures: 0 };
        self.all.insert(key, orphan);
    }

    /// The launcher is back after all.
    pub fn returned(&mut self, key: &Key) {
        self.all.remove(key);
    }

    /// The base whose slices have to be looked up now; one look-up at a time.
    pub fn next(&mut self, now: Now) -> Option<JobId> {
        if self.asked.is_some() {
            return None;
        }
        let (key, _) = self.all.iter().filter(|(_, o)| o.next_at <= now).min_by_key(|(_, o)| o.next_at)?;
        self.asked = Some(key.clone());
        Some(key.0)
    }

    /// The end of a look-up; `Err`: Slurm did not answer. Gives what has to be cancelled.
    pub fn found(&mut self, jobs: Result<Vec<Job>, String>, now: Now) -> Vec<(JobId, Want)> {
        let Some(key) = self.asked.take() else {
            return vec![];
        };
        let Some(orphan) = self.all.get_mut(&key) else {
            return vec![];
        };
        let Ok(jobs) = jobs else {
            orphan.next_at = now + back_off(orphan.failures);
            orphan.failures = orphan.failures.saturating_add(1);
            return vec![];
        };
        let worked_at = *orphan.worked_at.get_or_insert(now);
        orphan.next_at = now + AGAIN;
        let pick = |job: Job| {
            let mark = job.mark.as_ref()?;
            let own = job.uid == orphan.uid && mark.base == key.0 && mark.instance == key.1;
            let held = own && orphan.tokens.contains(&mark.token) && !job.is_over();
            let (instance, token) = (Some(mark.instance.clone()), Some(mark.token.clone()));
            held.then_some((job.id, Want { base: mark.base, instance, token, uid: Some(job.uid) }))
        };
        let out: Vec<_> = jobs.into_iter().filter_map(pick).collect();
        if now.saturating_sub(worked_at) >= LAST && out.is_empty() {
            self.all.remove(&key);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slurm_text::slices;

    fn at(seconds: u64) -> Now {
        Duration::from_secs(seconds)
    }

    fn orphans() -> Orphans {
        let mut o = Orphans::default();
        o.add((JobId(7), "ab".into()), 999, ["t1".to_owned(), "t2".to_owned()].into(), at(0));
        o
    }

    #[test]
    fn only_its_own_tokens() {
        let mut o = orphans();
        assert_eq!(o.next(at(0)), Some(JobId(7)));
        assert_eq!(o.next(at(0)), None, "one at a time");
        let list = "12|999|RUNNING|pliant base=7 instance=ab token=t1
13|999|PENDING|pliant base=7 instance=ab token=t2
14|999|RUNNING|pliant base=7 instance=ab token=other
15|999|RUNNING|pliant base=7 instance=new token=t1
16|1000|RUNNING|pliant base=7 instance=ab token=t1
17|999|CANCELLED|pliant base=7 instance=ab token=t1
18|999|RUNNING|pliant base=8 instance=ab token=t1
";
        let ids: Vec<u32> = o.found(Ok(slices(list)), at(0)).into_iter().map(|(id, _)| id.0).collect();
        assert_eq!(ids, [12, 13]);
        assert_eq!(o.next(at(9)), None);
        assert_eq!(o.next(at(10)), Some(JobId(7)), "again: a salloc may submit late");
    }

    #[test]
    fn a_failed_look_up_is_repeated_and_an_empty_one_is_not_the_end() {
        let mut o = orphans();
        o.next(at(0));
        assert!(o.found(Err("x".into()), at(0)).is_empty());
        assert_eq!(o.next(at(0)), None);
        assert_eq!(o.next(at(1)), Some(JobId(7)));
        o.found(Ok(vec![]), at(1));
        assert_eq!(o.next(at(11)), Some(JobId(7)));
        o.found(Ok(vec![]), at(70));
        assert_eq!(o.next(at(1000)), None, "over at last");
    }

    #[test]
    fn a_launcher_that_is_back_keeps_its_slices() {
        let mut o = orphans();
        o.next(at(0));
        o.returned(&(JobId(7), "ab".into()));
        let list = "12|999|RUNNING|pliant base=7 instance=ab token=t1\n";
        assert!(o.found(Ok(slices(list)), at(1)).is_empty());
        assert_eq!(o.next(at(100)), None);
    }
}
