//! Tests that load BPF programs as root, in one executable.

mod processes;
