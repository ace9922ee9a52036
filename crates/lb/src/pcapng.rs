//! Writer of pcapng files (draft-ietf-opsawg-pcapng) of one Ethernet interface with timestamps in nanoseconds.

use std::io::{self, Write};
use std::time::Duration;

const SECTION_HEADER_BLOCK_TYPE: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION_BLOCK_TYPE: u32 = 1;
const ENHANCED_PACKET_BLOCK_TYPE: u32 = 6;

const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;
const LINKTYPE_ETHERNET: u16 = 1;
const OPT_ENDOFOPT: u16 = 0;
const OPT_COMMENT: u16 = 1;
const IF_TSRESOL: u16 = 9;

pub(crate) struct PcapngWriter<W> {
    output: W,
}

impl<W: Write> PcapngWriter<W> {
    /// Returns a writer that has written the file's section header and interface description to `output`.
    pub(crate) fn new(output: W) -> io::Result<Self> {
        let mut writer = Self { output };
        let mut section_header = BYTE_ORDER_MAGIC.to_le_bytes().to_vec();
        section_header.extend([1, 0, 0, 0]); // version 1.0
        section_header.extend(u64::MAX.to_le_bytes()); // section length: not given
        writer.write_block(SECTION_HEADER_BLOCK_TYPE, &section_header)?;
        let mut interface_description = LINKTYPE_ETHERNET.to_le_bytes().to_vec();
        interface_description.extend([0; 6]); // reserved, and no limit of the packets' length
        push_option(&mut interface_description, IF_TSRESOL, &[9]); // 10^-9 s
        push_option(&mut interface_description, OPT_ENDOFOPT, &[]);
        writer.write_block(INTERFACE_DESCRIPTION_BLOCK_TYPE, &interface_description)?;
        Ok(writer)
    }

    /// Writes a packet. `time` is the time since 1970, `frame` the captured part of a frame of `frame_length` bytes.
    pub(crate) fn write_packet(
        &mut self,
        time: Duration,
        frame: &[u8],
        frame_length: u32,
        comment: Option<&str>,
    ) -> io::Result<()> {
        let nanoseconds = time.as_nanos() as u64;
        let header = [0, (nanoseconds >> 32) as u32, nanoseconds as u32, frame.len() as u32, frame_length];
        let mut packet: Vec<u8> = header.into_iter().flat_map(u32::to_le_bytes).collect();
        packet.extend(frame);
        pad_to_four_bytes(&mut packet);
        if let Some(comment) = comment {
            push_option(&mut packet, OPT_COMMENT, comment.as_bytes());
            push_option(&mut packet, OPT_ENDOFOPT, &[]);
        }
        self.write_block(ENHANCED_PACKET_BLOCK_TYPE, &packet)
    }

    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }

    fn write_block(&mut self, block_type: u32, body: &[u8]) -> io::Result<()> {
        let block_length = (body.len() as u32 + 12).to_le_bytes();
        self.output.write_all(&block_type.to_le_bytes())?;
        self.output.write_all(&block_length)?;
        self.output.write_all(body)?;
        self.output.write_all(&block_length)
    }
}

fn push_option(block: &mut Vec<u8>, option_code: u16, value: &[u8]) {
    block.extend(option_code.to_le_bytes());
    block.extend((value.len() as u16).to_le_bytes());
    block.extend(value);
    pad_to_four_bytes(block);
}

/// Pads `block` with zeros to a multiple of four bytes, as the format requires for blocks, packets and options.
fn pad_to_four_bytes(block: &mut Vec<u8>) {
    block.resize(block.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use pcap_parser::pcapng::{Block, EnhancedPacketBlock, PcapNGSlice};
    use pcap_parser::traits::PcapNGPacketBlock as _;
    use pcap_parser::{Linktype, PcapBlockOwned};

    use super::*;

    fn assert_packet(packet: &EnhancedPacketBlock<'_>, time: (u32, u32), frame: &[u8], comments: &[&str]) {
        assert_eq!(packet.decode_ts(0, 1_000_000_000), time);
        assert_eq!(packet.packet_data(), frame);
        let decoded_comments: Vec<_> = packet
            .options
            .iter()
            .filter(|option| option.code.0 == OPT_COMMENT)
            .map(|option| option.as_str().unwrap())
            .collect();
        assert_eq!(decoded_comments, comments);
    }

    #[test]
    fn pcapng_library_reads_written_packets_and_comments() {
        let mut writer = PcapngWriter::new(Vec::new()).unwrap();
        let time = Duration::new(1_700_000_000, 123_456_789);
        writer.write_packet(time, b"short", 1500, Some("dropped")).unwrap();
        writer.write_packet(time + Duration::from_nanos(1), b"second packet", 13, None).unwrap();

        let blocks: Vec<_> = PcapNGSlice::from_slice(&writer.output).unwrap().map(Result::unwrap).collect();
        let [
            PcapBlockOwned::NG(Block::SectionHeader(_)),
            PcapBlockOwned::NG(Block::InterfaceDescription(interface)),
            PcapBlockOwned::NG(Block::EnhancedPacket(first)),
            PcapBlockOwned::NG(Block::EnhancedPacket(second)),
        ] = blocks.as_slice()
        else {
            panic!("{} blocks", blocks.len());
        };
        assert_eq!((interface.linktype, interface.ts_resolution()), (Linktype::ETHERNET, Some(1_000_000_000)));
        assert_packet(first, (1_700_000_000, 123_456_789), b"short", &["dropped"]);
        assert_eq!((first.orig_len(), first.caplen), (1500, 5));
        assert_packet(second, (1_700_000_000, 123_456_790), b"second packet", &[]);
    }
}
