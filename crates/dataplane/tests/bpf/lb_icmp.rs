//! Tests of `bpf/lb/lb.bpf.c` (`BPF_PROG_TEST_RUN`) with ICMP errors, which go to the server whose packet they quote.

use std::net::Ipv4Addr;

use coreward_dataplane::lb::{LoadBalancerOptions, Server};
use coreward_model::consistency::{ConsistencyMode, CookieStamper, ServiceSettings};
use coreward_model::cookie::{self, Cookie};
use coreward_model::placement::PlacementRule;
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_model::tuple::TransportProtocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use rand::Rng as _;

use crate::support::balancer::{
    CLIENT_ENDPOINT, ExpectedIdentification, TestBalancer, VIP, XDP_DROP, random_placement_table, service_address,
};
use crate::support::{
    self, ACK, SYN, TcpPacket, UdpDatagram, aligned_timestamp_option, ipv4_frame, missing_bpf_rights, skip_if,
    timestamp_option,
};

/// Address of a router between client and VIP that sends ICMP errors.
const ROUTER_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// Offset of the IP header in a frame, in bytes. The IP header has 20 bytes.
const IP_HEADER_OFFSET: usize = 14;
const ICMP_HEADER_OFFSET: usize = IP_HEADER_OFFSET + 20;
const QUOTED_PACKET_OFFSET: usize = ICMP_HEADER_OFFSET + 8;

const UNCHANGED_IDENTIFICATION: ExpectedIdentification = ExpectedIdentification::Unchanged;

fn ip_packet_in_frame(frame: &[u8]) -> Vec<u8> {
    frame[14..].to_vec()
}

/// Returns an IP packet from a server to the client, which an ICMP error can quote.
fn quotable_server_packet(options: Vec<u8>, ip_options: Vec<u8>) -> Vec<u8> {
    ip_packet_in_frame(
        &TcpPacket { tcp_options: options, ip_options, payload: vec![9; 64], ..TcpPacket::new(VIP, CLIENT_ENDPOINT) }
            .to_frame(),
    )
}

/// Returns the frame of an ICMP error of type `kind` and code 4 that quotes `quoted_packet`. Type 3 means
/// "fragmentation needed".
fn icmp_error_frame(kind: u8, quoted_packet: &[u8]) -> Vec<u8> {
    let icmp_message = [&[kind, 4, 0, 0, 0, 0, 5, 0][..], quoted_packet].concat();
    ipv4_frame(1, [ROUTER_ADDRESS, VIP.0], &[], [0x77, 0], &icmp_message)
}

fn balancer_with_servers(mode: ServiceSettings) -> (TestBalancer, Vec<ServerId>) {
    let mut rng = seeded_rng(71, 0);
    let mut balancer =
        TestBalancer::with_model(&[(service_address(VIP), mode)], LoadBalancerOptions::default(), &mut rng);
    let server_ids = balancer.replace_servers(0, 5, &mut rng);
    balancer.install_table(0, &random_placement_table(PlacementRule::Table, 1, 1, &server_ids, &mut rng));
    (balancer, server_ids)
}

fn client_four_tuple() -> FourTuple {
    FourTuple::ipv4(CLIENT_ENDPOINT, VIP)
}

fn tsval_with_cookie(balancer: &TestBalancer, server: ServerId) -> u32 {
    cookie::stamp_tsval(
        &balancer.fleet_keys,
        &support::FOREIGN_TIME_KEY,
        &client_four_tuple(),
        Cookie::Server(server),
        12_345,
    )
}

#[test]
fn icmp_error_goes_to_the_server_in_the_quoted_cookie() {
    skip_if!(missing_bpf_rights());
    let (mut balancer, ids) = balancer_with_servers(ServiceSettings::default());
    let cookie_value = tsval_with_cookie(&balancer, ids[3]);
    let aligned_option = aligned_timestamp_option(cookie_value, 7);
    let unaligned_option = [&[1][..], &timestamp_option(cookie_value, 7), &[0]].concat();
    let syn_ack_options = [&[2, 4, 5, 0xb4, 4, 2][..], &timestamp_option(cookie_value, 7), &[1, 3, 3, 7]].concat();
    for kind in [3, 11, 12] {
        for options in [&aligned_option, &unaligned_option, &syn_ack_options] {
            for ip_options in [vec![], vec![1; 40]] {
                let quoted_packet = quotable_server_packet(options.clone(), ip_options);
                balancer.expect_sent_to(0, &icmp_error_frame(kind, &quoted_packet), ids[3], "icmp_error");
            }
        }
    }
    // The server is also found with options in the outer IP header, and with a quote that ends at the timestamp.
    let quoted_packet = quotable_server_packet(aligned_option.clone(), vec![]);
    let icmp_message = [&[3, 4, 0, 0, 0, 0, 5, 0][..], &quoted_packet].concat();
    let frame = ipv4_frame(1, [ROUTER_ADDRESS, VIP.0], &[1; 8], [0x77, 0], &icmp_message);
    balancer.expect_sent_to(0, &frame, ids[3], "icmp_error");
    balancer.expect_sent_to(0, &icmp_error_frame(3, &quoted_packet[..20 + 32]), ids[3], "icmp_error");

    balancer.lb.set_server(balancer.service_indexes[0], ids[3], Server { mac: None, is_eligible: true });
    balancer.expect_unforwarded(&icmp_error_frame(3, &quoted_packet), XDP_DROP, 0, "drop_server_unresolved");
    balancer.lb.remove_server(balancer.service_indexes[0], ids[3]);
    balancer.expect_broadcast_or_dropped(
        0,
        &icmp_error_frame(3, &quoted_packet),
        UNCHANGED_IDENTIFICATION,
        "drop_broadcast_rate_limited",
    );
}

