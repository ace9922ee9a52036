//! Tests of the outer headers of packets to servers behind routers (`bpf/lb/encapsulate.h`, `BPF_PROG_TEST_RUN`).

use coreward_dataplane::lb::{BroadcastRateLimits, LoadBalancerOptions, PacketRateLimit, ServerTunnel};
use coreward_intf as intf;
use coreward_model::consistency::{ConsistencyMode, ServiceSettings};
use coreward_model::cookie::{self, Cookie};
use coreward_model::forwarding::{ForwardingMode, gue_source_port};
use coreward_model::placement::{PlacementRule, PlacementTable};
use coreward_model::rss::seeded_rng;
use coreward_model::{FourTuple, ServerId};
use rand::Rng;

use crate::support::balancer::{
    LOAD_BALANCER_MAC, TestBalancer, XDP_DROP, XDP_TX, random_placement_table, server_id_from_number, service_address,
};
use crate::support::tunnel::{
    ETHERNET_HEADER_BYTES, LB_OUTER_SOURCE_ADDRESSES, TunnelVariant, address_octets, client_socket_address,
    ip_header_bytes, own_outer_address, server_outer_address, service_vip, set_traffic_class,
};
use crate::support::{
    ACK, AddressFamily, FOREIGN_TIME_KEY, RST, SYN, TcpPacket, aligned_timestamp_option, missing_bpf_rights,
    ones_complement_sum, skip_if,
};

const MTU_BYTES: usize = 1500;

fn settings_for_tunnel(variant: TunnelVariant) -> ServiceSettings {
    ServiceSettings { forwarding: variant.forwarding, ..ServiceSettings::default() }
}

fn balancer_and_table(variant: TunnelVariant) -> (TestBalancer, PlacementTable) {
    balancer_and_table_with_settings(variant, settings_for_tunnel(variant), MTU_BYTES)
}

fn balancer_and_table_with_settings(
    variant: TunnelVariant,
    mode: ServiceSettings,
    mtu_bytes: usize,
) -> (TestBalancer, PlacementTable) {
    let mut rng = seeded_rng(32, 0);
    let balancer = TestBalancer::with_model(
        &[(service_address(service_vip(variant.inner_family)), mode)],
        LoadBalancerOptions::default(),
        &mut rng,
    );
    set_up_servers(balancer, variant, mtu_bytes, &mut rng)
}

fn set_up_servers(
    mut balancer: TestBalancer,
    variant: TunnelVariant,
    mtu_bytes: usize,
    rng: &mut impl Rng,
) -> (TestBalancer, PlacementTable) {
    balancer.lb.set_outer_header(LB_OUTER_SOURCE_ADDRESSES, mtu_bytes as u32);
    let server_ids = balancer.replace_servers(0, 9, rng);
    for id in &server_ids {
        set_server_tunnel(&mut balancer, variant.outer_family, *id, None);
    }
    let table = random_placement_table(PlacementRule::Table, 1, 1, &server_ids, rng);
    balancer.install_table(0, &table);
    (balancer, table)
}

fn set_server_tunnel(
    balancer: &mut TestBalancer,
    outer_family: AddressFamily,
    server: ServerId,
    source_port: Option<u16>,
) {
    let outer_address = server_outer_address(outer_family, server);
    balancer.lb.set_server_tunnel(server, ServerTunnel { destination_address: outer_address, source_port }).unwrap();
}

fn server_selected_by_model(family: AddressFamily, table: &PlacementTable) -> ServerId {
    let mut placement_state = coreward_model::placement::PlacementTableState::for_table(table);
    table
        .select_server(
            &mut placement_state,
            &FourTuple::new(client_socket_address(family), service_vip(family)).unwrap(),
        )
        .unwrap()
}

fn syn_packet(family: AddressFamily) -> TcpPacket {
    TcpPacket {
        flags: SYN,
        tcp_options: aligned_timestamp_option(7, 0),
        ..TcpPacket::between(client_socket_address(family), service_vip(family))
    }
}

/// Returns the expected source port and flow label of outer headers, which are equal to a hash of the client's flow.
fn expected_outer_source_port(family: AddressFamily) -> u16 {
    let [[a, b], [c, d]] = [client_socket_address(family).port(), service_vip(family).port()].map(u16::to_be_bytes);
    gue_source_port(client_socket_address(family).ip(), [a, b, c, d])
}

