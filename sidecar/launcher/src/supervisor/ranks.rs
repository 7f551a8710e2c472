//! The ranks: started, listened to, signalled, reaped.

use super::{Supervisor, ToLauncher, processes};
use crate::environment;
use pliant_protocol::step::{self, FromSupervisor, Spawn};
use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
use rustix::process::{Pid, Signal, WaitOptions, kill_process_group, wait};
use std::collections::BTreeSet;
use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// One process that we started: a rank, or the node's torchrun.
pub struct Rank {
    pub generation: u32,
    pub rank: u32,
    /// Ranks that it stands for: 1, or all of the node with torchrun.
    pub covers: u32,
    pub pid: Pid,
    pub begun: Instant,
    pub ended: bool,
}

/// A port that is bound and not listened on: nobody else gets it, and whoever sets SO_REUSEADDR may take it over.
pub struct Port(#[expect(dead_code, reason = "held for its Drop")] OwnedFd);

/// Below the ports that Linux gives to outgoing connections, so that none of them takes it between our letting go and
/// the store's bind.
const FIRST_PORT: u16 = 20_000;
const PORTS: u16 = 12_000;

fn bound(port: u16) -> Option<(OwnedFd, u16)> {
    let fd = socket(AddressFamily::INET, SocketType::STREAM, None).ok()?;
    rustix::net::sockopt::set_socket_reuseaddr(&fd, true).ok()?;
    bind(&fd, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port)).ok()?;
    let name = SocketAddr::try_from(getsockname(&fd).ok()?).ok()?;
    Some((fd, name.port()))
}

/// A free port.
fn free_port() -> Option<(OwnedFd, u16)> {
    let word = crate::slurm::random_word().unwrap_or_default();
    let start = u16::from_str_radix(word.get(..4).unwrap_or("0"), 16).unwrap_or(0) % PORTS;
    let tries = (0..200u16).map(|i| FIRST_PORT + (start.wrapping_add(i * 61)) % PORTS);
    tries.into_iter().find_map(bound).or_else(|| bound(0))
}

impl Supervisor {
    pub(super) fn reserve(&mut self, generation: u32) {
        match free_port() {
            Some((fd, port)) => {
                self.ports.insert(generation, Port(fd));
                self.out.say(&FromSupervisor::Port { generation, port });
            }
            None => eprintln!("pliant supervise: no free TCP port on {}", self.node),
        }
    }

