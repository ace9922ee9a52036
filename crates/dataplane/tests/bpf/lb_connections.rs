//! Tests of the connection table in `bpf/lb/lb.bpf.c` (`BPF_PROG_TEST_RUN`). Entries are allocated, found, freed and
//! reused.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::time::Duration;

use coreward_dataplane::lb::{BroadcastRateLimits, LoadBalancerOptions, PacketRateLimit, Server};
use coreward_dataplane::mac::MacAddress;
use coreward_intf as intf;
use coreward_model::connection_table::{
    ConnectionExpiryReason, ConnectionTableSize, ConnectionTimeouts, DecisecondTicks, decode_cookie_index,
    encode_cookie_index, encode_syn_tsecr,
};
use coreward_model::consistency::ServiceSettings;
use coreward_model::cookie::{self, Cookie};
use coreward_model::placement::PlacementRule;
use coreward_model::rss::{seeded_rng, uniform_below};
use rand::Rng as _;

use crate::support::balancer::{
    ExpectedIdentification, LOAD_BALANCER_MAC, TestBalancer, XDP_DROP, XDP_TX, random_placement_table, service_address,
};
use crate::support::stateful::{
    STATEFUL_SERVICE_SETTINGS, VIP, four_tuple_to_vip, frame_with_cookie_index, ipv4_client_endpoint,
    packet_with_cookie_index, random_client, read_tsecr, stateful_balancer, syn_frame, syn_with_tsecr,
    table_owner_number, tested_lb_owner_number,
};
use crate::support::{
    self, ACK, FIN, RST, SYN, TcpPacket, aligned_timestamp_option, missing_bpf_rights, skip_if, tcp_segment_sum,
    timestamp_option,
};

#[test]
fn later_packets_find_the_entry_of_a_new_connection() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(101, 0);
    let (mut balancer, ids) = stateful_balancer(4096, &mut rng);
    balancer.lb.tick_packet_clock(Duration::from_millis(12_345));
    let opened_connections: Vec<_> =
        (0..500).map(|_| balancer.open_connection_with_entry(random_client(&mut rng))).collect();
    let reached_servers: BTreeSet<_> = opened_connections.iter().map(|connection| connection.server).collect();
    assert_eq!(reached_servers, ids.iter().copied().collect(), "the rule is obeyed");
    for connection in &opened_connections {
        let entry = balancer.connection_entry(connection.client).unwrap();
        assert_eq!(entry.identity.server, connection.server);
        assert_eq!(decode_cookie_index(connection.cookie_index), (tested_lb_owner_number(), entry.index.slot()));
        let connection_hash = balancer.connection_hash(connection.client);
        let table_size = ConnectionTableSize::try_from(4096).unwrap();
        assert_eq!(
            (entry.index.partition(), entry.identity.tag),
            (connection_hash.partition(table_size), connection_hash.entry_tag())
        );
        assert_eq!((entry.packet_count, entry.byte_count), (1, syn_frame(connection.client).len() as u64));
        assert_eq!(
            (entry.opened_at, entry.last_packet_at, entry.is_closing),
            (DecisecondTicks(123), DecisecondTicks(123), false)
        );
    }
    let entry_indexes: BTreeSet<_> = opened_connections
        .iter()
        .map(|connection| balancer.connection_entry(connection.client).unwrap().index)
        .collect();
    assert_eq!(entry_indexes.len(), opened_connections.len());

    // The result does not depend on the table, the keys or the path (fast or slow).
    balancer.lb.tick_packet_clock(Duration::from_secs(20));
    let table = random_placement_table(PlacementRule::Table, 2, 1, &ids, &mut rng);
    balancer.install_table(0, &table);
    balancer.set_random_keys(&mut rng);
    let unaligned_timestamp = [&[1][..], &timestamp_option(1, 0), &[0]].concat();
    for connection in &opened_connections {
        balancer.expect_index_leads_to_server(connection);
        let mut slow_path_packet =
            packet_with_cookie_index(&balancer.fleet_keys, connection.client, connection.cookie_index, ACK);
        let tsecr = cookie::stamp_tsval(
            &balancer.fleet_keys,
            &support::FOREIGN_TIME_KEY,
            &four_tuple_to_vip(connection.client),
            Cookie::TableIndex(connection.cookie_index),
            5,
        );
        slow_path_packet.tcp_options = unaligned_timestamp.clone();
        slow_path_packet.tcp_options[7..11].copy_from_slice(&tsecr.to_be_bytes());
        let slow_path_frame = slow_path_packet.to_frame();
        balancer.expect_sent_to(0, &slow_path_frame, connection.server, "connection_table");
        let entry = balancer.connection_entry(connection.client).unwrap();
        let forwarded_bytes = syn_frame(connection.client).len()
            + slow_path_frame.len()
            + frame_with_cookie_index(&balancer, connection.client, 0).len();
        assert_eq!((entry.packet_count, entry.byte_count), (3, forwarded_bytes as u64));
        assert_eq!((entry.opened_at, entry.last_packet_at), (DecisecondTicks(123), DecisecondTicks(200)));
    }
    // FIN and RST mark an entry as closing, and a SYN removes the mark.
    for (connection, flags) in opened_connections.iter().zip([ACK | FIN, ACK | RST].into_iter().cycle()) {
        let frame = packet_with_cookie_index(&balancer.fleet_keys, connection.client, connection.cookie_index, flags)
            .to_frame();
        let read_closed_connection_count = || balancer.lb.server_traffic(connection.server).closed_connection_count;
        let closed_count_before = read_closed_connection_count();
        for _ in 0..3 {
            balancer.expect_sent_to(0, &frame, connection.server, "connection_table");
        }
        assert_eq!(read_closed_connection_count(), closed_count_before + 1, "sent again it closes nothing");
        assert!(balancer.connection_entry(connection.client).unwrap().is_closing);
        assert_eq!(balancer.send_syn(connection.client).1, Some(connection.cookie_index));
        assert!(!balancer.connection_entry(connection.client).unwrap().is_closing);
    }
    assert_eq!(balancer.event_count(0, "connection_unknown"), 0);
}

