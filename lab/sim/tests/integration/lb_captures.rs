//! Tests that read valid captures of every kind and reject invalid ones.

use std::io::Write as _;
use std::path::PathBuf;

use coreward_sim::trace::capture::{CaptureReadOptions, writer};
use coreward_sim::trace::{FlowFirstPacket, PacketBatch, PacketSkipCounts, TraceFlowEvent, TracePacket, TraceSource};

const SECOND_NS: u64 = 1_000_000_000;

struct TestDirectory(tempfile::TempDir);

impl TestDirectory {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write_file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::File::create(&path).unwrap().write_all(bytes).unwrap();
        path
    }
}

/// Contents of a trace that has been read to its end.
#[derive(Debug, Default)]
struct TraceContents {
    packets: Vec<TracePacket>,
    first_packets: Vec<FlowFirstPacket>,
    skipped_packet_counts: PacketSkipCounts,
    reordered_packet_count: u64,
}

impl TraceContents {
    fn client_addresses(&self) -> Vec<String> {
        self.first_packets.iter().map(|first_packet| first_packet.tuple.client().to_string()).collect()
    }

    fn expect_read_error(path: PathBuf) -> String {
        read_trace(path).expect_err("an error is expected")
    }
}

fn read_trace_with_options(path: PathBuf, options: CaptureReadOptions) -> Result<TraceContents, String> {
    let mut trace = TraceSource::File(path).open_trace(1, options).map_err(|error| error.to_string())?;
    let (mut contents, mut batch) = (TraceContents::default(), PacketBatch::default());
    loop {
        trace.read(&mut batch).map_err(|error| error.to_string())?;
        if batch.packets.is_empty() {
            (contents.skipped_packet_counts, contents.reordered_packet_count) =
                (trace.skipped_packet_counts(), trace.reordered_packet_count());
            return Ok(contents);
        }
        contents.packets.extend(&batch.packets);
        contents.first_packets.extend(&batch.first_packets);
    }
}

fn read_trace(path: PathBuf) -> Result<TraceContents, String> {
    read_trace_with_options(path, CaptureReadOptions::default())
}

/// Returns an IPv4 packet that has `option_words` 32-bit words of IPv4 options, and a TCP header with these flags.
fn build_ipv4_packet(port: u16, tcp_flags: u8, option_words: usize) -> Vec<u8> {
    let mut packet = vec![0; 20 + option_words * 4];
    packet[0] = 0x45 + option_words as u8;
    packet[9] = 6;
    packet[12..16].copy_from_slice(&[10, 1, 0, 7]);
    packet[16..20].copy_from_slice(&[10, 200, 0, 1]);
    packet.extend(build_tcp_segment(port, tcp_flags));
    packet
}

fn build_tcp_segment(port: u16, flags: u8) -> Vec<u8> {
    let mut segment = vec![0; 20];
    segment[..2].copy_from_slice(&port.to_be_bytes());
    segment[2..4].copy_from_slice(&80u16.to_be_bytes());
    segment[13] = flags;
    segment
}

/// Returns an IPv6 packet with these extension headers (type, bytes), followed by `segment` of the transport
/// `protocol`.
fn build_ipv6_packet(headers: &[(u8, Vec<u8>)], protocol: u8, segment: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; 40];
    packet[0] = 0x60;
    packet[6] = headers.first().map_or(protocol, |(kind, _)| *kind);
    packet[8..24].copy_from_slice(&"2001:db8::7".parse::<std::net::Ipv6Addr>().unwrap().octets());
    packet[24..40].copy_from_slice(&"2001:db8::1".parse::<std::net::Ipv6Addr>().unwrap().octets());
    for (position, (_, bytes)) in headers.iter().enumerate() {
        let header_offset = packet.len();
        packet.extend(bytes);
        packet[header_offset] = headers.get(position + 1).map_or(protocol, |(kind, _)| *kind);
    }
    packet.extend(segment);
    packet
}

fn build_ethernet_frame(vlan_tags: &[u16], ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; 12];
    for tag in vlan_tags {
        frame.extend(tag.to_be_bytes());
        frame.extend([0, 42]);
    }
    frame.extend(ethertype.to_be_bytes());
    frame.extend(packet);
    frame
}

