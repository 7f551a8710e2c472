//! Nobody sees, moves or ends another user's job.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests fail the test")]

use pliant_lab::Lab;
use pliant_tests::{Options, Training};
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(60);

fn refused(lab: &Lab, user: &str, argv: &[&str]) -> String {
    format!("{:#}", lab.run(user, argv).expect_err("it was allowed"))
}

#[test]
fn another_users_job_is_not_there() {
    let lab = Lab::builder().nodes(2).gpus(8).poll_interval(1).accounting(true).start().unwrap();
    let job = Training::submit(&lab, &Options::default()).unwrap();
    job.wait_world(&lab, 8, WAIT).unwrap();
    let id = job.job.to_string();
    let slice = job.slices(&lab).unwrap()[0].id.to_string();
    let (owner, other) = (lab.user(0), lab.user(1));
    // Asks about it: the same answer as for a job that is not there.
    let theirs = refused(&lab, other, &["pliant", "explain", &id]);
    let missing = refused(&lab, other, &["pliant", "explain", "99999"]);
    let strip = |t: &str, n: &str| t.replace(&format!("job {n}:"), "job N:").replace(&format!("\"{n}\""), "");
    assert_eq!(strip(&theirs, &id), strip(&missing, "99999"));
    refused(&lab, other, &["pliant", "explain", &slice]);
    assert!(!lab.run(other, &["pliant", "jobs", "--json"]).unwrap().contains(&format!("\"base\": {id}")));
    lab.run(owner, &["pliant", "explain", &id]).unwrap();
    // Cancels it and its slice: Slurm refuses, and both still run below.
    let _ = lab.run(other, &["scancel", &id, &slice]);
    // Makes a slice of it look like an orphan: a job of one's own with the mark of that base changes nothing.
    let mark = format!("--comment=pliant base={id} instance=x token=y");
    let name = format!("--job-name=pliant-{id}");
    lab.sbatch(other, &["--gpus=1", &mark, &name, "--wrap", "sleep 60"]).unwrap();
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(lab.job_state(job.job).unwrap(), "RUNNING");
    let slices = job.slices(&lab).unwrap();
    assert!(slices.iter().any(|s| s.id.to_string() == slice), "{slices:?}");
}

/// Reports for a job from outside it, and from inside another one, are refused by the agent.
#[test]
fn the_agent_serves_only_processes_of_the_job() {
    let lab = Lab::builder().nodes(1).gpus(4).poll_interval(1).start().unwrap();
    let job = Training::submit(&lab, &Options::default().elastic("4").sbatch(&["--gpus=1"])).unwrap();
    job.wait_world(&lab, 4, WAIT).unwrap();
    // We are root and in no job at all.
    let answer =
        hello(&lab.agent_socket("n0"), r#"{"type":"hello","version":1,"role":"client","rank":0,"generation":1}"#);
    assert!(answer.contains("refused"), "{answer}");
    let answer = hello(&lab.agent_socket("n0"), r#"{"type":"hello","version":99,"role":"supervisor"}"#);
    assert!(answer.contains("refused"), "{answer}");
    for bad in ["{", "[]", r#"{"type":"order"}"#, ""] {
        let answer = hello(&lab.agent_socket("n0"), bad);
        assert!(answer.is_empty() || answer.contains("refused"), "{bad}: {answer}");
    }
    // From another user's own job: a status for this base is not believed.
    let program = format!(
        "import json,socket,struct,time\ndef send(m):\n b=json.dumps(m).encode(); s.sendall(struct.pack('>I',len(b))+b)\n\
         def dial():\n s=socket.socket(socket.AF_UNIX); s.connect('{}'); return s\n\
         s=dial(); send(dict(type='hello',version=99,role='supervisor')); print(s.recv(4096), flush=True)\ns=dial()\n\
         send(dict(type='hello',version=1,role='launcher',instance='evil'))\n\
         send(dict(type='holds',tokens=['x']))\n\
         send(dict(type='lease',base={},instance='evil'))\ntime.sleep(2)\n",
        lab.agent_socket("n0").display(),
        job.job
    );
    let path = lab.home(lab.user(1)).join("evil.py");
    std::fs::write(&path, program).unwrap();
    let out = lab.home(lab.user(1)).join("evil.out");
    let (to, run) = (format!("--output={}", out.display()), format!("/usr/bin/python3 {}", path.display()));
    let evil = lab.sbatch(lab.user(1), &["--ntasks=1", &to, "--wrap", &run]).unwrap();
    lab.wait_end(evil, WAIT).unwrap();
    // Case B49: a peer of another version is refused, and both versions are named.
    let refusal = std::fs::read_to_string(&out).unwrap();
    assert!(refusal.contains("refused") && refusal.contains("version 1") && refusal.contains("99"), "{refusal}");
    std::thread::sleep(Duration::from_secs(25));
    let view = job.view(&lab).unwrap().unwrap();
    assert_eq!(view.user, lab.user(0));
    assert_eq!(job.held(&lab).unwrap(), 4, "nothing of the real job was touched");
}

fn hello(socket: &std::path::Path, text: &str) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let length = u32::try_from(text.len()).unwrap().to_be_bytes();
    stream.write_all(&length).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    let mut answer = vec![];
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}
