//! Tests the daemon with a fake controller that records its messages.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use coreward_agent::agent::Agent;
use coreward_agent::daemon;
use coreward_agent::report_state::SentReportState;
use coreward_model::ServerId;
use coreward_model::rss::{IndirectionTable, RssConfig, RssKey};
use coreward_model::tuple::{ServiceAddress, TransportProtocol};
use coreward_rpc::v1::control_server::{Control, ControlServer};
use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::nginx::WORKER_IDENTITY_PATH;
use coreward_testbed::rss_emulation::{read_rss_registers, write_rss_registers};
use coreward_testbed::{Testbed, find_missing_testbed_rights, skip_if};
use coreward_wire::v1::agent_message::Message;
use coreward_wire::{AgentConfiguration, AgentReport, PreviousServer, SocketAnswer, SocketQuery, v1};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::BoxStream;
use tonic::{Request, Response, Status, Streaming};

use crate::support::{
    CORE_COUNT, agent_config, busy_time_file_path, create_testbed, http_get, reported_counter,
    test_agent_configuration, test_server_id, wait_until,
};

type ReceivedAgentMessages = Arc<Mutex<Vec<v1::AgentMessage>>>;

/// Fake controller. It sends one configuration to each agent, and records the messages from the agents.
#[derive(Clone, Default)]
struct FakeController {
    received_messages: ReceivedAgentMessages,
    rejects_agents: bool,
    rejected_request_count: Arc<AtomicUsize>,
}

