//! What goes wrong, and what must not come of it.

use super::*;

impl Stage {
    /// A world of 2 + 2 over n1 and the slice 101 on n2.
    fn grown() -> Stage {
        let mut s = Stage::new(&[2], "2-8");
        s.grow("g", &[("n2", 2)]);
        assert_eq!(s.world(), [2, 2]);
        s
    }

    fn exited(&mut self, unit: UnitId, rank: u32, code: i32) {
        let generation = self.core.status().generation;
        self.says(unit, FromSupervisor::Exited { generation, rank, code: Some(code), signal: None });
    }

    fn vote(&mut self, unit: UnitId, rank: u32, accept: bool, passed: u64) {
        let generation = self.core.status().generation;
        let boundary = self.proposed();
        self.says(unit, FromSupervisor::Vote { generation, rank, boundary, accept, passed });
    }

    /// The last boundary that was proposed.
    fn proposed(&self) -> u64 {
        let found = self.done.iter().rev().find_map(|e| match e {
            Effect::Tell(_, ToSupervisor::Propose { boundary, .. }) => Some(*boundary),
            _ => None,
        });
        found.unwrap()
    }

    /// Votes for both ranks of the base, whose ranks then neither leave nor end by themselves.
    fn agree_by_hand(&mut self, passed: u64) {
        self.done.clear();
        let generation = self.core.status().generation;
        let boundary = self.core.running.as_ref().unwrap().proposed;
        for rank in 0..2 {
            let vote = FromSupervisor::Vote { generation, rank, boundary, accept: true, passed };
            let effects = self.core.handle(Event::UnitSays { unit: UnitId(0), message: vote }, self.now);
            self.done.extend(effects);
        }
        assert_eq!(self.told(|m| matches!(m, ToSupervisor::Commit { .. })), 1);
    }

    fn kills(&self) -> usize {
        self.told(|m| matches!(m, ToSupervisor::Signal { generation: Some(1), .. }))
    }
}

#[test]
fn a_growth_kills_nobody_when_votes_do_not_come() {
    let mut s = Stage::new(&[2], "2-8");
    s.obedient = false;
    s.grow("g", &[("n2", 2)]);
    s.pass(30_000);
    assert_eq!((s.world(), s.last().1), (vec![2], State::Undone));
    assert_eq!((s.kills(), s.exit()), (0, None));
    let (aborts, proposals) =
        (s.told(|m| matches!(m, ToSupervisor::Abort { .. })), s.told(|m| matches!(m, ToSupervisor::Propose { .. })));
    assert_eq!(aborts, proposals, "no rank keeps a promise");
    assert!(s.done.contains(&Effect::Release(JobId(101))));
}

#[test]
fn a_growth_without_an_agent_is_taken_back() {
    // The agent goes while votes are due.
    let mut s = Stage::new(&[2], "2-8");
    s.obedient = false;
    s.grow("g", &[("n2", 2)]);
    s.says(UnitId(0), FromSupervisor::Agent { connected: false });
    assert_eq!((s.world(), s.last().1, s.kills()), (vec![2], State::Undone, 0));
    // It is away from the start: nobody is even asked.
    let before = s.told(|m| matches!(m, ToSupervisor::Propose { .. }));
    s.grow("h", &[("n2", 2)]);
    s.pass(25_000);
    assert_eq!((s.world(), s.last().0.as_str(), s.last().1, s.kills()), (vec![2], "h", State::Undone, 0));
    assert_eq!(s.told(|m| matches!(m, ToSupervisor::Propose { .. })), before);
    // The new node has none.
    let mut s = Stage::new(&[2], "2-8");
    s.agents = false;
    s.grow("g", &[("n2", 2)]);
    assert_eq!((s.world(), s.last().1, s.kills()), (vec![2], State::Undone, 0));
}

#[test]
fn a_growth_lets_its_ranks_save_as_long_as_it_takes() {
    let mut s = Stage::new(&[2], "2-8");
    s.obedient = false;
    s.grow("g", &[("n2", 2)]);
    s.agree_by_hand(1);
    s.pass(90_000);
    assert_eq!(s.kills(), 0, "grace 20 s, grace_max 100 s");
    s.exited(UnitId(0), 0, 0);
    s.exited(UnitId(0), 1, 0);
    assert_eq!((s.world(), s.exit()), (vec![2, 2], None));
    // With a notice behind it the growth may take no longer than that.
    let mut s = Stage::new(&[2], "2-8");
    s.obedient = false;
    s.grow("g", &[("n2", 2)]);
    s.agree_by_hand(1);
    s.shrink("s", &[101]);
    s.pass(21_000);
    assert_eq!(s.kills(), 1);
}

