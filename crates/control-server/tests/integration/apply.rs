//! Tests of `coreward apply` and `coreward fleet` through a controller's API.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use coreward_api::types::{Fleet, FleetChange, NewFleet, Server, ServerState, Service, Status};
use coreward_render::RenderedOutputFormat;
use coreward_render::fleet::{self, ProposedFleet};
use proptest::prelude::*;

use crate::support::{RunningController, TestDirectory, with_timeout};

/// Returns a test directory whose controller's file names no fleet file.
fn directory_without_fleet_file() -> TestDirectory {
    let test_directory = TestDirectory::new(&[], "");
    test_directory.write_controller_config("");
    test_directory
}

fn fleet_document_text(servers: &[&str], additional_text: &str) -> String {
    let format_server_section =
        |name: &&str| format!("[[server]]\nname = \"{name}\"\naddress = \"10.2.0.{}\"\n", &name[1..]);
    let server_sections: String = servers.iter().map(format_server_section).collect();
    format!("# Ours.\nreport_interval = \"10ms\"\n{server_sections}{WEB_SERVICE_TOML}{additional_text}")
}

const WEB_SERVICE_TOML: &str = "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n";

impl TestDirectory {
    fn write_proposed_file(&self, text: &str) -> PathBuf {
        let path = self.temporary_directory.path().join("wanted.toml");
        std::fs::write(&path, text).unwrap();
        path
    }
}

impl RunningController {
    /// Reads the proposed fleet in a blocking task, because `coreward apply` has a runtime of its own.
    async fn read_proposal(&self, test_directory: &TestDirectory, text: &str) -> Result<ProposedFleet, String> {
        let (client, file) = (self.client.clone(), test_directory.write_proposed_file(text));
        let proposed_fleet =
            tokio::task::spawn_blocking(move || ProposedFleet::read_and_check(&client, &file)).await.unwrap();
        proposed_fleet.map_err(|error| {
            format!("{error:#}").replace(test_directory.temporary_directory.path().to_str().unwrap(), "")
        })
    }

    async fn apply_proposed_text(&self, test_directory: &TestDirectory, text: &str) -> Result<u64, String> {
        apply_proposed_fleet(self.read_proposal(test_directory, text).await?).await
    }

    async fn show_fleet(&self, format: RenderedOutputFormat) -> String {
        let client = self.client.clone();
        tokio::task::spawn_blocking(move || fleet::fetch_document(&client, format)).await.unwrap().unwrap()
    }

    async fn expect_applied_fleet_is_shown(&self, generation: u64, document: &str) {
        assert_eq!(
            self.show_fleet(RenderedOutputFormat::Text).await,
            format!("# generation {generation}, applied\n{document}")
        );
        let shown_json: serde_json::Value =
            serde_json::from_str(&self.show_fleet(RenderedOutputFormat::Json).await).unwrap();
        assert_eq!(
            (&shown_json["generation"], &shown_json["file"], &shown_json["text"]),
            (&generation.into(), &().into(), &document.into())
        );
    }

    async fn fetch_applied_document(&self) -> Fleet {
        self.client.fleet().await.unwrap()
    }

