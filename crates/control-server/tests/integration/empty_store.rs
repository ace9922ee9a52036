//! Tests of a controller whose store lacks a configuration that is active at its load balancers.

use coreward_api::types::NewFleet;
use coreward_wire::v1::{self, load_balancer_message::Message};
use coreward_wire::{FleetConfiguration, v1::DataplaneUpdate};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::support::{RunningController, TestDirectory, apply_update_to_configuration, with_timeout};

const SERVER_AND_SERVICE_TOML: &str = "[[server]]\nname = \"s1\"\naddress = \"10.2.0.1\"\n\
                   [[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\nhealth = { check = \"tcp\" }\n";
const NO_SERVICES_TOML: &str = "report_interval = \"50ms\"\n";

/// Simulated load balancer that is connected to a controller, and that may already have an active configuration.
struct FakeLoadBalancer {
    update_stream: Streaming<DataplaneUpdate>,
    newest_configuration: Option<FleetConfiguration>,
    _message_sender: mpsc::Sender<v1::LoadBalancerMessage>,
}

impl FakeLoadBalancer {
    async fn connect(controller: &RunningController, configuration_generation: u64) -> Self {
        let (messages, receiver) = mpsc::channel(4);
        let registration =
            v1::LoadBalancerRegistration { name: "lb1".into(), configuration_generation, ..Default::default() };
        let message = Some(Message::Registration(registration));
        messages.send(v1::LoadBalancerMessage { message }).await.unwrap();
        let updates = controller
            .connect_control_client()
            .await
            .load_balancer(ReceiverStream::new(receiver))
            .await
            .unwrap()
            .into_inner();
        with_timeout("the load balancer on record", async {
            while controller
                .fetch_status()
                .await
                .load_balancers
                .iter()
                .all(|balancer| balancer.connection_table_owner.is_none())
            {
                tokio::time::sleep(std::time::Duration::from_millis(60)).await;
            }
        })
        .await;
        Self { update_stream: updates, newest_configuration: None, _message_sender: messages }
    }

    /// Waits for the next configuration from the controller, and returns the number of services in it.
    async fn receive_service_count(&mut self) -> usize {
        loop {
            let update = with_timeout("an update", self.update_stream.message()).await.unwrap().unwrap().update;
            if update.is_some_and(|update| apply_update_to_configuration(&mut self.newest_configuration, &update)) {
                return self
                    .newest_configuration
                    .as_ref()
                    .expect("a stream begins with a whole configuration")
                    .services
                    .len();
            }
        }
    }
}

async fn apply_document(controller: &RunningController, text: &str, generation: u64) {
    let fleet = NewFleet { name: "fleet.toml".into(), text: text.into(), generation, dry_run: false };
    controller.client.apply_fleet(&fleet).await.unwrap();
}

fn find_metric_line(controller: &RunningController, name: &str) -> String {
    let metrics_text = (controller.render_metrics_text)();
    metrics_text.lines().find_map(|line| line.strip_prefix(&format!("{name} "))).unwrap_or_default().to_owned()
}

/// Returns a test directory without a fleet file, because the tests apply the fleet through the API.
fn directory_without_fleet_file() -> TestDirectory {
    let test_directory = TestDirectory { temporary_directory: tempfile::tempdir().unwrap() };
    test_directory.write_controller_config("");
    test_directory
}

#[tokio::test]
async fn controller_without_a_document_sends_no_configuration() {
    let test_directory = directory_without_fleet_file();
    let controller = test_directory.start_controller().await;
    let mut load_balancer = FakeLoadBalancer::connect(&controller, 27).await;
    let warnings = controller.fetch_status().await.warnings;
    assert!(warnings.iter().any(|warning| warning.starts_with("the store has no document")), "{warnings:?}");
    let expected_warning_prefix = "load balancer lb1 had configuration 27 in force, and the store has ";
    assert!(warnings.iter().any(|warning| warning.starts_with(expected_warning_prefix)), "{warnings:?}");
    assert_eq!(find_metric_line(&controller, "coreward_store_behind"), "1.0");
    assert_eq!(find_metric_line(&controller, "coreward_store_has_document"), "0.0");

    apply_document(&controller, SERVER_AND_SERVICE_TOML, 0).await;
    assert_eq!(load_balancer.receive_service_count().await, 1, "the first configuration that was sent");
    assert_eq!(controller.fetch_status().await.warnings, [""; 0]);
    assert_eq!(find_metric_line(&controller, "coreward_store_behind"), "0.0");
    assert_eq!(find_metric_line(&controller, "coreward_store_has_document"), "1.0");
}

#[tokio::test]
async fn applied_document_without_services_removes_all_services() {
    let test_directory = directory_without_fleet_file();
    let controller = test_directory.start_controller().await;
    let mut load_balancer = FakeLoadBalancer::connect(&controller, 0).await;
    apply_document(&controller, SERVER_AND_SERVICE_TOML, 0).await;
    assert_eq!(load_balancer.receive_service_count().await, 1);
    apply_document(&controller, NO_SERVICES_TOML, 1).await;
    while load_balancer.receive_service_count().await > 0 {}
}

#[tokio::test]
async fn store_older_than_load_balancer_causes_warning() {
    let test_directory = directory_without_fleet_file();
    let controller = test_directory.start_controller().await;
    apply_document(&controller, SERVER_AND_SERVICE_TOML, 0).await;
    let generation = controller.fetch_status().await.configuration_generation;
    let _load_balancer = FakeLoadBalancer::connect(&controller, generation).await;
    assert_eq!(controller.fetch_status().await.warnings, [""; 0]);
    controller.kill().await;
    let controller = test_directory.start_controller().await;
    let mut load_balancer = FakeLoadBalancer::connect(&controller, generation + 20).await;
    assert_eq!(load_balancer.receive_service_count().await, 1);
    assert_eq!(controller.fetch_status().await.warnings.len(), 1);
    assert_eq!(find_metric_line(&controller, "coreward_store_behind"), "1.0");
}
