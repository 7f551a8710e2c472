use super::json::{Json, KEYS};
use super::table::Table;
use super::*;
use pliant_model::resize::{Kind, State};
use pliant_model::{JobId, Member, OrderId, Reason};
use pliant_protocol::admin::{Event, Level, Select};
use pliant_protocol::job::{JobStatus, OrderStatus, Progress, SliceStatus};

/// 2026-11-30T22:00:00 UTC.
const T0: u64 = 1_796_076_000;

fn member(slice: Option<u32>, node: &str, gpus: u32) -> Member {
    Member { slice: slice.map(JobId), node: node.into(), gpus }
}

fn view() -> JobView {
    let slice = |job, node: &str, gpus| SliceStatus {
        job: JobId(job),
        node: node.into(),
        gpus,
        cpus: 4,
        joined: true,
        leaving: false,
    };
    let status = JobStatus {
        base: JobId(12),
        instance: "ab".into(),
        command: "python train.py".into(),
        range: "8:2".parse().unwrap(),
        base_gpus: 2,
        base_nodes: vec!["n0".into()],
        cpus_per_gpu: 2,
        partition: "gpu".into(),
        kind: None,
        feature: None,
        locality: Default::default(),
        grace: 60,
        ends_at: Some(T0 + 3600),
        generation: 3,
        world: vec![member(None, "n0", 2), member(Some(13), "n1", 2), member(Some(14), "n2", 2)],
        ready: true,
        slices: vec![slice(13, "n1", 2), slice(14, "n2", 2)],
        order: None,
        done: vec![],
        progress: Progress { step: Some(120), total_steps: Some(1000), samples: None, loss: Some(0.25) },
    };
    JobView {
        user: "alice".into(),
        status,
        connected: true,
        now: Some(Reason::NoIdleGpus { idle: 1, kept: 0, step: 2 }),
    }
}

fn growing() -> JobView {
    let mut view = view();
    view.status.order = Some(OrderStatus {
        id: OrderId("f00d".into()),
        kind: Kind::Grow,
        state: State::Granted,
        slices: vec![JobId(15)],
        reason: Reason::IdleGpus { idle: 4, takers: 1, from: 6, to: 8 },
        times: vec![(State::Requested, T0 * 1000 - 3000), (State::Granted, T0 * 1000 - 2000)],
        load_ms: None,
    });
    view
}

fn explanation(view: Option<JobView>) -> Explanation {
    let event = |ms, order: Option<&str>, kind, state, gpus, reason| Event {
        at_ms: T0 * 1000 + ms,
        job: JobId(12),
        order: order.map(|o| OrderId(o.into())),
        kind,
        state,
        gpus,
        reason,
    };
    let grow = |idle| Reason::IdleGpus { idle, takers: 1, from: 2, to: 6 };
    Explanation {
        placement: None,
        job: JobId(12),
        now: view.iter().filter_map(|v| v.now.clone()).collect(),
        view,
        history: vec![
            event(7, Some("0ff1ce"), Some(Kind::Grow), Some(State::Proposed), Some((2, 6)), grow(4)),
            event(
                5012,
                Some("0ff1ce"),
                Some(Kind::Grow),
                Some(State::Undone),
                None,
                Reason::Withdrawn { waited: 5, slurm: "Priority".into(), expected_start: Some(T0 + 60) },
            ),
            event(9000, None, None, None, None, Reason::NotReady),
        ],
    }
}

fn table() -> Table {
    Table::at(true, T0)
}

#[test]
fn jobs_in_columns() {
    let mut zero = view();
    zero.user = "a-long-user-name".into();
    zero.status.base = JobId(1_234_567);
    zero.status.range = "0-16".parse().unwrap();
    (zero.status.base_gpus, zero.status.generation) = (0, 0);
    zero.status.slices.clear();
    zero.status.world.clear();
    zero.status.progress = Progress::default();
    zero.now = None;
    let text = table().jobs(&[view(), growing(), zero.clone()]).unwrap();
    assert_eq!(
        text,
        "   JOBID USER             ST  GPUS MIN-MAX:STEP  GEN NODES            STEP/TOTAL   REASON\n      \
         12 alice            R      6 2-8:2           3 n[0-2]:2         120/1000     1 idle GPUs where it may grow (0 kept for pending jobs), it grows by 2\n      \
         12 alice            GR     6 2-8:2           3 n[0-2]:2         120/1000     grow f00d is granted for 2 s, slices 15: 4 idle GPUs for 1 elastic job(s): from 6 to 8\n \
         1234567 a-long-user-name PD     0 0-16:1          0 -                -            -\n"
    );
    zero.connected = false;
    let bare = Table::at(false, T0).jobs(&[zero]).unwrap();
    assert_eq!(bare.lines().count(), 1);
    assert!(bare.contains(" NC "), "{bare}");
}

