//! Overlay of several copies of a trace, for traces whose traffic is too thin to load a fleet.
//!
//! Copy k of n starts k/n of the trace's duration into the trace, and continues at its beginning after its end. All
//! copies therefore last as long as the trace, and their busy times do not coincide. A flow that is cut in two counts
//! as two flows. Each copy has its own addresses. If a generator draws the trace, each copy has its own seed instead,
//! so no cut is needed.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use coreward_model::FourTuple;

use super::{
    CoreServiceRate, FlowFirstPacket, PacketBatch, PacketSkipCounts, PacketTrace, TraceError, TraceFlowEvent,
    TracePacket,
};

/// Maximum number of packets in a batch that is merged from several copies.
const MAX_BATCH_PACKETS: usize = 16_384;

/// Part of another trace between two times. Packet times are shifted so that this slice starts at 0.
pub struct TraceSlice {
    trace: Box<dyn PacketTrace>,
    from_ns: u64,
    until_ns: u64,
    /// First packet of each flow that began before the slice but has not yet sent a packet within it, by flow number.
    unsent_first_packets: HashMap<u32, FlowFirstPacket>,
    /// Numbers of the flows that have sent a packet within the slice and have not ended.
    open_flow_numbers: HashMap<u32, ()>,
    has_ended: bool,
}

impl TraceSlice {
    /// Creates the slice of `trace` from `from_ns` to `until_ns`. Panics when the trace has a history, which cannot be
    /// cut.
    pub fn new(trace: Box<dyn PacketTrace>, from_ns: u64, until_ns: u64) -> Self {
        assert_eq!(trace.history_duration_ns(), 0, "a trace with a history is not cut");
        Self {
            trace,
            from_ns,
            until_ns,
            unsent_first_packets: HashMap::new(),
            open_flow_numbers: HashMap::new(),
            has_ended: false,
        }
    }

    /// Copies the packets of `source_batch` that are within the slice, with times relative to the slice's start.
    fn copy_packets_in_slice(&mut self, source_batch: &PacketBatch, slice_batch: &mut PacketBatch) {
        let mut first_packets = source_batch.first_packets.iter();
        for packet in &source_batch.packets {
            let first_packet = if packet.event.opens_flow() { first_packets.next().copied() } else { None };
            if packet.time_ns >= self.until_ns {
                self.has_ended = true;
                return;
            }
            if packet.time_ns < self.from_ns {
                self.track_packet_before_slice(packet, first_packet);
            } else {
                self.process_packet_in_slice(packet, first_packet, slice_batch);
            }
        }
    }

    fn track_packet_before_slice(&mut self, packet: &TracePacket, first_packet: Option<FlowFirstPacket>) {
        if let Some(first_packet) = first_packet {
            self.unsent_first_packets.insert(packet.flow_number, first_packet);
        }
        if packet.event.closes_flow() {
            self.unsent_first_packets.remove(&packet.flow_number);
        }
    }

    fn process_packet_in_slice(
        &mut self,
        packet: &TracePacket,
        first_packet: Option<FlowFirstPacket>,
        slice_batch: &mut PacketBatch,
    ) {
        let unsent_first_packet = self.unsent_first_packets.remove(&packet.flow_number);
        if unsent_first_packet.is_some() && !packet.event.has_packet() {
            return;
        }
        let mut event = packet.event;
        if let Some(first_packet) = first_packet.or(unsent_first_packet) {
            slice_batch.first_packets.push(first_packet);
            event = if event.closes_flow() { TraceFlowEvent::OPENS_AND_CLOSES } else { TraceFlowEvent::OPENS };
        }
        if event.closes_flow() {
            self.open_flow_numbers.remove(&packet.flow_number);
        } else if event.opens_flow() {
            self.open_flow_numbers.insert(packet.flow_number, ());
        }
        slice_batch.packets.push(TracePacket { time_ns: packet.time_ns - self.from_ns, event, ..*packet });
    }
}