fn read_u16(bytes: &[u8], offset: usize) -> u16 {
    u16::from_be_bytes([bytes[offset], bytes[offset + 1]])
}

fn assert_outer_ipv4_header(outer_packet: &[u8], variant: TunnelVariant, server: ServerId, traffic_class: u8) {
    assert_eq!(ones_complement_sum(&outer_packet[..20]), 0xffff, "checksum of the outer header");
    assert_eq!(
        (outer_packet[0], outer_packet[1], usize::from(read_u16(outer_packet, 2))),
        (0x45, traffic_class, outer_packet.len())
    );
    assert_eq!(
        outer_packet[4..10],
        [0, 0, 0x40, 0, 64, variant.outer_protocol_number()],
        "identification 0, DF, TTL 64"
    );
    let outer_addresses = [
        address_octets(own_outer_address(variant.outer_family)),
        address_octets(server_outer_address(variant.outer_family, server)),
    ];
    assert_eq!(outer_packet[12..20], outer_addresses.concat());
}

fn assert_outer_ipv6_header(outer_packet: &[u8], variant: TunnelVariant, server: ServerId, traffic_class: u8) {
    let [a, b] = expected_outer_source_port(variant.inner_family).to_be_bytes();
    assert_eq!(outer_packet[..4], [0x60 | traffic_class >> 4, traffic_class << 4, a, b]);
    assert_eq!(
        (usize::from(read_u16(outer_packet, 4)), outer_packet[6], outer_packet[7]),
        (outer_packet.len() - 40, variant.outer_protocol_number(), 64)
    );
    let outer_addresses = [
        address_octets(own_outer_address(variant.outer_family)),
        address_octets(server_outer_address(variant.outer_family, server)),
    ];
    assert_eq!(outer_packet[8..40], outer_addresses.concat());
}

/// Checks the outer header of `packet`, and returns the inner packet.
fn check_and_strip_outer_header(packet: &[u8], variant: TunnelVariant, server: ServerId, traffic_class: u8) -> Vec<u8> {
    let outer_packet = &packet[ETHERNET_HEADER_BYTES..];
    match variant.outer_family {
        AddressFamily::Ipv4 => assert_outer_ipv4_header(outer_packet, variant, server, traffic_class),
        AddressFamily::Ipv6 => assert_outer_ipv6_header(outer_packet, variant, server, traffic_class),
    }
    if variant.forwarding == ForwardingMode::Gue {
        let udp_header = &outer_packet[ip_header_bytes(variant.outer_family)..];
        let expected_udp_fields = (expected_outer_source_port(variant.inner_family), 6080, udp_header.len(), 0);
        assert_eq!(
            (
                read_u16(udp_header, 0),
                read_u16(udp_header, 2),
                usize::from(read_u16(udp_header, 4)),
                read_u16(udp_header, 6)
            ),
            expected_udp_fields
        );
    }
    outer_packet[variant.overhead_bytes()..].to_vec()
}

fn ethertype_bytes(family: AddressFamily) -> [u8; 2] {
    if family == AddressFamily::Ipv4 { [8, 0] } else { [0x86, 0xdd] }
}

#[test]
fn encapsulation_only_adds_an_outer_header() {
    skip_if!(missing_bpf_rights());
    for variant in TunnelVariant::all() {
        let (balancer, table) = balancer_and_table(variant);
        let server = server_selected_by_model(variant.inner_family, &table);
        let mut frame = syn_packet(variant.inner_family).to_frame();
        // The byte contains DSCP 46 and ECT(0).
        set_traffic_class(&mut frame, 0xba);
        let (xdp_action, packet) = balancer.process_frame_expecting_counter(&frame, Some(0), "new_connection");
        assert_eq!(xdp_action, XDP_TX, "{variant:?}");
        assert_eq!(packet[..6], balancer.server_macs[&(0, server)].0);
        assert_eq!(packet[6..14], [&LOAD_BALANCER_MAC.0[..], &ethertype_bytes(variant.outer_family)].concat());
        assert_eq!(
            check_and_strip_outer_header(&packet, variant, server, 0xba),
            frame[ETHERNET_HEADER_BYTES..],
            "{variant:?}"
        );
    }
}

