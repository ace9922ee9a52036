//! Errors of the shared memory and of RingLeader's interface on it.

use std::net::SocketAddrV4;
use std::time::Duration;
use std::{io, path::PathBuf};

use crate::layout::GeometryError;
use crate::ring::DamagedCursor;

/// Reason for which the memory or a call is rejected.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// The file system or the kernel refuses an operation.
    #[error("{path}: cannot {action}: {error}")]
    Io {
        /// Operation that failed.
        action: &'static str,
        /// File of the memory.
        path: PathBuf,
        error: io::Error,
    },
    #[error("not the memory of an orchestrator")]
    ForeignContents,
    /// The orchestrator has another version of this library.
    #[error("layout version {found}: expected {expected}; run both sides from one release")]
    LayoutVersionMismatch {
        /// Version of the memory.
        found: u32,
        /// Version of this library.
        expected: u32,
    },
    /// The orchestrator runs as another user.
    #[error("the memory belongs to user {owner}: expected user {user}, as which this process runs")]
    OtherUser {
        /// User of the memory.
        owner: u32,
        /// Effective user of this process.
        user: u32,
    },
    /// The file is shorter or longer than its header requires.
    #[error("{found} bytes of memory: expected {expected}")]
    SizeMismatch {
        /// Bytes of the file.
        found: u64,
        /// Bytes by the header.
        expected: u64,
    },
    /// A size that no memory can have.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    #[error("another orchestrator is running with this memory")]
    OrchestratorRunning,
    #[error("the orchestrator is not running")]
    OrchestratorGone,
    /// The orchestrator runs and does not answer.
    #[error("core {core}: the orchestrator did not accept the worker within {timeout:?}")]
    WorkerNotAccepted {
        core: u16,
        /// Time that the worker waited.
        timeout: Duration,
    },
    /// The orchestrator found damaged queues and released the core. Connect again.
    #[error("core {0}: the orchestrator released the worker")]
    WorkerReleased(u16),
    #[error("core {core}: expected 0 to {last}")]
    CoreOutOfRange { core: u16, last: u16 },
    #[error("core {0} has a worker already")]
    CoreTaken(u16),
    /// No such service in the orchestrator's configuration.
    #[error("service {service}: the orchestrator has {services} services")]
    UnknownService { service: u8, services: u32 },
    /// A process has registered the service.
    #[error("service {0} is registered already")]
    RegisteredTwice(u8),
    /// A core is enabled for a service that no process has registered.
    #[error("core {core}: service {service} is not registered")]
    NotRegistered { service: u8, core: u16 },
    /// A priority that has no queue.
    #[error("priority {priority}: expected 0 to {last}")]
    PriorityOutOfRange {
        priority: u8,
        /// Lowest priority.
        last: u8,
    },
    #[error("service {service} at {address} with priority {priority}: the orchestrator has {expected}")]
    ServiceMismatch {
        service: u8,
        address: SocketAddrV4,
        priority: u8,
        /// Address and priority in the configuration.
        expected: String,
    },
    /// A payload that fits no slot.
    #[error("{length} bytes: a slot holds {limit}")]
    TooLong {
        length: usize,
        /// Maximum payload in bytes.
        limit: usize,
    },
    /// The other side does not empty a ring.
    #[error("core {core}: the ring of {ring} is full")]
    RingFull { core: u16, ring: &'static str },
    /// The other side stored a cursor that is impossible.
    #[error("core {core}: {cursors}")]
    DamagedQueue { core: u16, cursors: DamagedCursor },
}
