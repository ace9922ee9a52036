//! Tests of `bpf/lb/lb.bpf.c` with packets for the kernel, and with truncated and malformed packets. The program's
//! comments state the expected verdict and counter, and the frame must be unchanged.

use coreward_model::cookie::{self, Cookie};
use coreward_model::placement::PlacementRule;
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_model::{FourTuple, ServerId};

use crate::support::balancer::{
    CLIENT_ENDPOINT, ExpectedIdentification, TestBalancer, VIP, XDP_DROP, XDP_PASS, XDP_TX, previous_server,
    random_placement_table,
};
use crate::support::{
    self, ACK, FIN, RST, SYN, TcpPacket, aligned_timestamp_option, missing_bpf_rights, ones_complement_sum, skip_if,
    tcp_header_offset, timestamp_option,
};

/// Offset of the IP header (20 bytes without options) in a frame, in bytes.
const IP_HEADER_OFFSET: usize = 14;
const TCP_HEADER_OFFSET: usize = IP_HEADER_OFFSET + 20;
const TCP_OPTIONS_OFFSET: usize = TCP_HEADER_OFFSET + 20;

/// Returns a load balancer with one service, one of its servers, and a packet of a connection to that server.
fn balancer_with_established_packet() -> (TestBalancer, ServerId, TcpPacket) {
    let mut rng = seeded_rng(21, 0);
    let mut balancer = TestBalancer::new(&[VIP], &mut rng);
    let server_ids = balancer.replace_servers(0, 5, &mut rng);
    balancer.install_table(0, &random_placement_table(PlacementRule::Table, 1, 1, &server_ids, &mut rng));
    let tsecr = cookie::stamp_tsval(
        &balancer.fleet_keys,
        &support::FOREIGN_TIME_KEY,
        &FourTuple::ipv4(CLIENT_ENDPOINT, VIP),
        Cookie::Server(server_ids[2]),
        12_345,
    );
    let packet = TcpPacket { tcp_options: aligned_timestamp_option(1, tsecr), ..TcpPacket::new(CLIENT_ENDPOINT, VIP) };
    (balancer, server_ids[2], packet)
}

fn frame_with_changed_bytes(frame: &[u8], offset: usize, bytes: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    frame[offset..offset + bytes.len()].copy_from_slice(bytes);
    frame
}

#[test]
fn packet_to_no_service_passes_unchanged() {
    skip_if!(missing_bpf_rights());
    let (balancer, _, packet) = balancer_with_established_packet();
    let frame = packet.to_frame();
    let mut foreign_frames = vec![
        ("ARP", frame_with_changed_bytes(&frame, 12, &[8, 6])),
        ("IPv6", frame_with_changed_bytes(&frame, 12, &[0x86, 0xdd])),
        ("VLAN-tagged", [&frame[..12], &[0x81, 0, 0, 5], &frame[12..]].concat()),
        ("UDP", frame_with_changed_bytes(&frame, IP_HEADER_OFFSET + 9, &[17])),
        ("ICMP", frame_with_changed_bytes(&frame, IP_HEADER_OFFSET + 9, &[1])),
        ("another address", frame_with_changed_bytes(&frame, IP_HEADER_OFFSET + 16, &[10, 200, 0, 2])),
        ("another port", frame_with_changed_bytes(&frame, TCP_HEADER_OFFSET + 2, &[0, 81])),
        ("port 0", frame_with_changed_bytes(&frame, TCP_HEADER_OFFSET + 2, &[0, 0])),
        ("the broadcast MAC address", frame_with_changed_bytes(&frame, 0, &[0xff; 6])),
        ("another MAC address", frame_with_changed_bytes(&frame, 0, &[0, 0, 0, 0, 0, 1])),
        (
            "a fragment to another address",
            frame_with_changed_bytes(
                &frame_with_changed_bytes(&frame, IP_HEADER_OFFSET + 16, &[10, 200, 0, 2]),
                IP_HEADER_OFFSET + 6,
                &[0x20, 0],
            ),
        ),
        (
            "a bad header length to another address",
            frame_with_changed_bytes(
                &frame_with_changed_bytes(&frame, IP_HEADER_OFFSET + 16, &[1, 2, 3, 4]),
                IP_HEADER_OFFSET,
                &[0x41],
            ),
        ),
    ];
    // Frames that end before the destination address have no service.
    foreign_frames.extend((14..IP_HEADER_OFFSET + 20).map(|length| ("cut in the IP header", frame[..length].to_vec())));
    let syn_frame = TcpPacket { flags: SYN, ..packet.clone() }.to_frame();
    foreign_frames
        .push(("SYN to another port", frame_with_changed_bytes(&syn_frame, TCP_HEADER_OFFSET + 2, &[1, 187])));
    foreign_frames.push(("SYN to port 0", frame_with_changed_bytes(&syn_frame, TCP_HEADER_OFFSET + 2, &[0, 0])));
    for (case_name, frame) in foreign_frames {
        println!("{case_name}");
        balancer.expect_passed_uncounted(&frame);
    }
}

