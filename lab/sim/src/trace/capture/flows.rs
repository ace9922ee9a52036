//! Assignment of captured packets to flows, and the times at which flows end.
//!
//! A flow consists of the packets with one 5-tuple in one direction. With direct server return, a load balancer only
//! receives the clients' packets, and a capture of both directions has two flows per connection. A flow ends after the
//! idle timeout. A TCP flow with FIN or RST ends after [`CLOSING_FLOW_TIMEOUT_NS`], because a few packets may follow.
//! It also ends when a new SYN starts a flow with the same 5-tuple. Flow numbers are reused, so memory is only needed
//! for the flows within one timeout.

use std::collections::HashMap;
use std::net::{Ipv4Addr, Ipv6Addr};

use coreward_model::FourTuple;
use foldhash::fast::FixedState;

use super::headers::{FLAG_ENDS_CONNECTION, FLAG_IPV6_ADDRESSES, FLAG_OPENS_CONNECTION};
use super::records::{PacketRecord, PacketRecordBatch};
use crate::trace::{FlowFirstPacket, PacketBatch, TraceFlowEvent, TracePacket};

/// Time during which a TCP flow may still send after its FIN or RST (ns).
const CLOSING_FLOW_TIMEOUT_NS: u64 = 2_000_000_000;

/// Key of an IPv4 flow, composed of its addresses, ports and protocol.
type Ipv4FlowKey = u128;
/// Key of an IPv6 flow. The first part holds the addresses, and the second the ports and the protocol.
type Ipv6FlowKey = ([u8; 32], u64);

#[derive(Debug, Clone, Copy)]
enum FlowKey {
    V4(Ipv4FlowKey),
    V6(Ipv6FlowKey),
    /// No flow has this number at present.
    Unused,
}

#[derive(Debug, Clone, Copy)]
struct FlowState {
    last_packet_ns: u64,
    /// Whether the flow has sent a FIN or RST.
    is_closing: bool,
}

pub struct FlowTracker {
    // Keys come from a file and not from an attacker, so a fixed seed is safe and makes runs reproducible.
    ipv4_flow_numbers: HashMap<Ipv4FlowKey, u32, FixedState>,
    ipv6_flow_numbers: HashMap<Ipv6FlowKey, u32, FixedState>,
    flows: Vec<FlowState>,
    /// Keys of the flows, indexed by flow number. They are in a separate vector because every packet accesses `flows`
    /// but not the keys.
    flow_keys: Vec<FlowKey>,
    free_flow_numbers: Vec<u32>,
    idle_timeout_ns: u64,
    next_expiry_sweep_ns: u64,
}

impl FlowTracker {
    pub fn new(idle_timeout_ns: u64) -> Self {
        Self {
            ipv4_flow_numbers: HashMap::with_hasher(FixedState::default()),
            ipv6_flow_numbers: HashMap::with_hasher(FixedState::default()),
            flows: Vec::new(),
            flow_keys: Vec::new(),
            free_flow_numbers: Vec::new(),
            idle_timeout_ns,
            next_expiry_sweep_ns: 0,
        }
    }

    /// Assigns the packets of `records` to flows, and appends them to `batch`.
    pub fn assign_packets_to_flows(&mut self, records: &PacketRecordBatch, batch: &mut PacketBatch) {
        for record in &records.packets {
            if record.time_ns >= self.next_expiry_sweep_ns {
                self.remove_ended_flows(record.time_ns, &mut batch.packets);
            }
            let ports = u64::from(record.port_pair) << 8 | u64::from(record.ip_protocol);
            let (number, is_new) = if record.packet_flags & FLAG_IPV6_ADDRESSES == 0 {
                self.find_or_add_ipv4_flow(u128::from(record.ipv4_addresses_or_ipv6_index) << 64 | u128::from(ports))
            } else {
                self.find_or_add_ipv6_flow((
                    records.ipv6_addresses[record.ipv4_addresses_or_ipv6_index as usize],
                    ports,
                ))
            };
            self.append_packet(record, number, is_new, batch);
        }
    }

    #[inline]
    fn find_or_add_ipv4_flow(&mut self, key: Ipv4FlowKey) -> (u32, bool) {
        match self.ipv4_flow_numbers.get(&key) {
            Some(number) => (*number, false),
            None => {
                let flow_number = self.allocate_flow_number(FlowKey::V4(key));
                self.ipv4_flow_numbers.insert(key, flow_number);
                (flow_number, true)
            }
        }
    }

