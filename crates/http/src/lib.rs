//! Transport of the controller's HTTP API, for both sides. `crates/api` contains the documents.
//!
//! * [`problem`][]: errors by RFC 9457
//! * [`tokens`][]: proofs of callers
//! * [`sessions`][]: browsers
//! * [`endpoints`][]: handlers with their roles, and their common parts: authentication, limits, timeouts, OpenAPI
//! * [`extract`][]: parts of a request for handlers
//! * [`work`][]: slow answers
//! * [`serve`][]: connections
//! * [`client`][]: client for commands
//!
//! The controller's handlers are in `crates/control-server/src/api`.

#![deny(missing_docs)]

pub mod client;
mod connection_limit;
pub mod endpoints;
pub mod extract;
mod limits;
pub mod problem;
pub mod serve;
pub mod sessions;
pub mod tokens;
pub mod work;

pub use problem::{Problem, ProblemKind};
pub use utoipa_axum::routes;
