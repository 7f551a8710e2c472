//! gres.conf: which device files are whose GPUs, near which cores, and how they are linked.

use super::{Budget, ConfError, Entry, MAX_TOTAL, Read, entries, index_list, short};
use crate::ids::NodeName;
use crate::{gres, hostlist};
use std::collections::{BTreeSet, HashMap};

/// Keys that Slurm knows.
const KEYS: [&str; 13] = [
    "AutoDetect",
    "Count",
    "CPUs",
    "Cores",
    "File",
    "Files",
    "Flags",
    "Link",
    "Links",
    "MultipleFiles",
    "Name",
    "NodeName",
    "Type",
];

/// The most GPUs that a line gives to a node (Slurm's limit of `Links=`).
pub const MAX_GPUS: usize = 1024;

/// A whole gres.conf.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GresConf {
    /// `AutoDetect=` for all nodes.
    pub auto_detect: Option<String>,
    /// In the order of the file.
    pub lines: Vec<GresLine>,
    /// Includes that could not be read: what they say is not known.
    pub gaps: Vec<String>,
    /// Positions in `lines` of what names a node; ascending.
    by_node: HashMap<NodeName, Vec<usize>>,
    /// Positions in `lines` of what is for all nodes; ascending.
    for_all: Vec<usize>,
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
    /// Slurm's GRES index; see [`GresConf::merged`].
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
    let mut budget = Budget::new(MAX_TOTAL);
    for entry in entries(file, text, read, &mut conf.gaps)? {
        match line_of(&entry, &mut budget)? {
            Some(line) => conf.push(line),
            None => conf.auto_detect = entry.get("AutoDetect").map(str::to_owned),
        }
    }
    Ok(conf)
}

/// `None`: a line that is about AutoDetect of all nodes only.
fn line_of(entry: &Entry, budget: &mut Budget) -> Result<Option<GresLine>, ConfError> {
    for word in &entry.words {
        if !KEYS.iter().any(|k| word.key.eq_ignore_ascii_case(k)) {
            return Err(entry.error(format!("{} is no key of gres.conf ({})", short(&word.key), KEYS.join(", "))));
        }
    }
    entry.no_cell_shifted(&KEYS)?;
    let mut hosts = |key: &str, value: Option<&str>| -> Result<Option<Vec<String>>, ConfError> {
        let Some(text) = value else { return Ok(None) };
        let names = hostlist::expand(text).map_err(|e| entry.error(format!("{key}={}: {e}", short(text))))?;
        budget.take(entry, names.len())?;
        Ok(Some(names.into_iter().map(|n| n.0).collect()))
    };
    let nodes: Option<Vec<NodeName>> =
        hosts("NodeName", entry.get("NodeName"))?.map(|n| n.into_iter().map(NodeName).collect());
    if nodes.as_ref().is_some_and(Vec::is_empty) {
        return Err(entry.error("NodeName= names no node"));
    }
    let auto_detect = entry.get("AutoDetect").map(str::to_owned);
    let name = match entry.get("Name") {
        Some(name) => name.to_ascii_lowercase(),
        None if auto_detect.is_some() && nodes.is_none() && entry.words.len() == 1 => return Ok(None),
        None if auto_detect.is_some() => "gpu".into(),
        None => return Err(entry.error("neither Name= nor AutoDetect=")),
    };
    let files = hosts("File", entry.get("File").or_else(|| entry.get("Files")))?.unwrap_or_default();
    let multiple_files = hosts("MultipleFiles", entry.get("MultipleFiles"))?.unwrap_or_default();
    let (cores, cores_are_cpus) = cores(entry)?;
    budget.take(entry, cores.as_ref().map_or(0, Vec::len))?;
    let links = entry.get("Links").or_else(|| entry.get("Link")).map(|t| links(entry, t)).transpose()?;
    let count = entry.get("Count").map(|t| count(entry, t)).transpose()?;
    let kind = entry.get("Type").map(str::to_owned);
    let (file, line) = (entry.file.clone(), entry.line);
    let line = GresLine {
        file,
        line,
        nodes,
        name,
        kind,
        files,
        multiple_files,
        cores,
        cores_are_cpus,
        links,
        count,
        auto_detect,
    };
    if line.name == "gpu" && line.devices() > MAX_GPUS {
        return Err(entry.error(format!("{} GPUs on a node: more than {MAX_GPUS}", line.devices())));
    }
    Ok(Some(line))
}

