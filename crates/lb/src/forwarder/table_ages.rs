//! Lifetime of placement tables. A table has the loads of the time when the controller made it. Without a newer table
//! for the fleet's `table_lifetime`, the load balancer chooses candidates by its own counts. After a reboot it has no
//! table, and makes one from the saved configuration.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use coreward_dataplane::clock::monotonic;
use coreward_dataplane::lb;
use coreward_model::ServerId;
use coreward_model::consistency::Consistency;
use coreward_model::lb::ServerTraffic;
use coreward_model::placement::{BucketCount, PlacementTable};
use coreward_model::policy::{self, LeastByMetric, Policy as _, Pool, PoolServer};
use coreward_wire::{Server, Service, ServiceIndex};

use super::{Forwarder, PROGRAM_LOAD_TIMEOUT};

/// Interval at which candidates for expired tables are chosen.
const CHOICE_INTERVAL: Duration = Duration::from_secs(1);
/// Generation of tables that this load balancer makes itself: those of controllers count from 1.
const OWN_GENERATION: u64 = 0;

/// Ages of the services' tables in force. All times are readings of one monotonic clock.
#[derive(Debug)]
pub struct TableAges {
    /// Start of this process, from which tables of an earlier process age.
    started_at: Duration,
    /// Time at which the stream that brought the newest table ended, by service; `None`: the stream is still open.
    stream_ends: BTreeMap<ServiceIndex, Option<Duration>>,
    /// Services whose tables have expired, with their number of opened connections at the last choice of candidates.
    expired: BTreeMap<ServiceIndex, u64>,
    last_choice: Duration,
    choice_count: u64,
}

impl TableAges {
    pub fn new(started_at: Duration) -> Self {
        Self {
            started_at,
            stream_ends: BTreeMap::new(),
            expired: BTreeMap::new(),
            last_choice: started_at,
            choice_count: 0,
        }
    }

    /// Records that a controller sent a table. Returns whether the replaced table had expired.
    pub fn renew(&mut self, service: ServiceIndex) -> bool {
        self.stream_ends.insert(service, None);
        self.expired.remove(&service).is_some()
    }

    pub fn end_stream(&mut self, now: Duration) {
        self.stream_ends.values_mut().for_each(|end| *end = end.or(Some(now)));
    }

    pub fn retain(&mut self, is_service: impl Fn(ServiceIndex) -> bool) {
        self.stream_ends.retain(|service, _| is_service(*service));
        self.expired.retain(|service, _| is_service(*service));
    }

    fn exceeds_lifetime(&self, service: ServiceIndex, lifetime: Duration, now: Duration) -> bool {
        let since = self.stream_ends.get(&service).copied().unwrap_or(Some(self.started_at));
        since.is_some_and(|since| now.saturating_sub(since) >= lifetime)
    }

    pub fn expired(&self) -> impl ExactSizeIterator<Item = ServiceIndex> + '_ {
        self.expired.keys().copied()
    }
}

impl Forwarder {
    pub fn end_stream(&mut self) {
        self.table_ages.end_stream(monotonic());
    }

    /// Chooses new candidates for services whose tables have expired, once a second.
    pub(super) fn choose_for_expired_tables(&mut self) {
        let now = monotonic();
        if now.saturating_sub(self.table_ages.last_choice) < CHOICE_INTERVAL {
            return;
        }
        self.table_ages.last_choice = now;
        let is_expired = |(service, index): &&(Service, lb::ServiceIndex)| {
            let may_choose = match self.balancer.table_generation(*index) {
                None => may_make_table(service),
                Some(generation) => generation == OWN_GENERATION || policy::reads_loads(&service.policy),
            };
            may_choose && self.table_ages.exceeds_lifetime(service.index, self.table_lifetime, now)
        };
        let expired: Vec<_> = self.services.values().filter(is_expired).map(|(service, _)| service.index).collect();
        if expired.is_empty() {
            return;
        }
        let ids: BTreeSet<ServerId> =
            expired.iter().flat_map(|index| self.services[index].0.servers.iter().map(|server| server.id)).collect();
        let ids: Vec<ServerId> = ids.into_iter().collect();
        let traffic = ids.iter().copied().zip(self.balancer.traffic_of(&ids)).collect();
        expired.into_iter().for_each(|index| self.choose_for_expired_table(index, &traffic));
    }

