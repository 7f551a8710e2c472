// SPDX-License-Identifier: GPL-2.0-or-later
//! Our part of a test: the nodes and GPUs of the job's plan are all that the stock call is offered, and what it has
//! chosen is compared with the plan.

use crate::state::{self, Expected, Guard, Place, Planned, Plugin, now_ms};
use crate::{events, grow};
use pliant_protocol::board::{Event, Outcome, Shape, Signature};
use slurm::fence::Fence;
use slurm::select::job::{GpuRequest, Job};
use slurm::select::mask::{BusyGpus, Nodes};
use slurm::select::node::Gpus;
use slurm::select::{ERROR, SUCCESS, node, thread_cpu_ns};
use std::ffi::{c_int, c_void};
use std::time::Instant;

const NAME: &str = "select_p_job_test";
const AFTER: &str = "select_p_job_test:after";

/// What slurmctld asks, besides the job and the nodes.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// Least nodes.
    pub min_nodes: u32,
    /// Most nodes.
    pub max_nodes: u32,
    /// Kind of test in the low byte, flags above.
    pub mode: u16,
}

impl Asked {
    /// Whether the job starts if it can.
    fn is_run_now(self) -> bool {
        // With both flags it is a test on a cluster without the jobs that may be preempted.
        self.mode & 0xff == 0 && self.mode & 0x300 != 0x300
    }

    fn is_will_run(self) -> bool {
        self.mode & 0xff == 2
    }
}

/// What is under way around one stock call.
#[derive(Debug)]
struct Attempt<'a> {
    job: Job<'a>,
    nodes: Nodes,
    asked: Asked,
    place: Option<Place>,
    /// What became of the plan so far.
    outcome: Option<Outcome>,
    masks: Vec<BusyGpus>,
    /// The job is to wait: no stock call.
    waits: bool,
    took: Took,
}

#[derive(Clone, Copy, Debug, Default)]
struct Took {
    cpu_ns: u64,
    wall_ns: u64,
}

/// Measures our parts; nothing is asked of the system unless a bench measures.
struct Meter(Option<(u64, Instant)>);

impl Meter {
    fn start(on: bool) -> Meter {
        Meter(on.then(|| (thread_cpu_ns(), Instant::now())))
    }

    fn add_to(self, took: &mut Took) {
        if let Some((cpu, wall)) = self.0 {
            took.cpu_ns += thread_cpu_ns().saturating_sub(cpu);
            took.wall_ns += u64::try_from(wall.elapsed().as_nanos()).unwrap_or(0);
        }
    }
}

enum Verdict {
    /// The stock call's answer stands.
    Done,
    /// Ask again, with what slurmctld offered.
    Again,
}

/// A test of a job.
///
/// # Safety
/// `job` and `nodes` are slurmctld's own pointers of the call that is running; `stock` is the stock call with them.
pub unsafe fn job_test(
    fence: &Fence,
    job: *mut c_void,
    nodes: *mut c_void,
    asked: Asked,
    mut stock: impl FnMut() -> c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let begun = fence.guard(NAME, || unsafe { begin(job, nodes, asked) });
    let Some(Some(mut attempt)) = begun else { return stock() };
    if attempt.waits {
        return ERROR;
    }
    let narrowed = attempt.place.is_some();
    let answer = stock();
    match fence.guard(AFTER, || verdict(&mut attempt, answer)) {
        Some(Verdict::Done) => {
            fence.guard(NAME, || finish(attempt, answer));
            answer
        }
        Some(Verdict::Again) => {
            let answer = stock();
            fence.guard(NAME, || finish(attempt, answer));
            answer
        }
        // A panic: what was narrowed is offered whole, once.
        None => {
            attempt.masks.clear();
            if narrowed && answer != SUCCESS {
                attempt.nodes.restore();
                drop(attempt);
                return stock();
            }
            answer
        }
    }
}

/// Before the stock call. `None`: nothing of ours to do.
///
/// # Safety
/// As [`job_test`].
unsafe fn begin<'a>(job: *mut c_void, nodes: *mut c_void, asked: Asked) -> Option<Attempt<'a>> {
    let mut plugin = state::plugin_for(job)?;
    let starts = asked.is_run_now() || asked.is_will_run();
    let meter = Meter::start(plugin.measure && starts);
    // SAFETY: the caller's promise; the layout was checked.
    let (pointer, job, nodes) = unsafe { (job, Job::from_callback(job)?, Nodes::from_callback(nodes)?) };
    if plugin.is_news(&job) {
        // How the test ends is told in a moment.
        if asked.is_run_now() {
            plugin.tell_with_next(&events::seen(&job));
        } else {
            plugin.tell(&events::seen(&job));
        }
    }
    let (place, outcome, masks, took) = (None, None, vec![], Took::default());
    let mut attempt = Attempt { job, nodes, asked, place, outcome, masks, waits: false, took };
    // SAFETY: as above.
    if let Some(why) = starts.then(|| unsafe { grow::limit(&plugin, pointer, &attempt.job, &attempt.nodes) }).flatten()
    {
        attempt.outcome = Some(Outcome::Waits(why));
        attempt.waits = true;
    } else if asked.is_run_now() {
        attempt.follow(&mut plugin);
    } else if asked.is_will_run() {
        attempt.limit(&mut plugin);
    } else {
        return None;
    }
    meter.add_to(&mut attempt.took);
    if attempt.waits {
        attempt.tell(&plugin, false);
    }
    Some(attempt)
}

