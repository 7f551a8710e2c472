//! The base as `scontrol show job -d` describes it, and what follows from it for slices. Pure.
//!
//! Serves the formats of Slurm 22.05 to 26.05.

use pliant_model::{GpuCount, GpuRange, JobId, NodeName, Seconds, gres, hostlist};
use std::collections::BTreeMap;

/// The base.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Base {
    /// Its own id, of an array task too.
    pub job: u32,
    /// Its nodes with their GPUs, the batch host first.
    pub nodes: Vec<(NodeName, GpuCount)>,
    /// CPUs.
    pub cpus: u32,
    /// Partition.
    pub partition: String,
    /// Account.
    pub account: Option<String>,
    /// QOS.
    pub qos: Option<String>,
    /// Reservation.
    pub reservation: Option<String>,
    /// Constraint.
    pub constraint: Option<String>,
    /// GPU type.
    pub kind: Option<String>,
    /// `--cpus-per-gpu`.
    pub cpus_per_gpu: Option<u32>,
    /// MiB of memory per GPU, where the base states memory.
    pub mem_per_gpu: Option<u64>,
    /// Time limit as Slurm writes it; `UNLIMITED` without one.
    pub time_limit: String,
    /// Leader of a heterogeneous job.
    pub het: Option<String>,
}

/// Values that hold no information.
fn value(text: Option<&String>) -> Option<String> {
    text.filter(|v| !v.is_empty() && *v != "(null)" && *v != "N/A").cloned()
}

/// The record of one job out of the answer, which holds all tasks where the id is an array's.
fn record(answer: &str, job: JobId) -> Option<Vec<&str>> {
    let own = format!("JobId={job}");
    let mut found: Option<Vec<&str>> = None;
    for line in answer.lines() {
        if line.starts_with("JobId=") {
            if found.is_some() {
                break;
            }
            if line.split_whitespace().next() == Some(&own) {
                found = Some(vec![line]);
            }
        } else if let Some(lines) = found.as_mut() {
            lines.push(line);
        }
    }
    found
}

/// Lines whose values are the user's own text.
const FREE_TEXT: [&str; 8] =
    ["Comment=", "Command=", "WorkDir=", "StdErr=", "StdIn=", "StdOut=", "AdminComment=", "SystemComment="];

impl Base {
    /// Reads the answer of `scontrol show job -d`; `None`: the job is not in it.
    pub fn parse(answer: &str, job: JobId) -> Option<Base> {
        let lines = record(answer, job)?;
        let mut keys: BTreeMap<&str, String> = BTreeMap::new();
        let mut gpus: BTreeMap<NodeName, GpuCount> = BTreeMap::new();
        for (at, line) in lines.iter().enumerate() {
            let line = line.trim();
            if FREE_TEXT.iter().any(|p| line.starts_with(p)) {
                continue;
            }
            let mut words: Vec<(&str, &str)> = line.split_whitespace().filter_map(|w| w.split_once('=')).collect();
            if at == 0 {
                // JobName may hold blanks and anything.
                words.retain(|(k, _)| ["JobId", "ArrayJobId", "HetJobId"].contains(k));
            }
            if let Some(("Nodes", list)) = words.first().copied() {
                let here = words.iter().find(|(k, _)| *k == "GRES").map_or(0, |(_, v)| gres::gpu_total(v));
                for node in hostlist::expand(list).ok()? {
                    *gpus.entry(node).or_default() += here;
                }
                continue;
            }
            for (key, text) in words {
                keys.entry(key).or_insert_with(|| text.to_owned());
            }
        }
        let get = |key: &str| value(keys.get(key));
        let batch_host = get("BatchHost").map(NodeName);
        let mut names = hostlist::expand(&get("NodeList")?).ok()?;
        names.sort_by_key(|n| Some(n) != batch_host.as_ref());
        let nodes: Vec<_> = names.into_iter().map(|n| (n.clone(), gpus.get(&n).copied().unwrap_or(0))).collect();
        let mut base = Base {
            job: job.0,
            nodes,
            cpus: get("NumCPUs").and_then(|n| n.split('-').next()?.parse().ok()).unwrap_or(1),
            partition: get("Partition").unwrap_or_default(),
            account: get("Account"),
            qos: get("QOS"),
            reservation: get("Reservation"),
            constraint: get("Features"),
            kind: ["TresPerJob", "TresPerNode", "TresPerTask", "TresPerSocket", "Gres"]
                .iter()
                .find_map(|k| gres::gpus(&get(k)?).into_iter().find_map(|g| g.kind)),
            cpus_per_gpu: get("CpusPerTres").and_then(|t| gres::tres_gpus(&t)),
            mem_per_gpu: None,
            time_limit: get("TimeLimit").unwrap_or_else(|| "UNLIMITED".into()),
            het: get("HetJobId").filter(|id| id != "0"),
        };
        base.mem_per_gpu = base.memory(&get);
        Some(base)
    }

