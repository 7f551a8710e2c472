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
/// Time between two look-ups of any slices: each is a call of slurmctld, made by root.
const PACE: Duration = Duration::from_secs(1);
/// The most launchers of one base and uid that are remembered; the oldest is forgotten (pliantd's sweep remains).
const PER_BASE: usize = 8;
/// The most launchers that are remembered in all.
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
    /// When the last look-up was asked for.
    asked_at: Option<Now>,
}

impl Orphans {
    /// A launcher is gone for good.
    pub fn add(&mut self, key: Key, uid: u32, tokens: BTreeSet<String>, now: Now) {
        if tokens.is_empty() {
            return;
        }
        if !self.all.contains_key(&key) {
            self.make_room(key.0, uid);
        }
        let orphan = Orphan { uid, tokens, added: now, next_at: now, worked_at: None, failures: 0 };
        self.all.insert(key, orphan);
    }

    /// Forgets the oldest of the same base, or of the same uid: nobody pushes out what others have lost. Only a uid
    /// that has nothing here yet takes the place of the one that has the most.
    fn make_room(&mut self, base: JobId, uid: u32) {
        let of_base = |k: &Key, o: &Orphan| k.0 == base && o.uid == uid;
        if self.all.iter().filter(|(k, o)| of_base(k, o)).count() >= PER_BASE {
            self.forget_oldest(of_base);
        } else if self.all.len() >= MAX {
            let mut counts = BTreeMap::<u32, usize>::new();
            self.all.values().for_each(|o| *counts.entry(o.uid).or_default() += 1);
            let most = counts.iter().max_by_key(|(_, n)| **n).map_or(uid, |(u, _)| *u);
            let from = if counts.contains_key(&uid) { uid } else { most };
            self.forget_oldest(|_, o| o.uid == from);
        }
    }

    fn forget_oldest(&mut self, among: impl Fn(&Key, &Orphan) -> bool) {
        let oldest = self.all.iter().filter(|(k, o)| among(k, o)).min_by_key(|(_, o)| o.added).map(|(k, _)| k.clone());
        oldest.and_then(|k| self.all.remove(&k));
    }

    /// The launcher is back after all.
    pub fn returned(&mut self, key: &Key) {
        self.all.remove(key);
    }

    /// The base whose slices have to be looked up now; one look-up at a time, and one a second.
    pub fn next(&mut self, now: Now) -> Option<JobId> {
        if self.asked.is_some() || self.asked_at.is_some_and(|at| now.saturating_sub(at) < PACE) {
            return None;
        }
        let (key, _) = self.all.iter().filter(|(_, o)| o.next_at <= now).min_by_key(|(_, o)| o.next_at)?;
        self.asked = Some(key.clone());
        self.asked_at = Some(now);
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
    fn a_user_pushes_out_only_his_own_and_look_ups_are_paced() {
        let mut o = orphans();
        let add = |o: &mut Orphans, base: u32, n: u64, uid: u32| {
            o.add((JobId(base), format!("i{base}-{n}")), uid, ["t".to_owned()].into(), at(1 + n));
        };
        (0..2000).for_each(|n| add(&mut o, 8, n, 1000));
        assert_eq!(o.all.len(), 1 + PER_BASE, "of one base");
        assert!(o.all.contains_key(&(JobId(8), "i8-1999".into())), "the newest are kept");
        (100..400).for_each(|base| (0..PER_BASE as u64).for_each(|n| add(&mut o, base, n, 1000)));
        assert_eq!(o.all.len(), MAX);
        assert!(o.all.contains_key(&(JobId(7), "ab".into())), "another user's");
        add(&mut o, 9, 0, 1001);
        assert_eq!((o.all.len(), o.all.values().filter(|o| o.uid == 1001).count()), (MAX, 1));
        let ms = Duration::from_millis;
        let looked = (0..100_000u64).step_by(100).filter(|&n| {
            let asked = o.next(at(3000) + ms(n)).is_some();
            o.found(Ok(vec![]), at(3000) + ms(n));
            asked
        });
        assert_eq!(looked.count(), 100, "one a second");
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
