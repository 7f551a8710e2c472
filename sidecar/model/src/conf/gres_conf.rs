//! gres.conf: which device files are whose GPUs, near which cores, and how they are linked.

use super::{ConfError, Entry, Read, entries, index_list};
use crate::hostlist;
use crate::ids::NodeName;
use std::collections::BTreeSet;

/// Keys that Slurm knows.
const KEYS: [&str; 11] = [
    "AutoDetect", "Count", "CPUs", "Cores", "File", "Flags", "Links", "MultipleFiles", "Name", "NodeName", "Type",
];

/// A whole gres.conf.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GresConf {
    /// `AutoDetect=` for all nodes.
    pub auto_detect: Option<String>,
    /// In the order of the file.
    pub lines: Vec<GresLine>,
    /// Includes that could not be read: what they say is not known.
    pub gaps: Vec<String>,
}

/// One line that names a GRES.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GresLine {
    /// Its file.
    pub file: String,
    /// Its line.
    pub line: usize,
    /// Nodes; `None`: all.
    pub nodes: Option<Vec<NodeName>>,
    /// `gpu`, `shard`, `mps`, …
    pub name: String,
    /// `Type=`
    pub kind: Option<String>,
    /// `File=`, expanded.
    pub files: Vec<String>,
    /// `MultipleFiles=` (MIG instances), expanded: all belong to one device.
    pub multiple_files: Vec<String>,
    /// `Cores=` or `CPUs=`.
    pub cores: Option<Vec<u32>>,
    /// Whether it was the old keyword `CPUs=`, whose numbers are of CPUs (hyper-threads), not of cores.
    pub cores_are_cpus: bool,
    /// `Links=`: one number per GPU of the node, -1 for itself.
    pub links: Option<Vec<i64>>,
    /// `Count=`
    pub count: Option<u64>,
    /// `AutoDetect=` of this line.
    pub auto_detect: Option<String>,
}

/// A GPU as gres.conf gives it to a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GresDevice {
    /// Slurm's GRES index.
    pub index: u32,
    /// Device file.
    pub file: Option<String>,
    /// `Type=`
    pub kind: Option<String>,
    /// See [`GresLine::cores`].
    pub cores: Option<Vec<u32>>,
    /// See [`GresLine::cores_are_cpus`].
    pub cores_are_cpus: bool,
    /// See [`GresLine::links`].
    pub links: Option<Vec<i64>>,
    /// Its line.
    pub line: usize,
}

/// Sockets, cores and threads of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Sockets.
    pub sockets: u32,
    /// Cores of each.
    pub cores: u32,
    /// Threads of each core.
    pub threads: u32,
}

impl Layout {
    /// The core of a Linux CPU number, where siblings are numbered after all first threads (the usual order).
    pub fn core_of_cpu(&self, cpu: u32) -> u32 {
        cpu % self.sockets.saturating_mul(self.cores).max(1)
    }
}

impl GresDevice {
    /// Its core numbers, whichever keyword gave them; ascending.
    pub fn core_numbers(&self, layout: Layout) -> Option<Vec<u32>> {
        let core = |n: &u32| if self.cores_are_cpus { layout.core_of_cpu(*n) } else { *n };
        Some(self.cores.as_ref()?.iter().map(core).collect::<BTreeSet<_>>().into_iter().collect())
    }

    /// The sockets that its cores are on; ascending.
    pub fn sockets(&self, layout: Layout) -> Option<Vec<u32>> {
        let of = |core: u32| core / layout.cores.max(1);
        Some(self.core_numbers(layout)?.into_iter().map(of).collect::<BTreeSet<_>>().into_iter().collect())
    }
}

/// Reads gres.conf.
///
/// # Errors
/// With file, line and reason.
pub fn parse(file: &str, text: &str, read: Read<'_>) -> Result<GresConf, ConfError> {
    let mut conf = GresConf::default();
    for entry in entries(file, text, read, &mut conf.gaps)? {
        let line = line_of(&entry)?;
        match line {
            Some(line) => conf.lines.push(line),
            None => conf.auto_detect = entry.get("AutoDetect").map(str::to_owned),
        }
    }
    Ok(conf)
}

/// `None`: a line that is about AutoDetect of all nodes only.
fn line_of(entry: &Entry) -> Result<Option<GresLine>, ConfError> {
    for word in &entry.words {
        if !KEYS.iter().any(|k| word.key.eq_ignore_ascii_case(k)) {
            return Err(entry.error(format!("{} is no key of gres.conf ({})", word.key, KEYS.join(", "))));
        }
    }
    let hosts = |key: &str| -> Result<Option<Vec<String>>, ConfError> {
        let Some(text) = entry.get(key) else { return Ok(None) };
        let names = hostlist::expand(text).map_err(|e| entry.error(format!("{key}={}: {e}", short(text))))?;
        Ok(Some(names.into_iter().map(|n| n.0).collect()))
    };
    let nodes = hosts("NodeName")?.map(|n| n.into_iter().map(NodeName).collect());
    let auto_detect = entry.get("AutoDetect").map(str::to_owned);
    let name = match entry.get("Name") {
        Some(name) => name.to_ascii_lowercase(),
        None if auto_detect.is_some() && nodes.is_none() && entry.words.len() == 1 => return Ok(None),
        None if auto_detect.is_some() => "gpu".into(),
        None => return Err(entry.error("neither Name= nor AutoDetect=")),
    };
    let (cores, cores_are_cpus) = match (entry.get("Cores"), entry.get("CPUs")) {
        (Some(_), Some(_)) => return Err(entry.error("Cores= and CPUs= on one line")),
        (cores, cpus) => (cores.or(cpus), cpus.is_some()),
    };
    let list = |t: &str| index_list::parse(t).map_err(|e| entry.error(format!("Cores: {e}")));
    let cores = cores.map(list).transpose()?;
    let links = entry.get("Links").map(|t| links(entry, t)).transpose()?;
    let count = entry.get("Count").map(|t| count(entry, t)).transpose()?;
    Ok(Some(GresLine {
        file: entry.file.clone(),
        line: entry.line,
        nodes,
        name,
        kind: entry.get("Type").map(str::to_owned),
        files: hosts("File")?.unwrap_or_default(),
        multiple_files: hosts("MultipleFiles")?.unwrap_or_default(),
        cores,
        cores_are_cpus,
        links,
        count,
        auto_detect,
    }))
}

