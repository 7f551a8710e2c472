//! What waits to be sent to pliantd. Of one job there is only the last that matters: its latest state, the end of its
//! launcher's connection, and the state of a launcher that came after that. A user can therefore fill it no further
//! than by the jobs that he has here, and the last word of a launcher is not lost.

use pliant_model::JobId;
use pliant_protocol::peer::FromAgent;
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use tokio::sync::Notify;

/// Messages that may wait, those about jobs not counted.
const MAX: usize = 4096;

/// In the order in which they are sent.
#[derive(Debug, Default)]
struct OfJob {
    before: Option<FromAgent>,
    gone: Option<FromAgent>,
    after: Option<FromAgent>,
}

impl OfJob {
    fn status(&mut self, message: FromAgent) {
        match self.gone {
            None => self.before = Some(message),
            Some(_) => self.after = Some(message),
        }
    }

    fn gone(&mut self, message: FromAgent) {
        match self.after.take() {
            // A state takes the place of the one before it, whoever's that was.
            Some(after) => (self.before, self.gone) = (Some(after), Some(message)),
            // A second end without a state in between is of a launcher that pliantd has not heard of.
            None => self.gone = self.gone.take().or(Some(message)),
        }
    }

    fn take(&mut self) -> Option<FromAgent> {
        self.before.take().or_else(|| self.gone.take()).or_else(|| self.after.take())
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Outbox {
    events: RefCell<VecDeque<FromAgent>>,
    jobs: RefCell<BTreeMap<JobId, OfJob>>,
    /// The last that was told of the GPUs; an older one is of no use.
    gpus: RefCell<Option<FromAgent>>,
    /// The last samples likewise.
    samples: RefCell<Option<FromAgent>>,
    /// Something is there.
    pub filled: Notify,
}

impl Outbox {
    /// Adds a message.
    pub fn push(&self, message: FromAgent) {
        match &message {
            FromAgent::Status { status, .. } => {
                self.jobs.borrow_mut().entry(status.base).or_default().status(message);
            }
            FromAgent::Gone { base, .. } => self.jobs.borrow_mut().entry(*base).or_default().gone(message),
            FromAgent::Gpus { .. } => *self.gpus.borrow_mut() = Some(message),
            FromAgent::Samples { .. } => *self.samples.borrow_mut() = Some(message),
            FromAgent::Hello { .. }
            | FromAgent::Cancelled { .. }
            | FromAgent::Happened { .. }
            | FromAgent::Pong { .. } => {
                let mut events = self.events.borrow_mut();
                if events.len() >= MAX {
                    events.pop_front();
                }
                events.push_back(message);
            }
        }
        self.filled.notify_one();
    }

    /// Takes the next message.
    pub fn pop(&self) -> Option<FromAgent> {
        let event = self.events.borrow_mut().pop_front();
        let event = event.or_else(|| self.gpus.borrow_mut().take()).or_else(|| self.samples.borrow_mut().take());
        event.or_else(|| {
            let mut jobs = self.jobs.borrow_mut();
            loop {
                let mut first = jobs.first_entry()?;
                match first.get_mut().take() {
                    Some(message) => return Some(message),
                    None => first.remove(),
                };
            }
        })
    }

    /// Forgets everything: the session is over.
    pub fn clear(&self) {
        self.events.borrow_mut().clear();
        self.jobs.borrow_mut().clear();
        self.gpus.borrow_mut().take();
        self.samples.borrow_mut().take();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(base: u32, instance: &str) -> FromAgent {
        FromAgent::Status { uid: 1, status: Box::new(crate::core::tests::status(base, instance)) }
    }

    fn gone(base: u32, instance: &str) -> FromAgent {
        FromAgent::Gone { base: JobId(base), instance: instance.into() }
    }

    fn all(outbox: &Outbox) -> Vec<FromAgent> {
        std::iter::from_fn(|| outbox.pop()).collect()
    }

    #[test]
    fn of_a_job_the_latest_state_and_then_its_end() {
        let outbox = Outbox::default();
        outbox.push(status(8, "ab"));
        outbox.push(status(7, "ab"));
        outbox.push(status(7, "ab"));
        outbox.push(gone(7, "ab"));
        outbox.push(FromAgent::Pong { clock_ms: 1 });
        let expected = [FromAgent::Pong { clock_ms: 1 }, status(7, "ab"), gone(7, "ab"), status(8, "ab")];
        assert_eq!(all(&outbox), expected);
    }

    #[test]
    fn a_launcher_that_comes_and_goes_fills_nothing() {
        let outbox = Outbox::default();
        for n in 0..10_000 {
            let instance = format!("i{n}");
            outbox.push(status(7, &instance));
            outbox.push(gone(7, &instance));
            outbox.push(gone(7, "never told of"));
        }
        outbox.push(status(7, "last"));
        assert_eq!(all(&outbox), [status(7, "i9999"), gone(7, "i9999"), status(7, "last")]);
        outbox.push(status(7, "x"));
        outbox.clear();
        assert!(all(&outbox).is_empty());
    }
}
