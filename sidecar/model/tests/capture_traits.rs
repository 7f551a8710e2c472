//! The traits of real captures in small ones of our own, and what damage does to them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use pliant_model::capture::{self, Capture, CaptureError};
use pliant_model::topology::{LinkKind, NodeTopology, Path};
use proptest::prelude::*;

fn topo(text: &str) -> Result<NodeTopology, CaptureError> {
    match capture::read(text)? {
        Capture::Topology(t) => Ok(t),
        Capture::List(all) => panic!("{all:?}"),
    }
}

const BRIDGED: &str = "\tGPU0\tGPU1\tGPU2\tmlx5_1\tmlx5_0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n\
    GPU0\t X \tNV3\tSYS\tPIX\tSYS\t0-3,8\t0\t\tN/A\nGPU1\tNV3\t X \tSYS\tPHB\tSYS\t0-3,8\t0\t\tN/A\n\
    GPU2\tSYS\tSYS\t X \tSYS\tPXB\t4-7\t1\t\tN/A\nmlx5_1\tPIX\tPHB\tSYS\t X \tSYS\n\nLegend:\n\n  X    = Self\n\
      NV#  = Connection traversing a bonded set of # NVLinks\n";

#[test]
fn tabs_links_numa_and_cards_out_of_order() {
    let t = topo(BRIDGED).unwrap();
    assert_eq!(t.linked_pairs(), [(0, 1)]);
    assert_eq!((t.link(0, 1).count, t.link(0, 1).kind), (3, LinkKind::NvLink));
    assert_eq!(t.gpus.iter().map(|g| g.numa).collect::<Vec<_>>(), [Some(0), Some(0), Some(1)]);
    assert_eq!(t.gpus[0].cpus, [0, 1, 2, 3, 8]);
    assert_eq!(t.nearest_nics(2).iter().map(|n| t.nics[*n].device.as_str()).collect::<Vec<_>>(), ["mlx5_0"]);
}

#[test]
fn blanks_old_words_and_a_header_without_tab() {
    let t = topo("GPU0 GPU1 CPU Affinity\nGPU0  X   SOC  0-5   \nGPU1 SOC   X   6-11\n").unwrap();
    assert_eq!((t.link(0, 1).path, t.gpus[1].numa), (Some(Path::Sys), None));
    let wrapped = "  GPU0 GPU1 CPU Affinity NUMA Affinity GPU NUMA ID\n  GPU0 X NODE 0-1 0 N/A\n  GPU1 NODE X 0-1 0 N/A\n\n  Legend:\n\
        \x20   SYS  = Connection traversing PCIe between\n  NUMA nodes (e.g., QPI/UPI)\n\n   GPU0 GPU1\n  GPU0 X NS\n  GPU1 NS X\n";
    let t = topo(wrapped).unwrap();
    assert_eq!((t.link(0, 1).path, t.link(0, 1).peer_access), (Some(Path::Node), Some(false)));
}

#[test]
fn lines_of_other_commands_change_nothing() {
    // B37: a block of MIG lines, and texts before and after.
    let with = format!(
        "GPU 0: NVIDIA A100 (UUID: GPU-1)\n  MIG 1g.5gb Device 0: (UUID: MIG-1)\n{BRIDGED}\nGPU 0: X\nNVML: Unable to retrieve\n"
    );
    assert_eq!(topo(&with).unwrap(), topo(BRIDGED).unwrap());
    let list =
        capture::read("GPU 0: A (UUID: GPU-1)\n  MIG 2g.10gb  Device  0: (UUID: MIG-7)\nGPU 1: B (UUID: GPU-2)\n");
    let Ok(Capture::List(all)) = list else { panic!() };
    assert_eq!((all.len(), all[0].instances.len(), all[1].instances.len()), (2, 1, 0));
}

#[test]
fn missing_rows_are_named_and_cells_never_shifted() {
    let rows: Vec<&str> = BRIDGED.lines().collect();
    let t = topo(&rows[..3].join("\n")).unwrap();
    assert_eq!((t.gpus.len(), t.warnings.as_slice()), (3, &["rows are missing: GPU2".to_owned()][..]));
    for (from, to, line, word) in [
        ("GPU1\tNV3\t X ", "GPU1\t X ", 3, "X must stand under GPU1"),
        ("GPU1\tNV3", "GPU1\tNVx", 3, "\"NVx\""),
        ("GPU1\tNV3", "GPU1\tNV4", 3, "says"),
        ("GPU2\tSYS\tSYS", "GPU1\tNV3\t X ", 4, "there already"),
        ("GPU2\tSYS", "GPU7\tSYS", 4, "no column"),
        ("0-3,8\t0\t\tN/A\nGPU1", "0-z\t0\t\tN/A\nGPU1", 2, "CPU Affinity"),
        ("4-7\t1\t\tN/A", "4-7\t1\t\tN/A\t5", 4, "values behind its cells"),
    ] {
        assert!(BRIDGED.contains(from), "{from:?}");
        let e = topo(&BRIDGED.replacen(from, to, 1)).unwrap_err();
        assert!(e.line == line && e.reason.contains(word), "{from:?}: {e}");
    }
    assert!(capture::read("nothing here\n").unwrap_err().reason.contains("nvidia-smi topo -m"));
}

const ROCM: &str = "=== Hops between two GPUs ===\n GPU0 GPU1\nGPU0 0 1\nGPU1 1 0\n=== Link Type between two GPUs ===\n GPU0 GPU1\n\
    GPU0 0 XGMI\nGPU1 XGMI 0\n=== Numa Nodes ===\nGPU 0 : (Topology) Numa Node: 2\nGPU[1] : (Topology) Numa Node: 3\n";

#[test]
fn rocm_blocks() {
    let t = topo(ROCM).unwrap();
    assert_eq!((t.link(0, 1).kind, t.gpus[0].numa, t.gpus[1].numa), (LinkKind::Xgmi, Some(2), Some(3)));
    let pcie = topo(ROCM.replace("XGMI", "PCIE").split("=== Numa").next().unwrap()).unwrap();
    assert_eq!((pcie.linked_pairs().len(), pcie.gpus[0].numa), (0, None));
    assert!(topo(&ROCM.replacen("GPU0 0 XGMI", "GPU0 0", 1)).is_err());
    assert!(topo(&ROCM.replacen("XGMI 0", "PCIE 0", 1)).unwrap_err().reason.contains("says"));
}

proptest! {
    /// Damage is refused or read as something that is whole: no panic, symmetric links, the GPUs of some header.
    #[test]
    fn damage_never_shifts(
        rocm in any::<bool>(), at in 0usize..600, cut in 0usize..40, put in "[ \\tGPUNVX0-9SYOK:=\\n]{0,12}",
    ) {
        let whole = if rocm { ROCM } else { BRIDGED };
        let at = at.min(whole.len());
        let end = (at + cut).min(whole.len());
        let text = format!("{}{put}{}", &whole[..at], &whole[end..]);
        if let Ok(Capture::Topology(t)) = capture::read(&text) {
            let n = t.gpus.len();
            prop_assert_eq!(t.links.len(), n * n);
            for a in 0..n {
                prop_assert_eq!(t.link(a, a).kind, LinkKind::Own);
                for b in 0..n {
                    prop_assert_eq!(t.link(a, b), t.link(b, a));
                }
            }
            prop_assert!(t.nics.iter().all(|nic| nic.paths.len() == n));
        }
    }

    #[test]
    fn no_text_panics(text in "[GPUNICX0-9NV \\t\\n=:()A-Za-z]{0,200}") {
        let _ = capture::read(&text);
    }
}
