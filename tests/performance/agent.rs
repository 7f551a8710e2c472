//! The agent of a node with eight GPUs: share of a core, memory, and how long one look at the GPUs takes.

use crate::report::Report;
use anyhow::{Context, Result};
use pliant_lab::Lab;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// From the issue: percent of a core, MiB.
const CPU: f64 = 0.5;
const MEMORY: f64 = 20.0;
/// How long the share is measured: six rounds of what is asked each ten seconds.
const SPAN: Duration = Duration::from_secs(60);
/// Microseconds of a call, as a driver that works takes them: NVML answers most from memory, a few ask the GPU.
const LATENCY: &str = "\n[latency_us]\ndefault = 20\nnvmlDeviceGetUtilizationRates = 60\n\
    nvmlDeviceGetComputeRunningProcesses_v3 = 200\nnvmlDeviceGetPcieThroughput = 20000\nnvmlDeviceGetPowerUsage = 100\n";

/// Runs the bench.
pub fn run(report: &mut Report) -> Result<()> {
    let scenario = pliant_tests::root().join("tests/fake-nvml/scenarios/lab-8.toml");
    let counts = std::env::temp_dir().join(format!("pliant-nvml-counts-{}", std::process::id()));
    let lab = Lab::builder()
        .nodes(1)
        .gpus(8)
        .poll_interval(2)
        .scenario(&scenario)
        .service_env("agent", "PLIANT_FAKE_NVML_COUNTS", &counts.to_string_lossy())
        .start()?;
    let own = lab.spec().scenario_of("n0");
    fs::write(&own, fs::read_to_string(&own)? + LATENCY)?;
    // Past the first inventory.
    std::thread::sleep(Duration::from_secs(8));
    let pid = lab.process("agent.n0").context("the agent has ended")?.pid;
    let (before, begin) = (ticks(pid)?, Instant::now());
    std::thread::sleep(SPAN);
    let used = (ticks(pid)? - before) / 100.0; // USER_HZ
    let share = 100.0 * used / begin.elapsed().as_secs_f64();
    report.at_most("8 GPUs, 1 look a second", "share of a core", share, "%", CPU);
    report.at_most("8 GPUs, 1 look a second", "resident memory", resident(pid)?, "MiB", MEMORY);
    calls(report, LATENCY);
    lab.down()?;
    let _ = fs::remove_file(&counts);
    Ok(())
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

/// What a look costs at those latencies, by the calls that it makes.
fn calls(report: &mut Report, latency: &str) {
    let of = |name: &str| {
        let line = latency.lines().find_map(|l| l.strip_prefix(name)?.trim().strip_prefix('='));
        line.and_then(|v| v.trim().parse::<f64>().ok()).unwrap_or(20.0)
    };
    // Per GPU each second: handle, utilisation, memory, processes (twice: their number first), throttle reasons.
    let fast =
        [of("default") * 3.0, of("nvmlDeviceGetUtilizationRates"), of("nvmlDeviceGetComputeRunningProcesses_v3") * 2.0];
    // Every tenth: two clocks, power, temperature, two error counts, remapped rows, PCIe twice, 12 links of 3 counters.
    let slow = [
        of("default") * 6.0,
        of("nvmlDeviceGetPowerUsage"),
        of("nvmlDeviceGetPcieThroughput") * 2.0,
        of("default") * 36.0,
    ];
    let ms = |us: &[f64]| us.iter().sum::<f64>() * 8.0 / 1000.0;
    report.note("8 GPUs, as called", "a look each second: 48 calls", ms(&fast), "ms");
    report.note("8 GPUs, as called", "what is asked every tenth look: 360 calls", ms(&slow), "ms");
}
