//! Tests of two controllers on a real etcd, and of what the follower reports about the leader.

use std::net::SocketAddr;
use std::process::Child;

use coreward_api::Role;
use coreward_api::types::{Health, HealthState, NewFleet};
use coreward_etcd::local::LocalEtcdMember;
use coreward_http::tokens::token_file_path;
use coreward_http::{Problem, ProblemKind};
use coreward_wire::{CONTROLLER_TERM_METADATA_KEY, v1};
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use crate::support::{RunningController, TestDirectory, with_timeout};

/// Process of a single-member etcd cluster. It is killed when the value is dropped.
struct EtcdProcess {
    member: LocalEtcdMember,
    process: Child,
    _directory: tempfile::TempDir,
}

impl EtcdProcess {
    fn start() -> Self {
        let (member, directory) = (LocalEtcdMember::single_member().unwrap(), tempfile::tempdir().unwrap());
        let process = member.build_start_command(std::slice::from_ref(&member), directory.path()).spawn();
        let process = process.expect("etcd cannot be started: `scripts/install run` installs it");
        Self { member, process, _directory: directory }
    }
}

impl EtcdProcess {
    fn delete_key(&self, key: &str) {
        let mut command = std::process::Command::new("etcdctl");
        command.args(["--endpoints", &self.member.endpoint(), "del", key]).env("ETCDCTL_API", "3");
        assert!(command.status().unwrap().success());
    }
}

impl Drop for EtcdProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// TCP proxy between a controller and etcd. The test can close it to make etcd unreachable.
struct TcpProxy {
    address: SocketAddr,
    target_address: SocketAddr,
    forwarding_task: tokio::task::JoinHandle<()>,
}

impl TcpProxy {
    async fn start(target_address: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        Self { address, target_address, forwarding_task: tokio::spawn(forward_connections(listener, target_address)) }
    }

    /// Closes all connections and the listening socket, so that new connections are refused.
    fn close(&mut self) {
        self.forwarding_task.abort();
    }

    async fn reopen(&mut self) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        self.forwarding_task = tokio::spawn(forward_connections(listener, self.target_address));
    }
}

async fn forward_connections(listener: TcpListener, target_address: SocketAddr) {
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((mut client_stream, _)) = listener.accept().await {
        connections.spawn(async move {
            let mut target_stream = TcpStream::connect(target_address).await?;
            tokio::io::copy_bidirectional(&mut client_stream, &mut target_stream).await
        });
    }
}

/// Running controller of a test with several controllers. Each has its own API tokens.
struct TestController {
    test_directory: TestDirectory,
    running_controller: RunningController,
}

impl TestController {
    async fn start(etcd: &EtcdProcess, name: &str) -> Self {
        Self::start_with_endpoint(&etcd.member.endpoint(), name).await
    }

    async fn start_with_endpoint(endpoint: &str, name: &str) -> Self {
        let test_directory = TestDirectory::new(&[], "");
        let config_text = format!(
            "listen = \"127.0.0.1:0\"\napi = \"127.0.0.1:0\"\ntoken_directory = {:?}\n[etcd]\nendpoints = \
             [\"{endpoint}\"]\nlease = \"5s\"\n\
             advertise_api = \"https://{name}.example:7401\"\n",
            test_directory.temporary_directory.path()
        );
        std::fs::write(test_directory.config_path(), config_text).unwrap();
        let running_controller = test_directory.start_controller().await;
        Self { test_directory, running_controller }
    }

    fn read_token(&self) -> String {
        std::fs::read_to_string(token_file_path(self.test_directory.temporary_directory.path(), Role::Operator))
            .unwrap()
            .trim()
            .to_owned()
    }

