//! Protocol of load generators and the testbed's paced server over TCP: 8 bytes each way, little-endian.
//!
//! A client may send a request before earlier ones are answered; responses arrive in the order of the requests.

use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Maximum service time of a request (us), which limits how long a corrupted request blocks a worker.
pub const SERVICE_MAX_US: u32 = 10_000_000;

/// Request that makes one core of the server busy for a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Request {
    /// Time for which the core is busy (us), at most [`SERVICE_MAX_US`].
    pub service_us: U32,
    /// Id that the server returns in its response.
    pub id: U32,
}

/// Response which confirms that the work is done, and names the core that did it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Response {
    /// Id of the request that is answered.
    pub id: U32,
    pub server: u8,
    /// Number of the core on which the worker runs.
    pub core: u8,
    /// Reserved bytes, which are zero.
    pub reserved: [u8; 2],
}

pub const MESSAGE_BYTES: usize = size_of::<Request>();
const _: () = assert!(size_of::<Response>() == MESSAGE_BYTES);

/// Buffer that cuts the bytes of a stream into messages of [`MESSAGE_BYTES`] bytes.
#[derive(Debug, Default)]
pub struct MessageBuffer {
    /// First bytes of an incomplete message.
    partial: Vec<u8>,
}

impl MessageBuffer {
    /// Appends received bytes, and calls `each` with each message that is now complete.
    pub fn for_each_message<M: FromBytes>(&mut self, mut bytes: &[u8], mut each: impl FnMut(M)) {
        if !self.partial.is_empty() {
            let missing = (MESSAGE_BYTES - self.partial.len()).min(bytes.len());
            self.partial.extend_from_slice(&bytes[..missing]);
            bytes = &bytes[missing..];
            if self.partial.len() < MESSAGE_BYTES {
                return;
            }
            each(read(&self.partial));
            self.partial.clear();
        }
        let whole = bytes.chunks_exact(MESSAGE_BYTES);
        self.partial.extend_from_slice(whole.remainder());
        whole.for_each(|message| each(read(message)));
    }
}

fn read<M: FromBytes>(message: &[u8]) -> M {
    M::read_from_bytes(message).expect("a message of MESSAGE_BYTES")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_reassembled_from_any_pieces() {
        let sent: Vec<Request> = (0..5).map(|id| Request { service_us: (id * 7).into(), id: id.into() }).collect();
        let bytes: Vec<u8> = sent.iter().flat_map(|request| request.as_bytes().to_vec()).collect();
        for piece in 1..=bytes.len() {
            let (mut messages, mut received) = (MessageBuffer::default(), Vec::new());
            bytes
                .chunks(piece)
                .for_each(|bytes| messages.for_each_message(bytes, |request: Request| received.push(request)));
            assert_eq!(received, sent, "in pieces of {piece} bytes");
        }
    }

    #[test]
    fn byte_order_is_fixed() {
        let request = Request { service_us: 5000.into(), id: 0x0102_0304.into() };
        assert_eq!(request.as_bytes(), [0x88, 0x13, 0, 0, 4, 3, 2, 1]);
    }
}
