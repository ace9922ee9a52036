//! Reading, freeing and take-over of connection table entries of stateful services. The operations on the table are in
//! `bpf/lb/connection_table.h` for the BPF program, and in [`coreward_model::connection_table::table`] for user space.

use std::mem::offset_of;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use coreward_intf as intf;
use coreward_model::connection_table::{
    ConnectionEntry, ConnectionExpiryReason, ConnectionIndex, ConnectionTableSize, ConnectionTimeouts, DecisecondTicks,
    TableOwnerNumber, max_entries_per_source_prefix, source_prefix_counter_index,
};
use coreward_model::cookie::CookieKey;
use coreward_model::{ServerId, ServiceAddress};
use rand::rand_core::UnwrapErr;
use rand::rngs::SysRng;

use super::connection_memory::{SharedConnectionTable, count_used_entries};
use super::program::LoadBalancerMaps;
use super::servers::server_entry;
use super::services::{read_services, services_with_names};
use super::{LoadBalancer, SERVER_FLAGS_SHIFT, ServiceIndex};
use crate::mac::MacAddress;
use crate::rcu::wait_until_running_programs_end;

const CLOCK_WORD_OFFSET: usize = offset_of!(intf::lb_state, clock);
const OWNER_ENTRIES_OFFSET: usize = offset_of!(intf::lb_state, owners);

/// Initialises the connection table in new maps: all entries are free, the hash key is `key` or a random one, and there
/// is no owner number.
pub(super) fn initialise_connection_table(maps: &LoadBalancerMaps, key: Option<CookieKey>) {
    maps.connections.initialise_entries();
    let hash_key = key.unwrap_or_else(|| CookieKey::random(&mut UnwrapErr(SysRng)));
    maps.state.write(offset_of!(intf::lb_state, connection_key), &hash_key.to_bpf_key());
    store_connection_timeouts(maps, &ConnectionTimeouts::default(), DecisecondTicks(0));
    store_owner_number(maps, None);
}

/// Stores the timers after which packets may reuse entries, and `last_sweep_time`, the time of the daemon's last sweep.
fn store_connection_timeouts(maps: &LoadBalancerMaps, timers: &ConnectionTimeouts, last_sweep_time: DecisecondTicks) {
    maps.state.write(offset_of!(intf::lb_state, timers), &timers.to_bpf_timers(last_sweep_time));
}

fn connection_hash_key(maps: &LoadBalancerMaps) -> CookieKey {
    let bpf_key = maps.state.read::<intf::cookie_key>(offset_of!(intf::lb_state, connection_key));
    CookieKey { k0: bpf_key.k0, k1: bpf_key.k1 }
}

/// Returns the counter of connection table entries for the clients of one shard. Shards divide the source prefixes by
/// their hash.
fn shard_entry_counter(maps: &LoadBalancerMaps, shard: usize) -> &AtomicU64 {
    maps.connection_takes.atomic_u64(offset_of!(intf::connection_takes, entries_by_source) + shard * size_of::<u64>())
}

