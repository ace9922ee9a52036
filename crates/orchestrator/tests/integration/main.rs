//! Tests that need neither rights nor other machines.

mod allocation;
mod classify;
mod config;
mod engine;
mod metrics;
mod replay;
mod socket;
