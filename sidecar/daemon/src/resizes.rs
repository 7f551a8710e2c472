//! The resizes under way, at most one per job, and how what is observed moves them along their arrows.

use crate::journal::{Journal, JournalError, Resize};
use pliant_model::resize::{Kind, State};
use pliant_model::{JobId, Reason};
use pliant_protocol::job::Millis;
use std::collections::BTreeMap;

/// All open resizes by base.
#[derive(Debug, Default)]
pub struct Resizes {
    open: BTreeMap<JobId, Resize>,
}

impl Resizes {
    /// Takes over what a journal has open.
    ///
    /// # Errors
    /// When the journal cannot be read.
    pub fn restore(journal: &Journal) -> Result<Resizes, JournalError> {
        Ok(Resizes { open: journal.open_resizes()?.into_iter().map(|r| (r.base, r)).collect() })
    }

    /// The resize of a job.
    pub fn of(&self, base: JobId) -> Option<&Resize> {
        self.open.get(&base)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Resize> {
        self.open.values()
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// Makes a new one durable. The caller acts on it only after that.
    ///
    /// # Errors
    /// When it is not durable; it is not open then.
    pub fn begin(&mut self, resize: Resize, reason: &Reason, journal: &mut Journal) -> Result<(), JournalError> {
        record(&resize, resize.started_ms, reason, journal)?;
        if !resize.state.is_final() {
            self.open.insert(resize.base, resize);
        }
        Ok(())
    }

    /// Moves the resize of `base` to `to` through every arrow between, each durable with its time; what does not
    /// lie ahead is ignored. Returns whether it has ended.
    ///
    /// # Errors
    /// When an arrow is not durable; the rest is left for the next observation.
    pub fn advance(
        &mut self,
        base: JobId,
        to: State,
        seen: &Seen<'_>,
        journal: &mut Journal,
    ) -> Result<bool, JournalError> {
        let Some(resize) = self.open.get_mut(&base) else {
            return Ok(false);
        };
        if !seen.slices.is_empty() {
            resize.slices = seen.slices.to_vec();
        }
        if let Some(after) = seen.after {
            resize.after = after;
        }
        let undone = [State::Undone];
        let arrows = if to == State::Undone { &undone } else { resize.kind.between(resize.state, to) };
        for &state in arrows {
            let at = seen.times.iter().rev().find(|(s, _)| *s == state).map_or(seen.now_ms, |(_, t)| *t);
            let next = Resize { state, ..resize.clone() };
            record(&next, at, seen.reason, journal)?;
            *resize = next;
        }
        let ended = resize.state.is_final();
        if ended {
            self.open.remove(&base);
        }
        Ok(ended)
    }
}

/// One observation.
#[derive(Debug)]
pub struct Seen<'a> {
    /// Why it stands so.
    pub reason: &'a Reason,
    /// The slices, where known.
    pub slices: &'a [JobId],
    /// The size it leads to, where that has changed.
    pub after: Option<u32>,
    /// When each arrow was passed, as the launcher told.
    pub times: &'a [(State, Millis)],
    /// The time for arrows without one.
    pub now_ms: Millis,
}

/// Writes one arrow, with a fail point on each side of the write: `before` is a crash with the arrow not durable,
/// `after` one with the arrow durable and not yet acted on.
fn record(resize: &Resize, at_ms: Millis, reason: &Reason, journal: &mut Journal) -> Result<(), JournalError> {
    crash_if_asked(resize.kind, resize.state, "before");
    journal.record(resize, at_ms, reason)?;
    crash_if_asked(resize.kind, resize.state, "after");
    Ok(())
}

fn crash_if_asked(kind: Kind, state: State, side: &str) {
    if cfg!(feature = "failpoints") {
        let name = format!("{kind}::{state}::{side}");
        // Not a panic: the process must be gone as by kill -9, with nothing unwound and nothing flushed.
        let _ = fail::eval(&name, |_| {
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        });
    }
}
