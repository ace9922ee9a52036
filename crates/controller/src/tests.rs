//! Tests of the controller in virtual time.

mod explanations;
mod rate_limits;

use std::collections::BTreeMap;

use coreward_api::types::{Explanation, ReportState, Server, ServerState};
use coreward_config::TomlSource;
use coreward_model::cookie::{self, Cookie, CookieKey};
use coreward_model::load::CoreBusyTimeReadings;
use coreward_model::placement::PlacementTableState;
use coreward_model::rss::{IndirectionTable, RssConfig, RssKey, seeded_rng};
use coreward_model::{FourTuple, ServiceAddress};
use coreward_wire::{AgentReportDetails, ReportedRss, WireError, v1};
use proptest::prelude::*;

use super::explain::ExplainedPacket;
use super::*;
use coreward_fleet::config::FleetConfig;
use coreward_fleet::records::FleetRecords;

const START_WALL_TIME: Duration = Duration::from_secs(1_700_000_000);

fn now_at_ms(milliseconds: u64) -> ClockReadings {
    let monotonic = Duration::from_millis(milliseconds);
    ClockReadings {
        monotonic_time: monotonic,
        wall_time: START_WALL_TIME + monotonic,
        record_clock_time: START_WALL_TIME + monotonic,
    }
}

/// Returns a fleet of servers s0, s1 ... with ids 0, 1 ... and the given `states`, and one service.
fn fleet_config(states: &[&str], policy: &str) -> FleetConfig {
    let mut text = String::new();
    for (n, state) in states.iter().enumerate() {
        text +=
            &format!("[[server]]\nname = \"s{n}\"\naddress = \"10.2.0.{}\"\nid = {n}\nstate = \"{state}\"\n", n + 1);
    }
    text += &format!("[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\npolicy = \"{policy}\"\n");
    FleetConfig::parse(&TomlSource::from_text("fleet.toml", &text)).unwrap()
}

struct ControllerHarness {
    records: FleetRecords,
    controller: Controller,
}

impl ControllerHarness {
    fn new(states: &[&str], policy: &str) -> Self {
        let random_source = &mut seeded_rng(5, 0);
        let mut records = FleetRecords::generate(START_WALL_TIME, random_source);
        let config = fleet_config(states, policy);
        records.apply_document(&config, START_WALL_TIME, random_source).unwrap();
        let controller = Controller::new(Fleet::new(&config, &records));
        Self { records, controller }
    }

    fn configure(&mut self, states: &[&str], policy: &str, now: ClockReadings) {
        let config = fleet_config(states, policy);
        self.records.apply_document(&config, now.wall_time, &mut seeded_rng(6, 0)).unwrap();
        self.controller.configure(Fleet::new(&config, &self.records));
    }

    /// Connects an agent for each server. Each agent reports twice, 100 ms apart, so that loads are known at 100 ms.
    fn connect_and_report_loads(&mut self, loads: &[&[f64]]) -> Vec<AgentSession> {
        let sessions: Vec<AgentSession> = (0..loads.len())
            .map(|n| self.controller.register_agent(&format!("s{n}"), "test", now_at_ms(0)).unwrap())
            .collect();
        for (session, loads) in sessions.iter().zip(loads) {
            self.controller
                .record_report(
                    session,
                    Ok(report_with_initial_rss(1, now_at_ms(0), &vec![0; loads.len()])),
                    now_at_ms(0),
                )
                .unwrap();
            let busy_ns: Vec<u64> = loads.iter().map(|load| (load * 100e6) as u64).collect();
            self.controller
                .record_report(session, Ok(report_with_initial_rss(2, now_at_ms(100), &busy_ns)), now_at_ms(100))
                .unwrap();
        }
        sessions
    }

    fn make_table(&mut self, now: ClockReadings) -> Arc<PlacementTable> {
        self.controller.end_report_interval(now).remove(0).table
    }

    fn server_status(&self, server: &str, now: ClockReadings) -> Server {
        self.controller.status(now).servers.into_iter().find(|status| status.name == server).unwrap()
    }

    fn explain_new_connection(&self, port: u16, now: ClockReadings) -> Explanation {
        self.explain_packet(port, ExplainedPacket::NewConnection, now)
    }

    fn explain_packet(&self, port: u16, packet: ExplainedPacket, now: ClockReadings) -> Explanation {
        self.controller.explain_packet(web_service_address(), client_address(port), packet, now).unwrap()
    }
}

