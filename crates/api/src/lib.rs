//! The controller's HTTP API, as its two sides see it.
//!
//! * [`types`][]: the documents, from which the OpenAPI document comes, too
//! * [`problem`][]: errors, as RFC 9457 has them
//! * [`role`] and [`tokens`]: who may do what, and how callers prove who they are
//! * [`sessions`][]: browsers
//! * [`endpoints`][]: an endpoint is its handler and the role that it asks for, said in one place; everything else that
//!   holds for all of them (authentication, limits, timeouts, the OpenAPI document) comes from here
//! * [`extract`][]: what handlers take out of a request
//! * [`work`][]: answers that take time
//! * [`serve`][]: connections
//! * [`client`][]: for commands
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
