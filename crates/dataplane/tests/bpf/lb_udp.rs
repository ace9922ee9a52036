//! Tests of `bpf/lb/lb.bpf.c` with UDP (`BPF_PROG_TEST_RUN`). Flows, malformed datagrams and fragments are tested.

use std::net::Ipv4Addr;

use coreward_dataplane::lb::{LoadBalancerOptions, Server};
use coreward_model::consistency::{ConsistencyMode, ServiceSettings};
use coreward_model::lb::ServerTraffic;
use coreward_model::placement::{PlacementRule, PlacementTable, PlacementTableState};
use coreward_model::rss::seeded_rng;
use coreward_model::tuple::TransportProtocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::support::balancer::{
    TestBalancer, XDP_DROP, XDP_TX, random_client, random_placement_table, service_address,
};
use crate::support::{MORE_FRAGMENTS_FLAG, SYN, TcpPacket, UdpDatagram, missing_bpf_rights, skip_if};

const VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 53);

/// Offset of the IP header (20 bytes without options) in a frame, in bytes.
const IP_HEADER_OFFSET: usize = 14;
const UDP_HEADER_OFFSET: usize = IP_HEADER_OFFSET + 20;

fn udp_service() -> ServiceAddress {
    ServiceAddress { protocol: TransportProtocol::Udp, ..service_address(VIP) }
}

fn four_tuple_to_vip(client: (Ipv4Addr, u16)) -> FourTuple {
    FourTuple::ipv4(client, VIP)
}

/// Returns a load balancer with a UDP and a TCP service at the same VIP and port. Also returns the ids of the UDP
/// service's servers, and its placement table.
fn balancer_with_table(
    consistency: ConsistencyMode,
    rule: PlacementRule,
    rng: &mut impl rand::Rng,
) -> (TestBalancer, Vec<ServerId>, PlacementTable) {
    let udp_mode = ServiceSettings { consistency, ..ServiceSettings::default_for_protocol(TransportProtocol::Udp) };
    let services = [(udp_service(), udp_mode), (service_address(VIP), ServiceSettings::default())];
    let mut balancer = TestBalancer::with_model(&services, LoadBalancerOptions::default(), rng);
    let server_ids = balancer.replace_servers(0, 9, rng);
    let table = random_placement_table(rule, 1, 2, &server_ids, rng);
    balancer.install_table(0, &table);
    (balancer, server_ids, table)
}

/// Returns three datagrams: one without payload, one with IP options, and one with padding.
fn unusual_datagrams(client: (Ipv4Addr, u16)) -> [Vec<u8>; 3] {
    let datagram = UdpDatagram::new(client, VIP);
    let mut padded_frame = datagram.to_frame();
    padded_frame[UDP_HEADER_OFFSET + 4..UDP_HEADER_OFFSET + 6].copy_from_slice(&[0, 10]);
    [
        UdpDatagram { payload: vec![], ..datagram.clone() }.to_frame(),
        UdpDatagram { ip_options: vec![1; 12], payload: vec![7; 1400], ..datagram }.to_frame(),
        padded_frame,
    ]
}