fn web_service_address() -> ServiceAddress {
    ServiceAddress {
        vip_and_port: "10.200.0.1:80".parse().unwrap(),
        protocol: coreward_model::tuple::TransportProtocol::Tcp,
    }
}

fn client_address(port: u16) -> std::net::SocketAddr {
    ([10, 1, 0, 7], port).into()
}

/// Returns an RSS configuration whose indirection table assigns its entries to the cores in turn.
pub(super) fn build_uniform_rss(entry_count: u32, core_count: u32) -> ReportedRss {
    let queues: Vec<u32> = (0..entry_count).map(|entry| entry % core_count).collect();
    let indirection_table = IndirectionTable::new(&queues).unwrap();
    let rss = RssConfig { key: RssKey::microsoft_verification_key(), indirection_table };
    ReportedRss { source: "ethtool".into(), rss: Some(rss) }
}

/// Returns a report like [`build_plain_report`] that is valid for 300 ms, with an RSS configuration if it is the first
/// one.
fn report_with_initial_rss(sequence: u64, now: ClockReadings, busy_ns: &[u64]) -> AgentReport {
    AgentReport {
        time_to_live: Duration::from_millis(300),
        open_connection_count: 10,
        rss_generation: 1,
        rss: (sequence == 1).then(|| build_uniform_rss(128, 4)),
        ..build_plain_report(sequence, now, busy_ns)
    }
}

/// Returns a report that is valid for a minute, without an RSS configuration.
pub(super) fn build_plain_report(sequence: u64, now: ClockReadings, busy_ns: &[u64]) -> AgentReport {
    AgentReport {
        sent_at: now.wall_time,
        time_to_live: Duration::from_secs(60),
        readings: CoreBusyTimeReadings {
            report_sequence_number: sequence,
            measured_at_ns: now.monotonic_time.as_nanos() as u64,
            busy_ns_by_core: busy_ns.to_vec(),
        },
        open_connection_count: 0,
        rss_generation: 0,
        rss: None,
        rss_matched_syn_count: 0,
        rss_mismatched_syn_count: 0,
        configuration_generation: 0,
        details: Some(AgentReportDetails::default()),
    }
}

const THREE_ACTIVE_SERVERS: [&str; 3] = ["active"; 3];

fn bucket_counts_by_server(table: &PlacementTable) -> BTreeMap<u16, usize> {
    let mut bucket_counts = BTreeMap::new();
    for candidate in &table.candidates {
        *bucket_counts.entry(candidate.server.get()).or_default() += 1;
    }
    bucket_counts
}

#[test]
fn placement_tables_follow_reported_loads() {
    let mut harness = ControllerHarness::new(&THREE_ACTIVE_SERVERS, "crossrss");
    // Without reports, bucket i goes to server i mod n.
    assert_eq!(bucket_counts_by_server(&harness.make_table(now_at_ms(0))), BTreeMap::from([(0, 43), (1, 43), (2, 42)]));
    let sessions = harness.connect_and_report_loads(&[&[0.9, 0.1, 0.9, 0.9], &[0.2, 0.8, 0.8, 0.8], &[0.5; 4]]);
    let table = harness.make_table(now_at_ms(100));
    let chosen_servers: Vec<u16> = (0..4).map(|bucket| table.bucket_candidates(0, bucket)[0].server.get()).collect();
    assert_eq!(chosen_servers, [1, 0, 2, 2]);
    // s2 becomes busy. Half of the change counts (alpha 0.5), so 0.5 becomes 0.75, less than the others' 0.8 and 0.9.
    harness
        .controller
        .record_report(&sessions[2], Ok(report_with_initial_rss(3, now_at_ms(200), &[150_000_000; 4])), now_at_ms(200))
        .unwrap();
    let table = harness.make_table(now_at_ms(200));
    assert_eq!(table.bucket_candidates(0, 2)[0].server.get(), 2);
    assert_eq!(table.bucket_candidates(0, 2)[0].fixed_point_load, coreward_model::load::load_to_fixed_point(0.75));
    assert_eq!(table.generation, 3);
}

