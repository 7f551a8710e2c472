//! The leases of the slices on this node: a slice whose supervisor has not renewed for [`TERM`] is to be cancelled.
//!
//! Pure: time is passed in. Nothing here is lost for good when the agent restarts: a sweep finds the slices again.

use crate::cancels::{Now, Want};
use crate::slurm_text::Job;
use pliant_model::{JobId, Reason};
use std::collections::BTreeMap;
use std::time::Duration;

/// How long a slice lives without a renewal. The launcher pings every 5 s, and a supervisor ends its ranks after 20 s
/// without a ping; this leaves as much again for a restart of the agent.
pub const TERM: Duration = Duration::from_secs(40);

#[derive(Clone, Debug)]
struct Lease {
    base: JobId,
    instance: String,
    uid: u32,
    since: Now,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Leases(BTreeMap<JobId, Lease>);

impl Leases {
    /// A supervisor of the proven job `slice` under the proven `uid` has heard from its launcher.
    pub fn renew(&mut self, slice: JobId, uid: u32, base: JobId, instance: &str, now: Now) {
        self.0.insert(slice, Lease { base, instance: instance.to_owned(), uid, since: now });
    }

    /// A sweep has found a slice on this node: one that is not known has a lease from now on.
    pub fn found(&mut self, job: &Job, now: Now) {
        let Some(mark) = job.mark.as_ref().filter(|_| !job.is_over()) else {
            return;
        };
        let lease = || Lease { base: mark.base, instance: mark.instance.clone(), uid: job.uid, since: now };
        self.0.entry(job.id).or_insert_with(lease);
    }

    /// The agent itself was stopped: nobody could renew, so all have the whole term again.
    pub fn restart(&mut self, now: Now) {
        self.0.values_mut().for_each(|l| l.since = now);
    }

    /// Takes out the leases that have run out.
    pub fn run_out(&mut self, now: Now) -> Vec<(JobId, Want, Reason)> {
        let over = |l: &Lease| now.saturating_sub(l.since) >= TERM;
        let slices: Vec<JobId> = self.0.iter().filter(|(_, l)| over(l)).map(|(slice, _)| *slice).collect();
        let take = |slice: JobId| {
            let l = self.0.remove(&slice)?;
            let silent = now.saturating_sub(l.since).as_secs();
            let want = Want { base: l.base, instance: Some(l.instance), token: None, uid: Some(l.uid) };
            Some((slice, want, Reason::LeaseOver { slice, silent }))
        };
        slices.into_iter().filter_map(take).collect()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slurm_text::slices;

    fn at(seconds: u64) -> Now {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_lease_lives_as_long_as_it_is_renewed() {
        let mut l = Leases::default();
        for t in (0..200).step_by(10) {
            l.renew(JobId(12), 999, JobId(7), "ab", at(t));
            assert!(l.run_out(at(t + 9)).is_empty());
        }
        assert!(l.run_out(at(229)).is_empty());
        let over = l.run_out(at(230));
        let want = Want { base: JobId(7), instance: Some("ab".into()), token: None, uid: Some(999) };
        assert_eq!(over, [(JobId(12), want, Reason::LeaseOver { slice: JobId(12), silent: 40 })]);
        assert_eq!(l.len(), 0);
    }

    #[test]
    fn a_sweep_gives_a_term_to_the_unknown_and_renews_nothing() {
        let mut l = Leases::default();
        let text =
            "12|999|RUNNING|pliant base=7 instance=ab token=t\n13|999|COMPLETING|pliant base=7 instance=ab token=t\n";
        for t in [0, 30] {
            slices(text).iter().for_each(|j| l.found(j, at(t)));
        }
        assert_eq!(l.len(), 1);
        assert_eq!(l.run_out(at(40)).len(), 1);
    }

    #[test]
    fn an_agent_that_was_stopped_starts_all_terms_anew() {
        let mut l = Leases::default();
        l.renew(JobId(12), 999, JobId(7), "ab", at(0));
        l.restart(at(3000));
        assert!(l.run_out(at(3039)).is_empty());
        assert_eq!(l.run_out(at(3040)).len(), 1);
    }
}
