//! Slices that vanish and scripts that do not listen.

use pliant_lab::Lab;
use pliant_tests::training::{count, kill};
use pliant_tests::{Options, Training};
use serde_json::Value;
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(60);

fn lab() -> Lab {
    Lab::builder().nodes(2).gpus(8).poll_interval(1).start().unwrap()
}

/// A slice is cancelled by its user: the job goes on without it from its last checkpoint.
#[test]
fn the_user_cancels_a_slice() {
    let lab = lab();
    let job = Training::submit(&lab, &Options::default().trainer(&["--checkpoint-every=5"]).steps(200)).unwrap();
    job.wait_world(&lab, 8, WAIT).unwrap();
    let slice = job.slices(&lab).unwrap()[0].id;
    lab.run(job.user, &["scancel", &slice.to_string()]).unwrap();
    lab.wait_for(WAIT, "the slice is gone from the world", || {
        job.view(&lab).ok().flatten().is_some_and(|v| v.status.slices.iter().all(|s| s.job != slice))
    })
    .unwrap();
    assert_eq!(lab.wait_end(job.job, WAIT * 2).unwrap(), "COMPLETED", "{}", job.tail(20));
    let check = job.check(&lab).unwrap();
    assert_eq!((count(&check, "lost"), count(&check, "repeated")), (0, 0), "{check}");
    assert!(count(&check, "redone") <= 20, "at most what the last checkpoint did not hold: {check}");
}

/// Case B22: every process of a node is killed. The job id stays, the world is smaller, what is done again is not
/// more than a checkpoint interval (and the step that was under way).
#[test]
fn a_node_loses_all_its_processes() {
    let lab = lab();
    // Four steps a checkpoint; the last world may be two steps ahead of it, in each of two changes.
    let job = Training::submit(&lab, &Options::default().trainer(&["--checkpoint-every=4"]).steps(200)).unwrap();
    job.wait_world(&lab, 8, WAIT).unwrap();
    let on_slice = |e: &Value| e.get("job").and_then(Value::as_str).is_some_and(|j| j != job.job.to_string());
    let pids: Vec<u32> = job
        .events()
        .iter()
        .filter(|e| e.get("event").and_then(Value::as_str) == Some("start") && on_slice(e))
        .filter_map(|e| u32::try_from(e.get("pid")?.as_u64()?).ok())
        .collect();
    assert_eq!(pids.len(), 6);
    let slice = job.slices(&lab).unwrap()[0].id;
    let supervisors: Vec<u32> = pids.iter().filter_map(|p| parent(*p)).collect();
    supervisors.into_iter().chain(pids).for_each(kill);
    lab.wait_for(WAIT, "the slice is given back", || job.slices(&lab).is_ok_and(|s| s.iter().all(|s| s.id != slice)))
        .unwrap();
    assert_eq!(lab.wait_end(job.job, WAIT * 2).unwrap(), "COMPLETED", "{}", job.tail(20));
    let check = job.check(&lab).unwrap();
    assert_eq!((count(&check, "lost"), count(&check, "repeated")), (0, 0), "{check}");
    assert!(count(&check, "redone") <= 6, "{check}");
}

fn parent(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// A script that ignores the notice: after the grace its slices are cancelled and the base goes on from its last
/// checkpoint.
#[test]
fn a_script_that_ignores_the_notice_loses_its_slices() {
    let lab = lab();
    let options = Options::default().flag("--elastic-grace=0:05").trainer(&[
        "--ignore-notice",
        "--ignore-term",
        "--checkpoint-every=5",
    ]);
    let job = Training::submit(&lab, &options).unwrap();
    job.wait_world(&lab, 8, WAIT).unwrap();
    let rigid = lab.sbatch(lab.user(1), &["--gpus=14", "--wrap", "sleep 600"]).unwrap();
    lab.wait_state(rigid, "RUNNING", WAIT).unwrap();
    job.wait_world(&lab, 2, WAIT).unwrap();
    assert_eq!(lab.job_state(job.job).unwrap(), "RUNNING");
    let reasons: Vec<String> = job.history(&lab).unwrap().iter().map(|e| e.reason.to_string()).collect();
    assert!(reasons.iter().any(|r| r.contains("grace of 5 s")), "{reasons:?}");
    let check = job.check(&lab).unwrap();
    assert_eq!((count(&check, "lost"), count(&check, "repeated")), (0, 0), "{check}");
}

/// Case B26: 2 -> 4 -> 2 many times; after each change every member has its devices and none has another's.
#[test]
fn devices_are_never_shared() {
    let lab = Lab::builder().nodes(2).gpus(2).poll_interval(1).start().unwrap();
    // The GPUs of a node are on two sockets: a CPU for each, or Slurm's steps see one GPU only.
    let options = Options::default().elastic("4").flag("--cpus-per-gpu=1");
    let job = Training::submit(&lab, &options).unwrap();
    for _ in 0..6 {
        let view = job.wait_world(&lab, 4, WAIT).unwrap();
        let generation = u64::from(view.status.generation);
        assert_eq!(job.held(&lab).unwrap(), 4);
        let mut devices: Vec<(String, u64)> = vec![];
        for e in job.events() {
            let of = |key: &str| e.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
            if of("event") == "start" && e.get("generation").and_then(Value::as_u64) == Some(generation) {
                assert!(!of("cuda").is_empty(), "a rank without devices: {e}");
                devices.push((format!("{} {} {}", of("node"), of("job"), of("cuda")), e["rank"].as_u64().unwrap()));
            }
        }
        let ranks: std::collections::BTreeSet<u64> = devices.iter().map(|d| d.1).collect();
        assert_eq!(ranks.len(), 4, "{devices:?}");
        let rigid = lab.sbatch(lab.user(1), &["--gpus=2", "--wrap", "sleep 1"]).unwrap();
        lab.wait_state(rigid, "RUNNING", WAIT).unwrap();
        assert_eq!(job.held(&lab).unwrap(), 2);
        lab.wait_end(rigid, WAIT).unwrap();
    }
}
