//! The timestamp option of TCP (RFC 7323).

use super::ip_packet::u32_at;

pub(super) const TCP_HEADER_BYTES: usize = 20;
const TCP_OPTION_END: u8 = 0;
const TCP_OPTION_NOP: u8 = 1;
const TCP_OPTION_TIMESTAMP: u8 = 8;
const TIMESTAMP_OPTION_BYTES: usize = 10;

pub(super) struct MalformedTcpOptions;

/// Returns the offset of the timestamp option, if there is one. Options after it are not checked.
pub(super) fn timestamp_option_offset(options: &[u8]) -> Result<Option<usize>, MalformedTcpOptions> {
    let mut offset = 0;
    while offset < options.len() {
        match options[offset] {
            TCP_OPTION_END => return Ok(None),
            TCP_OPTION_NOP => offset += 1,
            kind => {
                let option_length = options.get(offset + 1).copied().map_or(0, usize::from);
                if option_length < 2 || offset + option_length > options.len() {
                    return Err(MalformedTcpOptions);
                }
                if kind == TCP_OPTION_TIMESTAMP && option_length == TIMESTAMP_OPTION_BYTES {
                    return Ok(Some(offset));
                }
                offset += option_length;
            }
        }
    }
    Ok(None)
}

/// Returns the TSval in the quoted beginning of a TCP segment, if the quote includes it.
pub(super) fn quoted_tsval(quoted_segment: &[u8]) -> Option<u32> {
    let header_bytes = usize::from(quoted_segment.get(12)? >> 4) * 4;
    let options = quoted_segment.get(TCP_HEADER_BYTES..header_bytes.min(quoted_segment.len()))?;
    // A truncated list is malformed, so it counts as a list without a timestamp.
    let option_offset = timestamp_option_offset(options).ok().flatten()?;
    Some(u32_at(options, option_offset + 2))
}
