//! Tests of the reuse of expired connection table entries by new connections (`BPF_PROG_TEST_RUN`).

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use coreward_dataplane::lb::LoadBalancerOptions;
use coreward_model::connection_table::{ConnectionEntry, ConnectionTableSize, ConnectionTimeouts, DecisecondTicks};
use coreward_model::placement::PlacementRule;
use coreward_model::rss::seeded_rng;
use rand::Rng;

use crate::support::balancer::{ExpectedIdentification, TestBalancer, random_placement_table, service_address};
use crate::support::stateful::{
    ClientEndpoint, EstablishedConnection, STATEFUL_SERVICE_SETTINGS, VIP, frame_with_cookie_index,
    ipv4_client_endpoint, packet_with_cookie_index, random_client, stateful_balancer, tested_lb_owner_number,
};
use crate::support::{ACK, FIN, missing_bpf_rights, skip_if};

const CONNECTION_ENTRY_COUNT: u64 = 2048;
/// Number of new connections that together examine every entry of a partition, because each examines 4 of 1024 entries.
const CONNECTIONS_TO_EXAMINE_PARTITION: usize = 1024 / 4;

/// Returns a load balancer with a full connection table, and the connections, whose last packets were at `start`.
fn balancer_with_full_table(start: Duration, rng: &mut impl Rng) -> (TestBalancer, Vec<EstablishedConnection>) {
    let (mut balancer, _) = stateful_balancer(CONNECTION_ENTRY_COUNT, rng);
    balancer.lb.tick_packet_clock(start);
    let opened_connections = fill_connection_table(&balancer, rng);
    (balancer, opened_connections)
}

/// Opens connections until no entry is free. Returns the connections that got an entry.
fn fill_connection_table(balancer: &TestBalancer, rng: &mut impl Rng) -> Vec<EstablishedConnection> {
    let mut opened_connections = Vec::new();
    while balancer.lb.count_used_entries_by_scan() < CONNECTION_ENTRY_COUNT as usize {
        let client = random_client(rng);
        let (server, number) = balancer.send_syn(client);
        opened_connections.extend(number.map(|number| EstablishedConnection { client, server, cookie_index: number }));
    }
    opened_connections
}

/// Opens `connection_count` connections. Returns the connections that got an entry.
fn open_connections(
    balancer: &TestBalancer,
    connection_count: usize,
    rng: &mut impl Rng,
) -> Vec<EstablishedConnection> {
    let open_new_connection = |client: ClientEndpoint| {
        let (server, number) = balancer.send_syn(client);
        number.map(|number| EstablishedConnection { client, server, cookie_index: number })
    };
    (0..connection_count).filter_map(|_| open_new_connection(random_client(rng))).collect()
}

#[test]
fn new_connection_reuses_expired_entry_if_sweeps_stop() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(141, 0);
    let start_time = Duration::from_secs(1000);
    let (mut balancer, initial_connections) = balancer_with_full_table(start_time, &mut rng);
    let full_table_count = balancer.event_count(0, "connection_table_full");
    balancer.lb.tick_packet_clock(start_time + Duration::from_millis(9900));
    assert_eq!(open_connections(&balancer, 100, &mut rng).len(), 0, "a SYN may be sent again until then");
    balancer.lb.tick_packet_clock(start_time + ConnectionTimeouts::default().half_open);
    let new_connections = open_connections(&balancer, 200, &mut rng);
    assert_eq!(new_connections.len(), 200);
    assert_eq!(
        (balancer.event_count(0, "connection_table_full"), balancer.event_count(0, "connection_reused")),
        (full_table_count + 100, 200)
    );

    new_connections.iter().for_each(|connection| balancer.expect_index_leads_to_server(connection));
    assert_eq!(
        (balancer.lb.used_entry_count(), balancer.lb.count_used_entries_by_scan()),
        (CONNECTION_ENTRY_COUNT, CONNECTION_ENTRY_COUNT as usize)
    );
    let lost_connections: Vec<_> = initial_connections
        .iter()
        .filter(|connection| balancer.connection_entry(connection.client).is_none())
        .collect();
    assert_eq!(lost_connections.len(), 200);
    let frame = frame_with_cookie_index(&balancer, lost_connections[0].client, lost_connections[0].cookie_index);
    balancer.expect_broadcast_or_dropped(0, &frame, ExpectedIdentification::Unchanged, "drop_unknown_cookie");
}

