//! Tests of [`super`]: whole stories over the pure core, with the time passed in.

use super::*;
use crate::slurm_text::{look, slices};
use pliant_model::{GpuRange, Locality, OrderId};
use pliant_protocol::VERSION;
use pliant_protocol::job::{JobStatus, Order, Progress};

const ALIVE: &dyn Fn(u32) -> bool = &|_| true;

/// A status of a job with nothing in it.
pub fn status(base: u32, instance: &str) -> JobStatus {
    JobStatus {
        base: JobId(base),
        instance: instance.into(),
        command: "x".into(),
        range: GpuRange { min: Some(2), max: 8, step: 1 },
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
        world: vec![],
        ready: true,
        slices: vec![],
        order: None,
        done: vec![],
        progress: Progress::default(),
    }
}

fn at(seconds: u64) -> Now {
    Duration::from_secs(seconds)
}

fn peer(job: u32, uid: u32, pid: u32) -> Peer {
    Peer { pid, uid, job: JobId(job) }
}

struct Agent {
    core: Core,
    next: u64,
}

impl Agent {
    /// With its first sweep done.
    fn new() -> Agent {
        let mut core = Core::new("n0".into(), at(0));
        assert_eq!(core.tick(at(0)), [Effect::Sweep]);
        core.swept(Ok(vec![]), at(0));
        Agent { core, next: 0 }
    }

    fn hello(&mut self, peer: Peer, role: Role, now: u64) -> (ConnId, Vec<Effect>) {
        self.next += 1;
        let conn = ConnId(self.next);
        let effects = self.core.hello(conn, peer, (VERSION, role), ALIVE, at(now));
        (conn, effects)
    }

    fn launcher(&mut self, job: u32, instance: &str, now: u64) -> ConnId {
        let (conn, effects) = self.hello(peer(job, 10, 100), Role::Launcher { instance: instance.into() }, now);
        assert!(matches!(effects.first(), Some(Effect::Send(_, FromAgent::Welcome { .. }))), "{effects:?}");
        conn
    }

    /// Ticks every second, without the sweeps.
    fn ticks(&mut self, seconds: std::ops::RangeInclusive<u64>) -> Vec<(u64, Effect)> {
        let mut out = vec![];
        for s in seconds {
            for effect in self.core.tick(at(s)) {
                match effect {
                    Effect::Sweep => self.core.swept(Ok(vec![]), at(s)),
                    other => out.push((s, other)),
                }
            }
        }
        out
    }
}

fn line(slice: u32, state: &str, token: &str) -> String {
    format!("{slice}|10|{state}|pliant base=7 instance=ab token={token}\n")
}

fn shown(slice: u32, state: &str) -> Look {
    look(JobId(slice), true, &line(slice, state, "t1"), "")
}

#[test]
fn a_slice_without_renewals_is_cancelled_after_forty_seconds() {
    let mut a = Agent::new();
    let (conn, _) = a.hello(peer(12, 10, 200), Role::Supervisor, 0);
    let lease = || ToAgent::Lease { base: JobId(7), instance: "ab".into() };
    a.core.message(conn, lease(), at(0));
    a.core.message(conn, lease(), at(5));
    a.core.closed(conn, at(6));
    assert_eq!(a.ticks(1..=45), [(45, Effect::Look(JobId(12)))]);
    assert_eq!(a.core.looked(JobId(12), shown(12, "RUNNING"), at(45)), [Effect::Cancel(JobId(12))]);
    assert!(a.core.cancelled(JobId(12), Ok(()), at(45)).is_empty(), "kept for pliantd");
    let reason = Reason::LeaseOver { slice: JobId(12), silent: 40 };
    let report = Effect::Daemon(peer::FromAgent::Cancelled { slice: JobId(12), reason });
    assert_eq!(a.core.daemon(true, at(46)), [report]);
    assert_eq!(a.ticks(46..=50), [(50, Effect::Look(JobId(12)))]);
    a.core.looked(JobId(12), Look::Gone, at(50));
    assert!(a.ticks(51..=200).is_empty());
}