    async fn wait_for_status(&self, awaited_event: &str, is_expected: impl Fn(&Status) -> bool) {
        with_timeout(awaited_event, async {
            while !is_expected(&self.fetch_status().await) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    }

    /// Returns the stored parts of the configuration, which are server ids, states and weights, and services with their
    /// servers. A server in its slow start counts as active, because the progress of the slow start is not stored.
    async fn fetch_stored_configuration(
        &self,
    ) -> (BTreeMap<String, (u32, String, u32)>, BTreeMap<String, (String, u32, Vec<String>)>) {
        let status = self.fetch_status().await;
        let to_stored_state = |state| if state == ServerState::Joining { ServerState::Active } else { state };
        let server =
            |server: Server| (server.name, (server.id, to_stored_state(server.state).to_string(), server.weight));
        let to_service_entry =
            |service: Service| (service.name, (service.policy, service.bucket_count, service.servers));
        (status.servers.into_iter().map(server).collect(), status.services.into_iter().map(to_service_entry).collect())
    }
}

fn server_state(status: &Status, name: &str) -> ServerState {
    status.servers.iter().find(|server| server.name == name).unwrap().state
}

async fn apply_proposed_fleet(proposed_fleet: ProposedFleet) -> Result<u64, String> {
    let apply_result = tokio::task::spawn_blocking(move || proposed_fleet.apply()).await.unwrap();
    apply_result.map(|applied_fleet| applied_fleet.generation).map_err(|error| format!("{error:#}"))
}

#[tokio::test]
async fn applied_fleet_is_shown_and_survives_a_restart() {
    let test_directory = directory_without_fleet_file();
    let controller = test_directory.start_controller().await;
    assert_eq!(controller.fetch_applied_document().await, Fleet { generation: 0, text: String::new(), file: None });
    let first_document = fleet_document_text(&["s1", "s2"], "");
    let proposed_fleet = controller.read_proposal(&test_directory, &first_document).await.unwrap();
    let is_added = |change: &&FleetChange| change.message.starts_with("+ ");
    let added_subjects: Vec<&str> =
        proposed_fleet.changes().iter().filter(is_added).map(|change| change.subject.as_str()).collect();
    assert_eq!(added_subjects, ["server s1", "server s2", "service web"]);
    assert_eq!(controller.fetch_applied_document().await.generation, 0, "a look changes nothing");
    assert_eq!(apply_proposed_fleet(proposed_fleet).await, Ok(1));
    let configuration_before = controller.fetch_stored_configuration().await;
    assert_eq!(configuration_before.0.keys().collect::<Vec<_>>(), ["s1", "s2"]);

    let repeated_proposal = controller.read_proposal(&test_directory, &first_document).await.unwrap();
    assert!(
        repeated_proposal.is_already_active()
            && repeated_proposal.format_changes(RenderedOutputFormat::Text).unwrap()
                == "generation 1 is the same: nothing changes\n"
    );
    let draining_document = first_document.replace("10.2.0.1\"\n", "10.2.0.1\"\nstate = \"draining\"\n");
    let draining_fleet = controller.read_proposal(&test_directory, &draining_document).await.unwrap();
    assert_eq!(
        draining_fleet.format_changes(RenderedOutputFormat::Text).unwrap(),
        "against generation 1:\n  ~ server s1: state (default) -> \"draining\"\n"
    );
    assert_eq!(apply_proposed_fleet(draining_fleet).await, Ok(2));
    controller.expect_applied_fleet_is_shown(2, &draining_document).await;

    controller.kill().await;
    let controller = test_directory.start_controller().await;
    assert_eq!(controller.fetch_applied_document().await, Fleet { generation: 2, text: draining_document, file: None });
    let configuration_after = controller.fetch_stored_configuration().await;
    assert_eq!(configuration_after.0["s1"], (configuration_before.0["s1"].0, "draining".to_owned(), 1));
    assert_eq!(
        (&configuration_after.0["s2"], &configuration_after.1),
        (&configuration_before.0["s2"], &configuration_before.1)
    );
}

#[tokio::test]
async fn document_based_on_an_old_generation_is_rejected() {
    let test_directory = directory_without_fleet_file();
    let controller = test_directory.start_controller().await;
    controller.apply_proposed_text(&test_directory, &fleet_document_text(&["s1"], "")).await.unwrap();
    let [late, early] = [&["s1", "s3"], &["s1", "s2"]].map(|servers| fleet_document_text(servers, ""));
    let late_proposal = controller.read_proposal(&test_directory, &late).await.unwrap();
    assert_eq!(controller.apply_proposed_text(&test_directory, &early).await, Ok(2));
    assert_eq!(
        apply_proposed_fleet(late_proposal).await.unwrap_err(),
        "generation 2 is in force, not 1, with which this was compared: expected a comparison with it"
    );
    assert_eq!(controller.fetch_applied_document().await, Fleet { generation: 2, text: early, file: None });
}

#[tokio::test]
async fn invalid_document_changes_nothing() {
    let test_directory = directory_without_fleet_file();
    let controller = test_directory.start_controller().await;
    let first_document = fleet_document_text(&["s1"], "").replace("address", "id = 7\naddress");
    controller.apply_proposed_text(&test_directory, &first_document).await.unwrap();
    let configuration_before = controller.fetch_stored_configuration().await;
    let invalid_document = fleet_document_text(&["s1", "s1"], "weihgt = 2\n");
    assert_eq!(
        controller
            .apply_proposed_text(&test_directory, &invalid_document)
            .await
            .unwrap_err()
            .lines()
            .collect::<Vec<_>>(),
        [
            "/wanted.toml:7:8: key `server.name`: server name s1 is used twice (first in line 4): expected each once",
            "/wanted.toml:8:11: key `server.address`: server address 10.2.0.1 is used twice (first in line 5): \
             expected each once",
            "/wanted.toml:12:1: key `service.weihgt`: is not known: expected one of `name`, `vip`, `protocol`, \
             `consistency`, `timestamps`, `forwarding`, `udp`, `migrate_from`, `migrate_to`, `policy`, `slow_start`, \
             `buckets`, `servers`, `health`, `when_all_down`",
        ]
    );
    // The document itself is valid, but only the controller has the record that connections may still use the id.
    let duplicate_id_document = fleet_document_text(&["s2"], "").replace("address", "id = 7\naddress");
    assert_eq!(
        controller.apply_proposed_text(&test_directory, &duplicate_id_document).await.unwrap_err(),
        "/wanted.toml:5:6: key `server.id`: server id 7 belongs to server \"s1\", whose connections may still carry \
         it: expected one that is free, or none to have one drawn"
    );
    // A client that does not check first gets the same answer.
    let invalid_fleet =
        NewFleet { name: "w".into(), text: "load_ewma_alpha = 2\n".into(), generation: 1, dry_run: false };
    let rejection = controller.client.apply_fleet(&invalid_fleet).await.unwrap_err();
    assert_eq!(rejection.to_string(), "w:1:19: key `load_ewma_alpha`: alpha 2: expected a number above 0, at most 1");
    assert_eq!(controller.fetch_applied_document().await, Fleet { generation: 1, text: first_document, file: None });
    assert_eq!(controller.fetch_stored_configuration().await, configuration_before);
}

/// The slow start of a server is not stored, so the next controller gives the server its full share at once.
#[tokio::test]
async fn slow_start_ends_with_a_controller_restart() {
    let test_directory = directory_without_fleet_file();
    let controller = test_directory.start_controller().await;
    let slow_start_line = "slow_start = \"1h\"\n";
    assert_eq!(
        controller.apply_proposed_text(&test_directory, &fleet_document_text(&["s1"], slow_start_line)).await,
        Ok(1)
    );
    controller.wait_for_status("the first table", |status| status.services[0].table_generation > 0).await;
    assert_eq!(
        controller.apply_proposed_text(&test_directory, &fleet_document_text(&["s1", "s2"], slow_start_line)).await,
        Ok(2)
    );
    controller.wait_for_status("s2 to join", |status| server_state(status, "s2") == ServerState::Joining).await;
    assert_eq!(controller.fetch_stored_configuration().await.0["s2"].1, "active", "its slow start is not stored");
    controller.kill().await;
    let controller = test_directory.start_controller().await;
    assert_eq!(server_state(&controller.fetch_status().await, "s2"), ServerState::Active);
}

/// Also asserts that the fleet remains unchanged if the file is removed.
#[tokio::test]
async fn fleet_managed_by_a_file_changes_only_with_the_file() {
    let test_directory = TestDirectory::new(&["s1"], WEB_SERVICE_TOML);
    let fleet_file = test_directory.temporary_directory.path().join("fleet.toml");
    let controller = test_directory.start_controller().await;
    let applied_fleet = controller.fetch_applied_document().await;
    assert_eq!((applied_fleet.generation, applied_fleet.text), (1, std::fs::read_to_string(&fleet_file).unwrap()));
    assert_eq!(applied_fleet.file, Some(fleet_file.display().to_string()));
    // An operator may still see what a document would change.
    let proposed_fleet = controller.read_proposal(&test_directory, &fleet_document_text(&["s2"], "")).await.unwrap();
    assert!(
        proposed_fleet.changes().iter().any(|change| change.message == "- server s1"),
        "{:?}",
        proposed_fleet.changes()
    );
    let apply_error = apply_proposed_fleet(proposed_fleet)
        .await
        .unwrap_err()
        .replace(&test_directory.temporary_directory.path().display().to_string(), "");
    assert_eq!(
        apply_error,
        "this controller's fleet is managed by /fleet.toml (`fleet` in /controller.toml): expected changes there, then \
         SIGHUP"
    );
    let configuration_before = controller.fetch_stored_configuration().await;
    controller.kill().await;
    test_directory.write_controller_config("");
    std::fs::remove_file(fleet_file).unwrap();
    let controller = test_directory.start_controller().await;
    assert_eq!(controller.fetch_stored_configuration().await, configuration_before);
    assert_eq!(controller.apply_proposed_text(&test_directory, &fleet_document_text(&["s1", "s2"], "")).await, Ok(2));
}

/// Returns a strategy that generates valid fleet documents, with servers and services in any order, and with comments.
fn any_valid_document() -> impl Strategy<Value = String> {
    let server_keys = (0u8..3, any::<bool>(), 0u8..=100, any::<bool>());
    let servers = prop::collection::btree_map(1u8..40, server_keys, 0..12);
    let service_keys =
        (prop::sample::select(coreward_model::policy::policy_names()), 0u32..12, 0u64..=3_600, any::<bool>());
    let services = prop::collection::btree_map(1u16..1000, service_keys, 0..6);
    (servers, services, 10u32..=1000, 1u32..=1000, prop::option::of(24u32..=8760)).prop_map(
        |(servers, services, interval, alpha, rotation)| {
            let mut document_text =
                format!("report_interval = \"{interval}ms\"\nload_ewma_alpha = {}\n", f64::from(alpha) / 1000.0);
            document_text += &rotation.map_or(String::new(), |hours| format!("key_rotation = \"{hours}h\"\n"));
            for (n, (kind, draining, weight, has_id)) in &servers {
                document_text +=
                    &format!("# {kind}\n[[server]]\nname = \"s{n}\"\naddress = \"10.2.0.{n}\"\nweight = {weight}\n");
                document_text += if *draining { "state = \"draining\"\n" } else { "" };
                document_text += &if *has_id { format!("id = {}\n", u32::from(*n) * 400) } else { String::new() };
            }
            for (port, (policy, buckets, slow_start, all)) in &services {
                document_text +=
                    &format!("[[service]]\nname = \"w{port}\"\nvip = \"10.200.0.1:{port}\"\npolicy = \"{policy}\"\n");
                document_text += &format!("buckets = {}\nslow_start = \"{slow_start}s\"\n", 1u32 << buckets);
                let even_servers: Vec<String> =
                    servers.keys().filter(|n| *n % 2 == 0).map(|n| format!("s{n}")).collect();
                document_text += &if *all { String::new() } else { format!("servers = {even_servers:?}\n") };
            }
            document_text
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// A controller that is killed and restarted has the applied document, with the same text, ids, states and pools.
    #[test]
    fn any_fleet_survives_a_restart(first in any_valid_document(), second in any_valid_document()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let test_directory = directory_without_fleet_file();
            let controller = test_directory.start_controller().await;
            prop_assert_eq!(controller.apply_proposed_text(&test_directory, &first).await, Ok(1));
            // An id that the first document assigned may still be in cookies. In this case the second document is
            // rejected completely.
            let apply_result = controller.apply_proposed_text(&test_directory, &second).await;
            let expected_document = if apply_result.is_ok() { &second } else { &first };
            prop_assert_eq!(&controller.fetch_applied_document().await.text, expected_document);
            let configuration_before =
                (controller.fetch_applied_document().await, controller.fetch_stored_configuration().await);
            controller.kill().await;
            let controller = test_directory.start_controller().await;
            let configuration_after =
                (controller.fetch_applied_document().await, controller.fetch_stored_configuration().await);
            controller.kill().await;
            prop_assert_eq!(configuration_after, configuration_before);
            Ok(())
        })?;
    }
}
