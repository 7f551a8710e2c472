//! What the SPANK plugin adds to `sbatch`: medians of pairs, with pliantd running and stopped.

use crate::report::{Report, percentile};
use anyhow::Result;
use pliant_lab::{Lab, Signal};
use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Instant;

const PAIRS: u32 = 200;
/// ms, from the issue.
const LIMIT: f64 = 1.0;

/// Runs the bench.
pub fn run(report: &mut Report) -> Result<()> {
    let lab = Lab::builder().nodes(1).gpus(8).start()?;
    let with = lab.dir().join("etc/slurm.conf");
    let without = bare(&lab)?;
    for _ in 0..20 {
        submit(&lab, &with)?;
        submit(&lab, &without)?;
    }
    pairs(report, &lab, "pliantd running", &with, &without)?;
    lab.signal("pliantd", Signal::STOP)?;
    let stopped = pairs(report, &lab, "pliantd stopped by SIGSTOP", &with, &without);
    lab.signal("pliantd", Signal::CONT)?;
    stopped?;
    lab.down()
}

/// A slurm.conf for the client alone that loads no SPANK plugin.
fn bare(lab: &Lab) -> Result<PathBuf> {
    let etc = lab.dir().join("etc");
    let empty = etc.join("plugstack-empty.conf");
    fs::write(&empty, "")?;
    let text = fs::read_to_string(etc.join("slurm.conf"))?;
    let lines = text.lines().filter(|l| !l.starts_with("PlugStackConfig")).map(str::to_owned);
    let conf = lines.chain([format!("PlugStackConfig={}", empty.display())]).collect::<Vec<_>>().join("\n");
    let path = etc.join("slurm-bare.conf");
    fs::write(&path, conf + "\n")?;
    Ok(path)
}

/// One `sbatch` of a held job; milliseconds from exec to exit.
fn submit(lab: &Lab, conf: &PathBuf) -> Result<f64> {
    let mut command = lab.command(lab.user(0), "sbatch")?;
    command.env("SLURM_CONF", conf).args(["-Q", "--hold", "--gpus=1", "--wrap", "true"]);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let started = Instant::now();
    let status = command.status()?;
    let took = started.elapsed().as_secs_f64() * 1000.0;
    anyhow::ensure!(status.success(), "sbatch: {status}");
    Ok(took)
}

fn pairs(report: &mut Report, lab: &Lab, case: &str, with: &PathBuf, without: &PathBuf) -> Result<()> {
    let (mut added, mut same, mut plain) = (vec![], vec![], vec![]);
    for n in 0..PAIRS {
        // Interleaved, and each side first in turn: drift and warm caches fall on both alike.
        let (a, b) = if n % 2 == 0 {
            let a = submit(lab, with)?;
            (a, submit(lab, without)?)
        } else {
            let b = submit(lab, without)?;
            (submit(lab, with)?, b)
        };
        added.push(a - b);
        plain.push(b);
        same.push(submit(lab, without)? - submit(lab, without)?);
    }
    report.at_most(
        case,
        "sbatch with the plugin minus without, median of 200 pairs",
        percentile(&added, 0.5),
        "ms",
        LIMIT,
    );
    report.note(case, "without minus without, median of 200 pairs", percentile(&same, 0.5), "ms");
    report.note(case, "sbatch without the plugin, median", percentile(&plain, 0.5), "ms");
    lab.run("root", &["scancel", "--state=PENDING", "--user", lab.user(0)])?;
    Ok(())
}
