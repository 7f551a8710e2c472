//! `pliant topo check`: Slurm's files against each other and against the hardware, and what to write instead.

use super::export::{cores_of, links_row};
use super::sources::Sources;
use pliant_model::conf::gres_conf::GresDevice;
use pliant_model::conf::index_list;
use pliant_model::topology::NodeTopology;
use pliant_model::{NodeName, gres, hostlist};
use pliant_protocol::admin::{Finding, Level, NodeHardware};
use std::collections::BTreeMap;

/// A finding before nodes with the same one are put together.
struct Found {
    check: &'static str,
    node: Option<NodeName>,
    level: Level,
    found: String,
    remedy: String,
}

type All = Vec<Found>;

fn add(all: &mut All, check: &'static str, level: Level, node: Option<&NodeName>, found: String, remedy: String) {
    all.push(Found { check, node: node.cloned(), level, found, remedy });
}

/// All findings; one that all is well where there is nothing else.
pub fn check(sources: &Sources) -> Vec<Finding> {
    let mut all = vec![];
    files(sources, &mut all);
    topology(sources, &mut all);
    if let Err(why) = &sources.hardware {
        let remedy = "run it where pliantd is, or start pliantd and the agents".to_owned();
        add(&mut all, "hardware", Level::Warn, None, format!("not compared: {why}"), remedy);
    }
    for node in gpu_nodes(sources) {
        of_node(sources, &node, &mut all);
    }
    if all.is_empty() {
        let nodes = gpu_nodes(sources).len();
        add(
            &mut all,
            "topology",
            Level::Ok,
            None,
            format!("{nodes} GPU nodes agree in all files and with the hardware"),
            String::new(),
        );
    }
    together(all)
}

/// Nodes with GPUs by slurm.conf, and those where an agent has found some.
fn gpu_nodes(sources: &Sources) -> Vec<NodeName> {
    let mut all: Vec<NodeName> = sources
        .slurm
        .iter()
        .flat_map(|s| s.nodes.iter().filter(|l| l.gpus() > 0).flat_map(|l| l.names.clone()))
        .collect();
    let found = |h: &&NodeHardware| h.gpus.as_ref().is_some_and(|g| !g.gpus.is_empty());
    all.extend(sources.hardware.iter().flatten().filter(found).map(|h| h.node.clone()));
    all.sort();
    all.dedup();
    all
}

fn files(sources: &Sources, all: &mut All) {
    let fix = || "correct the file".to_owned();
    match &sources.slurm {
        Err(e) => add(all, "slurm.conf", Level::Fail, None, e.clone(), fix()),
        Ok(conf) => {
            if !conf.cons_tres() {
                let found = format!(
                    "SelectType={}: --gpus and its like are not supported",
                    conf.get("SelectType").unwrap_or("")
                );
                add(all, "slurm.conf", Level::Fail, None, found, "SelectType=select/cons_tres".into());
            }
            conf.gaps.iter().for_each(|g| add(all, "slurm.conf", Level::Warn, None, g.clone(), "not compared".into()));
        }
    }
    match &sources.gres {
        Err(e) => add(all, "gres.conf", Level::Fail, None, e.clone(), fix()),
        Ok(None) if !gpu_nodes(sources).is_empty() => {
            let found = format!("{} is not there", sources.folder.join("gres.conf").display());
            add(all, "gres.conf", Level::Fail, None, found, "pliant topo export gres.conf".into());
        }
        Ok(None) => {}
        Ok(Some(conf)) => {
            conf.gaps.iter().for_each(|g| add(all, "gres.conf", Level::Warn, None, g.clone(), "not compared".into()));
        }
    }
}

