//! Tests in virtual time of an agent that attracts connections by false reports. A load balancer places connections by
//! the controller's tables, and the servers' loads follow from their connections. One server always reports idle cores.

use std::collections::VecDeque;

use coreward_config::TomlSource;
use coreward_model::placement::PlacementTableState;
use coreward_model::rss::{RssKey, seeded_rng};
use coreward_wire::{ServerTraffic, TrafficCountsMessage};

use super::tests::{build_plain_report, build_uniform_rss};
use super::*;
use coreward_fleet::config::FleetConfig;
use coreward_fleet::records::FleetRecords;

const SERVER_COUNT: usize = 10;
const CORE_COUNT: usize = 4;
/// Number of new connections at all servers per interval of 100 ms. Each lasts for `CONNECTION_LIFETIME_INTERVALS`.
const CONNECTIONS_PER_INTERVAL: u64 = 20;
const CONNECTION_LIFETIME_INTERVALS: usize = 50;
/// CPU time that a connection takes per interval (ns). All connections together use half of the cores' time.
const BUSY_NS_PER_CONNECTION: u64 = 2_000_000;
const BYZANTINE_SERVER_INDEX: usize = 0;

fn now_at_interval(interval: u64) -> ClockReadings {
    let monotonic = Duration::from_millis(100 * interval);
    let wall = Duration::from_secs(1_700_000_000) + monotonic;
    ClockReadings { monotonic_time: monotonic, wall_time: wall, record_clock_time: wall }
}

struct ShareLimiterHarness {
    controller: Controller,
    sessions: Vec<AgentSession>,
    balancer_session: u64,
    rng_state: u32,
    /// Server and core of each open connection, grouped by the interval in which the connection was opened.
    open_connections_by_interval: VecDeque<Vec<(usize, usize)>>,
    core_busy_ns: Vec<[u64; CORE_COUNT]>,
    opened_counts_by_server: Vec<u64>,
    has_byzantine_server: bool,
    /// RSS key that the Byzantine server reports, and every connection's hash with it, or `None` if it reports
    /// the other servers' key.
    byzantine_key_and_hash: Option<(RssKey, u32)>,
}

impl ShareLimiterHarness {
    fn new(policy: &str, has_byzantine_server: bool) -> Self {
        let mut text = String::new();
        for n in 0..SERVER_COUNT {
            text += &format!("[[server]]\nname = \"s{n}\"\naddress = \"10.2.0.{}\"\nid = {n}\n", n + 1);
        }
        text += &format!("[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\npolicy = \"{policy}\"\n");
        let config = FleetConfig::parse(&TomlSource::from_text("fleet.toml", &text)).unwrap();
        let mut records = FleetRecords::generate(now_at_interval(0).wall_time, &mut seeded_rng(5, 0));
        records.apply_document(&config, now_at_interval(0).wall_time, &mut seeded_rng(6, 0)).unwrap();
        let mut controller = Controller::new(Fleet::new(&config, &records));
        let sessions = (0..SERVER_COUNT)
            .map(|n| controller.register_agent(&format!("s{n}"), "test", now_at_interval(0)).unwrap())
            .collect();
        let balancer_session = controller.register_load_balancer("lb1", now_at_interval(0)).unwrap();
        Self {
            controller,
            sessions,
            balancer_session,
            rng_state: 7,
            open_connections_by_interval: VecDeque::new(),
            core_busy_ns: vec![[0; CORE_COUNT]; SERVER_COUNT],
            opened_counts_by_server: vec![0; SERVER_COUNT],
            has_byzantine_server,
            byzantine_key_and_hash: None,
        }
    }

    fn report_all_servers(&mut self, interval_number: u64) {
        for (server, core) in self.open_connections_by_interval.iter().flatten() {
            if !self.has_byzantine_server || *server != BYZANTINE_SERVER_INDEX {
                self.core_busy_ns[*server][*core] += BUSY_NS_PER_CONNECTION;
            }
        }
        for (n, session) in self.sessions.iter().enumerate() {
            let mut rss = (interval_number == 0).then(|| build_uniform_rss(128, CORE_COUNT as u32));
            if let Some((key, _)) = self.byzantine_key_and_hash.as_ref().filter(|_| n == BYZANTINE_SERVER_INDEX)
                && let Some(rss) = rss.as_mut().and_then(|reported_rss| reported_rss.rss.as_mut())
            {
                rss.key = key.clone();
            }
            let report =
                build_plain_report(interval_number + 1, now_at_interval(interval_number), &self.core_busy_ns[n]);
            let report = AgentReport { rss, rss_generation: 1, ..report };
            self.controller.record_report(session, Ok(report), now_at_interval(interval_number)).unwrap();
        }
    }

