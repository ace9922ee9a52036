//! The daemon, which connects the controller's decisions with gRPC, timers and the files.
//!
//! * [`controller_state`]: state shared by all callers
//! * [`update_publisher`]: updates for load balancers
//! * [`state_manager`]: configuration and records, as the only writer of the store
//! * [`leader_election`]: leadership among several controllers
//! * [`socket_query_relay`]: socket queries and answers between load balancers and agents
//! * [`agents`], [`racks`], [`load_balancers`], [`doctor_rpc`]: the streams of each kind of caller

mod agents;
pub(crate) mod controller_state;
mod doctor_rpc;
mod lb_runtime;
pub mod leader_election;
mod load_balancers;
mod periodic_records;
mod racks;
mod rejection_status;
mod socket_query_relay;
pub(crate) mod state_manager;
mod table_cpu_budget;
mod table_scheduler;
mod update_publisher;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use coreward_daemon::metrics_endpoint;
use coreward_daemon::priority::lower_thread_priority;
pub use coreward_daemon::raise_open_file_limit;
use coreward_etcd::cluster::EtcdClusterClient;
use coreward_etcd::leadership::Leadership;
use coreward_http::serve::ApiListener;
use coreward_http::tokens::ApiTokens;
use coreward_listener::grpc_server_builder;
use coreward_listener::message_size::SizeLimitedControlServer;
use coreward_listener::security::{AuthenticatedPeer, ListenerSecurity};
use coreward_rpc::v1::control_server::Control;
use coreward_tls::verify::RevocationList;
use coreward_tls::{AcceptorLimits, FleetRole};
use coreward_wire::{CONTROLLER_TERM_METADATA_KEY, v1};
use futures_util::future::BoxFuture;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::BoxStream;
use tonic::{Request, Response, Status, Streaming};

use crate::api;
use crate::config::etcd::EtcdConfig;
use crate::config::{ControllerConfig, StoreLocation};
use agents::AgentReportSource;
use controller_state::{ControllerState, FleetRecordChangeOutcome, FleetRecordChangeRequest};
use coreward_controller::Controller;
use coreward_fleet::audit::FleetChangeAuthor;
use coreward_store::FleetStore;
use coreward_store::embedded::EmbeddedStore;
use coreward_store::etcd::EtcdStore;
use lb_runtime::LbConnectionRuntime;
use leader_election::LeaderElection;
use state_manager::{FleetRecordChange, FleetStateManager, ForgetLoadBalancerError};
use table_scheduler::run_table_scheduler;

/// Roles of the daemons that may open a gRPC stream.
const GRPC_STREAM_ROLES: &[FleetRole] = &[FleetRole::Agent, FleetRole::Lb, FleetRole::Rack];
/// Pause before a former leader takes part in the next election, so that another controller can win.
const PAUSE_BEFORE_NEXT_CAMPAIGN: Duration = Duration::from_secs(1);
/// Maximum number of placement tables sent to a load balancer before it confirms one. It is low, because newer tables
/// must wait behind them.
const MAX_UNCONFIRMED_TABLES_PER_LB: usize = 4;
/// Number of tasks after which tokio polls I/O and timers. A rack's message takes up to some hundred microseconds, so
/// with tokio's default of 61 tasks, polls would be 10 ms apart.
const TOKIO_EVENT_INTERVAL: u32 = 7;
/// Interval of checks whether the ids of former servers may be reused.
const EXPIRED_ID_CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Runs the controller until SIGTERM or SIGINT. SIGHUP reloads the files. Fails if a file is invalid, the store is
/// unusable or an address cannot be bound.
pub fn run_controller(config: &Path) -> anyhow::Result<()> {
    raise_open_file_limit();
    // One worker receives from agents and racks, and makes tables. A multi-thread worker runs the newest woken task
    // first, while a current-thread runtime runs the oldest. A due table thus does not wait for the reports of a
    // thousand agents.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .event_interval(TOKIO_EVENT_INTERVAL)
        .enable_all()
        .build()?;
    let config = config.to_owned();
    runtime.block_on(async { tokio::spawn(lead_and_serve(config)).await? })
}

async fn lead_and_serve(config: PathBuf) -> anyhow::Result<()> {
    let server = ControllerServer::bind(&config).await?;
    tracing::info!(
        event = "listening",
        address = %server.address(),
        api = %server.api_address(),
        "the controller listens for daemons at `address` and for API clients at `api`"
    );
    let election = server.election();
    let outcome = coreward_daemon::run_until_shutdown(server.serve()).await;
    election.resign().await;
    outcome
}

