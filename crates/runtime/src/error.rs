//! Errors of the shared memory, and of RingLeader's interface on it.

use std::net::SocketAddrV4;
use std::time::Duration;
use std::{io, path::PathBuf};

use crate::ring::DamagedRingCursor;
use crate::segment_layout::SegmentGeometryError;

/// Reason why the shared memory cannot be used or a call failed.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// The file system or the kernel rejected an operation on the shared memory.
    #[error("{path}: cannot {action}: {error}")]
    Io {
        /// Name of the operation that failed.
        action: &'static str,
        path: PathBuf,
        error: io::Error,
    },
    #[error("not the memory of an orchestrator")]
    ForeignSharedMemory,
    /// The orchestrator uses a version of this library with another memory layout.
    #[error("layout version {found}: expected {expected}; run both sides from one release")]
    LayoutVersionMismatch {
        /// Layout version of the shared memory.
        found: u32,
        /// Layout version of this library.
        expected: u32,
    },
    /// The orchestrator runs as a different user than this process.
    #[error("the memory belongs to user {owner}: expected user {user}, as which this process runs")]
    OwnedByOtherUser {
        /// User id of the shared memory's owner.
        owner: u32,
        /// Effective user id of this process.
        user: u32,
    },
    /// The file is shorter or longer than its header requires.
    #[error("{found} bytes of memory: expected {expected}")]
    MemorySizeMismatch {
        /// Size of the file in bytes.
        found: u64,
        /// Size that the header requires, in bytes.
        expected: u64,
    },
    /// A configured size is outside the range that the shared memory allows.
    #[error(transparent)]
    InvalidSegmentGeometry(#[from] SegmentGeometryError),
    #[error("another orchestrator is running with this memory")]
    OrchestratorRunning,
    #[error("the orchestrator is not running")]
    OrchestratorNotRunning,
    /// The orchestrator is running but has not accepted the worker.
    #[error("core {core}: the orchestrator did not accept the worker within {timeout:?}")]
    WorkerNotAccepted { core: u16, timeout: Duration },
    /// The orchestrator has found damaged queues and released the core, so that the worker must connect again.
    #[error("core {0}: the orchestrator released the worker")]
    CoreWorkerReleased(u16),
    #[error("core {core}: expected 0 to {last}")]
    CoreOutOfRange { core: u16, last: u16 },
    #[error("core {0} has a worker already")]
    CoreHasWorker(u16),
    /// The orchestrator's configuration has no service with this number.
    #[error("service {service}: the orchestrator has {services} services")]
    UnknownService { service: u8, services: u32 },
    /// Another process has already registered the service.
    #[error("service {0} is registered already")]
    ServiceRegisteredTwice(u8),
    /// A service was enabled on a core although no process has registered it.
    #[error("core {core}: service {service} is not registered")]
    ServiceNotRegistered { service: u8, core: u16 },
    /// The memory has no queue for this priority.
    #[error("priority {priority}: expected 0 to {last}")]
    PriorityOutOfRange {
        priority: u8,
        /// Largest valid number. It is the lowest priority, and 0 is the highest.
        last: u8,
    },
    #[error("service {service} at {address} with priority {priority}: the orchestrator has {expected}")]
    ServiceSettingsMismatch {
        service: u8,
        address: SocketAddrV4,
        priority: u8,
        /// Address and priority that the orchestrator's configuration has for the service.
        expected: String,
    },
    /// The payload does not fit into a slot.
    #[error("{length} bytes: a slot holds {limit}")]
    PayloadTooLong { length: usize, limit: usize },
    /// A ring is full, because its consumer does not empty it.
    #[error("core {core}: the ring of {ring} is full")]
    RingFull { core: u16, ring: &'static str },
    /// The process at the other end of a ring has stored an impossible cursor value.
    #[error("core {core}: {cursors}")]
    DamagedQueue { core: u16, cursors: DamagedRingCursor },
}
