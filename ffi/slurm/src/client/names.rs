// SPDX-License-Identifier: GPL-2.0-or-later
//! Slurm's words for its numbers.

use super::owned;
use std::ffi::{CStr, c_char, c_uint};
use std::sync::OnceLock;

const JOB_STATES: [&str; 12] = [
    "PENDING",
    "RUNNING",
    "SUSPENDED",
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
];
// Positions: asserted in slurm-sys/wrapper.h.
const JOB_FLAGS: [(u32, &str); 13] = [
    (8, "LAUNCH_FAILED"),
    (10, "REQUEUED"),
    (11, "REQUEUE_HOLD"),
    (12, "SPECIAL_EXIT"),
    (13, "RESIZING"),
    (14, "CONFIGURING"),
    (15, "COMPLETING"),
    (16, "STOPPED"),
    (17, "RECONFIG_FAIL"),
    (18, "POWER_UP_NODE"),
    (19, "REVOKED"),
    (21, "RESV_DEL_HOLD"),
    (22, "SIGNALING"),
];
const NODE_STATES: [&str; 7] = ["UNKNOWN", "DOWN", "IDLE", "ALLOCATED", "ERROR", "MIXED", "FUTURE"];
const NODE_FLAGS: [(u32, &str); 20] = [
    (5, "RESERVED"),
    (6, "UNDRAIN"),
    (7, "CLOUD"),
    (9, "DRAIN"),
    (10, "COMPLETING"),
    (11, "NOT_RESPONDING"),
    (12, "POWERED_DOWN"),
    (13, "FAIL"),
    (14, "POWERING_UP"),
    (15, "MAINTENANCE"),
    (16, "REBOOT_REQUESTED"),
    (17, "REBOOT_CANCELED"),
    (18, "POWERING_DOWN"),
    (19, "DYNAMIC_FUTURE"),
    (20, "REBOOT_ISSUED"),
    (21, "PLANNED"),
    (22, "INVALID_REG"),
    (23, "POWER_DOWN"),
    (26, "DYNAMIC_NORM"),
    (27, "BLOCKED"),
];

fn flags(value: u32, table: &[(u32, &str)]) -> Vec<String> {
    table.iter().filter(|(bit, _)| value & (1 << bit) != 0).map(|(_, name)| (*name).to_owned()).collect()
}

fn base(index: u32, table: &[&str]) -> String {
    let name = usize::try_from(index).ok().and_then(|i| table.get(i));
    name.map_or_else(|| format!("STATE_{index}"), |name| (*name).to_owned())
}

/// State and flags of a job.
pub fn job_state(value: u32) -> (String, Vec<String>) {
    (base(value & 0xff, &JOB_STATES), flags(value, &JOB_FLAGS))
}

/// State and flags of a node.
pub fn node_state(value: u32) -> (String, Vec<String>) {
    (base(value & 0xf, &NODE_STATES), flags(value, &NODE_FLAGS))
}

/// State of a partition.
pub fn partition_state(value: u16) -> String {
    match value & 3 {
        3 => "UP",
        1 => "DOWN",
        2 => "DRAIN",
        _ => "INACTIVE",
    }
    .to_owned()
}

/// Preemption mode of a partition; `None`: the cluster's.
pub fn preempt_mode(value: u16) -> Option<String> {
    if value == u16::MAX - 1 {
        return None;
    }
    let words = [(0x8000, "GANG"), (0x4000, "WITHIN"), (0x0001, "SUSPEND"), (0x0002, "REQUEUE"), (0x0008, "CANCEL")];
    let set: Vec<_> = words.iter().filter(|(bit, _)| value & bit != 0).map(|(_, name)| *name).collect();
    Some(if set.is_empty() { "OFF".to_owned() } else { set.join(",") })
}

/// Reason of a job as squeue shows it; `None`: none.
///
/// The numbers differ between releases and the table is libslurm's. slurm.h does not declare the function, which is
/// exported under one of two names: found at run time, so that a third name costs the text only.
pub fn reason(value: u32) -> Option<String> {
    type Function = unsafe extern "C" fn(c_uint) -> *const c_char;
    static FUNCTION: OnceLock<Option<Function>> = OnceLock::new();
    const NAMES: [&CStr; 2] = [c"slurm_job_state_reason_string", c"slurm_job_reason_string"];
    if value == 0 {
        return None;
    }
    let function = FUNCTION.get_or_init(|| {
        // SAFETY: looks a name up in what is loaded.
        let found = NAMES.iter().map(|name| unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) });
        let found = found.into_iter().find(|address| !address.is_null())?;
        // SAFETY: both take an enum of the size of `unsigned int` and return a C string that lives on, in every release read
        // (22.05 to 26.05).
        Some(unsafe { std::mem::transmute::<*mut libc::c_void, Function>(found) })
    });
    let common = match value {
        1 => "Priority",
        2 => "Dependency",
        3 => "Resources",
        _ => "Unknown",
    };
    // SAFETY: see above.
    function.and_then(|f| unsafe { owned(f(value)) }).or_else(|| Some(common.to_owned())).filter(|text| text != "None")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_base_and_flags() {
        assert_eq!(job_state(1 | (1 << 15)), ("RUNNING".to_owned(), vec!["COMPLETING".to_owned()]));
        assert_eq!(job_state(99).0, "STATE_99");
        assert_eq!(node_state(2 | (1 << 9)), ("IDLE".to_owned(), vec!["DRAIN".to_owned()]));
        assert_eq!(partition_state(3), "UP");
        assert_eq!(preempt_mode(0x8001).as_deref(), Some("GANG,SUSPEND"));
        assert_eq!((preempt_mode(0).as_deref(), preempt_mode(0xfffe)), (Some("OFF"), None));
    }

    #[test]
    fn the_commonest_reasons_are_known_without_libslurm() {
        assert_eq!((reason(0), reason(3).as_deref()), (None, Some("Resources")));
    }
}
