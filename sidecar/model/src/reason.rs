//! Why something was decided, or not: typed, with its numbers, and one sentence for people.

use crate::gpu::GpuId;
use crate::ids::{GpuCount, JobId, NodeName, OrderId, Seconds};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The reason of a decision, a non-decision, or of how a resize ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reason {
    /// Grow: idle GPUs are shared evenly among the elastic jobs.
    IdleGpus {
        /// GPUs idle and not kept for a pending job.
        idle: GpuCount,
        /// Elastic jobs that could take some.
        takers: u32,
        /// Size before.
        from: GpuCount,
        /// Size after.
        to: GpuCount,
    },
    /// Shrink: the release lets a pending job start.
    PendingJob {
        /// The job that waits.
        job: JobId,
        /// GPUs it asks for.
        wants: GpuCount,
        /// GPUs idle where it may run.
        idle: GpuCount,
        /// GPUs taken back from this job.
        taken: GpuCount,
    },
    /// No growth: at MAX (or the last step below it).
    AtMax {
        /// Its size.
        size: GpuCount,
        /// MAX.
        max: GpuCount,
    },
    /// No growth: too few idle GPUs where it may have slices.
    NoIdleGpus {
        /// Idle ones there, after what is kept for pending jobs.
        idle: GpuCount,
        /// GPUs kept for pending jobs.
        kept: GpuCount,
        /// STEP, the least that a growth adds.
        step: GpuCount,
    },
    /// No change: one is under way.
    InFlight {
        /// Which.
        order: OrderId,
    },
    /// No growth: a pending job needs GPUs of this one as soon as a resize that is under way has ended.
    GivesSoon,
    /// No growth: its ranks have not finished a step yet.
    NotReady,
    /// No growth: the last attempt was withdrawn.
    BackOff {
        /// Seconds until the next attempt.
        left: Seconds,
    },
    /// No growth: the base ends soon.
    EndsSoon {
        /// Seconds until its time limit.
        left: Seconds,
    },
    /// No change at all: what is known of Slurm is too old.
    StaleView {
        /// Its age in seconds.
        age: Seconds,
    },
    /// No change to this job: its launcher is not connected.
    NoLauncher,
    /// A pending job gets nothing: even all slices would not let it start.
    CannotFit {
        /// GPUs it asks for.
        wants: GpuCount,
        /// GPUs that it could have with all slices released.
        reachable: GpuCount,
    },
    /// A pending job gets nothing more: it could start by our reckoning and Slurm does not start it.
    NotStarted {
        /// Seconds since it could.
        since: Seconds,
    },
    /// A pending job gets nothing more for a while: slices were taken back for it and it did not start.
    ServedInVain {
        /// How often.
        times: u32,
    },
    /// A growth undone: Slurm did not allocate the slice in time.
    Withdrawn {
        /// Seconds waited.
        waited: Seconds,
        /// Slurm's own reason for the pending slice.
        slurm: String,
        /// When Slurm expected to start it (Unix time), where it said.
        expected_start: Option<Seconds>,
    },
    /// A growth undone: Slurm refused the slice.
    Refused {
        /// What salloc said.
        slurm: String,
    },
    /// A resize undone: the newcomers did not come up, or the ranks did not come back.
    Failed {
        /// What happened.
        what: String,
    },
    /// Slurm takes a slice back itself (preemption): adopted as a shrink.
    Preempted {
        /// The slice.
        slice: JobId,
        /// Seconds until Slurm kills it.
        grace: Seconds,
    },
    /// A slice is gone and we did not release it (cancelled, node lost, time limit).
    SliceGone {
        /// The slice.
        slice: JobId,
        /// Its node.
        node: NodeName,
    },
    /// A GPU of the job is lost; a slice that holds it is given back and replaced elsewhere.
    GpuLost {
        /// Which.
        gpu: GpuId,
        /// Slurm's GRES index of it.
        index: Option<u32>,
        /// The slice that holds it; `None`: the base.
        slice: Option<JobId>,
    },
    /// The grace ran out: the ranks did not leave at a boundary and were ended.
    GraceOver {
        /// The grace in seconds.
        grace: Seconds,
    },
    /// A slice cancelled: its base is gone or has a new launcher.
    Orphan {
        /// The slice.
        slice: JobId,
    },
    /// A slice cancelled: its launcher has not renewed the lease.
    LeaseOver {
        /// The slice.
        slice: JobId,
        /// Seconds without a renewal.
        silent: Seconds,
    },
    /// A resize resumed or undone after a restart of pliantd.
    Recovered {
        /// What was found.
        found: String,
    },
    /// A resize ended as intended.
    Done {
        /// Seconds from the decision to the end.
        took: Seconds,
    },
}

