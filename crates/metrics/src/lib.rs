//! Prometheus endpoints of coreward's parts.
//!
//! * [`table`]: every metric, once: name, kind, labels, who serves it
//! * [`snapshot`]: values of one moment, and how many series a metric may have
//! * [`component`]: what each part says, from the messages in which it says the same to others
//! * [`latency`]: how long something took
//! * [`endpoint`] serves it by HTTP

pub mod component;
pub mod endpoint;
pub mod latency;
pub mod snapshot;
pub mod table;
