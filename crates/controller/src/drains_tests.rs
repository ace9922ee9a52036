//! Tests in virtual time of the remaining connections of a draining server.

use std::time::Duration;

use coreward_api::types::DrainStatus;
use coreward_config::TomlSource;
use coreward_model::load::CoreBusyTimeReadings;
use coreward_model::rss::seeded_rng;
use coreward_wire::{AgentReport, AgentReportDetails, CountedConnections, v1};

use super::tests::build_plain_report;
use super::{AgentSession, ClockReadings, Controller};
use coreward_fleet::config::FleetConfig;
use coreward_fleet::drains::ServerDrainRequest;
use coreward_fleet::fleet::Fleet;
use coreward_fleet::records::FleetRecords;

fn now_at_seconds(seconds: u64) -> ClockReadings {
    let monotonic = Duration::from_secs(seconds);
    let wall = Duration::from_secs(1_700_000_000) + monotonic;
    ClockReadings { monotonic_time: monotonic, wall_time: wall, record_clock_time: wall }
}

const TWO_SERVER_FLEET: &str = "[[server]]\nname = \"s1\"\naddress = \"10.2.0.1\"\n[[server]]\nname = \"s2\"\naddress \
                                = \
                     \"10.2.0.2\"\n\
                     [[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n[[service]]\nname = \"api\"\nvip = \
                     \"10.200.0.1:81\"\n\
                     [[service]]\nname = \"dns\"\nvip = \"10.200.0.1:53\"\nprotocol = \"udp\"\n";

struct DrainHarness {
    config: FleetConfig,
    records: FleetRecords,
    controller: Controller,
    report_sequence: u64,
}

impl DrainHarness {
    fn new() -> Self {
        let config = FleetConfig::parse(&TomlSource::from_text("fleet.toml", TWO_SERVER_FLEET)).unwrap();
        let random_source = &mut seeded_rng(5, 0);
        let mut records = FleetRecords::generate(now_at_seconds(0).wall_time, random_source);
        records.apply_document(&config, now_at_seconds(0).wall_time, random_source).unwrap();
        let controller = Controller::new(Fleet::new(&config, &records));
        Self { config, records, controller, report_sequence: 0 }
    }

    fn drain_server_s1(&mut self, services: &[&str], now: ClockReadings) -> u64 {
        let services = (!services.is_empty()).then(|| services.iter().map(|service| (*service).to_owned()).collect());
        let request = ServerDrainRequest { server_name: "s1".into(), services, may_drain_last_server: false };
        self.controller.check_drain_is_possible(&request, now).unwrap();
        assert!(self.records.drain_server(&request, self.records.generation + 1, now.record_clock_time));
        self.records.generation += 1;
        self.controller.configure(Fleet::new(&self.config, &self.records));
        self.records.generation
    }

    /// Sends a report of the session's agent. `connection_count` is the count's age in seconds, the configuration
    /// generation at its start, and the number of connections.
    fn send_report(&mut self, session: &AgentSession, connection_count: Option<(u64, u64, u32)>, now: ClockReadings) {
        self.report_sequence += 1;
        let connections = connection_count.map(|(age, configuration_generation, connections)| CountedConnections {
            count_age: Duration::from_secs(age),
            configuration_generation,
            connection_count_by_service: [("web".to_owned(), connections), ("api".to_owned(), 100)].into(),
        });
        let readings = CoreBusyTimeReadings {
            report_sequence_number: self.report_sequence,
            measured_at_ns: self.report_sequence,
            busy_ns_by_core: vec![0],
        };
        let details = Some(AgentReportDetails { counted_connections: connections, ..AgentReportDetails::default() });
        let report = AgentReport {
            details,
            readings,
            open_connection_count: 11,
            ..build_plain_report(self.report_sequence, now, &[0])
        };
        self.controller.record_report(session, Ok(report), now).unwrap();
    }

    fn confirm_configuration(&mut self, session: u64, configuration_generation: u64, now: ClockReadings) {
        let state = v1::LoadBalancerState { configuration_generation, ..Default::default() };
        self.controller.record_load_balancer_state(session, state, now);
    }

    fn drain_status(&self, now: ClockReadings) -> DrainStatus {
        self.controller.drain_status("s1", now).unwrap()
    }

    /// Returns the open connections of server s1, as `status` and `top` display them.
    fn displayed_open_connections(&self, now: ClockReadings) -> [u32; 2] {
        let (id, server) = self.controller.servers_after_id(None).find(|(_, server)| server.name == "s1").unwrap();
        let server_status = self.controller.server_status(id, server, false, now);
        [server_status.open_connections, self.controller.server_loads(id, server, now).open_connections]
    }

    fn drain_wait_reasons(&self, now: ClockReadings) -> Vec<String> {
        let drain_status = self.drain_status(now);
        assert_eq!(drain_status.remaining_connections, None);
        drain_status.unknown_count_reasons
    }
}