#[test]
fn syn_carries_the_connection_index_at_any_option_offset() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(102, 0);
    let (balancer, _) = stateful_balancer(65_536, &mut rng);
    for round in 0..2000 {
        let client = random_client(&mut rng);
        // Up to 7 bytes of NOPs and an option of 5 bytes move the timestamp to even and odd offsets.
        let mut options_before = vec![1; round % 8];
        if round % 3 == 0 {
            options_before.splice(0..0, [254, 5, 1, 2, 3]);
        }
        let options_after: &[u8] = if round % 2 == 0 { &[3, 3, 7] } else { &[] };
        let ip_options = vec![1; 4 * (round / 8 % 11)];
        // A SYN's TSecr should be 0, but some clients send another value.
        let tsecr = if round % 5 == 0 { rng.next_u32() } else { 0 };
        let syn_frame_with_tsecr = |tsecr: u32| {
            let options =
                [&options_before[..], &timestamp_option(rng.clone().next_u32(), tsecr), options_after].concat();
            let tcp = TcpPacket {
                flags: SYN,
                tcp_options: options,
                ip_options: ip_options.clone(),
                ..TcpPacket::new(client, VIP)
            };
            tcp.to_frame_with_sequence(77, 0)
        };
        let (xdp_action, forwarded_frame) =
            balancer.process_frame_expecting_counter(&syn_frame_with_tsecr(tsecr), Some(0), "new_connection");
        let entry = balancer.connection_entry(client).expect("it got an entry");
        let mut expected_frame = syn_frame_with_tsecr(encode_syn_tsecr(tested_lb_owner_number(), entry.index.slot()));
        expected_frame[..6].copy_from_slice(&balancer.server_macs[&(0, entry.identity.server)].0);
        expected_frame[6..12].copy_from_slice(&LOAD_BALANCER_MAC.0);
        assert_eq!(xdp_action, XDP_TX);
        assert_eq!(tcp_segment_sum(&forwarded_frame), 0xffff, "round {round}: the checksum is wrong");
        // `tcp_sum` alone would accept 0 and 0xffff as the same sum.
        assert_eq!(forwarded_frame, expected_frame, "round {round}");
        rng.next_u32();
    }
}

