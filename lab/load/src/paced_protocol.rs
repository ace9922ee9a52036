//! TCP protocol between load generators and the testbed's paced server. Messages in both directions have 8 bytes, and
//! their numbers are little-endian.
//!
//! A client may send a request before earlier ones are answered. Responses arrive in the order of the requests.

use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Maximum service time of a request (us). It limits how long a corrupted request can block a worker.
pub const MAX_SERVICE_TIME_US: u32 = 10_000_000;

/// Request that keeps one of the server's cores busy for a given time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct PacedRequest {
    /// Time for which the core is busy (us), at most [`MAX_SERVICE_TIME_US`].
    pub service_us: U32,
    /// Id that the server returns in its response.
    pub id: U32,
}

/// Response which confirms that the work is done, and names the core that did it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct PacedResponse {
    pub id: U32,
    pub server_number: u8,
    /// Number of the core on which the worker runs.
    pub core_number: u8,
    /// Reserved bytes, which are zero.
    pub reserved: [u8; 2],
}

pub const PACED_MESSAGE_BYTES: usize = size_of::<PacedRequest>();
const _: () = assert!(size_of::<PacedResponse>() == PACED_MESSAGE_BYTES);

/// Buffer that splits a received byte stream into messages of [`PACED_MESSAGE_BYTES`] bytes.
#[derive(Debug, Default)]
pub struct PacedMessageBuffer {
    /// Received bytes of a message whose remaining bytes have not arrived yet.
    partial_message: Vec<u8>,
}

impl PacedMessageBuffer {
    /// Appends received bytes, and calls `on_message` with each message that is now complete.
    pub fn for_each_message<M: FromBytes>(&mut self, mut bytes: &[u8], mut on_message: impl FnMut(M)) {
        if !self.partial_message.is_empty() {
            let missing_bytes = (PACED_MESSAGE_BYTES - self.partial_message.len()).min(bytes.len());
            self.partial_message.extend_from_slice(&bytes[..missing_bytes]);
            bytes = &bytes[missing_bytes..];
            if self.partial_message.len() < PACED_MESSAGE_BYTES {
                return;
            }
            on_message(parse_message(&self.partial_message));
            self.partial_message.clear();
        }
        let whole_messages = bytes.chunks_exact(PACED_MESSAGE_BYTES);
        self.partial_message.extend_from_slice(whole_messages.remainder());
        whole_messages.for_each(|message| on_message(parse_message(message)));
    }
}

fn parse_message<M: FromBytes>(message: &[u8]) -> M {
    M::read_from_bytes(message).expect("a message of MESSAGE_BYTES")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_reassembled_from_pieces_of_any_length() {
        let sent_requests: Vec<PacedRequest> =
            (0..5).map(|id| PacedRequest { service_us: (id * 7).into(), id: id.into() }).collect();
        let sent_bytes: Vec<u8> = sent_requests.iter().flat_map(|request| request.as_bytes().to_vec()).collect();
        for piece_bytes in 1..=sent_bytes.len() {
            let (mut message_buffer, mut received_requests) = (PacedMessageBuffer::default(), Vec::new());
            sent_bytes.chunks(piece_bytes).for_each(|bytes| {
                message_buffer.for_each_message(bytes, |request: PacedRequest| received_requests.push(request))
            });
            assert_eq!(received_requests, sent_requests, "in pieces of {piece_bytes} bytes");
        }
    }

    #[test]
    fn numbers_of_a_paced_request_are_little_endian() {
        let request = PacedRequest { service_us: 5000.into(), id: 0x0102_0304.into() };
        assert_eq!(request.as_bytes(), [0x88, 0x13, 0, 0, 4, 3, 2, 1]);
    }
}