#[test]
fn drained_connections_are_counted_after_all_load_balancers_confirmed() {
    let mut harness = DrainHarness::new();
    let balancer_sessions =
        ["lb1", "lb2"].map(|name| harness.controller.register_load_balancer(name, now_at_seconds(10)).unwrap());
    let session = harness.controller.register_agent("s1", "test", now_at_seconds(10)).unwrap();
    let generation_before_drain = harness.records.generation;
    harness.send_report(&session, Some((0, generation_before_drain, 7)), now_at_seconds(10));
    assert_eq!(
        (
            harness.drain_status(now_at_seconds(10)).remaining_connections,
            harness.drain_status(now_at_seconds(10)).unknown_count_reasons.len()
        ),
        (None, 0),
        "it is not drained"
    );
    let generation = harness.drain_server_s1(&["web"], now_at_seconds(10));
    harness.confirm_configuration(balancer_sessions[0], generation, now_at_seconds(11));
    harness.confirm_configuration(balancer_sessions[1], generation_before_drain, now_at_seconds(11));
    let expected_lb2_reason = "load balancer lb2, which may send new connections still";
    assert_eq!(harness.drain_wait_reasons(now_at_seconds(11)), [expected_lb2_reason]);
    harness.send_report(&session, Some((0, generation, 0)), now_at_seconds(11));
    assert_eq!(harness.drain_wait_reasons(now_at_seconds(11)), [expected_lb2_reason], "nothing remains, as yet");
    harness.confirm_configuration(balancer_sessions[0], generation, now_at_seconds(12));
    harness.confirm_configuration(balancer_sessions[1], generation, now_at_seconds(12));
    let expected_count_reason = "a count that begins now";
    assert_eq!(harness.drain_wait_reasons(now_at_seconds(12)), [expected_count_reason]);
    harness.send_report(&session, Some((1, generation, 1)), now_at_seconds(13));
    assert_eq!(
        harness.drain_wait_reasons(now_at_seconds(13)),
        [expected_count_reason],
        "it began when the last one confirmed"
    );
    harness.send_report(&session, Some((0, generation_before_drain, 0)), now_at_seconds(13));
    assert_eq!(
        harness.drain_wait_reasons(now_at_seconds(13)),
        [expected_count_reason],
        "it began before the agent knew"
    );
    harness.send_report(&session, Some((0, generation, 3)), now_at_seconds(13));
    assert_eq!(
        harness.drain_status(now_at_seconds(13)).remaining_connections,
        Some(3),
        "of the service in which it is drained"
    );
    let generation = harness.drain_server_s1(&[], now_at_seconds(13));
    balancer_sessions
        .iter()
        .for_each(|session| harness.confirm_configuration(*session, generation, now_at_seconds(13)));
    harness.send_report(&session, Some((0, generation, 3)), now_at_seconds(14));
    let drain_status = harness.drain_status(now_at_seconds(14));
    assert_eq!(
        (drain_status.remaining_connections, drain_status.uncounted_services),
        (Some(103), vec!["dns".to_owned()])
    );
    assert_eq!(
        harness.displayed_open_connections(now_at_seconds(14)),
        [103, 103],
        "connections of services, and no other sockets"
    );
}

#[test]
fn drain_waits_for_missing_confirmations() {
    let mut harness = DrainHarness::new();
    harness.drain_server_s1(&[], now_at_seconds(10));
    assert_eq!(
        harness.drain_wait_reasons(now_at_seconds(10)),
        ["its agent, which does not report", "a load balancer: none is connected"]
    );
    let balancer_session = harness.controller.register_load_balancer("lb1", now_at_seconds(10)).unwrap();
    harness.confirm_configuration(balancer_session, harness.records.generation, now_at_seconds(10));
    assert_eq!(harness.drain_wait_reasons(now_at_seconds(10)), ["its agent, which does not report"]);
    let session = harness.controller.register_agent("s1", "test", now_at_seconds(10)).unwrap();
    harness.send_report(&session, None, now_at_seconds(11));
    let expected_first_count_reason = "its agent's first count of connections (those before this version do not count)";
    assert_eq!(harness.drain_wait_reasons(now_at_seconds(11)), [expected_first_count_reason]);
    let generation = harness.records.generation;
    harness.send_report(&session, Some((0, generation, 0)), now_at_seconds(11));
    assert_eq!(harness.drain_status(now_at_seconds(11)).remaining_connections, Some(100));
    let list_disconnected_names = |now| {
        harness
            .controller
            .acknowledgements(now)
            .disconnected_load_balancers
            .into_iter()
            .map(|peer| peer.name)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (list_disconnected_names(now_at_seconds(11)), list_disconnected_names(now_at_seconds(80))),
        (vec![], vec!["lb1".to_owned()])
    );
    // The server's agent is gone, so its count is valid no longer than its report.
    harness.confirm_configuration(balancer_session, generation, now_at_seconds(80));
    assert_eq!(harness.drain_wait_reasons(now_at_seconds(80)), ["its agent, which does not report"]);
}
