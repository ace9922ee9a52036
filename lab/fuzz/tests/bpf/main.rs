//! Tests of the BPF program and of its reference model, in one executable; most load the program as root.

mod consistency;
mod cookies;
mod frames;
mod lb_fuzz;
