//! The srun children: one step with one supervisor for each base node and each slice.

use crate::core::{Event, UnitId};
use crate::environment;
use crate::output::Output;
use crate::slurm;
use pliant_model::{GpuCount, JobId, NodeName};
use pliant_protocol::VERSION;
use pliant_protocol::codec;
use pliant_protocol::step::{self, Frame, FromSupervisor, Setup, ToSupervisor};
use rustix::process::{Pid, Signal, kill_process_group};
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Stdio};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};

/// The largest frame of a step: the environment of a batch script fits.
pub const MAX_STEP_FRAME: usize = 16 << 20;

/// Comes first on a supervisor's stdout. What a site's TaskProlog prints before is no frame.
pub const MAGIC: &[u8] = b"\0pliant-step\n";

/// Words of srun and slurmstepd that mean nothing to the user of `pliant run`.
const NOISE: [&str; 8] = [
    "lacks support for cpu binding",
    "CANCELLED AT",
    "Job step aborted",
    "forcing job termination",
    "error: Timed out waiting for job step to complete",
    "Force Terminated",
    "srun: got SIGCONT",
    "srun: forwarding",
];

/// The ranks' output on its way out.
pub type Out = Arc<Mutex<Output<io::Stdout, io::Stderr>>>;

/// All steps of this launcher.
#[derive(Debug)]
pub struct Steps {
    base: JobId,
    setup: Setup,
    program: PathBuf,
    out: Out,
    tell: Sender<Event>,
    running: Arc<Mutex<BTreeMap<UnitId, Running>>>,
}

#[derive(Debug)]
struct Running {
    frames: Sender<Vec<u8>>,
    pid: Option<Pid>,
}

impl Steps {
    /// No step yet. `setup` is what every supervisor is told; its slice is set for each.
    pub fn new(base: JobId, setup: Setup, program: PathBuf, out: Out, tell: Sender<Event>) -> Self {
        Steps { base, setup, program, out, tell, running: Arc::default() }
    }

    /// Starts a step. Whatever becomes of it is told as an event; the last is always `UnitGone`.
    pub fn start(&self, unit: UnitId, slice: Option<JobId>, node: NodeName, gpus: GpuCount) {
        let (frames, rx) = mpsc::channel::<Vec<u8>>();
        self.running.lock().unwrap_or_else(PoisonError::into_inner).insert(unit, Running { frames, pid: None });
        let setup = Setup { slice, ..self.setup.clone() };
        let job = slice.unwrap_or(self.base);
        let (program, out, tell, running) =
            (self.program.clone(), self.out.clone(), self.tell.clone(), self.running.clone());
        std::thread::spawn(move || {
            let why = match spawn(job, &node, gpus, &program) {
                Ok(child) => {
                    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
                    if let Some(r) = running.lock().unwrap_or_else(PoisonError::into_inner).get_mut(&unit) {
                        r.pid = pid;
                    }
                    let hello = ToSupervisor::Hello(Box::new(setup));
                    serve(child, unit, &node, &hello, rx, &out, &tell)
                }
                Err(e) => format!("srun: {e}"),
            };
            running.lock().unwrap_or_else(PoisonError::into_inner).remove(&unit);
            let _ = tell.send(Event::UnitGone { unit, why });
        });
    }

    /// Sends a message; to a step that is gone it is nothing.
    pub fn send(&self, unit: UnitId, message: &ToSupervisor) {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(r), Ok(frame)) = (running.get(&unit), codec::encode(message)) {
            let _ = r.frames.send(frame);
        }
    }

    /// Ends the srun of a step; its supervisor then ends by itself.
    pub fn kill(&self, unit: UnitId) {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pid) = running.get(&unit).and_then(|r| r.pid) {
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }
}

fn spawn(job: JobId, node: &NodeName, gpus: GpuCount, program: &PathBuf) -> io::Result<Child> {
    let gres = if gpus == 0 { "--gres=none".to_owned() } else { format!("--gres=gpu:{gpus}") };
    // No -c: it would mean --exact. Without it the step has all CPUs of its job on that node.
    slurm::command("srun")
        .arg(format!("--jobid={job}"))
        .args(["-N1", "-n1"])
        .arg(format!("--nodelist={node}"))
        .args(["--overlap", "--no-kill", "--kill-on-bad-exit=0", "--unbuffered", "--cpu-bind=none", "--mpi=none"])
        .args([gres.as_str(), "--export=ALL", "--job-name=pliant"])
        .arg(program)
        .arg("supervise")
        .stdin(Stdio::piped())
        .spawn()
}