    fn memory(&self, get: &impl Fn(&str) -> Option<String>) -> Option<u64> {
        // `gres:gpu:4096`: here the count is MiB.
        if let Some(mib) = get("MemPerTres").and_then(|t| mem_of(t.rsplit(':').next()?)) {
            return Some(mib);
        }
        if let Some(mib) = get("MinMemoryCPU").and_then(|t| mem_of(&t)) {
            return Some(mib.saturating_mul(u64::from(self.cpus_of_a_gpu(None))));
        }
        let mib = get("MinMemoryNode").and_then(|t| mem_of(&t)).filter(|mib| *mib > 0)?;
        let most = self.nodes.iter().map(|(_, n)| *n).max().filter(|n| *n > 0)?;
        Some(mib.div_ceil(u64::from(most)))
    }

    /// GPUs in all.
    pub fn gpus(&self) -> GpuCount {
        self.nodes.iter().map(|(_, n)| n).sum()
    }

    /// CPUs that a slice takes per GPU; `share` is what the site gives where the base has no GPU and says nothing.
    pub fn cpus_of_a_gpu(&self, share: Option<u32>) -> u32 {
        match (self.cpus_per_gpu, self.gpus()) {
            (Some(cpus), _) => cpus,
            (None, 0) => share.unwrap_or(1),
            (None, gpus) => self.cpus / gpus,
        }
        .max(1)
    }

    /// The constraint where it is one plain feature.
    pub fn feature(&self) -> Option<String> {
        let plain = |c: &String| c.chars().all(|c| c.is_alphanumeric() || "_-.:".contains(c));
        self.constraint.clone().filter(plain)
    }

    /// Why the job cannot be elastic in that range; one line that names flag, text and allocation.
    pub fn unfit(&self, range: GpuRange, in_partition: Option<GpuCount>) -> Option<String> {
        let (job, gpus) = (self.job, self.gpus());
        let flag = format!("--elastic={range}");
        if let Some(het) = &self.het {
            return Some(format!(
                "{flag}: job {job} is part of heterogeneous job {het}, whose parts Slurm starts and ends as one; use a plain job"
            ));
        }
        if let Some(min) = range.min.filter(|min| *min != gpus) {
            return Some(format!(
                "{flag}: MIN is {min} and Slurm allocated {gpus} GPU(s) to job {job}; write --elastic={gpus}-{} or ask Slurm for {min} GPU(s)",
                range.max.max(gpus)
            ));
        }
        if range.max < gpus {
            return Some(format!(
                "{flag}: MAX is {} and Slurm allocated {gpus} GPU(s) to job {job}; write a MAX of at least {gpus}",
                range.max
            ));
        }
        match in_partition {
            Some(all) if range.max > all => Some(format!(
                "{flag}: MAX is {} and partition {} has {all} GPU(s); write a MAX of at most {all}",
                range.max, self.partition
            )),
            _ => None,
        }
    }
}

