//! The TCP side: one task per agent, a Noise session that MUNGE credentials have bound to root on both ends.

use crate::core::Agent;
use crate::{Input, now};
use anyhow::{Context as _, bail, ensure};
use pliant_model::NodeName;
use pliant_protocol::codec::{self, Decoder};
use pliant_protocol::peer::{FromAgent, PURPOSE, ToAgent};
use pliant_protocol::secure::{self, Credentials, Handshake, Party, Proof, Session};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;

/// How long a handshake may take in all, munged included.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How often an agent is asked whether it lives.
const PING: Duration = Duration::from_secs(10);
/// An agent silent for so long is gone.
const SILENCE: Duration = Duration::from_secs(30);
/// Handshakes at a time; more wait.
const HANDSHAKES: usize = 64;
/// Agents at a time.
const MAX_AGENTS: usize = 20_000;

/// MUNGE through libmunge.
#[derive(Clone, Debug)]
pub struct Munge {
    /// munged's socket; empty: the default one.
    pub socket: PathBuf,
}

impl Credentials for Munge {
    fn encode(&mut self, payload: &[u8], only_for: u32) -> Result<String, String> {
        pliant_munge::encode(Some(&self.socket), payload, Some(only_for), secure::CREDENTIAL_TTL)
            .map_err(|e| e.to_string())
    }

    fn decode(&mut self, credential: &str) -> Result<Proof, String> {
        let d = pliant_munge::decode(Some(&self.socket), credential).map_err(|e| e.to_string())?;
        Ok(Proof { uid: d.uid, payload: d.payload })
    }
}

/// Accepts agents for ever.
pub async fn listen(listener: TcpListener, munge: Munge, me: String, inputs: mpsc::Sender<Input>) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES));
    let agents = Arc::new(Semaphore::new(MAX_AGENTS));
    let mut number = 0u64;
    loop {
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(e) => {
                tracing::warn!("accept: {e}");
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&agents).try_acquire_owned() else {
            tracing::warn!("{MAX_AGENTS} agents are connected: {from} refused");
            continue;
        };
        number += 1;
        let (connection, munge, me) = (number, munge.clone(), me.clone());
        let (handshakes, inputs) = (Arc::clone(&handshakes), inputs.clone());
        tokio::spawn(async move {
            let _place = place;
            if let Err(e) = serve(stream, connection, munge, me, &handshakes, &inputs).await {
                tracing::info!("agent at {from}: {e:#}");
            }
            let _ = inputs.send(Input::AgentGone { connection }).await;
        });
    }
}

async fn serve(
    mut stream: TcpStream,
    connection: u64,
    munge: Munge,
    me: String,
    handshakes: &Semaphore,
    inputs: &mpsc::Sender<Input>,
) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    let (session, mut decoder) = {
        // One limit for the wait and the handshake: an idle connection holds no place for long.
        let accepted = timeout(HANDSHAKE, async {
            let _turn = handshakes.acquire().await?;
            accept(&mut stream, munge, me).await
        });
        accepted.await.context("handshake took too long")??
    };
    let peer = NodeName(session.peer().to_owned());
    let (mut sealer, mut opener) = session.split();
    let (orders, mut outgoing) = mpsc::channel::<ToAgent>(256);
    let mut orders = Some(orders);
    let (mut reader, mut writer) = stream.into_split();
    let mut buffer = vec![0; 64 << 10];
    let mut ping = tokio::time::interval(PING);
    let mut heard = tokio::time::Instant::now();
    let mut known = false;
    loop {
        while let Some(frame) = decoder.next_frame()? {
            let Some(payload) = opener.open(&frame)? else {
                continue;
            };
            let message: FromAgent = codec::decode(&payload)?;
            if !known {
                let welcome = greet(&message, &peer);
                writer.write_all(&sealer.seal(&serde_json::to_vec(&welcome)?)?).await?;
                ensure!(matches!(welcome, ToAgent::Welcome { .. }), "refused: {welcome:?}");
                known = true;
                let agent = agent_of(message)?;
                let orders = orders.take().context("greeted twice")?;
                inputs.send(Input::Agent { connection, node: peer.clone(), agent, orders }).await?;
            } else if matches!(message, FromAgent::Hello { .. }) {
                bail!("a second hello");
            } else {
                inputs.send(Input::FromAgent { connection, message: Box::new(message) }).await?;
            }
        }
        tokio::select! {
            read = reader.read(&mut buffer) => {
                let n = read?;
                ensure!(n > 0, "closed");
                heard = tokio::time::Instant::now();
                decoder.feed(buffer.get(..n).unwrap_or_default());
            }
            Some(message) = outgoing.recv() => {
                let sealed = sealer.seal(&serde_json::to_vec(&message)?)?;
                timeout(SILENCE, writer.write_all(&sealed)).await.context("does not read")??;
            }
            _ = ping.tick(), if known => {
                ensure!(heard.elapsed() < SILENCE, "silent for {} s", SILENCE.as_secs());
                timeout(SILENCE, writer.write_all(&sealer.seal(&serde_json::to_vec(&ToAgent::Ping)?)?)).await??;
            }
        }
    }
}

/// The answer to the first message.
fn greet(first: &FromAgent, peer: &NodeName) -> ToAgent {
    let refuse = |reason: String| ToAgent::Refused { reason };
    match first {
        FromAgent::Hello { version, software, node, .. } if *version != pliant_protocol::VERSION => refuse(format!(
            "agent {software} on {node} speaks protocol {version}, pliantd {} speaks {}: install the same version",
            pliant_protocol::SOFTWARE,
            pliant_protocol::VERSION
        )),
        FromAgent::Hello { node, .. } if node != peer => {
            refuse(format!("the agent says that it is {node}, its credential says {peer}"))
        }
        FromAgent::Hello { .. } => {
            ToAgent::Welcome { version: pliant_protocol::VERSION, software: pliant_protocol::SOFTWARE.to_owned() }
        }
        _ => refuse("the first message must be hello".to_owned()),
    }
}

fn agent_of(hello: FromAgent) -> anyhow::Result<Agent> {
    let FromAgent::Hello { software, clock_ms, facts, .. } = hello else { bail!("no hello") };
    let skew_ms = i64::try_from(clock_ms)? - i64::try_from(now().wall_ms)?;
    Ok(Agent { software, skew_ms, facts })
}

async fn accept(stream: &mut TcpStream, munge: Munge, me: String) -> anyhow::Result<(Session, Decoder)> {
    let mut handshake = Handshake::responder(Party { purpose: PURPOSE.into(), me, peer: None, peer_uid: 0 })?;
    let mut decoder = Decoder::new(secure::MAX_SEALED);
    let mut buffer = vec![0; 16 << 10];
    loop {
        while let Some(frame) = decoder.next_frame()? {
            let mut munge = munge.clone();
            // libmunge blocks.
            let (next, out) = tokio::task::spawn_blocking(move || {
                let out = handshake.step(&frame, &mut munge);
                (handshake, out)
            })
            .await?;
            handshake = next;
            stream.write_all(&out?).await?;
            if handshake.is_done() {
                return Ok((handshake.into_session()?, decoder));
            }
        }
        let n = stream.read(&mut buffer).await?;
        ensure!(n > 0, "closed during the handshake");
        decoder.feed(buffer.get(..n).unwrap_or_default());
    }
}
