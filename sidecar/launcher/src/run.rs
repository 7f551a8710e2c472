//! `pliant run`: looks at the job, starts the core, and does what it says until it says exit.

use crate::agent::{Link, LinkEvent};
use crate::base::{self, Base};
use crate::core::{Core, Effect, Event, Millis, Settings};
use crate::output::Output;
use crate::slurm::{self, Template};
use crate::steps::{self, Steps};
use crate::{environment, signals, torchrun};
use pliant_model::{GpuRange, JobId, Locality, Seconds};
use pliant_protocol::config::{Config, Elastic};
use pliant_protocol::local::{FromAgent, Role, ToAgent};
use pliant_protocol::options::{self, Request};
use pliant_protocol::step::Setup;
use pliant_protocol::{VERSION, exit};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// What `pliant run` was asked to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    /// `[rank] ` before each line of output.
    pub label: bool,
    /// The command and its arguments.
    pub command: Vec<String>,
}

/// Why nothing was started: exit code and one line.
struct Refusal(u8, String);

/// Between two looks at the clock.
const TICK: Duration = Duration::from_millis(100);
/// A first look at the job that fails is begun anew for so long; one look may take 20 s more.
const LOOK: Duration = Duration::from_secs(70);
/// Between two of them.
const PAUSE: Duration = Duration::from_secs(2);
/// A look at the slices that fails is repeated for so long.
const CHECK: Duration = Duration::from_secs(20);

/// Runs a command as the ranks of the job, and ends with the code that `pliant_protocol::exit` describes.
pub fn run(options: RunOptions) -> u8 {
    match begin(options) {
        Ok(launcher) => launcher.main(),
        Err(Refusal(code, text)) => {
            say(&text);
            code
        }
    }
}

/// One line for the user.
fn say(text: &str) {
    eprintln!("pliant: {text}");
}

struct Launcher {
    core: Core,
    events: mpsc::Receiver<Event>,
    tell: Sender<Event>,
    steps: Steps,
    out: steps::Out,
    link: Option<Link>,
    template: Arc<Template>,
    withdraw: Arc<AtomicBool>,
    base: JobId,
    kill_wait: Seconds,
    zero: Instant,
}

/// What is known of the job before anything starts.
struct Looked {
    base: Base,
    request: Option<Request>,
    ends: Option<Seconds>,
    kill_wait: Seconds,
    cpus_per_gpu: u32,
    mem_per_gpu: Option<u64>,
}