impl Attempt<'_> {
    /// Finds the plan of the job, or of its class, and offers the first of its places that is free.
    fn follow(&mut self, plugin: &mut Guard) {
        let Some(request) = self.job.gpus() else { return };
        let now = now_ms();
        let fresh = plugin.board.refresh(now);
        plugin.complain();
        let own = fresh.then(|| plugin.plan_of_job(self.job.id(), now)).flatten();
        let hard = own.as_ref().is_some_and(|p| p.is_hard(now));
        let mut why = None;
        if let Some(plan) = &own
            && self.take(plan, &request, &mut why)
        {
            return;
        }
        // A place that was taken meanwhile is made up for by those of the class.
        let class =
            if fresh && !hard { self.signature(&request).and_then(|s| plugin.plan_of_class(&s, now)) } else { None };
        if let Some(plan) = &class
            && self.take(plan, &request, &mut why)
        {
            return;
        }
        if own.is_none() && class.is_none() {
            self.waits = self.is_held(plugin, now);
            return;
        }
        let why = why.unwrap_or_else(|| "the plan has no place".into());
        self.waits = hard && self.left_alone(&request).is_none();
        self.outcome = Some(if self.waits { Outcome::Waits(why) } else { Outcome::Not(why) });
    }

    /// Offers the first place of a plan that is free; else says why not.
    fn take(&mut self, plan: &Planned, request: &GpuRequest<'_>, why: &mut Option<String>) -> bool {
        if let Some(text) = self.left_alone(request) {
            *why = Some(text.into());
            return false;
        }
        for place in &plan.places {
            match self.fits(place) {
                Ok(()) => {
                    self.offer(place.clone());
                    return true;
                }
                // The first place is the one that the plan is about.
                Err(text) => *why = why.take().or(Some(text)),
            }
        }
        false
    }

    fn signature<'b>(&'b self, request: &GpuRequest<'b>) -> Option<Signature<'b>> {
        let counts = [
            (Shape::PerJob, request.per_job),
            (Shape::PerTask, request.per_task),
            (Shape::PerSocket, request.per_socket),
            (Shape::PerNode, request.per_node),
        ];
        let (shape, gpus) = counts.into_iter().find(|(_, n)| *n > 0)?;
        Some(Signature {
            partition: self.job.partition(),
            features: self.job.features(),
            kind: request.kind,
            uid: self.job.uid(),
            min_nodes: self.asked.min_nodes,
            max_nodes: self.asked.max_nodes,
            shape,
            gpus: u32::try_from(gpus).ok()?,
        })
    }

    /// Requests that are none of ours.
    fn left_alone(&self, request: &GpuRequest<'_>) -> Option<&'static str> {
        if self.job.is_het() {
            Some("a part of a heterogeneous job is left alone")
        } else if request.kinds > 1 {
            Some("a job of several GPU types is left alone")
        } else if self.job.is_exclusive() {
            Some("an exclusive job has all GPUs of its nodes")
        } else if self.job.is_reserved() {
            Some("a job in a reservation is left alone")
        } else {
            None
        }
    }

    fn fits(&self, place: &Place) -> Result<(), String> {
        let name = |n: usize| node::name(n).unwrap_or("?");
        let count = u32::try_from(place.len()).unwrap_or(u32::MAX);
        if place.is_empty() {
            return Err("a node of the plan is not in slurm.conf".into());
        }
        if count < self.asked.min_nodes || (self.asked.max_nodes > 0 && count > self.asked.max_nodes) {
            let Asked { min_nodes, max_nodes, .. } = self.asked;
            return Err(format!("{count} nodes planned, {min_nodes} to {max_nodes} asked for"));
        }
        for (n, wanted) in place {
            if !self.nodes.offers(*n) {
                return Err(format!("{} is not among the nodes that Slurm offers", name(*n)));
            }
            let gpus = Gpus::of(*n).ok_or_else(|| format!("{} has no GPU with an index", name(*n)))?;
            if wanted & !gpus.all() != 0 {
                return Err(format!("{} has {} GPUs", name(*n), gpus.count()));
            }
            if wanted & gpus.busy() != 0 {
                return Err(format!("GPU {} of {} is busy", (wanted & gpus.busy()).trailing_zeros(), name(*n)));
            }
        }
        if let Some(missing) = self.job.required().into_iter().find(|r| !place.iter().any(|(n, _)| n == r)) {
            return Err(format!("the user insists on {}", name(missing)));
        }
        Ok(())
    }

    fn offer(&mut self, place: Place) {
        let nodes: Vec<usize> = place.iter().map(|(n, _)| *n).collect();
        self.nodes.narrow(&nodes);
        self.masks = place.iter().filter_map(|(n, g)| Some(BusyGpus::mark(Gpus::of(*n)?, !g))).collect();
        self.place = Some(place);
    }

    /// In a test of when the job could start only a hard plan counts, and only its nodes.
    fn limit(&mut self, plugin: &mut Guard) {
        let Some(request) = self.job.gpus() else { return };
        let now = now_ms();
        if !plugin.board.refresh(now) || self.left_alone(&request).is_some() {
            return;
        }
        let Some(plan) = plugin.plan_of_job(self.job.id(), now).filter(|p| p.is_hard(now)) else { return };
        let nodes: Vec<usize> =
            plan.places.into_iter().flatten().map(|(n, _)| n).filter(|n| self.nodes.offers(*n)).collect();
        if !nodes.is_empty() {
            self.nodes.narrow(&nodes);
            self.place = Some(vec![]);
        }
    }

    /// Whether the job waits for a plan: elastic, young, and the admin wants it.
    fn is_held(&self, plugin: &Plugin, now: u64) -> bool {
        let submitted = u64::try_from(self.job.numbers().submitted).unwrap_or(0).saturating_mul(1000);
        let young = now < submitted.saturating_add(plugin.hold_ms);
        plugin.hold_ms > 0 && young && self.job.spank_env().iter().any(|e| e.contains("PLIANT_JOB_ELASTIC="))
    }

    fn tell(&self, plugin: &Plugin, fits: bool) {
        if self.asked.is_run_now() {
            plugin.tell(&Event::Test { job: self.job.id(), fits, outcome: self.outcome.clone() });
        }
    }
}