#[test]
fn retransmitted_syn_keeps_its_entry_while_its_server_is_eligible() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(103, 0);
    let (mut balancer, _) = stateful_balancer(4096, &mut rng);
    let first_connection = balancer.open_connection_with_entry(random_client(&mut rng));
    for _ in 0..50 {
        balancer.open_connection_with_entry(random_client(&mut rng));
    }
    balancer.lb.tick_packet_clock(Duration::from_secs(3));
    assert_eq!(
        balancer.send_syn(first_connection.client),
        (first_connection.server, Some(first_connection.cookie_index))
    );
    let entry = balancer.connection_entry(first_connection.client).unwrap();
    assert_eq!((entry.packet_count, entry.last_packet_at), (1, DecisecondTicks(30)), "it is still half-open");
    assert_eq!(balancer.lb.count_used_entries_by_scan(), 51);

    let draining_server = Server { mac: Some(balancer.server_macs[&(0, first_connection.server)]), is_eligible: false };
    balancer.lb.set_server(balancer.service_indexes[0], first_connection.server, draining_server);
    let (server, cookie_index) = balancer.send_syn(first_connection.client);
    assert_ne!(server, first_connection.server);
    assert!(cookie_index.is_some_and(|number| number != first_connection.cookie_index));
    assert_eq!(balancer.lb.count_used_entries_by_scan(), 52);
}

#[test]
fn retransmitted_syns_hold_one_entry_despite_few_hash_collisions() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(117, 0);
    let (balancer, _) = stateful_balancer(4096, &mut rng);
    let first_connection = balancer.open_connection_with_entry(random_client(&mut rng));
    let entry_set = balancer.connection_hash(first_connection.client).recent_syn_set_index();
    for round in 1..=20 {
        let mut other_clients = Vec::new();
        while other_clients.len() < intf::RECENT_WAYS as usize - 1 {
            let other_client = random_client(&mut rng);
            if balancer.connection_hash(other_client).recent_syn_set_index() == entry_set {
                other_clients.push(balancer.open_connection_with_entry(other_client));
            }
        }
        for connection in other_clients.iter().chain([&first_connection]) {
            assert_eq!(
                balancer.send_syn(connection.client),
                (connection.server, Some(connection.cookie_index)),
                "round {round}"
            );
        }
        assert_eq!(balancer.lb.count_used_entries_by_scan(), 1 + round * other_clients.len());
    }
}

