//! Tests of the flow table in `bpf/lb/lb.bpf.c` (`BPF_PROG_TEST_RUN`). They cover new connections that find an older
//! connection's entry, and floods, which must not move the flows of other services.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use coreward_dataplane::lb::{LoadBalancerOptions, Server};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::connection_table::ConnectionHash;
use coreward_model::consistency::{ConsistencyMode, CookieStamper, ServiceSettings};
use coreward_model::placement::{PlacementRule, PlacementTable};
use coreward_model::rss::seeded_rng;
use coreward_model::tuple::TransportProtocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use rand::Rng;

use crate::support::balancer::{
    ExpectedIdentification, TestBalancer, XDP_DROP, XDP_PASS, XDP_TX, random_client, random_placement_table,
    server_id_from_number, service_address,
};
use crate::support::{
    ACK, FOREIGN_TIME_KEY, SYN, TcpPacket, UdpDatagram, missing_bpf_rights, read_u32, skip_if, timestamp_option,
    tsval_offset,
};

const WEB_VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 80);
const DNS_VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 53);

fn udp_service(vip: (Ipv4Addr, u16)) -> (ServiceAddress, ServiceSettings) {
    let protocol = TransportProtocol::Udp;
    (ServiceAddress { protocol, ..service_address(vip) }, ServiceSettings::default_for_protocol(protocol))
}

fn set_server_eligible(balancer: &mut TestBalancer, id: ServerId, is_eligible: bool) {
    let server_mac = Some(balancer.server_macs[&(0, id)]);
    balancer.lb.set_server(balancer.service_indexes[0], id, Server { mac: server_mac, is_eligible });
}

fn drain_server(balancer: &mut TestBalancer, id: ServerId) {
    set_server_eligible(balancer, id, false);
}

/// Returns a TCP packet from a server to a client, with the TSval `tsval` and the TSecr 7.
fn reply_frame(client: (Ipv4Addr, u16), server: MacAddress, flags: u8, tsval: u32) -> Vec<u8> {
    let mut frame =
        TcpPacket { flags, tcp_options: timestamp_option(tsval, 7), ..TcpPacket::new(WEB_VIP, client) }.to_frame();
    frame[6..12].copy_from_slice(&server.0);
    frame
}

fn tested_service_settings() -> [ServiceSettings; 4] {
    [
        ServiceSettings::default(),
        ServiceSettings { timestamps: CookieStamper::Off, ..ServiceSettings::default() },
        ServiceSettings { consistency: ConsistencyMode::Stateful, ..ServiceSettings::default() },
        ServiceSettings { timestamps: CookieStamper::LoadBalancer, ..ServiceSettings::default() },
    ]
}

/// Asserts that an established connection stays at its server, and that a new connection with the same ports avoids the
/// servers that take no new connections.
fn expect_only_new_flow_moves(
    balancer: &TestBalancer,
    mode: ServiceSettings,
    [syn, ack]: &[Vec<u8>; 2],
    previous_destination: MacAddress,
    refusing_macs: &[MacAddress],
) {
    // With LB-side stamping, only servers' replies make flow table entries, and this test sends no replies.
    let uses_flow_table = mode.timestamps != CookieStamper::LoadBalancer;
    assert!(
        !uses_flow_table || balancer.forward_frame(ack) == previous_destination,
        "{mode:?}: what is established stays"
    );
    let new_connection_destination = balancer.forward_frame(syn);
    assert!(!refusing_macs.contains(&new_connection_destination), "{mode:?}");
    assert!(
        !uses_flow_table || balancer.forward_frame(ack) == new_connection_destination,
        "{mode:?}: the new connection's packets follow"
    );
    assert_eq!(balancer.forward_frame(syn), new_connection_destination, "{mode:?}: and so does the SYN sent again");
}

