//! Comparison of each decision of `bpf/lb/lb.bpf.c` with the model (`BPF_PROG_TEST_RUN`). The packets are new
//! connections under every rule, packets with cookies, and packets without timestamps.

use std::collections::HashSet;
use std::net::{Ipv4Addr, SocketAddrV4};

use coreward_dataplane::lb::{BroadcastRateLimits, LoadBalancerOptions, PacketRateLimit, Server};
use coreward_dataplane::mac::MacAddress;
use coreward_intf as intf;
use coreward_model::consistency::ServiceSettings;
use coreward_model::cookie::{self, Cookie};
use coreward_model::placement::{PlacementRule, PlacementTable, PlacementTableState};
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_model::{FourTuple, ServerId};
use rand::Rng as _;

use crate::support::balancer::{
    ExpectedIdentification, TestBalancer, VIP, XDP_DROP, XDP_TX, four_tuple_to_vip, random_client,
    random_placement_table, service_address,
};
use crate::support::{
    self, ACK, FIN, RST, SYN, TcpPacket, aligned_timestamp_option, missing_bpf_rights, skip_if, timestamp_option,
};

fn syn_frame(client: (Ipv4Addr, u16)) -> Vec<u8> {
    let options = [&[2, 4, 5, 0xb4, 4, 2][..], &timestamp_option(77, 0), &[1, 3, 3, 7]].concat();
    TcpPacket { flags: SYN, tcp_options: options, payload: vec![], ..TcpPacket::new(client, VIP) }.to_frame()
}

#[test]
fn new_connections_go_to_the_models_server() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(1, 0);
    let mut balancer = TestBalancer::new(&[VIP], &mut rng);
    let mut clients = HashSet::new();
    let mut generation = 0;
    // The rules are in the outer loop, because each rule needs another variant of the program.
    for rule in PlacementRule::ALL {
        for round in 0..8 {
            let server_count = 1 + uniform_below(&mut rng, 40) as usize;
            let server_ids = balancer.replace_servers(0, server_count, &mut rng);
            let group_count = 1 + round % intf::MAX_RSS_GROUPS as usize;
            generation += 1;
            let table = random_placement_table(rule, generation, group_count, &server_ids, &mut rng);
            let mut placement_state = PlacementTableState::for_table(&table);
            // The round robin counter continues from table to table.
            placement_state.round_robin_counter = balancer.round_robin_connection_count;
            balancer.install_table(0, &table);
            for _ in 0..450 {
                let client = random_client(&mut rng);
                if !clients.insert(client) {
                    continue;
                }
                let chosen_server =
                    table.select_server(&mut placement_state, &four_tuple_to_vip(client)).expect("there are members");
                balancer.expect_sent_to(0, &syn_frame(client), chosen_server, "new_connection");
            }
            balancer.round_robin_connection_count = placement_state.round_robin_counter;
        }
    }
}