#[test]
fn truncated_frames_are_dropped_and_counted() {
    skip_if!(missing_bpf_rights());
    let (balancer, _, packet) = balancer_with_established_packet();
    let complete_packets =
        [packet.clone(), TcpPacket { flags: SYN, ..packet.clone() }, TcpPacket { ip_options: vec![1; 8], ..packet }];
    for frame in complete_packets.map(|packet| packet.to_frame()) {
        // The total length in the IP header exceeds the frame.
        for length in IP_HEADER_OFFSET + 20..frame.len() {
            balancer.expect_unforwarded_without_service(&frame[..length], XDP_DROP, "drop_malformed_ipv4");
        }
    }
}

#[test]
fn packets_with_truncated_headers_are_dropped_and_counted() {
    skip_if!(missing_bpf_rights());
    let (balancer, server, packet) = balancer_with_established_packet();
    for packet in [packet.clone(), TcpPacket { flags: SYN, ..packet }] {
        let frame = packet.to_frame();
        let header_bytes = 20 + 20 + 12;
        for total_length in 0..header_bytes as u16 {
            // The frame has all bytes (Ethernet pads short frames), but the total length in the IP header is smaller.
            let frame = frame_with_changed_bytes(&frame, IP_HEADER_OFFSET + 2, &total_length.to_be_bytes());
            match total_length {
                0..20 => balancer.expect_unforwarded_without_service(&frame, XDP_DROP, "drop_malformed_ipv4"),
                20..24 => balancer.expect_unforwarded_without_service(&frame, XDP_DROP, "drop_malformed_tcp"),
                _ => balancer.expect_unforwarded(&frame, XDP_DROP, 0, "drop_malformed_tcp"),
            }
        }
        let headers_only_frame =
            frame_with_changed_bytes(&frame, IP_HEADER_OFFSET + 2, &(header_bytes as u16).to_be_bytes());
        if packet.flags == SYN {
            assert_eq!(balancer.process_frame(&headers_only_frame).0, XDP_TX);
        } else {
            balancer.expect_sent_to(0, &headers_only_frame, server, "established");
        }
    }
}

