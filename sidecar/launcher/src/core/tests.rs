//! The core without processes: a small stage plays supervisors and Slurm.

use super::*;
use pliant_model::resize::State;
use pliant_model::{OrderId, Reason};
use pliant_protocol::job::SliceSpec;

mod faults;

/// Plays what the core talks to: steps come up, ports are free, ranks obey.
struct Stage {
    core: Core,
    now: Millis,
    /// Everything that was to be done, in order.
    done: Vec<Effect>,
    /// Nodes by unit, with the slice.
    units: BTreeMap<UnitId, (Option<JobId>, NodeName, GpuCount)>,
    next_job: u32,
    /// Ranks have the client.
    client: bool,
    /// The client answers proposals.
    obedient: bool,
    /// Ranks refuse boundaries up to this one.
    passed: u64,
    grant: bool,
    /// Slurm answers questions about jobs.
    answers: bool,
    /// What it says about the base after a SIGTERM.
    goes_on: bool,
    /// New steps are known to their agents.
    agents: bool,
    port: u16,
}

fn settings(gpus: &[u32], range: &str) -> Settings {
    Settings {
        base: JobId(1),
        instance: "i".into(),
        command: "train".into(),
        elastic: true,
        range: range.parse().unwrap(),
        locality: Locality::Any,
        grace: 20,
        grace_max: 100,
        client_wait: 3,
        nodes: gpus.iter().enumerate().map(|(i, n)| (NodeName(format!("n{}", i + 1)), *n)).collect(),
        cpus_per_gpu: 2,
        partition: "p".into(),
        kind: None,
        feature: None,
        ends: None,
        kill_wait: 30,
        unix_at_zero: 1_000_000,
        torchrun: false,
    }
}

impl Stage {
    fn new(gpus: &[u32], range: &str) -> Stage {
        Stage::with(gpus, range, true)
    }

    fn without_client(gpus: &[u32], range: &str) -> Stage {
        Stage::with(gpus, range, false)
    }

    fn with(gpus: &[u32], range: &str, client: bool) -> Stage {
        let mut n = 0;
        let fresh = move || {
            n += 1;
            format!("t{n}")
        };
        let core = Core::new(settings(gpus, range), Box::new(fresh));
        let (units, done) = (BTreeMap::new(), vec![]);
        let mut stage = Stage {
            core,
            now: 1_000,
            done,
            units,
            next_job: 100,
            client,
            obedient: true,
            passed: 0,
            grant: true,
            answers: true,
            goes_on: false,
            agents: true,
            port: 0,
        };
        let effects = stage.core.start(stage.now);
        stage.play(effects);
        stage.handle(Event::Agent { connected: true });
        stage
    }

    fn handle(&mut self, event: Event) {
        let effects = self.core.handle(event, self.now);
        self.play(effects);
    }

    fn pass(&mut self, ms: Millis) {
        for _ in 0..ms / 100 {
            self.now += 100;
            self.handle(Event::Tick);
        }
    }

    fn says(&mut self, unit: UnitId, message: FromSupervisor) {
        self.handle(Event::UnitSays { unit, message });
    }

    fn ranks_on(&self, unit: UnitId, generation: u32) -> Vec<u32> {
        let all = [self.core.running.as_ref(), self.core.next.as_ref()];
        let found = all.into_iter().flatten().find(|g| g.number == generation);
        let part = found.and_then(|g| g.parts.iter().find(|p| p.unit == unit).copied());
        part.map(|p| (p.first..p.first + p.ranks).collect()).unwrap_or_default()
    }