pub struct ControllerServer {
    config_path: PathBuf,
    config: ControllerConfig,
    store: OpenedFleetStore,
    election: Arc<LeaderElection>,
    listener: TcpListener,
    address: SocketAddr,
    api_listener: ApiListener,
    tokens: Arc<ApiTokens>,
    hangup_signals: HangupSignals,
}

/// Receivers of SIGHUP, one for each task that waits for it.
struct HangupSignals {
    file_reload: Signal,
    token_reload: Signal,
}

enum OpenedFleetStore {
    /// Embedded store, which only this controller uses.
    Embedded(Box<FleetStateManager>),
    Etcd(Arc<EtcdClusterClient>, EtcdConfig),
}

impl ControllerServer {
    /// Reads the file, opens the store and binds the addresses. The future is boxed so that callers compile faster.
    pub fn bind(path: &Path) -> BoxFuture<'_, anyhow::Result<Self>> {
        Box::pin(Self::open(path))
    }

    async fn open(path: &Path) -> anyhow::Result<Self> {
        // The signal receivers are created before the files are read, so that later changes are not missed.
        let hangup_signals =
            HangupSignals { file_reload: signal(SignalKind::hangup())?, token_reload: signal(SignalKind::hangup())? };
        let config_path = path.to_owned();
        let (config, store, security) =
            tokio::task::spawn_blocking(move || load_config_and_open_store(&config_path)).await??;
        let cluster = match &store {
            OpenedFleetStore::Embedded(_) => None,
            OpenedFleetStore::Etcd(cluster, _) => Some(cluster.clone()),
        };
        let expected_address = "expected a free port and an address of this host (`listen`)";
        let listener = TcpListener::bind(config.listen_address)
            .await
            .with_context(|| format!("cannot listen on {}: {expected_address}", config.listen_address))?;
        let address = listener.local_addr()?;
        let api_listener = ApiListener::bind(config.api_listen_address)?;
        let tokens = Arc::new(ApiTokens::open(&config.token_directory)?);
        let election = Arc::new(LeaderElection::new(cluster, security));
        Ok(Self {
            config_path: path.to_owned(),
            config,
            store,
            election,
            listener,
            address,
            api_listener,
            tokens,
            hangup_signals,
        })
    }

    /// Returns the address at which the server listens, with the actual port if port 0 was configured.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn election(&self) -> Arc<LeaderElection> {
        self.election.clone()
    }

    pub fn api_address(&self) -> SocketAddr {
        self.api_listener.address()
    }

    /// Serves until the listening socket fails, and returns its error.
    pub fn serve(self) -> BoxFuture<'static, anyhow::Result<()>> {
        Box::pin(self.run())
    }

    async fn run(self) -> anyhow::Result<()> {
        let election = self.election.clone();
        // Metrics have a low priority, so that they do not delay reports and tables on a shared CPU.
        metrics_endpoint::serve_metrics(
            self.config.metrics_listen_address,
            || lower_thread_priority("metrics"),
            move || election.metrics_snapshot(),
        )?;
        // A permanent leader starts its term before the first request, which a script may send at once.
        let leadership_mode = LeadershipMode::start(self.store, &self.election);
        let api_acceptor = self.election.security.api_acceptor(self.config.api_listen_address);
        let HangupSignals { file_reload: mut files, token_reload: tokens } = self.hangup_signals;
        let _api_server =
            api::serve_api(self.api_listener, api_acceptor.clone(), self.election.clone(), self.tokens, tokens)?;
        let mut load_balancer_runtime = LbConnectionRuntime::start(self.election.clone())?;
        let incoming_connections = self
            .election
            .security
            .grpc_acceptor(GRPC_STREAM_ROLES, AcceptorLimits::default())
            .accepted_connections(self.listener);
        let grpc_server = grpc_server_builder()
            .add_service(size_limited_control_service(ControllerGrpcService { election: self.election.clone() }))
            .serve_with_incoming(load_balancer_runtime.split_off_load_balancer_connections(incoming_connections));
        let leadership_task = leadership_mode.lead(&self.config_path, self.config, &self.election, &mut files);
        tokio::select! {
            outcome = grpc_server => outcome.context("the controller's socket failed"),
            outcome = load_balancer_runtime.wait_for_server_task() => outcome,
            outcome = leadership_task => outcome,
            never = self.election.security.reload_changed_certificates() => match never {},
            never = api_acceptor.close_invalid_connections_loop() => match never {},
        }
    }
}

