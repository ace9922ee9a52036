//! Tests that need neither rights nor other machines.

mod ring_loom;
mod serve;
mod shared_memory;