    fn play(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            self.done.push(effect.clone());
            match effect {
                Effect::StartUnit { unit, slice, node, gpus } => {
                    self.units.insert(unit, (slice, node, gpus));
                    let gpus = (0..gpus).map(|g| g.to_string()).collect();
                    self.handle(Event::UnitUp { unit, addr: "a".into(), gpus, agent: self.agents });
                }
                Effect::Ask(ask) if self.grant => {
                    self.next_job += 1;
                    let job = JobId(self.next_job);
                    let outcome =
                        AskOutcome::Granted { job, node: ask.node, gpus: ask.gpus, cpus: ask.cpus, indexes: vec![] };
                    self.handle(Event::Asked { token: ask.token, outcome });
                }
                Effect::Check { number, .. } if self.answers => self.handle(Event::Checked { number }),
                Effect::AskBase if self.answers => self.handle(Event::BaseGoesOn(self.goes_on)),
                Effect::Release(slice) => self.handle(Event::Released { slice }),
                Effect::Tell(unit, message) => self.supervise(unit, message),
                _ => {}
            }
        }
    }

    fn supervise(&mut self, unit: UnitId, message: ToSupervisor) {
        match message {
            ToSupervisor::ReservePort { generation } => {
                self.port += 1;
                let port = self.port;
                self.says(unit, FromSupervisor::Port { generation, port });
            }
            ToSupervisor::Spawn(spawn) if self.client => {
                for rank in spawn.first_rank..spawn.first_rank + spawn.ranks {
                    self.says(unit, FromSupervisor::Ready { generation: spawn.generation, rank, load_ms: 5 });
                    if !spawn.hold {
                        self.says(unit, FromSupervisor::Stepped { generation: spawn.generation, rank });
                    }
                }
            }
            ToSupervisor::Start { generation } => {
                for rank in self.ranks_on(unit, generation) {
                    self.says(unit, FromSupervisor::Stepped { generation, rank });
                }
            }
            ToSupervisor::Propose { generation, boundary, .. } if self.obedient => {
                let (accept, passed) = (boundary > self.passed, self.passed);
                for rank in self.ranks_on(unit, generation) {
                    self.says(unit, FromSupervisor::Vote { generation, rank, boundary, accept, passed });
                }
            }
            ToSupervisor::Commit { generation, boundary } => {
                for rank in self.ranks_on(unit, generation) {
                    self.says(unit, FromSupervisor::Left { generation, rank, boundary });
                    self.says(unit, FromSupervisor::Exited { generation, rank, code: Some(0), signal: None });
                }
            }
            ToSupervisor::Signal { generation: Some(generation), signal }
                if signal == 9 || (signal == 15 && self.obedient) =>
            {
                for rank in self.ranks_on(unit, generation) {
                    self.says(unit, FromSupervisor::Exited { generation, rank, code: None, signal: Some(signal) });
                }
            }
            ToSupervisor::Stop => self.handle(Event::UnitGone { unit, why: "stopped".into() }),
            _ => {}
        }
    }

    fn grow(&mut self, id: &str, slices: &[(&str, u32)]) {
        let slices = slices.iter().map(|(n, g)| SliceSpec { node: NodeName::from(*n), gpus: *g }).collect();
        let reason = Reason::IdleGpus { idle: 4, takers: 1, from: 2, to: 6 };
        self.handle(Event::Order(Order::Grow { id: OrderId(id.into()), slices, patience: 5, reason }));
    }

    fn shrink(&mut self, id: &str, slices: &[u32]) {
        let reason = Reason::PendingJob { job: JobId(9), wants: 1, idle: 0, taken: 1 };
        let slices = slices.iter().map(|s| JobId(*s)).collect();
        self.handle(Event::Order(Order::Shrink { id: OrderId(id.into()), slices, grace: 20, reason }));
    }

    fn world(&self) -> Vec<u32> {
        self.core.status().world.iter().map(|m| m.gpus).collect()
    }

    fn last(&self) -> (String, State, Reason) {
        let done = self.core.status().done;
        let last = done.last().unwrap();
        (last.id.0.clone(), last.state, last.reason.clone())
    }

    fn told(&self, what: impl Fn(&ToSupervisor) -> bool) -> usize {
        self.done.iter().filter(|e| matches!(e, Effect::Tell(_, m) if what(m))).count()
    }

    fn exit(&self) -> Option<u8> {
        self.done.iter().find_map(|e| if let Effect::Exit(code) = e { Some(*code) } else { None })
    }

    fn unit_of(&self, slice: u32) -> UnitId {
        *self.units.iter().find(|(_, (s, ..))| *s == Some(JobId(slice))).unwrap().0
    }

    /// Every member has its GPUs and none is there twice; the world is what the units say.
    fn invariant(&self) {
        let status = self.core.status();
        let mut seen = BTreeSet::new();
        for member in &status.world {
            assert!(seen.insert((member.slice, member.node.clone())), "{status:?}");
            assert!(member.gpus > 0);
        }
        if let Some(running) = &self.core.running {
            assert_eq!(running.ranks.len(), status.world.iter().map(|m| m.gpus as usize).sum::<usize>());
        }
    }
}

