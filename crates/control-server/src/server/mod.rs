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
mod racks;
mod socket_query_relay;
pub(crate) mod state_manager;
mod table_budget;
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
pub use coreward_daemon::raise_file_limit;
use coreward_etcd::cluster::Cluster;
use coreward_etcd::leadership::Leadership;
use coreward_http::serve::Listener;
use coreward_http::tokens::Tokens;
use coreward_listener::builder;
use coreward_listener::message_size::SizedControl;
use coreward_listener::security::{AuthenticatedPeer, Security};
use coreward_rpc::v1::control_server::Control;
use coreward_tls::verify::RevocationList;
use coreward_tls::{AcceptorLimits, Role};
use coreward_wire::{TERM_HEADER, v1};
use futures_util::future::BoxFuture;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::BoxStream;
use tonic::{Request, Response, Status, Streaming};

use crate::api;
use crate::config::etcd::EtcdConfig;
use crate::config::{ControllerConfig, StoreLocation};
use agents::ReportSource;
use controller_state::{ChangeOutcome, ChangeRequest, ControllerState};
use coreward_controller::Controller;
use coreward_controller::rejection::Rejection;
use coreward_controller::rotation::KeyStep;
use coreward_fleet::audit::Author;
use coreward_store::Store;
use coreward_store::embedded::EmbeddedStore;
use coreward_store::etcd::EtcdStore;
use lb_runtime::LbRuntime;
use leader_election::LeaderElection;
use state_manager::{Change, ForgetError, StateManager};
use table_scheduler::make_tables;

/// Roles of the daemons that may open a gRPC stream.
const STREAM_ROLES: &[Role] = &[Role::Agent, Role::Lb, Role::Rack];
/// Pause before a former leader takes part in the next election, so that another controller can win.
const CAMPAIGN_PAUSE: Duration = Duration::from_secs(1);
/// Maximum number of tables sent before a load balancer confirms one. It is low, because newer tables wait behind them.
const MAX_UNCONFIRMED_TABLES: usize = 4;
/// Number of tasks after which tokio polls I/O and timers. A rack's message takes up to some hundred microseconds, so
/// with tokio's default of 61 tasks, polls would be 10 ms apart.
const TOKIO_EVENT_INTERVAL: u32 = 7;
/// Interval of checks whether the ids of former servers may be reused.
const RETIRE_INTERVAL: Duration = Duration::from_secs(60);
/// Interval of checks for changed bucket histories, and for the next step of a key rotation.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Runs the controller until SIGTERM or SIGINT. SIGHUP reloads the files. Fails if a file is invalid, the store is
/// unusable or an address cannot be bound.
pub fn run(config: &Path) -> anyhow::Result<()> {
    raise_file_limit();
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
    path: PathBuf,
    config: ControllerConfig,
    store: OpenedStore,
    election: Arc<LeaderElection>,
    listener: TcpListener,
    address: SocketAddr,
    api_listener: Listener,
    tokens: Arc<Tokens>,
    hangups: HangupSignals,
}

/// Receivers of SIGHUP, one for each task that waits for it.
struct HangupSignals {
    files: Signal,
    tokens: Signal,
}

enum OpenedStore {
    /// The embedded store is used only by this controller.
    Embedded(Box<StateManager>),
    Etcd(Arc<Cluster>, EtcdConfig),
}

