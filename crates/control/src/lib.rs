//! The controller: reports in, tables out.
//!
//! * [`config`]: the controller's own file
//! * [`store`]: where the fleet's records survive (`coreward-fleet`)
//! * [`controller`]: what is known and decided; pure
//! * [`server`]: the daemon around it, and [`api`]: what it answers to people and their programs
//! * [`show`]: `coreward status` and `coreward explain`

mod api;
pub mod config;
pub mod controller;
pub mod server;
pub mod show;
pub mod store;
