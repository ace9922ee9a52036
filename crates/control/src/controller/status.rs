//! What `coreward status` shows.

use std::time::Duration;

use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::policy::{Capacity, Pool, PoolServer, RssGroup, rss_groups};
use coreward_model::rss::{Rss, RssKey};
use coreward_wire::address::address_bytes;
use coreward_wire::v1;

use super::agent::Agent;
use super::service::Service;
use super::{Controller, Now};
use crate::fleet::{FleetServer, Standing};

impl Controller {
    /// Everything there is to see at this moment.
    pub fn status(&self, now: Now) -> v1::StatusReply {
        v1::StatusReply {
            configuration_generation: self.fleet.generation,
            report_interval_ms: self.fleet.report_interval.as_millis() as u32,
            services: self.services.iter().map(|service| self.service_status(service, now)).collect(),
            servers: self.fleet.servers.iter().map(|(id, server)| self.server_status(*id, server, now)).collect(),
            load_balancers: self.load_balancer_status(now),
            refused_reports: self.refused.iter().map(|(reason, count)| ((*reason).to_owned(), *count)).collect(),
            accepted_reports: self.accepted,
            keys: Some(self.keys_status(now)),
        }
    }

    fn load_balancer_status(&self, now: Now) -> Vec<v1::LoadBalancerStatus> {
        self.load_balancers
            .iter()
            .map(|(name, balancer)| {
                let record = self.fleet.load_balancers.get(name);
                v1::LoadBalancerStatus {
                    name: name.clone(),
                    state: balancer.state.as_ref().map(|(state, _)| state.clone()),
                    state_age_ms: balancer.state.as_ref().map_or(0, |(_, at)| milliseconds_since(*at, now)),
                    connected: balancer.is_connected(),
                    alive: balancer.is_alive(now),
                    owner: record.and_then(|record| record.owner).map(|owner| owner.get().into()),
                    address: record.and_then(|record| record.address).map(address_bytes).unwrap_or_default(),
                }
            })
            .collect()
    }

    fn service_status(&self, service: &Service, now: Now) -> v1::ServiceStatus {
        let fleet = service.fleet();
        let pool = self.pool(service, now);
        let table = service.table(now);
        v1::ServiceStatus {
            name: fleet.name.clone(),
            address: Some(fleet.address.into()),
            policy: fleet.policy.to_owned(),
            table_generation: table.map_or(0, |(table, _)| table.generation),
            table_age_ms: table.map_or(0, |(_, age)| age.as_millis() as u32),
            servers: self.names(fleet.members.keys().copied()),
            rss_groups: self.groups(&pool).into_iter().filter_map(|group| self.group_status(&group)).collect(),
            bucket_count: fleet.buckets.get(),
            warnings: self.service_warnings(service, &pool),
            mode: Some(fleet.mode.into()),
        }
    }

    fn names(&self, ids: impl Iterator<Item = ServerId>) -> Vec<String> {
        ids.map(|id| self.fleet.servers[&id].name.clone()).collect()
    }

