//! Faults of a capture.

/// Time stamps may go back by this much (ns), and then count as the predecessor's: several queues of a NIC are read in
/// turn, so captures are a little out of order.
pub const TOLERATED_NS: u64 = 10_000_000;

#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// No known format.
    #[error(
        "begins with {mark:02x?}: expected a capture (pcap or pcapng, perhaps compressed by gzip, xz or zstd) or an \
         arrival log of the demo"
    )]
    Foreign { mark: Vec<u8> },
    /// The end is within a record.
    #[error("cut off in packet {number}: {read} packets were read before, up to {last_s:.6} s after the first")]
    Truncated {
        /// Counted from 1.
        number: u64,
        /// Packets before it.
        read: u64,
        /// Time of the last of them.
        last_s: f64,
    },
    /// A record that cannot be one.
    #[error("packet {number} claims to have {bytes} bytes: expected at most {max_bytes}; the file is damaged there")]
    Damaged {
        /// Counted from 1.
        number: u64,
        bytes: u64,
        max_bytes: u32,
    },
    /// A block of a pcapng file that cannot be read.
    #[error("after packet {number} comes what is no pcapng block ({reason}): the file is damaged there")]
    Block {
        /// Packets before it.
        number: u64,
        reason: String,
    },
    /// The medium failed, or the compressed data is damaged.
    #[error("after packet {number}: {error}")]
    Read {
        /// Packets before it.
        number: u64,
        error: std::io::Error,
    },
    /// Frames of a link layer that is not known.
    #[error(
        "link type {0}: expected Ethernet (1), raw IP (12, 14, 101, 228, 229), Linux cooked (113, 276) or BSD loopback \
         (0)"
    )]
    LinkType(u32),
    /// Ports are not in the capture.
    #[error(
        "packet {number} was captured up to byte {captured} of {length}: its ports are behind; expected a snap length \
         of \
         at least {expected} bytes (64 is enough for most, 96 for nearly all)"
    )]
    SnapLength {
        /// Counted from 1.
        number: u64,
        captured: u32,
        /// Bytes of the packet.
        length: u32,
        /// End of the ports of a packet without options.
        expected: u32,
    },
    /// Packets are not in the order of their times.
    #[error(
        "packet {number} is of {time_s:.9} s, {:.3} ms before packet {before} of {before_s:.9} s: expected time stamps \
         in \
         order, or at most {tolerated} ms back (reordercap sorts a capture)", (before_s - time_s) * 1e3,
        before = number - 1, tolerated = TOLERATED_NS / 1_000_000
    )]
    Unsorted {
        /// Counted from 1.
        number: u64,
        /// Its time (s since 1970).
        time_s: f64,
        /// The latest time before it (s since 1970).
        before_s: f64,
    },
}
