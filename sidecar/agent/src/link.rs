//! The connection to pliantd: TCP, the secure handshake, messages, and connecting again.

use crate::shared::{Shared, clock_ms};
use anyhow::{Context as _, bail, ensure};
use pliant_model::NodeName;
use pliant_protocol::codec::{self, Decoder};
use pliant_protocol::peer::{FromAgent, PURPOSE, ToAgent};
use pliant_protocol::secure::{self, Credentials, Handshake, Opener, Party, Proof, Sealer, Session};
use pliant_protocol::{SOFTWARE, VERSION};
use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;

const CONNECT: Duration = Duration::from_secs(3);
/// From the first byte to pliantd's Welcome.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// pliantd pings every 10 s.
const SILENCE: Duration = Duration::from_secs(30);
const WRITE: Duration = Duration::from_secs(10);
const BACK_OFF: Duration = Duration::from_millis(200);
/// In the first minute without pliantd, so that its restart is noticed at once; 5 s afterwards.
const BACK_OFF_SOON: Duration = Duration::from_secs(1);
const BACK_OFF_MAX: Duration = Duration::from_secs(5);
/// The first connection waits so long for the facts about Slurm.
const FACTS: Duration = Duration::from_secs(2);
/// One repeated error is logged again, with its count, after this time.
const LOG_AGAIN: Duration = Duration::from_secs(300);

/// Where pliantd is, and as whom.
#[derive(Clone, Debug)]
pub struct Target {
    /// `host:port`.
    pub address: String,
    /// Account of pliantd: name or number.
    pub user: String,
    /// munged's socket; empty: libmunge's default.
    pub munge_socket: PathBuf,
    /// This node.
    pub node: NodeName,
}

#[derive(Clone)]
struct Munge(PathBuf);

impl Credentials for Munge {
    fn encode(&mut self, payload: &[u8], only_for: u32) -> Result<String, String> {
        let made = pliant_munge::encode(Some(&self.0), payload, Some(only_for), secure::CREDENTIAL_TTL);
        made.map_err(|e| e.to_string())
    }

    fn decode(&mut self, credential: &str) -> Result<Proof, String> {
        let decoded = pliant_munge::decode(Some(&self.0), credential).map_err(|e| e.to_string())?;
        Ok(Proof { uid: decoded.uid, payload: decoded.payload })
    }
}

/// What `pliant doctor` shows of this node, as last asked for.
#[derive(Debug, Default)]
struct Facts {
    told: RefCell<Vec<(String, String)>>,
    asked: Cell<Option<Duration>>,
    busy: Cell<bool>,
}

/// Keeps a session with pliantd, for ever.
pub async fn run(shared: Rc<Shared>, target: Target) {
    let facts = Rc::new(Facts::default());
    let first = refresh(Rc::clone(&shared), Rc::clone(&facts));
    let _ = timeout(FACTS, tokio::task::spawn_local(first)).await;
    let mut errors = Repeated::default();
    let mut lost_at = Instant::now();
    let mut pause = BACK_OFF;
    loop {
        let up = Cell::new(false);
        let told = facts.told.borrow().clone();
        let end = session(&shared, &target, told, &up).await;
        if up.get() {
            shared.with(|core, now| core.daemon(false, now));
            shared.outbox.clear();
            errors = Repeated::default();
            lost_at = Instant::now();
            pause = BACK_OFF;
        }
        if let Err(e) = end {
            errors.warn(&format!("no session with pliantd at {}: {e:#}", target.address), Instant::now());
        }
        tokio::task::spawn_local(refresh(Rc::clone(&shared), Rc::clone(&facts)));
        tokio::time::sleep(jitter(pause)).await;
        let max = if lost_at.elapsed() < Duration::from_secs(60) { BACK_OFF_SOON } else { BACK_OFF_MAX };
        pause = (pause * 2).min(max);
    }
}

/// Asks Slurm for the facts anew, at most once a minute; one at a time.
async fn refresh(shared: Rc<Shared>, facts: Rc<Facts>) {
    let recent = |at| shared.now().saturating_sub(at) < Duration::from_secs(60);
    if facts.asked.get().is_some_and(recent) || facts.busy.replace(true) {
        return;
    }
    let new = shared.slurm.facts().await;
    *facts.told.borrow_mut() = new;
    facts.asked.set(Some(shared.now()));
    facts.busy.set(false);
}

/// Three quarters to five quarters, so that the agents of a cluster do not come back in step.
fn jitter(pause: Duration) -> Duration {
    use std::hash::{BuildHasher as _, RandomState};
    let random = RandomState::new().hash_one(0) % 512;
    pause.mul_f64(0.75 + f64::from(u16::try_from(random).unwrap_or(0)) / 1024.0)
}

async fn session(
    shared: &Rc<Shared>,
    target: &Target,
    facts: Vec<(String, String)>,
    up: &Cell<bool>,
) -> anyhow::Result<()> {
    let uid = uid_of(shared, &target.user).await?;
    let connect = timeout(CONNECT, TcpStream::connect(&target.address));
    let mut stream = connect.await.context("no connection in time")??;
    stream.set_nodelay(true)?;
    let party = Party { purpose: PURPOSE.into(), me: target.node.0.clone(), peer: None, peer_uid: uid };
    let munge = Munge(target.munge_socket.clone());
    let shaken = timeout(HANDSHAKE, handshake(&mut stream, party, munge));
    let (session, decoder) = shaken.await.context("the handshake took too long")??;
    let host = session.peer().to_owned();
    let (sealer, opener) = session.split();
    let (from, to) = stream.into_split();
    let mut reader = Reader { from, decoder, opener };
    let mut writer = Writer { to, sealer };
    let software = greet(&mut reader, &mut writer, &target.node, facts).await?;
    tracing::info!("connected to pliantd {software} on {host}, at {}", target.address);
    up.set(true);
    shared.with(|core, now| core.daemon(true, now));
    tokio::select! {
        end = receive(shared, reader) => end,
        end = send(shared, writer) => end,
    }
}