    pub(super) fn spawn(&mut self, spawn: &Spawn) {
        let Some(setup) = self.setup.clone() else { return };
        if !spawn.hold {
            self.ports.remove(&spawn.generation);
        }
        self.word.retain(|generation, _| generation.saturating_add(2) > spawn.generation);
        let locals: Vec<Option<u32>> = if setup.torchrun { vec![None] } else { (0..spawn.ranks).map(Some).collect() };
        for local in locals {
            let rank = spawn.first_rank + local.unwrap_or(0);
            let env = environment::process(&setup, &self.step_env, spawn, local, &self.gpus, &self.socket);
            let Some((program, args)) = setup.command.split_first() else { return };
            let child = Command::new(program)
                .args(args)
                .env_clear()
                .envs(env)
                .current_dir(&setup.directory)
                // Slurm's signals for the step are for us alone.
                .process_group(0)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn();
            let begun = Instant::now();
            match child {
                Ok(mut child) => {
                    let streams: [Option<Box<dyn Read + Send>>; 2] = [
                        child.stdout.take().map(|s| Box::new(s) as Box<dyn Read + Send>),
                        child.stderr.take().map(|s| Box::new(s) as Box<dyn Read + Send>),
                    ];
                    for (stream, from) in [1u8, 2].into_iter().zip(streams) {
                        if let Some(from) = from {
                            listen(from, stream, rank, self.out.clone(), self.readers.clone());
                        }
                    }
                    let covers = if local.is_none() { spawn.ranks } else { 1 };
                    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                        self.ranks.push(Rank { generation: spawn.generation, rank, covers, pid, begun, ended: false });
                    }
                }
                Err(e) => {
                    let error = format!("{program} in {}: {e}", setup.directory);
                    self.out.say(&FromSupervisor::NotStarted { generation: spawn.generation, rank, error });
                }
            }
        }
    }

    /// Collects processes that have ended, ranks and whatever they left behind.
    pub(super) fn reap(&mut self) {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            let Some(rank) = self.ranks.iter_mut().find(|r| r.pid == pid && !r.ended) else { continue };
            rank.ended = true;
            let (generation, number) = (rank.generation, rank.rank);
            // What it left in its own group would keep its GPU.
            let _ = kill_process_group(pid, Signal::KILL);
            if self.ranks.iter().all(|r| r.generation != generation || r.ended) {
                processes::kill_generation(generation);
            }
            self.settle();
            self.out.say(&FromSupervisor::Exited {
                generation,
                rank: number,
                code: status.exit_status(),
                signal: status.terminating_signal(),
            });
        }
        forget(&mut self.ranks);
    }

    /// Lets the last words of a rank go out before its end is told.
    fn settle(&self) {
        let alive = self.ranks.iter().filter(|r| !r.ended).count();
        let until = Instant::now() + Duration::from_millis(50);
        while self.readers.load(Ordering::Acquire) > alive * 2 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(super) fn signal(&self, generation: Option<u32>, signal: i32) {
        let Some(signal) = Signal::from_named_raw(signal) else { return };
        let meant = |r: &&Rank| !r.ended && generation.is_none_or(|g| r.generation == g);
        for rank in self.ranks.iter().filter(meant) {
            let _ = kill_process_group(rank.pid, signal);
        }
        if signal == Signal::KILL
            && let Some(generation) = generation
        {
            processes::kill_generation(generation);
        }
    }

    /// Ends every process below us, also those that left their session.
    pub(super) fn end_all(&mut self) {
        self.signal(None, Signal::KILL.as_raw());
        let until = Instant::now() + Duration::from_secs(3);
        while processes::kill_descendants() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
            self.reap();
        }
        self.reap();
        let until = Instant::now() + Duration::from_millis(500);
        while self.readers.load(Ordering::Acquire) > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Generations that are over and still known: the last word of a rank may come after its end.
const KNOWN: usize = 4;

/// Forgets ranks whose generation has long been over. One of which a process lives is known whole.
fn forget(ranks: &mut Vec<Rank>) {
    let alive: BTreeSet<u32> = ranks.iter().filter(|r| !r.ended).map(|r| r.generation).collect();
    let all: BTreeSet<u32> = ranks.iter().map(|r| r.generation).collect();
    let last: BTreeSet<u32> = all.into_iter().rev().take(KNOWN).collect();
    ranks.retain(|r| alive.contains(&r.generation) || last.contains(&r.generation));
}

/// Passes on what a rank prints.
fn listen(mut from: Box<dyn Read + Send>, stream: u8, rank: u32, out: ToLauncher, readers: Arc<AtomicUsize>) {
    readers.fetch_add(1, Ordering::AcqRel);
    std::thread::spawn(move || {
        let mut buffer = vec![0u8; 64 << 10];
        while let Ok(n) = from.read(&mut buffer) {
            if n == 0 {
                break;
            }
            if let Ok(frame) = step::encode_output(stream, rank, buffer.get(..n).unwrap_or_default()) {
                out.bytes(&frame);
            }
        }
        readers.fetch_sub(1, Ordering::AcqRel);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_known_after_its_end() {
        let rank = |generation: u32, rank: u32, ended: bool| {
            let pid = Pid::from_raw(1_000).unwrap();
            Rank { generation, rank, covers: 1, pid, begun: Instant::now(), ended }
        };
        // Generation 1 leaves while 9 waits on hold; 2 to 8 were growths that came to nothing.
        let mut ranks: Vec<Rank> = (2..9).map(|g| rank(g, 0, true)).collect();
        ranks.extend([rank(1, 0, true), rank(1, 1, false), rank(9, 0, false)]);
        forget(&mut ranks);
        let left: Vec<_> = ranks.iter().map(|r| (r.generation, r.rank)).collect();
        assert_eq!(left, [(6, 0), (7, 0), (8, 0), (1, 0), (1, 1), (9, 0)]);
        let mut two = vec![rank(1, 0, true), rank(2, 0, false)];
        forget(&mut two);
        assert_eq!(two.len(), 2, "a word of the old world may still come");
    }

    #[test]
    fn a_reserved_port_is_taken_and_can_be_taken_over() {
        let (held, port) = free_port().unwrap();
        assert!(bound(port).is_some(), "a socket with SO_REUSEADDR may bind it too");
        let plain = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        assert!(bind(&plain, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port)).is_err());
        drop(held);
        assert!(bind(&plain, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port)).is_ok());
    }
}
