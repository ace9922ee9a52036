//! Output of `coreward status`.

use std::borrow::Cow;
use std::ops::Bound;
use std::time::Duration;

use coreward_api::types::{
    DispatchedService, LoadBalancer, LoadBalancerCounters, LoadBalancerState, Loads, Overview, OverviewLoadBalancer,
    OverviewServer, OverviewService, RssGroup as ShownGroup, Server, ServerLoads, ServerRss, Service as ShownService,
    Status,
};
use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::policy::{PoolServer, RssGroup, ServerCapacity, ServerPool, rss_groups, rss_key_count};
use coreward_model::rss::{RssConfig, RssKey};

use super::agent::{Agent, ReportedConnectionCount};
use super::drains::to_counted_connections;
use super::service::Service;
use super::{ClockReadings, Controller};
use coreward_fleet::config::MigrationLoadBalancer;
use coreward_fleet::fleet::FleetServer;

impl Controller {
    /// Returns servers in the order of their ids, either those whose ids follow `last_id`, or all servers.
    pub fn servers_after_id(&self, last_id: Option<ServerId>) -> impl Iterator<Item = (ServerId, &FleetServer)> {
        let lower_bound = last_id.map_or(Bound::Unbounded, Bound::Excluded);
        self.fleet.servers.range((lower_bound, Bound::Unbounded)).map(|(id, server)| (*id, server))
    }

    /// Returns the status without services and servers. Callers add them in steps, because reports must not wait for
    /// thousands of servers.
    pub fn status_summary(&self, now: ClockReadings) -> Status {
        Status {
            configuration_generation: self.fleet.generation,
            report_interval_ms: self.fleet.report_interval.as_millis() as u32,
            accepted_reports: self.accepted_report_count,
            rejected_reports: self
                .rejection_counts
                .iter()
                .map(|(reason, count)| ((*reason).to_owned(), *count))
                .collect(),
            services: Vec::new(),
            servers: Vec::new(),
            load_balancers: self.load_balancer_statuses(now),
            keys: self.keys_summary(now),
            racks: self.rack_statuses(now),
            warnings: self.fleet_store_warnings(),
        }
    }

    #[cfg(test)]
    pub fn status(&self, now: ClockReadings) -> Status {
        let service_with_members = |position| {
            let service = self.service_status(position, None, false, now)?;
            let members = self.members_after_id((position, service.address), None, usize::MAX, now);
            Some(service.with_members(members.into_iter().map(|(_, member)| member).collect()))
        };
        let services = (0..self.services.len()).filter_map(service_with_members).collect();
        let servers =
            self.servers_after_id(None).map(|(id, server)| self.server_status(id, server, false, now)).collect();
        Status { services, servers, keys: self.keys(now), ..self.status_summary(now) }
    }

    /// Returns the part of the status that changes with every report, without the servers.
    pub fn loads_summary(&self, now: ClockReadings) -> Loads {
        let load_balancer_counts =
            |(name, balancer): (&String, &super::load_balancers::LoadBalancer)| LoadBalancerCounters {
                name: name.clone(),
                counters: balancer
                    .reported_state_and_time
                    .iter()
                    .flat_map(|(state, _)| state.counters.clone())
                    .collect(),
            };
        Loads {
            at_unix_ms: now.wall_time.as_millis() as u64,
            uptime_ms: now.monotonic_time.as_millis() as u64,
            servers: Vec::new(),
            load_balancers: self.load_balancers.iter().map(load_balancer_counts).collect(),
        }
    }

    /// Returns the part of a server's status that changes with each of its reports.
    pub fn server_loads(&self, id: ServerId, server: &FleetServer, now: ClockReadings) -> ServerLoads {
        let empty_agent = Agent::default();
        let agent = self.agent(id).unwrap_or(&empty_agent);
        let newest_report = agent.newest_report.as_ref();
        let core_loads = agent.fresh_core_loads(now).into_iter().flat_map(|loads| loads.iter());
        ServerLoads {
            name: server.name.clone(),
            core_loads: core_loads.map(|load| (load * 1000.0).round() / 1000.0).collect(),
            open_connections: agent.open_connection_count(),
            service_connections: agent.fresh_connection_count(now).map(ReportedConnectionCount::total_connection_count),
            new_connections: newest_report
                .map_or(0, |report| report.rss_matched_syn_count.saturating_add(report.rss_mismatched_syn_count)),
        }
    }

