//! `nvidia-smi topo -m` of all driver versions, and `nvidia-smi -L`.

use super::{CaptureError, MAX_GPUS};
use crate::conf::index_list;
use crate::topology::{Gpu, Link, LinkKind, Nic, NodeTopology, Path, Source};
use std::collections::{BTreeMap, HashMap};

/// The most columns of devices.
const MAX_COLUMNS: usize = 512;
/// The most bonded NVLinks that a cell may name.
const MAX_BOND: u32 = 64;

/// A GPU of `nvidia-smi -L`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// NVML's index.
    pub index: u32,
    /// Product name.
    pub name: String,
    /// UUID.
    pub uuid: String,
    /// MIG instances: profile and UUID.
    pub instances: Vec<(String, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cell {
    Own,
    NvLink(u32),
    Pcie(Path),
    /// Of the matrix of peer access.
    Peer(bool),
    PeerUnknown,
}

fn cell(word: &str) -> Option<Cell> {
    Some(match word {
        "X" => Cell::Own,
        "OK" => Cell::Peer(true),
        "CNS" | "GNS" | "TNS" | "NS" | "DR" => Cell::Peer(false),
        "U" => Cell::PeerUnknown,
        "PSB" => Cell::Pcie(Path::Internal),
        _ => match word.strip_prefix("NV").and_then(|n| n.parse::<u32>().ok()) {
            Some(n) if (1..=MAX_BOND).contains(&n) => Cell::NvLink(n),
            Some(_) => return None,
            None => Cell::Pcie(Path::parse(word)?),
        },
    })
}

/// `GPU12` gives 12.
fn gpu_number(word: &str) -> Option<u32> {
    let digits = word.strip_prefix("GPU")?;
    (!digits.is_empty() && digits.len() <= 3 && digits.bytes().all(|b| b.is_ascii_digit()))
        .then(|| digits.parse().ok())?
}

const CPU: &str = "CPU-Affinity";
const NUMA: &str = "NUMA-Affinity";
const GPU_NUMA: &str = "GPU-NUMA-ID";

/// The words of a line; titles of more than one word count as one.
fn words(line: &str) -> Vec<String> {
    let line = line.replace("CPU Affinity", CPU).replace("NUMA Affinity", NUMA).replace("GPU NUMA ID", GPU_NUMA);
    line.split_whitespace().map(str::to_owned).collect()
}

/// A header: labels of devices and titles, the first a GPU, and no cell.
fn is_header(words: &[String]) -> bool {
    let gpus = words.iter().filter(|w| gpu_number(w).is_some()).count();
    let first = words.first().is_some_and(|w| gpu_number(w).is_some());
    first && (gpus > 1 || words.iter().any(|w| w == CPU)) && !words.iter().any(|w| cell(w).is_some())
}

/// Whether there is a matrix in a text.
pub(super) fn has_matrix(text: &str) -> bool {
    text.lines().any(|l| is_header(&words(l)))
}

/// One matrix as it stands: rows of cells by label.
struct Matrix {
    /// Line of its header.
    line: usize,
    devices: Vec<String>,
    titles: Vec<String>,
    /// Label, line, cells of the devices, what follows.
    rows: BTreeMap<String, (usize, Vec<Cell>, Vec<String>)>,
}

/// Reads `nvidia-smi topo -m`. Text around the matrix is left out; a second matrix of peer access (`topo -p2p`) tells
/// whether peers reach each other, and never replaces the first.
///
/// # Errors
/// With the line and the reason.
pub fn topo(text: &str) -> Result<NodeTopology, CaptureError> {
    let (mut links, mut peers, mut warnings) = (None, None, vec![]);
    for matrix in matrices(text)? {
        let peer = |c: &Cell| matches!(c, Cell::Peer(_) | Cell::PeerUnknown);
        let of_peers = matrix.rows.values().flat_map(|r| &r.1).any(peer);
        let place = if of_peers { &mut peers } else { &mut links };
        match place {
            None => *place = Some(matrix),
            Some(_) => warnings.push(format!("line {}: a further matrix is left out", matrix.line)),
        }
    }
    let Some(links) = links else {
        return Err(CaptureError::new(0, "no matrix of `nvidia-smi topo -m`"));
    };
    let mut topology = build(&links, warnings)?;
    name_nics(text, &mut topology);
    if let Some(peers) = peers {
        add_peers(&mut topology, &peers)?;
    }
    Ok(topology)
}

fn matrices(text: &str) -> Result<Vec<Matrix>, CaptureError> {
    let mut all: Vec<Matrix> = vec![];
    for (number, line) in text.lines().enumerate().map(|(i, l)| (i + 1, l)) {
        let words = words(line);
        if is_header(&words) {
            let (titles, devices): (Vec<String>, Vec<String>) =
                words.into_iter().partition(|w| [CPU, NUMA, GPU_NUMA].contains(&w.as_str()));
            let gpus = devices.iter().filter(|d| gpu_number(d).is_some()).count();
            if gpus > MAX_GPUS || devices.len() > MAX_COLUMNS {
                return Err(CaptureError::new(number, format!("{gpus} GPUs in {} columns: too many", devices.len())));
            }
            let mut sorted = devices.clone();
            sorted.sort_unstable();
            if let Some(twice) = sorted.windows(2).find(|w| w.first() == w.last()) {
                return Err(CaptureError::new(number, format!("two columns {}", twice.concat())));
            }
            all.push(Matrix { line: number, devices, titles, rows: BTreeMap::new() });
        } else if let (Some(matrix), Some((label, rest))) = (all.last_mut(), words.split_first()) {
            matrix.row(number, label, rest)?;
        }
    }
    Ok(all)
}

impl Matrix {
    /// Takes a line if it is a row of this matrix.
    fn row(&mut self, line: usize, label: &str, rest: &[String]) -> Result<(), CaptureError> {
        let Some(own) = self.devices.iter().position(|d| d == label) else {
            return match gpu_number(label).filter(|_| rest.iter().any(|w| w == "X")) {
                Some(_) => Err(CaptureError::new(line, format!("row {label} has no column in line {}", self.line))),
                None => Ok(()),
            };
        };
        if rest.first().is_some_and(|w| w.starts_with(':')) || label.ends_with(':') {
            return Ok(()); // a legend
        }
        let cells: Vec<Cell> = rest.iter().map_while(|w| cell(w)).take(self.devices.len()).collect();
        let is_gpu = gpu_number(label).is_some();
        if !is_gpu && cells.get(own) != Some(&Cell::Own) {
            return Ok(()); // rows of NICs may end early; the columns of the GPUs' rows say the same
        }
        if is_gpu && (cells.len() != self.devices.len() || cells.get(own) != Some(&Cell::Own)) {
            let odd = rest.get(cells.len()).map_or("nothing", String::as_str);
            let reason = format!(
                "row {label} has {} cells and then {odd:?}, its header has {} devices; X must stand under {label}",
                cells.len(),
                self.devices.len()
            );
            return Err(CaptureError::new(line, reason));
        }
        let after = rest.get(cells.len()..).unwrap_or_default().to_vec();
        match self.rows.insert(label.to_owned(), (line, cells, after)) {
            Some((first, ..)) => Err(CaptureError::new(line, format!("row {label} is there already, at line {first}"))),
            None => Ok(()),
        }
    }

    fn cell(&self, row: &str, column: &str) -> Option<(usize, Cell)> {
        let (line, cells, _) = self.rows.get(row)?;
        let at = self.devices.iter().position(|d| d == column)?;
        Some((*line, *cells.get(at)?))
    }

    /// The cell of a pair, which both rows must agree on.
    fn pair(&self, a: &str, b: &str) -> Result<Option<Cell>, CaptureError> {
        match (self.cell(a, b), self.cell(b, a)) {
            (Some((_, x)), Some((line, y))) if x != y => {
                Err(CaptureError::new(line, format!("row {b} says {y:?} for {a}, row {a} says {x:?} for {b}")))
            }
            (Some((_, x)), _) | (None, Some((_, x))) => Ok(Some(x)),
            (None, None) => Ok(None),
        }
    }
}

fn build(matrix: &Matrix, warnings: Vec<String>) -> Result<NodeTopology, CaptureError> {
    let names: Vec<&String> = matrix.devices.iter().filter(|d| gpu_number(d).is_some()).collect();
    let mut warnings = warnings;
    let missing: Vec<&str> = names.iter().filter(|n| !matrix.rows.contains_key(**n)).map(|n| n.as_str()).collect();
    if missing.len() == names.len() {
        return Err(CaptureError::new(matrix.line, "a header without rows"));
    }
    if !missing.is_empty() {
        warnings.push(format!("rows are missing: {}", missing.join(", ")));
    }
    let mut gpus = vec![];
    for name in &names {
        gpus.push(gpu(matrix, name, &mut warnings)?);
    }
    let mut topology = NodeTopology::unlinked(Source::Capture, gpus);
    let mut unknown = vec![];
    for (a, x) in names.iter().enumerate() {
        for (b, y) in names.iter().enumerate().skip(a + 1) {
            match matrix.pair(x, y)? {
                Some(Cell::NvLink(n)) => topology.set_link(a, b, Link::nvlink(n, None)),
                Some(Cell::Pcie(path)) => topology.set_link(a, b, Link::pcie(path)),
                Some(_) => return Err(CaptureError::new(matrix.line, format!("no link between {x} and {y}"))),
                None => unknown.push((a, b)),
            }
        }
    }
    complete(&mut topology, &unknown);
    topology.warnings = warnings;
    topology.detect_switch();
    for nic in matrix.devices.iter().filter(|d| gpu_number(d).is_none()) {
        let path = |gpu: &&String| match matrix.pair(gpu, nic) {
            Ok(Some(Cell::Pcie(path))) => Some(path),
            _ => None,
        };
        let paths = names.iter().map(path).collect();
        topology.nics.push(Nic { name: nic.clone(), device: nic.clone(), paths });
    }
    Ok(topology)
}

/// Pairs of which both rows are missing. Where every pair that is known has so many links that only a switch can be
/// between them, the others are behind it too; else nothing is known of them.
fn complete(topology: &mut NodeTopology, unknown: &[(usize, usize)]) {
    let n = topology.gpus.len();
    let known = (0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b))).filter(|p| !unknown.contains(p));
    let counts: Vec<u32> = known.map(|(a, b)| topology.link(a, b)).map(|l| l.count).collect();
    let Some(first) = counts.first().copied() else { return };
    let peers = u32::try_from(n.saturating_sub(1)).unwrap_or(0);
    if first > 0 && counts.iter().all(|c| *c == first) && first.saturating_mul(peers) > 18 {
        for (a, b) in unknown {
            topology.set_link(*a, *b, Link { kind: LinkKind::NvLink, ..Link::nvlink(first, None) });
        }
    }
}