#[test]
fn a_growth_does_not_wait_for_a_script_that_never_asks() {
    let mut s = Stage::new(&[2], "2-8");
    s.obedient = false;
    s.grow("g", &[("n2", 2)]);
    s.agree_by_hand(0);
    s.pass(21_000);
    assert_eq!(s.kills(), 1, "its grace of 20 s is over");
}

#[test]
fn a_world_on_hold_whose_agent_goes_is_started_again() {
    let mut s = Stage::new(&[2], "2-8");
    s.obedient = false;
    s.grow("g", &[("n2", 2)]);
    s.agree_by_hand(1);
    let unit = s.unit_of(101);
    s.says(unit, FromSupervisor::Agent { connected: false });
    s.exited(UnitId(0), 0, 0);
    s.exited(UnitId(0), 1, 0);
    assert_eq!(s.told(|m| matches!(m, ToSupervisor::Start { .. })), 0, "it would never hear it");
    assert_eq!(s.told(|m| matches!(m, ToSupervisor::Spawn(w) if !w.hold && w.world_size == 4)), 2);
    // Start was on its way when the agent went: the process gives up, which is no failure.
    let mut s = Stage::grown();
    for rank in &mut s.core.running.as_mut().unwrap().ranks {
        rank.stepped = false;
    }
    let unit = s.unit_of(101);
    s.exited(unit, 2, 75);
    s.pass(3_000);
    assert_eq!((s.world(), s.exit()), (vec![2, 2], None));
    assert_eq!(s.core.status().generation, 3);
    s.exited(unit, 2, 75);
    s.pass(3_000);
    assert_eq!(s.exit(), Some(75), "a code of the script's own");
}

#[test]
fn an_exit_after_a_commit_is_no_end_of_the_training() {
    let mut s = Stage::new(&[2], "2-8");
    s.obedient = false;
    s.grow("g", &[("n2", 2)]);
    s.agree_by_hand(1);
    // The agent has died: no word of leaving comes.
    s.exited(UnitId(0), 0, 0);
    s.exited(UnitId(0), 1, 0);
    s.pass(3_000);
    assert_eq!((s.world(), s.exit()), (vec![2, 2], None));
}

#[test]
fn steps_that_are_starting_hear_the_launcher() {
    let mut core = Core::new(settings(&[2], "2-8"), Box::new(|| "t".into()));
    core.start(0);
    let ping = Effect::Tell(UnitId(0), ToSupervisor::Ping);
    assert!(!core.handle(Event::Tick, 4_900).contains(&ping));
    assert!(core.handle(Event::Tick, 5_100).contains(&ping));
}

#[test]
fn a_base_that_slurm_lets_go_on_gives_its_ranks_their_time() {
    for (code, expected) in [(0, 0), (3, 3)] {
        let mut s = Stage::grown();
        (s.goes_on, s.obedient) = (true, false);
        s.says(UnitId(0), FromSupervisor::Signalled { signal: 15 });
        assert_eq!(s.told(|m| matches!(m, ToSupervisor::Signal { signal: 15, .. })), 2);
        s.pass(120_000);
        assert_eq!((s.exit(), s.told(|m| matches!(m, ToSupervisor::Signal { signal: 9, .. }))), (None, 0));
        let unit = s.unit_of(101);
        for (unit, rank) in [(UnitId(0), 0), (UnitId(0), 1), (unit, 2), (unit, 3)] {
            assert_eq!(s.exit(), None);
            s.exited(unit, rank, code);
        }
        assert_eq!(s.exit(), Some(expected));
    }
}

#[test]
fn a_base_that_slurm_ends_has_five_seconds() {
    // Slurm says that it is being ended, or nothing at all.
    for answers in [true, false] {
        let mut s = Stage::grown();
        (s.answers, s.obedient) = (answers, false);
        s.says(UnitId(0), FromSupervisor::Signalled { signal: 15 });
        s.pass(4_900);
        assert_eq!(s.exit(), None);
        s.pass(300);
        assert_eq!(s.exit(), Some(143));
    }
    // First a warning, then the end.
    let mut s = Stage::grown();
    (s.goes_on, s.obedient) = (true, false);
    s.says(UnitId(0), FromSupervisor::Signalled { signal: 15 });
    s.pass(60_000);
    s.goes_on = false;
    s.says(UnitId(0), FromSupervisor::Signalled { signal: 15 });
    s.pass(4_900);
    assert_eq!(s.exit(), None);
    s.pass(300);
    assert_eq!(s.exit(), Some(143));
}

