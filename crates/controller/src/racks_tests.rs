//! Permitted racks, and the servers for which they may report.

use std::time::Duration;

use coreward_config::Source;
use coreward_model::rss::seeded_rng;
use coreward_wire::v1;

use super::racks::{RackRelay, SummaryRejection};
use super::rejection::Rejection;
use super::{Controller, Now, Session};
use coreward_fleet::config::FleetConfig;
use coreward_fleet::fleet::Fleet;
use coreward_fleet::records::Records;

const START: Duration = Duration::from_secs(1_700_000_000);

fn at(milliseconds: u64) -> Now {
    let monotonic = Duration::from_millis(milliseconds);
    Now { monotonic, wall: START + monotonic, record: START + monotonic }
}

struct Harness {
    records: Records,
    controller: Controller,
}

impl Harness {
    /// Creates a fleet. `fleet`: keys of the document; `servers`: additional line of each server, or an empty string.
    fn new(fleet: &str, servers: &[&str]) -> Self {
        let records = Records::generate(START, &mut seeded_rng(5, 0));
        let nobody = FleetConfig::parse_stored(&Source::from_text("fleet.toml", "")).unwrap();
        let mut harness = Self { controller: Controller::new(Fleet::new(&nobody, &records)), records };
        harness.configure(fleet, servers);
        harness
    }

    fn configure(&mut self, fleet: &str, servers: &[&str]) {
        let mut text = format!("{fleet}\n");
        for (n, line) in servers.iter().enumerate().filter(|(_, line)| **line != "gone") {
            text += &format!("[[server]]\nname = \"s{n}\"\naddress = \"10.2.0.{}\"\nid = {n}\n{line}\n", n + 1);
        }
        text += "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n";
        let config = FleetConfig::parse(&Source::from_text("fleet.toml", &text)).unwrap();
        self.records.apply(&config, START, &mut seeded_rng(6, 0)).unwrap();
        self.controller.configure(Fleet::new(&config, &self.records));
    }

    fn rack(&mut self, name: &str) -> u64 {
        self.controller.register_rack(name, "test", at(0)).unwrap()
    }

    /// Connects an agent of the server through the rack, on a stream of its own.
    fn connect_agent_via(
        &mut self,
        rack_session: u64,
        name: &str,
        server: &str,
        stream: u64,
    ) -> Result<Session, Rejection> {
        let behind = RackRelay { rack_session, name: name.into(), stream };
        self.controller.connect_via_rack(server, "test", Some(behind), at(0))
    }

    /// Returns the stream numbers and server ids in the rack's configuration.
    fn reported(&self, rack: u64) -> Vec<(u64, u16)> {
        let configuration = self.controller.rack_configuration(rack, at(0)).unwrap().unwrap();
        configuration.servers.iter().map(|server| (server.stream_number, server.id.get())).collect()
    }
}

fn foreign_rack(server: &str, rack: &str, racks: &[&str]) -> Rejection {
    let racks = racks.iter().map(|rack| (*rack).to_owned()).collect();
    Rejection::ForeignRack { server: server.to_owned(), rack: rack.to_owned(), racks }
}

#[test]
fn any_rack_may_report_for_any_server_by_default() {
    let mut harness = Harness::new("", &["", ""]);
    let rack = harness.rack("r1");
    harness.connect_agent_via(rack, "r1", "s0", 1).unwrap();
    assert_eq!(harness.reported(rack), [(1, 0)]);
    let status = harness.controller.status(at(0));
    assert_eq!((status.racks[0].permitted_servers, &status.racks[0].servers), (2, &vec!["s0".to_owned()]));
    assert_eq!((status.servers[0].rack.as_deref(), &status.servers[0].racks), (Some("r1"), &None));
}

