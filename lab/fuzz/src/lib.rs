//! Compares `bpf/lb/lb.bpf.c` with its reference model in Rust (`coreward_model::lb`), packet by packet.
//!
//! * [`campaign`]: many epochs on several threads
//! * [`fuzz_epoch`]: packets and changes from one seed
//! * [`packet_generator_state`]: the state as the generator tracks it, and random changes to it
//! * [`packet_generator`], [`mutate`], [`frame`]: packets
//! * [`harness`]: BPF program and reference model, with the same changes and packets
//! * [`state_change`]: changes to the state, and differences
//! * [`consistency`]: check that connections stay with their server while everything changes
//! * [`cookies`]: effect of forged TSecr values
//! * [`program_maps`]: the BPF program's maps
//! * [`guarantees`]: the documentation's guarantees, checked on every packet without the model
//! * [`shrink`]: search for the smallest sequence of steps that shows a difference

pub mod campaign;
pub mod cli;
pub mod consistency;
pub mod cookies;
pub mod frame;
pub mod fuzz_epoch;
pub mod fuzz_rng;
pub mod guarantees;
pub mod harness;
mod ipv6_translation;
pub mod mutate;
pub mod packet_generator;
pub mod packet_generator_state;
pub mod program_maps;
mod server_networks;
pub mod shrink;
pub mod state_change;