#[test]
fn cookie_of_another_connection_is_unknown() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(104, 0);
    let options = LoadBalancerOptions {
        connection_table_size: ConnectionTableSize::try_from(1024).unwrap(),
        broadcast_limits: [BroadcastRateLimits::with_equal_rates(PacketRateLimit {
            packets_per_second: 1,
            burst_packets: 3,
        }); intf::LIMITED_KIND_COUNT as usize],
        ..LoadBalancerOptions::default()
    };
    let other_vip = (Ipv4Addr::new(10, 200, 0, 1), 443);
    let services =
        [(service_address(VIP), STATEFUL_SERVICE_SETTINGS), (service_address(other_vip), STATEFUL_SERVICE_SETTINGS)];
    let mut balancer = TestBalancer::without_model(&services, options, &mut rng);
    let server_ids = balancer.replace_servers(0, 4, &mut rng);
    let table = random_placement_table(PlacementRule::RoundRobin, 1, 1, &server_ids, &mut rng);
    balancer.install_table(0, &table);
    balancer.lb.set_owner_number(Some(tested_lb_owner_number()));
    let opened_connection = balancer.open_connection_with_entry(random_client(&mut rng));
    let mut unknown_count = 0;
    let mut expect_unknown_cookie = |balancer: &TestBalancer, frame: &[u8]| {
        balancer.expect_broadcast_or_dropped(0, frame, ExpectedIdentification::Unchanged, "drop_unknown_cookie");
        unknown_count += 1;
        assert_eq!(balancer.event_count(0, "connection_unknown"), unknown_count);
    };
    // These packets have other tuples with this slot, or this tuple with free slots. A FIN takes the slow path.
    for _ in 0..200 {
        expect_unknown_cookie(
            &balancer,
            &frame_with_cookie_index(&balancer, random_client(&mut rng), opened_connection.cookie_index),
        );
    }
    for slot in (0..1024).filter(|slot| *slot != u32::from(opened_connection.cookie_index) % 1024).step_by(7) {
        let cookie_index = encode_cookie_index(tested_lb_owner_number(), slot);
        expect_unknown_cookie(&balancer, &frame_with_cookie_index(&balancer, opened_connection.client, cookie_index));
        expect_unknown_cookie(
            &balancer,
            &packet_with_cookie_index(&balancer.fleet_keys, opened_connection.client, cookie_index, ACK | FIN)
                .to_frame(),
        );
    }
    let entry = balancer.connection_entry(opened_connection.client).unwrap();
    assert_eq!((entry.packet_count, entry.is_closing), (1, false), "nothing of that was counted for it");
    // The same client has another connection at the other service.
    let tsecr = cookie::stamp_tsval(
        &balancer.fleet_keys,
        &support::FOREIGN_TIME_KEY,
        &four_tuple_to_vip(opened_connection.client),
        Cookie::TableIndex(opened_connection.cookie_index),
        5,
    );
    let mut packet_to_other_vip =
        TcpPacket { tcp_options: aligned_timestamp_option(1, tsecr), ..TcpPacket::new(opened_connection.client, VIP) };
    packet_to_other_vip.destination.set_port(other_vip.1);
    let (_, _) = balancer.process_frame(&packet_to_other_vip.to_frame());
    assert_eq!(balancer.connection_entry(opened_connection.client).unwrap().packet_count, 1);
    balancer.expect_index_leads_to_server(&opened_connection);

    // Packets to an unresolved server are dropped, and packets to a removed server are broadcast.
    let service_index = balancer.service_indexes[0];
    balancer.lb.set_server(service_index, opened_connection.server, Server { mac: None, is_eligible: true });
    let frame = frame_with_cookie_index(&balancer, opened_connection.client, opened_connection.cookie_index);
    balancer.expect_unforwarded(&frame, XDP_DROP, 0, "drop_server_unresolved");
    balancer.lb.remove_server(service_index, opened_connection.server);
    balancer.expect_broadcast_or_dropped(0, &frame, ExpectedIdentification::Unchanged, "drop_unknown_cookie");
    assert_eq!(balancer.event_count(0, "connection_unknown"), unknown_count);
}

