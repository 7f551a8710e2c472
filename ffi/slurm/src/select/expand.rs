// SPDX-License-Identifier: GPL-2.0-or-later
//! A job merged into another one, with its GPUs.
//!
//! The stock `job_expand` refuses jobs with GRES, and puts the cores of the new nodes on the wrong ones (its
//! `job_resources_bits_copy` joins both bitmaps without moving them, in 22.05.8 and 24.11.5). So the merge is made here,
//! out of what the stock plugin and slurmctld do anyway: both jobs give back what they hold, their resources and lists of
//! GRES are joined, and the job that grows takes all of it.

use super::job::Job;
use super::node::{self, Gpus, gres_of, is_gpu};
use super::{ERROR, SUCCESS, bits, stock};
use slurm_sys::select as sys;
use std::ffi::{CStr, c_char, c_int, c_void};

/// Slurm's number for "no type".
const NO_TYPE: u32 = 0xffff_fffe;
/// Releases whose slurmctld crashes after a resize, or at a reconfigure that follows one.
const UNSOUND: [&str; 2] = ["23.02.6", "23.11.7"];

/// Why no job is merged on a release of Slurm; `None`: it can be.
pub fn unsound(version: &str) -> Option<String> {
    UNSOUND
        .contains(&version)
        .then(|| format!("not on this release: slurmctld {version} may crash after a job was resized; slices are used"))
}

type List = sys::pliant_list;
type Map = *mut sys::bitstr_t;
type Resources = sys::job_resources;

/// Functions of slurmctld and libslurmfull, under the names that they have in each release.
#[derive(Clone, Copy, Debug)]
struct Functions {
    merge: unsafe extern "C" fn(List, Map, List, Map),
    create: unsafe extern "C" fn() -> *mut Resources,
    build: unsafe extern "C" fn(*mut Resources) -> c_int,
    build_cpus: unsafe extern "C" fn(*mut Resources) -> c_int,
    free: unsafe extern "C" fn(*mut *mut Resources),
    names: unsafe extern "C" fn(Map) -> *mut c_char,
    zeros: unsafe extern "C" fn(usize, usize, bool, bool, *const c_char, c_int, *const c_char) -> *mut c_void,
    release: unsafe extern "C" fn(*mut *mut c_void),
    find: unsafe extern "C" fn(u32) -> *mut sys::job_record,
}

impl Functions {
    /// Of this process; `None`: it lacks one.
    fn look_up() -> Option<Functions> {
        // SAFETY: functions of those names have the types of these fields in every release from 22.05 to 26.05.
        unsafe {
            Some(Functions {
                merge: function(c"gres_stepmgr_job_merge").or_else(|| function(c"gres_ctld_job_merge"))?,
                create: function(c"create_job_resources")?,
                build: function(c"build_job_resources")?,
                build_cpus: function(c"build_job_resources_cpu_array")?,
                free: function(c"free_job_resources")?,
                names: function(c"bitmap2node_name")?,
                zeros: function(c"slurm_xcalloc")?,
                release: function(c"slurm_xfree")?,
                find: function(c"find_job_record")?,
            })
        }
    }

    /// Slurm's memory for so many values, zeroed; Slurm ends the process where there is none.
    unsafe fn array<T>(&self, count: usize) -> *mut T {
        // SAFETY: any count and size; the texts are C strings.
        unsafe { (self.zeros)(count, size_of::<T>(), true, false, c"pliant".as_ptr(), 0, c"pliant".as_ptr()) }.cast()
    }

    /// Puts another text in the place of one of Slurm's.
    ///
    /// # Safety
    /// A place for a text of Slurm's own memory or null, and another such text.
    unsafe fn replace(&self, place: *mut *mut c_char, by: *mut c_char) {
        // SAFETY: the caller's promise.
        unsafe {
            (self.release)(place.cast());
            *place = by;
        }
    }
}

/// A function of this process.
///
/// # Safety
/// `F` is a pointer to a function of the type that the named one has.
unsafe fn function<F: Copy>(name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    let found = stock::of_process(name);
    // SAFETY: the caller's promise; not null, and of a pointer's size.
    (!found.is_null()).then(|| unsafe { std::mem::transmute_copy(&found) })
}

/// A job that is merged, or that another one is merged into.
struct Side {
    record: *mut sys::job_record,
    resources: *mut sys::job_resources,
    /// Positions of its nodes.
    nodes: Vec<usize>,
    request: *mut sys::gres_job_state,
    held: *mut sys::gres_job_state,
    plugin: u32,
}

