//! Shared state and leader election for a fleet's controllers, stored in etcd.
//!
//! * [`cluster`]: connections to the members, which are tried in turn
//! * [`leadership`]: leader election with a lease
//! * [`chunked_store`]: state that only the leader writes, and that each change replaces atomically
//! * [`local`]: etcd processes for tests
//!
//! These keys exist below the operator's prefix:
//!
//! ```text
//! PREFIX/leader               leader, with its lease
//! PREFIX/manifest             names of the current parts; only a change of this key changes the state
//! PREFIX/parts/NAME/NUMBER    part as written by the change with this number
//! ```

pub mod chunked_store;
pub mod clock;
pub mod cluster;
pub mod leadership;
pub mod local;

pub use etcd_client::{Certificate, Identity, TlsOptions};

/// Key segments that follow a fleet's key prefix. No prefix may contain them. Otherwise, the fleet's keys would be
/// among the keys of another fleet, whose leader would delete them.
pub const RESERVED_KEY_SEGMENTS: [&str; 3] = ["leader", "manifest", "parts"];

/// Reason why a request to etcd failed.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// No member answered in time, so the outcome of the request is unknown.
    #[error("etcd at {endpoints}: {problem}")]
    Unreachable {
        endpoints: String,
        /// Error of the member that was tried last.
        problem: String,
    },
    #[error("etcd rejects: {0}")]
    Rejected(String),
    #[error("this controller no longer leads: {0}")]
    Deposed(String),
    /// A key contains a record of another program, or of a later version of this one.
    #[error("{key} in etcd: {problem}")]
    InvalidContent { key: String, problem: String },
}