#[test]
fn packet_of_another_table_goes_to_its_owner_or_is_broadcast() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(105, 0);
    let mut broadcast_limits =
        [BroadcastRateLimits::with_equal_rates(PacketRateLimit { packets_per_second: 1, burst_packets: 1 });
            intf::LIMITED_KIND_COUNT as usize];
    broadcast_limits[intf::LIMITED_OWNER_LOST as usize] =
        BroadcastRateLimits::with_equal_rates(PacketRateLimit { packets_per_second: 1, burst_packets: 40 });
    let options = LoadBalancerOptions { broadcast_limits, ..LoadBalancerOptions::default() };
    let mut balancer =
        TestBalancer::without_model(&[(service_address(VIP), STATEFUL_SERVICE_SETTINGS)], options, &mut rng);
    balancer.lb.set_owner_number(Some(tested_lb_owner_number()));
    let (live_owner, lost_owner, unknown_owner) =
        (table_owner_number(9), table_owner_number(0), table_owner_number(15));
    let owner_mac = MacAddress([2, 0, 0, 0, 9, 9]);
    balancer.lb.set_owner_mac(live_owner, Some(owner_mac));
    balancer.lb.set_owner_mac(lost_owner, None);
    let frame_with_owner = |balancer: &TestBalancer, owner, rng: &mut _| {
        frame_with_cookie_index(balancer, random_client(rng), encode_cookie_index(owner, 77))
    };
    for flags in [ACK, ACK | FIN] {
        for _ in 0..50 {
            let cookie_index = encode_cookie_index(live_owner, uniform_below(&mut rng, 1024));
            let frame =
                packet_with_cookie_index(&balancer.fleet_keys, random_client(&mut rng), cookie_index, flags).to_frame();
            balancer.expect_sent_to_mac(&frame, owner_mac, "to_owner");
        }
    }
    // A packet from another load balancer is broadcast, because a packet is sent to an owner only once.
    let mut forwarded_frame = frame_with_owner(&balancer, live_owner, &mut rng);
    forwarded_frame[6..12].copy_from_slice(&owner_mac.0);
    balancer.expect_sent_to_mac(&forwarded_frame, MacAddress::BROADCAST, "broadcast_owner_lost");

    // The burst is 40 packets, of which one is used. One more packet is allowed per second.
    let xdp_actions: Vec<i32> =
        (0..60).map(|_| balancer.process_frame(&frame_with_owner(&balancer, lost_owner, &mut rng)).0).collect();
    let broadcast_count = xdp_actions.iter().filter(|xdp_action| **xdp_action == XDP_TX).count();
    assert!((39..=45).contains(&broadcast_count), "{broadcast_count} of 60 broadcast");
    // On a slow machine the bucket may have new tokens, which the first packets use up.
    let expect_dropped_above_rate = |balancer: &TestBalancer, owner, name: &str, rng: &mut _| {
        let mut spend_tokens = (0..5).map(|_| balancer.process_frame(&frame_with_owner(balancer, owner, rng)).0);
        assert!(spend_tokens.any(|xdp_action| xdp_action == XDP_DROP), "{name}: five of five are broadcast");
        balancer.expect_unforwarded(&frame_with_owner(balancer, owner, rng), XDP_DROP, 0, name);
    };
    expect_dropped_above_rate(&balancer, lost_owner, "drop_broadcast_rate_limited", &mut rng);
    // An owner number that was never in use has a burst of one packet.
    balancer.expect_sent_to_mac(
        &frame_with_owner(&balancer, unknown_owner, &mut rng),
        MacAddress::BROADCAST,
        "broadcast",
    );
    expect_dropped_above_rate(&balancer, unknown_owner, "drop_unknown_cookie", &mut rng);
    assert_eq!(balancer.event_count(0, "connection_unknown"), 0, "our own table was not asked");
    balancer.lb.remove_owner(live_owner);
    expect_dropped_above_rate(&balancer, live_owner, "drop_unknown_cookie", &mut rng);
}

#[test]
fn connections_are_stateless_without_an_owner_number() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(106, 0);
    let (mut balancer, ids) = stateful_balancer(1024, &mut rng);
    balancer.lb.tick_packet_clock(Duration::from_secs(9));
    assert_eq!(balancer.lb.owner_number(), Some(tested_lb_owner_number()));
    balancer.lb.set_owner_number(None);
    assert_eq!((balancer.lb.owner_number(), balancer.lb.packet_clock_ticks()), (None, DecisecondTicks(90)));
    for _ in 0..20 {
        let client = random_client(&mut rng);
        let (server, cookie_index) = balancer.send_syn(client);
        assert_eq!(cookie_index, None);
        // A TSecr that only a load balancer may write is not accepted from a client.
        let forged_syn = syn_with_tsecr(client, encode_syn_tsecr(tested_lb_owner_number(), 3)).to_frame();
        let (_, forwarded_frame) = balancer.process_frame_expecting_counter(&forged_syn, Some(0), "new_connection");
        assert_eq!((read_tsecr(&forwarded_frame), tcp_segment_sum(&forwarded_frame)), (0, 0xffff));
        balancer.expect_cookie_leads_to_server(client, server);
    }
    assert_eq!(balancer.lb.count_used_entries_by_scan(), 0);
    // A connection without timestamps gets no entry either.
    balancer.lb.set_owner_number(Some(tested_lb_owner_number()));
    let plain_syn = TcpPacket { flags: SYN, ..TcpPacket::new(random_client(&mut rng), VIP) }.to_frame();
    balancer.process_frame_expecting_counter(&plain_syn, Some(0), "bucket_hash");
    assert_eq!(balancer.lb.count_used_entries_by_scan(), 0);
    assert!(ids.len() > 1);
}

