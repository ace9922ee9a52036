//! Comparison of `bpf/lb/lb.bpf.c` with the model's tables and cookies for IPv6 VIPs.

use std::net::{Ipv4Addr, Ipv6Addr};

use coreward_dataplane::lb::{LoadBalancerOptions, Server};
use coreward_dataplane::mac::MacAddress;
use coreward_intf as intf;
use coreward_model::connection_table::ConnectionTableSize;
use coreward_model::consistency::{ConsistencyMode, ServiceMigration, ServiceSettings};
use coreward_model::cookie::{self, Cookie};
use coreward_model::placement::{PlacementRule, PlacementTableState};
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_model::tuple::TransportProtocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use rand::Rng as _;

use crate::support::balancer::{
    ExpectedIdentification, TestBalancer, XDP_DROP, previous_server, random_placement_table, server_id_from_number,
    service_address,
};
use crate::support::stateful::{STATEFUL_SERVICE_SETTINGS, read_cookie_index, tested_lb_owner_number};
use crate::support::{
    self, ACK, FIN, RST, SYN, TcpPacket, aligned_timestamp_option, ipv6_frame, missing_bpf_rights, skip_if,
    timestamp_option,
};

const VIP: (Ipv6Addr, u16) = (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0xc8, 1), 80);
const IPV4_VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 80);

fn random_client(rng: &mut impl rand::Rng) -> (Ipv6Addr, u16) {
    (Ipv6Addr::from(u128::from(rng.next_u64()) << 64 | u128::from(rng.next_u64())), rng.next_u32() as u16)
}

fn four_tuple_to_vip(client: (Ipv6Addr, u16)) -> FourTuple {
    FourTuple::ipv6(client, VIP)
}

fn frame_with_extension_headers(
    headers: &[(u8, Vec<u8>)],
    client: (Ipv6Addr, u16),
    flags: u8,
    options: Vec<u8>,
) -> Vec<u8> {
    let ipv4_endpoints_with_ports = ((Ipv4Addr::UNSPECIFIED, client.1), (Ipv4Addr::UNSPECIFIED, VIP.1));
    TcpPacket {
        flags,
        tcp_options: options,
        ..TcpPacket::new(ipv4_endpoints_with_ports.0, ipv4_endpoints_with_ports.1)
    }
    .to_ipv6_frame(client.0, VIP.0, headers)
}

fn client_frame(client: (Ipv6Addr, u16), flags: u8, options: Vec<u8>) -> Vec<u8> {
    frame_with_extension_headers(&[], client, flags, options)
}

fn syn_frame(client: (Ipv6Addr, u16)) -> Vec<u8> {
    client_frame(client, SYN, [&[2, 4, 5, 0xa0, 4, 2][..], &timestamp_option(77, 0), &[1, 3, 3, 7]].concat())
}

/// Returns a load balancer with an IPv6 and an IPv4 service. Service 0 has the IPv6 VIP.
fn dual_stack_balancer(rng: &mut impl rand::Rng) -> TestBalancer {
    let services =
        [service_address(VIP), service_address(IPV4_VIP)].map(|service| (service, ServiceSettings::default()));
    TestBalancer::with_model(&services, LoadBalancerOptions::default(), rng)
}

/// Returns lists of extension headers that the program skips to find the TCP header.
fn skippable_extension_headers() -> [Vec<(u8, Vec<u8>)>; 4] {
    let new_options_header = |number| (number, vec![0, 0, 1, 4, 0, 0, 0, 0]);
    // An atomic fragment contains the whole packet (RFC 6946). The authentication header has 24 bytes.
    let atomic_fragment_header = (44, vec![0, 0, 0, 0, 1, 2, 3, 4]);
    let authentication_header = (51, [&[0, 4][..], &[0; 22]].concat());
    [
        vec![new_options_header(0)],
        vec![new_options_header(60)],
        vec![new_options_header(0), new_options_header(43), atomic_fragment_header],
        vec![authentication_header],
    ]
}

