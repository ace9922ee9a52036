//! The layouts, limits and counters that the BPF programs share with user space, generated from `bpf/include/intf.h`.
//!
//! Nothing is written here by hand, so a change of `bpf/include/intf.h` changes both sides. Every struct can be read
//! from and written to bytes (`zerocopy`), which the compiler rejects for a struct with padding.
#![allow(non_camel_case_types, missing_docs, clippy::undocumented_unsafe_blocks)]

include!(concat!(env!("OUT_DIR"), "/intf.rs"));
include!(concat!(env!("OUT_DIR"), "/names.rs"));
