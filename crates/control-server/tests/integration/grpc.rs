//! Tests of the controller as its peers see it, with simulated agents and load balancers over real gRPC on loopback.

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use coreward_api::types::{KeyPhase, ReportState, RotateKeys};
use coreward_http::{Problem, ProblemKind};
use coreward_model::placement::PlacementTable;
use coreward_rpc::v1::control_client::ControlClient;
use coreward_wire::v1::{agent_message, agent_update, dataplane_update, load_balancer_message};
use coreward_wire::{FleetConfiguration, LB_STATE_MESSAGE_INTERVAL, SocketQuery, table, v1};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Streaming};

use crate::support::{RunningController, SIGHUP_LOCK, TestDirectory, apply_update_to_configuration, with_timeout};

impl RunningController {
    async fn connect_agent(&self, server: &str) -> FakeAgent {
        let (sender, receiver) = mpsc::channel(4);
        let registration = v1::AgentRegistration { server: server.into(), version: "test".into() };
        let agent = FakeAgent {
            message_sender: sender,
            report_sequence_number: 0,
            core_busy_ns: vec![0; 2],
            update_stream: None,
        };
        agent.send_message(agent_message::Message::Registration(registration)).await;
        let agent_updates =
            self.connect_control_client().await.agent(ReceiverStream::new(receiver)).await.unwrap().into_inner();
        FakeAgent { update_stream: Some(agent_updates), ..agent }
    }

    async fn connect_load_balancer(&self, client: ControlClient<Channel>) -> FakeLoadBalancer {
        self.connect_load_balancer_as("lb1", client).await
    }

    async fn connect_load_balancer_as(&self, name: &str, client: ControlClient<Channel>) -> FakeLoadBalancer {
        let (sender, receiver) = mpsc::channel(4);
        let registration = v1::LoadBalancerRegistration {
            name: name.into(),
            version: "test".into(),
            address: vec![10, 2, 0, 200],
            configuration_generation: 0,
        };
        let message = Some(load_balancer_message::Message::Registration(registration));
        sender.send(v1::LoadBalancerMessage { message }).await.unwrap();
        let updates = client.clone().load_balancer(ReceiverStream::new(receiver)).await.unwrap().into_inner();
        FakeLoadBalancer { message_sender: sender, update_stream: updates, newest_configuration: None }
    }
}

struct FakeAgent {
    message_sender: mpsc::Sender<v1::AgentMessage>,
    report_sequence_number: u64,
    core_busy_ns: Vec<u64>,
    update_stream: Option<Streaming<v1::AgentUpdate>>,
}

impl FakeAgent {
    async fn send_message(&self, message: agent_message::Message) {
        self.message_sender.send(v1::AgentMessage { message: Some(message) }).await.unwrap();
    }

    async fn receive_update(&mut self) -> Result<agent_update::Update, tonic::Status> {
        let updates = self.update_stream.as_mut().unwrap();
        let agent_update = with_timeout("an agent's update", updates.message()).await?.expect("the stream goes on");
        Ok(agent_update.update.expect("an update has contents"))
    }

    async fn receive_configuration(&mut self) -> Result<v1::AgentConfiguration, tonic::Status> {
        loop {
            if let agent_update::Update::Configuration(configuration) = self.receive_update().await? {
                return Ok(configuration);
            }
        }
    }

    /// Sends a report with the load of each core, as the busy fraction of the time since the previous report.
    async fn send_report(&mut self, core_loads: [f64; 2]) {
        self.report_sequence_number += 1;
        let measurement_time_ns = self.report_sequence_number * 10_000_000;
        for (core_busy_ns, load) in self.core_busy_ns.iter_mut().zip(core_loads) {
            *core_busy_ns += (load * 10e6) as u64;
        }
        let report = v1::Report {
            sequence: self.report_sequence_number,
            sent_unix_ns: SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64,
            time_to_live_ms: 60_000,
            measured_ns: measurement_time_ns,
            core_busy_ns: self.core_busy_ns.clone(),
            open_connections: 5,
            rss_generation: 1,
            rss: (self.report_sequence_number == 1).then(|| v1::Rss {
                source: "testbed emulation".into(),
                key: vec![0x5a; 40],
                indirection_table: vec![0, 1],
                input_transform: 0,
            }),
            ..Default::default()
        };
        self.send_message(agent_message::Message::Report(report)).await;
    }
}

