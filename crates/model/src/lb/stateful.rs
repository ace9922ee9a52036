//! Stateful services, with the connection table, its owners, and SYNs whose TSecr carries their entry.
//!
//! [`crate::connection_table::table`] has the operations on entries, which `bpf/lb/connection_table.h` follows line by
//! line.

use std::net::IpAddr;

use coreward_intf as intf;

use super::decision::PacketDecision;
use super::packet::{self, ClientPacket};
use super::{LoadBalancer, MacAddress};
use crate::connection_table::table::{
    ConnectionSlotError, ConnectionTable, HeapTableMemory, NewConnection, RecentConnections,
};
use crate::connection_table::{
    ConnectionEntry, ConnectionHash, ConnectionIndex, ConnectionTableSize, ConnectionTimeouts, DecisecondTicks,
    TableOwnerNumber, decode_cookie_index, encode_syn_tsecr, source_prefix_counter_index,
};
use crate::cookie::CookieKey;
use crate::{FourTuple, ServerId};

/// Reachability of the load balancer with a certain owner number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TableOwnerReachability {
    /// No load balancer has the owner number.
    #[default]
    Unknown,
    /// The load balancer left the fleet, or its MAC address is not resolved.
    Lost,
    /// Packets with an index into the owner's table are forwarded to this MAC address.
    Reachable(MacAddress),
}

#[derive(Debug)]
pub(super) struct ConnectionTableState {
    pub connection_key: CookieKey,
    pub owner_number: Option<TableOwnerNumber>,
    pub reachability_by_owner: [TableOwnerReachability; intf::MAX_OWNERS as usize],
    pub now: DecisecondTicks,
    pub last_sweep: DecisecondTicks,
    /// Maximum number of connection table entries of one source prefix, or `None` for no limit.
    pub max_entries_per_source: Option<u32>,
    connection_table: ConnectionTable<HeapTableMemory>,
    recent_connections: RecentConnections,
    /// Number of connection table entries that the clients of each source prefix hold.
    entry_count_by_source: Vec<u32>,
}

/// Result of the look-up of a cookie's index in the connection table.
pub(super) enum ConnectionIndexLookup {
    /// Decision on the packet, with the entry's index if the entry is in this load balancer's own table.
    Decided(PacketDecision, Option<ConnectionIndex>),
    /// The entry is free, or belongs to another connection.
    UnknownConnection,
    /// The server of the entry is no longer in the service.
    UnknownServer,
}

impl ConnectionTableState {
    pub fn new(size: ConnectionTableSize) -> Self {
        let connection_table = ConnectionTable::new(HeapTableMemory::new(size), size);
        connection_table.initialise_entries();
        Self {
            connection_key: CookieKey { k0: 0, k1: 0 },
            owner_number: None,
            reachability_by_owner: Default::default(),
            now: DecisecondTicks::default(),
            last_sweep: DecisecondTicks::default(),
            max_entries_per_source: None,
            connection_table,
            recent_connections: RecentConnections::default(),
            entry_count_by_source: vec![0; intf::SOURCE_SHARDS as usize],
        }
    }

    fn source_entry_count_mut(&mut self, client: IpAddr) -> &mut u32 {
        &mut self.entry_count_by_source[source_prefix_counter_index(&self.connection_key, client)]
    }

    fn may_take_entry(&mut self, client: IpAddr) -> bool {
        let max_entry_count = self.max_entries_per_source;
        max_entry_count.is_none_or(|limit| *self.source_entry_count_mut(client) < limit)
    }

    pub fn connection_at(&self, index: ConnectionIndex) -> Option<ConnectionEntry> {
        self.connection_table.connection_at(index)
    }

