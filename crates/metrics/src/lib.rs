//! Prometheus endpoints of the daemons.
//!
//! * [`table`]: every metric: name, kind, labels, daemons
//! * [`snapshot`]: values, with a limit of series per metric
//! * [`component`]: values of each daemon, from its messages to others
//! * [`latency`]: histogram of durations
//! * [`endpoint`]: server of `GET /metrics`

pub mod component;
#[cfg(test)]
mod documents_tests;
pub mod endpoint;
pub mod latency;
pub mod snapshot;
pub mod table;