#[test]
fn open_connections_lose_entries_only_if_sweeps_stop() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(142, 0);
    let (start_time, timers) = (Duration::from_secs(1000), ConnectionTimeouts::default());
    let (mut balancer, connections) = balancer_with_full_table(start_time, &mut rng);
    let (closing_connections, live_connections) = connections.split_at(connections.len() / 2);
    live_connections.iter().for_each(|connection| balancer.expect_index_leads_to_server(connection));
    for connection in closing_connections {
        let fin_frame =
            packet_with_cookie_index(&balancer.fleet_keys, connection.client, connection.cookie_index, ACK | FIN)
                .to_frame();
        balancer.expect_sent_to(0, &fin_frame, connection.server, "connection_table");
    }
    // Cases have the time since the last packet, whether user space has just swept, and how many entries may be reused.
    let cases = [
        (timers.closing - Duration::from_millis(100), false, 0),
        (timers.closing, true, 0),
        (timers.closing + Duration::from_millis(59_900), false, 0),
        (timers.closing + Duration::from_secs(60), false, closing_connections.len()),
        (timers.idle - Duration::from_millis(100), false, 0),
        (timers.idle, true, 0),
        (timers.idle + Duration::from_secs(60), false, live_connections.len()),
    ];
    for (idle_time, is_swept, expected_count) in cases {
        balancer.lb.tick_packet_clock(start_time + idle_time);
        if is_swept {
            balancer.lb.scan_expired_connections(&timers, 0);
        }
        let reusing_connections = open_connections(&balancer, 8 * CONNECTIONS_TO_EXAMINE_PARTITION, &mut rng);
        assert_eq!(reusing_connections.len(), expected_count, "after {idle_time:?}");
        // A packet establishes the new connections, so that they are idle for less time than the others.
        reusing_connections.iter().for_each(|connection| balancer.expect_index_leads_to_server(connection));
    }
}

#[test]
fn reused_entry_counts_for_its_new_source_prefix() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(143, 0);
    let start_time = Duration::from_secs(1000);
    let (mut balancer, _) = stateful_balancer(CONNECTION_ENTRY_COUNT, &mut rng);
    balancer.lb.tick_packet_clock(start_time);
    let flood_client_endpoint = |number: u32| (Ipv4Addr::from(0xc000_0200 + number % 256), (number / 256) as u16);
    for number in 0..20_000 {
        balancer.send_syn(flood_client_endpoint(number));
    }
    assert_eq!(
        balancer.lb.count_used_entries_by_scan(),
        CONNECTION_ENTRY_COUNT as usize,
        "one prefix holds all: no limit is set yet"
    );
    balancer.lb.update_source_prefix_limit();
    balancer.lb.tick_packet_clock(start_time + ConnectionTimeouts::default().half_open);
    assert_eq!(balancer.send_syn(flood_client_endpoint(20_000)).1, None);
    assert_eq!(balancer.event_count(0, "connection_source_limited"), 1, "a full table gives each prefix one entry");
    let is_from_flood = |connection: &ConnectionEntry| ipv4_client_endpoint(connection).0.octets()[..3] == [192, 0, 2];
    while balancer.lb.connections(balancer.service_indexes[0]).any(|connection| is_from_flood(&connection)) {
        balancer.send_syn(random_client(&mut rng));
    }
    balancer.lb.tick_packet_clock(start_time + 2 * ConnectionTimeouts::default().half_open);
    assert!(balancer.send_syn(flood_client_endpoint(20_001)).1.is_some(), "the prefix holds none");
    assert_eq!(balancer.send_syn(flood_client_endpoint(20_002)).1, None, "it holds one");
    assert_eq!(
        (balancer.lb.used_entry_count(), balancer.lb.count_used_entries_by_scan()),
        (CONNECTION_ENTRY_COUNT, CONNECTION_ENTRY_COUNT as usize)
    );
}

#[test]
fn packets_update_the_clock_without_a_daemon() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(144, 0);
    let options = LoadBalancerOptions {
        connection_table_size: ConnectionTableSize::try_from(1024).unwrap(),
        packets_read_clock: true,
        ..LoadBalancerOptions::default()
    };
    let mut balancer =
        TestBalancer::with_model(&[(service_address(VIP), STATEFUL_SERVICE_SETTINGS)], options, &mut rng);
    let server_ids = balancer.replace_servers(0, 3, &mut rng);
    balancer.install_table(0, &random_placement_table(PlacementRule::RoundRobin, 1, 1, &server_ids, &mut rng));
    balancer.lb.set_owner_number(Some(tested_lb_owner_number()));
    let (connection, start_time) = (balancer.open_connection_with_entry(random_client(&mut rng)), Instant::now());
    let first_time = balancer.lb.packet_clock_ticks();
    assert_ne!(first_time, DecisecondTicks(0), "the SYN read the clock");
    while start_time.elapsed() < Duration::from_secs(1) {
        balancer.expect_index_leads_to_server(&connection);
    }
    let elapsed_ticks = balancer.lb.packet_clock_ticks().saturating_duration_since(first_time);
    assert!(
        elapsed_ticks >= Duration::from_millis(900)
            && elapsed_ticks <= start_time.elapsed() + Duration::from_millis(200),
        "{elapsed_ticks:?}"
    );
    assert_eq!(balancer.connection_entry(connection.client).unwrap().last_packet_at, balancer.lb.packet_clock_ticks());
}
