//! The load balancer's daemon, which attaches the XDP program or takes over the attached one, and applies the
//! controller's updates. The data plane forwards packets even if neither daemon nor controller runs.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use coreward_daemon::ControllerConnection;
use coreward_daemon::metrics_endpoint::MetricsScrapeReceiver;
use coreward_dataplane::lb::{self, LoadBalancer};
use coreward_dataplane::pins::{self, PinDirectoryLock};
use coreward_dataplane::routes::RouteSockets;
use coreward_dataplane::{neighbour, vlan_device};
use coreward_metrics::snapshot::MetricsSnapshot;
use coreward_rpc::v1::control_client::ControlClient;
use coreward_tls::FleetRole;
use coreward_wire::address::address_to_bytes;
use coreward_wire::v1::dataplane_update::Update;
use coreward_wire::v1::load_balancer_message::Message;
use coreward_wire::{
    FleetConfiguration, FleetConfigurationChange, LB_STATE_MESSAGE_INTERVAL, SocketAnswer, SocketQuery, table, v1,
};
use prost::Message as _;
use prost::bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::{Interval, MissedTickBehavior};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

use crate::config::{LoadBalancerConfig, VipAnnouncementConfig, VipTreatmentOnStop};
use crate::forwarder::{Forwarder, XDP_PROGRAM_LOAD_TIMEOUT, log_rejection};
use crate::health::HealthChecks;
use crate::last_configuration::SavedConfigurationFile;
use crate::resolvers::{MacResolution, NeighbourResolvers};
use crate::sweeper::ConnectionSweeper;
use crate::vip_announcement::{VipAnnouncementState, VipAnnouncer};

/// Interval at which the data plane's clock is set and the next section of the connection table is swept.
const DATA_PLANE_TICK_INTERVAL: Duration = Duration::from_millis(100);
/// Minimum time between two state messages. Creating one takes a millisecond if there are a thousand services.
const MIN_STATE_MESSAGE_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum number of queued messages to the controller, which are states, traffic counts and socket queries.
const CONTROLLER_MESSAGE_QUEUE_LENGTH: usize = 64;
const MAC_RESOLVER_ENDED_ERROR: &str = "a thread that resolves MAC addresses has ended";

/// Runs the load balancer until SIGTERM or SIGINT. Pinned programs and maps stay in use. Fails when the
/// configuration file is invalid, another daemon uses the pin directory, the interface does not exist, or the kernel
/// rejects the program.
pub fn run_load_balancer(config: &Path) -> anyhow::Result<()> {
    let config = LoadBalancerConfig::load(config)?;
    // Health checks of many servers need many concurrent connections, and each of them takes a file descriptor.
    coreward_daemon::raise_open_file_limit();
    let _pin_lock = PinDirectoryLock::new(&config.pin_directory)?;
    let mut load_balancer = LoadBalancer::load(build_lb_options(&config))?;
    let attachment = load_balancer.attach(&config.interface, config.xdp_mode)?;
    let start_action = match (load_balancer.is_state_taken_over(), load_balancer.is_upgrade_pending()) {
        (true, _) => "taken over its XDP program",
        (_, true) => "loaded its XDP program, which will replace the program of another version",
        _ => "attached its XDP program",
    };
    tracing::info!(
        event = "program-attached",
        load_balancer = config.name,
        interface = config.interface,
        ?attachment,
        "the load balancer has {start_action}"
    );
    let (neighbour_resolvers, resolution_receiver) = NeighbourResolvers::start(&config.interface)?;
    let connection_timers = config.connection_timers;
    let health_checks = HealthChecks::start(config.interface.clone())?;
    let resolvers_and_routes =
        (neighbour_resolvers, RouteSockets::open().context("cannot open a netlink socket for routes")?);
    let interface_and_vlan = (config.interface.clone(), config.vlan.unwrap_or_default());
    let forwarder = Forwarder::new(
        config.name.clone(),
        interface_and_vlan,
        load_balancer,
        attachment,
        resolvers_and_routes,
        connection_timers,
        health_checks,
    );
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(serve_until_shutdown(
        config,
        forwarder,
        resolution_receiver,
    ))
}

