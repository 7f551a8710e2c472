//! The log of `train_digits.py`: one line per step, written by rank 0.

use anyhow::{Context, Result};
use pliant_tests::Training;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;

/// Steps that followed one another on the same number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct World {
    /// Ranks.
    pub ranks: u64,
    /// The first of its steps.
    pub first_step: u64,
    /// How many.
    pub steps: u64,
}

/// What the log says.
#[derive(Debug, Clone, Default)]
pub struct Log {
    /// In the order of time.
    pub worlds: Vec<World>,
    /// Different steps.
    pub steps: usize,
    /// Steps that are there more than once.
    pub repeated: usize,
}

impl Log {
    /// Reads it as far as it is written.
    ///
    /// # Errors
    /// When it is not there (yet).
    pub fn read(training: &Training) -> Result<Log> {
        let file = training.log.join("checkpoint/loss.jsonl");
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let mut counts: BTreeMap<u64, u32> = BTreeMap::new();
        let mut log = Log::default();
        // The last line may be half written.
        for line in text.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok()) {
            let number = |key: &str| line.get(key).and_then(Value::as_u64).unwrap_or(0);
            let (step, ranks) = (number("step"), number("world"));
            *counts.entry(step).or_default() += 1;
            match log.worlds.last_mut() {
                Some(world) if world.ranks == ranks => world.steps += 1,
                _ => log.worlds.push(World { ranks, first_step: step, steps: 1 }),
            }
        }
        log.steps = counts.len();
        log.repeated = counts.values().filter(|n| **n > 1).count();
        Ok(log)
    }

    /// Numbers of ranks, in the order of time.
    pub fn sizes(&self) -> Vec<u64> {
        self.worlds.iter().map(|w| w.ranks).collect()
    }
}
