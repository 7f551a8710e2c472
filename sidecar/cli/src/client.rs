//! One question to pliantd over its Unix socket, with one deadline for all of it.

use pliant_protocol::admin::{Reply, Request};
use pliant_protocol::codec::{self, CodecError};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

/// Time for connecting, asking and answering.
const DEADLINE: Duration = Duration::from_secs(5);

/// The largest answer, in bytes: some 50,000 jobs. pliantd is trusted, the limit only keeps a wrong peer out.
const MAX_REPLY: usize = 128 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// Nobody listens.
    #[error(
        "no pliantd at {} ({source}): is the service running? It runs on the controller's host (systemctl status \
         pliantd there); its socket is daemon.socket of the file that --config or PLIANT_CONFIG names",
        path.display()
    )]
    Absent {
        /// The socket.
        path: PathBuf,
        /// The system's words.
        source: io::Error,
    },
    /// Somebody listens and says nothing.
    #[error("pliantd at {} has not answered within {} s: see its log (journalctl -u pliantd)", path.display(), DEADLINE.as_secs())]
    Silent {
        /// The socket.
        path: PathBuf,
    },
    /// It hung up.
    #[error("pliantd at {} closed the connection without an answer: it may be busy, try again", path.display())]
    Closed {
        /// The socket.
        path: PathBuf,
    },
    /// The answer is none.
    #[error("the answer of pliantd at {} is not understood ({source}): is pliant {} of the same version?", path.display(), pliant_protocol::SOFTWARE)]
    Garbled {
        /// The socket.
        path: PathBuf,
        /// What is wrong with it.
        source: CodecError,
    },
}

/// Asks pliantd.
///
/// # Errors
/// [`AskError`], after 5 s at the latest.
pub fn ask(socket: &Path, request: &Request) -> Result<Reply, AskError> {
    let (back, answer) = mpsc::channel();
    let (path, request) = (socket.to_owned(), request.clone());
    // A thread, because neither connect() nor a peer that sends byte by byte is bounded by the socket's own timeouts.
    std::thread::spawn(move || {
        // Nobody listens any more once the deadline has passed.
        let _ = back.send(exchange(&path, &request));
    });
    answer.recv_timeout(DEADLINE).unwrap_or_else(|_| Err(AskError::Silent { path: socket.to_owned() }))
}

fn exchange(path: &Path, request: &Request) -> Result<Reply, AskError> {
    let closed = || AskError::Closed { path: path.to_owned() };
    let mut stream = UnixStream::connect(path).map_err(|source| AskError::Absent { path: path.to_owned(), source })?;
    codec::write_frame(&mut stream, request).map_err(|_| closed())?;
    match codec::read_frame(&mut stream, MAX_REPLY) {
        Ok(Some(reply)) => Ok(reply),
        Ok(None) | Err(CodecError::Io(_)) => Err(closed()),
        Err(source) => Err(AskError::Garbled { path: path.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn served(serve: impl FnOnce(UnixStream) + Send + 'static) -> Result<Reply, AskError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || serve(listener.accept().unwrap().0));
        let reply = ask(&path, &Request::Jobs);
        server.join().unwrap();
        reply
    }

    #[test]
    fn an_answer_comes_back() {
        let reply = served(|mut stream| {
            let asked: Request = codec::read_frame(&mut stream, 4096).unwrap().unwrap();
            assert_eq!(asked, Request::Jobs);
            codec::write_frame(&mut stream, &Reply::Jobs { jobs: vec![] }).unwrap();
        });
        assert_eq!(reply.unwrap(), Reply::Jobs { jobs: vec![] });
    }

    #[test]
    fn absence_hanging_up_and_nonsense_are_told_apart() {
        let absent = ask(Path::new("/nonexistent/s"), &Request::Jobs).unwrap_err().to_string();
        assert!(
            absent.starts_with("no pliantd at /nonexistent/s (No such file or directory (os error 2)): is the service"),
            "{absent}"
        );
        assert!(matches!(served(drop), Err(AskError::Closed { .. })));
        let garbled = served(|mut stream| {
            let _ = codec::read_frame::<Request>(&mut stream, 4096);
            codec::write_frame(&mut stream, &7).unwrap();
        });
        assert!(matches!(garbled, Err(AskError::Garbled { .. })), "{garbled:?}");
    }

    #[test]
    fn silence_ends() {
        let started = std::time::Instant::now();
        let reply = served(|stream| {
            std::thread::sleep(DEADLINE + Duration::from_millis(300));
            drop(stream);
        });
        assert!(matches!(reply, Err(AskError::Silent { .. })), "{reply:?}");
        assert!(started.elapsed() < DEADLINE + Duration::from_secs(3));
    }
}
