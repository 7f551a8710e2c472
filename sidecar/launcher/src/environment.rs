//! Which variables go where. Pure.

use pliant_model::JobId;
use pliant_protocol::options;
use pliant_protocol::step::{Setup, Spawn};

/// A variable.
pub type Var = (String, String);

/// What Slurm's commands must not inherit: the base's geometry and options, ours, and the user's own habits for them. A
/// filter or a question (`SQUEUE_PARTITION`, `SCANCEL_INTERACTIVE`) would make them lie or hang.
const OF_THE_BASE: [&str; 13] = [
    "SLURM_",
    "SBATCH_",
    "SALLOC_",
    "SRUN_",
    "PLIANT_",
    "SPANK_",
    "_SLURM_",
    "SQUEUE_",
    "SCANCEL_",
    "SINFO_",
    "SCONTROL_",
    "SACCT_",
    "SACCTMGR_",
];
/// Says where Slurm's and Pliant's configuration are: of no job, and needed by the commands.
const KEPT: [&str; 2] = ["SLURM_CONF", "PLIANT_CONFIG"];
/// GPU masks that Slurm sets for a step.
const MASKS: [&str; 5] =
    ["CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"];
/// What Slurm says about the user's job in its batch step, and not in a step of a slice.
const OF_THE_JOB: [&str; 6] =
    ["SLURM_ARRAY_", "SLURM_CLUSTER_NAME", "SLURM_JOB_ACCOUNT", "SLURM_JOB_NAME", "SLURM_JOB_QOS", "SLURM_SUBMIT_"];
/// Flags of our own srun, which an srun inside a rank would take for its own.
const OF_OUR_SRUN: [&str; 7] = [
    "SLURM_CPU_BIND",
    "SLURM_DISTRIBUTION",
    "SLURM_KILL_BAD_EXIT",
    "SLURM_MPI_TYPE",
    "SLURM_NO_KILL",
    "SLURM_OVERLAP",
    "SLURM_UNBUFFEREDIO",
];
/// Slurm's view of the step's one task (the supervisor): wrong for ranks, and read as their world by frameworks.
const OF_THE_TASK: [&str; 9] = [
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_GTIDS",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_TASK_PID",
];

fn begins(name: &str, with: &[&str]) -> bool {
    with.iter().any(|p| name.starts_with(p))
}

/// The environment of salloc, srun and of Slurm's other commands.
pub fn for_submission(all: impl IntoIterator<Item = Var>) -> Vec<Var> {
    all.into_iter().filter(|(n, _)| KEPT.contains(&n.as_str()) || !begins(n, &OF_THE_BASE)).collect()
}

/// What the ranks get of the batch script's environment: neither inputs of Pliant, which a job that they submit would
/// read as its own, nor what Slurm says about the batch step.
pub fn for_ranks(all: impl IntoIterator<Item = Var>) -> Vec<Var> {
    let of_step = |n: &str| n.starts_with("SLURM_") || n.starts_with("_SLURM_") || n.starts_with("SPANK_");
    let drop = |n: &str| {
        !KEPT.contains(&n)
            && !begins(n, &OF_THE_JOB)
            && (of_step(n) || n.starts_with("PLIANT_") || n.starts_with("SLURMD_") || MASKS.contains(&n))
    };
    all.into_iter().filter(|(n, _)| !drop(n)).collect()
}

/// What Slurm set for the step and the ranks are to see.
pub fn of_step(all: impl IntoIterator<Item = Var>) -> Vec<Var> {
    let keep = |n: &str| {
        MASKS.contains(&n)
            || ((n.starts_with("SLURM_") || n.starts_with("SLURMD_"))
                && !n.starts_with("SLURM_SPANK_")
                && !begins(n, &OF_OUR_SRUN)
                && !begins(n, &OF_THE_JOB)
                && !OF_THE_TASK.contains(&n))
    };
    all.into_iter().filter(|(n, _)| keep(n)).collect()
}

/// The GPUs that a mask shows. `NoDevFiles` is what Slurm writes for none (B03).
pub fn gpus(mask: Option<&str>) -> Vec<String> {
    let entries = mask.unwrap_or_default().split(',').map(str::trim);
    entries.filter(|e| !e.is_empty() && *e != "NoDevFiles").map(str::to_owned).collect()
}

