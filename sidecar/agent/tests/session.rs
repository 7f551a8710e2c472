//! The agent's program against a real munged and a small peer in the place of pliantd.
#![allow(clippy::unwrap_used, clippy::panic)]

use pliant_protocol::codec::{self, Decoder};
use pliant_protocol::local::{FromAgent as ToPeer, Role, ToAgent as FromPeer};
use pliant_protocol::peer::{FromAgent, ToAgent};
use pliant_protocol::secure::{self, Credentials, Handshake, Party, Proof, SecureError, Session};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

struct Munge(PathBuf);

impl Credentials for Munge {
    fn encode(&mut self, payload: &[u8], only_for: u32) -> Result<String, String> {
        pliant_munge::encode(Some(&self.0), payload, Some(only_for), 30).map_err(|e| e.to_string())
    }
    fn decode(&mut self, credential: &str) -> Result<Proof, String> {
        let d = pliant_munge::decode(Some(&self.0), credential).map_err(|e| e.to_string())?;
        Ok(Proof { uid: d.uid, payload: d.payload })
    }
}

/// munged, an agent and a listener, all of this test alone.
struct Stage {
    dir: tempfile::TempDir,
    munged: Child,
    agent: Option<Child>,
    listener: TcpListener,
}

fn uid() -> u32 {
    std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self").unwrap())
}

