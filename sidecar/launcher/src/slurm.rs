//! Slurm by its commands. Each has a deadline and is killed with its whole process group when it is over: nothing
//! piles up while slurmctld is away (B52). A failed or empty answer never means that something is gone (B55).

use crate::base::Base;
use crate::core::{Ask, AskOutcome};
use crate::environment;
use pliant_model::job_state::is_over;
use pliant_model::{JobId, NodeName, Seconds, gres};
use pliant_protocol::job::{SliceMark, slice_name};
use rustix::process::{Pid, Signal, kill_process_group};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// For a look at Slurm's tables.
const LOOK: Duration = Duration::from_secs(20);
/// For a look that somebody waits for with a signal in hand.
const SHORT: Duration = Duration::from_secs(4);
/// More than any answer that is read here: what says more is cut off and fails.
const MOST: u64 = 4 << 20;
/// Slices stand behind everybody else's jobs.
const NICE: &str = "--nice=1000000";

/// Why a command gave no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SlurmError {
    /// Not installed, or no process could be had.
    #[error("{command}: {source}")]
    Start {
        /// Which.
        command: String,
        /// The system's words.
        source: std::io::Error,
    },
    /// Killed after its deadline.
    #[error("{command} gave no answer in {} s", .after.as_secs())]
    Timeout {
        /// Which.
        command: String,
        /// The deadline.
        after: Duration,
    },
    /// Ended with an error.
    #[error("{command}: {text}")]
    Failed {
        /// Which.
        command: String,
        /// Its words.
        text: String,
    },
}

/// What slices are asked for with: they take over what the base has.
#[derive(Clone, Debug)]
pub struct Template {
    /// The base.
    pub base: Base,
    /// This run of the launcher.
    pub instance: String,
    /// MiB per GPU: the base's, or the site's default.
    pub mem_per_gpu: Option<u64>,
}

/// A command of Slurm with the environment that a submission may have.
pub fn command(name: &str) -> Command {
    let mut command = Command::new(name);
    command.env_clear().envs(environment::for_submission(std::env::vars_os().filter_map(text)));
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Variables that are no UTF-8 are left out.
fn text((name, value): (std::ffi::OsString, std::ffi::OsString)) -> Option<(String, String)> {
    Some((name.into_string().ok()?, value.into_string().ok()?))
}

fn kill_group(child: &Child, signal: Signal) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(pid, signal);
    }
}

