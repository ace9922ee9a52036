//! Traffic, as the simulations see it: packets in the order of their times, each with the number of its flow.
//!
//! * [`Source`]: what a user names: `campus`, a capture, an arrival log
//! * [`campus`]: a generator of a university uplink's traffic
//! * [`burst`]: connections that are opened all at once
//! * [`capture`]: pcap and pcapng files
//! * [`arrivals`]: the arrival logs of the demo
//! * [`amplify`]: several copies of a trace at once
//!
//! A [`Trace`] is read in [`Batch`]es and never held whole. Flow numbers are dense and reused after a flow's end, so an
//! array with an entry per flow needs memory for the open flows only.

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
pub use source::{Source, SourceError};

/// A packet, or the end of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// When, in ns after the trace's start (that of its history, if it has one); never less than the previous packet's.
    pub time_ns: u64,
    pub flow: u32,
    /// Bytes on the wire, Ethernet header included; 0 when the trace has no sizes.
    pub bytes: u16,
    /// Event of the flow.
    pub event: Event,
}

/// Effect of a [`Packet`] on its flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Event(u8);

impl Event {
    /// A packet in the midst of its flow.
    pub const NONE: Event = Event(0);
    /// The flow's first packet: the batch's next [`Opening`] is its.
    pub const OPENS: Event = Event(1);
    /// The flow's last packet: its number may be used again.
    pub const CLOSES: Event = Event(2);
    pub const ONLY: Event = Event(3);
    /// No packet at all: the flow turned out to have ended earlier.
    pub const EXPIRES: Event = Event(4 | 2);

    /// In a trace's [history](Trace::history_ns): the flow begins, and brings its rate from now on.
    pub const BEGINS: Event = Event(4 | 1);

    /// Whether the flow begins with this.
    pub fn opens(self) -> bool {
        self.0 & 1 != 0
    }

    /// Whether the flow has ended with this.
    pub fn closes(self) -> bool {
        self.0 & 2 != 0
    }

    pub fn is_packet(self) -> bool {
        self.0 & 4 == 0
    }
}

/// A flow's beginning.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Opening {
    /// Addresses and ports, as the sender's packets carry them.
    pub tuple: FourTuple,
    /// Packets per second, from the flow's first packet to its last; `None`: the trace does not know it beforehand.
    pub rate: Option<f64>,
}

/// Some packets of a trace.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    /// In the order of their times.
    pub packets: Vec<Packet>,
    /// One for each packet that opens a flow, in the packets' order.
    pub openings: Vec<Opening>,
}

impl Batch {
    /// Empties it, and keeps its memory.
    pub fn clear(&mut self) {
        self.packets.clear();
        self.openings.clear();
    }
}

/// Packets that were left out, by reason.
pub type Skipped = BTreeMap<&'static str, u64>;

/// Speed of a trace's own servers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Service {
    /// Packets (requests) that a core serves per second.
    pub packets_per_s: f64,
}

/// Traffic to be read once, from its start to its end.
pub trait Trace: Send {
    /// Replaces the contents of `batch` by the next packets; an empty batch means the end. The error names the mistake
    /// and its place.
    fn read(&mut self, batch: &mut Batch) -> Result<(), TraceError>;

    /// Packets that were left out so far.
    fn skipped(&self) -> Skipped {
        Skipped::new()
    }

    /// Packets with time stamps a little before their predecessor's, counted as simultaneous.
    fn reordered(&self) -> u64 {
        0
    }

    /// Length of the history before the packets (ns): flows that begin and expire, each with its rate, but no packets.
    /// A load balancer that ran all the time has placed the flows that are open at the first packet.
    fn history_ns(&self) -> u64 {
        0
    }

    /// End of the packets (ns after the trace's start) if that is known beforehand.
    fn end_ns(&self) -> Option<u64>;

    /// Speed of the cores, if the trace has it: requests then wait as long as they must.
    fn service(&self) -> Option<Service> {
        None
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened or read.
    #[error("{path}: {error}")]
    File { path: String, error: std::io::Error },
    /// It is no capture, or a damaged one.
    #[error("{path}: {error}")]
    Capture { path: String, error: capture::CaptureError },
    /// It begins as an arrival log and is not one.
    #[error("{path}: {error}")]
    ArrivalLog { path: String, error: coreward_model::arrivals::ArrivalLogError },
    /// Requests of an arrival log take unlike times.
    #[error(
        "{path}: requests of {first} us and of {other} us: expected the same service time throughout, as packets of a \
         trace cost the same"
    )]
    MixedServiceTimes {
        path: String,
        /// The first connection's.
        first: u32,
        /// One that differs.
        other: u32,
    },
}
