//! A world's processes, from the port of its store to the exit of its last rank.

use super::{Core, Effect, Millis, UnitId, UnitState};
use pliant_model::Member;
use pliant_protocol::step::{Spawn, ToSupervisor};

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By itself.
    Code(i32),
    /// By a signal.
    Signal(i32),
    /// With its step.
    Lost,
}

impl End {
    /// The exit code that stands for it, 128 + signal where a signal ended it.
    pub fn code(self) -> u8 {
        match self {
            End::Code(code) => u8::try_from(code & 0xff).unwrap_or(1),
            End::Signal(signal) => u8::try_from((128 + signal) & 0xff).unwrap_or(1),
            End::Lost => 1,
        }
    }
}

/// One rank.
#[derive(Clone, Debug)]
pub struct Rank {
    /// Where it runs.
    pub unit: UnitId,
    /// Its client is in `connect()`: milliseconds from exec.
    pub ready: Option<u64>,
    /// It has finished its first step.
    pub stepped: bool,
    /// Boundaries that it has passed, as far as known.
    pub passed: u64,
    /// Its last vote: boundary, promised.
    pub vote: Option<(u64, bool)>,
    /// When its `should_leave()` returned true.
    pub left: Option<Millis>,
    /// How and when it ended.
    pub end: Option<(End, Millis)>,
}

/// The part of a generation on one unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Where.
    pub unit: UnitId,
    /// Its first rank.
    pub first: u32,
    /// How many.
    pub ranks: u32,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Generation {
    /// From 1.
    pub number: u32,
    /// In the order of ranks.
    pub parts: Vec<Part>,
    /// As told to pliantd.
    pub world: Vec<Member>,
    /// By rank.
    pub ranks: Vec<Rank>,
    /// Started on hold: waits for Start.
    pub hold: bool,
    /// Its processes have been started.
    pub spawned: bool,
    /// Since when it trains.
    pub running_since: Option<Millis>,
    /// SIGTERM or SIGKILL has been sent by us.
    pub ended_by_us: bool,
    /// A process failed before the generation trained.
    pub failed: Option<String>,
    /// A boundary has been committed: whoever ends with 0 from now on has left, whether or not its word came.
    pub committed: bool,
    /// Ended because its processes never heard Start: the same world is started again, without hold.
    pub again: bool,
    /// The last boundary that was proposed. Never the same twice: an old vote must not count for a new proposal.
    pub proposed: u64,
}

impl Generation {
    /// All ranks have said that they use the client.
    pub fn all_ready(&self) -> bool {
        self.spawned && self.ranks.iter().all(|r| r.ready.is_some())
    }

    /// All have finished a step.
    pub fn all_stepped(&self) -> bool {
        self.ranks.iter().all(|r| r.stepped)
    }

    /// No process is left.
    pub fn all_ended(&self) -> bool {
        self.spawned && self.ranks.iter().all(|r| r.end.is_some())
    }

    /// Whether it runs on that unit.
    pub fn is_on(&self, unit: UnitId) -> bool {
        self.parts.iter().any(|p| p.unit == unit)
    }

    /// The most boundaries that a rank is known to have passed.
    pub fn passed(&self) -> u64 {
        self.ranks.iter().map(|r| r.passed).max().unwrap_or(0)
    }

    /// Whether it serves: first steps done, or a script without client for `alone` ms (`None`: it has one).
    pub fn settled(&self, now: Millis, alone: Option<Millis>) -> bool {
        let Some(since) = self.running_since else { return false };
        self.all_stepped()
            || (self.ranks.iter().all(|r| r.ready.is_none()) && alone.is_some_and(|alone| now >= since + alone))
    }
}

/// How long a world of a script that is known to have no client runs before it counts as training.
const ALONE: Millis = 3_000;

impl Core {
    /// After how long a world in which no rank has connected is one of a script without client. Of the first world
    /// nobody knows whether it is still loading, so the wait is long; a script that has connected once always will.
    pub(super) fn alone_after(&self) -> Option<Millis> {
        match self.client {
            Some(true) => None,
            Some(false) => Some(ALONE),
            None => Some(self.settings.client_wait.saturating_mul(1_000)),
        }
    }

    /// Remembers what the present world shows about the script.
    pub(super) fn learn_client(&mut self) {
        let Some(running) = &self.running else { return };
        if running.ranks.iter().any(|r| r.ready.is_some()) {
            self.client = Some(true);
        } else if running.settled(self.now, self.alone_after()) {
            self.client = Some(false);
        }
    }

