//! Tests that need neither root nor a network namespace, in one executable.

mod grpc;
mod tls;