impl fmt::Display for Reason {
    #[allow(clippy::too_many_lines)] // one arm per variant
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::IdleGpus { idle, takers, from, to } => {
                write!(f, "{idle} idle GPUs for {takers} elastic job(s): from {from} to {to}")
            }
            Reason::PendingJob { job, wants, idle, taken } => {
                write!(f, "pending job {job} wants {wants} GPUs, {idle} are idle: {taken} taken back")
            }
            Reason::AtMax { size, max } => write!(f, "has {size} GPUs, its maximum is {max}"),
            Reason::NoIdleGpus { idle, kept, step } => {
                write!(f, "{idle} idle GPUs where it may grow ({kept} kept for pending jobs), it grows by {step}")
            }
            Reason::InFlight { order } => write!(f, "resize {order} is under way"),
            Reason::GivesSoon => f.write_str("a pending job waits for GPUs of it"),
            Reason::NotReady => f.write_str("its ranks have not finished a step yet"),
            Reason::BackOff { left } => {
                write!(f, "the last attempt was withdrawn, next one in {left} s")
            }
            Reason::EndsSoon { left } => write!(f, "its time limit is {left} s away"),
            Reason::StaleView { age } => write!(f, "Slurm's last answer is {age} s old: no change"),
            Reason::NoLauncher => f.write_str("its launcher is not connected: no change"),
            Reason::CannotFit { wants, reachable } => {
                write!(f, "wants {wants} GPUs, at most {reachable} could be had by taking slices back")
            }
            Reason::NotStarted { since } => {
                write!(f, "could start for {since} s and Slurm does not start it: its GPUs are lent again")
            }
            Reason::ServedInVain { times } => {
                write!(f, "slices were taken back for it {times} times and Slurm did not start it")
            }
            Reason::Withdrawn { waited, slurm, expected_start } => {
                write!(f, "slice not allocated in {waited} s, Slurm says {slurm}")?;
                match expected_start {
                    Some(at) => write!(f, ", expected start at {at}"),
                    None => Ok(()),
                }
            }
            Reason::Refused { slurm } => write!(f, "Slurm refused the slice: {slurm}"),
            Reason::Failed { what } => f.write_str(what),
            Reason::Preempted { slice, grace } => {
                write!(f, "Slurm preempts slice {slice}, it is killed in {grace} s")
            }
            Reason::SliceGone { slice, node } => write!(f, "slice {slice} on {node} is gone"),
            Reason::GpuLost { gpu, index, slice } => {
                write!(f, "GPU ")?;
                if let Some(index) = index {
                    write!(f, "{index} of {} ", gpu.node)?;
                }
                write!(f, "is lost ({}, {})", gpu.uuid, gpu.bus)?;
                match slice {
                    Some(slice) => write!(f, ": slice {slice} is given back"),
                    None => f.write_str(": the base holds it, which only its owner can replace"),
                }
            }
            Reason::GraceOver { grace } => {
                write!(f, "the ranks did not leave within the grace of {grace} s and were ended")
            }
            Reason::Orphan { slice } => write!(f, "slice {slice} has no living base"),
            Reason::LeaseOver { slice, silent } => {
                write!(f, "the launcher has not renewed slice {slice} for {silent} s")
            }
            Reason::Recovered { found } => write!(f, "after a restart of pliantd: {found}"),
            Reason::Done { took } => write!(f, "done after {took} s"),
        }
    }
}