fn topology(sources: &Sources, all: &mut All) {
    let switches = match &sources.switches {
        Err(e) => return add(all, "topology", Level::Fail, None, e.clone(), "correct the file".into()),
        Ok(None) => return,
        Ok(Some(switches)) => switches,
    };
    let Ok(slurm) = &sources.slurm else { return };
    let cluster: Vec<NodeName> = slurm.node_names().into_iter().cloned().collect();
    let (unknown, missing) = switches.unknown_nodes(&cluster);
    if !unknown.is_empty() {
        let found = format!("names nodes that slurm.conf does not: {}", hostlist::compress(unknown));
        add(all, "topology", Level::Fail, None, found, "take them out".into());
    }
    let missing: Vec<&NodeName> =
        missing.into_iter().filter(|n| slurm.node_line(n).is_some_and(|l| l.gpus() > 0)).collect();
    if !missing.is_empty() {
        let found = format!("GPU nodes at no switch: {}", hostlist::compress(missing));
        add(
            all,
            "topology",
            Level::Warn,
            None,
            found,
            "add them: jobs over nodes are placed without regard to them".into(),
        );
    }
}

fn of_node(sources: &Sources, node: &NodeName, all: &mut All) {
    let devices = sources.devices(node);
    let auto = sources.gres.iter().flatten().any(|g| g.auto_detect_of(node).is_some());
    let n = Some(node);
    let expected = sources.slurm.as_ref().ok().and_then(|s| s.node_line(node)).map_or(0, |l| l.gpus());
    let named = u32::try_from(devices.len()).unwrap_or(u32::MAX);
    if !matches!(sources.gres, Ok(Some(_))) {
        return; // said once, of the file
    }
    if named != expected && !(auto && devices.is_empty()) {
        let found = format!("slurm.conf has {expected} GPUs, gres.conf {named}");
        add(all, "count", Level::Fail, n, found, "make both say what is built in".into());
    }
    duplicates(&devices, node, all);
    if !auto && devices.iter().any(|d| d.cores.is_none()) {
        let which: Vec<u32> = devices.iter().filter(|d| d.cores.is_none()).map(|d| d.index).collect();
        let found =
            format!("GPU {}: no Cores=: Slurm knows no place of it, and ignores Links=", index_list::format(&which));
        add(all, "Cores", Level::Warn, n, found, "pliant topo export gres.conf writes them".into());
    }
    for d in devices.iter().filter(|d| d.links.as_ref().is_some_and(|l| l.len() != devices.len())) {
        let found =
            format!("GPU {}: Links= has {} numbers for {named} GPUs", d.index, d.links.as_ref().map_or(0, Vec::len));
        add(all, "Links", Level::Fail, n, found, "one number per GPU, -1 for itself".into());
    }
    let Some(hardware) = sources.hardware.iter().flatten().find(|h| h.node == *node) else { return };
    compared(sources, node, &devices, hardware, all);
}

fn duplicates(devices: &[GresDevice], node: &NodeName, all: &mut All) {
    let mut seen: BTreeMap<&str, u32> = BTreeMap::new();
    for d in devices {
        let Some(file) = d.file.as_deref() else { continue };
        if let Some(first) = seen.insert(file, d.index) {
            let found = format!("GPU {} and {first} are one device: {file}", d.index);
            add(all, "duplicate", Level::Fail, Some(node), found, "name each device file once".into());
        }
    }
}

