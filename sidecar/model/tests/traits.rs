//! Files of our own (`fixtures/`) with the traits of the real ones in `cases.rs`, so that a clone without
//! `../shared/cases` tests the same.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use pliant_model::NodeName;
use pliant_model::conf::{ConfError, gres_conf, slurm_conf, topology_conf, topology_yaml};
use pliant_model::hostlist::{self, Release};

fn text(path: &str) -> String {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
    std::fs::read_to_string(format!("{root}/{path}")).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn none(_: &str) -> Result<String, String> {
    Err("not there".into())
}

fn try_gres(name: &str) -> Result<gres_conf::GresConf, ConfError> {
    gres_conf::parse(name, &text(&format!("gres_conf/{name}.conf")), &mut none)
}

fn gres(name: &str) -> gres_conf::GresConf {
    try_gres(name).unwrap()
}

fn try_slurm(name: &str) -> Result<slurm_conf::SlurmConf, ConfError> {
    slurm_conf::parse(name, &text(&format!("slurm_conf/{name}.conf")), &mut none)
}

fn try_topology(name: &str) -> Result<pliant_model::topology::Switches, ConfError> {
    topology_conf::parse(name, &text(&format!("topology_conf/{name}.conf")), &mut none)
}

fn files(gpus: &[gres_conf::GresDevice]) -> Vec<(&str, &str)> {
    gpus.iter().map(|d| (d.file.as_deref().unwrap_or("-"), d.kind.as_deref().unwrap_or("-"))).collect()
}

#[test]
fn keys_without_case_tabs_and_two_types_on_a_host() {
    let conf = gres("tabs-and-two-types");
    assert_eq!(conf.total(), 8);
    assert_eq!(files(&conf.gpus(&"elm".into())), [("/dev/nvidia0", "p4"), ("/dev/nvidia1", "t4")]);
    assert_eq!(conf.gpus(&"oak3".into()).len(), 2);
    assert_eq!(conf.gpus(&"oak4".into()), []);
}

#[test]
fn cpus_are_hyper_threads_and_cores_are_cores() {
    let layout = gres_conf::Layout { sockets: 2, cores: 12, threads: 2 };
    let sockets: Vec<_> =
        gres("hyper-threads").gpus(&"fir".into()).iter().map(|d| d.sockets(layout).unwrap()).collect();
    assert_eq!(sockets, [[0], [0], [1], [1]]);
    let gpus = gres("cpus-in-turn").gpus(&"any".into());
    assert!(gpus.len() == 6 && (0..3).all(|i| gpus[i].cores == gpus[i + 3].cores && gpus[i].cores_are_cpus));
    let gpus = gres("links").gpus(&"gum2".into());
    assert_eq!(gpus[2].links.as_deref(), Some(&[1, 0, -1, 2][..]));
    assert_eq!((gpus[2].cores.as_deref(), gpus[2].cores_are_cpus), (Some(&(8..16).collect::<Vec<_>>()[..]), false));
}

#[test]
fn autodetect_shards_ranges_and_mig() {
    let conf = gres("autodetect-long-type");
    assert_eq!((conf.auto_detect_of(&"ash7".into()), conf.total()), (Some("nvidia"), 1));
    assert_eq!(files(&conf.gpus(&"ash7".into())), [("/dev/nvidia2", "quadro_rtx-6000_24.0gb")]);
    let conf = gres("shards-without-file");
    assert_eq!((conf.total(), conf.shards_per_gpu(&"x".into())), (4, Some(6)));
    let conf = gres("ranges");
    assert_eq!((conf.nodes().len(), conf.total()), (4, 32));
    assert!(conf.nodes().contains(&NodeName::from("yew08")), "the width of numbers is kept");
    let mig = gres("mig").gpus(&"bay".into());
    assert_eq!(files(&mig), [("/dev/nvidia0", "1g.5gb"), ("/dev/nvidia1", "a100")]);
}

#[test]
fn slurm_numbers_gpus_by_the_types_of_slurm_conf() {
    let conf = gres("tabs-and-two-types");
    let merged = |node: &str, gres: &str| -> Vec<(String, String)> {
        let all = conf.merged(&node.into(), gres);
        assert!(all.iter().enumerate().all(|(i, d)| d.index == u32::try_from(i).unwrap()));
        files(&all).into_iter().map(|(a, b)| (a.to_owned(), b.to_owned())).collect()
    };
    let of = |pairs: &[(&str, &str)]| pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect::<Vec<_>>();
    // t4 comes first in slurm.conf, so /dev/nvidia1 is index 0.
    assert_eq!(merged("elm", "gpu:t4:1,gpu:p4:1"), of(&[("/dev/nvidia1", "t4"), ("/dev/nvidia0", "p4")]));
    assert_eq!(merged("elm", "gpu:2"), of(&[("/dev/nvidia0", "-"), ("/dev/nvidia1", "-")]));
    // More than slurm.conf counts is left out; less is made up without a device.
    assert_eq!(merged("oak1", "gpu:k40m:1"), of(&[("/dev/nvidia0", "k40m")]));
    assert_eq!(merged("elm", "gpu:p4:2"), of(&[("/dev/nvidia0", "p4"), ("-", "p4")]));
    assert_eq!(merged("elm", "gpu:a100:1"), of(&[("-", "a100")]));
}

#[test]
fn what_is_no_gres_conf_is_refused_with_its_line() {
    let e = try_gres("template").unwrap_err();
    assert!(e.line == 1 && e.reason.contains("template"), "{e}");
    let conf = gres("include-only");
    assert_eq!(conf.gaps, ["include-only:2: Include made-by-tool.conf: not there"]);
    for (line, word) in [
        ("Name=gpu Fiel=/dev/nvidia0", "Fiel is no key"),
        ("File=/dev/nvidia0", "neither Name"),
        ("Name=gpu File=/dev/nvidia[0-", "unbalanced"),
        ("Name=gpu Cores=0-x", "Cores"),
        ("Name=gpu Cores=1 CPUs=2", "on one line"),
        ("Name=gpu Links=0,-1,-1", "2 times"),
        ("Name=gpu Links=0,-3", "no number"),
        ("Name=gpu Count=many", "Count=many"),
        ("Name=gpu File=/dev/nvidia[0-1024]", "more than 1024"),
        ("NodeName= Name=gpu", "NodeName= has no value"),
        ("Name=gpu Type= File=/dev/nvidia0", "Type= has no value"),
        ("Name=gpu File=", "File= has no value"),
        ("NodeName=(null) Name=gpu", "names no node"),
    ] {
        let e = gres_conf::parse("g", &format!("# c\n{line}\n"), &mut none).unwrap_err();
        assert!(e.line == 2 && e.reason.contains(word), "{line}: {e}");
    }
    let all = "Name=gpu Cores=0-65535\n".repeat(100);
    assert!(gres_conf::parse("g", &all, &mut none).unwrap_err().reason.contains("stands for more than"));
}

#[test]
fn nodes_partitions_defaults_and_times() {
    let conf = try_slurm("hetero").unwrap();
    assert_eq!((conf.node_names().len(), conf.gpus(), conf.controllers()), (10, 8, vec!["root1", "root2"]));
    let layout = |n: &str| conf.node_line(&n.into()).unwrap().layout();
    assert_eq!(layout("oak2"), gres_conf::Layout { sockets: 4, cores: 12, threads: 1 });
    assert_eq!(layout("elm"), gres_conf::Layout { sockets: 2, cores: 8, threads: 2 });
    assert_eq!(conf.node_line(&"oak1".into()).unwrap().get("features"), Some("gpu,old one"));
    // A node of several partitions counts once.
    assert_eq!(conf.partitions_of(&"oak1".into()).map(|p| p.name.as_str()).collect::<Vec<_>>(), ["all", "old", "gpu"]);
    let times: Vec<_> = conf.partitions.iter().map(|p| p.max_time().unwrap()).collect();
    assert_eq!(times, [Some(172_861), Some(172_861), None]);
    assert!(conf.cons_tres() && conf.unknown_nodes().is_empty());
    let conf = try_slurm("cons-res").unwrap();
    assert!(!conf.cons_tres() && conf.gpus() == 6);
}

#[test]
fn blanks_continuations_includes_and_strangers() {
    let conf = try_slurm("blanks").unwrap();
    assert_eq!(conf.controllers(), ["c1", "c2"]);
    assert_eq!(conf.accounting_tres(), ["cpu", "gres/gpu", "gres/gpu:t4"]);
    assert_eq!((conf.get("MPIDEFAULT"), conf.get("JobSubmitPlugins")), (Some("pmix"), Some("lua")));
    assert_eq!(conf.gaps, ["blanks:13: Include rest.conf: not there"]);
    let strangers: Vec<_> = conf.unknown_nodes().into_iter().map(|(p, n)| (p.line, n.as_str())).collect();
    assert_eq!(strangers, [(11, "moss")]);
    let e = try_slurm("template").unwrap_err();
    assert!(e.line == 2 && e.reason.contains("{state_dir}"), "{e}");
    for (text, line, word) in [
        ("NodeName=a[1-2]\nNodeName=b,a2\n", 2, "node a2 is there already, at f:1"),
        ("NodeName=a[0-65535]\nNodeName=b\n", 2, "stands for more than 65536"),
        ("PartitionName=p Nodes=a[3-1]\n", 1, "Nodes=a[3-1]"),
        ("A b\n", 1, "expected KEY=VALUE"),
        ("NodeName=a Gres= CPUs=4\n", 1, "Gres= has no value"),
    ] {
        let e = slurm_conf::parse("f", text, &mut none).unwrap_err();
        assert!(e.line == line && e.reason.contains(word), "{text}: {e}");
    }
    let long = format!("NodeName=DEFAULT Features={}\n", "x".repeat(5000));
    assert!(slurm_conf::parse("f", &long, &mut none).unwrap_err().reason.contains("defaults"));
}

#[test]
fn trees_and_blocks() {
    let tree = try_topology("roots").unwrap();
    assert_eq!((tree.node_count(), tree.roots().len()), (11, 3), "the last line has no newline");
    assert_eq!(tree.unknown_nodes(&["oak001".into()]).0.len(), 10);
    let tree = try_topology("commas").unwrap();
    assert_eq!(tree.leaves().map(|l| l.nodes.len()).collect::<Vec<_>>(), [2, 3, 1]);
    assert_eq!(tree.paths().get(&NodeName::from("a-9")), Some(&vec!["l1", "mid", "top"]));
    let e = try_topology("no-block").unwrap_err();
    assert!(e.line == 3 && e.reason.contains("no block"), "{e}");
    let blocks = try_topology("blocks").unwrap();
    assert_eq!((blocks.switches.len(), blocks.node_count(), blocks.block_sizes), (3, 18, vec![3, 6, 12]));
    for (text, line, word) in [
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2\n", 2, "already, at line 1"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", 1, "below itself"),
        ("SwitchName=a Switches=b,c\nSwitchName=b Nodes=n\n", 1, "the switch c"),
        ("SwitchName=a Nodes=n\nSwitchName=b Nodes=n\n", 2, "n is at a already"),
        ("SwitchName=a\n", 1, "neither Nodes nor Switches"),
        ("BlockName=a Nodes=n[1-4]\nBlockSizes=4,12\n", 2, "power of two"),
        ("BlockName=a Nodes=n[1-4]\nBlockSizes=4,x\n", 2, "no number"),
        ("SwitchName=a Switches= Nodes=n\n", 1, "Switches= has no value"),
        ("SwitchName=a Notes=n\n", 1, "Notes is no key"),
        ("SwitchName=a Nodes=n[0-65535]\nSwitchName=b Nodes=m\n", 2, "stands for more than"),
        ("SwitchName=a Nodes=n\nInclude x\n", 0, "not whole: f:2: Include x: not there"),
    ] {
        let e = topology_conf::parse("f", text, &mut none).unwrap_err();
        assert!(e.line == line && e.reason.contains(word), "{text}: {e}");
    }
}

