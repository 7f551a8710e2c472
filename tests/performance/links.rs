//! Which GPUs jobs get, by Slurm release: ours beside stock. Every release but the host's own runs in its chroot.

use crate::placement::{Random, boxes};
use crate::report::Report;
use anyhow::{Context, Result, ensure};
use pliant_lab::{Lab, release};
use pliant_model::gres;
use pliant_model::topology::NodeTopology;
use pliant_policy::placement::{GpuSet, Tables};
use std::fmt::Write as _;
use std::process::Command;
use std::time::Duration;

/// Releases that have a select plugin of ours here, and the one that has not.
const STEERED: [&str; 2] = ["22.05", "24.11"];
const STOCK_ONLY: &str = "26.05";
/// Arrivals and departures on a box.
const EVENTS: u32 = 500;
/// Boxes of eight GPUs whose links differ: two DGX-1 of different wiring, one of PCIe pairs, one of two halves.
const BOXES: [&str; 4] = ["topo/01", "topo/31", "topo/10", "topo/17"];
const PAIRS: [[u32; 2]; 4] = [[0, 3], [1, 2], [4, 7], [5, 6]];

/// Runs the bench: here, and again in the chroot of each other release.
pub fn run(report: &mut Report) -> Result<()> {
    let inside = std::env::var("PLIANT_LAB_RELEASE").ok();
    let own = inside.clone().map_or_else(release::native, Ok)?;
    let steered = STEERED.contains(&own.as_str());
    pairs(report, &own, steered)?;
    if steered {
        for id in BOXES {
            on_box(report, &own, id)?;
        }
    }
    if inside.is_some() {
        return Ok(());
    }
    let program = std::env::current_exe()?;
    for other in STEERED.into_iter().chain([STOCK_ONLY]).filter(|r| *r != own) {
        let mut command: Command = release::command(other, &program)?;
        if other == STOCK_ONLY {
            command.env("PLIANT_LAB_NO_SELECT", "1");
        }
        let out = command.arg("links").stderr(std::process::Stdio::inherit()).output()?;
        print!("{}", String::from_utf8_lossy(&out.stdout));
        report.also(out.status.success());
    }
    Ok(())
}

/// Four jobs of two GPUs on eight: how many get a linked pair.
fn pairs(report: &mut Report, own: &str, steered: bool) -> Result<()> {
    let case = format!("{own}: eight GPUs, pairs 0-3 1-2 4-7 5-6");
    let stock = Lab::builder().nodes(1).gpus(8).pliant(false).start()?;
    report.note(&case, "linked pairs of 4, stock", linked(&stock)?, "pairs");
    stock.down()?;
    if steered {
        let ours = ours(Lab::builder().nodes(1).gpus(8))?;
        report.at_least(&case, "linked pairs of 4, ours", linked(&ours)?, "pairs", 4.0);
        // Also without pliantd: what the plugin does by itself.
        ours.kill("pliantd")?;
        std::fs::remove_file(ours.spec().board())?;
        ours.restart_slurmctld()?;
        ours.wait_for(Duration::from_secs(60), "the node is idle", || {
            ours.run("root", &["sinfo", "-h", "-o", "%T"]).is_ok_and(|s| s.trim() == "idle")
        })?;
        report.at_least(&case, "linked pairs of 4, ours without pliantd", linked(&ours)?, "pairs", 4.0);
        ours.down()?;
    }
    Ok(())
}

fn ours(builder: pliant_lab::Builder) -> Result<Lab> {
    let lab = builder.start()?;
    lab.wait_for(Duration::from_secs(30), "plans are there", || lab.spec().board().exists())?;
    Ok(lab)
}

fn linked(lab: &Lab) -> Result<f64> {
    let (mut jobs, mut count) = (vec![], 0.0);
    for _ in 0..4 {
        let (job, set) = allocate(lab, 2)?;
        count += f64::from(u8::from(PAIRS.iter().any(|p| *p == *set)));
        jobs.push(job);
        // As long as pliantd takes to hear of it.
        std::thread::sleep(Duration::from_millis(20));
    }
    jobs.iter().try_for_each(|job| leave(lab, job))?;
    Ok(count)
}