/// A GPU with what stands behind its cells.
fn gpu(matrix: &Matrix, name: &str, warnings: &mut Vec<String>) -> Result<Gpu, CaptureError> {
    let mut gpu = Gpu { name: name.to_owned(), ..Gpu::default() };
    let Some((line, _, after)) = matrix.rows.get(name) else { return Ok(gpu) };
    let known = |t: &&String| !matches!(t.as_str(), "N/A" | "-");
    if after.is_empty() || matrix.titles.is_empty() {
        return Ok(gpu);
    }
    if after.len() > matrix.titles.len() {
        let reason =
            format!("row {name} has {} values behind its cells, its header {}", after.len(), matrix.titles.len());
        return Err(CaptureError::new(*line, reason));
    }
    let value = |title: &str| {
        let at = matrix.titles.iter().position(|t| t == title)?;
        after.get(at).filter(known)
    };
    if after.len() < matrix.titles.len() {
        // Which one is missing cannot be told by blanks; CPUs are known by their form.
        warnings.push(format!("line {line}: row {name} has fewer values than its header: only its CPUs are taken"));
        let list = after.first().filter(|t| t.contains(['-', ',']));
        gpu.cpus = list.and_then(|t| index_list::parse(t).ok()).unwrap_or_default();
        return Ok(gpu);
    }
    if let Some(cpus) = value(CPU) {
        let reason = |e: index_list::IndexListError| CaptureError::new(*line, format!("CPU Affinity of {name}: {e}"));
        gpu.cpus = index_list::parse(cpus).map_err(reason)?;
    }
    if let Some(numa) = value(NUMA) {
        // More than one (`0-1`) is near none in particular.
        let all =
            index_list::parse(numa).map_err(|e| CaptureError::new(*line, format!("NUMA Affinity of {name}: {e}")))?;
        gpu.numa = all.first().copied().filter(|_| all.len() == 1);
    }
    Ok(gpu)
}

