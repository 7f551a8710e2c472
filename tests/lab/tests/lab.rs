//! The lab itself: it comes up, jobs run, and it leaves nothing behind. Needs root and Slurm, as `./dev test` sets up.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pliant_lab::{Builder, Lab, Proc, Signal};

const LIMIT: Duration = Duration::from_secs(20);

fn small() -> Builder {
    // Batch jobs start at once instead of within 3 s.
    Lab::builder().nodes(2).gpus(4).pliant(false).conf_line("SchedulerParameters=batch_sched_delay=0")
}

/// Living processes whose command line or environment names `dir`.
fn processes_of(dir: &Path) -> Vec<u32> {
    let text = dir.to_string_lossy().into_owned();
    let names = |file: PathBuf| {
        fs::read(file).is_ok_and(|raw| {
            raw.split(|b| *b == 0).any(|part| {
                String::from_utf8_lossy(part).split(['=', ' ', ':']).any(|word| Path::new(word).starts_with(&text))
            })
        })
    };
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| *pid != std::process::id() && Proc::of(*pid).is_some())
        .filter(|pid| names(format!("/proc/{pid}/cmdline").into()) || names(format!("/proc/{pid}/environ").into()))
        .collect()
}

fn wait(limit: Duration, mut test: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    while !test() {
        if Instant::now() > end {
            return false;
        }
        thread::sleep(Duration::from_millis(20));
    }
    true
}

#[test]
fn jobs_of_both_users_get_distinct_gpus() -> Result<()> {
    let lab = small().start()?;
    let mut seen = BTreeSet::new();
    let mut jobs = Vec::new();
    for index in 0..2 {
        let user = lab.user(index);
        let job = lab.sbatch(user, &["--gpus=2", "--wrap", "id -un; echo gpus $CUDA_VISIBLE_DEVICES; sleep 60"])?;
        lab.wait_state(job, "RUNNING", LIMIT)?;
        let gpus = lab.gpus(job)?;
        assert_eq!(gpus.len(), 2, "{gpus:?}");
        assert!(gpus.iter().all(|gpu| seen.insert(gpu.clone())), "{gpus:?} are held twice");
        let output = lab.home(user).join(format!("slurm-{job}.out"));
        lab.wait_for(LIMIT, "output of the job", || {
            fs::read_to_string(&output).is_ok_and(|text| text.starts_with(user) && text.contains("gpus "))
        })?;
        jobs.push(job);
    }
    let [first, second] = jobs.as_slice() else { unreachable!() };
    assert!(lab.run(lab.user(1), &["scancel", &first.to_string()]).is_err(), "another user's job was cancelled");
    assert_eq!(lab.job_state(*first)?, "RUNNING");
    lab.run(lab.user(1), &["scancel", &second.to_string()])?;
    assert_eq!(lab.wait_end(*second, LIMIT)?, "CANCELLED");
    lab.clear()?;
    lab.down()
}

#[test]
fn gpus_are_devices_with_cores_and_distinct_minors() -> Result<()> {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let lab = small().nodes(1).gpus(8).start()?;
    let mut numbers = BTreeSet::new();
    for gpu in 0..8 {
        let meta = fs::metadata(lab.spec().devices.join(format!("gpu{gpu}")))?;
        assert!(meta.file_type().is_char_device());
        numbers.insert(meta.rdev());
    }
    assert_eq!(numbers.len(), 8);
    // With Cores= Slurm knows the sockets, and a job says which GPUs it holds.
    let job = lab.sbatch(lab.user(0), &["--gpus=8", "--cpus-per-gpu=8", "--wrap", "sleep 60"])?;
    lab.wait_state(job, "RUNNING", LIMIT)?;
    assert_eq!(lab.gpus(job)?.len(), 8);
    lab.down()
}

#[test]
fn labs_side_by_side_do_not_meet_and_leave_nothing() -> Result<()> {
    let labs: Vec<Result<Lab>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(|| small().start())).collect();
        threads.into_iter().map(|t| t.join().expect("thread")).collect()
    });
    let mut labs = labs.into_iter().collect::<Result<Vec<Lab>>>()?;
    let ports: BTreeSet<u16> = labs.iter().map(|lab| lab.spec().ports.slurmctld).collect();
    assert_eq!(ports.len(), 3);
    for lab in &labs {
        let script = "sleep 600 & setsid env -i sleep 600 & wait";
        let job = lab.sbatch(lab.user(0), &["-N2", "--gpus-per-node=1", "--export=NONE", "--wrap", script])?;
        lab.wait_state(job, "RUNNING", LIMIT)?;
    }
    let last = labs.pop().context("three labs")?;
    for lab in labs {
        let dir = lab.dir().to_path_buf();
        assert!(!processes_of(&dir).is_empty());
        lab.down()?;
        assert!(!dir.exists());
        assert_eq!(processes_of(&dir), Vec::<u32>::new());
    }
    assert_eq!(last.jobs()?.len(), 1, "the end of one lab touched another");
    assert!(last.run(last.user(0), &["srun", "--gpus=1", "true"]).is_ok());
    Ok(())
}

