//! What goes wrong: crashes at every arrow, killed launchers, hung commands, scripts that do not listen.
#![forbid(unsafe_code)]

mod arrows;
mod isolation;
mod lost;
mod orphans;
mod outages;
mod preemption;
