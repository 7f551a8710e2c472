//! Ports that no other lab and no other program uses.

use std::fs::{self, File, OpenOptions};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::spec::Ports;

/// Below the range that Linux gives to outgoing connections (32768 and up).
const FIRST: u16 = 17_000;
const LAST: u16 = 32_000;
/// slurmctld, slurmdbd, pliantd, one spare.
const FIXED: u16 = 4;

fn registry() -> PathBuf {
    PathBuf::from("/tmp/.pliant-lab-ports")
}

/// Takes the machine-wide lock of all labs; it is released when the file is dropped.
pub(crate) fn machine_lock() -> Result<File> {
    let dir = registry();
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let path = dir.join("lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(file)
}

/// One reserved block and the lab that it belongs to.
struct Reservation {
    file: PathBuf,
    base: u16,
    len: u16,
    dir: PathBuf,
}

fn reservations() -> Vec<Reservation> {
    let Ok(entries) = fs::read_dir(registry()) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| {
            let file = entry.path();
            let name = entry.file_name().into_string().ok()?;
            let (base, len) = name.split_once('+')?;
            let dir = PathBuf::from(fs::read_to_string(&file).ok()?.trim());
            Some(Reservation { base: base.parse().ok()?, len: len.parse().ok()?, file, dir })
        })
        .collect()
}

/// Directories of the labs that hold ports, that is of all labs that are up.
pub fn labs() -> Vec<PathBuf> {
    reservations().into_iter().map(|r| r.dir).filter(|d| d.exists()).collect()
}

/// Reserves ports for a lab whose directory exists already. Blocks of labs whose directory is gone are dropped.
pub(crate) fn reserve(dir: &Path, nodes: u16) -> Result<Ports> {
    let _lock = machine_lock()?;
    let mut taken = Vec::new();
    for r in reservations() {
        if r.dir.exists() && r.dir != dir {
            taken.push((r.base, r.base + r.len));
        } else {
            let _ = fs::remove_file(&r.file);
        }
    }
    let len = FIXED + nodes;
    let mut base = FIRST;
    while base + len < LAST {
        let clash = taken.iter().find(|(from, to)| base < *to && *from < base + len);
        if let Some((_, to)) = clash {
            base = *to;
        } else if let Some(busy) = (base..base + len).find(|p| !is_free(*p)) {
            base = busy + 1;
        } else {
            let file = registry().join(format!("{base}+{len}"));
            fs::write(&file, dir.as_os_str().as_encoded_bytes())
                .with_context(|| format!("cannot write {}", file.display()))?;
            return Ok(Ports { slurmctld: base, slurmdbd: base + 1, pliantd: base + 2, slurmd: base + FIXED });
        }
    }
    bail!("no {len} free ports between {FIRST} and {LAST}: end other labs (`pliant-lab status`)")
}

/// Gives back the ports of a lab.
pub(crate) fn release(dir: &Path) {
    let Ok(_lock) = machine_lock() else { return };
    for r in reservations().into_iter().filter(|r| r.dir == dir) {
        let _ = fs::remove_file(r.file);
    }
}

fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok()
}
