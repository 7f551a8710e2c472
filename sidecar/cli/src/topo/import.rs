//! `pliant topo import`: reads a file of any kind that has something to do with GPUs or Slurm, and shows what Pliant
//! understands in it.

use super::draw;
use super::sources::{self, Cluster};
use anyhow::{Context as _, bail};
use pliant_model::NodeName;
use pliant_model::capture::{self, Capture, Listed};
use pliant_model::conf::gres_conf::{self, GresConf};
use pliant_model::conf::index_list;
use pliant_model::conf::slurm_conf::{self, SlurmConf};
use pliant_model::conf::{topology_conf, topology_yaml};
use pliant_model::topology::{NodeTopology, Switches};
use pliant_protocol::dump::{self, Dump};
use pliant_protocol::slurm_files;
use std::fmt::Write as _;
use std::path::Path;

/// What a file is.
enum Read {
    Topology(Box<NodeTopology>),
    List(Vec<Listed>),
    Switches(Vec<(String, Switches)>),
    Gres(GresConf),
    Slurm(Box<SlurmConf>),
    Dump(Dump),
}

/// Reads all files and writes what they say; with `measured` captures are compared with it.
pub fn all(files: &[String], measured: Option<&NodeTopology>, json: bool) -> anyhow::Result<String> {
    let mut out = String::new();
    for file in files {
        let text = match file.as_str() {
            "-" => slurm_files::read_from(std::io::stdin()).map_err(anyhow::Error::msg).context("standard input")?,
            path => slurm_files::read(Path::new(path)).map_err(anyhow::Error::msg).with_context(|| path.to_owned())?,
        };
        let read = read(file, &text)?;
        out.push_str(&if json { as_json(&read)? } else { words(file, &read, measured) });
    }
    Ok(out)
}

/// By name where that tells, or else by content.
fn read(file: &str, text: &str) -> anyhow::Result<Read> {
    let folder = Path::new(file).parent().unwrap_or(Path::new("."));
    let mut include = |path: &str| slurm_files::read(&folder.join(path));
    // What can be known by its content is, whatever its name.
    let matrix = |l: &str| l.split_whitespace().next().is_some_and(|w| w == "GPU0");
    if text.trim_start().starts_with('{') {
        return Ok(Read::Dump(dump::read(text).with_context(|| file.to_owned())?));
    }
    if text.lines().any(matrix) {
        return captured(file, text);
    }
    let name = Path::new(file).file_name().map(|n| n.to_string_lossy().to_ascii_lowercase()).unwrap_or_default();
    let begins = |keys: &[&str]| {
        let key = |l: &str| l.trim_start().split(['=', ' ', '\t']).next().unwrap_or_default().to_ascii_lowercase();
        let lines = text.lines().filter(|l| !l.trim().is_empty() && !l.trim_start().starts_with('#'));
        lines.map(key).any(|k| keys.contains(&k.as_str()))
    };
    if name.ends_with(".yaml") || name.ends_with(".yml") || begins(&["-"]) && text.contains("topology:") {
        let all = topology_yaml::parse(file, text)?;
        return Ok(Read::Switches(all.into_iter().map(|t| (t.name, t.switches)).collect()));
    }
    if begins(&["switchname", "blockname", "blocksizes"]) {
        return Ok(Read::Switches(vec![(name, topology_conf::parse(file, text, &mut include)?)]));
    }
    if begins(&["partitionname", "clustername", "slurmctldhost", "controlmachine"]) || name.starts_with("slurm") {
        return Ok(Read::Slurm(Box::new(slurm_conf::parse(file, text, &mut include)?)));
    }
    if name.starts_with("gres") || begins(&["autodetect", "name"]) || begins(&["nodename"]) && text.contains("File=") {
        return Ok(Read::Gres(gres_conf::parse(file, text, &mut include)?));
    }
    if dump::is_dump(text) {
        return Ok(Read::Dump(dump::read(text).with_context(|| file.to_owned())?));
    }
    captured(file, text)
}

fn captured(file: &str, text: &str) -> anyhow::Result<Read> {
    match capture::read(text).with_context(|| file.to_owned())? {
        Capture::Topology(t) => Ok(Read::Topology(Box::new(t))),
        Capture::List(all) => Ok(Read::List(all)),
    }
}

fn as_json(read: &Read) -> anyhow::Result<String> {
    match read {
        Read::Topology(t) => super::json(t),
        Read::Switches(all) => super::json(all),
        Read::List(_) | Read::Gres(_) | Read::Slurm(_) | Read::Dump(_) => bail!("--json: topologies only"),
    }
}

fn words(file: &str, read: &Read, measured: Option<&NodeTopology>) -> String {
    match read {
        Read::Topology(t) => {
            let differences = measured.map(|m| sources::differences("the capture", t, m)).unwrap_or_default();
            draw::node(&NodeName(file.to_owned()), t, &differences)
        }
        Read::List(all) => listed(file, all),
        Read::Switches(all) => {
            let mut out = String::new();
            for (name, switches) in all {
                let (s, n) = (switches.switches.len(), switches.node_count());
                let _ = writeln!(out, "{name}: {s} switches or blocks, {n} nodes");
                let nodes =
                    switches.leaves().flat_map(|s| &s.nodes).map(|n| (n.0.clone(), "node".to_owned())).collect();
                out.push_str(&draw::cluster(&Cluster { switches: switches.clone(), nodes, domains: vec![] }));
            }
            out
        }
        Read::Gres(conf) => gres_words(file, conf),
        Read::Dump(dump) => dump_words(file, dump),
        Read::Slurm(conf) => {
            let mut out = format!(
                "{file}: {} nodes, {} GPUs, {} partitions, controllers {}\n",
                conf.node_names().len(),
                conf.gpus(),
                conf.partitions.len(),
                conf.controllers().join(", ")
            );
            if !conf.cons_tres() {
                out.push_str("Warning: SelectType is not select/cons_tres: --gpus and its like are not supported\n");
            }
            warn(&conf.gaps, &mut out);
            out
        }
    }
}

