//! The Unix socket: admission, the proof of each peer, frames in and out.

use crate::core::ConnId;
use crate::limit::Bucket;
use crate::proof::{Evidence, Peer, ProofError};
use crate::shared::{Outgoing, Shared};
use anyhow::{Context as _, bail};
use pliant_protocol::codec::{self, MAX_FRAME};
use pliant_protocol::local::{FromAgent, FromClient, Role, ToAgent};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::DirBuilder;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;

/// For the first frame.
const FIRST: Duration = Duration::from_secs(5);
/// For writing one frame to a peer that does not read.
const WRITE: Duration = Duration::from_secs(10);
/// The largest frame of all but a launcher, and of anybody before he is known.
const SMALL_FRAME: usize = 64 << 10;
/// Frames that may wait for a rank that does not read: more than are kept for one that is not there.
const RANK_QUEUE: usize = 64;
/// The same for a supervisor, which hears all its ranks at once, and for a launcher.
const QUEUE: usize = 1024;
/// Connections of one uid.
const PER_UID: usize = 512;
/// Connections in all; less where the limit of open files is lower.
const IN_ALL: u64 = 8192;
/// Frames that are no valid messages, before a connection is closed.
const BAD_FRAMES: u64 = 100;
/// One uid may make the agent ask slurmd about a process this often.
const PIDINFO_EVERY: Duration = Duration::from_secs(2);

/// The bound socket; removed when dropped.
#[derive(Debug)]
pub struct Socket {
    path: PathBuf,
    inode: (u64, u64),
    _lock: OwnedFd,
}

