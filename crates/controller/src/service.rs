//! A service, its policy and its newest table.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use coreward_api::types::ServerState;
use coreward_model::ServerId;
use coreward_model::bucket_history::BucketHistory;
use coreward_model::consistency::Consistency;
use coreward_model::health::WhenAllDown;
use coreward_model::placement::{Core, PlacementTable, Rule};
use coreward_model::policy::{Policy, Pool};
use coreward_model::tuple::Protocol;

use super::dirty_set::DirtySet;
use super::input_fingerprints::{InputFingerprints, Shard};
use super::{NewTable, Now, policy_of};
use coreward_fleet::fleet::FleetService;

/// Initial ramp of a slow start. Above 0, or a pool of new servers would have no share at all.
const MIN_RAMP: f64 = 1.0 / 64.0;

/// Eligibility of a server for a service's new connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Eligibility {
    Eligible,
    /// Down by checks.
    Unhealthy,
    /// No load balancer reaches it on the network.
    Unreachable,
    Drained,
    Left,
}

impl Eligibility {
    /// Returns the state that follows, apart from the slow start.
    pub fn state(self) -> ServerState {
        match self {
            Eligibility::Left => ServerState::Gone,
            Eligibility::Drained => ServerState::Draining,
            Eligibility::Unhealthy | Eligibility::Unreachable => ServerState::Down,
            Eligibility::Eligible => ServerState::Active,
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub struct ServerStatus {
    pub state: ServerState,
    /// Start (since the controller's start); `None`: since before this process.
    pub since: Option<Duration>,
    pub eligibility: Eligibility,
    /// Start of eligibility, as `since`.
    eligible_since: Option<Duration>,
}

pub struct Service {
    fleet: FleetService,
    policy: Box<dyn Policy>,
    generation: u64,
    newest_table: Option<(Arc<PlacementTable>, Duration)>,
    statuses: BTreeMap<ServerId, ServerStatus>,
    /// Whether servers that are down take new connections, because no other one does.
    failing_open: bool,
    /// Whether a table has been made: servers of the first one have not just joined.
    begun: bool,
    history: BucketHistory,
    /// Whether the history has changed since the last call.
    history_changed: bool,
    /// For each server its predecessors in any bucket, during this process: the load balancers' flow tables keep them
    /// for connections of that time.
    predecessors: BTreeMap<ServerId, BTreeSet<ServerId>>,
    predecessor_changes: u64,
    pub due: Option<TableTrigger>,
    /// Servers with changes since the newest table.
    dirty: DirtySet,
    /// Pool of the newest table; `None`: another input than loads may have changed since.
    pool: Option<Pool>,
    /// Connections opened in the last whole report interval, and whether a table has been made since it ended.
    opened: Option<u64>,
    new_interval: bool,
    /// Inputs of the newest table, apart from loads.
    fingerprints: InputFingerprints,
}

/// Parts of a service before another configuration.
pub struct PreviousService {
    _fleet: FleetService,
    _pool: Option<Pool>,
}

/// Oldest change that is not in a table yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableTrigger {
    /// Time of arrival (since the controller's start).
    pub received: Duration,
    /// Whether a server's or a rack's loads have changed, and not a polled input.
    pub is_load: bool,
    /// Time of sending by the reporter's wall clock (since 1970); `None`: not reported.
    pub sent_at: Option<Duration>,
}

impl Service {
    pub fn new(fleet: FleetService) -> Self {
        Self {
            policy: policy_of(&fleet),
            generation: 0,
            newest_table: None,
            statuses: BTreeMap::new(),
            failing_open: false,
            begun: false,
            history: fleet.bucket_history.clone(),
            history_changed: false,
            predecessors: fleet.bucket_history.predecessors(),
            predecessor_changes: 0,
            due: None,
            dirty: DirtySet::default(),
            pool: None,
            opened: None,
            new_interval: true,
            fingerprints: InputFingerprints::default(),
            fleet,
        }
    }

    /// Whether `new` is the same service in another configuration.
    pub fn is_same_service(&self, new: &FleetService) -> bool {
        self.fleet.name == new.name && self.fleet.index == new.index
    }

    /// Returns the service with another configuration: generations continue. Also returns what it replaces, because
    /// dropping thousands of servers takes milliseconds.
    pub fn reconfigured(mut self, new: FleetService) -> (Self, PreviousService) {
        if self.fleet.policy != new.policy || self.fleet.seed != new.seed {
            self.policy = policy_of(&new);
        }
        let replaced = PreviousService { _fleet: std::mem::replace(&mut self.fleet, new), _pool: self.pool.take() };
        let members = &self.fleet.members;
        self.dirty.retain(|server| members.contains_key(&server));
        self.predecessors.retain(|server, before| {
            before.retain(|before| members.contains_key(before));
            members.contains_key(server) && !before.is_empty()
        });
        (self, replaced)
    }

    pub fn fleet(&self) -> &FleetService {
        &self.fleet
    }

    /// Updates the eligibility of its servers. Servers that were eligible at the first table have not just joined.
    pub fn update_eligibilities(&mut self, eligibilities: Vec<(ServerId, Eligibility)>, now: Now) {
        let moment = self.begun.then_some(now.monotonic);
        let mut before = std::mem::take(&mut self.statuses);
        let none_is_eligible = eligibilities.iter().all(|(_, eligibility)| *eligibility != Eligibility::Eligible);
        self.failing_open = none_is_eligible
            && self.fleet.when_all_down == WhenAllDown::FailOpen
            && eligibilities.iter().any(|(_, eligibility)| *eligibility == Eligibility::Unhealthy);
        self.statuses = eligibilities
            .into_iter()
            .map(|(id, eligibility)| {
                let known = before.remove(&id);
                let eligible_since = known
                    .as_ref()
                    .filter(|status| status.eligibility == Eligibility::Eligible)
                    .map(|status| status.eligible_since);
                let joined = eligible_since.unwrap_or(moment);
                let state = self.state(eligibility, joined, now);
                let since = known.as_ref().filter(|status| status.state == state).map(|status| status.since);
                (id, ServerStatus { state, since: since.unwrap_or(moment), eligibility, eligible_since: joined })
            })
            .collect();
        self.begun = true;
    }

    fn state(&self, eligibility: Eligibility, joined: Option<Duration>, now: Now) -> ServerState {
        match eligibility {
            Eligibility::Eligible if self.ramp_since(joined, now) < 1.0 => ServerState::Joining,
            other => other.state(),
        }
    }

    /// Returns the server's state; `None` until the next table is made.
    pub fn status(&self, server: ServerId) -> Option<&ServerStatus> {
        self.statuses.get(&server)
    }

    pub fn is_failing_open(&self) -> bool {
        self.failing_open
    }

    /// Whether the server takes new connections; `None` until the next table is made.
    pub fn takes_connections(&self, server: ServerId) -> Option<bool> {
        self.statuses.get(&server).map(|status| self.admits(status.eligibility))
    }

    fn admits(&self, eligibility: Eligibility) -> bool {
        match eligibility {
            Eligibility::Eligible => true,
            Eligibility::Unhealthy => self.failing_open,
            Eligibility::Unreachable | Eligibility::Drained | Eligibility::Left => false,
        }
    }

    /// Returns the part of its share that the server gets so far: from nearly 0 to 1 during the slow start.
    pub fn ramp(&self, server: ServerId, now: Now) -> f64 {
        self.statuses.get(&server).map_or(1.0, |status| self.next_ramp(server, status.eligibility, now))
    }

    /// Returns [`Service::ramp`] in a table that is made now, when the server has this eligibility.
    pub fn next_ramp(&self, server: ServerId, eligibility: Eligibility, now: Now) -> f64 {
        if eligibility != Eligibility::Eligible {
            return 1.0;
        }
        let known = self.statuses.get(&server).filter(|status| status.eligibility == Eligibility::Eligible);
        self.ramp_since(known.map_or(self.begun.then_some(now.monotonic), |status| status.eligible_since), now)
    }

    fn ramp_since(&self, joined: Option<Duration>, now: Now) -> f64 {
        let Some(joined) = joined.filter(|_| !self.fleet.slow_start.is_zero()) else { return 1.0 };
        let passed = now.monotonic.saturating_sub(joined).as_secs_f64() / self.fleet.slow_start.as_secs_f64();
        passed.clamp(MIN_RAMP, 1.0)
    }

    /// Whether its tables depend on servers' reports.
    pub fn reads_loads(&self) -> bool {
        self.policy.reads_loads()
    }

    /// Returns each server's fair part of its new connections, by capacity if its policy uses that.
    pub fn fair_shares(&self, pool: &Pool) -> Vec<(ServerId, f64)> {
        pool.fair_shares(self.policy.depends_on_capacity())
    }

    /// Whether its tables depend on load balancers' counts.
    pub fn reads_traffic(&self) -> bool {
        self.policy.reads_traffic()
    }

    pub fn load_is_new(&mut self, server: ServerId) {
        self.dirty.mark(server);
    }

    pub fn on_relayed_load(&mut self, server: ServerId) {
        self.dirty.mark_relayed(server);
    }

    pub fn loads_are_new(&mut self) {
        self.fleet.members.keys().for_each(|server| self.dirty.mark(*server));
    }

    /// Takes the pool of the newest table; `None`: all servers must be read.
    pub fn take_cached_pool(&mut self) -> Option<Pool> {
        self.pool.take()
    }

    /// Returns the cached pool, read-only.
    pub fn cached_pool(&self) -> Option<&Pool> {
        self.pool.as_ref()
    }

    pub fn cache_pool(&mut self, pool: Pool) {
        self.pool = Some(pool);
    }

    /// Drops cached state after a change of other inputs than loads.
    pub fn forget_servers(&mut self) {
        self.pool = None;
    }

    /// Returns the servers with changes since the newest table or at it. (Some occur twice.)
    pub fn dirty_servers(&self) -> impl Iterator<Item = ServerId> {
        self.dirty.changed()
    }

    /// Whether the server's load is newer than the newest table.
    pub fn is_fresh(&self, server: ServerId) -> bool {
        self.dirty.is_fresh(server)
    }

    /// Whether more than its rack's summary may have changed.
    pub fn needs_refresh(&self, server: ServerId) -> bool {
        self.dirty.needs_refresh(server)
    }

    /// Begins a report interval after one with this number of opened connections, if known.
    pub fn begin_interval(&mut self, opened: Option<u64>) {
        self.opened = opened;
        self.new_interval = true;
    }

    pub fn with_interval(&self, pool: Pool) -> Pool {
        let pool = match self.opened {
            Some(opened) => pool.with_opened_connections(opened),
            None => pool,
        };
        if self.new_interval { pool } else { pool.for_same_interval() }
    }

    /// Stores the inputs of the next table, apart from loads; returns whether they have changed.
    pub fn update_fingerprints(&mut self, inputs: u64, servers: &[(Shard, u64)]) -> bool {
        self.fingerprints.update(inputs, servers)
    }

    /// Returns the servers to poll next for changes with time.
    pub fn next_shards(&mut self, all: bool) -> Vec<Shard> {
        self.fingerprints.next(&self.fleet.members, all)
    }

    pub fn place(&mut self, pool: &Pool, now: Now) -> NewTable {
        self.generation += 1;
        let mut table = self.policy.place(pool, self.fleet.buckets, self.generation);
        if self.history.update(&table.consistent) {
            self.history_changed = true;
            self.add_predecessors();
        }
        if !table.members.is_empty() {
            table.consistent_before = self.history.previous_consistent();
        }
        table.down = self.down_servers().collect();
        self.new_interval = false;
        table.core_slot_ages = self.slot_ages(&table);
        let table = Arc::new(table);
        self.newest_table = Some((table.clone(), now.monotonic));
        NewTable { service: self.fleet.index, table }
    }

    fn down_servers(&self) -> impl Iterator<Item = ServerId> {
        let is_down = |status: &ServerStatus| status.eligibility.state() == ServerState::Down;
        let down = self.statuses.iter().filter(move |(_, status)| is_down(status) && !self.admits(status.eligibility));
        down.map(|(id, _)| *id)
    }

    /// [`PlacementTable::core_slot_ages`] of a table just made.
    fn slot_ages(&mut self, table: &PlacementTable) -> Vec<u32> {
        self.dirty.is_in_table(table.generation);
        if table.rule != Rule::LeastAssigned {
            return Vec::new();
        }
        let newest = |core: &Core| self.dirty.generation(core.server).unwrap_or(table.generation);
        let ages: Vec<u32> = table.core_slots.iter().map(|core| (table.generation - newest(core)) as u32).collect();
        if ages.iter().all(|age| *age == 0) { Vec::new() } else { ages }
    }

    fn add_predecessors(&mut self) {
        for (server, before) in self.history.predecessors() {
            let known = self.predecessors.entry(server).or_default();
            let count = known.len();
            known.extend(before);
            self.predecessor_changes += u64::from(known.len() > count);
        }
    }

    /// Returns the server's predecessors in buckets, if any.
    pub fn predecessors(&self, server: ServerId) -> Option<&BTreeSet<ServerId>> {
        self.predecessors.get(&server).filter(|_| self.forwards_unknown_packets())
    }

    pub fn predecessor_changes(&self) -> u64 {
        if self.forwards_unknown_packets() { self.predecessor_changes } else { 0 }
    }

    /// Whether servers forward unknown packets: those that go by the bucket.
    fn forwards_unknown_packets(&self) -> bool {
        self.fleet.address.protocol == Protocol::Tcp
            && !matches!(self.fleet.mode.consistency, Consistency::None | Consistency::HashTable)
    }

    pub fn changed_history(&mut self) -> Option<(String, BucketHistory)> {
        std::mem::take(&mut self.history_changed).then(|| (self.fleet.name.clone(), self.history.clone()))
    }

    pub fn newest_table(&self) -> Option<NewTable> {
        self.newest_table.as_ref().map(|(table, _)| NewTable { service: self.fleet.index, table: table.clone() })
    }

    /// Returns the newest table and its age; `None` before the first one.
    pub fn table(&self, now: Now) -> Option<(&PlacementTable, Duration)> {
        self.newest_table.as_ref().map(|(table, made)| (&**table, now.monotonic.saturating_sub(*made)))
    }
}
