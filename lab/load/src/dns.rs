//! DNS queries (RFC 1035, Sect. 4) with EDNS (RFC 6891), limited to the parts that a load generator needs.

use std::fmt;
use std::str::FromStr;

const DNS_HEADER_BYTES: usize = 12;
/// Bit QR in the first flags byte of the DNS header, which marks a response.
const QR_RESPONSE_BIT: u8 = 0x80;
/// Mask of the response code (RCODE) in the second flags byte of the DNS header.
const DNS_RCODE_MASK: u8 = 0x0f;
const DNS_CLASS_INTERNET: u16 = 1;
const DNS_TYPE_OPT: u16 = 41;
/// Maximum length of a response (bytes), which queries announce by EDNS. With all headers, a datagram of this length
/// fits into one Ethernet frame (RFC 9715, Sect. 3.2).
const EDNS_PAYLOAD_BYTES: u16 = 1_400;
/// Bit DO in the extended flags of EDNS, which requests DNSSEC signatures (RFC 6891, Sect. 6.1.4).
const EDNS_DNSSEC_OK_FLAG: u32 = 0x8000;
const MAX_DNS_LABEL_BYTES: usize = 63;
const MAX_DNS_NAME_BYTES: usize = 255;

const DNS_QUERY_TYPE_CODES: [(&str, u16); 8] =
    [("A", 1), ("NS", 2), ("SOA", 6), ("MX", 15), ("TXT", 16), ("AAAA", 28), ("DNSKEY", 48), ("ANY", 255)];

/// DNS query with one question, which does not ask the server for recursion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DnsQuery {
    /// Domain name in wire format, as a sequence of labels.
    wire_format_name: Vec<u8>,
    query_type_code: u16,
    requests_dnssec: bool,
    source_text: String,
}

/// Error for a text that does not describe a DNS query.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "query {0:?}: expected NAME/TYPE or NAME/TYPE/dnssec, as in www.example/A, with one of the types A, NS, SOA, MX, \
     TXT, AAAA, DNSKEY, ANY"
)]
pub struct DnsQueryError(String);

impl FromStr for DnsQuery {
    type Err = DnsQueryError;

    fn from_str(text: &str) -> Result<Self, DnsQueryError> {
        let build_query_error = || DnsQueryError(text.to_owned());
        let mut slash_separated = text.split('/');
        let (name, query_type) = slash_separated.next().zip(slash_separated.next()).ok_or_else(build_query_error)?;
        let requests_dnssec = match (slash_separated.next(), slash_separated.next()) {
            (None, _) => false,
            (Some("dnssec"), None) => true,
            _ => return Err(build_query_error()),
        };
        let (_, query_type_code) = DNS_QUERY_TYPE_CODES
            .into_iter()
            .find(|(type_name, _)| *type_name == query_type)
            .ok_or_else(build_query_error)?;
        let mut wire_name = Vec::new();
        for label in name.trim_end_matches('.').split('.') {
            if label.is_empty() || label.len() > MAX_DNS_LABEL_BYTES || !label.is_ascii() {
                return Err(build_query_error());
            }
            wire_name.push(label.len() as u8);
            wire_name.extend(label.bytes());
        }
        wire_name.push(0);
        if wire_name.len() > MAX_DNS_NAME_BYTES {
            return Err(build_query_error());
        }
        Ok(Self { wire_format_name: wire_name, query_type_code, requests_dnssec, source_text: text.to_owned() })
    }
}

impl fmt::Display for DnsQuery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.source_text)
    }
}

impl DnsQuery {
    /// Replaces the contents of `datagram` by this query, with `id` as the message id.
    pub fn write_datagram(&self, id: u16, datagram: &mut Vec<u8>) {
        datagram.clear();
        datagram.extend(id.to_be_bytes());
        // The flags request no recursion, and the counts announce one question and one additional record (for EDNS).
        datagram.extend([0, 0, 0, 1, 0, 0, 0, 0, 0, 1]);
        datagram.extend(&self.wire_format_name);
        datagram.extend(self.query_type_code.to_be_bytes());
        datagram.extend(DNS_CLASS_INTERNET.to_be_bytes());
        datagram.push(0);
        datagram.extend(DNS_TYPE_OPT.to_be_bytes());
        datagram.extend(EDNS_PAYLOAD_BYTES.to_be_bytes());
        datagram.extend(if self.requests_dnssec { EDNS_DNSSEC_OK_FLAG } else { 0 }.to_be_bytes());
        datagram.extend([0, 0]);
    }
}

/// Returns a DNS response's id, and whether the response reports success. Returns `None` for other datagrams.
pub fn parse_response_id_and_success(datagram: &[u8]) -> Option<(u16, bool)> {
    let header: &[u8; DNS_HEADER_BYTES] = datagram.first_chunk()?;
    let is_response = header[2] & QR_RESPONSE_BIT != 0;
    is_response.then(|| (u16::from_be_bytes([header[0], header[1]]), header[3] & DNS_RCODE_MASK == 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dns_query_has_the_wire_format_of_rfc_1035_and_rfc_6891() {
        let mut datagram = vec![9];
        "www.example./A/dnssec".parse::<DnsQuery>().unwrap().write_datagram(0x1234, &mut datagram);
        let expected_parts = [
            &[0x12, 0x34, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1][..],
            b"\x03www\x07example\x00\x00\x01\x00\x01",
            &[0, 0, 41, 0x05, 0x78, 0, 0, 0x80, 0, 0, 0],
        ];
        assert_eq!(datagram, expected_parts.concat());
    }

    #[test]
    fn successful_and_failed_dns_responses_are_distinguished_from_other_datagrams() {
        let header_with_flags = |flags: [u8; 2]| [&[0xab, 0xcd][..], &flags, &[0; 8]].concat();
        assert_eq!(parse_response_id_and_success(&header_with_flags([0x84, 0])), Some((0xabcd, true)));
        assert_eq!(parse_response_id_and_success(&header_with_flags([0x84, 3])), Some((0xabcd, false)));
        assert_eq!(parse_response_id_and_success(&header_with_flags([0x04, 0])), None);
        assert_eq!(parse_response_id_and_success(&[0x84; 11]), None);
    }

    #[test]
    fn invalid_dns_query_is_rejected_with_a_message_about_the_format() {
        for text in ["www.example", "www.example/B", "a..b/A", "www.example/A/dnssec/x", "www.example/A/x", "/A"] {
            let error = text.parse::<DnsQuery>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("query {text:?}: expected NAME/TYPE")), "{error}");
        }
        assert!(format!("{}/A", "a".repeat(64)).parse::<DnsQuery>().is_err());
    }
}