#[tonic::async_trait]
impl Control for FakeController {
    async fn agent(
        &self,
        request: Request<Streaming<v1::AgentMessage>>,
    ) -> Result<Response<BoxStream<v1::AgentUpdate>>, Status> {
        if self.rejects_agents {
            self.rejected_request_count.fetch_add(1, Ordering::Relaxed);
            return Err(Status::not_found("server s1 is not in the controller's file"));
        }
        let (sender, receiver) = mpsc::channel(1);
        let (received_messages, mut message_stream) = (self.received_messages.clone(), request.into_inner());
        let update = Some(v1::agent_update::Update::Configuration((&test_agent_configuration()).into()));
        sender.try_send(Ok(v1::AgentUpdate { update })).expect("an empty channel");
        tokio::spawn(async move {
            while let Ok(Some(message)) = message_stream.message().await {
                received_messages.lock().unwrap().push(message);
            }
            drop(sender);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// Runs the agent until `is_enough` returns true, at most for a minute. Returns the messages that the controller
/// received.
fn run_agent_until(
    agent: &mut Agent,
    fake_controller: FakeController,
    is_enough: impl Fn(&FakeController) -> bool,
) -> anyhow::Result<Vec<v1::AgentMessage>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let controller_address = agent.controllers().addresses()[0];
    let controller_server =
        tonic::transport::Server::builder().add_service(ControlServer::new(fake_controller.clone()));
    let wait_for_messages = async {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_enough(&fake_controller) && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    runtime.block_on(async {
        tokio::select! {
            never = daemon::keep_agent_connected(agent) => match never? {},
            outcome = controller_server.serve(controller_address) => anyhow::Ok(outcome?),
            () = wait_for_messages => Ok(()),
        }
    })?;
    Ok(std::mem::take(&mut fake_controller.received_messages.lock().unwrap()))
}

/// Returns whether the controller has received the given minimum numbers of reports and of reports with details.
fn has_received_reports(fake_controller: &FakeController, min_report_count: usize, min_detailed_count: usize) -> bool {
    let reports = decode_reports(&fake_controller.received_messages.lock().unwrap());
    reports.len() >= min_report_count
        && reports.iter().filter(|report| report.details.is_some()).count() >= min_detailed_count
}

fn decode_reports(received_messages: &[v1::AgentMessage]) -> Vec<AgentReport> {
    let to_report = |message: &v1::AgentMessage| match &message.message {
        Some(Message::Report(report)) => {
            Some(AgentReport::try_from(report.clone()).expect("a report that can be read"))
        }
        _ => None,
    };
    received_messages.iter().filter_map(to_report).collect()
}

fn read_tcp_timestamps_sysctl() -> String {
    std::fs::read_to_string("/proc/sys/net/ipv4/tcp_timestamps").unwrap().trim().to_owned()
}

fn expected_managed_rss() -> RssConfig {
    let indirection_table =
        IndirectionTable::draw_balanced_entries(test_server_id().get().into(), 128, CORE_COUNT).unwrap();
    RssConfig { key: RssKey::microsoft_verification_key(), indirection_table }
}

fn expect_reports_in_order(reports: &[AgentReport], elapsed: Duration) {
    // The first interval is 100 ms, and later ones are 50 ms.
    let max_report_count = 2 + elapsed.as_millis() as usize / 50;
    assert!((30..=max_report_count).contains(&reports.len()), "{} reports in {elapsed:?}", reports.len());
    for (position, report) in reports.iter().enumerate() {
        assert_eq!(report.readings.report_sequence_number, position as u64 + 1);
        assert_eq!(report.readings.busy_ns_by_core, [5, 6, 7, 8]);
        assert_eq!(report.time_to_live, Duration::from_millis(500));
    }
}

fn expect_details_in_reports(reports: &[AgentReport], elapsed: Duration) {
    // Details are sent at the beginning, once a second, and when warnings change.
    let details: Vec<_> = reports.iter().filter_map(|report| report.details.as_ref()).collect();
    let max_details_count = 8 + elapsed.as_secs() as usize;
    assert!((3..=max_details_count).contains(&details.len()), "{} of {} have details", details.len(), reports.len());
    let last_details = details.last().expect("not empty");
    assert!(
        last_details.warnings.iter().any(|warning| warning.contains("no process listens")),
        "{:?}",
        last_details.warnings
    );
    assert!(last_details.counters.iter().any(|(name, _)| name == "stamped"), "{:?}", last_details.counters);
    assert!(last_details.counters.iter().any(|(name, _)| name == "steered"), "{:?}", last_details.counters);
}

#[test]
fn agent_registers_sends_reports_and_applies_configurations() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = create_testbed("tdaemon")?;
    testbed.server(1)?.run_within(|| {
        let original_rss = read_rss_registers(&testbed.emulated_rss_pin_path(1))?;
        assert_eq!(read_tcp_timestamps_sysctl(), "1");
        let mut agent = Agent::start(agent_config(&testbed))?;
        assert_eq!(read_tcp_timestamps_sysctl(), "1", "nothing is stamped yet");
        std::fs::write(busy_time_file_path(&testbed), [5u64, 6, 7, 8].map(u64::to_le_bytes).concat())?;
        let start_time = Instant::now();
        let received_messages =
            run_agent_until(&mut agent, FakeController::default(), |listener| has_received_reports(listener, 30, 3))?;
        let elapsed = start_time.elapsed();
        assert_eq!(read_tcp_timestamps_sysctl(), "2");

        match &received_messages[0].message {
            Some(Message::Registration(registration)) => assert_eq!(registration.server, "s1"),
            other => panic!("{other:?} instead of a registration"),
        }
        let reports = decode_reports(&received_messages);
        expect_reports_in_order(&reports, elapsed);
        // RSS is sent once per generation, with the settings at that time.
        let reported_rss: Vec<_> =
            reports.iter().filter_map(|report| Some((report.rss_generation, report.rss.clone()?))).collect();
        assert!(
            !reported_rss.is_empty()
                && reported_rss.windows(2).all(|adjacent_reports| adjacent_reports[0].0 < adjacent_reports[1].0),
            "{reported_rss:?}"
        );
        let (_, last_rss) = reported_rss.last().expect("not empty");
        assert_eq!((last_rss.source.as_str(), &last_rss.rss), ("testbed emulation", &Some(expected_managed_rss())));
        assert_eq!(read_rss_registers(&testbed.emulated_rss_pin_path(1))?, expected_managed_rss());
        expect_details_in_reports(&reports, elapsed);

        check_shutdown_and_restart(&testbed, agent, &original_rss)
    })
}

/// Checks that a shutdown restores RSS but continues stamping. Also checks that the successor of a killed agent
/// restores the original RSS.
fn check_shutdown_and_restart(testbed: &Testbed, agent: Agent, original_rss: &RssConfig) -> anyhow::Result<()> {
    agent.shut_down()?;
    assert_eq!(&read_rss_registers(&testbed.emulated_rss_pin_path(1))?, original_rss);
    assert_eq!(read_tcp_timestamps_sysctl(), "2", "connections are still stamped");
    let mut agent = Agent::start(agent_config(testbed))?;
    agent.apply_configuration(test_agent_configuration(), &[]);
    assert_eq!(read_rss_registers(&testbed.emulated_rss_pin_path(1))?, expected_managed_rss());
    // If the agent is killed, nothing is restored.
    drop(agent);
    assert_eq!(read_rss_registers(&testbed.emulated_rss_pin_path(1))?, expected_managed_rss());
    // Meanwhile, another program changes the table.
    write_rss_registers(
        &testbed.emulated_rss_pin_path(1),
        &RssConfig { key: RssKey::microsoft_verification_key(), ..original_rss.clone() },
    )?;
    let mut agent = Agent::start(agent_config(testbed))?;
    agent.apply_configuration(test_agent_configuration(), &[]);
    assert_eq!(read_rss_registers(&testbed.emulated_rss_pin_path(1))?, expected_managed_rss());
    agent.detach_programs()?;
    assert_eq!(&read_rss_registers(&testbed.emulated_rss_pin_path(1))?, original_rss);
    assert_eq!(read_tcp_timestamps_sysctl(), "1");
    assert!(!agent_config(testbed).pin_directory.exists());
    Ok(())
}

#[test]
fn agent_retries_while_controller_rejects_it_or_is_absent() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = create_testbed("trefused")?;
    testbed.server(1)?.run_within(|| {
        let mut agent = Agent::start(agent_config(&testbed))?;
        let rejecting_controller = FakeController { rejects_agents: true, ..FakeController::default() };
        let has_rejected_agent =
            |listener: &FakeController| listener.rejected_request_count.load(Ordering::Relaxed) > 0;
        assert!(run_agent_until(&mut agent, rejecting_controller.clone(), has_rejected_agent)?.is_empty());
        assert!(has_rejected_agent(&rejecting_controller));
        // At first no controller is reachable, and then one accepts the agent.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let serve_result =
                tokio::time::timeout(Duration::from_millis(500), daemon::keep_agent_connected(&mut agent)).await;
            assert!(serve_result.is_err(), "it ended: {serve_result:?}");
        });
        let received_messages =
            run_agent_until(&mut agent, FakeController::default(), |listener| has_received_reports(listener, 6, 0))?;
        assert!(decode_reports(&received_messages).len() > 5);
        agent.detach_programs()
    })
}