#[test]
fn an_explanation_has_the_present_then_the_history() {
    let text = table().explanation(&explanation(Some(growing()))).unwrap();
    let expected = "\
Job 12 of alice: growing, 6 GPUs, 2-8:2, generation 3
  Command   python train.py
  World     n[0-2]:2
  Base      2 GPUs on n0
  Slice     13: 2 GPUs on n1
  Slice     14: 2 GPUs on n2
  Progress  step 120 of 1000, loss 0.2500
  Grace     60 s
  Ends      2026-11-30T23:00:00 at the latest
Now
  grow f00d is granted for 2 s, slices 15: 4 idle GPUs for 1 elastic job(s): from 6 to 8
  1 idle GPUs where it may grow (0 kept for pending jobs), it grows by 2
History
TIME                    RESIZE KIND   ARROW     GPUS   REASON
2026-11-30T22:00:00.007 0ff1ce grow   proposed  2->6   4 idle GPUs for 1 elastic job(s): from 2 to 6
2026-11-30T22:00:05.012 0ff1ce grow   undone    -      slice not allocated in 5 s, Slurm says Priority, expected start at 2026-11-30T22:01:00
2026-11-30T22:00:09.000 -      -      -         -      its ranks have not finished a step yet
";
    assert_eq!(text, expected);
}

#[test]
fn a_job_that_is_gone_or_waits_is_explained_too() {
    let mut gone = explanation(None);
    gone.history.clear();
    gone.now.push(Reason::CannotFit { wants: 32, reachable: 30 });
    let text = table().explanation(&gone).unwrap();
    let expected = "Job 12: no elastic job that runs now\nNow\n  wants 32 GPUs, at most 30 could be had by taking slices back\nHistory\n  none\n";
    assert_eq!(text, expected);
}

#[test]
fn text_of_users_cannot_steer_the_terminal() {
    let mut hostile = view();
    hostile.status.command = "x\u{1b}[2J\nJob 13 of root".into();
    hostile.now = Some(Reason::Refused { slurm: "\u{9b}31m\r\nno".into() });
    let jobs = table().jobs(&[hostile.clone()]).unwrap();
    let explained = table().explanation(&explanation(Some(hostile))).unwrap();
    for text in [jobs, explained] {
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        assert!(!text.lines().any(|l| l.starts_with("Job 13") || l.starts_with("no")), "{text:?}");
    }
}

#[test]
fn the_daemon_in_eight_lines() {
    let status = status();
    let text = table().status(&status).unwrap();
    let expected = "\
pliantd   0.1.0, up since 2026-11-30T21:00:00
Slurm     answered 3 s ago
Operator  unknown (no slurmdbd): the agents cancel slices as root
Agents    4 on 4 GPU nodes
GPUs      32, 20 idle, 6 lent
Jobs      2 elastic, 1 pending for resources
Resizes   0 under way
Placement 12 jobs as planned, 1 otherwise; plans for 3 jobs and 32 classes
";
    assert_eq!(text, expected);
    let never = table().status(&Status { slurm_as_of: None, fresh: false, ..status }).unwrap();
    assert!(never.contains("has not answered yet: nothing is changed"));
}

fn status() -> Status {
    Status {
        software: "0.1.0".into(),
        since: T0 - 3600,
        slurm_as_of: Some(T0 - 3),
        fresh: true,
        operator: None,
        agents: 4,
        nodes: 4,
        gpus: 32,
        gpus_idle: 20,
        gpus_lent: 6,
        jobs: 2,
        pending: 1,
        resizes: 0,
        select: Select { following: true, honoured: 12, missed: 1, plans: (3, 32), ..Select::default() },
    }
}

fn findings() -> Vec<Finding> {
    let finding = |check: &str, host: Option<&str>, level, found: &str, remedy: &str| Finding {
        check: check.into(),
        host: host.map(Into::into),
        level,
        found: found.into(),
        remedy: remedy.into(),
    };
    vec![
        finding("MUNGE", None, Level::Ok, "works", ""),
        finding("device cgroups", Some("n1"), Level::Warn, "no", "set ConstrainDevices=yes"),
        finding("bridge", None, Level::Fail, "line 1\nline 2", "install it"),
    ]
}

#[test]
fn findings_with_what_to_do() {
    let expected = "\
LEVEL HOST CHECK            FOUND
ok    -    MUNGE            works
warn  n1   device cgroups   no => set ConstrainDevices=yes
FAIL  -    bridge           line 1 line 2 => install it
1 ok, 1 to note, 1 to mend
";
    assert_eq!(table().findings(&findings()).unwrap(), expected);
}

#[test]
fn json_has_the_documented_keys_and_no_others() {
    let documented = |command: &str| KEYS.iter().find(|(c, _)| *c == command).unwrap().1;
    let texts = [
        ("status", Json.status(&status()).unwrap()),
        ("jobs", Json.jobs(&[view()]).unwrap()),
        ("explain", Json.explanation(&explanation(Some(growing()))).unwrap()),
        ("doctor", Json.findings(&findings()).unwrap()),
    ];
    for (command, text) in texts {
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let words: Vec<&str> = documented(command).split(|c: char| !c.is_alphanumeric() && c != '_').collect();
        let mut keys: Vec<String> = value.as_object().unwrap().keys().cloned().collect();
        match command {
            "jobs" => {
                keys.extend(value["jobs"][0].as_object().unwrap().keys().cloned());
                keys.extend(value["jobs"][0]["status"].as_object().unwrap().keys().cloned());
            }
            "explain" => keys.extend(value["history"][0].as_object().unwrap().keys().cloned()),
            "doctor" => keys.extend(value["findings"][0].as_object().unwrap().keys().cloned()),
            _ => {}
        }
        for key in keys {
            assert!(words.contains(&key.as_str()), "{command}: {key}");
        }
        assert!(text.ends_with("}\n"));
    }
    let level = Json.findings(&findings()).unwrap();
    assert!(level.contains("\"level\": \"fail\""), "{level}");
}
