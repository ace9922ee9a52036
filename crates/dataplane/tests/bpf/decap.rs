//! Tests of `bpf/server/decap.bpf.c`, which removes outer headers at a server (`BPF_PROG_TEST_RUN`).

use std::net::{IpAddr, SocketAddr};

use coreward_dataplane::decap::{COUNTER_NAMES, DecapProgram};
use coreward_dataplane::lb::{LoadBalancerOptions, ServerTunnel};
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::consistency::ServiceSettings;
use coreward_model::forwarding::ForwardingMode;
use coreward_model::placement::PlacementRule;
use coreward_model::rss::seeded_rng;

use crate::support::balancer::{
    TestBalancer, XDP_DROP, XDP_PASS, XDP_TX, random_placement_table, server_id_from_number, service_address,
};
use crate::support::tunnel::{
    ETHERNET_HEADER_BYTES, LB_OUTER_SOURCE_ADDRESSES, TunnelVariant, client_socket_address, ip_header_bytes,
    own_outer_address, server_outer_address, service_vip, set_traffic_class,
};
use crate::support::{
    AddressFamily, ExtensionHeader, MORE_FRAGMENTS_FLAG, SYN, TcpPacket, aligned_timestamp_option, ipv4_frame,
    ipv6_frame, missing_bpf_rights, skip_if,
};

const CONGESTION_EXPERIENCED: u8 = 3;
const UDP_PROTOCOL: u8 = 17;
const IPV6_FRAGMENT_HEADER: u8 = 44;

fn load_decap_program() -> DecapProgram {
    let decapsulation = DecapProgram::load_unattached().unwrap();
    decapsulation.set_source_addresses(&AddressFamily::BOTH.map(own_outer_address)).unwrap();
    decapsulation.set_vips(&AddressFamily::BOTH.map(|family| service_vip(family).ip())).unwrap();
    decapsulation
}

fn client_packet(family: AddressFamily) -> Vec<u8> {
    TcpPacket::between(client_socket_address(family), service_vip(family)).to_frame()
}

fn ip_frame(source: IpAddr, destination: IpAddr, protocol: u8, fragment: u16, transport: &[u8]) -> Vec<u8> {
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            ipv4_frame(protocol, [source, destination], &[], [0, fragment], transport)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => ipv6_frame([source, destination], &[], protocol, transport),
        other => panic!("{other:?}"),
    }
}

fn udp_frame(family: AddressFamily, port: u16) -> Vec<u8> {
    let udp_bytes = [&40_000u16.to_be_bytes()[..], &port.to_be_bytes(), &[0, 12, 0, 0], b"data"].concat();
    ip_frame(client_socket_address(family).ip(), service_vip(family).ip(), UDP_PROTOCOL, 0, &udp_bytes)
}

/// Encapsulates `frame` as a load balancer does, with the outer header of `variant`.
fn encapsulate_frame(variant: TunnelVariant, frame: &[u8]) -> Vec<u8> {
    let inner_packet = &frame[ETHERNET_HEADER_BYTES..];
    let mut outer_transport = Vec::new();
    if variant.forwarding == ForwardingMode::Gue {
        for header_field in [50_000, intf::GUE_PORT as u16, (inner_packet.len() + 8) as u16, 0] {
            outer_transport.extend(header_field.to_be_bytes());
        }
    }
    outer_transport.extend(inner_packet);
    ip_frame(
        own_outer_address(variant.outer_family),
        server_outer_address(variant.outer_family, server_id_from_number(1)),
        variant.outer_protocol_number(),
        0x4000,
        &outer_transport,
    )
}

/// Runs the program on `frame`, and returns its verdict and the packet. Asserts that only `counter` has increased, or
/// no counter if `counter` is `None`.
fn process_frame_expecting_counter(
    decapsulation: &DecapProgram,
    frame: &[u8],
    counter: Option<&str>,
) -> (i32, Vec<u8>) {
    let counters_before = decapsulation.counters().unwrap();
    let outcome = test_run::run_program(decapsulation.program_fd(), frame, 1).unwrap();
    let counters_after = decapsulation.counters().unwrap();
    let increased_counters: Vec<_> = (0..COUNTER_NAMES.len())
        .filter(|counter_index| counters_after[*counter_index] != counters_before[*counter_index])
        .map(|counter_index| COUNTER_NAMES[counter_index])
        .collect();
    assert_eq!(increased_counters, Vec::from_iter(counter));
    (outcome.verdict, outcome.packet)
}

