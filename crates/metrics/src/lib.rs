//! Prometheus metrics of the daemons, which `coreward-daemon` serves.
//!
//! * [`table`]: declarations of metrics with name, kind, labels, daemons and help
//! * [`snapshot`]: values of metrics, with a limit of series per metric
//! * [`component`]: metrics whose values are in messages between daemons
//! * [`latency`]: histogram of durations

pub mod component;
pub mod latency;
pub mod snapshot;
pub mod table;

#[doc(hidden)]
pub use linkme;