    pub fn connections(&self) -> impl Iterator<Item = ConnectionEntry> + '_ {
        self.connection_table.size().entry_indexes().filter_map(|index| self.connection_table.connection_at(index))
    }

    pub fn free_unchanged_connections(&mut self, connections: &[ConnectionEntry]) {
        let is_connection_unchanged = |connection: &&ConnectionEntry| {
            let current_connection = self.connection_table.connection_at(connection.index);
            current_connection.is_some_and(|current_snapshot| current_snapshot.has_no_packet_since(connection))
        };
        let release_entry =
            |connection: &&ConnectionEntry| self.connection_table.release_entry(connection.index, connection.identity);
        let released_connections: Vec<&ConnectionEntry> =
            connections.iter().filter(is_connection_unchanged).filter(release_entry).collect();
        for connection in released_connections {
            self.connection_table.push_free_slot(connection.index);
            *self.source_entry_count_mut(connection.client.ip()) -= 1;
        }
    }

    pub fn free_entries_of_services(&mut self, service_slots: &[usize]) {
        for service_slot in service_slots {
            let service_connections: Vec<ConnectionEntry> = self
                .connections()
                .filter(|connection| usize::from(connection.identity.service_slot) == *service_slot)
                .collect();
            self.free_unchanged_connections(&service_connections);
        }
    }

    pub fn record_packet(&self, index: ConnectionIndex, frame_bytes: u64, is_closing_packet: bool) -> bool {
        self.connection_table.record_packet(index, frame_bytes, is_closing_packet, self.now)
    }
}

impl LoadBalancer {
    pub(super) fn connection_hash(&self, service_slot: usize, tuple: &FourTuple) -> ConnectionHash {
        ConnectionHash::new(&self.connection_table_state.connection_key, service_slot as u16, tuple.client())
    }

    /// Decides on a packet by the index `cookie_index` in its cookie. `source_mac` is the source MAC address of the
    /// packet's frame.
    pub(super) fn decide_by_cookie_index(
        &mut self,
        service_slot: usize,
        tuple: &FourTuple,
        cookie_index: u16,
        counter: intf::lb_counter,
        source_mac: MacAddress,
        now_ns: u64,
    ) -> ConnectionIndexLookup {
        let (owner, entry_slot) = decode_cookie_index(cookie_index);
        if self.connection_table_state.owner_number != Some(owner) {
            return ConnectionIndexLookup::Decided(
                self.forward_to_owner((service_slot, tuple.client().ip()), owner, source_mac, now_ns),
                None,
            );
        }
        let hash = self.connection_hash(service_slot, tuple);
        match self.connection_table_state.connection_table.find_connection(hash, entry_slot, service_slot as u16) {
            None => ConnectionIndexLookup::UnknownConnection,
            Some((_, id)) if self.service_in_slot(service_slot).server(id).is_none() => {
                ConnectionIndexLookup::UnknownServer
            }
            Some((index, id)) => {
                ConnectionIndexLookup::Decided(self.decide_delivery_to_server(service_slot, id, counter), Some(index))
            }
        }
    }

    /// Forwards a packet to the load balancer that owns the entry, unless it came from another load balancer.
    fn forward_to_owner(
        &mut self,
        slot_and_source: (usize, IpAddr),
        owner: TableOwnerNumber,
        source_mac: MacAddress,
        now_ns: u64,
    ) -> PacketDecision {
        let owners = self.connection_table_state.reachability_by_owner;
        match owners[usize::from(owner.get())] {
            TableOwnerReachability::Unknown => self.decide_packet_of_unknown_connection(slot_and_source, now_ns),
            TableOwnerReachability::Reachable(mac)
                if !owners.contains(&TableOwnerReachability::Reachable(source_mac)) =>
            {
                PacketDecision::forward_to_mac(intf::LB_COUNTER_TO_OWNER, mac)
            }
            TableOwnerReachability::Reachable(_) | TableOwnerReachability::Lost => {
                let over_rate_counter = intf::LB_COUNTER_DROP_BROADCAST_RATE_LIMITED;
                self.decide_broadcast(slot_and_source, intf::LIMITED_OWNER_LOST, over_rate_counter, now_ns)
            }
        }
    }

