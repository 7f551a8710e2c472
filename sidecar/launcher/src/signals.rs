//! Signals as events: a handler of our own, so that nothing else happens.

use signal_hook::consts::{SIGALRM, SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use std::io;

/// Those that mean something for the ranks.
const FOR_RANKS: [i32; 8] = [SIGALRM, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

/// The end of a child.
pub const CHILD: i32 = SIGCHLD;

/// Slurm's request to end.
pub const TERMINATE: i32 = SIGTERM;

/// Calls `tell` with each signal that comes from now on, until it answers `false`.
///
/// # Errors
/// When the system refuses a handler.
pub fn watch(children: bool, tell: impl Fn(i32) -> bool + Send + 'static) -> io::Result<()> {
    let mut which = FOR_RANKS.to_vec();
    if children {
        which.push(SIGCHLD);
    }
    let mut signals = Signals::new(which)?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            if !tell(signal) {
                return;
            }
        }
    });
    Ok(())
}
