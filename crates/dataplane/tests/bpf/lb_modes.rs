//! Tests of server look-up, flow table entries and counters of `bpf/lb/lb.bpf.c` in each consistency mode
//! (`BPF_PROG_TEST_RUN`).

use std::net::Ipv4Addr;

use coreward_dataplane::lb::{LoadBalancerOptions, Server};
use coreward_intf as intf;
use coreward_model::consistency::{ConsistencyMode, CookieStamper, ServiceSettings};
use coreward_model::cookie::{self, Cookie};
use coreward_model::lb::ServerTraffic;
use coreward_model::placement::{PlacementRule, PlacementTable, PlacementTableState};
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_model::tuple::TransportProtocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};

use crate::support::balancer::{
    ExpectedIdentification, TestBalancer, VIP, XDP_DROP, XDP_TX, four_tuple_to_vip, previous_server, random_client,
    random_placement_table, service_address,
};
use crate::support::{self, ACK, FIN, RST, SYN, TcpPacket, aligned_timestamp_option, missing_bpf_rights, skip_if};

fn settings_with_consistency(consistency: ConsistencyMode) -> ServiceSettings {
    ServiceSettings { consistency, ..ServiceSettings::default() }
}

fn balancer_with_table(
    mode: ServiceSettings,
    rule: PlacementRule,
    rng: &mut impl rand::Rng,
) -> (TestBalancer, Vec<ServerId>, PlacementTable) {
    let mut balancer = TestBalancer::with_model(&[(service_address(VIP), mode)], LoadBalancerOptions::default(), rng);
    let server_ids = balancer.replace_servers(0, 9, rng);
    let table = random_placement_table(rule, 1, 2, &server_ids, rng);
    balancer.install_table(0, &table);
    (balancer, server_ids, table)
}

/// Returns the frame of a client's packet. `option_form` is 0 for no timestamp, 1 for an aligned timestamp, and 2 for
/// an unaligned timestamp.
fn client_frame(client: (Ipv4Addr, u16), flags: u8, option_form: u32) -> Vec<u8> {
    let tcp_options = match option_form {
        0 => vec![],
        1 => aligned_timestamp_option(7, if flags & SYN == 0 { 0x1234_5678 } else { 0 }),
        _ => [&[2, 4, 5, 0xb4][..], &aligned_timestamp_option(7, 99)].concat(),
    };
    TcpPacket { flags, tcp_options, ..TcpPacket::new(client, VIP) }.to_frame()
}

#[test]
fn every_packet_follows_the_rule_without_consistency() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(41, 0);
    let (mut balancer, ids, mut table) =
        balancer_with_table(settings_with_consistency(ConsistencyMode::None), PlacementRule::Table, &mut rng);
    for generation in 2..8 {
        let mut placement_state = PlacementTableState::for_table(&table);
        for _ in 0..100 {
            let client = random_client(&mut rng);
            for (flags, name) in
                [(SYN, "new_connection"), (ACK, "per_packet"), (ACK | FIN, "per_packet"), (RST, "per_packet")]
            {
                let frame = client_frame(client, flags, uniform_below(&mut rng, 3));
                let chosen_server = table.select_server(&mut placement_state, &four_tuple_to_vip(client)).unwrap();
                balancer.expect_sent_to(0, &frame, chosen_server, name);
            }
        }
        table = random_placement_table(PlacementRule::PowerOfTwo, generation, 1, &ids, &mut rng);
        balancer.install_table(0, &table);
    }
    assert_eq!(balancer.event_count(0, "flow_inserted"), 0);
}

