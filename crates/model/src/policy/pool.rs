//! A service's servers as policies see them.

use std::sync::{Arc, OnceLock};

use super::loads::{ServerLoadClass, ServerLoads};
use super::{BucketCandidateList, RackSummary, ServerCapacity, ServerWeight};
use crate::ServerId;
use crate::placement::mix_hash;
use crate::rss::{RssConfig, RssKey};

/// Server of a pool, with the data that policies use.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolServer {
    /// Id of the server.
    pub id: ServerId,
    /// Whether the server takes new connections (neither draining nor unhealthy).
    pub is_eligible: bool,
    /// Loads of the server's cores, or `None` without a recent report. The server then counts with the neutral load.
    pub loads: Option<ServerLoads>,
    /// RSS key and indirection table of the server's NIC, or `None` if unknown. All cores of the server then count as
    /// one.
    pub rss: Option<RssConfig>,
    /// Number of the server's open connections in all services.
    pub open_connection_count: u32,
    /// Weight of the server. A server of weight 0 is not eligible.
    pub weight: ServerWeight,
    /// Fraction of its share that the server gets during slow start, above 0. Outside slow start it is 1.
    pub slow_start_fraction: f64,
    /// Capacity that the operator configured, or `None` if the number of cores counts instead.
    pub capacity: Option<ServerCapacity>,
    /// Rates of the traffic from load balancers, or `None` if traffic was not counted yet.
    pub traffic: Option<TrafficRates>,
    /// Whether the loads are newer than the service's previous table. Older loads lack connections assigned since, and
    /// smoothing has processed them already.
    pub has_new_load: bool,
}

/// Rates of the traffic to a server, summed over all services and load balancers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrafficRates {
    /// Number of packets per second that load balancers send to the server.
    pub packets_per_second: f64,
    /// Number of frame bytes per second that load balancers send to the server.
    pub bytes_per_second: f64,
}

/// Maximum ratio of a server's reported number of cores to the pool's median number. Cores above it do not count,
/// unless the server's capacity is configured.
pub const MAX_CORE_COUNT_TO_MEDIAN_RATIO: u32 = 8;

/// Servers of one service, with their state when a table is computed.
#[derive(Debug, Clone)]
pub struct ServerPool {
    pub(super) servers: Vec<PoolServer>,
    pub(super) rack_summaries: Vec<Arc<RackSummary>>,
    pub(super) load_balancer_count: u32,
    pub(super) opened_connection_count: Option<u64>,
    pub(super) counts_placements_as_requests: bool,
    pub(super) is_new_report_interval: bool,
    /// Index in `servers` by server id. The list is empty before the first look-up.
    position_by_id: Vec<Option<u16>>,
    /// Whether no server has loads from the summaries of several racks. Then a rack's next summary replaces the loads.
    is_each_server_in_one_rack: bool,
    totals: OnceLock<ServerPoolTotals>,
}

/// Values computed once per table from all servers of the pool.
#[derive(Debug, Clone, Copy)]
pub(super) struct ServerPoolTotals {
    neutral_load: f64,
    has_loads: bool,
    /// Whether all eligible servers have the same weight and core speed.
    pub has_uniform_servers: bool,
    /// Whether any server reports the loads of its cores directly to this controller.
    pub has_local_reports: bool,
}

impl ServerPool {
    /// Returns a pool of these servers. `load_balancer_count` is the number of load balancers that share the service's
    /// new connections (0 counts as 1).
    pub fn new(mut servers: Vec<PoolServer>, load_balancer_count: u32) -> Self {
        servers.sort_by_key(|server| server.id);
        let load_balancer_count = load_balancer_count.max(1);
        Self {
            servers,
            rack_summaries: Vec::new(),
            load_balancer_count,
            opened_connection_count: None,
            counts_placements_as_requests: false,
            is_new_report_interval: true,
            position_by_id: Vec::new(),
            is_each_server_in_one_rack: true,
            totals: OnceLock::new(),
        }
    }

    /// Returns this pool with other servers. The number of load balancers, the interval and the rack summaries are
    /// kept.
    pub fn with_servers(self, servers: Vec<PoolServer>) -> Self {
        let Self {
            load_balancer_count,
            opened_connection_count: opened_connections,
            counts_placements_as_requests: counts_requests,
            is_new_report_interval: is_new_interval,
            rack_summaries: racks,
            ..
        } = self;
        let pool = Self {
            opened_connection_count: opened_connections,
            counts_placements_as_requests: counts_requests,
            is_new_report_interval: is_new_interval,
            ..Self::new(servers, load_balancer_count)
        };
        pool.with_rack_summaries(racks)
    }

