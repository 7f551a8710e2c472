//! What the agent and pliantd are told, and the pace of the training.

use super::{Core, Effect, Millis, UnitState};
use pliant_protocol::job::{JobStatus, Progress, SliceStatus};
use pliant_protocol::local::ToAgent;

/// At least so often the status is repeated.
const REPEAT: Millis = 5_000;
/// At most so often for new numbers alone.
const NUMBERS: Millis = 1_000;

/// Measured: how long a step and a save take.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    first: Option<(u64, Millis)>,
    step_ms: Option<Millis>,
    save_ms: Option<Millis>,
}

impl Pace {
    /// A new world: steps are measured anew.
    pub fn restart(&mut self) {
        self.first = None;
    }

    /// A report of the step that was done.
    pub fn step(&mut self, step: u64, now: Millis) {
        match self.first {
            Some((first, at)) if step > first => self.step_ms = (now - at).checked_div(step - first),
            Some(_) => {}
            None => self.first = Some((step, now)),
        }
    }

    /// A rank took so long from its boundary to its exit.
    pub fn saved(&mut self, ms: Option<Millis>) {
        self.save_ms = self.save_ms.max(ms);
    }

    /// How many steps fit into a time, as measured.
    pub fn steps_in(&self, time: Millis) -> Option<u64> {
        time.checked_div(self.step_ms?)
    }

    /// What a notice needs at least, in milliseconds: two steps (the promised boundary lies up to two steps ahead) and
    /// a save (nothing until one has been seen). `None` until steps have been seen.
    pub fn need(&self) -> Option<Millis> {
        Some(self.step_ms?.saturating_mul(2).saturating_add(self.save_ms.unwrap_or(0)))
    }
}

impl Core {
    pub(super) fn report(&mut self, generation: u32, progress: Progress) {
        if self.running.as_ref().is_none_or(|g| g.number != generation) {
            return;
        }
        if let Some(step) = progress.step {
            self.pace.step(step, self.now);
        }
        let keep = std::mem::take(&mut self.progress);
        self.progress = Progress {
            step: progress.step.or(keep.step),
            total_steps: progress.total_steps.or(keep.total_steps),
            samples: progress.samples.or(keep.samples),
            loss: progress.loss.or(keep.loss),
        };
        self.progress_changed = true;
        self.raise_grace();
    }

    /// A grace shorter than a step and a save would end every notice with a kill (B61): it is raised as far as the site
    /// allows, and said once.
    fn raise_grace(&mut self) {
        let Some(need) = self.pace.need().map(|ms| ms.div_ceil(1_000) + 1) else { return };
        let (grace, max) = (self.settings.grace, self.settings.grace_max);
        if need <= grace {
            return;
        }
        self.settings.grace = need.min(max).max(grace);
        let now = self.settings.grace;
        self.say_once("grace", || {
            if need <= max {
                format!("a step and a save take up to {need} s, the grace was {grace} s: raised to {now} s")
            } else {
                format!(
                    "a step and a save take up to {need} s, the site allows a grace of at most {max} s: \
                     when GPUs are taken back, work since the last checkpoint may be repeated"
                )
            }
        });
    }

    /// The state of the job as it is now.
    pub fn status(&self) -> JobStatus {
        let s = &self.settings;
        let unix = |at: Millis| at + s.unix_at_zero;
        let joined = |id| self.running.as_ref().is_some_and(|g| g.is_on(id));
        let slice = |u: &super::Unit| {
            Some(SliceStatus {
                job: u.slice?,
                node: u.node.clone(),
                gpus: u.gpus,
                cpus: u.cpus,
                joined: joined(u.id),
                leaving: u.leaving,
            })
        };
        let ready = self.started
            && self.ending.is_none()
            && match &self.running {
                Some(running) => running.settled(self.now, self.alone_after()),
                None => self.next.is_none() && !self.has_members(),
            };
        JobStatus {
            base: s.base,
            instance: s.instance.clone(),
            command: s.command.chars().take(200).collect(),
            range: s.range,
            base_gpus: s.nodes.iter().map(|(_, n)| n).sum(),
            base_nodes: s.nodes.iter().map(|(n, _)| n.clone()).collect(),
            cpus_per_gpu: s.cpus_per_gpu,
            partition: s.partition.clone(),
            kind: s.kind.clone(),
            feature: s.feature.clone(),
            locality: s.locality,
            grace: s.grace,
            ends_at: s.ends.map(|at| unix(at) / 1_000),
            generation: self.running.as_ref().map_or(0, |g| g.number),
            world: self.running.as_ref().map(|g| g.world.clone()).unwrap_or_default(),
            ready,
            slices: self.held().filter_map(slice).collect(),
            order: self.change.as_ref().map(|c| c.status.clone()),
            done: self.done.iter().cloned().collect(),
            progress: self.progress.clone(),
        }
    }

    /// Slices that Slurm may still count as ours.
    fn held(&self) -> impl Iterator<Item = &super::Unit> {
        self.units
            .values()
            .filter(|u| u.slice.is_some_and(|job| u.state != UnitState::Gone || self.releasing.contains(&job)))
    }

    pub(super) fn tell_agent(&mut self) {
        if !self.agent || !self.settings.elastic {
            return;
        }
        self.tell_holds();
        let status = self.status();
        let due = self.now >= self.status_at + REPEAT;
        let numbers = self.progress_changed && self.now >= self.progress_at + NUMBERS;
        let changed = self.status_sent.as_ref().is_none_or(|sent| {
            let progress = sent.progress.clone();
            let (mut a, mut b) = (JobStatus { progress, ..status.clone() }, sent.clone());
            // The clock of the time limit is read anew each time: a second is no change.
            if a.ends_at.zip(b.ends_at).is_some_and(|(x, y)| x.abs_diff(y) <= 2) {
                a.ends_at = None;
                b.ends_at = None;
            }
            a != b
        });
        if due || numbers || changed {
            self.status_at = self.now;
            self.progress_at = self.now;
            self.progress_changed = false;
            self.out.push(Effect::Agent(ToAgent::Status(Box::new(status.clone()))));
            self.status_sent = Some(status);
        }
    }

    /// Tells the agent which tokens are asked for or held; before the request itself goes out.
    pub(super) fn tell_holds(&mut self) {
        let held = self.held().filter_map(|u| u.token.clone());
        let mut tokens: Vec<String> = held.chain(self.open_asks.iter().cloned()).collect();
        tokens.sort();
        tokens.dedup();
        if self.agent && self.holds_sent.as_ref() != Some(&tokens) {
            self.out.push(Effect::Agent(ToAgent::Holds { tokens: tokens.clone() }));
            self.holds_sent = Some(tokens);
        }
    }
}
