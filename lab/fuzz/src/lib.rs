//! Compares `bpf/lb/lb.bpf.c` with its reference model in Rust (`coreward_model::lb`), packet by packet.
//!
//! * [`campaign`]: many epochs on several threads
//! * [`epoch`]: packets and changes from one seed
//! * [`gen_state`]: the state as the generator tracks it, and random changes to it
//! * [`generate`], [`mutate`], [`frame`]: packets
//! * [`harness`]: BPF program and reference model, with the same changes and packets
//! * [`change`]: changes to the state, and differences
//! * [`consistency`]: check that connections stay with their server while everything changes
//! * [`cookies`]: effect of forged TSecr values
//! * [`memory`]: the BPF program's maps
//! * [`guarantees`]: the documentation's guarantees, checked on every packet without the model
//! * [`shrink`]: search for the smallest sequence of steps that shows a difference

pub mod campaign;
pub mod change;
pub mod cli;
pub mod consistency;
pub mod cookies;
pub mod epoch;
pub mod frame;
pub mod fuzz_rng;
pub mod gen_state;
pub mod generate;
pub mod guarantees;
pub mod harness;
mod ipv6;
pub mod memory;
pub mod mutate;
mod server_networks;
pub mod shrink;
