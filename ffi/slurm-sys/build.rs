// SPDX-License-Identifier: GPL-2.0-or-later
//! Runs bindgen over the installed Slurm headers. `PLIANT_SLURM_INCLUDE` names another include directory (the one that
//! holds `slurm/slurm.h`), for a build against the headers of another release.
//!
//! For the select plugin it runs a second time, over Slurm's internal headers: those of the configured source tree that
//! `SLURM_SOURCE` names, or of `.cache/slurm/RELEASE`, where `./dev` puts them.

use std::path::{Path, PathBuf};
use std::{env, fs};

const FUNCTIONS_SPANK: &[&str] = &[
    "spank_context",
    "spank_option_register",
    "spank_get_item",
    "spank_getenv",
    "spank_setenv",
    "spank_unsetenv",
    "spank_job_control_setenv",
    "slurm_error",
    "slurm_spank_log",
];
const FUNCTIONS_CLIENT: &[&str] = &[
    "slurm_init",
    "slurm_load_jobs",
    "slurm_load_job",
    "slurm_free_job_info_msg",
    "slurm_load_node",
    "slurm_free_node_info_msg",
    "slurm_load_partitions",
    "slurm_free_partition_info_msg",
    "slurm_get_select_nodeinfo",
    "slurm_init_job_desc_msg",
    "slurm_update_job",
    "slurm_kill_job2",
    "slurm_list_iterator_create",
    "slurm_list_next",
    "slurm_list_iterator_destroy",
    "slurm_strerror",
];
const TYPES_SPANK: &[&str] = &["spank_t", "spank_option", "spank_item", "spank_context"];
const TYPES_CLIENT: &[&str] = &[
    "job_info_msg_t",
    "node_info_msg_t",
    "partition_info_msg_t",
    "job_desc_msg_t",
    "job_defaults_t",
    "job_states",
    "node_states",
];
const FUNCTIONS_SELECT: &[&str] = &[
    "slurm_bit_test",
    "slurm_bit_set",
    "slurm_bit_clear",
    "slurm_bit_size",
    "slurm_bit_set_count",
    "slurm_bit_overlap",
    "slurm_bit_ffs",
    "slurm_bit_fls",
    "slurm_bit_copy",
    "slurm_bit_copybits",
    "slurm_bit_or",
    "slurm_bit_free",
    "slurm_bit_clear_all",
    "slurm_list_find_first",
    "slurm_list_for_each",
    "slurm_info",
    "slurm_error",
    "slurm_running_in_slurmctld",
];
const TYPES_SELECT: &[&str] = &[
    "job_record",
    "job_details",
    "job_details_t",
    "job_resources",
    "node_record",
    "part_record_t",
    "gres_state",
    "gres_node_state",
    "gres_job_state",
    "slurm_conf_t",
];
const VALUES_SELECT: &[&str] = &[
    "PLIANT_JOB_MAGIC",
    "PLIANT_DETAILS_MAGIC",
    "PLIANT_SOURCE_VERSION",
    "NODE_MAGIC",
    "slurm_conf",
    "NO_VAL",
    "NO_VAL16",
    "SLURM_SUCCESS",
    "SLURM_ERROR",
];
const VALUES: &[&str] =
    &["PLIANT_SLURM_VERSION", "NO_VAL", "NO_VAL16", "NO_VAL64", "INFINITE", "INFINITE64", "MEM_PER_CPU"];

fn main() {
    println!("cargo:rerun-if-changed=wrapper.h");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=PLIANT_SLURM_INCLUDE");
    if let Err(text) = generate() {
        for line in text.lines() {
            println!("cargo::error={line}");
        }
        println!("cargo::error=slurm-sys could not be built, see above");
    }
}

fn generate() -> Result<(), String> {
    let include = find_headers()?;
    println!("cargo:rerun-if-changed={}", include.join("slurm/slurm.h").display());
    println!("cargo:rerun-if-changed={}", include.join("slurm/spank.h").display());
    let client = env::var_os("CARGO_FEATURE_CLIENT").is_some();
    let mut builder = builder("wrapper.h", &include);
    let functions = FUNCTIONS_SPANK.iter().chain(if client { FUNCTIONS_CLIENT } else { &[] });
    for name in functions {
        builder = builder.allowlist_function(name);
    }
    let types = TYPES_SPANK.iter().chain(if client { TYPES_CLIENT } else { &[] });
    for name in types {
        builder = builder.allowlist_type(name);
    }
    for name in VALUES {
        builder = builder.allowlist_var(name);
    }
    let bindings = run(builder, &include)?;
    announce_shape(&bindings);
    write("bindings.rs", &bindings)?;
    println!("cargo:version={}", version_of(&bindings)?);
    if env::var_os("CARGO_FEATURE_SELECT").is_some() { generate_select(&version_of(&bindings)?) } else { Ok(()) }
}

