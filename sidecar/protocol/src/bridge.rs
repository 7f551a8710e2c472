//! Between `pliantd` and its child `pliant-slurm-bridge`: what Slurm knows, in records that no longer depend on a
//! Slurm release.
//!
//! One [`Request`] gives one [`Reply`] with the same id. The bridge answers in order and ends when its standard input
//! closes. A value that Slurm calls unset, unknown or zero-for-unset is `None`, never 0. An error is an
//! [`Answer::Error`]: no list in an answer is empty because something failed.

use serde::{Deserialize, Serialize};

/// A question with its number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Repeated in the answer.
    pub id: u64,
    /// What is asked.
    #[serde(flatten)]
    pub ask: Ask,
}

/// What pliantd may ask.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Ask {
    /// Whether the bridge lives; no call to Slurm.
    Ping,
    /// All jobs.
    Jobs,
    /// One job; an answer without a job: Slurm does not know it.
    Job {
        /// Its id.
        job: u32,
    },
    /// All nodes.
    Nodes,
    /// All partitions.
    Partitions,
    /// Change one job.
    Update {
        /// Slurm's text form of a job id: `123`, `123_4`, `123+1`.
        job: String,
        /// What to set; the rest stays as it is.
        fields: UpdateFields,
    },
    /// End or signal one job.
    Cancel {
        /// Slurm's text form of a job id.
        job: String,
        /// `None`: end the job as scancel does. Else this signal, to all steps and the batch script.
        signal: Option<u16>,
        /// Written into the job's admin comment first where the right to do so is there.
        reason: Option<String>,
    },
}

/// Fields of a job that an update may set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UpdateFields {
    /// User's comment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comment: Option<String>,
    /// Administrator's comment; needs operator rights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admin_comment: Option<String>,
    /// Minutes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_limit: Option<u32>,
    /// Added to the priority's opposite: -2147483645 to 2147483645.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nice: Option<i32>,
    /// Absolute priority; 0 holds the job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
    /// Node list: of a running job the nodes that stay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub req_nodes: Option<String>,
    /// Excluded nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exc_nodes: Option<String>,
}

/// An answer with the number of its question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// The question's.
    pub id: u64,
    /// The answer.
    #[serde(flatten)]
    pub answer: Answer,
}

/// What the bridge answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Answer {
    /// To [`Ask::Ping`].
    Pong {
        /// The Slurm release that the bridge was built for, such as `22.05.8`.
        slurm: String,
    },
    /// To [`Ask::Jobs`] and [`Ask::Job`].
    Jobs {
        /// When slurmctld made the list, Unix seconds.
        as_of: i64,
        /// All jobs that slurmctld still remembers, finished ones within MinJobAge too.
        jobs: Vec<JobRecord>,
    },
    /// To [`Ask::Nodes`].
    Nodes {
        /// When slurmctld made the list, Unix seconds.
        as_of: i64,
        /// All nodes.
        nodes: Vec<NodeRecord>,
    },
    /// To [`Ask::Partitions`].
    Partitions {
        /// When slurmctld made the list, Unix seconds.
        as_of: i64,
        /// All partitions, hidden ones too.
        partitions: Vec<PartitionRecord>,
    },
    /// To [`Ask::Update`] and [`Ask::Cancel`].
    Done,
    /// Slurm refused, or could not be reached.
    Error {
        /// Slurm's error number (slurm_errno.h), or the system's.
        errno: i32,
        /// Slurm's text for it.
        text: String,
    },
}

/// Memory that a job asks for, in MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MinMemory {
    /// Per node.
    PerNode(u64),
    /// Per allocated CPU.
    PerCpu(u64),
}

