//! Tables for people, in squeue's manner. No colour.

use super::Output;
use super::columns::{Column, clean, left, render, right};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use pliant_model::gpu::GpuEvent;
use pliant_model::resize::Kind;
use pliant_model::{GpuCount, Member, NodeName, Reason, Seconds, hostlist};
use pliant_protocol::admin::{Event, Explanation, Finding, GpuView, JobView, Level, Select, Status};
use pliant_protocol::job::{JobStatus, Millis, OrderStatus, Progress};
use std::fmt::Write as _;

/// Tables.
#[derive(Clone, Debug)]
pub struct Table {
    header: bool,
    zone: TimeZone,
    /// Unix time.
    now: Seconds,
}

const JOBS: [Column; 9] = [
    right("JOBID", 8),
    left("USER", 8),
    left("ST", 2),
    right("GPUS", 5),
    left("MIN-MAX:STEP", 12),
    right("GEN", 4),
    left("NODES", 16),
    left("STEP/TOTAL", 12),
    left("REASON", 0),
];

const HISTORY: [Column; 6] =
    [left("TIME", 23), left("RESIZE", 6), left("KIND", 6), left("ARROW", 9), left("GPUS", 6), left("REASON", 0)];

const FINDINGS: [Column; 4] = [left("LEVEL", 5), left("HOST", 4), left("CHECK", 16), left("FOUND", 0)];

impl Table {
    /// Tables with times of this host's zone.
    pub fn local(header: bool) -> Table {
        Table { header, zone: TimeZone::system(), now: u64::try_from(Timestamp::now().as_second()).unwrap_or(0) }
    }

    /// Tables as of a given time, in UTC.
    #[cfg(test)]
    pub fn at(header: bool, now: Seconds) -> Table {
        Table { header, zone: TimeZone::UTC, now }
    }

    fn time(&self, at: Seconds) -> String {
        self.millis(at.saturating_mul(1000), "%Y-%m-%dT%H:%M:%S")
    }

    fn millis(&self, at: Millis, form: &str) -> String {
        i64::try_from(at)
            .ok()
            .and_then(|ms| Timestamp::from_millisecond(ms).ok())
            .map_or_else(|| "Unknown".to_owned(), |t| t.to_zoned_datetime(self.zone.clone()).strftime(form).to_string())
    }

    fn sentence(&self, reason: &Reason) -> String {
        match reason {
            // The model knows no clock and no zone.
            Reason::Withdrawn { waited, slurm, expected_start: Some(at) } => {
                format!("slice not allocated in {waited} s, Slurm says {slurm}, expected start at {}", self.time(*at))
            }
            other => other.to_string(),
        }
    }

    fn order(&self, order: &OrderStatus) -> String {
        let since = order.times.last().map(|(_, at)| self.now.saturating_sub(at / 1000));
        let slices: Vec<String> = order.slices.iter().map(ToString::to_string).collect();
        let mut text = format!("{} {} is {}", order.kind, order.id, order.state);
        if let Some(since) = since {
            let _ = write!(text, " for {since} s");
        }
        if !slices.is_empty() {
            let _ = write!(text, ", slices {}", slices.join(","));
        }
        let _ = write!(text, ": {}", self.sentence(&order.reason));
        clean(&text)
    }

    fn event(&self, event: &Event) -> [String; 6] {
        [
            self.millis(event.at_ms, "%Y-%m-%dT%H:%M:%S.%3f"),
            event.order.as_ref().map(ToString::to_string).unwrap_or_default(),
            event.kind.map(|k| k.to_string()).unwrap_or_default(),
            event.state.map(|s| s.to_string()).unwrap_or_default(),
            event.gpus.map(|(before, after)| format!("{before}->{after}")).unwrap_or_default(),
            self.sentence(&event.reason),
        ]
    }