/// The second run, over Slurm's internal headers. They change between micros of one release, so the source must be of
/// the very release whose headers are installed.
fn generate_select(version: &str) -> Result<(), String> {
    println!("cargo:rerun-if-env-changed=SLURM_SOURCE");
    println!("cargo:rerun-if-changed=wrapper_select.h");
    let usual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/slurm").join(version);
    let named = env::var_os("SLURM_SOURCE").map(PathBuf::from);
    let source = named.unwrap_or(usual);
    println!("cargo:rerun-if-changed={}", source.join("config.h").display());
    if !source.join("config.h").is_file() {
        return Err(format!(
            "{} holds no configured source of Slurm {version}, which the select plugin is built from: `./dev source` \
             fetches it on Debian, or name one in SLURM_SOURCE (unpack it, then ./configure)",
            source.display()
        ));
    }
    let mut builder = builder("wrapper_select.h", &source);
    for name in FUNCTIONS_SELECT {
        builder = builder.allowlist_function(name);
    }
    for name in TYPES_SELECT {
        builder = builder.allowlist_type(name);
    }
    for name in VALUES_SELECT {
        builder = builder.allowlist_var(name);
    }
    let bindings = run(builder, &source)?;
    let found = version_of(&bindings.replace("PLIANT_SOURCE_VERSION", "PLIANT_SLURM_VERSION"))?;
    if found != version {
        return Err(format!(
            "{} is the source of Slurm {found}, and the installed headers are of {version}: the select plugin is built for \
             one exact release",
            source.display()
        ));
    }
    // One name in every release for what changed its own.
    let details =
        if bindings.contains("pub struct job_details_t") { "" } else { "pub type job_details_t = job_details;\n" };
    let list = if bindings.contains("pub type List =") { "List" } else { "*mut list_t" };
    write("select.rs", &format!("{bindings}\n{details}pub type pliant_list = {list};\n"))
}

fn builder(header: &str, include: &Path) -> bindgen::Builder {
    bindgen::Builder::default()
        .header(header)
        .clang_arg(format!("-I{}", include.display()))
        .layout_tests(true)
        .generate_comments(false)
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .derive_debug(false)
        .merge_extern_blocks(true)
        .wrap_unsafe_ops(true)
        .rust_edition(bindgen::RustEdition::Edition2024)
}

fn run(builder: bindgen::Builder, include: &Path) -> Result<String, String> {
    // libclang is loaded at run time and its absence is a panic inside bindgen: turned into a line that helps.
    let bindings = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || builder.generate()))
        .map_err(|_| {
            "bindgen found no libclang: install the package libclang-dev (Debian, Ubuntu) or clang-devel (RPM)"
                .to_owned()
        })?
        .map_err(|e| format!("bindgen could not read the headers in {}: {e}", include.display()))?;
    Ok(bindings.to_string())
}

fn write(name: &str, bindings: &str) -> Result<(), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?).join(name);
    fs::write(&out, bindings).map_err(|e| format!("{}: {e}", out.display()))
}

/// `22.05.8`, out of the constant that wrapper.h makes.
fn version_of(bindings: &str) -> Result<String, String> {
    let number = bindings
        .split_once("pub const PLIANT_SLURM_VERSION: ::std::os::raw::c_uint = ")
        .and_then(|(_, rest)| rest.split(';').next()?.parse::<u32>().ok())
        .ok_or("bindgen gave no PLIANT_SLURM_VERSION")?;
    let [_, major, minor, micro] = number.to_be_bytes();
    Ok(format!("{major}.{minor:02}.{micro}"))
}

fn find_headers() -> Result<PathBuf, String> {
    let named = env::var_os("PLIANT_SLURM_INCLUDE").map(PathBuf::from);
    let usual = ["/usr/include", "/usr/local/include", "/opt/slurm/include"].map(PathBuf::from);
    let candidates: Vec<PathBuf> = named.map_or_else(|| usual.to_vec(), |dir| vec![dir]);
    let holds = |dir: &Path, file: &str| dir.join("slurm").join(file).is_file();
    let Some(dir) = candidates.iter().find(|dir| holds(dir, "slurm.h")) else {
        return Err(format!(
            "slurm/slurm.h was not found in {candidates:?}: install the package libslurm-dev (Debian, Ubuntu) or \
             slurm-devel (RPM), or name the include directory in PLIANT_SLURM_INCLUDE"
        ));
    };
    for file in ["spank.h", "slurm_errno.h", "slurm_version.h"] {
        if !holds(dir, file) {
            return Err(format!(
                "{}/slurm holds slurm.h but no {file}: install the whole of libslurm-dev (Debian, Ubuntu) or slurm-devel (RPM)",
                dir.display()
            ));
        }
    }
    Ok(dir.clone())
}

/// Tells those that depend on this crate, as `DEP_SLURM_*`, where the structures of this release differ.
fn announce_shape(bindings: &str) {
    let has = |of: &str, field: &str| {
        bindings
            .split_once(&format!("pub struct {of} {{"))
            .and_then(|(_, rest)| rest.split_once("\n}"))
            .is_some_and(|(fields, _)| fields.contains(&format!("pub {field}:")))
    };
    // 25.05 moved what the select plugin knew of a node into node_info itself.
    if has("node_info", "alloc_cpus") {
        println!("cargo:node_alloc_fields=1");
    }
    // 26.05 replaced the job id of a request by a step id.
    if !has("job_descriptor", "job_id") {
        println!("cargo:job_desc_step_id=1");
    }
}