/// Counts the entries in use, and corrects the counter of each shard of source prefixes. A counter may be wrong if a
/// process was killed after it freed an entry and before it decremented the counter. The next call corrects
/// a counter that changes during this call.
fn recount_used_entries(maps: &LoadBalancerMaps) -> u64 {
    let hash_key = connection_hash_key(maps);
    let shard_indexes = 0..intf::SOURCE_SHARDS as usize;
    let counts_before_scan: Vec<u64> =
        shard_indexes.clone().map(|shard| shard_entry_counter(maps, shard).load(Ordering::Acquire)).collect();
    let mut counts_by_shard = vec![0; shard_indexes.len()];
    let table = &maps.connections;
    for client in table.size().entry_indexes().filter_map(|index| table.client_address(index)) {
        counts_by_shard[source_prefix_counter_index(&hash_key, client)] += 1;
    }
    for shard in shard_indexes.filter(|shard| counts_before_scan[*shard] != counts_by_shard[*shard]) {
        // The exchange fails if the prefix's count has changed since.
        let (previous_count, scanned_count) = (counts_before_scan[shard], counts_by_shard[shard]);
        let _ = shard_entry_counter(maps, shard).compare_exchange(
            previous_count,
            scanned_count,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
    }
    counts_by_shard.iter().sum()
}

/// Pushes lost entries onto the stacks of free entries. Entries are lost if a process ends after it released them and
/// before it pushed them. Fails when the kernel offers no RCU grace period.
pub(super) fn recover_lost_entries(table: &SharedConnectionTable) -> anyhow::Result<()> {
    let mut indexes_off_stack = Vec::new();
    for partition in 0..table.size().partition_count() {
        let mut is_on_stack = [false; intf::CONNECTIONS_PER_PARTITION as usize];
        for index in table.free_slot_indexes(partition) {
            is_on_stack[index.slot() as usize] = true;
        }
        let partition_slots = 0..intf::CONNECTIONS_PER_PARTITION;
        let slots_off_stack = partition_slots
            .filter(|slot| !is_on_stack[*slot as usize])
            .map(|slot| ConnectionIndex::new(partition, slot));
        indexes_off_stack.extend(slots_off_stack.filter(|index| table.is_entry_free(*index)));
    }
    if indexes_off_stack.is_empty() {
        return Ok(());
    }
    // A running program may just be filling such an entry, so the entries are checked again when all such programs have
    // ended.
    wait_until_running_programs_end()?;
    let lost_indexes: Vec<_> = indexes_off_stack.into_iter().filter(|index| table.is_entry_free(*index)).collect();
    lost_indexes.iter().for_each(|index| table.push_free_slot(*index));
    if !lost_indexes.is_empty() {
        tracing::info!(
            event = "leaked-entries-freed",
            count = lost_indexes.len(),
            "the load balancer has freed connection table entries that an earlier process leaked"
        );
    }
    Ok(())
}

/// Stores the owner number in the word that also holds the clock. A concurrent clock update by a packet may be lost.
fn store_owner_number(maps: &LoadBalancerMaps, owner: Option<TableOwnerNumber>) {
    let owner_word = owner.map_or(intf::MAX_OWNERS, |owner| u32::from(owner.get()));
    let clock_ticks = maps.state.load(CLOCK_WORD_OFFSET) as u32;
    maps.state.store(CLOCK_WORD_OFFSET, u64::from(owner_word) << 32 | u64::from(clock_ticks));
}

const _: () =
    assert!(CLOCK_WORD_OFFSET.is_multiple_of(8) && offset_of!(intf::lb_state, owner) == CLOCK_WORD_OFFSET + 4);

pub(super) fn packet_clock_ticks(maps: &LoadBalancerMaps) -> DecisecondTicks {
    DecisecondTicks(maps.state.load(CLOCK_WORD_OFFSET) as u32)
}

fn owner_entry_offset(owner: TableOwnerNumber) -> usize {
    OWNER_ENTRIES_OFFSET + usize::from(owner.get()) * size_of::<intf::server_entry>()
}

fn is_server_known(maps: &LoadBalancerMaps, service: ServiceIndex, server: ServerId) -> bool {
    (server_entry(maps, service, server) >> SERVER_FLAGS_SHIFT) as u32 & intf::SERVER_KNOWN != 0
}

/// Number of connection table entries in use, computed from the last count and the changes since then.
#[derive(Debug)]
pub(super) struct ConnectionTableOccupancy {
    entries_at_last_count: u64,
    /// Number of entries that packets had allocated in total at the time of the last count.
    allocations_at_last_count: u64,
    entries_freed_since_count: u64,
}

fn total_entry_allocation_count(maps: &LoadBalancerMaps) -> u64 {
    let entry_allocations_of_row = |row: usize| {
        let row_offset = offset_of!(intf::connection_takes, by_row) + row * size_of::<intf::connection_takes_row>();
        maps.connection_takes.load(row_offset + offset_of!(intf::connection_takes_row, count))
    };
    (0..maps.counter_row_count()).map(entry_allocations_of_row).sum()
}

impl ConnectionTableOccupancy {
    pub fn count_used_entries(maps: &LoadBalancerMaps) -> Self {
        let allocations_at_last_count = total_entry_allocation_count(maps);
        Self {
            entries_at_last_count: recount_used_entries(maps),
            allocations_at_last_count,
            entries_freed_since_count: 0,
        }
    }

    fn used_entry_count(&self, maps: &LoadBalancerMaps) -> u64 {
        let entry_count = u64::from(maps.connections.size().entry_count());
        (self.entries_at_last_count + total_entry_allocation_count(maps).saturating_sub(self.allocations_at_last_count))
            .saturating_sub(self.entries_freed_since_count)
            .min(entry_count)
    }
}

pub(super) fn connections_of_service(
    table: &SharedConnectionTable,
    service: ServiceIndex,
) -> impl Iterator<Item = ConnectionEntry> + '_ {
    let all_connections = table.size().entry_indexes().filter_map(|index| table.connection_at(index));
    all_connections.filter(move |connection| connection.identity.service_slot == service.0)
}

/// Read access to a running load balancer's connection table without its daemon.
#[derive(Debug)]
pub struct PinnedConnectionTable {
    maps: LoadBalancerMaps,
}