#[test]
fn connection_without_timestamps_stays_at_its_buckets_server() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(2, 0);
    let mut balancer = TestBalancer::new(&[VIP], &mut rng);
    let server_ids = balancer.replace_servers(0, 7, &mut rng);
    for (generation, rule) in PlacementRule::ALL.into_iter().enumerate() {
        let table = random_placement_table(rule, generation as u64, 2, &server_ids, &mut rng);
        balancer.install_table(0, &table);
        for _ in 0..200 {
            let client = random_client(&mut rng);
            let chosen_server = table.select_consistent_server(&four_tuple_to_vip(client)).expect("one per bucket");
            let previous_server_identification = ExpectedIdentification::PreviousServer(
                support::balancer::previous_server(&table, &four_tuple_to_vip(client)),
            );
            let inserted_count_before = balancer.event_count(0, "flow_inserted");
            // The first packet that is not a SYN enters the connection into the flow table.
            let flags_and_options = [
                (SYN, vec![2, 4, 5, 0xb4], "bucket_hash", 0),
                (SYN, vec![2, 4, 5, 0xb4], "bucket_hash", 0),
                (ACK, vec![], "bucket_hash", 1),
                (ACK | FIN, vec![1, 1, 1, 0], "flow_table", 1),
                (RST, vec![], "flow_table", 1),
            ];
            for (flags, options, name, inserted_count) in flags_and_options {
                let frame = TcpPacket { flags, tcp_options: options, ..TcpPacket::new(client, VIP) }.to_frame();
                balancer.expect_sent_with_identification(
                    0,
                    &frame,
                    chosen_server,
                    previous_server_identification,
                    name,
                );
                assert_eq!(balancer.event_count(0, "flow_inserted") - inserted_count_before, inserted_count);
            }
        }
    }
    // Packets to an unresolved server are dropped, because no other server has the connection.
    let client = random_client(&mut rng);
    let chosen_server = newest_placement_table(&balancer).select_consistent_server(&four_tuple_to_vip(client)).unwrap();
    balancer.lb.set_server(balancer.service_indexes[0], chosen_server, Server { mac: None, is_eligible: true });
    let frame = TcpPacket::new(client, VIP).to_frame();
    balancer.expect_unforwarded(&frame, XDP_DROP, 0, "drop_server_unresolved");
}

fn newest_placement_table(balancer: &TestBalancer) -> PlacementTable {
    balancer.newest_table.clone().expect("a table was installed")
}

#[test]
fn established_packets_follow_the_cookie_not_the_table() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(3, 0);
    let mut balancer = TestBalancer::new(&[VIP], &mut rng);
    let server_ids = balancer.replace_servers(0, 300, &mut rng);
    for round in 0..3000 {
        if round % 500 == 0 {
            balancer.set_random_keys(&mut rng);
            let rule = PlacementRule::ALL[round / 500 % 4];
            let table = random_placement_table(rule, round as u64 + 1, 1, &server_ids, &mut rng);
            balancer.install_table(0, &table);
        }
        let client = random_client(&mut rng);
        let server = server_ids[uniform_below(&mut rng, server_ids.len() as u32) as usize];
        let tsecr = balancer.stamp_tsval_by_random_key(&four_tuple_to_vip(client), server, &mut rng);
        // The timestamp has aligned and other offsets. Packets have IP options, and come with and without payload.
        let aligned_option = aligned_timestamp_option(rng.next_u32(), tsecr);
        let timestamp_option = timestamp_option(rng.next_u32(), tsecr);
        let unaligned_option = [&[1][..], &timestamp_option, &[0]].concat();
        let timestamp_after_other_options = [&[254, 5, 1, 2, 3, 2, 4, 0, 0, 1, 1, 1][..], &timestamp_option].concat();
        let timestamp_after_unknown_option = [&[5, 10, 0, 0, 0, 1, 0, 0, 0, 9][..], &timestamp_option].concat();
        let possible_tcp_flags = [ACK, ACK | FIN, ACK | RST, RST, ACK | 0x08, ACK | 0x20 | 0xc0];
        for options in [
            aligned_option.clone(),
            unaligned_option,
            timestamp_after_other_options,
            timestamp_after_unknown_option,
            aligned_option,
        ] {
            let flags = possible_tcp_flags[uniform_below(&mut rng, possible_tcp_flags.len() as u32) as usize];
            let payload = vec![0x5a; uniform_below(&mut rng, 1400) as usize];
            let ip_options = vec![1; 4 * uniform_below(&mut rng, 2) as usize * uniform_below(&mut rng, 11) as usize];
            let frame = TcpPacket { flags, tcp_options: options, payload, ip_options, ..TcpPacket::new(client, VIP) }
                .to_frame();
            balancer.expect_sent_to(0, &frame, server, "established");
        }
    }
}

