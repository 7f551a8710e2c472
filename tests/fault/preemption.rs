//! Slurm preempts a slice: adopted as a shrink, with the partition's GraceTime as the deadline.
//!
//! With proctrack/cgroup, as on production clusters, only the step's own task (the supervisor) gets Slurm's SIGTERM.
//! proctrack/linuxproc sends it to every process: ranks that do not handle it die at once, which is a loss of the slice
//! (tests/fault/lost.rs) instead of a shrink.

use pliant_lab::Lab;
use pliant_tests::{Options, Training};
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(60);

#[test]
fn slurm_preempts_a_slice() {
    let lab = Lab::builder().nodes(2).gpus(8).poll_interval(10).preemption(20).cgroups(true).start().unwrap();
    // The rest of n0 is taken, so that what the job loses on n1 cannot be lent to it there.
    let other = ["--nodes=1", "--gres=gpu:6", "--nodelist=n0", "--wrap", "sleep 600"];
    let holder = lab.sbatch(lab.user(1), &other).unwrap();
    lab.wait_state(holder, "RUNNING", WAIT).unwrap();
    // The base is in the preemptible partition too; it is on n0, and the other job asks for n1 alone.
    let options = Options::default().sbatch(&["--gpus=2", "--nodes=1", "--partition=low", "--nodelist=n0"]);
    let job = Training::submit(&lab, &options).unwrap();
    let view = job.wait_world(&lab, 8, WAIT).unwrap();
    assert_eq!(view.status.slices.first().unwrap().node.as_str(), "n1");
    let other = lab.sbatch(lab.user(1), &["--nodes=1", "--gres=gpu:8", "--nodelist=n1", "--wrap", "sleep 5"]).unwrap();
    lab.wait_state(other, "RUNNING", WAIT).unwrap();
    job.wait_world(&lab, 2, WAIT).unwrap();
    assert_eq!(lab.job_state(job.job).unwrap(), "RUNNING");
    let check = job.check(&lab).unwrap();
    for key in ["lost", "repeated", "redone"] {
        assert_eq!(check.get(key).and_then(serde_json::Value::as_u64), Some(0), "{key}: {check}");
    }
    let reasons: Vec<String> = job.history(&lab).unwrap().iter().map(|e| e.reason.to_string()).collect();
    assert!(reasons.iter().any(|r| r.contains("preempts slice") || r.contains("pending job")), "{reasons:?}");
}
