//! Everything that says something about the topology: Slurm's files on this host, and what the agents have measured.

use anyhow::bail;
use pliant_model::conf::gres_conf::{self, GresConf, Layout};
use pliant_model::conf::slurm_conf::SlurmConf;
use pliant_model::topology::{NodeTopology, Source, Switches};
use pliant_model::{NodeName, gres, hostlist};
use pliant_protocol::admin::{NodeHardware, Reply, Request};
use pliant_protocol::config::Config;
use pliant_protocol::slurm_files::{self, SlurmFiles};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// What was found, or why not.
#[derive(Debug)]
pub struct Sources {
    /// Folder of Slurm's files.
    pub folder: PathBuf,
    /// slurm.conf.
    pub slurm: Result<SlurmConf, String>,
    /// gres.conf; `Ok(None)`: there is none.
    pub gres: Result<Option<GresConf>, String>,
    /// topology.yaml or topology.conf; `Ok(None)`: neither.
    pub switches: Result<Option<Switches>, String>,
    /// What pliantd knows of the hardware.
    pub hardware: Result<Vec<NodeHardware>, String>,
}

/// The cluster in one picture.
#[derive(Debug, Serialize)]
pub struct Cluster {
    /// Switches or blocks.
    pub switches: Switches,
    /// What each node has, in words such as `8 x NVIDIA A100`.
    pub nodes: BTreeMap<String, String>,
    /// NVLink domains that span nodes: fabric and clique, and their nodes.
    pub domains: Vec<(String, Vec<NodeName>)>,
}

impl Cluster {
    /// One line for the nodes that have the same: `n[0-3] (8 x NVIDIA A100)`.
    pub fn lines(&self, nodes: &[NodeName]) -> Vec<String> {
        let mut alike: BTreeMap<&str, Vec<&NodeName>> = BTreeMap::new();
        for node in nodes {
            alike
                .entry(self.nodes.get(node.as_str()).map_or("not in slurm.conf", String::as_str))
                .or_default()
                .push(node);
        }
        alike.into_iter().map(|(what, nodes)| format!("{} ({what})", hostlist::compress(nodes))).collect()
    }
}

impl Sources {
    /// Reads all; `conf` is another folder with Slurm's files.
    pub fn read(config: Option<&Path>, conf: Option<PathBuf>) -> Sources {
        let loaded = Config::find(config);
        let set = loaded.as_ref().map(|c| c.slurm.conf.clone()).unwrap_or_default();
        let folder = conf.unwrap_or_else(|| slurm_files::folder(&set));
        let hardware = match loaded {
            Ok(config) => match crate::client::ask(&config.daemon.socket, &Request::Hardware { node: None }) {
                Ok(Reply::Hardware { nodes }) => Ok(nodes),
                Ok(Reply::Error { text }) => Err(format!("pliantd: {text}")),
                Ok(_) => Err("pliantd gave an answer to another question".into()),
                Err(e) => Err(e.to_string()),
            },
            Err(e) => Err(e.to_string()),
        };
        let mut all = Sources::of_folder(&folder);
        all.hardware = hardware;
        all
    }

    /// Slurm's files only.
    pub fn of_folder(folder: &Path) -> Sources {
        let SlurmFiles { folder, slurm, gres, switches } = SlurmFiles::read(folder);
        Sources { folder, slurm, gres, switches, hardware: Err("not asked".into()) }
    }

    /// Sockets, cores and threads of a node as slurm.conf says.
    pub fn layout(&self, node: &NodeName) -> Layout {
        let line = self.slurm.as_ref().ok().and_then(|s| s.node_line(node));
        line.map_or(Layout { sockets: 1, cores: 1, threads: 1 }, |l| l.layout())
    }

    /// What gres.conf names for a node.
    pub fn devices(&self, node: &NodeName) -> Vec<gres_conf::GresDevice> {
        self.gres.as_ref().ok().and_then(Option::as_ref).map(|g| g.gpus(node)).unwrap_or_default()
    }

    /// What the agent of a node has measured.
    pub fn measured(&self, node: &NodeName) -> Option<NodeTopology> {
        let found = self.hardware.as_ref().ok()?.iter().find(|h| h.node == *node)?;
        let gpus = found.gpus.as_ref().filter(|g| g.absent.is_none())?;
        Some(NodeTopology::of_agent(gpus))
    }

