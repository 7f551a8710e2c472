//! The plan board: pliantd writes, the select plugin reads.
//!
//! A header of 64 bytes (generation, expiry, length and sum of the body) and a body. The body is written first: a
//! reader that meets the middle of a write finds a wrong sum and keeps the copy that it has.

use super::bytes::{Sum, put_text, text_at, u32_at, u64_at};
use super::file::{FileError, Trusted};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

/// The largest body that is read, in bytes.
pub const MAX_BOARD: usize = 4 << 20;
const HEADER: usize = 64;
const MAGIC: u64 = u64::from_le_bytes(*b"PLIANTPB");
const LAYOUT: u64 = 1;
/// Milliseconds between two attempts to open a board that is not there or not fresh.
const REOPEN_MS: u64 = 1000;
const HARD: u32 = 1;

/// How a request counts its GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Shape {
    /// `--gres`, `--gpus-per-node`.
    PerNode = 0,
    /// `--gpus`.
    PerJob = 1,
    /// `--gpus-per-task`.
    PerTask = 2,
    /// `--gpus-per-socket`.
    PerSocket = 3,
}

/// What a job asks for, as far as classes tell requests apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Signature<'a> {
    /// The partition that is tried.
    pub partition: &'a str,
    /// `--constraint`, as typed.
    pub features: &'a str,
    /// GPU type; empty: any.
    pub kind: &'a str,
    /// Owner.
    pub uid: u32,
    /// Least nodes.
    pub min_nodes: u32,
    /// Most nodes; 0: no limit.
    pub max_nodes: u32,
    /// How GPUs are counted.
    pub shape: Shape,
    /// How many.
    pub gpus: u32,
}

/// A class of requests: jobs that are not known yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Class {
    /// Partition; empty: any.
    pub partition: String,
    /// Constraint, as typed; empty: none.
    pub features: String,
    /// GPU type; empty: none named.
    pub kind: String,
    /// Owner; `None`: anybody.
    pub uid: Option<u32>,
    /// Least nodes.
    pub min_nodes: u32,
    /// Most nodes; 0: no limit, or as many as the least.
    pub max_nodes: u32,
    /// GPUs per node (`false`), or in all.
    pub in_all: bool,
    /// How many.
    pub gpus: u32,
}

/// A class in the plugin's copy.
struct ClassRef<'a> {
    partition: &'a str,
    features: &'a str,
    kind: &'a str,
    uid: Option<u32>,
    min_nodes: u32,
    max_nodes: u32,
    in_all: bool,
    gpus: u32,
}

impl Class {
    /// Whether a request is of this class.
    pub fn holds(&self, request: &Signature<'_>) -> bool {
        let (partition, features, kind) = (&*self.partition, &*self.features, &*self.kind);
        let Class { uid, min_nodes, max_nodes, in_all, gpus, .. } = *self;
        ClassRef { partition, features, kind, uid, min_nodes, max_nodes, in_all, gpus }.holds(request)
    }
}

impl ClassRef<'_> {
    fn holds(&self, s: &Signature<'_>) -> bool {
        let counted = match s.shape {
            Shape::PerNode => !self.in_all || s.min_nodes == 1 && s.max_nodes == 1,
            Shape::PerJob => self.in_all || s.min_nodes == 1 && s.max_nodes == 1,
            Shape::PerTask | Shape::PerSocket => false,
        };
        counted
            && s.gpus == self.gpus
            && (self.partition.is_empty() || self.partition == s.partition)
            && self.features == s.features
            && self.kind == s.kind
            && self.uid.is_none_or(|uid| uid == s.uid)
            && s.min_nodes == self.min_nodes
            && (self.max_nodes == 0 || s.max_nodes == self.max_nodes)
    }
}

/// Whom a plan is for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// A job.
    Job(u32),
    /// Jobs not known yet.
    Class(Class),
}

/// Nodes, and GPUs of each by Slurm index (bit i stands for index i).
pub type Place = Vec<(u32, u64)>;

/// A plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// For whom.
    pub key: Key,
    /// Whether the job waits rather than goes elsewhere.
    pub hard: bool,
    /// Until when, milliseconds since the Unix epoch.
    pub until_ms: u64,
    /// In order of preference; nodes by their position in the board's list.
    pub places: Vec<Place>,
}

