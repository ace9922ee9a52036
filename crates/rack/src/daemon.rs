//! The rack controller's daemon, which applies updates, and serves agents while a controller is connected.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use coreward_daemon::ControllerConnection;
use coreward_daemon::metrics_endpoint;
use coreward_listener::message_size::SizeLimitedControlServer;
use coreward_listener::security::ListenerSecurity;
use coreward_metrics::message_metrics;
use coreward_metrics::metric_declarations::MetricKind::Gauge;
use coreward_metrics::metric_declarations::{Component, MetricFamily, declare_family};
use coreward_metrics::metrics;
use coreward_rpc::v1::control_client::ControlClient;
use coreward_tls::{AcceptorLimits, FleetRole};
use coreward_wire::v1;
use futures_util::future::BoxFuture;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;

use crate::agents::{RackGrpcService, SharedRackState};
use crate::config::RackControllerConfig;
use crate::reducer::ReportReducer;

metrics! {
    RACK_CONTROLLER_CONNECTED: MetricFamily<0> = declare_family(
        Gauge, "coreward_rack_controller_connected", &[], &[Component::Rack],
        "1: the rack is connected to a controller",
    );
    RACK_AGENTS: MetricFamily<0> = declare_family(
        Gauge, "coreward_rack_agents", &[], &[Component::Rack],
        "Agents that are connected",
    );
}

/// Maximum number of queued messages to the controller. If the queue is full, agents wait and summaries are dropped.
const CONTROLLER_MESSAGE_QUEUE_LENGTH: usize = 64;

/// Runs the rack controller until SIGTERM or SIGINT. Fails if the configuration file is invalid or the listening
/// address cannot be bound.
pub fn run_rack_controller(config: &Path) -> anyhow::Result<()> {
    coreward_daemon::raise_open_file_limit();
    let config_path = config;
    let config = RackControllerConfig::load(config_path)?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let hangup_signal = signal(SignalKind::hangup())?;
        let rack = RackController::bind(config.clone()).await?;
        tracing::info!(
            event = "listening",
            address = %rack.listen_address(),
            rack = config.name,
            "the rack controller listens for agents at `address`"
        );
        let security = rack.security.clone();
        coreward_daemon::run_until_shutdown(async {
            tokio::select! {
                outcome = rack.serve() => outcome,
                never = reload_revoked_certificates_on_sighup(hangup_signal, config_path, config, &security) => {
                    match never {}
                },
            }
        })
        .await
    })
}

/// Reloads the revoked certificates from the configuration file at each SIGHUP. Changes of other keys in the file need
/// a restart, which disconnects agents for a second.
async fn reload_revoked_certificates_on_sighup(
    mut hangup: Signal,
    path: &Path,
    initial_config: RackControllerConfig,
    security: &ListenerSecurity,
) -> Infallible {
    loop {
        hangup.recv().await;
        match RackControllerConfig::load(path) {
            Ok(config) => {
                security.revocation_list.replace_fingerprints(config.revoked_certificates.iter().copied());
                let is_unchanged = RackControllerConfig {
                    revoked_certificates: initial_config.revoked_certificates.clone(),
                    ..config
                } == initial_config;
                let file = path.display();
                match is_unchanged {
                    true => tracing::info!(
                        event = "revocations-reloaded",
                        %file,
                        "the rack controller has reloaded `revoked_certificates`"
                    ),
                    false => tracing::warn!(
                        event = "restart-required",
                        %file,
                        "the rack controller reloads only `revoked_certificates`: other changed keys need a restart"
                    ),
                }
            }
            Err(mistakes) => coreward_daemon::log_reload_failure(path, &mistakes),
        }
    }
}

pub struct RackController {
    config: RackControllerConfig,
    listener: TcpListener,
    address: SocketAddr,
    security: Arc<ListenerSecurity>,
}

