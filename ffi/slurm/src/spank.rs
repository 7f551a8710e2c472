// SPDX-License-Identifier: GPL-2.0-or-later
//! SPANK: what a plugin asks of the process that loaded it.
//!
//! The functions are symbols of that process (libslurmfull), not of libslurm.

use slurm_sys as sys;
use std::ffi::{CStr, CString, c_char, c_int};

/// ESPANK_SUCCESS, a macro in every release.
const SUCCESS: sys::spank_err_t = 0;

/// In which kind of process a plugin runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// srun.
    Local,
    /// slurmstepd.
    Remote,
    /// sbatch, salloc, scrontab.
    Allocator,
    /// slurmd.
    Slurmd,
    /// Prolog or epilog.
    JobScript,
    /// Slurm could not tell.
    Unknown,
}

/// The context of the calling process.
pub fn context() -> Context {
    // SAFETY: no arguments; reads a variable of the host process.
    match unsafe { sys::spank_context() } {
        sys::S_CTX_LOCAL => Context::Local,
        sys::S_CTX_REMOTE => Context::Remote,
        sys::S_CTX_ALLOCATOR => Context::Allocator,
        sys::S_CTX_SLURMD => Context::Slurmd,
        sys::S_CTX_JOB_SCRIPT => Context::JobScript,
        _ => Context::Unknown,
    }
}

/// A SPANK call was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed with SPANK error {code}")]
pub struct SpankError {
    /// Which call.
    pub call: &'static str,
    /// `spank_err_t`.
    pub code: u32,
}

/// `slurmctld`'s numbers for steps that are no srun step.
pub mod step {
    /// The batch script.
    pub const BATCH: u32 = 0xffff_fffb;
    /// The extern step of PrologFlags=Contain.
    pub const EXTERN: u32 = 0xffff_fffc;
}

/// Value callback of an option: number given at registration, text, whether it comes from the remote side.
pub type OptionCallback = unsafe extern "C" fn(c_int, *const c_char, c_int) -> c_int;

/// An option to register.
#[derive(Clone, Copy, Debug)]
pub struct OptionSpec<'a> {
    /// Long name without dashes.
    pub name: &'a str,
    /// What stands for the value in the help text.
    pub value_name: &'a str,
    /// Help text.
    pub usage: &'a str,
    /// Handed to the callback.
    pub number: c_int,
}

/// One SPANK callback's handle and plugstack arguments.
#[derive(Debug)]
pub struct Spank {
    handle: sys::spank_t,
    args: Vec<String>,
}

impl Spank {
    /// Takes what Slurm hands to a SPANK callback.
    ///
    /// # Safety
    /// The three must be the arguments of the callback that is running, and the result must not outlive it.
    pub unsafe fn from_callback(handle: sys::spank_t, argc: c_int, argv: *mut *mut c_char) -> Spank {
        let count = if argv.is_null() { 0 } else { usize::try_from(argc).unwrap_or(0) };
        // SAFETY: Slurm passes argc C strings in argv.
        let args = (0..count).map(|i| unsafe { text(*argv.add(i)) }).collect();
        Spank { handle, args }
    }

    /// The arguments on the plugstack.conf line.
    pub fn args(&self) -> &[String] {
        &self.args
    }

    /// Registers an option with a required value. Only in `slurm_spank_init`.
    ///
    /// # Errors
    /// When Slurm refuses, for instance because another plugin has an option of that name.
    pub fn register_option(&self, spec: &OptionSpec<'_>, callback: OptionCallback) -> Result<(), SpankError> {
        // Slurm keeps its own copy in every release read, but nothing promises it: these few strings live as long as the
        // plugin.
        let own = |s: &str| c_string(s).into_raw();
        let option = Box::leak(Box::new(sys::spank_option {
            name: own(spec.name),
            arginfo: own(spec.value_name),
            usage: own(spec.usage),
            has_arg: 1,
            val: spec.number,
            cb: Some(callback),
        }));
        // SAFETY: the handle is valid during the callback, the option lives on.
        check("spank_option_register", unsafe { sys::spank_option_register(self.handle, option) })
    }

    /// A variable of the job's environment (slurmstepd only). `None`: not there. Bytes that are no UTF-8 are replaced.
    pub fn getenv(&self, name: &str) -> Option<String> {
        let name = c_string(name);
        let mut buffer: Vec<c_char> = vec![0; 4096];
        loop {
            let size = c_int::try_from(buffer.len()).ok()?;
            // SAFETY: handle as above; the buffer has `size` bytes.
            let code = unsafe { sys::spank_getenv(self.handle, name.as_ptr(), buffer.as_mut_ptr(), size) };
            match code {
                SUCCESS => {
                    // SAFETY: Slurm has written a C string into the buffer.
                    return Some(unsafe { text(buffer.as_ptr()) });
                }
                sys::ESPANK_NOSPACE if buffer.len() < 1 << 20 => buffer.resize(buffer.len() * 16, 0),
                _ => return None,
            }
        }
    }

