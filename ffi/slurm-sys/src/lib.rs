// SPDX-License-Identifier: GPL-2.0-or-later
//! Bindings of `slurm/slurm.h` and `slurm/spank.h` as installed where this was built. No logic; `slurm` is the safe
//! wrapper.
//!
//! The crate asks for no library: `spank_*` and `slurm_error` come from the process that loads a plugin, and the program
//! that uses the feature `client` links libslurm itself. It is bound to the release it was built against
//! ([`PLIANT_SLURM_VERSION`]: major, minor and micro in one byte each).
#![allow(
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    missing_docs,
    missing_debug_implementations,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap
)]
// The two runs of bindgen declare what both headers have, one with less known of its types.
#![allow(clashing_extern_declarations)]

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));

/// Slurm's internal headers, for the select plugin: bound to the exact release that this was built for.
#[cfg(feature = "select")]
pub mod select {
    include!(concat!(env!("OUT_DIR"), "/select.rs"));
}