/// Detaches the XDP program and removes all pins, which ends the forwarding of packets. Fails when the configuration
/// file is invalid, the daemon that uses it is running, or a pin cannot be removed.
pub fn detach_load_balancer(config: &Path) -> anyhow::Result<()> {
    let config = LoadBalancerConfig::load(config)?;
    let _pin_lock = PinDirectoryLock::new(&config.pin_directory)?;
    let mut load_balancer = LoadBalancer::load(build_lb_options(&config))?;
    if !load_balancer.is_state_taken_over() && !load_balancer.is_upgrade_pending() {
        tracing::info!(
            event = "nothing-pinned",
            pin_directory = %config.pin_directory.display(),
            "no XDP program of a load balancer is pinned: `coreward lb --detach` has nothing to remove"
        );
    } else {
        load_balancer.attach(&config.interface, config.xdp_mode)?;
    }
    if let Some(announce) = &config.announce {
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(withdraw_vips(announce))?;
    }
    load_balancer.detach()?;
    pins::remove_pin_directory_if_empty(&config.pin_directory)
}

fn build_lb_options(config: &LoadBalancerConfig) -> lb::LoadBalancerOptions {
    lb::LoadBalancerOptions {
        pin_directory: Some(config.pin_directory.clone()),
        flow_table_entry_count: config.flow_table,
        connection_table_size: config.connection_table,
        packets_read_clock: true,
        vip_vlan: config.vlan.unwrap_or_default(),
        ..Default::default()
    }
}

async fn serve_until_shutdown(
    config: LoadBalancerConfig,
    mut forwarder: Forwarder,
    resolution_receiver: mpsc::UnboundedReceiver<MacResolution>,
) -> anyhow::Result<()> {
    let mut tick_interval = tokio::time::interval(DATA_PLANE_TICK_INTERVAL);
    tick_interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let scrape_receiver = MetricsScrapeReceiver::listen(config.metrics)?;
    let announcer = match &config.announce {
        Some(announce) => Some(VipAnnouncer::start(announce).await?),
        None => None,
    };
    let mut controller_connection =
        ControllerConnection::new(config.controllers.clone(), config.tls.as_ref(), &[FleetRole::Controller])?;
    let sweeper = ConnectionSweeper::new(&config.connection_timers);
    let mut saved_configuration_file = SavedConfigurationFile::new(&config.state_directory, &config.name);
    // During an upgrade, the previous version's program continues with its tables until a controller has sent new ones.
    if !forwarder.is_upgrade_pending() {
        saved_configuration_file.restore_into(&mut forwarder);
    }
    let mut tasks = BackgroundTasks {
        mac_resolution_receiver: resolution_receiver,
        tick_interval,
        scrape_receiver,
        announcer,
        sweeper,
        saved_configuration_file,
    };
    let session_loop = run_controller_sessions(&config, &mut controller_connection, &mut forwarder, &mut tasks);
    let outcome = coreward_daemon::run_until_shutdown(session_loop).await;
    tasks.saved_configuration_file.save_if_changed(&mut forwarder);
    if let Some(announce) = config.announce.filter(|announce| announce.on_stop == VipTreatmentOnStop::Withdraw)
        && let Some(mut announcer) = tasks.announcer.take()
    {
        announcer.announce_vips(&BTreeSet::new()).await?;
        tracing::info!(
            event = "drain-started",
            drain = ?announce.drain,
            "the load balancer has withdrawn its VIPs, and forwards packets until the drain time is over"
        );
        tasks.run_tasks_until_ready(&mut forwarder, &controller_connection, tokio::time::sleep(announce.drain)).await?;
    }
    outcome
}

