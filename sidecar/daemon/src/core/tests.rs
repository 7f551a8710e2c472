//! The reactor in situations: what goes in, what comes out, over a real journal on disk.

mod gpus;

use crate::core::{Agent, Core, Effect, Now, Settings};
use crate::journal::Journal;
use crate::view::SlurmView;
use pliant_model::resize::{Kind, State};
use pliant_model::{JobId, Locality, Member, OrderId, Reason};
use pliant_protocol::bridge::{JobRecord, NodeRecord};
use pliant_protocol::job::{JobStatus, Order, OrderStatus, Progress, SliceMark, SliceStatus, slice_name};
use pliant_protocol::peer::ToAgent;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

const UID: u32 = 1000;

fn at(seconds: u64) -> Now {
    Now { wall_ms: (1_000_000 + seconds) * 1000, mono: 1000 + seconds }
}

fn id() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("order-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

fn core(dir: &Path) -> Core {
    let journal = Journal::open(&dir.join("journal.sqlite")).unwrap();
    let mut core =
        Core::new(Settings { patience: 5, stale_after: 40, grace_max: 600, depth: 200 }, journal, id).unwrap();
    for n in ["n0", "n1"] {
        core.on_agent(n.into(), Agent { software: String::new(), skew_ms: 0, facts: vec![] });
    }
    core
}

fn node(name: &str, used: u32) -> NodeRecord {
    NodeRecord {
        name: name.into(),
        state: "MIXED".into(),
        cpus: 64,
        cpus_alloc: Some(used),
        gres: Some("gpu:8".into()),
        gres_used: Some(format!("gpu:{used}")),
        ..NodeRecord::default()
    }
}

fn running(job: u32) -> JobRecord {
    JobRecord {
        job_id: job,
        user_id: UID,
        state: "RUNNING".into(),
        nodes: Some("n0".into()),
        batch_host: Some("n0".into()),
        ..JobRecord::default()
    }
}

fn slice(job: u32, base: u32, instance: &str) -> JobRecord {
    let mark = SliceMark { base: JobId(base), instance: instance.into(), token: "t".into() };
    JobRecord {
        name: Some(slice_name(JobId(base))),
        comment: Some(mark.to_string()),
        nodes: Some("n1".into()),
        tres_alloc: Some("cpu=6,gres/gpu=6".into()),
        ..running(job)
    }
}

fn wants(job: u32, gpus: u32) -> JobRecord {
    JobRecord {
        job_id: job,
        user_id: 1,
        state: "PENDING".into(),
        reason: Some("Resources".into()),
        priority: Some(5),
        partition: Some("gpu".into()),
        tres_per_job: Some(format!("gres:gpu:{gpus}")),
        ..JobRecord::default()
    }
}

fn view(jobs: Vec<JobRecord>, used: (u32, u32)) -> SlurmView {
    SlurmView {
        tiers: std::collections::BTreeMap::new(),
        jobs: jobs.into_iter().map(|j| (JobId(j.job_id), j)).collect(),
        nodes: vec![node("n0", used.0), node("n1", used.1)],
        partitions: ["n0", "n1"].map(|n| (n.into(), vec!["gpu".to_owned()])).into(),
    }
}

fn status(base: u32) -> JobStatus {
    JobStatus {
        base: JobId(base),
        instance: "one".into(),
        command: "train".into(),
        range: "2-8".parse().unwrap(),
        base_gpus: 2,
        base_nodes: vec!["n0".into()],
        cpus_per_gpu: 1,
        partition: "gpu".into(),
        kind: None,
        feature: None,
        locality: Locality::Any,
        grace: 60,
        ends_at: None,
        generation: 1,
        world: vec![Member { slice: None, node: "n0".into(), gpus: 2 }],
        ready: true,
        slices: vec![],
        order: None,
        done: vec![],
        progress: Progress::default(),
    }
}

fn told(id: &OrderId, kind: Kind, state: State, slices: &[u32]) -> OrderStatus {
    OrderStatus {
        id: id.clone(),
        kind,
        state,
        slices: slices.iter().map(|s| JobId(*s)).collect(),
        reason: Reason::NotReady,
        times: vec![],
        load_ms: None,
    }
}

fn held(job: u32) -> SliceStatus {
    SliceStatus { job: JobId(job), node: "n1".into(), gpus: 6, cpus: 6, joined: true, leaving: false }
}

fn orders(core: &mut Core) -> Vec<Order> {
    let order = |e| match e {
        Effect::Agent(_, ToAgent::Order { order, .. }) => Some(order),
        _ => None,
    };
    core.take_effects().into_iter().filter_map(order).collect()
}

fn cancelled(core: &mut Core) -> Vec<u32> {
    let job = |e| match e {
        Effect::Cancel { slice, .. } => Some(slice.0),
        _ => None,
    };
    core.take_effects().into_iter().filter_map(job).collect()
}

/// Feeds a view, and lets what follows from it be decided.
fn look(core: &mut Core, view: SlurmView, now: Now) {
    core.on_view(view, now, now);
    core.settle(now);
}

/// Feeds a status, likewise.
fn tell(core: &mut Core, status: JobStatus, now: Now) {
    core.on_status("n0".into(), UID, status, now);
    core.settle(now);
}

/// A job of 2 GPUs on n0 that has just been told to grow.
fn growing(dir: &Path) -> (Core, OrderId) {
    let mut core = core(dir);
    look(&mut core, view(vec![running(7)], (2, 0)), at(0));
    tell(&mut core, status(7), at(1));
    let orders = orders(&mut core);
    assert_eq!(orders.len(), 1, "{orders:?}");
    assert!(matches!(&orders[0], Order::Grow { slices, .. } if slices[0].gpus == 6));
    let id = orders[0].id().clone();
    (core, id)
}

fn arrows(core: &Core, job: u32) -> Vec<State> {
    core.journal.history(JobId(job), 100).unwrap().iter().filter_map(|e| e.state).collect()
}

#[test]
fn a_growth_passes_every_arrow_once() {
    let dir = tempfile::tempdir().unwrap();
    let (mut core, id) = growing(dir.path());
    for state in [State::Requested, State::Granted, State::Granted, State::Joined] {
        let s = JobStatus { order: Some(told(&id, Kind::Grow, state, &[11])), ..status(7) };
        tell(&mut core, s, at(2));
        assert!(orders(&mut core).is_empty(), "one resize at a time");
    }
    let s = JobStatus {
        done: vec![told(&id, Kind::Grow, State::Settled, &[11])],
        slices: vec![held(11)],
        world: vec![
            Member { slice: None, node: "n0".into(), gpus: 2 },
            Member { slice: Some(JobId(11)), node: "n1".into(), gpus: 6 },
        ],
        ..status(7)
    };
    tell(&mut core, s.clone(), at(3));
    tell(&mut core, s, at(8));
    use State::*;
    assert_eq!(arrows(&core, 7), [Proposed, Requested, Granted, Announced, Joined, Settled]);
    assert_eq!(core.resizes.len(), 0);
    assert_eq!(core.notes[&JobId(7)], Reason::AtMax { size: 8, max: 8 });
}

#[test]
fn an_order_that_was_lost_is_sent_again() {
    let dir = tempfile::tempdir().unwrap();
    let (mut core, id) = growing(dir.path());
    core.tick(at(2));
    assert!(orders(&mut core).is_empty());
    core.tick(at(5));
    assert_eq!(orders(&mut core)[0].id(), &id);
}

#[test]
fn a_restart_takes_up_what_was_open() {
    let dir = tempfile::tempdir().unwrap();
    let (core_before, id) = growing(dir.path());
    drop(core_before);
    // The launcher has it already: it goes on from there.
    let mut core1 = core(dir.path());
    let s = JobStatus { order: Some(told(&id, Kind::Grow, State::Granted, &[11])), ..status(7) };
    tell(&mut core1, s, at(10));
    assert_eq!(core1.resizes.of(JobId(7)).unwrap().state, State::Granted);
    drop(core1);
    // The launcher no longer knows it: undone, with the reason.
    let mut core2 = core(dir.path());
    tell(&mut core2, status(7), at(20));
    assert_eq!(core2.resizes.len(), 0);
    let last = core2.journal.history(JobId(7), 100).unwrap().pop().unwrap();
    assert!(matches!(last.reason, Reason::Recovered { .. }));
}

#[test]
fn a_withdrawn_growth_backs_off() {
    let dir = tempfile::tempdir().unwrap();
    let (mut core, id) = growing(dir.path());
    let s = JobStatus { done: vec![told(&id, Kind::Grow, State::Undone, &[])], ..status(7) };
    tell(&mut core, s.clone(), at(6));
    look(&mut core, view(vec![running(7)], (2, 0)), at(7));
    assert!(orders(&mut core).is_empty());
    assert_eq!(core.notes[&JobId(7)], Reason::BackOff { left: 4 });
    look(&mut core, view(vec![running(7)], (2, 0)), at(12));
    assert_eq!(orders(&mut core).len(), 1);
}

fn lent(dir: &Path) -> Core {
    let mut core = core(dir);
    look(&mut core, view(vec![running(7), slice(11, 7, "one")], (2, 6)), at(0));
    tell(&mut core, JobStatus { slices: vec![held(11)], ..status(7) }, at(1));
    assert!(orders(&mut core).is_empty());
    core
}

#[test]
fn a_pending_job_gets_its_gpus_and_the_shrink_is_confirmed_by_slurm() {
    let dir = tempfile::tempdir().unwrap();
    let mut core = lent(dir.path());
    look(&mut core, view(vec![running(7), slice(11, 7, "one"), wants(20, 14)], (2, 6)), at(2));
    let orders = orders(&mut core);
    let Order::Shrink { id, slices, grace, .. } = &orders[0] else { panic!("{orders:?}") };
    assert_eq!((slices.as_slice(), *grace), ([JobId(11)].as_slice(), 60));
    let s = JobStatus { done: vec![told(id, Kind::Shrink, State::Released, &[11])], ..status(7) };
    tell(&mut core, s.clone(), at(3));
    assert_eq!(core.resizes.of(JobId(7)).unwrap().state, State::Released, "Slurm still shows the slice");
    look(&mut core, view(vec![running(7), wants(20, 14)], (2, 0)), at(4));
    assert_eq!(core.resizes.len(), 0);
    assert_eq!(arrows(&core, 7).last(), Some(&State::Confirmed));
    assert!(self::orders(&mut core).is_empty(), "what was released is kept for the job that waits");
}

#[test]
fn a_script_that_stays_beyond_its_grace_loses_its_slices() {
    let dir = tempfile::tempdir().unwrap();
    let mut core = lent(dir.path());
    let pending = || view(vec![running(7), slice(11, 7, "one"), wants(20, 14)], (2, 6));
    look(&mut core, pending(), at(2));
    let id = orders(&mut core)[0].id().clone();
    let announced = JobStatus {
        order: Some(told(&id, Kind::Shrink, State::Announced, &[11])),
        slices: vec![held(11)],
        ..status(7)
    };
    tell(&mut core, announced, at(3));
    look(&mut core, pending(), at(60));
    core.tick(at(71));
    assert!(cancelled(&mut core).is_empty());
    core.tick(at(72));
    assert_eq!(cancelled(&mut core), [11]);
    core.tick(at(120));
    assert!(cancelled(&mut core).is_empty(), "nothing is cancelled on a stale view");
}

#[test]
fn slices_without_a_base_are_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    let mut core = core(dir.path());
    let ended = JobRecord { state: "CANCELLED".into(), ..running(7) };
    look(&mut core, view(vec![ended, slice(11, 7, "one")], (0, 6)), at(0));
    assert_eq!(cancelled(&mut core), [11], "Slurm says that the base has ended");
    // The base runs and nobody has registered: its launcher may be about to.
    let lone = || view(vec![running(7), slice(12, 7, "one")], (2, 6));
    look(&mut core, lone(), at(10));
    look(&mut core, lone(), at(50));
    assert!(cancelled(&mut core).is_empty());
    look(&mut core, lone(), at(56));
    assert_eq!(cancelled(&mut core), [12]);
}

