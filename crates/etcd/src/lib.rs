//! What several controllers share in etcd.
//!
//! * [`cluster`]: the members, and a request that goes on to the next one when a member does not answer
//! * [`leadership`]: one controller leads, by a lease; it knows by its own clock until when
//! * [`parts`]: the state, which only who leads can write, and which changes whole or not at all
//! * [`local`]: an etcd of one's own, for tests
//! * [`clock`]: a clock that goes on while the machine sleeps
//!
//! All keys begin with the prefix that the operator chose:
//!
//! ```text
//! PREFIX/leader               who leads; goes away with its lease
//! PREFIX/manifest             which parts are in force: the one key whose change is a change of the state
//! PREFIX/parts/NAME/NUMBER    a part, as the change of that number wrote it
//! ```

pub mod clock;
pub mod cluster;
pub mod leadership;
pub mod local;
pub mod parts;

pub use etcd_client::{Certificate, Identity, TlsOptions};

/// What follows the prefix in a fleet's keys. A prefix with one of these would stand among the records of another fleet, which its
/// leader throws away as left over.
pub const OWN_SEGMENTS: [&str; 3] = ["leader", "manifest", "parts"];

/// Why something in etcd could not be done.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// No member answered in time. Whether it was done is not known.
    #[error("etcd at {endpoints}: {problem}")]
    Unreachable {
        /// Of all members.
        endpoints: String,
        /// What the last one that was asked said, or that it said nothing.
        problem: String,
    },
    /// etcd does not want to.
    #[error("etcd refuses: {0}")]
    Rejected(String),
    /// Another controller leads, or may.
    #[error("this controller leads no more: {0}")]
    Deposed(String),
    /// What is there was written by something else, or by a later version.
    #[error("{key} in etcd: {problem}")]
    Content {
        /// Where.
        key: String,
        /// What is wrong.
        problem: String,
    },
}
