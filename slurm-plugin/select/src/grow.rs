// SPDX-License-Identifier: GPL-2.0-or-later
//! Our part of a merge of two GPU jobs, which the stock plugin refuses. Off unless `elastic.grow` is `in-place`.

use crate::state::{self, Plugin};
use pliant_protocol::board::Event;
use slurm::select::expand::{self, Pair};
use slurm::select::job::Job;
use slurm::select::mask::Nodes;
use slurm::select::{SUCCESS, log_info};
use std::ffi::{c_int, c_void};

/// A job that is to be merged into another one starts only where that can be done: slurmctld has ended its processes
/// before it asks for the merge, and a refusal then leaves wrong counters. `Some`: why it does not start.
///
/// # Safety
/// The job and the nodes of a test that is running.
pub unsafe fn limit(plugin: &Plugin, pointer: *mut c_void, job: &Job<'_>, nodes: &Nodes) -> Option<String> {
    let base = job.expands().filter(|_| plugin.in_place && job.gpus().is_some())?;
    // SAFETY: the caller's promise; the layout was checked.
    match unsafe { expand::keep_off(pointer, base) } {
        Ok(off) => {
            nodes.take_out(&off);
            None
        }
        Err(why) => Some(why),
    }
}

/// A merge that may go ahead.
#[derive(Debug)]
pub struct Growth {
    /// Both jobs, looked at.
    pub pair: Pair,
    /// The job that is merged.
    pub from: u32,
    /// The job that grows.
    pub to: u32,
}

/// Before the stock call. `None`: nothing of ours to do.
///
/// # Safety
/// slurmctld's own pointers of the call that is running.
pub unsafe fn begin(from: *mut c_void, to: *mut c_void) -> Option<Growth> {
    let plugin = state::plugin_for(from)?;
    if !plugin.in_place {
        return None;
    }
    // SAFETY: the caller's promise; the layout was checked.
    let (smaller, base) = unsafe { (Job::from_callback(from)?, Job::from_callback(to)?) };
    if smaller.gpus().is_none() && base.gpus().is_none() {
        return None;
    }
    let (less, more) = (smaller.id(), base.id());
    // SAFETY: as above.
    match unsafe { Pair::of(from, to) } {
        Ok(pair) => Some(Growth { pair, from: less, to: more }),
        Err(why) => {
            log_info(&format!("pliant: job {less} is not merged into job {more}: {why}"));
            plugin.tell(&Event::Expand { from: less, to: more, refused: Some(why) });
            None
        }
    }
}

/// After the stock call.
pub fn end(from: u32, to: u32, answer: c_int) {
    let refused = (answer != SUCCESS).then(|| "Slurm refuses".to_owned());
    if let Some(plugin) = state::plugin() {
        plugin.tell(&Event::Expand { from, to, refused });
    }
}
