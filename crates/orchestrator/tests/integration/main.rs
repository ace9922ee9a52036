//! Tests that need neither rights nor other machines.

mod allocation;
mod engine;
mod metrics;
