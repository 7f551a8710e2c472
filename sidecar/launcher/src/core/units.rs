//! Steps with a supervisor.

use super::{Core, Effect, Millis};
use pliant_model::{GpuCount, JobId, NodeName};
use pliant_protocol::exit;
use pliant_protocol::step::ToSupervisor;

/// Names a unit within one launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitId(pub u32);

/// How far a unit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitState {
    /// Its srun runs, its supervisor has not said Hello.
    Starting,
    /// It takes ranks.
    Up,
    /// Its srun has ended.
    Gone,
}

/// One step with one supervisor.
#[derive(Clone, Debug)]
pub struct Unit {
    /// Its name.
    pub id: UnitId,
    /// The slice; `None`: the base.
    pub slice: Option<JobId>,
    /// Where.
    pub node: NodeName,
    /// GPUs.
    pub gpus: GpuCount,
    /// CPUs; 0 for the base.
    pub cpus: u32,
    /// Slurm's GRES indexes of its GPUs, where known.
    pub indexes: Vec<u32>,
    /// The mark of the slice.
    pub token: Option<String>,
    /// How far it is.
    pub state: UnitState,
    /// NodeAddr.
    pub addr: String,
    /// Whether the agent of its node knows it.
    pub agent: bool,
    /// On its way out: part of no new world.
    pub leaving: bool,
    /// Slurm has sent it SIGTERM.
    pub terminated: Option<Millis>,
    /// When its srun is ended by force.
    pub kill_at: Option<Millis>,
    /// The slice is to be given back when the step has gone, or at this time.
    pub release_at: Option<Millis>,
    /// Slurm has taken the slice back.
    pub released: bool,
}

/// How long a supervisor may take to go after Stop.
const STOP: Millis = 3_000;
/// How long the release of a slice waits for its step, so that Slurm need not end the step itself.
const STEP_FIRST: Millis = 1_500;

impl Core {
    pub(super) fn start_unit(
        &mut self,
        slice: Option<JobId>,
        node: NodeName,
        gpus: GpuCount,
        cpus: u32,
        indexes: Vec<u32>,
        token: Option<String>,
    ) -> UnitId {
        let id = UnitId(self.next_unit);
        self.next_unit += 1;
        self.out.push(Effect::StartUnit { unit: id, slice, node: node.clone(), gpus });
        let unit = Unit {
            id,
            slice,
            node,
            gpus,
            cpus,
            indexes,
            token,
            state: UnitState::Starting,
            addr: String::new(),
            agent: false,
            leaving: false,
            terminated: None,
            kill_at: None,
            release_at: None,
            released: false,
        };
        self.units.insert(id, unit);
        id
    }

    pub(super) fn unit_up(&mut self, id: UnitId, addr: String, gpus: Vec<String>, agent: bool) {
        let Some(unit) = self.units.get_mut(&id) else { return };
        if unit.state != UnitState::Starting {
            return;
        }
        unit.state = UnitState::Up;
        unit.addr = addr;
        unit.agent = agent;
        let (seen, wanted) = (gpus.len(), usize::try_from(unit.gpus).unwrap_or(usize::MAX));
        if seen >= wanted {
            return;
        }
        // A member without its devices would be a rank without a GPU: it never joins (B26).
        let (slice, node) = (unit.slice, unit.node.clone());
        let what = format!(
            "{node}: Slurm allocated {wanted} GPU(s) and CUDA_VISIBLE_DEVICES of the step shows {seen} ({}); a step gets only GPUs near \
             its CPUs: ask for CPUs near all of them, e.g. --cpus-per-gpu=1",
            if gpus.is_empty() { "empty or NoDevFiles".to_owned() } else { gpus.join(",") }
        );
        match slice {
            None => {
                self.say(format!("{what}: nothing started"));
                self.begin_end(exit::NO_WORLD, 0);
            }
            Some(_) => {
                self.say(format!("{what}: the slice is given back"));
                self.give_back(id);
            }
        }
    }

    pub(super) fn unit_gone(&mut self, id: UnitId, why: &str) {
        let Some(unit) = self.units.get_mut(&id) else { return };
        let (before, slice, node) = (unit.state, unit.slice, unit.node.clone());
        let expected = unit.leaving || unit.kill_at.is_some();
        if before == UnitState::Gone {
            return;
        }
        unit.state = UnitState::Gone;
        let release = unit.release_at.take().and(unit.slice);
        self.out.extend(release.map(Effect::Release));
        self.ranks_lost(id);
        if self.ending.is_some() {
            return;
        }
        match slice {
            None if before == UnitState::Starting => {
                self.say(format!("the step on {node} could not be started: {why}"));
                self.begin_end(exit::SLURM, 0);
            }
            None => {
                self.say(format!("the step on {node} is lost: {why}"));
                self.begin_end(exit::FAILURE, 2_000);
            }
            Some(job) => {
                if !expected {
                    self.say(format!("the step of slice {job} on {node} is lost: {why}"));
                }
                self.lose(id);
            }
        }
    }

    /// Ends a unit's supervisor and gives its slice back to Slurm as soon as it is gone.
    pub(super) fn give_back(&mut self, id: UnitId) {
        let now = self.now;
        let Some(unit) = self.units.get_mut(&id) else { return };
        unit.leaving = true;
        if unit.state != UnitState::Gone && unit.kill_at.is_none() {
            unit.kill_at = Some(now + STOP);
            self.out.push(Effect::Tell(id, ToSupervisor::Stop));
        }
        self.release(id, STEP_FIRST);
    }

    /// Gives the slice of a unit back to Slurm when its step has gone, or after `wait`.
    pub(super) fn release(&mut self, id: UnitId, wait: Millis) {
        let now = self.now;
        let Some(unit) = self.units.get_mut(&id) else { return };
        let Some(slice) = unit.slice.filter(|_| !unit.released) else { return };
        if !self.releasing.insert(slice) {
            return;
        }
        if unit.state == UnitState::Gone {
            self.out.push(Effect::Release(slice));
        } else {
            unit.release_at = Some(now + wait);
        }
    }

    pub(super) fn released(&mut self, slice: JobId) {
        self.releasing.remove(&slice);
        if let Some(unit) = self.units.values_mut().find(|u| u.slice == Some(slice)) {
            unit.released = true;
        }
        self.units.retain(|_, u| !u.released || u.state != UnitState::Gone);
    }

    /// The slices that are held, those on their way out included.
    pub(super) fn slices(&self) -> Vec<JobId> {
        self.units.values().filter(|u| u.state != UnitState::Gone).filter_map(|u| u.slice).collect()
    }

    pub(super) fn unit_of(&self, slice: JobId) -> Option<&Unit> {
        self.units.values().find(|u| u.slice == Some(slice))
    }

    /// GPUs of the base and of the slices that stay.
    pub(super) fn size(&self) -> GpuCount {
        self.units.values().filter(|u| u.state != UnitState::Gone && !u.leaving).map(|u| u.gpus).sum()
    }
}
