//! The collection of real files and situations (`../shared/cases`, not part of the product): configuration files,
//! hostlists and strings, each with the value that a right program reads. Skipped by name where it is not there; the
//! same traits are in `traits.rs` with files of our own.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use pliant_model::conf::{ConfError, gres_conf, slurm_conf, topology_conf};
use pliant_model::hostlist::{self, Release};
use pliant_model::{NodeName, gres, time};
use std::collections::BTreeSet;
use std::path::PathBuf;

fn file(path: &str) -> Option<String> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/cases/files");
    if !root.is_dir() {
        println!("skipped: no ../shared/cases");
        return None;
    }
    Some(std::fs::read_to_string(root.join(path)).unwrap_or_else(|e| panic!("{path}: {e}")))
}

fn none(_: &str) -> Result<String, String> {
    Err("not there".into())
}

fn gres(name: &str) -> Option<Result<gres_conf::GresConf, ConfError>> {
    Some(gres_conf::parse(name, &file(&format!("gresconf/{name}"))?, &mut none))
}

fn slurm(name: &str) -> Option<Result<slurm_conf::SlurmConf, ConfError>> {
    Some(slurm_conf::parse(name, &file(&format!("slurmconf/{name}"))?, &mut none))
}

fn devices(conf: &gres_conf::GresConf, node: &str) -> Vec<(Option<String>, Option<String>)> {
    conf.gpus(&node.into()).into_iter().map(|d| (d.file, d.kind)).collect()
}

#[test]
fn g03_two_types_on_one_host() {
    let Some(conf) = gres("03-hetero-nodename-tabs.txt") else { return };
    let conf = conf.unwrap();
    assert_eq!(conf.total(), 15);
    let of = |f: &str, k: &str| (Some(f.to_owned()), Some(k.to_owned()));
    assert_eq!(devices(&conf, "viz1"), [of("/dev/nvidia0", "gtx970"), of("/dev/nvidia1", "gtx1060")]);
    assert_eq!(["cn1", "cn2", "viz2", "gpuv"].map(|n| devices(&conf, n).len()), [4, 4, 1, 4]);
}

#[test]
fn g04_g05_cpus_are_hyper_threads() {
    let layouts = [("04-cpus-keyword-legacy-ht.txt", "box1", 16), ("05-dgx1-cpus-keyword.txt", "dgx01", 20)];
    for (name, node, cores) in layouts {
        let Some(conf) = gres(name) else { return };
        let layout = gres_conf::Layout { sockets: 2, cores, threads: 2 };
        let sockets: Vec<_> = conf.unwrap().gpus(&node.into()).iter().map(|d| d.sockets(layout).unwrap()).collect();
        assert_eq!(sockets, [[0], [0], [0], [0], [1], [1], [1], [1]], "{name}");
    }
}

#[test]
fn g06_affinity_in_turn() {
    let Some(conf) = gres("06-cpus-round-robin.txt") else { return };
    let gpus = conf.unwrap().gpus(&"x".into());
    assert_eq!(gpus.len(), 8);
    for (a, gpu) in gpus.iter().enumerate() {
        let same: Vec<usize> = (0..8).filter(|b| gpus[*b].cores == gpu.cores).collect();
        assert_eq!(same, [a % 4, a % 4 + 4]);
    }
}

#[test]
fn g09_g20_g21_g26_counts_types_and_shards() {
    let Some(conf) = gres("09-autodetect-nvidia-long-type.txt") else { return };
    let conf = conf.unwrap();
    assert_eq!((conf.auto_detect.as_deref(), conf.total()), (Some("nvidia"), 1));
    assert_eq!(devices(&conf, "gpu01")[0].1.as_deref(), Some("tesla_v100-sxm2-32gb"));
    let conf = gres("20-global-shard-with-types.txt").unwrap().unwrap();
    let kinds: BTreeSet<_> = devices(&conf, "x").into_iter().map(|d| d.1.unwrap()).collect();
    assert_eq!((conf.total(), kinds.len(), conf.shards_per_gpu(&"x".into())), (4, 2, Some(8)));
    let conf = gres("21-noderange-filerange.txt").unwrap().unwrap();
    assert_eq!((conf.nodes().len(), conf.total()), (3, 12));
    let conf = gres("26-indented-yaml-block-8gpu.txt").unwrap().unwrap();
    assert!(conf.total() == 8 && devices(&conf, "x").iter().all(|d| d.1.as_deref() == Some("h100")));
}

#[test]
fn g22_g23_templates_are_refused_and_includes_followed() {
    let Some(conf) = gres("22-ansible-template-not-rendered.txt") else { return };
    let e = conf.unwrap_err();
    assert!(e.line == 1 && e.reason.contains("template"), "{e}");
    let conf = gres("23-include-directive.txt").unwrap().unwrap();
    assert!(conf.gaps[0].contains("slurm_parallelcluster_gres.conf"), "{:?}", conf.gaps);
    let text = file("gresconf/23-include-directive.txt").unwrap();
    let mut there = |path: &str| {
        assert_eq!(path, "slurm_parallelcluster_gres.conf");
        Ok("Name=gpu File=/dev/nvidia[0-1]\n".to_owned())
    };
    assert_eq!(gres_conf::parse("f", &text, &mut there).unwrap().total(), 2);
}

