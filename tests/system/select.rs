//! The select plugin in a real slurmctld: plans are followed, requests that are not ours are left alone, and whatever is
//! wrong with a plan or the board, jobs run.

use pliant_lab::{Lab, Signal};
use pliant_model::JobId;
use pliant_protocol::board::{Class, Event, Key, Outcome, Place, Plan};
use pliant_tests::select::{Events, Hand, all_free, in_use, now_ms};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(60);

/// Where the select plugin of a release cannot be built there is none to test.
pub fn missing() -> bool {
    let none = std::env::var_os("PLIANT_LAB_NO_SELECT").is_some();
    if none {
        eprintln!("skipped: the select plugin is not built for this release of Slurm");
    }
    none
}

fn builder(nodes: u16) -> pliant_lab::Builder {
    // Every job is tried at once, so that a test need not wait for the next pass.
    Lab::builder()
        .nodes(nodes)
        .gpus(8)
        .poll_interval(1)
        .conf_line("SchedulerParameters=batch_sched_delay=0,sched_interval=2")
}

/// A lab in which the test itself plays pliantd's part towards the plugin.
fn by_hand(nodes: u16) -> (Lab, Hand, Events) {
    let lab = builder(nodes).start().unwrap();
    lab.kill("pliantd").unwrap();
    let hand = Hand::of(&lab).unwrap();
    let events = Events::of(&lab).unwrap();
    (lab, hand, events)
}

fn submit(lab: &Lab, flags: &[&str]) -> JobId {
    lab.sbatch(lab.user(0), &[flags, &["--wrap", "sleep 300"]].concat()).unwrap()
}

/// A job that is held until the board has its plan.
fn held(lab: &Lab, flags: &[&str]) -> JobId {
    submit(lab, &[flags, &["--hold"]].concat())
}

fn release(lab: &Lab, job: JobId) {
    lab.run("root", &["scontrol", "release", &job.to_string()]).unwrap();
}

fn plan(job: JobId, hard: bool, places: Vec<Place>) -> Plan {
    Plan { key: Key::Job(job.0), hard, until_ms: now_ms() + 60_000, places }
}

