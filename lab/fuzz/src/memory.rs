//! Maps of a loaded `bpf/lb/lb.bpf.c`, found by the program's id. The load balancer's own interface does not offer
//! them, because only tests need them.

use std::mem::offset_of;
use std::os::fd::BorrowedFd;

use anyhow::Context as _;
use coreward_dataplane::mmap_array::MmapArray;
use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::lb::{ServerTraffic, TokenBucketSelector};
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use libbpf_rs::{MapCore as _, MapHandle};

type Recent = [u64; intf::RECENT_PLACEMENTS as usize];

/// Number of 64-bit words in the counters of a service.
pub const COUNTER_WORDS: usize = size_of::<intf::lb_counters>() / size_of::<u64>();

/// Maps of the loaded program, mapped into the memory of this process.
pub struct Memory {
    state: MmapArray<intf::lb_state>,
    /// Counters in all rows. Packets count in the row of receive queue 0, new and ended connections in that of the CPU.
    counters: MmapArray<[intf::lb_counters]>,
    rows: usize,
    recent: MmapArray<Recent>,
    traffic: MmapArray<[intf::server_traffic]>,
    flows: MmapArray<[intf::flow_set]>,
    broadcast: MmapArray<intf::broadcast_buckets>,
}

impl Memory {
    /// Maps the program's maps into memory. Fails when one of them cannot be found.
    pub fn of(program: BorrowedFd<'_>) -> anyhow::Result<Self> {
        let id = libbpf_rs::Program::id_from_fd(program).context("the program's id")?;
        let options = ProgInfoQueryOptions::default().include_map_ids(true);
        let info = ProgInfoIter::with_query_opts(options).find(|info| info.id == id).context("not listed")?;
        let maps: Vec<MapHandle> =
            info.map_ids.iter().map(|id| MapHandle::from_map_id(*id)).collect::<Result<_, _>>()?;
        let named = |name: &str| maps.iter().find(|map| map.name() == name).with_context(|| format!("no map {name}"));
        let counters = named("lb_counters")?;
        let rows = counters.max_entries() as usize / intf::LB_COUNTERS_PER_ROW as usize;
        Ok(Self {
            rows,
            state: MmapArray::new(named(".bss.state")?)?,
            counters: MmapArray::new_slice(counters, rows * intf::LB_COUNTERS_PER_ROW as usize)?,
            recent: MmapArray::new(named(".bss.recent")?)?,
            traffic: MmapArray::new_slice(named("server_traffic")?, rows * ServerId::COUNT)?,
            flows: MmapArray::new_slice(named("flow_table")?, named("flow_table")?.max_entries() as usize)?,
            broadcast: MmapArray::new(named(".bss.broadcast")?)?,
        })
    }

    /// Returns the 64-bit word with this index of a service's counters, as the sum over all rows.
    pub fn counter(&self, service: usize, word: usize) -> u64 {
        let position =
            |row: usize| (row * intf::LB_COUNTERS_PER_ROW as usize + service) * size_of::<intf::lb_counters>();
        (0..self.rows).map(|row| self.counters.load(position(row) + word * size_of::<u64>())).sum()
    }

    pub fn set_paid_until(&self, buckets: TokenBucketSelector, paid_until: u64) {
        let word = |at: usize| at * size_of::<u64>();
        let set = |start: usize, at: usize| self.broadcast.store(start + word(at), paid_until);
        match buckets {
            TokenBucketSelector::Service(service, reason) => {
                set(
                    offset_of!(intf::broadcast_buckets, per_service),
                    service * intf::LIMITED_KIND_SLOTS as usize + reason as usize,
                );
            }
            TokenBucketSelector::Total(reason) => set(offset_of!(intf::broadcast_buckets, total), reason as usize),
            TokenBucketSelector::Sources(first) => {
                TokenBucketSelector::sources(first)
                    .for_each(|at| set(offset_of!(intf::broadcast_buckets, per_source), at));
            }
        }
    }

    /// Limits the number of connection-table entries per source prefix; `None` removes the limit.
    pub fn limit_entries(&self, per_source: Option<u32>) {
        self.state.store(offset_of!(intf::lb_state, entries_per_source), per_source.unwrap_or(0).into());
    }

    pub fn round_robin(&self, service: usize) -> u64 {
        self.state.load(service_offset(service) + offset_of!(intf::service_state, round_robin))
    }

    /// Returns the traffic counters of a server, as sums over all rows.
    pub fn traffic(&self, id: ServerId) -> ServerTraffic {
        let position = |row: usize| (row * ServerId::COUNT + usize::from(id.get())) * size_of::<intf::server_traffic>();
        let word = |field| (0..self.rows).map(|row| self.traffic.load(position(row) + field)).sum();
        ServerTraffic {
            opened: word(offset_of!(intf::server_traffic, opened)),
            closed: word(offset_of!(intf::server_traffic, closed)),
            packets: word(offset_of!(intf::server_traffic, packets)),
            bytes: word(offset_of!(intf::server_traffic, bytes)),
        }
    }

    /// Returns the first `count` words of the flow table.
    pub fn flow_table_words(&self, count: usize) -> impl Iterator<Item = u64> + '_ {
        (0..count).map(|word| self.flows.load(word * size_of::<u64>()))
    }

    /// Returns the words of the map `recent_placements`.
    pub fn recent_placements(&self) -> Vec<u64> {
        (0..intf::RECENT_PLACEMENTS as usize).map(|word| self.recent.load(word * size_of::<u64>())).collect()
    }
}

fn service_offset(service: usize) -> usize {
    offset_of!(intf::lb_state, services) + service * size_of::<intf::service_state>()
}
