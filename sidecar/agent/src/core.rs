//! What the agent does with what happens: pure, with the time passed in. Input and output are in the other files.

use crate::cancels::{Cancels, Now, Outcome, Want};
use crate::launchers::{Launchers, NAME};
use crate::leases::Leases;
use crate::limit::Lines;
use crate::orphans::Orphans;
use crate::proof::Peer;
use crate::ranks::{RankId, Ranks};
use crate::slurm_text::{Job, Look};
use pliant_model::gpu::{GpuEvent, NodeGpus, Sample};
use pliant_model::{JobId, NodeName, Reason};
use pliant_protocol::local::{FromAgent, FromClient, Role, ToAgent, ToClient};
use pliant_protocol::peer;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Between two sweeps while pliantd is not there.
const SWEEP: Duration = Duration::from_secs(60);
/// A pause between two ticks (one a second) that shows that the agent itself was stopped.
const STOPPED: Duration = Duration::from_secs(10);
/// The longest reason of a proposal, in characters: it may be kept for many ranks at once.
const REASON: usize = 200;
/// The most cancellations that are kept for pliantd while it is not there.
const REPORTS: usize = 1024;

/// A connection on the Unix socket; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u64);

/// What has to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Write to a connection.
    Send(ConnId, FromAgent),
    /// Close a connection once what was sent is written.
    Close(ConnId),
    /// Write to pliantd.
    Daemon(peer::FromAgent),
    /// squeue by id; ends in [`Core::looked`].
    Look(JobId),
    /// scancel; ends in [`Core::cancelled`].
    Cancel(JobId),
    /// squeue by the job name of a base's slices; ends in [`Core::found`].
    Find(JobId),
    /// squeue by node; ends in [`Core::swept`].
    Sweep,
}

#[derive(Debug)]
enum Kind {
    Rank(RankId),
    Supervisor,
    Launcher,
}

/// What is to be told of the node's GPUs.
#[derive(Debug, Default)]
pub struct Hardware {
    /// The GPUs; kept for the next connection.
    pub gpus: Option<NodeGpus>,
    told: bool,
    /// The last samples, until they are told.
    pub samples: Option<Vec<Sample>>,
    /// Events that wait for pliantd.
    pub events: VecDeque<GpuEvent>,
}

impl Hardware {
    /// The most events that wait; the log has all.
    pub const EVENTS: usize = 256;

    /// What can be told now.
    pub fn tell(&mut self, connected: bool) -> Vec<Effect> {
        if !connected {
            return vec![];
        }
        let gpus = self.gpus.clone().filter(|_| !std::mem::replace(&mut self.told, true));
        let gpus = gpus.map(|g| peer::FromAgent::Gpus { gpus: Box::new(g) });
        let samples = self.samples.take().map(|samples| peer::FromAgent::Samples { samples });
        let events = self.events.drain(..).map(|e| peer::FromAgent::Happened { event: Box::new(e) });
        gpus.into_iter().chain(samples).chain(events).map(Effect::Daemon).collect()
    }

    /// They are to be told anew.
    pub fn changed(&mut self) {
        self.told = false;
    }
}

/// The state of an agent.
#[derive(Debug)]
pub struct Core {
    node: NodeName,
    conns: BTreeMap<ConnId, (Peer, Kind)>,
    ranks: Ranks,
    launchers: Launchers,
    leases: Leases,
    cancels: Cancels,
    orphans: Orphans,
    daemon: bool,
    reports: VecDeque<peer::FromAgent>,
    sweep_at: Option<Now>,
    sweep_failures: u32,
    swept: bool,
    ticked: Now,
    lines: Lines,
    /// The node's GPUs.
    pub hardware: Hardware,
}

impl Core {
    /// The agent of a node; the first sweep is due at once.
    pub fn new(node: NodeName, now: Now) -> Core {
        Core {
            node,
            conns: BTreeMap::new(),
            ranks: Ranks::default(),
            launchers: Launchers::default(),
            leases: Leases::default(),
            cancels: Cancels::default(),
            orphans: Orphans::default(),
            daemon: false,
            reports: VecDeque::new(),
            sweep_at: Some(now),
            sweep_failures: 0,
            swept: false,
            ticked: now,
            lines: Lines::default(),
            hardware: Hardware::default(),
        }
    }