/// Opens a connection that gets no table entry, and asserts that a stateless cookie leads to its server.
fn expect_stateless_cookie(balancer: &TestBalancer, client: (Ipv4Addr, u16)) {
    let (server, cookie_index) = balancer.send_syn(client);
    assert_eq!(cookie_index, None);
    balancer.expect_cookie_leads_to_server(client, server);
}

/// Frees the entries of half-open connections, which have had a single packet. Returns the number of freed entries.
fn free_half_open_connections(balancer: &mut TestBalancer) -> usize {
    let mut freed_count = 0;
    for _ in 0..2 {
        let due_connections = balancer.lb.scan_expired_connections(&ConnectionTimeouts::default(), 1024);
        assert!(
            due_connections
                .iter()
                .all(|(connection, reason)| *reason == ConnectionExpiryReason::HalfOpen && connection.packet_count == 1)
        );
        let connections_to_free: Vec<_> = due_connections.into_iter().map(|(connection, _)| connection).collect();
        freed_count += balancer.lb.free_connections(&connections_to_free).unwrap();
    }
    freed_count
}

#[test]
fn syn_flood_fills_the_table_and_keeps_established_connections() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(107, 0);
    let (mut balancer, _) = stateful_balancer(2048, &mut rng);
    let genuine_connections: Vec<_> =
        (0..700).map(|_| balancer.open_connection_with_entry(random_client(&mut rng))).collect();
    genuine_connections.iter().for_each(|connection| balancer.expect_index_leads_to_server(connection));
    let entries_before: BTreeMap<_, _> = genuine_connections
        .iter()
        .map(|connection| (connection.client, balancer.connection_entry(connection.client).unwrap().identity))
        .collect();

    let mut refused_count = 0;
    for _ in 0..5000 {
        let (xdp_action, forwarded_frame) = balancer.process_frame(&syn_frame(random_client(&mut rng)));
        assert_eq!(xdp_action, XDP_TX);
        refused_count += u64::from(read_tsecr(&forwarded_frame) == 0);
    }
    assert_eq!(refused_count, 5000 - (2048 - 700));
    assert_eq!(balancer.lb.count_used_entries_by_scan(), 2048, "every partition is full");
    assert_eq!(balancer.event_count(0, "connection_table_full"), refused_count);
    for connection in &genuine_connections {
        assert_eq!(balancer.connection_entry(connection.client).unwrap().identity, entries_before[&connection.client]);
        balancer.expect_index_leads_to_server(connection);
    }
    // A genuine connection during the flood gets a stateless cookie and works.
    let late_client = random_client(&mut rng);
    expect_stateless_cookie(&balancer, late_client);

    // After ten seconds, the flood's entries may be freed without querying an agent.
    balancer.lb.tick_packet_clock(Duration::from_millis(9_900));
    assert_eq!(balancer.lb.scan_expired_connections(&ConnectionTimeouts::default(), 2048), []);
    balancer.lb.tick_packet_clock(Duration::from_secs(10));
    let freed_count = free_half_open_connections(&mut balancer);
    assert_eq!((freed_count, balancer.lb.count_used_entries_by_scan()), (2048 - 700, 700));
    genuine_connections.iter().for_each(|connection| balancer.expect_index_leads_to_server(connection));
    balancer.open_connection_with_entry(random_client(&mut rng));
}

#[test]
fn connection_entry_is_freed_once_and_only_if_unchanged() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(108, 0);
    let (mut balancer, _) = stateful_balancer(1024, &mut rng);
    let opened_connections: Vec<_> =
        (0..1024).map(|_| balancer.open_connection_with_entry(random_client(&mut rng))).collect();
    let (first_connection, second_connection) = (opened_connections[0], opened_connections[1]);
    let entries_before =
        [first_connection, second_connection].map(|connection| balancer.connection_entry(connection.client).unwrap());
    // The second connection has another packet after its entry was read.
    balancer.expect_index_leads_to_server(&second_connection);
    assert_eq!(balancer.lb.free_connections(&[entries_before[0], entries_before[1], entries_before[0]]).unwrap(), 1);
    assert_eq!(balancer.lb.free_connections(&entries_before).unwrap(), 0);
    balancer.expect_index_leads_to_server(&second_connection);
    let frame = frame_with_cookie_index(&balancer, first_connection.client, first_connection.cookie_index);
    balancer.expect_broadcast_or_dropped(0, &frame, ExpectedIdentification::Unchanged, "drop_unknown_cookie");
    assert_eq!(balancer.event_count(0, "connection_unknown"), 1);

    // The next connection gets the only free slot, with the next generation.
    let next_connection = balancer.open_connection_with_entry(random_client(&mut rng));
    let entry = balancer.connection_entry(next_connection.client).unwrap();
    assert_eq!(
        (entry.index, entry.identity.generation),
        (entries_before[0].index, entries_before[0].identity.generation + 1)
    );
    balancer.expect_broadcast_or_dropped(0, &frame, ExpectedIdentification::Unchanged, "drop_unknown_cookie");
    balancer.expect_index_leads_to_server(&next_connection);
    assert_eq!(balancer.lb.free_connections(&entries_before).unwrap(), 0);
    assert_eq!(balancer.connection_entry(next_connection.client).unwrap().packet_count, 2);
}