#[test]
fn server_without_fresh_reports_counts_with_the_mean_load() {
    let mut harness = ControllerHarness::new(&THREE_ACTIVE_SERVERS, "crossrss");
    assert!(!harness.controller.are_all_loads_known(now_at_ms(0)));
    let sessions = harness.connect_and_report_loads(&[&[0.0; 4], &[0.5; 4], &[1.0; 4]]);
    assert!(
        harness.controller.are_all_loads_known(now_at_ms(400))
            && !harness.controller.are_all_loads_known(now_at_ms(401))
    );
    assert_eq!(bucket_counts_by_server(&harness.make_table(now_at_ms(100))), BTreeMap::from([(0, 128)]));
    assert_eq!(harness.server_status("s0", now_at_ms(400)).report_state, ReportState::Fresh);
    // s1 and s2 continue to report, while s0 stops. After its time to live, s0 counts as the mean of the others, 0.75.
    for (session, load) in [(&sessions[1], 0.5), (&sessions[2], 1.0)] {
        let busy_ns = [(load * 500e6) as u64; 4];
        harness
            .controller
            .record_report(session, Ok(report_with_initial_rss(3, now_at_ms(500), &busy_ns)), now_at_ms(500))
            .unwrap();
    }
    assert_eq!(bucket_counts_by_server(&harness.make_table(now_at_ms(401))), BTreeMap::from([(1, 128)]));
    let status = harness.server_status("s0", now_at_ms(401));
    assert_eq!((status.report_state, status.core_loads.len(), status.report_age_ms), (ReportState::Stale, 0, 301));
    harness
        .controller
        .record_report(&sessions[0], Ok(report_with_initial_rss(3, now_at_ms(600), &[0; 4])), now_at_ms(600))
        .unwrap();
    assert_eq!(bucket_counts_by_server(&harness.make_table(now_at_ms(600))), BTreeMap::from([(0, 128)]));
}

#[test]
fn unknown_server_is_rejected() {
    let mut harness = ControllerHarness::new(&THREE_ACTIVE_SERVERS, "crossrss");
    let rejection = harness.controller.register_agent("s9", "test", now_at_ms(0)).unwrap_err();
    assert_eq!(
        rejection.to_string(),
        "server \"s9\" is not known: expected the name of a [[server]] in the fleet's file"
    );
    assert_eq!(harness.controller.status(now_at_ms(0)).rejected_reports["unknown_server"], 1);
}

#[test]
fn second_agent_of_a_server_is_rejected_while_the_first_is_alive() {
    let mut harness = ControllerHarness::new(&THREE_ACTIVE_SERVERS, "crossrss");
    let first_session = harness.controller.register_agent("s0", "test", now_at_ms(0)).unwrap();
    let report = report_with_initial_rss(1, now_at_ms(100), &[0; 4]);
    harness.controller.record_report(&first_session, Ok(report), now_at_ms(100)).unwrap();
    let rejection = harness.controller.register_agent("s0", "test", now_at_ms(400)).unwrap_err();
    assert_eq!(
        rejection.to_string(),
        "server \"s0\" has an agent already, last message 300 ms ago: expected one agent per server"
    );
    // After 300 ms the new agent takes over, and the old one's late report is rejected.
    let second_session = harness.controller.register_agent("s0", "test", now_at_ms(401)).unwrap();
    let late_rejection = harness
        .controller
        .record_report(&first_session, Ok(report_with_initial_rss(2, now_at_ms(410), &[0; 4])), now_at_ms(410))
        .unwrap_err();
    assert_eq!(late_rejection, MessageRejection::SupersededAgent("s0".into()));
    harness.controller.end_session(&first_session);
    let report = report_with_initial_rss(1, now_at_ms(420), &[0; 4]);
    harness.controller.record_report(&second_session, Ok(report), now_at_ms(420)).unwrap();
    harness.controller.end_session(&second_session);
    harness.controller.register_agent("s0", "test", now_at_ms(421)).unwrap();
    let rejection_counts = harness.controller.status(now_at_ms(421)).rejected_reports;
    assert_eq!((rejection_counts["duplicate_session"], rejection_counts["superseded"]), (1, 1));
}

