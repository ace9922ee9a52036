//! An open-loop load generator (`coreward-lab load`), and the protocols that it speaks.
//!
//! * [`key_value`]: requests and responses of the testbed's key-value server (UDP); [`paced`]: of its paced server
//!   (TCP)
//! * [`dns`]: the parts of DNS that a load generator needs
//! * [`request_type`]: kinds of requests, and how long each takes; [`workload`]: which are sent; [`arrivals`]: when
//! * [`generator`]: sends them, over a [`transport`], and knows which are [`outstanding`]
//! * [`results`]: outcomes; [`report`], [`histogram_log`]: output; [`cli`]: the command
//! * [`receive`]: arrival times of the kernel; [`event_loop`]: waiting

pub mod arrivals;
pub mod cli;
pub mod dns;
pub mod event_loop;
pub mod generator;
pub mod histogram_log;
pub mod key_value;
pub mod outstanding;
pub mod paced;
pub mod receive;
pub mod report;
pub mod request_type;
pub mod results;
pub mod transport;
pub mod workload;