#[test]
fn agent_sends_no_report_until_its_load_is_known() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = create_testbed("tnoload")?;
    testbed.server(1)?.run_within(|| {
        std::fs::remove_file(busy_time_file_path(&testbed))?;
        let mut agent = Agent::start(agent_config(&testbed))?;
        assert_eq!(agent.build_next_report(&SentReportState::default(), &[]), None);
        std::fs::write(busy_time_file_path(&testbed), [1u64, 2].map(u64::to_le_bytes).concat())?;
        let first_report = agent.build_next_report(&SentReportState::default(), &[]);
        assert_eq!(first_report.map(|report| report.core_busy_ns), Some(vec![1, 2]));
        agent.detach_programs()
    })
}

#[test]
fn error_names_the_missing_interface() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = create_testbed("tnodevice")?;
    let config = coreward_agent::config::AgentConfig { interface: "eth9".to_owned(), ..agent_config(&testbed) };
    let error = testbed.server(1)?.run_within(|| Ok(Agent::start(config).err()))?.expect("an error");
    let text = format!("{error:#}");
    assert!(text.starts_with("interface eth9: expected a device of this network namespace"), "{text}");
    Ok(())
}

/// Checks the warning about a table that is not in force. SYNs arrive on the predicted queues until the agent reads the
/// registers of another server's NIC.
#[test]
fn rss_table_that_is_not_in_force_causes_warning() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let mut testbed = create_testbed("tforce")?;
    testbed.add_server()?;
    let nginx = testbed.start_nginx(1)?;
    for (shown_server, is_in_force, first_port) in [(1, true, 20_000), (2, false, 30_000)] {
        let emulated_rss = coreward_agent::config::RssSourceConfig::Testbed {
            path: testbed.emulated_rss_pin_path(shown_server),
            entries: 128,
        };
        let config =
            coreward_agent::config::AgentConfig { rss: emulated_rss, manage_rss: false, ..agent_config(&testbed) };
        testbed.server(1)?.run_within(|| {
            let mut agent = Agent::start(config)?;
            agent.apply_configuration(test_agent_configuration(), &[]);
            for port in first_port..first_port + 64 {
                http_get(&testbed, WORKER_IDENTITY_PATH, port)?;
            }
            agent.run_maintenance();
            let (matched_count, mismatched_count) =
                (reported_counter(&mut agent, "rss_matched"), reported_counter(&mut agent, "rss_mismatched"));
            assert_eq!(
                (matched_count + mismatched_count, mismatched_count == 0),
                (64, is_in_force),
                "{matched_count} of 64 matched"
            );
            let has_warning = agent.maintenance_warnings().iter().any(|warning| warning.contains("is not in force"));
            assert_eq!(has_warning, !is_in_force, "{:?}", agent.maintenance_warnings());
            agent.detach_programs()
        })?;
    }
    drop(nginx);
    Ok(())
}

