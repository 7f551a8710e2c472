//! What is not as it should be: processes outside their allocation or far from their GPU, memory without an owner,
//! processes that do not end, clocks held down, memory errors. Each is told once, until it is over.

use pliant_model::JobId;
use pliant_model::conf::index_list;
use pliant_model::gpu::{Gpu, Happening, NodeGpus, Sample};
use std::collections::BTreeMap;

/// Memory that a driver keeps for itself is below this, MiB.
const OWN_MEMORY: u64 = 512;
/// Looks in a row in which a process has to be in state D: it passes through it whenever it waits for a disk.
const STUCK_AFTER: u32 = 5;
/// Looks without clocks held down after which they are told again.
const QUIET: u32 = 60;

/// What /proc tells of a process on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Owner.
    pub uid: u32,
    /// Its Slurm job, proven.
    pub job: Option<JobId>,
    /// State letter.
    pub state: char,
    /// CPUs that it may use.
    pub cpus: Vec<u32>,
    /// GRES indexes of its step; `None`: nothing can be concluded.
    pub gpus: Option<Vec<u32>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Outside,
    Orphaned,
    Stuck,
    Far,
    Throttled,
    Ecc,
}

/// What has been told and is not over yet.
#[derive(Debug, Default)]
pub struct Audit {
    /// Kind, GPU and process (0 where there is none); the value says what was told.
    open: BTreeMap<(Kind, String, u32), Happening>,
    /// Looks in a row in which something that was told is not there.
    quiet: BTreeMap<(Kind, String, u32), u32>,
    /// Looks in a row in state D.
    waiting: BTreeMap<(String, u32), u32>,
    /// The first count of uncorrected errors by GPU.
    errors: BTreeMap<String, u64>,
}

impl Audit {
    /// One look: gives what is new by UUID, and completes the samples by what is known of the processes.
    pub fn look(
        &mut self,
        node: &NodeGpus,
        samples: &mut [Sample],
        facts: &dyn Fn(u32) -> Option<Facts>,
    ) -> Vec<(String, Happening)> {
        let mut now: BTreeMap<(Kind, String, u32), Happening> = BTreeMap::new();
        for sample in samples.iter_mut() {
            let Some(gpu) = node.gpus.iter().find(|g| g.uuid == sample.uuid) else { continue };
            let mut add = |kind, pid, what| drop(now.insert((kind, gpu.uuid.clone(), pid), what));
            let mut owners = 0;
            for process in sample.processes.iter_mut().flatten() {
                let Some(f) = facts(process.pid) else { continue };
                owners += 1;
                (process.uid, process.job, process.state) = (Some(f.uid), f.job, Some(f.state));
                for (kind, what) in self.of_process(gpu, process.pid, &f) {
                    add(kind, process.pid, what);
                }
            }
            let memory =
                sample.memory_used_mib.filter(|m| *m > OWN_MEMORY && owners == 0 && sample.processes.is_some());
            if let Some(memory_mib) = memory {
                add(Kind::Orphaned, 0, Happening::Orphaned { memory_mib });
            }
            let why = sample.throttle.clone().filter(|w| !w.is_empty());
            if let Some(why) = why {
                add(Kind::Throttled, 0, Happening::Throttled { why });
            }
            if let Some(uncorrected) = sample.ecc_uncorrected {
                let first = *self.errors.entry(gpu.uuid.clone()).or_insert(uncorrected);
                if uncorrected > first {
                    add(Kind::Ecc, 0, Happening::Ecc { uncorrected });
                }
            }
        }
        self.waiting.retain(|(uuid, pid), _| now_has(samples, uuid, *pid));
        self.news(now)
    }

    /// What is told now: what is there and was not, and counts that have grown. Clocks at a limit come and go: they are
    /// told again only when they have been free for a while.
    fn news(&mut self, now: BTreeMap<(Kind, String, u32), Happening>) -> Vec<(String, Happening)> {
        let mut news = vec![];
        let quiet = &mut self.quiet;
        self.open.retain(|key, _| {
            let looks = quiet.entry(key.clone()).or_default();
            *looks = if now.contains_key(key) { 0 } else { *looks + 1 };
            *looks < if key.0 == Kind::Throttled { QUIET } else { 1 }
        });
        quiet.retain(|key, _| self.open.contains_key(key));
        for (key, what) in now {
            let told = self.open.get(&key);
            let again = matches!((&what, told), (Happening::Ecc { .. }, Some(t)) if *t != what);
            if told.is_none() || again {
                news.push((key.1.clone(), what.clone()));
                self.open.insert(key, what);
            }
        }
        news
    }

