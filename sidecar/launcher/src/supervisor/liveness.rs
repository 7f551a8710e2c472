//! Whether the launcher still lives, as far as its supervisor can tell.

use std::time::{Duration, Instant};

/// Without a sign of the launcher for so long, the ranks are ended.
const SILENCE: Duration = Duration::from_secs(20);
/// After Slurm's SIGTERM to the base's step the launcher speaks twice a second while it ends the job; else it has gone
/// with the batch script, which Slurm kills together with everything below it.
const AFTER_TERM: Duration = Duration::from_millis(1_500);
/// The same in a slice, where it may be a preemption that the launcher is to turn into a shrink.
const AFTER_TERM_SLICE: Duration = Duration::from_secs(4);
/// A supervisor that did not look for so long was stopped itself (`scontrol suspend`, gang scheduling, SIGSTOP): what
/// it did not hear meanwhile proves nothing.
const STOPPED: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Liveness {
    heard: Instant,
    looked: Instant,
    /// When Slurm sent SIGTERM.
    terminated: Option<Instant>,
}

impl Liveness {
    /// Heard just now.
    pub fn new(now: Instant) -> Self {
        Liveness { heard: now, looked: now, terminated: None }
    }

    /// A sign of the launcher.
    pub fn heard(&mut self, now: Instant) {
        self.heard = now;
    }

    /// Slurm has sent SIGTERM.
    pub fn terminated(&mut self, now: Instant) {
        self.terminated = self.terminated.or(Some(now));
    }

    /// Whether the launcher is gone. To be asked every second or so, after all that has arrived was taken.
    pub fn is_orphan(&mut self, now: Instant, slice: bool) -> bool {
        if now.saturating_duration_since(self.looked) > STOPPED {
            self.heard = now;
        }
        self.looked = now;
        let patience = if slice { AFTER_TERM_SLICE } else { AFTER_TERM };
        let silent = now.saturating_duration_since(self.heard);
        let told = self.terminated.is_some_and(|at| now.saturating_duration_since(at) >= patience);
        silent >= SILENCE || (silent >= patience && told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(begun: Instant, ms: u64) -> Instant {
        begun + Duration::from_millis(ms)
    }

    #[test]
    fn a_supervisor_that_was_stopped_does_not_take_the_launcher_for_dead() {
        let begun = Instant::now();
        let mut l = Liveness::new(begun);
        assert!(!l.is_orphan(after(begun, 500), false));
        // Stopped for a minute; the pings are still in the pipe.
        assert!(!l.is_orphan(after(begun, 60_500), false));
        assert!(!l.is_orphan(after(begun, 61_000), false));
        let silent = (0..50).map(|i| 61_500 + i * 500).find(|at| l.is_orphan(after(begun, *at), false));
        assert_eq!(silent, Some(80_500), "20 s of silence while it looks");
    }

    #[test]
    fn after_a_sigterm_the_patience_is_short() {
        let begun = Instant::now();
        for (slice, patience) in [(false, 1_500), (true, 4_000)] {
            let mut l = Liveness::new(begun);
            l.terminated(begun);
            assert!(!l.is_orphan(after(begun, patience - 100), slice));
            let mut alive = l;
            alive.heard(after(begun, patience - 100));
            assert!(!alive.is_orphan(after(begun, patience), slice));
            assert!(l.is_orphan(after(begun, patience), slice));
        }
    }
}
