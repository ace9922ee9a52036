//! Traffic of the simulations: packets in order of time, each with the number of its flow.
//!
//! * [`TraceSource`]: traces that a user can name: `campus`, a capture, an arrival log
//! * [`campus`]: a generator of a university uplink's traffic
//! * [`burst`]: connections that open at the same time
//! * [`capture`]: pcap and pcapng files
//! * [`arrivals`]: the arrival logs of the demo
//! * [`amplify`]: overlay of several copies of a trace
//!
//! A [`Trace`] is read in [`Batch`]es and is never completely in memory. Flow numbers are dense and reused after a
//! flow's end, so an array with an entry per flow only needs memory for the open flows.

pub mod amplify;
pub mod arrivals;
pub mod burst;
pub mod campus;
pub mod capture;
mod settings;
mod source;

use std::collections::BTreeMap;

use coreward_model::FourTuple;

pub use settings::SettingError;
pub use source::{SourceError, TraceSource};

/// Packet of a trace, or the begin or end of a flow without a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// Time (ns) after the start of the trace, including its history; never less than the previous packet's.
    pub time_ns: u64,
    pub flow: u32,
    /// Number of bytes on the wire, including the Ethernet header; 0 if the trace has no packet sizes.
    pub bytes: u16,
    /// Whether the packet starts its flow, ends it, or neither.
    pub event: FlowEvent,
}

/// Effect of a [`Packet`] on its flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FlowEvent(u8);

impl FlowEvent {
    /// Packet without an effect on the flow's state.
    pub const NONE: FlowEvent = FlowEvent(0);
    /// First packet of the flow: the batch's next [`FirstPacket`] belongs to it.
    pub const OPENS: FlowEvent = FlowEvent(1);
    /// Last packet of the flow, whose number may be reused afterwards.
    pub const CLOSES: FlowEvent = FlowEvent(2);
    pub const OPENS_AND_CLOSES: FlowEvent = FlowEvent(3);
    /// End of a flow without a packet, because the flow has ended before.
    pub const EXPIRES: FlowEvent = FlowEvent(4 | 2);

    /// Start of a flow in a trace's [history](Trace::history_ns), without a packet.
    pub const BEGINS: FlowEvent = FlowEvent(4 | 1);

    /// Returns whether the flow begins with this event.
    pub fn opens(self) -> bool {
        self.0 & 1 != 0
    }

    /// Returns whether the flow has ended with this event.
    pub fn closes(self) -> bool {
        self.0 & 2 != 0
    }

    pub fn is_packet(self) -> bool {
        self.0 & 4 == 0
    }
}

/// Flow that starts in a trace, as described with its first packet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FirstPacket {
    /// Addresses and ports in the sender's packets.
    pub tuple: FourTuple,
    /// Packets per second between the flow's first and last packet; `None` if unknown in advance.
    pub rate_pps: Option<f64>,
}

/// Consecutive packets of a trace.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    /// Packets in the order of their times.
    pub packets: Vec<Packet>,
    /// Flows that packets of this batch open, in the order of these packets.
    pub first_packets: Vec<FirstPacket>,
}

impl Batch {
    /// Empties the batch, but keeps its memory.
    pub fn clear(&mut self) {
        self.packets.clear();
        self.first_packets.clear();
    }
}

/// Numbers of skipped packets by reason.
pub type SkipCounts = BTreeMap<&'static str, u64>;

/// Service rate of the cores, as defined by a trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CoreServiceRate {
    /// Number of packets (requests) that a core serves per second.
    pub packets_per_s: f64,
}

/// Traffic that is read once, from its start to its end.
pub trait Trace: Send {
    /// Replaces the contents of `batch` by the next packets; an empty batch means the end. An error names the fault and
    /// its position.
    fn read(&mut self, batch: &mut Batch) -> Result<(), TraceError>;

    /// Returns the numbers of packets that have been skipped so far.
    fn skip_counts(&self) -> SkipCounts {
        SkipCounts::new()
    }

    /// Returns the number of packets so far whose time stamps were slightly earlier than that of the packet before.
    /// They count as simultaneous.
    fn reordered_packet_count(&self) -> u64 {
        0
    }

    /// Returns the duration of the history before the packets (ns): flows that begin and expire, with rates but without
    /// packets. A load balancer has placed the flows that are open at the first packet during the history.
    fn history_ns(&self) -> u64 {
        0
    }

    /// Returns the end of the trace (ns after its start), if known in advance.
    fn end_ns(&self) -> Option<u64>;

    /// Returns the service rate of the cores, if the trace defines it: requests then wait without limit.
    fn service(&self) -> Option<CoreServiceRate> {
        None
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened or read.
    #[error("{path}: {error}")]
    File { path: String, error: std::io::Error },
    /// The file is not a capture, or is damaged.
    #[error("{path}: {error}")]
    Capture { path: String, error: capture::CaptureError },
    /// The file begins like an arrival log but is invalid.
    #[error("{path}: {error}")]
    ArrivalLog { path: String, error: coreward_model::arrivals::ArrivalLogError },
    /// The requests of an arrival log have different service times.
    #[error(
        "{path}: requests of {first} us and of {other} us: expected the same service time throughout, as packets of a \
         trace cost the same"
    )]
    MixedServiceTimes {
        path: String,
        /// Service time of the first connection (us).
        first: u32,
        /// Service time of another connection (us).
        other: u32,
    },
}
