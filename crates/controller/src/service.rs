//! A service, its policy and its newest table.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use coreward_api::types::ServerState;
use coreward_model::ServerId;
use coreward_model::bucket_history::BucketHistory;
use coreward_model::consistency::ConsistencyMode;
use coreward_model::health::AllServersDownTreatment;
use coreward_model::placement::{PlacementRule, PlacementTable, ServerCore};
use coreward_model::policy::{PlacementPolicy, ServerPool};
use coreward_model::tuple::TransportProtocol;

use super::dirty_server_set::DirtyServerSet;
use super::input_fingerprints::{ServerShard, TableInputFingerprints};
use super::{ClockReadings, NewPlacementTable, create_policy};
use coreward_fleet::fleet::FleetService;

/// Fraction of its full share of new connections that a server gets at the beginning of a slow start. With 0, a pool of
/// new servers would have no share at all.
const INITIAL_SLOW_START_FRACTION: f64 = 1.0 / 64.0;

/// Permission of a server to take a service's new connections, or the reason why it may not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ServerEligibility {
    Eligible,
    /// Health checks have found the server down.
    Unhealthy,
    /// No load balancer reaches the server on the network.
    Unreachable,
    Drained,
    Left,
}

impl ServerEligibility {
    /// Returns the state of a server with this eligibility, apart from a slow start.
    pub fn to_server_state(self) -> ServerState {
        match self {
            ServerEligibility::Left => ServerState::Gone,
            ServerEligibility::Drained => ServerState::Draining,
            ServerEligibility::Unhealthy | ServerEligibility::Unreachable => ServerState::Down,
            ServerEligibility::Eligible => ServerState::Active,
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub struct ServerStatus {
    pub state: ServerState,
    /// Time of the last change of the state, since the controller's start, or `None` if it was before the start.
    pub state_since: Option<Duration>,
    pub eligibility: ServerEligibility,
    /// Time at which the server became eligible, since the controller's start, or `None` if it was before the start.
    eligible_since: Option<Duration>,
}

pub struct Service {
    configuration: FleetService,
    policy: Box<dyn PlacementPolicy>,
    table_generation: u64,
    newest_table_and_creation_time: Option<(Arc<PlacementTable>, Duration)>,
    server_statuses: BTreeMap<ServerId, ServerStatus>,
    /// Whether servers that are down take new connections because no server is up.
    is_failing_open: bool,
    /// Whether a table has been made. The servers of the first table have no slow start.
    has_table: bool,
    bucket_history: BucketHistory,
    /// Whether `bucket_history` has changed since it was last stored.
    is_bucket_history_changed: bool,
    /// Previous owners of each server's buckets, from the stored history and from this process. The flow tables of load
    /// balancers keep the connections of these owners.
    previous_servers_by_server: BTreeMap<ServerId, BTreeSet<ServerId>>,
    previous_server_change_count: u64,
    pub due_trigger: Option<TableTrigger>,
    /// Servers that have changed since the newest table was made.
    dirty_servers: DirtyServerSet,
    /// Pool from which the newest table was made, or `None` if all servers must be read again.
    cached_pool: Option<ServerPool>,
    /// Number of connections opened in the last full report interval, if known.
    connections_opened_in_interval: Option<u64>,
    is_first_table_of_interval: bool,
    /// Fingerprints of the newest table's inputs, except loads.
    input_fingerprints: TableInputFingerprints,
}

/// State of a service that a new configuration has replaced. It is kept only to be dropped later.
pub struct ReplacedService {
    _fleet: FleetService,
    _pool: Option<ServerPool>,
}

/// Oldest change that no table contains yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableTrigger {
    /// Time at which the change arrived, since the controller's start.
    pub received_at: Duration,
    /// Whether the load of a server or a rack has changed. Otherwise a polled input has changed.
    pub is_load_change: bool,
    /// Time at which the report was sent, by the sender's wall clock since 1970, or `None` if unknown.
    pub sent_at: Option<Duration>,
}

impl Service {
    pub fn new(configuration: FleetService) -> Self {
        Self {
            policy: create_policy(&configuration),
            table_generation: 0,
            newest_table_and_creation_time: None,
            server_statuses: BTreeMap::new(),
            is_failing_open: false,
            has_table: false,
            bucket_history: configuration.bucket_history.clone(),
            is_bucket_history_changed: false,
            previous_servers_by_server: configuration.bucket_history.previous_servers_by_current_server(),
            previous_server_change_count: 0,
            due_trigger: None,
            dirty_servers: DirtyServerSet::default(),
            cached_pool: None,
            connections_opened_in_interval: None,
            is_first_table_of_interval: true,
            input_fingerprints: TableInputFingerprints::default(),
            configuration,
        }
    }

    pub fn is_same_service(&self, new: &FleetService) -> bool {
        self.configuration.name == new.name && self.configuration.index == new.index
    }

    /// Returns the service with a new configuration, and the replaced state. Dropping that state takes milliseconds for
    /// thousands of servers. The generations of tables continue.
    pub fn with_new_configuration(mut self, new: FleetService) -> (Self, ReplacedService) {
        if self.configuration.policy_name != new.policy_name || self.configuration.hash_seed != new.hash_seed {
            self.policy = create_policy(&new);
        }
        let previous_service =
            ReplacedService { _fleet: std::mem::replace(&mut self.configuration, new), _pool: self.cached_pool.take() };
        let members = &self.configuration.members;
        self.dirty_servers.retain_fleet_servers(|server| members.contains_key(&server));
        self.previous_servers_by_server.retain(|server, previous_servers| {
            previous_servers.retain(|server| members.contains_key(server));
            members.contains_key(server) && !previous_servers.is_empty()
        });
        (self, previous_service)
    }

    pub fn configuration(&self) -> &FleetService {
        &self.configuration
    }

    /// Updates the eligibility of the service's servers. Servers of the first table have no slow start.
    pub fn update_eligibilities(&mut self, eligibilities: Vec<(ServerId, ServerEligibility)>, now: ClockReadings) {
        let change_time = self.has_table.then_some(now.monotonic_time);
        let mut previous_statuses = std::mem::take(&mut self.server_statuses);
        let none_is_eligible = eligibilities.iter().all(|(_, eligibility)| *eligibility != ServerEligibility::Eligible);
        self.is_failing_open = none_is_eligible
            && self.configuration.when_all_down == AllServersDownTreatment::FailOpen
            && eligibilities.iter().any(|(_, eligibility)| *eligibility == ServerEligibility::Unhealthy);
        self.server_statuses = eligibilities
            .into_iter()
            .map(|(id, eligibility)| {
                let previous_status = previous_statuses.remove(&id);
                let eligible_since = previous_status
                    .as_ref()
                    .filter(|status| status.eligibility == ServerEligibility::Eligible)
                    .map(|status| status.eligible_since);
                let eligible_from = eligible_since.unwrap_or(change_time);
                let state = self.state_for_eligibility(eligibility, eligible_from, now);
                let state_since =
                    previous_status.as_ref().filter(|status| status.state == state).map(|status| status.state_since);
                (
                    id,
                    ServerStatus {
                        state,
                        state_since: state_since.unwrap_or(change_time),
                        eligibility,
                        eligible_since: eligible_from,
                    },
                )
            })
            .collect();
        self.has_table = true;
    }

    fn state_for_eligibility(
        &self,
        eligibility: ServerEligibility,
        eligible_from: Option<Duration>,
        now: ClockReadings,
    ) -> ServerState {
        match eligibility {
            ServerEligibility::Eligible if self.slow_start_fraction_since(eligible_from, now) < 1.0 => {
                ServerState::Joining
            }
            other => other.to_server_state(),
        }
    }

    /// Returns the server's status, or `None` until the next table is made.
    pub fn server_status(&self, server: ServerId) -> Option<&ServerStatus> {
        self.server_statuses.get(&server)
    }

    pub fn is_failing_open(&self) -> bool {
        self.is_failing_open
    }

    /// Returns whether the server takes new connections, or `None` until the next table is made.
    pub fn takes_new_connections(&self, server: ServerId) -> Option<bool> {
        self.server_statuses.get(&server).map(|status| self.allows_new_connections(status.eligibility))
    }

    fn allows_new_connections(&self, eligibility: ServerEligibility) -> bool {
        match eligibility {
            ServerEligibility::Eligible => true,
            ServerEligibility::Unhealthy => self.is_failing_open,
            ServerEligibility::Unreachable | ServerEligibility::Drained | ServerEligibility::Left => false,
        }
    }

    /// Returns the fraction of its full share that the server gets. It increases from nearly 0 to 1 during the slow
    /// start, and then remains 1.
    pub fn slow_start_fraction(&self, server: ServerId, now: ClockReadings) -> f64 {
        self.server_statuses
            .get(&server)
            .map_or(1.0, |status| self.next_slow_start_fraction(server, status.eligibility, now))
    }

    /// Returns the [`Service::slow_start_fraction`] of the server in a table made at `now`, if it then has this
    /// eligibility.
    pub fn next_slow_start_fraction(
        &self,
        server: ServerId,
        eligibility: ServerEligibility,
        now: ClockReadings,
    ) -> f64 {
        if eligibility != ServerEligibility::Eligible {
            return 1.0;
        }
        let eligible_status =
            self.server_statuses.get(&server).filter(|status| status.eligibility == ServerEligibility::Eligible);
        self.slow_start_fraction_since(
            eligible_status.map_or(self.has_table.then_some(now.monotonic_time), |status| status.eligible_since),
            now,
        )
    }

    fn slow_start_fraction_since(&self, eligible_from: Option<Duration>, now: ClockReadings) -> f64 {
        let Some(start_time) = eligible_from.filter(|_| !self.configuration.slow_start_duration.is_zero()) else {
            return 1.0;
        };
        let elapsed_fraction = now.monotonic_time.saturating_sub(start_time).as_secs_f64()
            / self.configuration.slow_start_duration.as_secs_f64();
        elapsed_fraction.clamp(INITIAL_SLOW_START_FRACTION, 1.0)
    }

    /// Returns whether the service's tables depend on the loads that servers report.
    pub fn reads_loads(&self) -> bool {
        self.policy.reads_loads()
    }

    /// Returns each server's fair fraction of the service's new connections. Fractions are proportional to capacity if
    /// the policy considers it.
    pub fn fair_share_fractions(&self, pool: &ServerPool) -> Vec<(ServerId, f64)> {
        pool.server_fair_shares(self.policy.depends_on_capacity())
    }

    /// Returns whether the service's tables depend on the traffic counts of load balancers.
    pub fn reads_traffic(&self) -> bool {
        self.policy.reads_traffic()
    }

    pub fn mark_load_changed(&mut self, server: ServerId) {
        self.dirty_servers.mark_changed(server);
    }

    pub fn mark_relayed_load_changed(&mut self, server: ServerId) {
        self.dirty_servers.mark_relayed_load_changed(server);
    }

    pub fn mark_all_loads_changed(&mut self) {
        self.configuration.members.keys().for_each(|server| self.dirty_servers.mark_changed(*server));
    }

    /// Takes the pool from which the newest table was made, or returns `None` if all servers must be read again.
    pub fn take_cached_pool(&mut self) -> Option<ServerPool> {
        self.cached_pool.take()
    }

    /// Returns the cached pool, from which the newest table was made.
    pub fn cached_pool(&self) -> Option<&ServerPool> {
        self.cached_pool.as_ref()
    }

    pub fn cache_pool(&mut self, pool: ServerPool) {
        self.cached_pool = Some(pool);
    }

    /// Drops the cached pool, because an input other than loads has changed.
    pub fn drop_cached_pool(&mut self) {
        self.cached_pool = None;
    }

    /// Returns the servers that have changed since the newest table, or whose changes that table contains. A server may
    /// occur twice.
    pub fn dirty_servers(&self) -> impl Iterator<Item = ServerId> {
        self.dirty_servers.changed_servers()
    }

    /// Returns whether a new load of the server has arrived since the newest table was made.
    pub fn has_new_load(&self, server: ServerId) -> bool {
        self.dirty_servers.has_new_load(server)
    }

    /// Returns whether inputs of the server may have changed that are not in its rack's summary.
    pub fn needs_input_reread(&self, server: ServerId) -> bool {
        self.dirty_servers.needs_input_reread(server)
    }

    /// Begins a report interval. `opened_connection_count` is the number of connections opened in the previous
    /// interval, or `None` if it is unknown.
    pub fn begin_report_interval(&mut self, opened_connection_count: Option<u64>) {
        self.connections_opened_in_interval = opened_connection_count;
        self.is_first_table_of_interval = true;
    }

    pub fn with_interval_inputs(&self, pool: ServerPool) -> ServerPool {
        let pool = match self.connections_opened_in_interval {
            Some(opened_count) => pool.with_opened_connection_count(opened_count),
            None => pool,
        };
        if self.is_first_table_of_interval { pool } else { pool.for_another_table_in_interval() }
    }

    /// Stores the fingerprints of the next table's inputs, except loads. Returns whether they have changed.
    pub fn store_and_compare_fingerprints(
        &mut self,
        service_fingerprint: u64,
        fingerprints_by_shard: &[(ServerShard, u64)],
    ) -> bool {
        self.input_fingerprints.store_and_compare(service_fingerprint, fingerprints_by_shard)
    }

    /// Returns the shards of servers to poll next, or all shards if `is_full_poll` is set.
    pub fn next_shards_to_poll(&mut self, is_full_poll: bool) -> Vec<ServerShard> {
        self.input_fingerprints.next_shards_to_poll(&self.configuration.members, is_full_poll)
    }

    pub fn make_table(&mut self, pool: &ServerPool, now: ClockReadings) -> NewPlacementTable {
        self.table_generation += 1;
        let mut table = self.policy.compute_table(pool, self.configuration.bucket_count, self.table_generation);
        if self.bucket_history.update_bucket_servers(&table.consistent_server_by_bucket) {
            self.is_bucket_history_changed = true;
            self.add_previous_servers();
        }
        if !table.members.is_empty() {
            table.previous_consistent_server_by_bucket = self.bucket_history.previous_servers_or_empty();
        }
        table.down_servers = self.down_servers().collect();
        self.is_first_table_of_interval = false;
        table.load_age_by_core_slot = self.record_table_and_compute_ages(&table);
        let table = Arc::new(table);
        self.newest_table_and_creation_time = Some((table.clone(), now.monotonic_time));
        NewPlacementTable { service_index: self.configuration.index, table }
    }

    fn down_servers(&self) -> impl Iterator<Item = ServerId> {
        let is_down = |status: &ServerStatus| status.eligibility.to_server_state() == ServerState::Down;
        let down_servers = self
            .server_statuses
            .iter()
            .filter(move |(_, status)| is_down(status) && !self.allows_new_connections(status.eligibility));
        down_servers.map(|(id, _)| *id)
    }

    /// Records the servers whose loads a new table contains. Returns the table's
    /// [`PlacementTable::load_age_by_core_slot`].
    fn record_table_and_compute_ages(&mut self, table: &PlacementTable) -> Vec<u32> {
        self.dirty_servers.record_new_table(table.generation);
        if table.rule != PlacementRule::LeastAssigned {
            return Vec::new();
        }
        let newest_load_generation =
            |core: &ServerCore| self.dirty_servers.load_table_generation(core.server).unwrap_or(table.generation);
        let slot_ages: Vec<u32> =
            table.core_slots.iter().map(|core| (table.generation - newest_load_generation(core)) as u32).collect();
        if slot_ages.iter().all(|age| *age == 0) { Vec::new() } else { slot_ages }
    }

    fn add_previous_servers(&mut self) {
        for (server, previous_servers) in self.bucket_history.previous_servers_by_current_server() {
            let known_previous_servers = self.previous_servers_by_server.entry(server).or_default();
            let previously_known_count = known_previous_servers.len();
            known_previous_servers.extend(previous_servers);
            self.previous_server_change_count += u64::from(known_previous_servers.len() > previously_known_count);
        }
    }

    /// Returns the previous owners of the server's buckets, if packets may be forwarded to them.
    pub fn previous_servers(&self, server: ServerId) -> Option<&BTreeSet<ServerId>> {
        self.previous_servers_by_server.get(&server).filter(|_| self.forwards_unknown_packets())
    }

    pub fn previous_server_change_count(&self) -> u64 {
        if self.forwards_unknown_packets() { self.previous_server_change_count } else { 0 }
    }

    /// Returns whether the service's servers forward packets of unknown connections to each other. They do so for TCP,
    /// with any consistency mode except `none` and `hash-table`.
    fn forwards_unknown_packets(&self) -> bool {
        self.configuration.address.protocol == TransportProtocol::Tcp
            && !matches!(self.configuration.settings.consistency, ConsistencyMode::None | ConsistencyMode::HashTable)
    }

    pub fn take_changed_bucket_history(&mut self) -> Option<(String, BucketHistory)> {
        std::mem::take(&mut self.is_bucket_history_changed)
            .then(|| (self.configuration.name.clone(), self.bucket_history.clone()))
    }

    pub fn newest_table(&self) -> Option<NewPlacementTable> {
        self.newest_table_and_creation_time
            .as_ref()
            .map(|(table, _)| NewPlacementTable { service_index: self.configuration.index, table: table.clone() })
    }

    /// Returns the newest table and its age, or `None` before the first table.
    pub fn newest_table_and_age(&self, now: ClockReadings) -> Option<(&PlacementTable, Duration)> {
        self.newest_table_and_creation_time
            .as_ref()
            .map(|(table, made_at)| (&**table, now.monotonic_time.saturating_sub(*made_at)))
    }
}
