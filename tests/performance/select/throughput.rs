//! Jobs started per second, with Pliant and without it, run in turn.

use super::faults::{FAULTS, Fault};
use crate::report::{Report, percentile};
use anyhow::{Context, Result, ensure};
use pliant_lab::{Lab, Signal};
use std::io::Read as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Jobs of a run.
const JOBS: u32 = 300;
const PAIRS: u32 = 10;
/// From the issue: ours over stock, and seconds to an answer of slurmctld.
const RATIO: f64 = 0.97;
const ANSWER: f64 = 1.0;

/// Runs this part. Nodes are other machines than the controller: slurmctld goes before all that runs on 64 nodes.
pub fn run(report: &mut Report) -> Result<()> {
    let ours = lab(true)?;
    let stock = lab(false)?;
    for fault in FAULTS {
        compare(report, &ours, &stock, fault)?;
    }
    ours.down()?;
    stock.down()
}

/// Puts slurmctld and munged before all else, as on a machine of their own; after each start.
pub fn prefer_slurmctld(lab: &Lab) -> Result<()> {
    ["slurmctld", "munged"].into_iter().try_for_each(|service| prefer(lab, service))
}

fn prefer(lab: &Lab, service: &str) -> Result<()> {
    let pid = lab.process(service).with_context(|| format!("no {service}"))?.pid;
    let threads: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/task"))?
        .filter_map(|t| t.ok()?.file_name().into_string().ok())
        .collect();
    let mut done = 0;
    // Some live for a moment only; new ones inherit it.
    for thread in &threads {
        done += u32::from(Command::new("chrt").args(["-f", "-p", "1", thread]).output()?.status.success());
    }
    ensure!(done > 0, "chrt could not put {service} before other processes");
    Ok(())
}

/// 64 nodes of eight. The agents, which belong on nodes of their own, would be 64 on this one machine.
pub fn lab(pliant: bool) -> Result<Lab> {
    let lab = Lab::builder()
        .nodes(64)
        .gpus(8)
        .pliant(pliant)
        .conf_line("SchedulerParameters=batch_sched_delay=0,sched_interval=1,default_queue_depth=2000,partition_job_depth=2000")
        .conf_line("MaxArraySize=2000")
        .conf_line("MaxJobCount=20000")
        .conf_line("MinJobAge=10")
        .start()?;
    prefer_slurmctld(&lab)?;
    if pliant {
        ensure!(lab.spec().select, "the select plugin is not built for this release of Slurm");
        lab.wait_for(Duration::from_secs(30), "plans are there", || lab.spec().board().exists())?;
        for service in lab.services().iter().filter(|s| s.starts_with("agent.")) {
            lab.kill(service)?;
        }
    }
    Ok(lab)
}

fn compare(report: &mut Report, ours: &Lab, stock: &Lab, fault: &Fault) -> Result<()> {
    let broken = (fault.begin)(ours)?;
    let (mut ratios, mut rates, mut answers) = (vec![], vec![], [vec![], vec![]]);
    for n in 0..=PAIRS {
        let first = if n % 2 == 0 { [ours, stock] } else { [stock, ours] };
        let mut rate = [0.0, 0.0];
        for lab in first {
            let (jobs, answer) = started_per_second(lab)?;
            let which = usize::from(lab.spec().pliant);
            if let (Some(place), Some(all)) = (rate.get_mut(which), answers.get_mut(which)) {
                *place = jobs;
                all.push(answer);
            }
        }
        // The first pair warms both up.
        if n > 0 {
            let [plain, with] = rate;
            ratios.push(with / plain);
            rates.push(with);
        }
    }
    drop(broken);
    let metric = "jobs started per second, ours over stock, median of 10 pairs";
    report.at_least(fault.name, metric, percentile(&ratios, 0.5), "ratio", RATIO);
    report.note(fault.name, "jobs started per second, ours, median", percentile(&rates, 0.5), "jobs/s");
    let [plain, with] = answers;
    report.at_most(fault.name, "scontrol ping, slowest", percentile(&with, 1.0), "s", ANSWER);
    report.note(fault.name, "scontrol ping, slowest, stock", percentile(&plain, 1.0), "s");
    Ok(())
}

