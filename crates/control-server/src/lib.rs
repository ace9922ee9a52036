//! The controller: reports in, tables out.
//!
//! * [`config`]: the controller's own file
//! * [`copy`]: `coreward store copy`
//! * [`server`]: the daemon, and [`api`]: its HTTP API

mod api;
pub mod config;
pub mod copy;
pub mod server;
