//! Follows the event ring of the select plugin, in a thread of its own: woken by inotify, and looks once a second all the
//! same.

use crate::Input;
use pliant_protocol::board::{Read, Record, RingReader, Trusted};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;
use tokio::sync::mpsc;

/// Between two attempts to open a ring, and between two looks without a sign.
const EVERY: Duration = Duration::from_secs(1);
/// Events handed over at once.
const BATCH: usize = 512;
/// Between two looks while events come: in a burst of starts each look costs new plans, beside a slurmctld that is busy.
const LOOK: Duration = Duration::from_millis(5);
/// After so many looks without an event it waits for the bell.
const QUIET: u32 = 10;

/// Runs for ever.
pub fn run(path: &Path, inputs: &mpsc::Sender<Input>) {
    let mut complaint = String::new();
    loop {
        match open(path) {
            Ok((reader, bell)) => {
                complaint.clear();
                if inputs.blocking_send(Input::Ring(true)).is_err() {
                    return;
                }
                let beginning = reader.beginning().into_iter().collect();
                if inputs.blocking_send(Input::Events(beginning)).is_err() {
                    return;
                }
                follow(reader, &bell, path, inputs);
                if inputs.blocking_send(Input::Ring(false)).is_err() {
                    return;
                }
            }
            Err(why) if why != complaint => {
                tracing::debug!("no event ring: {why}");
                complaint = why;
            }
            Err(_) => {}
        }
        if inputs.is_closed() {
            return;
        }
        std::thread::sleep(EVERY);
    }
}

/// A ring belongs to whom its folder belongs to, SlurmUser; nobody else may write there.
fn open(path: &Path) -> Result<(RingReader, OwnedFd), String> {
    let say = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
    let folder = path.parent().ok_or_else(|| say(&"no folder"))?;
    let meta = folder.metadata().map_err(|e| format!("{}: {e}", folder.display()))?;
    if meta.mode() & 0o022 != 0 {
        return Err(format!("{}: mode {:o} lets others write", folder.display(), meta.mode() & 0o7777));
    }
    let file = Trusted { path: path.to_owned(), owner: meta.uid() }.open().map_err(|e| e.to_string())?;
    let bell = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC).map_err(|e| say(&e))?;
    // Watched before the last record is looked for: nothing falls between.
    watch(&bell, path).map_err(|e| say(&e))?;
    let reader = RingReader::open(file).map_err(|e| say(&e))?;
    Ok((reader, bell))
}

/// Rings once, at the next write: a watch that stays would cost slurmctld a wake-up at each of its writes.
fn watch(bell: &OwnedFd, path: &Path) -> rustix::io::Result<()> {
    let signs = inotify::WatchFlags::MODIFY | inotify::WatchFlags::ATTRIB | inotify::WatchFlags::ONESHOT;
    inotify::add_watch(bell, path, signs).map(drop)
}

/// Hands events on until the ring is another one. While events come it looks at short intervals, else it waits for the bell.
fn follow(mut reader: RingReader, bell: &OwnedFd, path: &Path, inputs: &mpsc::Sender<Input>) {
    let inode = path.metadata().map(|m| m.ino()).ok();
    let mut quiet = QUIET;
    loop {
        let mut batch: Vec<Record> = vec![];
        while batch.len() < BATCH {
            match reader.read() {
                Read::Record(record) => batch.push(record),
                Read::Gap(lost) => {
                    if inputs.blocking_send(Input::Gap(lost)).is_err() {
                        return;
                    }
                }
                Read::Nothing => break,
                Read::Anew => return,
            }
        }
        quiet = if batch.is_empty() { quiet.saturating_add(1) } else { 0 };
        if !batch.is_empty() && inputs.blocking_send(Input::Events(batch)).is_err() {
            return;
        }
        if quiet < QUIET {
            std::thread::sleep(LOOK);
            continue;
        }
        if quiet == QUIET {
            // Looked at once more with the bell in place.
            if watch(bell, path).is_err() {
                return;
            }
            continue;
        }
        let limit = Timespec { tv_sec: 1, tv_nsec: 0 };
        if poll(&mut [PollFd::new(bell, PollFlags::IN)], Some(&limit)).is_ok_and(|n| n > 0) {
            let mut signs = [0u8; 4096];
            while rustix::io::read(bell, &mut signs).is_ok_and(|n| n > 0) {}
            quiet = 0;
        }
        if path.metadata().map(|m| m.ino()).ok() != inode {
            return;
        }
    }
}
