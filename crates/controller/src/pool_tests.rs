//! Tests in virtual time of weights, slow starts, counts by load balancers and changes of the pool.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use coreward_config::TomlSource;
use coreward_model::lb_stamping;
use coreward_model::placement::PlacementTable;
use coreward_model::rss::seeded_rng;
use coreward_model::{FourTuple, ServerId};
use coreward_wire::{AgentReport, LOAD_BALANCER_LOSS_TIMEOUT, ServerTraffic, ServiceIndex, TrafficCountsMessage};

use super::explain::ExplainedPacket;
use super::tests::build_plain_report;
use super::{AgentSession, ClockReadings, Controller};
use coreward_fleet::config::FleetConfig;
use coreward_fleet::fleet::Fleet;
use coreward_fleet::records::FleetRecords;

fn now_at_seconds(seconds: u64) -> ClockReadings {
    let monotonic = Duration::from_secs(seconds);
    let wall = Duration::from_secs(1_700_000_000) + monotonic;
    ClockReadings { monotonic_time: monotonic, wall_time: wall, record_clock_time: wall }
}

/// Returns a fleet of servers s0, s1 ... with ids 0, 1 ... and the TOML keys `server_keys`, and one
/// service with the keys `service_keys`.
fn fleet_config(server_keys: &[&str], service_keys: &str) -> FleetConfig {
    let mut text = String::new();
    for (n, keys) in server_keys.iter().enumerate() {
        text += &format!("[[server]]\nname = \"s{n}\"\naddress = \"10.2.0.{}\"\nid = {n}\n{keys}\n", n + 1);
    }
    text += &format!("[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n{service_keys}");
    FleetConfig::parse(&TomlSource::from_text("fleet.toml", &text)).unwrap()
}

struct PoolHarness {
    records: FleetRecords,
    controller: Controller,
}

impl PoolHarness {
    fn new(server_keys: &[&str], service_keys: &str) -> Self {
        let config = fleet_config(server_keys, service_keys);
        let mut records = FleetRecords::generate(now_at_seconds(0).wall_time, &mut seeded_rng(5, 0));
        records.apply_document(&config, now_at_seconds(0).wall_time, &mut seeded_rng(6, 0)).unwrap();
        let controller = Controller::new(Fleet::new(&config, &records));
        Self { records, controller }
    }

    fn configure(&mut self, server_keys: &[&str], service_keys: &str, now: ClockReadings) {
        let config = fleet_config(server_keys, service_keys);
        self.records.apply_document(&config, now.wall_time, &mut seeded_rng(7, 0)).unwrap();
        self.controller.configure(Fleet::new(&config, &self.records));
    }

    fn make_table(&mut self, now: ClockReadings) -> PlacementTable {
        (*self.controller.end_report_interval(now).remove(0).table).clone()
    }

    fn connect_agent(&mut self, server_number: usize, open_connections: u32, now: ClockReadings) -> AgentSession {
        let session = self.controller.register_agent(&format!("s{server_number}"), "test", now).unwrap();
        self.send_report(&session, 1, open_connections, now);
        session
    }

    fn send_report(&mut self, session: &AgentSession, sequence: u64, open_connections: u32, now: ClockReadings) {
        let report =
            AgentReport { open_connection_count: open_connections, ..build_plain_report(sequence, now, &[0; 2]) };
        self.controller.record_report(session, Ok(report), now).unwrap();
    }

    fn open_connection_counts(&self, now: ClockReadings) -> Vec<u32> {
        let pool = self.controller.compute_pool(&self.controller.services[0], now);
        pool.servers().iter().map(|server| server.open_connection_count).collect()
    }
}

fn server_id(number: u64) -> ServerId {
    number.try_into().unwrap()
}

fn build_traffic_message(opened_and_closed_by_server: &[(u64, u64, u64)]) -> TrafficCountsMessage {
    let to_server_traffic = |(server, opened_count, closed_count): &(u64, u64, u64)| {
        let server_traffic = ServerTraffic {
            opened_connection_count: *opened_count,
            closed_connection_count: *closed_count,
            packet_count: opened_count * 10,
            frame_bytes: opened_count * 1000,
        };
        (server_id(*server), server_traffic)
    };
    let opened_count = opened_and_closed_by_server.iter().map(|(_, count, _)| count).sum();
    TrafficCountsMessage {
        opened_connection_count_by_service: [(ServiceIndex::FIRST, opened_count)].into(),
        traffic_by_server: opened_and_closed_by_server.iter().map(to_server_traffic).collect(),
    }
}