/// One run: 300 tasks of one GPU; by slurmctld's own log, from its first allocation to its last. Also the slowest answer
/// of slurmctld meanwhile, in seconds.
fn started_per_second(lab: &Lab) -> Result<(f64, f64)> {
    let tasks = format!("--array=0-{}", JOBS - 1);
    let before = std::fs::metadata(lab.log("slurmctld"))?.len();
    let pings = Pings::start(lab)?;
    // Nodes are other machines: what they do with the jobs waits until all have started.
    let nodes: Vec<String> = lab.services().into_iter().filter(|s| s.starts_with("slurmd.")).collect();
    nodes.iter().try_for_each(|node| lab.signal(node, Signal::STOP))?;
    let ran = lab.sbatch(lab.user(0), &[&tasks, "--gres=gpu:1", "-o/dev/null", "--wrap", "true"]).and_then(|_| {
        lab.wait_for(Duration::from_secs(60), "all have started", || {
            starts(lab, before).is_ok_and(|all| all.len() == JOBS as usize)
        })
    });
    std::thread::sleep(Duration::from_secs(2));
    let slowest = pings.slowest();
    nodes.iter().try_for_each(|node| lab.signal(node, Signal::CONT))?;
    ran.and_then(|()| idle(lab))?;
    let slowest = slowest?;
    let starts = starts(lab, before)?;
    ensure!(starts.len() == JOBS as usize, "{} of {JOBS} starts in slurmctld's log", starts.len());
    let (first, last) = (percentile(&starts, 0.0), percentile(&starts, 1.0));
    Ok((f64::from(JOBS) / (last - first).max(1e-3), slowest))
}

/// Asks slurmctld four times a second whether it is there, before all other processes: the question is how slurmctld
/// answers, not how long a command waits for a core.
struct Pings(Child);

impl Pings {
    fn start(lab: &Lab) -> Result<Pings> {
        let script = "while a=$EPOCHREALTIME; scontrol ping; do echo took $a $EPOCHREALTIME; sleep 0.25; done";
        let mut command = lab.command("root", "chrt")?;
        let child = command.args(["-f", "2", "bash", "-c", script]).stdout(Stdio::piped()).spawn()?;
        Ok(Pings(child))
    }

    /// Seconds of the slowest answer.
    fn slowest(mut self) -> Result<f64> {
        self.0.kill()?;
        let mut text = String::new();
        self.0.stdout.take().context("no stdout")?.read_to_string(&mut text)?;
        self.0.wait()?;
        let took = |line: &str| {
            let (from, to) = line.strip_prefix("took ")?.split_once(' ')?;
            Some(to.parse::<f64>().ok()? - from.parse::<f64>().ok()?)
        };
        let all: Vec<f64> = text.lines().filter_map(took).collect();
        ensure!(all.len() > 2 && !text.contains("DOWN"), "scontrol ping: {text}");
        Ok(percentile(&all, 1.0))
    }
}

/// When jobs have started, in seconds of the day, by slurmctld's log from a byte on.
fn starts(lab: &Lab, from: u64) -> Result<Vec<f64>> {
    let log = std::fs::read(lab.log("slurmctld"))?;
    let log = String::from_utf8_lossy(log.get(usize::try_from(from)?..).unwrap_or_default()).into_owned();
    let started = |line: &&str| line.contains("Allocate JobId=") || line.contains("Started JobId=");
    Ok(log.lines().filter(started).filter_map(time).collect())
}

/// Waits until no job is left.
pub fn idle(lab: &Lab) -> Result<()> {
    lab.wait_for(Duration::from_secs(300), "all jobs are through", || {
        std::thread::sleep(Duration::from_millis(200));
        lab.run("root", &["squeue", "-h"]).is_ok_and(|t| t.trim().is_empty())
    })
}

/// Seconds of the day of a line such as `[2026-12-01T12:00:00.123] …`.
fn time(line: &str) -> Option<f64> {
    let clock = line.strip_prefix('[')?.split_once('T')?.1.split_once(']')?.0;
    let mut parts = clock.split(':').map(str::parse::<f64>);
    let mut next = || parts.next()?.ok();
    Some(next()? * 3600.0 + next()? * 60.0 + next()?)
}

/// MiB that a service holds in memory.
pub fn resident(lab: &Lab, service: &str) -> Result<f64> {
    let pid = lab.process(service).with_context(|| format!("no {service}"))?.pid;
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find_map(|l| l.strip_prefix("VmRSS:")).context("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? / 1024.0)
}