    /// Sets a variable of the job's environment (slurmstepd only), replacing what is there.
    ///
    /// # Errors
    /// When Slurm refuses.
    pub fn setenv(&self, name: &str, value: &str) -> Result<(), SpankError> {
        let (name, value) = (c_string(name), c_string(value));
        // SAFETY: handle as above; Slurm copies the strings.
        check("spank_setenv", unsafe { sys::spank_setenv(self.handle, name.as_ptr(), value.as_ptr(), 1) })
    }

    /// Removes a variable of the job's environment (slurmstepd only).
    ///
    /// # Errors
    /// When Slurm refuses.
    pub fn unsetenv(&self, name: &str) -> Result<(), SpankError> {
        let name = c_string(name);
        // SAFETY: handle as above; Slurm only reads the name.
        check("spank_unsetenv", unsafe { sys::spank_unsetenv(self.handle, name.as_ptr()) })
    }

    /// Adds a value to `spank_job_env` (srun, sbatch, salloc): slurmctld, prolog and epilog see it as `SPANK_name`, and
    /// sbatch and salloc hand it to the job as `SLURM_SPANK_name`.
    ///
    /// # Errors
    /// When Slurm refuses.
    pub fn job_control_setenv(&self, name: &str, value: &str) -> Result<(), SpankError> {
        let (name, value) = (c_string(name), c_string(value));
        // SAFETY: handle as above; Slurm copies the strings.
        check("spank_job_control_setenv", unsafe {
            sys::spank_job_control_setenv(self.handle, name.as_ptr(), value.as_ptr(), 1)
        })
    }

    /// Job id (slurmstepd; srun once it has one).
    pub fn job_id(&self) -> Option<u32> {
        self.number(sys::S_JOB_ID)
    }

    /// Step id (slurmstepd): an srun step's number, or one of [`step`].
    pub fn step_id(&self) -> Option<u32> {
        self.number(sys::S_JOB_STEPID)
    }

    fn number(&self, item: sys::spank_item) -> Option<u32> {
        let mut value: u32 = 0;
        // SAFETY: each item asked for takes a pointer to 32 bits (spank.h).
        let code = unsafe { sys::spank_get_item(self.handle, item, std::ptr::from_mut(&mut value)) };
        (code == SUCCESS).then_some(value)
    }

    /// Names of the job's environment that begin with `prefix` (slurmstepd only).
    pub fn env_names(&self, prefix: &str) -> Vec<String> {
        let mut env: *mut *mut c_char = std::ptr::null_mut();
        // SAFETY: S_JOB_ENV takes a pointer to `char **` (spank.h).
        let code = unsafe { sys::spank_get_item(self.handle, sys::S_JOB_ENV, std::ptr::from_mut(&mut env)) };
        let mut names = vec![];
        if code != SUCCESS || env.is_null() {
            return names;
        }
        // SAFETY: an environment is an array of C strings that ends with a null pointer; nothing changes it meanwhile.
        unsafe {
            while !(*env).is_null() {
                let entry = CStr::from_ptr(*env).to_bytes();
                let name = entry.split(|&b| b == b'=').next().unwrap_or_default();
                if let Ok(name) = std::str::from_utf8(name)
                    && name.starts_with(prefix)
                {
                    names.push(name.to_owned());
                }
                env = env.add(1);
            }
        }
        names
    }
}

fn check(call: &'static str, code: sys::spank_err_t) -> Result<(), SpankError> {
    if code == SUCCESS { Ok(()) } else { Err(SpankError { call, code }) }
}

/// A text that Slurm hands over, bytes that are no UTF-8 replaced; empty for a null pointer.
///
/// # Safety
/// `pointer` must be null or point to a C string.
pub unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// One line on the command's standard error, or in the daemon's log, as an error.
pub fn log_error(line: &str) {
    let line = c_string(line);
    // SAFETY: the format takes one C string.
    unsafe { sys::slurm_error(c"%s".as_ptr(), line.as_ptr()) }
}

/// One line on the command's standard error, or in the daemon's log, without "error:".
pub fn log_notice(line: &str) {
    let line = c_string(line);
    // SAFETY: the format takes one C string.
    unsafe { sys::slurm_spank_log(c"%s".as_ptr(), line.as_ptr()) }
}

/// C's form of a text, up to its first NUL.
fn c_string(text: &str) -> CString {
    let text = text.split('\0').next().unwrap_or_default();
    CString::new(text).unwrap_or_default()
}
