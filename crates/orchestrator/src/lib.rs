//! `coreward orchestrate`: RingLeader's NIC in software (NSDI'23). One thread holds requests in per-service queues and
//! sends them to the priority queues of cores, by the decisions of `coreward-model`.
//!
//! * [`engine`]: decisions, queues, monitors and workers; no sockets
//! * [`buffers`]: memory of the requests that wait

pub mod buffers;
pub mod engine;
