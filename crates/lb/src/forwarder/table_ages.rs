//! Limits the lifetime of placement tables, which contain the loads at the time when the controller made them. If no
//! newer table arrives within the fleet's `table_lifetime`, the load balancer chooses candidate servers by its own
//! counts. After a reboot it has no table, so it makes one from the saved configuration.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use coreward_dataplane::clock::monotonic_time;
use coreward_dataplane::lb;
use coreward_model::ServerId;
use coreward_model::consistency::ConsistencyMode;
use coreward_model::lb::ServerTraffic;
use coreward_model::placement::{BucketCount, PlacementTable};
use coreward_model::policy::{self, LeastPolicy, PlacementPolicy as _, PoolServer, ServerPool};
use coreward_wire::{Server, Service, ServiceIndex};

use super::{Forwarder, XDP_PROGRAM_LOAD_TIMEOUT};

/// Interval at which new candidate servers are chosen for services whose placement tables have expired.
const EXPIRED_TABLE_RENEWAL_INTERVAL: Duration = Duration::from_secs(1);
/// Generation of tables that this load balancer makes itself. Those that controllers make are numbered from 1.
const LB_MADE_TABLE_GENERATION: u64 = 0;

/// Ages of the services' current tables. All times are readings of one monotonic clock.
#[derive(Debug)]
pub struct PlacementTableAges {
    /// Start of this process, from which the age of an earlier process's tables is measured.
    process_started_at: Duration,
    /// Time at which the stream that brought a service's newest table ended, or `None` while the stream is open.
    stream_ended_at_by_service: BTreeMap<ServiceIndex, Option<Duration>>,
    /// Number of connections that each service with an expired table had opened when its candidates were last chosen.
    opened_counts_of_expired_tables: BTreeMap<ServiceIndex, u64>,
    last_candidate_choice_at: Duration,
    candidate_choice_count: u64,
}

impl PlacementTableAges {
    pub fn new(process_started_at: Duration) -> Self {
        Self {
            process_started_at,
            stream_ended_at_by_service: BTreeMap::new(),
            opened_counts_of_expired_tables: BTreeMap::new(),
            last_candidate_choice_at: process_started_at,
            candidate_choice_count: 0,
        }
    }

    /// Records that a controller sent a table, and returns whether the replaced table had expired.
    pub fn record_new_table(&mut self, service: ServiceIndex) -> bool {
        self.stream_ended_at_by_service.insert(service, None);
        self.opened_counts_of_expired_tables.remove(&service).is_some()
    }

    pub fn record_stream_end(&mut self, now: Duration) {
        self.stream_ended_at_by_service.values_mut().for_each(|stream_end| *stream_end = stream_end.or(Some(now)));
    }

    pub fn retain_services(&mut self, is_service: impl Fn(ServiceIndex) -> bool) {
        self.stream_ended_at_by_service.retain(|service, _| is_service(*service));
        self.opened_counts_of_expired_tables.retain(|service, _| is_service(*service));
    }

    fn exceeds_table_lifetime(&self, service: ServiceIndex, table_lifetime: Duration, now: Duration) -> bool {
        let aging_since =
            self.stream_ended_at_by_service.get(&service).copied().unwrap_or(Some(self.process_started_at));
        aging_since.is_some_and(|started_at| now.saturating_sub(started_at) >= table_lifetime)
    }

    pub fn services_with_expired_tables(&self) -> impl ExactSizeIterator<Item = ServiceIndex> + '_ {
        self.opened_counts_of_expired_tables.keys().copied()
    }
}

impl Forwarder {
    pub fn end_controller_stream(&mut self) {
        self.table_ages.record_stream_end(monotonic_time());
    }

