//! How the job ends: all ranks finished, one failed, Slurm or the user ends it, a base without GPUs has waited long
//! enough. Then every rank is ended, every slice is given back, and the launcher exits.

use super::generation::End;
use super::{Core, Effect, Millis, UnitId, UnitState};
use pliant_protocol::exit;
use pliant_protocol::step::ToSupervisor;

/// A rank has failed; for a moment it may still turn out that it was the loss of a slice.
#[derive(Clone, Debug)]
pub struct Failing {
    rank: u32,
    end: End,
    until: Millis,
}

/// The end, on its way.
#[derive(Clone, Debug)]
pub struct Ending {
    code: u8,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Terminating { kill_at: Millis },
    Stopping { until: Millis },
    Over,
}

/// How long a failure may turn out to be a loss.
const JUDGE: Millis = 2_000;
/// Ranks of a failed job have so long after SIGTERM.
const AFTER_FAILURE: Millis = 2_000;
/// Ranks of a cancelled job have so long after SIGTERM, if Slurm's KillWait allows.
const AFTER_CANCEL: Millis = 5_000;
/// Slices and steps have so long to go.
const STOP: Millis = 15_000;
/// A base that waits at zero ends so long before Slurm ends it.
const BEFORE_LIMIT: Millis = 5_000;

impl Core {
    /// All base steps are up: starts the first world, or waits for GPUs.
    pub(super) fn advance_start(&mut self) -> bool {
        if self.started {
            return self.waited_long_enough();
        }
        if self.units.values().any(|u| u.slice.is_none() && u.state != UnitState::Up) {
            return false;
        }
        self.started = true;
        if self.has_members() {
            return true;
        }
        if self.settings.elastic {
            self.say(format!(
                "job {} holds no GPU: waiting for up to {} lent ones, at most until its time limit",
                self.settings.base, self.settings.range.max
            ));
        } else {
            self.say(format!(
                "world of 0: job {} holds no GPU (CUDA_VISIBLE_DEVICES is empty or NoDevFiles) and --elastic was not \
                 given; ask Slurm for GPUs, such as --gpus=1",
                self.settings.base
            ));
            self.begin_end(exit::NO_WORLD, 0);
        }
        true
    }

    fn waited_long_enough(&mut self) -> bool {
        let over = self.settings.ends.is_some_and(|at| self.now + BEFORE_LIMIT >= at);
        if !over || self.ever_ran || self.running.is_some() || self.next.is_some() {
            return false;
        }
        self.say(format!("job {} reached its time limit before any GPU came", self.settings.base));
        self.begin_end(exit::NEVER_STARTED, 0);
        true
    }

    /// A rank ended with an error and had not left.
    pub(super) fn rank_failed(&mut self, rank: u32, unit: UnitId, end: End) {
        let by_us = self.running.as_ref().is_some_and(|g| g.ended_by_us);
        if by_us || self.failing.is_some() || self.ending.is_some() {
            return;
        }
        let now = self.now;
        let hit = self.units.get(&unit);
        // Without cgroups Slurm's SIGTERM to a slice reaches its ranks directly: that is a loss of the slice.
        let told = hit.is_some_and(|u| u.slice.is_some() && u.terminated.is_some_and(|at| now < at + 10_000));
        if told && matches!(end, End::Signal(15) | End::Code(143)) {
            self.say(format!("rank {rank} was ended together with its slice"));
            self.give_back(unit);
            self.lose_trained(unit);
            return;
        }
        let slices = self.slices();
        let until = if slices.is_empty() { now } else { now + JUDGE };
        if !slices.is_empty() {
            self.out.push(Effect::Check(slices));
        }
        self.failing = Some(Failing { rank, end, until });
    }

    fn lose_trained(&mut self, unit: UnitId) {
        self.ranks_lost(unit);
        self.lose(unit);
    }

    pub(super) fn advance_failing(&mut self) -> bool {
        let Some(failing) = self.failing.clone().filter(|f| self.now >= f.until) else { return false };
        self.failing = None;
        let how = match failing.end {
            End::Code(code) => format!("with exit code {code}"),
            End::Signal(signal) => format!("by signal {signal}"),
            End::Lost => "with its step".to_owned(),
        };
        self.say(format!("rank {} ended {how}: ending the job", failing.rank));
        self.begin_end(failing.end.code(), AFTER_FAILURE);
        true
    }

