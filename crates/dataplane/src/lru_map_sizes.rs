//! Sizes of maps that evict the least recently used entry (LRU maps).

use std::path::Path;

use anyhow::Context as _;
use libbpf_rs::{MapCore as _, MapHandle, OpenMapMut};

/// Number of free entries that each CPU reserves in an LRU map (`LOCAL_FREE_TARGET` in `kernel/bpf/bpf_lru_list.c`).
/// Without space for these entries, a map of 4,096 entries evicts early with two CPUs, and immediately with 32.
const LRU_RESERVED_ENTRIES_PER_CPU: u32 = 128;

/// Sets an LRU map's size so that it can store `capacity` entries with any number of CPUs. A map that is pinned at
/// `pin_path` keeps its size. Fails when the pin cannot be opened, or the map has already been created.
pub(crate) fn set_lru_capacity(map: &mut OpenMapMut<'_>, capacity: u32, pin_path: Option<&Path>) -> anyhow::Result<()> {
    let existing_pin = pin_path.filter(|pin| pin.exists());
    let entry_count = match existing_pin {
        Some(pin) => MapHandle::from_pinned_path(pin).with_context(|| pin.display().to_string())?.max_entries(),
        None => {
            capacity
                + LRU_RESERVED_ENTRIES_PER_CPU * libbpf_rs::num_possible_cpus().context("the number of CPUs")? as u32
        }
    };
    map.set_max_entries(entry_count).context("the size of an LRU map")
}