/// Way in which this controller becomes the leader.
enum LeadershipMode {
    /// The controller always leads, because it has a store of its own.
    Permanent(Box<LeadershipTerm>),
    /// The controller leads after it has won an election in etcd.
    Elected(Arc<EtcdClusterClient>, EtcdConfig),
}

impl LeadershipMode {
    fn start(store: OpenedFleetStore, election: &LeaderElection) -> Self {
        match store {
            OpenedFleetStore::Embedded(manager) => {
                Self::Permanent(Box::new(LeadershipTerm::start(*manager, election, None)))
            }
            OpenedFleetStore::Etcd(cluster, etcd) => Self::Elected(cluster, etcd),
        }
    }

    /// Leads, or takes part in elections, until an error occurs.
    async fn lead(
        self,
        config_path: &Path,
        config: ControllerConfig,
        election: &Arc<LeaderElection>,
        hangup: &mut Signal,
    ) -> anyhow::Result<()> {
        match self {
            Self::Permanent(term) => term.lead(hangup).await,
            Self::Elected(cluster, etcd) => {
                let cluster_and_config = (&cluster, &etcd);
                tokio::select! {
                    outcome = lead_or_follow_loop(config_path, config, election, cluster_and_config, hangup) => outcome,
                    never = leader_election::reload_changed_certificates(&cluster, &etcd) => match never {},
                }
            }
        }
    }
}

/// Reads the controller's file and opens its store. Must not be called from asynchronous code.
fn load_config_and_open_store(path: &Path) -> anyhow::Result<(ControllerConfig, OpenedFleetStore, ListenerSecurity)> {
    let config = ControllerConfig::load(path)?;
    let security = ListenerSecurity::from_config(&config.listener_config())?;
    let store = match &config.store {
        StoreLocation::Embedded(file) => {
            let open_store = || Ok(FleetStore::Embedded(EmbeddedStore::open(file)?));
            OpenedFleetStore::Embedded(Box::new(FleetStateManager::open(
                path,
                config.clone(),
                security.revocation_list.clone(),
                open_store,
            )?))
        }
        StoreLocation::Etcd(etcd) => OpenedFleetStore::Etcd(leader_election::connect_cluster(etcd)?, etcd.clone()),
    };
    Ok((config, store, security))
}

/// Leads whenever no other controller leads, and follows otherwise, until an error occurs.
async fn lead_or_follow_loop(
    path: &Path,
    mut config: ControllerConfig,
    election: &Arc<LeaderElection>,
    (cluster, etcd): (&Arc<EtcdClusterClient>, &EtcdConfig),
    hangup: &mut Signal,
) -> anyhow::Result<()> {
    loop {
        let leadership = tokio::select! {
            leadership = leader_election::campaign_for_leadership(election, cluster, etcd) => Arc::new(leadership?),
            never = update_revocations_on_sighup(hangup, path, &election.security.revocation_list) => match never {},
        };
        config = reload_config(path).unwrap_or(config);
        let (file, config) = (path.to_owned(), config.clone());
        let (cluster, store_leadership, prefix) = (cluster.clone(), leadership.clone(), etcd.key_prefix.clone());
        let revoked_certificates = election.security.revocation_list.clone();
        let open_task = tokio::task::spawn_blocking(move || {
            let open_store = || Ok(FleetStore::Etcd(EtcdStore::open(cluster, store_leadership, &prefix)?));
            FleetStateManager::open(&file, config, revoked_certificates, open_store)
        });
        let reason = match open_task.await? {
            Ok(manager) => {
                tracing::info!(event = "leading", term = leadership.term(), "this controller leads from now on");
                let term = LeadershipTerm::start(manager, election, Some(leadership.clone()));
                let controller_state = term.controller_state.clone();
                let end_reason = tokio::select! {
                    outcome = term.lead(hangup) => return outcome,
                    reason = leadership.wait_for_end() => reason,
                };
                controller_state.depose();
                end_reason
            }
            Err(error) => format!("the records are unusable: {error:#}"),
        };
        step_down(election, &leadership, &reason).await;
        tokio::time::sleep(PAUSE_BEFORE_NEXT_CAMPAIGN).await;
    }
}

/// Returns the configuration in the file. If the file has mistakes, logs them and returns `None`.
fn reload_config(path: &Path) -> Option<ControllerConfig> {
    ControllerConfig::load(path).inspect_err(|mistakes| coreward_daemon::log_reload_failure(path, mistakes)).ok()
}

