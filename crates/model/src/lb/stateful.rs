//! Stateful services: the connection table, its owners, and SYNs whose TSecr names their entry.
//!
//! [`crate::connection_table::table`] has the operations on entries, which `bpf/lb/connection_table.h` follows line by
//! line.

use std::net::IpAddr;

use coreward_intf as intf;

use super::decision::Decision;
use super::packet::{self, Packet};
use super::{LoadBalancer, Mac};
use crate::connection_table::table::{ConnectionTable, NewConnection, OwnMemory, RecentConnections, TakeError};
use crate::connection_table::{
    ClockTicks, Connection, ConnectionHash, ConnectionIndex, OwnerNumber, TableSize, Timeouts, decode_cookie_index,
    encode_syn_tsecr, source_shard,
};
use crate::cookie::CookieKey;
use crate::{FourTuple, ServerId};

/// State of a load balancer that may own a connection table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Owner {
    /// No load balancer has the number.
    #[default]
    Unknown,
    /// The load balancer left, or its MAC address is not resolved.
    Lost,
    /// Packets with an index into the owner's table are forwarded to this MAC address.
    Reachable(Mac),
}

#[derive(Debug)]
pub(super) struct ConnectionTableState {
    pub key: CookieKey,
    pub owner: Option<OwnerNumber>,
    pub owners: [Owner; intf::MAX_OWNERS as usize],
    pub clock: ClockTicks,
    /// Time of the last sweep by user space.
    pub last_sweep: ClockTicks,
    /// Maximum number of entries of one source prefix; `None` for no limit.
    pub entries_per_source: Option<u32>,
    table: ConnectionTable<OwnMemory>,
    recent_connections: RecentConnections,
    /// Number of entries of each source prefix.
    entries_by_source: Vec<u32>,
}

/// Result of the look-up of the index in a cookie.
pub(super) enum IndexLookup {
    /// A decision and, if the index is into this load balancer's own table, the entry.
    Decided(Decision, Option<ConnectionIndex>),
    /// The entry is free, or has another connection.
    UnknownConnection,
    /// The service no longer has the server of the entry.
    UnknownServer,
}

impl ConnectionTableState {
    pub fn new(size: TableSize) -> Self {
        let table = ConnectionTable::new(OwnMemory::new(size), size);
        table.initialise();
        Self {
            key: CookieKey { k0: 0, k1: 0 },
            owner: None,
            owners: Default::default(),
            clock: ClockTicks::default(),
            last_sweep: ClockTicks::default(),
            entries_per_source: None,
            table,
            recent_connections: RecentConnections::default(),
            entries_by_source: vec![0; intf::SOURCE_SHARDS as usize],
        }
    }

    fn source_entries_mut(&mut self, client: IpAddr) -> &mut u32 {
        &mut self.entries_by_source[source_shard(&self.key, client)]
    }

    fn may_take_entry(&mut self, client: IpAddr) -> bool {
        let limit = self.entries_per_source;
        limit.is_none_or(|limit| *self.source_entries_mut(client) < limit)
    }

    pub fn connection(&self, index: ConnectionIndex) -> Option<Connection> {
        self.table.connection(index)
    }

    pub fn connections(&self) -> impl Iterator<Item = Connection> + '_ {
        self.table.size().indexes().filter_map(|index| self.table.connection(index))
    }

    pub fn free_connections(&mut self, connections: &[Connection]) {
        let is_unchanged = |connection: &&Connection| {
            let now = self.table.connection(connection.index);
            now.is_some_and(|now| now.has_no_packet_since(connection))
        };
        let release = |connection: &&Connection| self.table.release(connection.index, connection.identity);
        let released: Vec<&Connection> = connections.iter().filter(is_unchanged).filter(release).collect();
        for connection in released {
            self.table.push(connection.index);
            *self.source_entries_mut(connection.client.ip()) -= 1;
        }
    }

    pub fn free_services(&mut self, services: &[usize]) {
        for service in services {
            let theirs: Vec<Connection> =
                self.connections().filter(|connection| usize::from(connection.identity.service) == *service).collect();
            self.free_connections(&theirs);
        }
    }

    pub fn update(&self, index: ConnectionIndex, bytes: u64, closing: bool) -> bool {
        self.table.update(index, bytes, closing, self.clock)
    }
}

impl LoadBalancer {
    pub(super) fn connection_hash(&self, service_slot: usize, tuple: &FourTuple) -> ConnectionHash {
        ConnectionHash::new(&self.stateful.key, service_slot as u16, tuple.client())
    }

