//! Which file may be trusted: owner, mode, kind and file system are checked on the open file, never on its path.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// `O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC` of Linux: no link is followed, and opening a FIFO does not wait.
const FLAGS: i32 = 0o400_000 | 0o4_000 | 0o2_000_000;
/// `S_IWGRP | S_IWOTH`.
const OTHERS_WRITE: u32 = 0o022;

/// What a file must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trusted {
    /// Where.
    pub path: PathBuf,
    /// The one user who may write it, besides root.
    pub owner: u32,
}

/// Why a board is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// Not there, or not to be opened.
    #[error("{path}: {source}")]
    Open {
        /// Which.
        path: PathBuf,
        /// The system's words.
        source: std::io::Error,
    },
    /// Somebody else's.
    #[error("{path}: {what}")]
    Foreign {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
}

impl Trusted {
    /// Opens for reading.
    ///
    /// # Errors
    /// [`FileError`], one line that names the file and what is wrong with it.
    pub fn open(&self) -> Result<File, FileError> {
        let open = |source| FileError::Open { path: self.path.clone(), source };
        let file = OpenOptions::new().read(true).custom_flags(FLAGS).open(&self.path).map_err(open)?;
        let meta = file.metadata().map_err(open)?;
        let foreign = |what: String| FileError::Foreign { path: self.path.clone(), what };
        if !meta.is_file() {
            return Err(foreign("is no regular file".into()));
        }
        if meta.uid() != self.owner && meta.uid() != 0 {
            return Err(foreign(format!("belongs to uid {}, expected {}", meta.uid(), self.owner)));
        }
        if meta.mode() & OTHERS_WRITE != 0 {
            return Err(foreign(format!("mode {:o} lets others write", meta.mode() & 0o7777)));
        }
        if !on_memory(&self.path) {
            return Err(foreign("does not lie on a tmpfs: a disk could make slurmctld wait".into()));
        }
        Ok(file)
    }
}

/// Whether the nearest mount above a path is a tmpfs, as /proc/self/mounts says.
pub fn on_memory(path: &Path) -> bool {
    let Ok(mounts) = std::fs::read_to_string("/proc/self/mounts") else { return false };
    let real = path.parent().and_then(|p| p.canonicalize().ok()).unwrap_or_else(|| path.to_owned());
    // The last of equally long ones lies on top.
    let mut best: Option<(usize, bool)> = None;
    for line in mounts.lines() {
        let mut words = line.split(' ');
        let (Some(_), Some(at), Some(kind)) = (words.next(), words.next(), words.next()) else { continue };
        let at = at.replace("\\040", " ");
        if real.starts_with(&at) && best.is_none_or(|(length, _)| at.len() >= length) {
            best = Some((at.len(), kind == "tmpfs" || kind == "ramfs"));
        }
    }
    best.is_some_and(|(_, memory)| memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn links_foreign_owners_and_open_modes_are_refused() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("board");
        std::fs::write(&path, "x").unwrap();
        let owner = std::fs::metadata(&path).unwrap().uid();
        let trusted = Trusted { path: path.clone(), owner };
        assert!(trusted.open().is_ok());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        assert!(trusted.open().unwrap_err().to_string().ends_with("mode 666 lets others write"));
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(Trusted { path: link, owner }.open().is_err());
        let folder = Trusted { path: dir.path().to_owned(), owner };
        assert!(folder.open().unwrap_err().to_string().ends_with("is no regular file"));
        let missing = Trusted { path: dir.path().join("no"), owner };
        assert!(matches!(missing.open(), Err(FileError::Open { .. })));
    }

    #[test]
    fn a_disk_is_no_memory() {
        assert!(on_memory(Path::new("/dev/shm/x")));
        assert!(!on_memory(Path::new("/proc/x")));
    }
}
