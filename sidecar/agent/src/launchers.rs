//! The launchers of bases on this node: their last status, the tokens of their slices, and orders on their way.
//! Keyed by the proven job and uid. Pure: time is passed in.

use crate::cancels::Now;
use crate::core::{ConnId, Effect, cut};
use crate::limit::Bucket;
use crate::orphans::{Key, RETURN};
use crate::proof::Peer;
use pliant_model::JobId;
use pliant_protocol::job::{JobStatus, MAX_DONE, MAX_ENTRIES, MAX_TIMES, Order, OrderStatus};
use pliant_protocol::local::FromAgent;
use pliant_protocol::peer;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The most orders that wait for a launcher that is connecting again.
const ORDERS: usize = 16;
/// The most slices that a launcher may hold or ask for.
const TOKENS: usize = 4096;
/// Characters of the command in a status.
const COMMAND: usize = 200;
/// The largest status, as JSON: it has to fit into one frame to pliantd with what is put around it there.
const STATUS: usize = 768 << 10;
/// Statuses a second of one launcher, and at once, that pliantd gets; of more it gets the last, within a second.
const STATUS_RATE: (f64, f64) = (5.0, 10.0);
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
    /// Pliantd has not been sent `status`, since there were too many.
    held_back: bool,
    pace: Bucket,
    tokens: BTreeSet<String>,
    orders: VecDeque<Order>,
}

/// A launcher that does not come back: its key, uid and the tokens of its slices.
pub type Lost = (Key, u32, BTreeSet<String>);

impl Launcher {
    fn told(&mut self, uid: u32) -> Option<peer::FromAgent> {
        self.held_back = false;
        Some(peer::FromAgent::Status { uid, status: Box::new(self.status.clone()?) })
    }
}

/// A status within its limits. `Err`: what is too much.
fn limited(mut status: JobStatus) -> Result<JobStatus, String> {
    fn last<T>(list: &mut Vec<T>, most: usize) {
        list.drain(..list.len().saturating_sub(most));
        list.shrink_to_fit();
    }
    status.progress.loss = status.progress.loss.filter(|l| l.is_finite());
    cut(&mut status.command, COMMAND);
    last(&mut status.done, MAX_DONE);
    let mut lists = vec![status.world.len(), status.slices.len(), status.base_nodes.len()];
    for OrderStatus { times, slices, .. } in status.order.iter_mut().chain(&mut status.done) {
        last(times, MAX_TIMES);
        lists.push(slices.len());
    }
    if let Some(length) = lists.into_iter().find(|&l| l > MAX_ENTRIES) {
        return Err(format!("a status with a list of {length} entries; {MAX_ENTRIES} are allowed"));
    }
    let size = serde_json::to_vec(&status).map_err(|e| e.to_string())?.len();
    if size > STATUS {
        return Err(format!("a status of {size} bytes; {STATUS} are allowed"));
    }
    Ok(status)
}

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
        now: Now,
        out: &mut Vec<Effect>,
    ) -> Result<Option<Lost>, String> {
        if instance.is_empty() || instance.len() > NAME || instance.contains(|c: char| !c.is_ascii_graphic()) {
            return Err(format!("an instance must be 1 to {NAME} visible ASCII characters"));
        }
        let key = (peer.job, peer.uid);
        let (mut lost, mut pace) = (None, Bucket::new(STATUS_RATE.0, STATUS_RATE.1, now));
        if let Some(old) = self.0.get(&key) {
            if old.conn.is_some() && old.pid != peer.pid && alive(old.pid) {
                return Err(format!("job {} has a launcher already: pliant run is process {}", peer.job, old.pid));
            }
            out.extend(old.conn.map(Effect::Close));
            if old.instance != instance
                && let Some(old) = self.0.remove(&key)
            {
                pace = old.pace; // not a way around it
                lost = Some(((key.0, old.instance), key.1, old.tokens));
            }
        }
        let launcher = self.0.entry(key).or_insert_with(|| Launcher {
            pid: peer.pid,
            instance: instance.to_owned(),
            conn: None,
            gone_at: Now::ZERO,
            status: None,
            held_back: false,
            pace,
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

    /// The whole state of a job: what to tell pliantd now. `Err`: not believed, for the log.
    pub fn status(
        &mut self,
        conn: ConnId,
        peer: &Peer,
        status: JobStatus,
        now: Now,
    ) -> Result<Option<peer::FromAgent>, String> {
        let launcher = self.of(conn, peer).ok_or("no launcher's connection")?;
        if status.base != peer.job {
            return Err(format!("it tells of job {}, but its process belongs to job {}", status.base, peer.job));
        }
        if status.instance != launcher.instance {
            return Err(format!("it tells of instance {:?}, its Hello was {:?}", status.instance, launcher.instance));
        }
        launcher.status = Some(limited(status)?);
        launcher.held_back = !launcher.pace.pass(now);
        Ok(if launcher.held_back { None } else { launcher.told(peer.uid) })
    }

    /// Once a second: the last of the statuses that were too many.
    pub fn held_back(&mut self, now: Now) -> Vec<peer::FromAgent> {
        let due = self.0.iter_mut().filter(|(_, l)| l.conn.is_some() && l.held_back);
        due.filter_map(|((_, uid), l)| if l.pace.pass(now) { l.told(*uid) } else { None }).collect()
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

    /// A connection is closed: what to tell pliantd, if it was a launcher's. Its last status is not lost.
    pub fn closed(&mut self, conn: ConnId, peer: &Peer, now: Now) -> Vec<peer::FromAgent> {
        let Some(launcher) = self.of(conn, peer) else {
            return vec![];
        };
        launcher.conn = None;
        launcher.gone_at = now;
        let last = if launcher.held_back { launcher.told(peer.uid) } else { None };
        let gone = peer::FromAgent::Gone { base: peer.job, instance: launcher.instance.clone() };
        last.into_iter().chain([gone]).collect()
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
    pub fn statuses(&mut self) -> impl Iterator<Item = peer::FromAgent> {
        self.0.iter_mut().filter(|(_, l)| l.conn.is_some()).filter_map(|((_, uid), l)| l.told(*uid))
    }
}