/// Withdraws all VIPs, and waits for the drain time, in which the routers stop sending packets to this load balancer.
async fn withdraw_vips(announce: &VipAnnouncementConfig) -> anyhow::Result<()> {
    VipAnnouncer::start(announce).await?.announce_vips(&BTreeSet::new()).await?;
    tokio::time::sleep(announce.drain).await;
    Ok(())
}

struct BackgroundTasks {
    mac_resolution_receiver: mpsc::UnboundedReceiver<MacResolution>,
    tick_interval: Interval,
    scrape_receiver: MetricsScrapeReceiver,
    announcer: Option<VipAnnouncer>,
    sweeper: ConnectionSweeper,
    saved_configuration_file: SavedConfigurationFile,
}

impl BackgroundTasks {
    /// Runs the tasks that are due ten times a second. Returns up to `max_queries` queries for agents.
    fn tick(&mut self, forwarder: &mut Forwarder, max_queries: usize) -> anyhow::Result<Vec<SocketQuery>> {
        forwarder.tick();
        let expired_connections = forwarder.sweep_connections()?;
        forwarder.free_connections(&self.sweeper.queue_expired_connections(&expired_connections, monotonic_time()))?;
        Ok(self.sweeper.next_socket_queries(monotonic_time(), max_queries))
    }

    /// Applies `first_resolution` and all queued resolutions of MAC addresses, so that one state message reports them
    /// all. Otherwise, 10,000 servers would cause 10,000 messages.
    fn apply_queued_mac_resolutions(&mut self, forwarder: &mut Forwarder, first_resolution: MacResolution) {
        forwarder.apply_mac_resolution(first_resolution);
        while let Ok(resolution) = self.mac_resolution_receiver.try_recv() {
            forwarder.apply_mac_resolution(resolution);
        }
    }

    async fn run_periodic_maintenance(&mut self, forwarder: &mut Forwarder, interface: &str) -> anyhow::Result<()> {
        forwarder.run_periodic_checks()?;
        self.saved_configuration_file.save_if_changed(forwarder);
        let Some(announcer) = &mut self.announcer else { return Ok(()) };
        // Without a configuration, an earlier process's announcements stay.
        let Some(mut state) = forwarder.vip_announcement_state() else { return Ok(()) };
        if !announcer.is_interface_up(interface).await? {
            state = VipAnnouncementState {
                obstacles: vec![format!("no VIP is announced: {interface} is down")],
                ..VipAnnouncementState::default()
            };
        }
        if let Err(error) = announcer.announce_vips(&state.announceable_vips).await {
            tracing::warn!(
                event = "announcement-failed",
                table = announcer.route_table_id(),
                error = format!("{error:#}"),
                "the load balancer cannot change the routes that announce its VIPs and retries every second"
            );
            state.obstacles.push(format!("{error:#}"));
        }
        forwarder.record_vip_announcement(announcer.announced_vip_count(), state.obstacles);
        Ok(())
    }

    /// Returns the daemon's state, which is sent to the controller and served to Prometheus.
    fn load_balancer_state(&self, forwarder: &Forwarder, connection: &ControllerConnection) -> v1::LoadBalancerState {
        let mut daemon_state = forwarder.build_state_message();
        daemon_state.warnings.extend(connection.certificate_warnings());
        daemon_state.warnings.extend(self.saved_configuration_file.last_file_error().map(str::to_owned));
        daemon_state
    }

    fn metrics_snapshot(&self, forwarder: &Forwarder, connection: &ControllerConnection) -> MetricsSnapshot {
        let mut snapshot = forwarder.metrics_snapshot(&self.load_balancer_state(forwarder, connection));
        connection.add_metrics(&mut snapshot);
        snapshot
    }

    async fn run_tasks_until_ready<T>(
        &mut self,
        forwarder: &mut Forwarder,
        connection: &ControllerConnection,
        future: impl Future<Output = T>,
    ) -> anyhow::Result<T> {
        tokio::pin!(future);
        loop {
            tokio::select! {
                outcome = &mut future => return Ok(outcome),
                resolution = self.mac_resolution_receiver.recv() => {
                    forwarder.apply_mac_resolution(resolution.context(MAC_RESOLVER_ENDED_ERROR)?)
                }
                // Without a controller, the queries are dropped. They time out, so their agents count as absent.
                _ = self.tick_interval.tick() => drop(self.tick(forwarder, usize::MAX)?),
                scrape = self.scrape_receiver.receive_scrape() => {
                    drop(scrape.send(self.metrics_snapshot(forwarder, connection)))
                }
            }
        }
    }
}