    /// Returns the part of the status that changes rarely, without services and servers.
    pub fn overview_summary(&self, now: ClockReadings) -> Overview {
        let load_balancer_overview =
            |(name, balancer): (&String, &super::load_balancers::LoadBalancer)| OverviewLoadBalancer {
                name: name.clone(),
                connected: balancer.is_connected(),
                alive: balancer.is_alive(now),
                xdp_mode: balancer.reported_state_and_time.as_ref().map(|(state, _)| state.xdp_mode.clone()),
                warnings: balancer
                    .reported_state_and_time
                    .iter()
                    .flat_map(|(state, _)| LoadBalancerState::from(state).warnings)
                    .collect(),
            };
        Overview {
            configuration_generation: self.fleet.generation,
            fleet_generation: self.fleet.document.generation,
            report_interval_ms: self.fleet.report_interval.as_millis() as u32,
            services: Vec::new(),
            servers: Vec::new(),
            load_balancers: self.load_balancers.iter().map(load_balancer_overview).collect(),
            keys: self.keys_summary(now),
        }
    }

    /// Returns the overview of the service at `service_position`, or `None` if there is no such service. Also returns
    /// the ids of its servers instead of their names, because looking up thousands of names takes milliseconds. `pool`
    /// is as for [`Controller::service_status`].
    pub fn overview_service(
        &self,
        service_position: usize,
        pool: Option<&ServerPool>,
        now: ClockReadings,
    ) -> Option<(OverviewService, Vec<ServerId>)> {
        let service = self.services.get(service_position)?;
        let pool = pool.map_or_else(|| self.cached_or_computed_pool(service, now), Cow::Borrowed);
        let service_overview = OverviewService {
            name: service.configuration().name.clone(),
            address: service.configuration().address,
            policy: service.configuration().policy_name.to_owned(),
            consistency: service.configuration().settings.consistency.name().to_owned(),
            servers: Vec::new(),
            warnings: self.service_warnings(service, &pool),
        };
        Some((service_overview, service.configuration().members.keys().copied().collect()))
    }

    pub fn overview_server(&self, id: ServerId, server: &FleetServer, now: ClockReadings) -> OverviewServer {
        let empty_agent = Agent::default();
        let agent = self.agent(id).unwrap_or(&empty_agent);
        let state_reason = self.state_with_reason(id, server, now);
        OverviewServer {
            name: server.name.clone(),
            id: id.get().into(),
            address: server.address,
            state: state_reason.state,
            state_reason: state_reason.state_reason,
            report_state: agent.report_state(now),
            weight: server.weight.get(),
            drain: self.active_drain(id, now),
            warnings: self.server_warnings(server, agent, now),
        }
    }

    pub fn load_balancer_statuses(&self, now: ClockReadings) -> Vec<LoadBalancer> {
        self.load_balancers
            .iter()
            .map(|(name, balancer)| {
                let record = self.fleet.load_balancer_records.get(name);
                LoadBalancer {
                    name: name.clone(),
                    state: balancer.reported_state_and_time.as_ref().map(|(state, _)| LoadBalancerState::from(state)),
                    state_age_ms: balancer
                        .reported_state_and_time
                        .as_ref()
                        .map_or(0, |(_, received_at)| milliseconds_since(*received_at, now)),
                    connected: balancer.is_connected(),
                    alive: balancer.is_alive(now),
                    connection_table_owner: record
                        .and_then(|record| record.owner_number)
                        .map(|owner| owner.get().into()),
                    address: record.and_then(|record| record.address),
                }
            })
            .collect()
    }

    /// Returns the status of the service at this position, or `None` if there is no such service. Its members are left
    /// out ([`Controller::members_after_id`]). `includes_rss_keys` is whether the status has full RSS keys. `pool` is
    /// the service's pool if none is cached ([`Controller::lacks_cached_pool`]).
    pub fn service_status(
        &self,
        service_position: usize,
        pool: Option<&ServerPool>,
        includes_rss_keys: bool,
        now: ClockReadings,
    ) -> Option<ShownService> {
        let service = self.services.get(service_position)?;
        let fleet_service = service.configuration();
        let pool = pool.map_or_else(|| self.cached_or_computed_pool(service, now), Cow::Borrowed);
        let table_and_age = service.newest_table_and_age(now);
        let rss_groups = self.rss_groups(&pool);
        Some(ShownService {
            name: fleet_service.name.clone(),
            address: fleet_service.address,
            policy: fleet_service.policy_name.to_owned(),
            consistency: fleet_service.settings.consistency.name().to_owned(),
            timestamps: fleet_service.settings.timestamps.name().to_owned(),
            bucket_count: fleet_service.bucket_count.get(),
            table_generation: table_and_age.map_or(0, |(table, _)| table.generation),
            table_age_ms: table_and_age.map_or(0, |(_, age)| age.as_millis() as u32),
            servers: Vec::new(),
            rss_groups: rss_groups
                .iter()
                .filter_map(|group| self.displayed_rss_group(group, includes_rss_keys))
                .collect(),
            warnings: self.service_warnings(service, &pool),
            members: Vec::new(),
            health_check_kind: fleet_service.health_check.as_ref().map(|check| check.probe.name().to_owned()),
            when_all_down: fleet_service.when_all_down.name().to_owned(),
            failing_open: service.is_failing_open(),
        })
    }

