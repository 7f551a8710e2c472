// SPDX-License-Identifier: GPL-2.0-or-later
//! Our part of the calls other than a test: what happened is told to pliantd.

use crate::state;
use pliant_protocol::board::{Event, Outcome, SeenJob, Sight};
use slurm::select::job::Job;
use slurm::select::node;
use std::ffi::{c_int, c_void};

/// The longest text of a job that is told, in bytes.
const TEXT: usize = 256;

/// The first sight of a job.
pub fn seen<'a>(job: &Job<'a>) -> Sight<'a> {
    let (n, t) = (job.numbers(), job.texts());
    let seen = SeenJob {
        job_id: n.id,
        array_job_id: n.array,
        array_task_id: n.task,
        // Which ones is not looked at.
        array_tasks: if n.tasks_wait { "?" } else { "" },
        het_job_id: n.het,
        user_id: n.uid,
        user_name: cut(t.user),
        name: cut(t.name),
        comment: cut(t.comment),
        account: cut(t.account),
        partition: cut(t.partition),
        reservation: cut(t.reservation),
        features: cut(t.features),
        state: "PENDING",
        priority: n.priority,
        submit_time: n.submitted,
        time_limit: n.time_limit,
        num_nodes: n.min_nodes,
        max_nodes: n.max_nodes,
        num_cpus: n.min_cpus,
        cpus_per_task: n.cpus_per_task,
        num_tasks: n.tasks,
        tres_req: cut(t.tres_req),
        tres_per_job: cut(t.tres_per_job),
        tres_per_node: cut(t.tres_per_node),
        tres_per_socket: cut(t.tres_per_socket),
        tres_per_task: cut(t.tres_per_task),
        cpus_per_tres: cut(t.cpus_per_tres),
        req_nodes: cut(t.req_nodes),
        exc_nodes: cut(t.exc_nodes),
        exclusive: n.exclusive,
        batch: n.batch,
        alloc_node: cut(t.alloc_node),
        restart_count: n.restarts,
        requeue: n.requeue,
        licenses: cut(t.licenses),
    };
    let env = job.spank_env().into_iter().filter(|e| e.contains("PLIANT_")).map(cut).collect();
    Sight { job: seen, env }
}

fn cut(text: &str) -> &str {
    let mut end = text.len().min(TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default()
}

/// An event about a job, made from its record.
///
/// # Safety
/// `job` is slurmctld's own pointer of the call that is running.
pub unsafe fn about(job: *mut c_void, event: impl FnOnce(&Job<'_>) -> Event) {
    let Some(plugin) = state::plugin_for(job) else { return };
    // SAFETY: the caller's promise; the layout was checked.
    if let Some(job) = unsafe { Job::from_callback(job) } {
        plugin.tell(&event(&job));
    }
}

/// A job is about to start: is it what the plan said?
///
/// # Safety
/// As [`about`].
pub unsafe fn begin(job: *mut c_void) {
    let Some(mut plugin) = state::plugin_for(job) else { return };
    // SAFETY: as above.
    let Some(job) = (unsafe { Job::from_callback(job) }) else { return };
    // The tasks of an array are tried under one id, and start each under its own.
    let expected = plugin.expected(job.id()).or_else(|| plugin.expected(job.array()).filter(|_| job.array() != 0));
    let outcome = expected.map(|expected| {
        let other = |(n, wanted): &&(usize, u64)| job.selected(*n) != Some(*wanted);
        match expected.place.iter().find(other) {
            None => Outcome::Honoured,
            Some((n, _)) => Outcome::Not(format!("the choice on {} has changed", node::name(*n).unwrap_or("?"))),
        }
    });
    plugin.forget(job.id());
    plugin.forget(job.array());
    // Its resources come at once.
    plugin.tell_with_next(&Event::Begin { job: job.id(), outcome });
}

/// A job has its resources.
pub fn start(job: &Job<'_>) -> Event {
    Event::Start {
        job: job.id(),
        nodes: job.nodes().to_owned(),
        gpus: job.gres_detail().into_iter().map(str::to_owned).collect(),
        cpus: job.numbers().total_cpus,
    }
}

/// An event about no job.
pub fn general(event: &Event) {
    if let Some(plugin) = state::plugin() {
        plugin.tell(event);
    }
}

/// Whether a call went well.
pub fn went_well(answer: c_int) -> bool {
    answer == slurm::select::SUCCESS
}
