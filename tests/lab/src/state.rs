//! `state.json`: what is known of a lab on disk, so that any process can use it and end it.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::procs::Proc;
use crate::spec::Spec;

/// Contents of `state.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct State {
    /// What the lab is made of.
    pub spec: Spec,
    /// Services that were started, by name, with their processes.
    pub services: BTreeMap<String, Proc>,
    /// The process that ends the lab when its owner dies.
    pub guard: Option<Proc>,
    /// True when everything had come up.
    pub ready: bool,
}

impl State {
    /// Reads the state of the lab in `dir`.
    pub fn load(dir: &Path) -> Result<State> {
        let path = dir.join("state.json");
        if !path.exists() {
            bail!("no lab in {} (`pliant-lab up --dir {}` starts one)", dir.display(), dir.display());
        }
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} was written by another version", path.display()))
    }

    /// Writes the state at one blow.
    pub(crate) fn store(&self) -> Result<()> {
        let path = self.spec.path("state.json");
        let new = self.spec.path("state.json.new");
        let text = serde_json::to_string_pretty(self).context("cannot write the state")?;
        fs::write(&new, text).with_context(|| format!("cannot write {}", new.display()))?;
        fs::rename(&new, &path).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Changes the state under the lab's lock.
    pub(crate) fn update(dir: &Path, change: impl FnOnce(&mut State)) -> Result<()> {
        let path = dir.join("state.lock");
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let lock = lock.with_context(|| format!("cannot open {}", path.display()))?;
        lock.lock().with_context(|| format!("cannot lock {}", path.display()))?;
        let mut state = State::load(dir)?;
        change(&mut state);
        state.store()
    }
}
