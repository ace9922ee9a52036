//! Tests a rack and agents that authenticate each other with certificates.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::config::RackControllerConfig;
use crate::daemon::RackController;
use coreward_config::TomlSource;
use coreward_control_server::server::ControllerServer;
use coreward_rpc::v1::control_client::ControlClient;
use coreward_tls::authority::{CertificateAuthority, CertificateValidity, DAY};
use coreward_tls::connect::GrpcConnector;
use coreward_tls::{FleetIdentity, FleetRole, ReloadableTlsCredentials, TlsCredentialFiles};
use coreward_wire::v1;
use coreward_wire::v1::agent_message::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;
use tonic::{Code, Status};

const TLS_TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// Directory with a certificate authority and the certificates that it has signed.
struct TestCertificates(tempfile::TempDir);

impl TestCertificates {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        CertificateAuthority::init(&directory.path().join("authority"), &"test".parse().unwrap(), 30 * DAY).unwrap();
        Self(directory)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn issue_credentials(&self, role: FleetRole, name: &str) -> TlsCredentialFiles {
        let authority = CertificateAuthority::open(&self.path().join("authority")).unwrap();
        let identity = FleetIdentity { fleet: "test".parse().unwrap(), role, name: name.parse().unwrap() };
        let directory = self.path().join(format!("{role}-{name}"));
        let certificate_and_key =
            authority.issue_certificate(&identity, &[], CertificateValidity::from_now(DAY)).unwrap();
        certificate_and_key.write_files(&directory, &authority).unwrap();
        let file_path = |name| directory.join(name);
        TlsCredentialFiles {
            ca_path: file_path("ca.crt"),
            certificate_path: file_path("own.crt"),
            key_path: file_path("own.key"),
        }
    }

    fn issue_tls_section(&self, role: FleetRole, name: &str) -> String {
        let TlsCredentialFiles { ca_path: ca, certificate_path: certificate, key_path: key } =
            self.issue_credentials(role, name);
        format!("[tls]\nca = {ca:?}\ncertificate = {certificate:?}\nkey = {key:?}\n")
    }

    /// Starts a controller for the servers s1 and s2. Returns the address at which daemons connect.
    async fn start_controller(&self) -> SocketAddr {
        let file_path = |name: &str| self.path().join(name);
        let server_section = |n: u32| format!("[[server]]\nname = \"s{n}\"\naddress = \"10.2.0.{n}\"\nid = {n}\n");
        std::fs::write(file_path("fleet.toml"), server_section(1) + &server_section(2)).unwrap();
        let controller_toml = format!(
            "listen = \"127.0.0.1:0\"\napi = \"127.0.0.1:0\"\nstore = {:?}\nfleet = \"fleet.toml\"\n{}",
            file_path("store"),
            self.issue_tls_section(FleetRole::Controller, "c1")
        );
        std::fs::write(file_path("controller.toml"), controller_toml).unwrap();
        let server = ControllerServer::bind(&file_path("controller.toml")).await.unwrap();
        let address = server.address();
        tokio::spawn(server.serve());
        address
    }

    async fn start_rack_controller(&self, controller: SocketAddr, tls_section: &str) -> SocketAddr {
        let rack_text =
            format!("name = \"r1\"\nlisten = \"127.0.0.1:0\"\ncontroller = \"{controller}\"\n{tls_section}");
        let rack =
            RackController::bind(RackControllerConfig::parse(&TomlSource::from_text("rack.toml", &rack_text)).unwrap())
                .await
                .unwrap();
        let address = rack.listen_address();
        tokio::spawn(rack.serve());
        address
    }
}