    fn view(&self, view: &JobView) -> String {
        let status = &view.status;
        let mut out = format!(
            "Job {} of {}: {}, {} GPUs, {}, generation {}\n",
            status.base,
            clean(&view.user),
            state(view).1,
            held(status),
            range(status),
            status.generation
        );
        let mut line = |name: &str, value: String| {
            let value = clean(&value);
            if !value.is_empty() {
                let _ = writeln!(out, "  {name:<9} {value}");
            }
        };
        line("Command", status.command.clone());
        line("World", world(&status.world));
        let base = match status.base_gpus {
            0 => format!("no GPU, {}", hostlist::compress(&status.base_nodes)),
            n => format!("{n} GPUs on {}", hostlist::compress(&status.base_nodes)),
        };
        line("Base", base);
        for slice in &status.slices {
            let how = match (slice.leaving, slice.joined) {
                (true, _) => ", leaving",
                (false, true) => "",
                (false, false) => ", joining",
            };
            line("Slice", format!("{}: {} GPUs on {}{how}", slice.job, slice.gpus, slice.node));
        }
        line("Progress", progress(&status.progress));
        line("Grace", format!("{} s", status.grace));
        line("Ends", status.ends_at.map(|at| format!("{} at the latest", self.time(at))).unwrap_or_default());
        out
    }
}

impl Output for Table {
    fn status(&self, status: &Status) -> anyhow::Result<String> {
        let slurm = match status.slurm_as_of {
            Some(at) => format!(
                "answered {} s ago{}",
                self.now.saturating_sub(at),
                if status.fresh { "" } else { ": too old, nothing is changed" }
            ),
            None => "has not answered yet: nothing is changed".to_owned(),
        };
        let operator = match status.operator {
            Some(true) => "yes",
            Some(false) => "no: the agents cancel slices as root",
            None => "unknown (no slurmdbd): the agents cancel slices as root",
        };
        let rows = [
            ("pliantd", format!("{}, up since {}", clean(&status.software), self.time(status.since))),
            ("Slurm", slurm),
            ("Operator", operator.to_owned()),
            ("Agents", format!("{} on {} GPU nodes", status.agents, status.nodes)),
            ("GPUs", format!("{}, {} idle, {} lent", status.gpus, status.gpus_idle, status.gpus_lent)),
            ("Jobs", format!("{} elastic, {} pending for resources", status.jobs, status.pending)),
            ("Resizes", format!("{} under way", status.resizes)),
            ("Placement", placement(&status.select)),
        ];
        Ok(rows.iter().fold(String::new(), |out, (name, value)| out + &format!("{name:<9} {value}\n")))
    }

    fn jobs(&self, jobs: &[JobView]) -> anyhow::Result<String> {
        let rows: Vec<[String; 9]> = jobs.iter().map(|view| row(self, view)).collect();
        Ok(render(&JOBS, &rows, self.header))
    }

    fn explanation(&self, explanation: &Explanation) -> anyhow::Result<String> {
        let mut out = match &explanation.view {
            Some(view) => self.view(view),
            None => format!("Job {}: no elastic job that runs now\n", explanation.job),
        };
        if let Some(text) = &explanation.placement {
            out.push_str(&format!("Placement: {}\n", clean(text)));
        }
        let under_way = explanation.view.as_ref().and_then(|v| v.status.order.as_ref()).map(|o| self.order(o));
        let reasons = explanation.now.iter().map(|r| clean(&self.sentence(r)));
        let mut now: Vec<String> = under_way.into_iter().chain(reasons).collect();
        if now.is_empty() {
            now.push("nothing has been decided about it yet".to_owned());
        }
        out.push_str("Now\n");
        for line in now {
            let _ = writeln!(out, "  {line}");
        }
        out.push_str("History\n");
        if explanation.history.is_empty() {
            out.push_str("  none\n");
        } else {
            let rows: Vec<[String; 6]> = explanation.history.iter().map(|e| self.event(e)).collect();
            out.push_str(&render(&HISTORY, &rows, self.header));
        }
        Ok(out)
    }

    fn gpus(&self, gpus: &[GpuView], events: &[GpuEvent]) -> anyhow::Result<String> {
        let time = |at| self.millis(at, "%Y-%m-%dT%H:%M:%S");
        Ok(super::gpus::table(gpus, events, self.header, &time))
    }

    fn findings(&self, findings: &[Finding]) -> anyhow::Result<String> {
        let rows: Vec<[String; 4]> = findings
            .iter()
            .map(|f| {
                let host = f.host.as_ref().map(ToString::to_string).unwrap_or_default();
                let remedy = if f.remedy.is_empty() { String::new() } else { format!(" => {}", f.remedy) };
                [level(f.level).to_owned(), host, f.check.clone(), f.found.clone() + &remedy]
            })
            .collect();
        let mut out = render(&FINDINGS, &rows, self.header);
        if self.header {
            let count = |level| findings.iter().filter(|f| f.level == level).count();
            let _ = writeln!(
                out,
                "{} ok, {} to note, {} to mend",
                count(Level::Ok),
                count(Level::Warn),
                count(Level::Fail)
            );
        }
        Ok(out)
    }
}

