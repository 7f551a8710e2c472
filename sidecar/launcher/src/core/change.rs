//! A change of the world on its way: prepare the next generation, agree on a boundary, let the old ranks leave, let
//! the next ones train, give slices back.

use super::orders::RAISE;
use super::{Core, Effect, Millis, UnitId, UnitState};
use pliant_model::resize::{Kind, State};
use pliant_model::{Reason, Seconds};
use pliant_protocol::job::OrderStatus;
use pliant_protocol::step::ToSupervisor;

/// A slice that a growth has asked for.
#[derive(Clone, Debug)]
pub struct Coming {
    /// The request.
    pub token: String,
    /// Its step, once granted.
    pub unit: Option<UnitId>,
    /// Why it does not come.
    pub over: Option<Reason>,
}

impl Coming {
    /// Not decided yet.
    pub fn open(&self) -> bool {
        self.unit.is_none() && self.over.is_none()
    }
}

/// Where a change stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Slurm has been asked for slices.
    Asking { until: Millis },
    /// Their steps are starting.
    Raising { until: Millis },
    /// The next generation loads on hold.
    Preparing { until: Millis },
    /// A boundary has been proposed; votes are due. `round` counts refusals.
    Agreeing { boundary: u64, round: u32, until: Millis },
    /// The boundary is fixed; the old ranks save and leave.
    Leaving,
    /// The old ranks have got SIGTERM.
    Terminating { kill_at: Millis },
    /// The old ranks have got SIGKILL.
    Killed { since: Millis },
    /// The new world starts, then does its first step.
    Joining { until: Millis },
    /// Slices are being given back.
    Releasing,
}

/// A change under way.
#[derive(Clone, Debug)]
pub struct Change {
    /// As told to pliantd.
    pub status: OrderStatus,
    /// Where it stands.
    pub stage: Stage,
    /// What a growth has asked for.
    pub coming: Vec<Coming>,
    /// When ranks that have not left are killed; `None`: not announced yet.
    pub deadline: Option<Millis>,
    /// Its grace.
    pub grace: Seconds,
    /// The ranks had to be killed.
    pub grace_over: bool,
    /// A rank failed after others had left: whoever has not left cannot any more.
    pub broken: bool,
}

impl Change {
    /// Whether the present world has not been asked to leave yet for good: the change can still be taken back.
    pub fn can_be_undone(&self) -> bool {
        use Stage::{Agreeing, Asking, Preparing, Raising};
        matches!(self.stage, Asking { .. } | Raising { .. } | Preparing { .. } | Agreeing { .. })
    }
}

/// The longest that the old world trains on while the next one loads.
const LOAD: Millis = 30_000;
/// The same for a shrink, where somebody waits.
const LOAD_SHRINK: Millis = 20_000;
/// How long votes may take.
const VOTES: Millis = 3_000;
/// A process that SIGKILL has not ended by then (in a system call) holds its slice no longer.
const UNKILLABLE: Millis = 10_000;
/// Ranks that cannot reach a boundary any more have so long after SIGTERM.
const AFTER_BREAK: Millis = 2_000;
/// How long a growth waits for the first step of its newcomers before it counts as done.
const FIRST_STEP: Millis = 60_000;

impl Core {
    pub(super) fn advance_change(&mut self) -> bool {
        let Some(change) = self.change.take() else { return false };
        let before = (change.stage, change.status.state);
        match change.stage {
            Stage::Asking { until } => self.advance_asking(change, until),
            Stage::Raising { until } => self.advance_raising(change, until),
            Stage::Preparing { until } => self.advance_preparing(change, until),
            Stage::Agreeing { boundary, round, until } => self.advance_agreeing(change, boundary, round, until),
            Stage::Leaving | Stage::Terminating { .. } | Stage::Killed { .. } => self.advance_leaving(change),
            Stage::Joining { until } => self.advance_joining(change, until),
            Stage::Releasing => self.advance_releasing(change),
        }
        self.change.as_ref().is_none_or(|c| (c.stage, c.status.state) != before)
    }

    fn advance_asking(&mut self, mut change: Change, until: Millis) {
        if self.now >= until {
            for coming in change.coming.iter_mut().filter(|c| c.open()) {
                coming.over = Some(Reason::Failed { what: "no answer to the request for a slice".into() });
            }
        }
        if change.coming.iter().any(Coming::open) {
            self.change = Some(change);
            return;
        }
        if change.coming.iter().all(|c| c.unit.is_none()) {
            let reason = change.coming.iter().find_map(|c| c.over.clone());
            self.undo_grow(change, reason.unwrap_or(Reason::Failed { what: "no slice was granted".into() }));
            return;
        }
        self.reach(&mut change, State::Granted);
        change.stage = Stage::Raising { until: self.now + RAISE };
        self.change = Some(change);
    }