impl Side {
    /// The parts of a job that are needed, each there and as expected.
    ///
    /// # Safety
    /// A job record of slurmctld's, under its write locks.
    unsafe fn of(record: *mut sys::job_record, name: &str) -> Result<Side, String> {
        // SAFETY: the caller's promise; each pointer is checked before it is followed.
        unsafe {
            let job = Job::from_callback(record.cast()).ok_or_else(|| format!("the {name} is no job"))?;
            if job.is_exclusive() {
                return Err(format!("the {name} has whole nodes for itself"));
            }
            let resources: *mut sys::job_resources = (*record).job_resrcs;
            let whole = !resources.is_null() && !(*resources).cpus.is_null() && !(*resources).node_bitmap.is_null();
            if !whole {
                return Err(format!("the {name} holds no nodes"));
            }
            let nodes = bits::ones((*resources).node_bitmap);
            let lost =
                nodes != bits::ones((*record).node_bitmap) || (0..nodes.len()).any(|n| *(*resources).cpus.add(n) == 0);
            let cores: Option<usize> = nodes.iter().map(|n| cores_of(*n)).sum();
            if nodes.is_empty() || lost || cores != Some(bits::size((*resources).core_bitmap)) {
                return Err(format!("the {name} has lost a node"));
            }
            let (request, plugin) = only_gpus((*record).gres_list_req, nodes.len(), name)?;
            let (held, _) = only_gpus((*record).gres_list_alloc, nodes.len(), name)?;
            Ok(Side { record, resources, nodes, request, held, plugin })
        }
    }
}

/// The one entry of a list of a job's GRES: GPUs with an index, on every node of the job.
///
/// # Safety
/// Null or a list of `gres_state` of a job.
unsafe fn only_gpus(list: List, nodes: usize, name: &str) -> Result<(*mut sys::gres_job_state, u32), String> {
    // SAFETY: the caller's promise.
    unsafe {
        let state = gres_of(list).ok_or_else(|| format!("the {name} has no GPU"))?;
        let counts = counts(list);
        if counts.all != 1 || counts.gpus != 1 {
            return Err(format!("the {name} has other GRES besides GPUs of one type"));
        }
        let data: *mut sys::gres_job_state = (*state).gres_data.cast();
        let there = !data.is_null()
            && usize::try_from((*data).node_cnt) == Ok(nodes)
            && !(*data).gres_bit_alloc.is_null()
            && !(*data).gres_cnt_node_alloc.is_null()
            && (0..nodes).all(|n| !(*(*data).gres_bit_alloc.add(n)).is_null());
        if there { Ok((data, (*state).plugin_id)) } else { Err(format!("the {name} has GPUs without an index")) }
    }
}

#[derive(Default)]
struct Counts {
    all: usize,
    gpus: usize,
}

/// # Safety
/// Null or a list of `gres_state`.
unsafe fn counts(list: List) -> Counts {
    let mut counts = Counts::default();
    if !list.is_null() {
        // SAFETY: the caller's promise.
        unsafe { sys::slurm_list_for_each(list, Some(count), (&raw mut counts).cast()) };
    }
    counts
}

unsafe extern "C" fn count(entry: *mut c_void, counts: *mut c_void) -> c_int {
    // SAFETY: entries of a list of `gres_state`, and the numbers that were handed over.
    unsafe {
        let counts = &mut *counts.cast::<Counts>();
        counts.all += 1;
        counts.gpus += usize::from(is_gpu(entry, std::ptr::null_mut()) != 0);
    }
    0
}

/// Cores of a node.
fn cores_of(node: usize) -> Option<usize> {
    // SAFETY: a record of the table.
    node::record(node).map(|n| usize::from(unsafe { (*n).tot_cores }))
}

/// Where a job may start that is to be merged into another one: not on these nodes (positions).
///
/// # Errors
/// Why it is not to start, since a merge that fails leaves wrong counters behind.
///
/// # Safety
/// A job of slurmctld's that is tested, under its locks; the layout was checked.
pub unsafe fn keep_off(job: *mut c_void, base: u32) -> Result<Vec<usize>, String> {
    if let Some(why) = unsound(&crate::version()) {
        return Err(why);
    }
    let functions = Functions::look_up().ok_or("this slurmctld has no functions to merge GRES")?;
    // SAFETY: the caller's promise; what is found is a record, or null.
    unsafe {
        let job: *mut sys::job_record = job.cast();
        let base = Side::of((functions.find)(base), "job that grows")?;
        if Job::from_callback(job.cast()).is_none_or(|j| j.is_exclusive()) {
            return Err("a job with whole nodes for itself cannot be merged".into());
        }
        if (*job).part_ptr != (*base.record).part_ptr {
            return Err("the job that grows is in another partition".into());
        }
        let counts = counts((*job).gres_list_req);
        let state = gres_of((*job).gres_list_req).filter(|_| counts.all == 1 && counts.gpus == 1);
        let request: *mut sys::gres_job_state = state.map_or(std::ptr::null_mut(), |s| (*s).gres_data.cast());
        if request.is_null() {
            return Err("only a job with GPUs of one type, and no other GRES, can be merged".into());
        }
        let kind = base.kind();
        if kind.is_some_and(|kind| (*request).type_id != kind) {
            return Err("it must ask for GPUs of the type that the job that grows has, as in gpu:TYPE:N".into());
        }
        let typed = |n: &usize| kind.is_none() && Gpus::of(*n).is_some_and(Gpus::is_typed);
        Ok((0..node::count()).filter(|n| base.nodes.contains(n) || typed(n)).collect())
    }
}