#[test]
fn hash_table_mode_keeps_the_server_that_the_rule_chose() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(42, 0);
    let (mut balancer, ids, table) =
        balancer_with_table(settings_with_consistency(ConsistencyMode::HashTable), PlacementRule::Table, &mut rng);
    let mut placement_state = PlacementTableState::for_table(&table);
    let mut connections = Vec::new();
    for _ in 0..100 {
        let client = random_client(&mut rng);
        let chosen_server = table.select_server(&mut placement_state, &four_tuple_to_vip(client)).unwrap();
        // A packet of an unknown connection that is no SYN is placed by the rule and gets no flow table entry.
        for (flags, counter) in [(ACK, "per_packet"), (SYN, "new_connection")] {
            let frame = client_frame(client, flags, uniform_below(&mut rng, 3));
            balancer.expect_sent_to(0, &frame, chosen_server, counter);
        }
        connections.push((client, chosen_server));
    }
    assert_eq!(balancer.event_count(0, "flow_inserted"), 100);
    let other_table = random_placement_table(PlacementRule::RoundRobin, 2, 1, &ids[1..], &mut rng);
    balancer.install_table(0, &other_table);
    for (client, chosen_server) in &connections {
        for flags in [ACK, ACK | FIN, RST] {
            balancer.expect_sent_to(
                0,
                &client_frame(*client, flags, uniform_below(&mut rng, 3)),
                *chosen_server,
                "flow_table",
            );
        }
    }
    // An unresolved server keeps its connections, but the connections of a removed server are placed by the rule.
    let (client, chosen_server) = connections[0];
    balancer.lb.set_server(balancer.service_indexes[0], chosen_server, Server { mac: None, is_eligible: true });
    balancer.expect_unforwarded(&client_frame(client, ACK, 1), XDP_DROP, 0, "drop_server_unresolved");
    balancer.lb.remove_server(balancer.service_indexes[0], chosen_server);
    let (xdp_action, _) =
        balancer.process_frame_expecting_counter(&client_frame(client, ACK, 1), Some(0), "per_packet");
    assert_eq!(xdp_action, XDP_TX);
}

#[test]
fn beamer_packets_go_to_bucket_server_and_contain_previous_server() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(43, 0);
    let (balancer, _, table) =
        balancer_with_table(settings_with_consistency(ConsistencyMode::Beamer), PlacementRule::LeastAssigned, &mut rng);
    let mut previous_server_count = 0;
    for _ in 0..200 {
        let client = random_client(&mut rng);
        let previous_id = previous_server(&table, &four_tuple_to_vip(client));
        previous_server_count += usize::from(previous_id.is_some());
        let chosen_server = table.select_consistent_server(&four_tuple_to_vip(client)).unwrap();
        for flags in [SYN, ACK, ACK | FIN, RST] {
            let frame = client_frame(client, flags, uniform_below(&mut rng, 3));
            balancer.expect_sent_with_identification(
                0,
                &frame,
                chosen_server,
                ExpectedIdentification::PreviousServer(previous_id),
                "bucket_hash",
            );
        }
    }
    assert!((50..180).contains(&previous_server_count), "{previous_server_count} of 200 with a server before");
    assert_eq!(balancer.event_count(0, "flow_inserted"), 0);
}

/// Sends a packet with an aligned timestamp. Returns the server to which the program forwards it, and the forwarded
/// packet's IP identification, which contains the previous server.
fn send_packet(balancer: &TestBalancer, client: (Ipv4Addr, u16), flags: u8, case_name: &str) -> (ServerId, u16) {
    let (xdp_action, frame) = balancer.process_frame(&client_frame(client, flags, 1));
    assert_eq!(xdp_action, XDP_TX, "{case_name}: flags {flags:#x}");
    (balancer.server_with_mac(&frame[..6]), u16::from_be_bytes([frame[18], frame[19]]))
}