#[test]
fn fast_path_only_adds_an_outer_header() {
    skip_if!(missing_bpf_rights());
    for variant in TunnelVariant::all() {
        let (balancer, table) = balancer_and_table(variant);
        let server = server_selected_by_model(variant.inner_family, &table);
        let tuple =
            FourTuple::new(client_socket_address(variant.inner_family), service_vip(variant.inner_family)).unwrap();
        let cookie_tsval =
            cookie::stamp_tsval(&balancer.fleet_keys, &FOREIGN_TIME_KEY, &tuple, Cookie::Server(server), 9);
        let frame = TcpPacket {
            tcp_options: aligned_timestamp_option(7, cookie_tsval),
            ..TcpPacket::between(client_socket_address(variant.inner_family), service_vip(variant.inner_family))
        }
        .to_frame();
        let (xdp_action, packet) = balancer.process_frame_expecting_counter(&frame, Some(0), "established");
        assert_eq!(xdp_action, XDP_TX, "{variant:?}");
        assert_eq!(
            check_and_strip_outer_header(&packet, variant, server, 0),
            frame[ETHERNET_HEADER_BYTES..],
            "{variant:?}"
        );
    }
}

#[test]
fn gue_source_port_depends_on_flow_or_server() {
    skip_if!(missing_bpf_rights());
    for variant in TunnelVariant::all().filter(|form| form.forwarding == ForwardingMode::Gue) {
        let (mut balancer, table) = balancer_and_table(variant);
        let server = server_selected_by_model(variant.inner_family, &table);
        let read_outer_source_port = |balancer: &TestBalancer| {
            read_u16(
                &balancer.process_frame(&syn_packet(variant.inner_family).to_frame()).1,
                ETHERNET_HEADER_BYTES + ip_header_bytes(variant.outer_family),
            )
        };
        assert_eq!(read_outer_source_port(&balancer), expected_outer_source_port(variant.inner_family));
        set_server_tunnel(&mut balancer, variant.outer_family, server, Some(50_123));
        assert_eq!(read_outer_source_port(&balancer), 50_123);
    }
}

#[test]
fn next_packet_uses_changed_outer_address() {
    skip_if!(missing_bpf_rights());
    let variant = TunnelVariant {
        forwarding: ForwardingMode::Ipip,
        inner_family: AddressFamily::Ipv4,
        outer_family: AddressFamily::Ipv6,
    };
    let (mut balancer, table) = balancer_and_table(variant);
    let server = server_selected_by_model(variant.inner_family, &table);
    let other_server = server_id_from_number(u64::from(server.get() ^ 1));
    for (family, endpoint_server) in
        [(AddressFamily::Ipv6, other_server), (AddressFamily::Ipv4, server), (AddressFamily::Ipv6, server)]
    {
        let tunnel =
            ServerTunnel { destination_address: server_outer_address(family, endpoint_server), source_port: None };
        balancer.lb.set_server_tunnel(server, tunnel).unwrap();
        let forwarded_packet = balancer.process_frame(&syn_packet(variant.inner_family).to_frame()).1;
        check_and_strip_outer_header(
            &forwarded_packet,
            TunnelVariant { outer_family: family, ..variant },
            endpoint_server,
            0,
        );
    }
}

/// Returns the frame of a SYN whose IP packet has `packet_length_bytes` bytes.
fn syn_frame_with_length(family: AddressFamily, packet_length_bytes: usize) -> Vec<u8> {
    let header_length = syn_packet(family).to_frame().len() - ETHERNET_HEADER_BYTES - b"payload".len();
    TcpPacket { payload: vec![7; packet_length_bytes - header_length], ..syn_packet(family) }.to_frame()
}

