//! HTTP/1.1 with keep-alive (RFC 9112): GET of one path, one request at a time on a connection.

use super::connections::{MalformedResponse, Protocol, Reply};
use crate::workload::RequestParameters;

/// Maximum number of header fields in a response.
const HEADERS_MAX: usize = 64;
/// Maximum length of the head of a response (bytes).
const HEAD_BYTES_MAX: usize = 65_536;

/// Protocol of an HTTP client that requests the same path again and again.
#[derive(Debug, Clone)]
pub struct Http {
    request: Vec<u8>,
}

impl Http {
    /// Creates a client that requests `path`, which begins with a slash. `host` is the value of the Host field.
    pub fn new(path: &str, host: &str) -> Self {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: coreward\r\n\r\n");
        Self { request: request.into_bytes() }
    }
}

impl Protocol for Http {
    type Reader = Reader;
    const ALLOWS_PIPELINING: bool = false;

    fn write(&self, _demand: &RequestParameters, _id: u32, output: &mut Vec<u8>) {
        output.extend_from_slice(&self.request);
    }

    fn read(reader: &mut Reader, bytes: &[u8], each: &mut dyn FnMut(Reply)) -> Result<(), MalformedResponse> {
        reader.unread.extend_from_slice(bytes);
        let mut at = 0;
        while let Some(consumed) = reader.step(at, each)? {
            at += consumed;
        }
        reader.unread.drain(..at);
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum ParseState {
    #[default]
    Head,
    /// Number of remaining bytes of a body whose length is known.
    Body(u64),
    ChunkSize,
    /// Number of remaining bytes of a chunk, including its line end.
    Chunk(u64),
    Trailer,
}

/// State of the response parser of one connection.
#[derive(Debug, Default)]
pub struct Reader {
    unread: Vec<u8>,
    expected: ParseState,
    reply: Reply,
}

impl Reader {
    /// Parses the next part of a response from offset `at`, and returns its length; `None` when it is incomplete.
    fn step(&mut self, at: usize, each: &mut dyn FnMut(Reply)) -> Result<Option<usize>, MalformedResponse> {
        let rest = &self.unread[at..];
        let consumed = match self.expected {
            ParseState::Head => {
                let Some((length, expected, reply)) = parse_head(rest)? else { return Ok(None) };
                (self.expected, self.reply) = (expected, reply);
                length
            }
            ParseState::Body(left) | ParseState::Chunk(left) => {
                let consumed = left.min(rest.len() as u64);
                if consumed == 0 && left > 0 {
                    return Ok(None);
                }
                let is_body = matches!(self.expected, ParseState::Body(_));
                self.expected = match left - consumed {
                    0 if is_body => ParseState::Body(0),
                    0 => ParseState::ChunkSize,
                    left if is_body => ParseState::Body(left),
                    left => ParseState::Chunk(left),
                };
                consumed as usize
            }
            ParseState::ChunkSize => match httparse::parse_chunk_size(rest).map_err(|_| MalformedResponse)? {
                httparse::Status::Partial => return Ok(None),
                httparse::Status::Complete((length, size)) => {
                    self.expected = if size == 0 {
                        ParseState::Trailer
                    } else {
                        ParseState::Chunk(size.checked_add(2).ok_or(MalformedResponse)?)
                    };
                    length
                }
            },
            ParseState::Trailer => {
                let Some(end) = rest.windows(2).position(|pair| pair == b"\r\n") else { return Ok(None) };
                if end == 0 {
                    self.expected = ParseState::Body(0);
                }
                end + 2
            }
        };
        if self.expected == ParseState::Body(0) {
            self.expected = ParseState::Head;
            each(self.reply);
        }
        Ok(Some(consumed))
    }
}

/// Parses the head of a response; `None` when incomplete. Returns its length, the part that follows, and the reply.
fn parse_head(bytes: &[u8]) -> Result<Option<(usize, ParseState, Reply)>, MalformedResponse> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut response = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(length) = response.parse(bytes).map_err(|_| MalformedResponse)? else {
        return if bytes.len() > HEAD_BYTES_MAX { Err(MalformedResponse) } else { Ok(None) };
    };
    let field = |name: &str| {
        let header = response.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
        header.and_then(|header| std::str::from_utf8(header.value).ok())
    };
    let has = |name: &str, word: &str| {
        field(name).is_some_and(|value| value.split(',').any(|part| part.trim().eq_ignore_ascii_case(word)))
    };
    let code = response.code.ok_or(MalformedResponse)?;
    let expected = if code == 204 || code == 304 {
        ParseState::Body(0)
    } else if has("transfer-encoding", "chunked") {
        ParseState::ChunkSize
    } else {
        // A body without a length ends with the connection, which could then not be reused.
        ParseState::Body(
            field("content-length").and_then(|length| length.trim().parse().ok()).ok_or(MalformedResponse)?,
        )
    };
    let persists = response.version == Some(1) || has("connection", "keep-alive");
    let closes_connection = !persists || has("connection", "close");
    Ok(Some((length, expected, Reply { is_failure: code >= 400, closes_connection, ..Reply::default() })))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the replies that these bytes contain, and checks that they do not depend on how the bytes are segmented.
    fn replies(bytes: &[u8]) -> Result<Vec<Reply>, MalformedResponse> {
        let read = |piece: usize| {
            let (mut reader, mut replies) = (Reader::default(), Vec::new());
            for bytes in bytes.chunks(piece) {
                Http::read(&mut reader, bytes, &mut |reply| replies.push(reply))?;
            }
            Ok(replies)
        };
        let whole = read(bytes.len());
        (1..bytes.len()).for_each(|piece| assert_eq!(read(piece), whole, "in pieces of {piece} bytes"));
        whole
    }

    const DONE: Reply = Reply { id: None, worker: None, is_failure: false, closes_connection: false };

    #[test]
    fn responses_are_matched_by_id() {
        let with_length =
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nHTTP/HTTP/1.1 404 Not Found\r\ncontent-length:0\r\n\r\n";
        assert_eq!(replies(with_length), Ok(vec![DONE, Reply { is_failure: true, ..DONE }]));
        let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: \
                        chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nX: y\r\n\r\n";
        assert_eq!(replies(chunked), Ok(vec![DONE]));
        let closing = b"HTTP/1.1 304 Not Modified\r\nConnection: Close\r\n\r\n";
        assert_eq!(replies(closing), Ok(vec![Reply { closes_connection: true, ..DONE }]));
        let old = b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx";
        assert_eq!(replies(old), Ok(vec![Reply { closes_connection: true, ..DONE }]));
        assert_eq!(replies(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nHTTP"), Ok(vec![]));
    }

    #[test]
    fn invalid_response_is_rejected() {
        assert_eq!(replies(b"220 mail.example\r\n\r\n"), Err(MalformedResponse));
        assert_eq!(replies(b"HTTP/1.1 200 OK\r\n\r\nuntil the end"), Err(MalformedResponse));
        assert_eq!(replies(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"), Err(MalformedResponse));
    }
}
