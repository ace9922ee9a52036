//! Tests that load BPF programs as root, in one executable.

mod containers;
mod daemon;
mod steering;
mod support;
