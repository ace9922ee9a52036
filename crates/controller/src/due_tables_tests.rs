//! Tests in virtual time of tables that are made when an input changes.

use std::time::Duration;

use coreward_config::TomlSource;
use coreward_model::rss::seeded_rng;
use coreward_wire::{ServerTraffic, ServiceIndex, TrafficCountsMessage};

use super::due_tables::{PlacementTableWithTrigger, TableInputPollCursor};
use super::tests::build_plain_report;
use super::{AgentSession, ClockReadings, Controller};
use coreward_fleet::config::FleetConfig;
use coreward_fleet::fleet::Fleet;
use coreward_fleet::records::FleetRecords;

fn now_at_ms(milliseconds: u64) -> ClockReadings {
    let monotonic = Duration::from_millis(milliseconds);
    let wall = Duration::from_secs(1_700_000_000) + monotonic;
    ClockReadings { monotonic_time: monotonic, wall_time: wall, record_clock_time: wall }
}

/// Returns a fleet of servers s0 to s3. Service `web` has the first two servers, `api` the last two, and `old` (policy
/// `hash`) all.
fn four_server_fleet(fleet_keys: &str) -> FleetConfig {
    let mut text = fleet_keys.to_owned();
    for n in 0..4 {
        text += &format!("[[server]]\nname = \"s{n}\"\naddress = \"10.2.0.{}\"\nid = {n}\n", n + 1);
    }
    for (name, port, policy, servers) in [
        ("web", 80, "crossrss-plus", "[\"s0\", \"s1\"]"),
        ("api", 81, "least", "[\"s2\", \"s3\"]"),
        ("old", 82, "hash", "[\"s0\", \"s1\", \"s2\", \"s3\"]"),
    ] {
        text += &format!(
            "[[service]]\nname = \"{name}\"\nvip = \"10.200.0.1:{port}\"\npolicy = \"{policy}\"\nservers = {servers}\n"
        );
    }
    FleetConfig::parse(&TomlSource::from_text("fleet.toml", &text)).unwrap()
}

struct TableUpdateHarness {
    controller: Controller,
    records: FleetRecords,
    sessions: Vec<AgentSession>,
    report_sequence: u64,
}

impl TableUpdateHarness {
    fn new() -> Self {
        Self::with_fleet_keys("")
    }

    fn with_fleet_keys(fleet_keys: &str) -> Self {
        let config = four_server_fleet(fleet_keys);
        let mut records = FleetRecords::generate(now_at_ms(0).wall_time, &mut seeded_rng(5, 0));
        records.apply_document(&config, now_at_ms(0).wall_time, &mut seeded_rng(6, 0)).unwrap();
        let mut controller = Controller::new(Fleet::new(&config, &records));
        let sessions =
            (0..4).map(|n| controller.register_agent(&format!("s{n}"), "test", now_at_ms(0)).unwrap()).collect();
        Self { controller, records, sessions, report_sequence: 0 }
    }

    fn send_report(&mut self, server_number: usize, now: ClockReadings) {
        self.report_sequence += 1;
        let report = build_plain_report(self.report_sequence, now, &[self.report_sequence * 1_000; 4]);
        self.controller.record_report(&self.sessions[server_number], Ok(report), now).unwrap();
    }

    fn make_due_tables(&mut self, now: ClockReadings) -> Vec<PlacementTableWithTrigger> {
        std::iter::from_fn(|| self.controller.make_next_due_table(now)).collect()
    }

    /// Makes the tables that are due. Returns the names of their services and the tables' generations.
    fn make_and_list_due_tables(&mut self, now: ClockReadings) -> Vec<(&'static str, u64)> {
        let due_tables = self.make_due_tables(now);
        due_tables
            .iter()
            .map(|due_table| {
                (self.service_name(due_table.new_table.service_index), due_table.new_table.table.generation)
            })
            .collect()
    }

    fn service_name(&self, index: ServiceIndex) -> &'static str {
        let service = self.controller.fleet().services.iter().find(|service| service.index == index).unwrap();
        ["web", "api", "old"].into_iter().find(|name| *name == service.name).unwrap()
    }

    fn service_index(&self, name: &str) -> ServiceIndex {
        self.controller.fleet().services.iter().find(|service| service.name == name).unwrap().index
    }
}

