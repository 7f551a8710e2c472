// SPDX-License-Identifier: GPL-2.0-or-later
//! The plugin that ours stands in front of: the next file of the same name in slurm.conf's `PluginDir`.

use super::str_of;
use slurm_sys::select as sys;
use std::ffi::{CStr, CString, c_void};
use std::path::{Path, PathBuf};

/// The file's name in every release.
const FILE: &str = "select_cons_tres.so";

/// The stock plugin, loaded for the life of the process.
#[derive(Debug)]
pub struct Stock {
    handle: *mut c_void,
    /// Where it was found.
    pub path: PathBuf,
}

// SAFETY: the handle of a library that is never closed; dlsym may be called from any thread.
unsafe impl Send for Stock {}
// SAFETY: as above.
unsafe impl Sync for Stock {}

impl Stock {
    /// Finds and loads it.
    ///
    /// # Errors
    /// What was looked for, where, and what to do.
    pub fn load() -> Result<Stock, String> {
        let own = own_path().and_then(|p| p.canonicalize().ok());
        // SAFETY: slurm.conf has been read before any plugin is loaded.
        let dirs = unsafe { str_of(sys::slurm_conf.plugindir) };
        let other = |p: &PathBuf| p.canonicalize().is_ok_and(|real| Some(&real) != own.as_ref());
        let path = dirs.split(':').map(|d| Path::new(d).join(FILE)).find(other);
        let path = path.ok_or_else(|| {
            format!(
                "PluginDir={dirs} holds no {FILE} besides Pliant's own: put Slurm's plugin directory behind Pliant's, \
                 separated by a colon"
            )
        })?;
        let name = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| "a path with a NUL".to_owned())?;
        // SAFETY: a path; the library's own constructors are those of a Slurm plugin.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(format!("{}: {}", path.display(), last_error()));
        }
        Ok(Stock { handle, path })
    }

    /// The address of one of its functions or numbers; null: it has none of that name.
    pub fn symbol(&self, name: &str) -> *mut c_void {
        let Ok(name) = CString::new(name) else { return std::ptr::null_mut() };
        // SAFETY: a library that is loaded.
        unsafe { libc::dlsym(self.handle, name.as_ptr()) }
    }

    /// Its `plugin_version`.
    pub fn version(&self) -> Option<u32> {
        let symbol = self.symbol("plugin_version");
        // SAFETY: every Slurm plugin has a 32-bit number of that name.
        (!symbol.is_null()).then(|| unsafe { *symbol.cast::<u32>() })
    }
}

/// A function of slurmctld itself; null: this release has none of that name.
pub fn of_process(name: &CStr) -> *mut c_void {
    // SAFETY: looks into what is loaded already.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
}

/// The file that this code lies in.
fn own_path() -> Option<PathBuf> {
    // SAFETY: zeros are a valid Dl_info, filled by the call.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let here: fn() -> Option<PathBuf> = own_path;
    // SAFETY: an address in this library.
    if unsafe { libc::dladdr(here as *const c_void, &mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: a C string that lives as long as the library.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(std::ffi::OsStr::new(name.to_str().ok()?)))
}

fn last_error() -> String {
    // SAFETY: null or a C string that lives until the next dl call of this thread.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() { "cannot be loaded".to_owned() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    }
}
