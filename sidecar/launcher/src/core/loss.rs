//! What is lost without our doing: a slice that somebody cancelled, a step that died, a preemption by Slurm.
//!
//! A loss is no failure: the other ranks are ended and a new generation starts from the script's last checkpoint in
//! the same job. The loss of a base node ends the job (`units`).

use super::change::Stage;
use super::{Core, Effect, UnitId, UnitState};
use pliant_model::resize::Kind;
use pliant_model::{JobId, OrderId, Reason, Seconds};

/// Between SIGTERM and SIGKILL for the ranks that a loss leaves behind.
const AFTER_LOSS: u64 = 2_000;

impl Core {
    /// A slice's unit is gone: its step has ended. What Slurm still holds of it is given back.
    pub(super) fn lose(&mut self, id: UnitId) {
        let Some(unit) = self.units.get_mut(&id) else { return };
        let Some(slice) = unit.slice else { return };
        let reason = Reason::SliceGone { slice, node: unit.node.clone() };
        unit.leaving = true;
        self.release(id, 0);
        let trains = self.running.as_ref().is_some_and(|g| g.is_on(id));
        let loads = self.next.as_ref().is_some_and(|g| g.is_on(id));
        if !trains && !loads {
            return;
        }
        self.failing = None;
        if loads {
            self.drop_next();
        }
        let Some(mut change) = self.change.take() else {
            if trains {
                self.restart_without(slice, reason);
            }
            return;
        };
        if !trains {
            // A newcomer that is lost before it joined; the rest of the growth goes on without it.
            if matches!(change.stage, Stage::Preparing { .. } | Stage::Agreeing { .. })
                && change.status.kind == Kind::Grow
            {
                change.coming.retain(|c| c.unit != Some(id));
                change.status.slices.retain(|job| *job != slice);
                if matches!(change.stage, Stage::Agreeing { boundary: _, .. }) || change.coming.is_empty() {
                    self.abort_boundary(&change.stage);
                    self.undo_grow(change, reason);
                } else {
                    self.prepare(change);
                }
                return;
            }
            self.change = Some(change);
            return;
        }
        if change.status.kind == Kind::Grow && change.can_be_undone() {
            self.undo_grow(change, Reason::Failed { what: reason.to_string() });
            self.restart_without(slice, reason);
        } else if matches!(change.stage, Stage::Joining { .. }) {
            self.undo_joined(change, &reason);
            self.restart_without(slice, reason);
        } else if matches!(change.stage, Stage::Releasing) {
            // The new world of a shrink has lost a member while the old slices are still going.
            self.finish(change, pliant_model::resize::State::Released);
            self.restart_without(slice, reason);
        } else {
            self.terminate_soon(&mut change, AFTER_LOSS);
            self.change = Some(change);
        }
    }

    fn abort_boundary(&mut self, stage: &Stage) {
        if let Stage::Agreeing { boundary, .. } = *stage {
            self.tell_running(&|generation| pliant_protocol::step::ToSupervisor::Abort { generation, boundary });
        }
    }

    /// A growth whose new world loses a member before its first step: what is left of it stays.
    fn undo_joined(&mut self, mut change: super::change::Change, reason: &Reason) {
        change.status.reason = reason.clone();
        self.finish(change, pliant_model::resize::State::Settled);
    }

    /// Begins a shrink of our own that does not wait for a boundary: the present world cannot reach one any more.
    fn restart_without(&mut self, slice: JobId, reason: Reason) {
        let id = OrderId(format!("l-{}", (self.fresh)()));
        let mut change = self.new_change(id, Kind::Shrink, vec![slice], reason, Stage::Killed { since: self.now });
        change.deadline = Some(self.now + change.grace.saturating_mul(1_000));
        self.drop_next();
        self.terminate_soon(&mut change, AFTER_LOSS);
        self.change = Some(change);
    }

    /// Slurm says that a slice has ended.
    pub(super) fn slice_ended(&mut self, slice: JobId, state: &str) {
        let Some(unit) = self.unit_of(slice) else { return };
        let (id, node, known) = (unit.id, unit.node.clone(), unit.leaving || unit.state == UnitState::Gone);
        if known || self.ending.is_some() {
            return;
        }
        self.say(format!("slice {slice} on {node} is gone: {state}"));
        if let Some(unit) = self.units.get_mut(&id) {
            unit.state = UnitState::Gone;
        }
        self.out.push(Effect::KillStep(id));
        self.ranks_lost(id);
        self.lose(id);
    }

    /// Slurm is ending a slice: adopted as a shrink within the time that it leaves.
    pub(super) fn preempted(&mut self, slice: JobId, grace: Seconds) {
        let Some(unit) = self.unit_of(slice) else { return };
        if unit.leaving || self.ending.is_some() || unit.state == UnitState::Gone {
            return;
        }
        let (id, node) = (unit.id, unit.node.clone());
        let reason = Reason::Preempted { slice, grace };
        self.say(format!("Slurm takes slice {slice} on {node} back: it is left within {grace} s"));
        let trains = self.running.as_ref().is_some_and(|g| g.is_on(id));
        if self.failing.is_some() && trains {
            self.blame(id);
            return;
        }
        // Leave a little of the time for the way back.
        let usable = grace.saturating_sub(2).max(1);
        if let Some(change) = self.change.take() {
            if change.status.kind == Kind::Grow && change.can_be_undone() {
                self.abort_boundary(&change.stage);
                self.undo_grow(change, reason.clone());
                if !trains {
                    return;
                }
            } else {
                self.change = Some(change);
            }
        }
        self.own_shrink(slice, usable, reason);
    }
}