#[test]
fn new_ipv6_connections_go_to_the_models_server() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(61, 0);
    let mut balancer = dual_stack_balancer(&mut rng);
    // The rules are in the outer loop, because each rule needs another variant of the program.
    for rule in PlacementRule::ALL {
        for (generation, groups) in [1, 2, 4].into_iter().enumerate() {
            let server_ids = balancer.replace_servers(0, 30, &mut rng);
            let table = random_placement_table(rule, generation as u64 + 1, groups, &server_ids, &mut rng);
            let mut placement_state = PlacementTableState::for_table(&table);
            placement_state.round_robin_counter = balancer.round_robin_connection_count;
            balancer.install_table(0, &table);
            for _ in 0..200 {
                let client = random_client(&mut rng);
                let chosen_server =
                    table.select_server(&mut placement_state, &four_tuple_to_vip(client)).expect("there are members");
                balancer.expect_sent_to(0, &syn_frame(client), chosen_server, "new_connection");
            }
            balancer.round_robin_connection_count = placement_state.round_robin_counter;
        }
    }
}

#[test]
fn ipv6_established_packets_follow_the_cookie() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(62, 0);
    let mut balancer = dual_stack_balancer(&mut rng);
    let server_ids = balancer.replace_servers(0, 300, &mut rng);
    for round in 0..1000 {
        if round % 250 == 0 {
            balancer.set_random_keys(&mut rng);
        }
        let client = random_client(&mut rng);
        let server = server_ids[uniform_below(&mut rng, server_ids.len() as u32) as usize];
        let tsecr = balancer.stamp_tsval_by_random_key(&four_tuple_to_vip(client), server, &mut rng);
        let unaligned_timestamp = [&[1][..], &timestamp_option(1, tsecr), &[0]].concat();
        let tcp_flags = [ACK, ACK | FIN, ACK | RST, RST][uniform_below(&mut rng, 4) as usize];
        for options in [aligned_timestamp_option(1, tsecr), unaligned_timestamp] {
            balancer.expect_sent_to(0, &client_frame(client, tcp_flags, options.clone()), server, "established");
            for headers in skippable_extension_headers() {
                let frame_after_headers = frame_with_extension_headers(&headers, client, tcp_flags, options.clone());
                balancer.expect_sent_to(0, &frame_after_headers, server, "established");
            }
        }
    }
}

#[test]
fn ipv6_packets_without_timestamps_contain_the_previous_server() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(63, 0);
    let mut balancer = dual_stack_balancer(&mut rng);
    let server_ids = balancer.replace_servers(0, 7, &mut rng);
    let table = random_placement_table(PlacementRule::Table, 1, 2, &server_ids, &mut rng);
    balancer.install_table(0, &table);
    for _ in 0..300 {
        let client = random_client(&mut rng);
        let chosen_server = table.select_consistent_server(&four_tuple_to_vip(client)).expect("one per bucket");
        let previous_server_identification =
            ExpectedIdentification::PreviousServer(previous_server(&table, &four_tuple_to_vip(client)));
        for (flags, name) in [(SYN, "bucket_hash"), (ACK, "bucket_hash"), (ACK | FIN, "flow_table")] {
            balancer.expect_sent_with_identification(
                0,
                &client_frame(client, flags, vec![]),
                chosen_server,
                previous_server_identification,
                name,
            );
        }
    }
}