impl Stage {
    /// `None` where munged is not installed. `user`: whom the agent takes for pliantd.
    fn new(user: u32) -> Option<Stage> {
        let program = ["/usr/sbin/munged", "/usr/local/sbin/munged"].into_iter().find(|p| Path::new(p).exists())?;
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("key"), [9u8; 128]).unwrap();
        std::fs::set_permissions(at("key"), PermissionsExt::from_mode(0o600)).unwrap();
        let option = |name: &str, file: &str| format!("--{name}={}", at(file).display());
        let munged = Command::new(program)
            .args(["--foreground", "--force", "--num-threads=2"])
            .args([option("key-file", "key"), option("socket", "munge"), option("pid-file", "pid")])
            .args([option("log-file", "log"), option("seed-file", "seed")])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let config = format!(
            "[daemon]\nuser = \"{user}\"\n[agent]\nsocket = {:?}\ndaemon = \"{}\"\n[slurm]\nmunge_socket = {:?}\n",
            at("run/%n/agent.sock"),
            listener.local_addr().unwrap(),
            at("munge"),
        );
        std::fs::write(at("pliant.toml"), config).unwrap();
        let mut stage = Stage { dir, munged, agent: None, listener };
        let munge = stage.munge();
        wait_for("munged", || pliant_munge::encode(Some(&munge.0), b"", None, 1).is_ok());
        stage.agent = Some(stage.agent_command().spawn().unwrap());
        wait_for("the agent", || stage.socket().exists());
        Some(stage)
    }

    fn agent_command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pliant-agent"));
        // No slurm.conf: every Slurm command fails, and nothing may follow from that.
        command.env("SLURM_CONF", self.dir.path().join("none")).args(["--node", "n0", "--config"]);
        command.arg(self.dir.path().join("pliant.toml"));
        command
    }

    fn munge(&self) -> Munge {
        Munge(self.dir.path().join("munge"))
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("run/n0/agent.sock")
    }

    /// Takes the agent's next connection through the handshake.
    fn accept(&self, party: Party) -> Result<Peer, SecureError> {
        let (mut stream, _) = self.listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut handshake = Handshake::responder(party).unwrap();
        let mut decoder = Decoder::new(secure::MAX_SEALED);
        while !handshake.is_done() {
            let frame = next_frame(&mut stream, &mut decoder).ok_or(SecureError::State)?;
            stream.write_all(&handshake.step(&frame, &mut self.munge())?).unwrap();
        }
        Ok(Peer { stream, decoder, session: handshake.into_session()? })
    }

    fn stop_agent(&mut self) {
        let mut agent = self.agent.take().unwrap();
        let pid = rustix::process::Pid::from_child(&agent);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(agent.wait().unwrap().success());
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        for child in self.agent.iter_mut().chain([&mut self.munged]) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(15);
    while !done() {
        assert!(Instant::now() < until, "{what} did not come up");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn next_frame(stream: &mut TcpStream, decoder: &mut Decoder) -> Option<Vec<u8>> {
    let mut buffer = [0; 4096];
    loop {
        if let Some(frame) = decoder.next_frame().unwrap() {
            return Some(frame);
        }
        let length = stream.read(&mut buffer).unwrap();
        if length == 0 {
            return None;
        }
        decoder.feed(buffer.get(..length).unwrap());
    }
}

struct Peer {
    stream: TcpStream,
    decoder: Decoder,
    session: Session,
}

impl Peer {
    fn send(&mut self, message: &ToAgent) {
        let bytes = self.session.seal(&serde_json::to_vec(message).unwrap()).unwrap();
        self.stream.write_all(&bytes).unwrap();
    }

    /// The next message that is not about GPUs: what there is of them (nothing, where there is no NVML) comes by itself.
    fn next(&mut self) -> Option<FromAgent> {
        loop {
            let frame = next_frame(&mut self.stream, &mut self.decoder)?;
            let Some(message) = self.session.open(&frame).unwrap() else { continue };
            match codec::decode(&message).unwrap() {
                FromAgent::Gpus { .. } | FromAgent::Samples { .. } | FromAgent::Happened { .. } => {}
                other => return Some(other),
            }
        }
    }

    fn welcome(&mut self) {
        let Some(FromAgent::Hello { node, .. }) = self.next() else { panic!("no Hello") };
        assert_eq!(node.as_str(), "n0");
        self.send(&ToAgent::Welcome { version: pliant_protocol::VERSION, software: "test".into() });
    }
}

fn party(peer_uid: u32, purpose: &str) -> Party {
    Party { purpose: purpose.into(), me: "ctl".into(), peer: None, peer_uid }
}

#[test]
fn a_session_with_pings_and_a_quick_return_after_a_restart_of_pliantd() {
    let Some(mut stage) = Stage::new(uid()) else {
        return eprintln!("munged is not installed: skipped");
    };
    let mut peer = stage.accept(party(uid(), "agent-session")).unwrap();
    assert_eq!((peer.session.peer(), peer.session.peer_uid()), ("n0", uid()));
    peer.welcome();
    for _ in 0..3 {
        peer.send(&ToAgent::Ping);
        assert!(matches!(peer.next(), Some(FromAgent::Pong { .. })));
    }
    drop(peer);
    let closed = Instant::now();
    let mut peer = stage.accept(party(uid(), "agent-session")).unwrap();
    assert!(closed.elapsed() < Duration::from_secs(1), "{:?}", closed.elapsed());
    peer.welcome();
    stage.stop_agent();
    assert!(peer.next().is_none());
    assert!(!stage.socket().exists(), "removed at SIGTERM");
}

#[test]
fn neither_side_accepts_another_uid_or_purpose() {
    let Some(stage) = Stage::new(uid()) else {
        return eprintln!("munged is not installed: skipped");
    };
    // This pliantd accepts an agent of another uid only.
    let e = stage.accept(party(uid() + 1, "agent-session")).err().unwrap();
    assert!(matches!(e, SecureError::Uid { .. }), "{e}");
    let e = stage.accept(party(uid(), "other")).err().unwrap();
    assert!(matches!(e, SecureError::Mismatch { field: "purpose" }), "{e}");
    // And this agent makes credentials for another uid only, which cannot be decoded here.
    let Some(stage) = Stage::new(uid() + 1) else {
        return;
    };
    let e = stage.accept(party(uid(), "agent-session")).err().unwrap().to_string();
    assert!(e.contains("Unauthorized"), "{e}");
}

#[test]
fn a_process_outside_any_job_is_refused_and_a_second_agent_too() {
    let Some(stage) = Stage::new(uid()) else {
        return eprintln!("munged is not installed: skipped");
    };
    let refused = |bytes: &[u8]| {
        let mut socket = UnixStream::connect(stage.socket()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        socket.write_all(bytes).unwrap();
        let answer = codec::read_frame::<ToPeer>(&mut socket, 1 << 20).unwrap();
        assert!(codec::read_payload(&mut socket, 1 << 20).unwrap_or(None).is_none(), "closed after it");
        match answer {
            Some(ToPeer::Refused { reason }) => reason,
            other => panic!("{other:?}"),
        }
    };
    let hello = FromPeer::Hello {
        version: pliant_protocol::VERSION,
        software: String::new(),
        role: Role::Launcher { instance: "ab".into() },
    };
    assert!(refused(&codec::encode(&hello).unwrap()).contains("belongs to no Slurm job"));
    let lease = FromPeer::Lease { base: pliant_model::JobId(1), instance: "ab".into() };
    assert!(refused(&codec::encode(&lease).unwrap()).contains("must be a Hello"));
    assert!(refused(&codec::frame(b"rubbish").unwrap()).contains("not a valid message"));

    let mut socket = UnixStream::connect(stage.socket()).unwrap();
    socket.write_all(&u32::MAX.to_be_bytes()).unwrap();
    assert_eq!(socket.read(&mut [0; 1]).unwrap_or(0), 0, "a frame of 4 GiB");

    let second = stage.agent_command().output().unwrap();
    assert!(!second.status.success());
    assert!(String::from_utf8_lossy(&second.stderr).contains("another pliant-agent serves"));
}