/// After the first stock call.
fn verdict(attempt: &mut Attempt<'_>, answer: c_int) -> Verdict {
    attempt.masks.clear();
    let Some(place) = attempt.place.take() else {
        return if answer == SUCCESS && attempt.asked.is_run_now() && turn_links(attempt) {
            Verdict::Again
        } else {
            Verdict::Done
        };
    };
    if answer == SUCCESS {
        if attempt.asked.is_run_now() {
            attempt.outcome = Some(compare(&attempt.job, &place));
            attempt.place = Some(place);
        }
        return Verdict::Done;
    }
    attempt.nodes.restore();
    attempt.outcome = Some(Outcome::Not("Slurm refuses the place of the plan".into()));
    Verdict::Again
}

/// What the test has chosen, against the plan.
fn compare(job: &Job<'_>, place: &Place) -> Outcome {
    for (n, wanted) in place {
        let name = node::name(*n).unwrap_or("?");
        match job.selected(*n) {
            None => return Outcome::Not(format!("Slurm names no GPU on {name}: Cores= is missing in gres.conf")),
            Some(got) if got != *wanted => {
                return Outcome::Not(format!("on {name} GPUs {got:#x} instead of {wanted:#x}"));
            }
            Some(_) => {}
        }
    }
    Outcome::Honoured
}

/// Slurm's sort of links is the wrong way round since 24.05: turns the counts of the chosen nodes, once for each
/// registration of a node. Whether any was turned, so that the test is to be made again.
fn turn_links(attempt: &Attempt<'_>) -> bool {
    if cfg!(before_2405) || attempt.job.gpus().is_none() {
        return false;
    }
    let chosen = attempt.nodes.ones();
    chosen.into_iter().filter_map(Gpus::of).filter(|g| g.turn_links()).count() > 0
}

/// After the last stock call.
fn finish(mut attempt: Attempt<'_>, answer: c_int) {
    let Some(mut plugin) = state::plugin() else { return };
    let meter = Meter::start(plugin.measure);
    let job = attempt.job.id();
    match attempt.place.take().filter(|_| answer == SUCCESS && attempt.outcome == Some(Outcome::Honoured)) {
        Some(place) => plugin.expect(Expected { job, place }),
        None => plugin.forget(job),
    }
    attempt.tell(&plugin, answer == SUCCESS);
    let (mut took, asked) = (attempt.took, attempt.asked);
    drop(attempt);
    meter.add_to(&mut took);
    if plugin.measure && asked.is_run_now() {
        plugin.tell(&Event::Took { job, cpu_ns: took.cpu_ns, wall_ns: took.wall_ns });
    }
}
