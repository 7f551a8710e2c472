//! The table of `pliant gpus`. What is not available is `-`, never 0.

use super::columns::{Column, left, render, right};
use pliant_model::gpu::GpuEvent;
use pliant_protocol::admin::{GpuState, GpuView};

const GPUS: [Column; 9] = [
    left("NODE", 8),
    right("IDX", 3),
    left("MODEL", 24),
    left("STATE", 11),
    right("JOB", 8),
    right("UTIL", 4),
    right("MEM", 13),
    right("TEMP", 4),
    left("REASON", 0),
];

const EVENTS: [Column; 4] = [left("TIME", 19), left("NODE", 8), right("IDX", 3), left("EVENT", 0)];

fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |v| v.to_string())
}

fn state(state: GpuState) -> &'static str {
    match state {
        GpuState::Idle => "idle",
        GpuState::Used => "used",
        GpuState::Lent => "lent",
        GpuState::Held => "held",
        GpuState::Unavailable => "unavailable",
        GpuState::Lost => "lost",
        GpuState::Unknown => "unknown",
    }
}

fn row(g: &GpuView) -> [String; 9] {
    let sample = g.sample.as_ref();
    let used = sample.and_then(|s| s.memory_used_mib);
    let total = g.gpu.as_ref().and_then(|g| g.memory_mib);
    let job = match (g.base, g.job) {
        (Some(base), _) => Some(base),
        (None, job) => job,
    };
    [
        g.node.to_string(),
        or_dash(g.index),
        or_dash(g.gpu.as_ref().and_then(|g| g.model.clone())),
        state(g.state).to_owned(),
        or_dash(job),
        sample.and_then(|s| s.utilisation).map_or_else(|| "-".to_owned(), |u| format!("{u}%")),
        format!("{}/{}", or_dash(used), or_dash(total)),
        or_dash(sample.and_then(|s| s.temperature_c)),
        g.reason.clone(),
    ]
}

/// GPUs, and below them what has happened, newest first.
pub fn table(gpus: &[GpuView], events: &[GpuEvent], header: bool, time: &dyn Fn(u64) -> String) -> String {
    let mut out = render(&GPUS, &gpus.iter().map(row).collect::<Vec<_>>(), header);
    if !events.is_empty() {
        let event = |e: &GpuEvent| {
            [time(e.at_ms), e.gpu.node.to_string(), or_dash(e.gres_index), format!("{}: {}", e.gpu.uuid, e.what)]
        };
        out.push('\n');
        out.push_str(&render(&EVENTS, &events.iter().map(event).collect::<Vec<_>>(), header));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use pliant_model::JobId;
    use pliant_model::gpu::Sample;

    #[test]
    fn what_is_not_available_is_a_dash() {
        let mut view = GpuView {
            node: "n0".into(),
            index: Some(3),
            gpu: None,
            state: GpuState::Lent,
            job: Some(JobId(12)),
            base: Some(JobId(7)),
            reason: "lent to an elastic job".into(),
            sample: None,
        };
        let text = table(&[view.clone()], &[], false, &|_| String::new());
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(words, ["n0", "3", "-", "lent", "7", "-", "-/-", "-", "lent", "to", "an", "elastic", "job"]);
        view.sample = Some(Sample { utilisation: Some(0), memory_used_mib: Some(0), ..Sample::default() });
        assert!(table(&[view], &[], false, &|_| String::new()).contains(" 0%           0/- "));
    }
}