    /// The groups of a pool. The key for a pool in which no RSS is known does not matter: such a group is not shown.
    fn groups<'a>(&self, pool: &'a Pool) -> Vec<RssGroup<'a>> {
        rss_groups(pool, &RssKey::microsoft())
    }

    fn group_status(&self, group: &RssGroup<'_>) -> Option<v1::RssGroupStatus> {
        let servers = self.names(group.servers.iter().map(|server| server.id));
        let (key, key_fingerprint) = (group.key.bytes().to_vec(), group.key.fingerprint());
        (!servers.is_empty()).then_some(v1::RssGroupStatus { key, servers, key_fingerprint })
    }

    fn service_warnings(&self, service: &Service, pool: &Pool) -> Vec<String> {
        let mut warnings = Vec::new();
        if pool.eligible().next().is_none() {
            warnings.push("no server takes new connections: their first packets are dropped".to_owned());
        }
        if service.fleet().is_corrected() && self.load_balancers.count() == 0 {
            warnings.push(
                "timestamps by load balancers: none is connected, so nobody says which servers it can stamp for"
                    .to_owned(),
            );
        }
        let groups = self.groups(pool);
        let left_over = groups.iter().flat_map(|group| &group.without_cores).filter(|server| server.rss.is_some());
        let left_over = self.names(left_over.map(|server| server.id));
        if !left_over.is_empty() {
            warnings.push(format!(
                "more than {} different RSS keys: the cores of {} count by their mean load (manage_rss = true gives all \
                 servers one key)",
                intf::MAX_RSS_GROUPS,
                left_over.join(", ")
            ));
        }
        let buckets = service.fleet().buckets.get() as usize;
        let longer =
            |server: &&PoolServer| server.rss.as_ref().is_some_and(|rss| rss.indirection_table.entry_count() > buckets);
        let longer = self.names(pool.eligible().filter(longer).map(|server| server.id));
        if !longer.is_empty() {
            warnings.push(format!(
                "{buckets} buckets are fewer than the indirection tables of {} have entries: a bucket reaches several of \
                 their cores, and the mean load of these counts (raise `buckets`)",
                longer.join(", ")
            ));
        }
        warnings
    }

    fn server_status(&self, id: ServerId, server: &FleetServer, now: Now) -> v1::ServerStatus {
        let nobody = Agent::default();
        let agent = self.agent(id).unwrap_or(&nobody);
        let mut status = v1::ServerStatus {
            name: server.name.clone(),
            id: id.get().into(),
            address: address_bytes(server.address),
            state: state_name(server, agent, now).to_owned(),
            core_load: agent.loads(now).unwrap_or_default().to_vec(),
            rss: agent.rss.reported.as_ref().map(v1::Rss::from),
            rss_key_fingerprint: agent.rss().map(|rss| rss.key.fingerprint()).unwrap_or_default(),
            warnings: self.server_warnings(server, agent, now),
            weight: server.weight.get(),
            capacity: self.capacity(server, agent).unwrap_or(0.0),
            configuration_generation: agent.confirmed,
            ..Default::default()
        };
        if let Some(newest) = &agent.newest {
            status.report_age_ms = milliseconds_since(newest.received, now);
            status.open_connections = newest.open_connections;
            status.rss_matched = newest.rss_matched;
            status.rss_mismatched = newest.rss_mismatched;
            status.counters = newest.counters.iter().cloned().collect();
            status.dispatch.clone_from(&newest.dispatch);
        }
        status
    }

    /// What the operator says, or else the number of its cores.
    fn capacity(&self, server: &FleetServer, agent: &Agent) -> Option<f64> {
        let cores = || agent.core_count().map(|cores| cores as f64);
        server.capacity.map(Capacity::get).or_else(cores)
    }

    fn server_warnings(&self, server: &FleetServer, agent: &Agent, now: Now) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.load_balancers.cannot_reach(&server.name, now) {
            warnings.push("no load balancer can find its MAC address: it takes no new connections".to_owned());
        }
        warnings.extend(agent.rss.problem.clone());
        if let (Some(rss), Some(loads)) = (agent.rss(), agent.loads(now)) {
            warnings.extend(queues_without_cores(rss, loads.len()));
        }
        warnings.extend(agent.newest.iter().flat_map(|newest| newest.warnings.iter().cloned()));
        warnings
    }
}

/// Loads are reported by receive queue: a queue beyond them counts as neutral.
fn queues_without_cores(rss: &Rss, cores: usize) -> Option<String> {
    let highest = usize::from(*rss.indirection_table.queues().iter().max()?);
    (highest >= cores).then(|| format!("its indirection table names receive queue {highest}, but {cores} cores report"))
}

fn state_name(server: &FleetServer, agent: &Agent, now: Now) -> &'static str {
    match server.standing {
        Standing::Left => "left",
        Standing::Draining => "draining",
        Standing::Active if agent.newest.is_none() => "never reported",
        Standing::Active if agent.is_fresh(now) => "reporting",
        Standing::Active => "stale",
    }
}

fn milliseconds_since(moment: Duration, now: Now) -> u32 {
    now.monotonic.saturating_sub(moment).as_millis() as u32
}