/// Becomes a follower after a term as the leader has ended.
async fn step_down(election: &LeaderElection, leadership: &Leadership, reason: &str) {
    tracing::warn!(
        event = "deposed",
        reason,
        "this controller no longer leads: it disconnects all daemons and tries to lead again"
    );
    election.become_follower(None);
    if let Err(error) = leadership.resign().await {
        tracing::debug!(
            event = "lease-not-revoked",
            %error,
            "the deposed controller cannot revoke its lease in etcd, which expires by itself"
        );
    }
}

/// Handles SIGHUP at a follower, which only reads the revoked certificates. The rest of the file is read when the
/// follower becomes the leader.
async fn update_revocations_on_sighup(
    hangup: &mut Signal,
    path: &Path,
    revocation_list: &RevocationList,
) -> Infallible {
    loop {
        hangup.recv().await;
        if let Some(config) = reload_config(path) {
            revocation_list.replace_fingerprints(config.revoked_certificates);
        }
    }
}

struct LeadershipTerm {
    manager: FleetStateManager,
    controller_state: Arc<ControllerState>,
    change_request_receiver: mpsc::Receiver<FleetRecordChangeRequest>,
}

impl LeadershipTerm {
    /// Starts a term as the leader, so that requests are answered.
    fn start(manager: FleetStateManager, election: &LeaderElection, leadership: Option<Arc<Leadership>>) -> Self {
        let (state, change_request_receiver) = ControllerState::new(
            Controller::new(manager.fleet()),
            (manager.record_clock(), manager.state_counters()),
            leadership,
        );
        let state = Arc::new(state);
        election.become_leader(state.clone());
        Self { manager, controller_state: state, change_request_receiver }
    }

    /// Makes tables, applies changes and answers requests until an error ends the term.
    async fn lead(self, hangup: &mut Signal) -> anyhow::Result<()> {
        let Self { manager, controller_state, change_request_receiver: change_requests } = self;
        tokio::select! {
            () = run_table_scheduler(&controller_state, manager.had_stored_records()) => Ok(()),
            outcome = process_record_changes(manager, &controller_state, change_requests, hangup) => outcome,
            () = periodic_records::store_histories_and_rotate_keys(&controller_state) => Ok(()),
        }
    }
}

/// Applies requested changes of the configuration and the records in their order, until an error occurs.
async fn process_record_changes(
    mut manager: FleetStateManager,
    controller_state: &ControllerState,
    mut change_request_receiver: mpsc::Receiver<FleetRecordChangeRequest>,
    hangup: &mut Signal,
) -> anyhow::Result<()> {
    let mut retire_timer = tokio::time::interval(EXPIRED_ID_CHECK_INTERVAL);
    loop {
        let (change, is_reply_expected) = tokio::select! {
            _ = hangup.recv() => {
                let author = FleetChangeAuthor::sighup();
                (FleetRecordChangeRequest::without_reply(FleetRecordChange::ReloadFleetFile, author), false)
            },
            _ = retire_timer.tick() => {
                let author = FleetChangeAuthor::controller();
                (FleetRecordChangeRequest::without_reply(FleetRecordChange::RetireExpiredIds, author), false)
            }
            Some(change) = change_request_receiver.recv() => (change, true),
        };
        let FleetRecordChangeRequest { change, author, reply_sender } = change;
        let is_reload = matches!(change, FleetRecordChange::ReloadFleetFile);
        let expected_reply = is_reply_expected.then_some(reply_sender);
        let (returned_manager, outcome) = apply_record_change(manager, controller_state, change, author).await?;
        manager = returned_manager;
        match (expected_reply, outcome) {
            (Some(reply_sender), outcome) => drop(reply_sender.send(outcome)),
            (None, Err(error)) if is_reload => tracing::warn!(
                event = "reload-failed",
                file = %manager.config_path().display(),
                error = format!("{error:#}"),
                "the controller cannot reload its files: the previous configuration stays in force"
            ),
            (None, Err(error)) => tracing::warn!(
                event = "ids-not-retired",
                error = format!("{error:#}"),
                "the controller cannot free the ids of removed servers and load balancers: it retries in a minute"
            ),
            (None, Ok(_)) => {}
        }
    }
}

