//! A controller in this process, which tests reach by real gRPC over loopback.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use coreward_api::Role;
use coreward_api::types::Status;
use coreward_control_server::server::ControllerServer;
use coreward_http::client::ControllerClient;
use coreward_http::tokens::token_file_path;
use coreward_rpc::v1::control_client::ControlClient;
use coreward_wire::v1::dataplane_update::Update;
use coreward_wire::{FleetConfiguration, FleetConfigurationChange};
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};

/// Time limit of a wait in tests. The awaited events take milliseconds, or the few seconds of an etcd lease.
pub const CONDITION_TIMEOUT: Duration = Duration::from_secs(30);

/// Lock for tests that send SIGHUP, which reaches all controllers in the test process. Tests that restart a controller
/// also take it, because a reload keeps the store open. So do tests that count generations, which a reload increases.
pub static SIGHUP_LOCK: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

pub async fn with_timeout<T>(awaited_event: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(CONDITION_TIMEOUT, future)
        .await
        .unwrap_or_else(|_| panic!("waited too long for {awaited_event}"))
}

/// Applies an update from a load balancer's stream to `newest_configuration`. Returns whether the update changed it.
pub fn apply_update_to_configuration(newest_configuration: &mut Option<FleetConfiguration>, update: &Update) -> bool {
    match update {
        Update::Configuration(configuration) => {
            *newest_configuration = Some(FleetConfiguration::decode(configuration.clone()).unwrap().1)
        }
        Update::Change(change) => {
            let (change, _) = FleetConfigurationChange::decode(change.clone()).unwrap();
            *newest_configuration =
                newest_configuration.take().map(|base_configuration| change.apply_to(base_configuration));
        }
        _ => return false,
    }
    true
}

pub struct TestDirectory {
    pub temporary_directory: tempfile::TempDir,
}

impl TestDirectory {
    pub fn new(servers: &[&str], services_toml: &str) -> Self {
        let test_directory = Self { temporary_directory: tempfile::tempdir().unwrap() };
        test_directory.write_controller_config("fleet = \"fleet.toml\"\n");
        test_directory.write_fleet_file(servers, services_toml);
        test_directory
    }

    pub fn write_controller_config(&self, extra_toml: &str) {
        let store_path = self.temporary_directory.path().join("controller.redb");
        let config_text =
            format!("listen = \"127.0.0.1:0\"\napi = \"127.0.0.1:0\"\nstore = {store_path:?}\n{extra_toml}");
        std::fs::write(self.config_path(), config_text).unwrap();
    }

    pub fn config_path(&self) -> PathBuf {
        self.temporary_directory.path().join("controller.toml")
    }

    pub fn write_fleet_file(&self, servers: &[&str], services_toml: &str) {
        // With this setting, tables are made whether any agent reports or not.
        let mut fleet_text = "report_interval = \"10ms\"\ntable_updates = \"interval\"\n".to_owned();
        for server in servers {
            fleet_text += &format!("[[server]]\nname = \"{server}\"\naddress = \"10.2.0.{}\"\n", &server[1..]);
        }
        std::fs::write(self.temporary_directory.path().join("fleet.toml"), format!("{fleet_text}{services_toml}"))
            .unwrap();
    }

    pub async fn start_controller(&self) -> RunningController {
        // The task of a killed controller may still be writing, because a task does not end at once like a process.
        let server = with_timeout("the store", async {
            loop {
                match ControllerServer::bind(&self.config_path()).await {
                    Err(error) if error.to_string().contains("is in use") => tokio::task::yield_now().await,
                    bound => break bound.unwrap(),
                }
            }
        })
        .await;
        let (address, api, state) = (server.address(), server.api_address(), server.election());
        let metrics = Box::new(move || state.metrics_snapshot().to_openmetrics());
        let token_path = token_file_path(self.temporary_directory.path(), Role::Operator);
        let client = ControllerClient::new(api.into(), &token_path).unwrap();
        RunningController {
            address,
            api_address: api,
            client,
            render_metrics_text: metrics,
            server_task: tokio::spawn(async move { server.serve().await.unwrap() }),
        }
    }
}

pub struct RunningController {
    pub address: SocketAddr,
    pub api_address: SocketAddr,
    /// Client of the API with an operator's token.
    pub client: ControllerClient,
    /// Returns the controller's metrics in the text format of Prometheus.
    pub render_metrics_text: Box<dyn Fn() -> String + Send + Sync>,
    server_task: JoinHandle<()>,
}

impl RunningController {
    pub fn grpc_endpoint(&self) -> Endpoint {
        Endpoint::from_shared(format!("http://{}", self.address)).unwrap()
    }

    pub async fn connect_control_client(&self) -> ControlClient<Channel> {
        ControlClient::connect(self.grpc_endpoint()).await.unwrap()
    }

    pub async fn fetch_status(&self) -> Status {
        self.client.status(false).await.unwrap()
    }

    /// Stops the controller immediately, as SIGKILL would.
    pub async fn kill(self) {
        self.server_task.abort();
        let _ = self.server_task.await;
    }
}
