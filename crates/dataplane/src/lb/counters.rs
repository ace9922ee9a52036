//! Counters of packets and events for each service.

use std::mem::offset_of;

use coreward_intf as intf;

use super::{LoadBalancer, ServiceIndex};

/// Number of possible outcomes of a packet. [`COUNTER_NAMES`](super::COUNTER_NAMES) has their names.
pub const LB_COUNTER_COUNT: usize = intf::LB_COUNTER_COUNT as usize;

/// Number of kinds of events. [`EVENT_NAMES`](super::EVENT_NAMES) has their names.
pub const LB_EVENT_KIND_COUNT: usize = intf::LB_EVENT_COUNT as usize;

/// Counters of packets and events since the maps were created.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PacketCounters {
    /// Number of packets with each outcome, in the order of [`COUNTER_NAMES`](super::COUNTER_NAMES). Each packet has
    /// one outcome.
    pub packets_by_outcome: [u64; LB_COUNTER_COUNT],
    /// Number of events by kind, in the order of [`EVENT_NAMES`](super::EVENT_NAMES).
    pub event_counts: [u64; LB_EVENT_KIND_COUNT],
    /// Number of bytes in the frames of forwarded packets.
    pub forwarded_bytes: u64,
}

impl PacketCounters {
    fn packet_count_with_outcomes(&self, outcomes: &[&str]) -> u64 {
        let named_counts = super::COUNTER_NAMES.iter().zip(self.packets_by_outcome);
        named_counts.filter(|(name, _)| outcomes.contains(name)).map(|(_, count)| count).sum()
    }

    /// Returns the number of SYNs sent to servers by the placement rule or a connection table entry. SYNs of clients
    /// without timestamps and of `beamer` services are counted only by [`PacketCounters::established_packet_count`].
    pub fn syn_packet_count(&self) -> u64 {
        self.packet_count_with_outcomes(&["new_connection"])
    }

    /// Returns the number of packets sent to servers as part of established connections.
    pub fn established_packet_count(&self) -> u64 {
        self.packet_count_with_outcomes(&[
            "established",
            "connection_table",
            "flow_table",
            "per_packet",
            "bucket_hash",
            "to_owner",
        ])
    }
}

impl LoadBalancer {
    /// Returns the counters of one service's packets.
    pub fn service_counters(&self, service: ServiceIndex) -> PacketCounters {
        self.sum_entries_over_rows(&[usize::from(service.0)])
    }

    /// Returns the number of new connections of a service that were sent to servers.
    pub fn opened_connection_count(&self, service: ServiceIndex) -> u64 {
        let row_entry_index = |row: usize| row * intf::LB_COUNTERS_PER_ROW as usize + usize::from(service.0);
        let opened_offset = offset_of!(intf::lb_counters, opened);
        let opened_connections_in_row =
            |row| self.maps.counter_entries.load(row_entry_index(row) * size_of::<intf::lb_counters>() + opened_offset);
        (0..self.maps.counter_row_count()).map(opened_connections_in_row).sum()
    }

    /// Moves a removed service's counters to the total of removed services, so that the next service with this index
    /// starts at zero. During the call, no packet may be counted for the index.
    pub(super) fn move_counters_to_removed_total(&self, service: ServiceIndex) {
        let words_per_entry = size_of::<intf::lb_counters>() / size_of::<u64>();
        for row in 0..self.maps.counter_row_count() {
            let row_start = row * intf::LB_COUNTERS_PER_ROW as usize;
            let [source_offset, target_offset] = [usize::from(service.0), intf::LB_COUNTERS_REMOVED as usize]
                .map(|position| (row_start + position) * size_of::<intf::lb_counters>());
            for offset in (0..words_per_entry).map(|word_index| word_index * size_of::<u64>()) {
                let count = self.maps.counter_entries.load(source_offset + offset);
                self.maps.counter_entries.store(source_offset + offset, 0);
                self.maps
                    .counter_entries
                    .store(target_offset + offset, self.maps.counter_entries.load(target_offset + offset) + count);
            }
        }
    }

    /// Returns the counters of packets that belong to no known service.
    pub fn counters_without_service(&self) -> PacketCounters {
        self.sum_entries_over_rows(&[intf::LB_COUNTERS_NO_SERVICE as usize])
    }

    /// Returns the counters of all packets, including those of removed services. No counter ever decreases, not even
    /// between a take-over and the new configuration of the services.
    pub fn total_counters(&self) -> PacketCounters {
        let service_indexes = 0..self.service_addresses_by_index.len();
        let special_indexes = [intf::LB_COUNTERS_NO_SERVICE as usize, intf::LB_COUNTERS_REMOVED as usize];
        self.sum_entries_over_rows(&service_indexes.chain(special_indexes).collect::<Vec<_>>())
    }

    fn sum_entries_over_rows(&self, entry_indexes: &[usize]) -> PacketCounters {
        let mut total = PacketCounters::default();
        for row in 0..self.maps.counter_row_count() {
            for position in entry_indexes {
                self.add_entry_to_totals(&mut total, row * intf::LB_COUNTERS_PER_ROW as usize + position);
            }
        }
        total
    }

    fn add_entry_to_totals(&self, totals: &mut PacketCounters, entry_index: usize) {
        let entry_offset = entry_index * size_of::<intf::lb_counters>();
        let packets_offset = entry_offset + offset_of!(intf::lb_counters, packets);
        for (counter_index, sum) in totals.packets_by_outcome.iter_mut().enumerate() {
            *sum += self.maps.counter_entries.load(packets_offset + counter_index * size_of::<u64>());
        }
        let events_offset = entry_offset + offset_of!(intf::lb_counters, events);
        for (event_index, sum) in totals.event_counts.iter_mut().enumerate() {
            *sum += self.maps.counter_entries.load(events_offset + event_index * size_of::<u64>());
        }
        totals.forwarded_bytes +=
            self.maps.counter_entries.load(entry_offset + offset_of!(intf::lb_counters, forwarded_bytes));
    }
}
