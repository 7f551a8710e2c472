// SPDX-License-Identifier: GPL-2.0-or-later
//! The built plugin offers exactly the names of its release, and asks only for what every loading process has.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

/// In every release.
const ALWAYS: &str = "fini init plugin_id plugin_name plugin_type plugin_version select_p_job_begin \
    select_p_job_expand select_p_job_fini select_p_job_ready select_p_job_resized select_p_job_resume \
    select_p_job_suspend select_p_job_test select_p_node_init select_p_reconfigure select_p_select_nodeinfo_set \
    select_p_select_nodeinfo_set_all";
/// Names that a release before the one in front has besides, or one from it on.
const STEPS: [(&str, (u32, u32), &str); 4] = [
    (
        "before",
        (25, 5),
        "select_p_get_info_from_plugin select_p_job_init select_p_select_jobinfo_alloc select_p_select_jobinfo_copy \
         select_p_select_jobinfo_free select_p_select_jobinfo_get select_p_select_jobinfo_pack \
         select_p_select_jobinfo_set select_p_select_jobinfo_unpack select_p_select_nodeinfo_alloc \
         select_p_select_nodeinfo_free select_p_select_nodeinfo_get select_p_select_nodeinfo_pack \
         select_p_select_nodeinfo_unpack select_p_state_restore select_p_state_save select_p_step_finish \
         select_p_step_pick_nodes select_p_step_start",
    ),
    (
        "before",
        (23, 2),
        "select_p_job_signal select_p_select_jobinfo_sprint select_p_select_jobinfo_xstrdup select_p_update_node_config",
    ),
    ("before", (23, 11), "select_p_resv_test"),
    ("from", (26, 5), "select_p_job_mem_reduce"),
];
/// Of libslurm, which every client has; nothing of slurmctld alone.
const WANTED: &str = "slurm_bit_clear slurm_bit_clear_all slurm_bit_copy slurm_bit_copybits slurm_bit_ffs slurm_bit_fls \
    slurm_bit_free slurm_bit_or slurm_bit_set slurm_bit_size slurm_bit_test slurm_conf slurm_info slurm_list_find_first \
    slurm_list_for_each slurm_running_in_slurmctld";

fn plugin() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().join("libselect_pliant.so")
}

fn names(args: &[&str]) -> BTreeSet<String> {
    let out = Command::new("nm").args(args).arg(plugin()).output().unwrap();
    assert!(out.status.success(), "nm {}: {}", plugin().display(), String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8(out.stdout).unwrap();
    text.lines().filter_map(|l| l.split_whitespace().last()).map(|n| n.split('@').next().unwrap().to_owned()).collect()
}

fn words(text: &str) -> BTreeSet<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn it_exports_the_names_of_its_release_only() {
    let [_, major, minor, _] = slurm::VERSION_NUMBER.to_be_bytes().map(u32::from);
    let mut expected = words(ALWAYS);
    for (kind, step, names) in STEPS {
        if ((major, minor) < step) == (kind == "before") {
            expected.extend(words(names));
        }
    }
    assert_eq!(names(&["-D", "--defined-only"]), expected);
}

#[test]
fn it_asks_for_what_every_client_of_slurm_has() {
    let wanted = names(&["-D", "--undefined-only"]);
    let known =
        |n: &String| n.contains("slurm") || n.contains("select") || n.contains("node_rec") || n.contains("gres");
    assert_eq!(wanted.into_iter().filter(known).collect::<BTreeSet<_>>(), words(WANTED));
}

#[test]
fn the_table_of_releases_counts_as_slurm_does() {
    let count = |release: (u32, u32)| {
        let of = |(kind, step, names): &(&str, (u32, u32), &str)| {
            if (release < *step) == (*kind == "before") { words(names).len() } else { 0 }
        };
        // init, fini and the three of every plugin are no part of it; plugin_id is.
        words(ALWAYS).len() - 5 + STEPS.iter().map(of).sum::<usize>()
    };
    let table =
        [((22, 5), 37), ((23, 2), 33), ((23, 11), 32), ((24, 5), 32), ((24, 11), 32), ((25, 5), 13), ((26, 5), 14)];
    for (release, symbols) in table {
        assert_eq!(count(release), symbols, "{release:?}");
    }
}