    pub(super) fn generation(&mut self, number: u32) -> Option<&mut Generation> {
        [self.running.as_mut(), self.next.as_mut()].into_iter().flatten().find(|g| g.number == number)
    }

    pub(super) fn rank(&mut self, generation: u32, rank: u32, then: impl FnOnce(&mut Rank)) {
        let at = usize::try_from(rank).unwrap_or(usize::MAX);
        if let Some(r) = self.generation(generation).and_then(|g| g.ranks.get_mut(at)) {
            then(r);
        }
    }

    /// The units of a new world in the order of ranks: the base first, then the slices by age.
    fn members(&self) -> Vec<UnitId> {
        let usable = |u: &&super::Unit| u.state == UnitState::Up && !u.leaving && u.gpus > 0;
        let mut all: Vec<_> = self.units.values().filter(usable).map(|u| (u.slice.is_some(), u.id)).collect();
        all.sort_unstable();
        all.into_iter().map(|(_, id)| id).collect()
    }

    /// Whether a new world would have any rank.
    pub(super) fn has_members(&self) -> bool {
        !self.members().is_empty()
    }

    /// Whether every unit of a new world can pass words to its ranks.
    pub(super) fn members_have_agents(&self) -> bool {
        self.members().iter().all(|id| self.units.get(id).is_some_and(|u| u.agent))
    }

    /// Every member has its devices, and no device is held twice (B26).
    fn devices_are_right(&self, members: &[UnitId]) -> Result<(), String> {
        let mut seen = std::collections::BTreeSet::new();
        for unit in members.iter().filter_map(|id| self.units.get(id)) {
            for index in &unit.indexes {
                if !seen.insert((&unit.node, *index)) {
                    return Err(format!("GPU {index} of {} belongs to two members of the new world", unit.node));
                }
            }
        }
        Ok(())
    }

    /// Begins the next generation: asks for the port of its store.
    ///
    /// # Errors
    /// When the devices of the new world are not right; nothing has been started then.
    pub(super) fn prepare_next(&mut self, hold: bool) -> Result<(), String> {
        let members = self.members();
        self.devices_are_right(&members)?;
        self.last_generation += 1;
        let number = self.last_generation;
        let (mut parts, mut world, mut ranks) = (vec![], vec![], vec![]);
        for unit in members.iter().filter_map(|id| self.units.get(id)) {
            let first = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
            parts.push(Part { unit: unit.id, first, ranks: unit.gpus });
            world.push(Member { slice: unit.slice, node: unit.node.clone(), gpus: unit.gpus });
            let rank =
                Rank { unit: unit.id, ready: None, stepped: false, passed: 0, vote: None, left: None, end: None };
            ranks.extend((0..unit.gpus).map(|_| rank.clone()));
        }
        if let Some(first) = parts.first() {
            self.out.push(Effect::Tell(first.unit, ToSupervisor::ReservePort { generation: number }));
        }
        self.next = Some(Generation {
            number,
            parts,
            world,
            ranks,
            hold,
            spawned: false,
            running_since: None,
            ended_by_us: false,
            failed: None,
            committed: false,
            again: false,
            proposed: 0,
        });
        Ok(())
    }

    /// The port is there: starts the processes.
    pub(super) fn port(&mut self, number: u32, port: u16) {
        let Some(next) = self.next.as_mut().filter(|g| g.number == number && !g.spawned) else { return };
        next.spawned = true;
        let first = next.parts.first().and_then(|p| self.units.get(&p.unit));
        let master_addr = first.map(|u| u.addr.clone()).unwrap_or_default();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let (world_size, nodes) = (count(next.ranks.len()), count(next.parts.len()));
        for (at, part) in next.parts.iter().enumerate() {
            let spawn = Spawn {
                generation: number,
                first_rank: part.first,
                ranks: part.ranks,
                world_size,
                node_rank: count(at),
                nodes,
                master_addr: master_addr.clone(),
                master_port: port,
                hold: next.hold,
            };
            self.out.push(Effect::Tell(part.unit, ToSupervisor::Spawn(spawn)));
        }
        if !next.hold {
            self.next_runs();
        }
    }

    /// The next generation becomes the present one. The old one must be gone.
    pub(super) fn next_runs(&mut self) {
        let Some(mut next) = self.next.take() else { return };
        if next.hold && next.spawned {
            let number = next.number;
            self.out
                .extend(next.parts.iter().map(|p| Effect::Tell(p.unit, ToSupervisor::Start { generation: number })));
        }
        if !next.spawned {
            // Its port is still to come; it then starts at once.
            next.hold = false;
            self.next = Some(next);
            return;
        }
        next.running_since = Some(self.now);
        self.ever_ran = true;
        self.pace.restart();
        self.running = Some(next);
    }