#[test]
fn only_services_whose_inputs_changed_get_a_table() {
    let mut harness = TableUpdateHarness::new();
    harness.controller.poll_table_inputs(now_at_ms(0), true);
    assert_eq!(
        harness.make_and_list_due_tables(now_at_ms(0)),
        [("web", 1), ("api", 1), ("old", 1)],
        "the first tables"
    );
    assert_eq!(harness.make_and_list_due_tables(now_at_ms(1)), []);
    harness.send_report(0, now_at_ms(10));
    harness.send_report(1, now_at_ms(11));
    assert_eq!(harness.make_and_list_due_tables(now_at_ms(12)), [("web", 2)], "two reports, one table");
    assert!(!harness.controller.has_due_table());
    harness.send_report(3, now_at_ms(20));
    harness.send_report(0, now_at_ms(21));
    assert_eq!(
        harness.make_and_list_due_tables(now_at_ms(22)),
        [("api", 2), ("web", 3)],
        "who has waited longest comes first"
    );
    harness.controller.poll_table_inputs(now_at_ms(100), true);
    harness.make_and_list_due_tables(now_at_ms(100));
    harness.controller.poll_table_inputs(now_at_ms(200), true);
    assert_eq!(harness.make_and_list_due_tables(now_at_ms(200)), [], "nothing has changed");
    harness.controller.poll_table_inputs(now_at_ms(100_000), true);
    assert_eq!(
        harness.make_and_list_due_tables(now_at_ms(100_000)),
        [("web", 5), ("api", 4)],
        "reports are too old to hold"
    );
}

#[test]
fn oldest_change_is_the_trigger_of_a_table() {
    let mut harness = TableUpdateHarness::new();
    harness.controller.poll_table_inputs(now_at_ms(0), true);
    harness.make_and_list_due_tables(now_at_ms(0));
    harness.send_report(0, now_at_ms(10));
    harness.send_report(1, now_at_ms(15));
    let due_table = harness.make_due_tables(now_at_ms(16)).remove(0);
    assert_eq!(due_table.trigger.received_at, now_at_ms(10).monotonic_time);
    assert_eq!(due_table.trigger.sent_at, Some(now_at_ms(10).wall_time));
    let web_index = harness.service_index("web");
    harness.controller.table_acks.record_confirmation(7, web_index, 1, now_at_ms(16));
    harness.controller.table_acks.record_confirmation(7, web_index, 2, now_at_ms(18));
    assert_eq!(harness.controller.table_acks.latency_since_report_receipt.observed_latency_count(), 1);
    assert!((harness.controller.table_acks.latency_since_report_receipt.total_duration_s() - 0.008).abs() < 1e-9);
}

#[test]
fn assigned_connection_counts_continue_until_a_newer_load_arrives() {
    let mut harness = TableUpdateHarness::new();
    for now in [0, 100] {
        (0..4).for_each(|server| harness.send_report(server, now_at_ms(now)));
    }
    harness.controller.poll_table_inputs(now_at_ms(100), true);
    harness.make_and_list_due_tables(now_at_ms(100));
    harness.send_report(1, now_at_ms(110));
    let table = harness.make_due_tables(now_at_ms(110)).remove(0).new_table.table;
    let find_slot_age = |table: &coreward_model::placement::PlacementTable, server: u16| {
        let slot = table.core_slots.iter().position(|core| core.server.get() == server).unwrap();
        table.load_age_by_core_slot.get(slot).copied().unwrap_or(0)
    };
    assert_eq!((find_slot_age(&table, 0), find_slot_age(&table, 1)), (1, 0));
    harness.send_report(1, now_at_ms(120));
    let table = harness.make_due_tables(now_at_ms(120)).remove(0).new_table.table;
    assert_eq!((find_slot_age(&table, 0), find_slot_age(&table, 1)), (2, 0));
    harness.send_report(0, now_at_ms(130));
    let table = harness.make_due_tables(now_at_ms(130)).remove(0).new_table.table;
    assert_eq!((find_slot_age(&table, 0), find_slot_age(&table, 1)), (0, 1));
    harness.send_report(0, now_at_ms(100_000));
    harness.make_due_tables(now_at_ms(100_000));
    harness.controller.poll_table_inputs(now_at_ms(100_000), true);
    harness.send_report(0, now_at_ms(100_010));
    let table = harness.make_due_tables(now_at_ms(100_010)).remove(0).new_table.table;
    assert_eq!(find_slot_age(&table, 1), 0);
}