impl ControllerServer {
    /// Reads the file, opens the store and binds the addresses. The future is boxed to spare callers its compilation.
    pub fn bind(path: &Path) -> BoxFuture<'_, anyhow::Result<Self>> {
        Box::pin(Self::open(path))
    }

    async fn open(path: &Path) -> anyhow::Result<Self> {
        // The signal receivers are created before the files are read, so that later changes are not missed.
        let hangups = HangupSignals { files: signal(SignalKind::hangup())?, tokens: signal(SignalKind::hangup())? };
        let file = path.to_owned();
        let (config, store, security) =
            tokio::task::spawn_blocking(move || load_config_and_open_store(&file)).await??;
        let cluster = match &store {
            OpenedStore::Embedded(_) => None,
            OpenedStore::Etcd(cluster, _) => Some(cluster.clone()),
        };
        let expected = "expected a free port and an address of this host (`listen`)";
        let listener = TcpListener::bind(config.listen)
            .await
            .with_context(|| format!("cannot listen on {}: {expected}", config.listen))?;
        let address = listener.local_addr()?;
        let api_listener = Listener::bind(config.api)?;
        let tokens = Arc::new(Tokens::open(&config.token_directory)?);
        let election = Arc::new(LeaderElection::new(cluster, security));
        Ok(Self { path: path.to_owned(), config, store, election, listener, address, api_listener, tokens, hangups })
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
        let asked = self.election.clone();
        // Metrics have a low priority, so that they do not delay reports and tables on a shared CPU.
        metrics_endpoint::serve(self.config.metrics, || lower_thread_priority("metrics"), move || asked.metrics())?;
        // A permanent leader starts its term before the first request, which a script may send at once.
        let mode = match self.store {
            OpenedStore::Embedded(manager) => {
                LeadershipMode::Permanent(Box::new(Term::start(*manager, &self.election, None)))
            }
            OpenedStore::Etcd(cluster, etcd) => LeadershipMode::Elected(cluster, etcd),
        };
        let api_acceptor = self.election.security.api_acceptor(self.config.api);
        let HangupSignals { mut files, tokens } = self.hangups;
        let _api = api::serve(self.api_listener, api_acceptor.clone(), self.election.clone(), self.tokens, tokens)?;
        let mut load_balancers = LbRuntime::start(self.election.clone())?;
        let admitted =
            self.election.security.grpc_acceptor(STREAM_ROLES, AcceptorLimits::default()).admit(self.listener);
        let others = builder()
            .add_service(sized_control_service(ControlService { election: self.election.clone() }))
            .serve_with_incoming(load_balancers.split_off(admitted));
        let work = async {
            match mode {
                LeadershipMode::Permanent(term) => term.lead(&mut files).await,
                LeadershipMode::Elected(cluster, etcd) => {
                    let stores = (&cluster, &etcd);
                    let leading = lead_and_follow(&self.path, self.config, &self.election, stores, &mut files);
                    tokio::select! {
                        outcome = leading => outcome,
                        never = leader_election::maintain_certificates(&cluster, &etcd) => match never {},
                    }
                }
            }
        };
        tokio::select! {
            outcome = others => outcome.context("the controller's socket failed"),
            outcome = load_balancers.wait_for_end() => outcome,
            outcome = work => outcome,
            never = self.election.security.maintenance_loop() => match never {},
            never = api_acceptor.maintenance_loop() => match never {},
        }
    }
}

/// Way in which this controller becomes the leader.
enum LeadershipMode {
    /// The controller always leads, because it has a store of its own.
    Permanent(Box<Term>),
    /// The controller leads after it has won an election in etcd.
    Elected(Arc<Cluster>, EtcdConfig),
}

/// Reads the controller's file and opens its store. Must not be called from asynchronous code.
fn load_config_and_open_store(path: &Path) -> anyhow::Result<(ControllerConfig, OpenedStore, Security)> {
    let config = ControllerConfig::load(path)?;
    let security = Security::of(&config.listener_config())?;
    let store = match &config.store {
        StoreLocation::Embedded(file) => {
            let open_store = || Ok(Store::Embedded(EmbeddedStore::open(file)?));
            OpenedStore::Embedded(Box::new(StateManager::open(
                path,
                config.clone(),
                security.revoked.clone(),
                open_store,
            )?))
        }
        StoreLocation::Etcd(etcd) => OpenedStore::Etcd(leader_election::connect_cluster(etcd)?, etcd.clone()),
    };
    Ok((config, store, security))
}

