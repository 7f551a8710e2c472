// SPDX-License-Identifier: GPL-2.0-or-later
//! libslurm calls. libslurm may print, wait for its own time-outs and, on a broken configuration, end the process
//! (`fatal`): only a program whose death harms nobody should link it.

mod job;
mod names;
mod node;
mod partition;

pub use job::{Job, Jobs, Memory};
pub use node::{Node, Nodes};
pub use partition::{Partition, Partitions};

use slurm_sys as sys;
use std::ffi::{CStr, CString, c_char, c_int};
use std::io;

/// SHOW_ALL, SHOW_DETAIL, SHOW_MIXED (the first two are asserted in slurm-sys/wrapper.h).
const SHOW: u16 = 0x0001 | 0x0002 | 0x0008;
/// KILL_FULL_JOB: all steps and the batch script.
const KILL_FULL_JOB: u16 = 1 << 3;
const SIGKILL: u16 = 9;
/// What `nice` is counted from in Slurm's records.
const NICE_OFFSET: i64 = 0x8000_0000;

/// Slurm refused, or could not be reached.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text} (error {errno})")]
pub struct ClientError {
    /// Number in slurm_errno.h, or the system's.
    pub errno: i32,
    /// Slurm's text for it.
    pub text: String,
}

impl ClientError {
    fn new(errno: i32) -> Self {
        // SAFETY: returns a static or thread-local C string, copied at once.
        let text = unsafe { owned(sys::slurm_strerror(errno)) }.unwrap_or_else(|| "unknown error".to_owned());
        ClientError { errno, text }
    }

    /// Whether Slurm does not know the job that was asked for.
    pub fn is_unknown_job(&self) -> bool {
        self.errno == ESLURM_INVALID_JOB_ID
    }
}

/// slurm_errno.h; the same in every release.
const ESLURM_INVALID_JOB_ID: i32 = 2017;

/// Fields of a job that an update sets; the rest stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Update {
    /// User's comment.
    pub comment: Option<String>,
    /// Administrator's comment.
    pub admin_comment: Option<String>,
    /// Minutes.
    pub time_limit: Option<u32>,
    /// Nice value.
    pub nice: Option<i32>,
    /// Priority; 0 holds.
    pub priority: Option<u32>,
    /// Node list.
    pub req_nodes: Option<String>,
    /// Excluded nodes.
    pub exc_nodes: Option<String>,
}

/// A process in which libslurm is ready.
#[derive(Debug)]
pub struct Client(());

impl Client {
    /// Reads slurm.conf (`SLURM_CONF` or the built-in place). libslurm ends the process where it cannot.
    ///
    /// Call it once, before the process has a second thread.
    pub fn new() -> Client {
        // SAFETY: a null pointer means the default configuration.
        unsafe { sys::slurm_init(std::ptr::null()) };
        Client(())
    }

    /// All jobs, with the GRES that each allocated node gives.
    ///
    /// # Errors
    /// When slurmctld cannot be reached or refuses.
    pub fn jobs(&self) -> Result<Jobs, ClientError> {
        let mut message = std::ptr::null_mut();
        // SAFETY: on success Slurm stores a message that `Jobs` frees.
        check(|| unsafe { sys::slurm_load_jobs(0, &mut message, SHOW) })?;
        Jobs::take(message).ok_or_else(|| ClientError::new(libc::EPROTO))
    }

    /// One job.
    ///
    /// # Errors
    /// When slurmctld cannot be reached, refuses, or does not know it ([`ClientError::is_unknown_job`]).
    pub fn job(&self, id: u32) -> Result<Jobs, ClientError> {
        let mut message = std::ptr::null_mut();
        #[cfg(not(job_desc_step_id))]
        // SAFETY: as above.
        check(|| unsafe { sys::slurm_load_job(&mut message, id, SHOW) })?;
        #[cfg(job_desc_step_id)]
        {
            // SAFETY: numbers only, for which zero bytes are a valid start.
            let mut step: sys::slurm_step_id_t = unsafe { std::mem::zeroed() };
            (step.job_id, step.step_id, step.step_het_comp) = (id, sys::NO_VAL, sys::NO_VAL);
            // SAFETY: as above.
            check(|| unsafe { sys::slurm_load_job(&mut message, step, SHOW) })?;
        }
        Jobs::take(message).ok_or_else(|| ClientError::new(libc::EPROTO))
    }

