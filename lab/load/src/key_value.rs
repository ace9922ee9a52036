//! Datagram protocol of key-value clients and servers. A request is one datagram, and its response one or several.
//! Numbers are little-endian.
//!
//! ```text
//! request   0 type | 1 key length | 2 value length (16) | 4 id (32) | 8 service time, ns (32) | 12 key | value
//! response  0 type | 1 status     | 2 worker (16)       | 4 id (32) | 8 part | 9 parts | 10 pairs (16) | 12 pairs ...
//! pair      0 key length | 1 zero | 2 value length (16) | 4 key | value
//! ```
//!
//! Type, worker and id have the same offset in every datagram, so a dispatcher needs to know no other part of the
//! protocol. A datagram whose length differs from its header's lengths is not a request and gets no response.

use std::fmt;

use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::request_type::RequestType;

/// Maximum length of a datagram (bytes), which is an Ethernet frame's 1,500 bytes without the IPv4 and UDP headers.
pub const MAX_DATAGRAM_BYTES: usize = 1_472;
pub const MAX_KEY_BYTES: usize = 255;
/// Maximum length of a stored value (bytes), which fits into one response datagram even with the longest key.
pub const MAX_VALUE_BYTES: usize =
    MAX_DATAGRAM_BYTES - size_of::<KeyValueResponseHeader>() - size_of::<KeyValuePairHeader>() - MAX_KEY_BYTES;
/// Offset of the request type in every datagram.
pub const REQUEST_TYPE_OFFSET: usize = 0;
/// Offset of the request id in every datagram, which has 4 bytes in little-endian order.
pub const REQUEST_ID_OFFSET: usize = 4;
pub const REQUEST_HEADER_BYTES: usize = size_of::<KeyValueRequestHeader>();

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct KeyValueRequestHeader {
    request_type: u8,
    key_length: u8,
    value_length: U16,
    id: U32,
    service_ns: U32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct KeyValueResponseHeader {
    pub request_type: u8,
    /// Outcome of the request, as the number of a [`KeyValueResponseStatus`].
    pub status_code: u8,
    /// Number of the worker that answered the request, from 0.
    pub worker_index: U16,
    /// Id of the request that this datagram answers.
    pub id: U32,
    /// Index of this datagram among the response's datagrams, from 0.
    pub part_index: u8,
    /// Number of datagrams in the response, at least 1.
    pub part_count: u8,
    pub pair_count: U16,
}

const _: () = assert!(std::mem::offset_of!(KeyValueRequestHeader, id) == REQUEST_ID_OFFSET);
const _: () = assert!(std::mem::offset_of!(KeyValueResponseHeader, id) == REQUEST_ID_OFFSET);

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct KeyValuePairHeader {
    key_length: u8,
    reserved: u8,
    value_length: U16,
}

/// Outcome of a request, as the response reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum KeyValueResponseStatus {
    Done = 0,
    /// The store does not contain the key that a GET requested.
    NotFound = 1,
    /// The store has no room for the new key of a PUT.
    StoreFull = 2,
}

/// Reason why a datagram is not a valid request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyValueRequestError {
    #[error("{0} bytes: expected at least {REQUEST_HEADER_BYTES}")]
    TooShort(usize),
    #[error(transparent)]
    InvalidRequestType(#[from] crate::request_type::RequestTypeError),
    #[error("{given} bytes: expected {expected} by the lengths in the header")]
    WrongLength { given: usize, expected: usize },
    #[error("a {0} without a key")]
    MissingKey(RequestType),
    #[error("a value of {0} bytes: expected at most {MAX_VALUE_BYTES}")]
    ValueTooLong(usize),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KeyValueRequest<'a> {
    pub request_type: RequestType,
    /// Id that the server returns in its response.
    pub request_id: u32,
    /// Service time that the client requests from a paced server (ns), or 0 for the time in the server's table.
    pub service_ns: u32,
    /// Key of a GET or PUT (not empty), or first key of a SCAN.
    pub key: &'a [u8],
    /// Value that a PUT stores, which is empty for other requests.
    pub value: &'a [u8],
}

impl fmt::Debug for KeyValueRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { request_type, request_id: id, service_ns, key, value } = self;
        write!(f, "{request_type} {id} {service_ns} ns {} = {} bytes", key.escape_ascii(), value.len())
    }
}

impl<'a> KeyValueRequest<'a> {
    pub fn parse(datagram: &'a [u8]) -> Result<Self, KeyValueRequestError> {
        let too_short_error = |_| KeyValueRequestError::TooShort(datagram.len());
        let (header, key_and_value) = KeyValueRequestHeader::read_from_prefix(datagram).map_err(too_short_error)?;
        let request_type = RequestType::try_from(header.request_type)?;
        let (key_length, value_length) = (usize::from(header.key_length), usize::from(header.value_length.get()));
        if key_and_value.len() != key_length + value_length {
            let expected = REQUEST_HEADER_BYTES + key_length + value_length;
            return Err(KeyValueRequestError::WrongLength { given: datagram.len(), expected });
        }
        let (key, value) = key_and_value.split_at(key_length);
        if key.is_empty() && matches!(request_type, RequestType::GET | RequestType::PUT) {
            return Err(KeyValueRequestError::MissingKey(request_type));
        }
        if value_length > MAX_VALUE_BYTES {
            return Err(KeyValueRequestError::ValueTooLong(value_length));
        }
        Ok(Self { request_type, request_id: header.id.get(), service_ns: header.service_ns.get(), key, value })
    }

