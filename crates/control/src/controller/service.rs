//! A service, its policy and its newest table.

use std::sync::Arc;
use std::time::Duration;

use coreward_model::placement::PlacementTable;
use coreward_model::policy::{Policy, Pool};

use super::{NewTable, Now, policy_of};
use crate::fleet::FleetService;

/// A service of the fleet.
pub struct Service {
    fleet: FleetService,
    policy: Box<dyn Policy>,
    generation: u64,
    newest: Option<(Arc<PlacementTable>, Duration)>,
}

impl Service {
    /// Without a table.
    pub fn new(fleet: &FleetService) -> Self {
        Self { fleet: fleet.clone(), policy: policy_of(fleet), generation: 0, newest: None }
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
        self
    }

    /// Its configuration.
    pub fn fleet(&self) -> &FleetService {
        &self.fleet
    }

    /// The table for this pool.
    pub fn place(&mut self, pool: &Pool, now: Now) -> NewTable {
        self.generation += 1;
        let table = Arc::new(self.policy.place(pool, self.fleet.buckets, self.generation));
        self.newest = Some((table.clone(), now.monotonic));
        NewTable { service: self.fleet.index, table }
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
