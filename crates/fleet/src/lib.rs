//! The fleet, with its servers, services and their records.
//!
//! * [`config`]: the fleet's document
//! * [`key_ring`]: the cookie keys and their rotation
//! * [`records`]: persistent state
//! * [`clock`]: clock of the persistent state
//! * [`audit`]: audit log
//! * [`drains`]: drains by operators
//! * [`fleet`]: the active configuration

pub mod audit;
pub mod clock;
pub mod config;
pub mod drains;
pub mod fleet;
pub mod key_ring;
pub mod records;
