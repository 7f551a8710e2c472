//! slurm.conf: nodes, partitions, and the keys that decide what Pliant can do on a cluster.

use super::gres_conf::Layout;
use super::{ConfError, Entry, Read, entries};
use crate::ids::{GpuCount, NodeName};
use crate::{gres, hostlist, time};
use std::collections::BTreeMap;

/// A whole slurm.conf.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlurmConf {
    /// Lines that are about neither nodes nor partitions, in order: file, line, key, value.
    pub keys: Vec<Key>,
    /// `NodeName=` lines.
    pub nodes: Vec<NodeLine>,
    /// `PartitionName=` lines.
    pub partitions: Vec<PartitionLine>,
    /// Includes that could not be read: what they say is not known.
    pub gaps: Vec<String>,
}

/// A key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Its file.
    pub file: String,
    /// Its line.
    pub line: usize,
    /// As typed.
    pub name: String,
    /// As typed.
    pub value: String,
}

/// A `NodeName=` line, with what `NodeName=DEFAULT` before it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeLine {
    /// Its file.
    pub file: String,
    /// Its line.
    pub line: usize,
    /// The nodes.
    pub names: Vec<NodeName>,
    /// Every word by its key in lower case.
    pub words: BTreeMap<String, String>,
}

/// A `PartitionName=` line, with what `PartitionName=DEFAULT` before it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionLine {
    /// Its file.
    pub file: String,
    /// Its line.
    pub line: usize,
    /// Its name.
    pub name: String,
    /// Its nodes; `None`: all (`ALL`).
    pub nodes: Option<Vec<NodeName>>,
    /// Every word by its key in lower case.
    pub words: BTreeMap<String, String>,
}

/// Reads slurm.conf.
///
/// # Errors
/// With file, line and reason.
pub fn parse(file: &str, text: &str, read: Read<'_>) -> Result<SlurmConf, ConfError> {
    let mut conf = SlurmConf::default();
    let (mut of_nodes, mut of_partitions) = (BTreeMap::new(), BTreeMap::new());
    for entry in entries(file, text, read, &mut conf.gaps)? {
        if entry.is("NodeName") {
            conf.node(&entry, &mut of_nodes)?;
        } else if entry.is("PartitionName") {
            conf.partition(&entry, &mut of_partitions)?;
        } else {
            let key = |w: &super::Word| Key {
                file: entry.file.clone(),
                line: entry.line,
                name: w.key.clone(),
                value: w.value.clone(),
            };
            conf.keys.extend(entry.words.iter().map(key));
        }
    }
    Ok(conf)
}

fn words(entry: &Entry, defaults: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut words = defaults.clone();
    words.extend(entry.words.iter().map(|w| (w.key.to_ascii_lowercase(), w.value.clone())));
    words
}

fn names(entry: &Entry, key: &str, text: &str) -> Result<Vec<NodeName>, ConfError> {
    let short: String = text.chars().take(60).collect();
    hostlist::expand(text).map_err(|e| entry.error(format!("{key}={short}: {e}")))
}

impl SlurmConf {
    fn node(&mut self, entry: &Entry, defaults: &mut BTreeMap<String, String>) -> Result<(), ConfError> {
        let text = entry.get("NodeName").unwrap_or_default();
        if text.eq_ignore_ascii_case("DEFAULT") {
            *defaults = words(entry, defaults);
            defaults.remove("nodename");
            return Ok(());
        }
        let line = NodeLine {
            file: entry.file.clone(),
            line: entry.line,
            names: names(entry, "NodeName", text)?,
            words: words(entry, defaults),
        };
        self.nodes.push(line);
        Ok(())
    }

    fn partition(&mut self, entry: &Entry, defaults: &mut BTreeMap<String, String>) -> Result<(), ConfError> {
        let name = entry.get("PartitionName").unwrap_or_default();
        let words = words(entry, defaults);
        if name.eq_ignore_ascii_case("DEFAULT") {
            *defaults = words;
            defaults.remove("partitionname");
            return Ok(());
        }
        let text = words.get("nodes").map_or("", String::as_str);
        let nodes = match text.eq_ignore_ascii_case("ALL") {
            true => None,
            false => Some(names(entry, "Nodes", text)?),
        };
        let (file, line) = (entry.file.clone(), entry.line);
        self.partitions.push(PartitionLine { file, line, name: name.to_owned(), nodes, words });
        Ok(())
    }