#[test]
fn a_requeued_base_is_another_instance() {
    let dir = tempfile::tempdir().unwrap();
    let (mut core, _) = growing(dir.path());
    tell(&mut core, JobStatus { instance: "two".into(), ready: false, ..status(7) }, at(5));
    assert_eq!(core.resizes.len(), 0);
    let v = || view(vec![running(7), slice(11, 7, "one")], (2, 6));
    look(&mut core, v(), at(6));
    look(&mut core, v(), at(60));
    assert_eq!(cancelled(&mut core), [11]);
}

#[test]
fn nobody_registers_another_users_job() {
    let dir = tempfile::tempdir().unwrap();
    let mut core = core(dir.path());
    look(&mut core, view(vec![running(7)], (2, 0)), at(0));
    core.on_status("n0".into(), UID + 1, status(7), at(1));
    assert!(core.jobs.is_empty() && orders(&mut core).is_empty());
}

#[test]
fn a_stale_view_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut core = core(dir.path());
    look(&mut core, view(vec![running(7)], (2, 0)), at(0));
    tell(&mut core, status(7), at(100));
    assert!(orders(&mut core).is_empty());
    assert_eq!(core.notes[&JobId(7)], Reason::StaleView { age: 100 });
}

#[test]
fn a_journal_that_takes_no_writes_stops_new_resizes_only() {
    let dir = tempfile::tempdir().unwrap();
    let mut core = core(dir.path());
    let other = rusqlite::Connection::open(dir.path().join("journal.sqlite")).unwrap();
    other.execute_batch("ALTER TABLE events RENAME TO gone").unwrap();
    look(&mut core, view(vec![running(7)], (2, 0)), at(0));
    tell(&mut core, status(7), at(1));
    assert!(orders(&mut core).is_empty() && !core.durable);
    assert_eq!(core.jobs.len(), 1);
    other.execute_batch("ALTER TABLE gone RENAME TO events").unwrap();
    look(&mut core, view(vec![running(7)], (2, 0)), at(2));
    look(&mut core, view(vec![running(7)], (2, 0)), at(3));
    assert_eq!(orders(&mut core).len(), 1, "and they begin again when it does");
}