/// Leads whenever no other controller leads, and follows otherwise, until an error occurs.
async fn lead_and_follow(
    path: &Path,
    mut config: ControllerConfig,
    election: &Arc<LeaderElection>,
    (cluster, etcd): (&Arc<Cluster>, &EtcdConfig),
    hangup: &mut Signal,
) -> anyhow::Result<()> {
    loop {
        let leadership = tokio::select! {
            leadership = leader_election::campaign(election, cluster, etcd) => Arc::new(leadership?),
            never = update_revocations(hangup, path, &election.security.revoked) => match never {},
        };
        match ControllerConfig::load(path) {
            Ok(changed) => config = changed,
            Err(mistakes) => coreward_daemon::log_reload_failure(path, &mistakes),
        }
        let term = leadership.term();
        let (file, config) = (path.to_owned(), config.clone());
        let (cluster, held, prefix) = (cluster.clone(), leadership.clone(), etcd.prefix.clone());
        let revoked = election.security.revoked.clone();
        let opened = tokio::task::spawn_blocking(move || {
            StateManager::open(&file, config, revoked, || Ok(Store::Etcd(EtcdStore::open(cluster, held, &prefix)?)))
        });
        let reason = match opened.await? {
            Ok(manager) => {
                tracing::info!(event = "leading", term, "this controller leads from now on");
                let term = Term::start(manager, election, Some(leadership.clone()));
                let shared = term.shared.clone();
                let reason = tokio::select! {
                    outcome = term.lead(hangup) => return outcome,
                    reason = leadership.wait_for_end() => reason,
                };
                shared.depose();
                reason
            }
            Err(error) => format!("the records are unusable: {error:#}"),
        };
        step_down(election, &leadership, &reason).await;
        tokio::time::sleep(CAMPAIGN_PAUSE).await;
    }
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
async fn update_revocations(hangup: &mut Signal, path: &Path, revoked: &RevocationList) -> Infallible {
    loop {
        hangup.recv().await;
        match ControllerConfig::load(path) {
            Ok(config) => revoked.set(config.revoked_certificates),
            Err(mistakes) => coreward_daemon::log_reload_failure(path, &mistakes),
        }
    }
}

struct Term {
    manager: StateManager,
    shared: Arc<ControllerState>,
    change_requests: mpsc::Receiver<ChangeRequest>,
}

impl Term {
    /// Starts a term as the leader, so that requests are answered.
    fn start(manager: StateManager, election: &LeaderElection, leadership: Option<Arc<Leadership>>) -> Self {
        let (state, change_requests) =
            ControllerState::new(Controller::new(manager.fleet()), (manager.clock(), manager.counts()), leadership);
        let state = Arc::new(state);
        election.become_leader(state.clone());
        Self { manager, shared: state, change_requests }
    }

    /// Makes tables, applies changes and answers requests until an error ends the term.
    async fn lead(self, hangup: &mut Signal) -> anyhow::Result<()> {
        let Self { manager, shared, change_requests } = self;
        tokio::select! {
            () = make_tables(&shared, manager.has_predecessor()) => Ok(()),
            outcome = process_changes(manager, &shared, change_requests, hangup) => outcome,
            () = maintenance_loop(&shared) => Ok(()),
        }
    }
}

/// Applies requested changes of the configuration and the records in their order, until an error occurs.
async fn process_changes(
    mut manager: StateManager,
    shared: &ControllerState,
    mut changes: mpsc::Receiver<ChangeRequest>,
    hangup: &mut Signal,
) -> anyhow::Result<()> {
    let mut retire = tokio::time::interval(RETIRE_INTERVAL);
    loop {
        let (change, waiting) = tokio::select! {
            _ = hangup.recv() => (ChangeRequest::without_reply(Change::Reload, Author::signal()), false),
            _ = retire.tick() => (ChangeRequest::without_reply(Change::RetireExpiredIds, Author::controller()), false),
            Some(change) = changes.recv() => (change, true),
        };
        let ChangeRequest { change, author, reply: done } = change;
        let is_reload = matches!(change, Change::Reload);
        let waiting = waiting.then_some(done);
        let (back, outcome) = apply_change(manager, shared, change, author).await?;
        manager = back;
        match (waiting, outcome) {
            (Some(done), outcome) => drop(done.send(outcome)),
            (None, Err(error)) if is_reload => tracing::warn!(
                event = "reload-failed",
                file = %manager.path().display(),
                error = format!("{error:#}"),
                "the controller cannot reload its files: the previous configuration stays in force"
            ),
            (None, Err(error)) => tracing::warn!(
                event = "ids-not-retired",
                error = format!("{error:#}"),
                "the controller cannot release the ids of former servers and load balancers and retries in a minute"
            ),
            (None, Ok(_)) => {}
        }
    }
}

/// Applies a change to the records, and activates the resulting configuration.
pub(crate) async fn apply_change(
    mut manager: StateManager,
    shared: &ControllerState,
    change: Change,
    author: Author,
) -> anyhow::Result<(StateManager, anyhow::Result<ChangeOutcome>)> {
    // Changes are sequential, so no other change can drain the last healthy server meanwhile.
    if let Change::Drain(drain) = &change
        && let Err(refused) = shared.controller().check_drain(drain, shared.now())
    {
        return Ok((manager, Err(refused.into())));
    }
    if let Change::ForgetLoadBalancer(name) = &change
        && shared.controller().load_balancers.is_connected(name)
    {
        return Ok((manager, Err(ForgetError::Connected(name.clone()).into())));
    }
    // The disk may be slow, so the change is written while tables and reports continue.
    let (manager, outcome) = tokio::task::spawn_blocking(move || {
        let outcome = manager.apply_change(change, &author);
        (manager, outcome)
    })
    .await?;
    let document_generation = manager.document_generation();
    let outcome = outcome.map(|fleet| {
        let is_new = fleet.is_some();
        if let Some(fleet) = fleet {
            tracing::info!(
                event = "configuration-applied",
                generation = fleet.generation,
                "the controller has applied a new configuration and sends it to all daemons"
            );
            shared.configure(fleet);
        }
        ChangeOutcome { is_new, document_generation }
    });
    Ok((manager, outcome))
}

/// Writes changed bucket histories and due steps of key rotations to the records. Never returns.
async fn maintenance_loop(shared: &ControllerState) {
    let mut due = tokio::time::interval(POLL_INTERVAL);
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut not_rotated = None;
    loop {
        due.tick().await;
        let now = shared.now();
        store_changed_histories(shared).await;
        let step = shared.controller().due_key_step(now);
        match step {
            Ok(None) => not_rotated = None,
            Ok(Some(step)) => request_key_step(shared, step).await,
            Err(reason) => {
                if not_rotated.as_ref() != Some(&reason) {
                    tracing::warn!(
                        event = "key-step-delayed",
                        %reason,
                        "the controller delays the next step of the cookie key rotation"
                    );
                }
                not_rotated = Some(reason);
            }
        }
    }
}

async fn store_changed_histories(shared: &ControllerState) {
    let histories = shared.controller().changed_histories();
    if histories.is_empty() {
        return;
    }
    let services = histories.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(",");
    if let Err(error) = shared.change(Change::StoreBucketHistories(histories)).await {
        tracing::warn!(
            event = "buckets-not-stored",
            services,
            error = format!("{error:#}"),
            "the controller cannot store the previous servers of moved buckets, which a restart needs"
        );
    }
}

async fn request_key_step(shared: &ControllerState, step: KeyStep) {
    match shared.change(Change::TakeKeyStep(step)).await {
        Ok(_) => tracing::info!(
            event = "key-step",
            step = step.describe(),
            "the controller has taken the next step of the cookie key rotation"
        ),
        Err(error) => tracing::warn!(
            event = "key-step-failed",
            step = step.describe(),
            error = format!("{error:#}"),
            "the controller cannot take the next step of the cookie key rotation and retries"
        ),
    }
}

/// Returns the gRPC status of a rejection that ends a stream.
fn rejection_status(rejection: &Rejection) -> Status {
    let message = rejection.to_string();
    match rejection {
        Rejection::UnknownServer(_) => Status::not_found(message),
        Rejection::DuplicateSession { .. }
        | Rejection::DuplicateLoadBalancer { .. }
        | Rejection::DuplicateRack { .. }
        | Rejection::Superseded(_) => Status::already_exists(message),
        Rejection::UnknownRack(_) | Rejection::UnknownLoadBalancer(_) | Rejection::ForeignRack { .. } => {
            Status::permission_denied(message)
        }
        Rejection::TooManyRegistrations(_) | Rejection::TooManyLoadBalancers(_) => Status::resource_exhausted(message),
        _ => Status::invalid_argument(message),
    }
}

/// Returns the response to a stream's request, with the leader's term. A peer that knows a newer term disconnects.
fn stream_response<T: Send + 'static>(
    state: &ControllerState,
    updates: mpsc::Receiver<Result<T, Status>>,
) -> Response<BoxStream<T>> {
    let mut response: Response<BoxStream<T>> = Response::new(Box::pin(ReceiverStream::new(updates)));
    if let Some(leadership) = state.leadership() {
        response.metadata_mut().insert(TERM_HEADER, leadership.term().into());
    }
    response
}