    /// A proven peer's first frame.
    pub fn hello(
        &mut self,
        conn: ConnId,
        peer: Peer,
        (version, role): (u32, Role),
        alive: &dyn Fn(u32) -> bool,
        now: Now,
    ) -> Vec<Effect> {
        let mut out = vec![];
        if let Err(reason) = self.admit(conn, peer, version, role, alive, now, &mut out) {
            if self.lines.pass(peer.uid, now) {
                tracing::info!(job = %peer.job, uid = peer.uid, pid = peer.pid, "refused: {reason}");
            }
            out.push(Effect::Send(conn, FromAgent::Refused { reason }));
            out.push(Effect::Close(conn));
        }
        out
    }

    #[allow(clippy::too_many_arguments)] // one caller, above
    fn admit(
        &mut self,
        conn: ConnId,
        peer: Peer,
        version: u32,
        role: Role,
        alive: &dyn Fn(u32) -> bool,
        now: Now,
        out: &mut Vec<Effect>,
    ) -> Result<(), String> {
        let own = pliant_protocol::VERSION;
        if version != own {
            return Err(format!("this agent speaks version {own} of the protocol, the peer version {version}"));
        }
        let welcome = FromAgent::Welcome { version: own, job: peer.job, node: self.node.clone() };
        let kind = match role {
            Role::Client { rank, generation } => {
                let id = (generation, rank);
                self.ranks.rank(conn, peer, id, alive, out)?;
                out.push(Effect::Send(conn, welcome));
                self.ranks.rank_ready(conn, &peer, id, out);
                Kind::Rank(id)
            }
            Role::Supervisor => {
                self.ranks.supervisor(conn, peer, alive, out)?;
                out.push(Effect::Send(conn, welcome));
                self.ranks.supervisor_ready(conn, &peer, out);
                Kind::Supervisor
            }
            Role::Launcher { instance } => {
                if let Some((key, uid, tokens)) = self.launchers.hello(conn, &peer, &instance, alive, now, out)? {
                    self.orphans.add(key, uid, tokens, now);
                }
                self.orphans.returned(&(peer.job, instance));
                out.push(Effect::Send(conn, welcome));
                self.launchers.ready(conn, &peer, self.daemon, out);
                Kind::Launcher
            }
        };
        self.conns.insert(conn, (peer, kind));
        Ok(())
    }

    /// A further frame of a peer. One that its role may not send is logged and left out.
    pub fn message(&mut self, conn: ConnId, message: ToAgent, now: Now) -> Vec<Effect> {
        let mut out = vec![];
        let Some((peer, kind)) = self.conns.get(&conn) else {
            return out;
        };
        let peer = *peer;
        let refused = match (kind, message) {
            (Kind::Rank(id), ToAgent::Client(mut message)) => {
                if let FromClient::Report(progress) = &mut message {
                    progress.loss = progress.loss.filter(|l| l.is_finite());
                }
                self.ranks.rank_message(&peer, *id, message, &mut out);
                Ok(())
            }
            (Kind::Supervisor, ToAgent::ToClient { rank, generation, mut message }) => {
                if let ToClient::Propose { reason, .. } = &mut message {
                    cut(reason, REASON);
                }
                self.ranks.supervisor_message(&peer, (generation, rank), message, &mut out);
                Ok(())
            }
            (Kind::Supervisor, ToAgent::Lease { base, instance }) => self.renew(&peer, base, &instance, now),
            (Kind::Launcher, ToAgent::Status(status)) => self
                .launchers
                .status(conn, &peer, *status, now)
                .map(|m| out.extend(m.filter(|_| self.daemon).map(Effect::Daemon))),
            (Kind::Launcher, ToAgent::Holds { tokens }) => self.launchers.holds(conn, &peer, tokens),
            (kind, _) => Err(format!("a message that a {} does not send", kind.word())),
        };
        if let Err(reason) = refused
            && self.lines.pass(peer.uid, now)
        {
            tracing::warn!(job = %peer.job, uid = peer.uid, pid = peer.pid, "message left out: {reason}");
        }
        out
    }