#[test]
fn rejected_reports_are_counted_and_change_nothing() {
    let mut harness = ControllerHarness::new(&THREE_ACTIVE_SERVERS, "crossrss");
    let session = harness.connect_and_report_loads(&[&[0.25; 4]]).remove(0);
    let load_before = harness.server_status("s0", now_at_ms(150)).core_loads;
    let mut reject_report = |report: Result<AgentReport, AgentReportError>| {
        let rejection = harness.controller.record_report(&session, report, now_at_ms(150)).unwrap_err();
        assert!(!rejection.ends_session());
        (rejection.counter_name(), rejection.to_string())
    };
    assert_eq!(
        reject_report(Ok(report_with_initial_rss(2, now_at_ms(150), &[0; 4]))),
        ("out_of_order", "report 2 after report 2: out of order".into())
    );
    assert_eq!(
        reject_report(Ok(report_with_initial_rss(3, now_at_ms(150), &[]))),
        ("no_cores", "a report without cores".into())
    );
    assert_eq!(reject_report(Ok(report_with_initial_rss(3, now_at_ms(100), &[90_000_000; 4]))).0, "clock_stalled");
    assert_eq!(reject_report(Err(AgentReportError::InvalidTimeToLive(0))).0, "time_to_live");
    assert_eq!(harness.server_status("s0", now_at_ms(150)).core_loads, load_before);
    harness
        .controller
        .record_report(&session, Ok(report_with_initial_rss(3, now_at_ms(1_150), &[100_000_000; 4])), now_at_ms(150))
        .unwrap();
    let status = harness.controller.status(now_at_ms(150));
    assert_eq!(status.rejected_reports.values().sum::<u64>(), 4);
    assert_eq!(status.accepted_reports, 3);
}

/// If the controller's wall clock is set back by an hour, or the server's forward, loads remain, with a warning.
#[test]
fn wall_clock_step_changes_no_load() {
    let mut harness = ControllerHarness::new(&THREE_ACTIVE_SERVERS, "crossrss");
    let session = harness.connect_and_report_loads(&[&[0.25; 4]]).remove(0);
    for (sequence, is_hour_ahead) in [(3, true), (4, false)] {
        let now = now_at_ms(sequence * 100);
        let mut next_report = report_with_initial_rss(sequence, now, &[sequence * 25_000_000; 4]);
        if is_hour_ahead {
            next_report.sent_at += Duration::from_secs(3600);
        }
        harness.controller.record_report(&session, Ok(next_report), now).unwrap();
        let status = harness.server_status("s0", now);
        assert_eq!(status.core_loads.len(), 4);
        let has_warning = status.warnings.iter().any(|warning| warning.contains("its wall clock is 3600000 ms ahead"));
        assert_eq!(has_warning, is_hour_ahead, "{:?}", status.warnings);
    }
}

#[test]
fn malformed_rss_invalidates_the_previous_rss() {
    let mut harness = ControllerHarness::new(&THREE_ACTIVE_SERVERS, "crossrss");
    let session = harness.connect_and_report_loads(&[&[0.25; 4]]).remove(0);
    assert!(harness.server_status("s0", now_at_ms(100)).rss.is_some());
    let invalid_length =
        v1::Rss { source: "ethtool".into(), key: vec![1; 40], indirection_table: vec![0; 100], input_transform: 0 };
    let malformed_rss: Result<ReportedRss, WireError> = (&invalid_length).try_into();
    let rejection = harness
        .controller
        .record_report(
            &session,
            Err(AgentReportError::InvalidRssConfiguration(malformed_rss.unwrap_err())),
            now_at_ms(200),
        )
        .unwrap_err();
    assert_eq!(rejection.counter_name(), "malformed_rss");
    let next_report = AgentReport { rss_generation: 2, ..report_with_initial_rss(4, now_at_ms(300), &[50_000_000; 4]) };
    harness.controller.record_report(&session, Ok(next_report), now_at_ms(300)).unwrap();
    let status = harness.server_status("s0", now_at_ms(300));
    assert_eq!(status.rss, None);
    assert_eq!(
        status.warnings,
        ["its RSS was rejected: indirection_table: an indirection table of 100 entries: expected a power of two from \
             1 to 2048"]
    );
    let valid_report = AgentReport {
        rss_generation: 3,
        rss: Some(build_uniform_rss(64, 4)),
        ..report_with_initial_rss(5, now_at_ms(400), &[60_000_000; 4])
    };
    harness.controller.record_report(&session, Ok(valid_report), now_at_ms(400)).unwrap();
    assert_eq!(harness.server_status("s0", now_at_ms(400)).rss.unwrap().indirection_table.len(), 64);
    let report_without_rss =
        AgentReport { rss_generation: 4, ..report_with_initial_rss(6, now_at_ms(500), &[70_000_000; 4]) };
    harness.controller.record_report(&session, Ok(report_without_rss), now_at_ms(500)).unwrap();
    let status = harness.server_status("s0", now_at_ms(500));
    assert_eq!(
        (status.rss, status.warnings),
        (None, vec!["its RSS of generation 4 was announced but not received".to_owned()])
    );
}