#[test]
fn s01_to_s06_nodes_gpus_and_times() {
    let Some(conf) = slurm("01-hetero-maxtime-99s.txt") else { return };
    let conf = conf.unwrap();
    assert_eq!((conf.node_names().len(), conf.gpus()), (29, 15));
    let gpuv = conf.partitions.iter().find(|p| p.name == "gpuv").unwrap();
    let seconds = gpuv.max_time().unwrap().unwrap();
    assert_eq!((seconds, time::minutes(seconds)), (604_899, 10_082));
    let conf = slurm("03-edge-mixed.txt").unwrap().unwrap();
    let kinds: BTreeSet<_> = conf.nodes.iter().filter_map(|n| gres::gpus(n.gres()?).into_iter().next()?.kind).collect();
    assert_eq!((conf.node_names().len(), conf.gpus(), kinds.len()), (4, 3, 3));
    let conf = slurm("04-two-node-v100.txt").unwrap().unwrap();
    assert_eq!((conf.partitions_of(&"gpu01".into()).count(), conf.gpus()), (2, 1));
    let conf = slurm("05-cons-res-fastschedule.txt").unwrap().unwrap();
    assert!(!conf.cons_tres());
    let conf = slurm("06-dgx1-cons-res.txt").unwrap().unwrap();
    assert_eq!((conf.node_names().len(), conf.gpus(), conf.partitions_of(&"linux1".into()).count()), (1, 8, 1));
}

#[test]
fn s08_to_s12_controllers_blanks_and_templates() {
    let Some(conf) = slurm("08-include-jobsubmit-lua.txt") else { return };
    let conf = conf.unwrap();
    assert_eq!((conf.controllers().len(), conf.gaps.len()), (2, 1), "{:?}", conf.gaps);
    assert!(conf.cons_tres());
    let conf = slurm("10-spaces-around-equals.txt").unwrap().unwrap();
    let tres: BTreeSet<_> = conf.accounting_tres().into_iter().collect();
    assert_eq!(tres, BTreeSet::from(["cpu", "mem", "gres/gpu", "gres/gpu:volta"]));
    assert_eq!(conf.get("mpidefault"), Some("pmi2"));
    for name in ["11-deepops-template.txt", "12-cyclecloud-template.txt"] {
        let e = slurm(name).unwrap().unwrap_err();
        assert!(e.reason.contains("template") && e.line > 0, "{e}");
    }
}

#[test]
fn p02_to_p10_trees_and_blocks() {
    let read = |name: &str| Some(topology_conf::parse(name, &file(&format!("topology/{name}"))?, &mut none));
    let Some(tree) = read("02-tree-no-root-mixed-hosts.txt") else { return };
    let tree = tree.unwrap();
    assert_eq!((tree.node_count(), tree.roots().len()), (39, 4));
    let tree = read("03-tree-placeholder-names.txt").unwrap().unwrap();
    assert_eq!(tree.unknown_nodes(&["n1".into()]).0.len(), 4);
    let tree = read("04-tree-comma-hosts.txt").unwrap().unwrap();
    let leaves: Vec<usize> = tree.leaves().map(|l| l.nodes.len()).collect();
    assert_eq!((tree.node_count(), leaves, tree.roots().len()), (16, vec![3, 6, 3, 2, 2], 1));
    let e = read("05-block-18-of-20-commented.txt").unwrap().unwrap_err();
    assert!(e.reason.contains("no block"), "{e}");
    for (name, blocks, hosts) in [
        ("06-block-sizes-illegal.txt", 3, 54),
        ("07-block-uuid-names.txt", 4, 72),
        ("10-block-nvl-12racks.txt", 12, 96),
    ] {
        let t = read(name).unwrap().unwrap();
        assert_eq!((t.switches.len(), t.node_count()), (blocks, hosts), "{name}");
    }
}