/// A server drains. In half of the cases, a new placement table also lacks that server and a server that is down.
/// Established connections stay at their servers, and new connections with the same ports go to another server.
#[test]
fn syn_avoids_servers_that_take_no_new_connections() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(111, 0);
    for (mode, has_new_table) in tested_service_settings().into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
        let mut balancer =
            TestBalancer::with_model(&[(service_address(WEB_VIP), mode)], LoadBalancerOptions::default(), &mut rng);
        let server_ids = balancer.replace_servers(0, 6, &mut rng);
        // Random tables are drawn until every server has a bucket.
        let table =
            std::iter::repeat_with(|| random_placement_table(PlacementRule::Table, 1, 1, &server_ids, &mut rng))
                .find(|table| server_ids.iter().all(|id| table.consistent_server_by_bucket.contains(id)))
                .unwrap();
        balancer.install_table(0, &table);
        let flows_with_frames: Vec<_> = (0..400)
            .map(|_| random_client(&mut rng))
            .map(|client| [SYN, ACK].map(|flags| TcpPacket { flags, ..TcpPacket::new(client, WEB_VIP) }.to_frame()))
            .collect();
        let destinations_before: Vec<_> = flows_with_frames
            .iter()
            .map(|[syn, ack]| {
                balancer.process_frame(syn);
                balancer.forward_frame(ack)
            })
            .collect();
        drain_server(&mut balancer, server_ids[0]);
        let mut refusing_macs = vec![balancer.server_macs[&(0, server_ids[0])]];
        if has_new_table {
            let table = random_placement_table(PlacementRule::Table, 2, 1, &server_ids[2..], &mut rng);
            balancer.install_table(0, &PlacementTable { down_servers: vec![server_ids[1]], ..table });
            refusing_macs.push(balancer.server_macs[&(0, server_ids[1])]);
        }
        assert!(refusing_macs.iter().all(|mac| destinations_before.contains(mac)));
        for (frames, previous_destination) in flows_with_frames.iter().zip(destinations_before) {
            expect_only_new_flow_moves(&balancer, mode, frames, previous_destination, &refusing_macs);
        }
    }
}

fn balancer_with_lb_stamping(rng: &mut impl Rng) -> TestBalancer {
    let lb_stamping_mode = ServiceSettings { timestamps: CookieStamper::LoadBalancer, ..ServiceSettings::default() };
    let mut balancer =
        TestBalancer::with_model(&[(service_address(WEB_VIP), lb_stamping_mode)], LoadBalancerOptions::default(), rng);
    balancer.lb.set_time_key(balancer.service_indexes[0], FOREIGN_TIME_KEY);
    // Cookies of LB-side stamping can hold only small ids.
    let server_ids: Vec<_> = (1..=6).map(server_id_from_number).collect();
    for (number, id) in (1..).zip(&server_ids) {
        let mac = MacAddress([2, 0, 0, 0, 1, number]);
        balancer.server_macs.insert((0, *id), mac);
        balancer.lb.set_server(balancer.service_indexes[0], *id, Server { mac: Some(mac), is_eligible: true });
    }
    balancer.install_table(0, &random_placement_table(PlacementRule::RoundRobin, 1, 1, &server_ids, rng));
    balancer
}

/// After a load balancer has lost its state, a retransmitted SYN may reach a second server, whose SYN-ACK then arrives
/// late.
#[test]
fn late_syn_ack_of_another_server_moves_no_unstamped_connection() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(115, 0);
    let mut balancer = balancer_with_lb_stamping(&mut rng);
    let client = random_client(&mut rng);
    let send_packet = |balancer: &TestBalancer, flags| {
        balancer.forward_frame(
            &TcpPacket { flags, tcp_options: timestamp_option(7, 9), ..TcpPacket::new(client, WEB_VIP) }.to_frame(),
        )
    };
    let receive_syn_ack = |balancer: &TestBalancer, server: MacAddress, expected_action, counter| {
        let frame = reply_frame(client, server, SYN | ACK, 9);
        balancer.expect_unforwarded(&frame, expected_action, 0, counter);
    };
    let expect_syn_ack_passes =
        |balancer: &TestBalancer, server| receive_syn_ack(balancer, server, XDP_PASS, "reply_unchanged");
    let expect_late_syn_ack =
        |balancer: &TestBalancer, server| receive_syn_ack(balancer, server, XDP_DROP, "drop_late_syn_ack");
    let first_server_mac = send_packet(&balancer, SYN);
    expect_syn_ack_passes(&balancer, first_server_mac);
    let other_server_mac = balancer.server_macs.values().copied().find(|mac| *mac != first_server_mac).unwrap();
    expect_late_syn_ack(&balancer, other_server_mac);
    assert_eq!(send_packet(&balancer, SYN), first_server_mac, "half open: repeated");
    assert_eq!(send_packet(&balancer, ACK), first_server_mac, "half open");
    expect_late_syn_ack(&balancer, other_server_mac);
    assert_eq!(send_packet(&balancer, ACK), first_server_mac, "open");
    for _ in 0..6 {
        assert_eq!(send_packet(&balancer, SYN), first_server_mac, "forged, or the ports are reused");
    }

    // After the server began to drain, the client reuses its port for a new connection.
    let drained_id =
        balancer.server_macs.iter().find(|(_, mac)| **mac == first_server_mac).map(|((_, id), _)| *id).unwrap();
    drain_server(&mut balancer, drained_id);
    let reopened_server_mac = send_packet(&balancer, SYN);
    assert_ne!(reopened_server_mac, first_server_mac);
    expect_syn_ack_passes(&balancer, reopened_server_mac);
    assert_eq!(send_packet(&balancer, ACK), reopened_server_mac);
}

