//! The daemon against a controller that records its messages.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use coreward_agent::agent::Agent;
use coreward_agent::daemon;
use coreward_agent::report_state::ReportState;
use coreward_model::ServerId;
use coreward_model::rss::{IndirectionTable, RssConfig, RssKey};
use coreward_model::tuple::{Protocol, ServiceAddress};
use coreward_rpc::v1::control_server::{Control, ControlServer};
use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::nginx::WORKER_PATH;
use coreward_testbed::rss_emulation::{read_registers, write_registers};
use coreward_testbed::{Testbed, missing_testbed_rights, skip_if};
use coreward_wire::v1::agent_message::Message;
use coreward_wire::{AgentConfiguration, PreviousServer, Report, SocketAnswer, SocketQuery, v1};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::BoxStream;
use tonic::{Request, Response, Status, Streaming};

use crate::support::{CORE_COUNT, busy_file, config, configuration, counter, get, server_id, testbed, wait_until};

type ReceivedMessages = Arc<Mutex<Vec<v1::AgentMessage>>>;

/// Fake controller that sends one configuration to each agent and records the agent's messages.
#[derive(Clone, Default)]
struct FakeController {
    received: ReceivedMessages,
    refuses_agents: bool,
    refused: Arc<AtomicUsize>,
}

#[tonic::async_trait]
impl Control for FakeController {
    async fn agent(
        &self,
        request: Request<Streaming<v1::AgentMessage>>,
    ) -> Result<Response<BoxStream<v1::AgentUpdate>>, Status> {
        if self.refuses_agents {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(Status::not_found("server s1 is not in the controller's file"));
        }
        let (sender, receiver) = mpsc::channel(1);
        let (received, mut messages) = (self.received.clone(), request.into_inner());
        let update = Some(v1::agent_update::Update::Configuration((&configuration()).into()));
        sender.try_send(Ok(v1::AgentUpdate { update })).expect("an empty channel");
        tokio::spawn(async move {
            while let Ok(Some(message)) = messages.message().await {
                received.lock().unwrap().push(message);
            }
            drop(sender);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// Runs the agent until the controller has received enough, or for a minute. Returns the received messages.
fn run_agent_until(
    agent: &mut Agent,
    listener: FakeController,
    is_enough: impl Fn(&FakeController) -> bool,
) -> anyhow::Result<Vec<v1::AgentMessage>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let address = agent.controllers().addresses()[0];
    let controller = tonic::transport::Server::builder().add_service(ControlServer::new(listener.clone()));
    let enough = async {
        let end = Instant::now() + Duration::from_secs(60);
        while !is_enough(&listener) && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    runtime.block_on(async {
        tokio::select! {
            never = daemon::serve(agent) => match never? {},
            outcome = controller.serve(address) => anyhow::Ok(outcome?),
            () = enough => Ok(()),
        }
    })?;
    Ok(std::mem::take(&mut listener.received.lock().unwrap()))
}

/// Returns whether the controller has received at least `count` reports, of which `detailed` have details.
fn has_reports(listener: &FakeController, count: usize, detailed: usize) -> bool {
    let reports = reports(&listener.received.lock().unwrap());
    reports.len() >= count && reports.iter().filter(|report| report.details.is_some()).count() >= detailed
}

fn reports(received: &[v1::AgentMessage]) -> Vec<Report> {
    let report = |message: &v1::AgentMessage| match &message.message {
        Some(Message::Report(report)) => Some(Report::try_from(report.clone()).expect("a report that can be read")),
        _ => None,
    };
    received.iter().filter_map(report).collect()
}

fn sysctl() -> String {
    std::fs::read_to_string("/proc/sys/net/ipv4/tcp_timestamps").unwrap().trim().to_owned()
}

fn managed() -> RssConfig {
    let indirection_table = IndirectionTable::balanced(server_id().get().into(), 128, CORE_COUNT).unwrap();
    RssConfig { key: RssKey::microsoft(), indirection_table }
}

#[test]
fn registers_reports_and_applies_configurations() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = testbed("tdaemon")?;
    testbed.server(1)?.within(|| {
        let original = read_registers(&testbed.emulated_rss_path(1))?;
        assert_eq!(sysctl(), "1");
        let mut agent = Agent::start(config(&testbed))?;
        assert_eq!(sysctl(), "1", "nothing is stamped yet");
        std::fs::write(busy_file(&testbed), [5u64, 6, 7, 8].map(u64::to_le_bytes).concat())?;
        let began = Instant::now();
        let received = run_agent_until(&mut agent, FakeController::default(), |listener| has_reports(listener, 30, 3))?;
        let elapsed = began.elapsed();
        assert_eq!(sysctl(), "2");

        match &received[0].message {
            Some(Message::Registration(registration)) => assert_eq!(registration.server, "s1"),
            other => panic!("{other:?} instead of a registration"),
        }
        // 50 ms between two, after 100 ms for the first.
        let reports = reports(&received);
        let at_most = 2 + elapsed.as_millis() as usize / 50;
        assert!((30..=at_most).contains(&reports.len()), "{} reports in {elapsed:?}", reports.len());
        for (position, report) in reports.iter().enumerate() {
            assert_eq!(report.readings.sequence, position as u64 + 1);
            assert_eq!(report.readings.busy_ns, [5, 6, 7, 8]);
            assert_eq!(report.time_to_live, Duration::from_millis(500));
        }
        // RSS is sent once per generation, as it was set.
        let printed: Vec<_> =
            reports.iter().filter_map(|report| Some((report.rss_generation, report.rss.clone()?))).collect();
        assert!(!printed.is_empty() && printed.windows(2).all(|pair| pair[0].0 < pair[1].0), "{printed:?}");
        let (_, last) = printed.last().expect("not empty");
        assert_eq!((last.source.as_str(), &last.rss), ("testbed emulation", &Some(managed())));
        assert_eq!(read_registers(&testbed.emulated_rss_path(1))?, managed());
        // Details at the beginning, once a second and when warnings change.
        let details: Vec<_> = reports.iter().filter_map(|report| report.details.as_ref()).collect();
        let at_most = 8 + elapsed.as_secs() as usize;
        assert!((3..=at_most).contains(&details.len()), "{} of {} have details", details.len(), reports.len());
        let last = details.last().expect("not empty");
        assert!(last.warnings.iter().any(|warning| warning.contains("no process listens")), "{:?}", last.warnings);
        assert!(last.counters.iter().any(|(name, _)| name == "stamped"), "{:?}", last.counters);
        assert!(last.counters.iter().any(|(name, _)| name == "steered"), "{:?}", last.counters);

        check_shutdown(&testbed, agent, &original)
    })
}

/// Checks that a shutdown restores RSS but keeps stamping, and that an agent knows the original RSS after a kill.
fn check_shutdown(testbed: &Testbed, agent: Agent, original: &RssConfig) -> anyhow::Result<()> {
    agent.leave()?;
    assert_eq!(&read_registers(&testbed.emulated_rss_path(1))?, original);
    assert_eq!(sysctl(), "2", "connections are still stamped");
    let mut agent = Agent::start(config(testbed))?;
    agent.configure(configuration(), &[]);
    assert_eq!(read_registers(&testbed.emulated_rss_path(1))?, managed());
    // Killed: nothing is put back.
    drop(agent);
    assert_eq!(read_registers(&testbed.emulated_rss_path(1))?, managed());
    // Another program sets another table meanwhile.
    write_registers(&testbed.emulated_rss_path(1), &RssConfig { key: RssKey::microsoft(), ..original.clone() })?;
    let mut agent = Agent::start(config(testbed))?;
    agent.configure(configuration(), &[]);
    assert_eq!(read_registers(&testbed.emulated_rss_path(1))?, managed());
    agent.detach()?;
    assert_eq!(&read_registers(&testbed.emulated_rss_path(1))?, original);
    assert_eq!(sysctl(), "1");
    assert!(!config(testbed).pin_directory.exists());
    Ok(())
}

#[test]
fn request_to_absent_controller_is_retried() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = testbed("trefused")?;
    testbed.server(1)?.within(|| {
        let mut agent = Agent::start(config(&testbed))?;
        let refusing = FakeController { refuses_agents: true, ..FakeController::default() };
        let is_refused = |listener: &FakeController| listener.refused.load(Ordering::Relaxed) > 0;
        assert!(run_agent_until(&mut agent, refusing.clone(), is_refused)?.is_empty());
        assert!(is_refused(&refusing));
        // No controller at all, then one that accepts it.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let served = tokio::time::timeout(Duration::from_millis(500), daemon::serve(&mut agent)).await;
            assert!(served.is_err(), "it ended: {served:?}");
        });
        let received = run_agent_until(&mut agent, FakeController::default(), |listener| has_reports(listener, 6, 0))?;
        assert!(reports(&received).len() > 5);
        agent.detach()
    })
}