#[test]
fn a_hanging_slurm_cancels_nothing() {
    let mut a = Agent::new();
    let (conn, _) = a.hello(peer(12, 10, 200), Role::Supervisor, 0);
    a.core.message(conn, ToAgent::Lease { base: JobId(7), instance: "ab".into() }, at(0));
    let mut looks = 0;
    for s in 1..=600 {
        for effect in a.core.tick(at(s)) {
            match effect {
                Effect::Look(slice) => {
                    looks += 1;
                    assert!(a.core.looked(slice, Look::Failed("timeout".into()), at(s)).is_empty());
                }
                Effect::Sweep => a.core.swept(Err("timeout".into()), at(s)),
                other => panic!("{other:?}"),
            }
        }
    }
    assert!((15..=30).contains(&looks), "with back-off: {looks}");
    a.core.message(conn, ToAgent::Lease { base: JobId(7), instance: "ab".into() }, at(601));
    assert!(a.ticks(601..=640).is_empty(), "a renewal takes it back");
}

#[test]
fn an_agent_that_was_stopped_does_not_cancel() {
    let mut a = Agent::new();
    let (conn, _) = a.hello(peer(12, 10, 200), Role::Supervisor, 0);
    a.core.message(conn, ToAgent::Lease { base: JobId(7), instance: "ab".into() }, at(0));
    let launcher = a.launcher(7, "ab", 0);
    a.core.message(launcher, ToAgent::Holds { tokens: vec!["t1".into()] }, at(0));
    a.core.closed(launcher, at(1));
    a.ticks(1..=5);
    assert!(a.ticks(1000..=1019).is_empty());
    assert_eq!(a.ticks(1020..=1040), [(1020, Effect::Find(JobId(7))), (1040, Effect::Look(JobId(12)))]);
}

#[test]
fn slices_of_a_lost_launcher_are_found_and_cancelled() {
    let mut a = Agent::new();
    let conn = a.launcher(7, "ab", 0);
    a.core.message(conn, ToAgent::Holds { tokens: vec!["t1".into(), "t2".into()] }, at(0));
    a.core.closed(conn, at(10));
    assert_eq!(a.ticks(10..=30), [(30, Effect::Find(JobId(7)))]);
    let list = line(12, "RUNNING", "t1") + &line(13, "PENDING", "t2") + &line(14, "RUNNING", "other");
    assert_eq!(a.core.found(Ok(slices(&list)), at(30)), [Effect::Look(JobId(12))]);
    assert_eq!(a.core.looked(JobId(12), shown(12, "RUNNING"), at(30)), [Effect::Cancel(JobId(12))]);
    assert_eq!(a.core.cancelled(JobId(12), Ok(()), at(30)), [Effect::Look(JobId(13))]);
    let pending = look(JobId(13), true, &line(13, "PENDING", "t2"), "");
    assert_eq!(a.core.looked(JobId(13), pending, at(30)), [Effect::Cancel(JobId(13))]);
}

#[test]
fn a_launcher_that_returns_in_time_keeps_everything() {
    let mut a = Agent::new();
    let conn = a.launcher(7, "ab", 0);
    a.core.message(conn, ToAgent::Holds { tokens: vec!["t1".into()] }, at(0));
    a.core.closed(conn, at(10));
    assert!(a.ticks(10..=29).is_empty());
    let conn = a.launcher(7, "ab", 29);
    assert!(a.ticks(30..=100).is_empty());
    // Another run in the same base: the first one's slices are nobody's.
    a.core.closed(conn, at(100));
    a.launcher(7, "new", 101);
    assert_eq!(a.ticks(101..=101), [(101, Effect::Find(JobId(7)))]);
}

#[test]
fn the_clean_end_of_a_launcher_looks_for_nothing() {
    let mut a = Agent::new();
    let conn = a.launcher(7, "ab", 0);
    a.core.message(conn, ToAgent::Holds { tokens: vec!["t1".into()] }, at(0));
    a.core.message(conn, ToAgent::Holds { tokens: vec![] }, at(5));
    a.core.closed(conn, at(5));
    assert!(a.ticks(5..=100).is_empty());
}