/// A board before it is written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Board {
    /// Names of nodes.
    pub nodes: Vec<String>,
    /// Plans.
    pub plans: Vec<Plan>,
}

impl Board {
    /// The body: counts, the index of jobs (sorted), of classes and of node names, and what they point at. Plans that
    /// would make it larger than [`MAX_BOARD`] are left out, the last first.
    pub fn encode(&self) -> Vec<u8> {
        let mut jobs: Vec<(u32, &Plan)> = vec![];
        let mut classes: Vec<(&Class, &Plan)> = vec![];
        for plan in &self.plans {
            match &plan.key {
                Key::Job(id) => jobs.push((*id, plan)),
                Key::Class(class) => classes.push((class, plan)),
            }
        }
        jobs.sort_by_key(|(id, _)| *id);
        let size = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let index = 12 + jobs.len() * 8 + (classes.len() + self.nodes.len()) * 4;
        let (mut head, mut data) = (vec![], vec![]);
        for n in [jobs.len(), classes.len(), self.nodes.len()] {
            head.extend(size(n).to_le_bytes());
        }
        for (id, plan) in jobs {
            head.extend(id.to_le_bytes());
            head.extend(size(index + data.len()).to_le_bytes());
            put_plan(&mut data, plan);
        }
        for (class, plan) in classes {
            head.extend(size(index + data.len()).to_le_bytes());
            for text in [&class.partition, &class.features, &class.kind] {
                put_text(&mut data, text);
            }
            let uid = class.uid.unwrap_or(u32::MAX);
            for n in [uid, class.min_nodes, class.max_nodes, u32::from(class.in_all), class.gpus] {
                data.extend(n.to_le_bytes());
            }
            put_plan(&mut data, plan);
        }
        for name in &self.nodes {
            head.extend(size(index + data.len()).to_le_bytes());
            put_text(&mut data, name);
        }
        head.extend(data);
        head
    }
}

fn put_plan(out: &mut Vec<u8>, plan: &Plan) {
    let size = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    out.extend((if plan.hard { HARD } else { 0 }).to_le_bytes());
    out.extend(plan.until_ms.to_le_bytes());
    out.extend(size(plan.places.len()).to_le_bytes());
    for place in &plan.places {
        out.extend(size(place.len()).to_le_bytes());
        for (node, gpus) in place {
            out.extend(node.to_le_bytes());
            out.extend(gpus.to_le_bytes());
        }
    }
}