    fn renew(&mut self, peer: &Peer, base: JobId, instance: &str, now: Now) -> Result<(), String> {
        if base == peer.job {
            return Ok(()); // the base itself needs no lease
        }
        if instance.is_empty() || instance.len() > NAME {
            return Err(format!("a lease whose instance is not 1 to {NAME} bytes"));
        }
        self.leases.renew(peer.job, peer.uid, base, instance, now);
        self.cancels.renewed(peer.job);
        Ok(())
    }

    /// A connection has ended.
    pub fn closed(&mut self, conn: ConnId, now: Now) -> Vec<Effect> {
        let Some((peer, kind)) = self.conns.remove(&conn) else {
            return vec![];
        };
        match kind {
            Kind::Launcher => {
                let gone = self.launchers.closed(conn, &peer, now);
                gone.into_iter().filter(|_| self.daemon).map(Effect::Daemon).collect()
            }
            Kind::Rank(_) | Kind::Supervisor => {
                self.ranks.closed(conn, &peer);
                vec![]
            }
        }
    }

    /// The session with pliantd has begun or ended.
    pub fn daemon(&mut self, connected: bool, now: Now) -> Vec<Effect> {
        if self.daemon == connected {
            return vec![];
        }
        self.daemon = connected;
        let mut out = vec![];
        if connected {
            out.extend(self.reports.drain(..).chain(self.launchers.statuses()).map(Effect::Daemon));
            self.hardware.changed();
            out.extend(self.hardware.tell(true));
            // The first sweep is wanted in any case; later ones are pliantd's matter.
            self.sweep_at = self.sweep_at.filter(|_| !self.swept);
        } else {
            self.sweep_at = self.sweep_at.or(Some(now + SWEEP));
        }
        self.launchers.daemon(connected, &mut out);
        out
    }

    /// Whether the session with pliantd is up.
    pub fn connected(&self) -> bool {
        self.daemon
    }

    /// From pliantd.
    pub fn daemon_message(&mut self, message: peer::ToAgent, now: Now) -> Vec<Effect> {
        let mut out = vec![];
        match message {
            peer::ToAgent::Order { base, instance, order } => {
                let id = order.id().clone();
                if let Err(reason) = self.launchers.order(base, &instance, order, &mut out) {
                    tracing::warn!(order = %id, "order left out: {reason}");
                }
            }
            peer::ToAgent::Cancel { slice, base, reason } => {
                let want = Want { base, instance: None, token: None, uid: None };
                self.cancels.add(slice, want, reason, false, now);
                self.commands(now, &mut out);
            }
            peer::ToAgent::Welcome { .. } | peer::ToAgent::Refused { .. } | peer::ToAgent::Ping => {}
        }
        out
    }

    /// Once a second.
    pub fn tick(&mut self, now: Now) -> Vec<Effect> {
        let pause = now.saturating_sub(std::mem::replace(&mut self.ticked, now));
        if pause > STOPPED {
            tracing::warn!("the agent was stopped for {} s: all leases start anew", pause.as_secs());
            self.leases.restart(now);
            self.launchers.restart(now);
            self.cancels.all_renewed();
        }
        for (slice, want, reason) in self.leases.run_out(now) {
            self.cancels.add(slice, want, reason, true, now);
        }
        for (key, uid, tokens) in self.launchers.lost(now) {
            if !tokens.is_empty() {
                tracing::info!(job = %key.0, uid, "the launcher is gone: looking for its {} slices", tokens.len());
            }
            self.orphans.add(key, uid, tokens, now);
        }
        let mut out = vec![];
        if self.daemon {
            out.extend(self.launchers.held_back(now).into_iter().map(Effect::Daemon));
        }
        self.commands(now, &mut out);
        out
    }

    fn commands(&mut self, now: Now, out: &mut Vec<Effect>) {
        out.extend(self.cancels.next(now).map(Effect::Look));
        out.extend(self.orphans.next(now).map(Effect::Find));
        if self.sweep_at.is_some_and(|at| at <= now) {
            self.sweep_at = None; // set again when it has ended
            out.push(Effect::Sweep);
        }
    }