/// A SYN must not go to its bucket's server if that server takes no new connections. Without a controller, the
/// placement table still contains the server.
#[test]
fn beamer_syn_avoids_its_buckets_server_if_ineligible() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(50, 0);
    for (name, is_down) in [("drains", false), ("is down by the load balancer's own checks", true)] {
        let (mut balancer, _, table) = balancer_with_table(
            settings_with_consistency(ConsistencyMode::Beamer),
            PlacementRule::LeastAssigned,
            &mut rng,
        );
        let avoided_server = table.consistent_server_by_bucket[0];
        let service_index = balancer.service_indexes[0];
        let clients: Vec<_> = std::iter::repeat_with(|| random_client(&mut rng))
            .filter(|client| table.select_consistent_server(&four_tuple_to_vip(*client)) == Some(avoided_server))
            .take(50)
            .collect();
        let server_mac = Some(balancer.server_macs[&(0, avoided_server)]);
        balancer.lb.set_server(service_index, avoided_server, Server { mac: server_mac, is_eligible: false });
        balancer.lb.set_server_masked(service_index, avoided_server, is_down);
        // An established connection stays at the server of its bucket.
        let (open_client, clients) = clients.split_last().unwrap();
        assert_eq!(send_packet(&balancer, *open_client, ACK, name).0, avoided_server, "{name}");
        let new_connection_destinations: Vec<_> =
            clients.iter().map(|client| send_packet(&balancer, *client, SYN, name)).collect();
        for (client, destination) in clients.iter().zip(&new_connection_destinations) {
            assert!(
                destination.0 != avoided_server && destination.1 == avoided_server.get(),
                "{name}: {destination:?}, and {avoided_server} is the server before"
            );
            for flags in [SYN, ACK, RST] {
                assert_eq!(send_packet(&balancer, *client, flags, name), *destination, "{name}");
            }
        }
        assert_eq!(send_packet(&balancer, *open_client, RST, name).0, avoided_server, "{name}");
        // The server takes new connections again. Connections that were opened at other servers stay there.
        balancer.lb.set_server(service_index, avoided_server, Server { mac: server_mac, is_eligible: true });
        balancer.lb.set_server_masked(service_index, avoided_server, false);
        for (client, destination) in clients.iter().zip(&new_connection_destinations) {
            assert_eq!(send_packet(&balancer, *client, ACK, name), *destination, "{name}, and returned");
        }
        assert_eq!(send_packet(&balancer, *open_client, SYN, name).0, avoided_server, "{name}, and returned");
        assert_eq!(balancer.event_count(0, "flow_inserted"), 49, "{name}");
    }
}

/// Returns a TSecr whose cookie contains `server`.
fn tsecr_with_cookie(balancer: &TestBalancer, tuple: &FourTuple, server: ServerId) -> u32 {
    cookie::stamp_tsval(&balancer.fleet_keys, &support::FOREIGN_TIME_KEY, tuple, Cookie::Server(server), 5)
}

/// Asserts that `frame` is sent to `server`, with the previous server `previous_id` in the IP identification.
fn expect_sent_with_previous_server(
    balancer: &TestBalancer,
    frame: &[u8],
    server: ServerId,
    previous_id: Option<ServerId>,
    counter: &str,
) {
    balancer.expect_sent_with_identification(
        0,
        frame,
        server,
        ExpectedIdentification::PreviousServer(previous_id),
        counter,
    );
}