struct ControlService {
    election: Arc<LeaderElection>,
}

fn sized_control_service(service: ControlService) -> SizedControl<ControlService> {
    SizedControl::new(service)
}

impl ControlService {
    /// Returns the authenticated peer. Fails if the peer has none of the roles.
    fn peer<T>(&self, request: &Request<T>, roles: &[Role]) -> Result<AuthenticatedPeer, Status> {
        let peer = AuthenticatedPeer::of(request, &self.election.security)?;
        peer.require_role(roles)?;
        Ok(peer)
    }
}

#[tonic::async_trait]
impl Control for ControlService {
    async fn agent(
        &self,
        request: Request<Streaming<v1::AgentMessage>>,
    ) -> Result<Response<BoxStream<v1::AgentUpdate>>, Status> {
        let peer = self.peer(&request, &[Role::Agent])?;
        let (answers, stream) = mpsc::channel(1);
        let source = ReportSource::Agent(peer);
        let shared = self.election.leader_state()?;
        let begun = stream_response(&shared, stream);
        tokio::spawn(agents::serve(shared, source, request.into_inner(), answers));
        Ok(begun)
    }

    async fn load_balancer(
        &self,
        request: Request<Streaming<v1::LoadBalancerMessage>>,
    ) -> Result<Response<BoxStream<v1::DataplaneUpdate>>, Status> {
        let peer = self.peer(&request, &[Role::Lb])?;
        let (updates, stream) = mpsc::channel(MAX_UNCONFIRMED_TABLES);
        let shared = self.election.leader_state()?;
        let begun = stream_response(&shared, stream);
        tokio::spawn(load_balancers::serve(shared, peer, request.into_inner(), updates));
        Ok(begun)
    }

    async fn rack(
        &self,
        request: Request<Streaming<v1::RackMessage>>,
    ) -> Result<Response<BoxStream<v1::RackUpdate>>, Status> {
        let peer = self.peer(&request, &[Role::Rack])?;
        let (updates, stream) = mpsc::channel(1);
        let shared = self.election.leader_state()?;
        let begun = stream_response(&shared, stream);
        tokio::spawn(racks::serve(shared, peer, request.into_inner(), updates));
        Ok(begun)
    }

    async fn fleet(&self, request: Request<v1::FleetRequest>) -> Result<Response<v1::FleetReply>, Status> {
        self.peer(&request, STREAM_ROLES)?;
        Ok(Response::new(doctor_rpc::fleet_reply(&*self.election.leader_state()?)))
    }
}