#[test]
fn unknown_mac_address_of_previous_server_causes_warning() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = create_testbed("tchain")?;
    // The client has the address of a server that exists, and an unused address that of one that does not.
    let reachable_address = testbed.client_address(0);
    let absent_address = testbed.client_address(200);
    testbed.server(1)?.run_within(|| {
        let mut agent = Agent::start(agent_config(&testbed))?;
        let build_previous_server = |id, address| PreviousServer { id: ServerId::try_from(id).unwrap(), address };
        let previous_servers =
            vec![build_previous_server(1, reachable_address), build_previous_server(2, absent_address)];
        agent.apply_configuration(AgentConfiguration { previous_servers, ..test_agent_configuration() }, &[]);
        wait_until("one of two servers is found", || {
            agent.run_maintenance();
            let mac_address_warning =
                agent.maintenance_warnings().iter().find(|warning| warning.starts_with("no MAC address of"));
            Ok(mac_address_warning.is_some_and(|warning| !warning.contains(&format!("{reachable_address}"))))
        })?;
        let names_both_addresses =
            agent.maintenance_warnings().iter().any(|warning| warning.contains(&absent_address.to_string()));
        assert!(names_both_addresses, "{:?}", agent.maintenance_warnings());
        agent.apply_configuration(AgentConfiguration { previous_servers: vec![], ..test_agent_configuration() }, &[]);
        assert!(
            !agent.maintenance_warnings().iter().any(|warning| warning.contains("MAC")),
            "{:?}",
            agent.maintenance_warnings()
        );
        agent.detach_programs()
    })
}

#[test]
fn answer_to_socket_query_lists_connections_with_open_sockets() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = create_testbed("tquery")?;
    testbed.server(1)?.run_within(|| {
        let mut agent = Agent::start(agent_config(&testbed))?;
        agent.apply_configuration(test_agent_configuration(), &[]);
        let listener = TcpListener::bind(SERVICE_ADDRESS)?;
        let client = TcpStream::connect(SERVICE_ADDRESS)?;
        let open_client = client.local_addr()?;
        let unknown_client = SocketAddr::new(open_client.ip(), open_client.port() ^ 1);
        let service_address = test_agent_configuration().services[0].address;
        let query = SocketQuery {
            query_number: 7,
            load_balancer_session: 8,
            server: test_server_id(),
            service: service_address,
            clients: vec![unknown_client, open_client],
        };
        assert_eq!(
            agent.answer_socket_query(&query)?,
            SocketAnswer { query_number: 7, load_balancer_session: 8, socket_exists_by_client: vec![false, true] }
        );
        let udp_service_address = ServiceAddress { protocol: TransportProtocol::Udp, ..service_address };
        assert!(agent.answer_socket_query(&SocketQuery { service: udp_service_address, ..query }).is_err());
        drop(listener);
        agent.detach_programs()
    })
}