#[test]
fn it_grows_and_shrinks_at_boundaries() {
    let mut s = Stage::new(&[2], "2-8");
    assert_eq!((s.world(), s.core.status().ready), (vec![2], true));
    s.grow("g", &[("n2", 2), ("n3", 4)]);
    assert_eq!(s.world(), [2, 2, 4]);
    assert_eq!(s.last().1, State::Settled);
    assert_eq!(s.told(|m| matches!(m, ToSupervisor::Spawn(w) if w.hold && w.world_size == 8)), 3);
    let done = s.core.status().done.pop().unwrap();
    let arrows: Vec<State> = done.times.iter().map(|(state, _)| *state).collect();
    use State::*;
    assert_eq!(arrows, [Proposed, Requested, Granted, Announced, Joined, Settled]);
    assert_eq!((done.load_ms, done.slices), (Some(5), vec![JobId(101), JobId(102)]));
    s.shrink("s", &[101]);
    assert_eq!((s.world(), s.last().1), (vec![2, 4], Released));
    assert_eq!(s.core.status().slices.len(), 1);
    assert_eq!(s.told(|m| matches!(m, ToSupervisor::Signal { .. })), 0, "nobody was killed");
    s.invariant();
}

#[test]
fn an_order_is_taken_once() {
    let mut s = Stage::new(&[2], "2-8");
    s.grow("g", &[("n2", 2)]);
    s.grow("g", &[("n2", 2)]);
    assert_eq!(s.done.iter().filter(|e| matches!(e, Effect::Ask(_))).count(), 1);
    s.shrink("s", &[77]);
    assert_eq!(s.last().1, State::Released, "a slice that is gone is released");
    assert_eq!(s.world(), [2, 2]);
}

#[test]
fn the_agent_knows_the_token_before_slurm_does() {
    let mut s = Stage::new(&[2], "2-8");
    s.grow("g", &[("n2", 2)]);
    let at = |f: &dyn Fn(&Effect) -> bool| s.done.iter().position(f).unwrap();
    let holds = at(&|e| matches!(e, Effect::Agent(ToAgent::Holds { tokens }) if !tokens.is_empty()));
    assert!(holds < at(&|e| matches!(e, Effect::Ask(_))));
}

#[test]
fn ranks_that_are_past_the_boundary_get_a_later_one() {
    let mut s = Stage::new(&[2], "2-8");
    s.passed = 100;
    s.grow("g", &[("n2", 2)]);
    assert_eq!(s.world(), [2, 2]);
    let proposed: Vec<u64> = s
        .done
        .iter()
        .filter_map(|e| {
            if let Effect::Tell(_, ToSupervisor::Propose { boundary, .. }) = e { Some(*boundary) } else { None }
        })
        .collect();
    assert_eq!(proposed, [2, 102]);
    assert_eq!(s.told(|m| matches!(m, ToSupervisor::Abort { boundary: 2, .. })), 1);
}

#[test]
fn a_script_that_does_not_answer_is_killed_after_the_grace() {
    let mut s = Stage::new(&[2], "2-8");
    s.grow("g", &[("n2", 2)]);
    s.obedient = false;
    s.shrink("s", &[101]);
    s.pass(19_000);
    assert_eq!(s.world(), [2, 2]);
    s.pass(2_000);
    assert_eq!(s.world(), [2]);
    assert_eq!((s.last().1, s.last().2), (State::Released, Reason::GraceOver { grace: 20 }));
    assert_eq!(s.exit(), None);
}

