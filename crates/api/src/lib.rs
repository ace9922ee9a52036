//! Documents of the controller's HTTP API, for both sides, without I/O.
//!
//! * [`types`][]: documents, also the source of the OpenAPI document
//! * [`role`][]: roles of callers

#![deny(missing_docs)]

pub mod role;
pub mod types;

pub use role::{Caller, Role};
