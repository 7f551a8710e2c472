// SPDX-License-Identifier: GPL-2.0-or-later
//! In slurmd, which keeps the plugin for life: nothing but the options' names.

use crate::submit;
use slurm::spank::Spank;
use std::ffi::c_int;

pub fn init(spank: &Spank) -> c_int {
    submit::register_options(spank);
    0
}