    /// All nodes.
    ///
    /// # Errors
    /// When slurmctld cannot be reached or refuses.
    pub fn nodes(&self) -> Result<Nodes, ClientError> {
        let mut message = std::ptr::null_mut();
        // SAFETY: on success Slurm stores a message that `Nodes` frees.
        check(|| unsafe { sys::slurm_load_node(0, &mut message, SHOW) })?;
        Nodes::take(message).ok_or_else(|| ClientError::new(libc::EPROTO))
    }

    /// All partitions.
    ///
    /// # Errors
    /// When slurmctld cannot be reached or refuses.
    pub fn partitions(&self) -> Result<Partitions, ClientError> {
        let mut message = std::ptr::null_mut();
        // SAFETY: on success Slurm stores a message that `Partitions` frees.
        check(|| unsafe { sys::slurm_load_partitions(0, &mut message, SHOW) })?;
        Partitions::take(message).ok_or_else(|| ClientError::new(libc::EPROTO))
    }

    /// Ends a job as scancel does (`signal` is `None`), or sends a signal to all its steps and its batch script.
    /// `job` is Slurm's text form of an id: `123`, `123_4`, `123+1`.
    ///
    /// # Errors
    /// When slurmctld cannot be reached or refuses.
    pub fn cancel(&self, job: &str, signal: Option<u16>) -> Result<(), ClientError> {
        let job = c_string(job)?;
        let (signal, flags) = signal.map_or((SIGKILL, 0), |s| (s, KILL_FULL_JOB));
        // SAFETY: Slurm reads the id and keeps nothing. This call has the same form from 22.05 to 26.05.
        check(|| unsafe { sys::slurm_kill_job2(job.as_ptr(), signal, flags, std::ptr::null()) })
    }

    /// Changes a job. `job` as in [`Client::cancel`].
    ///
    /// # Errors
    /// When slurmctld cannot be reached or refuses, or a text holds a NUL.
    pub fn update(&self, job: &str, update: &Update) -> Result<(), ClientError> {
        let text = |s: &Option<String>| s.as_deref().map(c_string).transpose();
        let id = c_string(job)?;
        let (comment, admin) = (text(&update.comment)?, text(&update.admin_comment)?);
        let (req, exc) = (text(&update.req_nodes)?, text(&update.exc_nodes)?);
        let pointer = |s: &Option<CString>| s.as_ref().map_or(std::ptr::null_mut(), |s| s.as_ptr().cast_mut());
        // SAFETY: slurm_init_job_desc_msg overwrites the whole structure, for which zero bytes are a valid start.
        let mut desc: sys::job_desc_msg_t = unsafe { std::mem::zeroed() };
        // SAFETY: a valid structure.
        unsafe { sys::slurm_init_job_desc_msg(&mut desc) };
        match job.parse::<u32>() {
            #[cfg(not(job_desc_step_id))]
            Ok(number) => desc.job_id = number,
            #[cfg(job_desc_step_id)]
            Ok(number) => desc.step_id.job_id = number,
            Err(_) => desc.job_id_str = id.as_ptr().cast_mut(),
        }
        desc.comment = pointer(&comment);
        desc.admin_comment = pointer(&admin);
        desc.req_nodes = pointer(&req);
        desc.exc_nodes = pointer(&exc);
        desc.time_limit = update.time_limit.unwrap_or(desc.time_limit);
        desc.priority = update.priority.unwrap_or(desc.priority);
        if let Some(nice) = update.nice {
            desc.nice = u32::try_from(NICE_OFFSET + i64::from(nice)).map_err(|_| ClientError::new(libc::ERANGE))?;
        }
        // SAFETY: Slurm reads the structure and its strings, which live until the call has returned, and frees nothing.
        check(|| unsafe { sys::slurm_update_job(&mut desc) })
    }
}

