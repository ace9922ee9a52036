//! The controller: reports in, tables out.
//!
//! * [`config`]: what the operator wrote
//! * [`records`]: what must survive, and [`store`]: where it does

pub mod config;
pub mod records;
pub mod store;
