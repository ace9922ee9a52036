//! Implements RingLeader's NIC (NSDI'23) in software (`coreward orchestrate`). One thread holds requests in a queue for
//! each service and sends them to the cores' priority queues. `coreward-model` makes the decisions.
//!
//! * [`config`]: the configuration file
//! * [`classify`]: assignment of datagrams to services
//! * [`daemon`]: the main loop
//! * [`socket`]: UDP sockets that handle datagrams in batches
//! * [`command`]: the command and its arguments
//! * [`intake`]: AF_XDP, with the sockets as fallback
//! * [`dispatch_engine`]: decisions, queues, load monitors and workers, without sockets
//! * [`report`]: counters as JSON and as metrics
//! * [`request_buffers`]: buffers for the requests that wait

pub mod classify;
pub mod command;
pub mod config;
pub mod daemon;
pub mod dispatch_engine;
pub mod intake;
pub mod report;
pub mod request_buffers;
pub mod socket;