#[test]
fn icmp_errors_without_cookie_follow_flow_table_or_are_broadcast() {
    skip_if!(missing_bpf_rights());
    let (balancer, ids) = balancer_with_servers(ServiceSettings::default());
    let cookie_value = tsval_with_cookie(&balancer, ids[2]);
    let complete_quote = quotable_server_packet(aligned_timestamp_option(cookie_value, 7), vec![]);
    let quote_without_timestamp = quotable_server_packet(vec![], vec![]);
    let quote_with_bad_options = quotable_server_packet(vec![3, 1, 0, 0], vec![]);
    // Quotes lack the timestamp. The shortest has the IP header and 8 bytes, as RFC 792 requires.
    let truncated_quotes: Vec<Vec<u8>> = (28..52).map(|length| complete_quote[..length].to_vec()).collect();
    let mut quote_with_bad_data_offset = complete_quote.clone();
    quote_with_bad_data_offset[20 + 12] = 0x40;
    let quotes: Vec<_> = truncated_quotes
        .into_iter()
        .chain([quote_without_timestamp, quote_with_bad_options, quote_with_bad_data_offset])
        .collect();
    for quote in &quotes {
        balancer.expect_broadcast_or_dropped(
            0,
            &icmp_error_frame(3, quote),
            UNCHANGED_IDENTIFICATION,
            "drop_broadcast_rate_limited",
        );
    }
    // After a packet of the connection, the flow table contains its server.
    let chosen_server = balancer.newest_table.as_ref().unwrap().select_consistent_server(&client_four_tuple()).unwrap();
    balancer.process_frame_expecting_counter(
        &TcpPacket { flags: ACK, ..TcpPacket::new(CLIENT_ENDPOINT, VIP) }.to_frame(),
        Some(0),
        "bucket_hash",
    );
    for quote in &quotes {
        balancer.expect_sent_to(0, &icmp_error_frame(3, quote), chosen_server, "icmp_error");
    }
    balancer.expect_sent_to(0, &icmp_error_frame(3, &complete_quote), ids[2], "icmp_error");
}

#[test]
fn icmp_errors_with_random_timestamps_reach_known_servers_or_are_broadcast() {
    skip_if!(missing_bpf_rights());
    let (mut balancer, _) = balancer_with_servers(ServiceSettings::default());
    let mut rng = seeded_rng(72, 0);
    let server_ids = balancer.replace_servers(0, 8192, &mut rng);
    let mut packet_counts_by_outcome = [0; 2];
    for _ in 0..500 {
        let random_value = rng.next_u32();
        let frame = icmp_error_frame(3, &quotable_server_packet(aligned_timestamp_option(random_value, 7), vec![]));
        match cookie::decode_cookie(&balancer.fleet_keys, &client_four_tuple(), random_value) {
            Cookie::Server(server) if server_ids.contains(&server) => {
                packet_counts_by_outcome[0] += 1;
                balancer.expect_sent_to(0, &frame, server, "icmp_error");
            }
            _ => {
                packet_counts_by_outcome[1] += 1;
                balancer.expect_broadcast_or_dropped(
                    0,
                    &frame,
                    UNCHANGED_IDENTIFICATION,
                    "drop_broadcast_rate_limited",
                );
            }
        }
    }
    assert!(packet_counts_by_outcome.iter().all(|count| *count > 50), "{packet_counts_by_outcome:?}");
}