#[test]
fn only_the_proven_base_may_tell_of_itself() {
    let mut a = Agent::new();
    a.core.daemon(true, at(0));
    let conn = a.launcher(7, "ab", 0);
    let send = |a: &mut Agent, s: JobStatus| a.core.message(conn, ToAgent::Status(Box::new(s)), at(1));
    assert!(send(&mut a, status(8, "ab")).is_empty());
    assert!(send(&mut a, status(7, "other")).is_empty());
    let mut told = status(7, "ab");
    told.progress.loss = Some(f64::NAN);
    let mut clean = told.clone();
    clean.progress.loss = None;
    let whole = Effect::Daemon(peer::FromAgent::Status { uid: 10, status: Box::new(clean) });
    assert_eq!(send(&mut a, told), std::slice::from_ref(&whole));
    // Known again to a pliantd that comes back, and gone when its launcher is.
    let daemon = |connected| Effect::Send(conn, FromAgent::Daemon { connected });
    assert_eq!(a.core.daemon(false, at(2)), [daemon(false)]);
    assert_eq!(a.core.daemon(true, at(3)), [whole, daemon(true)]);
    let gone = peer::FromAgent::Gone { base: JobId(7), instance: "ab".into() };
    assert_eq!(a.core.closed(conn, at(4)), [Effect::Daemon(gone)]);
}

#[test]
fn of_too_many_statuses_pliantd_gets_the_last() {
    let mut a = Agent::new();
    a.core.daemon(true, at(0));
    let told = |out: &[Effect]| -> Vec<u32> {
        let generation = |e: &Effect| match e {
            Effect::Daemon(peer::FromAgent::Status { status, .. }) => Some(status.generation),
            _ => None,
        };
        out.iter().filter_map(generation).collect()
    };
    let send = |a: &mut Agent, conn, instance: &str, generation, now| {
        let s = JobStatus { generation, ..status(7, instance) };
        told(&a.core.message(conn, ToAgent::Status(Box::new(s)), at(now)))
    };
    let conn = a.launcher(7, "ab", 0);
    let now: Vec<u32> = (1..=500).flat_map(|n| send(&mut a, conn, "ab", n, 0)).collect();
    assert_eq!(now, (1..=10).collect::<Vec<_>>());
    assert_eq!(told(&a.core.tick(at(1))), [500]);
    assert!(told(&a.core.tick(at(2))).is_empty());
    // Neither another instance nor the end of the connection is a way around it, and the last one is not lost.
    (501..=600).for_each(|n| drop(send(&mut a, conn, "ab", n, 2)));
    assert_eq!(told(&a.core.closed(conn, at(2))), [600]);
    let conn = a.launcher(7, "cd", 2);
    assert!(send(&mut a, conn, "cd", 601, 2).is_empty());
    let gone = peer::FromAgent::Gone { base: JobId(7), instance: "cd".into() };
    let end = a.core.closed(conn, at(2));
    assert_eq!((told(&end), end.get(1..)), (vec![601], Some(&[Effect::Daemon(gone)][..])));
}

#[test]
fn a_status_has_limits() {
    use pliant_protocol::job::{OrderStatus, SliceStatus};
    let mut a = Agent::new();
    a.core.daemon(true, at(0));
    let conn = a.launcher(7, "ab", 0);
    let mut send = |s: JobStatus| match a.core.message(conn, ToAgent::Status(Box::new(s)), at(0)).pop() {
        Some(Effect::Daemon(peer::FromAgent::Status { status, .. })) => Some(*status),
        _ => None,
    };
    let (kind, state) = (pliant_model::resize::Kind::Grow, pliant_model::resize::State::Undone);
    let order = |n: u32| OrderStatus {
        id: OrderId(n.to_string()),
        kind,
        state,
        slices: vec![],
        reason: Reason::NotReady,
        times: vec![(state, 0); 100],
        load_ms: None,
    };
    let full = JobStatus { command: "é".repeat(9000), done: (0..100).map(order).collect(), ..status(7, "ab") };
    let full = send(full).unwrap();
    assert_eq!(full.command, "é".repeat(200));
    assert_eq!(
        full.done.iter().map(|o| o.id.0.clone()).collect::<Vec<_>>(),
        ["92", "93", "94", "95", "96", "97", "98", "99"]
    );
    assert!(full.done.iter().all(|o| o.times.len() == 16));
    let slice = |_| SliceStatus { job: JobId(1), node: "n0".into(), gpus: 1, cpus: 1, joined: true, leaving: false };
    assert!(send(JobStatus { slices: (0..4096).map(slice).collect(), ..status(7, "ab") }).is_some());
    assert!(send(JobStatus { slices: (0..4097).map(slice).collect(), ..status(7, "ab") }).is_none());
    assert!(send(JobStatus { base_nodes: vec!["n".into(); 4097], ..status(7, "ab") }).is_none());
    let order = OrderStatus { slices: vec![JobId(1); 4097], ..order(1) };
    assert!(send(JobStatus { order: Some(order), ..status(7, "ab") }).is_none());
    // With what is put around it, it would fit into no frame to pliantd, at each connection anew.
    assert!(send(JobStatus { partition: "x".repeat(1_000_000), ..status(7, "ab") }).is_none());
}