    /// Returns the pool for the next table. All values except the servers and rack summaries are those of
    /// [`ServerPool::new`].
    pub fn for_next_table(self, load_balancer_count: u32) -> Self {
        let load_balancer_count = load_balancer_count.max(1);
        Self {
            load_balancer_count,
            opened_connection_count: None,
            counts_placements_as_requests: false,
            is_new_report_interval: true,
            ..self
        }
    }

    /// Replaces a server, but keeps its loads from rack summaries. A server that is not in the pool is ignored.
    pub fn replace_server(&mut self, new_server: PoolServer) {
        let Some(pool_server) = self.find_server_position(new_server.id).map(|position| &mut self.servers[position])
        else {
            return;
        };
        let rack_loads = match (&new_server.loads, &pool_server.loads) {
            (None, Some(loads)) if !matches!(loads, ServerLoads::Local(_)) => pool_server.loads.take(),
            (None, Some(_)) => {
                self.is_each_server_in_one_rack = false;
                None
            }
            _ => None,
        };
        *pool_server = PoolServer { loads: new_server.loads.or(rack_loads), ..new_server };
        self.totals = OnceLock::new();
    }

    /// Sets whether the loads of a server are newer than the previous table.
    pub fn set_has_new_load(&mut self, id: ServerId, has_new_load: bool) {
        if let Some(position) = self.find_server_position(id) {
            self.servers[position].has_new_load = has_new_load;
        }
    }

    fn find_server_position(&mut self, id: ServerId) -> Option<usize> {
        if self.position_by_id.is_empty()
            && let Some(last) = self.servers.last()
        {
            self.position_by_id.resize(usize::from(last.id.get()) + 1, None);
            for (position, server) in (0..).zip(&self.servers) {
                self.position_by_id[usize::from(server.id.get())] = Some(position);
            }
        }
        self.position_by_id.get(usize::from(id.get())).copied().flatten().map(usize::from)
    }

    /// Returns the pool with loads from rack summaries, for servers whose loads are not known otherwise. If the pool
    /// already has summaries, only new ones are processed.
    pub fn with_rack_summaries(mut self, racks: Vec<Arc<RackSummary>>) -> Self {
        let previous_racks = std::mem::replace(&mut self.rack_summaries, racks.clone());
        self.totals = OnceLock::new();
        if self.is_each_server_in_one_rack && previous_racks.len() == racks.len() {
            let changed_rack_pairs = || {
                previous_racks
                    .iter()
                    .zip(&racks)
                    .filter(|(previous_rack, current_rack)| !Arc::ptr_eq(previous_rack, current_rack))
            };
            changed_rack_pairs().for_each(|(previous_rack, _)| self.remove_rack_loads(previous_rack));
            changed_rack_pairs().for_each(|(_, current_rack)| self.add_rack_loads(current_rack));
            if self.is_each_server_in_one_rack {
                return self;
            }
        }
        self.is_each_server_in_one_rack = true;
        for server in &mut self.servers {
            server.loads = server.loads.take().filter(|loads| matches!(loads, ServerLoads::Local(_)));
        }
        racks.iter().for_each(|rack| self.add_rack_loads(rack));
        self
    }

    fn remove_rack_loads(&mut self, rack: &RackSummary) {
        for summarized_server in &rack.servers {
            if let Some(position) = self.find_server_position(summarized_server.id) {
                let loads = &mut self.servers[position].loads;
                *loads = loads.take().filter(|loads| matches!(loads, ServerLoads::Local(_)));
            }
        }
    }

    /// Adds the loads of a rack's summary. If several summaries contain the same server, the first one counts.
    fn add_rack_loads(&mut self, rack: &RackSummary) {
        for summarized_server in &rack.servers {
            let Some(position) = self.find_server_position(summarized_server.id) else { continue };
            match &mut self.servers[position].loads {
                loads @ None => *loads = Some(summarized_server.loads.clone()),
                Some(ServerLoads::Local(_)) => {}
                Some(_) => self.is_each_server_in_one_rack = false,
            }
        }
    }

    /// Returns the racks' candidate lists of servers with RSS key `key`.
    pub(super) fn candidate_lists_with_key(&self, key: &RssKey) -> impl Iterator<Item = &BucketCandidateList> {
        self.rack_summaries.iter().flat_map(|rack| &rack.candidate_lists).filter(move |list| list.key == *key)
    }