/// Serves one step until its srun has ended; says how.
fn serve(
    mut child: Child,
    unit: UnitId,
    node: &NodeName,
    hello: &ToSupervisor,
    frames: mpsc::Receiver<Vec<u8>>,
    out: &Out,
    tell: &Sender<Event>,
) -> String {
    if let (Some(mut stdin), Ok(hello)) = (child.stdin.take(), codec::encode(hello)) {
        std::thread::spawn(move || {
            if stdin.write_all(&hello).is_err() {
                return;
            }
            frames.into_iter().all(|f| stdin.write_all(&f).and_then(|()| stdin.flush()).is_ok());
        });
    }
    let (last, said) = mpsc::channel();
    if let Some(stderr) = child.stderr.take() {
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if !NOISE.iter().any(|n| line.contains(n)) {
                    eprintln!("{line}");
                    let _ = last.send(line);
                }
            }
        });
    }
    let stopped = child.stdout.take().map(|stdout| read(stdout, unit, node, out, tell));
    let status = child.wait().map(|s| s.to_string()).unwrap_or_else(|e| e.to_string());
    // srun's words are on their way; they explain more than its code.
    let mut why = said.recv_timeout(std::time::Duration::from_millis(100)).ok();
    while let Ok(line) = said.try_recv() {
        why = Some(line);
    }
    why.or(stopped.flatten()).unwrap_or(format!("srun ended ({status})"))
}

/// Reads a supervisor's frames until the end; says what is wrong with them.
fn read(stdout: ChildStdout, unit: UnitId, node: &NodeName, out: &Out, tell: &Sender<Event>) -> Option<String> {
    let mut from = BufReader::with_capacity(64 << 10, stdout);
    match skip_to_magic(&mut from) {
        Ok(before) if before.is_empty() => {}
        Ok(before) => {
            let _ = out.lock().unwrap_or_else(PoisonError::into_inner).write(2, 0, &before);
        }
        Err(_) => return Some("the supervisor did not start".into()),
    }
    loop {
        let payload = match codec::read_payload(&mut from, MAX_STEP_FRAME) {
            Ok(Some(payload)) => payload,
            Ok(None) => return None,
            Err(e) => return Some(e.to_string()),
        };
        let event = match step::decode::<FromSupervisor>(&payload) {
            Ok(Frame::Output { stream, rank, bytes }) => {
                // Our own stdout is gone: the training goes on without words.
                let _ = out.lock().unwrap_or_else(PoisonError::into_inner).write(stream, rank, &bytes);
                continue;
            }
            Ok(Frame::Message(FromSupervisor::Hello { version, .. })) if version != VERSION => {
                return Some(format!("the pliant on {node} speaks version {version}, this one speaks {VERSION}"));
            }
            Ok(Frame::Message(FromSupervisor::Hello { gpus, agent, .. })) => {
                let addr = slurm::node_addr(node).unwrap_or_else(|_| node.to_string());
                Event::UnitUp { unit, addr, gpus, agent }
            }
            Ok(Frame::Message(message)) => Event::UnitSays { unit, message },
            Err(e) => return Some(e.to_string()),
        };
        if tell.send(event).is_err() {
            return None;
        }
    }
}

/// What comes before the magic; an error: the stream ended without it.
fn skip_to_magic(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut before = vec![];
    let mut byte = [0u8];
    while !before.ends_with(MAGIC) {
        from.read_exact(&mut byte)?;
        before.extend_from_slice(&byte);
        if before.len() > 1 << 20 {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
    }
    before.truncate(before.len() - MAGIC.len());
    Ok(before)
}

/// The environment that supervisors are told.
pub fn environment_for_ranks() -> Vec<(String, String)> {
    let all = std::env::vars_os().filter_map(|(n, v)| Some((n.into_string().ok()?, v.into_string().ok()?)));
    environment::for_ranks(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_task_prolog_prints_is_no_frame() {
        let mut text = b"motd\n".to_vec();
        text.extend_from_slice(MAGIC);
        text.extend_from_slice(b"rest");
        let mut from = text.as_slice();
        assert_eq!(skip_to_magic(&mut from).unwrap(), b"motd\n");
        assert_eq!(from, b"rest");
        assert!(skip_to_magic(&mut b"nothing".as_slice()).is_err());
    }
}
