//! GPUs: lost ones, held ones, and who sees what.

use super::*;
use crate::answers::{self, Asker, Process};
use pliant_model::gpu::{self, Gpu, GpuEvent, GpuId, Happening, NodeGpus, Sample};
use pliant_protocol::admin::{GpuState, GpuView, Reply, Request};

const ROOT: Asker = Asker { uid: 0, privileged: true };

fn gpu(index: u32) -> Gpu {
    let bus = format!("0000:{index:02x}:00.0").parse().unwrap();
    Gpu { minor: Some(index), gres_index: Some(index), ..Gpu::new(format!("GPU-{index}"), bus, index) }
}

fn gpus(count: u32) -> NodeGpus {
    NodeGpus { gpus: (0..count).map(gpu).collect(), ..NodeGpus::default() }
}

fn lost_event(node: &str, index: u32) -> GpuEvent {
    let g = gpu(index);
    let gpu = GpuId { node: node.into(), bus: g.bus, uuid: g.uuid };
    let what = Happening::Lost { why: "fallen off the bus".into() };
    GpuEvent { at_ms: 1, boot_id: "b".into(), gpu, gres_index: Some(index), what }
}

fn rows(core: &Core, asker: Asker) -> Vec<GpuView> {
    let process = Process { since: 0, operator: None };
    match answers::answer(core, asker, &Request::Gpus, process, at(3)) {
        Reply::Gpus { gpus, .. } => gpus,
        other => panic!("{other:?}"),
    }
}

fn with_indexes(job: JobRecord, indexes: &str, count: u32) -> JobRecord {
    JobRecord { gres_detail: vec![format!("gpu:{count}(IDX:{indexes})")], ..job }
}

/// Job 7 with GPUs 0-1 of n0, its slice 11 with 2-7 of n1.
fn lent_with_indexes(dir: &Path) -> Core {
    let mut core = core(dir);
    let jobs = vec![with_indexes(running(7), "0-1", 2), with_indexes(slice(11, 7, "one"), "2-7", 6)];
    look(&mut core, view(jobs, (2, 6)), at(0));
    tell(&mut core, JobStatus { slices: vec![held(11)], ..status(7) }, at(1));
    for n in ["n0", "n1"] {
        core.on_gpus(n.into(), gpus(8));
    }
    core.settle(at(1));
    assert!(orders(&mut core).is_empty());
    core
}

#[test]
fn a_slice_with_a_lost_gpu_is_given_back_and_the_right_gpu_named() {
    let dir = tempfile::tempdir().unwrap();
    let mut core = lent_with_indexes(dir.path());
    let mut now_lost = gpus(8);
    now_lost.gpus[4].lost = Some("fallen off the bus".into());
    core.on_gpus("n1".into(), now_lost);
    core.on_happened(&"n1".into(), lost_event("n1", 4), at(2));
    core.settle(at(2));
    let orders = orders(&mut core);
    let Order::Shrink { slices, reason: Reason::GpuLost { gpu, index, slice }, .. } = &orders[0] else {
        panic!("{orders:?}")
    };
    assert_eq!(
        (slices.as_slice(), gpu.uuid.as_str(), *index, *slice),
        (&[JobId(11)][..], "GPU-4", Some(4), Some(JobId(11)))
    );
    assert_eq!(rows(&core, ROOT)[8 + 4].state, GpuState::Lost);
    let history = core.journal.history(JobId(7), 10).unwrap();
    assert!(history.iter().any(|e| matches!(e.reason, Reason::GpuLost { .. })), "{history:?}");
}

#[test]
fn a_lost_gpu_that_no_slice_holds_takes_nothing_away() {
    let dir = tempfile::tempdir().unwrap();
    let mut core = lent_with_indexes(dir.path());
    let mut now_lost = gpus(8);
    now_lost.gpus[0].lost = Some("x".into());
    core.on_gpus("n1".into(), now_lost.clone());
    core.on_gpus("n0".into(), now_lost);
    core.settle(at(2));
    assert!(orders(&mut core).is_empty(), "index 0 of n1 is idle, index 0 of n0 is the base's");
}

#[test]
fn an_agent_speaks_for_its_own_node_only() {
    let dir = tempfile::tempdir().unwrap();
    let mut core = lent_with_indexes(dir.path());
    core.on_happened(&"n0".into(), lost_event("n1", 4), at(2));
    assert!(core.hardware.events.is_empty());
}

#[test]
fn every_gpu_has_a_state_and_a_reason() {
    // B43, B45: a process that does not die, and memory that nobody owns.
    let dir = tempfile::tempdir().unwrap();
    let mut core = lent_with_indexes(dir.path());
    let process = |pid, state| gpu::Process { pid, uid: Some(5), job: None, memory_mib: None, state, instance: None };
    let stuck = Sample { uuid: "GPU-3".into(), processes: Some(vec![process(99, Some('D'))]), ..Sample::default() };
    let memory = Sample {
        uuid: "GPU-4".into(),
        memory_used_mib: Some(9000),
        processes: Some(vec![process(98, None)]),
        ..Sample::default()
    };
    core.on_samples("n0".into(), vec![stuck, memory]);
    core.on_happened(
        &"n0".into(),
        GpuEvent { what: Happening::Orphaned { memory_mib: 9000 }, ..lost_event("n0", 4) },
        at(2),
    );
    let all = rows(&core, ROOT);
    let of = |i: usize| (all[i].state, all[i].job, all[i].base);
    assert_eq!(of(0), (GpuState::Used, Some(JobId(7)), None));
    assert_eq!(of(3), (GpuState::Held, None, None));
    assert!(all[3].reason.contains("process 99 in state D"), "{}", all[3].reason);
    assert!(all[4].reason.contains("9000 MiB"), "{}", all[4].reason);
    assert_eq!(of(5), (GpuState::Idle, None, None), "the neighbours can be used");
    assert_eq!(of(8 + 2), (GpuState::Lent, Some(JobId(11)), Some(JobId(7))));
    assert_eq!(core.hardware.held(&core.holders), [("n0".into(), 2)].into());
    let other = rows(&core, Asker { uid: 77, privileged: false });
    assert_eq!((other[0].state, other[0].job), (GpuState::Used, None), "whose job it is, is not told to others");
    assert_eq!(other[3].sample.as_ref().unwrap().processes, Some(vec![]));
}
