//! Tests of permitted racks and of the servers for which they may report.

use std::time::Duration;

use coreward_config::TomlSource;
use coreward_model::rss::seeded_rng;
use coreward_wire::v1;

use super::message_rejection::MessageRejection;
use super::racks::{RackRelay, RackSummaryRejection};
use super::{AgentSession, ClockReadings, Controller};
use coreward_fleet::config::FleetConfig;
use coreward_fleet::fleet::Fleet;
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

struct RackHarness {
    records: FleetRecords,
    controller: Controller,
}

impl RackHarness {
    /// Returns a harness whose fleet document has the TOML keys `fleet_keys`, and one server for each of `server_keys`.
    fn new(fleet_keys: &str, server_keys: &[&str]) -> Self {
        let records = FleetRecords::generate(START_WALL_TIME, &mut seeded_rng(5, 0));
        let empty_config = FleetConfig::parse_stored(&TomlSource::from_text("fleet.toml", "")).unwrap();
        let mut harness = Self { controller: Controller::new(Fleet::new(&empty_config, &records)), records };
        harness.configure(fleet_keys, server_keys);
        harness
    }

    fn configure(&mut self, fleet_keys: &str, server_keys: &[&str]) {
        let mut text = format!("{fleet_keys}\n");
        for (n, line) in server_keys.iter().enumerate().filter(|(_, line)| **line != "gone") {
            text += &format!("[[server]]\nname = \"s{n}\"\naddress = \"10.2.0.{}\"\nid = {n}\n{line}\n", n + 1);
        }
        text += "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n";
        let config = FleetConfig::parse(&TomlSource::from_text("fleet.toml", &text)).unwrap();
        self.records.apply_document(&config, START_WALL_TIME, &mut seeded_rng(6, 0)).unwrap();
        self.controller.configure(Fleet::new(&config, &self.records));
    }

    fn register_rack(&mut self, name: &str) -> u64 {
        self.controller.register_rack(name, "test", now_at_ms(0)).unwrap()
    }

    fn connect_agent_through_rack(
        &mut self,
        rack_session: u64,
        name: &str,
        server: &str,
        stream_number: u64,
    ) -> Result<AgentSession, MessageRejection> {
        let rack_relay = RackRelay { rack_session, rack_name: name.into(), stream_number };
        self.controller.register_agent_with_relay(server, "test", Some(rack_relay), now_at_ms(0))
    }

    /// Returns the stream numbers and server ids in the rack's configuration.
    fn configured_streams(&self, rack_session: u64) -> Vec<(u64, u16)> {
        let configuration = self.controller.rack_configuration(rack_session, now_at_ms(0)).unwrap().unwrap();
        configuration.servers.iter().map(|server| (server.stream_number, server.id.get())).collect()
    }
}

fn build_foreign_rack_rejection(server: &str, rack: &str, racks: &[&str]) -> MessageRejection {
    let racks = racks.iter().map(|rack| (*rack).to_owned()).collect();
    MessageRejection::ForeignRack { server: server.to_owned(), rack: rack.to_owned(), racks }
}

#[test]
fn any_rack_may_report_for_any_server_by_default() {
    let mut harness = RackHarness::new("", &["", ""]);
    let rack_session = harness.register_rack("r1");
    harness.connect_agent_through_rack(rack_session, "r1", "s0", 1).unwrap();
    assert_eq!(harness.configured_streams(rack_session), [(1, 0)]);
    let status = harness.controller.status(now_at_ms(0));
    assert_eq!((status.racks[0].permitted_servers, &status.racks[0].servers), (2, &vec!["s0".to_owned()]));
    assert_eq!((status.servers[0].rack.as_deref(), &status.servers[0].permitted_racks), (Some("r1"), &None));
}

#[test]
fn rack_reports_only_for_servers_that_name_it() {
    let mut harness = RackHarness::new("racks = [\"r1\", \"r2\"]", &["racks = [\"r1\"]", "racks = []", ""]);
    let unknown_rack_rejection = harness.controller.register_rack("r3", "test", now_at_ms(0)).unwrap_err();
    assert_eq!(unknown_rack_rejection, MessageRejection::UnknownRack("r3".to_owned()));
    let [first, second] = ["r1", "r2"].map(|name| harness.register_rack(name));
    assert_eq!(
        harness.connect_agent_through_rack(second, "r2", "s0", 1),
        Err(build_foreign_rack_rejection("s0", "r2", &["r1"]))
    );
    assert_eq!(
        harness.connect_agent_through_rack(first, "r1", "s1", 1),
        Err(build_foreign_rack_rejection("s1", "r1", &[]))
    );
    harness.connect_agent_through_rack(first, "r1", "s0", 2).unwrap();
    harness.connect_agent_through_rack(second, "r2", "s2", 2).unwrap();
    harness.controller.register_agent("s1", "test", now_at_ms(0)).unwrap();
    assert_eq!((harness.configured_streams(first), harness.configured_streams(second)), (vec![(2, 0)], vec![(2, 2)]));
    let status = harness.controller.status(now_at_ms(0));
    let permitted_server_counts: Vec<u32> = status.racks.iter().map(|rack| rack.permitted_servers).collect();
    assert_eq!(permitted_server_counts, [2, 1]);
    assert_eq!(status.servers[1].permitted_racks, Some(Vec::new()));
    assert_eq!((status.rejected_reports["unknown_rack"], status.rejected_reports["foreign_rack"]), (1, 2));
    let summary = v1::RackSummary { server_id: vec![2], cores: vec![1], load_sum: vec![0.5], ..Default::default() };
    let rejection = harness.controller.record_rack_summaries(first, &[summary], now_at_ms(0)).unwrap_err();
    assert!(matches!(rejection, RackSummaryRejection::ForeignServer(id) if id.get() == 2), "{rejection}");
}