    /// The end of [`Effect::Look`].
    pub fn looked(&mut self, slice: JobId, look: Look, now: Now) -> Vec<Effect> {
        let mut out = vec![];
        match self.cancels.looked(slice, look, now) {
            Outcome::Cancel(slice) => out.push(Effect::Cancel(slice)),
            Outcome::Later(text) => {
                tracing::warn!(%slice, "not cancelled, Slurm does not answer: {text}")
            }
            Outcome::NotOurs => {
                tracing::warn!(%slice, "not cancelled: it does not bear the expected mark and owner")
            }
            Outcome::Ended | Outcome::Withdrawn => {}
        }
        self.commands(now, &mut out);
        out
    }

    /// The end of [`Effect::Cancel`]; `Err`: scancel's words.
    pub fn cancelled(&mut self, slice: JobId, result: Result<(), String>, now: Now) -> Vec<Effect> {
        let mut out = vec![];
        let reason = self.cancels.cancelled(slice, result.is_ok(), now);
        match (reason, result) {
            (Some(reason), _) => {
                tracing::info!(%slice, "cancelled: {reason}");
                self.report(peer::FromAgent::Cancelled { slice, reason }, &mut out);
            }
            (None, Err(text)) => tracing::warn!(%slice, "scancel failed: {text}"),
            (None, Ok(())) => {}
        }
        self.commands(now, &mut out);
        out
    }

    fn report(&mut self, message: peer::FromAgent, out: &mut Vec<Effect>) {
        if self.daemon {
            out.push(Effect::Daemon(message));
            return;
        }
        if self.reports.len() >= REPORTS {
            self.reports.pop_front();
        }
        self.reports.push_back(message);
    }

    /// The end of [`Effect::Find`].
    pub fn found(&mut self, jobs: Result<Vec<Job>, String>, now: Now) -> Vec<Effect> {
        if let Err(text) = &jobs {
            tracing::warn!("slices of a lost launcher could not be looked up: {text}");
        }
        for (slice, want) in self.orphans.found(jobs, now) {
            self.cancels.add(slice, want, Reason::Orphan { slice }, false, now);
        }
        let mut out = vec![];
        self.commands(now, &mut out);
        out
    }

    /// The end of [`Effect::Sweep`].
    pub fn swept(&mut self, jobs: Result<Vec<Job>, String>, now: Now) {
        match jobs {
            Ok(jobs) => {
                self.sweep_failures = 0;
                self.swept = true;
                jobs.iter().filter(|j| !self.cancels.contains(j.id)).for_each(|j| self.leases.found(j, now));
                tracing::debug!("sweep: {} slices, {} leases", jobs.len(), self.leases.len());
                self.sweep_at = (!self.daemon).then(|| now + SWEEP);
            }
            Err(text) => {
                if self.sweep_failures == 0 {
                    tracing::warn!("the slices on this node could not be listed: {text}");
                }
                let wanted = !self.swept || !self.daemon;
                self.sweep_at = wanted.then(|| now + crate::cancels::back_off(self.sweep_failures));
                self.sweep_failures = self.sweep_failures.saturating_add(1);
            }
        }
    }
}

impl Core {
    /// The GPUs of the node have changed.
    pub fn gpus(&mut self, gpus: NodeGpus) -> Vec<Effect> {
        self.hardware.gpus = Some(gpus);
        self.hardware.changed();
        self.hardware.tell(self.connected())
    }

    /// What they do.
    pub fn samples(&mut self, samples: Vec<Sample>) -> Vec<Effect> {
        self.hardware.samples = Some(samples);
        self.hardware.tell(self.connected())
    }

    /// Something happened to one.
    pub fn happened(&mut self, event: GpuEvent) -> Vec<Effect> {
        self.hardware.events.push_back(event);
        while self.hardware.events.len() > Hardware::EVENTS {
            self.hardware.events.pop_front();
        }
        self.hardware.tell(self.connected())
    }
}

/// Leaves the first `most` characters, and no memory for more.
pub fn cut(text: &mut String, most: usize) {
    if let Some((end, _)) = text.char_indices().nth(most) {
        text.truncate(end);
        text.shrink_to_fit();
    }
}

impl Kind {
    fn word(&self) -> &'static str {
        match self {
            Kind::Rank(_) => "rank",
            Kind::Supervisor => "supervisor",
            Kind::Launcher => "launcher",
        }
    }
}

#[cfg(test)]
#[path = "core_tests.rs"]
pub mod tests;