/// Two jobs that may be merged.
pub struct Pair {
    from: Side,
    to: Side,
    functions: Functions,
    /// Their nodes before.
    maps: [Map; 2],
}

impl std::fmt::Debug for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pair({:?} into {:?})", self.from.nodes, self.to.nodes)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // SAFETY: copies that this has made.
        self.maps.iter_mut().for_each(|map| unsafe { sys::slurm_bit_free(map) });
    }
}

impl Pair {
    /// Looks at both jobs; nothing is changed.
    ///
    /// # Errors
    /// Why they are not merged.
    ///
    /// # Safety
    /// slurmctld's own pointers of the `job_expand` that is running; the layout was checked.
    pub unsafe fn of(from: *mut c_void, to: *mut c_void) -> Result<Pair, String> {
        if let Some(why) = unsound(&crate::version()) {
            return Err(why);
        }
        let functions = Functions::look_up().ok_or("this slurmctld has no functions to merge GRES")?;
        // SAFETY: the caller's promise.
        unsafe {
            let (from, to) = (Side::of(from.cast(), "smaller job")?, Side::of(to.cast(), "job that grows")?);
            if from.nodes.iter().any(|n| to.nodes.contains(n)) {
                return Err("both jobs have GPUs on one node".into());
            }
            if from.plugin != to.plugin || from.kind() != to.kind() {
                return Err("the jobs have GPUs of different types".into());
            }
            if (*from.record).part_ptr != (*to.record).part_ptr {
                return Err("the jobs are in different partitions".into());
            }
            let maps = [&from, &to].map(|side| sys::slurm_bit_copy((*side.resources).node_bitmap));
            Ok(Pair { from, to, functions, maps })
        }
    }

    /// Merges them. `finish` is the stock plugin's `job_fini`, `set` its `nodeinfo_set`: they take and give back what a
    /// job holds. The answer for slurmctld.
    pub fn merge(self, finish: impl Fn(*mut c_void) -> c_int, set: impl Fn(*mut c_void) -> c_int) -> c_int {
        let (from, to) = (self.from.record, self.to.record);
        // SAFETY: both records live during the call, and slurmctld's write locks are held.
        unsafe {
            let Some(joined) = self.joined() else { return ERROR };
            finish(from.cast());
            finish(to.cast());
            let lists = [
                ((*from).gres_list_req, (*to).gres_list_req, self.from.request, self.to.request),
                ((*from).gres_list_alloc, (*to).gres_list_alloc, self.from.held, self.to.held),
            ];
            for (less, more, small, large) in lists {
                (self.functions.merge)(less, self.maps[0], more, self.maps[1]);
                (*large).total_gres = (*large).total_gres.saturating_add((*small).total_gres);
            }
            // Steps may ask for no more than the request says.
            let (small, large) = (&*self.from.request, &mut *self.to.request);
            large.gres_per_node = large.gres_per_node.max(small.gres_per_node);
            if large.gres_per_job > 0 {
                large.gres_per_job = large.total_gres;
            }
            self.hand_over(joined);
            set(to.cast())
        }
    }

