//! The core with its inputs and outputs, for the tasks of the one thread.

use crate::cancels::Now;
use crate::core::{ConnId, Core, Effect};
use crate::proof::Processes;
use crate::slurm::Slurm;
use pliant_model::{JobId, NodeName};
use pliant_protocol::local::FromAgent;
use pliant_protocol::peer;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;
use std::time::Instant;
use tokio::sync::{Notify, mpsc};

/// Frames that may wait for a peer that does not read; then it is disconnected.
pub const QUEUE: usize = 1024;
/// Messages that may wait for pliantd, states of jobs not counted (there is one of each at most).
const OUTBOX: usize = 4096;

/// A connection as the rest sees it.
#[derive(Debug)]
pub struct Outgoing {
    /// Frames to be written; dropping it closes the connection when they are.
    pub queue: mpsc::Sender<FromAgent>,
    /// Ends the reading side.
    pub stop: Rc<Notify>,
}

/// What waits to be sent to pliantd. Of the states of a job only the last is kept.
#[derive(Debug, Default)]
pub struct Outbox {
    events: RefCell<VecDeque<peer::FromAgent>>,
    states: RefCell<BTreeMap<JobId, peer::FromAgent>>,
    /// Something is there.
    pub filled: Notify,
}

impl Outbox {
    /// Adds a message.
    pub fn push(&self, message: peer::FromAgent) {
        if let peer::FromAgent::Status { status, .. } = &message {
            self.states.borrow_mut().insert(status.base, message);
        } else {
            if let peer::FromAgent::Gone { base, .. } = &message {
                self.states.borrow_mut().remove(base);
            }
            let mut events = self.events.borrow_mut();
            if events.len() >= OUTBOX {
                events.pop_front();
            }
            events.push_back(message);
        }
        self.filled.notify_one();
    }

    /// Takes the next message.
    pub fn pop(&self) -> Option<peer::FromAgent> {
        let event = self.events.borrow_mut().pop_front();
        event.or_else(|| self.states.borrow_mut().pop_first().map(|(_, m)| m))
    }

    /// Forgets everything: the session is over.
    pub fn clear(&self) {
        self.events.borrow_mut().clear();
        self.states.borrow_mut().clear();
    }
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
            start: Instant::now(),
            next: Cell::new(0),
        })
    }

    /// Time since the start; never jumps, and stands still while the machine sleeps.
    pub fn now(&self) -> Now {
        self.start.elapsed()
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
                    tracing::warn!(conn = conn.0, "a peer that does not read is disconnected");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_is_gone_has_no_state_left_in_the_outbox() {
        let status =
            |base: u32| peer::FromAgent::Status { uid: 1, status: Box::new(crate::core::tests::status(base, "ab")) };
        let outbox = Outbox::default();
        outbox.push(status(7));
        outbox.push(status(7));
        outbox.push(status(8));
        let gone = peer::FromAgent::Gone { base: JobId(7), instance: "ab".into() };
        outbox.push(gone.clone());
        assert_eq!(outbox.pop(), Some(gone));
        assert_eq!(outbox.pop(), Some(status(8)));
        assert_eq!(outbox.pop(), None);
    }
}
