//! Prometheus metrics of the daemons, which `coreward-daemon` serves.
//!
//! * [`metric_declarations`]: declarations of metrics with name, kind, labels, daemons and help
//! * [`snapshot`]: values of metrics, with a limit of series per metric
//! * [`message_metrics`]: metrics whose values are in messages between daemons
//! * [`latency_histogram`]: histogram of durations

pub mod latency_histogram;
pub mod message_metrics;
pub mod metric_declarations;
pub mod snapshot;

#[doc(hidden)]
pub use linkme;