/// What is logged meanwhile.
fn logged(f: impl FnOnce()) -> Vec<String> {
    #[derive(Clone, Default)]
    struct Lines(std::sync::Arc<std::sync::Mutex<Vec<u8>>>);
    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    let to = lines.clone();
    let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || to.clone()).finish();
    tracing::subscriber::with_default(log, f);
    let bytes = lines.0.lock().unwrap();
    String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect()
}

#[test]
fn bad_messages_and_refusals_do_not_fill_the_log() {
    let mut a = Agent::new();
    let (rank, _) = a.hello(peer(7, 10, 300), Role::Client { rank: 0, generation: 1 }, 0);
    let (other, _) = a.hello(peer(8, 11, 301), Role::Client { rank: 0, generation: 1 }, 0);
    let lines = logged(|| {
        for n in 0..1000 {
            a.core.message(rank, ToAgent::Holds { tokens: vec![] }, at(1));
            a.core.hello(ConnId(1000 + n), peer(7, 10, 1), (VERSION + 1, Role::Supervisor), ALIVE, at(1));
        }
        a.core.message(other, ToAgent::Holds { tokens: vec![] }, at(1));
    });
    assert_eq!(lines.len(), 11, "{lines:?}");
    assert!(lines.last().unwrap().contains("uid=11"), "each uid has its own: {lines:?}");
    let lines = logged(|| drop(a.core.message(rank, ToAgent::Holds { tokens: vec![] }, at(100))));
    assert!(matches!(&lines[..], [count, _] if count.contains("1990 lines") && count.contains("uid=10")), "{lines:?}");
}

#[test]
fn each_role_says_only_its_own() {
    let mut a = Agent::new();
    a.core.daemon(true, at(0));
    let (rank, _) = a.hello(peer(7, 10, 300), Role::Client { rank: 0, generation: 1 }, 0);
    for message in [
        ToAgent::Status(Box::new(status(7, "ab"))),
        ToAgent::Holds { tokens: vec!["t".into()] },
        ToAgent::Lease { base: JobId(1), instance: "ab".into() },
        ToAgent::Hello { version: 1, software: String::new(), role: Role::Supervisor },
    ] {
        assert!(a.core.message(rank, message, at(0)).is_empty());
    }
    assert!(a.ticks(1..=100).is_empty());
    assert!(a.core.message(ConnId(99), ToAgent::Holds { tokens: vec![] }, at(0)).is_empty());
}

#[test]
fn a_long_reason_is_cut() {
    let mut a = Agent::new();
    let (rank, _) = a.hello(peer(7, 10, 300), Role::Client { rank: 0, generation: 1 }, 0);
    let (supervisor, _) = a.hello(peer(7, 10, 200), Role::Supervisor, 0);
    let propose = |reason: &str| ToClient::Propose { boundary: 9, grace: 60, reason: reason.into() };
    for (reason, told) in [("é".repeat(30_000), "é".repeat(200)), ("short".into(), "short".into())] {
        let message = ToAgent::ToClient { rank: 0, generation: 1, message: propose(&reason) };
        let sent = [Effect::Send(rank, FromAgent::Client(propose(&told)))];
        assert_eq!(a.core.message(supervisor, message, at(0)), sent);
    }
}

#[test]
fn versions_and_instances_are_checked() {
    let mut a = Agent::new();
    let role = || Role::Launcher { instance: "ab".into() };
    let refused = a.core.hello(ConnId(50), peer(7, 10, 1), (VERSION + 1, role()), ALIVE, at(0));
    assert!(matches!(&refused[..], [Effect::Send(_, FromAgent::Refused { .. }), Effect::Close(_)]), "{refused:?}");
    for instance in ["", "a b", "a\n", &"x".repeat(129)] {
        let (_, e) = a.hello(peer(7, 10, 1), Role::Launcher { instance: instance.into() }, 0);
        assert!(matches!(&e[..], [Effect::Send(_, FromAgent::Refused { .. }), Effect::Close(_)]), "{e:?}");
    }
    a.launcher(7, "ab", 0);
    let (_, e) = a.hello(peer(7, 10, 555), Role::Launcher { instance: "cd".into() }, 0);
    let Some(Effect::Send(_, FromAgent::Refused { reason })) = e.first() else { panic!("{e:?}") };
    assert_eq!(reason, "job 7 has a launcher already: pliant run is process 100");
    let (_, e) = a.hello(peer(7, 11, 555), Role::Launcher { instance: "cd".into() }, 0);
    assert!(matches!(e.first(), Some(Effect::Send(_, FromAgent::Welcome { .. }))), "another uid: {e:?}");
}

