//! State of the controller that all callers share.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use coreward_api::types::{Keys, LoadBalancer, Loads, Overview, OverviewService, Server, Service, Status, Table};
use coreward_etcd::leadership::Leadership;
use coreward_metrics::latency_histogram::LatencyHistogram;
use coreward_metrics::message_metrics;
use coreward_metrics::snapshot::MetricsSnapshot;
use coreward_model::policy::ServerPool;
use coreward_model::{ServerId, ServiceAddress};
use coreward_wire::{ServiceIndex, table};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::Instant;

use coreward_controller::due_tables::TableInputPollCursor;
use coreward_controller::explain::{PacketExplanationError, ServiceSnapshot};
use coreward_controller::{ClockReadings, Controller, NewPlacementTable, ServicePositions, metrics, tables};
use coreward_fleet::audit::FleetChangeAuthor;
use coreward_fleet::clock::{RecordClock, wall_clock_time};
use coreward_fleet::config::PlacementTableTiming;
use coreward_fleet::fleet::{Fleet, FleetServer};
use coreward_metrics::metric_declarations::{Component, HistogramMetric, declare_histogram};
use coreward_metrics::metrics;

use super::socket_query_relay::SocketQueryRelay;
use super::state_manager::{FleetRecordChange, FleetStateCounters};
use super::table_cpu_budget::TableCpuBudget;
use super::update_publisher::UpdatePublisher;

metrics! {
    TABLE_BUILD_DELAY_SECONDS: HistogramMetric = declare_histogram(
        "coreward_table_build_delay_seconds", &[Component::Controller],
        "Time from a server's newest report to the tables that contain it",
    );
    TABLE_PROPAGATION_SECONDS: HistogramMetric = declare_histogram(
        "coreward_table_propagation_seconds", &[Component::Controller],
        "Time from the receipt of the report that triggers a table until a load balancer acknowledges the table",
    );
    REPORT_SENT_TO_KERNEL_SECONDS: HistogramMetric = declare_histogram(
        "coreward_report_sent_to_kernel_seconds", &[Component::Controller],
        "Like coreward_table_propagation_seconds, but from the send time at the agent, by two machines' wall clocks",
    );
}

pub struct ControllerState {
    controller: Mutex<Controller>,
    /// This controller's leadership in etcd, or `None` if no other controllers share its store.
    leadership: Option<Arc<Leadership>>,
    pub publisher: UpdatePublisher,
    tables_due_notification: Notify,
    table_budget: TableCpuBudget,
    /// Sender of the number of changes of agents' configurations so far. Agents' streams wait for the next change.
    agent_configuration_version_sender: watch::Sender<u64>,
    pub socket_query_relay: SocketQueryRelay,
    is_deposed_sender: watch::Sender<bool>,
    change_request_sender: mpsc::Sender<FleetRecordChangeRequest>,
    /// Whether tables may be made. After a restart, they must wait for agents' reports.
    are_tables_allowed: AtomicBool,
    /// Inputs of the newest published configuration, other than the fleet document and the records.
    last_published_inputs: Mutex<LastPublishedTableInputs>,
    /// Histogram of the time from a server's newest report to the publication of the table made from it.
    report_to_table_latency: Mutex<LatencyHistogram>,
    start_time: Instant,
    clock: RecordClock,
    state_counters: Arc<FleetStateCounters>,
}

/// Requested change of the records, with its author and a channel to the waiting caller.
pub struct FleetRecordChangeRequest {
    pub change: FleetRecordChange,
    pub author: FleetChangeAuthor,
    /// Sender of the result, which is used when the change is active or rejected.
    pub reply_sender: oneshot::Sender<anyhow::Result<FleetRecordChangeOutcome>>,
}

impl FleetRecordChangeRequest {
    pub fn without_reply(change: FleetRecordChange, author: FleetChangeAuthor) -> Self {
        Self { change, author, reply_sender: oneshot::channel().0 }
    }
}

/// Result of one change, which later changes do not affect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FleetRecordChangeOutcome {
    /// Whether the change has led to a new configuration.
    pub has_new_configuration: bool,
    /// Generation of the fleet document after the change.
    pub document_generation: u64,
}

