//! With device cgroups: a released GPU is closed to the old ranks, and no process of a slice outlives it.

use pliant_lab::Lab;
use pliant_tests::{Options, Training};
use serde_json::Value;
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(60);
/// EPERM: the device cgroup refuses. ENXIO: it is open, and no driver stands behind the simulated device.
const EPERM: u64 = 1;
const ENXIO: u64 = 6;

fn opened(job: &Training) -> Vec<(String, u64, u64, u64)> {
    let of = |e: &Value| {
        (e.get("event")?.as_str()? == "open").then_some(())?;
        let path = e.get("path")?.as_str()?.to_owned();
        Some((path, e.get("errno")?.as_u64()?, e.get("rank")?.as_u64()?, e.get("world")?.as_u64()?))
    };
    job.events().iter().filter_map(of).collect()
}

#[test]
fn a_released_gpu_is_closed_and_no_process_escapes() {
    let lab = Lab::builder().nodes(2).gpus(4).poll_interval(1).cgroups(true).start().unwrap();
    let devices: Vec<String> = (0..4).map(|n| device(&lab, n)).collect();
    let flags = ["--escape".to_owned(), format!("--open-gpu={}", devices.join(","))];
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let options = Options::default().elastic("6").sbatch(&["--gpus=2", "--nodes=1", "--nodelist=n0"]).trainer(&flags);
    let job = Training::submit(&lab, &options).unwrap();
    job.wait_world(&lab, 6, WAIT).unwrap();
    // Ranks of the base may open two of the four, those of a whole-node slice all four.
    let large: Vec<_> = opened(&job).into_iter().filter(|o| o.3 == 6).collect();
    let of = |rank: u64, errno: u64| large.iter().filter(|o| o.2 == rank && o.1 == errno).count();
    assert_eq!((of(0, ENXIO), of(0, EPERM)), (2, 2), "{large:?}");
    assert_eq!((of(5, ENXIO), of(5, EPERM)), (4, 0), "{large:?}");
    let rigid =
        lab.sbatch(lab.user(1), &["--nodes=1", "--gres=gpu:4", "--nodelist=n1", "--wrap", "sleep 600"]).unwrap();
    lab.wait_state(rigid, "RUNNING", WAIT).unwrap();
    // The other half of n0 is idle and lent next.
    job.wait_world(&lab, 4, WAIT).unwrap();
    // What had left its process group in the slice on n1 is gone with it.
    let of = |name: &str| job.events().into_iter().filter(move |e| e["event"] == name).collect::<Vec<_>>();
    let lent: Vec<Value> = of("start").iter().filter(|e| e["node"] == "n1").map(|e| e["pid"].clone()).collect();
    let escaped: Vec<u64> =
        of("escaped").iter().filter(|e| lent.contains(&e["pid"])).filter_map(|e| e["child"].as_u64()).collect();
    assert_eq!((lent.len(), escaped.len()), (4, 4));
    let alive = job.alive();
    assert!(escaped.iter().all(|p| !alive.contains(&u32::try_from(*p).unwrap())), "{escaped:?} in {alive:?}");
}

/// The device file of a GPU; the lab's nodes share minors, as real nodes do.
fn device(lab: &Lab, index: u32) -> String {
    let conf = std::fs::read_to_string(lab.dir().join("etc/gres.conf")).unwrap();
    let line = conf.lines().find(|l| l.contains("NodeName=n0")).or_else(|| conf.lines().find(|l| l.contains("File=")));
    let file = line.and_then(|l| l.split("File=").nth(1)).and_then(|f| f.split_whitespace().next()).unwrap();
    let stem = file.split('[').next().unwrap().trim_end_matches(|c: char| c.is_ascii_digit());
    format!("{stem}{index}")
}