#[test]
fn a_peer_that_crashes_first_is_a_loss_of_the_slice() {
    // Slurm's SIGTERM kills a rank of the slice; a peer in the base crashes, and is heard of first.
    let crash = |s: &mut Stage| {
        s.exited(UnitId(0), 0, 1);
        s.pass(100);
    };
    let mut s = Stage::grown();
    crash(&mut s);
    let unit = s.unit_of(101);
    s.says(unit, FromSupervisor::Signalled { signal: 15 });
    s.pass(5_000);
    assert_eq!((s.world(), s.exit()), (vec![2], None));
    // The same with the rank's own end in between, and told by Slurm.
    let mut s = Stage::grown();
    crash(&mut s);
    s.handle(Event::Preempted { slice: JobId(101), grace: 30 });
    s.pass(5_000);
    assert_eq!((s.world(), s.exit()), (vec![2], None));
    let mut s = Stage::grown();
    let unit = s.unit_of(101);
    s.core.units.get_mut(&unit).unwrap().terminated = Some(s.now);
    crash(&mut s);
    let exited = FromSupervisor::Exited { generation: 2, rank: 2, code: None, signal: Some(15) };
    s.says(unit, exited);
    s.pass(5_000);
    assert_eq!((s.world(), s.exit()), (vec![2], None));
}

#[test]
fn a_failure_is_not_judged_without_an_answer_of_slurm() {
    let mut s = Stage::grown();
    s.answers = false;
    s.exited(UnitId(0), 0, 1);
    s.pass(10_000);
    assert_eq!(s.exit(), None);
    s.handle(Event::SliceEnded { slice: JobId(101), state: "PREEMPTED".into() });
    s.pass(5_000);
    assert_eq!((s.world(), s.exit()), (vec![2], None));
    // An older look proves nothing, and 20 s are enough.
    let mut s = Stage::grown();
    s.answers = false;
    s.exited(UnitId(0), 0, 1);
    s.handle(Event::Checked { number: 0 });
    s.pass(19_000);
    assert_eq!(s.exit(), None);
    s.pass(4_000);
    assert_eq!(s.exit(), Some(1));
}

#[test]
fn a_rank_that_cannot_follow_is_no_failure() {
    let mut s = Stage::new(&[2], "2-8");
    s.obedient = false;
    s.grow("g", &[("n2", 2)]);
    s.agree_by_hand(1);
    s.says(UnitId(0), FromSupervisor::Left { generation: 1, rank: 0, boundary: 2 });
    // The commit reaches rank 1 too late: its collective fails while rank 0 still saves.
    s.exited(UnitId(0), 1, 1);
    s.pass(10_000);
    assert_eq!((s.kills(), s.exit()), (0, None));
    s.exited(UnitId(0), 0, 0);
    s.pass(3_000);
    assert_eq!((s.world(), s.exit()), (vec![2, 2], None));
}

#[test]
fn ranks_that_cannot_follow_do_not_hold_the_world_up() {
    let mut s = Stage::grown();
    s.obedient = false;
    s.shrink("s", &[101]);
    let unit = s.unit_of(101);
    let generation = s.core.status().generation;
    for (unit, rank) in [(UnitId(0), 0), (UnitId(0), 1), (unit, 2), (unit, 3)] {
        let boundary = s.core.running.as_ref().unwrap().proposed;
        let message = FromSupervisor::Vote { generation, rank, boundary, accept: true, passed: 0 };
        let effects = s.core.handle(Event::UnitSays { unit, message }, s.now);
        s.done.extend(effects);
    }
    s.says(UnitId(0), FromSupervisor::Left { generation, rank: 0, boundary: 2 });
    s.exited(UnitId(0), 0, 0);
    s.exited(unit, 2, 1);
    s.pass(2_500);
    assert_eq!((s.world(), s.exit()), (vec![2], None), "ranks 1 and 3 hung in a collective");
}

