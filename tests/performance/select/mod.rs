//! The select plugin inside slurmctld: what a test costs, what it waits for, and how fast jobs start.

mod cost;
mod faults;
mod soak;
mod throughput;

use crate::report::Report;
use anyhow::Result;
pub use soak::run as soak;

/// Runs the bench.
pub fn run(report: &mut Report) -> Result<()> {
    cost::run(report)?;
    throughput::run(report)
}