    /// Returns the pool with the number of connections that were opened in the last complete report interval.
    pub fn with_opened_connection_count(self, connection_count: u64) -> Self {
        Self { opened_connection_count: Some(connection_count), ..self }
    }

    /// Returns the pool, marked as belonging to the same report interval as the previous table.
    pub fn for_another_table_in_interval(self) -> Self {
        Self { is_new_report_interval: false, ..self }
    }

    /// Returns the pool in which each placement counts as one request. It is for UDP services that place each datagram
    /// independently, where no request remains at the next table.
    pub fn with_placements_counted_as_requests(self) -> Self {
        Self { counts_placements_as_requests: true, ..self }
    }

    /// Returns all servers of the pool, by id.
    pub fn servers(&self) -> &[PoolServer] {
        &self.servers
    }

    /// Returns the servers that take new connections, by id.
    pub fn eligible_servers(&self) -> impl Iterator<Item = &PoolServer> + Clone {
        self.servers.iter().filter(|server| server.is_eligible)
    }

    /// Returns a copy of this pool with `servers` and their loads.
    pub(super) fn copy_with_server_loads(&self, servers: Vec<PoolServer>) -> Self {
        Self {
            servers,
            rack_summaries: self.rack_summaries.clone(),
            position_by_id: Vec::new(),
            totals: OnceLock::new(),
            ..*self
        }
    }

    pub(super) fn pool_totals(&self) -> &ServerPoolTotals {
        self.totals.get_or_init(|| {
            // The sum starts at -0, as sums of iterators do.
            let (mut core_count, mut load_sum, mut is_uniform, mut first_class) = (0u64, -0.0, true, None);
            for server in self.eligible_servers() {
                if let Some(loads) = &server.loads {
                    core_count += u64::from(loads.core_count());
                    load_sum += loads.load_sum();
                }
                let class = server.server_class();
                is_uniform &= class == *first_class.get_or_insert(class);
            }
            ServerPoolTotals {
                neutral_load: if core_count == 0 { 0.0 } else { load_sum / core_count as f64 },
                has_loads: self.eligible_servers().any(|server| server.loads.is_some()),
                has_uniform_servers: is_uniform,
                has_local_reports: self
                    .servers
                    .iter()
                    .any(|server| matches!(server.loads, Some(ServerLoads::Local(_)))),
            }
        })
    }

    /// Returns whether the load of at least one eligible server is known.
    pub fn has_loads(&self) -> bool {
        self.pool_totals().has_loads
    }

    /// Returns the neutral load, which is the mean of all known core loads. A server without a recent report counts
    /// with it.
    pub fn neutral_load(&self) -> f64 {
        self.pool_totals().neutral_load
    }

    /// Returns each eligible server's share of new connections, which is its weight times its slow-start fraction.
    pub fn new_connection_shares(&self) -> Vec<(ServerId, f64)> {
        self.eligible_servers()
            .map(|server| (server.id, f64::from(server.weight.get()) * server.slow_start_fraction))
            .collect()
    }

    /// Returns the capacity of each eligible server, which is the operator's value or the number of cores. The number
    /// of cores counts up to [`MAX_CORE_COUNT_TO_MEDIAN_RATIO`] times the pool's median, because only the server itself
    /// reports it. A server without data counts as the mean of the others, or as 1 if no server has data.
    pub fn server_capacities(&self) -> Vec<f64> {
        let mut core_counts: Vec<u32> = self.eligible_servers().filter_map(PoolServer::core_count).collect();
        core_counts.sort_unstable();
        let median_core_count = core_counts.get(core_counts.len().saturating_sub(1) / 2).copied().unwrap_or(0);
        let max_core_count = median_core_count.saturating_mul(MAX_CORE_COUNT_TO_MEDIAN_RATIO);
        let known_capacity = |server: &PoolServer| {
            let limited_core_count = || server.core_count().map(|core_count| f64::from(core_count.min(max_core_count)));
            server.capacity.map(ServerCapacity::get).or_else(limited_core_count)
        };
        let known_capacities: Vec<f64> = self.eligible_servers().filter_map(known_capacity).collect();
        let mean_capacity = crate::statistics::mean(&known_capacities).map_or(1.0, f64::round).max(1.0);
        self.eligible_servers().map(|server| known_capacity(server).unwrap_or(mean_capacity)).collect()
    }

