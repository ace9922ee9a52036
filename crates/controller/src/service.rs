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

/// What a server gets at the first moment of its slow start: not nothing, or nobody would have anything in a pool of which
/// all have just joined.
const SMALLEST_RAMP: f64 = 1.0 / 64.0;

/// What decides whether a server takes a service's new connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Eligibility {
    /// Nothing is against it.
    Eligible,
    /// Checks say that it is not well.
    Unhealthy,
    /// No load balancer finds it on the network.
    Unreachable,
    /// Somebody does not want it to.
    Drained,
    Left,
}

impl Eligibility {
    /// The state that follows, but for the slow start.
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
    /// Now.
    pub state: ServerState,
    /// Since then (since the controller's start); `None`: since before this process.
    pub since: Option<Duration>,
    /// Why.
    pub eligibility: Eligibility,
    /// While it is fit: since when; as `since`.
    joined: Option<Duration>,
}

pub struct Service {
    fleet: FleetService,
    policy: Box<dyn Policy>,
    generation: u64,
    newest: Option<(Arc<PlacementTable>, Duration)>,
    statuses: BTreeMap<ServerId, ServerStatus>,
    /// Whether servers that are down take new connections, as no other one does.
    failing_open: bool,
    /// Whether any table has been made: who is there with the first one has not just joined.
    begun: bool,
    history: BucketHistory,
    /// Whether the history has changed since somebody asked.
    history_changed: bool,
    /// For each server from whom it has ever had buckets, as long as this process runs: the load balancers' flow tables
    /// remember who was before when a connection began.
    predecessors: BTreeMap<ServerId, BTreeSet<ServerId>>,
    predecessor_changes: u64,
    /// What made a table due that is not made yet.
    pub due: Option<TableTrigger>,
    /// Of which servers something is newer than the newest table.
    dirty: DirtySet,
    /// The pool of the newest table; `None`: something else than loads may have changed since.
    pool: Option<Pool>,
    /// Connections opened in the last whole report interval, and whether a table has been made since it ended.
    opened: Option<u64>,
    new_interval: bool,
    /// What the newest table was made of, apart from loads.
    fingerprints: InputFingerprints,
}

/// The oldest change that a table does not have yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableTrigger {
    /// When it came (since the controller's start).
    pub received: Duration,
    /// Whether a server's or a rack's loads have changed, and not something that was looked for.
    pub is_load: bool,
    /// When whoever reported it sent it, by the wall clock (since 1970); `None`: it did not say.
    pub sent: Option<Duration>,
}

