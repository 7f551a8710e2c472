//! `./dev demo`: one elastic PyTorch training in a lab of 4 nodes with 8 simulated GPUs. It grows, gives its GPUs to a
//! rigid job, grows again and ends with the accuracy of the same training at a fixed size. What happens is printed with
//! Pliant's reasons and drawn as an SVG. Exits with 0 only if all of that was really seen.
#![forbid(unsafe_code)]

mod log;
mod picture;
mod play;
mod record;
mod watch;

use anyhow::{Context, Result};
use clap::Parser;
use pliant_lab::Lab;
use record::Record;
use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// An elastic training on a private Slurm with simulated GPUs, shown from its start to its result
#[derive(Debug, Parser)]
#[command(name = "demo")]
struct Arguments {
    /// Where the picture goes [default: target/demo/timeline.svg]
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let file = arguments.picture.unwrap_or_else(|| pliant_tests::root().join("target/demo/timeline.svg"));
    match run(&file) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("demo: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(file: &Path) -> Result<()> {
    let started = Instant::now();
    let lab = Lab::builder().nodes(4).gpus(8).poll_interval(1).start()?;
    println!(
        "A Slurm of 4 nodes with 8 simulated GPUs each is up in {} after {:.1} s.",
        lab.dir().display(),
        started.elapsed().as_secs_f64()
    );
    let record = Record::new();
    let result = play::play(&lab, &record);
    // Of a run that failed the picture shows how far it came.
    let drawn = write(file, &picture::draw(&record.history(), result.as_ref().ok()));
    let down = lab.down();
    let outcome = result?;
    drawn?;
    down?;
    println!("\n{outcome}");
    println!("Took {:.0} s.", started.elapsed().as_secs_f64());
    let shown = fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
    println!("Picture: {}", shown.display());
    outcome.judge()
}

/// Writes the picture; it belongs to whom the checkout belongs to, also where `./dev` has used sudo.
fn write(file: &Path, text: &str) -> Result<()> {
    let named = || file.display().to_string();
    let dir = file.parent().unwrap_or(Path::new("."));
    let fresh = !dir.exists();
    fs::create_dir_all(dir).with_context(named)?;
    fs::write(file, text).with_context(named)?;
    if let Ok(owner) = fs::metadata(pliant_tests::root()) {
        let (uid, gid) = (Some(owner.uid()), Some(owner.gid()));
        for path in [file, dir].into_iter().take(1 + usize::from(fresh)) {
            let _ = chown(path, uid, gid); // a nicety: where it fails the file is root's
        }
    }
    Ok(())
}