    /// Returns each eligible server's fair share of new connections, by weight and, with `includes_capacity`, also by
    /// capacity. The shares add up to 1.
    pub fn server_fair_shares(&self, includes_capacity: bool) -> Vec<(ServerId, f64)> {
        let weights = self.eligible_servers().map(|server| f64::from(server.weight.get()));
        let unscaled_shares: Vec<f64> = match includes_capacity {
            true => weights.zip(self.server_capacities()).map(|(weight, capacity)| weight * capacity).collect(),
            false => weights.collect(),
        };
        let sum_of_shares = unscaled_shares.iter().sum::<f64>().max(f64::MIN_POSITIVE);
        self.eligible_servers()
            .zip(unscaled_shares)
            .map(|(server, unscaled_share)| (server.id, unscaled_share / sum_of_shares))
            .collect()
    }

    /// Returns whether a server takes part in a bucket. A server in slow start takes part in a fraction of the buckets.
    /// As the fraction grows, buckets are only added.
    pub fn server_takes_part_in_bucket(&self, server: &PoolServer, bucket: u32) -> bool {
        server.slow_start_fraction >= 1.0 || bucket_hash_fraction(bucket, server.id) < server.slow_start_fraction
    }

    /// Returns the mean load per open connection, which is the sum of all loads divided by the number of open
    /// connections.
    pub fn mean_load_per_connection(&self) -> f64 {
        let servers_with_loads = self.servers.iter().filter(|server| server.loads.is_some());
        let open_connection_count: u64 = servers_with_loads.map(|server| u64::from(server.open_connection_count)).sum();
        if open_connection_count == 0 { 0.0 } else { self.total_load() / open_connection_count as f64 }
    }

    /// Returns the sum of the loads of all cores whose load is known.
    pub fn total_load(&self) -> f64 {
        self.servers.iter().filter_map(|server| server.loads.as_ref()).map(ServerLoads::load_sum).sum()
    }
}

/// Returns a pseudorandom number from 0 to 1 that depends only on the bucket and the server.
fn bucket_hash_fraction(bucket: u32, server: ServerId) -> f64 {
    let hash_bits = mix_hash(bucket << 16 | u32::from(server.get())).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (hash_bits >> 11) as f64 / (1u64 << 53) as f64
}

impl PoolServer {
    /// Returns an eligible server of weight 1, of which nothing else is known.
    pub fn new(id: ServerId) -> Self {
        Self {
            id,
            is_eligible: true,
            loads: None,
            rss: None,
            open_connection_count: 0,
            weight: ServerWeight::ONE,
            slow_start_fraction: 1.0,
            capacity: None,
            traffic: None,
            has_new_load: true,
        }
    }

    /// Returns the load of the core with index `core`. For a core beyond the reported ones, it is their mean load, or
    /// `neutral_load` if no core was reported.
    pub fn core_load(&self, core: u16, neutral_load: f64) -> f64 {
        let known_load =
            self.loads.as_ref().and_then(ServerLoads::core_loads).and_then(|loads| loads.get(usize::from(core)));
        known_load.copied().unwrap_or_else(|| self.mean_load(neutral_load))
    }

    pub(super) fn server_class(&self) -> ServerLoadClass {
        // The speed of one core is the operator's capacity divided by the number of cores.
        let speed = self.capacity.and_then(|capacity| Some(capacity.get() / f64::from(self.core_count()?.max(1))));
        ServerLoadClass { weight: self.weight, relative_core_speed: speed.unwrap_or(1.0) }
    }

    /// Returns the number of the server's cores according to its reports or its indirection table, or `None` if both
    /// are unknown.
    pub fn core_count(&self) -> Option<u32> {
        let core_count_by_table =
            |rss: &RssConfig| rss.indirection_table.queue_by_entry().iter().max().map(|last| u32::from(*last) + 1);
        let reported_core_count = self.loads.as_ref().map(ServerLoads::core_count);
        reported_core_count.or_else(|| self.rss.as_ref().and_then(core_count_by_table))
    }

