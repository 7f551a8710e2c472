//! Captures of commands that show GPUs: `nvidia-smi topo -m`, `nvidia-smi -L`, `rocm-smi --showtopo`.
//!
//! Everything is found by its label, never by its column or line number. Cells are never shifted: a row that does not
//! match its header is refused.

mod nvidia;
mod rocm;

pub use nvidia::{Listed, list, topo};
pub use rocm::topo as rocm_topo;

use crate::topology::NodeTopology;

/// The longest line that is read, in bytes.
pub const MAX_LINE: usize = 1 << 20;
/// The most GPUs of a node.
pub const MAX_GPUS: usize = 64;

/// Why a capture is not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct CaptureError {
    /// Line, from 1; 0: the capture as a whole.
    pub line: usize,
    /// What is wrong.
    pub reason: String,
}

impl CaptureError {
    fn new(line: usize, reason: impl Into<String>) -> Self {
        CaptureError { line, reason: reason.into() }
    }
}

/// What a capture holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Capture {
    /// GPUs and their links.
    Topology(NodeTopology),
    /// GPUs and their MIG instances.
    List(Vec<Listed>),
}

/// Reads a capture, whichever it is.
///
/// # Errors
/// With the line and the reason; also where nothing is recognised.
pub fn read(text: &str) -> Result<Capture, CaptureError> {
    if let Some((i, _)) = text.lines().enumerate().find(|(_, l)| l.len() > MAX_LINE) {
        return Err(CaptureError::new(i + 1, format!("longer than {MAX_LINE} bytes")));
    }
    if text.contains("between two GPUs") {
        return rocm::topo(text).map(Capture::Topology);
    }
    if nvidia::has_matrix(text) {
        return nvidia::topo(text).map(Capture::Topology);
    }
    let listed = nvidia::list(text)?;
    if listed.is_empty() {
        let expected = "neither `nvidia-smi topo -m`, `nvidia-smi -L` nor `rocm-smi --showtopo`";
        return Err(CaptureError::new(0, format!("no GPUs in it: this is {expected}")));
    }
    Ok(Capture::List(listed))
}
