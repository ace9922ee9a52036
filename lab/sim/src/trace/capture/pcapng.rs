//! Next-generation capture file (draft-ietf-opsawg-pcapng): sections, interfaces, packets.

use std::io::{self, ErrorKind, Read};

use pcap_parser::traits::PcapReaderIterator as _;
use pcap_parser::{Block, PcapBlockOwned, PcapError, PcapNGReader};

use super::error::CaptureError;
use super::headers::{LinkType, SkipReason};
use super::input::Reader;
use super::records::{Frame, FrameParser, StopReason};

/// Initial size of the library's buffer, and maximum size of a block (bytes).
const BUFFER_BYTES: usize = 1 << 20;
const MAX_BLOCK_BYTES: usize = 1 << 25;

/// Reader that fills whole buffers: the library needs a file's first block in its first read. A truncated compressed
/// file ends like any other file.
struct FullReads(Reader);

impl Read for FullReads {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.0.read(&mut buffer[filled..]) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }
}

struct Interface {
    link: Result<LinkType, u32>,
    ticks_per_s: i128,
    offset_s: i64,
}

/// Returns the ticks per second of the option if_tsresol: a power of 10, or of 2 if the uppermost bit is set (which the
/// library does not support). 10^38 is the largest supported value.
fn ticks_per_s(if_tsresol: u8) -> i128 {
    let exponent = u32::from(if_tsresol & 0x7f);
    if if_tsresol & 0x80 == 0 { 10i128.pow(exponent.min(38)) } else { 1 << exponent.min(126) }
}

impl Interface {
    /// Converts a time stamp to ns since 1970; `None` when it is earlier, or more than 500 years later.
    fn time_ns(&self, high: u32, low: u32) -> Option<u64> {
        let ticks = i128::from(u64::from(high) << 32 | u64::from(low));
        let ns = ticks * 1_000_000_000 / self.ticks_per_s + i128::from(self.offset_s) * 1_000_000_000;
        u64::try_from(ns).ok()
    }
}

/// Reads a whole file and parses its frames. An error names the fault and its position.
pub fn read(reader: Reader, out: &mut FrameParser) -> Result<(), StopReason> {
    let mut file = match PcapNGReader::new(BUFFER_BYTES, FullReads(reader)) {
        Ok(file) => file,
        Err(error) => return Err(stop_reason(&error, out)),
    };
    let (mut interfaces, mut capacity) = (Vec::new(), BUFFER_BYTES);
    loop {
        let consumed = match file.next() {
            Ok((bytes, PcapBlockOwned::NG(block))) => {
                record_block(&block, &mut interfaces, out)?;
                Ok(bytes)
            }
            Ok((bytes, _)) => Ok(bytes),
            Err(PcapError::Eof) => return Ok(()),
            Err(PcapError::Incomplete(_)) => Err(()),
            Err(PcapError::BufferTooSmall) if capacity < MAX_BLOCK_BYTES => {
                capacity *= 2;
                Err(())
            }
            Err(error) => return Err(stop_reason(&error, out)),
        };
        match consumed {
            Ok(bytes) => file.consume(bytes),
            Err(()) => refill(&mut file, capacity, out)?,
        }
    }
}

fn refill(file: &mut PcapNGReader<FullReads>, capacity: usize, out: &FrameParser) -> Result<(), StopReason> {
    if file.reader_exhausted() {
        return Err(out.truncation_error().into());
    }
    file.grow(capacity);
    file.refill().map_err(|error| stop_reason(&error, out))
}

fn stop_reason(error: &PcapError<&[u8]>, out: &FrameParser) -> StopReason {
    match error {
        PcapError::UnexpectedEof | PcapError::Incomplete(_) => out.truncation_error().into(),
        PcapError::BufferTooSmall => {
            let (number, bytes) = (out.packet_count() + 1, MAX_BLOCK_BYTES as u64 + 1);
            CaptureError::Damaged { number, bytes, max_bytes: MAX_BLOCK_BYTES as u32 }.into()
        }
        PcapError::ReadError => {
            let error =
                std::io::Error::other("the file cannot be read any further (damaged compression, or the medium)");
            CaptureError::Read { number: out.packet_count(), error }.into()
        }
        PcapError::NomError(_, kind) | PcapError::OwnedNomError(_, kind) => {
            CaptureError::Block { number: out.packet_count(), reason: format!("{kind:?}") }.into()
        }
        other => CaptureError::Block { number: out.packet_count(), reason: other.to_string() }.into(),
    }
}

fn record_block(block: &Block<'_>, interfaces: &mut Vec<Interface>, out: &mut FrameParser) -> Result<(), StopReason> {
    match block {
        Block::SectionHeader(_) => interfaces.clear(),
        Block::InterfaceDescription(interface) => interfaces.push(Interface {
            link: LinkType::try_from(interface.linktype.0 as u32).map_err(|_| interface.linktype.0 as u32),
            ticks_per_s: ticks_per_s(interface.if_tsresol),
            offset_s: interface.ts_offset(),
        }),
        Block::EnhancedPacket(packet) => {
            let Some(interface) = interfaces.get(packet.if_id as usize) else {
                let reason = format!("a packet of interface {}, which is not described", packet.if_id);
                return Err(CaptureError::Block { number: out.packet_count(), reason }.into());
            };
            let data = &packet.data[..packet.data.len().min(packet.caplen as usize)];
            match (interface.link, interface.time_ns(packet.ts_high, packet.ts_low)) {
                (Ok(link), Some(time_ns)) => {
                    out.record_frame(link, &Frame { time_ns, length: packet.origlen, data })?
                }
                (Err(number), _) => return Err(CaptureError::LinkType(number).into()),
                (_, None) => out.skip(SkipReason::NoTime),
            }
        }
        Block::SimplePacket(_) => out.skip(SkipReason::NoTime),
        _ => {}
    }
    Ok(())
}
