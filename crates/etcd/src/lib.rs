//! State and leader election of several controllers in etcd.
//!
//! * [`cluster`]: the members, tried in turn
//! * [`leadership`]: leader election by a lease
//! * [`chunked_store`]: the state, replaced atomically, written by the leader only
//! * [`local`]: etcd processes for tests
//!
//! Keys below the operator's prefix:
//!
//! ```text
//! PREFIX/leader               the leader, with its lease
//! PREFIX/manifest             parts in force; the only key whose change changes the state
//! PREFIX/parts/NAME/NUMBER    a part as written by change NUMBER
//! ```

pub mod chunked_store;
pub mod clock;
pub mod cluster;
pub mod leadership;
pub mod local;

pub use etcd_client::{Certificate, Identity, TlsOptions};

/// Key segments that follow the prefix of a fleet. No prefix may contain them: its keys would be among another fleet's
/// records, which that fleet's leader deletes.
pub const RESERVED_KEY_SEGMENTS: [&str; 3] = ["leader", "manifest", "parts"];

/// Reason for which a request to etcd failed.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// No member answered in time, so that the outcome is unknown.
    #[error("etcd at {endpoints}: {problem}")]
    Unreachable {
        endpoints: String,
        /// Error of the member that was asked last.
        problem: String,
    },
    #[error("etcd refuses: {0}")]
    Rejected(String),
    #[error("this controller no longer leads: {0}")]
    Deposed(String),
    /// A record was written by another program, or by a later version of this one.
    #[error("{key} in etcd: {problem}")]
    Content { key: String, problem: String },
}
