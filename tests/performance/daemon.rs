//! pliantd with 1,000 queued jobs and 64 nodes: resident memory.

use crate::report::Report;
use anyhow::{Context, Result};
use pliant_lab::Lab;
use std::fs;
use std::time::{Duration, Instant};

/// MiB, from the issue.
const LIMIT: f64 = 100.0;
const QUEUED: u32 = 1000;

/// Runs the bench.
pub fn run(report: &mut Report) -> Result<()> {
    let started = Instant::now();
    let lab = Lab::builder().nodes(64).gpus(8).poll_interval(2).start()?;
    report.note("64 nodes of 8", "lab up, with pliantd and agents", started.elapsed().as_secs_f64(), "s");
    let user = lab.user(0);
    lab.sbatch(user, &["--exclusive", "-N64", "--time=60", "--wrap", "sleep 3000"])?;
    let submit = format!("seq {QUEUED} | xargs -P4 -I{{}} sbatch -Q --gpus=8 --time=10 --wrap 'sleep 60'");
    lab.run_within(Duration::from_secs(400), user, &["bash", "-c", &submit])?;
    let want = QUEUED.to_string();
    lab.wait_for(Duration::from_secs(60), "all jobs in the queue", || {
        lab.run(user, &["bash", "-c", "squeue -h -t PD | wc -l"]).is_ok_and(|n| n.trim() == want)
    })?;
    // Some looks at the whole table, so that what grows has grown.
    std::thread::sleep(Duration::from_secs(20));
    let pid = lab.process("pliantd").context("pliantd has ended")?.pid;
    report.at_most("1,000 queued jobs, 64 nodes", "resident memory", resident(pid)?, "MiB", LIMIT);
    lab.down()
}

fn resident(pid: u32) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).context("no VmRSS")?;
    let kib: f64 = line.split_whitespace().nth(1).context("no value")?.parse()?;
    Ok(kib / 1024.0)
}
