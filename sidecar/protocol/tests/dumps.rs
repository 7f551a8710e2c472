//! Real outputs of Slurm's commands (`../shared/cases`, not part of the product), each with what a right program reads;
//! and their traits in texts of our own.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use pliant_protocol::dump::{self, Dump, DumpError};
use std::path::PathBuf;

fn case(folder: &str, id: &str) -> Option<Result<Dump, DumpError>> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/cases/files");
    if !root.is_dir() {
        println!("skipped: no ../shared/cases");
        return None;
    }
    let named = |p: &PathBuf| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(id));
    let file = std::fs::read_dir(root.join(folder)).unwrap().map(|e| e.unwrap().path()).find(named).unwrap();
    Some(dump::read(&std::fs::read_to_string(file).unwrap()))
}

fn held(d: &Dump) -> Vec<(String, u32, Vec<u32>)> {
    d.jobs[0].held.iter().map(|h| (h.node.0.clone(), h.gpus, h.indexes.clone())).collect()
}

#[test]
fn j01_j06_only_gres_detail_tells() {
    for id in ["01", "06"] {
        let Some(d) = case("json", id) else { return };
        let d = d.unwrap();
        let four = |n: &str| (n.to_owned(), 4, vec![0, 1, 2, 3]);
        assert_eq!((held(&d), d.jobs[0].gpus()), (vec![four("gpu1"), four("gpu2")], 8), "{id}");
    }
}

#[test]
fn j02_j05_j07_j16_what_is_held_and_wanted() {
    let Some(d) = case("json", "02") else { return };
    let d = d.unwrap();
    assert_eq!(held(&d), [("ia1".to_owned(), 2, vec![0, 2])]);
    let kind = |name: &str, n| (Some(name.to_owned()), n);
    assert_eq!(d.jobs[0].held[0].kinds, [kind("h100", 1), kind("h200", 1)]);
    let d = case("json", "05").unwrap().unwrap();
    assert_eq!((d.jobs[0].wants, d.jobs[0].gpus()), (Some(4), 4));
    let d = case("json", "07").unwrap().unwrap();
    let pending = ["PENDING".to_owned()];
    assert_eq!((d.jobs[0].wants, d.jobs[0].gpus(), d.jobs[0].state.as_slice()), (Some(4), 0, &pending[..]));
    let d = case("json", "16").unwrap().unwrap();
    assert_eq!(held(&d), [("ia1".to_owned(), 2, vec![0, 1])]);
    assert_eq!(d.jobs[0].held[0].kinds, [kind("h100", 2)]);
}

#[test]
fn j09_j10_j12_nodes() {
    let Some(d) = case("json", "09") else { return };
    let d = d.unwrap();
    assert_eq!((d.nodes[0].gpus, d.nodes[0].used, d.nodes[0].used_indexes.len()), (6, 6, 6));
    let d = case("json", "10").unwrap().unwrap();
    assert_eq!((d.nodes[0].gpus, d.nodes[0].used, d.nodes[0].usable()), (4, 0, 0), "not while it completes");
    let d = case("json", "12").unwrap().unwrap();
    assert!(!d.nodes[0].schedulable());
    assert_eq!(d.nodes[0].memory_used_mib, Some(6656));
}

#[test]
fn j14_j17_j18_not_found_and_other_schemas() {
    let Some(d) = case("json", "14") else { return };
    let d = d.unwrap();
    assert!(d.not_found() && d.errors[0].contains("11500"), "{d:?}");
    let d = case("json", "17").unwrap().unwrap();
    let completed = ["COMPLETED".to_owned()];
    assert_eq!((d.jobs.len(), d.jobs[0].state.as_slice()), (1, &completed[..]));
    let d = case("json", "18").unwrap().unwrap();
    assert_eq!((d.jobs.len(), d.jobs[0].time_limit_min), (2, Some(30_240)));
}

#[test]
fn j20_j21_bad_lines_are_counted() {
    let Some(d) = case("json", "20") else { return };
    let d = d.unwrap();
    assert_eq!((d.jobs.len(), d.skipped), (6, 2));
    assert_eq!(d.jobs[3].reason.as_deref(), Some("(ReqNodeNotAvail, UnavailableNodes:cs[100,101,102])"));
    let d = case("json", "21").unwrap().unwrap();
    assert_eq!((d.nodes.len(), d.skipped), (8, 0));
}

