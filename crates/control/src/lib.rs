//! The controller: reports in, tables out.
//!
//! * [`config`]: what the operator wrote
//! * [`key_ring`]: the cookie keys and their rotation
//! * [`records`]: what must survive, and [`store`]: where it does; [`clock`]: by which it ages
//! * [`drains`]: who takes no new connections because an operator said so
//! * [`fleet`]: the two put together, the configuration in force
//! * [`controller`]: what is known and decided; pure
//! * [`server`]: the daemon around it, and [`api`]: what it answers to people and their programs
//! * [`show`]: `coreward status` and `coreward explain`

mod api;
pub mod audit;
pub mod clock;
pub mod config;
pub mod controller;
pub mod drains;
pub mod fleet;
pub mod key_ring;
pub mod records;
pub mod server;
pub mod show;
pub mod store;
