//! Long connections. The client sends one request. The server sends packets of 125 bytes at equal intervals for the
//! requested time, and closes the connection. This is Cheetah's experiment on broken connections without HTTP (NSDI'20,
//! Sect. 5.3; `includes/httpserver.py` of github.com/cheetahlb/experiments).
//!
//! Each connection's bytes are computed from a random number in its request, so that bytes of another connection are
//! detected.
//!
//! * [`server`] is one process for all servers of a testbed, so that two CPUs can run 31 of them.
//! * [`client`] opens connections like the simulator's clients, and counts the results of each second.

pub mod client;
pub mod server;

use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Number of bytes in each packet of a response.
pub const STREAM_PACKET_BYTES: usize = 125;

/// Request of a stream client. The response consists of the bytes that [`stream_content_byte`] returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct StreamRequest {
    /// Seed from which the response's bytes are generated.
    pub content_seed: U32,
    /// Number of packets in the response, at least 1.
    pub packet_count: U32,
    /// Time from the request to the last packet of the response (us).
    pub duration_us: U32,
}

pub const STREAM_REQUEST_BYTES: usize = size_of::<StreamRequest>();

impl StreamRequest {
    /// Returns the time from the request until packet `packet_index` is due (ns). Packets are counted from 0.
    pub fn packet_due_ns(&self, packet_index: u32) -> u64 {
        let (duration_ns, packets) =
            (u64::from(self.duration_us.get()) * 1_000, u64::from(self.packet_count.get().max(1)));
        // Multiply in 128 bits, because 2^32 us in ns times 2^32 would not fit in 64 bits.
        (u128::from(duration_ns) * (u128::from(packet_index) + 1) / u128::from(packets)) as u64
    }

    /// Returns the length of the whole response (bytes).
    pub fn response_byte_count(&self) -> u64 {
        u64::from(self.packet_count.get()) * STREAM_PACKET_BYTES as u64
    }
}

/// Returns the byte at `position` in the response to a request with this seed.
pub fn stream_content_byte(seed: u32, position: u64) -> u8 {
    // Use Knuth's multiplicative hash, in which adjacent bytes and adjacent seeds differ.
    ((seed ^ position as u32).wrapping_mul(0x9e37_79b1) >> 24) as u8
}

/// Raises this process's limit of open files to the maximum, for thousands of connections.
fn raise_open_file_limit() -> anyhow::Result<()> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (_, hard_limit) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(setrlimit(Resource::RLIMIT_NOFILE, hard_limit, hard_limit)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_due_at_equal_intervals_and_the_last_at_the_end() {
        let request = StreamRequest { content_seed: 0.into(), packet_count: 4.into(), duration_us: 1_000.into() };
        assert_eq!([0, 1, 2, 3].map(|index| request.packet_due_ns(index)), [250_000, 500_000, 750_000, 1_000_000]);
        let longest_request =
            StreamRequest { content_seed: 0.into(), packet_count: u32::MAX.into(), duration_us: u32::MAX.into() };
        assert_eq!(longest_request.packet_due_ns(u32::MAX - 1), u64::from(u32::MAX) * 1_000);
    }

    #[test]
    fn different_seeds_give_different_response_bytes() {
        let count_differing_bytes = |a: u32, b: u32| {
            (0..125).filter(|position| stream_content_byte(a, *position) != stream_content_byte(b, *position)).count()
        };
        for (a, b) in [(1, 2), (7, 0x8000_0007), (0, u32::MAX)] {
            assert!(count_differing_bytes(a, b) > 50, "{a} and {b}: {}", count_differing_bytes(a, b));
        }
    }
}