#[test]
fn packets_with_random_tsecr_have_the_models_outcome() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(4, 0);
    let mut balancer = TestBalancer::new(&[VIP], &mut rng);
    // A quarter of all ids are known servers, half of which have a MAC address.
    let server_ids = balancer.replace_servers(0, 4096, &mut rng);
    let unresolved_ids: HashSet<ServerId> = server_ids.iter().copied().step_by(2).collect();
    for server in &unresolved_ids {
        balancer.lb.set_server(balancer.service_indexes[0], *server, Server { mac: None, is_eligible: true });
    }
    let known_ids: HashSet<ServerId> = server_ids.iter().copied().collect();
    let mut packet_counts_by_outcome = [0; 3];
    for _ in 0..4000 {
        let client = random_client(&mut rng);
        let tsecr = rng.next_u32();
        let frame =
            TcpPacket { tcp_options: aligned_timestamp_option(1, tsecr), ..TcpPacket::new(client, VIP) }.to_frame();
        match cookie::decode_cookie(&balancer.fleet_keys, &four_tuple_to_vip(client), tsecr) {
            Cookie::Server(server) if unresolved_ids.contains(&server) => {
                packet_counts_by_outcome[0] += 1;
                balancer.expect_unforwarded(&frame, XDP_DROP, 0, "drop_server_unresolved");
            }
            Cookie::Server(server) if known_ids.contains(&server) => {
                packet_counts_by_outcome[1] += 1;
                balancer.expect_sent_to(0, &frame, server, "established");
            }
            _ => {
                packet_counts_by_outcome[2] += 1;
                balancer.expect_broadcast_or_dropped(
                    0,
                    &frame,
                    ExpectedIdentification::Unchanged,
                    "drop_unknown_cookie",
                );
            }
        }
    }
    assert!(packet_counts_by_outcome.iter().all(|count| *count > 200), "{packet_counts_by_outcome:?}");
}

#[test]
fn retransmitted_syn_reaches_the_same_server_until_the_next_table() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(5, 0);
    let mut balancer = TestBalancer::new(&[VIP], &mut rng);
    let server_ids = balancer.replace_servers(0, 8, &mut rng);
    for (generation, rule) in PlacementRule::ALL.into_iter().enumerate() {
        let table = random_placement_table(rule, generation as u64 + 10, 1, &server_ids, &mut rng);
        balancer.install_table(0, &table);
        let mut moved_connection_count = 0;
        for _ in 0..100 {
            let client = random_client(&mut rng);
            let first_destination = balancer.forward_frame(&syn_frame(client));
            // Other connections open between the SYN and its retransmission.
            for _ in 0..3 {
                balancer.forward_frame(&syn_frame(self::random_client(&mut rng)));
            }
            moved_connection_count += usize::from(balancer.forward_frame(&syn_frame(client)) != first_destination);
        }
        // The memory of recent placements has 4096 entries, some of which are overwritten by other connections.
        assert!(
            moved_connection_count <= 10,
            "{rule:?}: {moved_connection_count} of 100 retransmissions went elsewhere"
        );
    }
    // Under a new table, the retransmission is placed again. By then the round robin counter has grown.
    let client = random_client(&mut rng);
    let table = random_placement_table(PlacementRule::RoundRobin, 20, 1, &server_ids, &mut rng);
    balancer.install_table(0, &table);
    let first_destination = balancer.forward_frame(&syn_frame(client));
    balancer.install_table(0, &PlacementTable { generation: 21, ..table });
    assert_ne!(balancer.forward_frame(&syn_frame(client)), first_destination);
}

