//! An open-loop load generator (`coreward-lab load`), and the protocols that it speaks.
//!
//! * [`key_value`], [`paced_protocol`]: protocols of the testbed's key-value server (UDP) and paced server (TCP)
//! * [`dns`]: the parts of DNS that a load generator needs
//! * [`request_type`], [`workload`], [`arrival_schedule`]: how long requests take, which requests are sent, and when
//! * [`generator`]: the main loop, which sends requests over a [`transport`] and keeps track of
//!   [`outstanding_requests`] ones
//! * [`results`], [`report`], [`histogram_log`]: the outcomes, and their output
//! * [`timestamped_receiver`], [`event_loop`]: the kernel's arrival times, and waiting for events
//! * [`cli`]: the command

pub mod arrival_schedule;
pub mod cli;
pub mod dns;
pub mod event_loop;
pub mod generator;
pub mod histogram_log;
pub mod key_value;
pub mod outstanding_requests;
pub mod paced_protocol;
pub mod report;
pub mod request_type;
pub mod results;
pub mod timestamped_receiver;
pub mod transport;
pub mod workload;
