//! An open-loop load generator (`coreward-lab load`), and the protocols that it speaks.
//!
//! * [`key_value`], [`paced`]: protocols of the testbed's key-value server (UDP) and paced server (TCP)
//! * [`dns`]: the parts of DNS that a load generator needs
//! * [`request_type`], [`workload`], [`arrivals`]: how long requests take, which requests are sent, and when
//! * [`generator`]: the main loop, which sends requests over a [`transport`] and keeps track of [`outstanding`] ones
//! * [`results`], [`report`], [`histogram_log`]: the outcomes, and their output
//! * [`receive`], [`event_loop`]: the kernel's arrival times, and waiting for events
//! * [`cli`]: the command

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
