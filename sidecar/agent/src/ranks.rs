//! Ranks and supervisors: who is connected, and what goes between them. Keyed by the proven Slurm job and uid, so that
//! nothing crosses from one job or user to another.
//!
//! What cannot be delivered because one end is connecting again (an agent that was restarted is known to both ends at
//! different times) is kept, in order, up to a limit. Pure.

use crate::core::{ConnId, Effect};
use crate::proof::Peer;
use pliant_model::JobId;
use pliant_protocol::local::{FromAgent, FromClient, ToClient};
use std::collections::{BTreeMap, VecDeque};

/// The most messages that are kept for a supervisor that is not connected.
const KEPT_UP: usize = 256;
/// The most messages that are kept for one rank that is not connected.
const KEPT_DOWN: usize = 16;
/// The most ranks of one job for which something is kept.
const KEPT_RANKS: usize = 64;

/// Generation and rank.
pub type RankId = (u32, u32);
type StepKey = (JobId, u32);

#[derive(Debug, Default)]
struct Step {
    supervisor: Option<(ConnId, Peer)>,
    ranks: BTreeMap<RankId, (ConnId, Peer)>,
    /// For the supervisor.
    up: VecDeque<FromAgent>,
    /// For ranks.
    down: BTreeMap<RankId, VecDeque<ToClient>>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Ranks(BTreeMap<StepKey, Step>);

fn key(peer: &Peer) -> StepKey {
    (peer.job, peer.uid)
}

fn push<T>(queue: &mut VecDeque<T>, item: T, most: usize) {
    if queue.len() >= most {
        queue.pop_front();
    }
    queue.push_back(item);
}

impl Ranks {
    /// A rank has said Hello. `Err`: another living process has that rank.
    pub fn rank(
        &mut self,
        conn: ConnId,
        peer: Peer,
        id: RankId,
        alive: &dyn Fn(u32) -> bool,
        out: &mut Vec<Effect>,
    ) -> Result<(), String> {
        let step = self.0.entry(key(&peer)).or_default();
        if let Some((old, holder)) = step.ranks.get(&id) {
            if holder.pid != peer.pid && alive(holder.pid) {
                let (generation, rank) = id;
                return Err(format!(
                    "rank {rank} of generation {generation} is process {}, not {}",
                    holder.pid, peer.pid
                ));
            }
            out.push(Effect::Close(*old));
        }
        step.ranks.insert(id, (conn, peer));
        Ok(())
    }

    /// After the Welcome of a rank: what was kept for it, and its Ready to the supervisor.
    pub fn rank_ready(&mut self, conn: ConnId, peer: &Peer, id: RankId, out: &mut Vec<Effect>) {
        let Some(step) = self.0.get_mut(&key(peer)) else {
            return;
        };
        let kept = step.down.remove(&id).unwrap_or_default();
        out.extend(kept.into_iter().map(|m| Effect::Send(conn, FromAgent::Client(m))));
        if let Some((supervisor, _)) = &step.supervisor {
            out.push(Effect::Send(*supervisor, ready(id)));
        }
    }

    /// A supervisor has said Hello. `Err`: another living process is the supervisor of this job here.
    pub fn supervisor(
        &mut self,
        conn: ConnId,
        peer: Peer,
        alive: &dyn Fn(u32) -> bool,
        out: &mut Vec<Effect>,
    ) -> Result<(), String> {
        let step = self.0.entry(key(&peer)).or_default();
        if let Some((old, holder)) = &step.supervisor {
            if holder.pid != peer.pid && alive(holder.pid) {
                return Err(format!(
                    "the supervisor of job {} here is process {}, not {}",
                    peer.job, holder.pid, peer.pid
                ));
            }
            out.push(Effect::Close(*old));
        }
        step.supervisor = Some((conn, peer));
        Ok(())
    }

    /// After the Welcome of a supervisor: Ready of every rank that is connected, then what was kept.
    pub fn supervisor_ready(&mut self, conn: ConnId, peer: &Peer, out: &mut Vec<Effect>) {
        let Some(step) = self.0.get_mut(&key(peer)) else {
            return;
        };
        out.extend(step.ranks.keys().map(|id| Effect::Send(conn, ready(*id))));
        out.extend(step.up.drain(..).map(|m| Effect::Send(conn, m)));
    }

    /// From a rank to its supervisor.
    pub fn rank_message(
        &mut self,
        peer: &Peer,
        (generation, rank): RankId,
        message: FromClient,
        out: &mut Vec<Effect>,
    ) {
        let Some(step) = self.0.get_mut(&key(peer)) else {
            return;
        };
        let numbers_only = matches!(message, FromClient::Report(_));
        let message = FromAgent::FromClient { rank, generation, message };
        match &step.supervisor {
            Some((conn, _)) => out.push(Effect::Send(*conn, message)),
            None if numbers_only => {}
            None => push(&mut step.up, message, KEPT_UP),
        }
    }

    /// From a supervisor to one of its ranks.
    pub fn supervisor_message(&mut self, peer: &Peer, id: RankId, message: ToClient, out: &mut Vec<Effect>) {
        let Some(step) = self.0.get_mut(&key(peer)) else {
            return;
        };
        match step.ranks.get(&id) {
            Some((conn, _)) => out.push(Effect::Send(*conn, FromAgent::Client(message))),
            None if step.down.len() >= KEPT_RANKS && !step.down.contains_key(&id) => {}
            None => push(step.down.entry(id).or_default(), message, KEPT_DOWN),
        }
    }