    /// The last value of a key, whose case has no meaning.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.keys.iter().rev().find(|k| k.name.eq_ignore_ascii_case(key)).map(|k| k.value.as_str())
    }

    /// The controllers, primary first: each `SlurmctldHost`, or the old keys.
    pub fn controllers(&self) -> Vec<&str> {
        let all = |key: &str| -> Vec<&str> {
            self.keys.iter().filter(|k| k.name.eq_ignore_ascii_case(key)).map(|k| k.value.as_str()).collect()
        };
        let hosts = all("SlurmctldHost");
        if !hosts.is_empty() {
            return hosts;
        }
        let mut old = all("ControlMachine");
        old.extend(all("BackupController"));
        old
    }

    /// Whether Slurm can allocate GPUs by `--gpus` and its like. cons_res knows `--gres` only; without the key the
    /// default of the release holds (cons_tres from 23.02 on).
    pub fn cons_tres(&self) -> bool {
        self.get("SelectType").is_none_or(|s| s.ends_with("cons_tres"))
    }

    /// `AccountingStorageTRES`, one each.
    pub fn accounting_tres(&self) -> Vec<&str> {
        let text = self.get("AccountingStorageTRES").unwrap_or_default();
        text.split(',').map(str::trim).filter(|t| !t.is_empty()).collect()
    }

    /// Every node once, in the order of the file.
    pub fn node_names(&self) -> Vec<&NodeName> {
        let mut seen = std::collections::HashSet::new();
        self.nodes.iter().flat_map(|l| &l.names).filter(|n| seen.insert(*n)).collect()
    }

    /// The line of a node; of two the last.
    pub fn node_line(&self, node: &NodeName) -> Option<&NodeLine> {
        self.nodes.iter().rev().find(|l| l.names.contains(node))
    }

    /// GPUs of all nodes.
    pub fn gpus(&self) -> GpuCount {
        self.node_names().into_iter().filter_map(|n| self.node_line(n)).map(NodeLine::gpus).sum()
    }

    /// The partitions of a node.
    pub fn partitions_of<'a>(&'a self, node: &'a NodeName) -> impl Iterator<Item = &'a PartitionLine> {
        self.partitions.iter().filter(move |p| p.nodes.as_ref().is_none_or(|n| n.contains(node)))
    }
}

impl NodeLine {
    /// A value by its key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.words.get(&key.to_ascii_lowercase()).map(String::as_str)
    }

    /// `Gres=`
    pub fn gres(&self) -> Option<&str> {
        self.get("Gres")
    }

    /// GPUs by `Gres=`.
    pub fn gpus(&self) -> GpuCount {
        self.gres().map_or(0, gres::gpu_total)
    }

    /// Sockets, cores and threads, each 1 where the line does not say.
    pub fn layout(&self) -> Layout {
        let number = |key: &str| self.get(key).and_then(|t| t.parse::<u32>().ok()).filter(|n| *n > 0);
        let boards = number("Boards").unwrap_or(1);
        let sockets = number("Sockets").or_else(|| number("SocketsPerBoard").map(|s| s.saturating_mul(boards)));
        let threads = number("ThreadsPerCore").unwrap_or(1);
        let cpus = number("CPUs").or_else(|| number("Procs"));
        let sockets = sockets.unwrap_or(1);
        let cores = number("CoresPerSocket").or_else(|| cpus.map(|c| (c / threads / sockets).max(1))).unwrap_or(1);
        Layout { sockets, cores, threads }
    }
}

impl PartitionLine {
    /// A value by its key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.words.get(&key.to_ascii_lowercase()).map(String::as_str)
    }

    /// `MaxTime=` in seconds; `Ok(None)`: none or unlimited.
    ///
    /// # Errors
    /// No time of Slurm's form.
    pub fn max_time(&self) -> Result<Option<u64>, time::TimeError> {
        self.get("MaxTime").map_or(Ok(None), time::parse)
    }
}