#[test]
fn new_document_disconnects_forbidden_peers() {
    let mut harness = RackHarness::new("", &["racks = [\"r1\"]"]);
    let rack_session = harness.register_rack("r1");
    let session = harness.connect_agent_through_rack(rack_session, "r1", "s0", 1).unwrap();
    assert!(harness.controller.agent_configuration(&session).is_ok());
    harness.configure("", &["racks = [\"r2\"]"]);
    assert_eq!(
        harness.controller.agent_configuration(&session),
        Err(build_foreign_rack_rejection("s0", "r1", &["r2"]))
    );
    harness.configure("racks = [\"r2\"]", &[""]);
    assert_eq!(
        harness.controller.rack_configuration(rack_session, now_at_ms(0)),
        Err(MessageRejection::UnknownRack("r1".to_owned()))
    );
}

#[test]
fn departed_server_keeps_its_rack_assignment() {
    let mut harness = RackHarness::new("", &["racks = [\"r1\"]", ""]);
    harness.configure("", &["gone", ""]);
    let rack_session = harness.register_rack("r2");
    assert_eq!(
        harness.connect_agent_through_rack(rack_session, "r2", "s0", 1),
        Err(build_foreign_rack_rejection("s0", "r2", &["r1"]))
    );
    harness.configure("", &["", ""]);
    harness.connect_agent_through_rack(rack_session, "r2", "s0", 1).unwrap();
}

#[test]
fn agent_that_reconnects_through_another_rack_leaves_the_old_rack() {
    let mut harness = RackHarness::new("", &["", ""]);
    let first_rack = harness.register_rack("r1");
    harness.connect_agent_through_rack(first_rack, "r1", "s0", 1).unwrap();
    harness.connect_agent_through_rack(first_rack, "r1", "s1", 2).unwrap();
    // The rack has not noticed yet that its agent is gone.
    let second_rack = harness.register_rack("r2");
    let config_versions =
        |harness: &RackHarness| [first_rack, second_rack].map(|rack| harness.controller.rack_config_version(rack));
    let (later_time, versions_before) = (now_at_ms(10_000), config_versions(&harness));
    harness.controller.register_agent("s0", "test", later_time).unwrap();
    assert_ne!(config_versions(&harness)[0], versions_before[0], "the rack gets an update");
    assert_eq!(config_versions(&harness)[1], versions_before[1], "the other one is not");
    assert_eq!(harness.configured_streams(first_rack), [(2, 1)]);
    assert_eq!(harness.controller.status(later_time).servers[0].rack, None);
}

#[test]
fn rejections_name_the_required_role() {
    let message = build_foreign_rack_rejection("s0", "r3", &["r1", "r2"]).to_string();
    let expected_message = "rack \"r3\" may not report for server \"s0\": expected rack \"r1\", rack \"r2\", or its \
                    agent itself (`racks` in the fleet's document)";
    assert_eq!(message, expected_message);
    let message = build_foreign_rack_rejection("s0", "r3", &[]).to_string();
    assert!(message.contains("server \"s0\": expected its agent itself"), "{message}");
}

#[test]
fn rack_summaries_are_accepted_per_service() {
    let mut harness = RackHarness::new("", &["", ""]);
    let rack_session = harness.register_rack("r1");
    harness.connect_agent_through_rack(rack_session, "r1", "s0", 1).unwrap();
    let web_index = harness.controller.fleet().services[0].index;
    let summary_for_service = |service: u32| v1::RackSummary {
        service_index: service,
        server_id: vec![0],
        cores: vec![1],
        load_sum: vec![0.5],
        ..Default::default()
    };
    let summary_count = |harness: &RackHarness, now: ClockReadings| {
        harness.controller.racks.valid_summaries_of_service(web_index, now).count()
    };
    harness
        .controller
        .record_rack_summaries(rack_session, &[summary_for_service(web_index.get().into())], now_at_ms(0))
        .unwrap();
    // A message about a service outside the fleet arrives later.
    harness
        .controller
        .record_rack_summaries(rack_session, &[summary_for_service(u32::from(web_index.get()) + 1)], now_at_ms(200))
        .unwrap();
    assert_eq!((summary_count(&harness, now_at_ms(300)), summary_count(&harness, now_at_ms(301))), (1, 0));
}
