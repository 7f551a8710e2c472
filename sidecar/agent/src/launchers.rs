//! The launchers of bases on this node: their last status, the tokens of their slices, and orders on their way.
//! Keyed by the proven job and uid. Pure: time is passed in.

use crate::cancels::Now;
use crate::core::{ConnId, Effect};
use crate::orphans::{Key, RETURN};
use crate::proof::Peer;
use pliant_model::JobId;
use pliant_protocol::job::{JobStatus, Order};
use pliant_protocol::local::FromAgent;
use pliant_protocol::peer;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The most orders that wait for a launcher that is connecting again.
const ORDERS: usize = 16;
/// The most slices that a launcher may hold or ask for.
const TOKENS: usize = 4096;
/// The longest instance or token, in bytes.
pub const NAME: usize = 128;

#[derive(Debug)]
struct Launcher {
    pid: u32,
    instance: String,
    conn: Option<ConnId>,
    /// Since when there is no connection.
    gone_at: Now,
    status: Option<JobStatus>,
    tokens: BTreeSet<String>,
    orders: VecDeque<Order>,
}

/// A launcher that does not come back: its key, uid and the tokens of its slices.
pub type Lost = (Key, u32, BTreeSet<String>);

/// See the module.
#[derive(Debug, Default)]
pub struct Launchers(BTreeMap<(JobId, u32), Launcher>);

impl Launchers {
    /// A launcher has said Hello. Gives the one before it in the same base, if that was another instance.
    ///
    /// # Errors
    /// Another living process is the launcher of this base.
    pub fn hello(
        &mut self,
        conn: ConnId,
        peer: &Peer,
        instance: &str,
        alive: &dyn Fn(u32) -> bool,
        out: &mut Vec<Effect>,
    ) -> Result<Option<Lost>, String> {
        if instance.is_empty() || instance.len() > NAME || instance.contains(|c: char| !c.is_ascii_graphic()) {
            return Err(format!("an instance must be 1 to {NAME} visible ASCII characters"));
        }
        let key = (peer.job, peer.uid);
        let mut lost = None;
        if let Some(old) = self.0.get(&key) {
            if old.conn.is_some() && old.pid != peer.pid && alive(old.pid) {
                return Err(format!("job {} has a launcher already: pliant run is process {}", peer.job, old.pid));
            }
            out.extend(old.conn.map(Effect::Close));
            if old.instance != instance {
                lost = self.0.remove(&key).map(|l| ((key.0, l.instance), key.1, l.tokens));
            }
        }
        let launcher = self.0.entry(key).or_insert_with(|| Launcher {
            pid: peer.pid,
            instance: instance.to_owned(),
            conn: None,
            gone_at: Now::ZERO,
            status: None,
            tokens: BTreeSet::new(),
            orders: VecDeque::new(),
        });
        launcher.pid = peer.pid;
        launcher.conn = Some(conn);
        Ok(lost)
    }

    /// After its Welcome: whether pliantd is there, and the orders that came meanwhile.
    pub fn ready(&mut self, conn: ConnId, peer: &Peer, daemon: bool, out: &mut Vec<Effect>) {
        out.push(Effect::Send(conn, FromAgent::Daemon { connected: daemon }));
        if let Some(launcher) = self.of(conn, peer) {
            out.extend(launcher.orders.drain(..).map(|o| Effect::Send(conn, FromAgent::Order(o))));
        }
    }

    fn of(&mut self, conn: ConnId, peer: &Peer) -> Option<&mut Launcher> {
        self.0.get_mut(&(peer.job, peer.uid)).filter(|l| l.conn == Some(conn))
    }

    /// The whole state of a job. `Err`: not believed, for the log.
    pub fn status(&mut self, conn: ConnId, peer: &Peer, mut status: JobStatus) -> Result<peer::FromAgent, String> {
        let launcher = self.of(conn, peer).ok_or("no launcher's connection")?;
        if status.base != peer.job {
            return Err(format!("it tells of job {}, but its process belongs to job {}", status.base, peer.job));
        }
        if status.instance != launcher.instance {
            return Err(format!("it tells of instance {:?}, its Hello was {:?}", status.instance, launcher.instance));
        }
        status.progress.loss = status.progress.loss.filter(|l| l.is_finite());
        launcher.status = Some(status.clone());
        Ok(peer::FromAgent::Status { uid: peer.uid, status: Box::new(status) })
    }

    /// The slices that a launcher holds or asks for. `Err`: not believed.
    pub fn holds(&mut self, conn: ConnId, peer: &Peer, tokens: Vec<String>) -> Result<(), String> {
        let launcher = self.of(conn, peer).ok_or("no launcher's connection")?;
        if tokens.len() > TOKENS || tokens.iter().any(|t| t.is_empty() || t.len() > NAME) {
            return Err(format!("more than {TOKENS} tokens, or one that is not 1 to {NAME} bytes"));
        }
        launcher.tokens = tokens.into_iter().collect();
        Ok(())
    }

    /// An order of pliantd. `Err`: nobody to give it to.
    pub fn order(&mut self, base: JobId, instance: &str, order: Order, out: &mut Vec<Effect>) -> Result<(), String> {
        let launcher = self.0.iter_mut().find(|((job, _), l)| *job == base && l.instance == instance);
        let (_, launcher) =
            launcher.ok_or_else(|| format!("no launcher of job {base}, instance {instance:?}, is here"))?;
        match launcher.conn {
            Some(conn) => out.push(Effect::Send(conn, FromAgent::Order(order))),
            None => {
                launcher.orders.retain(|o| o.id() != order.id());
                if launcher.orders.len() >= ORDERS {
                    launcher.orders.pop_front();
                }
                launcher.orders.push_back(order);
            }
        }
        Ok(())
    }

    /// A connection is closed: what to tell pliantd, if it was a launcher's.
    pub fn closed(&mut self, conn: ConnId, peer: &Peer, now: Now) -> Option<peer::FromAgent> {
        let launcher = self.of(conn, peer)?;
        launcher.conn = None;
        launcher.gone_at = now;
        Some(peer::FromAgent::Gone { base: peer.job, instance: launcher.instance.clone() })
    }

    /// Takes out the launchers that have not come back in time.
    pub fn lost(&mut self, now: Now) -> Vec<Lost> {
        let over = |l: &Launcher| l.conn.is_none() && now.saturating_sub(l.gone_at) >= RETURN;
        let keys: Vec<_> = self.0.iter().filter(|(_, l)| over(l)).map(|(k, _)| *k).collect();
        let take = |key: (JobId, u32)| self.0.remove(&key).map(|l| ((key.0, l.instance), key.1, l.tokens));
        keys.into_iter().filter_map(take).collect()
    }

    /// The agent itself was stopped: launchers have the whole time again to connect.
    pub fn restart(&mut self, now: Now) {
        self.0.values_mut().for_each(|l| l.gone_at = now);
    }

    /// Tells every launcher whether pliantd is there.
    pub fn daemon(&self, connected: bool, out: &mut Vec<Effect>) {
        out.extend(self.0.values().filter_map(|l| l.conn).map(|c| Effect::Send(c, FromAgent::Daemon { connected })));
    }

    /// The last status of each job whose launcher is connected.
    pub fn statuses(&self) -> impl Iterator<Item = peer::FromAgent> {
        let connected = self.0.iter().filter(|(_, l)| l.conn.is_some());
        connected.filter_map(|((_, uid), l)| {
            Some(peer::FromAgent::Status { uid: *uid, status: Box::new(l.status.clone()?) })
        })
    }
}
