//! The connection table of stateful services: reading, freeing, take-over. `bpf/lb/connection_table.h` has the
//! program's operations on the table, [`coreward_model::connection_table::table`] those of user space.

use std::mem::offset_of;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use coreward_intf as intf;
use coreward_model::connection_table::{
    ClockTicks, Connection, ConnectionIndex, ExpiryReason, OwnerNumber, TableSize, Timeouts, entries_per_source,
    source_shard,
};
use coreward_model::cookie::CookieKey;
use coreward_model::{ServerId, ServiceAddress};
use rand::rand_core::UnwrapErr;
use rand::rngs::SysRng;

use super::connection_memory::{SharedConnectionTable, count_used};
use super::program::{self, Maps};
use super::servers::server_entry;
use super::services::{read_services, service_names};
use super::{LoadBalancer, SERVER_FLAGS_SHIFT, ServiceIndex};
use crate::mac::MacAddress;
use crate::rcu::wait_for_programs;

const CLOCK_OFFSET: usize = offset_of!(intf::lb_state, clock);
const OWNERS_OFFSET: usize = offset_of!(intf::lb_state, owners);

/// Initialises new maps: all slots free, the hash key `key` or a random one, no owner number.
pub(super) fn initialise_connections(maps: &Maps, key: Option<CookieKey>) {
    maps.connections.initialise();
    let key = key.unwrap_or_else(|| CookieKey::random(&mut UnwrapErr(SysRng)));
    maps.state.write(offset_of!(intf::lb_state, connection_key), &key.to_bpf_key());
    set_timers(maps, &Timeouts::default(), ClockTicks(0));
    set_owner_word(maps, None);
}

/// Stores the timers after which packets may reuse entries, and the time `swept` of the daemon's last sweep.
fn set_timers(maps: &Maps, timers: &Timeouts, swept: ClockTicks) {
    maps.state.write(offset_of!(intf::lb_state, timers), &timers.to_bpf_timers(swept));
}

fn connection_key(maps: &Maps) -> CookieKey {
    let key = maps.state.read::<intf::cookie_key>(offset_of!(intf::lb_state, connection_key));
    CookieKey { k0: key.k0, k1: key.k1 }
}

/// Returns the program's counter of connection table entries of one shard of source prefixes.
fn source_entry_counter(maps: &Maps, shard: usize) -> &AtomicU64 {
    maps.connection_takes.word(offset_of!(intf::connection_takes, entries_by_source) + shard * size_of::<u64>())
}

/// Counts the entries in use. Corrects the count of each source prefix, since an earlier process may have been killed
/// between freeing and subtracting. A count that changes meanwhile is corrected by the next call.
fn recount(maps: &Maps) -> u64 {
    let key = connection_key(maps);
    let shards = 0..intf::SOURCE_SHARDS as usize;
    let before: Vec<u64> =
        shards.clone().map(|shard| source_entry_counter(maps, shard).load(Ordering::Acquire)).collect();
    let mut counted = vec![0; shards.len()];
    let table = &maps.connections;
    for client in table.size().indexes().filter_map(|index| table.client_address(index)) {
        counted[source_shard(&key, client)] += 1;
    }
    for shard in shards.filter(|shard| before[*shard] != counted[*shard]) {
        // The exchange fails when the prefix's count has changed since.
        let (before, counted) = (before[shard], counted[shard]);
        let _ =
            source_entry_counter(maps, shard).compare_exchange(before, counted, Ordering::AcqRel, Ordering::Relaxed);
    }
    counted.iter().sum()
}