async fn run_controller_sessions(
    config: &LoadBalancerConfig,
    connection: &mut ControllerConnection,
    forwarder: &mut Forwarder,
    tasks: &mut BackgroundTasks,
) -> anyhow::Result<()> {
    loop {
        let error = run_controller_session(config, connection, forwarder, tasks).await.err();
        forwarder.end_controller_stream();
        let retry_delay = connection.record_stream_end(error.as_ref());
        tasks.run_tasks_until_ready(forwarder, connection, tokio::time::sleep(retry_delay)).await?;
        tasks.run_periodic_maintenance(forwarder, &config.interface).await?;
    }
}

async fn run_controller_session(
    config: &LoadBalancerConfig,
    connection: &mut ControllerConnection,
    forwarder: &mut Forwarder,
    tasks: &mut BackgroundTasks,
) -> anyhow::Result<()> {
    let mut stream = ControllerStream::open(config, connection, forwarder, tasks).await?;
    loop {
        tokio::select! {
            update = stream.updates.message() => {
                let Some(update) = update? else { return Ok(()) };
                connection.record_controller_message();
                stream.process_update(update, forwarder, &mut tasks.sweeper)?;
            }
            resolution = tasks.mac_resolution_receiver.recv() => {
                tasks.apply_queued_mac_resolutions(forwarder, resolution.context(MAC_RESOLVER_ENDED_ERROR)?);
                stream.is_state_due = true;
            }
            () = tokio::time::sleep_until(stream.next_state_message_at), if stream.is_state_due => {}
            _ = stream.state_timer.tick() => {
                tasks.run_periodic_maintenance(forwarder, &config.interface).await?;
                stream.is_state_due = true;
            }
            _ = stream.traffic_timer.tick() => stream.send_traffic_message(forwarder),
            scrape = tasks.scrape_receiver.receive_scrape() => {
                drop(scrape.send(tasks.metrics_snapshot(forwarder, connection)))
            }
            _ = tasks.tick_interval.tick() => {
                // Half of the queue stays free for other messages.
                for query in tasks.tick(forwarder, stream.message_sender.capacity() / 2)? {
                    stream.try_send(Message::SocketQuery((&query).into()));
                }
                stream.send_health_message(forwarder);
            }
        }
        if stream.is_state_due && tokio::time::Instant::now() >= stream.next_state_message_at {
            stream.send_state_message(forwarder, || tasks.load_balancer_state(forwarder, connection));
        }
    }
}

/// Open stream to a controller, with the times of its messages.
struct ControllerStream {
    message_sender: mpsc::Sender<v1::LoadBalancerMessage>,
    updates: Streaming<v1::DataplaneUpdate>,
    state_timer: Interval,
    traffic_timer: Interval,
    /// Number of installed tables and confirmed configuration generation, as in the last state message.
    last_table_count_and_generation: (usize, u64),
    /// Whether a state message is due: each second, and at once when a service got its first table, a server's MAC
    /// address was found or lost, or another configuration was applied.
    is_state_due: bool,
    next_state_message_at: tokio::time::Instant,
    /// gRPC client, which keeps the stream's connection open.
    _client: ControlClient<Channel>,
}

