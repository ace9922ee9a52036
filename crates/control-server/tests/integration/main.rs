//! Tests that need neither root nor a network namespace, in one executable.

mod agent_flood;
mod api;
mod api_tls;
mod apply;
mod audit;
mod empty_store;
mod grpc;
mod leaders;
mod sessions;
mod support;