/// Connects to a rack or controller and registers as the agent of `server`. Returns the first update that it receives.
async fn request_first_update(
    credential_files: &TlsCredentialFiles,
    expected_roles: &'static [FleetRole],
    server: &str,
    address: SocketAddr,
) -> Result<Option<v1::AgentUpdate>, Status> {
    let connector = GrpcConnector::new(
        address,
        Some((ReloadableTlsCredentials::load_from_files(credential_files.clone()).unwrap(), expected_roles)),
    );
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let channel = endpoint.connect_with_connector(connector).await.map_err(|error| Status::from_error(error.into()))?;
    let (sender, receiver) = mpsc::channel(1);
    let registration = v1::AgentRegistration { server: server.to_owned(), version: "test".into() };
    sender.send(v1::AgentMessage { message: Some(Message::Registration(registration)) }).await.unwrap();
    ControlClient::new(channel).agent(ReceiverStream::new(receiver)).await?.into_inner().message().await
}

/// Repeats [`request_first_update`] until the rack has connected to its controller, and returns the update.
async fn retry_first_update_until_connected(
    credential_files: &TlsCredentialFiles,
    expected_roles: &'static [FleetRole],
    server: &str,
    address: SocketAddr,
) -> Result<Option<v1::AgentUpdate>, Status> {
    let connected_update = async {
        loop {
            match request_first_update(credential_files, expected_roles, server, address).await {
                Err(status) if status.message().contains("no connection to its controller") => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                other => return other,
            }
        }
    };
    tokio::time::timeout(TLS_TEST_TIMEOUT, connected_update).await.expect("an answer in time")
}

const CONTROLLERS_AND_RACKS: &[FleetRole] = &[FleetRole::Controller, FleetRole::Rack];

#[tokio::test]
async fn agent_behind_a_rack_may_report_for_its_own_server_only() {
    let certificates = TestCertificates::new();
    let controller_address = certificates.start_controller().await;
    let rack_address = certificates
        .start_rack_controller(controller_address, &certificates.issue_tls_section(FleetRole::Rack, "r1"))
        .await;
    let s1 = certificates.issue_credentials(FleetRole::Agent, "s1");
    let agent_update = retry_first_update_until_connected(&s1, CONTROLLERS_AND_RACKS, "s1", rack_address)
        .await
        .unwrap()
        .and_then(|update| update.update);
    let Some(v1::agent_update::Update::Configuration(configuration)) = agent_update else { panic!("{agent_update:?}") };
    assert_eq!(configuration.server_id, 1);

    let rejection =
        retry_first_update_until_connected(&s1, CONTROLLERS_AND_RACKS, "s2", rack_address).await.unwrap_err();
    assert_eq!(rejection.code(), Code::PermissionDenied, "{rejection}");
    assert!(rejection.message().contains("s1") && rejection.message().contains("s2"), "{rejection}");
}

#[tokio::test]
async fn rack_accepts_agents_only() {
    let certificates = TestCertificates::new();
    let controller_address = certificates.start_controller().await;
    let rack_address = certificates
        .start_rack_controller(controller_address, &certificates.issue_tls_section(FleetRole::Rack, "r1"))
        .await;
    let lb = certificates.issue_credentials(FleetRole::Lb, "lb1");
    // A load balancer neither accepts the rack as a controller nor is accepted by it.
    assert!(request_first_update(&lb, &[FleetRole::Controller], "s1", rack_address).await.is_err());
    let rejection = request_first_update(&lb, CONTROLLERS_AND_RACKS, "s1", rack_address).await.unwrap_err();
    assert_ne!(rejection.code(), Code::Ok);
    // A rack cannot use an agent's key. The controller rejects it, so it accepts no agents.
    let false_rack_address = certificates
        .start_rack_controller(controller_address, &certificates.issue_tls_section(FleetRole::Agent, "s2"))
        .await;
    let s1 = certificates.issue_credentials(FleetRole::Agent, "s1");
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(request_first_update(&s1, CONTROLLERS_AND_RACKS, "s1", false_rack_address).await.is_err());
    // An agent without a certificate is rejected.
    let plaintext_endpoint = Arc::new(Endpoint::from_shared(format!("http://{rack_address}")).unwrap());
    let mut client = ControlClient::new(plaintext_endpoint.connect_lazy());
    let plaintext_result = client.agent(tokio_stream::empty::<v1::AgentMessage>()).await;
    assert!(plaintext_result.is_err());
}