/// Pushes free slots that an earlier process did not push on a stack. Fails when the kernel offers no grace period.
pub(super) fn recover_lost_slots(table: &SharedConnectionTable) -> anyhow::Result<()> {
    let mut missing = Vec::new();
    for partition in 0..table.size().partition_count() {
        let mut on_stack = [false; intf::CONNECTIONS_PER_PARTITION as usize];
        for index in table.free_slots(partition) {
            on_stack[index.slot() as usize] = true;
        }
        let slots = 0..intf::CONNECTIONS_PER_PARTITION;
        let off_stack =
            slots.filter(|slot| !on_stack[*slot as usize]).map(|slot| ConnectionIndex::new(partition, slot));
        missing.extend(off_stack.filter(|index| table.is_free(*index)));
    }
    if missing.is_empty() {
        return Ok(());
    }
    // A running program may be filling a missing slot; all such programs have ended after this.
    wait_for_programs()?;
    let lost: Vec<_> = missing.into_iter().filter(|index| table.is_free(*index)).collect();
    lost.iter().for_each(|index| table.push(*index));
    if !lost.is_empty() {
        tracing::info!(
            event = "leaked-entries-freed",
            count = lost.len(),
            "the load balancer has freed connection table entries that an earlier process leaked"
        );
    }
    Ok(())
}

/// Stores the owner number in the word that holds the clock, too. A packet's concurrent clock update may be lost.
fn set_owner_word(maps: &Maps, owner: Option<OwnerNumber>) {
    let number = owner.map_or(intf::MAX_OWNERS, |owner| u32::from(owner.get()));
    let clock = maps.state.load(CLOCK_OFFSET) as u32;
    maps.state.store(CLOCK_OFFSET, u64::from(number) << 32 | u64::from(clock));
}

const _: () = assert!(CLOCK_OFFSET.is_multiple_of(8) && offset_of!(intf::lb_state, owner) == CLOCK_OFFSET + 4);

pub(super) fn clock(maps: &Maps) -> ClockTicks {
    ClockTicks(maps.state.load(CLOCK_OFFSET) as u32)
}

fn owner_entry_offset(owner: OwnerNumber) -> usize {
    OWNERS_OFFSET + usize::from(owner.get()) * size_of::<intf::server_entry>()
}

fn is_known(maps: &Maps, service: ServiceIndex, server: ServerId) -> bool {
    (server_entry(maps, service, server) >> SERVER_FLAGS_SHIFT) as u32 & intf::SERVER_KNOWN != 0
}

/// Number of connection table entries in use: the number at the last count, and the changes since then.
#[derive(Debug)]
pub(super) struct Occupancy {
    counted_entries: u64,
    /// Number of entries that packets had ever allocated, at the time of the last count.
    allocations: u64,
    freed_entries: u64,
}

fn allocations(maps: &Maps) -> u64 {
    let row = |row: usize| {
        let at = offset_of!(intf::connection_takes, by_row) + row * size_of::<intf::connection_takes_row>();
        maps.connection_takes.load(at + offset_of!(intf::connection_takes_row, count))
    };
    (0..maps.counter_rows()).map(row).sum()
}

impl Occupancy {
    /// Counts all connection table entries in use.
    pub fn count(maps: &Maps) -> Self {
        let allocations = allocations(maps);
        Self { counted_entries: recount(maps), allocations, freed_entries: 0 }
    }

    fn entries_in_use(&self, maps: &Maps) -> u64 {
        let entries = u64::from(maps.connections.size().entry_count());
        (self.counted_entries + allocations(maps).saturating_sub(self.allocations))
            .saturating_sub(self.freed_entries)
            .min(entries)
    }
}

pub(super) fn service_connections(
    table: &SharedConnectionTable,
    service: ServiceIndex,
) -> impl Iterator<Item = Connection> + '_ {
    let all = table.size().indexes().filter_map(|index| table.connection(index));
    all.filter(move |connection| connection.identity.service == service.0)
}

/// Read access to the connection table of a running load balancer, without its daemon.
#[derive(Debug)]
pub struct PinnedConnections {
    maps: Maps,
}

impl PinnedConnections {
    /// Opens the maps in `pin_directory`. Fails when no load balancer is pinned there, or one of another version.
    pub fn open(pin_directory: &Path) -> anyhow::Result<Self> {
        Ok(Self { maps: Maps::take_over(&program::existing_pin_directory(pin_directory)?)? })
    }

