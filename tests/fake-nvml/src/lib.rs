//! NVML's C ABI without a GPU: what a scenario file says, every call answers (README.md).
//!
//! `scenario` reads the file and works out each GPU: safe, pure. `state` holds what the process has opened; `exports`
//! are the C functions, each a line over one fence.

mod exports;
mod scenario;
mod state;

pub use scenario::{Gpu, Scenario};
