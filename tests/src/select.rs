//! The select plugin seen from outside: the event ring, boards written by a test, and Slurm's own counters.

use anyhow::{Context, Result, bail};
use pliant_lab::{Lab, User};
use pliant_model::JobId;
use pliant_protocol::board::{self, Board, Event, Outcome, Place, Plan, Read, Record, RingReader};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Milliseconds since the Unix epoch.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Microseconds since the Unix epoch, to the fraction.
pub fn now_us() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64() * 1e6
}

/// The event ring of a lab, from now on.
#[derive(Debug)]
pub struct Events {
    reader: RingReader,
    path: PathBuf,
    /// All that was read so far.
    pub all: Vec<Record>,
}

impl Events {
    /// Follows the ring of a lab from its present end.
    pub fn of(lab: &Lab) -> Result<Events> {
        let path = lab.spec().ring();
        let file = File::open(&path).with_context(|| path.display().to_string())?;
        Ok(Events { reader: RingReader::open(file)?, path, all: vec![] })
    }

    /// Reads what has come; a ring that was begun anew is followed from its beginning.
    pub fn read(&mut self) -> Result<&[Record]> {
        loop {
            match self.reader.read() {
                Read::Record(record) => self.all.push(record),
                Read::Gap(lost) => bail!("{lost} events lost"),
                Read::Nothing => return Ok(&self.all),
                Read::Anew => self.reader = RingReader::open(File::open(&self.path)?)?,
            }
        }
    }

    /// Waits for an event that `pick` takes.
    pub fn wait<T>(&mut self, what: &str, mut pick: impl FnMut(&Record) -> Option<T>) -> Result<T> {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(found) = self.read()?.iter().find_map(&mut pick) {
                return Ok(found);
            }
            if Instant::now() > end {
                bail!("no event within 60 s: {what}; there were {:?}", self.all);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits for the start of a job: GPUs by node.
    pub fn started(&mut self, job: JobId) -> Result<BTreeMap<String, Vec<u32>>> {
        self.wait(&format!("job {job} starts"), |r| match &r.event {
            Event::Start { job: id, nodes, gpus, .. } if *id == job.0 => {
                let names = pliant_model::hostlist::expand(nodes).ok()?;
                Some(
                    names
                        .into_iter()
                        .map(|n| n.0)
                        .zip(gpus.iter().map(|g| pliant_model::gres::gpu_indexes(g)))
                        .collect(),
                )
            }
            _ => None,
        })
    }

    /// Waits for the start of a job: what became of its plan.
    pub fn outcome(&mut self, job: JobId) -> Result<Option<Outcome>> {
        self.started(job)?;
        let of = |r: &Record| match &r.event {
            Event::Test { job: id, outcome, .. } | Event::Begin { job: id, outcome } if *id == job.0 => outcome.clone(),
            _ => None,
        };
        Ok(self.all.iter().rev().find_map(of))
    }
}

/// Writes plans by its own hand: pliantd must not run.
#[derive(Debug)]
pub struct Hand {
    path: PathBuf,
    /// The file, for whoever wants to break it.
    pub file: File,
    nodes: Vec<String>,
    generation: u64,
}

impl Hand {
    /// Takes over the board of a lab.
    pub fn of(lab: &Lab) -> Result<Hand> {
        let path = lab.spec().board();
        let _ = fs::remove_file(&path);
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644))?;
        let pliant = User::get("pliant")?;
        chown(&path, Some(pliant.uid), Some(pliant.gid))?;
        let nodes = lab.nodes().into_iter().chain(["gone".to_owned()]).collect();
        Ok(Hand { path, file, nodes, generation: now_ms() })
    }

    /// Where it lies.
    pub fn path(&self) -> &PathBuf {
        &self.path
    }

    /// Publishes plans that count for a minute.
    pub fn write(&mut self, plans: Vec<Plan>) -> Result<()> {
        let board = Board { nodes: self.nodes.clone(), plans };
        self.generation += 1;
        board::write(&self.file, self.generation, now_ms(), now_ms() + 60_000, &board.encode())?;
        Ok(())
    }

    /// A place on nodes by number (beyond the last: one that is not there).
    pub fn place(parts: &[(u32, &[u32])]) -> Place {
        parts.iter().map(|(n, gpus)| (*n, gpus.iter().fold(0, |set, g| set | 1u64 << g))).collect()
    }
}

/// What Slurm counts as used on its nodes: GRES in use and allocated CPUs, by node.
pub fn in_use(lab: &Lab) -> Result<BTreeMap<String, String>> {
    let text = lab.run("root", &["scontrol", "-d", "-o", "show", "nodes"])?;
    let word = |line: &str, key: &str| {
        line.split_whitespace().find_map(|w| w.strip_prefix(key)).unwrap_or_default().to_owned()
    };
    let of = |line: &str| {
        let used = format!("{} {}", word(line, "GresUsed="), word(line, "CPUAlloc="));
        (word(line, "NodeName="), used)
    };
    Ok(text.lines().filter(|l| l.contains("NodeName=")).map(of).collect())
}

/// Waits until nothing is in use on any node, in Slurm's own counters.
pub fn all_free(lab: &Lab) -> Result<()> {
    lab.wait_for(Duration::from_secs(60), "all counters are back at 0", || {
        let idle = |used: &String| pliant_model::gres::gpu_total(used) == 0 && used.ends_with(" 0");
        in_use(lab).is_ok_and(|all| all.values().all(idle))
    })
}

/// File offset of an exported symbol of a library; panics where it has none.
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a library that was just built")]
pub fn symbol(file: &std::path::Path, bytes: &[u8], name: &str) -> usize {
    let nm = std::process::Command::new("nm").args(["-D", "--defined-only"]).arg(file).output().unwrap();
    let text = String::from_utf8(nm.stdout).unwrap();
    let line = text.lines().find(|l| l.ends_with(&format!(" {name}"))).unwrap();
    let address = usize::from_str_radix(line.split(' ').next().unwrap(), 16).unwrap();
    let word = |at: usize| usize::try_from(u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())).unwrap();
    let half = |at: usize| usize::from(u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap()));
    let (table, size, count) = (word(32), half(54), half(56)); // of the ELF64 header: program headers
    let segments = (0..count).map(|i| table + i * size);
    let holds = |at: &usize| word(at + 16) <= address && address < word(at + 16) + word(at + 32);
    let segment = segments.filter(|at| bytes[*at] == 1).find(holds).unwrap();
    address - word(segment + 16) + word(segment + 8)
}
