//! Shared files between pliantd and the select plugin inside slurmctld: the plan board (`plan`) and the event ring
//! (`ring`). Both lie on a tmpfs, each is written by one side only, and neither is ever mapped: what another process
//! may truncate must not be.

mod bytes;
mod event;
mod file;
mod plan;
mod ring;

pub use event::{Event, Outcome, Record, SeenJob, Sight, Told};
pub use file::{FileError, Trusted, on_memory};
pub use plan::{Board, BoardReader, Class, Key, MAX_BOARD, Place, PlaceRef, Plan, PlanRef, Shape, Signature, write};
pub use ring::{Read, RingReader, RingWriter};