#[test]
fn connections_use_the_flow_table_when_timestamps_are_off() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(44, 0);
    let timestamps_off_mode = ServiceSettings { timestamps: CookieStamper::Off, ..ServiceSettings::default() };
    let (mut balancer, ids, table) = balancer_with_table(timestamps_off_mode, PlacementRule::Table, &mut rng);
    let mut connections = Vec::new();
    for _ in 0..100 {
        let client = random_client(&mut rng);
        let chosen_server = table.select_consistent_server(&four_tuple_to_vip(client)).unwrap();
        let previous_id = previous_server(&table, &four_tuple_to_vip(client));
        for (flags, name) in [(SYN, "bucket_hash"), (ACK, "bucket_hash"), (ACK, "flow_table")] {
            let frame = client_frame(client, flags, uniform_below(&mut rng, 3));
            expect_sent_with_previous_server(&balancer, &frame, chosen_server, previous_id, name);
        }
        // With `timestamps = "off"` the program ignores cookies.
        let other_server = ids[uniform_below(&mut rng, ids.len() as u32) as usize];
        let tsecr = tsecr_with_cookie(&balancer, &four_tuple_to_vip(client), other_server);
        let frame =
            TcpPacket { tcp_options: aligned_timestamp_option(1, tsecr), ..TcpPacket::new(client, VIP) }.to_frame();
        expect_sent_with_previous_server(&balancer, &frame, chosen_server, previous_id, "flow_table");
        connections.push((client, chosen_server, previous_id));
    }
    // With another pool, connections in the flow table keep their server and their previous server.
    let next_table = random_placement_table(PlacementRule::Table, 2, 1, &ids[3..], &mut rng);
    balancer.install_table(0, &next_table);
    for (client, chosen_server, previous_id) in connections {
        let fin_frame = client_frame(client, ACK | FIN, 1);
        expect_sent_with_previous_server(&balancer, &fin_frame, chosen_server, previous_id, "flow_table");
    }
    // Without a flow table entry, a connection's server is unknown, so its resets are broadcast.
    let no_server_identification = ExpectedIdentification::PreviousServer(None);
    for options in 0..3 {
        let rst_frame = client_frame(random_client(&mut rng), RST, options);
        balancer.expect_broadcast_or_dropped(0, &rst_frame, no_server_identification, "drop_broadcast_rate_limited");
    }
}

#[test]
fn flow_of_removed_server_moves_to_its_buckets_server() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(45, 0);
    let (mut balancer, ids, table) = balancer_with_table(ServiceSettings::default(), PlacementRule::Table, &mut rng);
    let client_address = std::iter::repeat_with(|| random_client(&mut rng))
        .find(|client| table.select_consistent_server(&four_tuple_to_vip(*client)) == Some(ids[0]))
        .unwrap();
    let frame = client_frame(client_address, ACK, 0);
    let expected_identification = |table: &PlacementTable| {
        ExpectedIdentification::PreviousServer(previous_server(table, &four_tuple_to_vip(client_address)))
    };
    balancer.expect_sent_with_identification(0, &frame, ids[0], expected_identification(&table), "bucket_hash");
    balancer.expect_sent_with_identification(0, &frame, ids[0], expected_identification(&table), "flow_table");
    balancer.lb.set_server(balancer.service_indexes[0], ids[0], Server { mac: None, is_eligible: false });
    balancer.expect_unforwarded(&frame, XDP_DROP, 0, "drop_server_unresolved");
    balancer.lb.remove_server(balancer.service_indexes[0], ids[0]);
    balancer.expect_unforwarded(&frame, XDP_DROP, 0, "drop_no_eligible_server");
    let next_table = random_placement_table(PlacementRule::Table, 2, 1, &ids[1..], &mut rng);
    balancer.install_table(0, &next_table);
    let chosen_server = next_table.select_consistent_server(&four_tuple_to_vip(client_address)).unwrap();
    balancer.expect_sent_with_identification(
        0,
        &frame,
        chosen_server,
        expected_identification(&next_table),
        "bucket_hash",
    );
    balancer.expect_sent_with_identification(
        0,
        &frame,
        chosen_server,
        expected_identification(&next_table),
        "flow_table",
    );
}