    fn choose_for_expired_table(&mut self, service_index: ServiceIndex, traffic: &HashMap<ServerId, ServerTraffic>) {
        let (service, index) = &self.services[&service_index];
        let opened = self.balancer.opened_connections(*index);
        let before = self.table_ages.expired.insert(service_index, opened);
        if before.is_none() {
            log_expired(service, self.table_lifetime);
        }
        self.table_ages.choice_count += 1;
        let mut least = LeastByMetric::new(self.table_ages.choice_count);
        let own_table = self.balancer.table_generation(*index).is_none().then(|| {
            let pool = eligible_pool(service, |server| server.is_eligible, traffic);
            least.compute_table(&pool, BucketCount::PUBLISHED, OWN_GENERATION)
        });
        let takes_new =
            |server: &Server| server.is_eligible && !self.masked_targets.contains(&(service_index, server.id));
        let choose = |table: &PlacementTable| {
            let members: BTreeSet<ServerId> = table.members.iter().map(|member| member.server).collect();
            let pool = eligible_pool(service, |server| members.contains(&server.id) && takes_new(server), traffic);
            let opened = opened.saturating_sub(before.unwrap_or(opened));
            least.candidate_table(&pool.with_opened_connections(opened), table.bucket_count)
        };
        let installed = own_table.map_or(Ok(()), |table| {
            coreward_daemon::run_with_watchdog_limit(PROGRAM_LOAD_TIMEOUT, || {
                self.balancer.install_table(*index, &table)
            })
        });
        if let Err(error) = installed.and_then(|()| self.balancer.replace_candidates(*index, choose)) {
            tracing::warn!(
                event = "candidates-not-replaced",
                service = service.name,
                error = format!("{error:#}"),
                "the table has expired, and the load balancer cannot select candidates: the old candidates stay"
            );
        }
    }

    pub(super) fn expired_tables(&self) -> impl Iterator<Item = String> + '_ {
        let services = self.table_ages.expired().filter_map(|index| self.services.get(&index));
        services.map(|(service, _)| {
            format!(
                "service {} has no table within its lifetime: new connections go by this load balancer's own counts",
                service.name
            )
        })
    }
}

fn log_expired(service: &Service, lifetime: Duration) {
    tracing::warn!(
        event = "table-expired",
        service = service.name,
        ?lifetime,
        "no new table came within the lifetime: this load balancer selects candidates by its own connection counts"
    );
}

/// Returns whether this load balancer may choose a service's candidates. Without a cookie or a connection table, all
/// load balancers must choose alike, or connections would change their server.
fn may_make_table(service: &Service) -> bool {
    matches!(service.mode.consistency, Consistency::Stateless | Consistency::Stateful | Consistency::HashTable)
        && service.servers.iter().any(|server| server.is_eligible)
}

/// Returns the pool of a service's servers that take new connections, with the loads that this load balancer counts.
fn eligible_pool(
    service: &Service,
    takes_new: impl Fn(&Server) -> bool,
    traffic: &HashMap<ServerId, ServerTraffic>,
) -> Pool {
    let servers = service.servers.iter().filter(|server| takes_new(server));
    let counted = |server: &Server| {
        let open = traffic.get(&server.id).map_or(0, |counts| counts.opened.saturating_sub(counts.closed));
        PoolServer {
            open_connections: open.try_into().unwrap_or(u32::MAX),
            weight: server.weight,
            capacity: server.capacity,
            ..PoolServer::new(server.id)
        }
    };
    Pool::new(servers.map(counted).collect(), 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(index: u32) -> ServiceIndex {
        ServiceIndex::new(index).unwrap()
    }

    #[test]
    fn table_ages_from_the_end_of_its_stream() {
        let [start, lifetime] = [100, 10].map(Duration::from_secs);
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut ages = TableAges::new(start);
        // A table of an earlier process.
        assert!(
            !ages.exceeds_lifetime(service(1), lifetime, at(9)) && ages.exceeds_lifetime(service(1), lifetime, at(10))
        );
        ages.renew(service(1));
        assert!(!ages.exceeds_lifetime(service(1), lifetime, at(1000)), "the stream goes on");
        ages.end_stream(at(1000));
        // Further attempts reach no leader.
        ages.end_stream(at(1005));
        assert!(
            !ages.exceeds_lifetime(service(1), lifetime, at(1009))
                && ages.exceeds_lifetime(service(1), lifetime, at(1010))
        );
        // The next stream brings another service's table only.
        ages.renew(service(2));
        assert!(
            ages.exceeds_lifetime(service(1), lifetime, at(1011))
                && !ages.exceeds_lifetime(service(2), lifetime, at(2000))
        );
    }

    #[test]
    fn next_table_ends_expiry() {
        let mut ages = TableAges::new(Duration::ZERO);
        ages.expired.extend([(service(1), 0), (service(2), 0)]);
        assert!(ages.renew(service(1)) && !ages.renew(service(1)));
        ages.retain(|index| index != service(2));
        assert_eq!(ages.expired().len(), 0);
    }
}
