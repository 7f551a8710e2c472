//! GPU jobs that grow in place: a second job is merged into the first by Slurm's own command, which the select plugin
//! allows where `elastic.grow` says so.

use crate::select::missing;
use pliant_lab::{Builder, Lab};
use pliant_model::JobId;
use pliant_protocol::board::{Event, Outcome};
use pliant_tests::select::{Events, all_free, in_use};
use std::collections::BTreeMap;
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(60);

fn builder() -> Builder {
    Lab::builder()
        .nodes(4)
        .gpus(8)
        .poll_interval(1)
        .pliant_set("elastic.grow='in-place'")
        .conf_line("SchedulerParameters=batch_sched_delay=0,sched_interval=2,permit_job_expansion")
}

fn base(lab: &Lab, gres: &str) -> JobId {
    let job = lab.sbatch(lab.user(0), &["--nodelist=n1", gres, "--wrap", "sleep 600"]).unwrap();
    lab.wait_state(job, "RUNNING", WAIT).unwrap();
    job
}

/// A job without a step that is to be merged into another one.
fn helper(lab: &Lab, base: JobId, node: &str, gres: &str) -> JobId {
    let (into, node) = (format!("--dependency=expand:{base}"), format!("--nodelist={node}"));
    let mut command = lab.command(lab.user(0), "salloc").unwrap();
    let out = command.args(["--no-shell", "--job-name=helper", &into, &node, gres]).output().unwrap();
    let told = String::from_utf8_lossy(&out.stderr).into_owned();
    let word = told.split("Granted job allocation ").nth(1).and_then(|t| t.split_whitespace().next());
    word.unwrap_or_else(|| panic!("{told}")).parse().unwrap()
}

fn merge(lab: &Lab, helper: JobId) -> anyhow::Result<String> {
    lab.run(lab.user(0), &["scontrol", "update", &format!("JobId={helper}"), "NumNodes=0"])
}

/// GPUs by node, in Slurm's own record of the job.
fn held(lab: &Lab, job: JobId) -> BTreeMap<String, Vec<u32>> {
    let mut all = BTreeMap::<String, Vec<u32>>::new();
    for gpu in lab.gpus(job).unwrap() {
        all.entry(gpu.node.to_string()).or_default().push(gpu.index);
    }
    all
}

/// GPUs in use on each node.
fn used(lab: &Lab) -> Vec<u32> {
    in_use(lab).unwrap().values().map(|used| pliant_model::gres::gpu_total(used)).collect()
}

/// CPUs in use on each node: the stock plugin would book those of new nodes on the old one.
fn cpus(lab: &Lab) -> Vec<String> {
    in_use(lab).unwrap().values().map(|used| used.split(' ').next_back().unwrap_or_default().to_owned()).collect()
}

fn sacct(lab: &Lab, job: JobId) -> Vec<(String, String)> {
    let argv = ["sacct", "-n", "-X", "-D", "-P", "-j", &job.to_string(), "-o", "State,AllocTRES"];
    let text = lab.run("root", &argv).unwrap_or_default();
    text.lines().filter_map(|l| l.split_once('|')).map(|(a, b)| (a.to_owned(), b.to_owned())).collect()
}