    fn advance_raising(&mut self, mut change: Change, until: Millis) {
        let state = |id: UnitId| self.units.get(&id).filter(|u| !u.leaving).map(|u| u.state);
        let units: Vec<UnitId> = change.coming.iter().filter_map(|c| c.unit).collect();
        let waiting: Vec<UnitId> = units.iter().copied().filter(|id| state(*id) == Some(UnitState::Starting)).collect();
        if !waiting.is_empty() && self.now < until {
            self.change = Some(change);
            return;
        }
        waiting.into_iter().for_each(|id| self.give_back(id));
        let up = |id: &UnitId| self.units.get(id).is_some_and(|u| u.state == UnitState::Up && !u.leaving);
        change.coming.retain(|c| c.unit.as_ref().is_some_and(up));
        let kept: Vec<_> = change.coming.iter().filter_map(|c| self.units.get(&c.unit?)?.slice).collect();
        change.status.slices.retain(|job| kept.contains(job));
        if change.coming.is_empty() {
            self.undo_grow(change, Reason::Failed { what: "the step in the new slice did not come up".into() });
        } else {
            self.prepare(change);
        }
    }

    /// Whether the present ranks can be asked to leave at a boundary.
    fn cooperates(&self) -> bool {
        self.running.as_ref().is_some_and(super::Generation::all_ready)
    }

    /// Loads the next generation beside the present one where that can be, then announces.
    pub(super) fn prepare(&mut self, mut change: Change) {
        self.drop_next();
        if self.running.is_none() {
            self.reach(&mut change, State::Announced);
            self.replace(change);
            return;
        }
        let reachable = self.members_have_agents();
        if change.status.kind == Kind::Grow && self.cooperates() && !reachable {
            self.undo_unheard(change);
            return;
        }
        if !(self.has_members() && self.cooperates() && reachable) {
            self.announce(change);
            return;
        }
        if let Err(why) = self.prepare_next(true) {
            self.say(why.clone());
            if change.status.kind == Kind::Grow {
                self.undo_grow(change, Reason::Failed { what: why });
                return;
            }
        }
        let load = match change.status.kind {
            Kind::Grow => LOAD,
            Kind::Shrink => LOAD_SHRINK.min(change.grace.saturating_mul(1_000) / 3),
        };
        change.stage = Stage::Preparing { until: self.now + load };
        self.change = Some(change);
    }

    fn advance_preparing(&mut self, change: Change, until: Millis) {
        let failed = self.next.as_ref().and_then(|g| g.failed.clone());
        if let Some(what) = failed {
            self.drop_next();
            if change.status.kind == Kind::Grow {
                self.say(format!("the new world did not come up: {what}; going on as before"));
                self.undo_grow(change, Reason::Failed { what });
            } else {
                self.announce(change);
            }
            return;
        }
        let ready = self.next.as_ref().is_none_or(super::Generation::all_ready);
        let over = self.running.as_ref().is_none_or(super::Generation::all_ended);
        if ready || over || self.now >= until {
            self.announce(change);
        } else {
            self.change = Some(change);
        }
    }

    /// Tells the present ranks.
    fn announce(&mut self, mut change: Change) {
        self.reach(&mut change, State::Announced);
        let deadline = self.now + change.grace.saturating_mul(1_000);
        let deadline = *change.deadline.get_or_insert(deadline);
        if self.cooperates() {
            self.propose(change, 0);
        } else {
            self.end_running(15);
            change.stage = Stage::Terminating { kill_at: deadline };
            self.change = Some(change);
        }
    }

    fn propose(&mut self, mut change: Change, round: u32) {
        // Two ahead of what is known. The first refusal tells how far the ranks are; after further ones they are faster
        // than the messages. Never so far that the steps up to it alone outlast the grace.
        let most = self.pace.steps_in(change.grace.saturating_mul(1_000)).unwrap_or(u64::MAX).max(2);
        let ahead = 2u64.saturating_mul(1 << round.saturating_sub(1).min(16)).min(most);
        let mut boundary = ahead;
        if let Some(running) = self.running.as_mut() {
            boundary = running.passed().saturating_add(ahead).max(running.proposed + 1);
            running.proposed = boundary;
        }
        for rank in self.running.iter_mut().flat_map(|g| g.ranks.iter_mut()) {
            rank.vote = None;
        }
        let (grace, reason) = (change.grace, change.status.reason.to_string());
        self.tell_running(&|generation| ToSupervisor::Propose { generation, boundary, grace, reason: reason.clone() });
        change.stage = Stage::Agreeing { boundary, round, until: self.now + VOTES };
        self.change = Some(change);
    }