impl PinnedConnectionTable {
    /// Opens the maps pinned in `pin_directory`. Fails when it has no pinned load balancer, or one of another version.
    pub fn open(pin_directory: &Path) -> anyhow::Result<Self> {
        Ok(Self { maps: LoadBalancerMaps::take_over(&super::pin_directory::find_lb_directory(pin_directory)?)? })
    }

    /// Returns the load balancer's services with their configured names.
    pub fn services_with_names(&self) -> Vec<(ServiceAddress, String)> {
        services_with_names(&self.maps)
    }

    /// Returns the size of the connection table.
    pub fn table_size(&self) -> ConnectionTableSize {
        self.maps.connections.size()
    }

    /// Returns the time of the clock by which connection table entries age, in tenths of a second.
    pub fn packet_clock_ticks(&self) -> DecisecondTicks {
        packet_clock_ticks(&self.maps)
    }

    /// Returns an iterator over a service's connection table entries, which is empty if the service does not exist.
    pub fn connections(&self, service: ServiceAddress) -> impl Iterator<Item = ConnectionEntry> + '_ {
        let service_index = read_services(&self.maps).get(&service).map(|service| service.index);
        service_index.into_iter().flat_map(|index| connections_of_service(&self.maps.connections, index))
    }
}

impl LoadBalancer {
    /// Returns the size of the connection table.
    pub fn connection_table_size(&self) -> ConnectionTableSize {
        self.maps.connections.size()
    }

    /// Returns the hash key of the connection table, which was set when the maps were created.
    pub fn connection_hash_key(&self) -> CookieKey {
        connection_hash_key(&self.maps)
    }

    /// Sets this load balancer's owner number, which must be unique among all load balancers with a connection table.
    /// With `None`, the default, new connections of stateful services get stateless cookies. After a change, cookies
    /// with the former number no longer lead to entries of this table.
    pub fn set_owner_number(&mut self, owner: Option<TableOwnerNumber>) {
        store_owner_number(&self.maps, owner);
    }

    /// Returns this load balancer's owner number, or `None` if it has none.
    pub fn owner_number(&self) -> Option<TableOwnerNumber> {
        TableOwnerNumber::try_from(self.maps.state.load(CLOCK_WORD_OFFSET) >> 32).ok()
    }

    /// Sets the MAC address of the load balancer that owns a connection table. Packets whose cookies name an entry of
    /// that table are sent to `mac`. With `None`, that load balancer counts as lost, and these packets are broadcast at
    /// a separate rate ([`broadcast_limits`](super::LoadBalancerOptions::broadcast_limits)).
    pub fn set_owner_mac(&mut self, owner: TableOwnerNumber, mac: Option<MacAddress>) {
        let server_flags = intf::SERVER_KNOWN | if mac.is_some() { intf::SERVER_RESOLVED } else { 0 };
        let owner_entry = mac.map_or(0, MacAddress::to_word) | u64::from(server_flags) << SERVER_FLAGS_SHIFT;
        self.maps.state.store(owner_entry_offset(owner), owner_entry);
    }

    /// Returns the MAC address set by [`set_owner_mac`](Self::set_owner_mac), even if an earlier process set it.
    pub fn owner_mac(&self, owner: TableOwnerNumber) -> Option<MacAddress> {
        let owner_entry = self.maps.state.load(owner_entry_offset(owner));
        let is_resolved = (owner_entry >> SERVER_FLAGS_SHIFT) as u32 & intf::SERVER_RESOLVED != 0;
        is_resolved.then(|| MacAddress::from_word(owner_entry))
    }

    /// Removes an owner number that no connection uses. Packets with that owner's cookies then count as forged.
    pub fn remove_owner(&mut self, owner: TableOwnerNumber) {
        self.maps.state.store(owner_entry_offset(owner), 0);
    }

    /// Sets the clock that packets read, in tenths of a second, from CLOCK_MONOTONIC. It must be called every 100 ms.
    pub fn tick_packet_clock(&mut self, monotonic_time: Duration) {
        let owner_bits = self.maps.state.load(CLOCK_WORD_OFFSET) & !u64::from(u32::MAX);
        self.maps
            .state
            .store(CLOCK_WORD_OFFSET, owner_bits | u64::from(DecisecondTicks::from_monotonic_time(monotonic_time).0));
    }

    /// Returns the time of the clock by which connection table entries age, in tenths of a second.
    pub fn packet_clock_ticks(&self) -> DecisecondTicks {
        packet_clock_ticks(&self.maps)
    }

