//! `coreward orchestrate`: RingLeader's NIC in software (NSDI'23). One thread holds requests in per-service queues and
//! sends them to the priority queues of cores, by the decisions of `coreward-model`.
//!
//! * [`config`]: the file
//! * [`classify`]: classification of datagrams by service
//! * [`daemon`]: the loop
//! * [`socket`]: datagrams in batches
//! * [`command`]: the command's arguments
//! * [`intake`]: AF_XDP, with the sockets as fallback
//! * [`engine`]: decisions, queues, monitors and workers; no sockets
//! * [`report`]: counters as JSON and as metrics
//! * [`buffers`]: memory of the requests that wait

pub mod buffers;
pub mod classify;
pub mod command;
pub mod config;
pub mod daemon;
pub mod engine;
pub mod intake;
pub mod report;
pub mod socket;