    fn reuse_expired_entry(&mut self, new_connection: &NewConnection, server: ServerId) -> Option<ConnectionIndex> {
        let (clock, last_sweep) = (self.connection_table_state.now, self.connection_table_state.last_sweep);
        let is_connection_expired = |connection: &ConnectionEntry| {
            let identity = connection.identity;
            let is_server_known =
                self.service_in_slot(usize::from(identity.service_slot)).server(identity.server).is_some();
            ConnectionTimeouts::default().is_expired(connection, is_server_known, last_sweep, clock)
        };
        let (index, expired_connection) = self.connection_table_state.connection_table.reuse_expired_slot(
            new_connection,
            server,
            clock,
            is_connection_expired,
        )?;
        let entry_count = self.connection_table_state.source_entry_count_mut(expired_connection.client.ip());
        *entry_count = entry_count.saturating_sub(1);
        Some(index)
    }

    /// Decides on a SYN whose connection already has an entry. Returns `None` if there is no entry, if the entry's
    /// server takes no new connections, or if this load balancer has no owner number.
    fn decide_repeated_syn(
        &mut self,
        service_slot: usize,
        hash: ConnectionHash,
        tsecr: packet::TcpTimestampField,
    ) -> Option<PacketDecision> {
        let recent_slot = self.connection_table_state.recent_connections.find_slot(hash)?;
        let (index, id) =
            self.connection_table_state.connection_table.find_connection(hash, recent_slot, service_slot as u16)?;
        let owner = self.connection_table_state.owner_number?;
        if !self.service_in_slot(service_slot).takes_new_connections(id) {
            return None;
        }
        let was_closing =
            self.connection_table_state.connection_table.record_repeated_syn(index, self.connection_table_state.now);
        self.connection_table_state.recent_connections.record_syn_slot(hash, index);
        let decision = self
            .decide_delivery_to_server(service_slot, id, intf::LB_COUNTER_NEW_CONNECTION)
            .with_opens_connection(was_closing);
        Some(decision.with_new_tsecr(tsecr, encode_syn_tsecr(owner, index.slot())))
    }

    /// Decides on a SYN. Takes a table entry for it, or finds the entry if the SYN was repeated. The SYN's TSecr
    /// carries the entry's index to the server.
    pub(super) fn decide_stateful_syn(
        &mut self,
        service_slot: usize,
        packet: &ClientPacket,
        tsecr: packet::TcpTimestampField,
        frame_bytes: u64,
    ) -> PacketDecision {
        let hash = self.connection_hash(service_slot, &packet.four_tuple());
        if let Some(decision) = self.decide_repeated_syn(service_slot, hash, tsecr) {
            return decision;
        }
        let decision = self.decide_by_rule(service_slot, packet, intf::LB_COUNTER_NEW_CONNECTION);
        let decision = if tsecr.timestamp_value == 0 { decision } else { decision.with_new_tsecr(tsecr, 0) };
        let owner_number = self.connection_table_state.owner_number;
        let (Some(server), Some(owner)) = (decision.server(), owner_number) else { return decision };
        if !self.connection_table_state.may_take_entry(packet.client.ip()) {
            return decision.with_extra_event(intf::LB_EVENT_CONNECTION_SOURCE_LIMITED);
        }
        let new_connection =
            NewConnection { hash, service_slot: service_slot as u16, client: packet.client, frame_bytes };
        let (index, decision) = match self.connection_table_state.connection_table.take_slot(
            &new_connection,
            server,
            self.connection_table_state.now,
        ) {
            Ok(index) => (index, decision),
            Err(ConnectionSlotError::PartitionFull) => match self.reuse_expired_entry(&new_connection, server) {
                Some(index) => (index, decision.with_extra_event(intf::LB_EVENT_CONNECTION_REUSED)),
                None => return decision.with_extra_event(intf::LB_EVENT_CONNECTION_TABLE_FULL),
            },
            Err(ConnectionSlotError::Contended) => unreachable!("no other operation takes entries here"),
        };
        *self.connection_table_state.source_entry_count_mut(packet.client.ip()) += 1;
        self.connection_table_state.recent_connections.record_syn_slot(hash, index);
        decision.with_new_tsecr(tsecr, encode_syn_tsecr(owner, index.slot()))
    }
}
