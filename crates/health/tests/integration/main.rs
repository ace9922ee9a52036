//! Tests that need neither root nor a network namespace, in one executable.

mod local_errors;
mod probes;
