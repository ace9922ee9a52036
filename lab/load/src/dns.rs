//! DNS queries (RFC 1035, Sect. 4; EDNS: RFC 6891), limited to the parts that a load generator needs.

use std::fmt;
use std::str::FromStr;

const HEADER_BYTES: usize = 12;
/// Bit QR in the first byte of the flags, which marks a response.
const QR_RESPONSE_BIT: u8 = 0x80;
/// Mask of the response code (RCODE) in the second byte of the flags.
const RCODE_MASK: u8 = 0x0f;
const CLASS_INTERNET: u16 = 1;
const TYPE_OPT: u16 = 41;
/// Maximum length of a datagram to accept (bytes): with all headers it fits Ethernet (RFC 9715, Sect. 3.2).
const EDNS_PAYLOAD_BYTES: u16 = 1_400;
/// Bit DO in the extended flags, which requests signatures (RFC 6891, Sect. 6.1.4).
const DNSSEC_OK: u32 = 0x8000;
const LABEL_MAX: usize = 63;
const NAME_MAX: usize = 255;

const QUERY_TYPES: [(&str, u16); 8] =
    [("A", 1), ("NS", 2), ("SOA", 6), ("MX", 15), ("TXT", 16), ("AAAA", 28), ("DNSKEY", 48), ("ANY", 255)];

/// Question of a DNS query, which is sent without recursion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DnsQuery {
    /// Domain name in wire format, as a sequence of labels.
    name: Vec<u8>,
    query_type: u16,
    dnssec: bool,
    text: String,
}

/// Error for a text that is not a query.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "query {0:?}: expected NAME/TYPE or NAME/TYPE/dnssec, as in www.example/A, with one of the types A, NS, SOA, MX, \
     TXT, AAAA, DNSKEY, ANY"
)]
pub struct QueryError(String);

impl FromStr for DnsQuery {
    type Err = QueryError;

    fn from_str(text: &str) -> Result<Self, QueryError> {
        let wrong = || QueryError(text.to_owned());
        let mut parts = text.split('/');
        let (name, query_type) = parts.next().zip(parts.next()).ok_or_else(wrong)?;
        let dnssec = match (parts.next(), parts.next()) {
            (None, _) => false,
            (Some("dnssec"), None) => true,
            _ => return Err(wrong()),
        };
        let (_, query_type) = QUERY_TYPES.into_iter().find(|(known, _)| *known == query_type).ok_or_else(wrong)?;
        let mut bytes = Vec::new();
        for label in name.trim_end_matches('.').split('.') {
            if label.is_empty() || label.len() > LABEL_MAX || !label.is_ascii() {
                return Err(wrong());
            }
            bytes.push(label.len() as u8);
            bytes.extend(label.bytes());
        }
        bytes.push(0);
        if bytes.len() > NAME_MAX {
            return Err(wrong());
        }
        Ok(Self { name: bytes, query_type, dnssec, text: text.to_owned() })
    }
}

impl fmt::Display for DnsQuery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl DnsQuery {
    /// Replaces the contents of `datagram` by the query with this id.
    pub fn write(&self, id: u16, datagram: &mut Vec<u8>) {
        datagram.clear();
        datagram.extend(id.to_be_bytes());
        // No recursion; one question, one additional record.
        datagram.extend([0, 0, 0, 1, 0, 0, 0, 0, 0, 1]);
        datagram.extend(&self.name);
        datagram.extend(self.query_type.to_be_bytes());
        datagram.extend(CLASS_INTERNET.to_be_bytes());
        datagram.push(0);
        datagram.extend(TYPE_OPT.to_be_bytes());
        datagram.extend(EDNS_PAYLOAD_BYTES.to_be_bytes());
        datagram.extend(if self.dnssec { DNSSEC_OK } else { 0 }.to_be_bytes());
        datagram.extend([0, 0]);
    }
}

/// Returns the id of a DNS response, and whether it has no error; `None` for other datagrams.
pub fn parse_response(datagram: &[u8]) -> Option<(u16, bool)> {
    let header: &[u8; HEADER_BYTES] = datagram.first_chunk()?;
    let is_response = header[2] & QR_RESPONSE_BIT != 0;
    is_response.then(|| (u16::from_be_bytes([header[0], header[1]]), header[3] & RCODE_MASK == 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dns_query_follows_the_rfcs() {
        let mut datagram = vec![9];
        "www.example./A/dnssec".parse::<DnsQuery>().unwrap().write(0x1234, &mut datagram);
        let expected = [
            &[0x12, 0x34, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1][..],
            b"\x03www\x07example\x00\x00\x01\x00\x01",
            &[0, 0, 41, 0x05, 0x78, 0, 0, 0x80, 0, 0, 0],
        ];
        assert_eq!(datagram, expected.concat());
    }

    #[test]
    fn responses_are_distinguished_from_queries_and_errors() {
        let header = |flags: [u8; 2]| [&[0xab, 0xcd][..], &flags, &[0; 8]].concat();
        assert_eq!(parse_response(&header([0x84, 0])), Some((0xabcd, true)));
        assert_eq!(parse_response(&header([0x84, 3])), Some((0xabcd, false)));
        assert_eq!(parse_response(&header([0x04, 0])), None);
        assert_eq!(parse_response(&[0x84; 11]), None);
    }

    #[test]
    fn invalid_query_is_rejected_with_message() {
        for text in ["www.example", "www.example/B", "a..b/A", "www.example/A/dnssec/x", "www.example/A/x", "/A"] {
            let error = text.parse::<DnsQuery>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("query {text:?}: expected NAME/TYPE")), "{error}");
        }
        assert!(format!("{}/A", "a".repeat(64)).parse::<DnsQuery>().is_err());
    }
}