fn build_untagged_frame(packet: &[u8]) -> Vec<u8> {
    build_ethernet_frame(&[], 0x0800, packet)
}

/// Returns a classic pcap file with these frames, each with its time (ns).
fn build_pcap_file(is_big_endian: bool, has_nanoseconds: bool, link_type: u32, frames: &[(u64, Vec<u8>)]) -> Vec<u8> {
    let u32_to_bytes = |value: u32| if is_big_endian { value.to_be_bytes() } else { value.to_le_bytes() };
    let (magic, unit_ns) = if has_nanoseconds { (0xa1b2_3c4d, 1) } else { (0xa1b2_c3d4, 1_000) };
    let mut file: Vec<u8> = [magic, 0x0004_0002, 0, 0, 262_144, link_type].into_iter().flat_map(u32_to_bytes).collect();
    for (time_ns, frame) in frames {
        let (seconds, fraction) = (time_ns / SECOND_NS, time_ns % SECOND_NS / unit_ns);
        let frame_length = frame.len() as u32;
        file.extend([seconds as u32, fraction as u32, frame_length, frame_length].into_iter().flat_map(u32_to_bytes));
        file.extend(frame);
    }
    file
}

fn build_pcapng_block(block_type: u32, body: &[u8]) -> Vec<u8> {
    let mut padded_body = body.to_vec();
    padded_body.resize(body.len().next_multiple_of(4), 0);
    let length = (padded_body.len() as u32 + 12).to_le_bytes();
    [&block_type.to_le_bytes()[..], &length, &padded_body, &length].concat()
}

/// Returns a pcapng file. `interfaces` has pairs (link type, if_tsresol), and `packets` has triples (interface, ticks,
/// frame).
fn build_pcapng_file(interfaces: &[(u16, Option<u8>)], packets: &[(u32, u64, Vec<u8>)]) -> Vec<u8> {
    let mut file =
        build_pcapng_block(0x0a0d_0d0a, &[&0x1a2b_3c4du32.to_le_bytes()[..], &[1, 0, 0, 0], &[0xff; 8]].concat());
    for (link_type, resolution) in interfaces {
        let mut body = [&link_type.to_le_bytes()[..], &[0, 0], &262_144u32.to_le_bytes()].concat();
        if let Some(resolution) = resolution {
            body.extend([9, 0, 1, 0, *resolution, 0, 0, 0, 0, 0, 0, 0]);
        }
        file.extend(build_pcapng_block(1, &body));
    }
    for (interface, ticks, frame) in packets {
        let frame_length = frame.len() as u32;
        let header_words = [*interface, (ticks >> 32) as u32, *ticks as u32, frame_length, frame_length];
        let mut body: Vec<u8> = header_words.into_iter().flat_map(u32::to_le_bytes).collect();
        body.extend(frame);
        file.extend(build_pcapng_block(6, &body));
    }
    file
}

/// Returns three frames of two flows, each with its time (ns). Some have IPv4 options.
fn build_three_frames(to_frame: impl Fn(&[u8]) -> Vec<u8>) -> Vec<(u64, Vec<u8>)> {
    vec![
        (2_003_000_000, to_frame(&build_ipv4_packet(1_000, 0x02, 0))),
        (2_003_005_000, to_frame(&build_ipv4_packet(2_000, 0x02, 1))),
        (2_004_000_000, to_frame(&build_ipv4_packet(1_000, 0x10, 10))),
    ]
}

fn assert_three_packets(contents: &TraceContents) {
    assert_eq!(contents.client_addresses(), ["10.1.0.7:1000", "10.1.0.7:2000"]);
    assert_eq!(contents.first_packets[0].tuple.vip().to_string(), "10.200.0.1:80");
    let packets: Vec<_> =
        contents.packets.iter().map(|packet| (packet.time_ns, packet.flow_number, packet.event)).collect();
    assert_eq!(
        packets,
        [(0, 0, TraceFlowEvent::OPENS), (5_000, 1, TraceFlowEvent::OPENS), (1_000_000, 0, TraceFlowEvent::NONE)]
    );
    assert!(contents.skipped_packet_counts.is_empty());
}

