//! How a change begins: orders of pliantd, answers of Slurm to requests for slices.

use super::change::{Change, Coming, Stage};
use super::{Ask, AskOutcome, Core, Effect, Millis, UnitState};
use pliant_model::resize::{Kind, State};
use pliant_model::{JobId, OrderId, Reason, Seconds};
use pliant_protocol::job::{MAX_DONE, Order, OrderStatus, SliceSpec};

/// Below this a base lives too short for a slice.
const SHORTEST: Seconds = 60;
/// How long a new step may take to come up.
pub(super) const RAISE: Millis = 30_000;
/// Added to Slurm's patience before a request without any answer counts as lost.
const ASK_SLACK: Millis = 60_000;

impl Core {
    /// An order of pliantd. One that is known already is left alone.
    pub(super) fn order(&mut self, order: Order) {
        let id = order.id();
        let known = self.change.as_ref().is_some_and(|c| &c.status.id == id)
            || self.done.iter().any(|d| &d.id == id)
            || self.queue.iter().any(|o| o.id() == id);
        if known || self.ending.is_some() || !self.settings.elastic {
            return;
        }
        // A notice goes before a growth that has not begun.
        match order {
            Order::Shrink { .. } => {
                let at = self.queue.iter().take_while(|o| o.kind() == Kind::Shrink).count();
                self.queue.insert(at, order);
            }
            Order::Grow { .. } => self.queue.push_back(order),
        }
        self.hurry();
    }

    /// Nothing is under way: begins the next order, or brings up a world where there is none.
    pub(super) fn advance_idle(&mut self) -> bool {
        if !self.started || self.change.is_some() {
            return false;
        }
        if self.running.as_ref().is_some_and(super::Generation::all_ended) {
            self.world_over();
            return true;
        }
        if self.next.is_none()
            && let Some(order) = self.queue.pop_front()
        {
            self.begin(order);
            return true;
        }
        if self.running.is_none() && self.next.is_none() && self.has_members() {
            if let Err(why) = self.prepare_next(false) {
                self.say(why);
                self.begin_end(pliant_protocol::exit::FAILURE, 0);
            }
            return true;
        }
        false
    }

    pub(super) fn new_change(
        &self,
        id: OrderId,
        kind: Kind,
        slices: Vec<JobId>,
        reason: Reason,
        stage: Stage,
    ) -> Change {
        let proposed = (State::Proposed, self.now + self.settings.unix_at_zero);
        Change {
            status: OrderStatus {
                id,
                kind,
                state: State::Proposed,
                slices,
                reason,
                times: vec![proposed],
                load_ms: None,
            },
            stage,
            coming: vec![],
            deadline: None,
            grace: self.settings.grace,
            grace_over: false,
            broken: false,
        }
    }

    fn begin(&mut self, order: Order) {
        match order {
            Order::Grow { id, slices, patience, reason } => self.begin_grow(id, slices, patience, reason),
            Order::Shrink { id, slices, grace, reason } => self.begin_shrink(id, slices, grace, reason),
        }
    }

    fn begin_grow(&mut self, id: OrderId, slices: Vec<SliceSpec>, patience: Seconds, reason: Reason) {
        let until = self.now + patience.saturating_mul(1_000) + ASK_SLACK;
        let mut change = self.new_change(id, Kind::Grow, vec![], reason, Stage::Asking { until });
        let rest = self.settings.ends.map(|at| at.saturating_sub(self.now) / 1_000);
        let wanted = slices.iter().fold(self.size(), |sum, s| sum.saturating_add(s.gpus));
        let max = self.settings.range.max;
        let refusal = if let Some(left) = rest.filter(|&left| left < SHORTEST) {
            Some(Reason::EndsSoon { left })
        } else if wanted > max {
            Some(Reason::AtMax { size: self.size(), max })
        } else if slices.is_empty() || slices.iter().any(|s| s.gpus == 0) {
            Some(Reason::Failed { what: "the order names no GPUs".into() })
        } else {
            None
        };
        if let Some(reason) = refusal {
            change.status.reason = reason;
            self.finish(change, State::Undone);
            return;
        }
        let mut asks = vec![];
        for spec in slices {
            let token = (self.fresh)();
            let cpus = spec.gpus.saturating_mul(self.settings.cpus_per_gpu);
            self.open_asks.insert(token.clone());
            change.coming.push(Coming { token: token.clone(), unit: None, over: None });
            asks.push(Ask { token, node: spec.node, gpus: spec.gpus, cpus, patience, rest });
        }
        // The agent has to know the tokens before Slurm can know the slices.
        self.tell_holds();
        self.out.extend(asks.into_iter().map(Effect::Ask));
        self.reach(&mut change, State::Requested);
        self.change = Some(change);
    }