/// The same arrivals and departures on one box, ours and stock: the mean bottleneck of what jobs get.
fn on_box(report: &mut Report, own: &str, id: &str) -> Result<()> {
    let case = format!("{own}: {id}, {EVENTS} arrivals and departures");
    let Some(topology) = boxes::topology(id)? else {
        eprintln!("bench links: {id}: skipped, ../shared/cases is not there");
        return Ok(());
    };
    let tables = Tables::new(&topology)?;
    let conf = gres_conf(&topology)?;
    let gpus = u16::try_from(topology.gpus.len())?;
    let stock = Lab::builder().nodes(1).gpus(gpus).gres_conf(&conf).pliant(false).start()?;
    let plain = come_and_go(&stock, &tables)?;
    stock.down()?;
    let steered = ours(Lab::builder().nodes(1).gpus(gpus).gres_conf(&conf))?;
    let planned = come_and_go(&steered, &tables)?;
    steered.down()?;
    report.note(&case, "mean bottleneck, stock", plain / 1000.0, "GB/s");
    report.note(&case, "mean bottleneck, ours", planned / 1000.0, "GB/s");
    report.at_least(&case, "ours over stock", planned / plain, "ratio", 1.0);
    Ok(())
}

/// gres.conf of a box for the lab's node: NUMA nodes become its two sockets.
fn gres_conf(topology: &NodeTopology) -> Result<String> {
    let mut places: Vec<u32> = topology.gpus.iter().map(|g| g.numa.unwrap_or(0)).collect();
    places.sort_unstable();
    places.dedup();
    let n = topology.gpus.len();
    let mut text = String::new();
    for (i, gpu) in topology.gpus.iter().enumerate() {
        let place = places.iter().position(|p| *p == gpu.numa.unwrap_or(0)).unwrap_or(0);
        let second = places.len() > 1 && place >= places.len().div_ceil(2);
        let links: Vec<String> = (0..n)
            .map(|other| if other == i { "-1".into() } else { topology.link(i, other).count.to_string() })
            .collect();
        let cores = if second { "32-63" } else { "0-31" };
        writeln!(text, "Name=gpu File={{devices}}/gpu{i} Cores={cores} Links={}", links.join(","))?;
    }
    Ok(text)
}

fn come_and_go(lab: &Lab, tables: &Tables) -> Result<f64> {
    let mut random = Random::new(23);
    let (mut free, mut jobs) = (GpuSet::first(tables.len()), Vec::<(String, GpuSet)>::new());
    let (mut sum, mut count) = (0.0, 0.0);
    for _ in 0..EVENTS {
        let want = 1 + random.below(4);
        let leaves = random.below(100) < 45;
        if free.len() < want || (leaves && !jobs.is_empty()) {
            if jobs.is_empty() {
                continue;
            }
            let (job, set) = jobs.swap_remove(random.below(u32::try_from(jobs.len())?) as usize);
            leave(lab, &job)?;
            free = GpuSet(free.0 | set.0);
            continue;
        }
        let (job, indexes) = allocate(lab, want)?;
        let set = GpuSet::of(indexes.iter().map(|i| *i as usize));
        ensure!(free.holds(set) && set.len() == want, "Slurm gave {indexes:?}");
        free = free.without(set);
        jobs.push((job, set));
        if want > 1 {
            sum += f64::from(tables.bottleneck(set));
            count += 1.0;
        }
        std::thread::sleep(Duration::from_millis(15));
    }
    jobs.iter().try_for_each(|(job, _)| leave(lab, job))?;
    ensure!(count > 50.0, "only {count} jobs");
    Ok(sum / count)
}

/// An allocation without a step, with CPUs for each GPU: its id and GPUs.
fn allocate(lab: &Lab, gpus: u32) -> Result<(String, Vec<u32>)> {
    let (gres, tasks) = (format!("--gres=gpu:{gpus}"), format!("-n{gpus}"));
    let mut command = lab.command(lab.user(0), "salloc")?;
    let out = command.args(["--no-shell", "-N1", &tasks, &gres]).output()?;
    let told = String::from_utf8_lossy(&out.stderr).into_owned();
    let word = told.split("allocation ").nth(1).and_then(|t| t.split_whitespace().next());
    let job = word.with_context(|| format!("salloc: {told}"))?.trim_end_matches('.').to_owned();
    let text = lab.run("root", &["scontrol", "-d", "-o", "show", "job", &job])?;
    let line = text.split_whitespace().find_map(|w| w.strip_prefix("GRES=")).context("no GRES")?;
    let indexes = gres::gpu_indexes(line);
    Ok((job, indexes))
}

fn leave(lab: &Lab, job: &str) -> Result<()> {
    lab.run(lab.user(0), &["scancel", job])?;
    let gone = || {
        let text = lab.run("root", &["squeue", "-h", "-t", "R,CG", "-j", job]);
        text.map_or(true, |t| t.trim().is_empty())
    };
    lab.wait_for(Duration::from_secs(30), "the job is gone", gone)
}
