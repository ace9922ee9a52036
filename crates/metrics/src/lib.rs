//! Prometheus metrics of the daemons. `coreward-daemon` serves them.
//!
//! * [`table`]: declarations: name, kind, labels, daemons, help
//! * [`snapshot`]: values, with a limit of series per metric
//! * [`component`]: values of each daemon, from its messages to others
//! * [`latency`]: histogram of durations

pub mod component;
pub mod latency;
pub mod snapshot;
pub mod table;

#[doc(hidden)]
pub use linkme;
