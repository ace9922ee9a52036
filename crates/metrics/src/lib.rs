//! Prometheus endpoints of coreward's parts.
//!
//! * [`table`]: every metric, once: name, kind, labels, who serves it
//! * [`page`]: values of one moment, and how many series a metric may have
//! * [`parts`]: what each part says, from the messages in which it says the same to others
//! * [`latency`]: how long something took
//! * [`endpoint`] serves it by HTTP

pub mod endpoint;
pub mod latency;
pub mod page;
pub mod parts;
pub mod table;