impl PacketTrace for TraceSlice {
    fn read(&mut self, batch: &mut PacketBatch) -> Result<(), TraceError> {
        batch.clear();
        let mut source_batch = PacketBatch::default();
        while batch.packets.is_empty() && !self.has_ended {
            self.trace.read(&mut source_batch)?;
            self.has_ended |= source_batch.packets.is_empty();
            self.copy_packets_in_slice(&source_batch, batch);
        }
        if self.has_ended {
            // Flows that are still open when the slice ends send nothing more.
            let mut open_flows: Vec<u32> = self.open_flow_numbers.drain().map(|(flow, ())| flow).collect();
            open_flows.sort_unstable();
            let time_ns = self.until_ns - self.from_ns;
            batch.packets.extend(open_flows.into_iter().map(|flow| TracePacket {
                time_ns,
                flow_number: flow,
                wire_bytes: 0,
                event: TraceFlowEvent::EXPIRES,
            }));
        }
        Ok(())
    }

    fn skipped_packet_counts(&self) -> PacketSkipCounts {
        self.trace.skipped_packet_counts()
    }

    fn reordered_packet_count(&self) -> u64 {
        self.trace.reordered_packet_count()
    }

    fn end_ns(&self) -> Option<u64> {
        Some(self.until_ns - self.from_ns)
    }

    fn core_service_rate(&self) -> Option<CoreServiceRate> {
        self.trace.core_service_rate()
    }
}

struct TraceCopy {
    trace: Box<dyn PacketTrace>,
    start_ns: u64,
    copy_number: u32,
    batch: PacketBatch,
    next_packet_index: usize,
    next_first_packet_index: usize,
}

impl TraceCopy {
    /// Returns the copy's next packet without consuming it, with its time in the overlay. Returns `None` at the end of
    /// the copy.
    fn peek_packet(&mut self) -> Result<Option<TracePacket>, TraceError> {
        if self.next_packet_index == self.batch.packets.len() {
            self.trace.read(&mut self.batch)?;
            (self.next_packet_index, self.next_first_packet_index) = (0, 0);
        }
        let packet = self.batch.packets.get(self.next_packet_index);
        Ok(packet.map(|packet| TracePacket { time_ns: packet.time_ns + self.start_ns, ..*packet }))
    }
}

/// Trace that merges the packets of several traces by time.
pub struct TraceOverlay {
    copies: Vec<TraceCopy>,
    /// Time of the next packet in each copy (ns), with the copy's index.
    next_packet_times: BinaryHeap<Reverse<(u64, usize)>>,
    is_started: bool,
}

impl TraceOverlay {
    /// Creates an overlay of the given traces, each with its start time (ns) and its copy number.
    pub fn new(traces: Vec<(Box<dyn PacketTrace>, u64, u32)>) -> Self {
        let to_trace_copy = |(trace, start_ns, copy_number)| TraceCopy {
            trace,
            start_ns,
            copy_number,
            batch: PacketBatch::default(),
            next_packet_index: 0,
            next_first_packet_index: 0,
        };
        Self {
            copies: traces.into_iter().map(to_trace_copy).collect(),
            next_packet_times: BinaryHeap::new(),
            is_started: false,
        }
    }

    fn schedule_next_packet(&mut self, copy_index: usize) -> Result<(), TraceError> {
        if let Some(packet) = self.copies[copy_index].peek_packet()? {
            self.next_packet_times.push(Reverse((packet.time_ns, copy_index)));
        }
        Ok(())
    }
}