#[test]
fn dual_stack_balancer_separates_address_families() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(64, 0);
    let mut balancer = dual_stack_balancer(&mut rng);
    let (ipv6_ids, ipv4_ids) = (balancer.replace_servers(0, 1, &mut rng), balancer.replace_servers(1, 1, &mut rng));
    balancer.install_table(0, &random_placement_table(PlacementRule::Table, 1, 1, &ipv6_ids, &mut rng));
    balancer.install_table(1, &random_placement_table(PlacementRule::Table, 1, 1, &ipv4_ids, &mut rng));
    balancer.expect_sent_to(0, &syn_frame(random_client(&mut rng)), ipv6_ids[0], "new_connection");
    let ipv4_syn = TcpPacket {
        flags: SYN,
        tcp_options: timestamp_option(1, 0),
        ..TcpPacket::new((Ipv4Addr::new(10, 1, 0, 7), 1), IPV4_VIP)
    };
    balancer.expect_sent_to(1, &ipv4_syn.to_frame(), ipv4_ids[0], "new_connection");
}

/// Returns a load balancer with servers in service 0, and a client of that service.
fn balancer_with_client() -> (TestBalancer, (Ipv6Addr, u16)) {
    let mut rng = seeded_rng(65, 0);
    let mut balancer = dual_stack_balancer(&mut rng);
    let server_ids = balancer.replace_servers(0, 3, &mut rng);
    balancer.install_table(0, &random_placement_table(PlacementRule::Table, 1, 1, &server_ids, &mut rng));
    (balancer, random_client(&mut rng))
}

/// Returns a copy of `frame` with `bytes` at `offset`.
fn frame_with_changed_bytes(frame: &[u8], offset: usize, bytes: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    frame[offset..offset + bytes.len()].copy_from_slice(bytes);
    frame
}

#[test]
fn malformed_ipv6_is_dropped_and_counted() {
    skip_if!(missing_bpf_rights());
    let (balancer, client) = balancer_with_client();
    let syn_with_changed_bytes =
        |offset: usize, bytes: &[u8]| frame_with_changed_bytes(&syn_frame(client), offset, bytes);
    let expect_drop = |frame: &[u8], name| balancer.expect_unforwarded_without_service(frame, XDP_DROP, name);
    expect_drop(&syn_with_changed_bytes(14, &[0x50]), "drop_malformed_ipv6");
    expect_drop(&syn_with_changed_bytes(18, &[0x7f, 0xff]), "drop_malformed_ipv6");
    // The chain of extension headers ends beyond the packet, or beyond the bytes that the program reads.
    expect_drop(&ipv6_frame([client.0, VIP.0], &[(0, vec![0, 0])], 6, &[]), "drop_malformed_ipv6");
    // The header of a later fragment ends after the packet, in the frame's padding.
    let mut later_fragment = ipv6_frame([client.0, VIP.0], &[(44, vec![0, 0, 0, 8, 0, 0, 0, 7])], 17, &[0; 8]);
    later_fragment[18..20].copy_from_slice(&7u16.to_be_bytes());
    expect_drop(&later_fragment, "drop_malformed_ipv6");
    let long_options_header = (60, [&[0, 9][..], &[0; 78]].concat());
    expect_drop(&frame_with_extension_headers(&[long_options_header], client, ACK, vec![]), "drop_extension_headers");
    // The program skips at most six extension headers, and treats a seventh as an unknown protocol.
    let new_options_header = |number| (number, vec![0, 0, 1, 4, 0, 0, 0, 0]);
    balancer.expect_passed_uncounted(&frame_with_extension_headers(
        &[0, 60, 43, 60, 60, 60, 60].map(new_options_header),
        client,
        ACK,
        vec![],
    ));
    let fragment_header = (44, vec![0, 0, 0, 1, 1, 2, 3, 4]);
    expect_drop(&frame_with_extension_headers(&[fragment_header], client, ACK, vec![]), "drop_fragment");
    balancer.expect_unforwarded(&syn_with_changed_bytes(54 + 12, &[0x40]), XDP_DROP, 0, "drop_malformed_tcp");
    balancer.expect_unforwarded(&syn_with_changed_bytes(54 + 13, &[SYN | FIN]), XDP_DROP, 0, "drop_malformed_tcp");
}

