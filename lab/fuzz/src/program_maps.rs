//! Access to the maps of a loaded `bpf/lb/lb.bpf.c`, which are found by the program's id. The load balancer's own
//! interface does not offer them, because only tests need them.

use std::mem::offset_of;
use std::os::fd::BorrowedFd;

use anyhow::Context as _;
use coreward_dataplane::mmap_array::MmapArray;
use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::lb::{ServerTraffic, TokenBucketSelector};
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use libbpf_rs::{MapCore as _, MapHandle};

type RecentPlacementWords = [u64; intf::RECENT_PLACEMENTS as usize];

/// Number of 64-bit words in a service's counters.
pub const COUNTER_U64_COUNT: usize = size_of::<intf::lb_counters>() / size_of::<u64>();

/// BPF maps of the loaded program, which this process accesses as memory.
pub struct ProgramMaps {
    lb_state: MmapArray<intf::lb_state>,
    /// Counters, in one row for each receive queue or CPU. Test packets are counted in the row of queue 0. New and
    /// ended connections are counted in the row of the current CPU.
    counters: MmapArray<[intf::lb_counters]>,
    counter_row_count: usize,
    recent_placements: MmapArray<RecentPlacementWords>,
    server_traffic: MmapArray<[intf::server_traffic]>,
    flow_table: MmapArray<[intf::flow_set]>,
    broadcast_buckets: MmapArray<intf::broadcast_buckets>,
}

impl ProgramMaps {
    /// Maps the program's BPF maps into memory. Fails when one of them cannot be found.
    pub fn for_program(program: BorrowedFd<'_>) -> anyhow::Result<Self> {
        let program_id = libbpf_rs::Program::id_from_fd(program).context("the program's id")?;
        let query_options = ProgInfoQueryOptions::default().include_map_ids(true);
        let program_info =
            ProgInfoIter::with_query_opts(query_options).find(|info| info.id == program_id).context("not listed")?;
        let map_handles: Vec<MapHandle> =
            program_info.map_ids.iter().map(|id| MapHandle::from_map_id(*id)).collect::<Result<_, _>>()?;
        let map_by_name =
            |name: &str| map_handles.iter().find(|map| map.name() == name).with_context(|| format!("no map {name}"));
        let counters = map_by_name("lb_counters")?;
        let counter_row_count = counters.max_entries() as usize / intf::LB_COUNTERS_PER_ROW as usize;
        Ok(Self {
            counter_row_count,
            lb_state: MmapArray::new(map_by_name(".bss.state")?)?,
            counters: MmapArray::mmap_slice(counters, counter_row_count * intf::LB_COUNTERS_PER_ROW as usize)?,
            recent_placements: MmapArray::new(map_by_name(".bss.recent")?)?,
            server_traffic: MmapArray::mmap_slice(map_by_name("server_traffic")?, counter_row_count * ServerId::COUNT)?,
            flow_table: MmapArray::mmap_slice(
                map_by_name("flow_table")?,
                map_by_name("flow_table")?.max_entries() as usize,
            )?,
            broadcast_buckets: MmapArray::new(map_by_name(".bss.broadcast")?)?,
        })
    }

    /// Returns one 64-bit word of a service's counters, summed over all receive queues and CPUs.
    pub fn service_counter_word(&self, service_slot: usize, word_index: usize) -> u64 {
        let row_offset =
            |row: usize| (row * intf::LB_COUNTERS_PER_ROW as usize + service_slot) * size_of::<intf::lb_counters>();
        (0..self.counter_row_count).map(|row| self.counters.load(row_offset(row) + word_index * size_of::<u64>())).sum()
    }

    pub fn set_tokens_paid_until(&self, buckets: TokenBucketSelector, paid_until_ns: u64) {
        let word_offset = |word_index: usize| word_index * size_of::<u64>();
        let store_word = |array_offset: usize, word_index: usize| {
            self.broadcast_buckets.store(array_offset + word_offset(word_index), paid_until_ns)
        };
        match buckets {
            TokenBucketSelector::ServiceSlot(service, reason) => {
                store_word(
                    offset_of!(intf::broadcast_buckets, per_service),
                    service * intf::LIMITED_KIND_SLOTS as usize + reason as usize,
                );
            }
            TokenBucketSelector::WholeLoadBalancer(reason) => {
                store_word(offset_of!(intf::broadcast_buckets, total), reason as usize)
            }
            TokenBucketSelector::EveryEighthSourceFrom(first) => {
                TokenBucketSelector::source_token_bucket_indexes(first)
                    .for_each(|word_index| store_word(offset_of!(intf::broadcast_buckets, per_source), word_index));
            }
        }
    }

    /// Limits the number of connection-table entries per source prefix, or removes the limit (`None`).
    pub fn limit_entries_per_source(&self, max_entries: Option<u32>) {
        self.lb_state.store(offset_of!(intf::lb_state, entries_per_source), max_entries.unwrap_or(0).into());
    }

    pub fn round_robin_counter(&self, service_slot: usize) -> u64 {
        self.lb_state.load(service_state_offset(service_slot) + offset_of!(intf::service_state, round_robin))
    }

    /// Returns the traffic counters of a server, summed over all receive queues and CPUs.
    pub fn traffic_of_server(&self, id: ServerId) -> ServerTraffic {
        let row_offset =
            |row: usize| (row * ServerId::COUNT + usize::from(id.get())) * size_of::<intf::server_traffic>();
        let sum_over_rows = |field_offset| {
            (0..self.counter_row_count).map(|row| self.server_traffic.load(row_offset(row) + field_offset)).sum()
        };
        ServerTraffic {
            opened_connection_count: sum_over_rows(offset_of!(intf::server_traffic, opened)),
            closed_connection_count: sum_over_rows(offset_of!(intf::server_traffic, closed)),
            packet_count: sum_over_rows(offset_of!(intf::server_traffic, packets)),
            frame_bytes: sum_over_rows(offset_of!(intf::server_traffic, bytes)),
        }
    }

    pub fn flow_table_words(&self, word_count: usize) -> impl Iterator<Item = u64> + '_ {
        (0..word_count).map(|word_index| self.flow_table.load(word_index * size_of::<u64>()))
    }

    pub fn recent_placement_words(&self) -> Vec<u64> {
        (0..intf::RECENT_PLACEMENTS as usize)
            .map(|word_index| self.recent_placements.load(word_index * size_of::<u64>()))
            .collect()
    }
}

fn service_state_offset(service_slot: usize) -> usize {
    offset_of!(intf::lb_state, services) + service_slot * size_of::<intf::service_state>()
}
