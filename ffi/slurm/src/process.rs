// SPDX-License-Identifier: GPL-2.0-or-later
//! Environment and exit of the Slurm command (sbatch, salloc, srun, scrontab) that has loaded a plugin.
//!
//! These commands parse their options and call SPANK's `init`, option and `init_post_opt` callbacks in their only thread,
//! and copy their environment into the job afterwards. The functions are for those callbacks alone.

use std::ffi::OsString;

/// Names of the process's environment that begin with `prefix`. Names that are no UTF-8 are left out.
pub fn env_names(prefix: &str) -> Vec<String> {
    std::env::vars_os()
        .filter_map(|(name, _): (OsString, OsString)| name.into_string().ok())
        .filter(|n| n.starts_with(prefix))
        .collect()
}

/// Removes a variable from the process's environment.
pub fn remove_env(name: &str) {
    // SAFETY: called from SPANK callbacks of a command that has no other thread yet (module docs).
    unsafe { std::env::remove_var(name) }
}

/// Sets a variable in the process's environment. A name or value that C cannot hold is not set.
pub fn set_env(name: &str, value: &str) {
    if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
        return;
    }
    // SAFETY: as in `remove_env`.
    unsafe { std::env::set_var(name, value) }
}

/// Ends the command before it has submitted anything.
///
/// The only way that stops a submission from `init_post_opt` where plugstack.conf says `optional`: Slurm ignores the
/// callback's return value then.
pub fn exit_command(code: i32) -> ! {
    #[allow(clippy::exit, reason = "see above; never reached in a daemon or slurmstepd")]
    std::process::exit(code)
}