    fn find_or_add_ipv6_flow(&mut self, key: Ipv6FlowKey) -> (u32, bool) {
        match self.ipv6_flow_numbers.get(&key) {
            Some(number) => (*number, false),
            None => {
                let flow_number = self.allocate_flow_number(FlowKey::V6(key));
                self.ipv6_flow_numbers.insert(key, flow_number);
                (flow_number, true)
            }
        }
    }

    fn allocate_flow_number(&mut self, key: FlowKey) -> u32 {
        let new_flow = FlowState { last_packet_ns: 0, is_closing: false };
        match self.free_flow_numbers.pop() {
            Some(number) => {
                (self.flows[number as usize], self.flow_keys[number as usize]) = (new_flow, key);
                number
            }
            None => {
                self.flows.push(new_flow);
                self.flow_keys.push(key);
                self.flows.len() as u32 - 1
            }
        }
    }

    #[inline]
    fn append_packet(&mut self, record: &PacketRecord, number: u32, mut is_new: bool, batch: &mut PacketBatch) {
        let flow = &mut self.flows[number as usize];
        if record.packet_flags != 0 && !is_new {
            let is_replaced = flow.is_closing && record.packet_flags & FLAG_OPENS_CONNECTION != 0;
            if is_replaced {
                batch.packets.push(TracePacket {
                    time_ns: record.time_ns,
                    flow_number: number,
                    wire_bytes: 0,
                    event: TraceFlowEvent::EXPIRES,
                });
                flow.is_closing = false;
                is_new = true;
            }
        }
        flow.last_packet_ns = record.time_ns;
        flow.is_closing |= record.packet_flags & FLAG_ENDS_CONNECTION != 0;
        let event = if is_new {
            batch.first_packets.push(FlowFirstPacket {
                tuple: flow_key_to_tuple(&self.flow_keys[number as usize]),
                flow_rate_pps: None,
            });
            TraceFlowEvent::OPENS
        } else {
            TraceFlowEvent::NONE
        };
        batch.packets.push(TracePacket {
            time_ns: record.time_ns,
            flow_number: number,
            wire_bytes: record.wire_bytes,
            event,
        });
    }

    /// Removes the flows that have ended by `now_ns`.
    fn remove_ended_flows(&mut self, now_ns: u64, events: &mut Vec<TracePacket>) {
        for number in 0..self.flows.len() as u32 {
            let flow = self.flows[number as usize];
            let timeout_ns =
                if flow.is_closing { CLOSING_FLOW_TIMEOUT_NS.min(self.idle_timeout_ns) } else { self.idle_timeout_ns };
            if now_ns - flow.last_packet_ns < timeout_ns {
                continue;
            }
            match std::mem::replace(&mut self.flow_keys[number as usize], FlowKey::Unused) {
                FlowKey::V4(key) => self.ipv4_flow_numbers.remove(&key),
                FlowKey::V6(key) => self.ipv6_flow_numbers.remove(&key),
                FlowKey::Unused => continue,
            };
            self.free_flow_numbers.push(number);
            events.push(TracePacket {
                time_ns: now_ns,
                flow_number: number,
                wire_bytes: 0,
                event: TraceFlowEvent::EXPIRES,
            });
        }
        // This is often enough to free ended flows soon, and so seldom that the scan costs almost nothing per packet.
        self.next_expiry_sweep_ns = now_ns + (CLOSING_FLOW_TIMEOUT_NS.min(self.idle_timeout_ns) / 4).max(1);
    }
}

/// Returns the 4-tuple of the flow with this key. The client is the sender of the flow's packets.
fn flow_key_to_tuple(key: &FlowKey) -> FourTuple {
    let split_ports = |ports: u64| ((ports >> 24) as u16, (ports >> 8) as u16);
    match key {
        FlowKey::V4(key) => {
            let (source, destination) = split_ports(*key as u64);
            let ipv4_address_at = |shift: u32| Ipv4Addr::from_bits((key >> shift) as u32);
            FourTuple::ipv4((ipv4_address_at(96), source), (ipv4_address_at(64), destination))
        }
        FlowKey::V6((addresses, ports)) => {
            let (source, destination) = split_ports(*ports);
            let ipv6_address_at =
                |at: usize| Ipv6Addr::from(<[u8; 16]>::try_from(&addresses[at..at + 16]).expect("16 bytes"));
            FourTuple::ipv6((ipv6_address_at(0), source), (ipv6_address_at(16), destination))
        }
        FlowKey::Unused => unreachable!("a flow that has just begun has a key"),
    }
}
