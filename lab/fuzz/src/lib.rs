//! `bpf/lb/lb.bpf.c` against its reference model in Rust (`coreward_model::lb`), packet by packet.
//!
//! * [`campaign`]: many epochs on several threads
//! * [`epoch`]: packets and changes from one seed
//! * [`gen_state`]: the state as the generator knows it, and changes of it
//! * [`generate`], [`mutate`], [`frame`]: packets
//! * [`harness`]: both load balancers side by side
//! * [`change`]: changes of the state, and differences
//! * [`consistency`]: whether connections stay with their server while everything changes
//! * [`cookies`]: what a client gains by other TSecr values than it was sent
//! * [`memory`]: the BPF program's maps
//! * [`promises`]: what the documentation promises of every packet, without the model
//! * [`shrink`]: the least that shows a difference

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
pub mod harness;
mod ipv6;
pub mod memory;
pub mod mutate;
pub mod promises;
pub mod shrink;
