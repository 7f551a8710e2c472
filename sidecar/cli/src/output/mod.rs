//! What is shown, in one of two forms.

mod columns;
mod gpus;
pub mod json;
pub mod table;
#[cfg(test)]
mod tests;

use crate::args::Show;
use pliant_model::gpu::GpuEvent;
use pliant_protocol::admin::{Explanation, Finding, GpuView, JobView, Status};

/// A form of output. Each method gives the whole text, with its last newline.
pub trait Output {
    /// `pliant status`
    ///
    /// # Errors
    /// None for tables; JSON fails only where a value has no JSON form.
    fn status(&self, status: &Status) -> anyhow::Result<String>;
    /// `pliant jobs`
    ///
    /// # Errors
    /// As [`Output::status`].
    fn jobs(&self, jobs: &[JobView]) -> anyhow::Result<String>;
    /// `pliant explain`
    ///
    /// # Errors
    /// As [`Output::status`].
    fn explanation(&self, explanation: &Explanation) -> anyhow::Result<String>;
    /// `pliant gpus`
    ///
    /// # Errors
    /// As [`Output::status`].
    fn gpus(&self, gpus: &[GpuView], events: &[GpuEvent]) -> anyhow::Result<String>;
    /// `pliant doctor`
    ///
    /// # Errors
    /// As [`Output::status`].
    fn findings(&self, findings: &[Finding]) -> anyhow::Result<String>;
}

/// The form that was asked for.
pub fn choose(show: Show) -> Box<dyn Output> {
    if show.json { Box::new(json::Json) } else { Box::new(table::Table::local(!show.noheader)) }
}
