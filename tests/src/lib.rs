//! What the tests, the benchmarks and the demo share: an elastic training in a lab, seen from outside.
#![forbid(unsafe_code)]

pub mod training;

pub use training::{Options, Training};

use std::path::PathBuf;

/// The root of the checkout.
pub fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// A file of the private cases, or `None` with a line that names what is skipped: a fresh clone has no `../shared`.
pub fn case(path: &str) -> Option<PathBuf> {
    let file = root().join("../shared/cases/files").join(path);
    if file.exists() {
        return Some(file);
    }
    eprintln!("skipped: ../shared/cases/files/{path} is not in this checkout");
    None
}