/// Checks the headers of `packet`, an ICMP error about `frame`, and returns the ICMP message.
fn check_and_strip_icmp_headers<'a>(packet: &'a [u8], frame: &[u8], family: AddressFamily) -> &'a [u8] {
    assert_eq!(packet[..14], [&frame[6..12], &LOAD_BALANCER_MAC.0, &ethertype_bytes(family)].concat());
    let (header, message) = packet[ETHERNET_HEADER_BYTES..].split_at(ip_header_bytes(family));
    let expected_addresses =
        [address_octets(service_vip(family).ip()), address_octets(client_socket_address(family).ip())].concat();
    match family {
        AddressFamily::Ipv4 => {
            assert_eq!(header[..10], [0x45, 0xc0, 0, 96, 0, 0, 0x40, 0, 64, 1]);
            assert_eq!(header[12..], expected_addresses);
            assert_eq!((ones_complement_sum(header), ones_complement_sum(message)), (0xffff, 0xffff));
            assert_eq!((&message[..2], &message[8..]), (&[3, 4][..], &frame[ETHERNET_HEADER_BYTES..][..68]));
        }
        AddressFamily::Ipv6 => {
            let message_length = (message.len() as u16).to_be_bytes();
            assert_eq!(header[..8], [0x6c, 0, 0, 0, message_length[0], message_length[1], 58, 64]);
            assert_eq!(header[8..], expected_addresses);
            let pseudo_header = [&expected_addresses[..], &[0, 0], &message_length, &[0, 0, 0, 58]].concat();
            assert_eq!(ones_complement_sum(&[&pseudo_header, message].concat()), 0xffff);
            assert_eq!((&message[..2], &message[8..]), (&[2, 0][..], &frame[ETHERNET_HEADER_BYTES..][..504]));
        }
    }
    message
}

#[test]
fn too_long_packet_is_answered_with_the_inner_mtu() {
    skip_if!(missing_bpf_rights());
    for variant in TunnelVariant::all() {
        let (balancer, _) = balancer_and_table(variant);
        let inner_mtu = MTU_BYTES - variant.overhead_bytes();
        assert_eq!(
            balancer
                .process_frame_expecting_counter(
                    &syn_frame_with_length(variant.inner_family, inner_mtu),
                    Some(0),
                    "new_connection"
                )
                .0,
            XDP_TX
        );
        let frame = syn_frame_with_length(variant.inner_family, inner_mtu + 1);
        let (xdp_action, packet) =
            balancer.process_frame_expecting_counter(&frame, Some(0), "drop_fragmentation_needed");
        assert_eq!(xdp_action, XDP_TX, "{variant:?}");
        let [high, low] = (inner_mtu as u16).to_be_bytes();
        assert_eq!(check_and_strip_icmp_headers(&packet, &frame, variant.inner_family)[4..8], [0, 0, high, low]);
    }
}

#[test]
fn ipv6_packet_of_1280_bytes_gets_no_error() {
    skip_if!(missing_bpf_rights());
    let variant = TunnelVariant {
        forwarding: ForwardingMode::Gue,
        inner_family: AddressFamily::Ipv6,
        outer_family: AddressFamily::Ipv6,
    };
    let (balancer, _) = balancer_and_table_with_settings(variant, settings_for_tunnel(variant), 1300);
    assert_eq!(
        balancer
            .process_frame_expecting_counter(
                &syn_frame_with_length(variant.inner_family, 1280),
                Some(0),
                "drop_exceeds_mtu"
            )
            .0,
        XDP_DROP
    );
    let frame = syn_frame_with_length(variant.inner_family, 1281);
    let (_, packet) = balancer.process_frame_expecting_counter(&frame, Some(0), "drop_fragmentation_needed");
    assert_eq!(check_and_strip_icmp_headers(&packet, &frame, variant.inner_family)[4..8], 1280u32.to_be_bytes());
}

#[test]
fn packet_without_unicast_source_gets_no_error() {
    skip_if!(missing_bpf_rights());
    for (inner, sources) in [
        (AddressFamily::Ipv4, vec![vec![239, 0, 2, 7], vec![0; 4]]),
        (AddressFamily::Ipv6, vec![[&[0xff, 2][..], &[0; 13], &[1]].concat(), vec![0; 16]]),
    ] {
        let variant =
            TunnelVariant { forwarding: ForwardingMode::Gue, inner_family: inner, outer_family: AddressFamily::Ipv4 };
        let (balancer, _) = balancer_and_table(variant);
        let source_offset = ETHERNET_HEADER_BYTES + if inner == AddressFamily::Ipv4 { 12 } else { 8 };
        for source in sources {
            let mut frame = syn_frame_with_length(inner, MTU_BYTES);
            frame[source_offset..source_offset + source.len()].copy_from_slice(&source);
            assert_eq!(
                balancer.process_frame_expecting_counter(&frame, Some(0), "drop_exceeds_mtu").0,
                XDP_DROP,
                "{source:?}"
            );
        }
    }
}