#[test]
fn a_gpu_job_grows_and_shrinks_in_place() {
    if missing() {
        return;
    }
    let lab = builder().accounting(true).start().unwrap();
    let mut events = Events::of(&lab).unwrap();
    let job = base(&lab, "--gres=gpu:2");
    let before = held(&lab, job);
    let more = helper(&lab, job, "n3", "--gres=gpu:2");
    let added = held(&lab, more);
    merge(&lab, more).unwrap();

    // One job on two nodes, with the GPUs of both.
    let merged: BTreeMap<_, _> = before.clone().into_iter().chain(added).collect();
    assert_eq!(merged.len(), 2, "{merged:?}");
    assert_eq!(held(&lab, job), merged);
    assert_eq!((used(&lab), cpus(&lab)), (vec![0, 2, 0, 2], ["0", "1", "0", "1"].map(str::to_owned).to_vec()));
    lab.wait_for(WAIT, "one job is left", || lab.jobs().is_ok_and(|jobs| jobs.len() == 1 && jobs[0].id == job))
        .unwrap();
    events
        .wait("the merge is told", |r| {
            (r.event == Event::Expand { from: more.0, to: job.0, refused: None }).then_some(())
        })
        .unwrap();
    // Steps on either node see them.
    for (node, gpus) in [("n1", 2), ("n3", 2)] {
        let (id, node, gres) = (format!("--jobid={job}"), format!("--nodelist={node}"), format!("--gres=gpu:{gpus}"));
        let step = ["srun", &id, &node, "-N1", "-n1", &gres, "printenv", "CUDA_VISIBLE_DEVICES"];
        let seen = lab.run(lab.user(0), &step).unwrap();
        assert_eq!(seen.trim().split(',').count(), gpus, "{node}: {seen}");
    }
    let id = format!("--jobid={job}");
    let both = ["srun", &id, "-N2", "-n2", "--ntasks-per-node=1", "printenv", "SLURMD_NODENAME"];
    let mut seen: Vec<String> = lab.run(lab.user(0), &both).unwrap().lines().map(str::to_owned).collect();
    seen.sort();
    assert_eq!(seen, ["n1", "n3"]);

    // Nobody else gets its GPUs.
    let other = lab.sbatch(lab.user(1), &["--nodelist=n3", "--gres=gpu:7", "--wrap", "sleep 1"]).unwrap();
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(lab.job_state(other).unwrap(), "PENDING");
    lab.run("root", &["scancel", &other.to_string()]).unwrap();

    // slurmctld is restarted in the middle: same GPUs, same counters.
    lab.restart_slurmctld().unwrap();
    lab.wait_for(WAIT, "counters are as before", || used(&lab) == [0, 2, 0, 2]).unwrap();
    assert_eq!(held(&lab, job), merged);

    // Again, and then a node less.
    let third = helper(&lab, job, "n0", "--gres=gpu:4");
    merge(&lab, third).unwrap_or_else(|e| panic!("{e:#}\n{}", lab.logs(30)));
    assert_eq!(used(&lab), [4, 2, 0, 2]);
    // Two sizes within a second are one record of slurmdbd's.
    std::thread::sleep(Duration::from_millis(1_500));
    lab.run(lab.user(0), &["scontrol", "update", &format!("JobId={job}"), "NodeList=n[0-1]"]).unwrap();
    lab.wait_for(WAIT, "n3 is free", || used(&lab) == [4, 2, 0, 0]).unwrap();
    assert_eq!(held(&lab, job).into_keys().collect::<Vec<_>>(), ["n0", "n1"]);

    lab.run("root", &["scancel", &job.to_string()]).unwrap();
    all_free(&lab).unwrap();
    // sacct: one record for each size.
    let sizes = |all: &[(String, String)]| -> Vec<(String, Option<u32>)> {
        all.iter().map(|(state, tres)| (state.split(' ').next().unwrap_or_default().to_owned(), count(tres))).collect()
    };
    let expected = [("RESIZING", 2), ("RESIZING", 4), ("RESIZING", 8), ("CANCELLED", 6)];
    lab.wait_for(WAIT, "sacct has a record for each size", || {
        sizes(&sacct(&lab, job)) == expected.map(|(state, n)| (state.to_owned(), Some(n)))
    })
    .unwrap_or_else(|e| panic!("{:?}: {e:#}", sacct(&lab, job)));
    no_errors(&lab);
}

/// GPUs in sacct's text.
fn count(tres: &str) -> Option<u32> {
    tres.split(',').find_map(|t| t.strip_prefix("gres/gpu=")?.parse().ok())
}

/// slurmctld has found nothing wrong with its GRES.
fn no_errors(lab: &Lab) {
    let log = std::fs::read_to_string(lab.log("slurmctld")).unwrap();
    let wrong: Vec<&str> =
        log.lines().filter(|l| l.contains("error:") && (l.contains("gres") || l.contains("allocated"))).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn typed_gpus_grow_in_place_and_what_is_unsound_does_not() {
    if missing() {
        return;
    }
    let conf: String = (0..8)
        .map(|i| format!("Name=gpu Type=a100 File={{devices}}/gpu{i} Cores={}\n", if i < 4 { "0-31" } else { "32-63" }))
        .collect();
    let lab = builder().gres_conf(conf).start().unwrap();
    let mut events = Events::of(&lab).unwrap();
    let job = base(&lab, "--gres=gpu:a100:2");
    let more = helper(&lab, job, "n2", "--gres=gpu:a100:4");
    merge(&lab, more).unwrap();
    assert_eq!(used(&lab), [0, 2, 4, 0]);
    // The helper's own end must not give away what it has no more.
    lab.wait_for(WAIT, "one job is left", || lab.jobs().is_ok_and(|jobs| jobs.len() == 1)).unwrap();
    assert_eq!(used(&lab), [0, 2, 4, 0]);
    no_errors(&lab);
    // A merge that fails leaves wrong counters, so a job that cannot be merged does not start, and says why: on a node
    // that the base has already, of another type, with a node for itself.
    let into = format!("--dependency=expand:{job}");
    let waits: [(&[&str], &str); 1] =
        [(&["--gres=gpu:1"], "it must ask for GPUs of the type that the job that grows has, as in gpu:TYPE:N")];
    for (flags, expected) in waits {
        let waiting = lab.sbatch(lab.user(0), &[&[into.as_str(), "--wrap", "true"], flags].concat()).unwrap();
        let why = events
            .wait("it waits", |r| match &r.event {
                Event::Test { job, fits: false, outcome: Some(Outcome::Waits(why)) } if *job == waiting.0 => {
                    Some(why.clone())
                }
                _ => None,
            })
            .unwrap();
        assert_eq!(why, expected);
        lab.run("root", &["scancel", &waiting.to_string()]).unwrap();
    }
    let same = lab.sbatch(lab.user(0), &[&into, "--nodelist=n2", "--gres=gpu:a100:1", "--wrap", "true"]).unwrap();
    events
        .wait("it is tried", |r| match r.event {
            Event::Test { job, fits: false, .. } => (job == same.0).then_some(()),
            _ => None,
        })
        .unwrap();
    assert_eq!(lab.job_state(same).unwrap(), "PENDING");
    lab.clear().unwrap();
    all_free(&lab).unwrap();
}
