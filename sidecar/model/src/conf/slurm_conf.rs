//! slurm.conf: nodes, partitions, and the keys that decide what Pliant can do on a cluster.

use super::gres_conf::Layout;
use super::{Budget, ConfError, Entry, MAX_TOTAL, Read, entries, short};
use crate::ids::{GpuCount, NodeName};
use crate::{gres, hostlist, time};
use std::collections::{BTreeMap, HashMap, HashSet};

/// The most bytes that `NodeName=DEFAULT` or `PartitionName=DEFAULT` may hand on to each line after it.
const MAX_DEFAULTS: usize = 4096;

/// Keys of `NodeName=` and `PartitionName=` lines that are often used: none of them is the start of a value.
const OF_LINES: [&str; 27] = [
    "NodeName",
    "NodeHostname",
    "NodeAddr",
    "Port",
    "CPUs",
    "Procs",
    "Boards",
    "SocketsPerBoard",
    "Sockets",
    "CoresPerSocket",
    "ThreadsPerCore",
    "RealMemory",
    "Gres",
    "Features",
    "Feature",
    "State",
    "Weight",
    "PartitionName",
    "Nodes",
    "Default",
    "DefaultTime",
    "MaxTime",
    "MaxNodes",
    "OverSubscribe",
    "Shared",
    "Priority",
    "AllowQOS",
];

/// A whole slurm.conf.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlurmConf {
    /// Words of lines that are about neither nodes nor partitions, in order.
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
    let mut reader = Reader {
        conf: SlurmConf::default(),
        of_nodes: BTreeMap::new(),
        of_partitions: BTreeMap::new(),
        nodes: Budget::new(hostlist::MAX_NAMES),
        members: Budget::new(MAX_TOTAL),
        lines: HashMap::new(),
    };
    for entry in entries(file, text, read, &mut reader.conf.gaps)? {
        if entry.is("NodeName") || entry.is("PartitionName") {
            entry.no_cell_shifted(&OF_LINES)?;
        }
        if entry.is("NodeName") {
            reader.node(&entry)?;
        } else if entry.is("PartitionName") {
            reader.partition(&entry)?;
        } else {
            let key = |w: &super::Word| Key {
                file: entry.file.clone(),
                line: entry.line,
                name: w.key.clone(),
                value: w.value.clone(),
            };
            reader.conf.keys.extend(entry.words.iter().map(key));
        }
    }
    Ok(reader.conf)
}

/// Words by their key in lower case.
type Words = BTreeMap<String, String>;

struct Reader {
    conf: SlurmConf,
    of_nodes: Words,
    of_partitions: Words,
    /// What all `NodeName=` lines may still stand for.
    nodes: Budget,
    /// What all `Nodes=` of partitions may still stand for.
    members: Budget,
    /// The place that defines a node.
    lines: HashMap<NodeName, (String, usize)>,
}

fn words(entry: &Entry, defaults: &Words) -> Words {
    let mut words = defaults.clone();
    words.extend(entry.words.iter().map(|w| (w.key.to_ascii_lowercase(), w.value.clone())));
    words
}

/// The words of a `DEFAULT` line and those before it, which all later lines get.
fn defaults(entry: &Entry, before: &Words, name: &str) -> Result<Words, ConfError> {
    let mut all = words(entry, before);
    all.remove(name);
    match all.iter().map(|(k, v)| k.len() + v.len()).sum::<usize>() {
        n if n > MAX_DEFAULTS => Err(entry.error(format!("the defaults are longer than {MAX_DEFAULTS} bytes"))),
        _ => Ok(all),
    }
}

fn names(entry: &Entry, key: &str, text: &str) -> Result<Vec<NodeName>, ConfError> {
    hostlist::expand(text).map_err(|e| entry.error(format!("{key}={}: {e}", short(text))))
}

impl Reader {
    fn node(&mut self, entry: &Entry) -> Result<(), ConfError> {
        let text = entry.get("NodeName").unwrap_or_default();
        if text.eq_ignore_ascii_case("DEFAULT") {
            self.of_nodes = defaults(entry, &self.of_nodes, "nodename")?;
            return Ok(());
        }
        let names = names(entry, "NodeName", text)?;
        self.nodes.take(entry, names.len())?;
        for name in &names {
            if let Some((file, line)) = self.lines.insert(name.clone(), (entry.file.clone(), entry.line)) {
                return Err(entry.error(format!("node {name} is there already, at {file}:{line}")));
            }
        }
        let (file, line) = (entry.file.clone(), entry.line);
        self.conf.nodes.push(NodeLine { file, line, names, words: words(entry, &self.of_nodes) });
        Ok(())
    }

    fn partition(&mut self, entry: &Entry) -> Result<(), ConfError> {
        let name = entry.get("PartitionName").unwrap_or_default();
        if name.eq_ignore_ascii_case("DEFAULT") {
            self.of_partitions = defaults(entry, &self.of_partitions, "partitionname")?;
            return Ok(());
        }
        let words = words(entry, &self.of_partitions);
        let text = words.get("nodes").map_or("", String::as_str);
        let nodes = match text.eq_ignore_ascii_case("ALL") {
            true => None,
            false => Some(names(entry, "Nodes", text)?),
        };
        self.members.take(entry, nodes.as_ref().map_or(0, Vec::len))?;
        let (file, line) = (entry.file.clone(), entry.line);
        self.conf.partitions.push(PartitionLine { file, line, name: name.to_owned(), nodes, words });
        Ok(())
    }
}

impl SlurmConf {
    /// The last value of a key, whose case has no meaning.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.keys.iter().rev().find(|k| k.name.eq_ignore_ascii_case(key)).map(|k| k.value.as_str())
    }

    /// The names of the controllers, primary first: each `SlurmctldHost` (without its address in parentheses), or the
    /// old keys.
    pub fn controllers(&self) -> Vec<&str> {
        let all = |key: &str| -> Vec<&str> {
            let of_key = self.keys.iter().filter(|k| k.name.eq_ignore_ascii_case(key));
            of_key.filter_map(|k| k.value.split('(').next()).collect()
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

    /// Every node, in the order of the file.
    pub fn node_names(&self) -> Vec<&NodeName> {
        self.nodes.iter().flat_map(|l| &l.names).collect()
    }

    /// The line of a node.
    pub fn node_line(&self, node: &NodeName) -> Option<&NodeLine> {
        self.nodes.iter().find(|l| l.names.contains(node))
    }

    /// GPUs of all nodes.
    pub fn gpus(&self) -> GpuCount {
        let of_line =
            |l: &NodeLine| l.gpus().saturating_mul(GpuCount::try_from(l.names.len()).unwrap_or(GpuCount::MAX));
        self.nodes.iter().map(of_line).fold(0, GpuCount::saturating_add)
    }

    /// Names in `Nodes=` of partitions that neither `NodeName=` nor `NodeSet=` defines, each with its partition's line.
    /// Where an include is missing the names may be there.
    pub fn unknown_nodes(&self) -> Vec<(&PartitionLine, &NodeName)> {
        let sets = self.keys.iter().filter(|k| k.name.eq_ignore_ascii_case("NodeSet")).map(|k| k.value.as_str());
        let known: HashSet<&str> = self.node_names().into_iter().map(NodeName::as_str).chain(sets).collect();
        let all = self.partitions.iter().flat_map(|p| p.nodes.iter().flatten().map(move |n| (p, n)));
        all.filter(|(_, n)| !known.contains(n.as_str())).collect()
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