/// A job as slurmctld has it. Times are Unix seconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct JobRecord {
    /// Job id, of an array task its own.
    pub job_id: u32,
    /// Id of the array it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub array_job_id: Option<u32>,
    /// Index in that array.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub array_task_id: Option<u32>,
    /// Of the record that stands for the tasks of an array which have not started: their indices, such as `3-4%2`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub array_tasks: Option<String>,
    /// Leader of the heterogeneous job it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub het_job_id: Option<u32>,
    /// The uid that Slurm runs it as.
    pub user_id: u32,
    /// Name of that user, where slurmctld knows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_name: Option<String>,
    /// Job name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// User's comment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comment: Option<String>,
    /// Administrator's comment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admin_comment: Option<String>,
    /// Account.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub account: Option<String>,
    /// Partition or, of a pending job, a comma-separated list of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partition: Option<String>,
    /// QOS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qos: Option<String>,
    /// Reservation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reservation: Option<String>,
    /// Constraint (`--constraint`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub features: Option<String>,
    /// Base state: PENDING, RUNNING, SUSPENDED, COMPLETED, CANCELLED, FAILED, TIMEOUT, NODE_FAIL, PREEMPTED, BOOT_FAIL,
    /// DEADLINE or OUT_OF_MEMORY.
    pub state: String,
    /// State flags: COMPLETING, CONFIGURING, RESIZING, REQUEUED, ...
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub flags: Vec<String>,
    /// Why it waits or ended, as squeue shows it: Resources, Priority, ... `None`: no reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Slurm's longer text for the reason, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason_detail: Option<String>,
    /// Priority; 0 means held.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
    /// Submission.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub submit_time: Option<i64>,
    /// From when it may start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eligible_time: Option<i64>,
    /// Start, actual or expected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_time: Option<i64>,
    /// End, actual or expected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_time: Option<i64>,
    /// Minutes; `None`: none set, or unlimited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_limit: Option<u32>,
    /// Whether the limit is UNLIMITED.
    pub unlimited: bool,
    /// Allocated nodes as a hostlist.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<String>,
    /// Allocated nodes, or the least it asks for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_nodes: Option<u32>,
    /// Most nodes it can use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_nodes: Option<u32>,
    /// Allocated CPUs, or the least it asks for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_cpus: Option<u32>,
    /// CPUs per task.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus_per_task: Option<u32>,
    /// Requested tasks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_tasks: Option<u32>,
    /// Requested memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_memory: Option<MinMemory>,
    /// Requested TRES, such as `cpu=2,mem=4G,node=1,billing=2,gres/gpu=2`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tres_req: Option<String>,
    /// Allocated TRES.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tres_alloc: Option<String>,
    /// `--gpus` and the like, such as `gres:gpu:8`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tres_per_job: Option<String>,
    /// `--gres`, `--gpus-per-node`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tres_per_node: Option<String>,
    /// `--gpus-per-socket`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tres_per_socket: Option<String>,
    /// `--gpus-per-task`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tres_per_task: Option<String>,
    /// `--cpus-per-gpu`, such as `gres:gpu:4`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus_per_tres: Option<String>,
    /// `--mem-per-gpu`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_per_tres: Option<String>,
    /// GRES by allocated node, in the order of `nodes`, such as `gpu:2(IDX:0-1)`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gres_detail: Vec<String>,
    /// `--nodelist`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub req_nodes: Option<String>,
    /// `--exclude`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exc_nodes: Option<String>,
    /// Whether it takes whole nodes for itself (`--exclusive` or the partition's way).
    pub exclusive: bool,
    /// Whether it has a batch script.
    pub batch: bool,
    /// Node of the batch script.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_host: Option<String>,
    /// Host it was submitted from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alloc_node: Option<String>,
    /// When Slurm sent the preemption signal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preempt_time: Option<i64>,
    /// How often it was requeued.
    pub restart_count: u32,
    /// Whether it may be requeued.
    pub requeue: bool,
    /// Nice value.
    pub nice: i64,
    /// Licences.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub licenses: Option<String>,
    /// Jobs it waits for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dependency: Option<String>,
    /// Nodes on which Slurm plans to start it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sched_nodes: Option<String>,
}

