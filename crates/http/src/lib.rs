//! HTTP transport of the controller's API, for the server and the client. `crates/api` contains the exchanged
//! documents.
//!
//! * [`problem`][]: error responses as in RFC 9457
//! * [`tokens`][]: bearer tokens that authenticate callers
//! * [`sessions`][]: sessions of browsers
//! * [`endpoints`][]: router with authentication, roles, limits, timeouts and the OpenAPI document
//! * [`request_extractors`][]: extractors of request data for handlers
//! * [`request_work`][]: worker threads for slow answers
//! * [`serve`][]: listening socket and its connections
//! * [`client`][]: client for commands
//!
//! The controller's handlers are in `crates/control-server/src/api`.

#![deny(missing_docs)]

pub mod client;
mod connection_limit;
pub mod endpoints;
mod limits;
pub mod problem;
pub mod request_extractors;
pub mod request_work;
pub mod serve;
pub mod sessions;
pub mod tokens;

pub use problem::{Problem, ProblemKind};
pub use utoipa_axum::routes;