#[test]
fn flow_table_is_bounded_and_forgets_removed_services() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(46, 0);
    let other_vip = (Ipv4Addr::new(10, 200, 0, 1), 443);
    let services =
        [VIP, other_vip].map(|vip| (service_address(vip), settings_with_consistency(ConsistencyMode::HashTable)));
    let options = LoadBalancerOptions { flow_table_entry_count: 4096, ..LoadBalancerOptions::default() };
    let mut balancer = TestBalancer::with_model(&services, options, &mut rng);
    let set_up_servers = |balancer: &mut TestBalancer, rng: &mut rand_xoshiro::Xoshiro256PlusPlus| {
        for position in 0..2 {
            let server_ids = balancer.replace_servers(position, 2, rng);
            balancer.install_table(position, &random_placement_table(PlacementRule::Table, 1, 1, &server_ids, rng));
        }
    };
    set_up_servers(&mut balancer, &mut rng);
    let clients: Vec<_> = (0..20_000).map(|_| random_client(&mut rng)).collect();
    let count_flow_table_hits = |balancer: &TestBalancer, position: usize| {
        let flow_table_counter = intf::LB_COUNTER_FLOW_TABLE as usize;
        let read_count =
            || balancer.lb.service_counters(balancer.service_indexes[position]).packets_by_outcome[flow_table_counter];
        let count_before = read_count();
        for client in &clients {
            balancer.process_frame(&TcpPacket::new(*client, [VIP, other_vip][position]).to_frame());
        }
        read_count() - count_before
    };
    for client in &clients {
        balancer.process_frame(&TcpPacket { flags: SYN, ..TcpPacket::new(*client, VIP) }.to_frame());
    }
    let flow_table_hit_count = count_flow_table_hits(&balancer, 0);
    assert!((1..=4096).contains(&flow_table_hit_count), "{flow_table_hit_count} of 20,000 remembered");

    // A new service reuses a removed service's index, but not its flow table entries.
    balancer.service_indexes = balancer.lb.set_services(&services[1..]).unwrap();
    balancer.service_indexes = balancer.lb.set_services(&services).unwrap();
    set_up_servers(&mut balancer, &mut rng);
    assert_eq!(count_flow_table_hits(&balancer, 0), 0);
}

#[test]
fn flow_table_of_an_invalid_size_is_rejected() {
    skip_if!(missing_bpf_rights());
    for entries in [0, coreward_dataplane::lb::MAX_FLOW_TABLE_ENTRIES + 1] {
        let options = LoadBalancerOptions { flow_table_entry_count: entries, ..LoadBalancerOptions::default() };
        let error = coreward_dataplane::lb::LoadBalancer::load(options).unwrap_err().to_string();
        assert_eq!(error, format!("a flow table of {entries} entries: expected 1 to 16777216"));
    }
}

/// Returns a server's numbers of opened connections, closed connections, packets and bytes.
fn server_traffic_counts(balancer: &TestBalancer, server: ServerId) -> [u64; 4] {
    let ServerTraffic { opened_connection_count, closed_connection_count, packet_count, frame_bytes } =
        balancer.lb.server_traffic(server);
    [opened_connection_count, closed_connection_count, packet_count, frame_bytes]
}

#[test]
fn traffic_is_counted_by_server() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(47, 0);
    let (mut balancer, ids, table) = balancer_with_table(ServiceSettings::default(), PlacementRule::Table, &mut rng);
    let client_address = random_client(&mut rng);
    let server =
        table.select_server(&mut PlacementTableState::for_table(&table), &four_tuple_to_vip(client_address)).unwrap();
    let tsecr = tsecr_with_cookie(&balancer, &four_tuple_to_vip(client_address), server);
    let frame_with_cookie = |flags| {
        TcpPacket { flags, tcp_options: aligned_timestamp_option(1, tsecr), ..TcpPacket::new(client_address, VIP) }
            .to_frame()
    };
    let frames = [
        client_frame(client_address, SYN, 1),
        frame_with_cookie(ACK),
        frame_with_cookie(ACK | FIN),
        frame_with_cookie(RST),
    ];
    for frame in &frames {
        balancer.forward_frame(frame);
    }
    assert_eq!(server_traffic_counts(&balancer, server), [1, 2, 0, 0]);
    balancer.lb.set_server_traffic_counting(true).unwrap();
    for frame in &frames {
        balancer.forward_frame(frame);
    }
    let sent_bytes: u64 = frames.iter().map(|frame| frame.len() as u64).sum();
    assert_eq!(server_traffic_counts(&balancer, server), [2, 4, 4, sent_bytes]);
    // Broadcast and dropped packets count for no server.
    balancer.process_frame(&client_frame(random_client(&mut rng), RST, 0));
    balancer.lb.set_server(balancer.service_indexes[0], server, Server { mac: None, is_eligible: true });
    balancer.expect_unforwarded(&frame_with_cookie(ACK), XDP_DROP, 0, "drop_server_unresolved");
    let packets_by_server: Vec<u64> = ids.iter().map(|id| balancer.lb.server_traffic(*id).packet_count).collect();
    assert_eq!(packets_by_server.iter().sum::<u64>(), 4, "{packets_by_server:?}");
    balancer.lb.set_server_traffic_counting(false).unwrap();
    assert_eq!(balancer.lb.server_traffic(server).packet_count, 4);
}

