//! Damaged files: every parser reads or refuses each of them, in time, and never stands for more than its limits.
//! The fuzz targets in `tests/fuzz` look further; these run with every test.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use pliant_model::conf::{ConfError, MAX_TOTAL, gres_conf, index_list, slurm_conf, topology_conf, topology_yaml};
use pliant_model::topology::Switches;
use pliant_model::{capture, gres, hostlist, time};
use proptest::prelude::*;
use std::time::{Duration, Instant};

/// Generous for a debug build on a busy machine; a quadratic step would need minutes.
const LIMIT: Duration = Duration::from_secs(10);

/// The fixtures of a parser.
fn seeds(folder: &str) -> Vec<String> {
    let path = format!("{}/tests/fixtures/{folder}", env!("CARGO_MANIFEST_DIR"));
    let mut files: Vec<_> = std::fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{path}");
    files.iter().map(|f| std::fs::read_to_string(f).unwrap()).collect()
}

/// One step of damage; places are shares of the length.
#[derive(Clone, Debug)]
enum Damage {
    Delete(u16, u8),
    Double(u16, u8),
    Swap(u16, u16),
    Set(u16, u8),
    Cut(u16),
    Splice(u16, u16),
}

fn damage() -> impl Strategy<Value = Damage> {
    // Bytes that mean something somewhere come more often than others.
    let telling = proptest::sample::select(b"[](){}=,-:#\\\"'*&!|>%@ \t\n0919azXN_./".to_vec());
    let byte = prop_oneof![4 => telling, 1 => any::<u8>()];
    prop_oneof![
        (any::<u16>(), 1..20_u8).prop_map(|(at, n)| Damage::Delete(at, n)),
        (any::<u16>(), 1..20_u8).prop_map(|(at, n)| Damage::Double(at, n)),
        (any::<u16>(), any::<u16>()).prop_map(|(a, b)| Damage::Swap(a, b)),
        (any::<u16>(), byte).prop_map(|(at, b)| Damage::Set(at, b)),
        any::<u16>().prop_map(Damage::Cut),
        (any::<u16>(), any::<u16>()).prop_map(|(a, b)| Damage::Splice(a, b)),
    ]
}