    pub(super) fn server_names(&self, ids: impl Iterator<Item = ServerId>) -> Vec<String> {
        ids.map(|id| self.fleet.servers[&id].name.clone()).collect()
    }

    /// Returns a pool's RSS groups. If no RSS is known, the only group has an arbitrary key and is not displayed.
    pub(super) fn rss_groups<'a>(&self, pool: &'a ServerPool) -> Vec<RssGroup<'a>> {
        rss_groups(pool, &RssKey::microsoft_verification_key())
    }

    fn displayed_rss_group(&self, group: &RssGroup<'_>, includes_rss_keys: bool) -> Option<ShownGroup> {
        let server_names = self.server_names(group.servers.iter().map(|server| server.id));
        let (key, key_fingerprint) = (includes_rss_keys.then(|| group.key.to_string()), group.key.key_fingerprint());
        (!server_names.is_empty()).then_some(ShownGroup { key, key_fingerprint, servers: server_names })
    }

    pub(super) fn service_warnings(&self, service: &Service, pool: &ServerPool) -> Vec<String> {
        let mut warnings = Vec::new();
        if service.is_failing_open() {
            warnings.push(
                "all of its servers are down: new connections go to all of them (`when_all_down = \"fail-open\"`)"
                    .to_owned(),
            );
        }
        if pool.eligible_servers().next().is_none() {
            warnings.push("no server takes new connections: they are dropped".to_owned());
        }
        warnings.extend(service.configuration().other_balancer.map(migration_warning));
        if service.configuration().is_lb_stamped() && self.load_balancers.connected_load_balancer_count() == 0 {
            warnings.push(
                "timestamps by load balancers: none is connected, so the servers that they can stamp for are unknown"
                    .to_owned(),
            );
        }
        warnings.extend(self.rss_key_warning(pool));
        warnings.extend(self.bucket_count_warning(service.configuration().bucket_count.get() as usize, pool));
        warnings
    }

    /// Returns a warning if the pool has more RSS keys than the data plane supports.
    fn rss_key_warning(&self, pool: &ServerPool) -> Option<String> {
        // Servers are grouped at most once a second, because grouping ten thousand servers takes milliseconds.
        if rss_key_count(pool) <= intf::MAX_RSS_GROUPS as usize {
            return None;
        }
        let rss_groups = self.rss_groups(pool);
        let ungrouped_servers =
            rss_groups.iter().flat_map(|group| &group.servers_without_core_loads).filter(|server| server.rss.is_some());
        let ungrouped_names = self.server_names(ungrouped_servers.map(|server| server.id));
        Some(format!(
            "more than {} different RSS keys: the cores of {} count by their mean load (manage_rss = true gives all \
             servers one key)",
            intf::MAX_RSS_GROUPS,
            ungrouped_names.join(", ")
        ))
    }

    /// Returns a warning if indirection tables are longer than the number of buckets.
    fn bucket_count_warning(&self, bucket_count: usize, pool: &ServerPool) -> Option<String> {
        let has_longer_table = |server: &&PoolServer| {
            server.rss.as_ref().is_some_and(|rss| rss.indirection_table.entry_count() > bucket_count)
        };
        let longer_table_names =
            self.server_names(pool.eligible_servers().filter(has_longer_table).map(|server| server.id));
        (!longer_table_names.is_empty()).then(|| {
            format!(
                "{bucket_count} buckets are fewer than the indirection tables of {} have entries: a bucket reaches \
                 several of their cores, and the mean load of these counts (raise `buckets`)",
                longer_table_names.join(", ")
            )
        })
    }

    /// Returns a server's status, which includes the full RSS key only if `includes_rss_keys` is set.
    pub fn server_status(
        &self,
        id: ServerId,
        server: &FleetServer,
        includes_rss_keys: bool,
        now: ClockReadings,
    ) -> Server {
        let empty_agent = Agent::default();
        let agent = self.agent(id).unwrap_or(&empty_agent);
        let state_reason = self.state_with_reason(id, server, now);
        let newest_report = agent.newest_report.as_ref();
        Server {
            name: server.name.clone(),
            id: id.get().into(),
            address: server.address,
            vlan: server.vlan.id(),
            state: state_reason.state,
            state_for_ms: state_reason.state_duration_ms(),
            state_reason: state_reason.state_reason,
            report_state: agent.report_state(now),
            core_loads: agent.fresh_core_loads(now).map(|loads| loads.to_vec()).unwrap_or_default(),
            report_age_ms: newest_report.map_or(0, |report| milliseconds_since(report.received_at, now)),
            open_connections: agent.open_connection_count(),
            rss: displayed_rss(agent, includes_rss_keys),
            rss_matched_syns: newest_report.map_or(0, |report| report.rss_matched_syn_count),
            rss_mismatched_syns: newest_report.map_or(0, |report| report.rss_mismatched_syn_count),
            warnings: self.server_warnings(server, agent, now),
            weight: server.weight.get(),
            capacity: self.server_capacity(server, agent).unwrap_or(0.0),
            configuration_generation: agent.confirmed_config_generation,
            counters: newest_report.iter().flat_map(|report| report.details.bpf_counters.iter().cloned()).collect(),
            dispatched_services: newest_report
                .iter()
                .flat_map(|report| &report.details.dispatched_services)
                .map(DispatchedService::from)
                .collect(),
            drain: self.active_drain(id, now),
            rack: agent.session.as_ref().and_then(|session| session.rack_name.as_ref().map(ToString::to_string)),
            permitted_racks: self.fleet.racks_allowed_for_server(id).map(|racks| racks.iter().cloned().collect()),
            connection_counts: agent.fresh_connection_count(now).map(|count| to_counted_connections(count, now)),
        }
    }

    /// Returns the server's configured capacity, or else the number of its cores.
    pub(super) fn server_capacity(&self, server: &FleetServer, agent: &Agent) -> Option<f64> {
        let count_cores = || agent.core_count().map(|cores| cores as f64);
        server.capacity.map(ServerCapacity::get).or_else(count_cores)
    }

    pub(super) fn server_warnings(&self, server: &FleetServer, agent: &Agent, now: ClockReadings) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.load_balancers.is_unreachable(&server.name, now) {
            warnings.push("no load balancer can find its MAC address: it takes no new connections".to_owned());
        }
        if let Some(clock_lead) = agent.clock_lead {
            warnings.push(format!(
                "its wall clock is {} ms ahead of the controller's: one of the two is wrong (chronyc tracking)",
                clock_lead.as_millis()
            ));
        }
        warnings.extend(agent.rss_state.rss_problem.clone());
        if let (Some(rss), Some(loads)) = (agent.rss_config(), agent.fresh_core_loads(now)) {
            warnings.extend(queue_count_warning(rss, loads.len()));
        }
        warnings.extend(agent.newest_report.iter().flat_map(|report| report.details.warnings.iter().cloned()));
        warnings
    }
}