    pub(super) fn begin_shrink(&mut self, id: OrderId, slices: Vec<JobId>, grace: Seconds, reason: Reason) {
        let mut change = self.new_change(id, Kind::Shrink, vec![], reason, Stage::Preparing { until: self.now });
        change.grace = grace;
        change.deadline = Some(self.now + grace.saturating_mul(1_000));
        let held: Vec<JobId> = slices.into_iter().filter(|s| self.unit_of(*s).is_some_and(|u| !u.leaving)).collect();
        change.status.slices.clone_from(&held);
        for unit in self.units.values_mut() {
            unit.leaving |= unit.slice.is_some_and(|job| held.contains(&job));
        }
        if held.is_empty() {
            // Gone already: there is nothing to wait for.
            self.finish(change, State::Released);
            return;
        }
        let joined = self.units.values().any(|u| {
            u.slice.is_some_and(|job| held.contains(&job)) && self.running.as_ref().is_some_and(|g| g.is_on(u.id))
        });
        if joined {
            self.prepare(change);
        } else {
            self.drained(change);
        }
    }

    /// A shrink that nobody ordered: Slurm takes the slice, or it is gone.
    pub(super) fn own_shrink(&mut self, slice: JobId, grace: Seconds, reason: Reason) {
        let id = OrderId(format!("l-{}", (self.fresh)()));
        self.queue.push_front(Order::Shrink { id, slices: vec![slice], grace, reason });
        self.hurry();
    }

    /// A request has been decided.
    pub(super) fn asked(&mut self, token: &str, outcome: AskOutcome) {
        self.open_asks.remove(token);
        let wanted = self.change.as_ref().is_some_and(|c| {
            matches!(c.stage, Stage::Asking { .. }) && c.coming.iter().any(|x| x.token == token && x.open())
        });
        let (unit, over) = match outcome {
            AskOutcome::Granted { job, .. } if !wanted || self.ending.is_some() => {
                // Too late: the change is over.
                if self.releasing.insert(job) {
                    self.out.push(Effect::Release(job));
                }
                return;
            }
            AskOutcome::Granted { job, cpus, indexes, node, gpus } => {
                let id = self.start_unit(Some(job), node, gpus, cpus, indexes, Some(token.to_owned()));
                (Some(id), None)
            }
            AskOutcome::Withdrawn { waited, slurm, expected_start } => {
                (None, Some(Reason::Withdrawn { waited, slurm, expected_start }))
            }
            AskOutcome::Refused { slurm } => (None, Some(Reason::Refused { slurm })),
        };
        let Some(change) = self.change.as_mut() else { return };
        if let Some(job) = unit.and_then(|id| self.units.get(&id)).and_then(|u| u.slice) {
            change.status.slices.push(job);
        }
        if let Some(coming) = change.coming.iter_mut().find(|x| x.token == token) {
            coming.unit = unit;
            coming.over = over;
        }
    }

    /// Notes that an arrow has been passed.
    pub(super) fn reach(&self, change: &mut Change, state: State) {
        if change.status.state != state {
            change.status.state = state;
            change.status.times.push((state, self.now + self.settings.unix_at_zero));
        }
    }

    /// The change is over; it is remembered.
    pub(super) fn finish(&mut self, mut change: Change, state: State) {
        self.reach(&mut change, state);
        self.done.push_back(change.status);
        while self.done.len() > MAX_DONE {
            self.done.pop_front();
        }
    }

    /// Takes a growth back: its slices are released, the present world stays as it is.
    pub(super) fn undo_grow(&mut self, mut change: Change, reason: Reason) {
        self.drop_next();
        for unit in change.coming.iter().filter_map(|c| c.unit) {
            if self.units.get(&unit).is_some_and(|u| u.state != UnitState::Gone) {
                self.give_back(unit);
            }
        }
        if !self.open_asks.is_empty() {
            self.out.push(Effect::WithdrawAll);
        }
        change.status.reason = reason;
        self.finish(change, State::Undone);
    }
}
