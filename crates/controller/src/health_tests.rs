//! Tests in virtual time of pools with servers that health checks find down.

use std::collections::BTreeMap;
use std::time::Duration;

use coreward_api::types::ServerState;
use coreward_config::TomlSource;
use coreward_model::ServerId;
use coreward_model::health::HealthVerdict;
use coreward_model::rss::seeded_rng;
use coreward_wire::{HealthCheckResultsMessage, LOAD_BALANCER_LOSS_TIMEOUT, ServerCheckResult, ServiceIndex, v1};

use super::tests::build_plain_report;
use super::{ClockReadings, Controller};
use coreward_fleet::config::FleetConfig;
use coreward_fleet::fleet::Fleet;
use coreward_fleet::records::FleetRecords;

fn now_at_ms(milliseconds: u64) -> ClockReadings {
    let monotonic = Duration::from_millis(milliseconds);
    let wall = Duration::from_secs(1_700_000_000) + monotonic;
    ClockReadings { monotonic_time: monotonic, wall_time: wall, record_clock_time: wall }
}

/// Returns a fleet of servers s0, s1, s2 with ids 0, 1, 2, and one service with the TOML keys `service_keys`.
fn three_server_config(service_keys: &str) -> FleetConfig {
    let mut text = String::new();
    for n in 0..3 {
        text += &format!("[[server]]\nname = \"s{n}\"\naddress = \"10.2.0.{}\"\nid = {n}\n", n + 1);
    }
    text += &format!("[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\npolicy = \"rr\"\n{service_keys}");
    FleetConfig::parse(&TomlSource::from_text("fleet.toml", &text)).unwrap()
}

struct HealthHarness {
    records: FleetRecords,
    controller: Controller,
    load_balancer_sessions: BTreeMap<&'static str, u64>,
}