    /// The topology of a node: measured, or else as gres.conf says.
    pub fn topology_of(&self, node: &NodeName) -> anyhow::Result<NodeTopology> {
        if let Some(measured) = self.measured(node) {
            return Ok(measured);
        }
        if self.slurm.as_ref().is_ok_and(|s| s.node_line(node).is_none()) {
            bail!("node {node}: {} has no such node", self.folder.join("slurm.conf").display());
        }
        let devices = self.devices(node);
        if devices.is_empty() {
            let why = self.hardware.as_ref().err().map_or("no agent with GPUs is connected", String::as_str);
            bail!(
                "node {node}: nothing is measured ({why}), and {} names no GPU of it",
                self.folder.join("gres.conf").display()
            );
        }
        let mut topology = NodeTopology::of_gres(&devices, self.layout(node));
        topology.warnings.push("not measured: as gres.conf says".into());
        Ok(topology)
    }

    /// Where gres.conf and what was measured differ; measured wins.
    pub fn differences(&self, node: &NodeName) -> Vec<String> {
        let Some(measured) = self.measured(node) else { return vec![] };
        let written = NodeTopology::of_gres(&self.devices(node), self.layout(node));
        differences("gres.conf", &written, &measured)
    }

    /// All of the cluster.
    pub fn cluster(&self) -> Cluster {
        let mut nodes = BTreeMap::new();
        let mut domains: BTreeMap<String, BTreeSet<NodeName>> = BTreeMap::new();
        for line in self.slurm.iter().flat_map(|s| &s.nodes) {
            let text = line.gres().filter(|g| gres::gpu_total(g) > 0).map_or_else(|| "no GPU".into(), gres_words);
            nodes.extend(line.names.iter().map(|n| (n.0.clone(), text.clone())));
        }
        for h in self.hardware.iter().flatten() {
            if let Some(t) = self.measured(&h.node) {
                nodes.insert(h.node.0.clone(), models(&t));
                for (cluster, clique) in t.gpus.iter().filter_map(|g| g.clique.as_ref()) {
                    domains.entry(format!("{cluster} clique {clique}")).or_default().insert(h.node.clone());
                }
            }
        }
        let switches = self.switches.as_ref().ok().cloned().flatten().unwrap_or_default();
        Cluster { switches, nodes, domains: domains.into_iter().map(|(d, n)| (d, n.into_iter().collect())).collect() }
    }
}

/// `gpu:a100:8` as `8 x a100`.
fn gres_words(text: &str) -> String {
    let word = |g: gres::GpuGres| format!("{} x {}", g.count, g.kind.as_deref().unwrap_or("GPU"));
    gres::gpus(text).into_iter().map(word).collect::<Vec<_>>().join(", ")
}

/// `8 x NVIDIA A100`
fn models(t: &NodeTopology) -> String {
    let mut count: BTreeMap<&str, u32> = BTreeMap::new();
    t.gpus.iter().for_each(|g| *count.entry(g.model.as_deref().unwrap_or("GPU")).or_default() += 1);
    let mut words: Vec<String> = count.into_iter().map(|(model, n)| format!("{n} x {model}")).collect();
    let lost = t.gpus.iter().filter(|g| g.lost).count();
    if lost > 0 {
        words.push(format!("{lost} lost"));
    }
    words.join(", ")
}

/// Where a source differs from what was measured, by GRES index: one sentence each.
pub fn differences(source: &str, written: &NodeTopology, measured: &NodeTopology) -> Vec<String> {
    let mut all = vec![];
    if written.gpus.len() != measured.gpus.len() {
        all.push(format!("{source} has {} GPUs, {} were measured", written.gpus.len(), measured.gpus.len()));
    }
    // By GRES index; a capture has none, and is in NVML's order as the agent's list is.
    let place = |index: usize| {
        let known = measured.gpus.iter().any(|g| g.gres_index.is_some()) && written.source == Source::GresConf;
        let by_index = |i| measured.gpus.iter().position(|g| g.gres_index == Some(i));
        if known { u32::try_from(index).ok().and_then(by_index) } else { Some(index) }
    };
    for a in 0..written.gpus.len() {
        for b in a + 1..written.gpus.len() {
            let (Some(x), Some(y)) = (place(a), place(b)) else { continue };
            if x >= measured.gpus.len() || y >= measured.gpus.len() {
                continue;
            }
            let (says, is) = (written.link(a, b), measured.link(x, y));
            if says.count != is.count {
                all.push(format!("GPU{a}-GPU{b}: {source} says {} links, {} were measured", says.count, is.count));
            }
        }
    }
    all
}