/// Files against what the agent has found.
fn compared(sources: &Sources, node: &NodeName, devices: &[GresDevice], hardware: &NodeHardware, all: &mut All) {
    let n = Some(node);
    if let Some(view) = hardware.gres.as_deref().map(gres::gpu_total) {
        let expected = sources.slurm.as_ref().ok().and_then(|s| s.node_line(node)).map_or(view, |l| l.gpus());
        if view != expected {
            let found = format!("slurm.conf has {expected} GPUs, slurmctld {view}");
            add(all, "count", Level::Warn, n, found, "scontrol reconfigure, or restart slurmctld".into());
        }
    }
    let Some(gpus) = &hardware.gpus else {
        return add(
            all,
            "hardware",
            Level::Warn,
            n,
            "not compared: no agent is connected".into(),
            "start pliant-agent there".into(),
        );
    };
    if let Some(why) = &gpus.absent {
        return add(all, "hardware", Level::Warn, n, format!("not compared: {why}"), String::new());
    }
    for gpu in gpus.gpus.iter() {
        if let Some(why) = &gpu.lost {
            let index = gpu.gres_index.map_or_else(|| "-".to_owned(), |i| i.to_string());
            let found = format!("GPU {index} ({}, {}): {why}", gpu.uuid, gpu.bus);
            add(all, "lost card", Level::Fail, n, found, "drain the node: Slurm may hand this GPU out".into());
        }
    }
    let told = |p: &&String| !p.contains(" is lost: ");
    for problem in gpus.problems.iter().filter(told) {
        let remedy = "correct gres.conf, or see to the card".to_owned();
        add(all, "identity", Level::Fail, n, problem.clone(), remedy);
    }
    let measured = NodeTopology::of_agent(gpus);
    links(devices, &measured, node, all);
    cores(sources, devices, &measured, node, all);
}

fn links(devices: &[GresDevice], measured: &NodeTopology, node: &NodeName, all: &mut All) {
    let linked = !measured.linked_pairs().is_empty();
    if linked && devices.iter().all(|d| d.links.is_none()) && !devices.is_empty() {
        let found = "the GPUs are linked and gres.conf has no Links=".to_owned();
        add(all, "Links", Level::Warn, Some(node), found, "pliant topo export gres.conf writes them".into());
        return;
    }
    for d in devices {
        let Some(written) = &d.links else { continue };
        let Some(right) = links_row(measured, d.index, devices.len()) else { continue };
        // A site may write any numbers that say the same: what counts is which are linked, and how many by.
        let differs = |(w, r): (&i64, &Option<i64>)| r.is_some_and(|r| (*w > 0) != (r > 0) || (*w > 0 && *w != r));
        let peer = written.iter().zip(&right).position(differs).filter(|_| written.len() == right.len());
        let Some((peer, says, is)) = peer.and_then(|p| Some((p, *written.get(p)?, right.get(p).copied().flatten()?)))
        else {
            continue;
        };
        let bridge = if says > 0 && is == 0 { " (a bridge that is missing?)" } else { "" };
        let found = format!("GPU {}: Links= says {says} to GPU {peer}, {is} were measured{bridge}", d.index);
        let row: Vec<String> = right.iter().zip(written).map(|(r, w)| r.unwrap_or(*w).to_string()).collect();
        add(all, "Links", Level::Fail, Some(node), found, format!("Links={}", row.join(",")));
    }
    let without: Vec<u32> = devices.iter().filter(|d| d.links.is_none()).map(|d| d.index).collect();
    if linked && !without.is_empty() {
        let found = format!("GPU {}: no Links=, and the GPUs are linked", index_list::format(&without));
        add(all, "Links", Level::Warn, Some(node), found, "pliant topo export gres.conf writes them".into());
    }
}

fn cores(sources: &Sources, devices: &[GresDevice], measured: &NodeTopology, node: &NodeName, all: &mut All) {
    let layout = sources.layout(node);
    for d in devices {
        let written = d.core_numbers(layout);
        let right = cores_of(measured, d.index, layout);
        if let (Some(written), Some(right)) = (written, right)
            && written != right
        {
            let list = index_list::format;
            let found = format!("GPU {}: Cores= says {}, {} were measured", d.index, list(&written), list(&right));
            add(all, "Cores", Level::Fail, Some(node), found, format!("Cores={}", list(&right)));
        }
    }
}

