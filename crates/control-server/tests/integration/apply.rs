//! `coreward apply` and `coreward fleet` against a controller, by its API.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use coreward_api::types::{Fleet, FleetChange, NewFleet, Server, ServerState, Service, Status};
use coreward_render::Format;
use coreward_render::fleet::{self, ProposedFleet};
use proptest::prelude::*;

use crate::support::{RunningController, TestDirectory, with_timeout};

/// Returns a test directory with a controller's file that does not name a fleet's file.
fn home() -> TestDirectory {
    let home = TestDirectory::new(&[], "");
    home.write_controllers_file("");
    home
}

fn document(servers: &[&str], more: &str) -> String {
    let server = |name: &&str| format!("[[server]]\nname = \"{name}\"\naddress = \"10.2.0.{}\"\n", &name[1..]);
    let servers: String = servers.iter().map(server).collect();
    format!("# Ours.\nreport_interval = \"10ms\"\n{servers}{WEB}{more}")
}

const WEB: &str = "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n";

impl TestDirectory {
    fn file(&self, text: &str) -> PathBuf {
        let path = self.directory.path().join("wanted.toml");
        std::fs::write(&path, text).unwrap();
        path
    }
}

impl RunningController {
    /// Reads the proposed fleet in a blocking task, because `coreward apply` has a runtime of its own.
    async fn proposed(&self, home: &TestDirectory, text: &str) -> Result<ProposedFleet, String> {
        let (client, file) = (self.client.clone(), home.file(text));
        let proposed = tokio::task::spawn_blocking(move || ProposedFleet::read(&client, &file)).await.unwrap();
        proposed.map_err(|error| format!("{error:#}").replace(home.directory.path().to_str().unwrap(), ""))
    }

    async fn apply(&self, home: &TestDirectory, text: &str) -> Result<u64, String> {
        apply(self.proposed(home, text).await?).await
    }

    async fn shown(&self, format: Format) -> String {
        let client = self.client.clone();
        tokio::task::spawn_blocking(move || fleet::show(&client, format)).await.unwrap().unwrap()
    }

    async fn document(&self) -> Fleet {
        self.client.fleet().await.unwrap()
    }