/// Maximum number of servers that are read during one lock of the controller, which lasts some hundred microseconds.
const MAX_SERVERS_READ_PER_LOCK: usize = 32;

const RECORD_CHANGE_QUEUE_LENGTH: usize = 64;

#[derive(Default)]
struct LastPublishedTableInputs {
    live_load_balancers: BTreeSet<String>,
    previous_server_change_count: u64,
    last_tables_made_at: Duration,
}

impl ControllerState {
    /// Returns the state, and the receiver of requested changes.
    pub fn new(
        controller: Controller,
        (clock, state_counters): (RecordClock, Arc<FleetStateCounters>),
        leadership: Option<Arc<Leadership>>,
    ) -> (Self, mpsc::Receiver<FleetRecordChangeRequest>) {
        let start_time = ClockReadings {
            monotonic_time: Duration::ZERO,
            wall_time: wall_clock_time(),
            record_clock_time: clock.now(),
        };
        let configuration = controller.fleet_configuration(start_time);
        let (change_requests, receiver) = mpsc::channel(RECORD_CHANGE_QUEUE_LENGTH);
        let state = Self {
            publisher: UpdatePublisher::new(configuration),
            tables_due_notification: Notify::new(),
            table_budget: TableCpuBudget::default(),
            agent_configuration_version_sender: watch::Sender::new(0),
            socket_query_relay: SocketQueryRelay::default(),
            leadership,
            is_deposed_sender: watch::Sender::new(false),
            change_request_sender: change_requests,
            are_tables_allowed: AtomicBool::new(false),
            last_published_inputs: Mutex::new(LastPublishedTableInputs {
                live_load_balancers: controller.live_load_balancer_names(start_time),
                ..LastPublishedTableInputs::default()
            }),
            report_to_table_latency: Mutex::default(),
            controller: Mutex::new(controller),
            start_time: Instant::now(),
            clock,
            state_counters,
        };
        (state, receiver)
    }

    /// Requests a change by the controller itself, and waits until it is active. Fails if it cannot be written.
    pub async fn request_change_by_controller(
        &self,
        request_own_change: FleetRecordChange,
    ) -> anyhow::Result<FleetRecordChangeOutcome> {
        self.request_change(FleetChangeAuthor::controller(), request_own_change).await
    }

    pub async fn request_change(
        &self,
        author: FleetChangeAuthor,
        change: FleetRecordChange,
    ) -> anyhow::Result<FleetRecordChangeOutcome> {
        let (reply_sender, outcome) = oneshot::channel();
        self.change_request_sender
            .send(FleetRecordChangeRequest { change, author, reply_sender })
            .await
            .context("the controller is ending")?;
        outcome.await.context("the controller is ending")?
    }

    /// Returns the leadership in etcd, or `None` if there is no other controller.
    pub fn leadership(&self) -> Option<&Arc<Leadership>> {
        self.leadership.as_ref()
    }

    /// Returns whether this controller still leads. Callers check this before every answer, because the process may
    /// have been suspended for any length of time.
    pub fn is_leading(&self) -> bool {
        self.leadership.as_ref().is_none_or(|leadership| leadership.is_valid())
    }

    /// Waits until this controller is deposed ([`ControllerState::depose`]). Streams use this instead of a timer.
    pub async fn wait_until_deposed(&self) {
        let _ = self.is_deposed_sender.subscribe().wait_for(|deposed| *deposed).await;
    }

    /// Marks this controller as deposed, which ends all streams.
    pub fn depose(&self) {
        self.is_deposed_sender.send_replace(true);
    }

    pub fn now(&self) -> ClockReadings {
        ClockReadings {
            monotonic_time: self.start_time.elapsed(),
            wall_time: wall_clock_time(),
            record_clock_time: self.clock.now(),
        }
    }

