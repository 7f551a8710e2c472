//! Outside commands, each with a time limit.

use rustix::process::{Pid, Signal, kill_process_group};
use std::ffi::OsStr;
use std::io::{self, Read, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// Most bytes that are kept of each stream.
const KEPT: u64 = 8 << 20;

/// How a command ended.
#[derive(Debug)]
pub struct Done {
    /// Code or signal.
    pub status: ExitStatus,
    /// What it printed.
    pub stdout: Vec<u8>,
    /// What it complained about.
    pub stderr: String,
}

impl Done {
    /// What it printed, as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// The first line of its complaint (else of its output), or how it ended.
    pub fn complaint(&self) -> String {
        let line = |text: &str| text.lines().map(str::trim).find(|l| !l.is_empty()).map(str::to_owned);
        line(&self.stderr).or_else(|| line(&self.text())).unwrap_or_else(|| self.status.to_string())
    }
}

/// Why a command gave nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// Not installed.
    #[error("{program}: not found")]
    Missing {
        /// What was called.
        program: String,
    },
    /// Could not be run.
    #[error("{program}: {source}")]
    Io {
        /// What was called.
        program: String,
        /// The system's words.
        source: io::Error,
    },
    /// Ended by us.
    #[error("{program}: no answer within {} s", limit.as_secs())]
    Slow {
        /// What was called.
        program: String,
        /// What it was given.
        limit: Duration,
    },
}

/// Runs a command to its end; it and its children are killed when the limit is over.
///
/// # Errors
/// When it cannot be run or takes too long; a code other than 0 is no error.
pub fn run(command: &mut Command, input: &[u8], limit: Duration) -> Result<Done, CommandError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let failed = |source| CommandError::Io { program: program.clone(), source };
    let ends = Instant::now() + limit;
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => CommandError::Missing { program: program.clone() },
        _ => failed(e),
    })?;
    if let Some(mut stdin) = child.stdin.take() {
        let input = input.to_owned();
        // A command that does not read its input shows that by its answer.
        std::thread::spawn(move || drop(stdin.write_all(&input)));
    }
    let stdout = child.stdout.take().map(collect);
    let stderr = child.stderr.take().map(collect);
    let status = loop {
        match child.try_wait().map_err(failed)? {
            Some(status) => break status,
            None if Instant::now() >= ends => {
                kill(&mut child);
                return Err(CommandError::Slow { program, limit });
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    // A child of the command may still hold the pipe: what has come until then counts.
    let rest = |stream: Option<Receiver<Vec<u8>>>| {
        let left = ends.saturating_duration_since(Instant::now()).max(Duration::from_millis(50));
        stream.and_then(|s| s.recv_timeout(left).ok()).unwrap_or_default()
    };
    let stdout = rest(stdout);
    Ok(Done { status, stdout, stderr: String::from_utf8_lossy(&rest(stderr)).into_owned() })
}

/// A command with the words of its answers in English.
pub fn command(program: impl AsRef<OsStr>, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).env("LC_ALL", "C");
    command
}

fn collect(stream: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (back, out) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = vec![];
        // A broken pipe leaves what came before.
        let _ = stream.take(KEPT).read_to_end(&mut bytes);
        let _ = back.send(bytes);
    });
    out
}

fn kill(child: &mut Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // Gone already is as good.
        let _ = kill_process_group(group, Signal::KILL);
    }
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    #[test]
    fn input_output_and_code() {
        let done = run(&mut command("sh", &["-c", "cat; echo oh >&2; exit 3"]), b"hello", LIMIT).unwrap();
        assert_eq!((done.text().as_str(), done.status.code()), ("hello", Some(3)));
        assert_eq!(done.complaint(), "oh");
    }

    #[test]
    fn missing_and_slow_are_told_apart() {
        let missing = run(&mut command("pliant-no-such-command", &[]), b"", LIMIT);
        assert!(matches!(missing, Err(CommandError::Missing { .. })));
        let started = Instant::now();
        let slow = run(&mut command("sh", &["-c", "sleep 60 & sleep 60"]), b"", Duration::from_millis(100));
        assert!(matches!(slow, Err(CommandError::Slow { .. })));
        assert!(started.elapsed() < LIMIT);
    }

    #[test]
    fn much_output_does_not_block() {
        let done = run(&mut command("sh", &["-c", "yes | head -c 1000000"]), b"", LIMIT).unwrap();
        assert_eq!(done.stdout.len(), 1_000_000);
    }
}
