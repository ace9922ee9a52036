//! Writer that stores a trace as a capture, for tests, reader benchmarks, and analysis of `campus` by other tools.

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};

use coreward_model::FourTuple;

use crate::trace::{PacketBatch, PacketTrace, TraceFlowEvent};

/// Total length of the Ethernet, IPv4 and TCP headers, without options (bytes).
const TCP_FRAME_HEADERS_BYTES: usize = 54;

/// Writes all packets of a trace as a classic pcap capture (Ethernet, IPv4, TCP), and returns their number.
///
/// A flow's first packet has SYN and its last one FIN. Times are in nanoseconds, because microseconds would lose the
/// order. Each packet is truncated to `snap_length` bytes (at least 54). The history is omitted because it has no
/// packets. Fails when the trace cannot be read or the capture cannot be written. Panics when a flow is IPv6.
pub fn write_capture(trace: &mut dyn PacketTrace, snap_length: usize, mut output: impl Write) -> io::Result<u64> {
    let snap_length = snap_length.max(TCP_FRAME_HEADERS_BYTES);
    let mut file_header = Vec::with_capacity(24);
    for header_word in [0xa1b2_3c4d, 0x0004_0002, 0, 0, snap_length as u32, 1] {
        file_header.extend_from_slice(&u32::to_le_bytes(header_word));
    }
    output.write_all(&file_header)?;
    let (mut batch, mut packet_count) = (PacketBatch::default(), 0);
    let mut frames: Vec<Vec<u8>> = Vec::new();
    loop {
        trace.read(&mut batch).map_err(io::Error::other)?;
        if batch.packets.is_empty() {
            return output.flush().map(|()| packet_count);
        }
        let mut first_packets = batch.first_packets.iter();
        for packet in &batch.packets {
            let flow = packet.flow_number as usize;
            if packet.event.opens_flow() {
                let first_packet = first_packets.next().expect("one for each flow that opens");
                frames.resize(frames.len().max(flow + 1), Vec::new());
                frames[flow] = build_tcp_frame(&first_packet.tuple, snap_length);
            }
            if !packet.event.has_packet() {
                continue;
            }
            let (frame, length) = (&mut frames[flow], packet.wire_bytes.max(TCP_FRAME_HEADERS_BYTES as u16));
            let time_ns = packet.time_ns - trace.history_duration_ns();
            frame[47] = event_to_tcp_flags(packet.event);
            let captured_bytes = snap_length.min(usize::from(length)) as u32;
            let (seconds, fraction) = ((time_ns / 1_000_000_000) as u32, (time_ns % 1_000_000_000) as u32);
            for header_word in [seconds, fraction, captured_bytes, u32::from(length)] {
                output.write_all(&header_word.to_le_bytes())?;
            }
            output.write_all(&frame[..captured_bytes as usize])?;
            packet_count += 1;
        }
    }
}

fn event_to_tcp_flags(event: TraceFlowEvent) -> u8 {
    let ack = 0x10;
    match (event.opens_flow(), event.closes_flow()) {
        (true, false) => 0x02,
        (true, true) => 0x03,
        (false, true) => ack | 0x01,
        (false, false) => ack,
    }
}

fn build_tcp_frame(tuple: &FourTuple, snap_length: usize) -> Vec<u8> {
    let to_ipv4_octets = |socket: SocketAddr| match socket.ip() {
        IpAddr::V4(v4) => v4.octets(),
        IpAddr::V6(_) => panic!("IPv6 flows are not written"),
    };
    let mut frame = vec![0; snap_length];
    frame[12..14].copy_from_slice(&[0x08, 0x00]);
    frame[14] = 0x45;
    frame[23] = 6;
    frame[26..30].copy_from_slice(&to_ipv4_octets(tuple.client()));
    frame[30..34].copy_from_slice(&to_ipv4_octets(tuple.vip()));
    frame[34..36].copy_from_slice(&tuple.client().port().to_be_bytes());
    frame[36..38].copy_from_slice(&tuple.vip().port().to_be_bytes());
    frame[46] = 0x50;
    frame
}
