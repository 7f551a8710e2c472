//! Launchers that die: 60 s later no slice holds a GPU and no rank of it lives, with or without pliantd.

use pliant_lab::Lab;
use pliant_tests::training::{children, kill};
use pliant_tests::{Options, Training};
use std::time::{Duration, Instant};

const WAIT: Duration = Duration::from_secs(60);
const LIMIT: Duration = Duration::from_secs(60);

fn lab() -> Lab {
    Lab::builder().nodes(4).gpus(8).poll_interval(1).start().unwrap()
}

/// A job whose batch script outlives its launcher.
fn options() -> Options {
    Options { after: "sleep 1000", ..Options::default() }
}

fn grown(lab: &Lab) -> Training {
    let job = Training::submit(lab, &options()).unwrap();
    job.wait_world(lab, 8, WAIT).unwrap();
    job
}

fn wait_clean(lab: &Lab, jobs: &[&Training], since: Instant) {
    for job in jobs {
        let left = LIMIT.saturating_sub(since.elapsed());
        lab.wait_for(left, &format!("no slice and no rank of job {}", job.job), || {
            job.slices(lab).is_ok_and(|s| s.is_empty()) && job.alive().is_empty()
        })
        .unwrap_or_else(|e| panic!("alive: {:?}, slices: {:?}\n{e:?}", job.alive(), job.slices(lab)));
        eprintln!("job {}: clean after {:.1} s", job.job, since.elapsed().as_secs_f64());
    }
}

/// Three jobs at once: the launcher killed, the launcher and its srun processes killed, the base cancelled.
fn launchers_die(lab: &Lab, with_pliantd: bool) {
    let (a, b, c) = (grown(lab), grown(lab), grown(lab));
    if !with_pliantd {
        lab.stop("pliantd").unwrap();
    }
    let since = Instant::now();
    a.launchers().into_iter().for_each(kill);
    for launcher in b.launchers() {
        let sruns = children(launcher);
        kill(launcher);
        sruns.into_iter().for_each(kill);
    }
    lab.run(c.user, &["scancel", &c.job.to_string()]).unwrap();
    wait_clean(lab, &[&a, &b, &c], since);
    for job in [&a, &b] {
        assert_eq!(lab.job_state(job.job).unwrap(), "RUNNING", "the base itself is not ours to end");
        assert_eq!(lab.gpus(job.job).unwrap().len(), 2);
    }
}

#[test]
fn launchers_die_with_pliantd() {
    launchers_die(&lab(), true);
}

#[test]
fn launchers_die_without_pliantd() {
    launchers_die(&lab(), false);
}

/// Killed after Slurm has granted the slice and before its first step: nobody in the slice knows whose it is.
#[test]
fn a_kill_between_salloc_and_the_first_step() {
    let lab = Lab::builder().nodes(2).gpus(8).poll_interval(1).start().unwrap();
    for with_pliantd in [true, false] {
        let job = Training::submit(&lab, &options()).unwrap();
        let seen = Instant::now() + WAIT;
        while job.slices(&lab).unwrap().is_empty() {
            assert!(Instant::now() < seen, "no slice\n{}", lab.logs(20));
            std::thread::sleep(Duration::from_millis(5));
        }
        job.launchers().into_iter().for_each(kill);
        if !with_pliantd {
            lab.kill("pliantd").unwrap();
        }
        wait_clean(&lab, &[&job], Instant::now());
        if !with_pliantd {
            lab.start("pliantd").unwrap();
        }
        lab.run("root", &["scancel", &job.job.to_string()]).unwrap();
    }
}

/// The agent that would have cancelled the slices is killed together with the launcher, and comes back.
#[test]
fn launcher_and_agents_die_together() {
    let lab = Lab::builder().nodes(2).gpus(8).poll_interval(1).start().unwrap();
    let job = grown(&lab);
    lab.stop("pliantd").unwrap();
    let launchers = job.launchers();
    for n in lab.nodes() {
        lab.kill(&format!("agent.{n}")).unwrap();
    }
    launchers.into_iter().for_each(kill);
    let since = Instant::now();
    for n in lab.nodes() {
        lab.start(&format!("agent.{n}")).unwrap();
    }
    wait_clean(&lab, &[&job], since);
}

/// A requeued base is a new instance: the old slices are not its own.
#[test]
fn a_requeued_base_starts_anew() {
    let lab = Lab::builder().nodes(2).gpus(8).poll_interval(1).start().unwrap();
    let job = Training::submit(&lab, &Options::default().flag("--requeue")).unwrap();
    job.wait_world(&lab, 8, WAIT).unwrap();
    let old: Vec<_> = job.slices(&lab).unwrap().into_iter().map(|s| s.id).collect();
    lab.run("root", &["scontrol", "requeue", &job.job.to_string()]).unwrap();
    lab.wait_for(WAIT, "the old slices are gone", || {
        job.slices(&lab).is_ok_and(|s| s.iter().all(|s| !old.contains(&s.id)))
    })
    .unwrap();
    // Slurm holds a requeued job back for a while (BeginTime); released, it grows again. Not within the second of its
    // end: slurmd compares whole seconds and would take the new start for the one that was revoked.
    std::thread::sleep(Duration::from_secs(3));
    let id = job.job.to_string();
    let _ = lab.run("root", &["scontrol", "update", &format!("JobId={id}"), "StartTime=now"]);
    job.wait_world(&lab, 8, Duration::from_secs(180)).unwrap();
}
