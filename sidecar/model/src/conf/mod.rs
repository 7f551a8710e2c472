//! Slurm's configuration files: what they say, read from their text.
//!
//! Includes are followed through a function that the caller gives, so that nothing here touches a file. What is
//! damaged is refused with file, line and reason; nothing is guessed. Every file has a limit to what it may stand for,
//! so that a short one cannot fill the memory.

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
/// How many includes are followed in all.
pub const MAX_INCLUDES: usize = 1024;
/// The longest text, with its includes, in bytes.
pub const MAX_TEXT: usize = 64 << 20;
/// How many names and numbers all lines of a file may stand for; nodes are at most
/// [`MAX_NAMES`](crate::hostlist::MAX_NAMES).
pub const MAX_TOTAL: usize = 4 << 20;

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
    /// At a line of a file. Control characters of the file, which a terminal would obey, do not reach the reason.
    pub fn new(file: &str, line: usize, reason: impl Into<String>) -> Self {
        ConfError { file: file.to_owned(), line, reason: reason.into().replace(char::is_control, " ") }
    }
}

/// Gives the text of an included file by its path as written, or says why it cannot.
pub type Read<'a> = &'a mut dyn FnMut(&str) -> Result<String, String>;

/// The start of a text, for a message.
fn short(text: &str) -> String {
    text.chars().take(60).collect()
}

/// What a file may still stand for.
struct Budget {
    left: usize,
    all: usize,
}

impl Budget {
    fn new(all: usize) -> Self {
        Budget { left: all, all }
    }

    fn take(&mut self, entry: &Entry, count: usize) -> Result<(), ConfError> {
        let all = self.all;
        let too_many = || entry.error(format!("the file stands for more than {all} names and numbers"));
        self.left = self.left.checked_sub(count).ok_or_else(too_many)?;
        Ok(())
    }
}
