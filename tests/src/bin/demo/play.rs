//! What is done, step by step, and what has to come of it.

use crate::log::Log;
use crate::record::{Record, Role};
use crate::watch::Watch;
use anyhow::{Context, Result, bail, ensure};
use pliant_lab::Lab;
use pliant_tests::{Options, Training};
use serde_json::Value;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Own GPUs of the elastic job, and the size of the fixed one.
const OWN: u32 = 2;
/// MAX of the elastic job.
const MAX: u32 = 8;
/// With the two trainings' own GPUs these are all 32 of the lab.
const RIGID: u32 = 28;
/// Each step lasts so long at least, so that a fast machine leaves time for the changes.
const TRAINING: &[&str] = &["--epochs=18", "--min-step-seconds=0.1"];
/// Steps that the world of 8 trains before the GPUs are wanted back.
const CALM: u64 = 50;
/// For any one thing to happen on a slow machine.
const WAIT: Duration = Duration::from_secs(100);
/// Both accuracies are of 1,000 test images.
const TOLERANCE: f64 = 0.02;

/// What one training came to.
#[derive(Debug, Clone)]
pub struct Trained {
    /// Share of the test images that are recognised.
    pub accuracy: f64,
    /// Its steps.
    pub log: Log,
}

/// What the demo came to.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The elastic training.
    pub elastic: Trained,
    /// The same at a fixed size.
    pub fixed: Trained,
    /// Looks at Slurm.
    pub looks: u32,
    /// Looks that showed a GPU in two jobs.
    pub twice: u32,
}

impl Outcome {
    /// Fails unless it trained on 8, then on 2, then on 8 again, with the result of the fixed size.
    pub fn judge(&self) -> Result<()> {
        let sizes = self.elastic.log.sizes();
        let (own, max) = (u64::from(OWN), u64::from(MAX));
        ensure!(
            sizes.ends_with(&[max, own, max]),
            "its log shows steps on {sizes:?} GPUs, not on {max}, then {own}, then {max}"
        );
        let apart = (self.elastic.accuracy - self.fixed.accuracy).abs();
        ensure!(apart <= TOLERANCE, "the accuracies are {apart:.3} apart, more than {TOLERANCE}");
        ensure!(self.twice == 0, "{} looks at Slurm showed a GPU in two jobs", self.twice);
        Ok(())
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, training) in [("elastic", &self.elastic), ("fixed size", &self.fixed)] {
            let sizes: Vec<String> = training.log.sizes().iter().map(u64::to_string).collect();
            writeln!(
                f,
                "{name:<11} test accuracy {:.3}, {} steps, {} of them repeated, on {} GPUs",
                training.accuracy,
                training.log.steps,
                training.log.repeated,
                sizes.join(", then ")
            )?;
        }
        write!(f, "{} looks at Slurm, {} of them showed a GPU in two jobs.", self.looks, self.twice)
    }
}

/// Runs all of it.
pub fn play(lab: &Lab, record: &Record) -> Result<Outcome> {
    let options =
        Options::default().elastic(&MAX.to_string()).sbatch(&["--gpus=2", "--nodes=1"]).flag("--cpus-per-gpu=1");
    let elastic = Training::digits(lab, &options.clone().flag("--job-name=elastic"), TRAINING)?;
    record.cast(elastic.job, Role::Base);
    record
        .mark(record.now(), &format!("job {} (elastic training, {OWN} GPUs, --elastic={MAX}) submitted", elastic.job));
    let fixed = Options { elastic: None, ..options.flag("--job-name=fixed") };
    let fixed = Training::digits(lab, &fixed, TRAINING)?;
    record.cast(fixed.job, Role::Fixed);
    record.say(record.now(), &format!("job {} (the same training, fixed at {OWN} GPUs) submitted", fixed.job));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| Watch::default().run(lab, record, &elastic, &stop));
        let result = scenes(lab, record, &elastic, &fixed);
        stop.store(true, Ordering::Relaxed);
        result
    })?;
    let history = record.history();
    Ok(Outcome {
        elastic: result(&elastic).context("the elastic training")?,
        fixed: result(&fixed).context("the training at a fixed size")?,
        looks: history.looks,
        twice: history.twice,
    })
}

fn scenes(lab: &Lab, record: &Record, elastic: &Training, fixed: &Training) -> Result<()> {
    elastic.wait_world(lab, MAX, WAIT).with_context(|| format!("it did not grow to {MAX} GPUs"))?;
    elastic.wait_held(lab, 8, WAIT)?;
    let worlds = wait_steps(lab, elastic, 0, MAX, CALM)?;

    let rigid = lab.sbatch(
        lab.user(1),
        &[&format!("--gpus={RIGID}"), "--time=5", "--job-name=rigid", "--output=rigid.out", "--wrap", "sleep 15"],
    )?;
    record.cast(rigid, Role::Rigid);
    record.mark(record.now(), &format!("job {rigid} (rigid, {RIGID} GPUs) submitted"));
    lab.wait_state(rigid, "RUNNING", WAIT).context("the rigid job did not start")?;
    let held = elastic.held(lab)?;
    ensure!(held == 2, "the rigid job runs and the elastic one holds {held} GPUs, not its own {OWN}");
    elastic.wait_world(lab, OWN, WAIT).with_context(|| format!("it does not train on its own {OWN} GPUs"))?;
    let worlds = wait_steps(lab, elastic, worlds, OWN, 1)?;

    let end = lab.wait_end(rigid, WAIT)?;
    ensure!(end == "COMPLETED", "the rigid job is {end}");
    elastic.wait_world(lab, MAX, WAIT).context("it did not grow again")?;
    wait_steps(lab, elastic, worlds, MAX, 1)?;
    for (name, training) in [("elastic training", elastic), ("fixed training", fixed)] {
        let end = lab.wait_end(training.job, WAIT * 2)?;
        let tail = training.tail(20);
        ensure!(end == "COMPLETED", "job {} ({name}) is {end}:\n{tail}", training.job);
    }
    lab.wait_for(WAIT, "no slice is left", || elastic.slices(lab).is_ok_and(|s| s.is_empty()))
}

/// Reads what a training printed and logged.
fn result(training: &Training) -> Result<Trained> {
    let text = training.text();
    let accuracy = text
        .lines()
        .rev()
        .filter_map(|l| serde_json::from_str::<Value>(l.trim()).ok())
        .find_map(|v| v.get("test_accuracy").and_then(Value::as_f64));
    let Some(accuracy) = accuracy else {
        bail!("printed no test accuracy:\n{}", training.tail(20));
    };
    Ok(Trained { accuracy, log: Log::read(training)? })
}

/// Waits until the log shows so many steps of a world of that size that came after the first `known` worlds. Gives the
/// number of worlds then.
fn wait_steps(lab: &Lab, training: &Training, known: usize, ranks: u32, steps: u64) -> Result<usize> {
    let mut seen = vec![];
    let found = lab.wait_some(WAIT, &format!("{steps} steps on {ranks} GPUs"), || {
        seen = Log::read(training).unwrap_or_default().worlds;
        let last = seen.last()?;
        let there = seen.len() > known && last.ranks == u64::from(ranks) && last.steps >= steps;
        there.then_some(seen.len())
    });
    found.with_context(|| format!("its log shows {seen:?}; its output:\n{}", training.tail(20)))
}
