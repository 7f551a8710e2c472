// SPDX-License-Identifier: GPL-2.0-or-later
//! Which functions a select plugin has changes with the release: `cfg(before_2311)` and its neighbours say so.

const STEPS: [(u32, u32); 6] = [(23, 2), (23, 11), (24, 5), (24, 11), (25, 5), (26, 5)];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let version = std::env::var("DEP_SLURM_VERSION").unwrap_or_default();
    let mut parts = version.split('.').map(|p| p.parse::<u32>().unwrap_or(0));
    let built_for = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    for (major, minor) in STEPS {
        println!("cargo:rustc-check-cfg=cfg(before_{major}{minor:02})");
        if built_for < (major, minor) {
            println!("cargo:rustc-cfg=before_{major}{minor:02}");
        }
    }
}