impl ControllerStream {
    async fn open(
        config: &LoadBalancerConfig,
        connection: &mut ControllerConnection,
        forwarder: &mut Forwarder,
        tasks: &mut BackgroundTasks,
    ) -> anyhow::Result<Self> {
        let grpc_channel = tasks.run_tasks_until_ready(forwarder, connection, connection.connect()).await??;
        let mut client = ControlClient::new(grpc_channel).max_decoding_message_size(64 << 20);
        let (message_sender, message_receiver) = mpsc::channel(CONTROLLER_MESSAGE_QUEUE_LENGTH);
        message_sender
            .send(to_load_balancer_message(Message::Registration(build_registration_message(
                config,
                forwarder.applied_generation(),
            ))))
            .await?;
        let stream_request = client.load_balancer(ReceiverStream::new(message_receiver));
        let stream_response = tasks.run_tasks_until_ready(forwarder, connection, stream_request).await??;
        let updates = connection.accept_stream(stream_response)?;
        tracing::info!(
            event = "controller-connected",
            controller = %connection.next_controller_address(),
            "the load balancer has opened its stream to the controller"
        );
        forwarder.begin_controller_stream();
        let mut state_timer = tokio::time::interval(LB_STATE_MESSAGE_INTERVAL);
        state_timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Ok(Self {
            message_sender,
            updates,
            state_timer,
            traffic_timer: interval_skipping_missed_ticks(forwarder.traffic_report_interval()),
            last_table_count_and_generation: (0, 0),
            is_state_due: false,
            next_state_message_at: tokio::time::Instant::now(),
            _client: client,
        })
    }

    /// Queues a message to the controller. If the queue is full, the message is lost.
    fn try_send(&self, message: Message) {
        let _ = self.message_sender.try_send(to_load_balancer_message(message));
    }

    /// Applies an update from the controller, and acknowledges it if it was a usable table. Requests a state message if
    /// the values of the last one have changed. Fails if a complete configuration is needed.
    fn process_update(
        &mut self,
        update: v1::DataplaneUpdate,
        forwarder: &mut Forwarder,
        sweeper: &mut ConnectionSweeper,
    ) -> anyhow::Result<()> {
        let table_in_force = apply_dataplane_update(forwarder, sweeper, update);
        anyhow::ensure!(
            !forwarder.needs_complete_configuration(),
            "a change does not fit the configuration in force: expected a complete configuration"
        );
        if let Some(table_in_force) = table_in_force {
            // The message only serves latency metrics, so it may be lost.
            self.try_send(Message::TableInForce(table_in_force));
        }
        if self.traffic_timer.period() != forwarder.traffic_report_interval() {
            self.traffic_timer = interval_skipping_missed_ticks(forwarder.traffic_report_interval());
        }
        self.is_state_due |= self.last_table_count_and_generation
            != (forwarder.installed_table_count(), forwarder.confirmed_generation());
        Ok(())
    }

    fn send_traffic_message(&self, forwarder: &Forwarder) {
        // The counts are totals, so the next message replaces a lost one.
        if let Some(traffic_message) = forwarder.build_traffic_message() {
            self.try_send(Message::Traffic((&traffic_message).into()));
        }
    }

    fn send_health_message(&self, forwarder: &mut Forwarder) {
        if let Some(health_message) = forwarder.take_due_health_message() {
            self.try_send(Message::Health((&health_message).into()));
        }
    }

    fn send_state_message(&mut self, forwarder: &Forwarder, daemon_state: impl FnOnce() -> v1::LoadBalancerState) {
        self.last_table_count_and_generation = (forwarder.installed_table_count(), forwarder.confirmed_generation());
        self.is_state_due = false;
        self.next_state_message_at = tokio::time::Instant::now() + MIN_STATE_MESSAGE_INTERVAL;
        // The message may be lost, because the next one replaces it.
        self.try_send(Message::State(daemon_state()));
    }
}

fn interval_skipping_missed_ticks(period: Duration) -> Interval {
    let mut interval = tokio::time::interval(period);
    interval.set_missed_tick_behavior(MissedTickBehavior::Skip);
    interval
}

/// Returns the time since the first call of this function, on a monotonic clock.
fn monotonic_time() -> Duration {
    static PROCESS_START_TIME: OnceLock<Instant> = OnceLock::new();
    PROCESS_START_TIME.get_or_init(Instant::now).elapsed()
}