    fn simulate_interval(&mut self, interval_number: u64) {
        self.report_all_servers(interval_number);
        let table = self.controller.end_report_interval(now_at_interval(interval_number)).remove(0).table;
        let service_index = self.controller.fleet().services[0].index;
        let mut placement_state = PlacementTableState::for_table(&table);
        let mut new_connections = Vec::new();
        for _ in 0..CONNECTIONS_PER_INTERVAL {
            self.rng_state = self.rng_state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let connection_hash = self.rng_state >> 25;
            let byzantine_key_hash = |key: &RssKey| {
                self.byzantine_key_and_hash.as_ref().filter(|(false_key, _)| false_key == key).map(|(_, hash)| *hash)
            };
            let chosen_server = table.select_server_by_hash(&mut placement_state, |group| {
                byzantine_key_hash(&table.rss_key_by_group[group]).unwrap_or(connection_hash)
            });
            let server_number = usize::from(chosen_server.unwrap().get());
            self.opened_counts_by_server[server_number] += 1;
            new_connections.push((server_number, connection_hash as usize % CORE_COUNT));
        }
        self.open_connections_by_interval.push_back(new_connections);
        if self.open_connections_by_interval.len() > CONNECTION_LIFETIME_INTERVALS {
            self.open_connections_by_interval.pop_front();
        }
        let numbered_opened_counts = self.opened_counts_by_server.iter().enumerate();
        let server_traffic = numbered_opened_counts.map(|(id, opened_count)| {
            (
                (id as u64).try_into().unwrap(),
                ServerTraffic { opened_connection_count: *opened_count, ..Default::default() },
            )
        });
        let server_traffic = server_traffic.collect();
        let opened_connections = [(service_index, self.opened_counts_by_server.iter().sum())].into();
        let traffic_message = TrafficCountsMessage {
            traffic_by_server: server_traffic,
            opened_connection_count_by_service: opened_connections,
        };
        self.controller.record_load_balancer_traffic(
            self.balancer_session,
            &traffic_message,
            now_at_interval(interval_number),
        );
    }

    /// Returns the Byzantine server's share of the connections that are opened during the second minute.
    fn simulate_byzantine_server_share(&mut self) -> f64 {
        (0..600).for_each(|interval| self.simulate_interval(interval));
        let previous_opened_counts = self.opened_counts_by_server.clone();
        (600..1200).for_each(|interval| self.simulate_interval(interval));
        let total_opened_count: u64 = self
            .opened_counts_by_server
            .iter()
            .zip(&previous_opened_counts)
            .map(|(count_after, count_before)| count_after - count_before)
            .sum();
        (self.opened_counts_by_server[BYZANTINE_SERVER_INDEX] - previous_opened_counts[BYZANTINE_SERVER_INDEX]) as f64
            / total_opened_count as f64
    }
}

#[test]
fn byzantine_server_gets_at_most_twice_its_fair_share() {
    for policy in ["crossrss", "crossrss-plus", "least:cpu"] {
        let mut harness = ShareLimiterHarness::new(policy, true);
        let byzantine_share = harness.simulate_byzantine_server_share();
        assert!(byzantine_share < 0.21, "{policy}: {byzantine_share}");
        assert_eq!(harness.controller.share_limiter.limited_server_count(), 1, "{policy}");
    }
}

/// Asserts that the Byzantine server gets no burst of connections, as it would if it were excluded too late.
#[test]
fn byzantine_server_gets_at_most_twice_its_share_in_ten_seconds() {
    let mut harness = ShareLimiterHarness::new("least:cpu", true);
    let opened_counts_by_interval: Vec<[u64; 2]> = (0..1_200)
        .map(|interval| {
            harness.simulate_interval(interval);
            [harness.opened_counts_by_server[BYZANTINE_SERVER_INDEX], harness.opened_counts_by_server.iter().sum()]
        })
        .collect();
    let compute_byzantine_share = |window: &[[u64; 2]]| {
        let [[false_count, total_count], [later_false_count, later_total_count]] =
            [window[0], window[window.len() - 1]];
        (later_false_count - false_count) as f64 / (later_total_count - total_count) as f64
    };
    let maximum_share = opened_counts_by_interval[600..].windows(101).map(compute_byzantine_share).fold(0.0, f64::max);
    // The connections of a quarter of a second may come after the allowance is spent.
    assert!(maximum_share < 0.2 + 0.25 / 10.0, "{maximum_share}");
}

/// Asserts that a server gets no larger share by an RSS key with which every connection has the same hash, such as one
/// of zeros. Such a key puts all connections into one bucket.
#[test]
fn byzantine_server_with_a_degenerate_key_gets_no_larger_share() {
    for hash in 0..16 {
        let mut harness = ShareLimiterHarness::new("crossrss", true);
        harness.byzantine_key_and_hash = Some((RssKey::new(&[0; 40]).unwrap(), hash));
        let byzantine_share = harness.simulate_byzantine_server_share();
        assert!(byzantine_share < 0.21, "hash {hash}: {byzantine_share}");
    }
}

#[test]
fn honest_servers_are_not_limited() {
    for policy in ["crossrss", "crossrss-plus", "least:cpu"] {
        let mut harness = ShareLimiterHarness::new(policy, false);
        for interval in 0..600 {
            harness.simulate_interval(interval);
            assert_eq!(harness.controller.share_limiter.limited_server_count(), 0, "{policy}, interval {interval}");
        }
    }
}

#[test]
fn byzantine_server_is_not_limited_once_it_reports_its_load() {
    let mut harness = ShareLimiterHarness::new("crossrss", true);
    (0..300).for_each(|interval| harness.simulate_interval(interval));
    assert_eq!(harness.controller.share_limiter.limited_server_count(), 1);
    harness.has_byzantine_server = false;
    (300..900).for_each(|interval| harness.simulate_interval(interval));
    assert_eq!(harness.controller.share_limiter.limited_server_count(), 0);
}
