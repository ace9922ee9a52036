//! Tests of the BPF program and its reference model in one executable. Most need root to load the program.

mod consistency;
mod cookies;
mod frames;
mod lb_fuzz;
