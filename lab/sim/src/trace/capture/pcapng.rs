//! Reader of pcapng files (draft-ietf-opsawg-pcapng), which contain sections, interfaces and packets.

use std::io::{self, ErrorKind, Read};

use pcap_parser::traits::PcapReaderIterator as _;
use pcap_parser::{Block, PcapBlockOwned, PcapError, PcapNGReader};

use super::error::CaptureError;
use super::headers::{CaptureLinkType, PacketSkipReason};
use super::input::BoxedReader;
use super::records::{CaptureReadStopReason, CapturedFrame, FrameParser};

/// Initial size of the library's buffer (bytes).
const INITIAL_READ_BUFFER_BYTES: usize = 1 << 20;
const MAX_PCAPNG_BLOCK_BYTES: usize = 1 << 25;

/// Reader that fills the whole buffer in each read, because the library needs a file's first block in its first read. A
/// truncated compressed file appears to end normally where it is truncated.
struct FullBufferReader(BoxedReader);

impl Read for FullBufferReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled_byte_count = 0;
        while filled_byte_count < buffer.len() {
            match self.0.read(&mut buffer[filled_byte_count..]) {
                Ok(0) => break,
                Ok(read_bytes) => filled_byte_count += read_bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
                Err(error) => return Err(error),
            }
        }
        Ok(filled_byte_count)
    }
}

struct CaptureInterface {
    link_type: Result<CaptureLinkType, u32>,
    ticks_per_s: i128,
    time_offset_s: i64,
}

/// Returns the number of ticks per second that the option if_tsresol specifies. It is a power of 10, or of 2 if the
/// uppermost bit is set (which the library does not support). The largest supported value is 10^38.
fn timestamp_ticks_per_s(if_tsresol: u8) -> i128 {
    let exponent = u32::from(if_tsresol & 0x7f);
    if if_tsresol & 0x80 == 0 { 10i128.pow(exponent.min(38)) } else { 1 << exponent.min(126) }
}

impl CaptureInterface {
    /// Converts an interface's time stamp to ns since 1970. Returns `None` if it is before 1970, or more than 500 years
    /// after.
    fn time_ns(&self, ticks_high: u32, ticks_low: u32) -> Option<u64> {
        let ticks = i128::from(u64::from(ticks_high) << 32 | u64::from(ticks_low));
        let ns = ticks * 1_000_000_000 / self.ticks_per_s + i128::from(self.time_offset_s) * 1_000_000_000;
        u64::try_from(ns).ok()
    }
}

/// Reads a whole pcapng file and passes its frames to `frame_parser`. An error names the fault and its position.
pub fn read_capture(reader: BoxedReader, frame_parser: &mut FrameParser) -> Result<(), CaptureReadStopReason> {
    let mut block_reader = match PcapNGReader::new(INITIAL_READ_BUFFER_BYTES, FullBufferReader(reader)) {
        Ok(file) => file,
        Err(error) => return Err(to_stop_reason(&error, frame_parser)),
    };
    let (mut interfaces, mut capacity) = (Vec::new(), INITIAL_READ_BUFFER_BYTES);
    loop {
        let consumed_byte_count = match block_reader.next() {
            Ok((bytes, PcapBlockOwned::NG(block))) => {
                parse_block(&block, &mut interfaces, frame_parser)?;
                Ok(bytes)
            }
            Ok((bytes, _)) => Ok(bytes),
            Err(PcapError::Eof) => return Ok(()),
            Err(PcapError::Incomplete(_)) => Err(()),
            Err(PcapError::BufferTooSmall) if capacity < MAX_PCAPNG_BLOCK_BYTES => {
                capacity *= 2;
                Err(())
            }
            Err(error) => return Err(to_stop_reason(&error, frame_parser)),
        };
        match consumed_byte_count {
            Ok(bytes) => block_reader.consume(bytes),
            Err(()) => refill_block_reader(&mut block_reader, capacity, frame_parser)?,
        }
    }
}

fn refill_block_reader(
    block_reader: &mut PcapNGReader<FullBufferReader>,
    capacity: usize,
    frame_parser: &FrameParser,
) -> Result<(), CaptureReadStopReason> {
    if block_reader.reader_exhausted() {
        return Err(frame_parser.build_truncation_error().into());
    }
    block_reader.grow(capacity);
    block_reader.refill().map_err(|error| to_stop_reason(&error, frame_parser))
}

fn to_stop_reason(error: &PcapError<&[u8]>, frame_parser: &FrameParser) -> CaptureReadStopReason {
    match error {
        PcapError::UnexpectedEof | PcapError::Incomplete(_) => frame_parser.build_truncation_error().into(),
        PcapError::BufferTooSmall => {
            let (number, bytes) = (frame_parser.packet_count() + 1, MAX_PCAPNG_BLOCK_BYTES as u64 + 1);
            CaptureError::OversizedPacket { packet_number: number, bytes, max_bytes: MAX_PCAPNG_BLOCK_BYTES as u32 }
                .into()
        }
        PcapError::ReadError => {
            let error =
                std::io::Error::other("the file cannot be read any further (damaged compression, or the medium)");
            CaptureError::ReadFailed { packet_number: frame_parser.packet_count(), error }.into()
        }
        PcapError::NomError(_, kind) | PcapError::OwnedNomError(_, kind) => {
            CaptureError::InvalidBlock { packet_number: frame_parser.packet_count(), reason: format!("{kind:?}") }
                .into()
        }
        other => {
            CaptureError::InvalidBlock { packet_number: frame_parser.packet_count(), reason: other.to_string() }.into()
        }
    }
}

fn parse_block(
    block: &Block<'_>,
    interfaces: &mut Vec<CaptureInterface>,
    frame_parser: &mut FrameParser,
) -> Result<(), CaptureReadStopReason> {
    match block {
        Block::SectionHeader(_) => interfaces.clear(),
        Block::InterfaceDescription(interface) => interfaces.push(CaptureInterface {
            link_type: CaptureLinkType::try_from(interface.linktype.0 as u32).map_err(|_| interface.linktype.0 as u32),
            ticks_per_s: timestamp_ticks_per_s(interface.if_tsresol),
            time_offset_s: interface.ts_offset(),
        }),
        Block::EnhancedPacket(packet) => {
            let Some(interface) = interfaces.get(packet.if_id as usize) else {
                let reason = format!("a packet of interface {}, which is not described", packet.if_id);
                return Err(CaptureError::InvalidBlock { packet_number: frame_parser.packet_count(), reason }.into());
            };
            let data = &packet.data[..packet.data.len().min(packet.caplen as usize)];
            match (interface.link_type, interface.time_ns(packet.ts_high, packet.ts_low)) {
                (Ok(link_type), Some(time_ns)) => frame_parser
                    .record_frame(link_type, &CapturedFrame { time_ns, wire_bytes: packet.origlen, data })?,
                (Err(number), _) => return Err(CaptureError::UnsupportedLinkType(number).into()),
                (_, None) => frame_parser.count_skipped_packet(PacketSkipReason::NoTimestamp),
            }
        }
        Block::SimplePacket(_) => frame_parser.count_skipped_packet(PacketSkipReason::NoTimestamp),
        _ => {}
    }
    Ok(())
}