/// `Cores=` or `CPUs=`, and whether it was the latter.
fn cores(entry: &Entry) -> Result<(Option<Vec<u32>>, bool), ConfError> {
    let list = |key: &str, t: &str| index_list::parse(t).map_err(|e| entry.error(format!("{key}: {e}")));
    match (entry.get("Cores"), entry.get("CPUs")) {
        (Some(_), Some(_)) => Err(entry.error("Cores= and CPUs= on one line")),
        (Some(cores), None) => Ok((Some(list("Cores", cores)?), false)),
        (None, Some(cpus)) => Ok((Some(list("CPUs", cpus)?), true)),
        (None, None) => Ok((None, false)),
    }
}

/// `Links=`: as in Slurm, at most one -1 (the GPU itself), and no number below -2.
fn links(entry: &Entry, text: &str) -> Result<Vec<i64>, ConfError> {
    let bad = |why: String| entry.error(format!("Links={}: {why}", short(text)));
    let number = |t: &str| {
        let n = t.trim().parse::<i64>().ok().filter(|n| (-2..1024).contains(n));
        n.ok_or_else(|| bad(format!("{:?} is no number from -2 to 1023", short(t))))
    };
    let all: Vec<i64> = text.split(',').take(MAX_GPUS + 1).map(number).collect::<Result<_, _>>()?;
    if all.len() > MAX_GPUS {
        return Err(bad(format!("more than {MAX_GPUS} numbers")));
    }
    match all.iter().filter(|n| **n == -1).count() {
        0 | 1 => Ok(all),
        n => Err(bad(format!("-1 stands for the GPU itself, and is there {n} times"))),
    }
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

impl GresLine {
    /// How many devices the line gives to each of its nodes. Without `File=` it counts by `Count=`, 1 if that is not
    /// there either (a line of AutoDetect alone names none).
    fn devices(&self) -> usize {
        match (self.files.len(), self.multiple_files.is_empty()) {
            (0, true) => {
                let none = if self.auto_detect.is_some() && self.kind.is_none() { 0 } else { 1 };
                usize::try_from(self.count.unwrap_or(none)).unwrap_or(usize::MAX)
            }
            (0, false) => 1,
            (files, _) => files,
        }
    }

    /// The first `most` of its devices, added to `all`.
    fn add_to(&self, all: &mut Vec<GresDevice>, most: usize, kind: Option<&String>) {
        let first = if self.files.is_empty() { &self.multiple_files } else { &self.files };
        for i in 0..self.devices().min(most).min(MAX_GPUS) {
            all.push(GresDevice {
                index: u32::try_from(all.len()).unwrap_or(u32::MAX),
                file: first.get(i).cloned(),
                kind: kind.cloned(),
                cores: self.cores.clone(),
                cores_are_cpus: self.cores_are_cpus,
                links: self.links.clone(),
                line: self.line,
            });
        }
    }
}

impl GresConf {
    fn push(&mut self, line: GresLine) {
        let at = self.lines.len();
        match &line.nodes {
            None => self.for_all.push(at),
            Some(nodes) => {
                for node in nodes {
                    let lines = self.by_node.entry(node.clone()).or_default();
                    // A node that the line names twice has it once.
                    if lines.last() != Some(&at) {
                        lines.push(at);
                    }
                }
            }
        }
        self.lines.push(line);
    }

    /// The lines of one GRES that hold for a node, in the order of the file.
    fn lines_of<'a>(&'a self, node: &NodeName, name: &'a str) -> impl Iterator<Item = &'a GresLine> {
        let own = self.by_node.get(node).into_iter().flatten();
        let mut all: Vec<usize> = self.for_all.iter().chain(own).copied().collect();
        all.sort_unstable();
        all.into_iter().filter_map(|i| self.lines.get(i)).filter(move |l| l.name == name)
    }

    /// The GPUs of a node, numbered in the order of the file. These are Slurm's indexes where `Gres=` in slurm.conf
    /// names the types in the same order (or none), and AutoDetect is off; see [`GresConf::merged`].
    pub fn gpus(&self, node: &NodeName) -> Vec<GresDevice> {
        let mut all = vec![];
        for line in self.lines_of(node, "gpu") {
            line.add_to(&mut all, usize::MAX, line.kind.as_ref());
        }
        all
    }

    /// The GPUs of a node with Slurm's indexes, where AutoDetect is off: `gres` is the node's `Gres=` of slurm.conf.
    /// Slurm takes them type by type in the order of slurm.conf, and within a type in that of gres.conf, and leaves
    /// out what slurm.conf does not count (`_merge_config` in src/common/gres.c). With AutoDetect the order is that of
    /// the driver instead.
    pub fn merged(&self, node: &NodeName, gres: &str) -> Vec<GresDevice> {
        let mut lines: Vec<&GresLine> = self.lines_of(node, "gpu").filter(|l| l.devices() > 0).collect();
        let wanted = gres::gpus(gres);
        let typed = wanted.iter().any(|w| w.kind.is_some());
        let mut all = vec![];
        for want in wanted.iter().filter(|w| w.kind.is_some() == typed) {
            let mut left = usize::try_from(want.count).unwrap_or(usize::MAX).min(MAX_GPUS);
            let of_type = |l: &GresLine| match (&want.kind, &l.kind) {
                (Some(want), Some(kind)) => want.eq_ignore_ascii_case(kind),
                (want, _) => want.is_none(),
            };
            lines.retain(|line| {
                let taken = left > 0 && of_type(line);
                if taken {
                    line.add_to(&mut all, left, want.kind.as_ref());
                    left = left.saturating_sub(line.devices());
                }
                !taken
            });
            for _ in 0..left {
                let (index, kind) = (u32::try_from(all.len()).unwrap_or(u32::MAX), want.kind.clone());
                let (file, cores, links) = (None, None, None);
                all.push(GresDevice { index, file, kind, cores, cores_are_cpus: false, links, line: 0 });
            }
        }
        all
    }

    /// All nodes that lines name; lines for all nodes name none.
    pub fn nodes(&self) -> BTreeSet<&NodeName> {
        self.by_node.keys().collect()
    }

    /// GPUs of all nodes that are named, or of one node where no line names any.
    pub fn total(&self) -> usize {
        let devices = |lines: &[usize]| -> usize {
            lines.iter().filter_map(|i| self.lines.get(*i)).filter(|l| l.name == "gpu").map(GresLine::devices).sum()
        };
        let of_all = devices(&self.for_all);
        match self.by_node.len() {
            0 => of_all,
            nodes => of_all * nodes + self.by_node.values().map(|l| devices(l)).sum::<usize>(),
        }
    }

    /// Shards of each GPU of a node, where they are given (`Name=shard Count=`): Slurm spreads them evenly.
    pub fn shards_per_gpu(&self, node: &NodeName) -> Option<u64> {
        let shards = self.lines_of(node, "shard").filter_map(|l| l.count).fold(0, u64::saturating_add);
        let gpus: usize = self.lines_of(node, "gpu").map(GresLine::devices).sum();
        let gpus = u64::try_from(gpus).ok().filter(|n| *n > 0)?;
        (shards > 0).then_some(shards / gpus)
    }

    /// The AutoDetect that holds for a node.
    pub fn auto_detect_of<'a>(&'a self, node: &NodeName) -> Option<&'a str> {
        let own = self.lines_of(node, "gpu").filter_map(|l| l.auto_detect.as_deref()).last();
        own.or(self.auto_detect.as_deref()).filter(|a| !a.eq_ignore_ascii_case("off"))
    }
}