    /// The resources of both, for all nodes.
    ///
    /// # Safety
    /// As [`Pair::of`].
    unsafe fn joined(&self) -> Option<*mut Resources> {
        let f = &self.functions;
        // SAFETY: new memory of Slurm's; the lengths are those of the nodes that were looked at.
        unsafe {
            let (less, more) = (self.from.resources, self.to.resources);
            let mut new = (f.create)();
            let map = sys::slurm_bit_copy(self.maps[1]);
            sys::slurm_bit_or(map, self.maps[0]);
            let nodes = bits::ones(map);
            let count = nodes.len();
            (*new).node_bitmap = map;
            (*new).nodes = (f.names)(map);
            (*new).nhosts = u32::try_from(count).ok()?;
            (*new).ncpus = (*less).ncpus.saturating_add((*more).ncpus);
            (*new).node_req = (*more).node_req;
            (*new).whole_node = (*more).whole_node;
            (*new).threads_per_core = (*more).threads_per_core;
            (*new).cr_type = (*more).cr_type;
            (*new).cpu_array_reps = f.array(count);
            (*new).cpu_array_value = f.array(count);
            (*new).cpus = f.array(count);
            (*new).cpus_used = f.array(count);
            (*new).memory_allocated = f.array(count);
            (*new).memory_used = f.array(count);
            if (f.build)(new) != SUCCESS {
                (f.free)(&mut new);
                return None;
            }
            let mut first = 0;
            for (at, node) in nodes.into_iter().enumerate() {
                let side = if self.to.nodes.contains(&node) { &self.to } else { &self.from };
                first += side.copy_node(node, new, at, first);
            }
            (f.build_cpus)(new);
            Some(new)
        }
    }

    /// The job that grows has the joined resources; the other one has nothing.
    ///
    /// # Safety
    /// As [`Pair::of`].
    unsafe fn hand_over(&self, joined: *mut Resources) {
        let f = &self.functions;
        // SAFETY: both records and what belongs to them, under slurmctld's write locks.
        unsafe {
            let (from, to) = (&mut *self.from.record, &mut *self.to.record);
            (f.free)((&raw mut to.job_resrcs).cast());
            to.job_resrcs = joined.cast();
            let count = (*joined).nhosts;
            let cpus = (0..usize::try_from(count).unwrap_or(0)).map(|n| u32::from(*(*joined).cpus.add(n))).sum();
            (to.total_cpus, to.cpu_cnt, to.total_nodes, to.node_cnt) = (cpus, cpus, count, count);
            ((*to.details).min_cpus, (*to.details).max_cpus) = (cpus, cpus);
            (from.total_cpus, from.total_nodes, from.node_cnt) = (0, 0, 0);
            ((*from.details).min_cpus, (*from.details).max_cpus, (*from.details).min_nodes) = (0, 0, 0);
            sys::slurm_bit_or(to.node_bitmap, from.node_bitmap);
            sys::slurm_bit_clear_all(from.node_bitmap);
            f.replace(&raw mut to.nodes, (f.names)((*joined).node_bitmap));
            f.replace(&raw mut from.nodes, f.array(1));
            let rest = &mut *self.from.resources;
            (rest.ncpus, rest.nhosts) = (0, 0);
            sys::slurm_bit_clear_all(rest.node_bitmap);
            f.replace(&raw mut rest.nodes, f.array(1));
        }
    }
}

impl Side {
    /// The type of its GPUs; `None`: they have none (which Slurm says in another way after a restart).
    unsafe fn kind(&self) -> Option<u32> {
        // SAFETY: looked at when this was made.
        Some(unsafe { (*self.held).type_id }).filter(|t| *t != 0 && *t != NO_TYPE)
    }

    /// Copies what the job holds on a node to place `at` of other resources, its cores from bit `first`. How many cores
    /// the node has.
    ///
    /// # Safety
    /// Resources with that place, and cores for the node.
    unsafe fn copy_node(&self, node: usize, new: *mut Resources, at: usize, first: usize) -> usize {
        let before = || self.nodes.iter().take_while(|n| **n != node);
        let (offset, begin) = (before().count(), before().filter_map(|n| cores_of(*n)).sum::<usize>());
        let cores = cores_of(node).unwrap_or(0);
        // SAFETY: the caller's promise; this side was looked at.
        unsafe {
            let old = self.resources;
            *(*new).cpus.add(at) = *(*old).cpus.add(offset);
            for (to, from) in
                [((*new).memory_allocated, (*old).memory_allocated), ((*new).memory_used, (*old).memory_used)]
            {
                if !from.is_null() {
                    *to.add(at) = *from.add(offset);
                }
            }
            if !(*old).cpus_used.is_null() {
                *(*new).cpus_used.add(at) = *(*old).cpus_used.add(offset);
            }
            for bit in (0..cores).filter(|bit| bits::test((*old).core_bitmap, begin + bit)) {
                bits::set((*new).core_bitmap, first + bit);
            }
        }
        cores
    }
}

#[cfg(test)]
mod tests {
    use super::unsound;

    #[test]
    fn releases_that_crash_after_a_resize_are_named() {
        for version in ["23.02.6", "23.11.7"] {
            let why = unsound(version).unwrap_or_default();
            assert!(why.starts_with("not on this release") && why.contains(version), "{why}");
        }
        for version in ["22.05.8", "23.02.7", "23.11.8", "24.11.5", "26.05.5"] {
            assert_eq!(unsound(version), None);
        }
    }
}