#[test]
fn a_lab_ends_when_its_owner_is_killed() -> Result<()> {
    let dir = PathBuf::from(format!("/tmp/pliant-lab-guarded-{}", std::process::id()));
    // The owner is another process, which is killed without a chance to clean up.
    let mut owner = Command::new("sleep").arg("600").stdin(Stdio::null()).spawn()?;
    let lab = small().dir(&dir).detached(Some(owner.id()))?.start()?;
    let job = lab.sbatch(lab.user(0), &["--gpus=1", "--wrap", "sleep 600"])?;
    lab.wait_state(job, "RUNNING", LIMIT)?;
    drop(lab);
    assert!(dir.exists(), "a detached lab outlives its handle");
    owner.kill()?;
    owner.wait()?;
    assert!(wait(LIMIT, || !dir.exists() && processes_of(&dir).is_empty()), "left: {:?}", processes_of(&dir));
    Ok(())
}

#[test]
fn a_lab_ends_when_its_test_panics() {
    let mut dir = None;
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let lab = small().start().expect("lab");
        dir = Some(lab.dir().to_path_buf());
        panic!("on purpose: the lab's logs follow");
    }));
    assert!(result.is_err());
    let dir = dir.expect("directory");
    assert!(!dir.exists());
    assert_eq!(processes_of(&dir), Vec::<u32>::new());
}

#[test]
fn services_are_killed_and_started_again() -> Result<()> {
    let lab = small().start()?;
    let job = lab.sbatch(lab.user(0), &["--gpus=1", "--wrap", "sleep 600"])?;
    lab.wait_state(job, "RUNNING", LIMIT)?;
    // SIGTERM first: slurmctld saves a new job's state only some seconds after its start.
    lab.restart_slurmctld()?;
    lab.wait_state(job, "RUNNING", LIMIT)?;
    lab.kill("slurmctld")?;
    assert!(lab.process("slurmctld").is_none());
    assert!(lab.kill("slurmctld").is_err());
    lab.start("slurmctld")?;
    lab.restart("slurmd.n1")?;
    lab.signal("slurmd.n1", Signal::STOP)?;
    lab.signal("slurmd.n1", Signal::CONT)?;
    lab.wait_state(job, "RUNNING", LIMIT)?;
    assert!(lab.start("slurmd.n2").is_err());
    assert!(lab.start("slurmd.n9").is_err());
    lab.down()
}

#[test]
fn accounts_give_pliant_operator_rights() -> Result<()> {
    let lab = small().accounting(true).start()?;
    let job = lab.sbatch(lab.user(0), &["--gpus=1", "--wrap", "sleep 600"])?;
    lab.wait_state(job, "RUNNING", LIMIT)?;
    assert!(lab.run(lab.user(1), &["scancel", &job.to_string()]).is_err());
    lab.run("pliant", &["scancel", &job.to_string()])?;
    assert_eq!(lab.wait_end(job, LIMIT)?, "CANCELLED");
    lab.wait_for(LIMIT, "sacct knows the job and its GPU", || {
        let argv = ["sacct", "-n", "-X", "-P", "-j", &job.to_string(), "-o", "AllocTRES,State"];
        lab.run("root", &argv).is_ok_and(|out| out.contains("gres/gpu=1") && out.contains("CANCELLED"))
    })?;
    lab.down()
}

#[test]
fn cgroups_refuse_the_gpus_of_others() -> Result<()> {
    let lab = match small().nodes(1).cgroups(true).start() {
        Ok(lab) => lab,
        Err(err) if format!("{err:#}").contains("leave out --cgroups") => {
            eprintln!("skipped: {err:#}");
            return Ok(());
        }
        Err(err) => return Err(err),
    };
    let devices = lab.spec().devices.display();
    let script =
        format!("for i in 0 1 2 3; do (exec 3<{devices}/gpu$i) 2>&1; done; setsid env -i sleep 600 & sleep 600");
    let job = lab.sbatch(lab.user(0), &["--gpus=1", "--wrap", &script])?;
    lab.wait_state(job, "RUNNING", LIMIT)?;
    let output = lab.home(lab.user(0)).join(format!("slurm-{job}.out"));
    let read = || fs::read_to_string(&output).unwrap_or_default();
    lab.wait_for(LIMIT, "four attempts to open", || read().lines().count() == 4)?;
    assert_eq!(read().matches("No such device or address").count(), 1, "its own GPU: {}", read());
    assert_eq!(read().matches("Operation not permitted").count(), 3, "the others: {}", read());
    let place =
        PathBuf::from(format!("/sys/fs/cgroup/devices/slurm_n0/uid_{}", pliant_lab::User::get(lab.user(0))?.uid));
    let place = place.join(format!("job_{job}"));
    assert!(place.exists());
    lab.down()?;
    assert!(!place.exists(), "{} is left", place.display());
    Ok(())
}

