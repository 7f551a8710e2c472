// SPDX-License-Identifier: GPL-2.0-or-later
//! A job, as slurmctld has it while it calls the select plugin.

use super::node::{gres_of, is_gpu};
use super::{bits, str_of};
use slurm_sys::select as sys;
use std::ffi::{c_char, c_int, c_void};

/// Slurm's own numbers for "not set".
const NO_VAL: u32 = 0xffff_fffe;

/// A job during one call.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    record: &'a sys::job_record,
    details: Option<&'a sys::job_details_t>,
}

/// GPUs that a job asks for, as gres_list_req has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuRequest<'a> {
    /// Type; empty: any.
    pub kind: &'a str,
    /// `--gpus`; 0: not given, as the others.
    pub per_job: u64,
    /// `--gres`, `--gpus-per-node`.
    pub per_node: u64,
    /// `--gpus-per-socket`.
    pub per_socket: u64,
    /// `--gpus-per-task`.
    pub per_task: u64,
    /// How many kinds of GPU it names; more than one is left alone.
    pub kinds: usize,
}

/// Texts of a job, as typed; empty: not given.
#[derive(Clone, Copy, Debug, Default)]
pub struct Texts<'a> {
    /// Job name.
    pub name: &'a str,
    /// Comment.
    pub comment: &'a str,
    /// Account.
    pub account: &'a str,
    /// Reservation.
    pub reservation: &'a str,
    /// Partitions, comma-separated.
    pub partition: &'a str,
    /// Submission host.
    pub alloc_node: &'a str,
    /// `--constraint`.
    pub features: &'a str,
    /// `--nodelist`.
    pub req_nodes: &'a str,
    /// `--exclude`.
    pub exc_nodes: &'a str,
    /// TRES of the whole job.
    pub tres_per_job: &'a str,
    /// TRES per node.
    pub tres_per_node: &'a str,
    /// TRES per socket.
    pub tres_per_socket: &'a str,
    /// TRES per task.
    pub tres_per_task: &'a str,
    /// `--cpus-per-gpu`.
    pub cpus_per_tres: &'a str,
    /// Requested TRES.
    pub tres_req: &'a str,
    /// Licences.
    pub licenses: &'a str,
    /// Owner.
    pub user: &'a str,
}

/// Numbers of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Numbers {
    /// Job id.
    pub id: u32,
    /// Array it belongs to.
    pub array: Option<u32>,
    /// Index in it.
    pub task: Option<u32>,
    /// Leader of the heterogeneous job it belongs to.
    pub het: Option<u32>,
    /// Owner.
    pub uid: u32,
    /// Priority; 0: held.
    pub priority: u32,
    /// Least nodes.
    pub min_nodes: u32,
    /// Most nodes; `None`: no limit.
    pub max_nodes: Option<u32>,
    /// Least CPUs.
    pub min_cpus: u32,
    /// CPUs per task.
    pub cpus_per_task: Option<u32>,
    /// Tasks.
    pub tasks: Option<u32>,
    /// Submission, Unix seconds.
    pub submitted: i64,
    /// Minutes; `None`: none set, or unlimited.
    pub time_limit: Option<u32>,
    /// Restarts.
    pub restarts: u32,
    /// Whether it stands for tasks of an array that have not started: each gets an id of its own when it starts.
    pub tasks_wait: bool,
    /// Whether it takes whole nodes for itself.
    pub exclusive: bool,
    /// Whether it has a batch script.
    pub batch: bool,
    /// Whether it may be requeued.
    pub requeue: bool,
    /// CPUs that it has.
    pub total_cpus: u32,
}

impl std::fmt::Debug for Job<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Job({})", self.record.job_id)
    }
}

