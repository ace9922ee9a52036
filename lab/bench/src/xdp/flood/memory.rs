//! Memory of the load balancer's program.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};

use anyhow::Context as _;
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use libbpf_rs::{MapCore as _, MapHandle, MapType};

/// Kernel memory and entries of all maps of a BPF program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Memory {
    /// Number of maps whose entries are preallocated, which are arrays.
    pub array_count: u64,
    /// Number of maps whose memory grows with their entries, which are hash tables.
    pub hash_count: u64,
    pub hash_entries: u64,
    /// Kernel memory of all maps in bytes (`memlock` of /proc/PID/fdinfo).
    pub bytes: u64,
}

impl Memory {
    /// Reads the memory of a program's maps. Fails when the kernel does not report it.
    pub fn of(program: BorrowedFd<'_>) -> anyhow::Result<Self> {
        let id = libbpf_rs::Program::id_from_fd(program).context("the program's id")?;
        let mut programs = ProgInfoIter::with_query_opts(ProgInfoQueryOptions::default().include_map_ids(true));
        let info = programs.find(|info| info.id == id).context("the program is not listed")?;
        let mut memory = Self::default();
        for map in info.map_ids {
            let map = MapHandle::from_map_id(map).context("a map of the program")?;
            memory.bytes += bytes_of(&map)?;
            match map.map_type() {
                MapType::Hash | MapType::LruHash | MapType::PercpuHash | MapType::LruPercpuHash => {
                    memory.hash_count += 1;
                    memory.hash_entries += map.keys().count() as u64;
                }
                _ => memory.array_count += 1,
            }
        }
        Ok(memory)
    }
}

fn bytes_of(map: &MapHandle) -> anyhow::Result<u64> {
    let path = format!("/proc/self/fdinfo/{}", map.as_fd().as_raw_fd());
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let memory =
        text.lines().find_map(|line| line.strip_prefix("memlock:")).with_context(|| format!("{path}: no memlock"))?;
    memory.trim().parse().with_context(|| format!("{path}: memlock {memory:?}"))
}