    /// Replaces the contents of `buffer` by the request's datagram. Panics when the key is longer than
    /// [`MAX_KEY_BYTES`] or the value longer than 65,535 bytes.
    pub fn write_datagram(&self, buffer: &mut Vec<u8>) {
        let header = KeyValueRequestHeader {
            request_type: self.request_type.as_byte(),
            key_length: self.key.len().try_into().expect("a key of at most 255 bytes"),
            value_length: u16::try_from(self.value.len()).expect("a value of at most 65535 bytes").into(),
            id: self.request_id.into(),
            service_ns: self.service_ns.into(),
        };
        buffer.clear();
        buffer.extend_from_slice(header.as_bytes());
        buffer.extend_from_slice(self.key);
        buffer.extend_from_slice(self.value);
    }
}

/// Returns the name of key `number`. All names have the same length, so that they sort like their numbers.
pub fn key_name(number: u32) -> String {
    format!("user{number:010}")
}

/// Builder for the datagrams of a response, to which key-value pairs are added one by one.
#[derive(Debug, Default)]
pub struct KeyValueResponseWriter {
    datagrams: Vec<Vec<u8>>,
    used_datagram_count: usize,
}

impl KeyValueResponseWriter {
    /// Begins a response that has one datagram without pairs, and discards the previous response.
    pub fn begin_response(&mut self, request: &KeyValueRequest<'_>, status: KeyValueResponseStatus, worker: u16) {
        self.used_datagram_count = 0;
        self.add_datagram(KeyValueResponseHeader {
            request_type: request.request_type.as_byte(),
            status_code: status as u8,
            worker_index: worker.into(),
            id: request.request_id.into(),
            part_index: 0,
            part_count: 1,
            pair_count: 0.into(),
        });
    }

    /// Adds a key-value pair, in a further datagram if necessary. Returns `false` if no datagram can hold the pair, or
    /// if the response already has 255 datagrams and no room.
    pub fn push_pair(&mut self, key: &[u8], value: &[u8]) -> bool {
        let pair_bytes = size_of::<KeyValuePairHeader>() + key.len() + value.len();
        let (Ok(key_length), Ok(value_length)) = (u8::try_from(key.len()), u16::try_from(value.len())) else {
            return false;
        };
        if size_of::<KeyValueResponseHeader>() + pair_bytes > MAX_DATAGRAM_BYTES {
            return false;
        }
        if self.datagrams[self.used_datagram_count - 1].len() + pair_bytes > MAX_DATAGRAM_BYTES {
            let Ok(part) = u8::try_from(self.used_datagram_count) else { return false };
            let header = *self.header_of_datagram(self.used_datagram_count - 1);
            self.add_datagram(KeyValueResponseHeader { part_index: part, pair_count: 0.into(), ..header });
        }
        self.header_of_datagram(self.used_datagram_count - 1).pair_count += 1;
        let pair_header = KeyValuePairHeader { key_length, reserved: 0, value_length: value_length.into() };
        let datagram = &mut self.datagrams[self.used_datagram_count - 1];
        datagram.extend_from_slice(pair_header.as_bytes());
        datagram.extend_from_slice(key);
        datagram.extend_from_slice(value);
        true
    }

    /// Completes the headers, and returns the response's datagrams in order.
    pub fn finish_response(&mut self) -> impl Iterator<Item = &[u8]> {
        let part_count = self.used_datagram_count as u8;
        (0..self.used_datagram_count).for_each(|index| self.header_of_datagram(index).part_count = part_count);
        self.datagrams[..self.used_datagram_count].iter().map(Vec::as_slice)
    }

    fn header_of_datagram(&mut self, index: usize) -> &mut KeyValueResponseHeader {
        KeyValueResponseHeader::mut_from_prefix(&mut self.datagrams[index]).expect("begins with a header").0
    }

    fn add_datagram(&mut self, header: KeyValueResponseHeader) {
        if self.used_datagram_count == self.datagrams.len() {
            self.datagrams.push(Vec::with_capacity(MAX_DATAGRAM_BYTES));
        }
        let datagram = &mut self.datagrams[self.used_datagram_count];
        datagram.clear();
        datagram.extend_from_slice(header.as_bytes());
        self.used_datagram_count += 1;
    }
}

pub type KeyValuePair<'a> = (&'a [u8], &'a [u8]);