/// The counts must stay right, although an attacker may repeatedly send forged packets to one server.
#[test]
fn forged_packets_do_not_change_connection_counts() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(49, 0);
    let timestamps_off_mode = ServiceSettings { timestamps: CookieStamper::Off, ..ServiceSettings::default() };
    let tested_modes = [ConsistencyMode::Stateless, ConsistencyMode::Stateful, ConsistencyMode::HashTable]
        .map(settings_with_consistency);
    for mode in tested_modes.into_iter().chain([timestamps_off_mode]) {
        let (balancer, ids, _) = balancer_with_table(mode, PlacementRule::Table, &mut rng);
        let sum_over_servers = |select_counter: fn(&ServerTraffic) -> u64| {
            ids.iter().map(|id| select_counter(&balancer.lb.server_traffic(*id))).sum::<u64>()
        };
        let client_address = random_client(&mut rng);
        // An ACK stores a hint in the flow table, and a SYN of a hash-table service stores an entry.
        for flags in [&[ACK | FIN; 200][..], &[ACK, ACK | FIN, RST], &[SYN; 200], &[ACK | FIN; 200]].concat() {
            balancer.process_frame(&client_frame(client_address, flags, 0));
        }
        let uses_hash_table = mode.consistency == ConsistencyMode::HashTable;
        assert_eq!(
            (
                sum_over_servers(|traffic| traffic.opened_connection_count),
                sum_over_servers(|of| of.closed_connection_count)
            ),
            (u64::from(uses_hash_table), 0),
            "{mode:?}"
        );
    }
}

fn vip_of_service(position: usize) -> (Ipv4Addr, u16) {
    (VIP.0, 80 + position as u16)
}

/// Asserts that a SYN and two later packets of `client` are forwarded as the service's consistency mode requires.
fn expect_packets_follow_mode(
    balancer: &TestBalancer,
    position: usize,
    mode: ServiceSettings,
    table: &PlacementTable,
    client: (Ipv4Addr, u16),
) {
    let tuple = FourTuple::ipv4(client, vip_of_service(position));
    let rule_server = table.select_server(&mut PlacementTableState::for_table(table), &tuple).unwrap();
    let bucket_server = table.select_consistent_server(&tuple).unwrap();
    let tsecr = tsecr_with_cookie(balancer, &tuple, rule_server);
    let syn_packet = TcpPacket {
        flags: SYN,
        tcp_options: aligned_timestamp_option(1, 0),
        ..TcpPacket::new(client, vip_of_service(position))
    };
    let ack_packet = TcpPacket { flags: ACK, tcp_options: aligned_timestamp_option(2, tsecr), ..syn_packet.clone() };
    let previous_server_identification = ExpectedIdentification::PreviousServer(previous_server(table, &tuple));
    let unchanged_identification = ExpectedIdentification::Unchanged;
    let (server, identification, counter_names) = match (mode.timestamps, mode.consistency) {
        (CookieStamper::Off, _) => {
            (bucket_server, previous_server_identification, ["bucket_hash", "bucket_hash", "flow_table"])
        }
        (_, ConsistencyMode::Beamer) => (bucket_server, previous_server_identification, ["bucket_hash"; 3]),
        (_, ConsistencyMode::None) => {
            (rule_server, unchanged_identification, ["new_connection", "per_packet", "per_packet"])
        }
        (_, ConsistencyMode::HashTable) => {
            (rule_server, unchanged_identification, ["new_connection", "flow_table", "flow_table"])
        }
        _ => (rule_server, unchanged_identification, ["new_connection", "established", "established"]),
    };
    for (frame, name) in [&syn_packet, &ack_packet, &ack_packet].into_iter().zip(counter_names) {
        balancer.expect_sent_with_identification(position, &frame.to_frame(), server, identification, name);
    }
}