    fn of_process(&mut self, gpu: &Gpu, pid: u32, f: &Facts) -> Vec<(Kind, Happening)> {
        let mut all = vec![];
        let own = |indexes: &Vec<u32>| {
            let instances = gpu.instances.iter().filter_map(|i| i.gres_index);
            instances.chain(gpu.gres_index).any(|i| indexes.contains(&i))
        };
        // Services of root (persistence daemon, MPS, DCGM) belong to no job and may be on any GPU.
        let outside = match (&f.job, &f.gpus) {
            (None, _) => f.uid != 0,
            (Some(_), Some(indexes)) => gpu.gres_index.is_some() && !own(indexes),
            (Some(_), None) => false,
        };
        if outside {
            all.push((Kind::Outside, Happening::Outside { pid, uid: Some(f.uid), job: f.job }));
        }
        let near = gpu.cpus.as_deref().unwrap_or_default();
        if !near.is_empty() && !f.cpus.is_empty() && f.job.is_some() && !f.cpus.iter().any(|c| near.contains(c)) {
            let (near, task) = (index_list::format(near), index_list::format(&f.cpus));
            all.push((Kind::Far, Happening::Far { pid, job: f.job, near, task }));
        }
        let waits = self.waiting.entry((gpu.uuid.clone(), pid)).or_default();
        *waits = if f.state == 'D' { *waits + 1 } else { 0 };
        if *waits >= STUCK_AFTER {
            all.push((Kind::Stuck, Happening::Stuck { pid, state: f.state, job: f.job }));
        }
        all
    }
}

