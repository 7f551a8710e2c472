// SPDX-License-Identifier: GPL-2.0-or-later
//! What Slurm looks up and calls. Each function is a shim: our part before, the stock call, our part after.

use crate::{events, grow, state, steer};
use pliant_protocol::board::Event;
use slurm::fence::Fence;
use slurm::select::stock::Stock;
use slurm::select::{self, ERROR, SUCCESS};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// A pointer to something of Slurm's.
type Ptr = *mut c_void;

static FENCE: Fence = Fence::new(select::log_info);
static STOCK: OnceLock<Stock> = OnceLock::new();

/// Name in Slurm's logs; the stock plugin's, as clients look for it.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "Slurm's name")]
pub static plugin_name: [u8; 36] = *b"Pliant in front of select/cons_tres\0";

/// Kind of plugin.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "Slurm's name")]
pub static plugin_type: [u8; 17] = *b"select/cons_tres\0";

/// Slurm release that this was built for; must be that of the loading process to the micro.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "Slurm's name")]
pub static plugin_version: c_uint = slurm::VERSION_NUMBER;

/// The stock plugin's: other numbers have no GPU features.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "Slurm's name")]
pub static plugin_id: c_uint = 109;

/// Called once in every process that loads the plugin. Fails where there is no stock plugin behind it.
#[unsafe(no_mangle)]
pub extern "C" fn init() -> c_int {
    let stock = FENCE.guard("init:stock", || Stock::load().and_then(complete));
    let loaded = stock.unwrap_or_else(|| Stock::load().and_then(complete));
    match loaded {
        Ok(stock) => drop(STOCK.set(stock)),
        Err(why) => {
            select::log_info(&format!("pliant: select/cons_tres: {why}"));
            return ERROR;
        }
    }
    FENCE.guard("init", begin);
    stock_call("init")
}

/// Called at the end, if at all.
#[unsafe(no_mangle)]
pub extern "C" fn fini() -> c_int {
    FENCE.guard("fini", || ());
    stock_call("fini")
}

fn begin() {
    if select::in_slurmctld() {
        let stock = STOCK.get().map(|s| s.path.display().to_string()).unwrap_or_default();
        select::log_info(&format!("pliant: select plugin for Slurm {} in front of {stock}", slurm::version()));
        state::begin().iter().for_each(|line| select::log_info(&format!("pliant: {line}")));
    }
}

/// A stock plugin of this very release that has all that we hand on.
fn complete(stock: Stock) -> Result<Stock, String> {
    let path = stock.path.display();
    match stock.version() {
        Some(version) if version == slurm::VERSION_NUMBER => {}
        found => {
            let [_, major, minor, micro] = found.unwrap_or(0).to_be_bytes();
            let ours = slurm::version();
            return Err(format!("{path} is of Slurm {major}.{minor:02}.{micro}, this plugin was built for {ours}"));
        }
    }
    match NAMES.iter().find(|name| stock.symbol(name).is_null()) {
        Some(missing) => Err(format!("{path} has no {missing}")),
        None => Ok(stock),
    }
}

/// An address in the stock plugin; null: it has none of that name.
fn stock_symbol(name: &str) -> Ptr {
    STOCK.get().map_or(std::ptr::null_mut(), |s| s.symbol(name))
}

/// `init` and `fini` of the stock plugin.
fn stock_call(name: &str) -> c_int {
    type Plain = extern "C" fn() -> c_int;
    // SAFETY: every Slurm plugin's `init` and `fini` take nothing and give an int.
    let function = unsafe { std::mem::transmute::<Ptr, Option<Plain>>(stock_symbol(name)) };
    function.map_or(SUCCESS, |f| f())
}

/// The answer where there is no stock plugin, which `init` has excluded.
trait Refusal {
    const REFUSAL: Self;
}
impl Refusal for c_int {
    const REFUSAL: c_int = ERROR;
}
impl Refusal for *mut c_void {
    const REFUSAL: *mut c_void = std::ptr::null_mut();
}
impl Refusal for *mut c_char {
    const REFUSAL: *mut c_char = std::ptr::null_mut();
}
impl Refusal for () {
    const REFUSAL: () = ();
}