/// Applies `change` to an encapsulated packet of each tunnel variant. Asserts that the program drops the changed packet
/// and counts it as `counter`.
fn expect_drop_of_changed_packet(counter: &str, change: impl Fn(&mut Vec<u8>, TunnelVariant)) {
    skip_if!(missing_bpf_rights());
    let decapsulation = load_decap_program();
    for variant in TunnelVariant::all() {
        let mut frame = encapsulate_frame(variant, &client_packet(variant.inner_family));
        change(&mut frame, variant);
        assert_eq!(process_frame_expecting_counter(&decapsulation, &frame, Some(counter)).0, XDP_DROP, "{variant:?}");
    }
}

#[test]
fn outer_header_of_load_balancers_packet_is_removed() {
    skip_if!(missing_bpf_rights());
    let decapsulation = load_decap_program();
    for variant in TunnelVariant::all() {
        let (client, vip) = (client_socket_address(variant.inner_family), service_vip(variant.inner_family));
        let inner_fragment = ip_frame(
            client.ip(),
            vip.ip(),
            UDP_PROTOCOL,
            MORE_FRAGMENTS_FLAG,
            &udp_frame(variant.inner_family, 53)[ETHERNET_HEADER_BYTES + 20..],
        );
        let mut inner_frames = vec![client_packet(variant.inner_family), inner_fragment];
        match (client, vip) {
            (SocketAddr::V4(_), _) => {
                inner_frames
                    .push(TcpPacket { ip_options: vec![1, 1, 1, 0], ..TcpPacket::between(client, vip) }.to_frame());
            }
            _ => {
                let extension_headers: Vec<ExtensionHeader> = vec![(60, vec![0, 0, 1, 4, 0, 0, 0, 0])];
                inner_frames.push(TcpPacket { extension_headers, ..TcpPacket::between(client, vip) }.to_frame());
            }
        }
        for inner_frame in inner_frames {
            let frame = encapsulate_frame(variant, &inner_frame);
            assert_eq!(
                process_frame_expecting_counter(&decapsulation, &frame, Some("decapsulated")),
                (XDP_PASS, inner_frame),
                "{variant:?}"
            );
        }
    }
}

#[test]
fn padding_after_the_outer_packet_is_accepted() {
    skip_if!(missing_bpf_rights());
    for variant in TunnelVariant::all() {
        let inner_frame = client_packet(variant.inner_family);
        let frame = [encapsulate_frame(variant, &inner_frame), vec![0; 9]].concat();
        assert_eq!(
            process_frame_expecting_counter(&load_decap_program(), &frame, Some("decapsulated")),
            (XDP_PASS, [inner_frame, vec![0; 9]].concat())
        );
    }
}

#[test]
fn foreign_packets_pass_unchanged() {
    skip_if!(missing_bpf_rights());
    let decapsulation = load_decap_program();
    let mut foreign_frames = vec![vec![0; 60]];
    for variant in TunnelVariant::all() {
        let mut wrong_family_frame = encapsulate_frame(variant, &client_packet(variant.inner_family));
        wrong_family_frame[12..14].copy_from_slice(if variant.outer_family == AddressFamily::Ipv4 {
            &[0x86, 0xdd]
        } else {
            &[8, 0]
        });
        foreign_frames.extend([
            client_packet(variant.inner_family),
            udp_frame(variant.inner_family, 6081),
            wrong_family_frame,
        ]);
    }
    let gue_variant = TunnelVariant {
        forwarding: ForwardingMode::Gue,
        inner_family: AddressFamily::Ipv4,
        outer_family: AddressFamily::Ipv4,
    };
    let mut later_fragment = encapsulate_frame(gue_variant, &client_packet(gue_variant.inner_family));
    later_fragment[ETHERNET_HEADER_BYTES + 7] = 5;
    let ipv6_outer_variant = TunnelVariant { outer_family: AddressFamily::Ipv6, ..gue_variant };
    let mut ipv6_fragment = encapsulate_frame(ipv6_outer_variant, &client_packet(gue_variant.inner_family));
    ipv6_fragment[ETHERNET_HEADER_BYTES + 6] = IPV6_FRAGMENT_HEADER;
    for frame in foreign_frames.into_iter().chain([later_fragment, ipv6_fragment]) {
        assert_eq!(process_frame_expecting_counter(&decapsulation, &frame, None), (XDP_PASS, frame));
    }
}

#[test]
fn packet_from_unknown_source_is_dropped() {
    expect_drop_of_changed_packet("drop_decap_foreign_source", |frame, variant| {
        frame[ETHERNET_HEADER_BYTES + if variant.outer_family == AddressFamily::Ipv4 { 15 } else { 23 }] ^= 1;
    });
}

