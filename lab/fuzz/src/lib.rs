//! Compares `bpf/lb/lb.bpf.c` with its reference model in Rust (`coreward_model::lb`), packet by packet.
//!
//! * [`campaign`]: many epochs on several threads
//! * [`epoch`]: packets and changes from one seed
//! * [`gen_state`]: the state as the generator tracks it, and changes of it
//! * [`generate`], [`mutate`], [`frame`]: packets
//! * [`harness`]: BPF program and reference model with the same state
//! * [`change`]: changes of the state, and differences
//! * [`consistency`]: whether connections stay with their server while everything changes
//! * [`cookies`]: effect of forged TSecr values
//! * [`memory`]: the BPF program's maps
//! * [`guarantees`]: guarantees of the documentation for every packet, checked without the model
//! * [`shrink`]: smallest sequence of steps that shows a difference

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
pub mod shrink;