#[test]
fn pcap_of_each_byte_order_and_resolution_is_read() {
    let directory = TestDirectory::new();
    for (is_big_endian, has_nanoseconds) in [(false, false), (false, true), (true, false), (true, true)] {
        let bytes = build_pcap_file(is_big_endian, has_nanoseconds, 1, &build_three_frames(build_untagged_frame));
        assert_three_packets(&read_trace(directory.write_file("a.pcap", &bytes)).unwrap());
    }
}

#[test]
fn every_link_layer_is_read() {
    let directory = TestDirectory::new();
    let cooked_frame_builder = |header_bytes: usize, offset: usize| {
        move |packet: &[u8]| {
            let mut frame = vec![0; header_bytes];
            frame[offset..offset + 2].copy_from_slice(&[0x08, 0x00]);
            frame.extend(packet);
            frame
        }
    };
    type FrameBuilder = Box<dyn Fn(&[u8]) -> Vec<u8>>;
    let link_layers: [(u32, FrameBuilder); 10] = [
        (1, Box::new(|packet| build_ethernet_frame(&[0x8100], 0x0800, packet))),
        (1, Box::new(|packet| build_ethernet_frame(&[0x88a8, 0x8100], 0x0800, packet))),
        (113, Box::new(cooked_frame_builder(16, 14))),
        (276, Box::new(cooked_frame_builder(20, 0))),
        (12, Box::new(<[u8]>::to_vec)),
        (14, Box::new(<[u8]>::to_vec)),
        (101, Box::new(<[u8]>::to_vec)),
        (228, Box::new(<[u8]>::to_vec)),
        (0, Box::new(|packet| [&[2, 0, 0, 0], packet].concat())),
        // This link type has the bits of a frame check sequence set.
        (0x1400_0001, Box::new(build_untagged_frame)),
    ];
    for (link_type, build_frame) in link_layers {
        assert_three_packets(
            &read_trace(
                directory
                    .write_file("a.pcap", &build_pcap_file(false, true, link_type, &build_three_frames(build_frame))),
            )
            .unwrap(),
        );
    }
    let error =
        TraceContents::expect_read_error(directory.write_file("a.pcap", &build_pcap_file(false, true, 105, &[])));
    assert!(error.contains("link type 105: expected Ethernet (1)"), "{error}");
}

