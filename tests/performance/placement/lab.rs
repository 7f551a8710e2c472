//! The model of Slurm 22.05's rule against real allocations: one node of eight GPUs, jobs that come and go.

use super::Random;
use super::rules::slurm;
use crate::report::Report;
use anyhow::{Context, Result, ensure};
use pliant_lab::Lab;
use pliant_model::conf::gres_conf;
use pliant_model::{NodeName, gres};
use pliant_policy::placement::GpuSet;

const ALLOCATIONS: u32 = 300;

/// Runs this part; on another release the rule is not checked.
pub fn run(report: &mut Report) -> Result<()> {
    let lab = Lab::builder().nodes(1).gpus(8).pliant(false).start()?;
    let version = lab.run(lab.user(0), &["sinfo", "--version"])?;
    if !version.contains("22.05") {
        eprintln!("bench placement: the rule of Slurm 22.05 is not checked on {}", version.trim());
        return lab.down();
    }
    let text = std::fs::read_to_string(lab.dir().join("etc/gres.conf"))?;
    let conf = gres_conf::parse("gres.conf", &text, &mut |_| Err("no includes".into()))?;
    let gpus = conf.gpus(&NodeName::from("n0"));
    let half = lab.spec().cpus() / 2;
    let links: Vec<Vec<u32>> =
        gpus.iter().map(|g| g.links.iter().flatten().map(|l| u32::try_from(*l).unwrap_or(0)).collect()).collect();
    let first_core = |g: &gres_conf::GresDevice| g.cores.as_ref().and_then(|c| c.first()).map_or(0, |c| c / half);
    let sockets: Vec<u32> = gpus.iter().map(first_core).collect();
    let (mut free, mut jobs, mut random) = (GpuSet::first(8), vec![], Random::new(17));
    let (mut made, mut equal) = (0, 0);
    while made < ALLOCATIONS {
        let want = 1 + random.below(4);
        if free.len() < want || (random.below(100) < 40 && !jobs.is_empty()) {
            let (job, set): (String, GpuSet) = jobs.swap_remove(random.below(u32::try_from(jobs.len())?) as usize);
            release(&lab, &job)?;
            free.0 |= set.0;
            continue;
        }
        let (job, set, cores) = allocate(&lab, want)?;
        ensure!(free.holds(set), "Slurm gave {set:?} of {free:?}");
        let mut used: Vec<u32> = cores.iter().map(|c| c / half).collect();
        used.dedup();
        made += 1;
        equal += u32::from(slurm(&links, &sockets, &used, free, want, true) == set);
        free = free.without(set);
        jobs.push((job, set));
    }
    report.note("Slurm 22.05 in the lab", "allocations", f64::from(made), "jobs");
    report.at_least(
        "Slurm 22.05 in the lab",
        "sets as the model says",
        100.0 * f64::from(equal) / f64::from(made),
        "%",
        100.0,
    );
    lab.down()
}

/// A job of so many GPUs and one CPU: its id, GPUs and CPUs.
fn allocate(lab: &Lab, gpus: u32) -> Result<(String, GpuSet, Vec<u32>)> {
    let gres = format!("--gres=gpu:{gpus}");
    let name = format!("p{}", std::process::id());
    lab.run(lab.user(0), &["salloc", "--quiet", "--no-shell", "-n1", "--time=60", "--job-name", &name, &gres])?;
    let list = lab.run(lab.user(0), &["squeue", "--noheader", "--states=R", "--format=%A", "--sort=-i"])?;
    let job = list.lines().next().context("no job")?.trim().to_owned();
    let text = lab.run(lab.user(0), &["scontrol", "show", "job", "-d", &job])?;
    let line = text.lines().find(|l| l.contains("CPU_IDs=")).context("no CPU_IDs")?;
    let word = |key: &str| line.split_whitespace().find_map(|w| w.strip_prefix(key)).unwrap_or_default();
    let set = GpuSet::of(gres::gpu_indexes(word("GRES=")).into_iter().map(|i| i as usize));
    let cpus = pliant_model::conf::index_list::parse(word("CPU_IDs="))?;
    Ok((job, set, cpus))
}

fn release(lab: &Lab, job: &str) -> Result<()> {
    lab.run(lab.user(0), &["scancel", job])?;
    let gone = || lab.run(lab.user(0), &["squeue", "--noheader", "--jobs", job]).map_or(true, |t| t.trim().is_empty());
    lab.wait_for(std::time::Duration::from_secs(30), "the job is gone", gone)
}
