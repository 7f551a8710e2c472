//! The words of Pliant as types: ids, GPU ranges, hostlists, GRES, times, job groups, slices, resizes and reasons.
//!
//! Pure: no file, socket, thread, async or clock. Time is an argument, in whole [`Seconds`] since the Unix epoch
//! where it is a point in time. The daemon, the replay of a published trace and the property tests all work on
//! these types.
#![forbid(unsafe_code)]

pub mod capture;
pub mod cluster;
pub mod conf;
pub mod gpu;
pub mod gres;
pub mod group;
pub mod hostlist;
pub mod ids;
pub mod job_state;
pub mod range;
pub mod reason;
pub mod resize;
pub mod time;
pub mod topology;

pub use cluster::{Cluster, Demand, Node, PendingJob};
pub use group::{Group, Locality, Member, Slice};
pub use ids::{GpuCount, JobId, NodeName, OrderId, Seconds};
pub use range::GpuRange;
pub use reason::Reason;
