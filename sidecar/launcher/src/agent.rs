//! The connection to the agent of this node: made anew for ever, with a growing pause.

use pliant_protocol::codec::{self, MAX_FRAME};
use pliant_protocol::local::{FromAgent, Role, ToAgent};
use pliant_protocol::{SOFTWARE, VERSION};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// What happens on the connection.
#[derive(Debug)]
pub enum LinkEvent {
    /// The agent knows us.
    Up,
    /// No connection, and why.
    Down(String),
    /// A frame after Welcome.
    Frame(FromAgent),
}

/// The connection. Writing never waits longer than two seconds; what cannot be written is lost, and told anew by the
/// owner after the next [`LinkEvent::Up`].
#[derive(Clone, Debug)]
pub struct Link {
    stream: Arc<Mutex<Option<UnixStream>>>,
}

const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LAST_PAUSE: Duration = Duration::from_secs(3);
const WRITE: Duration = Duration::from_secs(2);
const WELCOME: Duration = Duration::from_secs(5);

impl Link {
    /// Starts connecting as `role`; `tell` is called from the link's own thread until it answers `false`.
    pub fn start(path: PathBuf, role: Role, tell: impl Fn(LinkEvent) -> bool + Send + 'static) -> Link {
        let link = Link { stream: Arc::default() };
        let mine = link.clone();
        std::thread::spawn(move || {
            let mut pause = FIRST_PAUSE;
            loop {
                let why = match mine.serve(&path, &role, &tell) {
                    Ok(()) => {
                        pause = FIRST_PAUSE;
                        "the connection was closed".to_owned()
                    }
                    Err(why) => why,
                };
                *mine.stream.lock().unwrap_or_else(PoisonError::into_inner) = None;
                if !tell(LinkEvent::Down(why)) {
                    return;
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(LAST_PAUSE);
            }
        });
        link
    }

    fn serve(&self, path: &PathBuf, role: &Role, tell: &impl Fn(LinkEvent) -> bool) -> Result<(), String> {
        let text = |e: &dyn std::fmt::Display| e.to_string();
        let mut stream = UnixStream::connect(path).map_err(|e| text(&e))?;
        stream.set_write_timeout(Some(WRITE)).map_err(|e| text(&e))?;
        stream.set_read_timeout(Some(WELCOME)).map_err(|e| text(&e))?;
        let hello = ToAgent::Hello { version: VERSION, software: SOFTWARE.to_owned(), role: role.clone() };
        codec::write_frame(&mut stream, &hello).map_err(|e| text(&e))?;
        match codec::read_frame(&mut stream, MAX_FRAME).map_err(|e| text(&e))? {
            Some(FromAgent::Welcome { version: VERSION, .. }) => {}
            Some(FromAgent::Welcome { version, node, .. }) => {
                return Err(format!("the agent of {node} speaks version {version}, this pliant speaks {VERSION}"));
            }
            Some(FromAgent::Refused { reason }) => return Err(reason),
            _ => return Err("the agent did not welcome us".to_owned()),
        }
        stream.set_read_timeout(None).map_err(|e| text(&e))?;
        let writer = stream.try_clone().map_err(|e| text(&e))?;
        *self.stream.lock().unwrap_or_else(PoisonError::into_inner) = Some(writer);
        if !tell(LinkEvent::Up) {
            return Ok(());
        }
        loop {
            match codec::read_payload(&mut stream, MAX_FRAME) {
                Ok(Some(payload)) => {
                    // A message of a later version is left alone.
                    if let Ok(frame) = codec::decode(&payload)
                        && !tell(LinkEvent::Frame(frame))
                    {
                        return Ok(());
                    }
                }
                Ok(None) | Err(_) => return Ok(()),
            }
        }
    }

    /// Sends a frame now; `false`: there is no connection.
    pub fn send(&self, message: &ToAgent) -> bool {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(to) = stream.as_mut() else { return false };
        if codec::write_frame(to, message).is_ok() {
            return true;
        }
        // Half a frame may be out: the stream is of no use any more.
        let _ = to.shutdown(std::net::Shutdown::Both);
        *stream = None;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pliant_model::{JobId, NodeName};
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc;

    #[test]
    fn it_connects_again_after_the_agent_went() {
        let dir = std::env::temp_dir().join(format!("pliant-link-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("agent.sock");
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let (tx, rx) = mpsc::channel();
        let link = Link::start(path, Role::Supervisor, move |e| tx.send(e).is_ok());
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().unwrap();
            let hello: ToAgent = codec::read_frame(&mut stream, MAX_FRAME).unwrap().unwrap();
            assert!(matches!(hello, ToAgent::Hello { role: Role::Supervisor, .. }));
            let welcome = FromAgent::Welcome { version: VERSION, job: JobId(1), node: NodeName::from("n1") };
            codec::write_frame(&mut stream, &welcome).unwrap();
            assert!(matches!(rx.recv().unwrap(), LinkEvent::Up));
            assert!(link.send(&ToAgent::Holds { tokens: vec![] }));
            let got: ToAgent = codec::read_frame(&mut stream, MAX_FRAME).unwrap().unwrap();
            assert_eq!(got, ToAgent::Holds { tokens: vec![] });
            drop(stream);
            assert!(matches!(rx.recv().unwrap(), LinkEvent::Down(_)));
        }
        std::fs::remove_dir_all(dir).unwrap();
    }
}
