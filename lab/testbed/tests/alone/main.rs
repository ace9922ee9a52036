//! End-to-end tests that need the machine for themselves or take long, in one executable.

mod chaos;
mod conformance;
mod dashboard;
mod demo;
mod dispatch_figures;
mod dispatch_soak;
mod high_availability;
mod key_value_latency;
mod knot_benchmark;
mod syn_flood;

#[path = "../support/mod.rs"]
mod support;
