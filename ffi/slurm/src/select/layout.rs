// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether slurmctld's structures look as they did when this was built. A build for another micro of the same release
//! line reads shifted fields: every pointer is therefore read by the kernel first, which answers instead of crashing.

use super::node;
use slurm_sys::select as sys;
use std::ffi::{c_char, c_void};

/// The longest name that is looked at.
const NAME: usize = 256;

/// Looks at a job and at the table of nodes.
///
/// # Errors
/// What does not fit, one phrase.
pub fn check(job: *mut c_void) -> Result<(), String> {
    let job: sys::job_record = copy(job.cast()).ok_or("a job record cannot be read")?;
    if job.magic != sys::PLIANT_JOB_MAGIC {
        return Err(format!("a job record begins with {:#x}", job.magic));
    }
    let details: sys::job_details_t = copy(job.details.cast_const().cast()).ok_or("job details cannot be read")?;
    if details.magic != sys::PLIANT_DETAILS_MAGIC {
        return Err(format!("job details begin with {:#x}", details.magic));
    }
    let partitions = name(job.partition).ok_or("a job's partition is no name")?;
    let part: sys::part_record_t = copy(job.part_ptr.cast_const().cast()).ok_or("a partition record cannot be read")?;
    let part = name(part.name).ok_or("a partition's name is none")?;
    if !partitions.split(',').any(|p| p == part) {
        return Err(format!("a job of partition {partitions:?} is tried in {part:?}"));
    }
    if !job.name.is_null() && name(job.name).is_none() {
        return Err("a job's name is none".into());
    }
    let count = node::count();
    let first = (0..count).find_map(node::record).ok_or("there is no node")?;
    let first: sys::node_record = copy(first.cast_const().cast()).ok_or("a node record cannot be read")?;
    if first.magic != sys::NODE_MAGIC {
        return Err(format!("a node record bears {:#x}", first.magic));
    }
    name(first.name).map(drop).ok_or_else(|| "a node's name is none".to_owned())
}

/// A structure at an address, or `None` where the process has nothing there.
fn copy<T>(from: *const c_void) -> Option<T> {
    let mut value = std::mem::MaybeUninit::<T>::uninit();
    read(from, value.as_mut_ptr().cast(), size_of::<T>()).then(|| {
        // SAFETY: the kernel has filled it; the types asked for are C structures, for which any bytes are a value.
        unsafe { value.assume_init() }
    })
}

/// A name at an address: printable, not empty, not too long.
fn name(from: *mut c_char) -> Option<String> {
    let mut bytes = Vec::new();
    let mut at = from.cast_const().cast::<u8>();
    while bytes.len() < NAME {
        let mut byte = 0u8;
        if from.is_null() || !read(at.cast(), (&raw mut byte).cast(), 1) {
            return None;
        }
        if byte == 0 {
            break;
        }
        bytes.push(byte);
        at = at.wrapping_add(1);
    }
    let text = String::from_utf8(bytes).ok()?;
    (!text.is_empty() && text.len() < NAME && !text.chars().any(char::is_control)).then_some(text)
}

/// Has the kernel copy bytes of this very process.
fn read(from: *const c_void, to: *mut c_void, size: usize) -> bool {
    let local = libc::iovec { iov_base: to, iov_len: size };
    let remote = libc::iovec { iov_base: from.cast_mut(), iov_len: size };
    // SAFETY: `to` has `size` bytes; a wrong `from` is an error and no fault.
    let done = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
    usize::try_from(done).is_ok_and(|n| n == size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_no_fault() {
        assert!(copy::<u64>(std::ptr::null()).is_none());
        assert!(copy::<u64>(std::ptr::dangling::<u64>().cast()).is_none());
        let value = 7u64;
        assert_eq!(copy::<u64>((&raw const value).cast()), Some(7));
        assert_eq!(name(c"gpu".as_ptr().cast_mut()).as_deref(), Some("gpu"));
        assert_eq!(name(c"a\x01b".as_ptr().cast_mut()), None);
        assert_eq!(name(std::ptr::null_mut()), None);
    }
}
