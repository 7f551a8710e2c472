//! Real captures (`../shared/cases`, not part of the product), each with what a right program reads. Skipped by name
//! where they are not there.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use pliant_model::capture::{self, Capture};
use pliant_model::conf::index_list;
use pliant_model::topology::{Link, LinkKind, NodeTopology, Path};
use std::path::PathBuf;

fn text(path: &str) -> Option<String> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/cases/files");
    if !root.is_dir() {
        println!("skipped: no ../shared/cases");
        return None;
    }
    let (folder, id) = path.split_once('/').unwrap();
    let found = std::fs::read_dir(root.join(folder)).unwrap().map(|e| e.unwrap().path());
    let file = found.into_iter().find(|p| p.file_name().unwrap().to_string_lossy().starts_with(id));
    Some(std::fs::read_to_string(file.unwrap()).unwrap())
}

fn topo(id: &str) -> Option<NodeTopology> {
    match capture::read(&text(&format!("topo/{id}"))?) {
        Ok(Capture::Topology(t)) => Some(t),
        other => panic!("{id}: {other:?}"),
    }
}

fn nvlinks(t: &NodeTopology) -> Vec<(usize, usize, u32)> {
    t.linked_pairs().into_iter().map(|(a, b)| (a, b, t.link(a, b).count)).collect()
}

fn cpus(t: &NodeTopology, gpu: usize) -> String {
    index_list::format(&t.gpus[gpu].cpus)
}

fn numas(t: &NodeTopology) -> Vec<Option<u32>> {
    t.gpus.iter().map(|g| g.numa).collect()
}

fn paths(t: &NodeTopology, path: Path) -> Vec<(usize, usize)> {
    let n = t.gpus.len();
    (0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b))).filter(|(a, b)| t.link(*a, *b).path == Some(path)).collect()
}

#[test]
fn t01_t23_the_hybrid_cube_mesh_in_two_layouts() {
    let Some(t) = topo("01") else { return };
    let links = nvlinks(&t);
    let double: Vec<_> = links.iter().filter(|l| l.2 == 2).map(|l| (l.0, l.1)).collect();
    assert_eq!(double, [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)]);
    assert_eq!((links.len(), 28 - links.len()), (16, 12));
    assert!((0..8).all(|g| t.physical_links(g) == 6));
    assert!(links.iter().all(|(a, b, _)| t.link(*a, *b).kind == LinkKind::NvLink));
    assert_eq!(numas(&t), [None; 8]);
    // The columns of the NICs are out of order: mlx5_0, mlx5_2, mlx5_1, mlx5_3.
    let nic = |g: usize| t.nearest_nics(g).into_iter().map(|n| t.nics[n].name.as_str()).collect::<Vec<_>>();
    assert_eq!((nic(0), nic(2), nic(4), nic(6)), (vec!["mlx5_0"], vec!["mlx5_1"], vec!["mlx5_2"], vec!["mlx5_3"]));
    let newer = topo("23").unwrap();
    assert_eq!(nvlinks(&newer), links);
    assert_eq!(numas(&newer), [0, 0, 0, 0, 1, 1, 1, 1].map(Some));
}

#[test]
fn t02_t28_old_words_and_missing_rows() {
    let Some(t) = topo("02") else { return };
    assert_eq!((nvlinks(&t).len(), paths(&t, Path::Pix)), (0, vec![(0, 1), (2, 3)]));
    assert!((0..4).all(|g| cpus(&t, g) == "0-11"));
    assert_eq!(Path::parse("SOC"), Path::parse("SYS"));
    let t = topo("28").unwrap();
    assert_eq!((t.gpus.len(), paths(&t, Path::Pix)), (8, vec![(0, 1), (2, 3)]));
    assert_eq!(t.warnings, ["rows are missing: GPU4, GPU5, GPU6, GPU7"]);
}

#[test]
fn t03_t15_t29_switches_share_their_links() {
    let Some(t) = topo("03") else { return };
    assert_eq!((nvlinks(&t).len(), t.nics.len()), (28, 12));
    assert!((0..8).all(|g| t.physical_links(g) == 12) && t.link(0, 7).kind == LinkKind::NvSwitch);
    assert_eq!(numas(&t), [3, 3, 1, 1, 7, 7, 5, 5].map(Some));
    assert_eq!((cpus(&t, 0), cpus(&t, 5)), ("48-63,176-191".into(), "112-127,240-255".into()));
    let t = topo("15").unwrap();
    assert!(nvlinks(&t).len() == 28 && (0..8).all(|g| t.physical_links(g) == 18));
    let near: Vec<Vec<usize>> = (0..8).map(|g| t.nearest_nics(g)).collect();
    assert_eq!(near, [[0], [3], [4], [5], [6], [9], [10], [11]]);
    assert_eq!(numas(&t), [0, 0, 0, 0, 1, 1, 1, 1].map(Some));
    let t = topo("29").unwrap();
    assert_eq!((t.gpus.len(), nvlinks(&t).len()), (16, 120));
    assert!((0..16).all(|g| t.physical_links(g) == 6) && t.link(14, 15).kind == LinkKind::NvSwitch);
    assert!(t.warnings[0].contains("GPU15"));
}

