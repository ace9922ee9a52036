//! The agent's daemon, which sends reports to the controller ten times a second and applies the controller's
//! configuration. The data plane forwards packets even if neither daemon nor controller runs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use coreward_daemon::ControllerConnection;
use coreward_daemon::metrics_endpoint::MetricsScrapeReceiver;
use coreward_dataplane::pins::PinDirectoryLock;
use coreward_metrics::snapshot::MetricsSnapshot;
use coreward_rpc::v1::control_client::ControlClient;
use coreward_tls::FleetRole;
use coreward_wire::v1::agent_message::Message;
use coreward_wire::v1::agent_update::Update;
use coreward_wire::{AgentConfiguration, SocketQuery, v1};
use futures_util::future::LocalBoxFuture;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, Interval, MissedTickBehavior};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

use crate::agent::Agent;
use crate::config::AgentConfig;
use crate::report_state::SentReportState;

/// Interval of maintenance runs, which check whether other programs have changed settings.
const AGENT_MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);
/// Runs the agent until SIGTERM or SIGINT. SIGHUP makes it read the `[dispatch]` section again. On exit, the BPF
/// programs remain pinned, and the NIC's RSS is restored. Fails if the configuration file is wrong, another agent uses
/// the pin directory, the interface does not exist, or the kernel rejects the programs.
pub fn run_agent(config: &Path) -> anyhow::Result<()> {
    let config_file = config;
    let config = AgentConfig::load(config_file)?;
    let _pin_lock = PinDirectoryLock::new(&config.pin_directory)?;
    let mut agent = Agent::start(config)?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let hangup_signal = signal(SignalKind::hangup())?;
        let scrape_receiver = MetricsScrapeReceiver::listen(agent.metrics_address())?;
        let background_tasks = BackgroundTaskTriggers {
            maintenance_timer: start_timer(AGENT_MAINTENANCE_INTERVAL),
            reload_signal_and_file: Some((hangup_signal, config_file.to_owned())),
            scrape_receiver,
        };
        let controller_connection = new_controller_connection(&agent)?;
        coreward_daemon::run_until_shutdown(async {
            match run_controller_sessions(&mut agent, controller_connection, background_tasks).await {}
        })
        .await
    })?;
    agent.shut_down()
}

/// Keeps the agent connected to a controller until the returned future is dropped. Fails if the agent's certificates
/// cannot be used.
/// The future is boxed, so that the compiler does not generate the agent's code again in each calling crate.
pub fn keep_agent_connected(agent: &mut Agent) -> LocalBoxFuture<'_, anyhow::Result<std::convert::Infallible>> {
    Box::pin(async {
        let controller_connection = new_controller_connection(agent)?;
        let background_tasks = BackgroundTaskTriggers {
            maintenance_timer: start_timer(AGENT_MAINTENANCE_INTERVAL),
            reload_signal_and_file: None,
            scrape_receiver: MetricsScrapeReceiver::default(),
        };
        Ok(run_controller_sessions(agent, controller_connection, background_tasks).await)
    })
}

fn new_controller_connection(agent: &Agent) -> anyhow::Result<ControllerConnection> {
    ControllerConnection::new(
        agent.controllers().clone(),
        agent.tls_credential_files(),
        &[FleetRole::Controller, FleetRole::Rack],
    )
}

/// Sources of the agent's background tasks, which also run while no controller is connected.
struct BackgroundTaskTriggers {
    maintenance_timer: Interval,
    /// Stream of SIGHUP signals, and the configuration file to read after each. `None` if the agent has no such file.
    reload_signal_and_file: Option<(Signal, PathBuf)>,
    scrape_receiver: MetricsScrapeReceiver,
}

enum BackgroundTask {
    MaintainAgent,
    ReloadConfig(PathBuf),
    AnswerMetricsScrape(oneshot::Sender<MetricsSnapshot>),
}

