//! Our part of a test, and the system calls on it: a full board, 64 nodes of eight GPUs, a thousand jobs.

use crate::report::{Report, percentile};
use anyhow::{Context, Result, ensure};
use pliant_lab::{Lab, Signal};
use pliant_model::JobId;
use pliant_protocol::board::{Class, Event, Key, Outcome, Plan};
use pliant_tests::select::{Events, Hand, now_ms};
use std::collections::{BTreeMap, BTreeSet};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const NODES: u16 = 64;
const GPUS: u32 = 8;
/// Jobs of a round; two rounds are a thousand.
const ROUND: u32 = 500;
/// Plans for jobs that do not come, so that the board is as full as a long queue makes it.
const OTHERS: u32 = 1_500;
/// Places of a class: every node.
const CLASSES: u32 = 24;
/// The board is written anew so often, ms: as pliantd does while jobs start.
const RENEWED: u64 = 10;
/// From the issue: microseconds of thread CPU time, and the share of calls that end honoured.
const HALF: f64 = 10.0;
const MOST: f64 = 100.0;
const HONOURED: f64 = 0.95;
/// System calls that can wait for somebody else.
const WAITING: [&str; 30] = [
    "futex",
    "poll",
    "ppoll",
    "select",
    "pselect6",
    "epoll_wait",
    "epoll_pwait",
    "nanosleep",
    "clock_nanosleep",
    "connect",
    "accept",
    "accept4",
    "sendto",
    "sendmsg",
    "recvfrom",
    "recvmsg",
    "socket",
    "fsync",
    "fdatasync",
    "sync_file_range",
    "msync",
    "flock",
    "wait4",
    "waitid",
    "pause",
    "sched_yield",
    "semop",
    "rt_sigtimedwait",
    "rt_sigsuspend",
    "ioctl",
];

/// Runs this part.
pub fn run(report: &mut Report) -> Result<()> {
    let lab = Lab::builder()
        .nodes(NODES)
        .gpus(8)
        .conf_line("SchedulerParameters=batch_sched_delay=0,sched_interval=1,default_queue_depth=2000,partition_job_depth=2000")
        .service_env("slurmctld", "PLIANT_SELECT_MEASURE", "1")
        .start()?;
    ensure!(lab.spec().select, "the select plugin is not built for this release of Slurm");
    super::throughput::prefer_slurmctld(&lab)?;
    lab.kill("pliantd")?;
    let mut hand = Hand::of(&lab)?;
    let mut events = Events::of(&lab)?;
    for round in 0..2 {
        let trace = if round == 1 { Some(trace(&lab)?) } else { None };
        start_all(&lab, &mut hand, &mut events)?;
        if let Some(trace) = trace {
            waits(report, trace, &lab)?;
        }
        lab.clear()?;
    }
    // The traced round tells nothing about time.
    let first: Vec<&Event> = events.all.iter().map(|r| &r.event).collect();
    figures(report, &first, &lab)?;
    lab.down()
}

/// Submits a round, plans a GPU for each of its jobs, and lets them start.
fn start_all(lab: &Lab, hand: &mut Hand, events: &mut Events) -> Result<()> {
    let submit = |_| lab.sbatch(lab.user(0), &["--gres=gpu:1", "-o/dev/null", "--wrap", "sleep 600"]);
    // They wait as in a queue: known to the plugin, and not to be started yet.
    partition(lab, "DOWN")?;
    let jobs: Vec<JobId> = (0..ROUND).map(submit).collect::<Result<_>>()?;
    let plans = plans(&jobs)?;
    hand.write(plans.clone())?;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| -> Result<()> {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let _ = hand.write(plans.clone());
                std::thread::sleep(Duration::from_millis(RENEWED));
            }
        });
        // Nodes are other machines: what they would do with the jobs waits until all have started.
        let nodes: Vec<String> = lab.services().into_iter().filter(|s| s.starts_with("slurmd.")).collect();
        nodes.iter().try_for_each(|node| lab.signal(node, Signal::STOP))?;
        let started = partition(lab, "UP").and_then(|_| {
            let wanted: BTreeSet<u32> = jobs.iter().map(|j| j.0).collect();
            lab.wait_for(Duration::from_secs(120), "the jobs of the round have started", || {
                let Ok(all) = events.read() else { return false };
                let begun = all.iter().filter(|r| matches!(&r.event, Event::Start { job, .. } if wanted.contains(job)));
                begun.count() == wanted.len()
            })
        });
        done.store(true, Ordering::Relaxed);
        nodes.iter().try_for_each(|node| lab.signal(node, Signal::CONT))?;
        started
    })
}

fn partition(lab: &Lab, state: &str) -> Result<String> {
    lab.run("root", &["scontrol", "update", "PartitionName=gpu", &format!("State={state}")])
}

