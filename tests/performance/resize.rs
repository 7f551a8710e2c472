//! Growing and shrinking on a real Slurm of 4 nodes with 8 GPUs: how long it takes, and that nothing is lost.
//!
//! * grow: pliantd's decision (durable as Proposed) -> the newcomers' first step is done (Joined), less the longest
//!   time from a new process's exec to its first word (the load time, which is the script's own).
//! * shrink: `sbatch` of the rigid job begins -> none of the slices holds a GPU any more in squeue.

use crate::report::{Report, percentile};
use anyhow::{Context, Result};
use pliant_lab::Lab;
use pliant_model::resize::{Kind, State};
use pliant_protocol::admin::Event;
use pliant_tests::{Options, Training};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const CYCLES: u32 = 50;
const SLOW_CYCLES: u32 = 8;
const BLOCKED: u32 = 20;
const TORCH_CYCLES: u32 = 5;
const WAIT: Duration = Duration::from_secs(60);

/// Runs the bench; a word after its name (cycles, blocked, slow, torch) runs that part alone.
pub fn run(report: &mut Report) -> Result<()> {
    let only = std::env::args().nth(2);
    let asked = |name: &str| only.as_deref().is_none_or(|o| o == name);
    if asked("cycles") {
        cycles(report, "empty queue, poll interval 1 s", 1, CYCLES, 4.0)?;
    }
    if asked("blocked") {
        blocked(report)?;
    }
    if asked("slow") {
        cycles(report, "poll interval 10 s", 10, SLOW_CYCLES, 14.0)?;
    }
    if asked("torch") {
        torch(report)?;
    }
    Ok(())
}

/// Grows and shrinks one job; what a rigid job of 30 GPUs needs is all that is lent.
fn cycles(report: &mut Report, case: &str, poll: u32, count: u32, limit: f64) -> Result<()> {
    let lab = Lab::builder().nodes(4).gpus(8).poll_interval(poll).start()?;
    let job = Training::submit(&lab, &Options::default().steps(100_000))?;
    let (mut grows, mut shrinks) = (vec![], vec![]);
    let watch = Watch::default();
    std::thread::scope(|scope| {
        scope.spawn(|| watch.run(&lab, &job));
        let result = (0..count).try_for_each(|_| {
            job.wait_world(&lab, 8, WAIT)?;
            grows.extend(last_growth(&lab, &job)?);
            // Any point of a step, and of the time between two looks at Slurm.
            std::thread::sleep(Duration::from_millis(u64::from(random() % (poll * 1000))));
            shrinks.push(displace(&lab, &job)?);
            Ok::<(), anyhow::Error>(())
        });
        watch.stop.store(true, Ordering::Relaxed);
        result
    })?;
    if poll == 1 {
        report.at_most(case, "decision to grow -> first step, load excluded, p95", percentile(&grows, 0.95), "s", 2.0);
        report.note(case, "decision to grow -> first step, load excluded, median", percentile(&grows, 0.5), "s");
    }
    let p95 = percentile(&shrinks, 0.95);
    report.at_most(case, "pending job submitted -> its GPUs free, p95", p95, "s", limit);
    report.note(case, "pending job submitted -> its GPUs free, median", percentile(&shrinks, 0.5), "s");
    report.note(case, "cycles", f64::from(count), "");
    judge(report, case, &lab, &job, &watch)?;
    lab.down()
}

/// Submits the rigid job, waits until the GPUs are free and it runs, and ends it. Seconds until they were free.
fn displace(lab: &Lab, job: &Training) -> Result<f64> {
    let started = Instant::now();
    let rigid = lab.sbatch(lab.user(1), &["--gpus=30", "--time=5", "--wrap", "sleep 120"])?;
    lab.wait_for(WAIT, "all slices given back", || job.slices(lab).is_ok_and(|s| s.is_empty()))?;
    let took = started.elapsed().as_secs_f64();
    lab.wait_state(rigid, "RUNNING", WAIT)?;
    lab.run("root", &["scancel", &rigid.to_string()])?;
    Ok(took)
}

/// GPUs leaked, held twice, below MIN; samples lost or repeated.
fn judge(report: &mut Report, case: &str, lab: &Lab, job: &Training, watch: &Watch) -> Result<()> {
    let count = |n: &AtomicU32| f64::from(n.load(Ordering::Relaxed));
    report.at_most(case, "looks in which a GPU was held twice", count(&watch.twice), "", 0.0);
    report.at_most(case, "looks in which the job was below MIN", count(&watch.below), "", 0.0);
    report.note(case, "looks", count(&watch.looks), "");
    lab.run("root", &["scancel", &job.job.to_string()])?;
    lab.wait_end(job.job, WAIT)?;
    let gone = lab.wait_for(WAIT, "no slice is left", || job.slices(lab).is_ok_and(|s| s.is_empty()));
    report.at_most(case, "slices leaked", f64::from(u8::from(gone.is_err())), "", 0.0);
    let check = job.check(lab)?;
    for key in ["lost", "repeated", "missing", "redone"] {
        let value = check.get(key).and_then(serde_json::Value::as_f64).with_context(|| format!("{key} in {check}"))?;
        let what = if matches!(key, "lost" | "repeated") { "samples" } else { "steps" };
        report.at_most(case, &format!("{what} {key}"), value, "", 0.0);
    }
    let samples = check.get("samples").and_then(serde_json::Value::as_f64).unwrap_or(f64::NAN);
    report.note(case, "samples", samples, "");
    Ok(())
}