fn short(text: &str) -> String {
    text.chars().take(60).collect()
}

fn links(entry: &Entry, text: &str) -> Result<Vec<i64>, ConfError> {
    let bad = |t: &str| entry.error(format!("Links={}: {t:?} is no number from -1 to 999", short(text)));
    let number = |t: &str| t.trim().parse::<i64>().ok().filter(|n| (-1..1000).contains(n)).ok_or_else(|| bad(t));
    let all: Vec<i64> = text.split(',').map(number).collect::<Result<_, _>>()?;
    if all.len() > 1024 { Err(bad("")) } else { Ok(all) }
}

/// `Count=` with Slurm's suffixes k, m, g (powers of 1024).
fn count(entry: &Entry, text: &str) -> Result<u64, ConfError> {
    let unit = match text.chars().last().map(|c| c.to_ascii_lowercase()) {
        Some('k') => 1 << 10,
        Some('m') => 1 << 20,
        Some('g') => 1 << 30,
        _ => 1,
    };
    let digits = if unit > 1 { text.get(..text.len() - 1).unwrap_or_default() } else { text };
    let number = digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse::<u64>().ok()).flatten();
    number.and_then(|n| n.checked_mul(unit)).ok_or_else(|| entry.error(format!("Count={}: no number", short(text))))
}

impl GresConf {
    fn lines_of<'a>(&'a self, node: &'a NodeName, name: &'a str) -> impl Iterator<Item = &'a GresLine> {
        let here = move |l: &&GresLine| l.name == name && l.nodes.as_ref().is_none_or(|n| n.contains(node));
        self.lines.iter().filter(here)
    }

    /// The GPUs of a node in the order of Slurm's indexes. A line without `File=` counts by `Count=`, 1 if that is not
    /// there either (a line of AutoDetect alone names none).
    pub fn gpus(&self, node: &NodeName) -> Vec<GresDevice> {
        let mut all = vec![];
        for line in self.lines_of(node, "gpu") {
            let mut files: Vec<Option<&String>> = line.files.iter().map(Some).collect();
            if files.is_empty() && !line.multiple_files.is_empty() {
                files.push(line.multiple_files.first());
            }
            if files.is_empty() {
                let none = if line.auto_detect.is_some() && line.kind.is_none() { 0 } else { 1 };
                let count = line.count.unwrap_or(none).min(1024);
                files.extend((0..count).map(|_| None));
            }
            for file in files {
                all.push(GresDevice {
                    index: u32::try_from(all.len()).unwrap_or(u32::MAX),
                    file: file.cloned(),
                    kind: line.kind.clone(),
                    cores: line.cores.clone(),
                    cores_are_cpus: line.cores_are_cpus,
                    links: line.links.clone(),
                    line: line.line,
                });
            }
        }
        all
    }

    /// All nodes that lines name; lines for all nodes name none.
    pub fn nodes(&self) -> BTreeSet<&NodeName> {
        self.lines.iter().flat_map(|l| l.nodes.iter().flatten()).collect()
    }

    /// GPUs of all nodes that are named, or of one node where no line names any.
    pub fn total(&self) -> usize {
        let nodes = self.nodes();
        match nodes.is_empty() {
            true => self.gpus(&NodeName(String::new())).len(),
            false => nodes.into_iter().map(|n| self.gpus(n).len()).sum(),
        }
    }

    /// Shards of each GPU of a node, where they are given (`Name=shard Count=`): Slurm spreads them evenly.
    pub fn shards_per_gpu(&self, node: &NodeName) -> Option<u64> {
        let shards: u64 = self.lines_of(node, "shard").filter_map(|l| l.count).sum();
        let gpus = u64::try_from(self.gpus(node).len()).ok().filter(|n| *n > 0)?;
        (shards > 0).then_some(shards / gpus)
    }

    /// The AutoDetect that holds for a node.
    pub fn auto_detect_of<'a>(&'a self, node: &'a NodeName) -> Option<&'a str> {
        let own = self.lines_of(node, "gpu").filter_map(|l| l.auto_detect.as_deref()).last();
        own.or(self.auto_detect.as_deref()).filter(|a| !a.eq_ignore_ascii_case("off"))
    }
}
