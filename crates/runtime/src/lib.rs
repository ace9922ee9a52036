//! Shared memory between a server's orchestrator and its workers, with queues by core and priority, feedback and hints.
//!
//! The orchestrator corresponds to RingLeader's NIC, and the workers correspond to its datapath OS (NSDI'23).
//!
//! * [`ring`]: cursors of a ring with one producer and one consumer
//! * [`segment_layout`]: sizes and offsets in the shared memory
//! * [`worker_message`]: RingLeader's interface between cores and NIC (Table 1)
//! * [`core_queues`]: the orchestrator's side of the memory
//! * [`worker`]: the workers' side of the memory
//! * [`serve`]: a worker's loop, whose handlers yield to requests of higher priority
//! * [`allocation`]: assignment of cores to services

pub mod allocation;
pub mod core_queues;
mod error;
pub mod ring;
mod segment;
pub mod segment_layout;
pub mod serve;
pub mod worker;
pub mod worker_message;

pub use error::RuntimeError;
pub use segment::SegmentServiceEntry;
