//! The controller: reports in, tables out.
//!
//! * [`config`]: the controller's own file
//! * [`copy`]: `coreward store copy`
//! * [`server`]: the daemon around it, and [`api`]: what it answers to people and their programs

mod api;
pub mod config;
pub mod copy;
pub mod server;
