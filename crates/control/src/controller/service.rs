//! A service, its policy and its newest table.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use coreward_model::ServerId;
use coreward_model::bucket_history::BucketHistory;
use coreward_model::consistency::Consistency;
use coreward_model::placement::PlacementTable;
use coreward_model::policy::{Policy, Pool};
use coreward_model::tuple::Protocol;

use super::{NewTable, Now, policy_of};
use crate::fleet::FleetService;

/// What a server gets at the first moment of its slow start: not nothing, or nobody would have anything in a pool of which
/// all have just joined.
const SMALLEST_RAMP: f64 = 1.0 / 64.0;

/// A service of the fleet.
pub struct Service {
    fleet: FleetService,
    policy: Box<dyn Policy>,
    generation: u64,
    newest: Option<(Arc<PlacementTable>, Duration)>,
    /// Who takes new connections, and since when; `None`: since before this process. For the slow start.
    since: BTreeMap<ServerId, Option<Duration>>,
    /// Whether any table has been made: who is there with the first one has not just joined.
    begun: bool,
    history: BucketHistory,
    /// Whether the history has changed since somebody asked.
    history_changed: bool,
    /// For each server from whom it has ever had buckets, as long as this process runs: the load balancers' flow tables
    /// remember who was before when a connection began.
    predecessors: BTreeMap<ServerId, BTreeSet<ServerId>>,
    predecessor_changes: u64,
}

impl Service {
    /// Without a table.
    pub fn new(fleet: &FleetService) -> Self {
        Self {
            policy: policy_of(fleet),
            generation: 0,
            newest: None,
            since: BTreeMap::new(),
            begun: false,
            history: fleet.bucket_history.clone(),
            history_changed: false,
            predecessors: fleet.bucket_history.predecessors(),
            predecessor_changes: 0,
            fleet: fleet.clone(),
        }
    }

    /// Whether `new` is the same service in another configuration.
    pub fn continues_as(&self, new: &FleetService) -> bool {
        self.fleet.name == new.name && self.fleet.index == new.index
    }

    /// The same service in another configuration: generations go on.
    pub fn reconfigured(mut self, new: &FleetService) -> Self {
        if self.fleet.policy != new.policy || self.fleet.seed != new.seed {
            self.policy = policy_of(new);
        }
        self.fleet = new.clone();
        let members = &self.fleet.members;
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

    /// These take new connections now.
    pub fn joined(&mut self, eligible: Vec<ServerId>, now: Now) {
        let since = self.begun.then_some(now.monotonic);
        let before = std::mem::take(&mut self.since);
        self.since = eligible.into_iter().map(|id| (id, before.get(&id).copied().unwrap_or(since))).collect();
        self.begun = true;
    }

    /// How much of its part the server gets so far: grows from nearly nothing to 1 during the slow start.
    pub fn ramp(&self, server: ServerId, now: Now) -> f64 {
        let Some(Some(since)) = self.since.get(&server) else { return 1.0 };
        if self.fleet.slow_start.is_zero() {
            return 1.0;
        }
        let passed = now.monotonic.saturating_sub(*since).as_secs_f64() / self.fleet.slow_start.as_secs_f64();
        passed.clamp(SMALLEST_RAMP, 1.0)
    }

    /// The table for this pool.
    pub fn place(&mut self, pool: &Pool, now: Now) -> NewTable {
        self.generation += 1;
        let mut table = self.policy.place(pool, self.fleet.buckets, self.generation);
        if self.history.follow(&table.consistent) {
            self.history_changed = true;
            self.add_predecessors();
        }
        if !table.members.is_empty() {
            table.consistent_before = self.history.consistent_before();
        }
        let table = Arc::new(table);
        self.newest = Some((table.clone(), now.monotonic));
        NewTable { service: self.fleet.index, table }
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

    /// Name and history, when it has changed since the last call.
    pub fn changed_history(&mut self) -> Option<(String, BucketHistory)> {
        std::mem::take(&mut self.history_changed).then(|| (self.fleet.name.clone(), self.history.clone()))
    }

    /// The table of the last tick.
    pub fn newest(&self) -> Option<NewTable> {
        self.newest.as_ref().map(|(table, _)| NewTable { service: self.fleet.index, table: table.clone() })
    }

    /// The table of the last tick and its age.
    pub fn table(&self, now: Now) -> Option<(&PlacementTable, Duration)> {
        self.newest.as_ref().map(|(table, made)| (&**table, now.monotonic.saturating_sub(*made)))
    }
}