/// Hello and Welcome; gives pliantd's software version.
async fn greet(
    reader: &mut Reader,
    writer: &mut Writer,
    node: &NodeName,
    facts: Vec<(String, String)>,
) -> anyhow::Result<String> {
    let hello = FromAgent::Hello {
        version: VERSION,
        software: SOFTWARE.into(),
        node: node.clone(),
        clock_ms: clock_ms(),
        facts,
    };
    writer.write(&hello).await?;
    match timeout(HANDSHAKE, reader.next()).await.context("no Welcome in time")?? {
        ToAgent::Welcome { version: VERSION, software } => Ok(software),
        ToAgent::Welcome { version, .. } => {
            bail!("pliantd speaks version {version} of the protocol, this agent version {VERSION}")
        }
        ToAgent::Refused { reason } => bail!("pliantd refused this agent: {reason}"),
        other => bail!("expected a Welcome, got {other:?}"),
    }
}

async fn handshake(stream: &mut TcpStream, party: Party, munge: Munge) -> anyhow::Result<(Session, Decoder)> {
    let mut handshake = Handshake::initiator(party)?;
    stream.write_all(&handshake.start()?).await?;
    let mut decoder = Decoder::new(secure::MAX_SEALED);
    let mut buffer = [0; 4096];
    loop {
        while let Some(frame) = decoder.next_frame()? {
            let mut munge = munge.clone();
            let step = tokio::task::spawn_blocking(move || {
                let out = handshake.step(&frame, &mut munge);
                (handshake, out)
            });
            let (next, out) = step.await?;
            handshake = next;
            stream.write_all(&out?).await?;
            if handshake.is_done() {
                return Ok((handshake.into_session()?, decoder));
            }
        }
        let length = stream.read(&mut buffer).await?;
        ensure!(length > 0, "pliantd closed the connection during the handshake (its log has the reason)");
        decoder.feed(buffer.get(..length).unwrap_or_default());
    }
}

struct Reader {
    from: OwnedReadHalf,
    decoder: Decoder,
    opener: Opener,
}

impl Reader {
    async fn next(&mut self) -> anyhow::Result<ToAgent> {
        let mut buffer = vec![0; 16 << 10];
        loop {
            while let Some(frame) = self.decoder.next_frame()? {
                if let Some(message) = self.opener.open(&frame)? {
                    return Ok(codec::decode(&message)?);
                }
            }
            let length = timeout(SILENCE, self.from.read(&mut buffer)).await;
            let length = length.with_context(|| format!("pliantd was silent for {} s", SILENCE.as_secs()))??;
            ensure!(length > 0, "pliantd closed the connection");
            self.decoder.feed(buffer.get(..length).unwrap_or_default());
        }
    }
}

struct Writer {
    to: OwnedWriteHalf,
    sealer: Sealer,
}

impl Writer {
    async fn write(&mut self, message: &FromAgent) -> anyhow::Result<()> {
        let bytes = self.sealer.seal(&serde_json::to_vec(message)?)?;
        timeout(WRITE, self.to.write_all(&bytes)).await.context("pliantd does not read")??;
        Ok(())
    }
}

async fn receive(shared: &Rc<Shared>, mut reader: Reader) -> anyhow::Result<()> {
    loop {
        match reader.next().await? {
            ToAgent::Ping => shared.outbox.push(FromAgent::Pong { clock_ms: clock_ms() }),
            ToAgent::Refused { reason } => bail!("pliantd refused this agent: {reason}"),
            message => shared.with(|core, now| core.daemon_message(message, now)),
        }
    }
}

async fn send(shared: &Rc<Shared>, mut writer: Writer) -> anyhow::Result<()> {
    loop {
        while let Some(message) = shared.outbox.pop() {
            writer.write(&message).await?;
        }
        shared.outbox.filled.notified().await;
    }
}

/// The uid of an account, through the system's name service.
async fn uid_of(shared: &Shared, user: &str) -> anyhow::Result<u32> {
    if let Ok(uid) = user.parse() {
        return Ok(uid);
    }
    let answer = shared.slurm.run("id", &["-u", "--", user]).await.map_err(anyhow::Error::msg)?;
    ensure!(answer.ok, "[daemon] user = {user:?}: no such account on this node");
    Ok(answer.out.trim().parse()?)
}

/// Logs an error once; the same again only counts, until some time has passed or another one comes.
#[derive(Debug, Default)]
struct Repeated {
    last: Option<(String, Instant)>,
    count: u32,
}

impl Repeated {
    fn warn(&mut self, text: &str, now: Instant) {
        match &self.last {
            Some((last, at)) if last == text && now.duration_since(*at) < LOG_AGAIN => self.count += 1,
            _ => {
                if self.count > 0 {
                    tracing::warn!("the last error {} more times", self.count);
                }
                tracing::warn!("{text}");
                self.last = Some((text.to_owned(), now));
                self.count = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_stays_near() {
        for _ in 0..100 {
            let pause = jitter(Duration::from_secs(4));
            assert!((3.0..=5.0).contains(&pause.as_secs_f64()), "{pause:?}");
        }
    }

    #[test]
    fn the_same_error_is_counted() {
        let (mut errors, now) = (Repeated::default(), Instant::now());
        errors.warn("a", now);
        errors.warn("a", now);
        errors.warn("a", now);
        assert_eq!(errors.count, 2);
        errors.warn("b", now);
        assert_eq!(errors.count, 0);
    }
}