/// Functions with their arguments. `before` and `after` are our parts; `answer` in `after` is the stock call's.
macro_rules! exports {
    ($(
        $(#[$cfg:meta])*
        fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty $({ $(before $before:block)? $(after($answer:ident) $after:block)? })?;
    )*) => {
        /// All that is handed on.
        const NAMES: &[&str] = &[$($(#[$cfg])* stringify!($name)),*];
        $(
            $(#[$cfg])*
            #[doc = concat!("`", stringify!($name), "`, handed on to the stock plugin.")]
            ///
            /// # Safety
            /// Called by Slurm as select.h of the release says.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> $ret {
                type Function = unsafe extern "C" fn($($ty),*) -> $ret;
                static FOUND: OnceLock<Option<Function>> = OnceLock::new();
                // SAFETY: the stock plugin's function of that name has that type in this release.
                let stock = *FOUND.get_or_init(|| unsafe {
                    std::mem::transmute::<Ptr, Option<Function>>(stock_symbol(stringify!($name)))
                });
                FENCE.guard(stringify!($name), || { $($($before)?)? });
                // SAFETY: with Slurm's own arguments.
                let answer = stock.map_or(<$ret>::REFUSAL, |f| unsafe { f($($arg),*) });
                FENCE.guard(concat!(stringify!($name), ":after"), || { $($(let $answer = answer; $after)?)? });
                answer
            }
        )*
    };
}

exports! {
    // Before 25.05 the plugin is also asked for what is saved and sent; nothing of it is ours.
    #[cfg(before_2505)]
    fn select_p_state_save(dir: *mut c_char) -> c_int;
    #[cfg(before_2505)]
    fn select_p_state_restore(dir: *mut c_char) -> c_int;
    #[cfg(before_2505)]
    fn select_p_job_init(jobs: Ptr) -> c_int;
    fn select_p_node_init() -> c_int {
        after(_answer) { events::general(&Event::NodeInit) }
    };
    fn select_p_job_begin(job: Ptr) -> c_int {
        // SAFETY: Slurm's own pointer.
        before { unsafe { events::begin(job) } }
    };
    fn select_p_job_ready(job: Ptr) -> c_int;
    fn select_p_job_resized(job: Ptr, node: Ptr) -> c_int {
        // SAFETY: as above.
        after(_answer) { unsafe { events::about(job, |j| Event::Resized { job: j.id() }) } }
    };
    #[cfg(before_2302)]
    fn select_p_job_signal(job: Ptr, signal: c_int) -> c_int;
    fn select_p_job_fini(job: Ptr) -> c_int {
        // SAFETY: as above.
        after(_answer) { unsafe { events::about(job, |j| Event::Fini { job: j.id() }) } }
    };
    fn select_p_job_suspend(job: Ptr, for_long: bool) -> c_int {
        // SAFETY: as above.
        after(_answer) { unsafe { events::about(job, |j| Event::Suspend { job: j.id() }) } }
    };
    fn select_p_job_resume(job: Ptr, for_long: bool) -> c_int {
        // SAFETY: as above.
        after(_answer) { unsafe { events::about(job, |j| Event::Resume { job: j.id() }) } }
    };
    #[cfg(before_2505)]
    fn select_p_step_pick_nodes(job: Ptr, step_info: Ptr, nodes: u32, available: *mut Ptr) -> Ptr;
    #[cfg(before_2505)]
    fn select_p_step_start(step: Ptr) -> c_int;
    #[cfg(before_2505)]
    fn select_p_step_finish(step: Ptr, killing: bool) -> c_int;
    #[cfg(before_2505)]
    fn select_p_select_nodeinfo_pack(info: Ptr, buffer: Ptr, version: u16) -> c_int;
    #[cfg(before_2505)]
    fn select_p_select_nodeinfo_unpack(info: *mut Ptr, buffer: Ptr, version: u16) -> c_int;
    #[cfg(before_2505)]
    fn select_p_select_nodeinfo_alloc() -> Ptr;
    #[cfg(before_2505)]
    fn select_p_select_nodeinfo_free(info: Ptr) -> c_int;
    fn select_p_select_nodeinfo_set_all() -> c_int;
    fn select_p_select_nodeinfo_set(job: Ptr) -> c_int {
        // Here the resources are committed.
        after(answer) {
            if events::went_well(answer) {
                // SAFETY: as above.
                unsafe { events::about(job, events::start) }
            }
        }
    };
    #[cfg(before_2505)]
    fn select_p_select_nodeinfo_get(info: Ptr, what: c_uint, state: c_uint, data: Ptr) -> c_int;
    #[cfg(before_2505)]
    fn select_p_select_jobinfo_alloc() -> Ptr;
    #[cfg(before_2505)]
    fn select_p_select_jobinfo_free(info: Ptr) -> c_int;
    #[cfg(before_2505)]
    fn select_p_select_jobinfo_set(info: Ptr, what: c_uint, data: Ptr) -> c_int;
    #[cfg(before_2505)]
    fn select_p_select_jobinfo_get(info: Ptr, what: c_uint, data: Ptr) -> c_int;
    #[cfg(before_2505)]
    fn select_p_select_jobinfo_copy(info: Ptr) -> Ptr;
    #[cfg(before_2505)]
    fn select_p_select_jobinfo_pack(info: Ptr, buffer: Ptr, version: u16) -> c_int;
    #[cfg(before_2505)]
    fn select_p_select_jobinfo_unpack(info: *mut Ptr, buffer: Ptr, version: u16) -> c_int;
    #[cfg(before_2302)]
    fn select_p_select_jobinfo_sprint(info: Ptr, text: *mut c_char, size: usize, mode: c_int) -> *mut c_char;
    #[cfg(before_2302)]
    fn select_p_select_jobinfo_xstrdup(info: Ptr, mode: c_int) -> *mut c_char;
    #[cfg(before_2505)]
    fn select_p_get_info_from_plugin(what: c_uint, job: Ptr, data: Ptr) -> c_int;
    #[cfg(before_2302)]
    fn select_p_update_node_config(index: c_int) -> c_int;
    fn select_p_reconfigure() -> c_int {
        after(_answer) { events::general(&Event::Reconfigure) }
    };
    #[cfg(before_2311)]
    fn select_p_resv_test(request: Ptr, nodes: u32, available: Ptr, cores: *mut Ptr) -> Ptr;
    #[cfg(not(before_2605))]
    fn select_p_job_mem_reduce(job: Ptr) -> ();
}

#[cfg(before_2411)]
type Test = unsafe extern "C" fn(Ptr, Ptr, u32, u32, u32, u16, Ptr, *mut Ptr, Ptr) -> c_int;
#[cfg(not(before_2411))]
type Test = unsafe extern "C" fn(Ptr, Ptr, u32, u32, u32, u16, Ptr, *mut Ptr, Ptr, Ptr) -> c_int;

/// Can a job start, now or ever, and where? The one call that we change.
///
/// # Safety
/// Called by Slurm as select.h of the release says.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "Slurm's signature")]
pub unsafe extern "C" fn select_p_job_test(
    job: Ptr,
    nodes: Ptr,
    min_nodes: u32,
    max_nodes: u32,
    wanted_nodes: u32,
    mode: u16,
    candidates: Ptr,
    preempted: *mut Ptr,
    exclusions: Ptr,
    #[cfg(not(before_2411))] will_run: Ptr,
) -> c_int {
    static FOUND: OnceLock<Option<Test>> = OnceLock::new();
    // SAFETY: the stock plugin's function of that name has that type in this release.
    let found =
        *FOUND.get_or_init(|| unsafe { std::mem::transmute::<Ptr, Option<Test>>(stock_symbol("select_p_job_test")) });
    let Some(stock) = found else { return ERROR };
    // SAFETY: with Slurm's own arguments.
    let stock = || unsafe {
        stock(
            job,
            nodes,
            min_nodes,
            max_nodes,
            wanted_nodes,
            mode,
            candidates,
            preempted,
            exclusions,
            #[cfg(not(before_2411))]
            will_run,
        )
    };
    // SAFETY: Slurm's own pointers, during its call.
    unsafe { steer::job_test(&FENCE, job, nodes, steer::Asked { min_nodes, max_nodes, mode }, stock) }
}

/// Merges a job into another one.
///
/// # Safety
/// Called by Slurm as select.h of the release says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn select_p_job_expand(from: Ptr, to: Ptr) -> c_int {
    type Expand = unsafe extern "C" fn(Ptr, Ptr) -> c_int;
    type Plain = unsafe extern "C" fn(Ptr) -> c_int;
    // SAFETY: Slurm's own pointers, during its call.
    let growth = FENCE.guard("select_p_job_expand", || unsafe { grow::begin(from, to) }).flatten();
    let Some(growth) = growth else {
        // SAFETY: as above.
        let stock = unsafe { std::mem::transmute::<Ptr, Option<Expand>>(stock_symbol("select_p_job_expand")) };
        // SAFETY: with Slurm's own arguments.
        return stock.map_or(ERROR, |f| unsafe { f(from, to) });
    };
    let call = |name: &str, job: Ptr| {
        // SAFETY: both functions take a job in every release.
        let stock = unsafe { std::mem::transmute::<Ptr, Option<Plain>>(stock_symbol(name)) };
        // SAFETY: a job of Slurm's own call.
        stock.map_or(ERROR, |f| unsafe { f(job) })
    };
    let answer =
        growth.pair.merge(|job| call("select_p_job_fini", job), |job| call("select_p_select_nodeinfo_set", job));
    FENCE.guard("select_p_job_expand:after", || grow::end(growth.from, growth.to, answer));
    answer
}
