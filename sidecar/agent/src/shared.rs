//! The core with its inputs and outputs, for the tasks of the one thread.

use crate::cancels::Now;
use crate::core::{ConnId, Core, Effect};
use crate::limit::Lines;
use crate::outbox::Outbox;
use crate::proof::Processes;
use crate::slurm::Slurm;
use pliant_model::NodeName;
use pliant_protocol::local::FromAgent;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{Notify, mpsc};

/// A connection as the rest sees it.
#[derive(Debug)]
pub struct Outgoing {
    /// Frames to be written; dropping it closes the connection when they are.
    pub queue: mpsc::Sender<FromAgent>,
    /// Ends the reading side.
    pub stop: Rc<Notify>,
    /// Of the peer.
    pub uid: u32,
}

/// See the module.
#[derive(Debug)]
pub struct Shared {
    /// The state.
    core: RefCell<Core>,
    /// Connections on the Unix socket.
    pub conns: RefCell<HashMap<ConnId, Outgoing>>,
    /// For pliantd.
    pub outbox: Outbox,
    /// Slurm's commands.
    pub slurm: Slurm,
    /// /proc.
    pub processes: Processes,
    lines: RefCell<Lines>,
    start: Instant,
    next: Cell<u64>,
}

impl Shared {
    /// Of the agent of `node`.
    pub fn new(node: NodeName, slurm: Slurm) -> Rc<Shared> {
        Rc::new(Shared {
            processes: Processes::new("/proc", node.as_str()),
            core: RefCell::new(Core::new(node, Now::ZERO)),
            conns: RefCell::default(),
            outbox: Outbox::default(),
            slurm,
            lines: RefCell::default(),
            start: Instant::now(),
            next: Cell::new(0),
        })
    }

    /// Time since the start; never jumps, and stands still while the machine sleeps.
    pub fn now(&self) -> Now {
        self.start.elapsed()
    }

    /// Whether a line about a process of `uid` may be logged.
    pub fn may_log(&self, uid: u32) -> bool {
        self.lines.borrow_mut().pass(uid, self.now())
    }

    /// A number for a new connection.
    pub fn next_conn(&self) -> ConnId {
        self.next.set(self.next.get().wrapping_add(1));
        ConnId(self.next.get())
    }

    /// Lets something happen to the core, and does what follows from it.
    pub fn with(self: &Rc<Self>, f: impl FnOnce(&mut Core, Now) -> Vec<Effect>) {
        let effects = f(&mut self.core.borrow_mut(), self.now());
        for effect in effects {
            self.apply(effect);
        }
    }

    fn apply(self: &Rc<Self>, effect: Effect) {
        match effect {
            Effect::Send(conn, message) => {
                let mut conns = self.conns.borrow_mut();
                let full = conns.get(&conn).is_some_and(|o| o.queue.try_send(message).is_err());
                if full && let Some(outgoing) = conns.remove(&conn) {
                    if self.may_log(outgoing.uid) {
                        tracing::warn!(conn = conn.0, uid = outgoing.uid, "a peer that does not read is disconnected");
                    }
                    outgoing.stop.notify_one();
                }
            }
            Effect::Close(conn) => {
                if let Some(outgoing) = self.conns.borrow_mut().remove(&conn) {
                    outgoing.stop.notify_one();
                }
            }
            Effect::Daemon(message) => self.outbox.push(message),
            Effect::Look(_) | Effect::Cancel(_) | Effect::Find(_) | Effect::Sweep => {
                tokio::task::spawn_local(Rc::clone(self).command(effect));
            }
        }
    }

    async fn command(self: Rc<Self>, effect: Effect) {
        match effect {
            Effect::Look(slice) => {
                let look = self.slurm.look(slice).await;
                self.with(|core, now| core.looked(slice, look, now));
            }
            Effect::Cancel(slice) => {
                let result = self.slurm.cancel(slice).await;
                self.with(|core, now| core.cancelled(slice, result, now));
            }
            Effect::Find(base) => {
                let jobs = self.slurm.find(base).await;
                self.with(|core, now| core.found(jobs, now));
            }
            Effect::Sweep => {
                let jobs = self.slurm.sweep().await;
                self.with(|core, now| {
                    core.swept(jobs, now);
                    vec![]
                });
            }
            Effect::Send(..) | Effect::Close(_) | Effect::Daemon(_) => {}
        }
    }
}

/// Milliseconds since the Unix epoch by this host's clock.
pub fn clock_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
