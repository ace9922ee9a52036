//! HTTP/1.1 client with keep-alive (RFC 9112), which requests one path by GET, one request at a time on a connection.

use super::connections::{ConnectionProtocol, ConnectionReply, MalformedResponse};
use crate::workload::RequestParameters;

const MAX_RESPONSE_HEADER_FIELDS: usize = 64;
const MAX_RESPONSE_HEAD_BYTES: usize = 65_536;

/// Protocol of an HTTP client that requests the same path again and again.
#[derive(Debug, Clone)]
pub struct HttpGetClient {
    request_bytes: Vec<u8>,
}

impl HttpGetClient {
    /// Creates a client that requests `path`, which begins with a slash. `host` is the value of the Host field.
    pub fn new(path: &str, host: &str) -> Self {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: coreward\r\n\r\n");
        Self { request_bytes: request.into_bytes() }
    }
}

impl ConnectionProtocol for HttpGetClient {
    type ReplyReader = HttpReplyReader;
    const ALLOWS_PIPELINING: bool = false;

    fn write_request(&self, _parameters: &RequestParameters, _id: u32, output: &mut Vec<u8>) {
        output.extend_from_slice(&self.request_bytes);
    }

    fn read_replies(
        reader: &mut HttpReplyReader,
        bytes: &[u8],
        on_reply: &mut dyn FnMut(ConnectionReply),
    ) -> Result<(), MalformedResponse> {
        reader.unread_bytes.extend_from_slice(bytes);
        let mut parsed_bytes = 0;
        while let Some(part_bytes) = reader.parse_next_part(parsed_bytes, on_reply)? {
            parsed_bytes += part_bytes;
        }
        reader.unread_bytes.drain(..parsed_bytes);
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum ExpectedResponsePart {
    #[default]
    Head,
    /// Body of known length, given by the number of bytes that remain to be received.
    BodyBytes(u64),
    ChunkSize,
    /// Chunk, given by the number of bytes that remain to be received, including its line end.
    ChunkBytes(u64),
    Trailer,
}

impl ExpectedResponsePart {
    /// Parses the expected part of a response, or as much of a body or chunk as `bytes` contains. Returns the part's
    /// length and the part that is expected next, or `None` when the part is incomplete. A parsed head replaces
    /// `reply`.
    fn parse(self, bytes: &[u8], reply: &mut ConnectionReply) -> Result<Option<(usize, Self)>, MalformedResponse> {
        match self {
            Self::Head => {
                let Some((head_bytes, next_part, parsed_reply)) = parse_response_head(bytes)? else { return Ok(None) };
                *reply = parsed_reply;
                Ok(Some((head_bytes, next_part)))
            }
            Self::BodyBytes(remaining_bytes) | Self::ChunkBytes(remaining_bytes) => {
                let available_bytes = remaining_bytes.min(bytes.len() as u64);
                if available_bytes == 0 && remaining_bytes > 0 {
                    return Ok(None);
                }
                let is_body = matches!(self, Self::BodyBytes(_));
                let next_part = match remaining_bytes - available_bytes {
                    0 if is_body => Self::BodyBytes(0),
                    0 => Self::ChunkSize,
                    remaining_bytes if is_body => Self::BodyBytes(remaining_bytes),
                    remaining_bytes => Self::ChunkBytes(remaining_bytes),
                };
                Ok(Some((available_bytes as usize, next_part)))
            }
            Self::ChunkSize => parse_chunk_size(bytes),
            Self::Trailer => {
                let line_end = bytes.windows(2).position(|byte_pair| byte_pair == b"\r\n");
                let select_part_after =
                    |line_end: usize| if line_end == 0 { Self::BodyBytes(0) } else { Self::Trailer };
                Ok(line_end.map(|line_end| (line_end + 2, select_part_after(line_end))))
            }
        }
    }
}

/// State of one connection's response parser.
#[derive(Debug, Default)]
pub struct HttpReplyReader {
    unread_bytes: Vec<u8>,
    expected_part: ExpectedResponsePart,
    current_reply: ConnectionReply,
}

impl HttpReplyReader {
    /// Parses the part of a response at `offset`, and returns its length, or `None` when the part is incomplete.
    fn parse_next_part(
        &mut self,
        offset: usize,
        on_reply: &mut dyn FnMut(ConnectionReply),
    ) -> Result<Option<usize>, MalformedResponse> {
        let unparsed_bytes = &self.unread_bytes[offset..];
        let parsed_part = self.expected_part.parse(unparsed_bytes, &mut self.current_reply)?;
        let Some((parsed_bytes, next_part)) = parsed_part else { return Ok(None) };
        self.expected_part = next_part;
        if self.expected_part == ExpectedResponsePart::BodyBytes(0) {
            self.expected_part = ExpectedResponsePart::Head;
            on_reply(self.current_reply);
        }
        Ok(Some(parsed_bytes))
    }
}

/// Returns the length of a response's head, the part that follows it, and the reply. Returns `None` when the head is
/// incomplete.
fn parse_response_head(
    bytes: &[u8],
) -> Result<Option<(usize, ExpectedResponsePart, ConnectionReply)>, MalformedResponse> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_RESPONSE_HEADER_FIELDS];
    let mut response = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(head_bytes) = response.parse(bytes).map_err(|_| MalformedResponse)? else {
        return if bytes.len() > MAX_RESPONSE_HEAD_BYTES { Err(MalformedResponse) } else { Ok(None) };
    };
    let find_field_value = |name: &str| {
        let matching_header = response.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
        matching_header.and_then(|header| std::str::from_utf8(header.value).ok())
    };
    let field_contains = |name: &str, token: &str| {
        find_field_value(name)
            .is_some_and(|value| value.split(',').any(|list_item| list_item.trim().eq_ignore_ascii_case(token)))
    };
    let status_code = response.code.ok_or(MalformedResponse)?;
    let expected_part = if status_code == 204 || status_code == 304 {
        ExpectedResponsePart::BodyBytes(0)
    } else if field_contains("transfer-encoding", "chunked") {
        ExpectedResponsePart::ChunkSize
    } else {
        // A body without a length extends to the end of the connection, which could then not be reused.
        ExpectedResponsePart::BodyBytes(
            find_field_value("content-length")
                .and_then(|length| length.trim().parse().ok())
                .ok_or(MalformedResponse)?,
        )
    };
    let is_persistent = response.version == Some(1) || field_contains("connection", "keep-alive");
    let closes_connection = !is_persistent || field_contains("connection", "close");
    Ok(Some((
        head_bytes,
        expected_part,
        ConnectionReply { is_failure: status_code >= 400, closes_connection, ..ConnectionReply::default() },
    )))
}

