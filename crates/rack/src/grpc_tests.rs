//! Tests a controller and two racks over gRPC on loopback, with simulated agents of four servers.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::config::RackControllerConfig;
use crate::daemon::RackController;
use coreward_api::Role;
use coreward_api::types::Status;
use coreward_config::TomlSource;
use coreward_control_server::server::ControllerServer;
use coreward_http::client::ControllerClient;
use coreward_http::tokens::token_file_path;
use coreward_model::placement::PlacementTable;
use coreward_rpc::v1::control_client::ControlClient;
use coreward_wire::v1::{agent_message, agent_update, dataplane_update, load_balancer_message};
use coreward_wire::{table, v1};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming};

const CONDITION_TIMEOUT: Duration = Duration::from_secs(60);

/// Awaits `future`, and panics if it does not complete within a generous timeout.
async fn await_within_timeout<T>(result_name: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(CONDITION_TIMEOUT, future).await.unwrap_or_else(|_| panic!("{result_name} does not come"))
}

async fn connect_client(address: SocketAddr) -> ControlClient<tonic::transport::Channel> {
    let connect = async || ControlClient::connect(format!("http://{address}")).await;
    await_within_timeout("a connection", async {
        loop {
            if let Ok(client) = connect().await {
                return client;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
}

/// Server task, which is aborted on drop, and the server's address.
struct RunningServer(JoinHandle<anyhow::Result<()>>, SocketAddr);

impl Drop for RunningServer {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Starts a controller. Returns its task and the address of its API.
async fn start_controller(directory: &Path) -> (RunningServer, SocketAddr) {
    let server_section = |n: u32| format!("[[server]]\nname = \"s{n}\"\naddress = \"10.2.0.{n}\"\nid = {}\n", n * 31);
    let fleet_text = (1..=4).map(server_section).collect::<String>()
        + "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\nbuckets = 128\n";
    std::fs::write(
        directory.join("fleet.toml"),
        format!("report_interval = \"20ms\"\nload_ewma_alpha = 1.0\n{fleet_text}"),
    )
    .unwrap();
    let store_path = directory.join("store");
    let controller_toml =
        format!("listen = \"127.0.0.1:0\"\napi = \"127.0.0.1:0\"\nstore = {store_path:?}\nfleet = \"fleet.toml\"\n");
    std::fs::write(directory.join("controller.toml"), controller_toml).unwrap();
    let server = ControllerServer::bind(&directory.join("controller.toml")).await.unwrap();
    let (address, api) = (server.address(), server.api_address());
    (RunningServer(tokio::spawn(server.serve()), address), api)
}

async fn start_rack_controller(name: &str, listen: &str, controller: &RunningServer) -> RunningServer {
    let rack_text = format!("name = \"{name}\"\nlisten = \"{listen}\"\ncontroller = \"{}\"\n", controller.1);
    let rack_text = rack_text + "detail_interval = \"100ms\"\n";
    let config = RackControllerConfig::parse(&TomlSource::from_text("rack.toml", &rack_text)).unwrap();
    let rack = RackController::bind(config).await.unwrap();
    let address = rack.listen_address();
    RunningServer(tokio::spawn(rack.serve()), address)
}

/// Task of an agent, which reports the same loads until this value is dropped.
struct TestAgent(JoinHandle<()>);

impl Drop for TestAgent {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Opens an agent's stream to a rack or controller, and returns it once this peer has accepted the agent.
async fn open_agent_stream(
    server: &str,
    address: SocketAddr,
) -> Result<(mpsc::Sender<v1::AgentMessage>, Streaming<v1::AgentUpdate>, v1::AgentConfiguration), tonic::Status> {
    let (sender, receiver) = mpsc::channel(4);
    let registration = v1::AgentRegistration { server: server.to_owned(), version: "test".into() };
    sender.send(v1::AgentMessage { message: Some(agent_message::Message::Registration(registration)) }).await.unwrap();
    let mut updates = connect_client(address).await.agent(ReceiverStream::new(receiver)).await?.into_inner();
    let update = await_within_timeout("a configuration", updates.message()).await?.and_then(|update| update.update);
    let Some(agent_update::Update::Configuration(configuration)) = update else { panic!("{update:?}") };
    Ok((sender, updates, configuration))
}

impl TestAgent {
    /// Starts an agent, and repeats the connection until a rack or the controller accepts it.
    async fn start(server_number: u32, address: SocketAddr, loads: [f64; 2]) -> Self {
        let server_name = format!("s{server_number}");
        let (sender, mut updates, configuration) = await_within_timeout("a stream", async {
            loop {
                match open_agent_stream(&server_name, address).await {
                    Ok(agent_stream) => return agent_stream,
                    Err(status) if matches!(status.code(), Code::Unavailable | Code::AlreadyExists) => {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    Err(status) => panic!("{status}"),
                }
            }
        })
        .await;
        assert_eq!(configuration.server_id, server_number * 31);
        Self(tokio::spawn(async move {
            let mut report_timer = tokio::time::interval(Duration::from_millis(20));
            for sequence in 1.. {
                tokio::select! {
                    _ = report_timer.tick() => {}
                    update = updates.message() => if !matches!(update, Ok(Some(_))) { return },
                }
                let report =
                    v1::AgentMessage { message: Some(agent_message::Message::Report(build_report(sequence, loads))) };
                if sender.send(report).await.is_err() {
                    return;
                }
            }
        }))
    }
}

fn build_report(sequence_number: u64, loads: [f64; 2]) -> v1::Report {
    v1::Report {
        sequence: sequence_number,
        sent_unix_ns: SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64,
        time_to_live_ms: 5_000,
        measured_ns: sequence_number * 1_000_000_000,
        core_busy_ns: loads.iter().map(|load| (load * 1e9) as u64 * sequence_number).collect(),
        open_connections: 7,
        rss_generation: 1,
        rss: (sequence_number == 1).then(|| v1::Rss {
            source: "testbed emulation".into(),
            key: vec![0x5a; 40],
            indirection_table: vec![0, 1],
            input_transform: 0,
        }),
        ..Default::default()
    }
}

struct TestLoadBalancer {
    /// Sender of messages, which is never used but keeps the stream open.
    _sender: mpsc::Sender<v1::LoadBalancerMessage>,
    updates: Streaming<v1::DataplaneUpdate>,
}

impl TestLoadBalancer {
    async fn start(controller: &RunningServer) -> Self {
        let (sender, receiver) = mpsc::channel(4);
        let registration = v1::LoadBalancerRegistration {
            name: "lb1".into(),
            version: "test".into(),
            address: vec![10, 2, 0, 200],
            configuration_generation: 0,
        };
        let message = Some(load_balancer_message::Message::Registration(registration));
        sender.send(v1::LoadBalancerMessage { message }).await.unwrap();
        let updates = connect_client(controller.1).await.load_balancer(ReceiverStream::new(receiver)).await.unwrap();
        Self { _sender: sender, updates: updates.into_inner() }
    }

    /// Returns the first table with the expected candidates (server number and load in percent) for buckets 0 and 1.
    async fn wait_for_table(&mut self, expected_candidates: [&[(u32, u32)]; 2]) -> PlacementTable {
        let mut last_candidates = Vec::new();
        let table_search = tokio::time::timeout(CONDITION_TIMEOUT, async {
            loop {
                let update = self.updates.message().await.unwrap().expect("the stream goes on").update;
                let Some(dataplane_update::Update::Table(bytes)) = update else { continue };
                let table = table::decode_table(bytes).unwrap().1;
                let candidates_of_bucket = |bucket: u32| -> Vec<(u32, u32)> {
                    let to_percent = |load: u32| (f64::from(load) / f64::from(1 << 20) * 100.0).round() as u32;
                    let candidates = table.bucket_candidates(0, bucket).iter();
                    candidates
                        .map(|candidate| {
                            (u32::from(candidate.server.get()) / 31, to_percent(candidate.fixed_point_load))
                        })
                        .collect()
                };
                last_candidates = vec![candidates_of_bucket(0), candidates_of_bucket(1)];
                if last_candidates == expected_candidates {
                    return table;
                }
            }
        });
        table_search
            .await
            .unwrap_or_else(|_| panic!("no table of {expected_candidates:?}; the last: {last_candidates:?}"))
    }
}

async fn fetch_controller_status(directory: &Path, api: SocketAddr) -> Status {
    let client = ControllerClient::new(api.into(), &token_file_path(directory, Role::Viewer)).unwrap();
    client.status(false).await.unwrap()
}

#[tokio::test]
async fn agents_of_a_lost_rack_connect_through_another_one() {
    let directory = tempfile::tempdir().unwrap();
    let (controller, api) = start_controller(directory.path()).await;
    let mut load_balancer = TestLoadBalancer::start(&controller).await;
    let first_rack = start_rack_controller("r1", "127.0.0.1:0", &controller).await;
    let second_rack = start_rack_controller("r2", "127.0.0.1:0", &controller).await;
    let agent_loads = [[0.4, 0.1], [0.2, 0.3], [0.3, 0.2], [0.1, 0.4]];
    let mut agents = Vec::new();
    for (number, rack_address) in [(1, first_rack.1), (2, first_rack.1), (3, second_rack.1), (4, second_rack.1)] {
        agents.push(TestAgent::start(number, rack_address, agent_loads[number as usize - 1]).await);
    }
    let all_candidates: [&[(u32, u32)]; 2] =
        [&[(4, 10), (2, 20), (3, 30), (1, 40)], &[(1, 10), (3, 20), (2, 30), (4, 40)]];
    load_balancer.wait_for_table(all_candidates).await;
    let fleet_status = fetch_controller_status(directory.path(), api).await;
    let agents_by_rack: Vec<(&str, Vec<&str>)> = fleet_status
        .racks
        .iter()
        .map(|rack| (rack.name.as_str(), rack.servers.iter().map(String::as_str).collect()))
        .collect();
    assert_eq!(agents_by_rack, [("r1", vec!["s1", "s2"]), ("r2", vec!["s3", "s4"])]);
    // The status shows every core, because the racks forward complete reports.
    let core_loads = await_within_timeout("the loads of every core", async {
        loop {
            let servers = fetch_controller_status(directory.path(), api).await.servers;
            if servers.iter().all(|server| server.core_loads.len() == 2) {
                return servers.into_iter().map(|server| server.core_loads).collect::<Vec<_>>();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    for (status_load, agent_load) in core_loads.iter().flatten().zip(agent_loads.iter().flatten()) {
        assert!((status_load - agent_load).abs() < 0.001, "{core_loads:?}");
    }

    // When a rack is killed, its servers count with the mean load of the other rack.
    let second_rack_address = second_rack.1;
    drop(second_rack);
    agents.truncate(2);
    let candidates_with_mean_loads: [&[(u32, u32)]; 2] =
        [&[(2, 20), (3, 25), (4, 25), (1, 40)], &[(1, 10), (3, 25), (4, 25), (2, 30)]];
    load_balancer.wait_for_table(candidates_with_mean_loads).await;

    // One agent of the killed rack connects to the controller, and the other one to the restarted rack.
    agents.push(TestAgent::start(3, controller.1, agent_loads[2]).await);
    let _second_rack = await_within_timeout("the address", async {
        while std::net::TcpListener::bind(second_rack_address).is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        start_rack_controller("r2", &second_rack_address.to_string(), &controller).await
    })
    .await;
    agents.push(TestAgent::start(4, second_rack_address, agent_loads[3]).await);
    load_balancer.wait_for_table(all_candidates).await;
}

#[tokio::test]
async fn rack_without_controller_accepts_no_agent() {
    let directory = tempfile::tempdir().unwrap();
    // The port is bound so that no other test can get it, but has no listener.
    let unconnected_socket = tokio::net::TcpSocket::new_v4().unwrap();
    unconnected_socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let unused_address = unconnected_socket.local_addr().unwrap();
    let unreachable_controller = RunningServer(tokio::spawn(std::future::pending()), unused_address);
    let rack_without_controller = start_rack_controller("r1", "127.0.0.1:0", &unreachable_controller).await;
    let rejection = open_agent_stream("s1", rack_without_controller.1).await.unwrap_err();
    assert_eq!(
        (rejection.code(), rejection.message()),
        (Code::Unavailable, "this rack has no connection to its controller")
    );
    let rejection = connect_client(rack_without_controller.1).await.fleet(v1::FleetRequest {}).await.unwrap_err();
    assert_eq!(rejection.code(), Code::Unimplemented);

    let (controller, _) = start_controller(directory.path()).await;
    let connected_rack = start_rack_controller("r1", "127.0.0.1:0", &controller).await;
    // A rack passes on that the controller rejects a server outside the fleet.
    let unknown_server_error = await_within_timeout("a rejection", async {
        loop {
            match open_agent_stream("s9", connected_rack.1).await {
                Err(status) if status.code() != Code::Unavailable => return status,
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    });
    assert_eq!(unknown_server_error.await.code(), Code::NotFound);
}