#[test]
fn h01_h02_hostlists_per_release() {
    let Some(table) = file("hostlist/01-expressions-with-counts.tsv.txt") else { return };
    let mut seen = 0;
    for line in table.lines().filter(|l| !l.starts_with('#')) {
        let fields: Vec<&str> = line.split('\t').collect();
        let (text, note) = (fields[0], fields.get(4).copied().unwrap_or(""));
        seen += 1;
        for (release, want) in [(Release::Old, fields[1]), (Release::New, fields[2])] {
            let got = hostlist::expand_for(text, release);
            if note.contains("we refuse") {
                assert!(got.is_err(), "{text}: {note}");
            } else if note.contains("we return no host") {
                assert_eq!(got, Ok(vec![]));
            } else if want == "INVALID" {
                assert!(got.is_err(), "{text} for {release:?}");
            } else {
                let names = got.unwrap_or_else(|e| panic!("{text} for {release:?}: {e}"));
                assert_eq!(names.len().to_string(), want, "{text} for {release:?}");
                let unique: BTreeSet<&NodeName> = names.iter().collect();
                assert_eq!(unique.len().to_string(), fields[3], "{text}");
            }
        }
    }
    assert_eq!(seen, 52);
    let only = file("hostlist/02-expressions-only.txt").unwrap();
    let first: Vec<&str> = table.lines().filter(|l| !l.starts_with('#')).filter_map(|l| l.split('\t').next()).collect();
    assert_eq!(only.lines().collect::<Vec<_>>(), first);
}

#[test]
fn x01_times() {
    let Some(table) = file("strings/01-time-limits.tsv.txt") else { return };
    for line in table.lines().filter(|l| !l.starts_with('#')) {
        let fields: Vec<&str> = line.split('\t').collect();
        let (text, want) = (fields[0], fields[1]);
        match want {
            "INFINITE" => assert_eq!(time::parse(text), Ok(None), "{text}"),
            "INVALID" => assert!(time::parse(text).is_err(), "{text}"),
            _ if fields[2] == "refuse" => assert!(time::parse(text).is_err(), "{text}"),
            // "We may accept" one day; never one minute. We refuse.
            _ if text == "1-" => assert!(time::parse(text).is_err()),
            _ => {
                let seconds = time::parse(text).unwrap().unwrap();
                assert_eq!(
                    (seconds.to_string().as_str(), time::minutes(seconds).to_string().as_str()),
                    (want, fields[2]),
                    "{text}"
                );
            }
        }
    }
}

#[test]
fn x02_gres_and_tres() {
    let Some(_) = file("strings/02-tres-and-gres.tsv.txt") else { return };
    for (text, gpus) in [
        ("gres/gpu=4", Some(4)),
        ("gres/gpu:a100=4", Some(4)),
        ("gres/gpu=4,gres/gpu:a100=2,gres/gpu:v100=2", Some(4)),
        ("gres/gpu:a100=2,gres/gpu:v100=2", Some(4)),
        ("cpu=2,mem=1G,node=2,billing=2", None),
        ("gres/gpu:8", Some(8)),
        ("gres/gpu=2", Some(2)),
        ("gres/gpu:h100:1,gres/gpu:h200:1", Some(2)),
    ] {
        assert_eq!(gres::tres_gpus(text), gpus, "{text}");
    }
    for (text, gpus, indexes) in [
        ("gpu:h100:4(IDX:0-3)", 4, vec![0, 1, 2, 3]),
        ("gpu:h100:2(IDX:0-1),gpu:h200:4(IDX:2-5)", 6, vec![0, 1, 2, 3, 4, 5]),
        ("gpu:h100:1(IDX:0),gpu:h200:0(IDX:)", 1, vec![0]),
        ("gpu:h100:0(IDX:N/A)", 0, vec![]),
        ("gpu:(null):4(IDX:0-3)", 4, vec![0, 1, 2, 3]),
        ("gpu:4(S:0-1)", 4, vec![]),
        ("gpu:1", 1, vec![]),
        ("gpu:a100:2(IDX:2,3)", 2, vec![2, 3]),
        ("gpu(IDX:2,4)", 2, vec![2, 4]),
        ("gpu:nvidia_h200_nvl_4g.71gb:2", 2, vec![]),
        ("shard:8(IDX:0-7)", 0, vec![]),
        ("mps:200", 0, vec![]),
        ("bandwidth:lustre:no_consume:4G", 0, vec![]),
    ] {
        assert_eq!((gres::gpu_total(text), gres::gpu_indexes(text)), (gpus, indexes), "{text}");
    }
    let null = gres::gpus("gpu:(null):4(IDX:0-3)");
    assert_eq!(null[0].kind, None, "(null) is no type");
    assert_eq!((gres::size_mib("6.50G"), gres::size_mib("62.50G")), (Some(6656), Some(64_000)));
}

#[test]
fn m05_b57_types_with_dots() {
    let Some(text) = file("mig/05-gres-type-with-dots.txt") else { return };
    let all: Vec<Vec<u32>> =
        text.lines().map(|l| gres::gpus(l.trim_start_matches("Gres=")).iter().map(|g| g.count).collect()).collect();
    assert_eq!(all, [vec![2, 3], vec![1], vec![1]]);
}

#[test]
fn c10_counts_in_the_environment() {
    let Some(text) = file("scontrol-text/10-env-gpu-forms.txt") else { return };
    let values = text.split_whitespace().filter_map(|w| w.strip_prefix("SLURM_GPUS_PER_NODE="));
    assert_eq!(values.map(|v| gres::count(v).unwrap()).collect::<Vec<_>>(), [4, 4]);
}