/// An attacker may send a SYN with the address and port of a connected client.
#[test]
fn forged_syn_does_not_move_an_open_connection() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(114, 0);
    let hash_table_mode = ServiceSettings { consistency: ConsistencyMode::HashTable, ..ServiceSettings::default() };
    let mut balancer = TestBalancer::with_model(
        &[(service_address(WEB_VIP), hash_table_mode)],
        LoadBalancerOptions::default(),
        &mut rng,
    );
    let server_ids = balancer.replace_servers(0, 6, &mut rng);
    balancer.install_table(0, &random_placement_table(PlacementRule::Table, 1, 1, &server_ids, &mut rng));
    let clients: Vec<_> = (0..50).map(|_| random_client(&mut rng)).collect();
    let send_packet = |balancer: &TestBalancer, client, flags| {
        balancer.forward_frame(&TcpPacket { flags, ..TcpPacket::new(client, WEB_VIP) }.to_frame())
    };
    let destinations: Vec<_> = clients.iter().map(|client| send_packet(&balancer, *client, SYN)).collect();
    // A new table, as after changed loads, would place most of these clients at other servers.
    balancer.install_table(0, &random_placement_table(PlacementRule::Table, 2, 1, &server_ids, &mut rng));
    let count_moved_connections = |balancer: &TestBalancer, flags| {
        clients
            .iter()
            .zip(&destinations)
            .filter(|(client, destination)| send_packet(balancer, **client, flags) != **destination)
            .count()
    };
    assert_eq!(
        (count_moved_connections(&balancer, SYN), count_moved_connections(&balancer, ACK)),
        (0, 0),
        "of 50 SYNs sent again, and of connections"
    );
    // A SYN to a draining server is placed at another server. The older connection moves as well, because the flow
    // table has one entry per tuple.
    let draining_mac = destinations[0];
    let id = server_ids.iter().copied().find(|id| balancer.server_macs[&(0, *id)] == draining_mac).unwrap();
    drain_server(&mut balancer, id);
    let draining_connection_count = destinations.iter().filter(|server| **server == draining_mac).count();
    assert_eq!(
        (
            count_moved_connections(&balancer, ACK),
            count_moved_connections(&balancer, SYN),
            count_moved_connections(&balancer, ACK)
        ),
        (0, draining_connection_count, draining_connection_count)
    );
}

/// A draining server may have an older connection with the same ports. The new server can forward its packets there.
#[test]
fn syn_names_draining_server_as_previous_server() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(112, 0);
    let mut balancer = TestBalancer::new(&[WEB_VIP], &mut rng);
    let server_ids = balancer.replace_servers(0, 6, &mut rng);
    let table = random_placement_table(PlacementRule::Table, 1, 1, &server_ids, &mut rng);
    balancer.install_table(0, &table);
    let new_four_tuple = |client| FourTuple::ipv4(client, WEB_VIP);
    let client_address = std::iter::repeat_with(|| random_client(&mut rng))
        .find(|client| table.select_consistent_server(&new_four_tuple(*client)) == Some(server_ids[0]))
        .unwrap();
    let build_frame = |flags| TcpPacket { flags, ..TcpPacket::new(client_address, WEB_VIP) }.to_frame();
    balancer.process_frame(&build_frame(ACK));
    drain_server(&mut balancer, server_ids[0]);
    let first_destination = balancer.forward_frame(&build_frame(SYN));
    let destination_id =
        server_ids.iter().copied().find(|id| balancer.server_macs[&(0, *id)] == first_destination).unwrap();
    assert_ne!(destination_id, server_ids[0]);
    balancer.expect_sent_with_identification(
        0,
        &build_frame(ACK),
        destination_id,
        ExpectedIdentification::PreviousServer(Some(server_ids[0])),
        "flow_table",
    );
}

