//! From a submission to pliantd's knowing the job, and to its plan on the board.

use crate::report::{Report, percentile};
use anyhow::Result;
use pliant_lab::Lab;
use pliant_tests::select::now_us;
use std::collections::BTreeMap;
use std::time::Duration;

const JOBS: u32 = 300;
/// ms, from the issue.
const KNOWN: f64 = 50.0;
/// ms, from the issue: from the event to the plan.
const PLANNED: f64 = 10.0;

/// Runs the bench.
pub fn run(report: &mut Report) -> Result<()> {
    let lab = Lab::builder().nodes(64).gpus(8).service_env("pliantd", "RUST_LOG", "pliantd=debug").start()?;
    // The cluster is full, so that nothing starts meanwhile.
    lab.sbatch(lab.user(1), &["--exclusive", "-N64", "--wrap", "sleep 3000"])?;
    lab.wait_for(Duration::from_secs(60), "the nodes are taken", || {
        lab.jobs().is_ok_and(|jobs| jobs.iter().any(|j| j.state == "RUNNING"))
    })?;
    let mut submitted = BTreeMap::new();
    for _ in 0..JOBS {
        let at = now_us() / 1000.0;
        let job = lab.sbatch(lab.user(0), &["--gres=gpu:2", "--wrap", "true"])?;
        submitted.insert(job.0, at);
    }
    std::thread::sleep(Duration::from_secs(1));
    let log = std::fs::read_to_string(lab.log("pliantd"))?;
    let known: BTreeMap<u32, f64> = log.lines().filter(|l| l.contains(" seen job=")).filter_map(stamp).collect();
    let took: Vec<f64> = submitted.iter().filter_map(|(job, at)| Some(known.get(job)? - at)).collect();
    let count = u32::try_from(took.len()).unwrap_or(0);
    report.at_least(
        "64 nodes of 8, 300 submissions",
        "known by their event",
        f64::from(count),
        "jobs",
        f64::from(JOBS),
    );
    let case = "sbatch begun -> known to pliantd";
    report.note(case, "p50", percentile(&took, 0.5), "ms");
    report.at_most(case, "p99", percentile(&took, 0.99), "ms", KNOWN);
    // After its start, which takes one as soon as it follows the ring, and another when it is fresh.
    let first = submitted.values().copied().fold(f64::INFINITY, f64::min);
    let late = |line: &&str| line.contains("all jobs listed") && time(line).is_some_and(|at| at > first);
    let listings = u32::try_from(log.lines().filter(late).count())?;
    report.at_most("with the ring", "listings of all jobs after the start", f64::from(listings), "listings", 1.0);
    // With room on the cluster each arrival, start and end makes new plans.
    lab.clear()?;
    let from = log.len();
    for _ in 0..JOBS {
        lab.sbatch(lab.user(0), &["--gres=gpu:2", "-o/dev/null", "--wrap", "sleep 2"])?;
    }
    lab.clear()?;
    let log = std::fs::read_to_string(lab.log("pliantd"))?;
    let inside: Vec<f64> =
        log.get(from..).unwrap_or_default().lines().filter_map(|l| number(l, "after_event_ms=")).collect();
    let case = "event -> plans on the board, 300 jobs come and go";
    report.note(case, "boards", f64::from(u32::try_from(inside.len())?), "boards");
    report.note(case, "p50", percentile(&inside, 0.5), "ms");
    report.at_most(case, "p99", percentile(&inside, 0.99), "ms", PLANNED);
    lab.down()
}

/// Job and time (ms) of a line such as `2026-12-01T07:12:23.326379Z DEBUG ... seen job=7`.
fn stamp(line: &str) -> Option<(u32, f64)> {
    let job = number(line, "job=")?;
    Some((format!("{job:.0}").parse().ok()?, time(line)?))
}

fn number(line: &str, key: &str) -> Option<f64> {
    line.split_once(key)?.1.split_whitespace().next()?.parse().ok()
}

fn time(line: &str) -> Option<f64> {
    let stamp: jiff::Timestamp = line.split_whitespace().next()?.parse().ok()?;
    Some(stamp.duration_since(jiff::Timestamp::UNIX_EPOCH).as_secs_f64() * 1000.0)
}