#[test]
fn a_preemption_by_slurm_is_adopted() {
    let dir = tempfile::tempdir().unwrap();
    let mut core = lent(dir.path());
    let own = OrderId("l-1".into());
    let s = JobStatus {
        order: Some(told(&own, Kind::Shrink, State::Announced, &[11])),
        slices: vec![held(11)],
        ..status(7)
    };
    tell(&mut core, s, at(2));
    let open = core.resizes.of(JobId(7)).unwrap();
    assert_eq!((open.id.clone(), open.state, open.before), (own, State::Announced, 2));
    look(&mut core, view(vec![running(7), slice(11, 7, "one"), wants(20, 14)], (2, 6)), at(3));
    assert!(orders(&mut core).is_empty(), "nothing else is taken from that job meanwhile");
}

#[test]
fn no_launcher_has_another_job_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    let mut core = lent(dir.path());
    let victim = || JobRecord { user_id: 1, ..running(999) };
    let v = || view(vec![running(7), slice(11, 7, "one"), wants(20, 14), victim()], (2, 6));
    look(&mut core, v(), at(2));
    let id = orders(&mut core)[0].id().clone();
    let lie = JobStatus {
        grace: 0,
        order: Some(told(&id, Kind::Shrink, State::Announced, &[999])),
        slices: vec![held(11), held(999)],
        ..status(7)
    };
    tell(&mut core, lie, at(3));
    look(&mut core, v(), at(30));
    core.tick(at(80));
    let all = cancelled(&mut core);
    assert!(!all.contains(&999), "{all:?}");
    // The same with a resize of its own.
    let own = OrderId("l-9".into());
    let lie = JobStatus {
        order: Some(told(&own, Kind::Shrink, State::Announced, &[999])),
        slices: vec![held(999)],
        ..status(7)
    };
    tell(&mut core, lie, at(81));
    look(&mut core, v(), at(82));
    core.tick(at(110));
    let all = cancelled(&mut core);
    assert!(!all.contains(&999), "{all:?}");
}