    /// Sends a GET request for the path with an operator's token. Returns the HTTP status and the body of the response.
    async fn get_json<T: serde::de::DeserializeOwned>(&self, path: &str) -> (u16, T) {
        let url = format!("http://{}/v1/{path}", self.running_controller.api_address);
        let response = reqwest::Client::new().get(url).bearer_auth(self.read_token()).send();
        let response = with_timeout("an answer", response).await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    /// Sends a request for a cookie key rotation, which a follower must reject. Returns the problem in the response.
    async fn rotate_keys_and_expect_rejection(&self) -> Problem {
        let url = format!("http://{}/v1/keys/rotate", self.running_controller.api_address);
        let body = serde_json::json!({ "force": true });
        let request = reqwest::Client::new().post(url).bearer_auth(self.read_token()).json(&body);
        with_timeout("an answer", request.send()).await.unwrap().json().await.unwrap()
    }

    /// Waits until this controller is the leader. Returns its term, from the header of a load balancer's stream.
    async fn wait_until_leading(&self) -> u64 {
        let wait_for_leader_term = async {
            loop {
                let (sender, receiver) = tokio::sync::mpsc::channel::<v1::LoadBalancerMessage>(1);
                let stream_result = self
                    .running_controller
                    .connect_control_client()
                    .await
                    .load_balancer(ReceiverStream::new(receiver))
                    .await;
                drop(sender);
                match stream_result {
                    Ok(response) => {
                        return response
                            .metadata()
                            .get(CONTROLLER_TERM_METADATA_KEY)
                            .unwrap()
                            .to_str()
                            .unwrap()
                            .parse()
                            .unwrap();
                    }
                    Err(status) => assert_eq!(status.code(), Code::Unavailable, "{status}"),
                }
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        };
        with_timeout("the leader", wait_for_leader_term).await
    }
}

#[tokio::test]
async fn followers_name_the_leader_and_terms_increase() {
    let etcd = EtcdProcess::start();
    let first_controller = TestController::start(&etcd, "c1").await;
    let term = first_controller.wait_until_leading().await;
    let second_controller = TestController::start(&etcd, "c2").await;
    let wait_for_leader_name = async {
        loop {
            let (status, health) = second_controller.get_json::<Health>("health").await;
            assert_eq!((status, health.state), (200, HealthState::Following));
            if health.leader.is_some() {
                break health;
            }
        }
    };
    let health = with_timeout("the name of the leader", wait_for_leader_name).await;
    assert_eq!(health.leader_api.as_deref(), Some("https://c1.example:7401"));
    let (status, problem) = second_controller.get_json::<Problem>("status").await;
    assert_eq!((status, problem.kind, problem.retry_after_s), (503, ProblemKind::NotLeading, Some(1)));
    assert_eq!(problem.leader.as_deref(), health.leader.as_deref());
    assert_eq!(problem.leader_api.as_deref(), health.leader_api.as_deref());
    assert!(problem.detail.contains("(API: https://c1.example:7401) does"), "{}", problem.detail);
    let (_, health) = first_controller.get_json::<Health>("health").await;
    assert_eq!((health.leader, health.leader_api), (None, None));

    first_controller.running_controller.kill().await;
    assert!(second_controller.wait_until_leading().await > term);

    // A watch stream from a former leader ends.
    let url = format!("http://{}/v1/watch", second_controller.running_controller.api_address);
    let mut watch_response =
        reqwest::Client::new().get(url).bearer_auth(second_controller.read_token()).send().await.unwrap();
    assert_eq!(watch_response.status(), 200);
    etcd.delete_key("/coreward/leader");
    // The controller's next write detects that the leader's key is gone.
    let rotation_problem = second_controller.rotate_keys_and_expect_rejection().await;
    assert_eq!(rotation_problem.kind, ProblemKind::NotLeading, "{}", rotation_problem.detail);
    with_timeout("the stream's end", async { while watch_response.chunk().await.unwrap().is_some() {} }).await;
}

#[tokio::test]
async fn leader_without_etcd_resigns_before_next_leader_is_elected() {
    let etcd = EtcdProcess::start();
    let mut etcd_proxy = TcpProxy::start(etcd.member.client_address).await;
    let first_controller = TestController::start_with_endpoint(&format!("http://{}", etcd_proxy.address), "c1").await;
    let term = first_controller.wait_until_leading().await;
    let fleet_text = "report_interval = \"50ms\"\n".to_owned();
    let fleet = NewFleet { name: "fleet.toml".to_owned(), text: fleet_text, generation: 0, dry_run: false };
    first_controller.running_controller.client.apply_fleet(&fleet).await.unwrap();
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    let registration = v1::LoadBalancerRegistration { name: "lb1".to_owned(), ..Default::default() };
    let registration = v1::load_balancer_message::Message::Registration(registration);
    sender.send(v1::LoadBalancerMessage { message: Some(registration) }).await.unwrap();
    let mut client = first_controller.running_controller.connect_control_client().await;
    let mut stream = client.load_balancer(ReceiverStream::new(receiver)).await.unwrap().into_inner();
    with_timeout("a configuration", stream.message()).await.unwrap().unwrap();
    let second_controller = TestController::start(&etcd, "c2").await;

    etcd_proxy.close();
    assert!(second_controller.wait_until_leading().await > term);
    let (status, problem) = first_controller.get_json::<Problem>("status").await;
    assert_eq!((status, problem.kind), (503, ProblemKind::NotLeading), "two leaders at once");
    with_timeout("the stream's end", async { while let Ok(Some(_)) = stream.message().await {} }).await;

    etcd_proxy.reopen().await;
    let wait_for_leader_name = async {
        while first_controller.get_json::<Health>("health").await.1.leader_api.as_deref()
            != Some("https://c2.example:7401")
        {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    with_timeout("the first one to follow the second", wait_for_leader_name).await;
}
