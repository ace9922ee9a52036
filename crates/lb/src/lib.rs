//! The load balancer's daemon.
//!
//! * [`config`]: its file
//! * [`daemon`]: follows the controller
//! * [`forwarder`]: what the controller says, put into the data plane

pub mod config;
pub mod daemon;
pub mod forwarder;