impl Socket {
    /// Makes the directory (0755), takes the lock beside the socket, and listens.
    ///
    /// # Errors
    /// Another agent serves the same socket, or the system refuses.
    pub fn bind(path: &Path) -> anyhow::Result<(Socket, UnixListener)> {
        let dir = path.parent().filter(|d| !d.as_os_str().is_empty()).context("[agent] socket must be a full path")?;
        let made = DirBuilder::new().recursive(true).mode(0o755).create(dir);
        made.with_context(|| format!("{}", dir.display()))?;
        let mut lock_path = path.as_os_str().to_owned();
        lock_path.push(".lock");
        let lock_path = PathBuf::from(lock_path);
        // Nobody else may open it, since whoever can may lock it; and no link is followed, since the directory may be
        // that of pliantd's account.
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let lock = rustix::fs::open(&lock_path, flags, Mode::RUSR | Mode::WUSR);
        let lock = lock.with_context(|| format!("{}", lock_path.display()))?;
        if rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
            bail!("another pliant-agent serves {} (it holds {})", path.display(), lock_path.display());
        }
        // Under the lock, what is there is a dead agent's. The socket gets its name when it can be used.
        let mut fresh_path = path.as_os_str().to_owned();
        fresh_path.push(".new");
        let fresh_path = PathBuf::from(fresh_path);
        match std::fs::remove_file(&fresh_path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                bail!("{}: {e}", fresh_path.display())
            }
            _ => {}
        }
        // 0666 from its first moment; chmod would follow a link. No other thread makes files at this time.
        let umask = rustix::process::umask(Mode::XUSR | Mode::XGRP | Mode::XOTH);
        let listener = UnixListener::bind(&fresh_path);
        rustix::process::umask(umask);
        let listener = listener.with_context(|| format!("{}", fresh_path.display()))?;
        std::fs::rename(&fresh_path, path).with_context(|| format!("{}", path.display()))?;
        let meta = std::fs::symlink_metadata(path)?;
        Ok((Socket { path: path.to_owned(), inode: (meta.dev(), meta.ino()), _lock: lock }, listener))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let same = std::fs::symlink_metadata(&self.path).is_ok_and(|m| (m.dev(), m.ino()) == self.inode);
        if same {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Who is connected, by uid.
#[derive(Debug, Default)]
struct Admission {
    by_uid: RefCell<HashMap<u32, usize>>,
    /// When a uid last made the agent ask slurmd.
    asked: RefCell<HashMap<u32, Duration>>,
}

struct Ticket {
    admission: Rc<Admission>,
    uid: u32,
}

impl Admission {
    fn enter(self: &Rc<Self>, uid: u32, max: usize) -> Option<Ticket> {
        let mut by_uid = self.by_uid.borrow_mut();
        let all: usize = by_uid.values().sum();
        let own = by_uid.entry(uid).or_default();
        if all >= max || *own >= PER_UID {
            return None;
        }
        *own += 1;
        Some(Ticket { admission: Rc::clone(self), uid })
    }

    fn may_ask(&self, uid: u32, now: Duration) -> bool {
        let mut asked = self.asked.borrow_mut();
        asked.retain(|_, at| now.saturating_sub(*at) < PIDINFO_EVERY);
        match asked.entry(uid) {
            std::collections::hash_map::Entry::Occupied(_) => false,
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(now);
                true
            }
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut by_uid = self.admission.by_uid.borrow_mut();
        if let Some(own) = by_uid.get_mut(&self.uid) {
            *own = own.saturating_sub(1);
            if *own == 0 {
                by_uid.remove(&self.uid);
            }
        }
    }
}

/// Accepts for ever.
pub async fn serve(shared: Rc<Shared>, listener: UnixListener) {
    let max = open_files();
    let admission = Rc::new(Admission::default());
    let mut refused = Bucket::new(1.0 / 60.0, 1.0, shared.now());
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(e) => {
                tracing::warn!("accept: {e}");
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        let Ok(cred) = stream.peer_cred() else {
            continue;
        };
        let Some(ticket) = admission.enter(cred.uid(), max) else {
            if refused.pass(shared.now()) {
                tracing::warn!(uid = cred.uid(), "too many connections ({} refused so far)", refused.refused);
            }
            continue;
        };
        let pid = cred.pid().and_then(|p| u32::try_from(p).ok()).unwrap_or(0);
        let (shared, uid) = (Rc::clone(&shared), cred.uid());
        tokio::task::spawn_local(async move {
            if let Err(e) = peer(shared, &ticket, stream, pid, uid).await {
                tracing::debug!(uid, pid, "connection ended: {e:#}");
            }
        });
    }
}

/// Raises the limit of open files to what is allowed, and gives the connections that fit.
fn open_files() -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.unwrap_or(IN_ALL + 64).min(IN_ALL + 64);
    let current = match setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum }) {
        Ok(()) => wanted,
        Err(_) => limit.current.unwrap_or(wanted),
    };
    usize::try_from(current.saturating_sub(64).clamp(16, IN_ALL)).unwrap_or(16)
}

/// One connection from its first byte to its last.
async fn peer(shared: Rc<Shared>, ticket: &Ticket, stream: UnixStream, pid: u32, uid: u32) -> anyhow::Result<()> {
    let (mut from, mut to) = stream.into_split();
    let first = timeout(FIRST, read_frame(&mut from, SMALL_FRAME)).await.context("no Hello in time")??;
    let Some(first) = first else { return Ok(()) };
    let (version, role) = match codec::decode::<ToAgent>(&first) {
        Ok(ToAgent::Hello { version, role, .. }) => (version, role),
        Ok(_) => return refuse(&mut to, "the first message must be a Hello".into()).await,
        Err(e) => return refuse(&mut to, e.to_string()).await,
    };
    let proven = match prove(&shared, ticket, pid, uid).await {
        Ok(proven) => proven,
        Err(e) => {
            if shared.may_log(uid) {
                tracing::info!(uid, pid, "refused: {e}");
            }
            return refuse(&mut to, e.to_string()).await;
        }
    };
    let (max, length) = limits(&role);
    let conn = shared.next_conn();
    let (queue, waiting) = mpsc::channel(length);
    let stop = Rc::new(Notify::new());
    shared.conns.borrow_mut().insert(conn, Outgoing { queue, stop: Rc::clone(&stop), uid });
    let writer = tokio::task::spawn_local(write(to, waiting, Rc::clone(&stop)));
    let processes = shared.processes.clone();
    shared.with(|core, now| core.hello(conn, proven, (version, role), &|pid| processes.alive(pid), now));
    let result = tokio::select! {
        () = stop.notified() => Ok(()),
        result = read(&shared, (conn, uid), &mut from, max) => result,
    };
    shared.with(|core, now| core.closed(conn, now));
    shared.conns.borrow_mut().remove(&conn);
    // What was sent, a refusal above all, is still written; `write` has its own time limit.
    let _ = writer.await;
    result
}