#[test]
fn datagrams_of_a_flow_go_to_one_server() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(61, 0);
    let (mut balancer, ids, table) =
        balancer_with_table(ConsistencyMode::HashTable, PlacementRule::LeastAssigned, &mut rng);
    let mut placement_state = PlacementTableState::for_table(&table);
    let flows_with_servers: Vec<_> = (0..200)
        .map(|_| {
            let client = random_client(&mut rng);
            let chosen_server = table.select_server(&mut placement_state, &four_tuple_to_vip(client)).unwrap();
            balancer.expect_sent_to(0, &UdpDatagram::new(client, VIP).to_frame(), chosen_server, "new_connection");
            (client, chosen_server)
        })
        .collect();
    assert_eq!(balancer.event_count(0, "flow_inserted"), 200);
    // Flows stay when other servers drain. Their datagrams have IP options, no payload, or padding.
    for draining_id in &ids[2..] {
        let draining_mac = Some(balancer.server_macs[&(0, *draining_id)]);
        let draining_server = Server { mac: draining_mac, is_eligible: false };
        balancer.lb.set_server(balancer.service_indexes[0], *draining_id, draining_server);
    }
    balancer.install_table(0, &random_placement_table(PlacementRule::Table, 2, 1, &ids[..2], &mut rng));
    for (client, chosen_server) in &flows_with_servers {
        for frame in unusual_datagrams(*client) {
            balancer.expect_sent_to(0, &frame, *chosen_server, "flow_table");
        }
    }
    let opened_connection_count: u64 =
        ids.iter().map(|id| balancer.lb.server_traffic(*id).opened_connection_count).sum();
    assert_eq!(opened_connection_count, 200);
    // A flow whose server was removed is placed and stored again.
    let (client, chosen_server) = flows_with_servers[0];
    balancer.lb.remove_server(balancer.service_indexes[0], chosen_server);
    let frame = UdpDatagram::new(client, VIP).to_frame();
    let (xdp_action, _) = balancer.process_frame_expecting_counter(&frame, Some(0), "new_connection");
    assert_eq!(xdp_action, XDP_TX);
    balancer.process_frame_expecting_counter(&frame, Some(0), "flow_table");
}

#[test]
fn udp_flow_moves_when_health_checks_find_its_server_down() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(68, 0);
    let (mut balancer, ids, table) = balancer_with_table(ConsistencyMode::HashTable, PlacementRule::Table, &mut rng);
    let client = random_client(&mut rng);
    let frame = UdpDatagram::new(client, VIP).to_frame();
    let chosen_server =
        table.select_server(&mut PlacementTableState::for_table(&table), &four_tuple_to_vip(client)).unwrap();
    balancer.expect_sent_to(0, &frame, chosen_server, "new_connection");
    // A flow stays at a draining server, but leaves a masked server even if the table still has that server.
    let server_mac = Some(balancer.server_macs[&(0, chosen_server)]);
    balancer.lb.set_server(balancer.service_indexes[0], chosen_server, Server { mac: server_mac, is_eligible: false });
    balancer.expect_sent_to(0, &frame, chosen_server, "flow_table");
    balancer.lb.set_server_masked(balancer.service_indexes[0], chosen_server, true);
    let has_other_mac = |id: &&ServerId| balancer.server_macs[&(0, **id)] != balancer.server_macs[&(0, chosen_server)];
    let (xdp_action, forwarded_frame) = balancer.process_frame_expecting_counter(&frame, Some(0), "new_connection");
    assert_eq!(xdp_action, XDP_TX);
    assert!(
        ids.iter().filter(has_other_mac).any(|id| forwarded_frame[..6] == balancer.server_macs[&(0, *id)].0),
        "it went to {chosen_server}"
    );
    balancer.process_frame_expecting_counter(&frame, Some(0), "flow_table");
}

#[test]
fn each_datagram_is_placed_independently_without_consistency() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(62, 0);
    let (balancer, ids, table) = balancer_with_table(ConsistencyMode::None, PlacementRule::PowerOfTwo, &mut rng);
    let mut placement_state = PlacementTableState::for_table(&table);
    for _ in 0..300 {
        let client = random_client(&mut rng);
        let chosen_server = table.select_server(&mut placement_state, &four_tuple_to_vip(client)).unwrap();
        for _ in 0..2 {
            balancer.expect_sent_to(0, &UdpDatagram::new(client, VIP).to_frame(), chosen_server, "per_packet");
        }
    }
    assert_eq!(balancer.event_count(0, "flow_inserted"), 0);
    assert!(ids.iter().all(|id| balancer.lb.server_traffic(*id) == ServerTraffic::default()));
}