/// If a connection opens while its bucket's server drains, only the flow table contains the connection's server.
#[test]
fn flood_evicts_no_connection_known_only_to_the_flow_table() {
    skip_if!(missing_bpf_rights());
    const FLOW_TABLE_ENTRY_COUNT: u32 = 1 << 10;
    let mut rng = seeded_rng(116, 0);
    let options =
        LoadBalancerOptions { flow_table_entry_count: FLOW_TABLE_ENTRY_COUNT, ..LoadBalancerOptions::default() };
    let mut balancer =
        TestBalancer::with_model(&[(service_address(WEB_VIP), ServiceSettings::default())], options, &mut rng);
    let server_ids = balancer.replace_servers(0, 6, &mut rng);
    let table = random_placement_table(PlacementRule::Table, 1, 1, &server_ids, &mut rng);
    balancer.install_table(0, &table);
    drain_server(&mut balancer, server_ids[0]);
    let is_placed_at_draining = |client: &(Ipv4Addr, u16)| {
        table.select_consistent_server(&FourTuple::ipv4(*client, WEB_VIP)) == Some(server_ids[0])
    };
    let clients: Vec<_> =
        std::iter::repeat_with(|| random_client(&mut rng)).filter(is_placed_at_draining).take(20).collect();
    let build_frame = |client, flags| TcpPacket { flags, ..TcpPacket::new(client, WEB_VIP) }.to_frame();
    let destinations_before: Vec<_> =
        clients.iter().map(|client| balancer.forward_frame(&build_frame(*client, SYN))).collect();
    assert!(!destinations_before.contains(&balancer.server_macs[&(0, server_ids[0])]));
    for _ in 0..10 * FLOW_TABLE_ENTRY_COUNT {
        balancer.process_frame(&build_frame(random_client(&mut rng), ACK));
    }
    let destinations_after: Vec<_> =
        clients.iter().map(|client| balancer.forward_frame(&build_frame(*client, ACK))).collect();
    assert_eq!(destinations_after, destinations_before);
}

#[test]
fn udp_flow_leaves_down_server_but_stays_at_draining_server() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(113, 0);
    let mut balancer = TestBalancer::with_model(&[udp_service(DNS_VIP)], LoadBalancerOptions::default(), &mut rng);
    let server_ids = balancer.replace_servers(0, 5, &mut rng);
    balancer.install_table(0, &random_placement_table(PlacementRule::RoundRobin, 1, 1, &server_ids, &mut rng));
    let frames: Vec<_> = (0..200).map(|_| UdpDatagram::new(random_client(&mut rng), DNS_VIP).to_frame()).collect();
    let destinations_before: Vec<_> = frames.iter().map(|frame| balancer.forward_frame(frame)).collect();
    let (draining_mac, down_mac) =
        (balancer.server_macs[&(0, server_ids[0])], balancer.server_macs[&(0, server_ids[1])]);
    drain_server(&mut balancer, server_ids[0]);
    let table = random_placement_table(PlacementRule::RoundRobin, 2, 1, &server_ids[2..], &mut rng);
    balancer.install_table(0, &PlacementTable { down_servers: vec![server_ids[1]], ..table });
    let destinations_after: Vec<_> = frames.iter().map(|frame| balancer.forward_frame(frame)).collect();
    for (previous_destination, new_destination) in destinations_before.iter().zip(&destinations_after) {
        if *previous_destination == down_mac {
            assert!(*new_destination != down_mac && *new_destination != draining_mac);
        } else {
            assert_eq!(previous_destination, new_destination);
        }
    }
    assert!(destinations_before.contains(&down_mac) && destinations_before.contains(&draining_mac));
    // The draining server is eligible again, but the table does not have it yet.
    set_server_eligible(&mut balancer, server_ids[0], true);
    assert_eq!(frames.iter().map(|frame| balancer.forward_frame(frame)).collect::<Vec<_>>(), destinations_after);
    drain_server(&mut balancer, server_ids[0]);
    // Flows that left the down server do not return when the server is up again.
    balancer.install_table(0, &random_placement_table(PlacementRule::RoundRobin, 3, 1, &server_ids[1..], &mut rng));
    assert_eq!(frames.iter().map(|frame| balancer.forward_frame(frame)).collect::<Vec<_>>(), destinations_after);
    // When all servers count as down, flows stay at their servers.
    let mut table_without_members = random_placement_table(PlacementRule::RoundRobin, 4, 1, &server_ids[1..], &mut rng);
    table_without_members.members.clear();
    table_without_members.consistent_server_by_bucket.clear();
    table_without_members.previous_consistent_server_by_bucket.clear();
    table_without_members.down_servers = server_ids[1..].to_vec();
    balancer.install_table(0, &table_without_members);
    assert_eq!(frames.iter().map(|frame| balancer.forward_frame(frame)).collect::<Vec<_>>(), destinations_after);
}