/// Applies a change to the records, and activates the resulting configuration.
pub(crate) async fn apply_record_change(
    mut manager: FleetStateManager,
    controller_state: &ControllerState,
    change: FleetRecordChange,
    author: FleetChangeAuthor,
) -> anyhow::Result<(FleetStateManager, anyhow::Result<FleetRecordChangeOutcome>)> {
    // Changes are sequential, so no other change can drain the last healthy server meanwhile.
    if let FleetRecordChange::DrainServer(drain) = &change
        && let Err(drain_error) =
            controller_state.lock_controller().check_drain_is_possible(drain, controller_state.now())
    {
        return Ok((manager, Err(drain_error.into())));
    }
    if let FleetRecordChange::ForgetLoadBalancer(name) = &change
        && controller_state.lock_controller().load_balancers.is_connected(name)
    {
        return Ok((manager, Err(ForgetLoadBalancerError::ConnectedLoadBalancer(name.clone()).into())));
    }
    // The disk may be slow, so the change is written while tables and reports continue.
    let (manager, outcome) = tokio::task::spawn_blocking(move || {
        let change_result = manager.apply_change(change, &author);
        (manager, change_result)
    })
    .await?;
    let document_generation = manager.document_generation();
    let change_result = outcome.map(|fleet| {
        let has_new_configuration = fleet.is_some();
        if let Some(fleet) = fleet {
            tracing::info!(
                event = "configuration-applied",
                generation = fleet.generation,
                "the controller has applied a new configuration and sends it to all daemons"
            );
            controller_state.configure(fleet);
        }
        FleetRecordChangeOutcome { has_new_configuration, document_generation }
    });
    Ok((manager, change_result))
}

/// Returns the response to a stream request, with the leader's term. A peer that has received a newer term disconnects.
fn build_stream_response<T: Send + 'static>(
    state: &ControllerState,
    update_receiver: mpsc::Receiver<Result<T, Status>>,
) -> Response<BoxStream<T>> {
    let mut response: Response<BoxStream<T>> = Response::new(Box::pin(ReceiverStream::new(update_receiver)));
    if let Some(leadership) = state.leadership() {
        response.metadata_mut().insert(CONTROLLER_TERM_METADATA_KEY, leadership.term().into());
    }
    response
}

struct ControllerGrpcService {
    election: Arc<LeaderElection>,
}

fn size_limited_control_service(service: ControllerGrpcService) -> SizeLimitedControlServer<ControllerGrpcService> {
    SizeLimitedControlServer::new(service)
}

impl ControllerGrpcService {
    /// Returns the authenticated peer. Fails if the peer has none of the roles.
    fn authenticated_peer<T>(&self, request: &Request<T>, roles: &[FleetRole]) -> Result<AuthenticatedPeer, Status> {
        let peer = AuthenticatedPeer::from_request(request, &self.election.security)?;
        peer.require_any_role(roles)?;
        Ok(peer)
    }
}

#[tonic::async_trait]
impl Control for ControllerGrpcService {
    async fn agent(
        &self,
        request: Request<Streaming<v1::AgentMessage>>,
    ) -> Result<Response<BoxStream<v1::AgentUpdate>>, Status> {
        let peer = self.authenticated_peer(&request, &[FleetRole::Agent])?;
        let (updates, stream) = mpsc::channel(1);
        let source = AgentReportSource::Agent(peer);
        let controller_state = self.election.leader_state()?;
        let response = build_stream_response(&controller_state, stream);
        tokio::spawn(agents::serve_agent(controller_state, source, request.into_inner(), updates));
        Ok(response)
    }

    async fn load_balancer(
        &self,
        request: Request<Streaming<v1::LoadBalancerMessage>>,
    ) -> Result<Response<BoxStream<v1::DataplaneUpdate>>, Status> {
        let peer = self.authenticated_peer(&request, &[FleetRole::Lb])?;
        let (updates, stream) = mpsc::channel(MAX_UNCONFIRMED_TABLES_PER_LB);
        let controller_state = self.election.leader_state()?;
        let response = build_stream_response(&controller_state, stream);
        tokio::spawn(load_balancers::serve_load_balancer(controller_state, peer, request.into_inner(), updates));
        Ok(response)
    }

    async fn rack(
        &self,
        request: Request<Streaming<v1::RackMessage>>,
    ) -> Result<Response<BoxStream<v1::RackUpdate>>, Status> {
        let peer = self.authenticated_peer(&request, &[FleetRole::Rack])?;
        let (updates, stream) = mpsc::channel(1);
        let controller_state = self.election.leader_state()?;
        let response = build_stream_response(&controller_state, stream);
        tokio::spawn(racks::serve_rack(controller_state, peer, request.into_inner(), updates));
        Ok(response)
    }

    async fn fleet(&self, request: Request<v1::FleetRequest>) -> Result<Response<v1::FleetReply>, Status> {
        self.authenticated_peer(&request, GRPC_STREAM_ROLES)?;
        Ok(Response::new(doctor_rpc::build_fleet_reply(&*self.election.leader_state()?)))
    }
}