#[test]
fn invalid_ip_headers_and_fragments_are_dropped_and_counted() {
    skip_if!(missing_bpf_rights());
    let (balancer, server, packet) = balancer_with_established_packet();
    let frame = packet.to_frame();
    for version_and_length in 0..=255u8 {
        let (version, header_words) = (version_and_length >> 4, version_and_length & 0xf);
        if version_and_length == 0x45 {
            continue;
        }
        let frame = frame_with_changed_bytes(&frame, IP_HEADER_OFFSET, &[version_and_length]);
        if version != 4 || header_words < 5 || 4 * usize::from(header_words) > frame.len() - IP_HEADER_OFFSET {
            balancer.expect_unforwarded_without_service(&frame, XDP_DROP, "drop_malformed_ipv4");
        } else {
            // The longer header covers the ports. Other bytes are read as ports, and some of them are port 80.
            let (xdp_action, output_frame) = balancer.process_frame(&frame);
            assert!(xdp_action == XDP_PASS || xdp_action == XDP_DROP, "{header_words} words: {xdp_action}");
            assert_eq!(output_frame, frame);
        }
    }
    for fragment in 0..=0xffffu16 {
        if fragment % 257 != 0 && fragment.count_ones() != 1 {
            continue;
        }
        let frame = frame_with_changed_bytes(&frame, IP_HEADER_OFFSET + 6, &fragment.to_be_bytes());
        // A packet is a fragment if any bit is set except the reserved bit and "don't fragment".
        if fragment & 0x3fff != 0 {
            balancer.expect_unforwarded_without_service(&frame, XDP_DROP, "drop_fragment");
        } else {
            balancer.expect_sent_to(0, &frame, server, "established");
        }
    }
    // A later fragment has payload in place of the ports.
    let later_fragment = frame_with_changed_bytes(
        &frame_with_changed_bytes(&frame, IP_HEADER_OFFSET + 6, &[0, 185]),
        TCP_HEADER_OFFSET,
        &[0xaa; 8],
    );
    balancer.expect_unforwarded_without_service(&later_fragment, XDP_DROP, "drop_fragment");
}

#[test]
fn invalid_tcp_data_offsets_are_dropped_and_counted() {
    skip_if!(missing_bpf_rights());
    let (balancer, server, packet) = balancer_with_established_packet();
    for flags in [ACK, SYN] {
        let packet = TcpPacket { flags, payload: vec![0; 4], ..packet.clone() };
        let frame = packet.to_frame();
        for header_words in 0..16u8 {
            let frame = frame_with_changed_bytes(&frame, TCP_HEADER_OFFSET + 12, &[header_words << 4]);
            let expected_counter = match (header_words, flags) {
                // The segment has 32 bytes of header and 4 of payload.
                (0..5 | 10.., _) => "drop_malformed_tcp",
                // The timestamp is outside the header, which then has no options at all, only NOPs, or a cut option.
                (5, _) => "bucket_hash",
                (6 | 7, _) => "drop_malformed_tcp",
                (_, SYN) => "new_connection",
                (_, _) => "established",
            };
            match expected_counter {
                "drop_malformed_tcp" => balancer.expect_unforwarded(&frame, XDP_DROP, 0, expected_counter),
                "established" => balancer.expect_sent_to(0, &frame, server, expected_counter),
                _ => assert_eq!(balancer.process_frame(&frame).0, XDP_TX, "{header_words} words, flags {flags:#x}"),
            }
        }
    }
}

/// Returns the timestamp option of `packet`, without the no-operation options that align it.
fn unaligned_timestamp_option(packet: &TcpPacket) -> Vec<u8> {
    let tsecr = u32::from_be_bytes(packet.tcp_options[8..12].try_into().unwrap());
    timestamp_option(1, tsecr)
}

#[test]
fn malformed_tcp_options_are_dropped_and_counted() {
    skip_if!(missing_bpf_rights());
    let (balancer, _, packet) = balancer_with_established_packet();
    let valid_timestamp = unaligned_timestamp_option(&packet);
    let malformed_options: Vec<(&str, Vec<u8>)> = vec![
        ("length 0", vec![3, 0, 0, 0]),
        ("length 1", vec![3, 1, 0, 0]),
        ("beyond the header", vec![3, 5, 0, 0]),
        ("far beyond the header", vec![1, 1, 1, 254, 255, 0, 0, 0]),
        ("a kind without its length", vec![1, 1, 1, 3]),
        ("a timestamp of 0 bytes", vec![8, 0, 0, 0]),
        ("a timestamp cut short", vec![1, 1, 8, 10, 1, 2, 3, 4]),
        ("length 1 before a good timestamp", [&[254, 1][..], &valid_timestamp].concat()),
        ("length 0 at the very end", [&[1; 38][..], &[254, 0]].concat()),
    ];
    for flags in [ACK, SYN, RST, ACK | FIN] {
        for (case_name, options) in &malformed_options {
            println!("{case_name}, flags {flags:#x}");
            let frame = TcpPacket { flags, tcp_options: options.clone(), ..packet.clone() }.to_frame();
            balancer.expect_unforwarded(&frame, XDP_DROP, 0, "drop_malformed_tcp");
        }
    }
}