#[test]
fn idle_udp_flow_expires() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(114, 0);
    let mut balancer = TestBalancer::with_model(&[udp_service(DNS_VIP)], LoadBalancerOptions::default(), &mut rng);
    let server_ids = balancer.replace_servers(0, 5, &mut rng);
    balancer.install_table(0, &random_placement_table(PlacementRule::RoundRobin, 1, 1, &server_ids, &mut rng));
    let frame = UdpDatagram::new(random_client(&mut rng), DNS_VIP).to_frame();
    let idle_time = Duration::from_millis(100 * u64::from(intf::FLOW_IDLE_UDP_TICKS));
    let mut now = Duration::from_secs(1000);
    balancer.lb.tick_packet_clock(now);
    balancer.process_frame_expecting_counter(&frame, Some(0), "new_connection");
    for _ in 0..3 {
        now += idle_time;
        balancer.lb.tick_packet_clock(now);
        balancer.process_frame_expecting_counter(&frame, Some(0), "flow_table");
    }
    balancer.lb.tick_packet_clock(now + idle_time + Duration::from_millis(100));
    balancer.process_frame_expecting_counter(&frame, Some(0), "new_connection");
}

/// Number of entries of the flow table, which the flooded services share with the DNS service.
const FLOODED_FLOW_TABLE_ENTRY_COUNT: u32 = 1 << 15;

/// Returns clients of the DNS service whose flows get entries. At most two flows per set of eight entries are used,
/// because each service keeps two entries of a set independently of other services' packets.
fn clients_with_free_flow_entries(balancer: &TestBalancer, rng: &mut impl Rng) -> Vec<(Ipv4Addr, u16)> {
    let (hash_key, dns_index) = (balancer.lb.connection_hash_key(), balancer.service_indexes[0].as_u16());
    let mut flows_by_set: HashMap<u64, u32> = HashMap::new();
    let mut has_free_entry = |client: (Ipv4Addr, u16)| {
        let connection_hash = ConnectionHash::new(&hash_key, dns_index, client.into());
        let flows_in_set = flows_by_set
            .entry(
                (u64::from(connection_hash.low_half())
                    * u64::from(FLOODED_FLOW_TABLE_ENTRY_COUNT / intf::FLOW_SET_ENTRIES))
                    >> 32,
            )
            .or_default();
        *flows_in_set += 1;
        *flows_in_set <= 2
    };
    std::iter::repeat_with(|| random_client(rng)).filter(|client| has_free_entry(*client)).take(1000).collect()
}