/// Jobs and nodes of Slurm's own output.
fn dump_words(file: &str, dump: &Dump) -> String {
    let list = index_list::format;
    let mut out = match dump.not_found() {
        true => format!("{file}: not found\n"),
        false => format!("{file}: {} jobs, {} nodes\n", dump.jobs.len(), dump.nodes.len()),
    };
    for job in &dump.jobs {
        let wants = job.wants.map_or_else(String::new, |w| format!(", asks for {w}"));
        let _ = write!(out, "job {} {}: {} GPUs{wants}", job.id, job.state.join("+"), job.gpus());
        for held in job.held.iter().filter(|h| h.gpus > 0) {
            let _ = write!(out, "; {} has {} ({})", held.node, held.gpus, list(&held.indexes));
        }
        let _ = writeln!(out, "{}", job.reason.as_ref().map_or_else(String::new, |r| format!("; waits: {r}")));
    }
    for n in &dump.nodes {
        let (state, used) = (n.state.join("+"), list(&n.used_indexes));
        let _ = writeln!(
            out,
            "node {} {state}: {} GPUs, {} used ({used}), {} can be had",
            n.name,
            n.gpus,
            n.used,
            n.usable()
        );
    }
    warn(&dump.errors, &mut out);
    warn(&dump.unread, &mut out);
    if dump.skipped > 0 {
        let _ = writeln!(out, "Warning: {} lines could not be read", dump.skipped);
    }
    out
}

fn warn(texts: &[String], out: &mut String) {
    for text in texts {
        let _ = writeln!(out, "Warning: {text}");
    }
}

fn listed(file: &str, all: &[Listed]) -> String {
    let instances: usize = all.iter().map(|g| g.instances.len()).sum();
    let mut out = format!("{file}: {} GPUs, {instances} MIG instances\n", all.len());
    for gpu in all {
        let _ = writeln!(out, "GPU{} {} {}", gpu.index, gpu.uuid, gpu.name);
        for (profile, uuid) in &gpu.instances {
            let _ = writeln!(out, "  MIG {profile} {uuid}");
        }
    }
    out
}

fn gres_words(file: &str, conf: &GresConf) -> String {
    let mut out = format!("{file}: {} GPUs\n", conf.total());
    if let Some(how) = &conf.auto_detect {
        let _ = writeln!(out, "AutoDetect={how}");
    }
    let nodes: Vec<NodeName> = conf.nodes().into_iter().cloned().collect();
    let nodes = if nodes.is_empty() { vec![NodeName("every node".into())] } else { nodes };
    for node in nodes {
        for d in conf.gpus(&node) {
            let kind = d.kind.as_deref().unwrap_or("-");
            let cores = d.cores.as_deref().map_or_else(|| "-".into(), index_list::format);
            let word = if d.cores_are_cpus { "CPUs" } else { "cores" };
            let _ = writeln!(out, "{node} {} {} type {kind} {word} {cores}", d.index, d.file.as_deref().unwrap_or("-"));
        }
    }
    warn(&conf.gaps, &mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(file: &str, text: &str) -> String {
        words(file, &read(file, text).unwrap(), None)
    }

    #[test]
    fn each_kind_is_known_by_its_content() {
        assert!(shown("a", "SwitchName=s Nodes=n[0-3]\n").starts_with("a: 1 switches or blocks, 4 nodes"));
        assert!(
            shown("t.yaml", "- topology: t\n  tree:\n    switches:\n    - switch: s\n      nodes: n[0-1]\n")
                .contains("n[0-1]")
        );
        assert!(shown("a", "NodeName=x Name=gpu File=/dev/nvidia[0-3]\n").starts_with("a: 4 GPUs"));
        assert!(shown("a", "ClusterName=c\nNodeName=n[0-1] Gres=gpu:8\n").starts_with("a: 2 nodes, 16 GPUs"));
        assert!(
            shown("a", "GPU 0: A (UUID: GPU-1)\n  MIG 1g.5gb Device 0: (UUID: MIG-2)\n")
                .starts_with("a: 1 GPUs, 1 MIG")
        );
        assert!(
            shown("a", "{\"nodes\": [{\"name\": \"n1\", \"state\": [\"IDLE\"], \"gres\": \"gpu:4\"}]}")
                .contains("4 can be had")
        );
        assert!(
            shown("a", "NodeName=n1 Gres=gpu:4 GresUsed=gpu:1(IDX:2) State=MIXED\n")
                .contains("1 used (2), 3 can be had")
        );
        assert!(shown("a", "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-3\nGPU1\tNV4\t X \t0-3\n").contains("NV4"));
    }

    #[test]
    fn what_is_none_of_them_is_refused_with_what_is_expected() {
        let e = format!("{:#}", read("x.txt", "hello\n").err().unwrap());
        assert!(e.contains("x.txt") && e.contains("nvidia-smi topo -m"), "{e}");
        let e = format!("{:#}", read("gres.conf", "Name=gpu File={{ x }}\n").err().unwrap());
        assert!(e.contains("gres.conf:1") && e.contains("template"), "{e}");
    }
}
