//! Tests that need neither root nor a network namespace, in one executable.

mod commands;
mod metrics_documents;
mod output;
mod start;
mod support;