fn not(outcome: Option<Outcome>) -> String {
    match outcome {
        Some(Outcome::Not(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn requests_of_every_kind_get_linked_gpus() {
    if missing() {
        return;
    }
    let lab = builder(4).start().unwrap();
    lab.wait_for(WAIT, "plans are published", || lab.spec().board().exists()).unwrap();
    let mut events = Events::of(&lab).unwrap();
    // The lab's pairs are 0-3, 1-2, 4-7 and 5-6.
    for flags in [["--gres=gpu:2"], ["--gpus-per-node=2"], ["--gpus=2"], ["--gres=gpu:2"]] {
        let job = submit(&lab, &flags);
        let (gpus, outcome) = (events.started(job).unwrap(), events.outcome(job).unwrap());
        assert_eq!(outcome, Some(Outcome::Honoured), "{flags:?}: {gpus:?}");
        let pairs = [[0, 3], [1, 2], [4, 7], [5, 6]];
        assert!(gpus.values().all(|g| pairs.iter().any(|p| g == p)), "{flags:?}: {gpus:?}");
    }
    let wide = submit(&lab, &["--nodes=2", "--gpus-per-node=4"]);
    assert_eq!(events.outcome(wide).unwrap(), Some(Outcome::Honoured));
    let gpus = events.started(wide).unwrap();
    assert!(gpus.len() == 2 && gpus.values().all(|g| *g == [0, 1, 2, 3] || *g == [4, 5, 6, 7]), "{gpus:?}");
    // srun and salloc come through the same test.
    let srun = lab.run(lab.user(0), &["srun", "--gres=gpu:2", "printenv", "SLURM_JOB_ID"]).unwrap();
    let srun = JobId(srun.trim().parse().unwrap());
    assert_eq!(events.outcome(srun).unwrap(), Some(Outcome::Honoured));
    let told = lab.run("root", &["pliant", "status"]).unwrap();
    assert!(told.contains(" jobs as planned, 0 otherwise"), "{told}");
    let told = lab.run("root", &["pliant", "doctor"]).unwrap_or_else(|e| e.to_string());
    assert!(told.contains("select plugin"), "{told}");
    lab.clear().unwrap();
    all_free(&lab).unwrap();
}

#[test]
fn a_thousand_tasks_and_a_burst_leave_no_counter_behind() {
    if missing() {
        return;
    }
    let lab = builder(4).conf_line("MaxArraySize=2000").conf_line("MaxJobCount=20000").start().unwrap();
    let mut events = Events::of(&lab).unwrap();
    let array = lab.sbatch(lab.user(0), &["--array=0-999%30", "--gpus=1", "--wrap", "true"]).unwrap();
    for n in 0..150 {
        let gpus = format!("--gres=gpu:{}", 1 + n % 4);
        lab.sbatch(lab.user(1), &[&gpus, "--wrap", "true"]).unwrap();
    }
    // Nobody has two jobs on one GPU while they come and go.
    let mut holders: BTreeMap<(String, u32), u32> = BTreeMap::new();
    let mut seen = 0;
    lab.wait_for(Duration::from_secs(240), "the burst and 300 tasks are through", || {
        events.read().unwrap();
        for record in &events.all[seen..] {
            match &record.event {
                Event::Start { job, nodes, gpus, .. } => {
                    let names = pliant_model::hostlist::expand(nodes).unwrap();
                    for (node, gres) in names.iter().zip(gpus) {
                        for index in pliant_model::gres::gpu_indexes(gres) {
                            let other = holders.insert((node.to_string(), index), *job);
                            assert!(other.is_none_or(|o| o == *job), "GPU {index} of {node}: {job} beside {other:?}");
                        }
                    }
                }
                Event::Fini { job } => holders.retain(|_, holder| holder != job),
                _ => {}
            }
        }
        seen = events.all.len();
        let ended = events.all.iter().filter(|r| matches!(r.event, Event::Fini { .. })).count();
        ended >= 450
    })
    .unwrap();
    let honoured =
        events.all.iter().filter(|r| matches!(&r.event, Event::Begin { outcome: Some(Outcome::Honoured), .. }));
    let mut why: BTreeMap<String, u32> = BTreeMap::new();
    for r in &events.all {
        if let Event::Test { outcome, fits: true, .. } = &r.event {
            *why.entry(format!("{outcome:?}")).or_default() += 1;
        }
    }
    assert!(honoured.count() > 100, "the usual requests have plans: {why:?}");
    lab.run("root", &["scancel", &array.to_string()]).unwrap();
    lab.clear().unwrap();
    all_free(&lab).unwrap();
    let log = std::fs::read_to_string(lab.log("slurmctld")).unwrap();
    let bad: Vec<&str> = log.lines().filter(|l| l.contains("error:") && l.to_lowercase().contains("gres")).collect();
    assert!(bad.is_empty(), "{bad:?}");
}

#[test]
fn requests_that_are_not_ours_are_left_alone() {
    if missing() {
        return;
    }
    let (lab, mut hand, mut events) = by_hand(3);
    lab.run(
        "root",
        &[
            "scontrol",
            "create",
            "reservation",
            "ReservationName=r1",
            "StartTime=now",
            "Duration=60",
            "Nodes=n2",
            "Users=pliant-lab-1",
        ],
    )
    .unwrap();
    for (flags, place, why) in [
        (vec!["--gres=gpu:2", "--exclusive"], Hand::place(&[(0, &[6, 7])]), "exclusive"),
        (vec!["--gres=gpu:2", "--reservation=r1"], Hand::place(&[(2, &[6, 7])]), "reservation"),
        (vec!["--gres=gpu:2", "--nodelist=n1"], Hand::place(&[(0, &[6, 7])]), "n1"),
        (
            vec!["--gres=gpu:2", "--exclude=n0"],
            Hand::place(&[(0, &[6, 7])]),
            "n0 is not among the nodes that Slurm offers",
        ),
    ] {
        let job = held(&lab, &flags);
        hand.write(vec![plan(job, false, vec![place])]).unwrap();
        release(&lab, job);
        let found = not(events.outcome(job).unwrap());
        assert!(found.contains(why), "{flags:?}: {found}");
        lab.run("root", &["scancel", &job.to_string()]).unwrap();
        lab.wait_end(job, WAIT).unwrap();
    }
    // A heterogeneous job: both parts run, neither is steered.
    let parts = ["--gres=gpu:1", ":", "--gres=gpu:1", "--wrap", "sleep 300"];
    let argv = [&["sbatch", "--parsable"], &parts[..]].concat();
    let leader = JobId(lab.run(lab.user(0), &argv).unwrap().trim().parse().unwrap());
    lab.wait_state(leader, "RUNNING", WAIT).unwrap();
    // Without GPUs there is nothing to say.
    let plain = submit(&lab, &["--ntasks=1"]);
    assert_eq!(events.outcome(plain).unwrap(), None);
    lab.clear().unwrap();
    all_free(&lab).unwrap();
}

#[test]
fn wrong_plans_are_told_and_the_job_runs_all_the_same() {
    if missing() {
        return;
    }
    let (lab, mut hand, mut events) = by_hand(2);
    let busy = held(&lab, &["--gres=gpu:2"]);
    hand.write(vec![plan(busy, false, vec![Hand::place(&[(0, &[2, 6])])])]).unwrap();
    release(&lab, busy);
    assert_eq!(events.started(busy).unwrap()["n0"], [2, 6], "even a bad place is taken exactly");
    assert_eq!(events.outcome(busy).unwrap(), Some(Outcome::Honoured));
    lab.run("root", &["scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test"]).unwrap();
    for (places, why) in [
        (vec![Hand::place(&[(0, &[2, 3])])], "GPU 2 of n0 is busy"),
        (vec![Hand::place(&[(0, &[0, 60])])], "n0 has 8 GPUs"),
        (vec![Hand::place(&[(1, &[0, 1])])], "n1 is not among the nodes that Slurm offers"),
        (vec![Hand::place(&[(2, &[0, 1])])], "not in slurm.conf"),
        (vec![Hand::place(&[(0, &[0, 1]), (1, &[0, 1])])], "n1 is not among"),
        (vec![Hand::place(&[(0, &[0])])], "Slurm refuses the place of the plan"),
        (vec![Hand::place(&[(0, &[0, 1, 3])])], "on n0 GPUs"),
        (vec![], "the plan has no place"),
        (vec![vec![]], "not in slurm.conf"),
    ] {
        let job = held(&lab, &["--gres=gpu:2"]);
        hand.write(vec![plan(job, false, places.clone())]).unwrap();
        release(&lab, job);
        let found = not(events.outcome(job).unwrap());
        assert!(found.contains(why), "{places:?}: {found}");
        lab.run("root", &["scancel", &job.to_string()]).unwrap();
        lab.wait_end(job, WAIT).unwrap();
    }
    // The second place is taken where the first is not to be had; an expired plan is none.
    let second = held(&lab, &["--gres=gpu:2"]);
    let places = vec![Hand::place(&[(0, &[2, 3])]), Hand::place(&[(0, &[5, 7])])];
    hand.write(vec![plan(second, false, places)]).unwrap();
    release(&lab, second);
    assert_eq!(events.started(second).unwrap()["n0"], [5, 7]);
    let late = held(&lab, &["--gres=gpu:1"]);
    hand.write(vec![Plan { until_ms: now_ms() - 1, ..plan(late, true, vec![Hand::place(&[(0, &[2])])]) }]).unwrap();
    release(&lab, late);
    assert_eq!(events.outcome(late).unwrap(), None);
    lab.clear().unwrap();
    all_free(&lab).unwrap();
}

#[test]
fn a_hard_plan_waits_two_seconds_at_most_and_a_class_serves_jobs_that_nobody_knew() {
    if missing() {
        return;
    }
    let (lab, mut hand, mut events) = by_hand(2);
    let first = held(&lab, &["--gres=gpu:2"]);
    hand.write(vec![plan(first, false, vec![Hand::place(&[(0, &[0, 3])])])]).unwrap();
    release(&lab, first);
    events.started(first).unwrap();
    let second = held(&lab, &["--gres=gpu:1"]);
    let until = now_ms() + 1_900;
    let place = vec![Hand::place(&[(0, &[3])])];
    hand.write(vec![Plan { until_ms: until, ..plan(second, true, place.clone()) }]).unwrap();
    release(&lab, second);
    events.started(second).unwrap();
    let waits = |r: &&pliant_protocol::board::Record| matches!(&r.event, Event::Test { job, outcome: Some(Outcome::Waits(_)), .. } if *job == second.0);
    assert!(events.all.iter().any(|r| waits(&r)), "it waited for GPU 3: {:?}", events.all);
    // One that claims to be hard for longer than that is a soft one.
    let third = held(&lab, &["--gres=gpu:1"]);
    hand.write(vec![plan(third, true, place)]).unwrap();
    release(&lab, third);
    assert_eq!(not(events.outcome(third).unwrap()), "GPU 3 of n0 is busy");
    let class = Class {
        partition: "gpu".into(),
        features: String::new(),
        kind: String::new(),
        uid: None,
        min_nodes: 1,
        max_nodes: 0,
        in_all: false,
        gpus: 2,
    };
    let places = vec![Hand::place(&[(1, &[5, 6])]), Hand::place(&[(1, &[1, 2])])];
    hand.write(vec![Plan { key: Key::Class(class), hard: false, until_ms: u64::MAX, places }]).unwrap();
    let (a, b) = (submit(&lab, &["--gres=gpu:2"]), submit(&lab, &["--gres=gpu:2"]));
    let got = |events: &mut Events, job| events.started(job).unwrap()["n1"].clone();
    assert_eq!((got(&mut events, a), got(&mut events, b)), (vec![5, 6], vec![1, 2]));
    let other = submit(&lab, &["--gres=gpu:3"]);
    assert_eq!(events.outcome(other).unwrap(), None, "of another class");
    lab.clear().unwrap();
    all_free(&lab).unwrap();
}

#[test]
fn whatever_is_wrong_with_the_board_jobs_run_as_without_it() {
    if missing() {
        return;
    }
    let (lab, hand, mut events) = by_hand(1);
    let path = hand.path().clone();
    let run = |events: &mut Events, how: &str| {
        let job = submit(&lab, &["--gres=gpu:2"]);
        let outcome = events.outcome(job).unwrap();
        assert_eq!(outcome, None, "{how}");
        lab.run("root", &["scancel", &job.to_string()]).unwrap();
        lab.wait_end(job, WAIT).unwrap();
    };
    hand.file.set_len(1 << 30).unwrap();
    run(&mut events, "1 GiB of zeros");
    hand.file.set_len(0).unwrap();
    hand.file.write_all_at(&[0xff; 4096], 0).unwrap();
    run(&mut events, "noise");
    std::fs::remove_file(&path).unwrap();
    run(&mut events, "deleted");
    std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
    run(&mut events, "a link");
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "x").unwrap();
    std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
    std::thread::sleep(Duration::from_millis(1_100));
    run(&mut events, "a stranger's");
    let log = std::fs::read_to_string(lab.log("slurmctld")).unwrap();
    assert!(log.contains("pliant: plans are not followed") && log.contains("belongs to uid 65534"), "{log}");
    assert!(lab.run("root", &["scontrol", "ping"]).unwrap().contains("UP"));
    all_free(&lab).unwrap();
}

#[test]
fn steered_jobs_keep_their_gpus_over_restart_and_reconfigure_and_leave_nothing() {
    if missing() {
        return;
    }
    let lab = builder(2).start().unwrap();
    let mut events = Events::of(&lab).unwrap();
    let jobs: Vec<JobId> = (0..4).map(|_| submit(&lab, &["--gres=gpu:2"])).collect();
    jobs.iter().for_each(|j| drop(events.started(*j).unwrap()));
    let before: Vec<BTreeSet<_>> = jobs.iter().map(|j| lab.gpus(*j).unwrap()).collect();
    let used = in_use(&lab).unwrap();
    let same = |when: &str| {
        let now: Vec<BTreeSet<_>> = jobs.iter().map(|j| lab.gpus(*j).unwrap()).collect();
        assert_eq!(now, before, "{when}");
        lab.wait_for(WAIT, when, || in_use(&lab).is_ok_and(|u| u == used)).unwrap();
    };
    lab.run("root", &["scontrol", "reconfigure"]).unwrap();
    same("after scontrol reconfigure");
    lab.restart_slurmctld().unwrap();
    same("after a restart");
    lab.kill("slurmctld").unwrap();
    lab.start("slurmctld").unwrap();
    same("after a crash");
    // Suspended and resumed, as ever.
    lab.run("root", &["scontrol", "suspend", &jobs[0].to_string()]).unwrap();
    lab.run("root", &["scontrol", "resume", &jobs[0].to_string()]).unwrap();
    same("after suspend and resume");
    // pliantd follows the new ring by itself.
    lab.wait_for(WAIT, "the new ring is followed", || {
        lab.run("root", &["pliant", "doctor"]).unwrap_or_else(|e| e.to_string()).contains("followed:")
    })
    .unwrap();
    lab.clear().unwrap();
    all_free(&lab).unwrap();
}

#[test]
fn without_the_plugin_everything_goes_on_by_polling() {
    if missing() {
        return;
    }
    let lab = builder(2).start().unwrap();
    let mut events = Events::of(&lab).unwrap();
    let job = submit(&lab, &["--gres=gpu:2"]);
    let gpus = events.started(job).unwrap();
    lab.wait_state(job, "RUNNING", WAIT).unwrap();
    // The line of the admin goes back to what it was.
    let conf = lab.spec().slurm_conf();
    let text = std::fs::read_to_string(&conf).unwrap();
    let own = format!("{}/plugins:", lab.dir().display());
    assert!(text.contains(&own));
    std::fs::write(&conf, text.replace(&own, "")).unwrap();
    lab.restart_slurmctld().unwrap();
    assert_eq!(lab.job_state(job).unwrap(), "RUNNING");
    let now = lab.gpus(job).unwrap();
    assert_eq!(now.iter().map(|g| g.index).collect::<Vec<_>>(), gpus["n0"]);
    std::fs::remove_file(lab.spec().ring()).unwrap();
    lab.wait_for(WAIT, "pliantd says so", || {
        lab.run("root", &["pliant", "doctor"]).unwrap_or_else(|e| e.to_string()).contains("not heard of")
    })
    .unwrap();
    let next = submit(&lab, &["--gres=gpu:2"]);
    lab.wait_state(next, "RUNNING", WAIT).unwrap();
    lab.signal("pliantd", Signal::CONT).unwrap();
    lab.clear().unwrap();
    all_free(&lab).unwrap();
}

/// Other hosts have the directory and nothing in it: they use Slurm's own plugin and understand each other.
#[test]
fn an_empty_directory_serves_the_other_hosts() {
    if missing() {
        return;
    }
    let dir = std::env::temp_dir().join(format!("pliant-empty-{}", std::process::id()));
    let lab = builder(2).start().unwrap();
    let empty = lab.dir().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let own = format!("{}/plugins:", lab.dir().display());
    let text = std::fs::read_to_string(lab.spec().slurm_conf()).unwrap();
    let other = lab.dir().join("etc/slurm-node.conf");
    std::fs::write(&other, text.replace(&own, &format!("{}:", empty.display()))).unwrap();
    for node in lab.nodes() {
        let service = format!("slurmd.{node}");
        lab.stop(&service).unwrap();
        lab.start_with(&service, &[("SLURM_CONF", &other.to_string_lossy())]).unwrap();
    }
    let mut events = Events::of(&lab).unwrap();
    let mut client = lab.command(lab.user(0), "srun").unwrap();
    client.env("SLURM_CONF", &other).args(["-N2", "--gpus-per-node=2", "printenv", "SLURM_JOB_ID"]);
    let out = client.output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8(out.stdout).unwrap();
    let job = JobId(text.lines().next().unwrap().parse().unwrap());
    assert_eq!(events.outcome(job).unwrap(), None, "two nodes of two GPUs: no class was seen yet");
    assert!(!dir.exists());
    all_free(&lab).unwrap();
}