struct FakeLoadBalancer {
    message_sender: mpsc::Sender<v1::LoadBalancerMessage>,
    update_stream: Streaming<v1::DataplaneUpdate>,
    newest_configuration: Option<FleetConfiguration>,
}

impl FakeLoadBalancer {
    async fn receive_update(&mut self) -> dataplane_update::Update {
        let message =
            with_timeout("an update", self.update_stream.message()).await.unwrap().expect("the stream goes on");
        let update = message.update.expect("an update has contents");
        apply_update_to_configuration(&mut self.newest_configuration, &update);
        update
    }

    async fn receive_configuration(&mut self) -> FleetConfiguration {
        use dataplane_update::Update::{Change, Configuration};
        while !matches!(self.receive_update().await, Configuration(_) | Change(_)) {}
        self.newest_configuration.clone().expect("a stream begins with a whole configuration")
    }

    async fn receive_table(&mut self) -> PlacementTable {
        loop {
            if let dataplane_update::Update::Table(bytes) = self.receive_update().await {
                return table::decode_table(bytes).unwrap().1;
            }
        }
    }

    async fn receive_table_where(
        &mut self,
        awaited_event: &str,
        is_expected: impl Fn(&PlacementTable) -> bool,
    ) -> PlacementTable {
        with_timeout(awaited_event, async {
            loop {
                let table = self.receive_table().await;
                if is_expected(&table) {
                    return table;
                }
            }
        })
        .await
    }
}

const WEB_SERVICE_TOML: &str = "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\npolicy = \"crossrss\"\n";

/// Returns the id of the server that owns each core's buckets. Even buckets belong to core 0, odd ones to core 1.
fn server_ids_of_cores(table: &PlacementTable) -> Option<[u16; 2]> {
    let server_of_bucket = |bucket: usize| table.candidates.get(bucket).map(|candidate| candidate.server.get());
    Some([server_of_bucket(0)?, server_of_bucket(1)?])
}

#[tokio::test]
async fn placement_tables_follow_reported_loads() {
    let test_directory = TestDirectory::new(&["s1", "s2"], WEB_SERVICE_TOML);
    let controller = test_directory.start_controller().await;
    let mut load_balancer = controller.connect_load_balancer(controller.connect_control_client().await).await;
    let configuration = load_balancer.receive_configuration().await;
    let find_server_id = |name: &str| {
        let servers = &configuration.services[0].servers;
        servers.iter().find(|server| server.name == name).unwrap().id.get()
    };
    let mut agents = [controller.connect_agent("s1").await, controller.connect_agent("s2").await];
    let agent_configuration = agents[0].receive_configuration().await.unwrap();
    assert_eq!(
        (agent_configuration.server_id, agent_configuration.report_interval_ms),
        (u32::from(find_server_id("s1")), 10)
    );
    assert_eq!(agent_configuration.services[0].server_id, u32::from(find_server_id("s1")));

    for _ in 0..3 {
        agents[0].send_report([0.9, 0.1]).await;
        agents[1].send_report([0.5, 0.5]).await;
    }
    let expected_server_ids = Some([find_server_id("s2"), find_server_id("s1")]);
    let table = load_balancer
        .receive_table_where("the loads in the table", |table| server_ids_of_cores(table) == expected_server_ids)
        .await;
    assert_eq!(table.members.len(), 2);
    // The loads of the two cores are exchanged.
    for _ in 0..10 {
        agents[0].send_report([0.1, 0.9]).await;
    }
    let expected_servers = Some([find_server_id("s1"), find_server_id("s2")]);
    load_balancer
        .receive_table_where("the new loads in the table", |table| server_ids_of_cores(table) == expected_servers)
        .await;

    let message = v1::LoadBalancerState { xdp_mode: "native".into(), ..Default::default() };
    let message = Some(load_balancer_message::Message::State(message));
    load_balancer.message_sender.send(v1::LoadBalancerMessage { message }).await.unwrap();
    let status = with_timeout("the load balancer's state", async {
        loop {
            let status = controller.fetch_status().await;
            // Each stream is read independently, so their messages may arrive in any order.
            if status.load_balancers[0].state.is_some() && status.accepted_reports >= 16 {
                return status;
            }
        }
    })
    .await;
    assert_eq!(status.accepted_reports, 16);
    assert!(
        status.servers.iter().all(|server| server.report_state == ReportState::Fresh && server.core_loads.len() == 2)
    );
    assert_eq!(status.services[0].rss_groups[0].servers.len(), 2);

    let explain_query = r#"{"vip": "10.200.0.1:80", "client": "10.1.0.7:40312"}"#;
    let explanation = controller.client.explain_packet(&serde_json::from_str(explain_query).unwrap()).await.unwrap();
    assert!(explanation.reason.contains(" is the least loaded"), "{}", explanation.reason);
    assert_eq!(explanation.servers.len(), 2);

    // The reply to `coreward doctor` on the fleet's machines has the same services and servers.
    let fleet = controller.connect_control_client().await.fleet(v1::FleetRequest {}).await.unwrap().into_inner();
    assert_eq!((fleet.services[0].name.as_str(), fleet.services[0].timestamps.as_str()), ("web", "server"));
    assert_eq!(BTreeSet::from_iter(&fleet.services[0].servers), BTreeSet::from([&"s1".to_owned(), &"s2".to_owned()]));
    let addresses: BTreeSet<&[u8]> = fleet.servers.iter().map(|server| server.address.as_slice()).collect();
    assert_eq!(addresses, BTreeSet::from([&[10, 2, 0, 1][..], &[10, 2, 0, 2]]));
}

