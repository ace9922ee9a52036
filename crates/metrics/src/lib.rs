//! Prometheus metrics of the daemons. (`coreward-daemon` serves them.)
//!
//! * [`table`]: every metric: name, kind, labels, daemons
//! * [`snapshot`]: values, with a limit of series per metric
//! * [`component`]: values of each daemon, from its messages to others
//! * [`latency`]: histogram of durations

pub mod component;
#[cfg(test)]
mod documents_tests;
pub mod latency;
pub mod snapshot;
pub mod table;