/// Returns the length of a chunk's first line, and the part that follows it, or `None` when the line is incomplete.
fn parse_chunk_size(bytes: &[u8]) -> Result<Option<(usize, ExpectedResponsePart)>, MalformedResponse> {
    match httparse::parse_chunk_size(bytes).map_err(|_| MalformedResponse)? {
        httparse::Status::Partial => Ok(None),
        httparse::Status::Complete((length, 0)) => Ok(Some((length, ExpectedResponsePart::Trailer))),
        httparse::Status::Complete((length, size)) => {
            Ok(Some((length, ExpectedResponsePart::ChunkBytes(size.checked_add(2).ok_or(MalformedResponse)?))))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the replies that these bytes contain, and checks that the result does not depend on how the bytes are
    /// segmented.
    fn parse_in_all_segmentations(bytes: &[u8]) -> Result<Vec<ConnectionReply>, MalformedResponse> {
        let parse_in_pieces = |piece_bytes: usize| {
            let (mut reader, mut replies) = (HttpReplyReader::default(), Vec::new());
            for bytes in bytes.chunks(piece_bytes) {
                HttpGetClient::read_replies(&mut reader, bytes, &mut |reply| replies.push(reply))?;
            }
            Ok(replies)
        };
        let whole_result = parse_in_pieces(bytes.len());
        (1..bytes.len()).for_each(|piece_bytes| {
            assert_eq!(parse_in_pieces(piece_bytes), whole_result, "in pieces of {piece_bytes} bytes")
        });
        whole_result
    }

    const SUCCESSFUL_REPLY: ConnectionReply =
        ConnectionReply { request_id: None, worker: None, is_failure: false, closes_connection: false };

    #[test]
    fn http_responses_with_length_chunks_or_connection_close_are_parsed() {
        let responses_with_length =
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nHTTP/HTTP/1.1 404 Not Found\r\ncontent-length:0\r\n\r\n";
        assert_eq!(
            parse_in_all_segmentations(responses_with_length),
            Ok(vec![SUCCESSFUL_REPLY, ConnectionReply { is_failure: true, ..SUCCESSFUL_REPLY }])
        );
        let chunked_response = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: \
                        chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nX: y\r\n\r\n";
        assert_eq!(parse_in_all_segmentations(chunked_response), Ok(vec![SUCCESSFUL_REPLY]));
        let closing_response = b"HTTP/1.1 304 Not Modified\r\nConnection: Close\r\n\r\n";
        assert_eq!(
            parse_in_all_segmentations(closing_response),
            Ok(vec![ConnectionReply { closes_connection: true, ..SUCCESSFUL_REPLY }])
        );
        let http_1_0_response = b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx";
        assert_eq!(
            parse_in_all_segmentations(http_1_0_response),
            Ok(vec![ConnectionReply { closes_connection: true, ..SUCCESSFUL_REPLY }])
        );
        assert_eq!(parse_in_all_segmentations(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nHTTP"), Ok(vec![]));
    }

    #[test]
    fn invalid_http_response_is_rejected() {
        assert_eq!(parse_in_all_segmentations(b"220 mail.example\r\n\r\n"), Err(MalformedResponse));
        assert_eq!(parse_in_all_segmentations(b"HTTP/1.1 200 OK\r\n\r\nuntil the end"), Err(MalformedResponse));
        assert_eq!(
            parse_in_all_segmentations(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"),
            Err(MalformedResponse)
        );
    }
}