impl HealthHarness {
    fn new(service_keys: &str, load_balancers: &[&'static str]) -> Self {
        let config = three_server_config(service_keys);
        let mut records = FleetRecords::generate(now_at_ms(0).wall_time, &mut seeded_rng(5, 0));
        records.apply_document(&config, now_at_ms(0).wall_time, &mut seeded_rng(6, 0)).unwrap();
        let mut controller = Controller::new(Fleet::new(&config, &records));
        let mut register_session =
            |name: &&'static str| (*name, controller.register_load_balancer(name, now_at_ms(0)).unwrap());
        let load_balancer_sessions = load_balancers.iter().map(&mut register_session).collect();
        Self { records, controller, load_balancer_sessions }
    }

    fn configure(&mut self, service_keys: &str, now: ClockReadings) {
        let config = three_server_config(service_keys);
        self.records.apply_document(&config, now.wall_time, &mut seeded_rng(7, 0)).unwrap();
        self.controller.configure(Fleet::new(&config, &self.records));
    }

    /// Reports a load balancer's verdict on each server: up ('u'), down ('d'), or unknown ('?').
    fn report_verdicts(&mut self, load_balancer: &str, verdicts: &str, now: ClockReadings) {
        let to_checked_server = |(id, verdict_letter): (usize, char)| {
            let verdict = match verdict_letter {
                'u' => Some(HealthVerdict::Up),
                'd' => Some(HealthVerdict::Down),
                _ => None,
            };
            let error = if verdict == Some(HealthVerdict::Down) { "connection refused" } else { "" };
            let checked_server = ServerCheckResult { verdict, error: error.to_owned(), ..Default::default() };
            (ServiceIndex::new(0).unwrap(), ServerId::try_from(id as u64).unwrap(), checked_server)
        };
        let health_message =
            HealthCheckResultsMessage { check_results: verdicts.chars().enumerate().map(to_checked_server).collect() };
        self.controller.load_balancers.record_health_check_results(
            self.load_balancer_sessions[load_balancer],
            health_message,
            now,
        );
    }

    fn send_keep_alives(&mut self, now: ClockReadings) {
        for session in self.load_balancer_sessions.values() {
            self.controller.record_load_balancer_state(*session, v1::LoadBalancerState::default(), now);
        }
    }

    /// Returns the ids of the members of the next table. Checks that all other servers are draining or down.
    fn next_table_member_ids(&mut self, now: ClockReadings) -> Vec<u16> {
        let table = self.controller.end_report_interval(now).remove(0).table;
        let member_ids: Vec<u16> = table.members.iter().map(|member| member.server.get()).collect();
        for (server, number) in self.controller.status(now).services[0].members.iter().zip(0u16..) {
            let is_down = table.down_servers.iter().any(|server_id| server_id.get() == number);
            let is_member = member_ids.contains(&number);
            assert_eq!(is_down, !is_member && server.state == ServerState::Down, "{}: {table:?}", server.server);
        }
        member_ids
    }

    fn server_states_and_reasons(&self, now: ClockReadings) -> Vec<(String, String)> {
        let servers = self.controller.status(now).servers;
        servers.into_iter().map(|server| (server.state.to_string(), server.state_reason)).collect()
    }

    fn server_state(&self, server_number: usize, now: ClockReadings) -> String {
        self.server_states_and_reasons(now).remove(server_number).0
    }
}

const TCP_HEALTH_CHECK_TOML: &str = "[service.health]\ncheck = \"tcp\"\n";

#[test]
fn only_listed_load_balancers_may_connect() {
    let config_with_allowed_lb1 = |service: &str| {
        let text = format!("load_balancers = [\"lb1\"]\n{}", three_server_config(service).source().text());
        FleetConfig::parse(&TomlSource::from_text("fleet.toml", &text)).unwrap()
    };
    let mut harness = HealthHarness::new("", &["lb1", "lb2"]);
    harness
        .records
        .apply_document(&config_with_allowed_lb1(""), now_at_ms(0).wall_time, &mut seeded_rng(7, 0))
        .unwrap();
    harness.controller.configure(Fleet::new(&config_with_allowed_lb1(""), &harness.records));
    let rejection = harness.controller.register_load_balancer("lb2", now_at_ms(10_000)).unwrap_err();
    assert_eq!(rejection, super::message_rejection::MessageRejection::UnknownLoadBalancer("lb2".to_owned()));
    harness.controller.register_load_balancer("lb1", now_at_ms(10_000)).unwrap();
}

/// Asserts that a new leader makes no table before load balancers have reported health verdicts.
#[test]
fn first_tables_wait_for_health_verdicts() {
    let mut harness = HealthHarness::new(TCP_HEALTH_CHECK_TOML, &["lb1", "lb2"]);
    assert!(!harness.controller.has_all_check_results(now_at_ms(10)));
    harness.report_verdicts("lb1", "ud?", now_at_ms(20));
    assert!(!harness.controller.has_all_check_results(now_at_ms(20)));
    harness.report_verdicts("lb2", "ud?", now_at_ms(30));
    assert!(harness.controller.has_all_check_results(now_at_ms(30)));
    assert!(HealthHarness::new("", &["lb1"]).controller.has_all_check_results(now_at_ms(10)), "nothing is checked");
}

#[test]
fn majority_of_load_balancers_decides_server_health() {
    let mut harness = HealthHarness::new(TCP_HEALTH_CHECK_TOML, &["lb1", "lb2", "lb3"]);
    assert_eq!(harness.next_table_member_ids(now_at_ms(0)), [0, 1, 2]);
    harness.report_verdicts("lb1", "udu", now_at_ms(100));
    assert_eq!(harness.next_table_member_ids(now_at_ms(100)), [0, 2], "no verdict is against it");
    harness.report_verdicts("lb2", "uuu", now_at_ms(200));
    assert_eq!(harness.next_table_member_ids(now_at_ms(200)), [0, 2], "a tie changes nothing");
    harness.report_verdicts("lb3", "uuu", now_at_ms(300));
    assert_eq!(harness.next_table_member_ids(now_at_ms(300)), [0, 1, 2]);
    assert_eq!(
        harness.server_states_and_reasons(now_at_ms(300))[1],
        ("active".to_owned(), "1 of 3 load balancers: connection refused".to_owned())
    );
    harness.report_verdicts("lb3", "udu", now_at_ms(400));
    assert_eq!(harness.next_table_member_ids(now_at_ms(400)), [0, 2]);
    assert_eq!(
        harness.server_states_and_reasons(now_at_ms(900))[1],
        ("down".to_owned(), "2 of 3 load balancers: connection refused".to_owned())
    );
    assert_eq!(harness.controller.status(now_at_ms(900)).servers[1].state_for_ms, Some(500));
    // A lost load balancer has no vote.
    let time_after_lb_timeout_ms = 400 + LOAD_BALANCER_LOSS_TIMEOUT.as_millis() as u64 + 5_000;
    harness.report_verdicts("lb2", "uuu", now_at_ms(time_after_lb_timeout_ms));
    assert_eq!(harness.next_table_member_ids(now_at_ms(time_after_lb_timeout_ms)), [0, 1, 2]);
    // When all load balancers are lost, the verdict remains.
    harness.report_verdicts("lb2", "duu", now_at_ms(time_after_lb_timeout_ms));
    assert_eq!(harness.next_table_member_ids(now_at_ms(time_after_lb_timeout_ms)), [1, 2]);
    assert_eq!(harness.next_table_member_ids(now_at_ms(2 * time_after_lb_timeout_ms)), [1, 2]);
}

#[test]
fn partitioned_load_balancer_does_not_mark_servers_down() {
    let mut harness = HealthHarness::new(TCP_HEALTH_CHECK_TOML, &["lb1", "lb2", "lb3"]);
    for name in ["lb1", "lb2"] {
        harness.report_verdicts(name, "ddd", now_at_ms(100));
    }
    harness.report_verdicts("lb3", "uud", now_at_ms(100));
    assert_eq!(harness.next_table_member_ids(now_at_ms(100)), [0, 1]);
    harness.report_verdicts("lb3", "u??", now_at_ms(200));
    assert_eq!(harness.next_table_member_ids(now_at_ms(200)), [0, 1], "of who is not known yet nothing changes");
}

#[test]
fn service_without_healthy_servers_fails_open_or_drops() {
    for (keys, fails_open) in [
        (TCP_HEALTH_CHECK_TOML.to_owned(), true),
        (format!("when_all_down = \"drop\"\n{TCP_HEALTH_CHECK_TOML}"), false),
    ] {
        let mut harness = HealthHarness::new(&keys, &["lb1"]);
        harness.report_verdicts("lb1", "uuu", now_at_ms(0));
        assert_eq!(harness.next_table_member_ids(now_at_ms(0)), [0, 1, 2]);
        harness.report_verdicts("lb1", "ddd", now_at_ms(100));
        assert_eq!(
            harness.next_table_member_ids(now_at_ms(100)),
            if fails_open { vec![0, 1, 2] } else { Vec::<u16>::new() }
        );
        let service = harness.controller.status(now_at_ms(100)).services.remove(0);
        assert_eq!((service.failing_open, service.warnings.len()), (fails_open, 1), "{:?}", service.warnings);
        assert!((0..3).all(|number| harness.server_state(number, now_at_ms(100)) == "down"));
        // The first healthy server gets all connections.
        harness.report_verdicts("lb1", "ddu", now_at_ms(200));
        assert_eq!(harness.next_table_member_ids(now_at_ms(200)), [2]);
    }
}

/// Asserts that draining and unreachable servers get no connections even while all servers are down.
#[test]
fn fail_open_excludes_draining_servers() {
    let mut harness = HealthHarness::new(TCP_HEALTH_CHECK_TOML, &["lb1"]);
    let unresolved_state = v1::LoadBalancerState { unresolved_servers: vec!["s0".to_owned()], ..Default::default() };
    let session = harness.load_balancer_sessions["lb1"];
    for ms in [0, 4_000] {
        harness.controller.record_load_balancer_state(session, unresolved_state.clone(), now_at_ms(ms));
    }
    harness.report_verdicts("lb1", "ddd", now_at_ms(4_000));
    assert_eq!(harness.next_table_member_ids(now_at_ms(4_000)), [1, 2]);
    assert_eq!(harness.server_states_and_reasons(now_at_ms(4_000))[0].1, "no load balancer can find its MAC address");
    let all_servers = ["s0", "s1", "s2"].map(str::to_owned).to_vec();
    let unresolved_state = v1::LoadBalancerState { unresolved_servers: all_servers, ..Default::default() };
    for ms in [5_000, 9_000] {
        harness.controller.record_load_balancer_state(session, unresolved_state.clone(), now_at_ms(ms));
    }
    assert!(harness.next_table_member_ids(now_at_ms(9_000)).is_empty());
}

#[test]
fn recovered_server_has_a_slow_start() {
    let mut harness = HealthHarness::new(&format!("slow_start = \"10s\"\n{TCP_HEALTH_CHECK_TOML}"), &["lb1"]);
    harness.report_verdicts("lb1", "uuu", now_at_ms(0));
    harness.next_table_member_ids(now_at_ms(0));
    assert_eq!(harness.server_state(1, now_at_ms(0)), "active", "who was there from the start has not just joined");
    harness.report_verdicts("lb1", "udu", now_at_ms(1_000));
    harness.next_table_member_ids(now_at_ms(1_000));
    harness.report_verdicts("lb1", "uuu", now_at_ms(2_000));
    harness.next_table_member_ids(now_at_ms(2_000));
    assert_eq!(
        harness.server_states_and_reasons(now_at_ms(2_000))[1],
        ("joining".to_owned(), "slow start: 2 %".to_owned())
    );
    harness.send_keep_alives(now_at_ms(7_000));
    harness.next_table_member_ids(now_at_ms(7_000));
    assert_eq!(
        harness.server_states_and_reasons(now_at_ms(7_000))[1],
        ("joining".to_owned(), "slow start: 50 %".to_owned())
    );
    harness.send_keep_alives(now_at_ms(12_000));
    harness.next_table_member_ids(now_at_ms(12_000));
    assert_eq!(harness.server_states_and_reasons(now_at_ms(12_000))[1], ("active".to_owned(), String::new()));
}

#[test]
fn service_without_health_check_ignores_verdicts() {
    let mut harness = HealthHarness::new("", &["lb1"]);
    harness.report_verdicts("lb1", "ddd", now_at_ms(0));
    assert_eq!(harness.next_table_member_ids(now_at_ms(0)), [0, 1, 2]);
    harness.configure(TCP_HEALTH_CHECK_TOML, now_at_ms(100));
    assert_eq!(harness.next_table_member_ids(now_at_ms(100)), [0, 1, 2]);
    let mut harness = HealthHarness::new(TCP_HEALTH_CHECK_TOML, &["lb1"]);
    harness.report_verdicts("lb1", "duu", now_at_ms(0));
    assert_eq!(harness.next_table_member_ids(now_at_ms(0)), [1, 2]);
    harness.configure("", now_at_ms(100));
    assert_eq!(harness.next_table_member_ids(now_at_ms(100)), [0, 1, 2]);
}

#[test]
fn agent_health_check_marks_silent_servers_down() {
    let agent_check = "[service.health]\ncheck = \"agent\"\ninterval = \"1s\"\nrise = 2\nfall = 3\n";
    let mut harness = HealthHarness::new(agent_check, &[]);
    let fleet_configuration = harness.controller.fleet_configuration(now_at_ms(0));
    assert!(fleet_configuration.services[0].health_check.is_none(), "load balancers have nothing to do with it");
    let mut sessions: Vec<_> =
        (0..3).map(|n| harness.controller.register_agent(&format!("s{n}"), "test", now_at_ms(0)).unwrap()).collect();
    let mut down_servers = Vec::new();
    for second in 0..30u64 {
        let now = now_at_ms(second * 1000);
        for (n, session) in sessions.iter_mut().enumerate().filter(|(n, _)| *n != 1 || !(8..20).contains(&second)) {
            let report = coreward_wire::AgentReport {
                time_to_live: Duration::from_millis(1_500),
                ..build_plain_report(second + 1, now, &[n as u64])
            };
            harness.controller.record_report(session, Ok(report), now).unwrap();
        }
        if harness.next_table_member_ids(now) != [0, 1, 2] {
            down_servers.push(second);
        }
    }
    // The report of second 7 expires at 8.5 s, so checks 9, 10 and 11 fail. Checks 20 and 21 pass.
    assert_eq!(down_servers, (11..21).collect::<Vec<_>>());
    assert_eq!(harness.server_state(1, now_at_ms(29_000)), "active");
}
