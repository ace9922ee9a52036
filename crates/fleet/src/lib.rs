//! The fleet: servers, services and what the controller keeps of them.
//!
//! * [`config`]: the fleet's document
//! * [`key_ring`]: the cookie keys and their rotation
//! * [`records`]: state that outlives a controller; [`clock`]: by which it ages
//! * [`audit`]: the changes that were made
//! * [`drains`]: servers that take no new connections because an operator said so
//! * [`fleet`]: document and records put together, the configuration in force

pub mod audit;
pub mod clock;
pub mod config;
pub mod drains;
pub mod fleet;
pub mod key_ring;
pub mod records;