#[test]
fn new_connections_avoid_ineligible_servers() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(6, 0);
    let mut balancer = TestBalancer::new(&[VIP], &mut rng);
    let server_ids = balancer.replace_servers(0, 10, &mut rng);
    let service_index = balancer.service_indexes[0];
    // Only two of ten servers take new connections. The others are removed, draining or unresolved.
    let eligible_ids = [server_ids[3], server_ids[8]];
    for (position, server) in server_ids.iter().enumerate().filter(|(_, server)| !eligible_ids.contains(server)) {
        match position % 3 {
            0 => balancer.lb.remove_server(service_index, *server),
            1 => balancer.lb.set_server(service_index, *server, Server { mac: None, is_eligible: true }),
            _ => {
                let server_mac = Some(balancer.server_macs[&(0, *server)]);
                balancer.lb.set_server(service_index, *server, Server { mac: server_mac, is_eligible: false });
            }
        }
    }
    let eligible_macs = eligible_ids.map(|server| balancer.server_macs[&(0, server)]);
    for (generation, rule) in PlacementRule::ALL.into_iter().enumerate() {
        let table = random_placement_table(rule, generation as u64 + 1, 1, &server_ids, &mut rng);
        balancer.install_table(0, &table);
        let mut reached_macs = HashSet::new();
        for _ in 0..100 {
            let destination = balancer.forward_frame(&syn_frame(random_client(&mut rng)));
            assert!(eligible_macs.contains(&destination), "{rule:?}: sent to {destination}");
            reached_macs.insert(destination);
        }
        assert_eq!(reached_macs.len(), 2, "{rule:?}");
    }
    for server in eligible_ids {
        balancer.lb.set_server(service_index, server, Server { mac: None, is_eligible: true });
    }
    balancer.expect_unforwarded(&syn_frame(random_client(&mut rng)), XDP_DROP, 0, "drop_no_eligible_server");
}

#[test]
fn new_connection_without_table_or_members_is_dropped() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(7, 0);
    let mut balancer = TestBalancer::new(&[VIP], &mut rng);
    let some_client = random_client(&mut rng);
    balancer.expect_unforwarded(&syn_frame(some_client), XDP_DROP, 0, "drop_no_eligible_server");
    balancer.expect_unforwarded(&TcpPacket::new(some_client, VIP).to_frame(), XDP_DROP, 0, "drop_no_eligible_server");
    let server_ids = balancer.replace_servers(0, 4, &mut rng);
    let mut table = random_placement_table(PlacementRule::LeastAssigned, 1, 1, &server_ids, &mut rng);
    table.members.clear();
    table.consistent_server_by_bucket.clear();
    table.previous_consistent_server_by_bucket.clear();
    balancer.install_table(0, &table);
    balancer.expect_unforwarded(&syn_frame(some_client), XDP_DROP, 0, "drop_no_eligible_server");
    assert_eq!(balancer.lb.placement_table_generation(balancer.service_indexes[0]), None);
}

