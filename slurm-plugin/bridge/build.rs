// SPDX-License-Identifier: GPL-2.0-or-later
//! Links libslurm here and nowhere else: the plugins must not need it. `PLIANT_SLURM_LIB` names its directory where that
//! is no usual one.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=PLIANT_SLURM_LIB");
    if let Some(dir) = std::env::var_os("PLIANT_SLURM_LIB") {
        println!("cargo:rustc-link-arg=-L{}", dir.display());
    }
    // A link argument comes after all objects, where a linker that drops unneeded libraries sees that it is needed.
    println!("cargo:rustc-link-arg=-lslurm");
}