#[test]
fn ipv6_packets_for_the_own_host_pass() {
    skip_if!(missing_bpf_rights());
    let (balancer, client) = balancer_with_client();
    let syn_with_changed_bytes =
        |offset: usize, bytes: &[u8]| frame_with_changed_bytes(&syn_frame(client), offset, bytes);
    // Packets for the kernel have another VIP, another port, a multicast MAC address, or an echo request.
    balancer.expect_passed_uncounted(&syn_with_changed_bytes(39, &[7]));
    balancer.expect_passed_uncounted(&syn_with_changed_bytes(56, &[7]));
    balancer.expect_passed_uncounted(&syn_with_changed_bytes(0, &[0x33, 0x33]));
    balancer.expect_passed_uncounted(&ipv6_frame([client.0, VIP.0], &[], 58, &[128, 0, 0, 0, 0, 0, 0, 0]));
}

/// Returns an ICMPv6 error from `router` to the VIP that quotes `quoted_length` bytes of a packet from the VIP.
fn icmpv6_error_frame(
    kind: u8,
    router: Ipv6Addr,
    client: (Ipv6Addr, u16),
    options: Vec<u8>,
    quoted_length: usize,
) -> Vec<u8> {
    let ipv4_endpoints_with_ports = ((Ipv4Addr::UNSPECIFIED, VIP.1), (Ipv4Addr::UNSPECIFIED, client.1));
    let segment =
        TcpPacket { tcp_options: options, ..TcpPacket::new(ipv4_endpoints_with_ports.0, ipv4_endpoints_with_ports.1) }
            .to_ipv6_frame(VIP.0, client.0, &[]);
    let quoted_packet = &segment[14..];
    let icmp_message =
        [&[kind, 0, 0, 0, 0, 0, 5, 0][..], &quoted_packet[..quoted_length.min(quoted_packet.len())]].concat();
    ipv6_frame([router, VIP.0], &[], 58, &icmp_message)
}

/// Address of the router that sends the ICMPv6 errors.
const ICMPV6_ROUTER_ADDRESS: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 1);

#[test]
fn icmpv6_errors_reach_the_server_in_the_quoted_cookie() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(68, 0);
    let mut balancer = dual_stack_balancer(&mut rng);
    let server_ids = balancer.replace_servers(0, 300, &mut rng);
    for kind in 1..=4 {
        let client = random_client(&mut rng);
        let server = server_ids[uniform_below(&mut rng, 300) as usize];
        let cookie_value = cookie::stamp_tsval(
            &balancer.fleet_keys,
            &support::FOREIGN_TIME_KEY,
            &four_tuple_to_vip(client),
            Cookie::Server(server),
            rng.next_u32(),
        );
        let error_with_complete_quote = icmpv6_error_frame(
            kind,
            ICMPV6_ROUTER_ADDRESS,
            client,
            aligned_timestamp_option(cookie_value, 7),
            usize::MAX,
        );
        balancer.expect_sent_to(0, &error_with_complete_quote, server, "icmp_error");
        // An error whose quote lacks the timestamp is broadcast.
        let error_with_short_quote =
            icmpv6_error_frame(kind, ICMPV6_ROUTER_ADDRESS, client, aligned_timestamp_option(cookie_value, 7), 48);
        balancer.expect_broadcast_or_dropped(
            0,
            &error_with_short_quote,
            ExpectedIdentification::Unchanged,
            "drop_broadcast_rate_limited",
        );
    }
}

