// SPDX-License-Identifier: GPL-2.0-or-later
//! The built plugin offers Slurm's names and no other, and asks only for what every loading process has.
//!
//! rustc writes the linker version script of a cdylib itself, from its `no_mangle` items; a second one from a build
//! script is refused by GNU ld. This test is what keeps the export map right.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

const EXPORTS: [&str; 6] = [
    "plugin_name",
    "plugin_type",
    "plugin_version",
    "slurm_spank_init",
    "slurm_spank_init_post_opt",
    "spank_plugin_version",
];

/// In sbatch, salloc, srun, scrontab, slurmd and slurmstepd alike (libslurmfull).
const WANTED: [&str; 9] = [
    "slurm_error",
    "slurm_spank_log",
    "spank_context",
    "spank_get_item",
    "spank_getenv",
    "spank_job_control_setenv",
    "spank_option_register",
    "spank_setenv",
    "spank_unsetenv",
];

fn plugin() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().join("libspank_pliant.so")
}

fn output(program: &str, args: &[&str]) -> String {
    let out = Command::new(program).args(args).arg(plugin()).output().unwrap();
    assert!(
        out.status.success(),
        "{program} {args:?} {}: {}",
        plugin().display(),
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8(out.stdout).unwrap()
}

fn names(nm: &str) -> BTreeSet<String> {
    nm.lines().filter_map(|l| l.split_whitespace().last()).map(|n| n.split('@').next().unwrap().to_owned()).collect()
}

#[test]
fn it_exports_slurms_names_only() {
    assert_eq!(names(&output("nm", &["-D", "--defined-only"])), EXPORTS.map(str::to_owned).into());
}

#[test]
fn it_asks_for_what_every_loading_process_has() {
    let wanted = names(&output("nm", &["-D", "--undefined-only"]));
    let of_slurm: BTreeSet<_> = wanted.into_iter().filter(|n| n.contains("slurm") || n.contains("spank")).collect();
    assert_eq!(of_slurm, WANTED.map(str::to_owned).into());
}

#[test]
fn it_does_not_need_libslurm() {
    let needed = output("readelf", &["-d"]);
    assert!(needed.contains("NEEDED") && !needed.contains("libslurm"), "{needed}");
}