#[test]
fn rack_reports_only_for_servers_that_name_it() {
    let mut harness = Harness::new("racks = [\"r1\", \"r2\"]", &["racks = [\"r1\"]", "racks = []", ""]);
    let unknown = harness.controller.register_rack("r3", "test", at(0)).unwrap_err();
    assert_eq!(unknown, Rejection::UnknownRack("r3".to_owned()));
    let [first, second] = ["r1", "r2"].map(|name| harness.rack(name));
    assert_eq!(harness.connect_agent_via(second, "r2", "s0", 1), Err(foreign_rack("s0", "r2", &["r1"])));
    assert_eq!(harness.connect_agent_via(first, "r1", "s1", 1), Err(foreign_rack("s1", "r1", &[])));
    harness.connect_agent_via(first, "r1", "s0", 2).unwrap();
    harness.connect_agent_via(second, "r2", "s2", 2).unwrap();
    harness.controller.register("s1", "test", at(0)).unwrap();
    assert_eq!((harness.reported(first), harness.reported(second)), (vec![(2, 0)], vec![(2, 2)]));
    let status = harness.controller.status(at(0));
    let permitted: Vec<u32> = status.racks.iter().map(|rack| rack.permitted_servers).collect();
    assert_eq!(permitted, [2, 1]);
    assert_eq!(status.servers[1].racks, Some(Vec::new()));
    assert_eq!((status.refused_reports["unknown_rack"], status.refused_reports["foreign_rack"]), (1, 2));
    let summary = v1::RackSummary { server_id: vec![2], cores: vec![1], load_sum: vec![0.5], ..Default::default() };
    let refused = harness.controller.record_rack_summaries(first, &[summary], at(0)).unwrap_err();
    assert!(matches!(refused, SummaryRejection::ForeignServer(id) if id.get() == 2), "{refused}");
}

#[test]
fn new_document_disconnects_forbidden_peers() {
    let mut harness = Harness::new("", &["racks = [\"r1\"]"]);
    let rack = harness.rack("r1");
    let session = harness.connect_agent_via(rack, "r1", "s0", 1).unwrap();
    assert!(harness.controller.agent_configuration(&session).is_ok());
    harness.configure("", &["racks = [\"r2\"]"]);
    assert_eq!(harness.controller.agent_configuration(&session), Err(foreign_rack("s0", "r1", &["r2"])));
    harness.configure("racks = [\"r2\"]", &[""]);
    assert_eq!(harness.controller.rack_configuration(rack, at(0)), Err(Rejection::UnknownRack("r1".to_owned())));
}

#[test]
fn rack_assignment_of_a_departed_server_still_holds() {
    let mut harness = Harness::new("", &["racks = [\"r1\"]", ""]);
    harness.configure("", &["gone", ""]);
    let rack = harness.rack("r2");
    assert_eq!(harness.connect_agent_via(rack, "r2", "s0", 1), Err(foreign_rack("s0", "r2", &["r1"])));
    harness.configure("", &["", ""]);
    harness.connect_agent_via(rack, "r2", "s0", 1).unwrap();
}

#[test]
fn agent_reconnect_moves_it_out_of_old_rack() {
    let mut harness = Harness::new("", &["", ""]);
    let rack = harness.rack("r1");
    harness.connect_agent_via(rack, "r1", "s0", 1).unwrap();
    harness.connect_agent_via(rack, "r1", "s1", 2).unwrap();
    // The rack has not noticed that its agent is gone.
    let other = harness.rack("r2");
    let changes = |harness: &Harness| [rack, other].map(|rack| harness.controller.rack_config_version(rack));
    let (later, before) = (at(10_000), changes(&harness));
    harness.controller.register("s0", "test", later).unwrap();
    assert_ne!(changes(&harness)[0], before[0], "the rack gets an update");
    assert_eq!(changes(&harness)[1], before[1], "the other one is not");
    assert_eq!(harness.reported(rack), [(2, 1)]);
    assert_eq!(harness.controller.status(later).servers[0].rack, None);
}

#[test]
fn rejections_name_the_required_role() {
    let words = foreign_rack("s0", "r3", &["r1", "r2"]).to_string();
    let expected = "rack \"r3\" may not report for server \"s0\": expected rack \"r1\", rack \"r2\", or its agent \
                    itself (`racks` in \
                    the fleet's document)";
    assert_eq!(words, expected);
    let words = foreign_rack("s0", "r3", &[]).to_string();
    assert!(words.contains("server \"s0\": expected its agent itself"), "{words}");
}

#[test]
fn summaries_are_accepted_per_service() {
    let mut harness = Harness::new("", &["", ""]);
    let rack = harness.rack("r1");
    harness.connect_agent_via(rack, "r1", "s0", 1).unwrap();
    let web = harness.controller.fleet().services[0].index;
    let summary = |service: u32| v1::RackSummary {
        service_index: service,
        server_id: vec![0],
        cores: vec![1],
        load_sum: vec![0.5],
        ..Default::default()
    };
    let relayed = |harness: &Harness, now: Now| harness.controller.racks.summaries(web, now).count();
    harness.controller.record_rack_summaries(rack, &[summary(web.get().into())], at(0)).unwrap();
    // Another message, of a service outside the fleet.
    harness.controller.record_rack_summaries(rack, &[summary(u32::from(web.get()) + 1)], at(200)).unwrap();
    assert_eq!((relayed(&harness, at(300)), relayed(&harness, at(301))), (1, 0));
}
