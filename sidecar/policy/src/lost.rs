//! Slices that hold a lost GPU are given back; what idle GPUs elsewhere allow replaces them in the next rounds.

use crate::{Action, Plan};
use pliant_model::{Cluster, Group, JobId, Reason};

/// Adds a shrink for each job that has nothing under way and holds a lost GPU in a slice. The base's own loss is the
/// owner's matter: it is never taken below its own GPUs.
pub(crate) fn replace(cluster: &Cluster, plan: &mut Plan) {
    let busy: Vec<JobId> = plan.actions.iter().map(Action::base).collect();
    for group in cluster.groups.iter().filter(|g| g.in_flight.is_none() && !busy.contains(&g.base)) {
        let live = || group.slices.iter().filter(|s| !s.leaving);
        let Some((slice, (gpu, index))) = live().find_map(|s| Some((s, s.lost.as_ref()?))) else { continue };
        let reason = Reason::GpuLost { gpu: gpu.clone(), index: Some(*index), slice: Some(slice.job) };
        let mut slices: Vec<JobId> = live().filter(|s| s.lost.is_some()).map(|s| s.job).collect();
        keep_to_steps(group, &mut slices);
        plan.actions.push(Action::Shrink { base: group.base, slices, reason });
    }
}

/// A size is the base plus a multiple of STEP: more slices go, smallest first, until it is.
fn keep_to_steps(group: &Group, going: &mut Vec<JobId>) {
    let step = group.range.step.max(1);
    let mut staying: Vec<_> = group.slices.iter().filter(|s| !s.leaving && !going.contains(&s.job)).collect();
    staying.sort_by_key(|s| (s.gpus, s.job));
    while staying.iter().map(|s| s.gpus).sum::<u32>() % step != 0 {
        going.push(staying.remove(0).job);
    }
}