fn build_registration_message(config: &LoadBalancerConfig, applied_generation: u64) -> v1::LoadBalancerRegistration {
    let device_name = vlan_device::vlan_device_name(&config.interface, config.vlan.unwrap_or_default());
    let own_address = config.address.or_else(|| neighbour::interface_routable_address(&device_name?));
    v1::LoadBalancerRegistration {
        name: config.name.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        address: own_address.map(address_to_bytes).unwrap_or_default(),
        configuration_generation: applied_generation,
    }
}

fn to_load_balancer_message(message: Message) -> v1::LoadBalancerMessage {
    v1::LoadBalancerMessage { message: Some(message) }
}

/// Applies an update from the controller, and returns the acknowledgement if it was a table. An unusable update is
/// logged and reported, and the previous state remains.
fn apply_dataplane_update(
    forwarder: &mut Forwarder,
    sweeper: &mut ConnectionSweeper,
    update: v1::DataplaneUpdate,
) -> Option<v1::TableInForce> {
    let started_at = Instant::now();
    match update.update {
        Some(Update::Configuration(configuration)) => match FleetConfiguration::decode(configuration) {
            Ok((number, configuration, rejected)) => {
                coreward_daemon::run_with_raised_watchdog_limit(XDP_PROGRAM_LOAD_TIMEOUT, || {
                    forwarder.apply_and_report_configuration(number, configuration, &rejected);
                });
            }
            Err(error) => forwarder.reject_configuration(0, &error.into()),
        },
        Some(Update::Change(change)) => match FleetConfigurationChange::decode(change) {
            Ok((change, rejected)) => coreward_daemon::run_with_raised_watchdog_limit(XDP_PROGRAM_LOAD_TIMEOUT, || {
                forwarder.apply_and_report_change(change, &rejected);
            }),
            Err(error) => forwarder.reject_configuration(0, &error.into()),
        },
        Some(Update::Table(bytes)) => {
            let table_in_force = install_and_acknowledge_table(forwarder, bytes)?;
            forwarder.record_table_install_latency(started_at.elapsed());
            return Some(table_in_force);
        }
        Some(Update::SocketAnswer(answer)) => free_closed_connections(forwarder, sweeper, answer),
        None => tracing::warn!(
            event = "update-unknown",
            "the controller has sent an update of an unknown kind, which is ignored: upgrade the load balancer"
        ),
    }
    None
}

/// Frees the table entries of the connections that the agent's answer reports as closed.
fn free_closed_connections(forwarder: &mut Forwarder, sweeper: &mut ConnectionSweeper, answer: v1::SocketAnswer) {
    let freed_result = SocketAnswer::try_from(answer)
        .map_err(anyhow::Error::from)
        .and_then(|answer| forwarder.free_connections(&sweeper.handle_socket_answer(&answer, monotonic_time())));
    if let Err(error) = freed_result {
        log_rejection("socket-answer", None, &format!("{error:#}"));
    }
}

/// Installs a placement table and returns its acknowledgement. If the table is unusable, reports this and returns
/// `None`.
fn install_and_acknowledge_table(forwarder: &mut Forwarder, bytes: Bytes) -> Option<v1::TableInForce> {
    let install_result = match table::decode_table(bytes.clone()) {
        Ok((service, table)) => {
            let install_result = forwarder.install_table(service, &table);
            forwarder.record_table_install_result(service.get().into(), table.generation, &install_result);
            install_result
                .map(|()| v1::TableInForce { service_index: service.get().into(), generation: table.generation })
        }
        Err(error) => {
            // Even a table that cannot be used usually names its service, which is needed for the report.
            let table_message = v1::PlacementTable::decode(bytes).unwrap_or_default();
            let decode_result = Err::<(), anyhow::Error>(error.into());
            forwarder.record_table_install_result(
                table_message.service_index,
                table_message.generation,
                &decode_result,
            );
            decode_result.map(|()| v1::TableInForce::default())
        }
    };
    install_result.ok()
}