    /// Kills the generation that loads.
    pub(super) fn drop_next(&mut self) {
        if let Some(next) = self.next.take() {
            self.signal_ranks(&next, 9);
        }
    }

    pub(super) fn signal_ranks(&mut self, generation: &Generation, signal: i32) {
        let number = Some(generation.number);
        let up = |p: &&Part| self.units.get(&p.unit).is_some_and(|u| u.state == UnitState::Up);
        let to: Vec<UnitId> = generation.parts.iter().filter(up).map(|p| p.unit).collect();
        self.out.extend(to.into_iter().map(|id| Effect::Tell(id, ToSupervisor::Signal { generation: number, signal })));
    }

    /// To all ranks of the present generation.
    pub(super) fn tell_running(&mut self, message: &impl Fn(u32) -> ToSupervisor) {
        let Some(running) = &self.running else { return };
        let number = running.number;
        self.out.extend(running.parts.iter().map(|p| Effect::Tell(p.unit, message(number))));
    }

    /// Sends a signal to the present generation, which is to end by it.
    pub(super) fn end_running(&mut self, signal: i32) {
        if let Some(mut running) = self.running.take() {
            running.ended_by_us = true;
            self.signal_ranks(&running, signal);
            self.running = Some(running);
        }
    }

    /// The unit is gone and its ranks with it.
    pub(super) fn ranks_lost(&mut self, unit: UnitId) {
        let now = self.now;
        for generation in [self.running.as_mut(), self.next.as_mut()].into_iter().flatten() {
            for rank in generation.ranks.iter_mut().filter(|r| r.unit == unit) {
                rank.end = rank.end.or(Some((End::Lost, now)));
            }
        }
    }

    pub(super) fn exited(&mut self, generation: u32, rank: u32, code: Option<i32>, signal: Option<i32>) {
        let end = match (code, signal) {
            (Some(code), _) => End::Code(code),
            (None, Some(signal)) => End::Signal(signal),
            (None, None) => End::Lost,
        };
        let (now, torchrun) = (self.now, self.settings.torchrun);
        let running = self.running.as_ref().map(|g| g.number);
        let Some(found) = self.generation(generation) else { return };
        let at = usize::try_from(rank).unwrap_or(usize::MAX);
        let Some(unit) = found.ranks.get(at).map(|r| r.unit) else { return };
        let mut left = true;
        for (i, r) in found.ranks.iter_mut().enumerate() {
            if i == at || (torchrun && r.unit == unit) {
                r.end = r.end.or(Some((end, now)));
                left &= r.left.is_some();
            }
        }
        if running == Some(generation) {
            self.pace.saved(found_save(self.running.as_ref(), at));
            if end != End::Code(0) && !left {
                self.rank_failed(rank, unit, end);
            } else if end != End::Code(0) {
                self.say(format!("rank {rank} left the world with exit code {}", end.code()));
            }
        } else if let Some(next) = self.next.as_mut() {
            next.failed = Some(format!("rank {rank} ended with code {} while it loaded", end.code()));
        }
    }

    pub(super) fn not_started(&mut self, generation: u32, rank: u32, error: &str) {
        let at = usize::try_from(rank).unwrap_or(usize::MAX);
        if let Some(running) = self.running.as_ref().filter(|g| g.number == generation) {
            let unit = running.ranks.get(at).map(|r| r.unit);
            let slice = unit.and_then(|id| self.units.get(&id)).filter(|u| u.slice.is_some());
            let on = slice.map(|u| (u.id, u.leaving, u.node.clone()));
            if let Some((id, leaving, node)) = on {
                // A lent node without the program is no reason to end what trains elsewhere.
                if !leaving && self.ending.is_none() {
                    self.say(format!("rank {rank} could not be started on {node}: {error}: the slice is given back"));
                    self.give_back(id);
                    self.lose_trained(id);
                }
                return;
            }
            self.say(format!("rank {rank} could not be started: {error}"));
            self.begin_end(pliant_protocol::exit::NO_COMMAND, 1_000);
        } else if let Some(next) = self.next.as_mut().filter(|g| g.number == generation) {
            next.failed = Some(format!("rank {rank} could not be started: {error}"));
        }
    }
}

/// Milliseconds between the boundary at which a rank left and its exit: the time of its save.
fn found_save(running: Option<&Generation>, at: usize) -> Option<Millis> {
    let rank = running?.ranks.get(at)?;
    Some(rank.end?.1.saturating_sub(rank.left?))
}
