//! kill -9 of pliantd at each arrow of a grow and of a shrink, before and after the arrow is durable.

use pliant_lab::Lab;
use pliant_model::resize::Kind;
use pliant_tests::{Options, Training};
use std::time::{Duration, Instant};

const WAIT: Duration = Duration::from_secs(60);
/// Recovery in all, from the start of the new pliantd: to the world that was on its way (or back again).
const RECOVERED: Duration = Duration::from_secs(30);

/// Starts pliantd so that it is killed at that arrow.
fn armed(lab: &Lab, arrow: &str) {
    lab.stop("pliantd").unwrap();
    lab.start_with("pliantd", &[("FAILPOINTS", &format!("{arrow}=return"))]).unwrap();
}

fn wait_dead(lab: &Lab, arrow: &str) {
    lab.wait_for(WAIT, &format!("pliantd is killed at {arrow}"), || lab.process("pliantd").is_none()).unwrap();
}

fn arrows(kind: Kind) -> Vec<String> {
    let sides = ["before", "after"];
    kind.arrows().iter().flat_map(|s| sides.map(|side| format!("{kind}::{s}::{side}"))).collect()
}

fn gone(lab: &Lab, job: &Training) {
    lab.run("root", &["scancel", &job.job.to_string()]).unwrap();
    lab.wait_for(WAIT, "nothing is left", || job.slices(lab).is_ok_and(|s| s.is_empty()) && job.alive().is_empty())
        .unwrap();
    lab.wait_end(job.job, WAIT).unwrap();
}

#[test]
fn a_growth_survives_a_crash_at_every_arrow() {
    let lab = Lab::builder().nodes(2).gpus(8).poll_interval(1).start().unwrap();
    for arrow in arrows(Kind::Grow) {
        armed(&lab, &arrow);
        let job = Training::submit(&lab, &Options::default()).unwrap();
        wait_dead(&lab, &arrow);
        let started = Instant::now();
        lab.start("pliantd").unwrap();
        job.wait_world(&lab, 8, RECOVERED).unwrap_or_else(|e| panic!("{arrow}: {e:?}"));
        assert_eq!(job.held(&lab).unwrap(), 8, "{arrow}: leaked or held twice");
        eprintln!("{arrow}: 8 GPUs {:.1} s after the restart", started.elapsed().as_secs_f64());
        gone(&lab, &job);
    }
}

#[test]
fn a_shrink_survives_a_crash_at_every_arrow() {
    let lab = Lab::builder().nodes(2).gpus(8).poll_interval(1).start().unwrap();
    for arrow in arrows(Kind::Shrink) {
        let job = Training::submit(&lab, &Options::default()).unwrap();
        job.wait_world(&lab, 8, WAIT).unwrap_or_else(|e| panic!("{arrow}: {e:?}"));
        armed(&lab, &arrow);
        let rigid = lab.sbatch(lab.user(1), &["--gpus=14", "--wrap", "sleep 600"]).unwrap();
        wait_dead(&lab, &arrow);
        let started = Instant::now();
        lab.start("pliantd").unwrap();
        lab.wait_state(rigid, "RUNNING", RECOVERED).unwrap_or_else(|e| panic!("{arrow}: {e:?}"));
        job.wait_world(&lab, 2, RECOVERED).unwrap_or_else(|e| panic!("{arrow}: {e:?}"));
        assert_eq!(job.held(&lab).unwrap(), 2, "{arrow}: leaked, or below MIN");
        eprintln!("{arrow}: 2 GPUs {:.1} s after the restart", started.elapsed().as_secs_f64());
        lab.run("root", &["scancel", &rigid.to_string()]).unwrap();
        gone(&lab, &job);
    }
}