/// Returns a server's RSS configuration as displayed. It includes the full key only if `includes_rss_keys` is set.
fn displayed_rss(agent: &Agent, includes_rss_keys: bool) -> Option<ServerRss> {
    let reported_rss = agent.rss_state.reported_rss.as_ref()?;
    let rss_config = agent.rss_config();
    Some(ServerRss {
        source: reported_rss.source.clone(),
        key: rss_config.filter(|_| includes_rss_keys).map(|rss| rss.key.to_string()),
        key_fingerprint: rss_config.map(|rss| rss.key.key_fingerprint()).unwrap_or_default(),
        input_transform: rss_config.map(|rss| rss.key.input_transform().name().to_owned()).unwrap_or_default(),
        indirection_table: rss_config
            .iter()
            .flat_map(|rss| rss.indirection_table.queue_by_entry())
            .map(|q| (*q).into())
            .collect(),
    })
}

/// Returns a warning that packets of a service are sent to another load balancer (migration).
fn migration_warning(other: MigrationLoadBalancer) -> String {
    match other.takes_new_connections {
        true => format!("new connections are sent to {} (migrate_to)", other.address),
        false => format!(
            "what is of no connection known here is sent to {} (migrate_from): counter `to_other_balancer`",
            other.address
        ),
    }
}

/// Returns a warning if there are more receive queues than cores. Each queue that has no core is assumed to have the
/// average load.
fn queue_count_warning(rss: &RssConfig, core_count: usize) -> Option<String> {
    let highest_queue = usize::from(*rss.indirection_table.queue_by_entry().iter().max()?);
    (highest_queue >= core_count)
        .then(|| format!("its indirection table names receive queue {highest_queue}, but {core_count} cores report"))
}

pub(super) fn milliseconds_since(start_time: Duration, now: ClockReadings) -> u32 {
    now.monotonic_time.saturating_sub(start_time).as_millis() as u32
}