impl Default for Client {
    fn default() -> Self {
        Client::new()
    }
}

/// Turns libslurm's two ways to fail (`-1` with errno, or the error number) into an error.
fn check(call: impl FnOnce() -> c_int) -> Result<(), ClientError> {
    match call() {
        0 => Ok(()),
        rc if rc > 0 => Err(ClientError::new(rc)),
        _ => Err(ClientError::new(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))),
    }
}

fn c_string(text: &str) -> Result<CString, ClientError> {
    CString::new(text).map_err(|_| ClientError::new(libc::EINVAL))
}

/// A text of Slurm's; `None` for a null pointer or an empty text.
///
/// # Safety
/// `pointer` must be null or point to a C string.
unsafe fn owned(pointer: *const c_char) -> Option<String> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(pointer) }.to_string_lossy();
    (!text.is_empty()).then(|| text.into_owned())
}

/// A point in time; `None` where Slurm has none.
fn time(seconds: sys::time_t) -> Option<i64> {
    (seconds > 0).then_some(seconds)
}

/// A number of a record, `None` where Slurm says "no value" or "infinite" in the number's own width.
trait Number: Copy + Into<u64> {
    const WIDTH_MAX: u64;

    fn known(self) -> Option<u64> {
        let value = self.into();
        (value < Self::WIDTH_MAX - 1).then_some(value)
    }

    fn known32(self) -> Option<u32> {
        self.known().and_then(|v| u32::try_from(v).ok())
    }

    fn is_infinite(self) -> bool {
        self.into() == Self::WIDTH_MAX
    }
}

impl Number for u8 {
    const WIDTH_MAX: u64 = u8::MAX as u64;
}
impl Number for u16 {
    const WIDTH_MAX: u64 = u16::MAX as u64;
}
impl Number for u32 {
    const WIDTH_MAX: u64 = u32::MAX as u64;
}
impl Number for u64 {
    const WIDTH_MAX: u64 = u64::MAX;
}

/// Number that stands for "none" as 0 in Slurm's records.
fn non_zero(value: Option<u32>) -> Option<u32> {
    value.filter(|&v| v != 0)
}

/// Methods that return a text of the record.
macro_rules! texts {
    ($($(#[$doc:meta])* $method:ident = $field:ident;)*) => {$(
        $(#[$doc])*
        pub fn $method(&self) -> Option<String> {
            // SAFETY: the record's texts are null or C strings, and live as long as the record.
            unsafe { owned(self.0.$field) }
        }
    )*};
}

/// The owner of a message of libslurm: an array of records that is freed with it.
macro_rules! records {
    ($(#[$doc:meta])* $owner:ident of $record:ident, $message:ty, $raw:ty, $array:ident, $free:path) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $owner(std::ptr::NonNull<$message>);

        impl $owner {
            pub(super) fn take(message: *mut $message) -> Option<Self> {
                std::ptr::NonNull::new(message).map($owner)
            }

            fn message(&self) -> &$message {
                // SAFETY: libslurm filled it, and it is freed in drop only.
                unsafe { self.0.as_ref() }
            }

            /// When slurmctld made it, Unix seconds.
            pub fn as_of(&self) -> i64 {
                self.message().last_update
            }

            /// The records.
            pub fn iter(&self) -> impl Iterator<Item = $record<'_>> {
                let message = self.message();
                let count = usize::try_from(message.record_count).unwrap_or(0);
                let records: &[$raw] = if message.$array.is_null() || count == 0 {
                    &[]
                } else {
                    // SAFETY: libslurm's array of record_count records, alive as long as self.
                    unsafe { std::slice::from_raw_parts(message.$array, count) }
                };
                records.iter().map($record)
            }
        }

        impl Drop for $owner {
            fn drop(&mut self) {
                // SAFETY: got from the matching load call, and never used again.
                unsafe { $free(self.0.as_ptr()) }
            }
        }
    };
}
use {records, texts};
