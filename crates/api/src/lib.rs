//! The controller's HTTP API, for both sides.
//!
//! * [`types`][]: documents, also the source of the OpenAPI document
//! * [`problem`][]: errors by RFC 9457
//! * [`role`] and [`tokens`]: roles, and the proofs of callers
//! * [`sessions`][]: browsers
//! * [`endpoints`][]: handlers with their roles, and their common parts: authentication, limits, timeouts, OpenAPI
//! * [`extract`][]: parts of a request for handlers
//! * [`work`][]: slow answers
//! * [`serve`][]: connections
//! * [`client`][]: client for commands
//!
//! The handlers are the controller's: `crates/control-server/src/api`.

#![deny(missing_docs)]

pub mod client;
mod connection_limit;
pub mod endpoints;
pub mod extract;
mod limits;
pub mod problem;
pub mod role;
pub mod serve;
pub mod sessions;
pub mod tokens;
pub mod types;
pub mod work;

pub use problem::{Problem, ProblemKind};
pub use role::{Caller, Role};
pub use utoipa_axum::routes;