    /// Chooses new candidates for services whose tables have expired, once a second.
    pub(super) fn replace_expired_candidates(&mut self) {
        let now = monotonic_time();
        if now.saturating_sub(self.table_ages.last_candidate_choice_at) < EXPIRED_TABLE_RENEWAL_INTERVAL {
            return;
        }
        self.table_ages.last_candidate_choice_at = now;
        let is_table_expired = |(service, index): &&(Service, lb::ServiceIndex)| {
            let may_choose = match self.load_balancer.placement_table_generation(*index) {
                None => may_choose_candidates(service),
                Some(generation) => {
                    generation == LB_MADE_TABLE_GENERATION || policy::policy_reads_loads(&service.policy_name)
                }
            };
            may_choose && self.table_ages.exceeds_table_lifetime(service.index, self.load_based_table_lifetime, now)
        };
        let expired_services: Vec<_> =
            self.services_by_index.values().filter(is_table_expired).map(|(service, _)| service.index).collect();
        if expired_services.is_empty() {
            return;
        }
        let server_ids: BTreeSet<ServerId> = expired_services
            .iter()
            .flat_map(|index| self.services_by_index[index].0.servers.iter().map(|server| server.id))
            .collect();
        let server_ids: Vec<ServerId> = server_ids.into_iter().collect();
        let traffic_by_server =
            server_ids.iter().copied().zip(self.load_balancer.traffic_of_servers(&server_ids)).collect();
        expired_services.into_iter().for_each(|index| self.replace_candidates_of_service(index, &traffic_by_server));
    }

    fn replace_candidates_of_service(
        &mut self,
        service_index: ServiceIndex,
        traffic_by_server: &HashMap<ServerId, ServerTraffic>,
    ) {
        let newly_opened_count = self.take_newly_opened_connection_count(service_index);
        self.table_ages.candidate_choice_count += 1;
        let mut least_policy = LeastPolicy::new(self.table_ages.candidate_choice_count);
        let install_result = self.install_own_table(service_index, &mut least_policy, traffic_by_server);
        let (service, lb_service_index) = &self.services_by_index[&service_index];
        let takes_new_connections =
            |server: &Server| server.is_eligible && !self.masked_targets.contains(&(service_index, server.id));
        let choose_candidates = |table: &PlacementTable| {
            let member_ids: BTreeSet<ServerId> = table.members.iter().map(|member| member.server).collect();
            let eligible_servers = build_eligible_pool(
                service,
                |server| member_ids.contains(&server.id) && takes_new_connections(server),
                traffic_by_server,
            );
            least_policy.build_candidate_table(
                &eligible_servers.with_opened_connection_count(newly_opened_count),
                table.bucket_count,
            )
        };
        if let Err(error) =
            install_result.and_then(|()| self.load_balancer.replace_candidates(*lb_service_index, choose_candidates))
        {
            tracing::warn!(
                event = "candidates-not-replaced",
                service = service.name,
                error = format!("{error:#}"),
                "the service's placement table has expired, but the load balancer cannot choose candidates by its own \
                 connection counts: the old candidates stay in use"
            );
        }
    }

    /// Returns the number of connections opened since candidates were last chosen for the service. Logs the expiry of
    /// its table if this is the first choice, for which the number is 0.
    fn take_newly_opened_connection_count(&mut self, service_index: ServiceIndex) -> u64 {
        let (service, lb_service_index) = &self.services_by_index[&service_index];
        let opened_count = self.load_balancer.opened_connection_count(*lb_service_index);
        let previous_opened_count = self.table_ages.opened_counts_of_expired_tables.insert(service_index, opened_count);
        if previous_opened_count.is_none() {
            log_expired_table(service, self.load_based_table_lifetime);
        }
        opened_count.saturating_sub(previous_opened_count.unwrap_or(opened_count))
    }

    /// Installs a table that this load balancer makes itself, if the service has none.
    fn install_own_table(
        &mut self,
        service_index: ServiceIndex,
        least_policy: &mut LeastPolicy,
        traffic_by_server: &HashMap<ServerId, ServerTraffic>,
    ) -> anyhow::Result<()> {
        let (service, lb_service_index) = &self.services_by_index[&service_index];
        if self.load_balancer.placement_table_generation(*lb_service_index).is_some() {
            return Ok(());
        }
        let eligible_servers = build_eligible_pool(service, |server| server.is_eligible, traffic_by_server);
        let own_table =
            least_policy.compute_table(&eligible_servers, BucketCount::PAPER_VALUE, LB_MADE_TABLE_GENERATION);
        coreward_daemon::run_with_raised_watchdog_limit(XDP_PROGRAM_LOAD_TIMEOUT, || {
            self.load_balancer.install_table(*lb_service_index, &own_table)
        })
    }

