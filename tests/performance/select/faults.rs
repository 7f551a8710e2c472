//! What may be wrong with pliantd and its board while jobs start.

use anyhow::{Context, Result};
use pliant_lab::{Lab, Signal};
use pliant_protocol::board::{Key, Plan};
use pliant_tests::select::{Hand, now_ms};
use std::any::Any;
use std::os::unix::fs::FileExt as _;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Something that is wrong as long as what `begin` gives is held.
pub struct Fault {
    pub name: &'static str,
    pub begin: fn(&Lab) -> Result<Box<dyn Any>>,
}

/// The last leaves pliantd without a place for its board.
pub const FAULTS: &[Fault] = &[
    Fault { name: "all well", begin: |_| Ok(Box::new(())) },
    Fault { name: "pliantd stopped by SIGSTOP", begin: stopped },
    Fault { name: "board deleted", begin: deleted },
    Fault { name: "board truncated while in use", begin: |lab| again_and_again(lab, truncate) },
    Fault { name: "board torn", begin: |lab| again_and_again(lab, tear) },
    Fault { name: "board of 1 GiB", begin: |lab| again_and_again(lab, |hand| hand.file.set_len(1 << 30)) },
    Fault { name: "tmpfs full", begin: full },
];

fn stopped(lab: &Lab) -> Result<Box<dyn Any>> {
    lab.signal("pliantd", Signal::STOP)?;
    Ok(Box::new(()))
}

/// From here on pliantd is gone.
fn deleted(lab: &Lab) -> Result<Box<dyn Any>> {
    lab.signal("pliantd", Signal::CONT)?;
    lab.kill("pliantd")?;
    std::fs::remove_file(lab.spec().board())?;
    Ok(Box::new(()))
}

/// Ends its thread when it is dropped.
struct Repeated(Arc<AtomicBool>, Option<std::thread::JoinHandle<()>>);

impl Drop for Repeated {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        if let Some(thread) = self.1.take() {
            let _ = thread.join();
        }
    }
}

/// A whole board, then what breaks it, a hundred times a second.
fn again_and_again(lab: &Lab, damage: fn(&mut Hand) -> std::io::Result<()>) -> Result<Box<dyn Any>> {
    let mut hand = Hand::of(lab)?;
    let until_ms = now_ms() + 3_600_000;
    let plans: Vec<Plan> = (1..500)
        .map(|id| Plan { key: Key::Job(id), hard: false, until_ms, places: vec![Hand::place(&[(id % 64, &[id % 8])])] })
        .collect();
    let done = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&done);
    let thread = std::thread::spawn(move || {
        while !told.load(Ordering::Relaxed) {
            let _ = hand.write(plans.clone());
            std::thread::sleep(Duration::from_millis(5));
            let _ = damage(&mut hand);
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    Ok(Box::new(Repeated(done, Some(thread))))
}

fn truncate(hand: &mut Hand) -> std::io::Result<()> {
    hand.file.set_len(100)
}

fn tear(hand: &mut Hand) -> std::io::Result<()> {
    hand.file.write_all_at(&[0xa5; 4096], 512)
}

/// A small tmpfs in the place of the lab's folder, with no byte left.
struct Mounted(std::path::PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// slurmctld begins with room for its ring; then the tmpfs fills up, and pliantd has nowhere to write a board.
fn full(lab: &Lab) -> Result<Box<dyn Any>> {
    let memory = lab.spec().memory();
    lab.stop("slurmctld")?;
    let at = memory.display();
    let script = format!(
        "mount -t tmpfs -o size=12m tmpfs {at} && mkdir -m 755 {at}/pliant && mkdir {at}/select && \
         chown pliant:pliant {at}/pliant && chown slurm:pliant {at}/select && chmod 2750 {at}/select"
    );
    let status = Command::new("sh").args(["-c", &script]).status().context("mount")?;
    anyhow::ensure!(status.success(), "no tmpfs at {at}");
    let mounted = Mounted(memory.clone());
    lab.start("slurmctld")?;
    super::throughput::prefer_slurmctld(lab)?;
    // `dd` ends with "no space left".
    Command::new("dd").args(["if=/dev/zero", &format!("of={at}/filler"), "bs=64k"]).output()?;
    lab.start("pliantd")?;
    lab.wait_for(Duration::from_secs(60), "the nodes are idle", || {
        let states = lab.run("root", &["sinfo", "-h", "-o", "%T"]).unwrap_or_default();
        !states.is_empty() && states.lines().all(|s| s == "idle")
    })?;
    Ok(Box::new(mounted))
}