/// A node as slurmctld has it. Times are Unix seconds, memory is MiB.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeRecord {
    /// NodeName.
    pub name: String,
    /// NodeAddr.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub addr: Option<String>,
    /// NodeHostName.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// Port of its slurmd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Base state: IDLE, ALLOCATED, MIXED, DOWN, UNKNOWN, FUTURE, ERROR.
    pub state: String,
    /// State flags: DRAIN, COMPLETING, NOT_RESPONDING, MAINT, PLANNED, ...
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub flags: Vec<String>,
    /// CPUs that jobs may have.
    pub cpus: u32,
    /// CPUs that jobs have; `None`: not told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus_alloc: Option<u32>,
    /// Memory.
    pub real_memory: u64,
    /// Memory that jobs have; `None`: not told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_alloc: Option<u64>,
    /// GRES, such as `gpu:a100:8(S:0-1)`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gres: Option<String>,
    /// GRES in use, such as `gpu:a100:2(IDX:0-1)`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gres_used: Option<String>,
    /// Active features.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub features: Option<String>,
    /// Partitions that hold it, comma-separated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partitions: Option<String>,
    /// Why it is down or drained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Boot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot_time: Option<i64>,
    /// Start of its slurmd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slurmd_start_time: Option<i64>,
    /// Slurm release of its slurmd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// A partition as slurmctld has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PartitionRecord {
    /// Name.
    pub name: String,
    /// Nodes as a hostlist.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<String>,
    /// UP, DOWN, DRAIN or INACTIVE.
    pub state: String,
    /// Whether jobs go here that name no partition.
    pub default: bool,
    /// Minutes; `None`: unlimited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_time: Option<u32>,
    /// Minutes that a job gets which asks for none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_time: Option<u32>,
    /// Most nodes per job; `None`: unlimited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_nodes: Option<u32>,
    /// OFF, SUSPEND, REQUEUE, CANCEL, with GANG or WITHIN where set; `None`: the cluster's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preempt_mode: Option<String>,
    /// Seconds between the preemption signal and the end.
    pub grace_time: u32,
    /// Tier; jobs of a higher one may preempt.
    pub priority_tier: u16,
    /// DefMemPerCPU or DefMemPerNode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub def_memory: Option<MinMemory>,
    /// DefCpuPerGPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub def_cpu_per_gpu: Option<u64>,
    /// DefMemPerGPU in MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub def_mem_per_gpu: Option<u64>,
    /// Accounts that may use it; `None`: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_accounts: Option<String>,
    /// QOS that may use it; `None`: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_qos: Option<String>,
    /// Groups that may use it; `None`: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_groups: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_have_a_flat_tagged_form() {
        let request =
            Request { id: 7, ask: Ask::Cancel { job: "12_3".into(), signal: None, reason: Some("grace over".into()) } };
        let text = serde_json::to_string(&request).unwrap();
        assert_eq!(text, r#"{"id":7,"ask":"cancel","job":"12_3","signal":null,"reason":"grace over"}"#);
        assert_eq!(serde_json::from_str::<Request>(&text).unwrap(), request);
        let ping: Request = serde_json::from_str(r#"{"id":1,"ask":"ping"}"#).unwrap();
        assert_eq!(ping.ask, Ask::Ping);
    }

    #[test]
    fn an_update_with_an_unknown_field_is_refused() {
        let text = r#"{"id":1,"ask":"update","job":"5","fields":{"user_id":0}}"#;
        assert!(serde_json::from_str::<Request>(text).is_err());
        let text = r#"{"id":1,"ask":"update","job":"5","fields":{"time_limit":10}}"#;
        let Ask::Update { fields, .. } = serde_json::from_str::<Request>(text).unwrap().ask else { panic!() };
        assert_eq!(fields, UpdateFields { time_limit: Some(10), ..Default::default() });
    }

    #[test]
    fn answers_read_back() {
        let job = JobRecord {
            job_id: 5,
            state: "PENDING".into(),
            reason: Some("Resources".into()),
            min_memory: Some(MinMemory::PerCpu(100)),
            gres_detail: vec!["gpu:2(IDX:0-1)".into()],
            ..Default::default()
        };
        let answers = [
            Answer::Jobs { as_of: 1, jobs: vec![job] },
            Answer::Nodes { as_of: 1, nodes: vec![NodeRecord::default()] },
            Answer::Partitions { as_of: 1, partitions: vec![PartitionRecord::default()] },
            Answer::Error { errno: 2017, text: "Invalid job id specified".into() },
            Answer::Done,
        ];
        for answer in answers {
            let reply = Reply { id: 3, answer };
            let text = serde_json::to_string(&reply).unwrap();
            assert_eq!(serde_json::from_str::<Reply>(&text).unwrap(), reply);
        }
    }
}