#[test]
fn c02_c03_c05_c07_texts() {
    let Some(d) = case("scontrol-text", "02") else { return };
    let d = d.unwrap();
    assert_eq!(held(&d), [("dgx-10".to_owned(), 1, vec![7]), ("dgx-12".to_owned(), 4, vec![0, 1, 2, 3])]);
    let d = case("scontrol-text", "03").unwrap().unwrap();
    let own = d.jobs[0].on("cn-002").unwrap();
    assert_eq!((own.gpus, own.indexes.as_slice(), own.cpus, own.memory_mib), (2, &[1, 2][..], Some(16), Some(96_000)));
    let d = case("scontrol-text", "05").unwrap().unwrap();
    let of = |i: usize| (d.nodes[i].gpus, d.nodes[i].used, d.nodes[i].used_indexes.clone());
    assert_eq!((of(0), of(1)), ((4, 1, vec![0]), (4, 0, vec![])));
    let d = case("scontrol-text", "07").unwrap().unwrap();
    assert_eq!((d.nodes[0].gpus, d.nodes[0].usable()), (1, 0));
}

#[test]
fn c08_columns_that_run_together_are_refused() {
    let Some(d) = case("scontrol-text", "08") else { return };
    let e = d.unwrap_err();
    assert!(e.line == 2 && e.reason.contains("--json"), "{e}");
}

#[test]
fn x03_one_reason_whatever_is_in_it() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/cases/files/strings");
    let Ok(text) = std::fs::read_to_string(root.join("03-pending-reasons-with-commas.txt")) else {
        println!("skipped: no ../shared/cases");
        return;
    };
    for reason in text.lines().filter(|l| l.starts_with('(') && *l != "(null)") {
        let line = serde_json::json!({"id": 1, "state": "PENDING", "r": reason}).to_string();
        let d = dump::read(&line).unwrap();
        assert_eq!(d.jobs[0].reason.as_deref(), Some(&reason[1..reason.len() - 1]));
        assert!(d.jobs[0].held.is_empty());
    }
}

const JOB: &str = r#"{"jobs": [{"job_id": {"set": true, "infinite": false, "number": 7}, "job_state": ["RUNNING"],
  "nodes": "a[1-2]", "gres_detail": ["gpu:x:1(IDX:3)", "gpu:x:2(IDX:0,2)"], "tres_alloc_str": "cpu=2",
  "tres_per_node": "gres/gpu:2", "node_count": 2, "time_limit": {"set": false, "infinite": true, "number": 0},
  "new_field": {"a": []}}], "errors": []}"#;

#[test]
fn our_own() {
    let d = dump::read(JOB).unwrap();
    assert_eq!(held(&d), [("a1".to_owned(), 1, vec![3]), ("a2".to_owned(), 2, vec![0, 2])]);
    assert_eq!((d.jobs[0].id, d.jobs[0].wants, d.jobs[0].time_limit_min), (7, Some(4), None));
    let none = dump::read(r#"{"nodes": [], "errors": []}"#).unwrap();
    assert!(!none.not_found(), "none is not \"not found\"");
    let d = dump::read("NodeName=n1 Gres=gpu:2(S:0) State=IDLE+COMPLETING\n   Reason=a, b (c) [root@x]\n").unwrap();
    assert_eq!((d.nodes[0].gpus, d.nodes[0].usable(), d.nodes[0].reason.as_deref()), (2, 0, Some("a, b (c) [root@x]")));
    let damaged = dump::read(&JOB.replace("a[1-2]", "a[1-")).unwrap();
    assert!(damaged.jobs.is_empty() && damaged.unread[0].contains("job 7"), "it must not look as if it held nothing");
    let short = dump::read(&JOB.replace("a[1-2]", "a1")).unwrap();
    assert_eq!((short.jobs.len(), short.unread.len()), (0, 1));
    let one_line = "JobId=9 JobState=RUNNING Nodes=a GRES=gpu:1(IDX:0) Nodes=b CPU_IDs=0-1 GRES=gpu:2(IDX:1-2)\n";
    let d = dump::read(one_line).unwrap();
    assert_eq!((d.jobs[0].id, d.jobs[0].gpus(), d.jobs[0].held[1].cpus), (9, 3, Some(2)));
    let both = dump::read(&format!("NodeName=n1 Gres=gpu:2 State=IDLE*\n{one_line}")).unwrap();
    assert_eq!((both.nodes.len(), both.jobs[0].id, both.nodes[0].schedulable()), (1, 9, false));
    let table = "JOBID     REASON    GRES\n1         Resources gpu:1\n2         ReqNodeNotgpu:1\n";
    assert_eq!(dump::read(table).unwrap_err().line, 3);
    assert!(dump::read("hello").unwrap_err().reason.contains("scontrol show job -d"));
    for cut in (0..JOB.len()).filter(|i| JOB.is_char_boundary(*i)) {
        let _ = dump::read(&JOB[..cut]);
    }
}