/// The devices behind `NIC0`, …, by the NIC legend.
fn name_nics(text: &str, topology: &mut NodeTopology) {
    let legend: HashMap<&str, &str> = text
        .lines()
        .filter_map(|l| l.trim().split_once(':'))
        .filter(|(name, device)| name.starts_with("NIC") && device.split_whitespace().count() == 1)
        .map(|(name, device)| (name, device.trim()))
        .collect();
    for nic in &mut topology.nics {
        if let Some(device) = legend.get(nic.name.as_str()) {
            nic.device = (*device).to_owned();
        }
    }
}

fn add_peers(topology: &mut NodeTopology, peers: &Matrix) -> Result<(), CaptureError> {
    let names: Vec<String> = topology.gpus.iter().map(|g| g.name.clone()).collect();
    for (a, x) in names.iter().enumerate() {
        for (b, y) in names.iter().enumerate().skip(a + 1) {
            if let Some(Cell::Peer(access)) = peers.pair(x, y)? {
                let link = topology.link(a, b);
                topology.set_link(a, b, Link { peer_access: Some(access), ..link });
            }
        }
    }
    Ok(())
}

/// Reads `nvidia-smi -L`; other lines are left out.
///
/// # Errors
/// A line that begins as one of these and does not go on so, a MIG instance before any GPU.
pub fn list(text: &str) -> Result<Vec<Listed>, CaptureError> {
    let mut all: Vec<Listed> = vec![];
    for (number, line) in text.lines().enumerate().map(|(i, l)| (i + 1, l.trim())) {
        let uuid = || line.rsplit_once("(UUID: ").and_then(|(head, u)| Some((head.trim(), u.strip_suffix(')')?)));
        let damaged = || CaptureError::new(number, "expected `… (UUID: …)`");
        if let Some((index, rest)) = line.strip_prefix("GPU ").and_then(|r| r.split_once(':')) {
            let Ok(index) = index.parse() else { continue };
            if !rest.contains("(UUID") {
                continue; // `GPU 0: NAME` heads a block of other commands
            }
            let (head, uuid) = uuid().ok_or_else(damaged)?;
            let name = head.split_once(':').map_or("", |(_, n)| n.trim()).to_owned();
            all.push(Listed { index, name, uuid: uuid.to_owned(), instances: vec![] });
        } else if let Some(rest) = line.strip_prefix("MIG ") {
            let Some(profile) = rest.split_whitespace().next().filter(|_| rest.contains("Device")) else { continue };
            let (_, uuid) = uuid().ok_or_else(damaged)?;
            let gpu = all.last_mut().ok_or_else(|| CaptureError::new(number, "a MIG instance before any GPU"))?;
            gpu.instances.push((profile.to_owned(), uuid.to_owned()));
        }
        if all.len() > MAX_GPUS {
            return Err(CaptureError::new(number, format!("more than {MAX_GPUS} GPUs")));
        }
    }
    Ok(all)
}