fn bucket_counts_by_server(table: &PlacementTable) -> BTreeMap<u16, usize> {
    let mut bucket_counts = BTreeMap::new();
    for bucket in 0..table.bucket_count.get() {
        *bucket_counts.entry(table.bucket_candidates(0, bucket)[0].server.get()).or_default() += 1;
    }
    bucket_counts
}

#[test]
fn servers_get_buckets_in_proportion_to_their_weights() {
    let mut harness = PoolHarness::new(&["weight = 3", "", "weight = 0"], "policy = \"maglev\"\n");
    let table = harness.make_table(now_at_seconds(0));
    assert_eq!(bucket_counts_by_server(&table), BTreeMap::from([(0, 96), (1, 32)]));
    assert!(table.consistent_server_by_bucket.iter().all(|server| *server != server_id(2)));
    let configured_servers = harness.controller.fleet_configuration(now_at_seconds(0)).services.remove(0).servers;
    assert_eq!(configured_servers.iter().map(|server| server.is_eligible).collect::<Vec<_>>(), [true, true, false]);
    harness.configure(&["weight = 0", "weight = 0"], "policy = \"maglev\"\n", now_at_seconds(1));
    assert!(harness.make_table(now_at_seconds(1)).members.is_empty());
}

#[test]
fn new_server_has_a_slow_start_but_initial_servers_have_none() {
    let service_keys = "policy = \"maglev\"\nslow_start = \"100s\"\nbuckets = 1024\n";
    let mut harness = PoolHarness::new(&["", ""], service_keys);
    assert_eq!(bucket_counts_by_server(&harness.make_table(now_at_seconds(0))), BTreeMap::from([(0, 512), (1, 512)]));
    harness.configure(&["", "", ""], service_keys, now_at_seconds(10));
    let new_server_bucket_count = |harness: &mut PoolHarness, now: u64| {
        bucket_counts_by_server(&harness.make_table(now_at_seconds(now))).get(&2).copied().unwrap_or(0)
    };
    let (initial_count, halfway_count, full_count) = (
        new_server_bucket_count(&mut harness, 10),
        new_server_bucket_count(&mut harness, 60),
        new_server_bucket_count(&mut harness, 110),
    );
    // The three totals are 2 + 1/64, 2.5 and 3 shares.
    assert!(
        (6..=10).contains(&initial_count) && (202..=208).contains(&halfway_count) && (340..=343).contains(&full_count),
        "{initial_count} {halfway_count}"
    );
    // After a drain, the server joins again with a slow start.
    harness.configure(&["", "", "state = \"draining\""], service_keys, now_at_seconds(200));
    assert_eq!(new_server_bucket_count(&mut harness, 200), 0);
    harness.configure(&["", "", ""], service_keys, now_at_seconds(300));
    assert!(new_server_bucket_count(&mut harness, 300) <= 10 && new_server_bucket_count(&mut harness, 400) >= 340);
    // The choice for connections without a cookie is complete at once.
    harness.configure(&["", "", "", ""], service_keys, now_at_seconds(500));
    assert!(
        harness
            .make_table(now_at_seconds(500))
            .consistent_server_by_bucket
            .iter()
            .filter(|server| **server == server_id(3))
            .count()
            > 200
    );
}

