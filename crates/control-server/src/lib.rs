//! The controller's daemon, which receives reports and sends tables.
//!
//! * [`config`]: the controller's own file
//! * [`copy`]: `coreward store copy`
//! * [`server`]: the daemon
//! * [`api`]: its HTTP API

mod api;
pub mod config;
pub mod copy;
pub mod server;