#[test]
fn a_script_without_client_is_terminated_and_restarted() {
    let mut s = Stage::without_client(&[2], "2-8");
    s.pass(2_900);
    assert!(!s.core.status().ready);
    s.pass(200);
    assert!(s.core.status().ready);
    s.grow("g", &[("n2", 2)]);
    assert_eq!(s.world(), [2, 2]);
    assert_eq!(s.told(|m| matches!(m, ToSupervisor::Signal { signal: 15, .. })), 1);
    assert_eq!(s.told(|m| matches!(m, ToSupervisor::Propose { .. })), 0);
    s.pass(3_100);
    assert_eq!(s.last().1, State::Settled);
}

#[test]
fn a_lost_slice_is_no_failure_and_a_failed_rank_is() {
    let mut s = Stage::new(&[2], "2-8");
    s.grow("g", &[("n2", 2), ("n3", 2)]);
    let unit = s.unit_of(101);
    let generation = s.core.status().generation;
    // The rank's end comes first; then its step turns out to be lost.
    s.says(unit, FromSupervisor::Exited { generation, rank: 2, code: None, signal: Some(9) });
    s.pass(500);
    s.handle(Event::UnitGone { unit, why: "killed".into() });
    s.pass(3_000);
    assert_eq!((s.world(), s.exit()), (vec![2, 2], None));
    assert!(s.last().0.starts_with("l-"));
    assert!(matches!(s.last().2, Reason::SliceGone { slice: JobId(101), .. }));
    assert!(s.done.contains(&Effect::Release(JobId(101))));
    s.invariant();
    let unit = s.unit_of(102);
    let generation = s.core.status().generation;
    s.says(unit, FromSupervisor::Exited { generation, rank: 2, code: Some(7), signal: None });
    s.pass(6_000);
    assert_eq!(s.exit(), Some(7));
    assert!(s.done.contains(&Effect::Release(JobId(102))));
}

#[test]
fn an_end_without_leaving_is_the_end_of_the_job() {
    let mut s = Stage::new(&[1, 1], "2-8");
    s.grow("g", &[("n3", 1)]);
    for (rank, unit) in [(0, UnitId(0)), (1, UnitId(1)), (2, s.unit_of(101))] {
        assert_eq!(s.exit(), None);
        s.says(unit, FromSupervisor::Exited { generation: 2, rank, code: Some(0), signal: None });
    }
    assert_eq!(s.exit(), Some(0));
    assert!(s.done.contains(&Effect::Release(JobId(101))));
}

#[test]
fn cancel_reaches_every_rank_and_gives_slices_back() {
    let mut s = Stage::new(&[2], "2-8");
    s.grow("g", &[("n2", 2)]);
    s.says(UnitId(0), FromSupervisor::Signalled { signal: 10 });
    assert_eq!(s.told(|m| matches!(m, ToSupervisor::Signal { signal: 10, .. })), 2);
    s.says(UnitId(0), FromSupervisor::Signalled { signal: 15 });
    s.pass(1_000);
    assert_eq!(s.told(|m| matches!(m, ToSupervisor::Signal { signal: 15, .. })), 2);
    assert_eq!(s.exit(), Some(143));
    assert!(s.done.contains(&Effect::Release(JobId(101))));
}

#[test]
fn a_preempted_slice_is_left_in_time() {
    let mut s = Stage::new(&[2], "2-8");
    s.grow("g", &[("n2", 2), ("n3", 2)]);
    let unit = s.unit_of(102);
    s.says(unit, FromSupervisor::Signalled { signal: 15 });
    assert!(s.done.contains(&Effect::AskPreemption(JobId(102))));
    assert_eq!(s.exit(), None);
    s.handle(Event::Preempted { slice: JobId(102), grace: 10 });
    assert_eq!(s.world(), [2, 2]);
    assert_eq!(s.last().2, Reason::Preempted { slice: JobId(102), grace: 10 });
    assert_eq!(s.told(|m| matches!(m, ToSupervisor::Signal { .. })), 0);
}

