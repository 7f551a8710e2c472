//! The life of an elastic job: it starts at once, grows, gives back, grows again and ends with its right result.

use pliant_lab::Lab;
use pliant_model::resize::State;
use pliant_tests::training::count;
use pliant_tests::{Options, Training};
use serde_json::Value;
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(60);

fn lab() -> Lab {
    Lab::builder().nodes(4).gpus(8).poll_interval(1).start().unwrap()
}

fn exact(lab: &Lab, job: &Training) {
    let check = job.check(lab).unwrap();
    for key in ["lost", "repeated", "missing"] {
        assert_eq!(count(&check, key), 0, "{key}: {check}");
    }
}

#[test]
fn it_grows_gives_back_and_ends_with_every_sample_once() {
    let lab = lab();
    let job = Training::submit(&lab, &Options::default().steps(150)).unwrap();
    job.wait_world(&lab, 8, WAIT).unwrap();
    job.wait_held(&lab, 8, WAIT).unwrap();
    // Somebody needs the GPUs: 30 of 32.
    let rigid = lab.sbatch(lab.user(1), &["--gpus=30", "--wrap", "sleep 3"]).unwrap();
    lab.wait_state(rigid, "RUNNING", WAIT).unwrap();
    assert_eq!(job.held(&lab).unwrap(), 2);
    job.wait_world(&lab, 2, WAIT).unwrap();
    lab.wait_end(rigid, WAIT).unwrap();
    job.wait_world(&lab, 8, WAIT).unwrap();
    assert_eq!(lab.wait_end(job.job, WAIT * 2).unwrap(), "COMPLETED", "{}", job.tail(20));
    exact(&lab, &job);
    let check = job.check(&lab).unwrap();
    assert_eq!(check.get("complete"), Some(&Value::Bool(true)), "{check}");
    assert_eq!(count(&check, "redone"), 0, "every world left at a boundary: {check}");
    lab.wait_for(WAIT, "no slice is left", || job.slices(&lab).is_ok_and(|s| s.is_empty())).unwrap();
    let history = job.history(&lab).unwrap();
    let arrows: Vec<State> = history.iter().filter_map(|e| e.state).collect();
    for state in [State::Proposed, State::Granted, State::Joined, State::Settled, State::Drained, State::Confirmed] {
        assert!(arrows.contains(&state), "{state} in {arrows:?}");
    }
    let reasons: Vec<String> = history.iter().map(|e| e.reason.to_string()).collect();
    assert!(reasons.iter().any(|r| r.contains(&format!("pending job {rigid} wants 30 GPUs"))), "{reasons:?}");
}

#[test]
fn two_elastic_jobs_share_what_is_idle() {
    let lab = Lab::builder().nodes(2).gpus(8).poll_interval(1).start().unwrap();
    let options = Options::default().elastic("2-16");
    let a = Training::submit(&lab, &options).unwrap();
    let b = Training::submit(&lab, &Options { user: lab.user(1), ..options }).unwrap();
    lab.wait_for(WAIT, "all 16 GPUs lent", || matches!((a.held(&lab), b.held(&lab)), (Ok(x), Ok(y)) if x + y == 16))
        .unwrap();
}

/// A base without GPUs waits, trains on slices alone, and can wait again.
#[test]
fn a_base_without_gpus_trains_on_slices() {
    let lab = Lab::builder().nodes(2).gpus(4).poll_interval(1).start().unwrap();
    let options = Options::default().elastic("0-4").sbatch(&["--ntasks=1"]).steps(200);
    let job = Training::submit(&lab, &options).unwrap();
    job.wait_world(&lab, 4, WAIT).unwrap();
    let rigid = lab.sbatch(lab.user(1), &["--gpus=8", "--wrap", "sleep 2"]).unwrap();
    lab.wait_state(rigid, "RUNNING", WAIT).unwrap();
    assert_eq!(job.held(&lab).unwrap(), 0, "it waits at zero");
    lab.wait_end(rigid, WAIT).unwrap();
    assert_eq!(lab.wait_end(job.job, WAIT * 2).unwrap(), "COMPLETED", "{}", job.tail(20));
    exact(&lab, &job);
}