#[test]
fn icmp_errors_without_cookie_follow_the_services_consistency_mode() {
    skip_if!(missing_bpf_rights());
    let timestamps_off_mode = ServiceSettings { timestamps: CookieStamper::Off, ..ServiceSettings::default() };
    let other_consistencies = [ConsistencyMode::None, ConsistencyMode::HashTable, ConsistencyMode::Beamer];
    let modes = other_consistencies.map(|consistency| ServiceSettings { consistency, ..ServiceSettings::default() });
    for mode in modes.into_iter().chain([timestamps_off_mode]) {
        let (balancer, ids) = balancer_with_servers(mode);
        let frame = icmp_error_frame(
            3,
            &quotable_server_packet(aligned_timestamp_option(tsval_with_cookie(&balancer, ids[1]), 7), vec![]),
        );
        balancer.expect_broadcast_or_dropped(0, &frame, UNCHANGED_IDENTIFICATION, "drop_broadcast_rate_limited");
        // A connection is found only by a flow table entry, and not if its rule or bucket would place it.
        let client_packet =
            TcpPacket { tcp_options: aligned_timestamp_option(1, 2), ..TcpPacket::new(CLIENT_ENDPOINT, VIP) };
        balancer.process_frame(&TcpPacket { flags: SYN, ..client_packet.clone() }.to_frame());
        let destination = balancer.forward_frame(&client_packet.to_frame());
        let uses_flow_table = mode == timestamps_off_mode || mode.consistency == ConsistencyMode::HashTable;
        if uses_flow_table {
            let server = *ids.iter().find(|id| balancer.server_macs[&(0, **id)] == destination).unwrap();
            balancer.expect_sent_to(0, &frame, server, "icmp_error");
        } else {
            balancer.expect_broadcast_or_dropped(0, &frame, UNCHANGED_IDENTIFICATION, "drop_broadcast_rate_limited");
        }
    }
}

#[test]
fn icmp_errors_about_datagrams_follow_the_udp_flow() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(73, 0);
    let udp_address = ServiceAddress { protocol: TransportProtocol::Udp, ..service_address(VIP) };
    for consistency in [ConsistencyMode::HashTable, ConsistencyMode::None] {
        let mode = ServiceSettings { consistency, ..ServiceSettings::default_for_protocol(TransportProtocol::Udp) };
        let mut balancer = TestBalancer::with_model(&[(udp_address, mode)], LoadBalancerOptions::default(), &mut rng);
        let server_ids = balancer.replace_servers(0, 5, &mut rng);
        balancer.install_table(0, &random_placement_table(PlacementRule::Table, 1, 1, &server_ids, &mut rng));
        let frame = icmp_error_frame(3, &ip_packet_in_frame(&UdpDatagram::new(VIP, CLIENT_ENDPOINT).to_frame()));
        balancer.expect_broadcast_or_dropped(0, &frame, UNCHANGED_IDENTIFICATION, "drop_broadcast_rate_limited");
        let destination = balancer.forward_frame(&UdpDatagram::new(CLIENT_ENDPOINT, VIP).to_frame());
        if consistency == ConsistencyMode::HashTable {
            let server = *server_ids.iter().find(|id| balancer.server_macs[&(0, **id)] == destination).unwrap();
            balancer.expect_sent_to(0, &frame, server, "icmp_error");
        } else {
            balancer.expect_broadcast_or_dropped(0, &frame, UNCHANGED_IDENTIFICATION, "drop_broadcast_rate_limited");
        }
        balancer.expect_passed_uncounted(&icmp_error_frame(3, &quotable_server_packet(vec![], vec![])));
    }
}

#[test]
fn icmp_error_about_an_unknown_service_passes_unchanged() {
    skip_if!(missing_bpf_rights());
    let (balancer, ids) = balancer_with_servers(ServiceSettings::default());
    let quoted_packet =
        quotable_server_packet(aligned_timestamp_option(tsval_with_cookie(&balancer, ids[0]), 7), vec![]);
    let valid_frame = icmp_error_frame(3, &quoted_packet);
    balancer.expect_sent_to(0, &valid_frame, ids[0], "icmp_error");
    let frame_with_changed_bytes = |offset: usize, bytes: &[u8]| {
        let mut frame = valid_frame.clone();
        frame[offset..offset + bytes.len()].copy_from_slice(bytes);
        frame
    };
    let mut passed_frames = vec![
        ("about another address", frame_with_changed_bytes(QUOTED_PACKET_OFFSET + 12, &[10, 200, 0, 2])),
        ("about another port", frame_with_changed_bytes(QUOTED_PACKET_OFFSET + 20, &[0, 81])),
        ("about another protocol", frame_with_changed_bytes(QUOTED_PACKET_OFFSET + 9, &[47])),
        ("about UDP", frame_with_changed_bytes(QUOTED_PACKET_OFFSET + 9, &[17])),
        ("about a later fragment", frame_with_changed_bytes(QUOTED_PACKET_OFFSET + 6, &[0, 1])),
        ("to another address", frame_with_changed_bytes(IP_HEADER_OFFSET + 16, &[10, 200, 0, 2])),
        ("a fragment itself", frame_with_changed_bytes(IP_HEADER_OFFSET + 6, &[0x20, 0])),
        ("a later fragment itself", frame_with_changed_bytes(IP_HEADER_OFFSET + 6, &[0, 3])),
    ];
    // An error about a first fragment is forwarded, because that fragment contains the ports.
    balancer.expect_sent_to(0, &frame_with_changed_bytes(QUOTED_PACKET_OFFSET + 6, &[0x20, 0]), ids[0], "icmp_error");
    passed_frames.extend(
        (0..=255u8)
            .filter(|kind| ![3, 11, 12].contains(kind))
            .map(|kind| ("another type", frame_with_changed_bytes(ICMP_HEADER_OFFSET, &[kind]))),
    );
    for (case_name, frame) in passed_frames {
        println!("{case_name}");
        balancer.expect_passed_uncounted(&frame);
    }
}

