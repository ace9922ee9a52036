//! Memory of the maps that the load balancer's program uses.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};

use anyhow::Context as _;
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use libbpf_rs::{MapCore as _, MapHandle, MapType};

/// Kernel memory and entries of all maps of a BPF program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BpfMapMemory {
    /// Number of arrays, which are maps with preallocated entries.
    pub array_map_count: u64,
    /// Number of hash tables, which are maps whose memory grows with their entries.
    pub hash_map_count: u64,
    pub hash_map_entry_count: u64,
    /// Kernel memory of all maps in bytes (`memlock` of /proc/PID/fdinfo).
    pub kernel_bytes: u64,
}

impl BpfMapMemory {
    /// Reads the kernel memory and entries of a program's maps. Fails when the kernel does not report them.
    pub fn read_for_program(program: BorrowedFd<'_>) -> anyhow::Result<Self> {
        let program_id = libbpf_rs::Program::id_from_fd(program).context("the program's id")?;
        let mut program_infos = ProgInfoIter::with_query_opts(ProgInfoQueryOptions::default().include_map_ids(true));
        let program_info = program_infos.find(|info| info.id == program_id).context("the program is not listed")?;
        let mut map_memory = Self::default();
        for map_id in program_info.map_ids {
            let map = MapHandle::from_map_id(map_id).context("a map of the program")?;
            map_memory.kernel_bytes += kernel_bytes_of_map(&map)?;
            match map.map_type() {
                MapType::Hash | MapType::LruHash | MapType::PercpuHash | MapType::LruPercpuHash => {
                    map_memory.hash_map_count += 1;
                    map_memory.hash_map_entry_count += map.keys().count() as u64;
                }
                _ => map_memory.array_map_count += 1,
            }
        }
        Ok(map_memory)
    }
}

fn kernel_bytes_of_map(map: &MapHandle) -> anyhow::Result<u64> {
    let fdinfo_path = format!("/proc/self/fdinfo/{}", map.as_fd().as_raw_fd());
    let fdinfo = std::fs::read_to_string(&fdinfo_path).with_context(|| fdinfo_path.clone())?;
    let memlock_value = fdinfo
        .lines()
        .find_map(|line| line.strip_prefix("memlock:"))
        .with_context(|| format!("{fdinfo_path}: no memlock"))?;
    memlock_value.trim().parse().with_context(|| format!("{fdinfo_path}: memlock {memlock_value:?}"))
}
