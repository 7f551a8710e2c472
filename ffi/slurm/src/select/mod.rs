// SPDX-License-Identifier: GPL-2.0-or-later
//! slurmctld's own structures, as far as the select plugin looks at them. Bound to one exact release; nothing here is
//! used before [`layout::check`] has agreed with what it sees.
//!
//! | module | for |
//! |---|---|
//! | [`stock`] | the plugin that ours stands in front of |
//! | [`layout`] | whether structures look as they did when this was built |
//! | [`job`], [`node`] | views of a job and of the table of nodes |
//! | [`mask`] | GPUs and nodes kept from one stock call |
//! | [`expand`] | a job merged into another one |

pub mod bits;
pub mod expand;
pub mod job;
pub mod layout;
pub mod mask;
pub mod node;
pub mod stock;

use slurm_sys::select as sys;
use std::ffi::{CStr, CString, c_char, c_int};

/// What Slurm reads as success.
pub const SUCCESS: c_int = 0;
/// What Slurm reads as failure.
pub const ERROR: c_int = -1;

/// Whether this process is slurmctld: before 25.05 clients and slurmd load select plugins too.
pub fn in_slurmctld() -> bool {
    // SAFETY: no arguments; compares a name that the process has set at its start.
    unsafe { sys::slurm_running_in_slurmctld() }
}

/// The uid of an account; `None`: there is none of that name.
pub fn uid_of(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut buffer: Vec<c_char> = vec![0; 1 << 14];
    // SAFETY: a passwd of zeros is a valid one, filled by the call.
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    // SAFETY: all pointers are valid, and the buffer has the length that is told.
    let code = unsafe { libc::getpwnam_r(name.as_ptr(), &mut entry, buffer.as_mut_ptr(), buffer.len(), &mut found) };
    (code == 0 && !found.is_null()).then_some(entry.pw_uid)
}

/// One line in slurmctld's log.
pub fn log_info(line: &str) {
    let line = CString::new(line.replace('\0', "")).unwrap_or_default();
    // SAFETY: the format takes one C string.
    unsafe { sys::slurm_info(c"%s".as_ptr(), line.as_ptr()) }
}

/// CPU time of the calling thread, nanoseconds.
pub fn thread_cpu_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes to the timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// A text of slurmctld's; empty for a null pointer or bytes that are no UTF-8.
///
/// # Safety
/// Null, or a C string that lives as long as the result is used.
unsafe fn str_of<'a>(text: *const c_char) -> &'a str {
    if text.is_null() {
        return "";
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or_default()
}
