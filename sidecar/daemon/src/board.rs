//! Writes the plan board.

use pliant_protocol::board::{self, Board};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// How long a board counts without a sign of life, milliseconds: longer than a restart of pliantd takes, and short enough
/// that a dead one steers nobody for long.
const LIVES_MS: u64 = 30_000;
/// Between two signs of life, milliseconds.
const RENEW_MS: u64 = 5_000;

/// The board and its file.
#[derive(Debug)]
pub struct BoardFile {
    path: PathBuf,
    file: Option<File>,
    generation: u64,
    body: Vec<u8>,
    written_ms: u64,
    /// The last complaint, so that it is logged once.
    complaint: String,
}

impl BoardFile {
    /// Nothing is written yet. `generation` is above all that were written before: the time will do.
    pub fn new(path: PathBuf, generation: u64) -> BoardFile {
        BoardFile { path, file: None, generation, body: vec![], written_ms: 0, complaint: String::new() }
    }

    /// Publishes plans.
    pub fn publish(&mut self, board: &Board, now_ms: u64) {
        self.body = board.encode();
        self.generation += 1;
        self.write(now_ms);
    }

    /// Shows that pliantd lives.
    pub fn renew(&mut self, now_ms: u64) {
        if now_ms.abs_diff(self.written_ms) >= RENEW_MS && !self.body.is_empty() {
            self.write(now_ms);
        }
    }

    fn write(&mut self, now_ms: u64) {
        self.written_ms = now_ms;
        // Deleted or replaced under us: made anew.
        if self.file.as_ref().is_none_or(|f| !is_at(f, &self.path)) {
            self.file = None;
        }
        let result = match &self.file {
            Some(file) => self.write_to(file, now_ms),
            None => create(&self.path).and_then(|file| {
                let done = self.write_to(&file, now_ms);
                self.file = Some(file);
                done
            }),
        };
        match result {
            Ok(()) => self.complaint.clear(),
            Err(e) => {
                let text = format!("{}: {e}", self.path.display());
                if text != self.complaint {
                    tracing::warn!("no plans for the select plugin, Slurm chooses by itself: {text}");
                }
                self.complaint = text;
            }
        }
    }

    fn write_to(&self, file: &File, now_ms: u64) -> std::io::Result<()> {
        board::write(file, self.generation, now_ms, now_ms + LIVES_MS, &self.body)
    }
}

fn create(path: &Path) -> std::io::Result<File> {
    // The file of the last run is kept, so that slurmctld need not look for another one.
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o644)
        .custom_flags(i32::try_from(rustix::fs::OFlags::NOFOLLOW.bits()).unwrap_or(0))
        .open(path)?;
    file.set_permissions(std::fs::Permissions::from_mode(0o644))?;
    Ok(file)
}

fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let id = |m: std::io::Result<std::fs::Metadata>| m.ok().map(|m| (m.dev(), m.ino()));
    id(file.metadata()) == id(path.symlink_metadata())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pliant_protocol::board::{BoardReader, Key, Plan, Trusted};
    use std::os::unix::fs::MetadataExt as _;

    #[test]
    fn the_reader_follows_a_board_that_is_published_renewed_and_made_anew() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("plan.board");
        let mut file = BoardFile::new(path.clone(), 1);
        let plan = |job| Plan { key: Key::Job(job), hard: false, until_ms: u64::MAX, places: vec![vec![(0, 1)]] };
        let board = |job| Board { nodes: vec!["n0".into()], plans: vec![plan(job)] };
        file.publish(&board(7), 1_000);
        let owner = dir.path().metadata().unwrap().uid();
        let mut reader = BoardReader::new(Trusted { path: path.clone(), owner });
        assert!(reader.refresh(2_000) && reader.job(7).is_some());
        file.publish(&board(8), 3_000);
        assert!(reader.refresh(3_001) && reader.job(7).is_none() && reader.job(8).is_some());
        assert!(!reader.refresh(40_000));
        file.renew(41_000);
        assert!(reader.refresh(41_001) && reader.job(8).is_some());
        std::fs::remove_file(&path).unwrap();
        file.renew(50_000);
        assert!(reader.refresh(75_000) && reader.job(8).is_some(), "found again after the old one has expired");
    }
}