#[test]
fn malformed_icmpv6_errors_are_dropped_and_unrelated_errors_pass() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(68, 0);
    let mut balancer = dual_stack_balancer(&mut rng);
    balancer.replace_servers(0, 300, &mut rng);
    let error_without_cookie =
        icmpv6_error_frame(2, ICMPV6_ROUTER_ADDRESS, random_client(&mut rng), vec![], usize::MAX);
    balancer.expect_unforwarded_without_service(
        &icmpv6_error_frame(2, ICMPV6_ROUTER_ADDRESS, random_client(&mut rng), vec![], 47),
        XDP_DROP,
        "drop_malformed_icmp",
    );
    // Messages for the kernel are an echo request, a quote from another VIP, and a quote with extension headers.
    let error_with_changed_byte =
        |offset: usize, byte: u8| frame_with_changed_bytes(&error_without_cookie, offset, &[byte]);
    balancer.expect_passed_uncounted(&error_with_changed_byte(54, 128));
    balancer.expect_passed_uncounted(&error_with_changed_byte(62 + 8 + 15, 99));
    balancer.expect_passed_uncounted(&error_with_changed_byte(62 + 6, 60));
    balancer.expect_unforwarded_without_service(&error_with_changed_byte(62, 0x40), XDP_DROP, "drop_malformed_icmp");
    balancer.expect_unforwarded_without_service(&error_with_changed_byte(18, 0x40), XDP_DROP, "drop_malformed_ipv6");
}

#[test]
fn packets_of_stateful_ipv6_connections_find_their_entry() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(69, 0);
    let options = LoadBalancerOptions {
        connection_table_size: ConnectionTableSize::try_from(4096).unwrap(),
        ..LoadBalancerOptions::default()
    };
    let mut balancer =
        TestBalancer::with_model(&[(service_address(VIP), STATEFUL_SERVICE_SETTINGS)], options, &mut rng);
    let server_ids = balancer.replace_servers(0, 9, &mut rng);
    balancer.install_table(0, &random_placement_table(PlacementRule::RoundRobin, 1, 1, &server_ids, &mut rng));
    balancer.lb.set_owner_number(Some(tested_lb_owner_number()));
    for _ in 0..300 {
        let client = random_client(&mut rng);
        let (_, first_frame) = balancer.process_frame_expecting_counter(&syn_frame(client), Some(0), "new_connection");
        let cookie_index = read_cookie_index(&first_frame).expect("an entry");
        let mut client_entries =
            balancer.lb.connections(balancer.service_indexes[0]).filter(|entry| entry.client == client.into());
        let server = client_entries.next().expect("an entry of that client").identity.server;
        drop(client_entries);
        // The SYN is retransmitted, and packets follow on the fast and the slow path.
        let (_, repeated_frame) =
            balancer.process_frame_expecting_counter(&syn_frame(client), Some(0), "new_connection");
        assert_eq!(
            (&first_frame[..6], read_cookie_index(&repeated_frame)),
            (&balancer.server_macs[&(0, server)].0[..], Some(cookie_index))
        );
        let table_cookie = Cookie::TableIndex(cookie_index);
        let tsecr = cookie::stamp_tsval(
            &balancer.fleet_keys,
            &support::FOREIGN_TIME_KEY,
            &four_tuple_to_vip(client),
            table_cookie,
            4711,
        );
        for flags in [ACK, ACK | FIN] {
            let packet = client_frame(client, flags, aligned_timestamp_option(1, tsecr));
            balancer.expect_sent_to(0, &packet, server, "connection_table");
        }
    }
    assert_eq!(balancer.lb.count_used_entries_by_scan(), 300);
}

/// A /64 counts as one source prefix, which may hold at most a quarter of the connection table.
#[test]
fn ipv6_prefix_occupies_at_most_a_quarter_of_the_table() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(70, 0);
    let options = LoadBalancerOptions {
        connection_table_size: ConnectionTableSize::try_from(4096).unwrap(),
        ..LoadBalancerOptions::default()
    };
    let mut balancer =
        TestBalancer::with_model(&[(service_address(VIP), STATEFUL_SERVICE_SETTINGS)], options, &mut rng);
    let server_ids = balancer.replace_servers(0, 9, &mut rng);
    balancer.install_table(0, &random_placement_table(PlacementRule::RoundRobin, 1, 1, &server_ids, &mut rng));
    balancer.lb.set_owner_number(Some(tested_lb_owner_number()));
    balancer.lb.update_source_prefix_limit();
    for number in 0..2000u128 {
        balancer.process_frame(&syn_frame((Ipv6Addr::from(0x2001_0db8 << 96 | number), 1024)));
    }
    assert_eq!(balancer.lb.count_used_entries_by_scan(), 1024, "a quarter of the table");
    assert_eq!(balancer.event_count(0, "connection_source_limited"), 2000 - 1024);
    balancer.process_frame_expecting_counter(
        &syn_frame((Ipv6Addr::from(0x2001_0db9 << 96), 1024)),
        Some(0),
        "new_connection",
    );
    assert_eq!(balancer.lb.count_used_entries_by_scan(), 1025);
}

