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
    unit: UnitId,
    end: End,
    /// Not judged before.
    until: Millis,
    /// Judged then also without an answer of Slurm.
    latest: Millis,
    /// The check whose answer is waited for.
    check: Option<u64>,
}

/// The end, on its way.
#[derive(Clone, Debug)]
pub struct Ending {
    code: u8,
    stage: Stage,
    /// Slurm has been asked whether the base goes on.
    asked: bool,
    /// It does: the ranks have their time, and the job ends as they do.
    by_ranks: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Terminating { kill_at: Millis },
    Stopping { until: Millis },
    Over,
}

/// How long a failure may turn out to be a loss.
const JUDGE: Millis = 2_000;
/// The same where Slurm does not answer.
const JUDGE_UNHEARD: Millis = 20_000;
/// What the client ends with when it is on hold and hears nothing of the agent (`pliant._job.HOLD_EXIT`).
const HELD: i32 = 75;
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
        if by_us || self.ending.is_some() {
            return;
        }
        let now = self.now;
        let hit = self.units.get(&unit);
        // Without cgroups Slurm's SIGTERM to a slice reaches its ranks directly: that is a loss of the slice.
        let told = hit.is_some_and(|u| u.slice.is_some() && u.terminated.is_some_and(|at| now < at + 10_000));
        if told && matches!(end, End::Signal(15) | End::Code(143)) {
            self.say(format!("rank {rank} was ended together with its slice"));
            self.blame(unit);
            return;
        }
        if self.failing.is_some() || self.leaves_broken() || self.never_started(rank, unit, end) {
            return;
        }
        let slices = self.slices();
        let (until, check) = if slices.is_empty() { (now, None) } else { (now + JUDGE, Some(self.check(slices))) };
        self.failing = Some(Failing { rank, unit, end, until, latest: now + JUDGE_UNHEARD, check });
    }

    /// Asks Slurm how the slices stand; gives the number under which it answers.
    pub(super) fn check(&mut self, slices: Vec<pliant_model::JobId>) -> u64 {
        self.last_check += 1;
        self.out.push(Effect::Check { number: self.last_check, slices });
        self.last_check
    }

    /// Slurm has answered; what it said about the slices has been taken.
    pub(super) fn checked(&mut self, number: u64) {
        if let Some(failing) = self.failing.as_mut()
            && failing.check.is_some_and(|asked| asked <= number)
        {
            failing.check = None;
        }
    }

    /// Some ranks have left at the boundary, this one could not: its peers are gone. No failure of the training.
    fn leaves_broken(&mut self) -> bool {
        let committed = self.running.as_ref().is_some_and(|g| g.committed && g.ranks.iter().any(|r| r.left.is_some()));
        match self.change.as_mut() {
            Some(change) if committed && change.stage == super::change::Stage::Leaving => {
                change.broken = true;
                true
            }
            _ => false,
        }
    }

    /// A process on hold that has given up waiting for the agent: the same world starts again without hold.
    fn never_started(&mut self, rank: u32, unit: UnitId, end: End) -> bool {
        // torchrun ends with a code of its own.
        let away = self.settings.torchrun && self.units.get(&unit).is_some_and(|u| !u.agent);
        let held = away || end == End::Code(HELD);
        let at = usize::try_from(rank).unwrap_or(usize::MAX);
        let Some(running) = self.running.as_mut().filter(|g| g.hold && held) else { return false };
        if running.ranks.get(at).is_none_or(|r| r.stepped) {
            return false;
        }
        running.again = true;
        self.say(format!("rank {rank} was not told to start, its agent is away: the world is started again"));
        self.end_running(9);
        true
    }

    /// What went wrong was the loss of that slice.
    pub(super) fn blame(&mut self, unit: UnitId) {
        self.failing = None;
        self.give_back(unit);
        self.lose_trained(unit);
    }

    pub(super) fn lose_trained(&mut self, unit: UnitId) {
        self.ranks_lost(unit);
        self.lose(unit);
    }

    pub(super) fn advance_failing(&mut self) -> bool {
        let now = self.now;
        let due = |f: &Failing| now >= f.latest || (now >= f.until && f.check.is_none());
        let Some(failing) = self.failing.clone().filter(due) else { return false };
        self.failing = None;
        if self.leaves_broken() {
            return true;
        }
        let how = match failing.end {
            End::Code(code) => format!("with exit code {code}"),
            End::Signal(signal) => format!("by signal {signal}"),
            End::Lost => "with its step".to_owned(),
        };
        let node = self.units.get(&failing.unit).map(|u| format!(" on {}", u.node)).unwrap_or_default();
        self.say(format!("rank {}{node} ended {how}: ending the job", failing.rank));
        self.begin_end(failing.end.code(), AFTER_FAILURE);
        true
    }

    /// The last rank of the present world has ended and nothing else is under way.
    pub(super) fn world_over(&mut self) {
        if self.running.as_ref().is_some_and(|g| g.again) {
            self.running = None;
        }
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
        if let Some(slice) = slice {
            // A slice is told by Slurm alone, never by the user's signals for the job.
            let told = from.filter(|_| signal == TERM && self.ending.is_none());
            if let Some(id) = told.filter(|id| self.units.get(id).is_some_and(|u| !u.leaving)) {
                if self.failing.is_some() && self.running.as_ref().is_some_and(|g| g.is_on(id)) {
                    self.say(format!("Slurm is ending slice {slice}: a rank has failed with it"));
                    self.blame(id);
                } else {
                    self.out.push(Effect::AskPreemption(slice));
                }
            }
            return;
        }
        if signal == TERM || signal == INT {
            self.told_to_end(signal);
            return;
        }
        if self.ending.is_some() {
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

    /// The base has got SIGTERM or SIGINT. Whether Slurm is ending it, or lets it go on for a while (`--signal`,
    /// preemption with a grace, `scancel -s`), only its state tells.
    fn told_to_end(&mut self, signal: i32) {
        const INT: i32 = 2;
        let room = self.settings.kill_wait.saturating_mul(1_000).saturating_sub(2_000);
        let soft = AFTER_CANCEL.min(room);
        if self.ending.is_none() {
            self.say(format!("the job is being ended (signal {signal})"));
            self.begin_end(if signal == INT { 130 } else { 143 }, soft);
            if signal == INT {
                return;
            }
        } else if signal == INT || !self.ending.as_ref().is_some_and(|e| e.by_ranks && !e.asked) {
            return;
        } else {
            self.end_running(signal);
        }
        let kill_at = self.now + soft;
        if let Some(Ending { asked, stage: Stage::Terminating { kill_at: at }, .. }) = self.ending.as_mut() {
            (*asked, *at) = (true, kill_at);
            self.out.push(Effect::AskBase);
        }
    }

    /// Whether Slurm lets the base go on after a SIGTERM; no answer counts as no.
    pub(super) fn base_goes_on(&mut self, goes_on: bool) {
        let Some(ending) = self.ending.as_mut().filter(|e| e.asked) else { return };
        ending.asked = false;
        let Stage::Terminating { kill_at } = &mut ending.stage else { return };
        if !goes_on {
            ending.by_ranks = false;
            return;
        }
        let first = !std::mem::replace(&mut ending.by_ranks, true);
        // At its time limit Slurm sends the next SIGTERM.
        *kill_at = Millis::MAX;
        if first && self.running.as_ref().is_some_and(|g| !g.all_ended()) {
            self.say("Slurm lets the job go on: its ranks have got SIGTERM and may take their time".into());
        }
    }

    /// What the ranks of the last world say by their ends; `otherwise` where they had left for another world.
    fn code_of_ranks(&self, otherwise: u8) -> u8 {
        let Some(running) = self.running.as_ref().filter(|g| !g.committed && !g.again) else { return otherwise };
        let ends = || running.ranks.iter().filter_map(|r| r.end.map(|(end, _)| end));
        ends().find(|e| *e != End::Code(0)).map_or(exit::OK, End::code)
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
        let stage = Stage::Terminating { kill_at: self.now + soft };
        self.ending = Some(Ending { code, stage, asked: false, by_ranks: false });
    }

    pub(super) fn advance_ending(&mut self) {
        let Some(Ending { mut code, stage, asked, by_ranks }) = self.ending.clone() else { return };
        let stage = match stage {
            Stage::Terminating { kill_at } => {
                let gone = self.running.as_ref().is_none_or(super::Generation::all_ended);
                if (!gone || asked) && self.now < kill_at {
                    return;
                }
                if gone && by_ranks {
                    code = self.code_of_ranks(code);
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
        self.ending = Some(Ending { code, stage, asked, by_ranks });
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