#[test]
fn boundaries_do_not_run_away() {
    let mut s = Stage::new(&[2], "2-8");
    (s.obedient, s.passed) = (false, 0);
    s.grow("g", &[("n2", 2)]);
    assert_eq!(s.proposed(), 2);
    // Votes that do not come say nothing.
    s.pass(9_500);
    assert!(s.proposed() <= 5, "{}", s.proposed());
    // The first refusal tells where the ranks are; further ones lead further ahead.
    s.vote(UnitId(0), 0, false, 100);
    assert_eq!(s.proposed(), 102);
    s.vote(UnitId(0), 0, false, 200);
    assert_eq!(s.proposed(), 204);
    s.vote(UnitId(0), 0, false, 300);
    assert_eq!(s.proposed(), 308);
    // Steps of 6 s: three of them fit into the grace of 20 s.
    s.core.pace.restart();
    s.core.pace.step(1, 0);
    s.core.pace.step(2, 6_000);
    s.vote(UnitId(0), 0, false, 400);
    assert_eq!(s.proposed(), 403);
}

#[test]
fn long_steps_raise_the_grace_before_any_save() {
    let mut s = Stage::new(&[1], "1-2");
    s.core.pace.step(1, 0);
    s.core.pace.step(2, 30_000);
    let progress = Progress { loss: Some(1.0), ..Progress::default() };
    s.says(UnitId(0), FromSupervisor::Report { generation: 1, rank: 0, progress });
    assert_eq!(s.core.status().grace, 61);
}

#[test]
fn an_unkillable_rank_does_not_keep_the_slice() {
    let mut s = Stage::grown();
    let unit = s.unit_of(101);
    s.obedient = false;
    // Nothing ends the ranks of the slice.
    let generation = s.core.status().generation;
    s.shrink("s", &[101]);
    let kill = |s: &mut Stage, ms: u64| {
        for _ in 0..ms / 100 {
            s.now += 100;
            let effects = s.core.handle(Event::Tick, s.now);
            for e in effects {
                let for_slice = matches!(&e, Effect::Tell(u, ToSupervisor::Signal { .. }) if *u == unit);
                if for_slice { s.done.push(e) } else { s.play(vec![e]) }
            }
        }
    };
    kill(&mut s, 21_000);
    for rank in 0..2 {
        s.says(UnitId(0), FromSupervisor::Exited { generation, rank, code: None, signal: Some(9) });
    }
    assert!(!s.done.contains(&Effect::Release(JobId(101))));
    kill(&mut s, 11_000);
    assert!(s.done.contains(&Effect::Release(JobId(101))));
    assert_eq!((s.world(), s.last().1, s.exit()), (vec![2], State::Released, None));
}

#[test]
fn a_lent_node_without_the_program_is_given_back() {
    let mut s = Stage::without_client(&[2], "2-8");
    s.pass(3_100);
    s.grow("g", &[("n2", 2)]);
    let (unit, generation) = (s.unit_of(101), s.core.status().generation);
    for rank in [2, 3] {
        s.says(unit, FromSupervisor::NotStarted { generation, rank, error: "train: not found".into() });
    }
    s.pass(5_000);
    assert_eq!((s.world(), s.exit()), (vec![2], None));
    assert!(s.done.contains(&Effect::Release(JobId(101))));
    // On the base it is the end.
    let generation = s.core.status().generation;
    s.says(UnitId(0), FromSupervisor::NotStarted { generation, rank: 0, error: "train: not found".into() });
    s.pass(3_000);
    assert_eq!(s.exit(), Some(pliant_protocol::exit::NO_COMMAND));
}

#[test]
fn too_few_gpus_in_a_step_come_with_the_remedy() {
    let mut core = Core::new(settings(&[2], "2-8"), Box::new(|| "t".into()));
    core.start(0);
    let up = Event::UnitUp { unit: UnitId(0), addr: "a".into(), gpus: vec!["0".into()], agent: true };
    let said = core.handle(up, 100).into_iter().find_map(|e| if let Effect::Say(t) = e { Some(t) } else { None });
    let said = said.unwrap();
    assert!(said.contains("Slurm allocated 2 GPU(s) and CUDA_VISIBLE_DEVICES of the step shows 1 (0)"), "{said}");
    assert!(said.contains("ask for CPUs near all of them, e.g. --cpus-per-gpu=1"), "{said}");
}