    /// Returns the load balancer's services and their configured names.
    pub fn services(&self) -> Vec<(ServiceAddress, String)> {
        service_names(&self.maps)
    }

    /// Returns the size of the table.
    pub fn size(&self) -> TableSize {
        self.maps.connections.size()
    }

    /// Returns the current time of the clock that packets read.
    pub fn clock(&self) -> ClockTicks {
        clock(&self.maps)
    }

    /// Returns the connection table entries of a service; none if the service does not exist.
    pub fn connections(&self, service: ServiceAddress) -> impl Iterator<Item = Connection> + '_ {
        let index = read_services(&self.maps).get(&service).map(|service| service.index);
        index.into_iter().flat_map(|index| service_connections(&self.maps.connections, index))
    }
}

impl LoadBalancer {
    /// Returns the size of the connection table.
    pub fn connection_table_size(&self) -> TableSize {
        self.maps.connections.size()
    }

    /// Returns the hash key of the connection table, which was set when the maps were created.
    pub fn connection_key(&self) -> CookieKey {
        connection_key(&self.maps)
    }

    /// Sets this load balancer's owner number, which is unique among all load balancers with a connection table. With
    /// `None`, the default, new connections of stateful services get stateless cookies. After a change, cookies that
    /// carry the former number no longer lead to entries of this table.
    pub fn set_owner_number(&mut self, owner: Option<OwnerNumber>) {
        set_owner_word(&self.maps, owner);
    }

    /// Returns this load balancer's owner number; `None`: it has none.
    pub fn owner_number(&self) -> Option<OwnerNumber> {
        OwnerNumber::try_from(self.maps.state.load(CLOCK_OFFSET) >> 32).ok()
    }

    /// Sets the MAC address of another load balancer, to which packets are sent whose cookies name an entry of its
    /// table. `None`: that load balancer is lost, and its packets are broadcast at a separate rate
    /// ([`Options::broadcast_limits`](super::Options::broadcast_limits)).
    pub fn set_owner_mac(&mut self, owner: OwnerNumber, mac: Option<MacAddress>) {
        let flags = intf::SERVER_KNOWN | if mac.is_some() { intf::SERVER_RESOLVED } else { 0 };
        let word = mac.map_or(0, MacAddress::word) | u64::from(flags) << SERVER_FLAGS_SHIFT;
        self.maps.state.store(owner_entry_offset(owner), word);
    }

    /// Returns the MAC address set by [`set_owner_mac`](Self::set_owner_mac), also by an earlier process.
    pub fn owner_mac(&self, owner: OwnerNumber) -> Option<MacAddress> {
        let word = self.maps.state.load(owner_entry_offset(owner));
        let resolved = (word >> SERVER_FLAGS_SHIFT) as u32 & intf::SERVER_RESOLVED != 0;
        resolved.then(|| MacAddress::from_word(word))
    }

    /// Removes an owner number that no connection uses. Packets with indexes of that owner are then treated as forged.
    pub fn forget_owner(&mut self, owner: OwnerNumber) {
        self.maps.state.store(owner_entry_offset(owner), 0);
    }

    /// Sets the clock that packets read, in tenths of a second, from CLOCK_MONOTONIC. To be called every 100 ms.
    pub fn tick(&mut self, monotonic: Duration) {
        let owner = self.maps.state.load(CLOCK_OFFSET) & !u64::from(u32::MAX);
        self.maps.state.store(CLOCK_OFFSET, owner | u64::from(ClockTicks::at(monotonic).0));
    }

    /// Returns the current time of the clock that packets read.
    pub fn clock(&self) -> ClockTicks {
        clock(&self.maps)
    }