/// Waits for a child at most until `deadline`.
fn wait_until(child: &mut Child, deadline: Instant) -> Option<ExitStatus> {
    let mut pause = Duration::from_millis(1);
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(pause.min(deadline.saturating_duration_since(Instant::now())));
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

fn collect(from: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (tx, rx) = mpsc::channel();
    std::thread::spawn(move || {
        let mut all = vec![];
        let _ = from.take(MOST).read_to_end(&mut all);
        let _ = tx.send(String::from_utf8_lossy(&all).into_owned());
    });
    rx
}

/// Runs a command and gives its standard output.
///
/// # Errors
/// When it cannot be started, fails, or gives no answer in time.
pub fn ask(name: &str, args: &[&str], after: Duration) -> Result<String, SlurmError> {
    let shown = || format!("{name} {}", args.join(" "));
    let mut child =
        command(name).args(args).spawn().map_err(|source| SlurmError::Start { command: shown(), source })?;
    let (out, err) = (child.stdout.take().map(collect), child.stderr.take().map(collect));
    let Some(status) = wait_until(&mut child, Instant::now() + after) else {
        kill_group(&child, Signal::KILL);
        let _ = child.wait();
        return Err(SlurmError::Timeout { command: shown(), after });
    };
    // The pipes may be held open by a grandchild; its words do not count.
    let read = |rx: Option<mpsc::Receiver<String>>| rx.and_then(|rx| rx.recv_timeout(Duration::from_secs(1)).ok());
    let (out, err) = (read(out).unwrap_or_default(), read(err).unwrap_or_default());
    if status.success() { Ok(out) } else { Err(SlurmError::Failed { command: shown(), text: one_line(&err) }) }
}

fn one_line(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    if lines.is_empty() { "it failed without a word".into() } else { lines.join("; ").chars().take(400).collect() }
}

/// `scontrol show job -d`.
///
/// # Errors
/// When Slurm does not answer.
pub fn show_job(job: JobId) -> Result<String, SlurmError> {
    ask("scontrol", &["-a", "show", "job", "-d", &job.to_string()], LOOK)
}

/// `scontrol show config`.
///
/// # Errors
/// When Slurm does not answer.
pub fn show_config() -> Result<String, SlurmError> {
    ask("scontrol", &["show", "config"], LOOK)
}

/// `scontrol show partition`.
///
/// # Errors
/// When Slurm does not answer.
pub fn show_partition(name: &str) -> Result<String, SlurmError> {
    ask("scontrol", &["-a", "show", "partition", name], LOOK)
}

/// Slurm's NodeAddr of a node.
///
/// # Errors
/// When Slurm does not answer.
pub fn node_addr(node: &NodeName) -> Result<String, SlurmError> {
    let answer = ask("scontrol", &["-a", "show", "node", node.as_str()], LOOK)?;
    let addr = answer.split_whitespace().find_map(|w| w.strip_prefix("NodeAddr="));
    Ok(addr.unwrap_or(node.as_str()).to_owned())
}

/// GPUs of a partition, and CPUs per GPU of its node with the fewest, as sinfo shows them. `taken` CPUs of a node are
/// left out: those of the base, beside which a slice of all the node's GPUs must fit.
///
/// # Errors
/// When Slurm does not answer.
pub fn partition_gpus(name: &str, taken: u32) -> Result<(u32, Option<u32>), SlurmError> {
    let answer = ask("sinfo", &["-h", "-N", "-p", name, "-o", "%N|%G|%c"], LOOK)?;
    let mut seen = std::collections::BTreeSet::new();
    let (mut all, mut share) = (0u32, None::<u32>);
    for line in answer.lines() {
        let mut fields = line.split('|').map(str::trim);
        let (Some(node), Some(gres), Some(cpus)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let gpus = gres::gpu_total(gres);
        if !seen.insert(node.to_owned()) || gpus == 0 {
            continue;
        }
        all = all.saturating_add(gpus);
        let here = cpus.trim_end_matches('+').parse::<u32>().ok().map(|c| (c.saturating_sub(taken) / gpus).max(1));
        share = share.into_iter().chain(here).min();
    }
    Ok((all, share))
}

/// How jobs stand: id, state, time left. Jobs that are not in the answer are simply not told about.
///
/// # Errors
/// When Slurm does not answer.
pub fn states(jobs: &[JobId]) -> Result<Vec<(JobId, String, String)>, SlurmError> {
    let list = jobs.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let answer = ask("squeue", &["-h", "--all", "-t", "all", "-j", &list, "-o", "%A|%T|%L"], LOOK)?;
    let read = |line: &str| {
        let mut fields = line.split('|').map(str::trim);
        Some((fields.next()?.parse().ok()?, fields.next()?.to_owned(), fields.next()?.to_owned()))
    };
    Ok(answer.lines().filter_map(read).collect())
}

/// The same, asked again until Slurm answers or the time is over.
pub fn states_within(jobs: &[JobId], within: Duration) -> Option<Vec<(JobId, String, String)>> {
    let until = Instant::now() + within;
    loop {
        match states(jobs) {
            Ok(found) => return Some(found),
            Err(_) if Instant::now() >= until => return None,
            Err(_) => std::thread::sleep(Duration::from_secs(1)),
        }
    }
}

/// Whether Slurm says within a few seconds that a job runs and is not being ended.
pub fn goes_on(job: JobId) -> bool {
    let answer = ask("squeue", &["-h", "--all", "-t", "all", "-j", &job.to_string(), "-o", "%T"], SHORT);
    answer.is_ok_and(|state| state.trim() == "RUNNING")
}

/// Gives a slice back. Answers once Slurm has taken it, or has it no more; `false`: not within the time.
pub fn release(slice: JobId, within: Duration) -> bool {
    let until = Instant::now() + within;
    loop {
        match ask("scancel", &[&slice.to_string()], LOOK) {
            Ok(_) => return true,
            Err(SlurmError::Failed { text, .. })
                if text.contains("Invalid job id") || text.contains("already completing or completed") =>
            {
                return true;
            }
            Err(_) if Instant::now() >= until => return false,
            Err(_) => std::thread::sleep(Duration::from_secs(2)),
        }
    }
}

/// Gives all slices of a launcher back; for the base's supervisor when the launcher is gone. Without an answer of Slurm
/// it gives up after a few seconds: the agents see to it then.
pub fn release_all(base: JobId, instance: &str) {
    let short = Duration::from_secs(5);
    let name = format!("--name={}", slice_name(base));
    let Ok(answer) = ask("squeue", &["-h", "--all", "-t", "all", &name, "-o", "%A|%T|%k"], short) else { return };
    for (job, state, mark) in marked(&answer) {
        if mark.base == base && mark.instance == instance && !is_over(&state) {
            release(job, short);
        }
    }
}

/// The slices in an answer of squeue.
fn marked(answer: &str) -> Vec<(JobId, String, SliceMark)> {
    let read = |line: &str| {
        let mut fields = line.splitn(3, '|');
        let (id, state, comment) = (fields.next()?, fields.next()?, fields.next()?);
        Some((id.trim().parse().ok()?, state.trim().to_owned(), SliceMark::parse(comment)?))
    };
    answer.lines().filter_map(read).collect()
}

/// What a SIGTERM to a slice means: seconds until Slurm kills it.
pub fn preemption(slice: JobId, kill_wait: Seconds) -> Seconds {
    let Ok(answer) = ask("squeue", &["-h", "--all", "-t", "all", "-j", &slice.to_string(), "-o", "%T|%P"], LOOK) else {
        return kill_wait;
    };
    let Some((state, partition)) = answer.lines().next().and_then(|l| l.split_once('|')) else { return kill_wait };
    if state != "RUNNING" {
        return kill_wait;
    }
    let grace = show_partition(partition.trim()).ok().and_then(|p| crate::base::number(&p, "GraceTime"));
    // Grace 0 with a running job: the grace is the QOS's, or somebody sent the signal by hand.
    grace.filter(|g| *g > 0).unwrap_or(kill_wait)
}

impl Template {
    fn job(&self) -> JobId {
        JobId(self.base.job)
    }

    fn args(&self, ask: &Ask) -> Vec<String> {
        let mark = SliceMark { base: self.job(), instance: self.instance.clone(), token: ask.token.clone() };
        let kind = self.base.kind.as_ref().map(|k| format!("{k}:")).unwrap_or_default();
        let mut args = vec![
            "--no-shell".into(),
            "-N1".into(),
            "-n1".into(),
            format!("--nodelist={}", ask.node),
            format!("--gres=gpu:{kind}{}", ask.gpus),
            format!("--cpus-per-task={}", ask.cpus),
            format!("--job-name={}", slice_name(self.job())),
            format!("--comment={mark}"),
            NICE.into(),
            // Slurm counts in minutes and rounds up: a slice must not outlive its base.
            ask.rest.map_or("--time=UNLIMITED".into(), |rest| format!("--time={}", (rest / 60).max(1))),
        ];
        let mut option = |name: &str, value: &Option<String>| {
            args.extend(value.as_ref().map(|v| format!("--{name}={v}")));
        };
        option("partition", &Some(self.base.partition.clone()));
        option("account", &self.base.account);
        option("qos", &self.base.qos);
        option("reservation", &self.base.reservation);
        option("constraint", &self.base.constraint);
        option("mem", &self.mem_per_gpu.map(|m| format!("{}M", m.saturating_mul(u64::from(ask.gpus)))));
        args
    }

    /// The slices of this launcher in Slurm that bear a token: id and state.
    fn look_up(&self, token: &str) -> Result<Vec<(JobId, String)>, SlurmError> {
        let name = format!("--name={}", slice_name(self.job()));
        let answer = ask("squeue", &["-h", "--all", "-t", "all", &name, "-o", "%A|%T|%k"], LOOK)?;
        let ours = |m: &SliceMark| m.base == self.job() && m.instance == self.instance && m.token == token;
        Ok(marked(&answer).into_iter().filter(|(_, _, m)| ours(m)).map(|(job, state, _)| (job, state)).collect())
    }

    /// Takes back whatever Slurm may have made of a request; answers once that is certain, or after a minute.
    fn clean_up(&self, token: &str) {
        for _ in 0..30 {
            if let Ok(found) = self.look_up(token) {
                let live = found.iter().filter(|(_, s)| !is_over(s) && s != "COMPLETING");
                for (job, _) in live {
                    release(*job, Duration::from_secs(60));
                }
                return;
            }
            std::thread::sleep(Duration::from_secs(2));
        }
    }

    /// Asks Slurm for a slice and waits at most its patience; `withdraw` ends the wait.
    pub fn request(&self, request: &Ask, withdraw: &AtomicBool) -> AskOutcome {
        let refused = |slurm: String| AskOutcome::Refused { slurm };
        let mut child = match command("salloc").args(self.args(request)).stdout(Stdio::null()).spawn() {
            Ok(child) => child,
            Err(e) => return refused(format!("salloc: {e}")),
        };
        let Some(stderr) = child.stderr.take() else { return refused("salloc has no stderr".into()) };
        let (tx, words) = mpsc::channel();
        std::thread::spawn(move || {
            BufReader::new(stderr).lines().map_while(Result::ok).all(|line| tx.send(line).is_ok());
        });
        let begun = Instant::now();
        let until = begun + Duration::from_secs(request.patience);
        let (mut said, mut status) = (vec![], None);
        while status.is_none() && Instant::now() < until && !withdraw.load(Ordering::Relaxed) {
            status = wait_until(&mut child, until.min(Instant::now() + Duration::from_millis(50)));
            said.extend(words.try_iter());
        }
        let Some(status) = status else {
            return self.withdraw(request, child, &said, begun);
        };
        while let Ok(line) = words.recv_timeout(Duration::from_millis(200)) {
            said.push(line);
        }
        let job = said.iter().find_map(|l| l.split_once("Granted job allocation ")?.1.trim().parse().ok());
        match job {
            Some(job) if status.success() => self.granted(request, job),
            _ => {
                let why: Vec<&str> =
                    said.iter().map(|l| l.trim_start_matches("salloc: ").trim_start_matches("error: ")).collect();
                self.clean_up(&request.token);
                refused(one_line(&why.join("\n")))
            }
        }
    }

    fn granted(&self, request: &Ask, job: JobId) -> AskOutcome {
        // Which GPUs they are is told by the record; without an answer the step will still show how many there are.
        let record = show_job(job).unwrap_or_default();
        let details = record.lines().filter(|l| l.trim_start().starts_with("Nodes="));
        let gres = details.filter_map(|l| l.split_whitespace().find_map(|w| w.strip_prefix("GRES=")));
        let cpus = number_of_cpus(&record).unwrap_or(request.cpus);
        let indexes = gres.flat_map(gres::gpu_indexes).collect();
        AskOutcome::Granted { job, node: request.node.clone(), gpus: request.gpus, cpus, indexes }
    }

    fn withdraw(&self, request: &Ask, mut child: Child, said: &[String], begun: Instant) -> AskOutcome {
        let id = said.iter().find_map(|l| {
            let (_, after) = l.split_once("job allocation ").or_else(|| l.split_once("job "))?;
            after.split_whitespace().next()?.parse::<JobId>().ok()
        });
        let (mut slurm, mut expected_start) = ("no answer".to_owned(), None);
        if let Some(id) = id
            && let Ok(answer) =
                ask("squeue", &["-h", "--all", "-j", &id.to_string(), "-o", "%r|%S"], Duration::from_secs(5))
            && let Some((reason, start)) = answer.trim().split_once('|')
        {
            slurm = reason.to_owned();
            expected_start = unix_time(start);
        }
        kill_group(&child, Signal::TERM);
        if wait_until(&mut child, Instant::now() + Duration::from_secs(2)).is_none() {
            kill_group(&child, Signal::KILL);
            let _ = child.wait();
        }
        if let Some(id) = id {
            release(id, Duration::from_secs(10));
        }
        self.clean_up(&request.token);
        AskOutcome::Withdrawn { waited: begun.elapsed().as_secs(), slurm, expected_start }
    }
}

fn number_of_cpus(record: &str) -> Option<u32> {
    record.split_whitespace().find_map(|w| w.strip_prefix("NumCPUs=")?.split('-').next()?.parse().ok())
}

/// A local time of Slurm's as Unix time, by the `date` command (the rules of the time zone are the system's).
fn unix_time(text: &str) -> Option<Seconds> {
    if !text.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    ask("date", &["-d", text, "+%s"], Duration::from_secs(2)).ok()?.trim().parse().ok()
}

/// A random word of 16 hexadecimal digits.
///
/// # Errors
/// When the system gives no random bytes.
pub fn random_word() -> std::io::Result<String> {
    let mut bytes = [0u8; 8];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template() -> Template {
        let base = Base {
            job: 7,
            partition: "p".into(),
            account: Some("a".into()),
            constraint: Some("x&y".into()),
            kind: Some("a100".into()),
            ..Base::default()
        };
        Template { base, instance: "i".into(), mem_per_gpu: Some(1000) }
    }

    #[test]
    fn a_slice_is_marked_and_bounded_by_its_base() {
        let ask = Ask { token: "t".into(), node: "n3".into(), gpus: 2, cpus: 8, patience: 5, rest: Some(119) };
        let args = template().args(&ask);
        for arg in [
            "--nodelist=n3",
            "--gres=gpu:a100:2",
            "--cpus-per-task=8",
            "--job-name=pliant-7",
            "--time=1",
            "--mem=2000M",
            "--constraint=x&y",
        ] {
            assert!(args.contains(&arg.to_owned()), "{arg}: {args:?}");
        }
        assert!(args.contains(&"--comment=pliant base=7 instance=i token=t".to_owned()));
    }

    #[test]
    fn a_command_that_hangs_is_killed_with_its_children() {
        let begun = Instant::now();
        let e = ask("sh", &["-c", "sleep 100 & sleep 100"], Duration::from_millis(200)).unwrap_err();
        assert!(matches!(e, SlurmError::Timeout { .. }) && begun.elapsed() < Duration::from_secs(5), "{e}");
        let e = ask("sh", &["-c", "echo bad >&2; exit 3"], Duration::from_secs(5)).unwrap_err();
        assert_eq!(e.to_string(), "sh -c echo bad >&2; exit 3: bad");
        let e = ask("head", &["-c", "5000000", "/dev/zero"], Duration::from_secs(10)).unwrap_err();
        assert!(matches!(e, SlurmError::Failed { .. }), "an answer without end is none: {e}");
        assert!(matches!(ask("/no/such", &[], LOOK), Err(SlurmError::Start { .. })));
    }

    #[test]
    fn only_marked_jobs_are_slices() {
        let answer = "5|RUNNING|pliant base=7 instance=i token=t\n6|PENDING|my|own job\n7|PENDING|(null)\n";
        let found = marked(answer);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].0, found[0].1.as_str(), found[0].2.token.as_str()), (JobId(5), "RUNNING", "t"));
    }

    #[test]
    fn words_are_random() {
        let (a, b) = (random_word().unwrap(), random_word().unwrap());
        assert!(a != b && a.len() == 16);
    }
}