/// The program ignores malformed options after the timestamp.
#[test]
fn timestamp_option_is_found_at_every_offset() {
    skip_if!(missing_bpf_rights());
    let (balancer, server, packet) = balancer_with_established_packet();
    let valid_timestamp = unaligned_timestamp_option(&packet);
    for leading_length in 0..=28 {
        let bytes_after_end = [254, 0, 7, 7];
        for leading_options in [vec![1; leading_length], tcp_options_without_timestamp(leading_length)] {
            let mut options = [&leading_options[..], &valid_timestamp].concat();
            options.extend(&bytes_after_end[..4.min(40 - options.len()).min(2)]);
            let frame = TcpPacket { tcp_options: options, ..packet.clone() }.to_frame();
            balancer.expect_sent_to(0, &frame, server, "established");
        }
    }
}

/// Checks timestamps after the end of options, and of a wrong length. Linux also ignores them (tcp_parse_options()).
#[test]
fn misplaced_or_wrongly_sized_timestamps_are_ignored() {
    skip_if!(missing_bpf_rights());
    let (balancer, _, packet) = balancer_with_established_packet();
    let valid_timestamp = unaligned_timestamp_option(&packet);
    let options_without_timestamp = [
        [&[0, 0][..], &valid_timestamp].concat(),
        [&[8, 9][..], &valid_timestamp[2..9]].concat(),
        [&[8, 12][..], &valid_timestamp[2..], &[0, 0]].concat(),
    ];
    let table = balancer.newest_table.as_ref().unwrap();
    for (port, options) in (1..).zip(options_without_timestamp) {
        let tuple = FourTuple::ipv4((CLIENT_ENDPOINT.0, port), VIP);
        let (chosen_server, previous_server) =
            (table.select_consistent_server(&tuple).unwrap(), previous_server(table, &tuple));
        let frame = TcpPacket { tcp_options: options, ..TcpPacket::new((CLIENT_ENDPOINT.0, port), VIP) }.to_frame();
        balancer.expect_sent_with_identification(
            0,
            &frame,
            chosen_server,
            ExpectedIdentification::PreviousServer(previous_server),
            "bucket_hash",
        );
    }
}

/// Returns `length` bytes of TCP options other than timestamp and end of options. For 1 byte, it is a no-operation.
fn tcp_options_without_timestamp(length: usize) -> Vec<u8> {
    match length {
        0 => vec![],
        1 => vec![1],
        3 => vec![253, 3, 8],
        _ => [&[253, 2][..], &tcp_options_without_timestamp(length - 2)].concat(),
    }
}

#[test]
fn invalid_tcp_flags_are_dropped_and_counted() {
    skip_if!(missing_bpf_rights());
    let (balancer, server, packet) = balancer_with_established_packet();
    for flags in 0..=255u8 {
        let frame = TcpPacket { flags, ..packet.clone() }.to_frame();
        let frame_without_timestamp = TcpPacket { flags, tcp_options: vec![], ..packet.clone() }.to_frame();
        let is_invalid = if flags & SYN != 0 { flags & (ACK | FIN | RST) != 0 } else { flags & (ACK | RST) == 0 };
        if is_invalid {
            balancer.expect_unforwarded(&frame, XDP_DROP, 0, "drop_malformed_tcp");
            balancer.expect_unforwarded(&frame_without_timestamp, XDP_DROP, 0, "drop_malformed_tcp");
        } else if flags & SYN != 0 {
            assert_eq!(balancer.process_frame(&frame).0, XDP_TX, "flags {flags:#x}");
        } else {
            balancer.expect_sent_to(0, &frame, server, "established");
            if flags & RST != 0 {
                let frame_without_timestamp =
                    TcpPacket { flags, tcp_options: vec![], ..TcpPacket::new((CLIENT_ENDPOINT.0, 1), VIP) }.to_frame();
                let no_server_identification = ExpectedIdentification::PreviousServer(None);
                balancer.expect_broadcast_or_dropped(
                    0,
                    &frame_without_timestamp,
                    no_server_identification,
                    "drop_broadcast_rate_limited",
                );
            }
        }
    }
}