fn row(table: &Table, view: &JobView) -> [String; 9] {
    let status = &view.status;
    let reason = match (&status.order, &view.now) {
        (Some(order), _) => table.order(order),
        (None, Some(reason)) => table.sentence(reason),
        (None, None) => String::new(),
    };
    let number = |n: Option<u64>| n.map_or_else(|| "-".to_owned(), |n| n.to_string());
    let steps = match (status.progress.step, status.progress.total_steps) {
        (None, None) => String::new(),
        (step, total) => format!("{}/{}", number(step), number(total)),
    };
    [
        status.base.to_string(),
        view.user.clone(),
        state(view).0.to_owned(),
        held(status).to_string(),
        range(status),
        status.generation.to_string(),
        world(&status.world),
        steps,
        reason,
    ]
}

/// Letters and words.
fn state(view: &JobView) -> (&'static str, &'static str) {
    let status = &view.status;
    match &status.order {
        _ if !view.connected => ("NC", "its launcher is not connected"),
        Some(order) if order.kind == Kind::Grow => ("GR", "growing"),
        Some(_) => ("SH", "shrinking"),
        None if held(status) == 0 => ("PD", "waiting at zero GPUs"),
        None if status.ready => ("R", "running"),
        None => ("CF", "starting"),
    }
}

/// GPUs that Slurm has given to the job group.
fn held(status: &JobStatus) -> GpuCount {
    status.slices.iter().map(|s| s.gpus).fold(status.base_gpus, GpuCount::saturating_add)
}

fn range(status: &JobStatus) -> String {
    format!("{}-{}:{}", status.range.min.unwrap_or(status.base_gpus), status.range.max, status.range.step)
}

/// `n0:2,n[1-3]:8`: GPUs of the world by node, nodes with the same number together.
fn world(members: &[Member]) -> String {
    let mut nodes: Vec<(&NodeName, GpuCount)> = vec![];
    for member in members {
        match nodes.iter_mut().find(|(node, _)| *node == &member.node) {
            Some((_, gpus)) => *gpus = gpus.saturating_add(member.gpus),
            None => nodes.push((&member.node, member.gpus)),
        }
    }
    let mut groups: Vec<(GpuCount, Vec<&NodeName>)> = vec![];
    for (node, gpus) in nodes {
        match groups.iter_mut().find(|(n, _)| *n == gpus) {
            Some((_, group)) => group.push(node),
            None => groups.push((gpus, vec![node])),
        }
    }
    let parts: Vec<String> =
        groups.into_iter().map(|(gpus, nodes)| format!("{}:{gpus}", hostlist::compress(nodes))).collect();
    parts.join(",")
}

fn progress(progress: &Progress) -> String {
    let mut parts = vec![];
    match (progress.step, progress.total_steps) {
        (Some(step), Some(total)) => parts.push(format!("step {step} of {total}")),
        (Some(step), None) => parts.push(format!("step {step}")),
        (None, Some(total)) => parts.push(format!("{total} steps in all")),
        (None, None) => {}
    }
    parts.extend(progress.samples.map(|n| format!("{n} samples")));
    parts.extend(progress.loss.map(|x| format!("loss {x:.4}")));
    parts.join(", ")
}

fn level(level: Level) -> &'static str {
    match level {
        Level::Ok => "ok",
        Level::Warn => "warn",
        Level::Fail => "FAIL",
    }
}

/// How jobs get their nodes and GPUs.
fn placement(select: &Select) -> String {
    match (&select.idle, select.following) {
        (Some(why), _) => format!("by Slurm alone: the select plugin only hands calls on ({})", clean(why)),
        (None, false) => "by Slurm alone: no select plugin is heard of".to_owned(),
        (None, true) => {
            let (jobs, classes) = select.plans;
            let (honoured, missed) = (select.honoured, select.missed);
            format!("{honoured} jobs as planned, {missed} otherwise; plans for {jobs} jobs and {classes} classes")
        }
    }
}