/// The program for all modes treats each service like the program that supports only the mode of that service.
#[test]
fn services_of_different_consistency_modes_coexist() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(48, 0);
    let mut modes: Vec<ServiceSettings> = ConsistencyMode::ALL.into_iter().map(settings_with_consistency).collect();
    modes.push(ServiceSettings { timestamps: CookieStamper::Off, ..ServiceSettings::default() });
    let services_with_modes = |modes: &[ServiceSettings]| -> Vec<(ServiceAddress, ServiceSettings)> {
        modes.iter().enumerate().map(|(position, mode)| (service_address(vip_of_service(position)), *mode)).collect()
    };
    let mut balancer = TestBalancer::with_model(&services_with_modes(&modes), LoadBalancerOptions::default(), &mut rng);
    let mut tables = Vec::new();
    for position in 0..modes.len() {
        let server_ids = balancer.replace_servers(position, 5, &mut rng);
        tables.push(random_placement_table(PlacementRule::Table, 1, 1, &server_ids, &mut rng));
        balancer.install_table(position, &tables[position]);
    }
    for round in 0..modes.len() {
        for (position, mode) in modes.iter().enumerate() {
            for _ in 0..20 {
                let client = random_client(&mut rng);
                expect_packets_follow_mode(&balancer, position, *mode, &tables[position], client);
            }
        }
        // Each service gets the mode of the next service. Indexes, servers and tables stay.
        modes.rotate_left(1);
        let service_indexes = balancer.lb.set_services(&services_with_modes(&modes)).unwrap();
        assert_eq!(service_indexes, balancer.service_indexes, "round {round}");
    }
}

#[test]
fn rejected_service_settings_change_nothing() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(49, 0);
    let (mut balancer, _, _) =
        balancer_with_table(settings_with_consistency(ConsistencyMode::Beamer), PlacementRule::Table, &mut rng);
    let udp_address = ServiceAddress { protocol: TransportProtocol::Udp, ..service_address(VIP) };
    let mut find_rejection_error = |service| balancer.lb.set_services(&[service]).unwrap_err().to_string();
    assert_eq!(
        find_rejection_error((udp_address, settings_with_consistency(ConsistencyMode::Beamer))),
        "service 10.200.0.1:80/udp: consistency \"beamer\" needs TCP: expected \"hash-table\" or \"none\""
    );
    let lb_stamping_mode = ServiceSettings {
        timestamps: CookieStamper::LoadBalancer,
        ..settings_with_consistency(ConsistencyMode::Beamer)
    };
    assert_eq!(
        find_rejection_error((service_address(VIP), lb_stamping_mode)),
        "service 10.200.0.1:80/tcp: timestamps by the load balancer need consistency \"stateless\" and TCP"
    );
    let (xdp_action, _) = balancer.process_frame_expecting_counter(
        &client_frame(random_client(&mut rng), ACK, 1),
        Some(0),
        "bucket_hash",
    );
    assert_eq!(xdp_action, XDP_TX);
}