#[test]
fn traffic_message_makes_traffic_based_tables_due() {
    let mut harness = TableUpdateHarness::new();
    harness.controller.poll_table_inputs(now_at_ms(0), true);
    harness.make_and_list_due_tables(now_at_ms(0));
    let session = harness.controller.register_load_balancer("lb1", now_at_ms(1)).unwrap();
    harness.controller.poll_table_inputs(now_at_ms(2), false);
    harness.make_and_list_due_tables(now_at_ms(2));
    let api_index = harness.service_index("api");
    let server_traffic = ServerTraffic { opened_connection_count: 5, ..Default::default() };
    let traffic_message = TrafficCountsMessage {
        opened_connection_count_by_service: [(api_index, 5)].into(),
        traffic_by_server: [(2u64.try_into().unwrap(), server_traffic)].into(),
    };
    harness.controller.record_load_balancer_traffic(session, &traffic_message, now_at_ms(3));
    assert_eq!(
        harness.make_and_list_due_tables(now_at_ms(3)).iter().map(|(name, _)| *name).collect::<Vec<_>>(),
        ["api"]
    );
}

#[test]
fn unrelated_configuration_change_makes_no_table_due() {
    let mut harness = TableUpdateHarness::new();
    harness.controller.poll_table_inputs(now_at_ms(0), true);
    harness.make_and_list_due_tables(now_at_ms(0));
    let config = four_server_fleet("load_ewma_alpha = 0.25\n");
    harness.records.apply_document(&config, now_at_ms(1).wall_time, &mut seeded_rng(6, 0)).unwrap();
    harness.send_report(0, now_at_ms(1));
    harness.controller.configure(Fleet::new(&config, &harness.records));
    harness.controller.poll_table_inputs(now_at_ms(2), false);
    assert_eq!(harness.make_and_list_due_tables(now_at_ms(2)), [("web", 2)], "what was due is due still, and no other");
}

#[test]
fn reports_make_no_table_due_in_interval_mode() {
    let mut harness = TableUpdateHarness::with_fleet_keys("table_updates = \"interval\"\n");
    assert_eq!(harness.controller.end_report_interval(now_at_ms(0)).len(), 3);
    (0..4).for_each(|server| harness.send_report(server, now_at_ms(100)));
    let traffic = TrafficCountsMessage::default();
    let session = harness.controller.register_load_balancer("lb", now_at_ms(100)).unwrap();
    harness.controller.record_load_balancer_traffic(session, &traffic, now_at_ms(110));
    assert_eq!((harness.controller.has_due_table(), harness.make_and_list_due_tables(now_at_ms(120))), (false, vec![]));
    assert_eq!(harness.controller.end_report_interval(now_at_ms(200)).len(), 3);
}

/// Asserts that all servers are polled in several steps, so that a report waits for at most one step.
#[test]
fn inputs_of_many_servers_are_polled_shard_by_shard() {
    let mut text = "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n".to_owned();
    for n in 0..5 * 2_048 {
        text += &format!("[[server]]\nname = \"s{n}\"\naddress = \"10.2.{}.{}\"\nid = {n}\n", n >> 8, n & 0xff);
    }
    let config = FleetConfig::parse(&TomlSource::from_text("fleet.toml", &text)).unwrap();
    let mut records = FleetRecords::generate(now_at_ms(0).wall_time, &mut seeded_rng(5, 0));
    records.apply_document(&config, now_at_ms(0).wall_time, &mut seeded_rng(6, 0)).unwrap();
    let mut controller = Controller::new(Fleet::new(&config, &records));
    let mut step_count = 0;
    let mut next_cursor = Some(TableInputPollCursor::default());
    while let Some(cursor) = next_cursor {
        next_cursor = controller.poll_table_inputs_from(cursor, now_at_ms(1_000), false);
        step_count += 1;
    }
    assert_eq!(step_count, 5);
    assert!(controller.has_due_table());
}