    /// The last rank of the present world has ended and nothing else is under way.
    pub(super) fn world_over(&mut self) {
        let Some(running) = &self.running else { return };
        let failed = running.ranks.iter().find_map(|r| r.end.map(|(end, _)| end).filter(|e| *e != End::Code(0)));
        if self.failing.is_some() {
            // The judgement is on its way; do not run ahead of it.
            return;
        }
        match failed {
            None => self.begin_end(exit::OK, 0),
            Some(end) => self.begin_end(end.code(), 0),
        }
    }

    /// A signal to the launcher (`from` is `None`) or to a step.
    pub(super) fn signal(&mut self, signal: i32, from: Option<UnitId>) {
        const INT: i32 = 2;
        const TERM: i32 = 15;
        let now = self.now;
        if signal == TERM {
            self.ping_at = now;
        }
        let slice = from.and_then(|id| self.units.get_mut(&id)).and_then(|u| {
            u.slice.inspect(|_| {
                if signal == TERM {
                    u.terminated = Some(now);
                }
            })
        });
        if self.ending.is_some() {
            return;
        }
        if let Some(slice) = slice {
            // A slice is told by Slurm alone, never by the user's signals for the job.
            if signal == TERM && self.unit_of(slice).is_some_and(|u| !u.leaving) {
                self.out.push(Effect::AskPreemption(slice));
            }
            return;
        }
        if signal == TERM || signal == INT {
            self.say(format!("the job is being ended (signal {signal})"));
            let room = self.settings.kill_wait.saturating_mul(1_000).saturating_sub(2_000);
            self.begin_end(if signal == INT { 130 } else { 143 }, AFTER_CANCEL.min(room));
            return;
        }
        // Each base node's step reports the same signal: it is forwarded once.
        if self.forwarded.is_some_and(|(last, at)| last == signal && now < at + 1_000) {
            return;
        }
        self.forwarded = Some((signal, now));
        if let Some(running) = self.running.take() {
            self.signal_ranks(&running, signal);
            self.running = Some(running);
        }
    }

    /// Ends everything: ranks get SIGTERM and `soft` milliseconds, then all is stopped and given back.
    pub(super) fn begin_end(&mut self, code: u8, soft: Millis) {
        if self.ending.is_some() {
            return;
        }
        self.ping_at = self.now;
        self.drop_next();
        if let Some(change) = self.change.take() {
            self.finish(change, pliant_model::resize::State::Undone);
        }
        self.queue.clear();
        if !self.open_asks.is_empty() {
            self.out.push(Effect::WithdrawAll);
        }
        if soft > 0 {
            self.end_running(15);
        }
        self.ending = Some(Ending { code, stage: Stage::Terminating { kill_at: self.now + soft } });
    }

    pub(super) fn advance_ending(&mut self) {
        let Some(Ending { code, stage }) = self.ending.clone() else { return };
        let stage = match stage {
            Stage::Terminating { kill_at } => {
                let gone = self.running.as_ref().is_none_or(super::Generation::all_ended);
                if !gone && self.now < kill_at {
                    return;
                }
                self.stop_all();
                Stage::Stopping { until: self.now + STOP }
            }
            Stage::Stopping { until } => {
                let alive = self.units.values().any(|u| u.state != UnitState::Gone);
                let clean = !alive && self.releasing.is_empty() && self.open_asks.is_empty();
                if !clean && self.now < until {
                    return;
                }
                if !self.releasing.is_empty() {
                    self.say("Slurm has not confirmed the release of all slices; their agents will see to it".into());
                }
                self.out.push(Effect::Exit(code));
                Stage::Over
            }
            Stage::Over => return,
        };
        let more = matches!(stage, Stage::Stopping { .. });
        self.ending = Some(Ending { code, stage });
        if more {
            self.advance_ending();
        }
    }

    fn stop_all(&mut self) {
        let (base, slices): (Vec<_>, Vec<_>) =
            self.units.values().map(|u| (u.id, u.slice)).partition(|(_, s)| s.is_none());
        for (id, _) in slices {
            self.give_back(id);
        }
        for (id, _) in base {
            let now = self.now;
            if let Some(unit) = self.units.get_mut(&id).filter(|u| u.state != UnitState::Gone) {
                unit.kill_at = Some(now + 3_000);
                self.out.push(Effect::Tell(id, ToSupervisor::Stop));
            }
        }
    }
}