    /// Decides on a packet by the index `number` in its cookie. `from` is the source MAC address of the frame.
    pub(super) fn decide_by_index(
        &mut self,
        service_slot: usize,
        tuple: &FourTuple,
        number: u16,
        counter: intf::lb_counter,
        from: Mac,
        now_ns: u64,
    ) -> IndexLookup {
        let (owner, entry) = decode_cookie_index(number);
        if self.stateful.owner != Some(owner) {
            return IndexLookup::Decided(
                self.decide_owner((service_slot, tuple.client().ip()), owner, from, now_ns),
                None,
            );
        }
        let hash = self.connection_hash(service_slot, tuple);
        match self.stateful.table.find(hash, entry, service_slot as u16) {
            None => IndexLookup::UnknownConnection,
            Some((_, id)) if self.service(service_slot).server(id).is_none() => IndexLookup::UnknownServer,
            Some((index, id)) => IndexLookup::Decided(self.deliver_to(service_slot, id, counter), Some(index)),
        }
    }

    /// Forwards to the load balancer that owns the entry, unless the packet came from another load balancer.
    fn decide_owner(&mut self, of: (usize, IpAddr), owner: OwnerNumber, from: Mac, now_ns: u64) -> Decision {
        let owners = self.stateful.owners;
        match owners[usize::from(owner.get())] {
            Owner::Unknown => self.decide_unknown(of, now_ns),
            Owner::Reachable(mac) if !owners.contains(&Owner::Reachable(from)) => {
                Decision::forward(intf::LB_COUNTER_TO_OWNER, mac)
            }
            Owner::Reachable(_) | Owner::Lost => {
                let over_rate = intf::LB_COUNTER_DROP_BROADCAST_RATE_LIMITED;
                self.deliver_broadcast(of, intf::LIMITED_OWNER_LOST, over_rate, now_ns)
            }
        }
    }

    /// Takes the slot of an expired entry for a new connection, and returns the entry's index.
    fn reuse(&mut self, new: &NewConnection, server: ServerId) -> Option<ConnectionIndex> {
        let (clock, swept) = (self.stateful.clock, self.stateful.last_sweep);
        let is_expired = |connection: &Connection| {
            let identity = connection.identity;
            let known = self.service(usize::from(identity.service)).server(identity.server).is_some();
            Timeouts::default().is_expired(connection, known, swept, clock)
        };
        let (index, before) = self.stateful.table.reuse(new, server, clock, is_expired)?;
        let held = self.stateful.source_entries_mut(before.client.ip());
        *held = held.saturating_sub(1);
        Some(index)
    }

    /// Takes an entry for a SYN, or finds that of its first transmission. TSecr carries the entry to the server.
    pub(super) fn decide_new_stateful(
        &mut self,
        service_slot: usize,
        packet: &Packet,
        tsecr: packet::Tsecr,
        bytes: u64,
    ) -> Decision {
        let hash = self.connection_hash(service_slot, &packet.tuple());
        let owner = self.stateful.owner;
        let recent = self.stateful.recent_connections.find_slot(hash);
        let before = recent.and_then(|recent| self.stateful.table.find(hash, recent, service_slot as u16));
        if let (Some((index, id)), Some(owner)) = (before, owner)
            && self.service(service_slot).takes_new_connections(id)
        {
            let opens = self.stateful.table.reopen(index, self.stateful.clock);
            self.stateful.recent_connections.remember(hash, index);
            let decision = self.deliver_to(service_slot, id, intf::LB_COUNTER_NEW_CONNECTION).opening(opens);
            return decision.with_tsecr(tsecr, encode_syn_tsecr(owner, index.slot()));
        }
        let decision = self.decide_by_rule(service_slot, packet, intf::LB_COUNTER_NEW_CONNECTION);
        let decision = if tsecr.value == 0 { decision } else { decision.with_tsecr(tsecr, 0) };
        let (Some(server), Some(owner)) = (decision.server(), owner) else { return decision };
        if !self.stateful.may_take_entry(packet.client.ip()) {
            return decision.with_event(intf::LB_EVENT_CONNECTION_SOURCE_LIMITED);
        }
        let new = NewConnection { hash, service: service_slot as u16, client: packet.client, bytes };
        let (index, decision) = match self.stateful.table.take(&new, server, self.stateful.clock) {
            Ok(index) => (index, decision),
            Err(TakeError::Full) => match self.reuse(&new, server) {
                Some(index) => (index, decision.with_event(intf::LB_EVENT_CONNECTION_REUSED)),
                None => return decision.with_event(intf::LB_EVENT_CONNECTION_TABLE_FULL),
            },
            Err(TakeError::Contended) => unreachable!("no other operation takes entries here"),
        };
        *self.stateful.source_entries_mut(packet.client.ip()) += 1;
        self.stateful.recent_connections.remember(hash, index);
        decision.with_tsecr(tsecr, encode_syn_tsecr(owner, index.slot()))
    }
}