#[test]
fn packet_to_unknown_inner_destination_is_dropped() {
    expect_drop_of_changed_packet("drop_decap_foreign_destination", |frame, variant| {
        frame[ETHERNET_HEADER_BYTES + variant.overhead_bytes() + ip_header_bytes(variant.inner_family) - 1] ^= 1
    });
}

#[test]
fn fragment_of_an_encapsulated_ipv4_packet_is_dropped() {
    skip_if!(missing_bpf_rights());
    let decapsulation = load_decap_program();
    for variant in TunnelVariant::all().filter(|form| form.outer_family == AddressFamily::Ipv4) {
        let mut first_fragment = encapsulate_frame(variant, &client_packet(variant.inner_family));
        first_fragment[ETHERNET_HEADER_BYTES + 6] = 0x20;
        let mut later_fragment = encapsulate_frame(variant, &client_packet(variant.inner_family));
        later_fragment[ETHERNET_HEADER_BYTES + 7] = 5;
        // A later fragment has no ports, so the program cannot recognise it as GUE.
        let fragments = if variant.forwarding == ForwardingMode::Ipip {
            vec![first_fragment, later_fragment]
        } else {
            vec![first_fragment]
        };
        for frame in fragments {
            assert_eq!(
                process_frame_expecting_counter(&decapsulation, &frame, Some("drop_decap_fragment")).0,
                XDP_DROP
            );
        }
    }
}

#[test]
fn nested_tunnel_packet_is_dropped() {
    for protocol in [4, 41, 47] {
        expect_drop_of_changed_packet("drop_decap_nested", |frame, variant| {
            let tunnel_frame = ip_frame(
                client_socket_address(variant.inner_family).ip(),
                service_vip(variant.inner_family).ip(),
                protocol,
                0,
                b"packet",
            );
            *frame = encapsulate_frame(variant, &tunnel_frame);
        });
    }
    expect_drop_of_changed_packet("drop_decap_nested", |frame, variant| {
        *frame = encapsulate_frame(variant, &udp_frame(variant.inner_family, intf::GUE_PORT as u16));
    });
}

#[test]
fn nested_tunnel_after_extension_headers_is_dropped() {
    expect_drop_of_changed_packet("drop_decap_nested", |frame, variant| {
        let ipv6_inner_variant = TunnelVariant { inner_family: AddressFamily::Ipv6, ..variant };
        let (IpAddr::V6(client), IpAddr::V6(vip)) = (
            client_socket_address(ipv6_inner_variant.inner_family).ip(),
            service_vip(ipv6_inner_variant.inner_family).ip(),
        ) else {
            panic!()
        };
        let extension_headers: Vec<ExtensionHeader> =
            vec![(0, vec![0, 0, 1, 4, 0, 0, 0, 0]), (60, vec![0, 0, 1, 4, 0, 0, 0, 0])];
        *frame = encapsulate_frame(ipv6_inner_variant, &ipv6_frame([client, vip], &extension_headers, 4, b"packet"));
    });
}

#[test]
fn packets_with_contradictory_lengths_are_dropped() {
    let length_field_offset = |family| if family == AddressFamily::Ipv4 { 3 } else { 5 };
    expect_drop_of_changed_packet("drop_decap_truncated", |frame, variant| {
        frame[ETHERNET_HEADER_BYTES + length_field_offset(variant.outer_family)] ^= 1
    });
    expect_drop_of_changed_packet("drop_decap_truncated", |frame, variant| {
        frame[ETHERNET_HEADER_BYTES + variant.overhead_bytes() + length_field_offset(variant.inner_family)] ^= 1;
    });
    // Flipping the first bit gives the other IP version, and flipping the second an unknown version.
    for flipped_bits in [0x20, 0x80] {
        expect_drop_of_changed_packet("drop_decap_truncated", |frame, variant| {
            frame[ETHERNET_HEADER_BYTES + variant.overhead_bytes()] ^= flipped_bits
        });
    }
    expect_drop_of_changed_packet("drop_decap_truncated", |frame, _| frame.truncate(frame.len() - 1));
    expect_drop_of_changed_packet("drop_decap_truncated", |frame, variant| {
        frame.truncate(ETHERNET_HEADER_BYTES + variant.overhead_bytes() + ip_header_bytes(variant.inner_family) - 1);
    });
    expect_drop_of_changed_packet("drop_decap_truncated", |frame, variant| match variant.inner_family {
        // The length in the IP header becomes four words, which is too short.
        AddressFamily::Ipv4 => frame[ETHERNET_HEADER_BYTES + variant.overhead_bytes()] ^= 1,
        AddressFamily::Ipv6 => frame.truncate(ETHERNET_HEADER_BYTES + variant.overhead_bytes()),
    });
}