#[tokio::test]
async fn killed_controller_restarts_with_the_same_ids_and_keys() {
    let _sighup_guard = SIGHUP_LOCK.lock().await;
    let services =
        format!("{WEB_SERVICE_TOML}[[service]]\nname = \"api\"\nvip = \"10.200.0.1:81\"\npolicy = \"hash\"\n");
    let test_directory = TestDirectory::new(&["s1", "s2", "s3"], &services);
    let mut observed_ids_and_keys = Vec::new();
    for _ in 0..2 {
        let controller = test_directory.start_controller().await;
        let mut load_balancer = controller.connect_load_balancer(controller.connect_control_client().await).await;
        let configuration = load_balancer.receive_configuration().await;
        let mut agent = controller.connect_agent("s1").await;
        let rss_key = agent.receive_configuration().await.unwrap().fleet_rss_key;
        load_balancer.receive_table().await;
        let group_key = load_balancer.receive_table().await.rss_key_by_group.remove(0);
        observed_ids_and_keys.push((configuration.generation, configuration, rss_key, group_key));
        controller.kill().await;
    }
    let (second, first) = (observed_ids_and_keys.pop().unwrap(), observed_ids_and_keys.pop().unwrap());
    // The file and the load balancer, which was new then, caused one generation each. The restart caused one more.
    assert_eq!((first.0, second.0), (2, 3));
    assert_eq!(first.1.cookie_keys, second.1.cookie_keys);
    assert_eq!(first.1.services, second.1.services);
    assert_eq!((first.2, first.3), (second.2, second.3));
    // Another fleet has different secrets.
    let other_fleet_controller = TestDirectory::new(&["s1", "s2", "s3"], &services).start_controller().await;
    let mut load_balancer =
        other_fleet_controller.connect_load_balancer(other_fleet_controller.connect_control_client().await).await;
    assert_ne!(load_balancer.receive_configuration().await.cookie_keys, first.1.cookie_keys);
}