/// Memory as Slurm writes it: a number of MiB, or with K, M, G, T.
pub fn mem_of(text: &str) -> Option<u64> {
    let digits: String = text.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
    let unit = text.get(digits.len()..)?;
    let number: f64 = digits.parse().ok()?;
    let factor = match unit.trim_end_matches(['n', 'c']) {
        "" | "M" => 1.0,
        "K" => 1.0 / 1024.0,
        "G" => 1024.0,
        "T" => 1024.0 * 1024.0,
        _ => return None,
    };
    let mib = (number * factor).ceil();
    // Text of at most 20 digits, checked above the largest memory that can be.
    (0.0..1e15).contains(&mib).then(|| format!("{mib:.0}").parse().ok()).flatten()
}

/// `DefCpuPerGPU` or `DefMemPerGPU` out of `JobDefaults=…` of a partition or of the configuration.
pub fn job_default(answer: &str, name: &str) -> Option<u64> {
    let at = answer.split_whitespace().filter_map(|w| w.split_once("JobDefaults=").map(|(_, v)| v));
    let listed = at.flat_map(|v| v.split(',')).find_map(|d| d.strip_prefix(name)?.strip_prefix('=')?.parse().ok());
    listed.or_else(|| {
        // `scontrol show config` writes `JobDefaults             = DefCpuPerGPU=2,…`.
        let line = answer.lines().find(|l| l.trim_start().starts_with("JobDefaults "))?;
        line.split(['=', ' ', ',']).collect::<Vec<_>>().windows(2).find_map(|w| match w {
            [key, number] if *key == name => number.parse().ok(),
            _ => None,
        })
    })
}

/// A value of `scontrol show config`, such as `KillWait                = 30 sec`.
pub fn config_number(answer: &str, name: &str) -> Option<u64> {
    let line = answer.lines().find(|l| l.split_whitespace().next() == Some(name))?;
    line.split_once('=')?.1.split_whitespace().next()?.parse().ok()
}

/// `Key=number` anywhere in an answer, such as `GraceTime=30` of a partition.
pub fn number(answer: &str, key: &str) -> Option<u64> {
    answer.split_whitespace().find_map(|w| w.strip_prefix(key)?.strip_prefix('=')?.parse().ok())
}