#[test]
fn first_report_waits_for_the_load() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = testbed("tnoload")?;
    testbed.server(1)?.within(|| {
        std::fs::remove_file(busy_file(&testbed))?;
        let mut agent = Agent::start(config(&testbed))?;
        assert_eq!(agent.report(&ReportState::default(), &[]), None);
        std::fs::write(busy_file(&testbed), [1u64, 2].map(u64::to_le_bytes).concat())?;
        let report = agent.report(&ReportState::default(), &[]);
        assert_eq!(report.map(|report| report.core_busy_ns), Some(vec![1, 2]));
        agent.detach()
    })
}

#[test]
fn missing_interface_is_named() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = testbed("tnodevice")?;
    let config = coreward_agent::config::Config { interface: "eth9".to_owned(), ..config(&testbed) };
    let error = testbed.server(1)?.within(|| Ok(Agent::start(config).err()))?.expect("an error");
    let text = format!("{error:#}");
    assert!(text.starts_with("interface eth9: expected a device of this network namespace"), "{text}");
    Ok(())
}

/// SYNs first arrive on predicted queues; then the agent reads the registers of another server's NIC.
#[test]
fn rss_table_not_in_force_is_reported() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let mut testbed = testbed("tforce")?;
    testbed.add_server()?;
    let nginx = testbed.start_nginx(1)?;
    for (shown, in_force, first_port) in [(1, true, 20_000), (2, false, 30_000)] {
        let rss = coreward_agent::config::Rss::Testbed { path: testbed.emulated_rss_path(shown), entries: 128 };
        let config = coreward_agent::config::Config { rss, manage_rss: false, ..config(&testbed) };
        testbed.server(1)?.within(|| {
            let mut agent = Agent::start(config)?;
            agent.configure(configuration(), &[]);
            for port in first_port..first_port + 64 {
                get(&testbed, WORKER_PATH, port)?;
            }
            agent.maintain();
            let (matched, mismatched) = (counter(&mut agent, "rss_matched"), counter(&mut agent, "rss_mismatched"));
            assert_eq!((matched + mismatched, mismatched == 0), (64, in_force), "{matched} of 64 matched");
            let warned = agent.warnings().iter().any(|warning| warning.contains("is not in force"));
            assert_eq!(warned, !in_force, "{:?}", agent.warnings());
            agent.detach()
        })?;
    }
    drop(nginx);
    Ok(())
}