    fn advance_agreeing(&mut self, change: Change, boundary: u64, round: u32, until: Millis) {
        if self.all_old_ended() {
            self.advance_leaving(change);
            return;
        }
        let late = change.deadline.is_some_and(|at| self.now >= at);
        if change.status.kind == Kind::Grow && (late || !self.members_have_agents()) {
            // Nobody needs a growth so much that ranks would be killed for it.
            self.tell_running(&|generation| ToSupervisor::Abort { generation, boundary });
            self.undo_unheard(change);
            return;
        }
        if late {
            self.advance_leaving(change);
            return;
        }
        let Some(running) = &self.running else { return self.advance_leaving(change) };
        let votes = || running.ranks.iter().filter(|r| r.end.is_none()).map(|r| r.vote.filter(|(b, _)| *b == boundary));
        let refused = votes().any(|v| v.is_some_and(|(_, accept)| !accept));
        if refused || self.now >= until {
            self.tell_running(&|generation| ToSupervisor::Abort { generation, boundary });
            // A vote that does not come says nothing about the pace of the ranks.
            self.propose(change, if refused { round + 1 } else { round });
        } else if votes().all(|v| v.is_some()) {
            self.commit(change, boundary);
        } else {
            self.change = Some(change);
        }
    }

    /// From here on the old ranks leave.
    fn commit(&mut self, mut change: Change, boundary: u64) {
        self.tell_running(&|generation| ToSupervisor::Commit { generation, boundary });
        if let Some(running) = self.running.as_mut() {
            running.committed = true;
        }
        if change.status.kind == Kind::Grow {
            // Nobody waits: the ranks may save as long as any notice may last. A growth is only ordered
            // after the first step: a script that has not asked whether to leave by then never does.
            let asks = self.running.as_ref().is_some_and(|g| g.passed() > 0);
            let patience = if asks { self.settings.grace_max.max(change.grace) } else { change.grace };
            change.deadline = Some(self.now + patience.saturating_mul(1_000));
        }
        change.stage = Stage::Leaving;
        self.change = Some(change);
        self.hurry();
    }

    /// A notice is waiting: a growth whose ranks are leaving may take no longer than it.
    pub(super) fn hurry(&mut self) {
        let notices = self.queue.iter().filter_map(|o| match o {
            pliant_protocol::job::Order::Shrink { grace, .. } => Some(*grace),
            pliant_protocol::job::Order::Grow { .. } => None,
        });
        let Some(grace) = notices.min() else { return };
        let at = self.now + grace.saturating_mul(1_000);
        if let Some(change) = self.change.as_mut().filter(|c| c.stage == Stage::Leaving) {
            change.deadline = Some(change.deadline.map_or(at, |d| d.min(at)));
        }
    }

    /// A growth whose ranks could not be asked: they train on as they are.
    fn undo_unheard(&mut self, change: Change) {
        let what = "the ranks could not be asked to leave: the agent of a node, or a rank, does not answer";
        self.undo_grow(change, Reason::Failed { what: what.into() });
    }

    fn all_old_ended(&self) -> bool {
        self.running.as_ref().is_none_or(super::Generation::all_ended)
    }

    fn advance_leaving(&mut self, mut change: Change) {
        if self.all_old_ended() {
            self.old_gone(change);
            return;
        }
        let kill_at = match change.stage {
            Stage::Terminating { kill_at } => Some(kill_at),
            Stage::Killed { since } => {
                if change.status.kind == Kind::Shrink && self.now >= since + UNKILLABLE {
                    self.leave_behind(&change);
                }
                None
            }
            _ => change.deadline,
        };
        let saving = |g: &super::Generation| g.ranks.iter().any(|r| r.left.is_some() && r.end.is_none());
        if change.broken && change.stage == Stage::Leaving && !self.running.as_ref().is_some_and(saving) {
            self.terminate_soon(&mut change, AFTER_BREAK);
            self.change = Some(change);
            return;
        }
        if kill_at.is_some_and(|at| self.now >= at) {
            if change.deadline.is_some_and(|at| self.now >= at) {
                change.grace_over = true;
                self.say(format!(
                    "the ranks did not leave within the grace of {} s and are killed; the training goes on from its \
                     last checkpoint",
                    change.grace
                ));
            }
            self.end_running(9);
            change.stage = Stage::Killed { since: self.now };
        }
        self.change = Some(change);
    }

