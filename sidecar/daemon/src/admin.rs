//! The Unix socket for `pliant`: one request and one answer a connection. The uid that counts is the peer's.

use crate::Input;
use anyhow::Context as _;
use pliant_protocol::admin::{Reply, Request};
use pliant_protocol::codec::{self, Decoder};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::timeout;

/// How long a connection may take in all.
const DEADLINE: Duration = Duration::from_secs(10);
/// Connections at a time; more are closed.
const CONNECTIONS: usize = 128;
/// The largest request in bytes.
const MAX_REQUEST: usize = 4096;

/// Binds the socket, replacing one that a dead pliantd has left (the lock on the state directory is held).
///
/// # Errors
/// When the directory or the socket cannot be made.
pub fn bind(path: &Path) -> anyhow::Result<UnixListener> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
    }
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(e).with_context(|| format!("replace {}", path.display()));
        }
        _ => {}
    }
    let listener = UnixListener::bind(path).with_context(|| format!("bind {}", path.display()))?;
    // Everybody may ask; what is answered depends on who.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
    Ok(listener)
}

/// Serves for ever.
pub async fn serve(listener: UnixListener, inputs: mpsc::Sender<Input>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(200)).await;
            continue;
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            continue;
        };
        let inputs = inputs.clone();
        tokio::spawn(async move {
            let _place = place;
            match timeout(DEADLINE, answer(stream, &inputs)).await {
                Ok(Ok(())) => {}
                Ok(Err(e)) => tracing::debug!("admin socket: {e:#}"),
                Err(_) => tracing::debug!("admin socket: too slow"),
            }
        });
    }
}

async fn answer(mut stream: UnixStream, inputs: &mpsc::Sender<Input>) -> anyhow::Result<()> {
    let uid = stream.peer_cred()?.uid();
    let mut decoder = Decoder::new(MAX_REQUEST);
    let mut buffer = [0; MAX_REQUEST];
    let payload = loop {
        if let Some(payload) = decoder.next_frame()? {
            break payload;
        }
        let n = stream.read(&mut buffer).await?;
        anyhow::ensure!(n > 0, "closed");
        decoder.feed(buffer.get(..n).unwrap_or_default());
    };
    let reply = match codec::decode::<Request>(&payload) {
        Ok(request) => {
            let (back, reply) = oneshot::channel();
            inputs.send(Input::Admin { uid, request, back }).await?;
            reply.await?
        }
        Err(e) => Reply::Error { text: format!("not understood by pliantd {}: {e}", pliant_protocol::SOFTWARE) },
    };
    Ok(stream.write_all(&codec::encode(&reply)?).await?)
}
