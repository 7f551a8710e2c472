//! Slurm and our own services go away and come back; Slurm's commands hang or fail: nothing is killed for that.

use pliant_lab::{Lab, Signal};
use pliant_tests::{Options, Training};
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(60);

fn lab() -> Lab {
    Lab::builder().nodes(2).gpus(8).poll_interval(1).start().unwrap()
}

fn steps(job: &Training) -> u64 {
    let text = std::fs::read_dir(&job.log).unwrap();
    let logs = text.filter_map(|e| std::fs::read_to_string(e.ok()?.path()).ok());
    let last = |l: String| l.lines().last().and_then(|l| l.split(' ').next()?.parse().ok());
    logs.filter_map(last).max().unwrap_or(0)
}

/// Trains on without a change for `seconds`.
fn undisturbed(lab: &Lab, job: &Training, seconds: u64) {
    let before = steps(job);
    std::thread::sleep(Duration::from_secs(seconds));
    let after = steps(job);
    assert!(after > before + 3 * seconds, "{before} -> {after} steps in {seconds} s\n{}", lab.logs(20));
}

#[test]
fn slurmctld_restarts_in_the_middle() {
    let lab = lab();
    let job = Training::submit(&lab, &Options::default()).unwrap();
    job.wait_world(&lab, 8, WAIT).unwrap();
    let slices: Vec<_> = job.slices(&lab).unwrap().into_iter().map(|s| s.id).collect();
    // Ended, not killed: slurmctld saves its state every few seconds, and what it forgets is Slurm's own to lose.
    lab.stop("slurmctld").unwrap();
    undisturbed(&lab, &job, 5);
    lab.start("slurmctld").unwrap();
    undisturbed(&lab, &job, 5);
    let after: Vec<_> = job.slices(&lab).unwrap().into_iter().map(|s| s.id).collect();
    assert_eq!(slices, after, "the same slices");
    let rigid = lab.sbatch(lab.user(1), &["--gpus=14", "--wrap", "sleep 1"]).unwrap();
    lab.wait_state(rigid, "RUNNING", WAIT).unwrap();
    lab.wait_end(rigid, WAIT).unwrap();
    job.wait_world(&lab, 8, WAIT).unwrap();
}

/// Cases B52 and B55: the controller is gone for longer than the view may be old. Nothing is cancelled, no pile of
/// child processes; afterwards it goes on.
#[test]
fn a_stale_view_changes_nothing() {
    let lab = Lab::builder().nodes(2).gpus(8).poll_interval(1).pliant_set("daemon.stale_after=5").start().unwrap();
    let job = Training::submit(&lab, &Options::default()).unwrap();
    job.wait_world(&lab, 8, WAIT).unwrap();
    lab.signal("slurmctld", Signal::STOP).unwrap();
    undisturbed(&lab, &job, 60);
    let daemon = lab.process("pliantd").unwrap().pid;
    assert!(pliant_tests::training::children(daemon).len() <= 3, "a pile of child processes");
    lab.signal("slurmctld", Signal::CONT).unwrap();
    job.wait_world(&lab, 8, WAIT).unwrap();
    assert_eq!(job.held(&lab).unwrap(), 8);
}

#[test]
fn an_agent_is_killed_and_comes_back() {
    let lab = lab();
    let job = Training::submit(&lab, &Options::default()).unwrap();
    let view = job.wait_world(&lab, 8, WAIT).unwrap();
    let slice_node = view.status.slices.first().unwrap().node.clone();
    for node in ["n0".to_owned(), slice_node.0] {
        let agent = format!("agent.{node}");
        lab.kill(&agent).unwrap();
        undisturbed(&lab, &job, 3);
        lab.start(&agent).unwrap();
        undisturbed(&lab, &job, 3);
    }
    // And the whole way still works over the new connections.
    let rigid = lab.sbatch(lab.user(1), &["--gpus=14", "--wrap", "sleep 1"]).unwrap();
    lab.wait_state(rigid, "RUNNING", WAIT).unwrap();
    job.wait_world(&lab, 2, WAIT).unwrap();
    let check = job.check(&lab).unwrap();
    assert_eq!(check.get("redone").and_then(serde_json::Value::as_u64), Some(0), "left at a boundary: {check}");
}

/// Case B50: `scontrol`, `squeue` and the rest sleep for ever in the job: it starts and trains all the same, or says
/// why not, and nothing is cancelled.
#[test]
fn slurm_commands_that_hang_cancel_nothing() {
    let lab = lab();
    let job = Training::submit(&lab, &Options::default()).unwrap();
    job.wait_world(&lab, 8, WAIT).unwrap();
    // The agents are started anew with commands that hang.
    let dir = lab.dir().join("hang");
    std::fs::create_dir_all(&dir).unwrap();
    for name in ["squeue", "scontrol", "scancel", "sacctmgr"] {
        let path = dir.join(name);
        std::fs::write(&path, "#!/bin/sh\nexec sleep 1000\n").unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", dir.display());
    for n in lab.nodes() {
        lab.stop(&format!("agent.{n}")).unwrap();
        lab.start_with(&format!("agent.{n}"), &[("PATH", &path)]).unwrap();
    }
    undisturbed(&lab, &job, 50);
    assert_eq!(job.held(&lab).unwrap(), 8);
    for n in lab.nodes() {
        let agent = lab.process(&format!("agent.{n}")).unwrap().pid;
        assert!(pliant_tests::training::children(agent).len() <= 4, "a pile of child processes");
    }
}

/// pliantd hangs: training goes on, and what it owes is done when it runs again.
#[test]
fn pliantd_hangs() {
    let lab = lab();
    let job = Training::submit(&lab, &Options::default()).unwrap();
    job.wait_world(&lab, 8, WAIT).unwrap();
    lab.signal("pliantd", Signal::STOP).unwrap();
    let rigid = lab.sbatch(lab.user(1), &["--gpus=14", "--wrap", "sleep 1"]).unwrap();
    undisturbed(&lab, &job, 5);
    lab.signal("pliantd", Signal::CONT).unwrap();
    lab.wait_state(rigid, "RUNNING", WAIT).unwrap();
}

/// A second pliantd on the same state refuses.
#[test]
fn a_second_pliantd_refuses() {
    let lab = lab();
    let config = lab.dir().join("etc/pliant.toml");
    let program = lab.dir().join("bin/pliantd");
    let mut command = lab.command("root", "timeout").unwrap();
    let output = command.arg("10").arg(program).arg("--config").arg(config).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("another pliantd uses"), "{output:?}");
}