    /// Ranks that nothing ends must not keep the slices from whom they are for.
    fn leave_behind(&mut self, change: &Change) {
        for id in self.units_of(change) {
            self.give_back(id);
            self.ranks_lost(id);
        }
    }

    fn units_of(&self, change: &Change) -> Vec<UnitId> {
        let meant = |u: &&super::Unit| u.slice.is_some_and(|job| change.status.slices.contains(&job));
        self.units.values().filter(meant).map(|u| u.id).collect()
    }

    /// The last old rank is gone.
    fn old_gone(&mut self, change: Change) {
        if let Some(old) = self.running.take() {
            let finished = !old.ended_by_us
                && !old.committed
                && old
                    .ranks
                    .iter()
                    .all(|r| r.left.is_none() && matches!(r.end, Some((super::generation::End::Code(0), _))));
            if finished {
                self.running = Some(old);
                self.change = Some(change);
                self.world_over();
                return;
            }
        }
        if change.status.kind == Kind::Shrink { self.drained(change) } else { self.replace(change) }
    }

    /// Shrink: nobody trains on the slices any more.
    pub(super) fn drained(&mut self, mut change: Change) {
        if change.grace_over {
            change.status.reason = Reason::GraceOver { grace: change.grace };
        }
        self.reach(&mut change, State::Drained);
        let leaving = self.units_of(&change);
        if self.running.is_none() {
            self.start_next();
        }
        leaving.into_iter().for_each(|id| self.give_back(id));
        change.stage = Stage::Releasing;
        self.change = Some(change);
    }

    /// Lets the next generation go, or brings one up.
    fn start_next(&mut self) {
        let usable = self.next.as_ref().is_some_and(|n| {
            // Without its agent a rank on hold would never hear Start.
            let up = |u: &super::Unit| u.state == UnitState::Up && !u.leaving && (u.agent || !n.hold);
            n.failed.is_none() && n.parts.iter().all(|p| self.units.get(&p.unit).is_some_and(up))
        });
        if usable {
            self.next_runs();
            return;
        }
        self.drop_next();
        if self.has_members()
            && let Err(why) = self.prepare_next(false)
        {
            self.say(why);
            self.begin_end(pliant_protocol::exit::FAILURE, 0);
        }
    }

    /// Grow: the old world is gone.
    fn replace(&mut self, mut change: Change) {
        self.start_next();
        change.stage = Stage::Joining { until: self.now + FIRST_STEP };
        self.change = Some(change);
    }

    fn advance_joining(&mut self, mut change: Change, until: Millis) {
        if self.all_old_ended() && self.running.is_some() {
            // The new world is over before its first step counted.
            self.finish(change, State::Settled);
            return;
        }
        let Some(running) = &self.running else {
            if self.next.is_none() {
                self.undo_grow(change, Reason::Failed { what: "the new world did not come up".into() });
            } else {
                self.change = Some(change);
            }
            return;
        };
        let newcomers: Vec<UnitId> = change.coming.iter().filter_map(|c| c.unit).collect();
        let mine = || running.ranks.iter().filter(|r| newcomers.contains(&r.unit));
        change.status.load_ms = running.ranks.iter().filter_map(|r| r.ready).max();
        let alone = running.settled(self.now, self.alone_after());
        if alone || mine().all(|r| r.stepped) {
            self.reach(&mut change, State::Joined);
        }
        // A notice must not wait for a first step.
        let hurry = self.queue.iter().any(|o| o.kind() == Kind::Shrink);
        if change.status.state == State::Joined || hurry || self.now >= until {
            self.finish(change, State::Settled);
        } else {
            self.change = Some(change);
        }
    }

    fn advance_releasing(&mut self, change: Change) {
        if change.status.slices.iter().any(|job| self.releasing.contains(job)) {
            self.change = Some(change);
        } else {
            self.finish(change, State::Released);
        }
    }

    /// The ranks of the present world are ended without a boundary, since one of them is lost.
    pub(super) fn terminate_soon(&mut self, change: &mut Change, after: Millis) {
        if matches!(change.stage, Stage::Agreeing { .. }) {
            self.out.retain(|e| !matches!(e, Effect::Tell(_, ToSupervisor::Commit { .. })));
        }
        self.reach(change, State::Announced);
        self.end_running(15);
        change.stage = Stage::Terminating { kill_at: self.now + after };
    }
}
