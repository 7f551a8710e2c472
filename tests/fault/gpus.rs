//! A card is lost while a job runs.

use pliant_lab::Lab;
use pliant_model::Reason;
use pliant_protocol::admin::GpuView;
use pliant_tests::training::count;
use pliant_tests::{Options, Training};
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(60);

fn gpus(lab: &Lab) -> Vec<GpuView> {
    let out = lab.command("root", "pliant").unwrap().args(["gpus", "--json"]).output().unwrap();
    let all: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    serde_json::from_value(all["gpus"].clone()).unwrap()
}

/// The event names the right GPU, the slice that holds it is given back, and another node replaces it.
#[test]
fn a_lost_card_costs_its_slice_and_another_replaces_it() {
    let scenario = pliant_tests::root().join("tests/fake-nvml/scenarios/lab-8.toml");
    let lab = Lab::builder().nodes(3).gpus(8).poll_interval(1).scenario(scenario).start().unwrap();
    lab.wait_for(WAIT, "pliantd knows all GPUs", || {
        let all = gpus(&lab);
        all.len() == 24 && all.iter().all(|g| g.gpu.is_some())
    })
    .unwrap();
    let options =
        Options::default().elastic("12").sbatch(&["--gpus=8", "--nodes=1", "--nodelist=n0", "--cpus-per-gpu=1"]);
    let job = Training::submit(&lab, &options.trainer(&["--checkpoint-every=5"]).steps(300)).unwrap();
    job.wait_world(&lab, 12, WAIT).unwrap();
    let slice = job.slices(&lab).unwrap()[0].clone();
    let lent = lab
        .wait_some(WAIT, "pliantd shows the slice", || {
            gpus(&lab).into_iter().find(|g| g.job.is_some_and(|j| j == slice.id))
        })
        .unwrap();
    let (node, index) = (lent.node.0.clone(), lent.index.unwrap());
    assert_ne!(node, "n0");
    let path = lab.spec().scenario_of(&node);
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, format!("{text}\n[gpu.{index}]\nlost = \"error\"\n")).unwrap();
    lab.wait_for(WAIT, "the slice is gone", || job.slices(&lab).is_ok_and(|s| s.iter().all(|s| s.id != slice.id)))
        .unwrap();
    job.wait_world(&lab, 12, WAIT).unwrap();
    let now: Vec<String> = gpus(&lab).iter().filter(|g| g.base == Some(job.job)).map(|g| g.node.0.clone()).collect();
    assert!(now.len() == 4 && now.iter().all(|n| *n != node), "{now:?} and not {node}");
    let uuid = lent.gpu.unwrap().uuid;
    let history = job.history(&lab).unwrap();
    let named = history.iter().find_map(|e| match &e.reason {
        Reason::GpuLost { gpu, index: i, slice: Some(s) } => Some((gpu.uuid.clone(), *i, *s)),
        _ => None,
    });
    assert_eq!(named, Some((uuid, Some(index), slice.id)));
    assert_eq!(lab.wait_end(job.job, WAIT * 2).unwrap(), "COMPLETED", "{}", job.tail(20));
    let check = job.check(&lab).unwrap();
    assert_eq!((count(&check, "lost"), count(&check, "repeated")), (0, 0), "{check}");
}