/// A time left as squeue's `%L` writes it; `Ok(None)`: no limit.
///
/// # Errors
/// When it is neither a time nor a word for none.
pub fn time_left(text: &str) -> Result<Option<Seconds>, pliant_model::time::TimeError> {
    match text.trim() {
        "UNLIMITED" | "NOT_SET" | "N/A" => Ok(None),
        "INVALID" => Ok(Some(0)),
        other => pliant_model::time::parse(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: &str = "JobId=12 ArrayJobId=11 ArrayTaskId=1 JobName=a Partition=evil x
   UserId=u(33) GroupId=u(33) MCS_label=N/A
   Priority=4294901759 Nice=0 Account=proj QOS=normal
   JobState=RUNNING Reason=None Dependency=(null)
   RunTime=00:00:00 TimeLimit=00:10:00 TimeMin=N/A
   Partition=main AllocNode:Sid=localhost:11749
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=n[1-2]
   BatchHost=n2
   NumNodes=2 NumCPUs=12 NumTasks=2 CPUs/Task=6 ReqB:S:C:T=0:0:*:*
   TRES=cpu=12,mem=8G,node=2,billing=12,gres/gpu=3
   JOB_GRES=gpu:a100:3
     Nodes=n1 CPU_IDs=0-5 Mem=4096 GRES=gpu:a100:1(IDX:0)
     Nodes=n2 CPU_IDs=0-5 Mem=4096 GRES=gpu:a100:2(IDX:2-3)
   MinCPUsNode=6 MinMemoryNode=4G MinTmpDiskNode=0
   Features=a100 DelayBoot=00:00:00
   Reservation=class
   Command=/x Partition=evil
   TresPerJob=gres:gpu:a100:3
";

    #[test]
    fn the_base_is_read() {
        let two = format!("{}\n{JOB}", JOB.replace("JobId=12 ", "JobId=11 ").replace("gpu:a100", "gpu"));
        let base = Base::parse(&two, JobId(12)).unwrap();
        assert_eq!(base.nodes, [(NodeName::from("n2"), 2), (NodeName::from("n1"), 1)]);
        assert_eq!((base.partition.as_str(), base.account.as_deref()), ("main", Some("proj")));
        assert_eq!((base.kind.as_deref(), base.reservation.as_deref()), (Some("a100"), Some("class")));
        assert_eq!((base.cpus_of_a_gpu(None), base.mem_per_gpu), (4, Some(2048)));
        assert_eq!(base.feature().as_deref(), Some("a100"));
        assert!(Base::parse(&two, JobId(13)).is_none());
    }

    #[test]
    fn equal_nodes_share_a_line_and_newer_names_serve() {
        let text = "JobId=5 JobName=x
   Partition=p
   NodeList=n[1-2]
   BatchHost=n1
   NumNodes=2 NumCPUs=4 NumTasks=2
     Nodes=n[1-2] CPU_IDs=0-1 Mem=0 GRES=gpu:4(IDX:0-3)
   MinCPUsNode=1 MinMemoryCPU=500M MinTmpDiskNode=0
   CpusPerTres=gres/gpu:2
   TresPerNode=gres/gpu:h100:4
";
        let base = Base::parse(text, JobId(5)).unwrap();
        assert_eq!((base.gpus(), base.cpus_of_a_gpu(None), base.kind.as_deref()), (8, 2, Some("h100")));
        assert_eq!(base.mem_per_gpu, Some(1000));
    }

    #[test]
    fn ranges_that_do_not_fit_are_refused_in_one_line() {
        let base = Base { job: 9, nodes: vec![("n1".into(), 2)], partition: "main".into(), ..Base::default() };
        let unfit = |text: &str| base.unfit(text.parse().unwrap(), Some(32));
        assert_eq!(unfit("2-8"), None);
        assert_eq!(unfit("8"), None);
        let line = unfit("4-8").unwrap();
        assert!(line.starts_with("--elastic=4-8: MIN is 4 and Slurm allocated 2 GPU(s) to job 9"), "{line}");
        assert!(unfit("1").unwrap().contains("MAX is 1"));
        assert!(unfit("64").unwrap().contains("partition main has 32 GPU(s)"));
        assert!(base.unfit("64".parse().unwrap(), None).is_none());
        let het = Base { het: Some("8".into()), ..base };
        assert!(het.unfit("8".parse().unwrap(), None).unwrap().contains("heterogeneous"));
    }

    #[test]
    fn small_values() {
        assert_eq!((mem_of("4G"), mem_of("1500M"), mem_of("0"), mem_of("x")), (Some(4096), Some(1500), Some(0), None));
        assert_eq!(job_default("   JobDefaults=DefCpuPerGPU=4,DefMemPerGPU=100\n", "DefMemPerGPU"), Some(100));
        assert_eq!(job_default("JobDefaults             = DefCpuPerGPU=2\n", "DefCpuPerGPU"), Some(2));
        assert_eq!(job_default("JobDefaults             = (null)\n", "DefCpuPerGPU"), None);
        assert_eq!(config_number("KillWait                = 30 sec\n", "KillWait"), Some(30));
        assert_eq!(number(" A=1 GraceTime=15 Hidden=NO", "GraceTime"), Some(15));
        assert_eq!(time_left("9:55"), Ok(Some(595)));
        assert_eq!(time_left("UNLIMITED"), Ok(None));
    }
}