/// The largest frame that is read from a peer, and how many may wait to be written to it. Whoever is in a job may
/// take any role, so that these times [`PER_UID`] are what one user can make a process of root hold.
fn limits(role: &Role) -> (usize, usize) {
    match role {
        Role::Client { .. } => (SMALL_FRAME, RANK_QUEUE),
        Role::Supervisor => (SMALL_FRAME, QUEUE),
        // Only one of each job is let in.
        Role::Launcher { .. } => (MAX_FRAME, QUEUE),
    }
}

async fn refuse(to: &mut OwnedWriteHalf, reason: String) -> anyhow::Result<()> {
    let frame = codec::encode(&FromAgent::Refused { reason })?;
    timeout(WRITE, to.write_all(&frame)).await??;
    Ok(())
}

async fn write(mut to: OwnedWriteHalf, mut queue: mpsc::Receiver<FromAgent>, stop: Rc<Notify>) {
    while let Some(message) = queue.recv().await {
        let Ok(frame) = codec::encode(&message) else {
            continue;
        };
        if !matches!(timeout(WRITE, to.write_all(&frame)).await, Ok(Ok(()))) {
            break;
        }
    }
    stop.notify_one();
}

async fn read(
    shared: &Rc<Shared>,
    (conn, uid): (ConnId, u32),
    from: &mut OwnedReadHalf,
    max: usize,
) -> anyhow::Result<()> {
    let mut reports = Bucket::new(20.0, 40.0, shared.now());
    let mut all = Bucket::new(500.0, 1000.0, shared.now());
    let mut bad = 0u64;
    let result = loop {
        let frame = match read_frame(from, max).await {
            Ok(Some(frame)) => frame,
            Ok(None) => break Ok(()),
            Err(e) => break Err(e.into()),
        };
        // Too much of anything is slowed down; too many reports are left out, the newest number is soon there again.
        for _ in 0..cost(frame.len()) {
            while !all.pass(shared.now()) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        match codec::decode::<ToAgent>(&frame) {
            Ok(ToAgent::Client(FromClient::Report(_))) if !reports.pass(shared.now()) => {}
            Ok(message) => shared.with(|core, now| core.message(conn, message, now)),
            Err(e) => {
                bad += 1;
                if bad == 1 && shared.may_log(uid) {
                    tracing::info!(conn = conn.0, uid, "a frame was left out: {e}");
                }
                if bad > BAD_FRAMES {
                    break Err(e.into());
                }
            }
        }
    };
    if (reports.refused > 0 || bad > 1) && shared.may_log(uid) {
        tracing::info!(
            conn = conn.0,
            uid,
            "left out: {} reports above the rate, {bad} invalid frames",
            reports.refused
        );
    }
    result
}

/// What a frame counts for: one for each 16 KiB that it begins.
fn cost(length: usize) -> usize {
    length.div_ceil(16 << 10)
}

/// The payload of one frame; `None` at a clean end. Memory is taken as bytes come, not as they are announced.
async fn read_frame(from: &mut OwnedReadHalf, max: usize) -> Result<Option<Vec<u8>>, codec::CodecError> {
    let mut head = [0u8; 4];
    if from.read(head.get_mut(..1).unwrap_or_default()).await? == 0 {
        return Ok(None);
    }
    from.read_exact(head.get_mut(1..).unwrap_or_default()).await?;
    let length = u64::from(u32::from_be_bytes(head));
    if length == 0 || length > u64::try_from(max).unwrap_or(u64::MAX) {
        return Err(codec::CodecError::Length { length, max });
    }
    let mut payload = vec![];
    from.take(length).read_to_end(&mut payload).await?;
    if u64::try_from(payload.len()).unwrap_or(0) < length {
        return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
    }
    Ok(Some(payload))
}

/// The job of a peer. A pidfd, and the start time where there is none, show that the pid has not been used again.
async fn prove(shared: &Shared, ticket: &Ticket, pid: u32, uid: u32) -> Result<Peer, ProofError> {
    let ended = || ProofError::Ended(pid);
    let raw = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(ended)?;
    let pidfd = pidfd_open(raw, PidfdFlags::empty());
    if matches!(pidfd, Err(rustix::io::Errno::SRCH)) {
        return Err(ended());
    }
    let started = shared.processes.started(pid).ok_or_else(ended)?;
    let mut found = shared.processes.job_of(pid, uid)?;
    if found.is_none() {
        if !ticket.admission.may_ask(uid, shared.now()) {
            return Err(ProofError::Later(pid));
        }
        found = shared.slurm.job_of(pid).await.map(|job| (job, Evidence::Slurmd));
    }
    if shared.processes.started(pid) != Some(started) || pidfd.is_ok_and(|fd| has_ended(&fd)) {
        return Err(ended());
    }
    let (job, evidence) = found.ok_or(ProofError::NoJob(pid))?;
    tracing::debug!(uid, pid, %job, "proven by {evidence:?}");
    Ok(Peer { pid, uid, job })
}

fn has_ended(pidfd: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|n| n > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_counted_by_uid_and_in_all() {
        let admission = Rc::new(Admission::default());
        let mut held: Vec<Ticket> = (0..PER_UID).map(|_| admission.enter(1000, 600).unwrap()).collect();
        assert!(admission.enter(1000, 600).is_none(), "of one uid");
        held.extend((0..600 - PER_UID).map(|_| admission.enter(1001, 600).unwrap()));
        assert!(admission.enter(1002, 600).is_none(), "in all");
        held.pop();
        assert!(admission.enter(1002, 600).is_some());
        drop(held);
        assert!(admission.by_uid.borrow().is_empty());
    }

    #[test]
    fn only_a_launcher_may_send_large_frames() {
        assert_eq!(limits(&Role::Launcher { instance: "ab".into() }).0, MAX_FRAME);
        assert_eq!(limits(&Role::Supervisor).0, 64 << 10);
        assert_eq!(limits(&Role::Client { rank: 0, generation: 1 }), (64 << 10, 64));
        assert_eq!((cost(1), cost(16 << 10), cost(MAX_FRAME)), (1, 1, 64));
    }

    #[test]
    fn slurmd_is_asked_only_so_often() {
        let admission = Admission::default();
        let at = Duration::from_secs;
        assert!(admission.may_ask(1, at(0)) && !admission.may_ask(1, at(1)) && admission.may_ask(2, at(1)));
        assert!(admission.may_ask(1, at(2)) && !admission.may_ask(1, at(3)));
    }

    #[test]
    fn two_agents_for_one_socket_refuse() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("n0").join("agent.sock");
            let (socket, _listener) = Socket::bind(&path).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o666);
            let e = Socket::bind(&path).unwrap_err().to_string();
            assert!(e.contains("another pliant-agent serves"), "{e}");
            drop(socket);
            assert!(!path.exists());
            std::fs::write(&path, "left by a dead agent").unwrap();
            Socket::bind(&path).unwrap();
        });
    }
}