#[test]
fn socket_query_returns_open_sockets() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = testbed("tchain")?;
    // The client replaces a server that exists, an unused address one that does not.
    let there = testbed.client_address(0);
    let missing = testbed.client_address(200);
    testbed.server(1)?.within(|| {
        let mut agent = Agent::start(config(&testbed))?;
        let server_before = |id, address| PreviousServer { id: ServerId::try_from(id).unwrap(), address };
        let previous_servers = vec![server_before(1, there), server_before(2, missing)];
        agent.configure(AgentConfiguration { previous_servers, ..configuration() }, &[]);
        wait_until("one of two servers is found", || {
            agent.maintain();
            let missing = agent.warnings().iter().find(|warning| warning.starts_with("no MAC address of"));
            Ok(missing.is_some_and(|warning| !warning.contains(&format!("{there}"))))
        })?;
        let both = agent.warnings().iter().any(|warning| warning.contains(&missing.to_string()));
        assert!(both, "{:?}", agent.warnings());
        agent.configure(AgentConfiguration { previous_servers: vec![], ..configuration() }, &[]);
        assert!(!agent.warnings().iter().any(|warning| warning.contains("MAC")), "{:?}", agent.warnings());

        let listener = TcpListener::bind(SERVICE_ADDRESS)?;
        let client = TcpStream::connect(SERVICE_ADDRESS)?;
        let open = client.local_addr()?;
        let nobody = SocketAddr::new(open.ip(), open.port() ^ 1);
        let service = configuration().services[0].address;
        let query = SocketQuery {
            number: 7,
            load_balancer_session: 8,
            server: server_id(),
            service,
            clients: vec![nobody, open],
        };
        assert_eq!(
            agent.answer_socket_query(&query)?,
            SocketAnswer { number: 7, load_balancer_session: 8, is_open: vec![false, true] }
        );
        let udp = ServiceAddress { protocol: Protocol::Udp, ..service };
        assert!(agent.answer_socket_query(&SocketQuery { service: udp, ..query }).is_err());
        drop(listener);
        agent.detach()
    })
}
