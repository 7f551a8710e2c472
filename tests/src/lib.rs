//! What the tests, the benchmarks and the demo share: an elastic training in a lab, seen from outside.
#![forbid(unsafe_code)]

pub mod select;
pub mod training;

pub use training::{Options, Training};

use std::path::PathBuf;

/// The root of the checkout.
pub fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}
