//! Ten thousand jobs: no new error line in slurmctld's log, no more memory than stock.

use super::throughput::{idle, lab, resident};
use crate::report::Report;
use anyhow::Result;
use pliant_lab::Lab;
use std::collections::BTreeSet;

/// Rounds of a thousand jobs; those before the first measurement fill caches.
const ROUNDS: u32 = 10;
const WARM: u32 = 2;
/// MiB by which the growth of two slurmctld that do the same differs anyhow.
const SLACK: f64 = 4.0;

/// Runs the bench.
pub fn run(report: &mut Report) -> Result<()> {
    let (stock, ours) = (through(false)?, through(true)?);
    let case = "10,000 jobs of one GPU";
    report.note(case, "slurmctld grows, stock", stock.grown, "MiB");
    report.at_most(case, "slurmctld grows, ours", ours.grown, "MiB", stock.grown.max(0.0) + SLACK);
    let new: Vec<&String> = ours.errors.difference(&stock.errors).collect();
    for line in &new {
        eprintln!("bench soak: {line}");
    }
    report.at_most(case, "kinds of error lines that stock has not", f64::from(u32::try_from(new.len())?), "lines", 0.0);
    Ok(())
}

struct Through {
    grown: f64,
    /// Error lines without their numbers.
    errors: BTreeSet<String>,
}

fn through(pliant: bool) -> Result<Through> {
    let lab = lab(pliant)?;
    for _ in 0..WARM {
        round(&lab)?;
    }
    let before = resident(&lab, "slurmctld")?;
    for _ in WARM..ROUNDS {
        round(&lab)?;
    }
    let grown = resident(&lab, "slurmctld")? - before;
    let log = std::fs::read_to_string(lab.log("slurmctld"))?;
    let errors = log.lines().filter(|l| l.contains("error:")).map(kind).collect();
    lab.down()?;
    Ok(Through { grown, errors })
}

/// A thousand jobs of 1 to 4 GPUs.
fn round(lab: &Lab) -> Result<()> {
    for gpus in 1..=4 {
        let gres = format!("--gres=gpu:{gpus}");
        lab.sbatch(lab.user(0), &["--array=0-249", &gres, "-o/dev/null", "--wrap", "true"])?;
    }
    idle(lab)
}

/// A line without its time and numbers.
fn kind(line: &str) -> String {
    let text = line.split_once("] ").map_or(line, |(_, text)| text);
    text.chars().filter(|c| !c.is_ascii_digit()).collect()
}