/// Returns the header and key-value pairs of a response datagram, or `None` for other datagrams.
pub fn parse_response(datagram: &[u8]) -> Option<(KeyValueResponseHeader, Vec<KeyValuePair<'_>>)> {
    let (header, mut unparsed_bytes) = KeyValueResponseHeader::read_from_prefix(datagram).ok()?;
    let mut pairs = Vec::with_capacity(header.pair_count.get().into());
    for _ in 0..header.pair_count.get() {
        let (pair_header, remaining_bytes) = KeyValuePairHeader::read_from_prefix(unparsed_bytes).ok()?;
        let (key, remaining_bytes) = remaining_bytes.split_at_checked(pair_header.key_length.into())?;
        let (value, remaining_bytes) = remaining_bytes.split_at_checked(pair_header.value_length.get().into())?;
        pairs.push((key, value));
        unparsed_bytes = remaining_bytes;
    }
    (header.part_index < header.part_count && unparsed_bytes.is_empty()).then_some((header, pairs))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn request_and_response_have_the_documented_layout() {
        let mut datagram = Vec::new();
        let request = KeyValueRequest {
            request_type: RequestType::PUT,
            request_id: 0x0102_0304,
            service_ns: 1_000,
            key: b"key",
            value: b"value",
        };
        request.write_datagram(&mut datagram);
        assert_eq!(datagram, b"\x02\x03\x05\x00\x04\x03\x02\x01\xe8\x03\x00\x00keyvalue");
        assert_eq!(KeyValueRequest::parse(&datagram), Ok(request));
        let mut response = KeyValueResponseWriter::default();
        response.begin_response(&request, KeyValueResponseStatus::StoreFull, 0x0506);
        assert!(response.push_pair(b"k", b"vw"));
        let datagrams: Vec<&[u8]> = response.finish_response().collect();
        assert_eq!(datagrams, [b"\x02\x02\x06\x05\x04\x03\x02\x01\x00\x01\x01\x00\x01\x00\x02\x00kvw"]);
    }

    #[test]
    fn invalid_request_is_rejected_with_its_reason() {
        let expect_parse_error = |bytes: &[u8]| KeyValueRequest::parse(bytes).unwrap_err().to_string();
        assert_eq!(expect_parse_error(b"\x01"), "1 bytes: expected at least 12");
        assert!(expect_parse_error(b"\x00\x00\x00\x00\x04\x03\x02\x01\xe8\x03\x00\x00").contains("request type 0"));
        assert!(
            expect_parse_error(b"\x01\x02\x00\x00\x04\x03\x02\x01\xe8\x03\x00\x00k").contains("13 bytes: expected 14")
        );
        assert!(
            expect_parse_error(b"\x01\x00\x00\x00\x04\x03\x02\x01\xe8\x03\x00\x00").contains("a GET without a key")
        );
        let mut datagram = Vec::new();
        let value = [0; MAX_VALUE_BYTES + 1];
        let build_put_request =
            |value| KeyValueRequest { request_type: RequestType::PUT, request_id: 1, service_ns: 0, key: b"k", value };
        build_put_request(&value[1..]).write_datagram(&mut datagram);
        assert!(KeyValueRequest::parse(&datagram).is_ok());
        build_put_request(&value).write_datagram(&mut datagram);
        assert!(
            expect_parse_error(&datagram).contains("a value of 1202 bytes: expected at most 1201"),
            "{}",
            expect_parse_error(&datagram)
        );
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_parsed_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = KeyValueRequest::parse(&bytes);
            let _ = parse_response(&bytes);
        }

        #[test]
        fn response_contains_all_pairs_in_order(
            pairs in prop::collection::vec((prop::collection::vec(any::<u8>(), 1..=MAX_KEY_BYTES),
                                            prop::collection::vec(any::<u8>(), 0..=MAX_VALUE_BYTES)), 0..127)
        ) {
            let request =
                KeyValueRequest { request_type: RequestType::GET, request_id: 7, service_ns: 0, key: b"k", value: b"" };
            let mut response = KeyValueResponseWriter::default();
            // The second response reuses the buffers of the first one.
            for _ in 0..2 {
                response.begin_response(&request, KeyValueResponseStatus::Done, 3);
                prop_assert!(pairs.iter().all(|(key, value)| response.push_pair(key, value)));
                let datagrams: Vec<&[u8]> = response.finish_response().collect();
                let mut read_pairs = Vec::new();
                for (index, datagram) in datagrams.iter().enumerate() {
                    prop_assert!(datagram.len() <= MAX_DATAGRAM_BYTES);
                    let (header, datagram_pairs) = parse_response(datagram).unwrap();
                    prop_assert_eq!((header.part_index, header.part_count), (index as u8, datagrams.len() as u8));
                    read_pairs.extend(datagram_pairs.into_iter().map(|(key, value)| (key.to_vec(), value.to_vec())));
                }
                prop_assert_eq!(&read_pairs, &pairs);
            }
        }
    }
}
