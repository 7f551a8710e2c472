// SPDX-License-Identifier: GPL-2.0-or-later
//! Passes on how this Slurm release's structures look (see slurm-sys/build.rs).

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for (shape, told) in
        [("node_alloc_fields", "DEP_SLURM_NODE_ALLOC_FIELDS"), ("job_desc_step_id", "DEP_SLURM_JOB_DESC_STEP_ID")]
    {
        println!("cargo:rustc-check-cfg=cfg({shape})");
        if std::env::var_os(told).is_some() {
            println!("cargo:rustc-cfg={shape}");
        }
    }
}