fn env(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Asks until Slurm answers, or `until`: a controller that is being restarted ends no job at its start.
fn patiently<T>(until: Instant, pause: Duration, mut ask: impl FnMut() -> Result<T, Refusal>) -> Result<T, Refusal> {
    let mut said = false;
    loop {
        match ask() {
            Err(Refusal(exit::SLURM, why)) if Instant::now() + pause < until && !why.contains("Invalid job id") => {
                if !std::mem::replace(&mut said, true) {
                    say(&format!("{why}; trying again for a while"));
                }
                std::thread::sleep(pause);
            }
            other => return other,
        }
    }
}

fn look(job: JobId) -> Result<Looked, Refusal> {
    let slurm = |e: slurm::SlurmError| Refusal(exit::SLURM, format!("nothing started: {e}"));
    let request = environment::request(env);
    if let (None, Some(text)) = (request, env(options::JOB_ELASTIC)) {
        let text = options::shown(&text);
        return Err(Refusal(
            exit::UNFIT,
            format!("{}={text}: expected {}", options::JOB_ELASTIC, pliant_model::range::GRAMMAR),
        ));
    }
    let record = slurm::show_job(job).map_err(slurm)?;
    let base = Base::parse(&record, job)
        .ok_or_else(|| Refusal(exit::SLURM, format!("nothing started: Slurm's record of job {job} cannot be read")))?;
    let left = slurm::states(&[job]).map_err(slurm)?;
    let left = left.into_iter().find(|(id, ..)| *id == job).map(|(_, _, left)| left);
    let ends = left.and_then(|l| base::time_left(&l).ok()).flatten();
    let config = slurm::show_config().map_err(slurm)?;
    let mut looked = Looked {
        request,
        ends,
        kill_wait: base::config_number(&config, "KillWait").unwrap_or(30),
        cpus_per_gpu: base.cpus_of_a_gpu(None),
        mem_per_gpu: base.mem_per_gpu,
        base,
    };
    let Some(request) = looked.request else { return Ok(looked) };
    let (all, share) = slurm::partition_gpus(&looked.base.partition, looked.base.cpus).map_err(slurm)?;
    // A partition whose GPUs sinfo does not show is no reason to refuse.
    if let Some(why) = looked.base.unfit(request.range, Some(all).filter(|n| *n > 0)) {
        return Err(Refusal(exit::UNFIT, why));
    }
    if looked.base.gpus() == 0 {
        let partition = slurm::show_partition(&looked.base.partition).map_err(slurm)?;
        let default = |name| base::job_default(&partition, name).or_else(|| base::job_default(&config, name));
        let cpus = default("DefCpuPerGPU").and_then(|n| u32::try_from(n).ok());
        looked.cpus_per_gpu = looked.base.cpus_of_a_gpu(cpus.or(share));
        looked.mem_per_gpu = looked.mem_per_gpu.or_else(|| default("DefMemPerGPU"));
    }
    Ok(looked)
}

fn begin(options: RunOptions) -> Result<Launcher, Refusal> {
    let zero = Instant::now();
    let job: JobId = env("SLURM_JOB_ID").and_then(|id| id.parse().ok()).ok_or_else(|| {
        Refusal(
            exit::NO_WORLD,
            "pliant run: not inside a Slurm job (SLURM_JOB_ID is not set); put it into a batch script".into(),
        )
    })?;
    if options.command.is_empty() {
        return Err(Refusal(exit::USAGE, "pliant run: no command; write pliant run -- COMMAND".into()));
    }
    let named = env("PLIANT_CONFIG").map(PathBuf::from);
    let config = Config::find(named.as_deref()).unwrap_or_else(|e| {
        say(&format!("{e}; going on with the defaults"));
        Config::default()
    });
    if let Some(why) = environment::heterogeneous(job, env) {
        return Err(Refusal(exit::UNFIT, why));
    }
    let looked = patiently(zero + LOOK, PAUSE, || look(job))?;
    let instance = slurm::random_word().map_err(|e| Refusal(exit::FAILURE, format!("/dev/urandom: {e}")))?;
    let command = torchrun::look(&options.command);
    if !command.stripped.is_empty() {
        say(&format!("the world comes from the job: left out of torchrun's flags: {}", command.stripped.join(" ")));
    }
    let agent = match looked.request {
        Some(_) => config.agent.socket.clone(),
        None => String::new(),
    };
    let setup = Setup {
        version: VERSION,
        base: job,
        instance: instance.clone(),
        slice: None,
        command: command.command,
        directory: std::env::current_dir().map(|d| d.display().to_string()).unwrap_or("/".into()),
        environment: steps::environment_for_ranks(),
        torchrun: command.torchrun,
        agent: agent.clone(),
    };
    let program = std::env::current_exe().map_err(|e| Refusal(exit::FAILURE, format!("own program: {e}")))?;
    let (tell, events) = mpsc::channel();
    let out: steps::Out = Arc::new(Mutex::new(Output::new(options.label, std::io::stdout(), std::io::stderr())));
    let settings = settings(&looked, &instance, &options.command, command.torchrun, &config.elastic);
    let link = looked.request.map(|_| connect(&agent, &instance, &tell));
    let for_signals = tell.clone();
    signals::watch(false, move |signal| for_signals.send(Event::Signal(signal)).is_ok())
        .map_err(|e| Refusal(exit::FAILURE, format!("signals: {e}")))?;
    Ok(Launcher {
        core: Core::new(settings, Box::new(|| slurm::random_word().unwrap_or_default())),
        events,
        steps: Steps::new(job, setup, program, out.clone(), tell.clone()),
        tell,
        out,
        link,
        template: Arc::new(Template { base: looked.base.clone(), instance, mem_per_gpu: looked.mem_per_gpu }),
        withdraw: Arc::default(),
        base: job,
        kill_wait: looked.kill_wait,
        zero,
    })
}

fn settings(looked: &Looked, instance: &str, command: &[String], torchrun: bool, elastic: &Elastic) -> Settings {
    let base = &looked.base;
    let range = GpuRange { min: None, max: base.gpus().max(1), step: 1 };
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    Settings {
        base: JobId(base.job),
        instance: instance.to_owned(),
        command: command.join(" "),
        elastic: looked.request.is_some(),
        range: looked.request.map_or(range, |r| r.range),
        locality: looked.request.map_or(Locality::default(), |r| r.locality),
        grace: looked.request.map_or(60, |r| r.grace),
        grace_max: elastic.grace_max,
        client_wait: elastic.client_wait,
        nodes: base.nodes.clone(),
        cpus_per_gpu: looked.cpus_per_gpu,
        partition: base.partition.clone(),
        kind: base.kind.clone(),
        feature: base.feature(),
        ends: looked.ends.map(|left| left.saturating_mul(1_000)),
        kill_wait: looked.kill_wait,
        unix_at_zero: u64::try_from(unix).unwrap_or(0),
        torchrun,
    }
}

fn connect(template: &str, instance: &str, tell: &Sender<Event>) -> Link {
    let node = env("SLURMD_NODENAME").unwrap_or_default();
    let path = env(options::JOB_AGENT).unwrap_or_else(|| template.replace("%n", &node));
    let (shown, told, tell) = (path.clone(), AtomicBool::new(false), tell.clone());
    let role = Role::Launcher { instance: instance.to_owned() };
    Link::start(PathBuf::from(path), role, move |event| {
        let event = match event {
            LinkEvent::Up => {
                if told.swap(false, Ordering::Relaxed) {
                    say("the agent of this node is there again");
                }
                Event::Agent { connected: true }
            }
            LinkEvent::Down(why) => {
                if !told.swap(true, Ordering::Relaxed) {
                    say(&format!("no agent at {shown} ({why}): running on the GPUs that the job has"));
                }
                Event::Agent { connected: false }
            }
            LinkEvent::Frame(FromAgent::Order(order)) => Event::Order(order),
            LinkEvent::Frame(FromAgent::Daemon { connected }) => Event::Daemon { connected },
            LinkEvent::Frame(_) => return true,
        };
        tell.send(event).is_ok()
    })
}

impl Launcher {
    fn now(&self) -> Millis {
        u64::try_from(self.zero.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn main(mut self) -> u8 {
        let mut effects = self.core.start(self.now());
        loop {
            for effect in std::mem::take(&mut effects) {
                if let Some(code) = self.perform(effect) {
                    let _ = self.out.lock().unwrap_or_else(PoisonError::into_inner).finish();
                    return code;
                }
            }
            let event = match self.events.recv_timeout(TICK) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Event::Tick,
            };
            effects = self.core.handle(event, self.now());
        }
    }

    fn perform(&mut self, effect: Effect) -> Option<u8> {
        match effect {
            Effect::StartUnit { unit, slice, node, gpus } => self.steps.start(unit, slice, node, gpus),
            Effect::Tell(unit, message) => self.steps.send(unit, &message),
            Effect::KillStep(unit) => self.steps.kill(unit),
            Effect::Ask(ask) => {
                self.withdraw.store(false, Ordering::Relaxed);
                let (template, withdraw) = (self.template.clone(), self.withdraw.clone());
                self.aside(move || {
                    let outcome = template.request(&ask, &withdraw);
                    vec![Event::Asked { token: ask.token, outcome }]
                });
            }
            Effect::WithdrawAll => self.withdraw.store(true, Ordering::Relaxed),
            Effect::Release(slice) => self.aside(move || {
                // As long as it takes: slurmctld may be away.
                let done = slurm::release(slice, Duration::from_secs(30 * 86_400));
                if done { vec![Event::Released { slice }] } else { vec![] }
            }),
            Effect::Check { number, slices } => self.check(number, slices),
            Effect::AskBase => {
                let base = self.base;
                self.aside(move || vec![Event::BaseGoesOn(slurm::goes_on(base))]);
            }
            Effect::AskPreemption(slice) => {
                let kill_wait = self.kill_wait;
                self.aside(move || vec![Event::Preempted { slice, grace: slurm::preemption(slice, kill_wait) }]);
            }
            Effect::Agent(message) => self.to_agent(&message),
            Effect::Say(text) => say(&text),
            Effect::Exit(code) => return Some(code),
        }
        None
    }

    fn to_agent(&self, message: &ToAgent) {
        if let Some(link) = &self.link {
            // Lost: the link reports it and everything is told anew.
            let _ = link.send(message);
        }
    }

    /// Does something that waits for Slurm in a thread of its own.
    fn aside(&self, work: impl FnOnce() -> Vec<Event> + Send + 'static) {
        let tell = self.tell.clone();
        std::thread::spawn(move || work().into_iter().all(|event| tell.send(event).is_ok()));
    }

    fn check(&self, number: u64, slices: Vec<JobId>) {
        let (base, zero) = (self.base, self.zero);
        let mut jobs = slices;
        jobs.push(base);
        self.aside(move || {
            let Some(found) = slurm::states_within(&jobs, CHECK) else { return vec![] };
            let now = u64::try_from(zero.elapsed().as_millis()).unwrap_or(u64::MAX);
            let told = |(job, state, left): (JobId, String, String)| {
                if job == base {
                    let left = base::time_left(&left).ok()?;
                    return Some(Event::Ends { at: left.map(|s| now + s.saturating_mul(1_000)) });
                }
                let gone = pliant_model::job_state::is_over(&state) || state == "COMPLETING";
                gone.then_some(Event::SliceEnded { slice: job, state })
            };
            found.into_iter().filter_map(told).chain([Event::Checked { number }]).collect()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slurm_that_comes_back_is_waited_for() {
        let (pause, mut asked) = (Duration::from_millis(1), 0);
        let mut after = |times: u32, code: u8, text: &str, within: u64| {
            asked = 0;
            let answer = patiently(Instant::now() + Duration::from_millis(within), pause, || {
                asked += 1;
                if asked > times { Ok(asked) } else { Err(Refusal(code, text.into())) }
            });
            answer.map_err(|Refusal(code, _)| (code, asked))
        };
        assert_eq!(after(3, exit::SLURM, "no answer", 5_000), Ok(4));
        assert_eq!(after(3, exit::UNFIT, "unfit", 5_000), Err((exit::UNFIT, 1)));
        assert_eq!(after(3, exit::SLURM, "Invalid job id specified", 5_000), Err((exit::SLURM, 1)));
        assert!(matches!(after(u32::MAX, exit::SLURM, "no answer", 50), Err((exit::SLURM, n)) if n > 1));
    }
}