/// The same finding of several nodes is one.
fn together(all: All) -> Vec<Finding> {
    let mut out: Vec<(Finding, Vec<NodeName>)> = vec![];
    for f in all {
        let same = |o: &&mut (Finding, Vec<NodeName>)| {
            o.0.check == f.check
                && o.0.found == f.found
                && o.0.remedy == f.remedy
                && f.node.is_some()
                && !o.1.is_empty()
        };
        if let Some((_, nodes)) = out.iter_mut().find(same) {
            nodes.extend(f.node);
            continue;
        }
        let finding = Finding { check: f.check.into(), host: None, level: f.level, found: f.found, remedy: f.remedy };
        out.push((finding, f.node.into_iter().collect()));
    }
    let named = |(f, nodes): (Finding, Vec<NodeName>)| Finding {
        host: (!nodes.is_empty()).then(|| NodeName(hostlist::compress(&nodes))),
        ..f
    };
    out.into_iter().map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pliant_model::conf::{gres_conf, slurm_conf, topology_conf};
    use pliant_model::gpu::{Gpu, LinkPeer, NodeGpus, NvLink, Pair};

    const SLURM: &str =
        "SelectType=select/cons_tres\nNodeName=n[0-1] Gres=gpu:4 Sockets=2 CoresPerSocket=4 ThreadsPerCore=2\n";
    const GRES: &str = "Name=gpu File=/dev/nvidia0 Cores=0-3 Links=-1,4,0,0\nName=gpu File=/dev/nvidia1 Cores=0-3 Links=4,-1,0,0\n\
                        Name=gpu File=/dev/nvidia2 Cores=4-7 Links=0,0,-1,4\nName=gpu File=/dev/nvidia3 Cores=4-7 Links=0,0,4,-1\n";

    fn none(_: &str) -> Result<String, String> {
        Err("not there".into())
    }

    /// Four GPUs, pairs 0-1 and 2-3 with four links, on two sockets of four cores with two threads.
    fn gpus() -> NodeGpus {
        let bus = |i: u32| format!("{:02x}:00.0", i + 1).parse::<pliant_model::gpu::BusId>().unwrap();
        let link = |i: u32| {
            (0..4).map(|link| NvLink { link, active: true, version: None, peer: LinkPeer::Gpu(bus(i ^ 1)) }).collect()
        };
        let gpu = |i: u32| Gpu {
            minor: Some(i),
            gres_index: Some(i),
            cpus: Some(if i < 2 { vec![0, 1, 2, 3, 8, 9, 10, 11] } else { vec![4, 5, 6, 7, 12, 13, 14, 15] }),
            numa: Some(i / 2),
            nvlinks: link(i),
            ..Gpu::new(format!("GPU-{i}"), bus(i), i)
        };
        let pair = |a: u32, b: u32| Pair { a, b, path: None, peer_access: None };
        let pairs = (0..4).flat_map(|a| (a + 1..4).map(move |b| pair(a, b))).collect();
        NodeGpus { gpus: (0..4).map(gpu).collect(), pairs, ..NodeGpus::default() }
    }

    fn sources(slurm: &str, gres: &str) -> Sources {
        let hardware =
            ["n0", "n1"].map(|n| NodeHardware { node: n.into(), gpus: Some(gpus()), gres: Some("gpu:4".into()) });
        Sources {
            folder: "/etc/slurm".into(),
            slurm: slurm_conf::parse("slurm.conf", slurm, &mut none).map_err(|e| e.to_string()),
            gres: gres_conf::parse("gres.conf", gres, &mut none).map(Some).map_err(|e| e.to_string()),
            switches: Ok(None),
            hardware: Ok(hardware.into()),
        }
    }

    fn found(s: &Sources) -> Vec<(String, String, String)> {
        let host = |f: &Finding| f.host.as_ref().map_or_else(String::new, ToString::to_string);
        check(s).iter().map(|f| (f.check.clone(), host(f), format!("{} > {}", f.found, f.remedy))).collect()
    }

    fn one(s: &Sources) -> (String, String, String) {
        let all = found(s);
        assert_eq!(all.len(), 1, "{all:?}");
        all[0].clone()
    }

    #[test]
    fn what_agrees_is_said_to_agree() {
        let all = check(&sources(SLURM, GRES));
        assert!(all.len() == 1 && all[0].level == Level::Ok, "{all:?}");
    }

    #[test]
    fn each_way_in_which_gres_conf_is_wrong() {
        let (check, host, text) = one(&sources(SLURM, &GRES.replace("Cores=0-3 Links=-1,4", "Cores=0-3 Links=-1,2")));
        assert_eq!((check.as_str(), host.as_str()), ("Links", "n[0-1]"));
        assert_eq!(text, "GPU 0: Links= says 2 to GPU 1, 4 were measured > Links=-1,4,0,0");
        let (_, _, text) = one(&sources(SLURM, &GRES.replace("Links=0,0,4,-1", "Links=3,0,4,-1")));
        assert!(text.contains("Links= says 3 to GPU 0, 0 were measured (a bridge that is missing?)"), "{text}");
        let (check, _, text) = one(&sources(SLURM, &GRES.replacen("Cores=4-7", "Cores=0-3", 1)));
        assert_eq!((check.as_str(), text.as_str()), ("Cores", "GPU 2: Cores= says 0-3, 4-7 were measured > Cores=4-7"));
        let (check, _, text) = one(&sources(SLURM, &GRES.replace("Cores=4-7 ", "")));
        assert!(check == "Cores" && text.starts_with("GPU 2-3: no Cores="), "{text}");
        let (check, _, text) = one(&sources(SLURM, &GRES.replace("nvidia1", "nvidia0")));
        assert!(check == "duplicate" && text.starts_with("GPU 1 and 0 are one device: /dev/nvidia0"), "{text}");
        let three: Vec<&str> = GRES.lines().take(3).collect();
        let three =
            three.join("\n").replace(",0\n", "\n").replace("Links=0,0,-1,4", "Links=0,0,-1").replace(",0,0", ",0");
        let all = found(&sources(SLURM, &three));
        assert!(
            all.iter().any(|(c, _, t)| c == "count" && t.starts_with("slurm.conf has 4 GPUs, gres.conf 3")),
            "{all:?}"
        );
    }

    #[test]
    fn lost_cards_and_what_the_agent_could_not_match() {
        let mut s = sources(SLURM, GRES);
        let node = s.hardware.as_mut().unwrap()[1].gpus.as_mut().unwrap();
        node.gpus[2].lost = Some("GPU is lost".into());
        node.problems = vec!["GPU-9 at 09:00.0 (minor 9): gres.conf does not name it".into()];
        let all = found(&s);
        assert_eq!((all[0].0.as_str(), all[0].1.as_str()), ("lost card", "n1"));
        assert!(all[0].2.starts_with("GPU 2 (GPU-2, 00000000:03:00.0): GPU is lost"), "{all:?}");
        assert!(all[1].2.contains("gres.conf does not name it"));
    }

    #[test]
    fn files_by_themselves() {
        let mut s = sources(&SLURM.replace("cons_tres", "cons_res"), GRES);
        s.hardware = Err("pliantd is not running".into());
        s.switches = topology_conf::parse("topology.conf", "SwitchName=s Nodes=n0,x[1-2]\n", &mut none)
            .map(Some)
            .map_err(|e| e.to_string());
        let all = found(&s);
        let has = |text: &str| assert!(all.iter().any(|f| f.2.contains(text)), "{text}: {all:?}");
        has("SelectType=select/cons_res: --gpus and its like are not supported");
        has("names nodes that slurm.conf does not: x[1-2]");
        has("GPU nodes at no switch: n1");
        has("not compared: pliantd is not running");
        let mut s = sources(SLURM, "Name=gpu File={{ x }}\n");
        s.switches = Err("topology.conf:3: s is below itself".into());
        let all = found(&s);
        assert!(
            all.iter().any(|f| f.2.contains("template")) && all.iter().any(|f| f.2.contains("below itself")),
            "{all:?}"
        );
    }
}
