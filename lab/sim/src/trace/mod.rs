//! Traffic of the simulations. It consists of packets in order of time, each with its flow's number.
//!
//! * [`TraceSource`]: traces that a user can select, such as `campus`, a capture or an arrival log
//! * [`campus`]: generator of traffic like that of a university's uplink
//! * [`burst_trace`]: connections that open at the same time
//! * [`capture`]: pcap and pcapng files
//! * [`arrivals`]: arrival logs of the demo
//! * [`trace_overlay`]: overlay of several copies of a trace
//!
//! A [`PacketTrace`] is read in [`PacketBatch`]es and is never completely in memory. Flow numbers are dense and are
//! reused after a flow has ended, so an array indexed by them only needs memory for the open flows.

pub mod arrivals;
pub mod burst_trace;
pub mod campus;
pub mod capture;
mod source;
pub mod trace_overlay;
mod traffic_settings;

use std::collections::BTreeMap;

use coreward_model::FourTuple;

pub use source::{TraceSource, TraceSourceError};
pub use traffic_settings::TrafficSettingError;

/// Event in a trace: a packet, or the start or end of a flow without a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TracePacket {
    /// Time after the start of the trace, including its history (ns). It never decreases from one packet to the next.
    pub time_ns: u64,
    pub flow_number: u32,
    /// Number of bytes on the wire, including the Ethernet header, or 0 if the trace has no packet sizes.
    pub wire_bytes: u16,
    /// Whether the packet starts its flow, ends its flow, or does neither.
    pub event: TraceFlowEvent,
}

/// Effect of a [`TracePacket`] on its flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TraceFlowEvent(u8);

impl TraceFlowEvent {
    /// The packet neither starts nor ends the flow.
    pub const NONE: TraceFlowEvent = TraceFlowEvent(0);
    /// The packet is the first of its flow, which the batch's next [`FlowFirstPacket`] describes.
    pub const OPENS: TraceFlowEvent = TraceFlowEvent(1);
    /// The packet is the last of its flow, whose number may then be reused.
    pub const CLOSES: TraceFlowEvent = TraceFlowEvent(2);
    pub const OPENS_AND_CLOSES: TraceFlowEvent = TraceFlowEvent(3);
    /// The flow has ended at or before this time. There is no packet.
    pub const EXPIRES: TraceFlowEvent = TraceFlowEvent(4 | 2);

    /// The flow starts during the trace's [history](PacketTrace::history_duration_ns). There is no packet.
    pub const BEGINS_IN_HISTORY: TraceFlowEvent = TraceFlowEvent(4 | 1);

    pub fn opens_flow(self) -> bool {
        self.0 & 1 != 0
    }

    pub fn closes_flow(self) -> bool {
        self.0 & 2 != 0
    }

    pub fn has_packet(self) -> bool {
        self.0 & 4 == 0
    }
}

/// Description of a flow that starts in a trace. It accompanies the flow's first packet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FlowFirstPacket {
    /// Addresses and ports in the packets that the client sends.
    pub tuple: FourTuple,
    /// Packets per second between the flow's first and last packet, or `None` if this is not known in advance.
    pub flow_rate_pps: Option<f64>,
}

/// Batch of consecutive packets of a trace.
#[derive(Debug, Clone, Default)]
pub struct PacketBatch {
    /// Packets in ascending order of time.
    pub packets: Vec<TracePacket>,
    /// Descriptions of the flows that the packets of this batch open, in the order of these packets.
    pub first_packets: Vec<FlowFirstPacket>,
}

impl PacketBatch {
    /// Empties the batch but keeps its memory for reuse.
    pub fn clear(&mut self) {
        self.packets.clear();
        self.first_packets.clear();
    }
}

/// Number of skipped packets for each reason.
pub type PacketSkipCounts = BTreeMap<&'static str, u64>;

/// Rate at which cores serve packets, if the trace specifies it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CoreServiceRate {
    /// Number of packets (or requests) that a core serves per second.
    pub packets_per_s: f64,
}

/// Traffic that can be read once, from its start to its end.
pub trait PacketTrace: Send {
    /// Replaces the contents of `batch` by the next packets. An empty batch means that the trace has ended. An error
    /// names the fault and its position.
    fn read(&mut self, batch: &mut PacketBatch) -> Result<(), TraceError>;

    /// Returns the number of packets that have been skipped so far, for each reason.
    fn skipped_packet_counts(&self) -> PacketSkipCounts {
        PacketSkipCounts::new()
    }

    /// Returns how many packets so far had a slightly earlier time stamp than the packet before. Both packets count as
    /// simultaneous.
    fn reordered_packet_count(&self) -> u64 {
        0
    }

    /// Returns the duration of the history, which precedes the packets (ns). In the history, flows start and end with
    /// known rates but without packets. It lets the load balancer place the flows that are open at the first packet.
    fn history_duration_ns(&self) -> u64 {
        0
    }

    /// Returns the time at which the trace ends (ns after its start), if this is known in advance.
    fn end_ns(&self) -> Option<u64>;

    /// Returns the cores' service rate, if the trace defines one. Any number of requests may then wait at a core.
    fn core_service_rate(&self) -> Option<CoreServiceRate> {
        None
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened or read.
    #[error("{path}: {error}")]
    UnreadableFile { path: String, error: std::io::Error },
    /// The file is not a capture, or it is damaged.
    #[error("{path}: {error}")]
    InvalidCapture { path: String, error: capture::CaptureError },
    /// The file begins like an arrival log but is not a valid one.
    #[error("{path}: {error}")]
    InvalidArrivalLog { path: String, error: coreward_model::arrival_log::ArrivalLogError },
    /// The requests of an arrival log do not all have the same service time.
    #[error(
        "{path}: requests of {first_service_us} us and of {other_service_us} us: expected the same service time \
         throughout, as packets of a trace cost the same"
    )]
    MixedServiceTimes {
        path: String,
        /// Service time of the requests on the first connection (us).
        first_service_us: u32,
        /// Different service time, found on a later connection (us).
        other_service_us: u32,
    },
}