#[test]
fn a_growth_that_slurm_does_not_grant_changes_nothing() {
    let mut s = Stage::new(&[2], "2-8");
    s.grant = false;
    s.grow("g", &[("n2", 2)]);
    let token = s.core.open_asks.iter().next().unwrap().clone();
    let outcome = AskOutcome::Withdrawn { waited: 5, slurm: "Resources".into(), expected_start: None };
    s.handle(Event::Asked { token: token.clone(), outcome });
    assert_eq!((s.last().1, s.world()), (State::Undone, vec![2]));
    // An answer after the end is given back at once.
    let late = AskOutcome::Granted { job: JobId(500), node: "n2".into(), gpus: 2, cpus: 4, indexes: vec![] };
    s.handle(Event::Asked { token, outcome: late });
    assert!(s.done.contains(&Effect::Release(JobId(500))));
    assert!(s.core.status().slices.is_empty());
    s.grow("too much", &[("n2", 7)]);
    assert!(matches!(s.last().2, Reason::AtMax { .. }));
}

#[test]
fn a_base_without_gpus_waits_and_says_so() {
    let mut s = Stage::new(&[0], "0-4");
    assert!(s.core.status().ready && s.world().is_empty());
    s.grow("g", &[("n2", 4)]);
    assert_eq!((s.world(), s.last().1), (vec![4], State::Settled));
    s.shrink("s", &[101]);
    assert_eq!((s.world(), s.last().1), (vec![], State::Released));
    assert!(s.core.status().ready, "at zero again");
    assert_eq!(s.exit(), None);
    let mut s = Stage::new(&[0], "0-4");
    s.handle(Event::Ends { at: Some(s.now + 60_000) });
    s.pass(54_000);
    assert_eq!(s.exit(), None);
    s.pass(2_000);
    assert_eq!(s.exit(), Some(pliant_protocol::exit::NEVER_STARTED));
}

#[test]
fn a_device_is_never_held_twice() {
    let mut s = Stage::new(&[2], "2-8");
    s.grant = false;
    s.grow("g", &[("n2", 1), ("n2", 1)]);
    for (job, token) in s.core.open_asks.clone().into_iter().enumerate() {
        let job = JobId(200 + u32::try_from(job).unwrap());
        let outcome = AskOutcome::Granted { job, node: "n2".into(), gpus: 1, cpus: 1, indexes: vec![3] };
        s.handle(Event::Asked { token, outcome });
    }
    assert_eq!(s.last().1, State::Undone);
    assert!(matches!(s.last().2, Reason::Failed { what } if what.contains("GPU 3 of n2")));
    assert_eq!(s.world(), [2]);
    assert!(s.done.contains(&Effect::Release(JobId(200))));
}

#[test]
fn a_slow_save_raises_the_grace_once() {
    let mut s = Stage::new(&[1], "1-2");
    let report = |step| FromSupervisor::Report {
        generation: 1,
        rank: 0,
        progress: Progress { step: Some(step), ..Progress::default() },
    };
    s.core.pace.saved(Some(30_000));
    s.says(UnitId(0), report(1));
    s.now += 20_000;
    s.says(UnitId(0), report(2));
    assert_eq!(s.core.status().grace, 71);
    let said = s.done.iter().filter(|e| matches!(e, Effect::Say(t) if t.contains("raised to 71"))).count();
    assert_eq!(said, 1);
}

#[test]
fn many_cycles_keep_the_invariant() {
    let mut s = Stage::new(&[2], "2-8");
    for i in 0..50u32 {
        s.grow(&format!("g{i}"), &[("n2", 2)]);
        s.invariant();
        assert_eq!(s.world(), [2, 2]);
        let slice = s.next_job;
        s.shrink(&format!("s{i}"), &[slice]);
        s.invariant();
        assert_eq!(s.world(), [2]);
    }
    assert_eq!(s.core.units.len(), 1);
}