#[tokio::test]
async fn first_table_after_restart_waits_for_agent_reports() {
    let _sighup_guard = SIGHUP_LOCK.lock().await;
    // Waits have a limit. Another attempt follows if the machine paused for longer.
    const FIRST_TABLE_TIMEOUT: Duration = Duration::from_secs(4);
    for _ in 0..5 {
        let test_directory = TestDirectory::new(&["s1", "s2"], WEB_SERVICE_TOML);
        test_directory.start_controller().await.kill().await;
        let start_time = Instant::now();
        let controller = test_directory.start_controller().await;
        let mut load_balancer = controller.connect_load_balancer(controller.connect_control_client().await).await;
        let configuration = load_balancer.receive_configuration().await;
        let early_table_result = tokio::time::timeout(Duration::from_millis(300), load_balancer.receive_table()).await;
        let mut agents = [controller.connect_agent("s1").await, controller.connect_agent("s2").await];
        for _ in 0..2 {
            for agent in &mut agents {
                agent.send_report([0.25, 0.75]).await;
            }
        }
        let table = load_balancer.receive_table().await;
        if start_time.elapsed() >= FIRST_TABLE_TIMEOUT {
            continue;
        }
        assert!(early_table_result.is_err(), "a table before anybody reported");
        assert_eq!(table.generation, 1);
        assert_eq!(table.members.len(), configuration.services[0].servers.len());
        let fixed_point_half_load = coreward_model::load::load_to_fixed_point(0.5);
        assert!(table.members.iter().all(|member| member.fixed_point_load == fixed_point_half_load), "{table:?}");
        return;
    }
    panic!("five times the first table came {FIRST_TABLE_TIMEOUT:?} after the start");
}

#[tokio::test]
async fn unknown_and_duplicate_agents_are_rejected() {
    let test_directory = TestDirectory::new(&["s1"], WEB_SERVICE_TOML);
    let controller = test_directory.start_controller().await;
    let mut first_agent = controller.connect_agent("s1").await;
    first_agent.receive_configuration().await.unwrap();
    first_agent.send_report([0.0, 0.0]).await;

    let rejection = controller.connect_agent("s1").await.receive_configuration().await.unwrap_err();
    assert_eq!(rejection.code(), Code::AlreadyExists);
    let rejection = controller.connect_agent("s9").await.receive_configuration().await.unwrap_err();
    assert_eq!(rejection.code(), Code::NotFound);
    assert_eq!(
        rejection.message(),
        "server \"s9\" is not known: expected the name of a [[server]] in the fleet's file"
    );
    let status = controller.fetch_status().await;
    assert_eq!((status.rejected_reports["unknown_server"], status.rejected_reports["duplicate_session"]), (1, 1));
    // The first agent still reports. When it disconnects, another one can register at once.
    first_agent.send_report([0.0, 0.0]).await;
    drop(first_agent);
    with_timeout("room for another agent", async {
        while controller.connect_agent("s1").await.receive_configuration().await.is_err() {}
    })
    .await;
}

