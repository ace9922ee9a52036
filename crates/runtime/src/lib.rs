//! Shared memory between the orchestrator of a server and its workers: per-core priority queues, feedback and hints.
//!
//! The orchestrator corresponds to RingLeader's NIC, the workers to RingLeader's datapath OS (NSDI'23).
//!
//! * [`ring`]: cursors of a ring with one producer and one consumer
//! * [`layout`]: sizes and offsets in the memory
//! * [`message`]: RingLeader's interface between cores and NIC (Table 1)
//! * [`core_queues`]: the orchestrator's side
//! * [`worker`]: the workers' side
//! * [`serve`]: a worker's loop: function handlers that yield to higher priorities
//! * [`allocation`]: assignment of cores to services, by load hints

pub mod allocation;
pub mod core_queues;
mod error;
pub mod layout;
pub mod message;
pub mod ring;
mod segment;
pub mod serve;
pub mod worker;

pub use error::RuntimeError;
pub use segment::ServiceEntry;