#[test]
fn draining_or_removed_server_keeps_only_its_connections() {
    let mut harness = ControllerHarness::new(&THREE_ACTIVE_SERVERS, "crossrss");
    let sessions = harness.connect_and_report_loads(&[&[0.0; 4], &[0.5; 4], &[1.0; 4]]);
    harness.configure(&["draining", "active", "active"], "crossrss", now_at_ms(100));
    assert_eq!(bucket_counts_by_server(&harness.make_table(now_at_ms(100))), BTreeMap::from([(1, 128)]));
    // s2 leaves. Its loads and its agent remain, and load balancers still reach it.
    harness.configure(&["draining", "active"], "crossrss", now_at_ms(200));
    let fleet = harness.controller.fleet_configuration(now_at_ms(200));
    let server_eligibilities: Vec<(&str, bool)> =
        fleet.services[0].servers.iter().map(|server| (server.name.as_str(), server.is_eligible)).collect();
    assert_eq!(server_eligibilities, [("s0", false), ("s1", true), ("s2", false)]);
    harness
        .controller
        .record_report(&sessions[2], Ok(report_with_initial_rss(3, now_at_ms(200), &[200_000_000; 4])), now_at_ms(200))
        .unwrap();
    assert_eq!(harness.controller.agent_configuration(&sessions[2]).unwrap().services.len(), 1);
    assert_eq!(harness.server_status("s2", now_at_ms(200)).state, ServerState::Gone);
    assert_eq!(harness.server_status("s0", now_at_ms(200)).state, ServerState::Draining);
    assert_eq!(harness.make_table(now_at_ms(300)).generation, 2);
    harness.configure(&["draining", "active"], "crossrss", now_at_ms(86_400_200));
    assert_eq!(harness.controller.fleet().servers.len(), 2);
    let departed_rejection = harness
        .controller
        .record_report(&sessions[2], Ok(report_with_initial_rss(4, now_at_ms(300), &[0; 4])), now_at_ms(300))
        .unwrap_err();
    assert_eq!(departed_rejection, MessageRejection::UnknownServer("s2".into()));
    assert!(departed_rejection.ends_session());
}

#[test]
fn pool_without_eligible_server_gives_an_empty_table_and_a_warning() {
    let mut harness = ControllerHarness::new(&["draining", "draining"], "crossrss-plus");
    let table = harness.make_table(now_at_ms(0));
    assert!(table.members.is_empty() && table.candidates.is_empty());
    assert_eq!(
        harness.controller.status(now_at_ms(0)).services[0].warnings,
        ["no server takes new connections: they are dropped"]
    );
    assert_eq!(
        harness.explain_new_connection(1, now_at_ms(0)).reason,
        "none of the 2 servers takes new connections: the new connection is dropped"
    );
}

#[test]
fn unreachable_server_gets_no_connections() {
    let mut harness = ControllerHarness::new(&THREE_ACTIVE_SERVERS, "crossrss");
    harness.connect_and_report_loads(&[&[0.0; 4], &[0.5; 4], &[1.0; 4]]);
    let build_unresolved_state = |names: &[&str]| v1::LoadBalancerState {
        unresolved_servers: names.iter().map(|name| (*name).to_owned()).collect(),
        ..Default::default()
    };
    let controller = &mut harness.controller;
    let (lb1, lb2) = ["lb1", "lb2"].map(|name| controller.register_load_balancer(name, now_at_ms(0)).unwrap()).into();
    controller.record_load_balancer_state(lb1, build_unresolved_state(&["s0"]), now_at_ms(0));
    controller.record_load_balancer_state(lb2, build_unresolved_state(&[]), now_at_ms(0));
    controller.record_load_balancer_state(lb1, build_unresolved_state(&["s0"]), now_at_ms(4_000));
    assert!(!controller.load_balancers.is_unreachable("s0", now_at_ms(4_000)));
    controller.record_load_balancer_state(lb2, build_unresolved_state(&["s0"]), now_at_ms(5_000));
    assert!(!controller.load_balancers.is_unreachable("s0", now_at_ms(7_999)));
    assert!(controller.load_balancers.is_unreachable("s0", now_at_ms(8_000)));
    assert_eq!(harness.make_table(now_at_ms(8_000)).members.len(), 2);
    assert_eq!(
        harness.server_status("s0", now_at_ms(8_000)).warnings,
        ["no load balancer can find its MAC address: it takes no new connections"]
    );
    harness.controller.record_load_balancer_state(lb1, build_unresolved_state(&[]), now_at_ms(9_000));
    assert_eq!(harness.make_table(now_at_ms(9_000)).members.len(), 3);
}