impl Service {
    /// Without a table.
    pub fn new(fleet: FleetService) -> Self {
        Self {
            policy: policy_of(&fleet),
            generation: 0,
            newest: None,
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
    pub fn continues_as(&self, new: &FleetService) -> bool {
        self.fleet.name == new.name && self.fleet.index == new.index
    }

    /// The same service in another configuration: generations go on.
    pub fn reconfigured(mut self, new: FleetService) -> Self {
        if self.fleet.policy != new.policy || self.fleet.seed != new.seed {
            self.policy = policy_of(&new);
        }
        self.fleet = new;
        self.pool = None;
        let members = &self.fleet.members;
        self.dirty.retain(|server| members.contains_key(&server));
        self.predecessors.retain(|server, before| {
            before.retain(|before| members.contains_key(before));
            members.contains_key(server) && !before.is_empty()
        });
        self
    }

    /// Its configuration.
    pub fn fleet(&self) -> &FleetService {
        &self.fleet
    }

    /// This is where its servers stand now. Who was fit for new connections when the first table was made has not just
    /// joined.
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
                    .map(|status| status.joined);
                let joined = eligible_since.unwrap_or(moment);
                let state = self.state(eligibility, joined, now);
                let since = known.as_ref().filter(|status| status.state == state).map(|status| status.since);
                (id, ServerStatus { state, since: since.unwrap_or(moment), eligibility, joined })
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

    /// Where the server stands; `None` until the next table is made.
    pub fn status(&self, server: ServerId) -> Option<&ServerStatus> {
        self.statuses.get(&server)
    }

    /// Whether servers that are down take new connections, as no other one does.
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

    /// How much of its part the server gets so far: grows from nearly nothing to 1 during the slow start.
    pub fn ramp(&self, server: ServerId, now: Now) -> f64 {
        let fit = self.statuses.get(&server).filter(|status| status.eligibility == Eligibility::Eligible);
        fit.map_or(1.0, |status| self.ramp_since(status.joined, now))
    }

    fn ramp_since(&self, joined: Option<Duration>, now: Now) -> f64 {
        let Some(joined) = joined.filter(|_| !self.fleet.slow_start.is_zero()) else { return 1.0 };
        let passed = now.monotonic.saturating_sub(joined).as_secs_f64() / self.fleet.slow_start.as_secs_f64();
        passed.clamp(SMALLEST_RAMP, 1.0)
    }

    /// Whether its tables depend on what servers report.
    pub fn reads_loads(&self) -> bool {
        self.policy.reads_loads()
    }

    /// The fair part of each of its servers in its new connections, as far as its policy goes by capacity.
    pub fn fair_shares(&self, pool: &Pool) -> Vec<(ServerId, f64)> {
        pool.fair_shares(self.policy.goes_by_capacity())
    }

    /// Whether its tables depend on what load balancers count.
    pub fn reads_traffic(&self) -> bool {
        self.policy.reads_traffic()
    }

    pub fn load_is_new(&mut self, server: ServerId) {
        self.dirty.mark(server);
    }

    pub fn load_is_passed_up(&mut self, server: ServerId) {
        self.dirty.mark_passed_up(server);
    }

    pub fn loads_are_new(&mut self) {
        self.fleet.members.keys().for_each(|server| self.dirty.mark(*server));
    }

    /// The pool of the newest table; `None`: all servers must be looked at.
    pub fn take_cached_pool(&mut self) -> Option<Pool> {
        self.pool.take()
    }

    /// The same, only to look at.
    pub fn cached_pool(&self) -> Option<&Pool> {
        self.pool.as_ref()
    }

    /// The newest table was made of this one.
    pub fn cache_pool(&mut self, pool: Pool) {
        self.pool = Some(pool);
    }

    /// Something else than loads may have changed.
    pub fn forget_servers(&mut self) {
        self.pool = None;
    }

    /// Of whom something is newer than the newest table, and was when that one was made. (Some come twice.)
    pub fn dirty_servers(&self) -> impl Iterator<Item = ServerId> {
        self.dirty.changed()
    }

    /// Whether the server's load is newer than the newest table.
    pub fn is_fresh(&self, server: ServerId) -> bool {
        self.dirty.is_fresh(server)
    }

    /// Whether more may be new of it than what its rack passes up.
    pub fn needs_refresh(&self, server: ServerId) -> bool {
        self.dirty.needs_refresh(server)
    }

    /// A report interval has ended, in which so many connections were opened, if that is known.
    pub fn begin_interval(&mut self, opened: Option<u64>) {
        self.opened = opened;
        self.new_interval = true;
    }

    pub fn with_interval(&self, pool: Pool) -> Pool {
        let pool = match self.opened {
            Some(opened) => pool.with_opened_connections(opened),
            None => pool,
        };
        if self.new_interval { pool } else { pool.within_interval() }
    }

    /// Takes note of what the next table will be made of, apart from loads; whether that has changed.
    pub fn update_fingerprints(&mut self, inputs: u64, servers: &[(Shard, u64)]) -> bool {
        self.fingerprints.update(inputs, servers)
    }

    /// Which servers are to be looked at next for what changes by itself.
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
            table.consistent_before = self.history.consistent_before();
        }
        table.down = self.down().collect();
        self.new_interval = false;
        table.core_slot_ages = self.slot_ages(&table);
        let table = Arc::new(table);
        self.newest = Some((table.clone(), now.monotonic));
        NewTable { service: self.fleet.index, table }
    }

    fn down(&self) -> impl Iterator<Item = ServerId> {
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

    /// From whom the server has had buckets, if from anybody.
    pub fn predecessors(&self, server: ServerId) -> Option<&BTreeSet<ServerId>> {
        self.predecessors.get(&server).filter(|_| self.hands_on())
    }

    /// How often [`Service::predecessors`] of any server has grown.
    pub fn predecessor_changes(&self) -> u64 {
        if self.hands_on() { self.predecessor_changes } else { 0 }
    }

    /// Whether servers hand packets on: those that go by the bucket.
    fn hands_on(&self) -> bool {
        self.fleet.address.protocol == Protocol::Tcp
            && !matches!(self.fleet.mode.consistency, Consistency::None | Consistency::HashTable)
    }

    pub fn changed_history(&mut self) -> Option<(String, BucketHistory)> {
        std::mem::take(&mut self.history_changed).then(|| (self.fleet.name.clone(), self.history.clone()))
    }

    pub fn newest(&self) -> Option<NewTable> {
        self.newest.as_ref().map(|(table, _)| NewTable { service: self.fleet.index, table: table.clone() })
    }

    /// The table of the last tick and its age.
    pub fn table(&self, now: Now) -> Option<(&PlacementTable, Duration)> {
        self.newest.as_ref().map(|(table, made)| (&**table, now.monotonic.saturating_sub(*made)))
    }
}
