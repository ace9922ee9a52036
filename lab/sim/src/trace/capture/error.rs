//! Errors that occur when a capture file is read.

/// Maximum time by which a packet's time stamp may precede that of the packet before (ns). The packet then gets the
/// earlier packet's time. Captures are slightly out of order because a NIC's queues are read in turn.
pub const REORDER_TOLERANCE_NS: u64 = 10_000_000;

#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The file's first bytes match no known format.
    #[error(
        "begins with {first_bytes:02x?}: expected a capture (pcap or pcapng, perhaps compressed by gzip, xz or zstd) \
         or an arrival log of the demo"
    )]
    UnknownFormat { first_bytes: Vec<u8> },
    /// The file ends in the middle of a record.
    #[error(
        "cut off in packet {packet_number}: {packets_before} packets were read before, up to {last_s:.6} s after the \
         first"
    )]
    TruncatedFile {
        /// Number of the incomplete packet, counted from 1.
        packet_number: u64,
        /// Number of complete packets before the incomplete one.
        packets_before: u64,
        /// Time from the first packet to the last complete one (s).
        last_s: f64,
    },
    /// A record claims to be longer than any valid record.
    #[error(
        "packet {packet_number} claims to have {bytes} bytes: expected at most {max_bytes}; the file is damaged there"
    )]
    OversizedPacket {
        /// Number of the oversized packet, counted from 1.
        packet_number: u64,
        bytes: u64,
        max_bytes: u32,
    },
    /// A pcapng file contains an invalid block.
    #[error("after packet {packet_number} comes what is no pcapng block ({reason}): the file is damaged there")]
    InvalidBlock {
        /// Number of packets before the invalid block.
        packet_number: u64,
        reason: String,
    },
    /// The file cannot be read, or its compressed data is damaged.
    #[error("after packet {packet_number}: {error}")]
    ReadFailed {
        /// Number of packets before the error occurred.
        packet_number: u64,
        error: std::io::Error,
    },
    /// The capture has an unsupported link layer.
    #[error(
        "link type {0}: expected Ethernet (1), raw IP (12, 14, 101, 228, 229), Linux cooked (113, 276) or BSD loopback \
         (0)"
    )]
    UnsupportedLinkType(u32),
    /// The capture's snap length is too small to include the packets' ports.
    #[error(
        "packet {packet_number} was captured up to byte {captured_bytes} of {wire_bytes}: its ports are behind; \
         expected a snap length of at least {min_snap_length} bytes (64 is enough for most, 96 for nearly all)"
    )]
    SnapLengthTooShort {
        /// Number of the packet, counted from 1.
        packet_number: u64,
        captured_bytes: u32,
        /// Length of the packet on the wire (bytes).
        wire_bytes: u32,
        /// Smallest snap length that includes the ports of a packet without options (bytes).
        min_snap_length: u32,
    },
    /// A packet's time stamp is much earlier than that of a packet before it.
    #[error(
        "packet {packet_number} is of {time_s:.9} s, {:.3} ms before packet {before} of {previous_s:.9} s: expected \
         time stamps in order, or at most {tolerated} ms back (reordercap sorts a capture)",
        (previous_s - time_s) * 1e3,
        before = packet_number - 1, tolerated = REORDER_TOLERANCE_NS / 1_000_000
    )]
    UnsortedPacketTimes {
        /// Number of the packet, counted from 1.
        packet_number: u64,
        /// Time stamp of the packet (s since 1970).
        time_s: f64,
        /// Latest time stamp of all earlier packets (s since 1970).
        previous_s: f64,
    },
}
