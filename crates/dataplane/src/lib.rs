//! The kernel's side of coreward, which loads, attaches and pins the BPF programs and fills their tables.

#![deny(missing_docs)]

pub mod capabilities;
pub mod clock;
pub mod cpu_load;
pub mod decap;
pub mod device;
pub mod dispatch;
pub mod ethtool;
pub mod health_check_nat;
pub mod intake;
pub mod lb;
pub mod listeners;
mod lru_map_sizes;
pub mod mac;
pub mod mmap_array;
pub mod neighbour;
mod per_cpu;
pub mod pins;
mod rcu;
pub mod reuseport;
pub mod routes;
pub mod server;
pub mod service_slots;
pub mod sockets;
pub mod steer;
pub mod tc;
pub mod test_run;
pub mod verifier_check;
pub mod veth;
pub mod vlan_device;

/// Skeletons of the BPF programs, which libbpf-cargo generates from the files `bpf/*/*.bpf.c`.
#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn, dead_code)]
pub mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/skeletons.rs"));
}