#[test]
fn udp_length_above_packet_length_is_dropped() {
    skip_if!(missing_bpf_rights());
    for variant in TunnelVariant::all().filter(|form| form.forwarding == ForwardingMode::Gue) {
        let mut frame = encapsulate_frame(variant, &client_packet(variant.inner_family));
        frame[ETHERNET_HEADER_BYTES + ip_header_bytes(variant.outer_family) + 5] -= 1;
        assert_eq!(
            process_frame_expecting_counter(&load_decap_program(), &frame, Some("drop_decap_truncated")).0,
            XDP_DROP
        );
    }
}

#[test]
fn congestion_mark_is_copied_or_the_packet_is_dropped() {
    skip_if!(missing_bpf_rights());
    let decapsulation = load_decap_program();
    for (variant, inner_ecn) in TunnelVariant::all().flat_map(|form| [1, 2, 3].map(|ecn| (form, ecn))) {
        let mut inner_frame = client_packet(variant.inner_family);
        // The upper bits contain DSCP 46.
        set_traffic_class(&mut inner_frame, 0xb8 | inner_ecn);
        let mut frame = encapsulate_frame(variant, &inner_frame);
        set_traffic_class(&mut frame, CONGESTION_EXPERIENCED);
        set_traffic_class(&mut inner_frame, 0xb8 | CONGESTION_EXPERIENCED);
        assert_eq!(
            process_frame_expecting_counter(&decapsulation, &frame, Some("decapsulated")),
            (XDP_PASS, inner_frame),
            "{variant:?} {inner_ecn}"
        );
    }
    expect_drop_of_changed_packet("drop_decap_congestion", |frame, _| set_traffic_class(frame, CONGESTION_EXPERIENCED));
}

#[test]
fn packets_of_removed_sources_and_vips_are_dropped() {
    skip_if!(missing_bpf_rights());
    for variant in TunnelVariant::all() {
        let decapsulation = load_decap_program();
        let frame = encapsulate_frame(variant, &client_packet(variant.inner_family));
        let (other_families, inner_families) =
            AddressFamily::BOTH.into_iter().partition::<Vec<_>, _>(|family| *family != variant.inner_family);
        assert_eq!(inner_families, [variant.inner_family]);
        decapsulation
            .set_vips(&other_families.iter().map(|family| service_vip(*family).ip()).collect::<Vec<_>>())
            .unwrap();
        assert_eq!(
            process_frame_expecting_counter(&decapsulation, &frame, Some("drop_decap_foreign_destination")).0,
            XDP_DROP
        );
        decapsulation.set_vips(&[service_vip(variant.inner_family).ip()]).unwrap();
        assert_eq!(process_frame_expecting_counter(&decapsulation, &frame, Some("decapsulated")).0, XDP_PASS);
        decapsulation.set_source_addresses(&[]).unwrap();
        assert_eq!(
            process_frame_expecting_counter(&decapsulation, &frame, Some("drop_decap_foreign_source")).0,
            XDP_DROP
        );
    }
}

#[test]
fn decapsulation_restores_the_packet_before_encapsulation() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(35, 0);
    for variant in TunnelVariant::all() {
        let mode = ServiceSettings { forwarding: variant.forwarding, ..ServiceSettings::default() };
        let mut balancer = TestBalancer::with_model(
            &[(service_address(service_vip(variant.inner_family)), mode)],
            LoadBalancerOptions::default(),
            &mut rng,
        );
        balancer.lb.set_outer_header(LB_OUTER_SOURCE_ADDRESSES, 1500);
        let server_ids = balancer.replace_servers(0, 1, &mut rng);
        let outer_address = server_outer_address(variant.outer_family, server_ids[0]);
        balancer
            .lb
            .set_server_tunnel(server_ids[0], ServerTunnel { destination_address: outer_address, source_port: None })
            .unwrap();
        balancer.install_table(0, &random_placement_table(PlacementRule::Table, 1, 1, &server_ids, &mut rng));
        let tcp_options = aligned_timestamp_option(7, 0);
        let syn = TcpPacket {
            flags: SYN,
            tcp_options,
            ..TcpPacket::between(client_socket_address(variant.inner_family), service_vip(variant.inner_family))
        }
        .to_frame();
        let (xdp_action, packet) = balancer.process_frame(&syn);
        assert_eq!(xdp_action, XDP_TX);
        let decapsulated_frame = process_frame_expecting_counter(&load_decap_program(), &packet, Some("decapsulated"));
        assert_eq!(
            decapsulated_frame,
            (XDP_PASS, [&packet[..ETHERNET_HEADER_BYTES - 2], &syn[ETHERNET_HEADER_BYTES - 2..]].concat()),
            "{variant:?}"
        );
    }
}