    pub(super) fn expired_table_warnings(&self) -> impl Iterator<Item = String> + '_ {
        let expired_services =
            self.table_ages.services_with_expired_tables().filter_map(|index| self.services_by_index.get(&index));
        expired_services.map(|(service, _)| {
            format!(
                "service {} has no table within its lifetime: new connections go by this load balancer's own counts",
                service.name
            )
        })
    }
}

fn log_expired_table(service: &Service, lifetime: Duration) {
    tracing::warn!(
        event = "table-expired",
        service = service.name,
        ?lifetime,
        "the service's table has expired: this load balancer places new connections by its own connection counts"
    );
}

/// Returns whether this load balancer may choose candidate servers for a service. Without a cookie or connection table,
/// all load balancers must choose alike, because connections would otherwise change their server.
fn may_choose_candidates(service: &Service) -> bool {
    matches!(
        service.settings.consistency,
        ConsistencyMode::Stateless | ConsistencyMode::Stateful | ConsistencyMode::HashTable
    ) && service.servers.iter().any(|server| server.is_eligible)
}

/// Returns the servers that take new connections of a service, with the loads that this load balancer counts.
fn build_eligible_pool(
    service: &Service,
    takes_new_connections: impl Fn(&Server) -> bool,
    traffic_by_server: &HashMap<ServerId, ServerTraffic>,
) -> ServerPool {
    let eligible_servers = service.servers.iter().filter(|server| takes_new_connections(server));
    let to_pool_server = |server: &Server| {
        let open_connection_count = traffic_by_server.get(&server.id).map_or(0, |server_traffic| {
            server_traffic.opened_connection_count.saturating_sub(server_traffic.closed_connection_count)
        });
        PoolServer {
            open_connection_count: open_connection_count.try_into().unwrap_or(u32::MAX),
            weight: server.weight,
            capacity: server.capacity,
            ..PoolServer::new(server.id)
        }
    };
    ServerPool::new(eligible_servers.map(to_pool_server).collect(), 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service_index(index: u32) -> ServiceIndex {
        ServiceIndex::new(index).unwrap()
    }

    #[test]
    fn table_ages_only_after_the_end_of_its_stream() {
        let [start, lifetime] = [100, 10].map(Duration::from_secs);
        let time_at_second = |seconds| start + Duration::from_secs(seconds);
        let mut table_ages = PlacementTableAges::new(start);
        // The table was installed by an earlier process.
        assert!(
            !table_ages.exceeds_table_lifetime(service_index(1), lifetime, time_at_second(9))
                && table_ages.exceeds_table_lifetime(service_index(1), lifetime, time_at_second(10))
        );
        table_ages.record_new_table(service_index(1));
        assert!(
            !table_ages.exceeds_table_lifetime(service_index(1), lifetime, time_at_second(1000)),
            "the stream goes on"
        );
        table_ages.record_stream_end(time_at_second(1000));
        // Further attempts to connect find no leader.
        table_ages.record_stream_end(time_at_second(1005));
        assert!(
            !table_ages.exceeds_table_lifetime(service_index(1), lifetime, time_at_second(1009))
                && table_ages.exceeds_table_lifetime(service_index(1), lifetime, time_at_second(1010))
        );
        // The next stream brings only another service's table.
        table_ages.record_new_table(service_index(2));
        assert!(
            table_ages.exceeds_table_lifetime(service_index(1), lifetime, time_at_second(1011))
                && !table_ages.exceeds_table_lifetime(service_index(2), lifetime, time_at_second(2000))
        );
    }

    #[test]
    fn new_table_ends_the_expiry_of_the_previous_table() {
        let mut table_ages = PlacementTableAges::new(Duration::ZERO);
        table_ages.opened_counts_of_expired_tables.extend([(service_index(1), 0), (service_index(2), 0)]);
        assert!(table_ages.record_new_table(service_index(1)) && !table_ages.record_new_table(service_index(1)));
        table_ages.retain_services(|index| index != service_index(2));
        assert_eq!(table_ages.services_with_expired_tables().len(), 0);
    }
}