#[test]
fn tcp_and_udp_at_one_port_are_separate_services() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(63, 0);
    let (mut balancer, _, table) = balancer_with_table(ConsistencyMode::HashTable, PlacementRule::Table, &mut rng);
    let client = random_client(&mut rng);
    let chosen_server =
        table.select_server(&mut PlacementTableState::for_table(&table), &four_tuple_to_vip(client)).unwrap();
    balancer.expect_sent_to(0, &UdpDatagram::new(client, VIP).to_frame(), chosen_server, "new_connection");
    let syn_frame = TcpPacket { flags: SYN, ..TcpPacket::new(client, VIP) }.to_frame();
    balancer.expect_unforwarded(&syn_frame, XDP_DROP, 1, "drop_no_eligible_server");
    // Datagrams to another port of the VIP pass to the kernel, even with a wrong length.
    let frame_to_other_port = UdpDatagram::new(client, (VIP.0, 54)).to_frame();
    balancer.expect_passed_uncounted(&frame_to_other_port);
    let mut malformed_frame = frame_to_other_port.clone();
    malformed_frame[UDP_HEADER_OFFSET + 5] = 1;
    balancer.expect_passed_uncounted(&malformed_frame);
    // Without a UDP service, all UDP packets pass to the kernel.
    balancer.service_indexes = balancer.lb.set_services(&[(service_address(VIP), ServiceSettings::default())]).unwrap();
    balancer.expect_passed_uncounted(&UdpDatagram::new(client, VIP).to_frame());
}

#[test]
fn malformed_datagrams_are_dropped_and_counted() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(64, 0);
    let (balancer, _, _) = balancer_with_table(ConsistencyMode::None, PlacementRule::Table, &mut rng);
    let frame = UdpDatagram::new(random_client(&mut rng), VIP).to_frame();
    let udp_length = (frame.len() - UDP_HEADER_OFFSET) as u16;
    for length_field in 0..=udp_length + 8 {
        let mut frame = frame.clone();
        frame[UDP_HEADER_OFFSET + 4..UDP_HEADER_OFFSET + 6].copy_from_slice(&length_field.to_be_bytes());
        if (8..=udp_length).contains(&length_field) {
            balancer.process_frame_expecting_counter(&frame, Some(0), "per_packet");
        } else {
            balancer.expect_unforwarded(&frame, XDP_DROP, 0, "drop_malformed_udp");
        }
    }
    // The total length in the IP header is too small.
    for total_length in 0..28u16 {
        let mut frame = frame.clone();
        frame[IP_HEADER_OFFSET + 2..IP_HEADER_OFFSET + 4].copy_from_slice(&total_length.to_be_bytes());
        match total_length {
            0..20 => balancer.expect_unforwarded_without_service(&frame, XDP_DROP, "drop_malformed_ipv4"),
            20..24 => balancer.expect_unforwarded_without_service(&frame, XDP_DROP, "drop_malformed_udp"),
            _ => balancer.expect_unforwarded(&frame, XDP_DROP, 0, "drop_malformed_udp"),
        }
    }
    for truncated_length in IP_HEADER_OFFSET + 20..frame.len() {
        balancer.expect_unforwarded_without_service(&frame[..truncated_length], XDP_DROP, "drop_malformed_ipv4");
    }
}

/// Returns the fragments of a datagram of `fragment_count` times 16 bytes (with the UDP header), in order.
fn build_fragment_frames(datagram: &UdpDatagram, fragment_count: u16) -> Vec<Vec<u8>> {
    let build_fragment_frame = |n: u16| {
        let more_fragments_flag = if n + 1 < fragment_count { MORE_FRAGMENTS_FLAG } else { 0 };
        // The first fragment has 8 bytes of UDP header and 8 of data, and the others have 16 of data.
        let payload = vec![n as u8; if n == 0 { 8 } else { 16 }];
        UdpDatagram { flags_and_offset: more_fragments_flag | (n * 2), payload, ..datagram.clone() }.to_frame()
    };
    (0..fragment_count).map(build_fragment_frame).collect()
}