#[tokio::test]
async fn reloaded_fleet_file_is_applied_completely_or_not_at_all() {
    let _sighup_guard = SIGHUP_LOCK.lock().await;
    let test_directory = TestDirectory::new(&["s1", "s2"], WEB_SERVICE_TOML);
    let controller = test_directory.start_controller().await;
    let mut load_balancer = controller.connect_load_balancer(controller.connect_control_client().await).await;
    let old_configuration = load_balancer.receive_configuration().await;
    load_balancer.receive_table_where("both servers", |table| table.members.len() == 2).await;
    let send_sighup = || nix::sys::signal::kill(nix::unistd::getpid(), nix::sys::signal::Signal::SIGHUP).unwrap();

    test_directory.write_fleet_file(&["s2", "s3"], &WEB_SERVICE_TOML.replace("crossrss", "no-such-policy"));
    send_sighup();
    with_timeout("the rejection of the file", async {
        while !(controller.render_metrics_text)().contains("coreward_reloads_total{result=\"rejected\"} 1.0\n") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    assert_eq!(controller.fetch_status().await.configuration_generation, old_configuration.generation);
    assert_eq!(load_balancer.receive_table().await.members.len(), 2);

    test_directory.write_fleet_file(&["s2", "s3"], WEB_SERVICE_TOML);
    send_sighup();
    let new_configuration = load_balancer.receive_configuration().await;
    assert_eq!(new_configuration.generation, old_configuration.generation + 1);
    let server_eligibilities: Vec<(&str, bool)> =
        new_configuration.services[0].servers.iter().map(|server| (server.name.as_str(), server.is_eligible)).collect();
    assert!(
        [("s1", false), ("s2", true), ("s3", true)].iter().all(|server| server_eligibilities.contains(server)),
        "{server_eligibilities:?}"
    );
    let find_server_id =
        |name: &str| new_configuration.services[0].servers.iter().find(|server| server.name == name).unwrap().id;
    let expected_server_ids = [find_server_id("s2"), find_server_id("s3")];
    let has_new_pool =
        |table: &PlacementTable| expected_server_ids.iter().all(|id| table.members.iter().any(|m| m.server == *id));
    assert_eq!(load_balancer.receive_table_where("the new pool", has_new_pool).await.members.len(), 2);
}

#[tokio::test]
async fn slow_load_balancer_gets_the_newest_table() {
    let test_directory = TestDirectory::new(&["s1", "s2"], &format!("{WEB_SERVICE_TOML}buckets = 2048\n"));
    let controller = test_directory.start_controller().await;
    let channel = controller.grpc_endpoint().initial_stream_window_size(65_535).connect().await.unwrap();
    let mut load_balancer = controller.connect_load_balancer(ControlClient::new(channel)).await;
    load_balancer.receive_configuration().await;
    let first_generation = load_balancer.receive_table().await.generation;
    let mut received_table_count = 1;
    let newest_generation = with_timeout("a hundred tables", async {
        loop {
            let newest_generation = controller.fetch_status().await.services[0].table_generation;
            if newest_generation >= first_generation + 100 {
                return newest_generation;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    while load_balancer.receive_table().await.generation < newest_generation {
        received_table_count += 1;
    }
    assert!(
        received_table_count < (newest_generation - first_generation) / 2,
        "{received_table_count} tables of generations {first_generation} to {newest_generation}"
    );
}

#[tokio::test]
async fn controller_relays_socket_queries_and_their_answers() {
    let test_directory = TestDirectory::new(&["s1", "s2"], WEB_SERVICE_TOML);
    let controller = test_directory.start_controller().await;
    let mut load_balancer = controller.connect_load_balancer(controller.connect_control_client().await).await;
    let configuration = load_balancer.receive_configuration().await;
    let server_id = configuration.services[0].servers.iter().find(|server| server.name == "s1").unwrap().id;
    let mut agent = controller.connect_agent("s1").await;
    agent.receive_configuration().await.unwrap();
    let query = SocketQuery {
        query_number: 17,
        load_balancer_session: 99,
        server: server_id,
        service: configuration.services[0].address,
        clients: vec!["10.1.0.7:40000".parse().unwrap(), "10.1.0.7:40001".parse().unwrap()],
    };
    let message = Some(load_balancer_message::Message::SocketQuery((&query).into()));
    load_balancer.message_sender.send(v1::LoadBalancerMessage { message }).await.unwrap();
    let relayed_query = loop {
        if let agent_update::Update::SocketQuery(asked) = agent.receive_update().await.unwrap() {
            break SocketQuery::try_from(&asked).unwrap();
        }
    };
    assert_eq!((relayed_query.query_number, &relayed_query.clients), (query.query_number, &query.clients));
    agent.send_message(agent_message::Message::SocketAnswer(relayed_query.to_answer(vec![true, false]).into())).await;
    let relayed_answer = loop {
        if let dataplane_update::Update::SocketAnswer(answer) = load_balancer.receive_update().await {
            break answer;
        }
    };
    assert_eq!((relayed_answer.number, relayed_answer.open), (17, vec![true, false]));
}

#[tokio::test]
async fn load_balancers_learn_which_peers_are_alive() {
    let test_directory = TestDirectory::new(&["s1"], WEB_SERVICE_TOML);
    let controller = test_directory.start_controller().await;
    let mut first_balancer =
        controller.connect_load_balancer_as("lb1", controller.connect_control_client().await).await;
    let second_balancer = controller.connect_load_balancer_as("lb2", controller.connect_control_client().await).await;
    // A silent load balancer would also count as lost.
    let first_sender = first_balancer.message_sender.clone();
    let keep_alive_task = tokio::spawn(async move {
        loop {
            let message = Some(load_balancer_message::Message::State(v1::LoadBalancerState::default()));
            first_sender.send(v1::LoadBalancerMessage { message }).await.unwrap();
            tokio::time::sleep(LB_STATE_MESSAGE_INTERVAL).await;
        }
    });
    let wait_for_peers = async |balancer: &mut FakeLoadBalancer, expected: &[(&str, u8, bool)]| loop {
        let peers = balancer.receive_configuration().await.load_balancers;
        let peer_states: Vec<_> = peers
            .iter()
            .map(|peer| (peer.name.as_str(), peer.owner_number.map_or(255, |owner| owner.get()), peer.is_alive))
            .collect();
        if peer_states == expected {
            break;
        }
    };
    wait_for_peers(&mut first_balancer, &[("lb1", 0, true), ("lb2", 1, true)]).await;
    let mut duplicate_balancer =
        controller.connect_load_balancer_as("lb1", controller.connect_control_client().await).await;
    let rejection = with_timeout("a rejection", duplicate_balancer.update_stream.message()).await.unwrap_err();
    assert_eq!(rejection.code(), Code::AlreadyExists);
    drop(second_balancer);
    wait_for_peers(&mut first_balancer, &[("lb1", 0, true), ("lb2", 1, false)]).await;
    keep_alive_task.abort();
}

#[tokio::test]
async fn key_rotation_waits_for_all_daemons_and_survives_a_restart() {
    let _sighup_guard = SIGHUP_LOCK.lock().await;
    let test_directory = TestDirectory::new(&["s1"], WEB_SERVICE_TOML);
    let request_key_rotation =
        async |controller: &RunningController, force: bool| controller.client.rotate_keys(&RotateKeys { force }).await;
    let controller = test_directory.start_controller().await;
    let rejection = request_key_rotation(&controller, false).await.unwrap_err();
    assert_eq!(rejection.downcast_ref::<Problem>().unwrap().kind, ProblemKind::Conflict);
    assert!(rejection.to_string().starts_with("the key in force is"), "{rejection}");
    let mut load_balancer = controller.connect_load_balancer(controller.connect_control_client().await).await;
    let original_keys = load_balancer.receive_configuration().await.cookie_keys;
    let announced_keys = request_key_rotation(&controller, true).await.unwrap();
    assert_eq!((announced_keys.rotation_phase, announced_keys.current_key), (KeyPhase::Announced, 0));
    assert!(
        announced_keys.pending_peers.contains(&"load balancer lb1".to_owned()),
        "{:?}",
        announced_keys.pending_peers
    );
    controller.kill().await;

    let controller = test_directory.start_controller().await;
    assert_eq!(controller.fetch_status().await.keys.rotation_phase, KeyPhase::Announced);
    let mut load_balancer = controller.connect_load_balancer(controller.connect_control_client().await).await;
    let configuration = load_balancer.receive_configuration().await;
    assert_eq!(configuration.cookie_keys.keys[0], original_keys.keys[0]);
    assert_ne!(configuration.cookie_keys.keys[1], original_keys.keys[1]);
    assert_eq!(configuration.cookie_keys.current_key_index, original_keys.current_key_index);
    let state = v1::LoadBalancerState { configuration_generation: configuration.generation, ..Default::default() };
    let message = Some(load_balancer_message::Message::State(state));
    load_balancer.message_sender.send(v1::LoadBalancerMessage { message }).await.unwrap();
    let keys_after_switch = loop {
        let next_configuration = load_balancer.receive_configuration().await;
        if next_configuration.cookie_keys != configuration.cookie_keys {
            break next_configuration.cookie_keys;
        }
    };
    assert_eq!(
        (keys_after_switch.keys, keys_after_switch.current_key_index),
        (configuration.cookie_keys.keys, original_keys.current_key_index.other_index())
    );
    assert_eq!(controller.fetch_status().await.keys.rotation_phase, KeyPhase::Steady);
}