/// The node's GRES indexes of the GPUs that a mask shows, in its order (B05). Where device cgroups number the mask from
/// 0, Slurm tells the indexes beside it.
fn on_node(step: &[Var], mask: &[String]) -> Vec<String> {
    let told = |name: &str| {
        let value = step.iter().rev().find(|(n, _)| n == name).map(|(_, v)| gpus(Some(v)))?;
        (value.len() == mask.len()).then_some(value)
    };
    told("SLURM_STEP_GPUS").or_else(|| told("SLURM_JOB_GPUS")).unwrap_or_else(|| mask.to_vec())
}

/// The environment of one process: of rank `spawn.first_rank + local`, or of the node's torchrun where `local` is `None`.
pub fn process(
    setup: &Setup,
    step: &[Var],
    spawn: &Spawn,
    local: Option<u32>,
    gpus: &[String],
    socket: &str,
) -> Vec<Var> {
    let mut out: Vec<Var> = setup.environment.clone();
    out.extend(step.iter().cloned());
    let mut set = |name: &str, value: String| out.push((name.to_owned(), value));
    set("CUDA_DEVICE_ORDER", "PCI_BUS_ID".into());
    set("PLIANT_JOB_ID", setup.base.to_string());
    set("PLIANT_JOB_GENERATION", spawn.generation.to_string());
    if !socket.is_empty() {
        set("PLIANT_JOB_SOCKET", socket.to_owned());
    }
    if spawn.hold {
        set("PLIANT_JOB_HOLD", "1".into());
    }
    match local {
        Some(local) => {
            set("RANK", (spawn.first_rank + local).to_string());
            set("LOCAL_RANK", local.to_string());
            set("WORLD_SIZE", spawn.world_size.to_string());
            set("LOCAL_WORLD_SIZE", spawn.ranks.to_string());
            set("GROUP_RANK", spawn.node_rank.to_string());
            set("MASTER_ADDR", spawn.master_addr.clone());
            set("MASTER_PORT", spawn.master_port.to_string());
            let at = usize::try_from(local).unwrap_or(usize::MAX);
            if let Some(index) = on_node(step, gpus).get(at) {
                set("PLIANT_JOB_GPU_ORDINAL", local.to_string());
                set("PLIANT_JOB_GPU_NODE_ORDINAL", index.clone());
            }
        }
        None => {
            set("PET_NNODES", spawn.nodes.to_string());
            set("PET_NODE_RANK", spawn.node_rank.to_string());
            set("PET_NPROC_PER_NODE", spawn.ranks.to_string());
            set("PET_MASTER_ADDR", spawn.master_addr.clone());
            set("PET_MASTER_PORT", spawn.master_port.to_string());
            set("PET_MAX_RESTARTS", "0".into());
        }
    }
    out
}

/// Whether `--elastic` was given: what the plugin in slurmstepd left for us.
pub fn request(get: impl Fn(&str) -> Option<String>) -> Option<options::Request> {
    options::Request::from_job_env(get)
}