#[test]
fn later_fragments_follow_the_first_fragment() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(65, 0);
    for consistency in [ConsistencyMode::HashTable, ConsistencyMode::None] {
        let (balancer, _, table) = balancer_with_table(consistency, PlacementRule::Table, &mut rng);
        let first_fragment_counter = if consistency == ConsistencyMode::None { "per_packet" } else { "new_connection" };
        let mut placement_state = PlacementTableState::for_table(&table);
        for round in 0..50u16 {
            let client = random_client(&mut rng);
            let datagram = UdpDatagram { identification: round, ..UdpDatagram::new(client, VIP) };
            let fragments_in_order = build_fragment_frames(&datagram, 4);
            let chosen_server = table.select_server(&mut placement_state, &four_tuple_to_vip(client)).unwrap();
            // Until the first fragment has arrived, the service of the others is unknown.
            balancer.expect_unforwarded_without_service(&fragments_in_order[1], XDP_DROP, "drop_fragment");
            balancer.expect_sent_to(0, &fragments_in_order[0], chosen_server, first_fragment_counter);
            for fragment_index in [3, 1, 2] {
                balancer.expect_sent_to(0, &fragments_in_order[fragment_index], chosen_server, "fragment");
            }
            // Fragments of another datagram, or from another client, are not matched.
            let unrelated_fragments = [
                UdpDatagram { identification: round + 1000, ..datagram.clone() },
                UdpDatagram {
                    source: std::net::SocketAddrV4::new(Ipv4Addr::new(1, 2, 3, 4), client.1),
                    ..datagram.clone()
                },
            ];
            for unrelated_fragment in unrelated_fragments {
                balancer.expect_unforwarded_without_service(
                    &build_fragment_frames(&unrelated_fragment, 3)[1],
                    XDP_DROP,
                    "drop_fragment",
                );
            }
        }
    }
}

/// Later fragments have no stored server if the first fragment was dropped, or if its server was removed.
#[test]
fn later_fragments_without_a_server_are_dropped_or_pass() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(65, 0);
    for consistency in [ConsistencyMode::HashTable, ConsistencyMode::None] {
        let (mut balancer, _, table) = balancer_with_table(consistency, PlacementRule::Table, &mut rng);
        let first_fragment_counter = if consistency == ConsistencyMode::None { "per_packet" } else { "new_connection" };
        let mut placement_state = PlacementTableState::for_table(&table);
        let datagram = UdpDatagram { identification: 7, ..UdpDatagram::new(random_client(&mut rng), VIP) };
        let fragments_in_order = build_fragment_frames(&datagram, 3);
        let mut damaged_fragment = fragments_in_order[0].clone();
        damaged_fragment[UDP_HEADER_OFFSET + 4..UDP_HEADER_OFFSET + 6].copy_from_slice(&[0, 7]);
        balancer.expect_unforwarded(&damaged_fragment, XDP_DROP, 0, "drop_malformed_udp");
        balancer.expect_unforwarded_without_service(&fragments_in_order[1], XDP_DROP, "drop_fragment");
        let chosen_server = table
            .select_server(&mut placement_state, &four_tuple_to_vip((*datagram.source.ip(), datagram.source.port())))
            .unwrap();
        balancer.expect_sent_to(0, &fragments_in_order[0], chosen_server, first_fragment_counter);
        balancer.lb.set_server(balancer.service_indexes[0], chosen_server, Server { mac: None, is_eligible: true });
        balancer.expect_unforwarded(&fragments_in_order[1], XDP_DROP, 0, "drop_server_unresolved");
        balancer.lb.remove_server(balancer.service_indexes[0], chosen_server);
        balancer.expect_unforwarded_without_service(&fragments_in_order[2], XDP_DROP, "drop_fragment");
        // The first fragment to another port passes to the kernel. Later fragments contain no port and are dropped.
        let fragments_to_other_port = build_fragment_frames(
            &UdpDatagram { identification: 9, ..UdpDatagram::new(random_client(&mut rng), (VIP.0, 54)) },
            2,
        );
        balancer.expect_passed_uncounted(&fragments_to_other_port[0]);
        balancer.expect_unforwarded_without_service(&fragments_to_other_port[1], XDP_DROP, "drop_fragment");
        // Without a UDP service later fragments pass to the kernel.
        balancer.service_indexes =
            balancer.lb.set_services(&[(service_address(VIP), ServiceSettings::default())]).unwrap();
        balancer.expect_passed_uncounted(&fragments_in_order[1]);
    }
}

