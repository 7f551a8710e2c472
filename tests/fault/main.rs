//! What goes wrong: crashes at every arrow, killed launchers, hung commands, scripts that do not listen.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests fail the test")]

mod arrows;
mod gpus;
mod isolation;
mod lost;
mod orphans;
mod outages;
mod plugins;
mod preemption;
