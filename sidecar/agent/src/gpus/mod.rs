//! The node's GPUs: what NVML says of them, which of them Slurm means, and what happens to them.
//!
//! NVML is read in a thread of its own ([`reader`]), since a call may take long. [`identity`], [`inventory`] and
//! [`audit`] are pure; [`watch`] joins them with /proc and gres.conf and tells the core.

mod audit;
mod identity;
mod inventory;
mod reader;
mod slurm_files;
mod watch;

pub use watch::{Watch, run};