fn apply(text: &str, steps: &[Damage]) -> String {
    let mut bytes = text.as_bytes().to_vec();
    for step in steps {
        let len = bytes.len();
        if len == 0 {
            break;
        }
        let place = |share: u16| usize::from(share) * len / 65_536;
        match *step {
            Damage::Delete(at, n) => drop(bytes.drain(place(at)..(place(at) + usize::from(n)).min(len))),
            Damage::Double(at, n) => {
                let part = bytes[place(at)..(place(at) + usize::from(n)).min(len)].to_vec();
                bytes.splice(place(at)..place(at), part);
            }
            Damage::Swap(a, b) => bytes.swap(place(a), place(b)),
            Damage::Set(at, b) => bytes[place(at)] = b,
            Damage::Cut(at) => bytes.truncate(place(at)),
            Damage::Splice(a, b) => {
                let mut lines: Vec<&[u8]> = bytes.split(|b| *b == b'\n').collect();
                let line = |share: u16| usize::from(share) * lines.len() / 65_536;
                let (from, to) = (line(a), line(b));
                lines.insert(to, lines[from]);
                bytes = lines.join(&b'\n');
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn damaged(folder: &str) -> impl Strategy<Value = String> {
    let steps = proptest::collection::vec(damage(), 1..6);
    (proptest::sample::select(seeds(folder)), steps).prop_map(|(text, steps)| apply(&text, &steps))
}

/// A refusal names a line of the text, or the file as a whole, and a reason of one line.
fn sound(e: &ConfError, text: &str) {
    assert!(e.line <= text.lines().count() + 1, "{e}: {text:?}");
    assert!(!e.reason.is_empty() && !e.reason.contains('\n') && e.reason.len() < 1000, "{e:?}");
}

fn none(_: &str) -> Result<String, String> {
    Err("not there".into())
}

fn within(tree: &Switches) {
    assert!(tree.check().is_ok() && tree.node_count() <= hostlist::MAX_NAMES);
    assert_eq!(tree.paths().len(), tree.node_count());
}

fn read_gres(text: &str) {
    match gres_conf::parse("f", text, &mut none) {
        Err(e) => sound(&e, text),
        Ok(conf) => {
            assert!(conf.lines.iter().map(|l| l.files.len()).sum::<usize>() <= MAX_TOTAL);
            let (nodes, total) = (conf.nodes(), conf.total());
            if let Some(node) = nodes.first() {
                let gpus = conf.gpus(node);
                assert!(gpus.len() <= total);
                assert!(conf.merged(node, "gpu:a40:2,gpu:4").len() <= 1024 + 2);
            }
        }
    }
}

fn read_slurm(text: &str) {
    match slurm_conf::parse("f", text, &mut none) {
        Err(e) => sound(&e, text),
        Ok(conf) => {
            assert!(conf.node_names().len() <= hostlist::MAX_NAMES);
            let _ = (conf.gpus(), conf.unknown_nodes(), conf.controllers(), conf.accounting_tres());
            for p in &conf.partitions {
                let _ = p.max_time();
            }
            for n in &conf.nodes {
                let _ = n.layout();
            }
        }
    }
}

fn read_topology(text: &str) {
    match topology_conf::parse("f", text, &mut none) {
        Err(e) => sound(&e, text),
        Ok(tree) => within(&tree),
    }
}

fn read_yaml(text: &str) {
    match topology_yaml::parse("f", text) {
        Err(e) => sound(&e, text),
        Ok(all) => all.iter().for_each(|t| within(&t.switches)),
    }
}

fn read_capture(text: &str) {
    match capture::read(text) {
        Err(e) => assert!(e.line <= text.lines().count() && !e.reason.is_empty(), "{e}: {text:?}"),
        Ok(capture::Capture::Topology(t)) => assert_eq!(t.links.len(), t.gpus.len() * t.gpus.len()),
        Ok(capture::Capture::List(all)) => assert!(all.len() <= capture::MAX_GPUS),
    }
}

fn read_words(text: &str) {
    for line in text.lines().take(20) {
        if let Ok(names) = hostlist::expand(line) {
            assert!(names.len() <= hostlist::MAX_NAMES);
            assert_eq!(hostlist::expand(&hostlist::compress(&names)).as_ref(), Ok(&names), "{line:?}");
        }
        let _ = (gres::gpus(line), gres::gpu_indexes(line), gres::tres_gpus(line), gres::tres_gpu_kind(line));
        let _ = (gres::count(line), gres::size_mib(line));
        if let Ok(Some(seconds)) = time::parse(line) {
            assert!(seconds <= time::MAX);
            assert_eq!(time::parse(&time::format(seconds)), Ok(Some(seconds)));
        }
        if let Ok(numbers) = index_list::parse(line) {
            assert_eq!(index_list::parse(&index_list::format(&numbers)), Ok(numbers));
        }
    }
}

fn timed(read: impl FnOnce(&str), text: &str) {
    let start = Instant::now();
    read(text);
    assert!(start.elapsed() < LIMIT, "{:?} for {} bytes", start.elapsed(), text.len());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_gres_conf(text in damaged("gres_conf")) { timed(read_gres, &text); }

    #[test]
    fn damaged_slurm_conf(text in damaged("slurm_conf")) { timed(read_slurm, &text); }

    #[test]
    fn damaged_topology_conf(text in damaged("topology_conf")) { timed(read_topology, &text); }

    #[test]
    fn damaged_topology_yaml(text in damaged("topology_yaml")) { timed(read_yaml, &text); }

    #[test]
    fn damaged_captures(text in damaged("topo_capture")) { timed(read_capture, &text); }

    #[test]
    fn damaged_words(text in prop_oneof![damaged("hostlist"), damaged("gres_tres"), damaged("time"), damaged("index_list")]) {
        timed(read_words, &text);
    }
}

/// Texts that would cost time or memory out of all proportion.
#[test]
fn hostile_texts_are_refused_soon() {
    let prefix = "n".repeat(200);
    for text in [
        format!("NodeName={}\n", "a[0-65535]".repeat(3)),
        format!("NodeName={}[0-65535]\n", "n".repeat(1 << 19)),
        format!("NodeName={}\n", "a[0],".repeat(100_000)),
        format!("NodeName={prefix}[0-65535]{}\n", "[0]".repeat(100_000)),
        format!("Name=gpu File={}\n", "[".repeat(500_000)),
        format!("NodeName=DEFAULT F={}\n{}", "x".repeat(4000), "NodeName=a\n".repeat(1000)),
        "PartitionName=p Nodes=a[0-65535]\n".repeat(2000),
        "Name=gpu Cores=0-65535\n".repeat(5000),
        "\\\n".repeat(500_000),
        "a=b ".repeat(200_000),
        format!("A={}\n", "{".repeat(1_000_000)),
    ] {
        timed(read_gres, &text);
        timed(read_slurm, &text);
        timed(read_topology, &text);
        timed(read_words, &text);
        timed(read_capture, &text);
    }
    let chain: String = (0..20_000).map(|i| format!("SwitchName=s{i} Switches=s{}\n", i + 1)).collect();
    timed(read_topology, &format!("{chain}SwitchName=s20000 Nodes=n\n"));
    timed(read_topology, &format!("{chain}SwitchName=s20000 Switches=s0\n"));
    let nodes: String = (0..20_000).map(|i| format!("NodeName=n{i} Gres=gpu:8\n")).collect();
    timed(read_slurm, &nodes);
    let gpus: String = (0..20_000).map(|i| format!("NodeName=n{i} Name=gpu File=/dev/nvidia[0-7]\n")).collect();
    timed(read_gres, &gpus);
    for text in
        ["[".repeat(100_000), "- ".repeat(100_000), "a: ".repeat(1000), "&a [*a]".repeat(1000), "? ".repeat(50_000)]
    {
        timed(read_yaml, &text);
    }
    timed(read_yaml, &"- topology: t\n  flat: true\n".repeat(2));
}