    /// Returns the connection table entries of a service. Packets may change the table while it is read.
    pub fn connections(&self, service: ServiceIndex) -> impl Iterator<Item = Connection> + '_ {
        service_connections(&self.maps.connections, service)
    }

    /// Updates the limit of entries that one source prefix may have. To be called as often as [`tick`](Self::tick).
    pub fn update_source_limit(&mut self) {
        let limit = entries_per_source(self.maps.connections.size(), self.occupancy.entries_in_use(&self.maps) as u32);
        self.maps.state.store(offset_of!(intf::lb_state, entries_per_source), limit.into());
    }

    /// Returns the number of connection table entries in use: the result of the last
    /// [`recount_connections`](Self::recount_connections), and the changes since then.
    pub fn occupancy(&self) -> u64 {
        self.occupancy.entries_in_use(&self.maps)
    }

    /// Counts all entries in use, so that [`used_entry_count`](Self::used_entry_count) and the counts of source
    /// prefixes are exact again. Counter rows that two CPUs share lose an increment now and then.
    pub fn count_connections(&mut self) {
        self.occupancy = Occupancy::count(&self.maps);
    }

    /// Returns the number of connection table entries in use, by reading the whole table.
    pub fn connections_in_use(&self) -> usize {
        count_used(&self.maps.connections)
    }

    /// Checks the next `entries` entries of the table. Returns the connections that may be freed, each with the reason.
    /// Each call continues after the last one and wraps, as a full sweep would pause the daemon. After
    /// [`intf::CONNECTION_UNSWEPT_TICKS`] without a call, packets reuse entries by the timers of the last call.
    pub fn due_connections(&mut self, timers: &Timeouts, entries: u32) -> Vec<(Connection, ExpiryReason)> {
        let all = self.maps.connections.size().entry_count();
        let (table, now) = (&self.maps.connections, self.clock());
        set_timers(&self.maps, timers, now);
        let mut found = Vec::new();
        for position in (0..entries.min(all)).map(|n| (self.next_sweep_position + n) % all) {
            let Some(connection) = table.connection(table.size().index_at(position)) else { continue };
            let service = ServiceIndex(connection.identity.service);
            let known = is_known(&self.maps, service, connection.identity.server);
            found.extend(timers.expiry_reason(&connection, known, now).map(|due| (connection, due)));
        }
        self.next_sweep_position = (self.next_sweep_position + entries) % all;
        found
    }

    /// Frees the entries of `connections` and returns how many were freed. An entry stays in use if it now has another
    /// connection, or its connection had another packet. Waits for an RCU grace period (some ms). Fails when the kernel
    /// offers no grace period: the slots are then lost until another process takes over.
    pub fn free_connections(&mut self, connections: &[Connection]) -> anyhow::Result<usize> {
        let table = &self.maps.connections;
        let unchanged = |connection: &&Connection| {
            let now = table.connection(connection.index);
            now.is_some_and(|now| now.has_no_packet_since(connection))
        };
        let released: Vec<&Connection> = connections
            .iter()
            .filter(unchanged)
            .filter(|connection| table.release(connection.index, connection.identity))
            .collect();
        if !released.is_empty() {
            // A program that found the connection may still be updating the entry.
            self.grace_periods.wait(self.grace_periods.request())?;
        }
        let key = connection_key(&self.maps);
        for connection in &released {
            self.maps.connections.push(connection.index);
            let held = source_entry_counter(&self.maps, source_shard(&key, connection.client.ip()));
            let _ = held.fetch_update(Ordering::AcqRel, Ordering::Acquire, |held| held.checked_sub(1));
        }
        self.occupancy.freed_entries += released.len() as u64;
        Ok(released.len())
    }

    /// Frees all entries of services that were removed or are no longer stateful, once no packet can find them.
    pub(super) fn forget_connections(&mut self, services: &[ServiceIndex]) -> anyhow::Result<()> {
        for service in services {
            let connections: Vec<Connection> = self.connections(*service).collect();
            self.free_connections(&connections)?;
        }
        Ok(())
    }
}