/// Why a component of a heterogeneous job cannot be run; Slurm tells by its environment.
pub fn heterogeneous(job: JobId, get: impl Fn(&str) -> Option<String>) -> Option<String> {
    let parts = get("SLURM_HET_SIZE")?;
    Some(format!(
        "nothing started: job {job} is a component of a heterogeneous job (SLURM_HET_SIZE={parts}), whose components \
         Slurm starts and ends as one, het group by het group; submit a plain job"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vars(names: &[&str]) -> Vec<Var> {
        names.iter().map(|n| ((*n).to_owned(), "x".to_owned())).collect()
    }

    fn names(vars: Vec<Var>) -> Vec<String> {
        vars.into_iter().map(|(n, _)| n).collect()
    }

    #[test]
    fn a_slice_inherits_nothing_of_the_base() {
        // B66: both memory variables inherited exclude each other; neither reaches salloc.
        let all = vars(&[
            "SLURM_MEM_PER_CPU",
            "SLURM_MEM_PER_NODE",
            "SBATCH_GRES",
            "SALLOC_PARTITION",
            "SRUN_CPUS_PER_TASK",
            "SLURM_SPANK_X",
            "_SLURM_SPANK_OPTION_pliant_elastic",
            "SCANCEL_INTERACTIVE",
            "SQUEUE_PARTITION",
            "SINFO_FORMAT",
            "SCONTROL_ALL",
            "SPANK_Y",
            "PLIANT_ELASTIC",
            "PLIANT_JOB_ELASTIC",
            "PATH",
            "SLURM_CONF",
            "PLIANT_CONFIG",
        ]);
        assert_eq!(names(for_submission(all)), ["PATH", "SLURM_CONF", "PLIANT_CONFIG"]);
    }

    #[test]
    fn ranks_keep_the_users_variables_and_lose_our_inputs() {
        let all = vars(&[
            "PATH",
            "PLIANT_ELASTIC",
            "PLIANT_JOB_ELASTIC",
            "SLURM_JOB_ID",
            "SLURMD_NODENAME",
            "CUDA_VISIBLE_DEVICES",
            "SBATCH_ACCOUNT",
            "SLURM_ARRAY_TASK_ID",
            "_SLURM_SPANK_OPTION_pliant_elastic",
            "SLURM_SPANK__SLURM_SPANK_OPTION_pliant_elastic",
            "SLURM_CONF",
        ]);
        assert_eq!(names(for_ranks(all)), ["PATH", "SBATCH_ACCOUNT", "SLURM_ARRAY_TASK_ID", "SLURM_CONF"]);
        let step = vars(&[
            "SLURM_JOB_ID",
            "SLURM_PROCID",
            "SLURM_NTASKS",
            "SLURM_CPU_BIND_TYPE",
            "SLURM_JOB_NAME",
            "CUDA_VISIBLE_DEVICES",
            "HOME",
            "SLURMD_NODENAME",
        ]);
        assert_eq!(names(of_step(step)), ["SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME"]);
    }

    #[test]
    fn no_dev_files_means_no_gpu() {
        assert!(gpus(Some("NoDevFiles")).is_empty() && gpus(None).is_empty() && gpus(Some("")).is_empty());
        assert_eq!(gpus(Some("0,3")), ["0", "3"]);
    }

    #[test]
    fn a_het_job_is_known_by_its_environment() {
        assert_eq!(heterogeneous(JobId(7), |_| None), None);
        let why = heterogeneous(JobId(7), |n| (n == "SLURM_HET_SIZE").then(|| "2".into())).unwrap();
        assert!(why.contains("job 7 is a component of a heterogeneous job (SLURM_HET_SIZE=2)"), "{why}");
    }

    fn setup() -> Setup {
        Setup {
            version: 1,
            base: JobId(7),
            instance: "i".into(),
            slice: None,
            command: vec![],
            directory: "/".into(),
            environment: vec![("RANK".into(), "99".into())],
            torchrun: false,
            agent: String::new(),
        }
    }

    #[test]
    fn a_rank_knows_its_gpu_in_the_mask_and_on_the_node() {
        // B05: four tasks of --gpus-per-task=1 under device cgroups: each sees ordinal 0.
        for index in ["2", "3", "5", "6"] {
            let step = [("SLURM_STEP_GPUS".to_owned(), index.to_owned())];
            assert_eq!(on_node(&step, &["0".to_owned()]), [index]);
        }
        let mask = ["0".to_owned(), "1".to_owned()];
        let step = [("SLURM_JOB_GPUS".to_owned(), "4,5".to_owned()), ("SLURM_STEP_GPUS".to_owned(), "4".to_owned())];
        assert_eq!(on_node(&step, &mask), ["4", "5"], "a list of another length is of something else");
        assert_eq!(on_node(&[], &mask), mask);
    }

    #[test]
    fn a_rank_knows_its_place() {
        let spawn = Spawn {
            generation: 2,
            first_rank: 4,
            ranks: 2,
            world_size: 6,
            node_rank: 1,
            nodes: 2,
            master_addr: "a".into(),
            master_port: 29_500,
            hold: true,
        };
        let masks = ["2".to_owned(), "5".to_owned()];
        let env = process(&setup(), &[], &spawn, Some(1), &masks, "/s");
        let get = |n: &str| env.iter().rev().find(|(k, _)| k == n).map(|(_, v)| v.as_str());
        for (name, value) in [
            ("RANK", "5"),
            ("LOCAL_RANK", "1"),
            ("WORLD_SIZE", "6"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_PORT", "29500"),
            ("PLIANT_JOB_ID", "7"),
            ("PLIANT_JOB_HOLD", "1"),
            ("PLIANT_JOB_SOCKET", "/s"),
            ("PLIANT_JOB_GPU_ORDINAL", "1"),
            ("PLIANT_JOB_GPU_NODE_ORDINAL", "5"),
        ] {
            assert_eq!(get(name), Some(value), "{name}");
        }
        let env = process(&setup(), &[], &Spawn { hold: false, ..spawn }, None, &masks, "");
        let get = |n: &str| env.iter().rev().find(|(k, _)| k == n).map(|(_, v)| v.as_str());
        assert_eq!(get("PET_NPROC_PER_NODE"), Some("2"));
        assert_eq!((get("PLIANT_JOB_HOLD"), get("PLIANT_JOB_SOCKET"), get("MASTER_ADDR")), (None, None, None));
    }
}