#[test]
fn open_connection_count_is_reported_count_plus_later_changes() {
    let mut harness = PoolHarness::new(&["", ""], "policy = \"least\"\n");
    let lb1_session = harness.controller.register_load_balancer("lb1", now_at_seconds(0)).unwrap();
    let lb2_session = harness.controller.register_load_balancer("lb2", now_at_seconds(0)).unwrap();
    harness.controller.record_load_balancer_traffic(
        lb1_session,
        &build_traffic_message(&[(0, 1000, 900), (1, 500, 500)]),
        now_at_seconds(0),
    );
    harness.controller.record_load_balancer_traffic(
        lb2_session,
        &build_traffic_message(&[(0, 10, 0)]),
        now_at_seconds(0),
    );
    let session = harness.connect_agent(0, 100, now_at_seconds(1));
    harness.connect_agent(1, 7, now_at_seconds(1));
    assert_eq!(harness.open_connection_counts(now_at_seconds(1)), [100, 7]);
    harness.controller.record_load_balancer_traffic(
        lb1_session,
        &build_traffic_message(&[(0, 1030, 910), (1, 500, 520)]),
        now_at_seconds(2),
    );
    harness.controller.record_load_balancer_traffic(
        lb2_session,
        &build_traffic_message(&[(0, 15, 0)]),
        now_at_seconds(2),
    );
    // More connections were closed than were open, because of a retransmitted FIN.
    assert_eq!(harness.open_connection_counts(now_at_seconds(2)), [125, 0]);
    harness.send_report(&session, 2, 124, now_at_seconds(3));
    assert_eq!(harness.open_connection_counts(now_at_seconds(3)), [124, 0]);
    // Both load balancers report rates of 30 and 5 connections in two seconds, with ten packets each.
    let pool = harness.controller.compute_pool(&harness.controller.services[0], now_at_seconds(3));
    assert_eq!(pool.servers()[0].traffic.unwrap().packets_per_second, 175.0);
}

#[test]
fn opened_connections_are_counted_by_load_balancers() {
    let mut harness = PoolHarness::new(&["", ""], "");
    let take_opened_connection_count = |harness: &mut PoolHarness| {
        harness.controller.load_balancers.take_opened_connection_count(ServiceIndex::new(0).unwrap())
    };
    let lb1_session = harness.controller.register_load_balancer("lb1", now_at_seconds(0)).unwrap();
    let lb2_session = harness.controller.register_load_balancer("lb2", now_at_seconds(0)).unwrap();
    let report_traffic = |harness: &mut PoolHarness, session, server_counts: &[(u64, u64, u64)], now| {
        harness.controller.record_load_balancer_traffic(session, &build_traffic_message(server_counts), now);
    };
    report_traffic(&mut harness, lb1_session, &[(0, 1000, 0), (1, 500, 0)], now_at_seconds(1));
    assert_eq!(take_opened_connection_count(&mut harness), None, "the new part is unknown");
    report_traffic(&mut harness, lb1_session, &[(0, 1010, 0), (1, 505, 0)], now_at_seconds(2));
    report_traffic(&mut harness, lb2_session, &[(0, 77, 0)], now_at_seconds(2));
    assert_eq!(take_opened_connection_count(&mut harness), Some(15));
    report_traffic(&mut harness, lb1_session, &[(0, 1011, 0), (1, 505, 0)], now_at_seconds(3));
    report_traffic(&mut harness, lb1_session, &[(0, 1012, 0), (1, 505, 0)], now_at_seconds(4));
    report_traffic(&mut harness, lb2_session, &[(0, 80, 0)], now_at_seconds(4));
    assert_eq!(take_opened_connection_count(&mut harness), Some(2 + 3), "twice before it was asked");
    report_traffic(&mut harness, lb2_session, &[(0, 4, 0)], now_at_seconds(5));
    assert_eq!(take_opened_connection_count(&mut harness), Some(0));
    report_traffic(&mut harness, lb2_session, &[(0, 10, 0)], now_at_seconds(6));
    assert_eq!(take_opened_connection_count(&mut harness), Some(6));
}