#[test]
fn entries_expire_by_their_timers_or_when_their_server_is_removed() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(109, 0);
    let (mut balancer, _) = stateful_balancer(4096, &mut rng);
    balancer.lb.tick_packet_clock(Duration::ZERO);
    let [half_open, closing, idle] = [(); 3].map(|()| balancer.open_connection_with_entry(random_client(&mut rng)));
    balancer.expect_index_leads_to_server(&idle);
    let fin_frame =
        packet_with_cookie_index(&balancer.fleet_keys, closing.client, closing.cookie_index, ACK | FIN).to_frame();
    balancer.expect_sent_to(0, &fin_frame, closing.server, "connection_table");
    let connections_expired_after = |balancer: &mut TestBalancer, seconds| -> BTreeMap<_, ConnectionExpiryReason> {
        balancer.lb.tick_packet_clock(Duration::from_secs(seconds));
        let expired_connections = balancer.lb.scan_expired_connections(&ConnectionTimeouts::default(), 4096);
        expired_connections.iter().map(|(connection, reason)| (ipv4_client_endpoint(connection), *reason)).collect()
    };
    let reasons_by_client =
        |connections: &[_]| connections.iter().copied().collect::<BTreeMap<_, ConnectionExpiryReason>>();
    let (half_open_due, closing_due, idle_due) = (
        (half_open.client, ConnectionExpiryReason::HalfOpen),
        (closing.client, ConnectionExpiryReason::Closing),
        (idle.client, ConnectionExpiryReason::Idle),
    );
    assert_eq!(connections_expired_after(&mut balancer, 9), reasons_by_client(&[]));
    assert_eq!(connections_expired_after(&mut balancer, 10), reasons_by_client(&[half_open_due]));
    assert_eq!(connections_expired_after(&mut balancer, 60), reasons_by_client(&[half_open_due, closing_due]));
    assert_eq!(
        connections_expired_after(&mut balancer, 300),
        reasons_by_client(&[half_open_due, closing_due, idle_due])
    );
    balancer.expect_index_leads_to_server(&idle);
    assert_eq!(connections_expired_after(&mut balancer, 300), reasons_by_client(&[half_open_due, closing_due]));
    balancer.lb.remove_server(balancer.service_indexes[0], idle.server);
    assert_eq!(connections_expired_after(&mut balancer, 300)[&idle.client], ConnectionExpiryReason::ServerGone);
}

#[test]
fn removed_service_leaves_no_connection_entries() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(110, 0);
    for new_services in [vec![], vec![(service_address(VIP), ServiceSettings::default())]] {
        let (mut balancer, _) = stateful_balancer(1024, &mut rng);
        for _ in 0..100 {
            balancer.open_connection_with_entry(random_client(&mut rng));
        }
        assert_eq!(balancer.lb.count_used_entries_by_scan(), 100);
        balancer.lb.set_services(&[(service_address(VIP), STATEFUL_SERVICE_SETTINGS)]).unwrap();
        assert_eq!(balancer.lb.count_used_entries_by_scan(), 100);
        balancer.lb.set_services(&new_services).unwrap();
        assert_eq!(balancer.lb.count_used_entries_by_scan(), 0);
    }
}