    /// Locks the controller. Callers hold the lock for microseconds only, and never across an await.
    pub fn lock_controller(&self) -> MutexGuard<'_, Controller> {
        // Every call leaves a consistent state, so other callers can continue after a panic.
        self.controller.lock()
    }

    /// Runs one step of a long operation under the lock. Other callers can get the lock before the next step.
    fn with_lock<T>(&self, step: impl FnOnce(&mut Controller) -> T) -> T {
        let mut controller = self.lock_controller();
        let result = step(&mut controller);
        MutexGuard::unlock_fair(controller);
        result
    }

    /// Returns the full status, which takes tens of ms for thousands of servers. It includes full RSS keys if
    /// `includes_rss_keys` is set.
    pub fn status(&self, includes_rss_keys: bool) -> Status {
        let now = self.now();
        let mut status = self.lock_controller().status_summary(now);
        status.warnings.extend(self.state_counters.warnings());
        status.keys = self.add_agents_delaying_rotation(status.keys, now);
        status.services = self.services(includes_rss_keys, now);
        status.servers = self.servers(includes_rss_keys, now);
        status
    }

    /// Returns the status of all services, with full RSS keys if `includes_rss_keys` is set.
    pub fn services(&self, includes_rss_keys: bool, now: ClockReadings) -> Vec<Service> {
        (0..).map_while(|position| self.service_at_position(position, includes_rss_keys, now)).collect()
    }

    /// Returns the status of the service with this name, as in [`ControllerState::services`].
    pub fn service(&self, name: &str, includes_rss_keys: bool, now: ClockReadings) -> Option<Service> {
        loop {
            let service_position = self.lock_controller().service_position(name)?;
            let service = self.service_at_position(service_position, includes_rss_keys, now);
            // Another document may have changed the position meanwhile.
            if service.as_ref().is_some_and(|service| service.name == name) {
                return service;
            }
        }
    }

    /// Returns the status of all servers, with full RSS keys if `includes_rss_keys` is set.
    pub fn servers(&self, includes_rss_keys: bool, now: ClockReadings) -> Vec<Server> {
        self.map_servers(|controller, id, server| controller.server_status(id, server, includes_rss_keys, now))
    }

    /// Returns the status of the server with this name, as in [`ControllerState::servers`]. If the operator changed the
    /// server's id, this is the status of the newer id.
    pub fn server(&self, name: &str, includes_rss_keys: bool, now: ClockReadings) -> Option<Server> {
        let status_if_named = |controller: &Controller, id, server: &FleetServer| {
            (server.name == name).then(|| controller.server_status(id, server, includes_rss_keys, now))
        };
        self.map_servers(status_if_named).into_iter().flatten().next_back()
    }

    pub fn load_balancers(&self) -> Vec<LoadBalancer> {
        let now = self.now();
        self.lock_controller().load_balancer_statuses(now)
    }

    /// Returns the part of the status that changes rarely.
    pub fn overview(&self, now: ClockReadings) -> Overview {
        let mut overview = self.lock_controller().overview_summary(now);
        let read_service = |controller: &Controller, position, pool: Option<&ServerPool>| {
            controller.overview_service(position, pool, now)
        };
        overview.keys = self.add_agents_delaying_rotation(overview.keys, now);
        overview.servers = self.map_servers(|controller, id, server| controller.overview_server(id, server, now));
        let server_names: HashMap<u32, &String> =
            overview.servers.iter().map(|server| (server.id, &server.name)).collect();
        let with_server_names = |(mut service, servers): (OverviewService, Vec<ServerId>)| {
            service.servers =
                servers.iter().filter_map(|id| server_names.get(&id.get().into()).copied().cloned()).collect();
            service
        };
        overview.services =
            (0..).map_while(|position| self.read_service(position, now, read_service).map(with_server_names)).collect();
        overview
    }

    /// Returns the part of the status that changes with every report.
    pub fn loads(&self) -> Loads {
        let now = self.now();
        let mut loads = self.lock_controller().loads_summary(now);
        loads.servers = self.map_servers(|controller, id, server| controller.server_loads(id, server, now));
        loads
    }

    /// Returns a snapshot of this service, to explain its placements. Fails if no service has this address.
    pub fn service_snapshot(&self, address: ServiceAddress) -> Result<ServiceSnapshot, PacketExplanationError> {
        let now = self.now();
        let service_view = self.lock_controller().service_snapshot(address, now)?;
        let servers =
            self.map_servers(|controller, id, server| controller.snapshot_server(&service_view, id, server, now));
        Ok(service_view.with_snapshot_servers(servers))
    }

    /// Returns the newest placement table of the service, or `None` if the service is unknown or has no table yet.
    pub fn table(&self, service: &str) -> Option<Table> {
        let (table, age) = self.lock_controller().newest_table(service, self.now())?;
        let server_names = self.map_servers(|_, id, server| (id, server.name.clone())).into_iter().collect();
        Some(tables::to_api_table(service, &table, age, &server_names))
    }

    /// Calls `to_value` for each server and returns the results. The controller's lock is released regularly.
    fn map_servers<T>(&self, to_value: impl Fn(&Controller, ServerId, &FleetServer) -> T) -> Vec<T> {
        let (mut values, mut last_id) = (Vec::new(), None);
        loop {
            let previous_count = values.len();
            self.with_lock(|controller| {
                for (id, server) in controller.servers_after_id(last_id).take(MAX_SERVERS_READ_PER_LOCK) {
                    values.push(to_value(controller, id, server));
                    last_id = Some(id);
                }
            });
            if values.len() - previous_count < MAX_SERVERS_READ_PER_LOCK {
                return values;
            }
        }
    }

    /// Calls `service_reader` for the service at `service_position`. If the controller has no server pool of the
    /// service in its cache, also passes a newly made pool.
    fn read_service<T>(
        &self,
        service_position: usize,
        now: ClockReadings,
        service_reader: impl FnOnce(&Controller, usize, Option<&ServerPool>) -> Option<T>,
    ) -> Option<T> {
        let uncached_pool = self.compute_pool_unless_cached(service_position, now);
        self.with_lock(|controller| service_reader(controller, service_position, uncached_pool.as_ref()))
    }

    fn service_at_position(
        &self,
        service_position: usize,
        includes_rss_keys: bool,
        now: ClockReadings,
    ) -> Option<Service> {
        let read_status = |controller: &Controller, position, pool: Option<&ServerPool>| {
            controller.service_status(position, pool, includes_rss_keys, now)
        };
        Some(self.add_members(service_position, self.read_service(service_position, now, read_status)?, now))
    }

    /// Adds the members of the service to its status. The lock is released regularly.
    fn add_members(&self, service_position: usize, service: Service, now: ClockReadings) -> Service {
        let (mut members, mut last_id) = (Vec::new(), None);
        loop {
            let member_batch = self.with_lock(|controller| {
                controller.members_after_id(
                    (service_position, service.address),
                    last_id,
                    MAX_SERVERS_READ_PER_LOCK,
                    now,
                )
            });
            let Some((batch_end, _)) = member_batch.last() else { return service.with_members(members) };
            last_id = Some(*batch_end);
            members.extend(member_batch.into_iter().map(|(_, member)| member));
        }
    }

    /// Makes the service's server pool, or returns `None` if one is cached. This takes tens of ms for thousands of
    /// servers.
    fn compute_pool_unless_cached(&self, service_position: usize, now: ClockReadings) -> Option<ServerPool> {
        if !self.lock_controller().lacks_cached_pool(service_position)? {
            return None;
        }
        let mut servers = Vec::new();
        while !self.with_lock(|controller| {
            controller.append_next_pool_servers(service_position, &mut servers, MAX_SERVERS_READ_PER_LOCK, now)
        }) {}
        self.lock_controller().build_pool_from_servers(service_position, servers, now)
    }

    pub fn keys(&self) -> Keys {
        let now = self.now();
        let keys = self.lock_controller().keys_summary(now);
        self.add_agents_delaying_rotation(keys, now)
    }

    fn add_agents_delaying_rotation(&self, mut keys: Keys, now: ClockReadings) -> Keys {
        let agents = self.map_servers(|controller, id, server| controller.agent_delaying_rotation(id, server, now));
        keys.pending_peers.extend(agents.into_iter().flatten());
        keys
    }

    pub fn are_tables_allowed(&self) -> bool {
        self.are_tables_allowed.load(Ordering::Relaxed)
    }

    pub fn metrics_snapshot(&self) -> MetricsSnapshot {
        let now = self.now();
        let mut snapshot = message_metrics::base_metrics_snapshot(Component::Controller);
        metrics::add_status_metrics(&mut snapshot, &self.status(false), now.wall_time);
        self.lock_controller().add_metrics(&mut snapshot, now);
        self.state_counters.add_metrics(&mut snapshot);
        let latency_histogram = *self.report_to_table_latency.lock();
        snapshot.add_histogram(&TABLE_BUILD_DELAY_SECONDS, latency_histogram);
        let (since_receipt, since_sent) = {
            let controller = self.lock_controller();
            (controller.table_acks.latency_since_report_receipt, controller.table_acks.latency_since_report_sent)
        };
        snapshot.add_histogram(&TABLE_PROPAGATION_SECONDS, since_receipt);
        snapshot.add_histogram(&REPORT_SENT_TO_KERNEL_SECONDS, since_sent);
        snapshot
    }

    pub fn are_loads_and_health_known(&self) -> bool {
        let now = self.now();
        let controller = self.lock_controller();
        controller.are_all_loads_known(now) && controller.has_all_check_results(now)
    }

    /// Makes the tables and updates that are due at the end of a report interval. Returns the time until the next
    /// interval ends.
    pub fn end_report_interval(&self) -> Duration {
        let now = self.now();
        let (table_timing, interval) = {
            let controller = self.lock_controller();
            (controller.fleet().table_timing, controller.fleet().report_interval)
        };
        match table_timing {
            PlacementTableTiming::Interval => self.make_all_tables(now),
            PlacementTableTiming::OnChange => {
                self.poll_all_table_inputs(now, true);
                self.tables_due_notification.notify_one();
            }
        }
        self.publish_live_load_balancers(now);
        interval
    }

    /// Makes the tables of all services, as `table_updates = "interval"` requires.
    fn make_all_tables(&self, now: ClockReadings) {
        let previous_tables_made_at =
            std::mem::replace(&mut self.lock_published_inputs().last_tables_made_at, now.monotonic_time);
        let (tables, report_arrival_times) = {
            let mut controller = self.lock_controller();
            let tables = controller.end_report_interval(now);
            let report_arrival_times: Vec<Duration> =
                controller.arrival_times_of_reports_after(previous_tables_made_at).collect();
            (tables, report_arrival_times)
        };
        self.publish_new_tables(&tables, report_arrival_times.into_iter());
    }

    /// Makes due tables, the longest due first, until none is due or `time_limit` has passed. Returns the elapsed time.
    pub fn make_due_tables(&self, time_limit: Duration) -> Duration {
        let start_time = Instant::now();
        while start_time.elapsed() < time_limit {
            let now = self.now();
            let Some(due_table) = self.lock_controller().make_next_due_table(now) else { break };
            self.publish_new_tables(
                &[due_table.new_table],
                due_table.trigger.is_load_change.then_some(due_table.trigger.received_at).into_iter(),
            );
        }
        start_time.elapsed()
    }

    /// Makes due tables if the table budget allows. Returns the time at which tables may be made next.
    pub fn make_tables_within_budget(&self) -> Instant {
        self.table_budget.run_within_budget(|limit| self.make_due_tables(limit))
    }

    /// Makes due tables after new loads arrived, if the budget allows, in the task that received the loads. A separate
    /// task would wait behind a burst of hundreds of tasks with reports.
    pub fn on_loads_updated(&self) {
        if self.may_make_tables() {
            self.make_tables_within_budget();
            self.on_table_inputs_changed();
        }
    }

    pub async fn wait_until_tables_due(&self) {
        self.tables_due_notification.notified().await;
    }

    /// Notifies the table scheduler that inputs of tables may have changed.
    pub fn on_table_inputs_changed(&self) {
        if self.may_make_tables() {
            self.tables_due_notification.notify_one();
        }
    }

    /// Returns whether any tables are due and may currently be made.
    pub fn may_make_tables(&self) -> bool {
        self.are_tables_allowed() && self.lock_controller().has_due_table()
    }

    fn publish_new_tables(&self, tables: &[NewPlacementTable], report_arrival_times: impl Iterator<Item = Duration>) {
        self.publisher.publish_tables(tables.iter().map(|new_table| {
            (new_table.service_index, table::encode_table(new_table.service_index, &new_table.table))
        }));
        let publication_time = self.start_time.elapsed();
        let mut latency_histogram = self.report_to_table_latency.lock();
        report_arrival_times
            .for_each(|arrival_time| latency_histogram.observe_latency(publication_time.saturating_sub(arrival_time)));
        drop(latency_histogram);
        let predecessor_change_count = self.lock_controller().previous_server_change_count();
        if std::mem::replace(&mut self.lock_published_inputs().previous_server_change_count, predecessor_change_count)
            != predecessor_change_count
        {
            self.agent_configuration_version_sender.send_modify(|count| *count += 1);
        }
    }

    fn lock_published_inputs(&self) -> MutexGuard<'_, LastPublishedTableInputs> {
        self.last_published_inputs.lock()
    }

    fn publish_live_load_balancers(&self, now: ClockReadings) {
        let controller = self.lock_controller();
        let live_load_balancers = controller.live_load_balancer_names(now);
        let mut last_published_inputs = self.lock_published_inputs();
        if last_published_inputs.live_load_balancers != live_load_balancers {
            last_published_inputs.live_load_balancers = live_load_balancers;
            self.publisher.publish_configuration(controller.fleet_configuration(now), |_| true);
        }
    }

    pub fn configure(&self, fleet: Fleet) {
        let now = self.now();
        let remaining_services: HashSet<ServiceIndex> = fleet.services.iter().map(|service| service.index).collect();
        // No caller waits for the encoding, or until the old configuration is dropped.
        let live_load_balancers = self.lock_controller().live_load_balancer_names(now);
        let configuration = fleet.load_balancer_configuration(|name| live_load_balancers.contains(name));
        let service_indexes = ServicePositions::for_fleet(&fleet);
        let old_configuration = self.lock_controller().configure_with_positions(fleet, service_indexes);
        drop(old_configuration);
        // Earlier tables may contain servers that are gone, which the data plane skips.
        self.publisher.publish_configuration(configuration, |service| remaining_services.contains(&service));
        self.agent_configuration_version_sender.send_modify(|count| *count += 1);
        if !self.are_tables_allowed.load(Ordering::Relaxed) {
            return;
        }
        let table_updates = self.lock_controller().fleet().table_timing;
        match table_updates {
            PlacementTableTiming::Interval => self.make_all_tables(now),
            PlacementTableTiming::OnChange => self.poll_table_inputs(),
        }
    }

    /// Polls inputs that change with time, and makes due tables if `table_updates = "on-change"`.
    pub fn poll_table_inputs(&self) {
        if !self.are_tables_allowed.load(Ordering::Relaxed) {
            return;
        }
        let table_updates = self.lock_controller().fleet().table_timing;
        if table_updates == PlacementTableTiming::OnChange {
            self.poll_all_table_inputs(self.now(), false);
            self.tables_due_notification.notify_one();
        }
    }

    fn poll_all_table_inputs(&self, now: ClockReadings, has_interval_ended: bool) {
        let mut next_cursor = Some(TableInputPollCursor::default());
        while let Some(cursor) = next_cursor {
            next_cursor =
                self.with_lock(|controller| controller.poll_table_inputs_from(cursor, now, has_interval_ended));
        }
    }

    /// Allows tables to be made after a restart.
    pub fn allow_tables(&self) {
        self.are_tables_allowed.store(true, Ordering::Relaxed);
    }

    pub fn subscribe_to_agent_configuration_version(&self) -> watch::Receiver<u64> {
        self.agent_configuration_version_sender.subscribe()
    }
}
