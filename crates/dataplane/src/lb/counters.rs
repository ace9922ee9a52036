//! Counters of packets and events, by service.

use std::mem::offset_of;

use coreward_intf as intf;

use super::{LoadBalancer, ServiceIndex};

/// Number of outcomes of a packet, which are named by [`COUNTER_NAMES`](super::COUNTER_NAMES).
pub const COUNTER_COUNT: usize = intf::LB_COUNTER_COUNT as usize;

/// Number of kinds of events, which are named by [`EVENT_NAMES`](super::EVENT_NAMES).
pub const EVENT_COUNT: usize = intf::LB_EVENT_COUNT as usize;

/// Counters of packets and events, since the maps were created.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counters {
    /// Packets by outcome, in the order of [`COUNTER_NAMES`](super::COUNTER_NAMES). Each packet has one outcome.
    pub packets: [u64; COUNTER_COUNT],
    /// Number of events of each kind, in the order of [`EVENT_NAMES`](super::EVENT_NAMES).
    pub events: [u64; EVENT_COUNT],
    /// Number of bytes in frames of forwarded packets.
    pub forwarded_bytes: u64,
}

impl Counters {
    fn sum(&self, outcomes: &[&str]) -> u64 {
        let counted = super::COUNTER_NAMES.iter().zip(self.packets);
        counted.filter(|(name, _)| outcomes.contains(name)).map(|(_, count)| count).sum()
    }

    /// Returns the number of SYNs that the placement rule or a connection table entry sent to servers. SYNs of clients
    /// without timestamps and of `beamer` services are counted by [`Counters::established_packets`] only.
    pub fn syns(&self) -> u64 {
        self.sum(&["new_connection"])
    }

    /// Returns the number of packets that were sent to servers as part of established connections.
    pub fn established_packets(&self) -> u64 {
        self.sum(&["established", "connection_table", "flow_table", "per_packet", "bucket_hash", "to_owner"])
    }
}

impl LoadBalancer {
    /// Returns the counters of the packets of one service.
    pub fn counters(&self, service: ServiceIndex) -> Counters {
        self.sum(&[usize::from(service.0)])
    }

    /// Returns how many new connections of a service were sent to servers.
    pub fn opened_connections(&self, service: ServiceIndex) -> u64 {
        let entry = |row: usize| row * intf::LB_COUNTERS_PER_ROW as usize + usize::from(service.0);
        let field = offset_of!(intf::lb_counters, opened);
        let of_row = |row| self.maps.counters.load(entry(row) * size_of::<intf::lb_counters>() + field);
        (0..self.maps.counter_rows()).map(of_row).sum()
    }

    /// Moves a removed service's counters to the total of removed services, so that the next service with this index
    /// starts at zero. No packet may be counted for the index during the call.
    pub(super) fn retire_counters(&self, service: ServiceIndex) {
        let words = size_of::<intf::lb_counters>() / size_of::<u64>();
        for row in 0..self.maps.counter_rows() {
            let start = row * intf::LB_COUNTERS_PER_ROW as usize;
            let [from, to] = [usize::from(service.0), intf::LB_COUNTERS_REMOVED as usize]
                .map(|position| (start + position) * size_of::<intf::lb_counters>());
            for offset in (0..words).map(|word| word * size_of::<u64>()) {
                let count = self.maps.counters.load(from + offset);
                self.maps.counters.store(from + offset, 0);
                self.maps.counters.store(to + offset, self.maps.counters.load(to + offset) + count);
            }
        }
    }

    /// Returns the counters of packets that belong to no known service.
    pub fn counters_without_service(&self) -> Counters {
        self.sum(&[intf::LB_COUNTERS_NO_SERVICE as usize])
    }

    /// Returns the counters of all packets, those of removed services included. No counter ever decreases, not even
    /// after a take-over, before the services are configured again.
    pub fn total_counters(&self) -> Counters {
        let places = 0..self.services_by_index.len();
        let others = [intf::LB_COUNTERS_NO_SERVICE as usize, intf::LB_COUNTERS_REMOVED as usize];
        self.sum(&places.chain(others).collect::<Vec<_>>())
    }

    fn sum(&self, positions: &[usize]) -> Counters {
        let mut sum = Counters::default();
        for row in 0..self.maps.counter_rows() {
            for position in positions {
                self.add(&mut sum, row * intf::LB_COUNTERS_PER_ROW as usize + position);
            }
        }
        sum
    }

    fn add(&self, sum: &mut Counters, entry: usize) {
        let start = entry * size_of::<intf::lb_counters>();
        let packets = start + offset_of!(intf::lb_counters, packets);
        for (counter, sum) in sum.packets.iter_mut().enumerate() {
            *sum += self.maps.counters.load(packets + counter * size_of::<u64>());
        }
        let events = start + offset_of!(intf::lb_counters, events);
        for (event, sum) in sum.events.iter_mut().enumerate() {
            *sum += self.maps.counters.load(events + event * size_of::<u64>());
        }
        sum.forwarded_bytes += self.maps.counters.load(start + offset_of!(intf::lb_counters, forwarded_bytes));
    }
}
