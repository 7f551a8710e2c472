// SPDX-License-Identifier: GPL-2.0-or-later
//! No panic crosses from a plugin into Slurm.
//!
//! Every exported function runs inside [`Fence::call`]. A panic there is caught and logged in one line, and from then on
//! the plugin answers "success, do nothing" for the life of the process: after a panic its state cannot be trusted.

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook, take_hook};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

/// What Slurm reads as success.
const SUCCESS: c_int = 0;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    static MESSAGE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// The fence of one plugin; a static.
#[derive(Debug)]
pub struct Fence {
    tripped: AtomicBool,
    hook: Once,
    log: fn(&str),
}

impl Fence {
    /// A fence that logs a caught panic with `log`.
    pub const fn new(log: fn(&str)) -> Self {
        Fence { tripped: AtomicBool::new(false), hook: Once::new(), log }
    }

    /// Runs the body of the exported function `name`. Returns its value, or success where it panicked or where any call
    /// has panicked before.
    pub fn call(&self, name: &'static str, body: impl FnOnce() -> c_int) -> c_int {
        self.guard(name, body).unwrap_or(SUCCESS)
    }

    /// Runs our part `name` of an exported function; `None` where it panicked or where any call has panicked before.
    pub fn guard<R>(&self, name: &'static str, body: impl FnOnce() -> R) -> Option<R> {
        if self.tripped.load(Ordering::Relaxed) {
            return None;
        }
        self.hook.call_once(install_hook);
        let outer = INSIDE.replace(true);
        // State that a panic leaves half changed is never looked at again: the fence stays closed.
        let result = catch_unwind(AssertUnwindSafe(|| {
            inject(name);
            body()
        }));
        INSIDE.set(outer);
        match result {
            Ok(value) => Some(value),
            Err(payload) => {
                // A payload whose own drop panics would unwind into Slurm.
                Box::leak(payload);
                self.trip(name);
                None
            }
        }
    }

    fn trip(&self, name: &str) {
        self.tripped.store(true, Ordering::Relaxed);
        let message = MESSAGE.take().unwrap_or_else(|| "unknown panic".to_owned());
        let line = format!("pliant: {name}: internal error, plugin disabled in this process: {message}");
        let logged = catch_unwind(AssertUnwindSafe(|| (self.log)(&line)));
        if let Err(payload) = logged {
            Box::leak(payload);
        }
    }
}

/// Keeps the text of a panic inside the fence for the log, instead of the usual lines on standard error. The hook
/// belongs to the plugin's own copy of std; panics elsewhere go on to the hook that was there.
fn install_hook() {
    let before = take_hook();
    set_hook(Box::new(move |info: &PanicHookInfo<'_>| {
        if !INSIDE.get() {
            return before(info);
        }
        let payload = info.payload();
        let text = payload.downcast_ref::<&str>().copied().or(payload.downcast_ref::<String>().map(String::as_str));
        let text = text.unwrap_or("panic").lines().next().unwrap_or_default().to_owned();
        let place = info.location().map(|l| format!(" ({}:{})", l.file(), l.line())).unwrap_or_default();
        MESSAGE.set(Some(text + &place));
    }));
}

#[cfg(feature = "inject-panic")]
#[allow(clippy::panic, reason = "the test-only way to panic in each exported function")]
fn inject(name: &str) {
    if std::env::var_os("PLIANT_INJECT_PANIC").is_some_and(|wanted| wanted == name) {
        panic!("injected by PLIANT_INJECT_PANIC");
    }
}

#[cfg(not(feature = "inject-panic"))]
fn inject(_name: &str) {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

    fn keep(line: &str) {
        LINES.lock().unwrap().push(line.to_owned());
    }

    #[test]
    fn a_panic_is_one_line_and_closes_the_fence() {
        static FENCE: Fence = Fence::new(keep);
        assert_eq!(FENCE.call("first", || 7), 7);
        assert_eq!(FENCE.call("second", || panic!("two\nlines")), 0);
        assert_eq!(FENCE.call("third", || 7), 0, "closed after a panic");
        let lines = LINES.lock().unwrap();
        let [line] = lines.as_slice() else { panic!("{lines:?}") };
        assert!(line.starts_with("pliant: second: internal error, plugin disabled in this process: two ("), "{line}");
        assert!(!line.contains('\n'));
    }

    #[test]
    fn a_part_that_panics_gives_nothing() {
        static FENCE: Fence = Fence::new(|_| ());
        assert_eq!(FENCE.guard("a", || "x"), Some("x"));
        assert_eq!(FENCE.guard("b", || -> u32 { panic!("b") }), None);
        assert_eq!(FENCE.guard("a", || "x"), None);
    }

    #[test]
    fn a_log_that_panics_is_caught_too() {
        static FENCE: Fence = Fence::new(|_| panic!("log"));
        assert_eq!(FENCE.call("f", || panic!("body")), 0);
    }
}
