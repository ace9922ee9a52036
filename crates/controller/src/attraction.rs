//! The part of new connections that a server may take.
//!
//! Policies send connections where load is lowest, and load is what a server's agent reports. An agent that lies draws connections; load
//! balancers count how many. So each server has an [`Allowance`]. A server without allowance takes part in
//! [`TIMES_FAIR`] times its fair part of the buckets only, whatever it reports, until half of the allowance is there again.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use coreward_model::ServerId;
use coreward_model::allowance::{Allowance, TIMES_FAIR};
use coreward_wire::ServiceIndex;

use super::service::Service;
use super::traffic::NewlyOpened;
use super::{Controller, Now};

/// Time between two looks.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// What servers took of new connections.
#[derive(Debug, Default)]
pub struct Attraction {
    /// Connections that were opened since the last look.
    services: HashMap<ServiceIndex, u64>,
    servers: HashMap<ServerId, u64>,
    looked: Duration,
    allowances: HashMap<ServerId, Allowance>,
    /// The part of a service's buckets that a limited server takes part in.
    parts: HashMap<(ServiceIndex, ServerId), f64>,
}

impl Attraction {
    /// Counts connections.
    pub fn add(&mut self, newly: &NewlyOpened) {
        for (service, count) in &newly.services {
            let known = self.services.entry(*service).or_default();
            *known = known.saturating_add(*count);
        }
        for (server, count) in &newly.servers {
            let known = self.servers.entry(*server).or_default();
            *known = known.saturating_add(*count);
        }
    }

    /// How many servers take part in some buckets only.
    pub fn limited_count(&self) -> usize {
        self.limited().count()
    }

    fn limited(&self) -> impl Iterator<Item = ServerId> {
        self.allowances.iter().filter(|(_, allowance)| allowance.is_limited()).map(|(id, _)| *id)
    }

    /// Takes in the time since the last look. `expected`: each server's fair part of what was opened.
    fn update(&mut self, expected: &HashMap<ServerId, f64>) {
        let opened = std::mem::take(&mut self.servers);
        for id in expected.keys().chain(opened.keys()) {
            let fair = expected.get(id).copied().unwrap_or(0.0);
            self.allowances.entry(*id).or_insert_with(|| Allowance::full(fair));
        }
        for (id, allowance) in &mut self.allowances {
            let fair = expected.get(id).copied().unwrap_or(0.0);
            allowance.update(fair, opened.get(id).copied().unwrap_or(0) as f64);
        }
    }
}

impl Controller {
    /// How much of its part of the service's new connections the server gets: less than 1 in its slow start, or when it took too many.
    pub(super) fn ramp(&self, service: &Service, id: ServerId, now: Now) -> f64 {
        let limit = self.attraction.parts.get(&(service.fleet().index, id));
        service.ramp(id, now).min(limit.copied().unwrap_or(1.0))
    }

    /// Looks at what servers took, once per second.
    pub(super) fn update_attraction(&mut self, now: Now) {
        if now.monotonic.saturating_sub(self.attraction.looked) < LOOK_INTERVAL {
            return;
        }
        self.attraction.looked = now.monotonic;
        let mut expected: HashMap<ServerId, f64> = HashMap::new();
        for (index, opened) in std::mem::take(&mut self.attraction.services) {
            let Some(position) = self.positions.get(&index) else { continue };
            for (id, share) in self.fair_shares(*position, now) {
                *expected.entry(id).or_default() += share * opened as f64;
            }
        }
        let before: HashSet<ServerId> = self.attraction.limited().collect();
        let servers = &self.fleet.servers;
        self.attraction.allowances.retain(|id, _| servers.contains_key(id));
        self.attraction.update(&expected);
        let limited: HashSet<ServerId> = self.attraction.limited().collect();
        self.limit(&before, &limited, now);
    }

    fn fair_shares(&self, position: usize, now: Now) -> Vec<(ServerId, f64)> {
        let service = &self.services[position];
        service.fair_shares(&self.newest_pool(service, now))
    }

    /// These servers take part in some buckets only from now on.
    fn limit(&mut self, before: &HashSet<ServerId>, limited: &HashSet<ServerId>, now: Now) {
        let reading = |position: &usize| self.services[*position].reads_loads();
        let of_server = |id: &ServerId| self.services_of.get(id).into_iter().flatten().copied();
        let positions: HashSet<usize> = limited.iter().flat_map(of_server).filter(reading).collect();
        let mut parts = HashMap::new();
        for position in positions {
            let index = self.services[position].fleet().index;
            let shares = self.fair_shares(position, now).into_iter().filter(|(id, _)| limited.contains(id));
            parts.extend(shares.map(|(id, share)| ((index, id), (TIMES_FAIR * share).min(1.0))));
        }
        self.attraction.parts = parts;
        for id in before.symmetric_difference(limited) {
            let name = &self.fleet.servers[id].name;
            match limited.contains(id) {
                true => tracing::warn!(
                    "server {name} took more than {TIMES_FAIR} times its fair part of new connections: it is limited to that"
                ),
                false => tracing::info!("server {name} is no longer limited in its part of new connections"),
            }
            self.source_changed(*id);
            self.racks.changes += 1;
        }
    }
}
