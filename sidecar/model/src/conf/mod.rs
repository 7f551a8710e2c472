//! Slurm's configuration files: what they say, read from their text.
//!
//! Includes are followed through a function that the caller gives, so that nothing here touches a file. What is
//! damaged is refused with file, line and reason; nothing is guessed.

pub mod gres_conf;
pub mod index_list;
mod lines;
pub mod slurm_conf;
pub mod topology_conf;
pub mod topology_yaml;

pub use lines::{Entry, Word, entries};

/// The longest line that is read, in bytes.
pub const MAX_LINE: usize = 1 << 20;
/// How deep includes may be nested.
pub const MAX_DEPTH: usize = 8;

/// Why a file is not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}: {reason}")]
pub struct ConfError {
    /// Which file, as it was named.
    pub file: String,
    /// Line, from 1; 0: the file as a whole.
    pub line: usize,
    /// What is wrong.
    pub reason: String,
}

impl ConfError {
    /// At a line of a file.
    pub fn new(file: &str, line: usize, reason: impl Into<String>) -> Self {
        ConfError { file: file.to_owned(), line, reason: reason.into() }
    }
}

/// Gives the text of an included file by its path as written, or says why it cannot.
pub type Read<'a> = &'a mut dyn FnMut(&str) -> Result<String, String>;