/// A GPU for each job, plans of a queue behind them, and classes.
fn plans(jobs: &[JobId]) -> Result<Vec<Plan>> {
    let until_ms = now_ms() + 300_000;
    let last = jobs.last().context("no job")?.0;
    let own = jobs.iter().map(|j| j.0).chain((0..OTHERS).map(|n| last + 100_000 + n));
    let mut plans: Vec<Plan> = own
        .zip(0u32..)
        .map(|(id, n)| {
            let place = Hand::place(&[(n % u32::from(NODES), &[n / u32::from(NODES) % GPUS])]);
            Plan { key: Key::Job(id), hard: false, until_ms, places: vec![place] }
        })
        .collect();
    plans.extend((0..CLASSES).map(|n| {
        let partition = format!("other{n}");
        let class = Class {
            partition,
            features: String::new(),
            kind: String::new(),
            uid: None,
            min_nodes: 1,
            max_nodes: 1,
            in_all: false,
            gpus: 1,
        };
        let places = (0..u32::from(NODES)).map(|node| Hand::place(&[(node, &[n % GPUS])])).collect();
        Plan { key: Key::Class(class), hard: false, until_ms, places }
    }));
    Ok(plans)
}

fn figures(report: &mut Report, all: &[&Event], lab: &Lab) -> Result<()> {
    let case = "64 nodes of 8, full board renewed each 10 ms, 1000 tests";
    let mut took: Vec<(f64, f64)> = vec![];
    let mut outcomes: BTreeMap<String, f64> = BTreeMap::new();
    let mut jobs = 0.0;
    for event in all {
        match event {
            Event::Took { cpu_ns, wall_ns, .. } => took.push((micros(*cpu_ns), micros(*wall_ns))),
            Event::Test { outcome, .. } => {
                let told = match outcome {
                    Some(Outcome::Honoured) => "honoured".to_owned(),
                    Some(Outcome::Not(why) | Outcome::Waits(why)) => why.clone(),
                    None => "no plan".to_owned(),
                };
                *outcomes.entry(told).or_default() += 1.0;
                jobs += 1.0;
            }
            _ => {}
        }
    }
    ensure!(took.len() >= 2 * ROUND as usize, "only {} calls were measured; {}", took.len(), lab.logs(5));
    report.at_least(case, "end honoured", outcomes.get("honoured").copied().unwrap_or(0.0) / jobs, "share", HONOURED);
    // The second half was traced.
    let plain = took.get(..took.len() / 2).unwrap_or_default();
    let cpu: Vec<f64> = plain.iter().map(|(cpu, _)| *cpu).collect();
    let wall: Vec<f64> = plain.iter().map(|(_, wall)| *wall).collect();
    report.at_most(case, "thread CPU time of our part, p50", percentile(&cpu, 0.5), "us", HALF);
    report.at_most(case, "thread CPU time of our part, p99", percentile(&cpu, 0.99), "us", MOST);
    report.note(case, "wall time of our part, p50", percentile(&wall, 0.5), "us");
    report.note(case, "wall time of our part, maximum", percentile(&wall, 1.0), "us");
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "microseconds of a call")]
fn micros(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

fn trace(lab: &Lab) -> Result<(Child, std::path::PathBuf)> {
    let file = lab.dir().join("log/strace");
    let pid = lab.process("slurmctld").context("no slurmctld")?.pid;
    let child = Command::new("strace")
        .args(["-f", "-q", "-o"])
        .arg(&file)
        .args(["-p", &pid.to_string()])
        .stderr(Stdio::null())
        .spawn()
        .context("strace")?;
    std::thread::sleep(Duration::from_secs(1));
    Ok((child, file))
}

/// The system calls of each thread between pairs of its readings of its CPU time: there we are at work.
fn waits(report: &mut Report, (mut child, file): (Child, std::path::PathBuf), lab: &Lab) -> Result<()> {
    lab.run("root", &["kill", &child.id().to_string()])?;
    child.wait()?;
    let text = std::fs::read_to_string(&file)?;
    let mut inside: BTreeSet<&str> = BTreeSet::new();
    let mut calls: BTreeMap<&str, f64> = BTreeMap::new();
    let mut spans = 0.0;
    for line in text.lines() {
        let Some((thread, call)) = line.split_once(' ') else { continue };
        let call = call.trim_start();
        if call.starts_with("clock_gettime(CLOCK_THREAD_CPUTIME_ID") {
            if !inside.remove(thread) {
                inside.insert(thread);
                spans += 1.0;
            }
        } else if inside.contains(thread)
            && let Some((name, _)) = call.split_once('(')
            && !name.starts_with("<...")
        {
            // Waking somebody is no waiting.
            let name = if call.contains("FUTEX_WAKE") { "futex (wake)" } else { name };
            if WAITING.contains(&name) {
                eprintln!("bench select: {line}");
            }
            *calls.entry(name).or_default() += 1.0;
        }
    }
    let case = "system calls of our part, by strace";
    report.at_least(case, "parts seen", spans, "parts", f64::from(ROUND));
    let waiting: f64 = calls.iter().filter(|(name, _)| WAITING.contains(name)).map(|(_, n)| n).sum();
    report.at_most(case, "that can wait", waiting, "calls", 0.0);
    for (name, count) in calls {
        report.note(case, name, count / spans, "calls per part");
    }
    Ok(())
}