#[test]
fn orders_wait_for_a_launcher_that_reconnects() {
    let mut a = Agent::new();
    a.core.daemon(true, at(0));
    let conn = a.launcher(7, "ab", 0);
    let order =
        |id: &str| Order::Shrink { id: OrderId(id.into()), slices: vec![], grace: 60, reason: Reason::NotReady };
    let send = |a: &mut Agent, id: &str, instance: &str| {
        let message = peer::ToAgent::Order { base: JobId(7), instance: instance.into(), order: order(id) };
        a.core.daemon_message(message, at(1))
    };
    assert_eq!(send(&mut a, "one", "ab"), [Effect::Send(conn, FromAgent::Order(order("one")))]);
    a.core.closed(conn, at(2));
    for id in ["two", "three", "two"] {
        assert!(send(&mut a, id, "ab").is_empty());
    }
    assert!(send(&mut a, "four", "other").is_empty());
    let (conn, effects) = a.hello(peer(7, 10, 100), Role::Launcher { instance: "ab".into() }, 3);
    let ids: Vec<&Effect> = effects.iter().skip(2).collect();
    let expected = ["three", "two"].map(|id| Effect::Send(conn, FromAgent::Order(order(id))));
    assert_eq!(ids, expected.iter().collect::<Vec<_>>());
}

#[test]
fn pliantd_cancels_a_slice_only_by_its_mark() {
    let mut a = Agent::new();
    a.core.daemon(true, at(0));
    let reason = Reason::Orphan { slice: JobId(12) };
    let cancel = |base| peer::ToAgent::Cancel { slice: JobId(12), base: JobId(base), reason: reason.clone() };
    assert_eq!(a.core.daemon_message(cancel(8), at(0)), [Effect::Look(JobId(12))]);
    assert!(a.core.looked(JobId(12), shown(12, "RUNNING"), at(0)).is_empty(), "another base's");
    assert_eq!(a.core.daemon_message(cancel(7), at(0)), [Effect::Look(JobId(12))]);
    assert_eq!(a.core.looked(JobId(12), shown(12, "RUNNING"), at(0)), [Effect::Cancel(JobId(12))]);
    let report = peer::FromAgent::Cancelled { slice: JobId(12), reason: reason.clone() };
    assert_eq!(a.core.cancelled(JobId(12), Ok(()), at(0)), [Effect::Daemon(report)]);
}

#[test]
fn sweeps_at_the_start_and_while_pliantd_is_away() {
    let mut core = Core::new("n0".into(), at(0));
    let sweeps = |core: &mut Core, seconds: std::ops::Range<u64>, ok: bool| {
        let mut times = vec![];
        for s in seconds {
            if core.tick(at(s)).contains(&Effect::Sweep) {
                times.push(s);
                core.swept(if ok { Ok(vec![]) } else { Err("x".into()) }, at(s));
            }
        }
        times
    };
    assert_eq!(sweeps(&mut core, 0..16, false), [0, 1, 3, 7, 15]);
    core.daemon(true, at(16));
    assert_eq!(sweeps(&mut core, 16..200, true), [31], "the first one in any case");
    core.daemon(false, at(200));
    assert_eq!(sweeps(&mut core, 200..400, true), [260, 320, 380]);
    core.daemon(true, at(400));
    assert!(sweeps(&mut core, 400..600, true).is_empty());
}

#[test]
fn what_a_sweep_finds_has_forty_seconds() {
    let mut core = Core::new("n0".into(), at(0));
    core.tick(at(0));
    core.swept(Ok(slices(&line(12, "RUNNING", "t1"))), at(0));
    for s in 1..40 {
        assert!(core.tick(at(s)).is_empty());
    }
    assert_eq!(core.tick(at(40)), [Effect::Look(JobId(12))]);
    core.swept(Ok(slices(&line(12, "RUNNING", "t1"))), at(41));
    assert_eq!(core.looked(JobId(12), shown(12, "RUNNING"), at(41)), [Effect::Cancel(JobId(12))]);
}
