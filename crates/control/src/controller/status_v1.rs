//! [`super::status`] as gRPC has it.

use coreward_api::types::{CheckedBy, ServiceMember};
use coreward_model::ServerId;
use coreward_model::policy::RssGroup;
use coreward_wire::address::address_bytes;
use coreward_wire::v1;

use super::agent::Agent;
use super::service::Service;
use super::status::{milliseconds_since, reports};
use super::{Controller, Now};
use crate::fleet::FleetServer;

impl Controller {
    /// Everything there is to see at this moment.
    pub fn status_v1(&self, now: Now) -> v1::StatusReply {
        v1::StatusReply {
            configuration_generation: self.fleet.generation,
            report_interval_ms: self.fleet.report_interval.as_millis() as u32,
            services: self.services.iter().map(|service| self.service_status_v1(service, now)).collect(),
            servers: self.fleet.servers.iter().map(|(id, server)| self.server_status_v1(*id, server, now)).collect(),
            load_balancers: self.load_balancer_status_v1(now),
            refused_reports: self.refused.iter().map(|(reason, count)| ((*reason).to_owned(), *count)).collect(),
            accepted_reports: self.accepted,
            keys: Some(self.keys_status_v1(now)),
            racks: self.racks.status(now).into_iter().map(rack).collect(),
        }
    }

    fn load_balancer_status_v1(&self, now: Now) -> Vec<v1::LoadBalancerStatus> {
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

    fn service_status_v1(&self, service: &Service, now: Now) -> v1::ServiceStatus {
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
            rss_groups: self.groups(&pool).into_iter().filter_map(|group| self.group_status_v1(&group)).collect(),
            bucket_count: fleet.buckets.get(),
            warnings: self.service_warnings(service, &pool),
            mode: Some(fleet.mode.into()),
            members: self.members(service, now).into_iter().map(member_v1).collect(),
            check: fleet.check.as_ref().map_or_else(String::new, |check| check.probe.name().to_owned()),
            when_all_down: fleet.when_all_down.name().to_owned(),
            failing_open: service.is_failing_open(),
        }
    }

    fn group_status_v1(&self, group: &RssGroup<'_>) -> Option<v1::RssGroupStatus> {
        let servers = self.names(group.servers.iter().map(|server| server.id));
        let (key, key_fingerprint) = (group.key.bytes().to_vec(), group.key.fingerprint());
        (!servers.is_empty()).then_some(v1::RssGroupStatus { key, servers, key_fingerprint })
    }

    fn server_status_v1(&self, id: ServerId, server: &FleetServer, now: Now) -> v1::ServerStatus {
        let nobody = Agent::default();
        let agent = self.agent(id).unwrap_or(&nobody);
        let life = self.life(id, server, now);
        let mut status = v1::ServerStatus {
            name: server.name.clone(),
            id: id.get().into(),
            address: address_bytes(server.address),
            state: life.state.name().to_owned(),
            state_for_ms: life.lasts_ms(),
            state_reason: life.reason,
            reports: reports(agent, now).name().to_owned(),
            core_load: agent.loads(now).map(|loads| loads.to_vec()).unwrap_or_default(),
            rss: agent.rss.reported.as_ref().map(v1::Rss::from),
            rss_key_fingerprint: agent.rss().map(|rss| rss.key.fingerprint()).unwrap_or_default(),
            warnings: self.server_warnings(server, agent, now),
            weight: server.weight.get(),
            capacity: self.capacity(server, agent).unwrap_or(0.0),
            configuration_generation: agent.confirmed,
            connections: agent.connections(now).map(|counted| v1::CountedConnections {
                age_ms: counted.age(now).as_millis() as u32,
                configuration_generation: counted.configuration_generation,
                services: counted.services.clone().into_iter().collect(),
            }),
            drained_by: self.drained(id, now).map_or("", |drained| drained.by.name()).to_owned(),
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
}

fn member_v1(member: ServiceMember) -> v1::MemberStatus {
    let check = |checked: CheckedBy| v1::CheckStatus {
        load_balancer: checked.load_balancer,
        health: Some(v1::ServerHealth {
            up: checked.up,
            since_ms: checked.since_ms,
            error: checked.error.unwrap_or_default(),
            latency_us: checked.latency_us,
            checks: checked.checks,
            failures: checked.failures,
            ..Default::default()
        }),
    };
    v1::MemberStatus {
        server: member.server,
        state: member.state.name().to_owned(),
        reason: member.reason,
        state_for_ms: member.state_for_ms,
        checks: member.checks.into_iter().map(check).collect(),
    }
}

fn rack(rack: coreward_api::types::Rack) -> v1::RackStatus {
    let coreward_api::types::Rack { name, version, age_ms, servers } = rack;
    v1::RackStatus { name, version, age_ms, servers }
}
