//! A private real Slurm cluster on one machine, with simulated GPUs.
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! use std::time::Duration;
//! let lab = pliant_lab::Lab::builder().nodes(4).gpus(8).pliant(false).start()?;
//! let job = lab.sbatch(lab.user(0), &["--gpus=2", "--wrap", "sleep 60"])?;
//! lab.wait_state(job, "RUNNING", Duration::from_secs(10))?;
//! assert_eq!(lab.gpus(job)?.len(), 2);
//! # Ok(())
//! # }
//! ```
//!
//! A lab has its own munged, slurmctld, one slurmd per node (`n0`, `n1`, …), ports and logs, all below one directory;
//! on request slurmdbd with a MariaDB of its own, device cgroups, pliantd and the agents. It needs root: jobs run as
//! the users of [`LAB_USERS`], pliantd as `pliant`, slurmctld as `slurm`, slurmd and the agents as root. GPUs are
//! character devices behind which there is nothing.
//!
//! A lab ends when its [`Lab`] is dropped. When the process that owns it dies in another way, a guard ends it.
#![forbid(unsafe_code)]

mod accounts;
mod build;
mod cgroups;
mod conf;
mod down;
mod lab;
mod ports;
mod procs;
pub mod release;
mod services;
mod slurm;
mod spec;
mod state;
mod users;

pub use build::Builder;
pub use down::{down, guard};
pub use lab::Lab;
pub use ports::labs;
pub use procs::Proc;
pub use rustix::process::Signal;
pub use slurm::{Gpu, Job};
pub use spec::{ACCOUNT, LAB_USERS, Owner, PLIANT_USER, Ports, SLURM_USER, Spec};
pub use state::State;
pub use users::User;