#[test]
fn errors_to_a_flood_of_long_packets_are_rate_limited() {
    skip_if!(missing_bpf_rights());
    for inner in AddressFamily::BOTH {
        let rate_limits =
            BroadcastRateLimits::with_equal_rates(PacketRateLimit { packets_per_second: 1, burst_packets: 8 });
        let options = LoadBalancerOptions {
            broadcast_limits: [rate_limits; intf::LIMITED_KIND_COUNT as usize],
            ..LoadBalancerOptions::default()
        };
        let variant =
            TunnelVariant { forwarding: ForwardingMode::Ipip, inner_family: inner, outer_family: AddressFamily::Ipv4 };
        let mut rng = seeded_rng(34, 0);
        let balancer = TestBalancer::without_model(
            &[(service_address(service_vip(inner)), settings_for_tunnel(variant))],
            options,
            &mut rng,
        );
        let (balancer, _) = set_up_servers(balancer, variant, MTU_BYTES, &mut rng);
        let frame = syn_frame_with_length(inner, MTU_BYTES);
        let icmp_error_count = (0..100).filter(|_| balancer.process_frame(&frame).0 == XDP_TX).count();
        assert!((8..=11).contains(&icmp_error_count), "{icmp_error_count}");
        balancer.process_frame_expecting_counter(&frame, Some(0), "drop_exceeds_mtu");
    }
}

#[test]
fn nothing_is_broadcast_to_servers_behind_routers() {
    skip_if!(missing_bpf_rights());
    for consistency in [ConsistencyMode::Stateless, ConsistencyMode::Stateful] {
        for variant in TunnelVariant::all() {
            let mode = ServiceSettings { consistency, ..settings_for_tunnel(variant) };
            let (balancer, _) = balancer_and_table_with_settings(variant, mode, MTU_BYTES);
            let rst_frame =
                TcpPacket { flags: RST, tcp_options: vec![], ..syn_packet(variant.inner_family) }.to_frame();
            let (xdp_action, _) = balancer.process_frame_expecting_counter(&rst_frame, Some(0), "drop_not_broadcast");
            assert_eq!(xdp_action, XDP_DROP);
        }
    }
}

#[test]
fn services_of_all_forwarding_modes_share_a_program_and_servers() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(33, 0);
    let service_kinds: Vec<(ForwardingMode, AddressFamily)> =
        ForwardingMode::ALL.into_iter().flat_map(|kind| AddressFamily::BOTH.map(|family| (kind, family))).collect();
    let vip_of_kind = |(forwarding, family): (ForwardingMode, AddressFamily)| {
        let mut vip = service_vip(family);
        vip.set_port(80 + forwarding.bpf_number() as u16);
        vip
    };
    let services: Vec<_> = service_kinds
        .iter()
        .map(|kind| {
            let mode = ServiceSettings {
                consistency: ConsistencyMode::HashTable,
                forwarding: kind.0,
                ..ServiceSettings::default()
            };
            (service_address(vip_of_kind(*kind)), mode)
        })
        .collect();
    let mut balancer = TestBalancer::with_model(&services, LoadBalancerOptions::default(), &mut rng);
    balancer.lb.set_outer_header(LB_OUTER_SOURCE_ADDRESSES, MTU_BYTES as u32);
    let server = server_id_from_number(7);
    let eligible_server = coreward_dataplane::lb::Server { mac: Some(LOAD_BALANCER_MAC), is_eligible: true };
    set_server_tunnel(&mut balancer, AddressFamily::Ipv6, server, None);
    for (position, kind) in service_kinds.into_iter().enumerate() {
        balancer.lb.set_server(balancer.service_indexes[position], server, eligible_server);
        balancer.install_table(position, &random_placement_table(PlacementRule::Table, 1, 1, &[server], &mut rng));
        for flags in [SYN, ACK] {
            let frame = TcpPacket {
                flags,
                tcp_options: vec![],
                ..TcpPacket::between(client_socket_address(kind.1), vip_of_kind(kind))
            }
            .to_frame();
            let (xdp_action, packet) = balancer.process_frame(&frame);
            let encapsulation_overhead = kind.0.encapsulation_overhead_bytes(own_outer_address(AddressFamily::Ipv6));
            assert_eq!((xdp_action, packet.len()), (XDP_TX, frame.len() + encapsulation_overhead), "{kind:?}");
        }
    }
}
