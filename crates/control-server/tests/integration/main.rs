//! Tests that need neither root nor a network namespace, in one executable.

mod agent_flood;
mod api;
mod api_tls;
mod apply;
mod audit;
mod empty_store;
mod leaders;

#[path = "../support/mod.rs"]
mod support;