impl RackController {
    /// Opens the listening socket. Agents are rejected until a controller is connected. The future is boxed, so that
    /// calling crates do not compile the server's code again.
    pub fn bind(config: RackControllerConfig) -> BoxFuture<'static, anyhow::Result<Self>> {
        Box::pin(Self::open(config))
    }

    async fn open(config: RackControllerConfig) -> anyhow::Result<Self> {
        let security = Arc::new(ListenerSecurity::from_config(&config.listener_config())?);
        let bind_error_context = "expected a free port and an address of this host (`listen`)";
        let listener = TcpListener::bind(config.listen)
            .await
            .with_context(|| format!("cannot listen on {}: {bind_error_context}", config.listen))?;
        let address = listener.local_addr()?;
        Ok(Self { config, listener, address, security })
    }

    /// Returns the address at which the rack listens. If port 0 was configured, the address has the port that the
    /// system chose.
    pub fn listen_address(&self) -> SocketAddr {
        self.address
    }

    /// Serves agents until the listening socket fails.
    pub fn serve(self) -> BoxFuture<'static, anyhow::Result<()>> {
        Box::pin(self.serve_agents())
    }

    async fn serve_agents(self) -> anyhow::Result<()> {
        let rack_state = Arc::new(SharedRackState::default());
        let (metrics_rack_state, metrics_security) = (rack_state.clone(), self.security.clone());
        metrics_endpoint::serve_metrics(
            self.config.metrics,
            || (),
            move || {
                let connection_status = metrics_rack_state.rack_connection_status();
                let mut snapshot = message_metrics::base_metrics_snapshot(Component::Rack);
                snapshot.add_value(
                    &RACK_CONTROLLER_CONNECTED,
                    [],
                    f64::from(u8::from(connection_status.is_controller_connected)),
                );
                snapshot.add_value(&RACK_AGENTS, [], connection_status.agent_count as f64);
                metrics_security.add_metrics(&mut snapshot);
                snapshot
            },
        )?;
        let grpc_server = coreward_listener::grpc_server_builder()
            .add_service(SizeLimitedControlServer::new(RackGrpcService {
                rack_state: rack_state.clone(),
                security: self.security.clone(),
            }))
            .serve_with_incoming(
                self.security
                    .grpc_acceptor(&[FleetRole::Agent], AcceptorLimits::default())
                    .accepted_connections(self.listener),
            );
        tokio::select! {
            outcome = grpc_server => outcome.context("the rack's socket failed"),
            never = run_controller_sessions(&self.config, &rack_state) => match never? {},
            never = self.security.reload_changed_certificates() => match never {},
        }
    }
}

async fn run_controller_sessions(
    config: &RackControllerConfig,
    rack_state: &SharedRackState,
) -> anyhow::Result<Infallible> {
    let mut connection =
        ControllerConnection::new(config.controllers.clone(), config.tls.as_ref(), &[FleetRole::Controller])?;
    loop {
        let session_result = run_controller_session(config, &mut connection, rack_state).await;
        rack_state.on_controller_disconnected();
        let retry_pause = connection.record_stream_end(session_result.err().as_ref());
        tokio::time::sleep(retry_pause).await;
    }
}

/// Records and logs that the controller has accepted this rack. Called for each of the controller's updates, the first
/// of which shows the acceptance. Later calls have no effect.
fn record_acceptance_by_controller(
    config: &RackControllerConfig,
    connection: &ControllerConnection,
    rack_state: &SharedRackState,
    message_sender: &mpsc::Sender<v1::RackMessage>,
) {
    if rack_state.report_interval().is_some() || rack_state.rack_connection_status().is_controller_connected {
        return;
    }
    tracing::info!(
        event = "controller-connected",
        controller = %connection.next_controller_address(),
        rack = config.name,
        "the controller has accepted this rack controller"
    );
    let reducer = ReportReducer::new(config.detail_interval, config.candidates);
    rack_state.on_controller_connected(message_sender.clone(), reducer);
}

async fn run_controller_session(
    config: &RackControllerConfig,
    connection: &mut ControllerConnection,
    rack_state: &SharedRackState,
) -> anyhow::Result<()> {
    let mut client = ControlClient::new(connection.connect().await?);
    let (message_sender, message_receiver) = mpsc::channel(CONTROLLER_MESSAGE_QUEUE_LENGTH);
    let registration =
        v1::RackRegistration { name: config.name.clone(), version: env!("CARGO_PKG_VERSION").to_owned() };
    message_sender.send(v1::RackMessage { registration: Some(registration), ..Default::default() }).await?;
    let stream_response = client.rack(ReceiverStream::new(message_receiver)).await?;
    let mut updates = connection.accept_stream(stream_response)?;
    let mut next_summaries_at = Instant::now();
    loop {
        tokio::select! {
            update = updates.message() => {
                let Some(update) = update? else { return Ok(()) };
                connection.record_controller_message();
                record_acceptance_by_controller(config, connection, rack_state, &message_sender);
                rack_state.apply_update(update)?;
            }
            () = tokio::time::sleep_until(next_summaries_at) => {
                let summary_interval = rack_state.report_interval().unwrap_or(std::time::Duration::from_millis(10));
                next_summaries_at = (next_summaries_at + summary_interval).max(Instant::now());
                if message_sender.capacity() > 0 {
                    for message in rack_state.take_summary_messages() {
                        // Each message waits for room, because otherwise the last summaries would always be dropped.
                        if message_sender.send(message).await.is_err() {
                            // The stream has ended. Its status is read below.
                            break;
                        }
                    }
                }
            }
        }
    }
}
