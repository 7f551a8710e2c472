// SPDX-License-Identifier: GPL-2.0-or-later
//! Slurm's bitmaps. Null stands for an empty one.

use slurm_sys::select as sys;

/// Bits in a map.
///
/// # Safety
/// Null or a bitmap of Slurm's, as everywhere in this module.
pub(super) unsafe fn size(map: *mut sys::bitstr_t) -> usize {
    if map.is_null() {
        return 0;
    }
    // SAFETY: the caller's promise.
    usize::try_from(unsafe { sys::slurm_bit_size(map) }).unwrap_or(0)
}

/// Whether a bit is there and set.
///
/// # Safety
/// As [`size`].
pub(super) unsafe fn test(map: *mut sys::bitstr_t, bit: usize) -> bool {
    // SAFETY: the caller's promise; the bit is inside.
    unsafe { bit < size(map) && sys::slurm_bit_test(map, number(bit)) != 0 }
}

/// Sets a bit that is there.
///
/// # Safety
/// As [`size`].
pub(super) unsafe fn set(map: *mut sys::bitstr_t, bit: usize) {
    // SAFETY: as above.
    unsafe {
        if bit < size(map) {
            sys::slurm_bit_set(map, number(bit));
        }
    }
}

/// Clears a bit that is there.
///
/// # Safety
/// As [`size`].
pub(super) unsafe fn clear(map: *mut sys::bitstr_t, bit: usize) {
    // SAFETY: as above.
    unsafe {
        if bit < size(map) {
            sys::slurm_bit_clear(map, number(bit));
        }
    }
}

/// The first 64 bits.
///
/// # Safety
/// As [`size`].
pub(super) unsafe fn word(map: *mut sys::bitstr_t) -> u64 {
    // SAFETY: as above; all bits are inside.
    unsafe {
        let bits = (0..size(map).min(64)).filter(|bit| sys::slurm_bit_test(map, number(*bit)) != 0);
        bits.fold(0, |word, bit| word | 1 << bit)
    }
}

/// The set bits, ascending.
///
/// # Safety
/// As [`size`].
pub(super) unsafe fn ones(map: *mut sys::bitstr_t) -> Vec<usize> {
    // SAFETY: as above.
    unsafe {
        if map.is_null() {
            return vec![];
        }
        let (first, last) = (sys::slurm_bit_ffs(map), sys::slurm_bit_fls(map));
        let (Ok(first), Ok(last)) = (usize::try_from(first), usize::try_from(last)) else { return vec![] };
        (first..=last).filter(|bit| test(map, *bit)).collect()
    }
}

fn number(bit: usize) -> sys::bitoff_t {
    sys::bitoff_t::try_from(bit).unwrap_or(0)
}