    /// Returns the mean load of all cores, or `neutral_load` if it is unknown.
    pub fn mean_load(&self, neutral_load: f64) -> f64 {
        self.loads.as_ref().and_then(ServerLoads::mean_load).unwrap_or(neutral_load)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn slow_start_server_takes_part_in_more_and_more_buckets() {
        let mut server = PoolServer::new(ServerId::try_from(77).unwrap());
        let pool = ServerPool::new(vec![server.clone()], 1);
        let mut previous_buckets: Vec<u32> = Vec::new();
        for ramp in [0.1, 0.5, 0.9, 1.0] {
            server.slow_start_fraction = ramp;
            let buckets: Vec<u32> =
                (0..2048).filter(|bucket| pool.server_takes_part_in_bucket(&server, *bucket)).collect();
            assert!((buckets.len() as f64 / 2048.0 - ramp).abs() < 0.03, "{ramp}: {}", buckets.len());
            assert!(previous_buckets.iter().all(|bucket| buckets.contains(bucket)));
            previous_buckets = buckets;
        }
    }

    #[test]
    fn unconfigured_capacity_is_the_core_count_or_the_mean() {
        let build_pool_server = |id: u64, capacity: Option<f64>, cores: usize| PoolServer {
            capacity: capacity.map(|capacity| ServerCapacity::new(capacity).unwrap()),
            loads: (cores > 0).then(|| vec![0.0; cores].into()),
            ..PoolServer::new(ServerId::try_from(id).unwrap())
        };
        let capacities_of_servers = |servers: &[PoolServer]| ServerPool::new(servers.to_vec(), 1).server_capacities();
        assert_eq!(
            capacities_of_servers(&[
                build_pool_server(1, Some(2.5), 8),
                build_pool_server(2, None, 4),
                build_pool_server(3, None, 0)
            ]),
            [2.5, 4.0, 3.0]
        );
        assert_eq!(capacities_of_servers(&[build_pool_server(1, None, 0)]), [1.0]);
    }

    prop_compose! {
        /// Generates local loads of some servers and summaries of some racks, several of which may have the same
        /// server.
        fn any_pool_update()(
            local_reports in prop::collection::vec((0usize..10, prop::option::weighted(0.3, 1u32..9)), 0..4),
            racks in prop::collection::vec((0usize..5, prop::collection::vec((0u64..12, 1u32..9), 0..5)), 0..3),
            rack_count in prop_oneof![4 => Just(4usize), 1 => 0usize..6],
        ) -> (Vec<(usize, Option<u32>)>, Vec<(usize, Vec<(u64, u32)>)>, usize) {
            (local_reports, racks, rack_count)
        }
    }

    fn server_id(number: u64) -> ServerId {
        ServerId::try_from(number * 7).unwrap()
    }

    fn rack_summary(servers: &[(u64, u32)]) -> Arc<RackSummary> {
        let mut servers = servers.to_vec();
        servers.sort_unstable();
        servers.dedup_by_key(|(server, _)| *server);
        let summarized_server = |(server, tenths): &(u64, u32)| {
            let loads = match tenths {
                1 => ServerLoads::Relayed(vec![0.5; 2].into()),
                _ => ServerLoads::Aggregated { sum: f64::from(*tenths) / 10.0, core_count: 3 },
            };
            crate::policy::SummarizedServer { id: server_id(*server), loads }
        };
        Arc::new(RackSummary {
            servers: servers.iter().map(summarized_server).collect(),
            histograms_by_class: Vec::new(),
            candidate_lists: Vec::new(),
        })
    }

    proptest! {
        #[test]
        fn pool_updated_in_steps_equals_a_newly_built_pool(steps in prop::collection::vec(any_pool_update(), 1..10)) {
            let mut servers: Vec<PoolServer> = (0..10).map(|n| PoolServer::new(server_id(n))).collect();
            let mut racks: Vec<Arc<RackSummary>> = (0..6).map(|_| rack_summary(&[])).collect();
            let mut pool = ServerPool::new(servers.clone(), 1);
            for (local_reports, rack_reports, rack_count) in steps {
                for (server, tenths) in local_reports {
                    let loads = tenths.map(|tenths| ServerLoads::from(vec![f64::from(tenths) / 10.0; 2]));
                    servers[server] = PoolServer { loads, has_new_load: tenths != Some(1), ..servers[server].clone() };
                    pool.replace_server(servers[server].clone());
                }
                for (rack, of_rack) in rack_reports {
                    racks[rack] = rack_summary(&of_rack);
                }
                pool = pool.for_next_table(3).with_opened_connection_count(4);
                pool = pool.with_rack_summaries(racks[..rack_count].to_vec());
                let new_pool = ServerPool::new(servers.clone(), 3);
                let new_pool = new_pool.with_opened_connection_count(4);
                let new_pool = new_pool.with_rack_summaries(racks[..rack_count].to_vec());
                prop_assert_eq!(pool.servers(), new_pool.servers());
                prop_assert_eq!(pool.neutral_load(), new_pool.neutral_load());
                prop_assert_eq!(pool.has_loads(), new_pool.has_loads());
                prop_assert_eq!(pool.load_balancer_count, new_pool.load_balancer_count);
                prop_assert_eq!(pool.opened_connection_count, new_pool.opened_connection_count);
            }
        }
    }
}