/// Returns a load balancer, and the frame of an ICMP error that quotes a packet with a cookie.
fn balancer_and_icmp_error_frame() -> (TestBalancer, Vec<u8>) {
    let (balancer, ids) = balancer_with_servers(ServiceSettings::default());
    let quoted_packet =
        quotable_server_packet(aligned_timestamp_option(tsval_with_cookie(&balancer, ids[0]), 7), vec![]);
    let valid_frame = icmp_error_frame(3, &quoted_packet);
    (balancer, valid_frame)
}

fn expect_no_internal_drop(balancer: &TestBalancer) {
    let internal_drop_counter = coreward_intf::LB_COUNTER_DROP_INTERNAL as usize;
    assert_eq!(balancer.lb.service_counters(balancer.service_indexes[0]).packets_by_outcome[internal_drop_counter], 0);
}

#[test]
fn malformed_icmp_errors_are_dropped_and_counted() {
    skip_if!(missing_bpf_rights());
    let (balancer, valid_frame) = balancer_and_icmp_error_frame();
    // The outer IP packet ends before the quote has 8 bytes after its IP header.
    for total_length in 0..20 + 8 + 28u16 {
        let mut frame = valid_frame.clone();
        frame[IP_HEADER_OFFSET + 2..IP_HEADER_OFFSET + 4].copy_from_slice(&total_length.to_be_bytes());
        let drop_counter = if total_length < 20 { "drop_malformed_ipv4" } else { "drop_malformed_icmp" };
        balancer.expect_unforwarded_without_service(&frame, XDP_DROP, drop_counter);
    }
    for truncated_length in IP_HEADER_OFFSET + 20..valid_frame.len() {
        balancer.expect_unforwarded_without_service(&valid_frame[..truncated_length], XDP_DROP, "drop_malformed_ipv4");
    }
    for version_and_length in (0..=255u8).filter(|byte| *byte != 0x45) {
        let mut frame = valid_frame.clone();
        frame[QUOTED_PACKET_OFFSET] = version_and_length;
        let header_words = usize::from(version_and_length & 0xf);
        if version_and_length >> 4 != 4 || header_words < 5 {
            balancer.expect_unforwarded_without_service(&frame, XDP_DROP, "drop_malformed_icmp");
        } else {
            // The longer IP header covers the ports, so no service is found.
            balancer.expect_passed_uncounted(&frame);
        }
    }
    // The quoted IP header is longer than the quote.
    let short_quote = &quotable_server_packet(vec![], vec![])[..28];
    let mut frame = icmp_error_frame(3, short_quote);
    frame[QUOTED_PACKET_OFFSET] = 0x46;
    balancer.expect_unforwarded_without_service(&frame, XDP_DROP, "drop_malformed_icmp");
    expect_no_internal_drop(&balancer);
}

/// ICMP errors with random bytes have exactly one outcome each, and the program does not change the random bytes.
#[test]
fn random_icmp_errors_have_one_outcome_and_stay_unchanged() {
    skip_if!(missing_bpf_rights());
    let (balancer, valid_frame) = balancer_and_icmp_error_frame();
    let mut rng = seeded_rng(74, 0);
    for _ in 0..5_000 {
        let mut frame = valid_frame.clone();
        for _ in 0..=uniform_below(&mut rng, 4) {
            let changed_offset =
                ICMP_HEADER_OFFSET + uniform_below(&mut rng, (frame.len() - ICMP_HEADER_OFFSET) as u32) as usize;
            frame[changed_offset] = rng.next_u32() as u8;
        }
        let (_, output_frame) = balancer.process_frame(&frame);
        assert_eq!(output_frame[12..], frame[12..]);
    }
    expect_no_internal_drop(&balancer);
}