    /// Returns a service's connection table entries. Packets may change the table while it is read.
    pub fn connections(&self, service: ServiceIndex) -> impl Iterator<Item = ConnectionEntry> + '_ {
        connections_of_service(&self.maps.connections, service)
    }

    /// Updates the maximum number of connection table entries per source prefix. It must be called as often as
    /// [`tick_packet_clock`](Self::tick_packet_clock).
    pub fn update_source_prefix_limit(&mut self) {
        let source_entry_limit = max_entries_per_source_prefix(
            self.maps.connections.size(),
            self.connection_table_occupancy.used_entry_count(&self.maps) as u32,
        );
        self.maps.state.store(offset_of!(intf::lb_state, entries_per_source), source_entry_limit.into());
    }

    /// Returns the number of connection table entries in use. It is computed from the result of the last
    /// [`recount_connections`](Self::recount_connections) and the changes since then.
    pub fn used_entry_count(&self) -> u64 {
        self.connection_table_occupancy.used_entry_count(&self.maps)
    }

    /// Counts all entries in use, so that [`used_entry_count`](Self::used_entry_count) and the counters of source
    /// prefixes are exact again. They drift, because two CPUs that share a counter row may lose increments.
    pub fn recount_connections(&mut self) {
        self.connection_table_occupancy = ConnectionTableOccupancy::count_used_entries(&self.maps);
    }

    /// Counts the connection table entries in use, by reading the whole table.
    pub fn count_used_entries_by_scan(&self) -> usize {
        count_used_entries(&self.maps.connections)
    }

    /// Checks the next `entries_to_scan` entries of the table. Returns the connections that may be freed, each with the
    /// reason. Each call continues after the last one and wraps around, because a full sweep would pause the daemon. If
    /// no call is made for [`intf::CONNECTION_UNSWEPT_TICKS`], packets reuse expired entries by the timers of the last
    /// call.
    pub fn scan_expired_connections(
        &mut self,
        timers: &ConnectionTimeouts,
        entries_to_scan: u32,
    ) -> Vec<(ConnectionEntry, ConnectionExpiryReason)> {
        let entry_count = self.maps.connections.size().entry_count();
        let (table, now) = (&self.maps.connections, self.packet_clock_ticks());
        store_connection_timeouts(&self.maps, timers, now);
        let mut expired_connections = Vec::new();
        for position in (0..entries_to_scan.min(entry_count)).map(|n| (self.sweep_start_index + n) % entry_count) {
            let Some(connection) = table.connection_at(table.size().index_at_position(position)) else { continue };
            let service_index = ServiceIndex(connection.identity.service_slot);
            let is_server_known = is_server_known(&self.maps, service_index, connection.identity.server);
            expired_connections
                .extend(timers.expiry_reason(&connection, is_server_known, now).map(|reason| (connection, reason)));
        }
        self.sweep_start_index = (self.sweep_start_index + entries_to_scan) % entry_count;
        expired_connections
    }

    /// Frees the entries of `connections` and returns how many were freed. An entry stays in use if it now has another
    /// connection, or if its connection had another packet. Waits for an RCU grace period (some ms). Fails when the
    /// kernel offers no grace period, in which case the entries stay lost until another process takes over.
    pub fn free_connections(&mut self, connections: &[ConnectionEntry]) -> anyhow::Result<usize> {
        let table = &self.maps.connections;
        let is_unchanged = |connection: &&ConnectionEntry| {
            let present_entry = table.connection_at(connection.index);
            present_entry.is_some_and(|present_connection| present_connection.has_no_packet_since(connection))
        };
        let released_connections: Vec<&ConnectionEntry> = connections
            .iter()
            .filter(is_unchanged)
            .filter(|connection| table.release_entry(connection.index, connection.identity))
            .collect();
        if !released_connections.is_empty() {
            // A program that found the connection may still be updating its entry.
            self.grace_periods.wait(self.grace_periods.request_ticket())?;
        }
        let hash_key = connection_hash_key(&self.maps);
        for connection in &released_connections {
            self.maps.connections.push_free_slot(connection.index);
            let source_prefix_counter =
                shard_entry_counter(&self.maps, source_prefix_counter_index(&hash_key, connection.client.ip()));
            let _ = source_prefix_counter
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, |entry_count| entry_count.checked_sub(1));
        }
        self.connection_table_occupancy.entries_freed_since_count += released_connections.len() as u64;
        Ok(released_connections.len())
    }

    /// Frees all entries of services that were removed or are no longer stateful. Packets can no longer find them.
    pub(super) fn free_connections_of_services(&mut self, services: &[ServiceIndex]) -> anyhow::Result<()> {
        for service in services {
            let service_connections: Vec<ConnectionEntry> = self.connections(*service).collect();
            self.free_connections(&service_connections)?;
        }
        Ok(())
    }
}