/// A script that imports nothing: SIGTERM, grace, restart in the new world.
#[test]
fn a_script_without_the_client_is_restarted() {
    let lab = Lab::builder().nodes(2).gpus(4).poll_interval(1).pliant_set("elastic.client_wait=3").start().unwrap();
    let options = Options::default().elastic("4").trainer(&["--no-client"]).steps(150);
    let job = Training::submit(&lab, &options).unwrap();
    job.wait_world(&lab, 4, WAIT).unwrap();
    assert_eq!(lab.wait_end(job.job, WAIT * 2).unwrap(), "COMPLETED", "{}", job.tail(20));
    exact(&lab, &job);
}

/// The exit code is that of the first failing rank, and no slice is left.
#[test]
fn the_exit_code_is_the_first_failing_ranks() {
    let lab = Lab::builder().nodes(2).gpus(4).poll_interval(1).start().unwrap();
    let options = Options::default().elastic("6").trainer(&["--exit-code=7", "--exit-step=60", "--exit-rank=1"]);
    let job = Training::submit(&lab, &options).unwrap();
    job.wait_world(&lab, 6, WAIT).unwrap();
    lab.wait_end(job.job, WAIT).unwrap();
    assert_eq!(job.exit_code(&lab).unwrap(), "7:0", "{}", job.tail(20));
    lab.wait_for(WAIT, "no slice is left", || job.slices(&lab).is_ok_and(|s| s.is_empty())).unwrap();
}

/// Without pliantd and agents the job is the plain Slurm job that its native flags describe, with one line.
#[test]
fn without_pliantd_it_runs_in_its_allocation() {
    let lab = Lab::builder().nodes(1).gpus(4).poll_interval(1).start().unwrap();
    lab.stop("agent.n0").unwrap();
    lab.stop("pliantd").unwrap();
    let job = Training::submit(&lab, &Options::default().elastic("4").steps(20)).unwrap();
    assert_eq!(lab.wait_end(job.job, WAIT).unwrap(), "COMPLETED", "{}", job.tail(20));
    exact(&lab, &job);
    let warnings = job.text().lines().filter(|l| l.starts_with("pliant: no agent")).count();
    assert_eq!(warnings, 1, "{}", job.text());
}

/// Array tasks are elastic jobs of their own.
#[test]
fn array_tasks_grow_each() {
    let lab = Lab::builder().nodes(2).gpus(8).poll_interval(1).start().unwrap();
    let options = Options::default().elastic("1-4").sbatch(&["--gpus=1", "--array=0-1"]);
    let array = Training::submit(&lab, &options).unwrap();
    lab.wait_for(WAIT, "both tasks hold 4 GPUs", || {
        let all = lab.jobs().unwrap_or_default();
        let gpus = |name: &dyn Fn(&str) -> bool| {
            all.iter()
                .filter(|j| j.state == "RUNNING" && name(&j.name))
                .filter_map(|j| lab.gpus(j.id).ok())
                .map(|g| g.len())
                .sum::<usize>()
        };
        gpus(&|n| n.starts_with("pliant-")) == 6
    })
    .unwrap();
    lab.run("root", &["scancel", &array.job.to_string()]).unwrap();
    lab.wait_for(WAIT, "no job is left", || lab.jobs().is_ok_and(|j| j.is_empty())).unwrap();
}

/// A het job is refused with a reason.
#[test]
fn a_het_job_is_refused() {
    let lab = Lab::builder().nodes(2).gpus(4).poll_interval(1).start().unwrap();
    let options = Options::default().elastic("4").sbatch(&["--gpus=1", ":", "--gpus=1"]);
    let job = Training::submit(&lab, &options);
    if let Ok(job) = job {
        lab.wait_end(job.job, WAIT).unwrap();
        assert_eq!(job.exit_code(&lab).unwrap(), "64:0", "{}", job.text());
        assert!(job.text().contains("het"), "{}", job.text());
    }
}

/// A signal to the base reaches the ranks of every slice; `scancel` ends them all.
#[test]
fn scancel_ends_every_rank_and_slice() {
    let lab = Lab::builder().nodes(2).gpus(8).poll_interval(1).start().unwrap();
    let job = Training::submit(&lab, &Options::default()).unwrap();
    job.wait_world(&lab, 8, WAIT).unwrap();
    assert_eq!(job.alive().len(), 8);
    lab.run(job.user, &["scancel", &job.job.to_string()]).unwrap();
    lab.wait_for(Duration::from_secs(30), "no rank, no slice", || {
        job.alive().is_empty() && job.slices(&lab).is_ok_and(|s| s.is_empty())
    })
    .unwrap();
}