/// Returns the frame of an ACK whose cookie contains `server`.
fn ack_frame_with_cookie(balancer: &TestBalancer, client: (Ipv6Addr, u16), server: ServerId) -> Vec<u8> {
    let tsecr = cookie::stamp_tsval(
        &balancer.fleet_keys,
        &support::FOREIGN_TIME_KEY,
        &four_tuple_to_vip(client),
        Cookie::Server(server),
        5,
    );
    client_frame(client, ACK, aligned_timestamp_option(1, tsecr))
}

/// Packets of unknown connections go to the other load balancer, with a flow label that prevents servers from
/// forwarding them. Packets to a server contain the other load balancer's id in the flow label.
#[test]
fn migrating_ipv6_service_forwards_unknown_packets() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(66, 0);
    let other_load_balancer = server_id_from_number(intf::SERVER_ID_COUNT as u64 - 1);
    let no_server_identification = ExpectedIdentification::PreviousServer(None);
    for migration in
        [ServiceMigration::AdoptedFrom(other_load_balancer), ServiceMigration::HandedOverTo(other_load_balancer)]
    {
        let mode = ServiceSettings { migration: Some(migration), ..ServiceSettings::default() };
        let mut balancer =
            TestBalancer::with_model(&[(service_address(VIP), mode)], LoadBalancerOptions::default(), &mut rng);
        let server_ids = balancer.replace_servers(0, 5, &mut rng);
        let other_mac = MacAddress([2, 0, 0, 0, 0, 0x77]);
        let other_server = Server { mac: Some(other_mac), is_eligible: false };
        balancer.lb.set_server(balancer.service_indexes[0], other_load_balancer, other_server);
        balancer.server_macs.insert((0, other_load_balancer), other_mac);
        let table = random_placement_table(PlacementRule::Table, 1, 1, &server_ids, &mut rng);
        let mut placement_state = PlacementTableState::for_table(&table);
        balancer.install_table(0, &table);
        for _ in 0..50 {
            let client = random_client(&mut rng);
            let chosen_server =
                table.select_server(&mut placement_state, &four_tuple_to_vip(client)).expect("there are members");
            let syn = syn_frame(client);
            if migration == ServiceMigration::AdoptedFrom(other_load_balancer) {
                balancer.expect_sent_to(0, &syn, chosen_server, "new_connection");
            } else {
                balancer.expect_sent_with_identification(
                    0,
                    &syn,
                    other_load_balancer,
                    no_server_identification,
                    "to_other_balancer",
                );
            }
            let other_load_balancer_identification = ExpectedIdentification::PreviousServer(Some(other_load_balancer));
            let known_frame = ack_frame_with_cookie(&balancer, client, chosen_server);
            balancer.expect_sent_with_identification(
                0,
                &known_frame,
                chosen_server,
                other_load_balancer_identification,
                "established",
            );
            let unknown_server =
                (0..).map(server_id_from_number).find(|id| !server_ids.contains(id)).expect("five of 16,384 are known");
            let unknown_frame = ack_frame_with_cookie(&balancer, client, unknown_server);
            balancer.expect_sent_with_identification(
                0,
                &unknown_frame,
                other_load_balancer,
                no_server_identification,
                "to_other_balancer",
            );
        }
    }
}