#[test]
fn services_have_separate_servers_and_tables() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(8, 0);
    let other_vip = (Ipv4Addr::new(10, 200, 0, 1), 443);
    let mut balancer = TestBalancer::new(&[VIP, other_vip], &mut rng);
    let first_servers = balancer.replace_servers(0, 3, &mut rng);
    let second_servers = balancer.replace_servers(1, 3, &mut rng);
    let tables = [(0, PlacementRule::Table, &first_servers), (1, PlacementRule::PowerOfTwo, &second_servers)]
        .map(|(service, rule, ids)| (service, random_placement_table(rule, 1, 1, ids, &mut rng)));
    for (service, table) in &tables {
        balancer.install_table(*service, table);
    }
    for (service, table) in &tables {
        let vip = [VIP, other_vip][*service];
        let mut placement_state = PlacementTableState::for_table(table);
        for _ in 0..200 {
            let client = random_client(&mut rng);
            let chosen_server = table.select_server(&mut placement_state, &FourTuple::ipv4(client, vip)).unwrap();
            let packet_to_vip =
                TcpPacket { destination: SocketAddrV4::new(vip.0, vip.1), ..TcpPacket::new(client, VIP) };
            let frame =
                TcpPacket { flags: SYN, tcp_options: aligned_timestamp_option(1, 0), ..packet_to_vip }.to_frame();
            balancer.expect_sent_to(*service, &frame, chosen_server, "new_connection");
        }
    }
    // The second service is removed. Another service that reuses its index starts without servers and table.
    let service_with_mode =
        |vip: (Ipv4Addr, u16)| (support::balancer::service_address(vip), ServiceSettings::default());
    balancer.service_indexes = balancer.lb.set_services(&[service_with_mode(VIP)]).unwrap();
    let syn_to_removed_service =
        TcpPacket { flags: SYN, ..TcpPacket::new(random_client(&mut rng), other_vip) }.to_frame();
    balancer.expect_passed_uncounted(&syn_to_removed_service);
    balancer.service_indexes =
        balancer.lb.set_services(&[service_with_mode((other_vip.0, 8443)), service_with_mode(VIP)]).unwrap();
    assert_eq!(balancer.lb.servers(balancer.service_indexes[0]), []);
    assert_eq!(balancer.lb.servers(balancer.service_indexes[1]).len(), 3);
    let syn_to_added_service =
        TcpPacket { flags: SYN, ..TcpPacket::new(random_client(&mut rng), (other_vip.0, 8443)) }.to_frame();
    balancer.expect_unforwarded(&syn_to_added_service, XDP_DROP, 0, "drop_no_eligible_server");
    assert_eq!(balancer.lb.set_services(&[service_with_mode(VIP), service_with_mode(VIP)]).unwrap_err().to_string(), {
        "service 10.200.0.1:80/tcp is listed twice"
    });
}

#[test]
fn broadcasts_are_rate_limited_and_resume_later() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(10, 0);
    let rate_limits =
        BroadcastRateLimits::with_equal_rates(PacketRateLimit { packets_per_second: 20, burst_packets: 8 });
    let options = LoadBalancerOptions {
        broadcast_limits: [rate_limits; intf::LIMITED_KIND_COUNT as usize],
        ..LoadBalancerOptions::default()
    };
    let services = [(service_address(VIP), ServiceSettings::default())];
    let mut balancer = TestBalancer::without_model(&services, options, &mut rng);
    let rst_frame = TcpPacket { flags: RST, ..TcpPacket::new(random_client(&mut rng), VIP) }.to_frame();
    let count_broadcasts = |balancer: &mut TestBalancer, count: usize| {
        (0..count).filter(|_| balancer.process_frame(&rst_frame).0 == XDP_TX).count()
    };
    let start_time = std::time::Instant::now();
    let broadcast_count = count_broadcasts(&mut balancer, 200);
    let refilled_tokens = (start_time.elapsed().as_secs_f64() * 20.0) as usize;
    assert!(
        (8..=9 + refilled_tokens).contains(&broadcast_count),
        "{broadcast_count} of 200 sent at once, {refilled_tokens} tokens earned meanwhile"
    );
    std::thread::sleep(std::time::Duration::from_millis(210));
    assert!(count_broadcasts(&mut balancer, 1) == 1);
    let counters = balancer.lb.service_counters(balancer.service_indexes[0]);
    let limited_counter =
        intf::LB_COUNTER_NAMES.iter().position(|name| *name == "drop_broadcast_rate_limited").unwrap();
    assert_eq!(counters.packets_by_outcome[limited_counter] as usize, 200 - broadcast_count);
}

#[test]
fn changed_mac_address_is_used_for_the_next_packet() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(11, 0);
    let mut balancer = TestBalancer::new(&[VIP], &mut rng);
    let server = balancer.replace_servers(0, 1, &mut rng)[0];
    let client = random_client(&mut rng);
    balancer.expect_cookie_leads_to_server(client, server);
    let new_mac = MacAddress([0x02, 1, 2, 3, 4, 5]);
    balancer.server_macs.insert((0, server), new_mac);
    balancer.lb.set_server(balancer.service_indexes[0], server, Server { mac: Some(new_mac), is_eligible: false });
    balancer.expect_cookie_leads_to_server(client, server);
}