#[test]
fn preemption_takes_a_low_job_after_its_grace() -> Result<()> {
    let lab = small().nodes(1).preemption(1).conf_line("KillWait=1").start()?;
    let low = lab.sbatch(lab.user(0), &["-p", "low", "--gpus=4", "--wrap", "sleep 600"])?;
    lab.wait_state(low, "RUNNING", LIMIT)?;
    let high = lab.sbatch(lab.user(1), &["--gpus=1", "--wrap", "sleep 600"])?;
    // slurmctld looks for jobs whose GraceTime is over every 30 s only.
    lab.wait_state(high, "RUNNING", Duration::from_secs(75))?;
    assert_eq!(lab.job_state(low)?, "PREEMPTED");
    lab.down()
}

#[test]
fn bad_input_is_refused_with_a_reason() {
    let refuse = |builder: Builder, word: &str| {
        let text = format!("{:#}", builder.start().expect_err("was accepted"));
        assert!(text.contains(word), "'{text}' does not say {word}");
    };
    refuse(small().nodes(0), "--nodes 0");
    refuse(small().gpus(65), "--gpus 65");
    refuse(small().conf_line("nonsense"), "KEY=VALUE");
    refuse(small().pliant_set("nonsense"), "SECTION.KEY=VALUE");
    refuse(small().dir("/tmp/a b"), "--dir");
    refuse(small().dir(format!("/tmp/{}", "x".repeat(80))), "--dir");
    // slurmctld ends at once, and its log is shown.
    refuse(small().conf_line("SchedulerType=sched/nonsense"), "nonsense");
    let missing = pliant_lab::down(Path::new("/tmp/pliant-lab-that-does-not-exist")).expect_err("no lab");
    assert!(format!("{missing:#}").contains("no lab in"));
    let foreign = PathBuf::from(format!("/tmp/pliant-lab-foreign-{}", std::process::id()));
    fs::create_dir(&foreign).expect("directory");
    assert!(pliant_lab::down(&foreign).is_err());
    assert!(foreign.exists(), "a directory that is no lab was removed");
    fs::remove_dir(&foreign).expect("directory");
}

#[test]
fn the_command_line_works() -> Result<()> {
    let dir = format!("/tmp/pliant-lab-cli-{}", std::process::id());
    let lab = |args: &[&str]| -> Result<(bool, String)> {
        let out = Command::new(env!("CARGO_BIN_EXE_pliant-lab")).args(args).stdin(Stdio::null()).output()?;
        let text = [out.stdout.as_slice(), out.stderr.as_slice()].concat();
        Ok((out.status.success(), String::from_utf8_lossy(&text).into_owned()))
    };
    let owner = std::process::id().to_string();
    let (ok, text) = lab(&["up", "--dir", &dir, "--nodes", "1", "--gpus", "2", "--no-pliant", "--owner", &owner])?;
    assert!(ok, "{text}");
    let (ok, text) = lab(&["up", "--dir", &dir, "--no-pliant"])?;
    assert!(!ok && text.contains("is up in"), "{text}");
    let (ok, text) = lab(&["exec", "--dir", &dir, "--as", "pliant-lab-2", "--", "srun", "--gpus=1", "id", "-un"])?;
    assert!(ok && text.trim() == "pliant-lab-2", "{text}");
    let (ok, _) = lab(&["exec", "--dir", &dir, "--", "sh", "-c", "exit 3"])?;
    assert!(!ok);
    let (ok, text) = lab(&["status", "--dir", &dir])?;
    assert!(ok && text.contains("slurmctld"), "{text}");
    let (ok, text) = lab(&["down", "--dir", &dir])?;
    assert!(ok && !Path::new(&dir).exists(), "{text}");
    Ok(())
}

#[test]
fn a_killed_test_leaves_nothing() -> Result<()> {
    // This test program again, as a child that starts a lab and is then killed by SIGKILL.
    if std::env::var_os("PLIANT_LAB_CHILD").is_some() {
        let lab = small().start()?;
        println!("\nlab={}", lab.dir().display());
        loop {
            thread::park();
        }
    }
    let mut child = Command::new(std::env::current_exe()?)
        .args(["--exact", "a_killed_test_leaves_nothing", "--nocapture"])
        .env("PLIANT_LAB_CHILD", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let lines = BufReader::new(child.stdout.take().context("stdout")?).lines();
    let dir = lines.map_while(Result::ok).find_map(|line| line.strip_prefix("lab=").map(PathBuf::from));
    let dir = dir.context("the child did not start a lab")?;
    assert!(!processes_of(&dir).is_empty());
    child.kill()?;
    child.wait()?;
    assert!(wait(LIMIT, || !dir.exists() && processes_of(&dir).is_empty()), "left: {:?}", processes_of(&dir));
    Ok(())
}
