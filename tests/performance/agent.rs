//! The agent of a node with eight GPUs: share of a core, memory, and how long one look at the GPUs takes.

use crate::report::{Report, percentile};
use anyhow::{Context, Result, ensure};
use pliant_lab::Lab;
use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// From the issue: percent of a core, MiB.
const CPU: f64 = 0.5;
const MEMORY: f64 = 20.0;
/// How long the share is measured: six rounds of what is asked each ten seconds.
const SPAN: Duration = Duration::from_secs(60);
/// Microseconds of a call, as a driver that works takes them: NVML answers most from memory, a few ask the GPU.
const LATENCY: &str = "\n[latency_us]\ndefault = 20\nnvmlDeviceGetUtilizationRates = 60\n\
    nvmlDeviceGetComputeRunningProcesses_v3 = 200\nnvmlDeviceGetPcieThroughput = 20000\nnvmlDeviceGetPowerUsage = 100\n";

/// The agent as it is installed, in the place of the lab's own.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the bench.
pub fn run(report: &mut Report) -> Result<()> {
    let scenario = pliant_tests::root().join("tests/fake-nvml/scenarios/lab-8.toml");
    let lab = Lab::builder().nodes(1).gpus(8).poll_interval(2).scenario(&scenario).start()?;
    let own = lab.spec().scenario_of("n0");
    fs::write(&own, fs::read_to_string(&own)? + LATENCY)?;
    let release = lab.spec().target.join("../release");
    let (program, library) = (release.join("pliant-agent"), release.join("libfake_nvml.so"));
    ensure!(
        program.is_file() && library.is_file(),
        "cargo build --release -p pliant-agent -p fake-nvml (./dev bench does)"
    );
    lab.stop("agent.n0")?;
    fs::copy(&library, lab.dir().join("lib/libnvidia-ml.so.1"))?;
    let log = lab.dir().join("log/bench-agent.log");
    let mut command = Command::new(program);
    command.arg("--config").arg(lab.spec().pliant_toml()).args(["--node", "n0"]);
    command.env("PLIANT_FAKE_NVML", &own).env("PLIANT_LOG", "debug").env("SLURM_CONF", lab.spec().slurm_conf());
    let agent = Agent(command.stderr(fs::File::create(&log)?).spawn()?);
    // Past the first inventory.
    std::thread::sleep(Duration::from_secs(8));
    let pid = agent.0.id();
    let (before, begin) = (ticks(pid)?, Instant::now());
    std::thread::sleep(SPAN);
    let used = (ticks(pid)? - before) / 100.0; // USER_HZ
    let share = 100.0 * used / begin.elapsed().as_secs_f64();
    report.at_most("8 GPUs, 1 look a second", "share of a core", share, "%", CPU);
    report.at_most("8 GPUs, 1 look a second", "resident memory", resident(pid)?, "MiB", MEMORY);
    drop(agent);
    looks(report, &fs::read_to_string(&log)?)?;
    lab.down()
}

/// User and system time of a process with all its threads, in ticks of 1/100 s.
fn ticks(pid: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, rest) = stat.rsplit_once(')').context("stat")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let field = |i: usize| -> Result<f64> { Ok(fields.get(i).context("stat")?.parse()?) };
    Ok(field(11)? + field(12)?)
}

fn resident(pid: u32) -> Result<f64> {
    let status = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("status"))?;
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).context("no VmRSS")?;
    let kib: f64 = line.split_whitespace().nth(1).context("no value")?.parse()?;
    Ok(kib / 1024.0)
}

/// How long a look takes at those latencies, by the agent's own log.
fn looks(report: &mut Report, log: &str) -> Result<()> {
    let value = |line: &str, key: &str| -> Option<f64> {
        line.split_whitespace().find_map(|w| w.strip_prefix(key)?.strip_prefix('=')?.parse().ok())
    };
    for (slow, what) in
        [("slow=false", "a look each second"), ("slow=true", "each tenth look, with what changes slowly")]
    {
        let lines: Vec<&str> = log.lines().filter(|l| l.contains("looked at the GPUs") && l.contains(slow)).collect();
        let of = |key: &str| lines.iter().filter_map(|l| value(l, key)).collect::<Vec<_>>();
        let calls = percentile(&of("calls"), 0.5);
        let us = percentile(&of("us"), 0.5);
        ensure!(calls > 0.0, "the agent's log has no look with {slow}");
        report.note("8 GPUs, 1 look a second", &format!("{what}: queries"), calls, "queries");
        report.note("8 GPUs, 1 look a second", &format!("{what}: time, median"), us / 1000.0, "ms");
    }
    Ok(())
}