/// Returns the frame of `packet` with up to four bytes replaced by random ones. If `round` is a multiple of 5,
/// truncates the frame. If it is a multiple of 7, all bytes after the Ethernet header are random.
fn random_frame(packet: &TcpPacket, round: u64, rng: &mut impl rand::Rng) -> Vec<u8> {
    let mut frame = TcpPacket {
        flags: [ACK, SYN, RST][uniform_below(rng, 3) as usize],
        ip_options: vec![1; 4 * uniform_below(rng, 3) as usize],
        ..packet.clone()
    }
    .to_frame();
    for _ in 0..=uniform_below(rng, 4) {
        let changed_offset =
            IP_HEADER_OFFSET + uniform_below(rng, (TCP_OPTIONS_OFFSET + 12 - IP_HEADER_OFFSET) as u32) as usize;
        frame[changed_offset] = rng.next_u32() as u8;
    }
    if round.is_multiple_of(5) {
        frame.truncate(14 + uniform_below(rng, frame.len() as u32 - 13) as usize);
    }
    if round.is_multiple_of(7) {
        rng.fill_bytes(&mut frame[14..]);
    }
    frame
}

/// Asserts that the frames differ only in the MAC addresses, the IP identification and the IP checksum.
fn expect_only_identification_changed(output_frame: &[u8], frame: &[u8]) {
    assert_eq!(output_frame[12..18], frame[12..18]);
    assert_eq!(output_frame[20..24], frame[20..24]);
    assert_eq!(output_frame[26..], frame[26..]);
    // Identification and checksum change together, so that the header's sum stays the same, right or wrong.
    let ip_header_sum = |frame: &[u8]| ones_complement_sum(&frame[IP_HEADER_OFFSET..tcp_header_offset(frame)]) % 0xffff;
    assert_eq!(ip_header_sum(output_frame), ip_header_sum(frame));
}

/// Random frames, and valid packets with random bytes, have exactly one outcome each. The program changes only their
/// MAC addresses and IP identification.
#[test]
fn random_frames_have_one_outcome_and_stay_unchanged() {
    skip_if!(missing_bpf_rights());
    let (balancer, _, packet) = balancer_with_established_packet();
    let mut rng = seeded_rng(22, 0);
    let read_total_packet_count = |balancer: &TestBalancer| -> u64 {
        let service_packets = balancer.lb.service_counters(balancer.service_indexes[0]).packets_by_outcome;
        service_packets.iter().chain(&balancer.lb.counters_without_service().packets_by_outcome).sum()
    };
    for round in 0..20_000u64 {
        let frame = random_frame(&packet, round, &mut rng);
        let (xdp_action, output_frame) = balancer.process_frame(&frame);
        match xdp_action {
            XDP_TX => expect_only_identification_changed(&output_frame, &frame),
            XDP_PASS | XDP_DROP => assert_eq!(output_frame, frame),
            other => panic!("verdict {other}"),
        }
        if round % 1000 == 0 {
            assert_eq!(read_total_packet_count(&balancer), round + 1);
        }
    }
    let internal_drop_counter = coreward_intf::LB_COUNTER_DROP_INTERNAL as usize;
    assert_eq!(balancer.lb.service_counters(balancer.service_indexes[0]).packets_by_outcome[internal_drop_counter], 0);
}