#[test]
fn topology_yaml_of_three() {
    let all = topology_yaml::parse("y", &text("topology_yaml/three.yaml")).unwrap();
    let seen: Vec<_> = all.iter().map(|t| (t.name.as_str(), t.default, t.switches.node_count())).collect();
    assert_eq!(seen, [("wood", true, 10), ("racks", false, 4), ("plain", false, 0)]);
    let lines: Vec<_> = all[0].switches.switches.iter().map(|s| s.line).collect();
    assert_eq!(lines, [7, 9, 11], "each switch keeps its line");
}

#[test]
fn hostlists_of_both_kinds_of_releases() {
    for (expression, old, new) in [
        ("n[1-3,07],login", Some(5), Some(5)),
        ("rack[0-1]-n[01-03]-ib", None, Some(6)),
        ("lake[1-4]88", None, Some(4)),
        ("a[1-2]b,a[1-2]c", None, Some(4)),
        (" a1 , b[2,4-6] ", Some(5), Some(5)),
        ("x[00000000000000000007-00000000000000000009]", Some(3), Some(3)),
        ("n[4294967294-4294967296]", Some(3), Some(3)),
        ("n[2,02,002]", Some(3), Some(3)),
        ("n[1-4],n[3-5]", Some(7), Some(7)),
        ("(null)", Some(0), Some(0)),
        ("n[0-65535]", Some(65_536), Some(65_536)),
        ("n[0-65536]", None, None),
        ("n[2-", None, None),
        ("n2]", None, None),
        ("n[2-]", None, None),
        ("n[2--4]", None, None),
        ("n[4-2]", None, None),
        ("n[]", None, None),
        ("n[1,,2]", None, None),
        ("n[1-8/2]", None, None),
        ("n[00x13]", None, None),
    ] {
        let count = |r| hostlist::expand_for(expression, r).map(|n| n.len()).ok();
        assert_eq!((count(Release::Old), count(Release::New)), (old, new), "{expression}");
    }
}