#[test]
fn the_silence_of_an_agent_that_is_away_proves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut core = lent(dir.path());
    core.on_agent_gone(&"n0".into(), at(2));
    let v = || view(vec![running(7), slice(11, 7, "one")], (2, 6));
    for t in [3, 50, 100, 1000] {
        look(&mut core, v(), at(t));
    }
    assert!(cancelled(&mut core).is_empty(), "the leases decide");
    // The agent is back and knows no launcher.
    core.on_agent("n0".into(), Agent { software: String::new(), skew_ms: 0, facts: vec![] });
    look(&mut core, v(), at(1001));
    look(&mut core, v(), at(1040));
    assert!(cancelled(&mut core).is_empty(), "it may be about to connect");
    look(&mut core, v(), at(1047));
    assert_eq!(cancelled(&mut core), [11]);
}

#[test]
fn a_status_that_makes_no_sense_is_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let mut core = core(dir.path());
    look(&mut core, view(vec![running(7)], (2, 0)), at(0));
    let huge = SliceStatus { gpus: u32::MAX, ..held(11) };
    let zero = pliant_model::GpuRange { min: None, max: 8, step: 0 };
    let many = vec![told(&OrderId("l-1".into()), Kind::Shrink, State::Undone, &[]); 9];
    for bad in [
        JobStatus { range: zero, ..status(7) },
        JobStatus { slices: vec![huge.clone(), huge], ..status(7) },
        JobStatus { done: many, ..status(7) },
        JobStatus { base_gpus: 9, ..status(7) },
    ] {
        tell(&mut core, bad, at(1));
        assert!(core.jobs.is_empty());
    }
    tell(&mut core, JobStatus { grace: u64::MAX, ..status(7) }, at(2));
    assert_eq!(core.jobs[&JobId(7)].status.grace, 600, "never more than the site allows");
}

#[test]
fn an_order_that_nobody_takes_up_expires() {
    let dir = tempfile::tempdir().unwrap();
    let (mut core, _) = growing(dir.path());
    core.tick(at(41));
    assert_eq!(core.resizes.len(), 1);
    core.tick(at(42));
    assert_eq!(core.resizes.len(), 0);
}
