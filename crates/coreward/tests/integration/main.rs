//! Tests that need neither root nor a network namespace, in one executable.

mod commands;
mod output;
mod start;
mod support;