impl PacketTrace for TraceOverlay {
    fn read(&mut self, batch: &mut PacketBatch) -> Result<(), TraceError> {
        batch.clear();
        if !self.is_started {
            self.is_started = true;
            for copy_index in 0..self.copies.len() {
                self.schedule_next_packet(copy_index)?;
            }
        }
        let copy_count = self.copies.len() as u32;
        while batch.packets.len() < MAX_BATCH_PACKETS {
            let Some(Reverse((time_ns, copy_index))) = self.next_packet_times.pop() else { break };
            let copy = &mut self.copies[copy_index];
            let packet = copy.batch.packets[copy.next_packet_index];
            copy.next_packet_index += 1;
            if packet.event.opens_flow() {
                let first_packet = copy.batch.first_packets[copy.next_first_packet_index];
                copy.next_first_packet_index += 1;
                batch.first_packets.push(FlowFirstPacket {
                    tuple: to_trace_copy_tuple(&first_packet.tuple, copy.copy_number),
                    ..first_packet
                });
            }
            batch.packets.push(TracePacket {
                time_ns,
                flow_number: packet.flow_number * copy_count + copy_index as u32,
                ..packet
            });
            self.schedule_next_packet(copy_index)?;
        }
        Ok(())
    }

    fn skipped_packet_counts(&self) -> PacketSkipCounts {
        let mut skip_counts = PacketSkipCounts::new();
        for (reason, packets) in self.copies.iter().flat_map(|trace_copy| trace_copy.trace.skipped_packet_counts()) {
            *skip_counts.entry(reason).or_default() += packets;
        }
        skip_counts
    }

    fn reordered_packet_count(&self) -> u64 {
        self.copies.iter().map(|trace_copy| trace_copy.trace.reordered_packet_count()).sum()
    }

    fn history_duration_ns(&self) -> u64 {
        self.copies[0].trace.history_duration_ns()
    }

    fn end_ns(&self) -> Option<u64> {
        self.copies.iter().map(|trace_copy| Some(trace_copy.start_ns + trace_copy.trace.end_ns()?)).max()?
    }

    fn core_service_rate(&self) -> Option<CoreServiceRate> {
        self.copies[0].trace.core_service_rate()
    }
}

/// Returns the 4-tuple that a flow has in copy `copy_number` of its trace. Copy 0 keeps the original. Others hash the
/// addresses, because Toeplitz is linear: with a constant difference, flows that share a bucket would share one in
/// every copy.
fn to_trace_copy_tuple(tuple: &FourTuple, copy_number: u32) -> FourTuple {
    let socket_in_copy =
        |socket: SocketAddr| SocketAddr::new(to_trace_copy_address(socket.ip(), copy_number), socket.port());
    FourTuple::new(socket_in_copy(tuple.client()), socket_in_copy(tuple.vip())).expect("families stay as they are")
}