#[test]
fn packet_placement_uses_the_mean_load_of_cores() {
    let unequal_busy_ns = [0, 80_000_000];
    let core_loads_in_table = |service: &str| {
        let mut harness = PoolHarness::new(&["", ""], &format!("policy = \"crossrss\"\n{service}"));
        for (n, busy_ns) in [unequal_busy_ns, [60_000_000; 2]].iter().enumerate() {
            let session = harness.controller.register_agent(&format!("s{n}"), "test", now_at_seconds(0)).unwrap();
            harness
                .controller
                .record_report(&session, Ok(build_plain_report(1, now_at_seconds(0), &[0; 2])), now_at_seconds(0))
                .unwrap();
            harness
                .controller
                .record_report(&session, Ok(build_plain_report(2, now_at_seconds(1), busy_ns)), now_at_seconds(1))
                .unwrap();
        }
        let pool = harness.controller.compute_pool(&harness.controller.services[0], now_at_seconds(1));
        pool.servers()
            .iter()
            .map(|server| server.loads.as_ref().unwrap().core_loads().unwrap().to_vec())
            .collect::<Vec<_>>()
    };
    let tcp_service_loads = core_loads_in_table("");
    assert!(tcp_service_loads[0][0] == 0.0 && tcp_service_loads[0][1] > tcp_service_loads[1][0]);
    assert_eq!(core_loads_in_table("protocol = \"udp\"\n"), tcp_service_loads, "flows");
    let packet_service_loads = core_loads_in_table("protocol = \"udp\"\nudp = \"packet\"\n");
    assert_eq!(packet_service_loads, [vec![tcp_service_loads[0][1] / 2.0; 2], tcp_service_loads[1].clone()]);
}

#[test]
fn previous_servers_of_buckets_are_sent_to_agents() {
    let mut harness = PoolHarness::new(&["", "", ""], "");
    let sessions: Vec<AgentSession> = (0..2).map(|n| harness.connect_agent(n, 0, now_at_seconds(0))).collect();
    let old_servers = harness.make_table(now_at_seconds(0)).consistent_server_by_bucket;
    assert!(harness.make_table(now_at_seconds(0)).previous_consistent_server_by_bucket.is_empty());
    assert_eq!(harness.controller.take_changed_bucket_histories().len(), 1);
    assert!(harness.controller.take_changed_bucket_histories().is_empty());
    let change_count = harness.controller.previous_server_change_count();
    harness.configure(&["", "", "state = \"draining\""], "", now_at_seconds(1));
    let table = harness.make_table(now_at_seconds(1));
    for (bucket, (old, new)) in old_servers.iter().zip(&table.consistent_server_by_bucket).enumerate() {
        assert_eq!(table.previous_consistent_server_by_bucket[bucket], (old != new).then_some(*old));
    }
    assert!(harness.controller.previous_server_change_count() > change_count);
    for session in &sessions {
        let previous_servers = harness.controller.agent_configuration(session).unwrap().previous_servers;
        assert_eq!(previous_servers.iter().map(|server| server.id).collect::<Vec<_>>(), [server_id(2)]);
    }
    // A new controller process continues from the records.
    let (name, history) = harness.controller.take_changed_bucket_histories().remove(0);
    harness.records.services.get_mut(&name).unwrap().bucket_history = history;
    harness.controller =
        Controller::new(Fleet::new(&fleet_config(&["", "", "state = \"draining\""], ""), &harness.records));
    assert_eq!(
        harness.make_table(now_at_seconds(2)).previous_consistent_server_by_bucket,
        table.previous_consistent_server_by_bucket
    );
    // No server forwards packets if the bucket does not determine their server.
    harness.configure(&["", "", ""], "consistency = \"hash-table\"\n", now_at_seconds(3));
    let session = harness.connect_agent(0, 0, now_at_seconds(3));
    harness.make_table(now_at_seconds(3));
    assert!(harness.controller.agent_configuration(&session).unwrap().previous_servers.is_empty());
}