#[test]
fn status_lists_rss_groups_and_servers_outside_them() {
    let mut harness = ControllerHarness::new(&["active"; 6], "crossrss");
    for n in 0..6u8 {
        let session = harness.controller.register_agent(&format!("s{n}"), "test", now_at_ms(0)).unwrap();
        let rss_key = RssKey::new(&[n.saturating_sub(1); 40]).unwrap();
        let queues: Vec<u32> = (0..256).map(|entry| entry % 4).collect();
        let rss = RssConfig { key: rss_key, indirection_table: IndirectionTable::new(&queues).unwrap() };
        let reported_rss = ReportedRss { source: "ethtool".into(), rss: Some(rss) };
        let report = AgentReport { rss: Some(reported_rss), ..report_with_initial_rss(1, now_at_ms(0), &[0; 2]) };
        harness.controller.record_report(&session, Ok(report), now_at_ms(0)).unwrap();
    }
    let service = harness.controller.status(now_at_ms(0)).services.remove(0);
    let grouped_servers: Vec<Vec<String>> = service.rss_groups.into_iter().map(|group| group.servers).collect();
    assert_eq!(grouped_servers, [vec!["s0", "s1"], vec!["s2"], vec!["s3"], vec!["s4"]]);
    assert_eq!(
        service.warnings,
        [
            "more than 4 different RSS keys: the cores of s5 count by their mean load (manage_rss = true gives all \
             servers one key)",
            "128 buckets are fewer than the indirection tables of s0, s1, s2, s3, s4, s5 have entries: a bucket \
             reaches several of their cores, and the mean load of these counts (raise `buckets`)",
        ]
    );
}

#[test]
fn receive_queue_without_a_core_is_reported() {
    let mut harness = ControllerHarness::new(&["active"], "crossrss");
    harness.connect_and_report_loads(&[&[0.5; 2]]);
    assert_eq!(
        harness.server_status("s0", now_at_ms(100)).warnings,
        ["its indirection table names receive queue 3, but 2 cores report"]
    );
}

proptest! {
    /// The explained server is the one that the data plane chooses, for all policies that decide by the table alone.
    #[test]
    fn explained_server_equals_the_chosen_server(
        policy in prop::sample::select(vec![
            "hash", "consistent-hash", "maglev", "crossrss", "crossrss-plus", "least", "pow2",
        ]),
        loads in prop::collection::vec(prop::collection::vec(0.0f64..1.0, 4), 1..6),
        ports in prop::collection::vec(1u16.., 10),
    ) {
        let mut harness = ControllerHarness::new(&vec!["active"; loads.len()], policy);
        let core_loads: Vec<&[f64]> = loads.iter().map(Vec::as_slice).collect();
        harness.connect_and_report_loads(&core_loads);
        let table = harness.make_table(now_at_ms(100));
        for port in ports {
            let tuple = FourTuple::new(client_address(port), web_service_address().vip_and_port).unwrap();
            let chosen_server = table.select_server(&mut PlacementTableState::for_table(&table), &tuple).unwrap();
            prop_assert_eq!(harness.explain_new_connection(port, now_at_ms(100)).chosen_server,
                Some(format!("s{chosen_server}")));
        }
    }

    /// After reports in any order and with any contents, tables can be made, and every report is counted once.
    #[test]
    fn arbitrary_reports_never_panic(
        reports in prop::collection::vec(
            (0u64..20, 0u64..2_000, prop::collection::vec(0u64..1_000_000_000, 0..4)),
            1..40,
        ),
    ) {
        let mut harness = ControllerHarness::new(&THREE_ACTIVE_SERVERS, "crossrss");
        let session = harness.controller.register_agent("s0", "test", now_at_ms(0)).unwrap();
        let (mut accepted_count, mut rejected_count) = (0, 0);
        for (sequence, milliseconds, busy_ns) in reports {
            let report = report_with_initial_rss(sequence, now_at_ms(milliseconds), &busy_ns);
            match harness.controller.record_report(&session, Ok(report), now_at_ms(1_000)) {
                Ok(()) => accepted_count += 1,
                Err(_) => rejected_count += 1,
            }
            let table = harness.make_table(now_at_ms(1_000));
            prop_assert_eq!(table.members.len(), 3);
        }
        let status = harness.controller.status(now_at_ms(1_000));
        prop_assert_eq!(status.accepted_reports, accepted_count);
        prop_assert_eq!(status.rejected_reports.values().sum::<u64>(), rejected_count);
    }
}