/// The free entries that each CPU reserves in an LRU map must not reduce the table's documented capacity.
#[test]
fn fragment_table_has_its_documented_capacity() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(68, 0);
    let (balancer, _, _) = balancer_with_table(ConsistencyMode::None, PlacementRule::Table, &mut rng);
    let fragmented_datagrams: Vec<_> = (0..coreward_intf::MAX_FRAGMENTED_DATAGRAMS as u16)
        .map(|n| {
            build_fragment_frames(
                &UdpDatagram { identification: n, ..UdpDatagram::new(random_client(&mut rng), VIP) },
                2,
            )
        })
        .collect();
    let allowed_cpus = sched_getaffinity(Pid::from_raw(0)).unwrap();
    let cpu_numbers: Vec<usize> = (0..CpuSet::count()).filter(|cpu| allowed_cpus.is_set(*cpu).unwrap()).collect();
    let pin_to_cpu = |cpu: usize| {
        let mut single_cpu = CpuSet::new();
        single_cpu.set(cpu).unwrap();
        sched_setaffinity(Pid::from_raw(0), &single_cpu).unwrap();
    };
    // Each CPU processes one datagram, and the first CPU all the others.
    for (n, datagram) in fragmented_datagrams.iter().enumerate() {
        pin_to_cpu(cpu_numbers.get(n).copied().unwrap_or(cpu_numbers[0]));
        assert_eq!(balancer.process_frame(&datagram[0]).0, XDP_TX);
    }
    let forwarded_count =
        fragmented_datagrams.iter().filter(|datagram| balancer.process_frame(&datagram[1]).0 == XDP_TX).count();
    sched_setaffinity(Pid::from_raw(0), &allowed_cpus).unwrap();
    assert_eq!(forwarded_count, fragmented_datagrams.len());
}

#[test]
fn fragments_of_a_removed_service_are_dropped() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(67, 0);
    let (mut balancer, _, _) = balancer_with_table(ConsistencyMode::HashTable, PlacementRule::Table, &mut rng);
    let fragments_in_order =
        build_fragment_frames(&UdpDatagram { identification: 7, ..UdpDatagram::new(random_client(&mut rng), VIP) }, 3);
    balancer.process_frame_expecting_counter(&fragments_in_order[0], Some(0), "new_connection");
    balancer.process_frame_expecting_counter(&fragments_in_order[1], Some(0), "fragment");
    // Another service of the VIP gets the removed service's index, and another server the removed server's id.
    let other_service = ServiceAddress { protocol: TransportProtocol::Udp, ..service_address((VIP.0, 5353)) };
    balancer.service_indexes = balancer
        .lb
        .set_services(&[(other_service, ServiceSettings::default_for_protocol(TransportProtocol::Udp))])
        .unwrap();
    for id in 0..coreward_intf::SERVER_ID_COUNT {
        let server_mac = Some(coreward_dataplane::mac::MacAddress([2, 0, 0, 0, 0, 7]));
        let id = ServerId::try_from(u64::from(id)).unwrap();
        balancer.lb.set_server(balancer.service_indexes[0], id, Server { mac: server_mac, is_eligible: true });
    }
    balancer.expect_unforwarded_without_service(&fragments_in_order[2], XDP_DROP, "drop_fragment");
}

#[test]
fn first_fragments_without_ports_are_dropped_and_counted() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(66, 0);
    let (balancer, _, _) = balancer_with_table(ConsistencyMode::None, PlacementRule::Table, &mut rng);
    let first_fragment = build_fragment_frames(&UdpDatagram::new(random_client(&mut rng), VIP), 2).remove(0);
    for total_length in 20..28u16 {
        let mut frame = first_fragment.clone();
        frame[IP_HEADER_OFFSET + 2..IP_HEADER_OFFSET + 4].copy_from_slice(&total_length.to_be_bytes());
        match total_length {
            20..24 => balancer.expect_unforwarded_without_service(&frame, XDP_DROP, "drop_malformed_udp"),
            _ => balancer.expect_unforwarded(&frame, XDP_DROP, 0, "drop_malformed_udp"),
        }
    }
}