#[test]
fn silent_load_balancers_count_as_lost() {
    let mut harness = PoolHarness::new(&[""], "");
    let session = harness.controller.register_load_balancer("lb1", now_at_seconds(10)).unwrap();
    let rejection = harness.controller.register_load_balancer("lb1", now_at_seconds(12)).unwrap_err();
    assert!(rejection.ends_session());
    assert_eq!(
        rejection.to_string(),
        "load balancer \"lb1\" is connected already, last message 2000 ms ago: expected a unique name"
    );
    let newer_session = harness.controller.register_load_balancer("lb1", now_at_seconds(20)).unwrap();
    assert!(!harness.controller.load_balancers.end_session(session, now_at_seconds(20)), "it is another's by now");
    assert!(harness.controller.load_balancers.end_session(newer_session, now_at_seconds(21)));
    let is_load_balancer_alive = |harness: &PoolHarness, now: Duration| {
        !harness
            .controller
            .live_load_balancer_names(ClockReadings { monotonic_time: now, wall_time: now, record_clock_time: now })
            .is_empty()
    };
    let session_end_time = Duration::from_secs(21);
    assert!(
        is_load_balancer_alive(&harness, session_end_time + LOAD_BALANCER_LOSS_TIMEOUT - Duration::from_millis(1))
            && !is_load_balancer_alive(&harness, session_end_time + LOAD_BALANCER_LOSS_TIMEOUT)
    );
    let silent_session = harness.controller.register_load_balancer("lb1", now_at_seconds(30)).unwrap();
    let last_message_time = Duration::from_secs(30);
    assert!(
        is_load_balancer_alive(&harness, Duration::from_secs(31))
            && !is_load_balancer_alive(&harness, last_message_time + LOAD_BALANCER_LOSS_TIMEOUT)
    );
    harness.controller.record_load_balancer_state(
        silent_session,
        coreward_wire::v1::LoadBalancerState::default(),
        now_at_seconds(40),
    );
    assert!(is_load_balancer_alive(&harness, Duration::from_secs(41)));
    // After the controller's start, load balancers on record have time to return.
    harness.records.register_load_balancer("lb1", None);
    let controller = Controller::new(Fleet::new(&fleet_config(&[""], ""), &harness.records));
    assert_eq!(
        (
            controller.live_load_balancer_names(now_at_seconds(4)).len(),
            controller.live_load_balancer_names(now_at_seconds(5)).len()
        ),
        (1, 0)
    );
}

/// Asserts that servers with LB-side stamping need no agents. Without any agent, there is a table, and no
/// rotation waits for the servers. A rotation does not change the key with which load balancers mask cookies' times.
#[test]
fn servers_with_lb_stamping_need_no_agent() {
    let mut harness = PoolHarness::new(&["", ""], "timestamps = \"lb\"\npolicy = \"rr\"\n");
    assert_eq!(harness.make_table(now_at_seconds(10)).members.len(), 2);
    let fleet = &harness.controller.fleet;
    let configuration = fleet.load_balancer_configuration(|_| true);
    let time_key = configuration.services[0].time_key.expect("load balancers stamp");
    let server = ServerId::try_from(1).unwrap();
    assert!(!fleet.is_stamping_server(server));
    assert!(!fleet.agent_configuration(server, &BTreeSet::new()).services[0].settings.servers_stamp_packets());
    assert!(harness.controller.keys(now_at_seconds(10)).pending_peers.is_empty());

    let (address, client) = (configuration.services[0].address, "10.1.0.7:1024".parse().unwrap());
    let tuple = FourTuple::new(client, address.vip_and_port).unwrap();
    let tsecr = lb_stamping::stamp_tsval(&configuration.cookie_keys, &time_key, &tuple, server, 5);
    let packet = ExplainedPacket::Established { tsecr: Some(tsecr), is_reset: false };
    let explanation = harness.controller.explain_packet(address, client, packet, now_at_seconds(10)).unwrap();
    assert_eq!(explanation.chosen_server.as_deref(), Some("s1"), "{}", explanation.reason);
    let reset_packet = ExplainedPacket::Established { tsecr: None, is_reset: true };
    let explanation = harness.controller.explain_packet(address, client, reset_packet, now_at_seconds(10)).unwrap();
    assert!(explanation.chosen_server.is_none() && explanation.reason.contains("is dropped"), "{}", explanation.reason);

    harness.records.key_ring.announce_next_key(true, 2, &mut seeded_rng(8, 0));
    harness.records.key_ring.switch_to_next_key(now_at_seconds(20).wall_time, 3);
    harness.configure(&["", ""], "timestamps = \"lb\"\npolicy = \"rr\"\n", now_at_seconds(20));
    let rotated_configuration = harness.controller.fleet.load_balancer_configuration(|_| true);
    assert_ne!(rotated_configuration.cookie_keys, configuration.cookie_keys);
    assert_eq!(rotated_configuration.services[0].time_key, Some(time_key));
    harness.configure(&["", ""], "policy = \"rr\"\n", now_at_seconds(30));
    assert_eq!(harness.controller.fleet.load_balancer_configuration(|_| true).services[0].time_key, None);
}