/// topology.conf of 529 switches (1 core, 16 spines, 512 leaves) and 10,000 hosts.
fn large_tree() -> String {
    let mut text = String::from("SwitchName=core Switches=spine[0-15]\n");
    for s in 0..16 {
        text += &format!("SwitchName=spine{s} Switches=leaf[{}-{}]\n", s * 32, s * 32 + 31);
    }
    for l in 0..512 {
        text += &format!("SwitchName=leaf{l} Nodes=node[{:05}-{:05}]\n", l * 10_000 / 512, (l + 1) * 10_000 / 512 - 1);
    }
    text
}

#[test]
fn a_large_tree_is_read_whole() {
    let start = std::time::Instant::now();
    let tree = topology_conf::parse("t", &large_tree(), &mut none).unwrap();
    let read = start.elapsed();
    assert_eq!((tree.switches.len(), tree.node_count(), tree.roots().len()), (529, 10_000, 1));
    assert_eq!(tree.paths().len(), 10_000);
    // The same as YAML.
    let switch = |s: &pliant_model::topology::Switch| {
        let nodes = hostlist::compress(&s.nodes);
        let children = s.children.join(",");
        let (key, list) = if nodes.is_empty() { ("children", children) } else { ("nodes", nodes) };
        format!("      - switch: {}\n        {key}: {list}\n", s.name)
    };
    let switches: String = tree.switches.iter().map(switch).collect();
    let yaml = format!("- topology: t\n  cluster_default: true\n  tree:\n    switches:\n{switches}");
    let again = std::time::Instant::now();
    let all = topology_yaml::parse("y", &yaml).unwrap();
    println!("the same as YAML: {:?}", again.elapsed());
    assert_eq!((all[0].switches.switches.len(), all[0].switches.node_count()), (529, 10_000));
    // A measurement, not a limit: that is in the bench.
    println!("529 switches, 10,000 hosts: read and checked in {read:?}");
}