impl BackgroundTaskTriggers {
    /// Waits for the next background task. Cancel-safe: no task is lost if the future is dropped.
    async fn next_task(&mut self) -> BackgroundTask {
        let reload = async {
            match &mut self.reload_signal_and_file {
                Some((hangup_signal, path)) => {
                    hangup_signal.recv().await;
                    path.clone()
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.maintenance_timer.tick() => BackgroundTask::MaintainAgent,
            path = reload => BackgroundTask::ReloadConfig(path),
            scrape = self.scrape_receiver.receive_scrape() => BackgroundTask::AnswerMetricsScrape(scrape),
        }
    }

    /// Runs background tasks until `future` completes, and returns its result.
    async fn run_tasks_while_awaiting<T>(
        &mut self,
        agent: &mut Agent,
        connection: &ControllerConnection,
        future: impl Future<Output = T>,
    ) -> T {
        tokio::pin!(future);
        loop {
            tokio::select! {
                outcome = &mut future => return outcome,
                task = self.next_task() => task.perform(agent, connection),
            }
        }
    }
}

impl BackgroundTask {
    fn perform(self, agent: &mut Agent, connection: &ControllerConnection) {
        let config_file = match self {
            Self::MaintainAgent => return agent.run_maintenance(),
            Self::AnswerMetricsScrape(scrape) => {
                let mut snapshot = agent.metrics_snapshot(&connection.certificate_warnings());
                connection.add_metrics(&mut snapshot);
                // Sending fails only if the client has disconnected, so the error is ignored.
                return drop(scrape.send(snapshot));
            }
            Self::ReloadConfig(path) => path,
        };
        let reload_result = AgentConfig::load(&config_file)
            .map_err(anyhow::Error::from)
            .and_then(|config| agent.reload_config(&config_file, config));
        match reload_result {
            Ok(()) => tracing::info!(
                event = "dispatch-reloaded",
                file = %config_file.display(),
                "the agent has reloaded `[dispatch]`"
            ),
            Err(error) => tracing::warn!(
                event = "reload-failed",
                file = %config_file.display(),
                error = format!("{error:#}"),
                "the agent cannot reload `[dispatch]`: the previous settings stay in force"
            ),
        }
    }
}

/// Removes the BPF programs and restores all settings, which breaks stamped connections. Fails if the configuration
/// file is wrong, an agent with this file is running, or something cannot be removed.
pub fn detach_agent(config: &Path) -> anyhow::Result<()> {
    let config = AgentConfig::load(config)?;
    let _pin_lock = PinDirectoryLock::new(&config.pin_directory)?;
    Agent::start(config)?.detach_programs()
}

fn start_timer(period: Duration) -> Interval {
    let mut interval = tokio::time::interval_at(Instant::now() + period, period);
    // Missed ticks are skipped, because a report has absolute values and a late one replaces a missed one.
    interval.set_missed_tick_behavior(MissedTickBehavior::Skip);
    interval
}

async fn run_controller_sessions(
    agent: &mut Agent,
    mut connection: ControllerConnection,
    mut tasks: BackgroundTaskTriggers,
) -> std::convert::Infallible {
    loop {
        let error = run_controller_session(&mut connection, agent, &mut tasks).await.err();
        let retry_delay = connection.record_stream_end(error.as_ref());
        tasks.run_tasks_while_awaiting(agent, &connection, tokio::time::sleep(retry_delay)).await;
    }
}

async fn run_controller_session(
    connection: &mut ControllerConnection,
    agent: &mut Agent,
    tasks: &mut BackgroundTaskTriggers,
) -> anyhow::Result<()> {
    let mut stream = ControllerStream::open(connection, agent, tasks).await?;
    loop {
        tokio::select! {
            update = stream.update_stream.message() => {
                let Some(update) = update? else { return Ok(()) };
                connection.record_controller_message();
                stream.process_update(update, agent, connection);
            }
            _ = stream.report_timer.tick() => stream.send_report(agent, connection),
            task = tasks.next_task() => task.perform(agent, connection),
        }
    }
}

/// Open stream to a controller, and the state of the reports that were sent on it.
struct ControllerStream {
    message_sender: mpsc::Sender<v1::AgentMessage>,
    update_stream: Streaming<v1::AgentUpdate>,
    report_timer: Interval,
    report_state: SentReportState,
    /// Client that keeps the stream's connection open.
    _client: ControlClient<Channel>,
}

impl ControllerStream {
    async fn open(
        connection: &mut ControllerConnection,
        agent: &mut Agent,
        tasks: &mut BackgroundTaskTriggers,
    ) -> anyhow::Result<Self> {
        let grpc_channel = tasks.run_tasks_while_awaiting(agent, connection, connection.connect()).await?;
        let mut client = ControlClient::new(grpc_channel);
        let (message_sender, message_receiver) = mpsc::channel(4);
        let registration = v1::AgentRegistration {
            server: agent.server_name().to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        };
        message_sender.send(to_agent_message(Message::Registration(registration))).await?;
        let stream_request = client.agent(ReceiverStream::new(message_receiver));
        let stream_response = tasks.run_tasks_while_awaiting(agent, connection, stream_request).await?;
        let updates = connection.accept_stream(stream_response)?;
        agent.begin_controller_stream();
        tracing::info!(
            event = "controller-connected",
            controller = %connection.next_controller_address(),
            "the agent has opened its stream to the controller"
        );
        let report_timer = start_timer(agent.report_interval());
        Ok(Self {
            message_sender,
            update_stream: updates,
            report_timer,
            report_state: SentReportState::default(),
            _client: client,
        })
    }

    fn process_update(&mut self, update: v1::AgentUpdate, agent: &mut Agent, connection: &ControllerConnection) {
        match update.update {
            Some(Update::Configuration(configuration)) => apply_configuration(agent, configuration, connection),
            Some(Update::SocketQuery(query)) => {
                // If the channel is full, the answer is dropped, because the load balancer repeats its query.
                if let Some(answer) = answer_socket_query(agent, &query) {
                    let _ = self.message_sender.try_send(to_agent_message(Message::SocketAnswer(answer)));
                }
            }
            None => tracing::warn!(
                event = "update-unknown",
                controller = %connection.next_controller_address(),
                "the controller has sent an update of a kind unknown to this agent, which ignores it: upgrade the agent"
            ),
        }
        if self.report_timer.period() != agent.report_interval() {
            self.report_timer = start_timer(agent.report_interval());
        }
    }

    fn send_report(&mut self, agent: &mut Agent, connection: &ControllerConnection) {
        let Some(report) = agent.build_next_report(&self.report_state, &connection.certificate_warnings()) else {
            return;
        };
        let next_report_state = self.report_state.state_after_sending_report(&report);
        // If the channel is full, the report is dropped, because the next one is complete.
        if self.message_sender.try_send(to_agent_message(Message::Report(report))).is_ok() {
            self.report_state = next_report_state;
        }
    }
}

fn apply_configuration(agent: &mut Agent, configuration: v1::AgentConfiguration, connection: &ControllerConnection) {
    let generation = configuration.generation;
    match AgentConfiguration::from_message(configuration) {
        Ok((configuration, unusable_services)) => agent.apply_configuration(configuration, &unusable_services),
        Err(error) => {
            tracing::warn!(
                event = "configuration-rejected",
                controller = %connection.next_controller_address(),
                generation,
                %error,
                "the agent cannot decode the controller's configuration: the previous configuration stays in force"
            );
            agent.reject_configuration(generation, error.to_string());
        }
    }
}

fn answer_socket_query(agent: &Agent, query: &v1::SocketQuery) -> Option<v1::SocketAnswer> {
    let answer =
        SocketQuery::try_from(query).map_err(anyhow::Error::from).and_then(|query| agent.answer_socket_query(&query));
    match answer {
        Ok(answer) => Some(answer.into()),
        Err(error) => {
            tracing::warn!(
                event = "socket-query-failed",
                query = query.number,
                error = format!("{error:#}"),
                "the agent cannot check which of the connections in a load balancer's query are open: the load \
                 balancer repeats the query"
            );
            None
        }
    }
}

fn to_agent_message(message: Message) -> v1::AgentMessage {
    v1::AgentMessage { message: Some(message) }
}
