//! JSON: the types of `pliant_protocol::admin` as they are, so that the keys are those of the protocol.

use super::Output;
use pliant_model::gpu::GpuEvent;
use pliant_protocol::admin::{Explanation, Finding, GpuView, JobView, Status};
use serde::Serialize;

/// The top keys of each command, for the manual; what lies below has the names of `pliant_protocol::admin`.
pub const KEYS: &[(&str, &str)] = &[
    (
        "status",
        "software, since, slurm_as_of, fresh, operator, agents, nodes, gpus, gpus_idle, gpus_lent, jobs, pending, \
         resizes, select (following, idle, honoured, missed, gaps, plans). Times are seconds since the Unix epoch",
    ),
    (
        "jobs",
        "jobs: a list of objects with user, connected, now (a reason, or null) and status: base, instance, command, \
         range, base_gpus, base_nodes, cpus_per_gpu, partition, kind, feature, locality, grace, ends_at, generation, \
         world, ready, slices, order, done, progress",
    ),
    (
        "explain",
        "job, view (as one of jobs, or null), now (a list of reasons), placement and history: a list of objects with at_ms \
         (milliseconds since the Unix epoch), job, order, kind, state, gpus (a pair: before, after), reason. A reason is an object \
         with why, its name, and its numbers",
    ),
    (
        "gpus",
        "gpus: a list of objects with node, index, gpu (uuid, bus, minor, model, memory_mib, ...; null without an agent), \
         state, job, base, reason, sample (utilisation, memory_used_mib, processes, ...; null where none is known); \
         events: a list of objects with at_ms, boot_id, gpu, gres_index, what. What is not available is null",
    ),
    (
        "doctor",
        "findings: a list of objects with check, host (null: this one), level (ok, warn or fail), found, remedy",
    ),
];

/// `--json`
#[derive(Clone, Copy, Debug)]
pub struct Json;

#[derive(Serialize)]
struct Jobs<'a> {
    jobs: &'a [JobView],
}

#[derive(Serialize)]
struct Findings<'a> {
    findings: &'a [Finding],
}

#[derive(Serialize)]
struct Gpus<'a> {
    gpus: &'a [GpuView],
    events: &'a [GpuEvent],
}

fn text(value: &impl Serialize) -> anyhow::Result<String> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    Ok(text)
}

impl Output for Json {
    fn status(&self, status: &Status) -> anyhow::Result<String> {
        text(status)
    }

    fn jobs(&self, jobs: &[JobView]) -> anyhow::Result<String> {
        text(&Jobs { jobs })
    }

    fn explanation(&self, explanation: &Explanation) -> anyhow::Result<String> {
        text(explanation)
    }

    fn gpus(&self, gpus: &[GpuView], events: &[GpuEvent]) -> anyhow::Result<String> {
        text(&Gpus { gpus, events })
    }

    fn findings(&self, findings: &[Finding]) -> anyhow::Result<String> {
        text(&Findings { findings })
    }
}