#[test]
fn t05_t07_t09_bridges() {
    let Some(t) = topo("05") else { return };
    assert_eq!((nvlinks(&t), numas(&t)), (vec![(0, 1, 12), (2, 3, 12)], [0, 0, 1, 1].map(Some).to_vec()));
    assert_eq!(t.domains(), [[0, 1], [2, 3]]);
    let t = topo("07").unwrap();
    assert_eq!((nvlinks(&t), numas(&t)), (vec![(0, 1, 12), (2, 3, 12)], [0, 1, 2, 3].map(Some).to_vec()));
    let t = topo("09").unwrap();
    assert_eq!(nvlinks(&t), [(0, 1, 4)]);
    // T34: the owner says that 2-3 are bridged, the matrix says that they are not.
    let t = topo("34").unwrap();
    assert_eq!((nvlinks(&t), t.link(2, 3).path), (vec![(0, 1, 12)], Some(Path::Node)));
}

#[test]
fn t06_t26_no_links_and_no_peers() {
    let Some(t) = topo("06") else { return };
    assert_eq!((nvlinks(&t).len(), numas(&t), t.warnings.len()), (0, vec![Some(1), Some(1)], 0));
    let t = topo("26").unwrap();
    assert_eq!((nvlinks(&t).len(), t.link(0, 1).peer_access), (0, Some(false)));
    assert_eq!(t.link(0, 1).path, Some(Path::Phb));
}

#[test]
fn t10_t11_t12_boxes_without_nvlink() {
    let Some(t) = topo("10") else { return };
    assert_eq!((nvlinks(&t).len(), paths(&t, Path::Sys).len()), (0, 28));
    assert_eq!(numas(&t), [0, 0, 0, 0, 1, 1, 1, 1].map(Some));
    assert_eq!(t.nearest_nics(6).len(), 2);
    assert_eq!(t.nics[0].paths[6], Some(Path::Phb));
    let t = topo("11").unwrap();
    assert_eq!((nvlinks(&t).len(), paths(&t, Path::Pix).len()), (0, 12));
    assert_eq!((t.nics[0].device.as_str(), t.nics[0].paths[0]), ("mlx5_bond_0", Some(Path::Pix)));
    let t = topo("12").unwrap();
    assert_eq!((paths(&t, Path::Phb), numas(&t)), (vec![(1, 2), (3, 4)], [1, 0, 0, 0, 0].map(Some).to_vec()));
}

#[test]
fn t14_a_second_matrix_never_replaces_the_first() {
    let Some(t) = topo("14") else { return };
    assert_eq!((t.gpus.len(), t.link(0, 1).path, t.link(0, 1).peer_access), (2, Some(Path::Node), Some(false)));
    assert_eq!((cpus(&t, 0), numas(&t)), ("0-15".into(), vec![Some(0), Some(0)]));
}

#[test]
fn t17_t19_t21_t24_t25_islands_meshes_and_rings() {
    let Some(t) = topo("17") else { return };
    assert_eq!((nvlinks(&t).len(), t.domains()), (12, vec![vec![0, 1, 2, 3], vec![4, 5, 6, 7]]));
    let t = topo("19").unwrap();
    assert_eq!((nvlinks(&t).len(), t.physical_links(0)), (6, 12));
    assert_eq!(numas(&t), [3, 2, 1, 0].map(Some));
    assert_eq!((cpus(&t, 0), cpus(&t, 3)), ("24-31,56-63".into(), "0-7,32-39".into()));
    let t = topo("21").unwrap();
    assert_eq!(nvlinks(&t), [(0, 1, 2), (0, 2, 2), (1, 3, 1), (2, 3, 2)]);
    let t = topo("24").unwrap();
    assert_eq!((nvlinks(&t).len(), cpus(&t, 2), t.nics[0].device.as_str()), (6, "32-63,96-127".into(), "rocep49s0"));
    let t = topo("25").unwrap();
    assert_eq!((nvlinks(&t), numas(&t)), (vec![(0, 1, 2)], vec![None, None]));
}

#[test]
fn t31_affinity_that_tells_nothing() {
    let Some(t) = topo("31") else { return };
    assert_eq!(t.gpus.len(), 8);
    assert!((0..6).all(|g| cpus(&t, g) == "18-35,54-71"));
    assert_eq!(
        nvlinks(&t).iter().filter(|l| l.0 == 0).map(|l| (l.1, l.2)).collect::<Vec<_>>(),
        [(1, 2), (2, 2), (3, 1), (4, 1)]
    );
    assert_eq!(t.nearest_nics(0), [0]);
    assert_eq!(t.nearest_nics(4), [2]);
}

#[test]
fn a01_a03_rocm() {
    let Some(one) = text("topo-amd/01") else { return };
    let Ok(Capture::Topology(t)) = capture::read(&one) else { panic!() };
    assert_eq!((nvlinks(&t).len(), t.link(0, 1).kind, numas(&t)), (6, LinkKind::Xgmi, [0, 1, 2, 3].map(Some).to_vec()));
    let Ok(Capture::Topology(t)) = capture::read(&text("topo-amd/03").unwrap()) else { panic!() };
    assert_eq!((t.gpus.len(), nvlinks(&t).len(), numas(&t)), (4, 0, vec![None; 4]));
    let all: Vec<Link> = (1..4).map(|b| t.link(0, b)).collect();
    assert!(all.iter().all(|l| *l == all[0]), "equal");
}

#[test]
fn m03_one_gpu_of_six_is_cut() {
    let Some(text) = text("mig/03") else { return };
    let Ok(Capture::List(all)) = capture::read(&text) else { panic!() };
    assert_eq!(all.iter().map(|g| g.instances.len()).collect::<Vec<_>>(), [0, 0, 0, 0, 0, 4]);
    assert_eq!((all[5].index, all[5].instances[0].0.as_str()), (5, "1g.5gb"));
}