fn now_has(samples: &[Sample], uuid: &str, pid: u32) -> bool {
    samples.iter().any(|s| s.uuid == uuid && s.processes.iter().flatten().any(|p| p.pid == pid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpus::inventory::tests::gpu;
    use pliant_model::gpu::Process;

    fn node() -> NodeGpus {
        let of =
            |i: u32| Gpu { gres_index: Some(i), cpus: Some(if i < 4 { vec![0, 1] } else { vec![2, 3] }), ..gpu(i) };
        NodeGpus { gpus: (0..8).map(of).collect(), ..NodeGpus::default() }
    }

    fn sample(gpu: u32, pids: &[u32]) -> Sample {
        let process =
            |pid: &u32| Process { pid: *pid, uid: None, job: None, memory_mib: None, state: None, instance: None };
        Sample { uuid: format!("GPU-{gpu}"), processes: Some(pids.iter().map(process).collect()), ..Sample::default() }
    }

    fn facts(gpus: &[u32], cpus: &[u32]) -> Facts {
        Facts { uid: 5, job: Some(JobId(7)), state: 'R', cpus: cpus.to_vec(), gpus: Some(gpus.to_vec()) }
    }

    #[test]
    fn a_process_outside_its_allocation_is_told_once_with_pid_and_owner() {
        // B04: the job owns 4 and 5, a process appears on 0.
        let (mut audit, node) = (Audit::default(), node());
        let mut samples = vec![sample(0, &[11]), sample(4, &[12])];
        let of = |_| Some(facts(&[4, 5], &[0, 1, 2, 3]));
        let news = audit.look(&node, &mut samples, &of);
        let want = Happening::Outside { pid: 11, uid: Some(5), job: Some(JobId(7)) };
        assert_eq!(news, [("GPU-0".to_owned(), want)]);
        assert_eq!(samples[1].processes.as_ref().unwrap()[0].job, Some(JobId(7)));
        assert!(audit.look(&node, &mut samples, &of).is_empty(), "told once");
        assert!(audit.look(&node, &mut [sample(0, &[])], &of).is_empty());
        assert_eq!(audit.look(&node, &mut samples, &of).len(), 1, "again when it comes again");
    }

    #[test]
    fn services_of_root_and_the_unknown_are_left_alone() {
        let (mut audit, node) = (Audit::default(), node());
        let root = Facts { uid: 0, job: None, state: 'S', cpus: vec![], gpus: None };
        assert!(audit.look(&node, &mut [sample(0, &[1])], &|_| Some(root.clone())).is_empty());
        let unknown = Facts { gpus: None, ..facts(&[], &[0]) };
        assert!(audit.look(&node, &mut [sample(0, &[1])], &|_| Some(unknown.clone())).is_empty());
        let user = Facts { uid: 9, ..root.clone() };
        assert_eq!(audit.look(&node, &mut [sample(1, &[1])], &|_| Some(user.clone())).len(), 1);
    }

    #[test]
    fn tasks_far_from_their_gpu_are_named_with_both_lists() {
        // B01: two tasks, GPUs 4 and 5 (socket 1), pinned on socket 0.
        let (mut audit, node) = (Audit::default(), node());
        let news = audit.look(&node, &mut [sample(4, &[1]), sample(5, &[2])], &|_| Some(facts(&[4, 5], &[0, 1])));
        let far = |n: &(String, Happening)| match &n.1 {
            Happening::Far { near, task, .. } => (n.0.clone(), near.clone(), task.clone()),
            other => panic!("{other:?}"),
        };
        let want = ["GPU-4", "GPU-5"].map(|g| (g.to_owned(), "2-3".to_owned(), "0-1".to_owned()));
        assert_eq!(news.iter().map(far).collect::<Vec<_>>(), want);
    }

    #[test]
    fn memory_without_an_owner_is_told_in_one_look() {
        // B45: 9 GB used, no live pid. A list that is not available concludes nothing.
        let (mut audit, node) = (Audit::default(), node());
        let mut held = sample(2, &[77]);
        held.memory_used_mib = Some(9000);
        let news = audit.look(&node, std::slice::from_mut(&mut held), &|_| None);
        assert_eq!(news, [("GPU-2".to_owned(), Happening::Orphaned { memory_mib: 9000 })]);
        assert_eq!(held.processes.as_ref().unwrap()[0].state, None, "no such process any more");
        let unknown = Sample { processes: None, memory_used_mib: Some(9000), ..sample(3, &[]) };
        assert!(audit.look(&node, &mut [unknown], &|_| None).is_empty());
    }

    #[test]
    fn a_process_in_state_d_is_stuck_after_a_while() {
        // B43
        let (mut audit, node) = (Audit::default(), node());
        let stuck = |_| Some(Facts { state: 'D', ..facts(&[3], &[0]) });
        let looks: Vec<usize> =
            (0..7).map(|_| audit.look(&node, &mut [sample(3, &[9]), sample(2, &[])], &stuck).len()).collect();
        assert_eq!(looks, [0, 0, 0, 0, 1, 0, 0]);
    }

    #[test]
    fn clocks_that_come_and_go_are_told_once() {
        let (mut audit, node) = (Audit::default(), node());
        let with = |hot: bool| Sample {
            throttle: Some(if hot { vec!["power brake".into()] } else { vec![] }),
            ..sample(1, &[])
        };
        let told: usize = (0..100).map(|i| audit.look(&node, &mut [with(i % 2 == 0)], &|_| None).len()).sum();
        assert_eq!(told, 1);
        (0..60).for_each(|_| drop(audit.look(&node, &mut [with(false)], &|_| None)));
        assert_eq!(audit.look(&node, &mut [with(true)], &|_| None).len(), 1);
    }

    #[test]
    fn errors_count_from_the_first_look() {
        let (mut audit, node) = (Audit::default(), node());
        let with = |n| Sample { ecc_uncorrected: Some(n), throttle: Some(vec![]), ..sample(1, &[]) };
        let news: Vec<usize> = [5, 5, 6, 6, 8].map(|n| audit.look(&node, &mut [with(n)], &|_| None).len()).to_vec();
        assert_eq!(news, [0, 0, 1, 0, 1]);
    }
}