/// Each of four services gets a flood that could fill the flow table ten times, while a fifth service has 1,000 flows.
#[test]
fn flood_of_one_service_moves_no_udp_flow_of_another_service() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(115, 0);
    let timestamps_off_mode = ServiceSettings { timestamps: CookieStamper::Off, ..ServiceSettings::default() };
    let hash_table_mode = ServiceSettings { consistency: ConsistencyMode::HashTable, ..ServiceSettings::default() };
    let flooded_vips: [(Ipv4Addr, u16); 4] = [80, 81, 82, 5353].map(|port| (WEB_VIP.0, port));
    let services = [
        udp_service(DNS_VIP),
        (service_address(flooded_vips[0]), ServiceSettings::default()),
        (service_address(flooded_vips[1]), timestamps_off_mode),
        (service_address(flooded_vips[2]), hash_table_mode),
        udp_service(flooded_vips[3]),
    ];
    let options = LoadBalancerOptions {
        flow_table_entry_count: FLOODED_FLOW_TABLE_ENTRY_COUNT,
        ..LoadBalancerOptions::default()
    };
    let mut balancer = TestBalancer::with_model(&services, options, &mut rng);
    for position in 0..services.len() {
        let server_ids = balancer.replace_servers(position, 5, &mut rng);
        balancer
            .install_table(position, &random_placement_table(PlacementRule::RoundRobin, 1, 1, &server_ids, &mut rng));
    }
    let clients = clients_with_free_flow_entries(&balancer, &mut rng);
    let flow_frames: Vec<_> = clients.into_iter().map(|client| UdpDatagram::new(client, DNS_VIP).to_frame()).collect();
    let destinations_before: Vec<_> = flow_frames.iter().map(|frame| balancer.forward_frame(frame)).collect();
    let mut output_buffer = vec![0; 2048];
    for (vip, (address, _)) in flooded_vips.iter().zip(&services[1..]) {
        let flags = if *vip == flooded_vips[2] { SYN } else { ACK };
        for _ in 0..FLOODED_FLOW_TABLE_ENTRY_COUNT * 10 / 4 {
            let client = random_client(&mut rng);
            let frame = match address.protocol {
                TransportProtocol::Udp => UdpDatagram::new(client, *vip).to_frame(),
                TransportProtocol::Tcp => TcpPacket { flags, ..TcpPacket::new(client, *vip) }.to_frame(),
            };
            let (xdp_action, _) =
                test_run::run_program_into_buffer(balancer.lb.program_fd(), &frame, &mut output_buffer).unwrap();
            assert_eq!(xdp_action, XDP_TX);
        }
        let destinations_after = flow_frames.iter().map(|frame| balancer.forward_frame(frame));
        let moved_flow_count =
            destinations_after.zip(&destinations_before).filter(|(after, before)| after != *before).count();
        assert_eq!(moved_flow_count, 0, "flows moved by a flood on {vip:?}");
    }
}

/// A SYN whose stamped SYN-ACK was lost is retransmitted to a second server, whose SYN-ACKs cannot be stamped yet. The
/// client may answer either SYN-ACK. Its connection goes to the server that sent the answered SYN-ACK.
#[test]
fn client_may_answer_either_the_stamped_or_unstamped_syn_ack() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(117, 0);
    let balancer = balancer_with_lb_stamping(&mut rng);
    let [stamped_mac, plain_mac] = [1, 2].map(|number| balancer.server_macs[&(0, server_id_from_number(number))]);
    let send_reply = |client, server: MacAddress, flags, tsval, counter| {
        let frame = reply_frame(client, server, flags, tsval);
        let (xdp_action, packet) = balancer.process_frame_expecting_counter(&frame, Some(0), counter);
        assert_eq!(xdp_action, XDP_PASS);
        read_u32(&packet, tsval_offset(&packet).unwrap())
    };
    // Four connections have SYN-ACKs from the same clock.
    let known_tsval = 1_000_000;
    for counter in ["reply_unchanged", "reply_unchanged", "reply_unchanged", "reply_stamped"] {
        send_reply(random_client(&mut rng), stamped_mac, SYN | ACK, known_tsval, counter);
    }
    for round in 0..200 {
        let client = random_client(&mut rng);
        let send_to_server = |tsecr, server: MacAddress, counter| {
            let frame =
                TcpPacket { tcp_options: timestamp_option(7, tsecr), ..TcpPacket::new(client, WEB_VIP) }.to_frame();
            let (xdp_action, packet) = balancer.process_frame_expecting_counter(&frame, Some(0), counter);
            assert_eq!((xdp_action, &packet[..6]), (XDP_TX, &server.0[..]), "round {round}");
        };
        let stamped_tsval = send_reply(client, stamped_mac, SYN | ACK, known_tsval, "reply_stamped");
        send_reply(client, plain_mac, SYN | ACK, stamped_tsval ^ 1 << 31, "reply_unchanged");
        if round % 2 == 0 {
            for _ in 0..2 {
                send_to_server(stamped_tsval, stamped_mac, "established");
                send_reply(client, stamped_mac, ACK, known_tsval, "reply_stamped");
                send_reply(client, plain_mac, SYN | ACK, stamped_tsval ^ 1 << 31, "reply_unchanged");
                send_reply(client, stamped_mac, ACK, known_tsval, "reply_stamped");
            }
        } else {
            send_to_server(stamped_tsval ^ 1 << 31, plain_mac, "flow_table");
            assert_eq!(send_reply(client, plain_mac, ACK, 99, "reply_unchanged"), 99);
            send_to_server(99, plain_mac, "flow_table");
        }
    }
}
