// SPDX-License-Identifier: GPL-2.0-or-later
//! The only safe wrapper of Slurm's C interfaces.
//!
//! | module | for |
//! |---|---|
//! | [`fence`] | exported functions of plugins: no panic crosses into Slurm |
//! | [`spank`] | what a SPANK plugin asks of the process that loaded it |
//! | [`process`] | environment and exit of the Slurm command that a plugin runs in |
//! | `select` (feature) | slurmctld's own structures, for the select plugin |
//! | `client` (feature) | libslurm calls; the program links libslurm itself |

#[cfg(feature = "client")]
pub mod client;
pub mod fence;
pub mod process;
#[cfg(feature = "select")]
pub mod select;
pub mod spank;

/// The Slurm release that this was built for, as Slurm writes it in `plugin_version`.
pub const VERSION_NUMBER: u32 = slurm_sys::PLIANT_SLURM_VERSION;

/// [`VERSION_NUMBER`] as text, such as `22.05.8`.
pub fn version() -> String {
    let [_, major, minor, micro] = VERSION_NUMBER.to_be_bytes();
    format!("{major}.{minor:02}.{micro}")
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_version_has_slurms_form() {
        let parts: Vec<u32> = super::version().split('.').map(|p| p.parse().unwrap()).collect();
        assert!(parts.len() == 3 && parts[0] >= 22, "{parts:?}");
    }
}