/// Writes a board: body, then header.
///
/// # Errors
/// The system's, and `InvalidInput` for a body above [`MAX_BOARD`].
pub fn write(file: &File, generation: u64, now_ms: u64, expires_ms: u64, body: &[u8]) -> io::Result<()> {
    if body.len() > MAX_BOARD {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    file.write_all_at(body, u64::try_from(HEADER).unwrap_or(64))?;
    file.write_all_at(&Header::of(generation, now_ms, expires_ms, body).encode(), 0)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    generation: u64,
    written_ms: u64,
    expires_ms: u64,
    length: u64,
    sum: u64,
}

impl Header {
    fn of(generation: u64, written_ms: u64, expires_ms: u64, body: &[u8]) -> Header {
        let mut sum = Sum::new(generation);
        sum.bytes(body);
        let length = u64::try_from(body.len()).unwrap_or(u64::MAX);
        Header { generation, written_ms, expires_ms, length, sum: sum.end() }
    }

    fn encode(&self) -> [u8; HEADER] {
        let fields = [MAGIC, LAYOUT, self.generation, self.written_ms, self.expires_ms, self.length, self.sum];
        let mut sum = Sum::new(MAGIC);
        fields.iter().for_each(|f| sum.word(*f));
        let mut out = [0; HEADER];
        for (place, field) in out.chunks_mut(8).zip(fields.iter().chain([&sum.end()])) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        out
    }

    fn decode(bytes: &[u8; HEADER]) -> Option<Header> {
        let field = |i: usize| u64_at(bytes, i * 8);
        let header = Header {
            generation: field(2)?,
            written_ms: field(3)?,
            expires_ms: field(4)?,
            length: field(5)?,
            sum: field(6)?,
        };
        (field(0)? == MAGIC && header.encode() == *bytes).then_some(header)
    }
}

/// The plugin's side: a file that is trusted, and a copy of its last whole content.
#[derive(Debug)]
pub struct BoardReader {
    trusted: Trusted,
    file: Option<File>,
    header: Option<Header>,
    body: Vec<u8>,
    /// Where the next body is read to.
    spare: Vec<u8>,
    /// When the file was looked at, and whether the copy counted then.
    looked_ms: u64,
    fresh: bool,
    /// Not opened again before.
    retry_ms: u64,
    /// Why there is no board, to be logged once.
    complaint: Option<String>,
}

impl BoardReader {
    /// Nothing is opened yet.
    pub fn new(trusted: Trusted) -> BoardReader {
        BoardReader {
            trusted,
            file: None,
            header: None,
            body: vec![],
            spare: vec![],
            looked_ms: 0,
            fresh: false,
            retry_ms: 0,
            complaint: None,
        }
    }

    /// Brings the copy up to date, at most once in a millisecond; whether there is a board that counts at `now_ms`.
    pub fn refresh(&mut self, now_ms: u64) -> bool {
        if self.looked_ms != now_ms {
            self.looked_ms = now_ms;
            self.fresh = self.look_again(now_ms);
        }
        self.fresh
    }

    fn look_again(&mut self, now_ms: u64) -> bool {
        let fresh = |h: &Header| h.expires_ms > now_ms && h.written_ms <= now_ms.saturating_add(60_000);
        match self.look() {
            Some(new) if self.header.is_some_and(|old| old == new) => {}
            Some(new) => self.copy(new),
            None => {}
        }
        if self.header.as_ref().is_some_and(fresh) {
            return true;
        }
        // Not there, not fresh or not readable: perhaps it is another file by now.
        if now_ms >= self.retry_ms {
            self.retry_ms = now_ms.saturating_add(REOPEN_MS);
            self.reopen();
            if let Some(new) = self.look() {
                self.copy(new);
            }
        }
        self.header.as_ref().is_some_and(fresh)
    }

    /// What is wrong with the file, once for each new complaint.
    pub fn complaint(&mut self) -> Option<String> {
        self.complaint.take()
    }

    fn look(&self) -> Option<Header> {
        let mut bytes = [0; HEADER];
        self.file.as_ref()?.read_exact_at(&mut bytes, 0).ok()?;
        Header::decode(&bytes)
    }

    /// Takes the body over, if it is whole; the old one counts as long as it is fresh.
    fn copy(&mut self, header: Header) {
        let Some(length) = usize::try_from(header.length).ok().filter(|n| *n <= MAX_BOARD) else { return };
        let Some(file) = &self.file else { return };
        let same = |h: Header| h.sum == header.sum && h.length == header.length && h.generation == header.generation;
        if self.header.is_some_and(same) {
            // Only the expiry has moved.
            self.header = Some(header);
            return;
        }
        self.spare.resize(length, 0);
        let read = file.read_exact_at(&mut self.spare, u64::try_from(HEADER).unwrap_or(64)).is_ok();
        if read && Header::of(header.generation, header.written_ms, header.expires_ms, &self.spare) == header {
            std::mem::swap(&mut self.body, &mut self.spare);
            self.header = Some(header);
        }
    }

    fn reopen(&mut self) {
        match self.trusted.open() {
            Ok(file) => {
                let same = |a: &File, b: &File| {
                    a.metadata()
                        .ok()
                        .zip(b.metadata().ok())
                        .is_some_and(|(a, b)| (a.dev(), a.ino()) == (b.dev(), b.ino()))
                };
                if self.file.as_ref().is_none_or(|old| !same(old, &file)) {
                    (self.file, self.header) = (Some(file), None);
                }
            }
            Err(FileError::Open { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(e) => {
                (self.file, self.header) = (None, None);
                self.complaint = Some(e.to_string());
            }
        }
    }

    /// The plan of a job.
    pub fn job(&self, id: u32) -> Option<PlanRef<'_>> {
        let count = usize::try_from(u32_at(&self.body, 0)?).ok()?;
        let key = |i: usize| u32_at(&self.body, 12 + i * 8);
        let (mut low, mut high) = (0, count);
        while low < high {
            let middle = low + (high - low) / 2;
            if key(middle)? < id { low = middle + 1 } else { high = middle }
        }
        (low < count && key(low)? == id).then(|| self.plan_at(u32_at(&self.body, 16 + low * 8)?)).flatten()
    }

    /// The plan of the first class that a request is of.
    pub fn class(&self, wanted: &Signature<'_>) -> Option<PlanRef<'_>> {
        let jobs = usize::try_from(u32_at(&self.body, 0)?).ok()?;
        let count = usize::try_from(u32_at(&self.body, 4)?).ok()?;
        // A body that says more than it holds ends where it ends.
        (0..count.min(self.body.len() / 4)).find_map(|i| {
            let at = usize::try_from(u32_at(&self.body, 12 + jobs * 8 + i * 4)?).ok()?;
            let (partition, at) = text_at(&self.body, at)?;
            let (features, at) = text_at(&self.body, at)?;
            let (kind, at) = text_at(&self.body, at)?;
            let n = |i: usize| u32_at(&self.body, at + i * 4);
            let class = ClassRef {
                partition,
                features,
                kind,
                uid: n(0).filter(|u| *u != u32::MAX),
                min_nodes: n(1)?,
                max_nodes: n(2)?,
                in_all: n(3)? != 0,
                gpus: n(4)?,
            };
            if class.holds(wanted) { self.plan_at(u32::try_from(at + 20).ok()?) } else { None }
        })
    }

    fn plan_at(&self, at: u32) -> Option<PlanRef<'_>> {
        let bytes = self.body.get(usize::try_from(at).ok()?..)?;
        Some(PlanRef {
            hard: u32_at(bytes, 0)? & HARD != 0,
            until_ms: u64_at(bytes, 4)?,
            places: u32_at(bytes, 12)?,
            bytes: bytes.get(16..)?,
        })
    }

    /// The name of a node of the board.
    pub fn node(&self, index: u32) -> Option<&str> {
        let n = |i: usize| usize::try_from(u32_at(&self.body, i * 4)?).ok();
        let (jobs, classes, nodes) = (n(0)?, n(1)?, n(2)?);
        let index = usize::try_from(index).ok().filter(|i| *i < nodes)?;
        let at = u32_at(&self.body, 12 + jobs * 8 + (classes + index) * 4)?;
        text_at(&self.body, usize::try_from(at).ok()?).map(|(name, _)| name)
    }
}

/// A plan in the plugin's copy.
#[derive(Clone, Copy, Debug)]
pub struct PlanRef<'a> {
    /// Whether the job waits rather than goes elsewhere.
    pub hard: bool,
    /// Until when.
    pub until_ms: u64,
    places: u32,
    bytes: &'a [u8],
}

impl<'a> PlanRef<'a> {
    /// Places in order of preference: node (position on the board) and GPUs of each.
    pub fn places(&self) -> impl Iterator<Item = PlaceRef<'a>> + 'a {
        let mut rest = self.bytes;
        (0..self.places).map_while(move |_| {
            let nodes = usize::try_from(u32_at(rest, 0)?).ok()?;
            let end = nodes.checked_mul(12)?.checked_add(4)?;
            let parts = rest.get(4..end)?;
            rest = rest.get(end..)?;
            Some(PlaceRef(parts))
        })
    }
}

/// A place in the plugin's copy.
#[derive(Clone, Copy, Debug)]
pub struct PlaceRef<'a>(&'a [u8]);

impl<'a> PlaceRef<'a> {
    /// How many nodes.
    pub fn len(&self) -> usize {
        self.0.len() / 12
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Node (position on the board) and GPUs by Slurm index.
    pub fn parts(&self) -> impl Iterator<Item = (u32, u64)> + 'a {
        self.0.chunks_exact(12).filter_map(|c| Some((u32_at(c, 0)?, u64_at(c, 4)?)))
    }
}

#[cfg(test)]
mod tests;