    /// A connection is closed. What is kept goes with the last connection of a step.
    pub fn closed(&mut self, conn: ConnId, peer: &Peer) {
        let Some(step) = self.0.get_mut(&key(peer)) else {
            return;
        };
        step.ranks.retain(|_, (c, _)| *c != conn);
        if step.supervisor.as_ref().is_some_and(|(c, _)| *c == conn) {
            step.supervisor = None;
        }
        if step.supervisor.is_none() && step.ranks.is_empty() {
            self.0.remove(&key(peer));
        }
    }
}

fn ready((generation, rank): RankId) -> FromAgent {
    FromAgent::FromClient { rank, generation, message: FromClient::Ready }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEAD: &dyn Fn(u32) -> bool = &|_| false;
    const ALIVE: &dyn Fn(u32) -> bool = &|_| true;

    fn peer(job: u32, uid: u32, pid: u32) -> Peer {
        Peer { pid, uid, job: JobId(job) }
    }

    fn sent(out: &mut Vec<Effect>) -> Vec<Effect> {
        std::mem::take(out)
    }

    #[test]
    fn messages_stay_within_job_and_uid() {
        let (mut r, mut out) = (Ranks::default(), vec![]);
        let (rank, sup, other) = (peer(1, 10, 100), peer(1, 10, 101), peer(1, 11, 102));
        r.supervisor(ConnId(1), sup, ALIVE, &mut out).unwrap();
        r.supervisor(ConnId(2), other, ALIVE, &mut out).unwrap();
        r.rank(ConnId(3), rank, (1, 0), ALIVE, &mut out).unwrap();
        r.rank_ready(ConnId(3), &rank, (1, 0), &mut out);
        assert_eq!(sent(&mut out), [Effect::Send(ConnId(1), ready((1, 0)))]);
        r.supervisor_message(&other, (1, 0), ToClient::Start, &mut out);
        assert!(sent(&mut out).is_empty());
        r.supervisor_message(&sup, (1, 0), ToClient::Start, &mut out);
        assert_eq!(sent(&mut out), [Effect::Send(ConnId(3), FromAgent::Client(ToClient::Start))]);
    }

    #[test]
    fn what_one_end_misses_while_it_reconnects_is_kept_in_order() {
        let (mut r, mut out) = (Ranks::default(), vec![]);
        let (rank, sup) = (peer(1, 10, 100), peer(1, 10, 101));
        r.rank(ConnId(3), rank, (2, 5), ALIVE, &mut out).unwrap();
        let left = FromClient::Left { boundary: 9 };
        r.rank_message(&rank, (2, 5), FromClient::Report(Default::default()), &mut out);
        r.rank_message(&rank, (2, 5), left.clone(), &mut out);
        assert!(sent(&mut out).is_empty());
        r.supervisor(ConnId(1), sup, ALIVE, &mut out).unwrap();
        r.supervisor_ready(ConnId(1), &sup, &mut out);
        let left = FromAgent::FromClient { rank: 5, generation: 2, message: left };
        assert_eq!(sent(&mut out), [Effect::Send(ConnId(1), ready((2, 5))), Effect::Send(ConnId(1), left)]);

        r.closed(ConnId(3), &rank);
        for n in 0..300 {
            r.supervisor_message(&sup, (2, 5), ToClient::Commit { boundary: n }, &mut out);
        }
        r.rank(ConnId(4), rank, (2, 5), ALIVE, &mut out).unwrap();
        r.rank_ready(ConnId(4), &rank, (2, 5), &mut out);
        let got = sent(&mut out);
        assert_eq!(got.len(), 16 + 1, "not more, since a user can have it filled");
        let last = FromAgent::Client(ToClient::Commit { boundary: 299 });
        assert_eq!(got[KEPT_DOWN - 1], Effect::Send(ConnId(4), last));
    }

    #[test]
    fn a_rank_is_one_process() {
        let (mut r, mut out) = (Ranks::default(), vec![]);
        r.rank(ConnId(1), peer(1, 10, 100), (1, 0), ALIVE, &mut out).unwrap();
        let e = r.rank(ConnId(2), peer(1, 10, 200), (1, 0), ALIVE, &mut out).unwrap_err();
        assert_eq!(e, "rank 0 of generation 1 is process 100, not 200");
        r.rank(ConnId(3), peer(1, 10, 100), (1, 0), ALIVE, &mut out).unwrap();
        assert_eq!(sent(&mut out), [Effect::Close(ConnId(1))]);
        r.closed(ConnId(1), &peer(1, 10, 100));
        r.rank(ConnId(4), peer(1, 10, 300), (1, 0), DEAD, &mut out).unwrap();
        assert_eq!(sent(&mut out), [Effect::Close(ConnId(3))], "the holder has died");
        r.rank(ConnId(5), peer(1, 11, 400), (1, 0), ALIVE, &mut out).unwrap();
        assert!(sent(&mut out).is_empty(), "another user's job");
    }

    #[test]
    fn nothing_is_left_of_a_step_that_is_over() {
        let (mut r, mut out) = (Ranks::default(), vec![]);
        let sup = peer(1, 10, 101);
        r.supervisor(ConnId(1), sup, ALIVE, &mut out).unwrap();
        for rank in 0..100 {
            r.supervisor_message(&sup, (1, rank), ToClient::Start, &mut out);
        }
        assert_eq!(r.0.values().next().unwrap().down.len(), KEPT_RANKS);
        r.closed(ConnId(1), &sup);
        assert!(r.0.is_empty());
    }
}