/// First growths while a job of 32 GPUs is blocked: each slice has to wait for the backfill pass.
fn blocked(report: &mut Report) -> Result<()> {
    let case = "one blocked 32-GPU job, bf_interval=1";
    let lab =
        Lab::builder().nodes(4).gpus(8).poll_interval(1).conf_line("SchedulerParameters=bf_interval=1").start()?;
    let holder = lab.sbatch(lab.user(1), &["--gpus=1", "--time=100", "--wrap", "sleep 6000"])?;
    lab.wait_state(holder, "RUNNING", WAIT)?;
    lab.sbatch(lab.user(1), &["--gpus=32", "--time=10", "--wrap", "sleep 60"])?;
    let mut grows = vec![];
    for _ in 0..BLOCKED {
        let job = Training::submit(&lab, &Options::default())?;
        job.wait_world(&lab, 8, WAIT)?;
        grows.extend(last_growth(&lab, &job)?);
        lab.run("root", &["scancel", &job.job.to_string()])?;
        lab.wait_end(job.job, WAIT)?;
        lab.wait_for(WAIT, "no slice is left", || job.slices(&lab).is_ok_and(|s| s.is_empty()))?;
    }
    report.at_most(case, "decision to grow -> first step, load excluded, p95", percentile(&grows, 0.95), "s", 4.0);
    report.note(case, "decision to grow -> first step, load excluded, median", percentile(&grows, 0.5), "s");
    lab.down()
}

/// The same growth with real PyTorch.
fn torch(report: &mut Report) -> Result<()> {
    let case = "PyTorch, empty queue";
    let lab = Lab::builder().nodes(4).gpus(8).poll_interval(1).start()?;
    let job = Training::digits(&lab, &Options::default().elastic("4"), &["--epochs=1000"])?;
    let (mut grows, mut loads) = (vec![], vec![]);
    for cycle in 1..=TORCH_CYCLES {
        job.wait_world(&lab, 4, Duration::from_secs(120))?;
        grows.push(last_growth(&lab, &job)?.context("the growth is not in the journal")?);
        loads.extend(load_of(&lab, &job)?);
        if cycle < TORCH_CYCLES {
            displace(&lab, &job)?;
        }
    }
    let what = "decision to grow -> first step, load excluded";
    report.at_most(case, &format!("{what}, longest of 5"), percentile(&grows, 1.0), "s", 2.0);
    report.note(case, &format!("{what}, median of 5"), percentile(&grows, 0.5), "s");
    report.note(case, "load time of the new world, median of 5", percentile(&loads, 0.5), "s");
    lab.run("root", &["scancel", &job.job.to_string()])?;
    lab.down()
}

/// Seconds of the last growth that ended well, less the load time.
fn last_growth(lab: &Lab, job: &Training) -> Result<Option<f64>> {
    let history = job.history(lab)?;
    let mut orders: BTreeMap<&str, (Option<u64>, Option<u64>)> = BTreeMap::new();
    let mut last = None;
    for Event { at_ms, order, kind, state, .. } in &history {
        let (Some(order), Some(Kind::Grow), Some(state)) = (order, kind, state) else {
            continue;
        };
        let times = orders.entry(order.0.as_str()).or_default();
        match state {
            State::Proposed => times.0 = Some(*at_ms),
            State::Joined => (times.1, last) = (Some(*at_ms), Some(order.0.as_str())),
            _ => {}
        }
    }
    let Some((Some(decided), Some(joined))) = last.and_then(|id| orders.get(id).copied()) else {
        return Ok(None);
    };
    let load = load_of(lab, job)?.unwrap_or(0.0);
    Ok(Some(seconds(joined.saturating_sub(decided)) - load))
}

/// Load time of the world of the last growth, in seconds.
fn load_of(lab: &Lab, job: &Training) -> Result<Option<f64>> {
    let view = job.view(lab)?.context("not registered")?;
    let grown = view.status.done.iter().rev().find(|o| o.kind == Kind::Grow && o.state == State::Settled);
    Ok(grown.and_then(|o| o.load_ms).map(seconds))
}

fn seconds(ms: u64) -> f64 {
    Duration::from_millis(ms).as_secs_f64()
}

/// No statistics hang on it: any spread over a step will do.
fn random() -> u32 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.subsec_micros())
}

/// Looks at Slurm all the time while the job changes its size.
#[derive(Debug, Default)]
struct Watch {
    stop: AtomicBool,
    looks: AtomicU32,
    twice: AtomicU32,
    below: AtomicU32,
}

impl Watch {
    fn run(&self, lab: &Lab, job: &Training) {
        while !self.stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(500));
            if !lab.job_state(job.job).is_ok_and(|s| s == "RUNNING") {
                continue;
            }
            match job.held(lab) {
                Ok(n) if n < 2 => drop(self.below.fetch_add(1, Ordering::Relaxed)),
                Ok(_) => {}
                Err(e) if e.to_string().contains("GPUs held") => drop(self.twice.fetch_add(1, Ordering::Relaxed)),
                Err(_) => continue,
            }
            self.looks.fetch_add(1, Ordering::Relaxed);
        }
    }
}