    async fn status_once(&self, what: &str, is_so: impl Fn(&Status) -> bool) {
        with_timeout(what, async {
            while !is_so(&self.status().await) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    }

    /// Returns the stored parts of the configuration: server ids, states and weights, and services with their servers.
    /// A server in its slow start counts as active, because the progress of the slow start is not stored.
    async fn stored_configuration(
        &self,
    ) -> (BTreeMap<String, (u32, String, u32)>, BTreeMap<String, (String, u32, Vec<String>)>) {
        let status = self.status().await;
        let stored = |state| if state == ServerState::Joining { ServerState::Active } else { state };
        let server = |server: Server| (server.name, (server.id, stored(server.state).to_string(), server.weight));
        let service = |service: Service| (service.name, (service.policy, service.bucket_count, service.servers));
        (status.servers.into_iter().map(server).collect(), status.services.into_iter().map(service).collect())
    }
}

fn state_of(status: &Status, name: &str) -> ServerState {
    status.servers.iter().find(|server| server.name == name).unwrap().state
}

async fn apply(proposed: ProposedFleet) -> Result<u64, String> {
    let applied = tokio::task::spawn_blocking(move || proposed.apply()).await.unwrap();
    applied.map(|applied| applied.generation).map_err(|error| format!("{error:#}"))
}

#[tokio::test]
async fn applied_fleet_is_shown_and_survives_a_restart() {
    let home = home();
    let controller = home.start().await;
    assert_eq!(controller.document().await, Fleet { generation: 0, text: String::new(), file: None });
    let first = document(&["s1", "s2"], "");
    let proposed = controller.proposed(&home, &first).await.unwrap();
    let is_added = |change: &&FleetChange| change.message.starts_with("+ ");
    let added: Vec<&str> = proposed.changes().iter().filter(is_added).map(|change| change.subject.as_str()).collect();
    assert_eq!(added, ["server s1", "server s2", "service web"]);
    assert_eq!(controller.document().await.generation, 0, "a look changes nothing");
    assert_eq!(apply(proposed).await, Ok(1));
    let before = controller.stored_configuration().await;
    assert_eq!(before.0.keys().collect::<Vec<_>>(), ["s1", "s2"]);

    let again = controller.proposed(&home, &first).await.unwrap();
    assert!(
        again.is_in_force()
            && again.format_changes(Format::Text).unwrap() == "generation 1 is the same: nothing changes\n"
    );
    let drained = first.replace("10.2.0.1\"\n", "10.2.0.1\"\nstate = \"draining\"\n");
    let proposed = controller.proposed(&home, &drained).await.unwrap();
    assert_eq!(
        proposed.format_changes(Format::Text).unwrap(),
        "against generation 1:\n  ~ server s1: state (default) -> \"draining\"\n"
    );
    assert_eq!(apply(proposed).await, Ok(2));
    assert_eq!(controller.shown(Format::Text).await, format!("# generation 2, applied\n{drained}"));
    let shown: serde_json::Value = serde_json::from_str(&controller.shown(Format::Json).await).unwrap();
    assert_eq!(
        (&shown["generation"], &shown["file"], &shown["text"]),
        (&2.into(), &().into(), &drained.as_str().into())
    );

    controller.kill().await;
    let controller = home.start().await;
    assert_eq!(controller.document().await, Fleet { generation: 2, text: drained, file: None });
    let after = controller.stored_configuration().await;
    assert_eq!(after.0["s1"], (before.0["s1"].0, "draining".to_owned(), 1));
    assert_eq!((&after.0["s2"], &after.1), (&before.0["s2"], &before.1));
}

#[tokio::test]
async fn apply_to_an_old_generation_is_rejected() {
    let home = home();
    let controller = home.start().await;
    controller.apply(&home, &document(&["s1"], "")).await.unwrap();
    let [late, early] = [&["s1", "s3"], &["s1", "s2"]].map(|servers| document(servers, ""));
    let late = controller.proposed(&home, &late).await.unwrap();
    assert_eq!(controller.apply(&home, &early).await, Ok(2));
    assert_eq!(
        apply(late).await.unwrap_err(),
        "generation 2 is in force, not 1, with which this was compared: expected a comparison with it"
    );
    assert_eq!(controller.document().await, Fleet { generation: 2, text: early, file: None });
}

#[tokio::test]
async fn invalid_document_changes_nothing() {
    let home = home();
    let controller = home.start().await;
    let first = document(&["s1"], "").replace("address", "id = 7\naddress");
    controller.apply(&home, &first).await.unwrap();
    let before = controller.stored_configuration().await;
    let wrong = document(&["s1", "s1"], "weihgt = 2\n");
    assert_eq!(
        controller.apply(&home, &wrong).await.unwrap_err().lines().collect::<Vec<_>>(),
        [
            "/wanted.toml:7:8: key `server.name`: server name s1 is used twice (first in line 4): expected each once",
            "/wanted.toml:8:11: key `server.address`: server address 10.2.0.1 is used twice (first in line 5): \
             expected \
             each once",
            "/wanted.toml:12:1: key `service.weihgt`: is not known: expected one of `name`, `vip`, `protocol`, \
             `consistency`, `timestamps`, `forwarding`, `udp`, \
             `migrate_from`, `migrate_to`, `policy`, `slow_start`, `buckets`, `servers`, \
             `health`, `when_all_down`",
        ]
    );
    // Right by itself, but the id's connections may still live: only the controller knows.
    let taken = document(&["s2"], "").replace("address", "id = 7\naddress");
    assert_eq!(
        controller.apply(&home, &taken).await.unwrap_err(),
        "/wanted.toml:5:6: key `server.id`: server id 7 belongs to server \"s1\", whose connections may still carry \
         it: \
         expected one that is free, or none to have one drawn"
    );
    // A client that does not check first gets the same answer.
    let document = NewFleet { name: "w".into(), text: "load_ewma_alpha = 2\n".into(), generation: 1, dry_run: false };
    let refused = controller.client.put_fleet(&document).await.unwrap_err();
    assert_eq!(refused.to_string(), "w:1:19: key `load_ewma_alpha`: alpha 2: expected a number above 0, at most 1");
    assert_eq!(controller.document().await, Fleet { generation: 1, text: first, file: None });
    assert_eq!(controller.stored_configuration().await, before);
}

/// The slow start of a server is not stored: the next controller gives the server its full share at once.
#[tokio::test]
async fn slow_start_ends_with_a_restart() {
    let home = home();
    let controller = home.start().await;
    let slow = "slow_start = \"1h\"\n";
    assert_eq!(controller.apply(&home, &document(&["s1"], slow)).await, Ok(1));
    controller.status_once("the first table", |status| status.services[0].table_generation > 0).await;
    assert_eq!(controller.apply(&home, &document(&["s1", "s2"], slow)).await, Ok(2));
    controller.status_once("s2 to join", |status| state_of(status, "s2") == ServerState::Joining).await;
    assert_eq!(controller.stored_configuration().await.0["s2"].1, "active", "its slow start is not stored");
    controller.kill().await;
    let controller = home.start().await;
    assert_eq!(state_of(&controller.status().await, "s2"), ServerState::Active);
}

/// If the file is removed, the fleet continues as it is.
#[tokio::test]
async fn fleet_managed_by_a_file_changes_only_there() {
    let home = TestDirectory::new(&["s1"], WEB);
    let file = home.directory.path().join("fleet.toml");
    let controller = home.start().await;
    let shown = controller.document().await;
    assert_eq!((shown.generation, shown.text), (1, std::fs::read_to_string(&file).unwrap()));
    assert_eq!(shown.file, Some(file.display().to_string()));
    // To look what a document would change is allowed.
    let preview = controller.proposed(&home, &document(&["s2"], "")).await.unwrap();
    assert!(preview.changes().iter().any(|change| change.message == "- server s1"), "{:?}", preview.changes());
    let refused = apply(preview).await.unwrap_err().replace(&home.directory.path().display().to_string(), "");
    assert_eq!(
        refused,
        "this controller's fleet is managed by /fleet.toml (`fleet` in /controller.toml): expected changes there, \
         then SIGHUP"
    );
    let before = controller.stored_configuration().await;
    controller.kill().await;
    home.write_controllers_file("");
    std::fs::remove_file(file).unwrap();
    let controller = home.start().await;
    assert_eq!(controller.stored_configuration().await, before);
    assert_eq!(controller.apply(&home, &document(&["s1", "s2"], "")).await, Ok(2));
}

/// Generates valid fleet documents, with servers and services in any order, and with comments.
fn documents() -> impl Strategy<Value = String> {
    let server = (0u8..3, any::<bool>(), 0u8..=100, any::<bool>());
    let servers = prop::collection::btree_map(1u8..40, server, 0..12);
    let service = (prop::sample::select(coreward_model::policy::names()), 0u32..12, 0u64..=3_600, any::<bool>());
    let services = prop::collection::btree_map(1u16..1000, service, 0..6);
    (servers, services, 10u32..=1000, 1u32..=1000, prop::option::of(24u32..=8760)).prop_map(
        |(servers, services, interval, alpha, rotation)| {
            let mut text =
                format!("report_interval = \"{interval}ms\"\nload_ewma_alpha = {}\n", f64::from(alpha) / 1000.0);
            text += &rotation.map_or(String::new(), |hours| format!("key_rotation = \"{hours}h\"\n"));
            for (n, (kind, draining, weight, has_id)) in &servers {
                text +=
                    &format!("# {kind}\n[[server]]\nname = \"s{n}\"\naddress = \"10.2.0.{n}\"\nweight = {weight}\n");
                text += if *draining { "state = \"draining\"\n" } else { "" };
                text += &if *has_id { format!("id = {}\n", u32::from(*n) * 400) } else { String::new() };
            }
            for (port, (policy, buckets, slow_start, all)) in &services {
                text +=
                    &format!("[[service]]\nname = \"w{port}\"\nvip = \"10.200.0.1:{port}\"\npolicy = \"{policy}\"\n");
                text += &format!("buckets = {}\nslow_start = \"{slow_start}s\"\n", 1u32 << buckets);
                let half: Vec<String> = servers.keys().filter(|n| *n % 2 == 0).map(|n| format!("s{n}")).collect();
                text += &if *all { String::new() } else { format!("servers = {half:?}\n") };
            }
            text
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// A controller that is killed and restarted has the applied document, with the same text, ids, states and pools.
    #[test]
    fn any_fleet_survives_a_restart(first in documents(), second in documents()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let home = home();
            let controller = home.start().await;
            prop_assert_eq!(controller.apply(&home, &first).await, Ok(1));
            // An id that the first document assigned may still be in cookies: then the second document is rejected
            // completely.
            let outcome = controller.apply(&home, &second).await;
            let expected = if outcome.is_ok() { &second } else { &first };
            prop_assert_eq!(&controller.document().await.text, expected);
            let before = (controller.document().await, controller.stored_configuration().await);
            controller.kill().await;
            let controller = home.start().await;
            let after = (controller.document().await, controller.stored_configuration().await);
            controller.kill().await;
            prop_assert_eq!(after, before);
            Ok(())
        })?;
    }
}