fn to_trace_copy_address(address: IpAddr, copy_number: u32) -> IpAddr {
    if copy_number == 0 {
        return address;
    }
    match address {
        IpAddr::V4(v4) => {
            // The finaliser of MurmurHash3 (32 bits) maps different addresses to different addresses.
            let mut x = v4.to_bits() ^ copy_number.wrapping_mul(0x9e37_79b9);
            x = (x ^ x >> 16).wrapping_mul(0x85eb_ca6b);
            x = (x ^ x >> 13).wrapping_mul(0xc2b2_ae35);
            Ipv4Addr::from_bits(x ^ x >> 16).into()
        }
        IpAddr::V6(v6) => {
            // The 64 interface bits are replaced, and the result also depends on the network bits.
            let (network, interface) = ((v6.to_bits() >> 64) as u64, v6.to_bits() as u64);
            let mut x =
                interface ^ u64::from(copy_number).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ network.rotate_left(32);
            x = (x ^ x >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
            x = (x ^ x >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
            Ipv6Addr::from_bits(u128::from(network) << 64 | u128::from(x ^ x >> 33)).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Trace in which flow 5 sends packets at 0, 10, .. 90 ns, and flow 6 at 35 and 65 ns.
    struct SmallTrace(Vec<PacketBatch>);

    fn build_small_trace() -> Box<dyn PacketTrace> {
        let build_tuple = |port| FourTuple::ipv4((Ipv4Addr::new(10, 0, 0, 1), port), (Ipv4Addr::new(10, 9, 0, 1), 80));
        let build_first_packet = |port| FlowFirstPacket { tuple: build_tuple(port), flow_rate_pps: None };
        let build_packet = |time_ns, flow, event| TracePacket { time_ns, flow_number: flow, wire_bytes: 60, event };
        let mut packets: Vec<TracePacket> = (0..10u64).map(|n| build_packet(n * 10, 5, TraceFlowEvent::NONE)).collect();
        packets[0].event = TraceFlowEvent::OPENS;
        packets.push(build_packet(35, 6, TraceFlowEvent::OPENS));
        packets.push(build_packet(65, 6, TraceFlowEvent::CLOSES));
        packets.sort_by_key(|packet| packet.time_ns);
        let batch = PacketBatch { packets, first_packets: vec![build_first_packet(1), build_first_packet(2)] };
        Box::new(SmallTrace(vec![batch]))
    }

    impl PacketTrace for SmallTrace {
        fn read(&mut self, batch: &mut PacketBatch) -> Result<(), TraceError> {
            *batch = self.0.pop().unwrap_or_default();
            Ok(())
        }

        fn end_ns(&self) -> Option<u64> {
            Some(100)
        }
    }

    fn read_all_packets(mut trace: impl PacketTrace) -> (Vec<(u64, u32, TraceFlowEvent)>, Vec<FlowFirstPacket>) {
        let (mut batch, mut packets, mut first_packets) = (PacketBatch::default(), Vec::new(), Vec::new());
        loop {
            trace.read(&mut batch).unwrap();
            if batch.packets.is_empty() {
                return (packets, first_packets);
            }
            packets.extend(batch.packets.iter().map(|packet| (packet.time_ns, packet.flow_number, packet.event)));
            first_packets.extend(&batch.first_packets);
        }
    }

    #[test]
    fn trace_slice_opens_and_closes_its_flows() {
        let (packets, first_packets) = read_all_packets(TraceSlice::new(build_small_trace(), 55, 75));
        assert_eq!(
            packets,
            [
                (5, 5, TraceFlowEvent::OPENS),
                (10, 6, TraceFlowEvent::OPENS_AND_CLOSES),
                (15, 5, TraceFlowEvent::NONE),
                (20, 5, TraceFlowEvent::EXPIRES)
            ]
        );
        assert_eq!(
            first_packets.iter().map(|first_packet| first_packet.tuple.client().port()).collect::<Vec<_>>(),
            [1, 2]
        );
        // From the beginning, the slice equals the trace, except that it also has the ends of flows.
        let (packets, _) = read_all_packets(TraceSlice::new(build_small_trace(), 0, 100));
        assert_eq!((packets.len(), packets[12]), (13, (100, 5, TraceFlowEvent::EXPIRES)));
    }

    #[test]
    fn overlay_merges_copies_by_time_and_gives_them_different_flows() {
        let traces = vec![(build_small_trace(), 0, 0), (build_small_trace(), 3, 1)];
        let (packets, first_packets) = read_all_packets(TraceOverlay::new(traces));
        assert_eq!(packets.len(), 24);
        assert!(packets.is_sorted_by_key(|(time_ns, ..)| *time_ns));
        assert_eq!((packets[0], packets[1]), ((0, 10, TraceFlowEvent::OPENS), (3, 11, TraceFlowEvent::OPENS)));
        let clients: std::collections::HashSet<_> =
            first_packets.iter().map(|first_packet| first_packet.tuple.client()).collect();
        assert_eq!(clients.len(), 4);
    }

    #[test]
    fn addresses_differ_irregularly_between_trace_copies() {
        let addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.3"].map(|text| text.parse::<Ipv4Addr>().unwrap());
        let address_differences: std::collections::HashSet<u32> = addresses
            .map(|address| match to_trace_copy_address(address.into(), 3) {
                IpAddr::V4(copied_address) => copied_address.to_bits() ^ address.to_bits(),
                IpAddr::V6(_) => unreachable!("stays IPv4"),
            })
            .into();
        assert_eq!(address_differences.len(), 3);
        let v6: IpAddr = "2001:db8::1".parse().unwrap();
        assert_ne!(to_trace_copy_address(v6, 1), to_trace_copy_address(v6, 2));
        assert_eq!(to_trace_copy_address(v6, 0), v6);
    }
}