impl<'a> Job<'a> {
    /// Of the pointer that slurmctld hands over; `None` for null and where the record does not bear its magic number.
    ///
    /// # Safety
    /// Null, or a job record that lives and is not changed by others for `'a`; the layout must have been checked.
    pub unsafe fn from_callback(pointer: *mut c_void) -> Option<Job<'a>> {
        // SAFETY: the caller's promise.
        let record = unsafe { pointer.cast::<sys::job_record>().as_ref() }?;
        if record.magic != sys::PLIANT_JOB_MAGIC {
            return None;
        }
        // SAFETY: null or the details of that job.
        let details = unsafe { record.details.as_ref() }.filter(|d| d.magic == sys::PLIANT_DETAILS_MAGIC);
        Some(Job { record, details })
    }

    /// Job id.
    pub fn id(&self) -> u32 {
        self.record.job_id
    }

    /// The array that it is a task of; 0: none.
    pub fn array(&self) -> u32 {
        self.record.array_job_id
    }

    /// Owner.
    pub fn uid(&self) -> u32 {
        self.record.user_id
    }

    /// Whether it is part of a heterogeneous job.
    pub fn is_het(&self) -> bool {
        self.record.het_job_id != 0
    }

    /// The job that it is to be merged into (`--dependency=expand:ID`).
    pub fn expands(&self) -> Option<u32> {
        self.details.map(|d| d.expanding_jobid).filter(|id| *id != 0)
    }

    /// The partition that is tried now.
    pub fn partition(&self) -> &'a str {
        // SAFETY: null or a partition's record, which lives as long as the call.
        unsafe { self.record.part_ptr.cast::<sys::part_record_t>().as_ref().map_or("", |p| str_of(p.name)) }
    }

    /// Whether it is in a reservation.
    pub fn is_reserved(&self) -> bool {
        // SAFETY: null or a C string of that job.
        !unsafe { str_of(self.record.resv_name) }.is_empty()
    }

    /// `--constraint`, as typed.
    pub fn features(&self) -> &'a str {
        // SAFETY: as above.
        self.details.map_or("", |d| unsafe { str_of(d.features) })
    }

    /// Whether it takes whole nodes for itself.
    pub fn is_exclusive(&self) -> bool {
        self.details.is_some_and(|d| d.whole_node == 1)
    }

    /// Numbers.
    pub fn numbers(&self) -> Numbers {
        let r = self.record;
        let set = |n: u32| Some(n).filter(|n| *n != NO_VAL && *n != 0);
        let base = Numbers {
            id: r.job_id,
            array: set(r.array_job_id),
            task: Some(r.array_task_id).filter(|t| *t != NO_VAL && r.array_job_id != 0),
            het: set(r.het_job_id),
            uid: r.user_id,
            priority: r.priority,
            time_limit: set(r.time_limit).filter(|t| *t != u32::MAX),
            restarts: u32::from(r.restart_cnt),
            tasks_wait: !r.array_recs.is_null(),
            batch: r.batch_flag != 0,
            total_cpus: r.total_cpus,
            ..Numbers::default()
        };
        let Some(d) = self.details else { return base };
        Numbers {
            min_nodes: d.min_nodes,
            max_nodes: set(d.max_nodes),
            min_cpus: d.min_cpus,
            cpus_per_task: Some(u32::from(d.cpus_per_task)).filter(|c| (1..0xfffe).contains(c)),
            tasks: set(d.num_tasks),
            submitted: d.submit_time,
            exclusive: d.whole_node == 1,
            requeue: d.requeue != 0,
            ..base
        }
    }

    /// Texts.
    pub fn texts(&self) -> Texts<'a> {
        let r = self.record;
        // SAFETY: each is null or a C string of that job, which lives as long as the call.
        let text = |t: *mut c_char| unsafe { str_of(t) };
        let base = Texts {
            name: text(r.name),
            comment: text(r.comment),
            account: text(r.account),
            reservation: text(r.resv_name),
            partition: text(r.partition),
            alloc_node: text(r.alloc_node),
            tres_per_job: text(r.tres_per_job),
            tres_per_node: text(r.tres_per_node),
            tres_per_socket: text(r.tres_per_socket),
            tres_per_task: text(r.tres_per_task),
            cpus_per_tres: text(r.cpus_per_tres),
            tres_req: text(r.tres_fmt_req_str),
            licenses: text(r.licenses),
            user: text(r.user_name),
            ..Texts::default()
        };
        let Some(d) = self.details else { return base };
        Texts { features: text(d.features), req_nodes: text(d.req_nodes), exc_nodes: text(d.exc_nodes), ..base }
    }

    /// `spank_job_env`: what the submitting command handed on.
    pub fn spank_env(&self) -> Vec<&'a str> {
        let size = usize::try_from(self.record.spank_job_env_size).unwrap_or(0).min(256);
        let env = self.record.spank_job_env;
        if env.is_null() {
            return vec![];
        }
        // SAFETY: an array of that many C strings.
        (0..size).map(|i| unsafe { str_of(*env.add(i)) }).collect()
    }

    /// The nodes that the user insists on (positions in the table).
    pub fn required(&self) -> Vec<usize> {
        // SAFETY: null or a bitmap of that job.
        self.details.map_or_else(Vec::new, |d| unsafe { bits::ones(d.req_node_bitmap) })
    }

    /// GPUs that it asks for; `None`: none.
    pub fn gpus(&self) -> Option<GpuRequest<'a>> {
        // SAFETY: null or a list of that job, whose entries hold a `gres_job_state`.
        unsafe {
            let state = gres_of(self.record.gres_list_req)?;
            let data: &sys::gres_job_state = (*state).gres_data.cast::<sys::gres_job_state>().as_ref()?;
            let mut kinds = 0usize;
            sys::slurm_list_for_each(self.record.gres_list_req, Some(count_gpu), (&raw mut kinds).cast());
            Some(GpuRequest {
                kind: str_of(data.type_name),
                per_job: data.gres_per_job,
                per_node: data.gres_per_node,
                per_socket: data.gres_per_socket,
                per_task: data.gres_per_task,
                kinds,
            })
        }
    }

    /// GPUs that a test has chosen on a node (position in the table); `None`: Slurm names none.
    pub fn selected(&self, node: usize) -> Option<u64> {
        // SAFETY: as above; the array has one entry for each node of the table, as its count says.
        unsafe {
            let state = gres_of(self.record.gres_list_req)?;
            let data: &sys::gres_job_state = (*state).gres_data.cast::<sys::gres_job_state>().as_ref()?;
            let there = node < usize::try_from(data.total_node_cnt).ok()? && !data.gres_bit_select.is_null();
            let map = if there { *data.gres_bit_select.add(node) } else { std::ptr::null_mut() };
            (!map.is_null()).then(|| bits::word(map))
        }
    }

    /// Its nodes as a hostlist; empty: none yet.
    pub fn nodes(&self) -> &'a str {
        // SAFETY: null or a C string of that job.
        unsafe { str_of(self.record.nodes) }
    }

    /// Positions of its nodes in the table.
    pub fn node_indexes(&self) -> Vec<usize> {
        // SAFETY: null or a bitmap of that job.
        unsafe { bits::ones(self.record.node_bitmap) }
    }

    /// GRES by node, in the order of its nodes.
    pub fn gres_detail(&self) -> Vec<&'a str> {
        let detail = self.record.gres_detail_str;
        if detail.is_null() {
            return vec![];
        }
        let count = usize::try_from(self.record.gres_detail_cnt).unwrap_or(0);
        // SAFETY: an array of that many C strings.
        (0..count).map(|i| unsafe { str_of(*detail.add(i)) }).collect()
    }
}

unsafe extern "C" fn count_gpu(entry: *mut c_void, count: *mut c_void) -> c_int {
    // SAFETY: entries of a list of `gres_state`, and the number that was handed over.
    unsafe {
        if is_gpu(entry, std::ptr::null_mut()) != 0 {
            *count.cast::<usize>() += 1;
        }
    }
    0
}
