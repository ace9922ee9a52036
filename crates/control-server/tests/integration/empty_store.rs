//! A controller whose store has less than its load balancers have in force.

use coreward_api::types::NewFleet;
use coreward_wire::v1::{self, load_balancer_message::Message};
use coreward_wire::{FleetConfiguration, v1::DataplaneUpdate};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::support::{RunningController, TestDirectory, apply_update, with_timeout};

const WEB: &str = "[[server]]\nname = \"s1\"\naddress = \"10.2.0.1\"\n\
                   [[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\nhealth = { check = \"tcp\" }\n";
const NO_SERVICES: &str = "report_interval = \"50ms\"\n";

/// Load balancer that is connected, and has had a configuration in force before.
struct LoadBalancer {
    updates: Streaming<DataplaneUpdate>,
    newest: Option<FleetConfiguration>,
    _messages: mpsc::Sender<v1::LoadBalancerMessage>,
}

impl LoadBalancer {
    async fn connect(running: &RunningController, configuration_generation: u64) -> Self {
        let (messages, receiver) = mpsc::channel(4);
        let first = v1::LoadBalancerRegistration { name: "lb1".into(), configuration_generation, ..Default::default() };
        let message = Some(Message::Registration(first));
        messages.send(v1::LoadBalancerMessage { message }).await.unwrap();
        let updates = running.client().await.load_balancer(ReceiverStream::new(receiver)).await.unwrap().into_inner();
        with_timeout("the load balancer on record", async {
            while running.status().await.load_balancers.iter().all(|balancer| balancer.owner.is_none()) {
                tokio::time::sleep(std::time::Duration::from_millis(60)).await;
            }
        })
        .await;
        Self { updates, newest: None, _messages: messages }
    }

    /// Waits for the next configuration, and returns the number of its services.
    async fn services(&mut self) -> usize {
        loop {
            let update = with_timeout("an update", self.updates.message()).await.unwrap().unwrap().update;
            if update.is_some_and(|update| apply_update(&mut self.newest, &update)) {
                return self.newest.as_ref().expect("a stream begins with a whole configuration").services.len();
            }
        }
    }
}

async fn apply(running: &RunningController, text: &str, generation: u64) {
    let fleet = NewFleet { name: "fleet.toml".into(), text: text.into(), generation, dry_run: false };
    running.client.put_fleet(&fleet).await.unwrap();
}

fn metric(running: &RunningController, name: &str) -> String {
    let text = (running.metrics)();
    text.lines().find_map(|line| line.strip_prefix(&format!("{name} "))).unwrap_or_default().to_owned()
}

/// Returns a test directory without a fleet's file: the fleet is applied by the API.
fn home() -> TestDirectory {
    let home = TestDirectory { directory: tempfile::tempdir().unwrap() };
    home.write_controllers_file("");
    home
}

#[tokio::test]
async fn controller_without_a_document_sends_no_configuration() {
    let home = home();
    let running = home.start().await;
    let mut balancer = LoadBalancer::connect(&running, 27).await;
    let warnings = running.status().await.warnings;
    assert!(warnings.iter().any(|warning| warning.starts_with("the store has no document")), "{warnings:?}");
    let ahead = "load balancer lb1 had configuration 27 in force, and the store has ";
    assert!(warnings.iter().any(|warning| warning.starts_with(ahead)), "{warnings:?}");
    assert_eq!(metric(&running, "coreward_store_behind"), "1.0");
    assert_eq!(metric(&running, "coreward_store_has_document"), "0.0");

    apply(&running, WEB, 0).await;
    assert_eq!(balancer.services().await, 1, "the first configuration that was sent");
    assert_eq!(running.status().await.warnings, [""; 0]);
    assert_eq!(metric(&running, "coreward_store_behind"), "0.0");
    assert_eq!(metric(&running, "coreward_store_has_document"), "1.0");
}

#[tokio::test]
async fn applied_document_without_services_removes_all() {
    let home = home();
    let running = home.start().await;
    let mut balancer = LoadBalancer::connect(&running, 0).await;
    apply(&running, WEB, 0).await;
    assert_eq!(balancer.services().await, 1);
    apply(&running, NO_SERVICES, 1).await;
    while balancer.services().await > 0 {}
}

#[tokio::test]
async fn older_copy_of_the_store_is_reported() {
    let home = home();
    let running = home.start().await;
    apply(&running, WEB, 0).await;
    let generation = running.status().await.configuration_generation;
    let _same = LoadBalancer::connect(&running, generation).await;
    assert_eq!(running.status().await.warnings, [""; 0]);
    running.kill().await;
    let running = home.start().await;
    let mut balancer = LoadBalancer::connect(&running, generation + 20).await;
    assert_eq!(balancer.services().await, 1);
    assert_eq!(running.status().await.warnings.len(), 1);
    assert_eq!(metric(&running, "coreward_store_behind"), "1.0");
}
