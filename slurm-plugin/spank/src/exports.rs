// SPDX-License-Identifier: GPL-2.0-or-later
//! What Slurm looks up and calls. Each function is a shim: arguments, fence, a switch on the kind of process.

use crate::{alloc, slurmd, slurmstepd, srun, state};
use pliant_protocol::options::OPTIONS;
use slurm::fence::Fence;
use slurm::spank::{self, Context, Spank};
use slurm_sys::spank_t;
use std::ffi::{c_char, c_int, c_uint};

static FENCE: Fence = Fence::new(spank::log_error);

/// Name in Slurm's logs and in its names for replayed options (`environment::PLUGIN_NAME`).
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "Slurm's name")]
pub static plugin_name: [u8; 7] = *b"pliant\0";

/// Kind of plugin.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "Slurm's name")]
pub static plugin_type: [u8; 6] = *b"spank\0";

/// Slurm release that this was built for; major and minor must be those of the loading process.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "Slurm's name")]
pub static plugin_version: c_uint = slurm::VERSION_NUMBER;

/// Version of the SPANK interface.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "Slurm's name")]
pub static spank_plugin_version: c_uint = 1;

/// Called first in every kind of process.
///
/// # Safety
/// Called by Slurm with the arguments of a SPANK callback.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slurm_spank_init(handle: spank_t, argc: c_int, argv: *mut *mut c_char) -> c_int {
    FENCE.call("slurm_spank_init", || {
        // SAFETY: Slurm's own arguments, used within the callback.
        let spank = unsafe { Spank::from_callback(handle, argc, argv) };
        match spank::context() {
            Context::Allocator => alloc::init(&spank),
            Context::Local => srun::init(&spank),
            Context::Remote => slurmstepd::init(&spank),
            Context::Slurmd => slurmd::init(&spank),
            Context::JobScript | Context::Unknown => 0,
        }
    })
}

/// Called once all options have been handed over.
///
/// # Safety
/// Called by Slurm with the arguments of a SPANK callback.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slurm_spank_init_post_opt(handle: spank_t, argc: c_int, argv: *mut *mut c_char) -> c_int {
    FENCE.call("slurm_spank_init_post_opt", || {
        // SAFETY: Slurm's own arguments, used within the callback.
        let spank = unsafe { Spank::from_callback(handle, argc, argv) };
        match spank::context() {
            Context::Allocator => alloc::init_post_opt(&spank),
            Context::Local => srun::init_post_opt(&spank),
            Context::Remote => slurmstepd::init_post_opt(&spank),
            Context::Slurmd | Context::JobScript | Context::Unknown => 0,
        }
    })
}

/// Called for each use of an option, several times with the same value too. Not exported by name.
///
/// It accepts every text: `init_post_opt` checks the one that counts and says so in one line, where Slurm would add
/// another with the whole text.
pub unsafe extern "C" fn option_callback(number: c_int, value: *const c_char, _remote: c_int) -> c_int {
    FENCE.call("option_callback", || {
        // SAFETY: Slurm passes a C string for an option that has a value.
        let text = unsafe { spank::text(value) };
        if let Some(def) = usize::try_from(number).ok().and_then(|i| OPTIONS.get(i)) {
            state::change(|typed| typed.set_flag(def.key, &text));
        }
        0
    })
}