#[test]
fn ipv6_datagrams_of_a_flow_keep_their_server() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(67, 0);
    let udp_service = ServiceAddress { vip_and_port: VIP.into(), protocol: TransportProtocol::Udp };
    let mode = ServiceSettings { consistency: ConsistencyMode::HashTable, ..ServiceSettings::default() };
    let mut balancer = TestBalancer::with_model(&[(udp_service, mode)], LoadBalancerOptions::default(), &mut rng);
    let server_ids = balancer.replace_servers(0, 20, &mut rng);
    let udp_frame = |client: (Ipv6Addr, u16), length: u16| {
        let udp_header = [client.1, VIP.1, 8 + length, 0].map(u16::to_be_bytes).concat();
        ipv6_frame([client.0, VIP.0], &[], 17, &[&udp_header[..], b"datagram"].concat())
    };
    let mut clients_with_servers: Vec<((Ipv6Addr, u16), ServerId)> = Vec::new();
    for generation in 1..3 {
        let table = random_placement_table(PlacementRule::Table, generation, 1, &server_ids, &mut rng);
        let mut placement_state = PlacementTableState::for_table(&table);
        balancer.install_table(0, &table);
        for (client, server) in &clients_with_servers {
            balancer.expect_sent_to(0, &udp_frame(*client, 8), *server, "flow_table");
        }
        for client in std::iter::repeat_with(|| random_client(&mut rng)).take(200) {
            let chosen_server =
                table.select_server(&mut placement_state, &four_tuple_to_vip(client)).expect("there are members");
            balancer.expect_sent_to(0, &udp_frame(client, 8), chosen_server, "new_connection");
            clients_with_servers.push((client, chosen_server));
        }
    }
    let client = random_client(&mut rng);
    balancer.expect_unforwarded(&udp_frame(client, 9), XDP_DROP, 0, "drop_malformed_udp");
}

#[test]
fn later_ipv6_fragments_follow_the_first_fragment() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(71, 0);
    let udp_service = ServiceAddress { vip_and_port: VIP.into(), protocol: TransportProtocol::Udp };
    let mode = ServiceSettings { consistency: ConsistencyMode::HashTable, ..ServiceSettings::default() };
    let mut balancer = TestBalancer::with_model(&[(udp_service, mode)], LoadBalancerOptions::default(), &mut rng);
    let server_ids = balancer.replace_servers(0, 20, &mut rng);
    let table = random_placement_table(PlacementRule::Table, 1, 1, &server_ids, &mut rng);
    let mut placement_state = PlacementTableState::for_table(&table);
    balancer.install_table(0, &table);
    let fragment_frame = |client: (Ipv6Addr, u16), identification: u32, field: u16, payload: &[u8]| {
        let fragment_header = [&[0, 0][..], &field.to_be_bytes(), &identification.to_be_bytes()].concat();
        ipv6_frame([client.0, VIP.0], &[(44, fragment_header)], 17, payload)
    };
    for identification in 0..200 {
        let client = random_client(&mut rng);
        let chosen_server =
            table.select_server(&mut placement_state, &four_tuple_to_vip(client)).expect("there are members");
        let udp_header = [client.1, VIP.1, 2008, 0].map(u16::to_be_bytes).concat();
        let later_fragment = fragment_frame(client, identification, 1000 | 1, b"more");
        balancer.expect_unforwarded_without_service(&later_fragment, XDP_DROP, "drop_fragment");
        balancer.expect_sent_to(
            0,
            &fragment_frame(client, identification, 1, &udp_header),
            chosen_server,
            "new_connection",
        );
        balancer.expect_sent_to(0, &later_fragment, chosen_server, "fragment");
        balancer.expect_sent_to(0, &fragment_frame(client, identification, 2000, b"last"), chosen_server, "fragment");
        let unrelated_fragment = fragment_frame(client, identification + 1000, 1000, b"another datagram");
        balancer.expect_unforwarded_without_service(&unrelated_fragment, XDP_DROP, "drop_fragment");
    }
}