#[test]
fn ipv6_with_extension_headers_is_read() {
    let directory = TestDirectory::new();
    let hop_by_hop = (0, vec![0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let authentication_header = (51, vec![0; 8]);
    let build_fragment_header = |offset: u16| (44, [&[0, 0], &(offset << 3).to_be_bytes()[..], &[0; 4]].concat());
    let frames = [
        (0, build_ipv6_packet(&[], 17, &build_tcp_segment(1_000, 0))),
        (1, build_ipv6_packet(&[hop_by_hop.clone(), authentication_header], 6, &build_tcp_segment(2_000, 0x02))),
        (2, build_ipv6_packet(&[hop_by_hop, build_fragment_header(0)], 6, &build_tcp_segment(2_000, 0x10))),
        (3, build_ipv6_packet(&[build_fragment_header(100)], 6, &build_tcp_segment(2_000, 0x10))),
        (4, build_ipv6_packet(&[], 58, &[0; 20])),
    ];
    let contents = read_trace(directory.write_file("a.pcap", &build_pcap_file(false, true, 229, &frames))).unwrap();
    assert_eq!(contents.client_addresses(), ["[2001:db8::7]:1000", "[2001:db8::7]:2000"]);
    assert_eq!(contents.packets.iter().map(|packet| packet.flow_number).collect::<Vec<_>>(), [0, 1, 1]);
    assert_eq!(
        contents.skipped_packet_counts,
        PacketSkipCounts::from([("fragment after the first", 1), ("neither TCP nor UDP", 1)])
    );
}

#[test]
fn skipped_packets_are_counted_by_reason() {
    let directory = TestDirectory::new();
    let frame_with_byte = |offset: usize, value: u8| {
        let mut packet = build_ipv4_packet(1_000, 0, 0);
        packet[offset] = value;
        build_untagged_frame(&packet)
    };
    // The frames have a first fragment, a later fragment, ICMP, and a header of 16 bytes.
    let mut frames =
        vec![frame_with_byte(6, 0x20), frame_with_byte(7, 9), frame_with_byte(9, 1), frame_with_byte(0, 0x44)];
    frames.push(build_untagged_frame(&build_ipv4_packet(3_000, 0, 0)));
    frames.push(build_ethernet_frame(&[], 0x0806, &[0; 28]));
    frames.push(build_untagged_frame(&build_ipv4_packet(1_000, 0, 0))[..36].to_vec());
    let frames: Vec<_> = frames.into_iter().zip(0..).map(|(frame, time)| (time, frame)).collect();
    let contents = read_trace(directory.write_file("a.pcap", &build_pcap_file(true, true, 1, &frames))).unwrap();
    assert_eq!(contents.packets.len(), 2);
    let expected_counts = [
        ("cut off before the ports", 1),
        ("fragment after the first", 1),
        ("malformed", 1),
        ("neither TCP nor UDP", 1),
        ("not IP", 1),
    ];
    assert_eq!(contents.skipped_packet_counts, PacketSkipCounts::from(expected_counts));
}

#[test]
fn pcapng_with_several_interfaces_and_resolutions_is_read() {
    let directory = TestDirectory::new();
    let packets = [
        // The units are microseconds (the default), nanoseconds, and 2^-10 s.
        (0, 5_000_000, build_untagged_frame(&build_ipv4_packet(1_000, 0x02, 0))),
        (1, 5_000_000_500, build_ipv4_packet(2_000, 0x02, 0)),
        (2, 5 * 1_024 + 1, build_ipv4_packet(1_000, 0x10, 0)),
    ];
    let file = build_pcapng_file(&[(1, None), (101, Some(9)), (101, Some(0x80 | 10))], &packets);
    let contents = read_trace(directory.write_file("a.pcapng", &file)).unwrap();
    assert_eq!(contents.packets.iter().map(|packet| packet.time_ns).collect::<Vec<_>>(), [0, 500, 976_562]);
    assert_eq!(contents.client_addresses().len(), 2);

    let simple_packet_block = build_pcapng_block(3, &[&40u32.to_le_bytes()[..], &build_ipv4_packet(1, 0, 0)].concat());
    let contents = read_trace(directory.write_file("b.pcapng", &[file.clone(), simple_packet_block].concat())).unwrap();
    assert_eq!(contents.skipped_packet_counts, PacketSkipCounts::from([("without a time stamp", 1)]));

    let error = TraceContents::expect_read_error(directory.write_file("c.pcapng", &file[..file.len() - 10]));
    assert!(error.contains("cut off in packet 3: 2 packets were read before"), "{error}");
    let mut damaged_file = file.clone();
    damaged_file[file.len() - 4..].copy_from_slice(&7u32.to_le_bytes());
    let error = TraceContents::expect_read_error(directory.write_file("d.pcapng", &damaged_file));
    assert!(error.contains("after packet 2 comes what is no pcapng block"), "{error}");
    let error = TraceContents::expect_read_error(directory.write_file("e.pcapng", &build_pcapng_file(&[], &packets)));
    assert!(error.contains("interface 0, which is not described"), "{error}");
}

fn compress_with_gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn compress_with_xz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(1)).unwrap();
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn compress_with_zstd(bytes: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
}

#[test]
fn compressed_captures_are_read() {
    let directory = TestDirectory::new();
    let plain_capture = build_pcap_file(false, true, 1, &build_three_frames(build_untagged_frame));
    let (head, tail) = plain_capture.split_at(100);
    // These files have several members, like those that `cat` creates.
    let skippable_frame = [&0x184d_2a50u32.to_le_bytes()[..], &3u32.to_le_bytes(), &[1, 2, 3]].concat();
    let compressed_files = [
        ("a.gz", [compress_with_gzip(head), compress_with_gzip(tail)].concat()),
        ("a.xz", [compress_with_xz(head), compress_with_xz(tail)].concat()),
        ("a.zst", [compress_with_zstd(head), skippable_frame, compress_with_zstd(tail)].concat()),
    ];
    for (name, bytes) in compressed_files {
        assert_three_packets(&read_trace(directory.write_file(name, &bytes)).unwrap());
        let error = TraceContents::expect_read_error(directory.write_file(name, &bytes[..bytes.len() - 20]));
        assert!(error.contains("cut off in packet") || error.contains("after packet"), "{name}: {error}");
    }
}

#[test]
fn damaged_captures_and_unknown_formats_are_rejected() {
    let directory = TestDirectory::new();
    let capture = build_pcap_file(false, false, 1, &build_three_frames(build_untagged_frame));
    let error = TraceContents::expect_read_error(directory.write_file("a.pcap", &capture[..capture.len() - 1]));
    let expected_error = "a.pcap: cut off in packet 3: 2 packets were read before, up to 0.000005 s after the first";
    assert!(error.ends_with(expected_error), "{error}");
    assert!(
        TraceContents::expect_read_error(directory.write_file("a.pcap", &capture[..20]))
            .contains("cut off in packet 1: 0 packets")
    );
    let error = TraceContents::expect_read_error(directory.write_file("b.txt", b"hello, world"));
    assert!(error.contains("begins with [68, 65, 6c, 6c, 6f, 2c]: expected a capture"), "{error}");
    assert!(TraceContents::expect_read_error(directory.write_file("c", b"")).contains("begins with []"));
    let mut damaged_capture = capture.clone();
    damaged_capture[24 + 8..24 + 12].copy_from_slice(&300_000_000u32.to_le_bytes());
    let error = TraceContents::expect_read_error(directory.write_file("d.pcap", &damaged_capture));
    assert!(error.contains("packet 1 claims to have 300000000 bytes: expected at most 262144"), "{error}");
    assert!(TraceContents::expect_read_error(directory.0.path().join("none")).contains("none: No such file"));
}

#[test]
fn small_reordering_is_counted_and_large_reordering_is_rejected() {
    let directory = TestDirectory::new();
    let capture_at_times = |times_ms: &[u64]| {
        let build_frame = |ms: &u64| (ms * 1_000_000, build_untagged_frame(&build_ipv4_packet(1_000, 0, 0)));
        build_pcap_file(false, true, 1, &times_ms.iter().map(build_frame).collect::<Vec<_>>())
    };
    let contents = read_trace(directory.write_file("a.pcap", &capture_at_times(&[100, 120, 111, 130]))).unwrap();
    let times_ms: Vec<u64> = contents.packets.iter().map(|packet| packet.time_ns / 1_000_000).collect();
    assert_eq!((times_ms, contents.reordered_packet_count), (vec![0, 20, 20, 30], 1));
    let error = TraceContents::expect_read_error(directory.write_file("b.pcap", &capture_at_times(&[100, 120, 109])));
    let expected_error = "packet 3 is of 0.109000000 s, 11.000 ms before packet 2 of 0.120000000 s";
    assert!(error.contains(expected_error), "{error}");
}

#[test]
fn capture_cut_off_before_the_ports_is_rejected() {
    let directory = TestDirectory::new();
    let frames = build_three_frames(|packet| build_untagged_frame(packet)[..34].to_vec());
    let error =
        TraceContents::expect_read_error(directory.write_file("a.pcap", &build_pcap_file(false, true, 1, &frames)));
    let expected_error =
        "packet 1 was captured up to byte 34 of 34: its ports are behind; expected a snap length of at least 38";
    assert!(error.contains(expected_error), "{error}");
}

#[test]
fn flows_end_by_timeout_or_fin_and_free_their_numbers() {
    let directory = TestDirectory::new();
    let build_frame = |port: u16, flags: u8| build_untagged_frame(&build_ipv4_packet(port, flags, 0));
    let frames = [
        (0, build_frame(1_000, 0x02)),
        (SECOND_NS, build_frame(2_000, 0x02)),
        // These are a FIN, the last acknowledgement, and a SYN with the same ports.
        (2 * SECOND_NS, build_frame(2_000, 0x11)),
        (2 * SECOND_NS + 1, build_frame(2_000, 0x10)),
        (3 * SECOND_NS, build_frame(2_000, 0x02)),
        // The flow from port 1000 was idle for 11 s, while that from port 2000 continues.
        (11 * SECOND_NS, build_frame(2_000, 0x10)),
        (12 * SECOND_NS, build_frame(3_000, 0x02)),
    ];
    let options = CaptureReadOptions { flow_idle_timeout_ns: 10 * SECOND_NS };
    let contents =
        read_trace_with_options(directory.write_file("a.pcap", &build_pcap_file(false, true, 1, &frames)), options)
            .unwrap();
    let to_event_tuple = |packet: &TracePacket| (packet.time_ns / SECOND_NS, packet.flow_number, packet.event);
    let expected_events = [
        (0, 0, TraceFlowEvent::OPENS),
        (1, 1, TraceFlowEvent::OPENS),
        (2, 1, TraceFlowEvent::NONE),
        (2, 1, TraceFlowEvent::NONE),
        (3, 1, TraceFlowEvent::EXPIRES),
        (3, 1, TraceFlowEvent::OPENS),
        (11, 0, TraceFlowEvent::EXPIRES),
        (11, 1, TraceFlowEvent::NONE),
        (12, 0, TraceFlowEvent::OPENS),
    ];
    assert_eq!(contents.packets.iter().map(to_event_tuple).collect::<Vec<_>>(), expected_events);
    assert_eq!(contents.client_addresses(), ["10.1.0.7:1000", "10.1.0.7:2000", "10.1.0.7:2000", "10.1.0.7:3000"]);
}

#[test]
fn generated_trace_round_trips_through_a_capture() {
    let directory = TestDirectory::new();
    let source: TraceSource = "campus:seed=5,flows=300,seconds=3,history=0".parse().unwrap();
    let mut bytes = Vec::new();
    writer::write_capture(source.open_trace(1, CaptureReadOptions::default()).unwrap().as_mut(), 96, &mut bytes)
        .unwrap();
    let contents = read_trace(directory.write_file("campus.pcap", &bytes)).unwrap();
    let mut trace = source.open_trace(1, CaptureReadOptions::default()).unwrap();
    let (mut batch, mut packets, mut tuples) = (PacketBatch::default(), Vec::new(), Vec::new());
    loop {
        trace.read(&mut batch).unwrap();
        if batch.packets.is_empty() {
            break;
        }
        packets.extend(batch.packets.iter().map(|packet| (packet.time_ns, packet.wire_bytes)));
        tuples.extend(batch.first_packets.iter().map(|first_packet| first_packet.tuple));
    }
    let first_ns = packets[0].0;
    packets.iter_mut().for_each(|(time_ns, _)| *time_ns -= first_ns);
    let read_packets = contents.packets.iter().filter(|packet| packet.event.has_packet());
    assert_eq!(read_packets.map(|packet| (packet.time_ns, packet.wire_bytes)).collect::<Vec<_>>(), packets);
    assert_eq!(contents.first_packets.iter().map(|first_packet| first_packet.tuple).collect::<Vec<_>>(), tuples);
}

#[test]
fn trace_with_a_pause_of_any_length_is_simulated() {
    let directory = TestDirectory::new();
    for pause_ms in [99_000, 99_900, 100_000, 100_100, 100_200, 101_000, 3_600_000, 90_000_000] {
        let times_ms = (0..50u64).map(|tick| tick * 100).chain((0..50).map(|tick| 5_000 + pause_ms + tick * 100));
        let frames: Vec<_> =
            times_ms.map(|ms| (ms * 1_000_000, build_untagged_frame(&build_ipv4_packet(1_000, 0, 0)))).collect();
        let config = coreward_sim::lb::LbSimulationConfig {
            trace: TraceSource::File(
                directory.write_file(&format!("{pause_ms}.pcap"), &build_pcap_file(false, true, 1, &frames)),
            ),
            policies: vec!["crossrss".to_owned()],
            seeds: vec![1],
            ..coreward_sim::lb::LbSimulationConfig::default()
        };
        let outcome = coreward_sim::lb::run(&config).unwrap_or_else(|error| panic!("{pause_ms} ms: {error}"));
        assert_eq!(outcome.packets, 100);
        // In each window, all packets are on one of 16 cores, so x / mean is 16 once and 0 elsewhere.
        assert_eq!(outcome.policies[0].core_variance_pct.median, 1500.0, "{pause_ms} ms");
    }
}
