//! Policy `least`, which selects the server with the fewest open connections by reports and later assignments.
//! `least:packets`, `least:bytes` and `least:cpu` compare packets or bytes per second, or the load of the cores.
//!
//! The rule is `LeastAssigned` with one connection as the cost. By another metric, the cost is an open connection's
//! mean share of the metric. A server with twice the weight x capacity should have twice as much. The rule adds the
//! same cost to every server, so each is compared by its distance from its share. The distance is have - share x
//! (present and expected total per share).
//!
//! In a pool of up to eight servers, every server is a candidate of every bucket. A larger pool has eight per bucket,
//! drawn again for every table, because the eight with fewest connections would get all new ones and soon be the
//! fullest. The least of eight random ones is within a connection or two of the least of all (log log n / log 8 in Azar
//! et al., "Balanced allocations", 1999).

use coreward_intf as intf;

use super::{
    LoadMetric, PlacementPolicy, ServerPool, TelemetryLevel, hash_key_independent_of_rss,
    table_with_consistent_servers, table_without_candidates,
};
use crate::ServerId;
use crate::load::load_to_fixed_point;
use crate::placement::{BucketCount, CandidateCore, PlacementRule, PlacementTable, ServerCore};
use crate::rss::{RssKey, seeded_rng, uniform_below};

/// Names of the policy, one for each metric: connections, packets, bytes and core loads.
pub const POLICY_NAMES: [&str; 4] = ["least", "least:packets", "least:bytes", "least:cpu"];

/// Number of the random-number stream ([`seeded_rng`]) from which the candidates of each bucket are drawn.
const CANDIDATE_RNG_STREAM: u64 = 7;

/// Policy `least`, which compares servers by one load metric.
pub struct LeastPolicy {
    hash_key: RssKey,
    sampling_seed: u64,
    metric: LoadMetric,
    max_candidates_per_bucket: usize,
}

impl LeastPolicy {
    /// Returns the policy that compares numbers of open connections, with as many candidates as the data plane allows.
    pub fn new(seed: u64) -> Self {
        Self::with_metric(LoadMetric::Connections, seed)
    }

    /// Returns the policy that compares servers by the metric `metric`.
    pub fn with_metric(metric: LoadMetric, sampling_seed: u64) -> Self {
        Self {
            hash_key: hash_key_independent_of_rss(sampling_seed),
            sampling_seed,
            metric,
            max_candidates_per_bucket: intf::MAX_CANDIDATES as usize,
        }
    }

    /// Returns the policy with all servers as candidates of every bucket, even in a large pool. It is only for
    /// simulations.
    pub fn without_sampling(seed: u64) -> Self {
        Self { max_candidates_per_bucket: usize::MAX, ..Self::new(seed) }
    }

    /// Returns the fixed-point load of each eligible server, by id, and the fixed-point cost of one connection.
    fn fixed_point_loads_and_cost(&self, pool: &ServerPool) -> (Vec<u32>, u32) {
        let metric_values = self.metric.server_loads(pool);
        let metric_value_per_connection = self.metric_value_per_connection(pool, &metric_values);
        let ranking_values = server_ranking_values(
            &metric_values,
            &self.metric.fair_metric_shares(pool),
            pool.opened_connection_count,
            metric_value_per_connection,
        );
        let largest_value = ranking_values.iter().copied().fold(0.0, f64::max);
        let fixed_point_scale = match self.metric {
            LoadMetric::Connections => f64::from(fixed_point_connection_load(largest_value)),
            _ => f64::from(load_to_fixed_point(1.0)) / largest_value.max(f64::MIN_POSITIVE),
        };
        let fixed_point_cost =
            ((metric_value_per_connection * fixed_point_scale) as u32).clamp(1, load_to_fixed_point(1.0));
        (ranking_values.iter().map(|load| (load * fixed_point_scale) as u32).collect(), fixed_point_cost)
    }

    fn metric_value_per_connection(&self, pool: &ServerPool, metric_values: &[f64]) -> f64 {
        if self.metric == LoadMetric::Connections {
            return 1.0;
        }
        let open_connection_count: f64 =
            pool.eligible_servers().map(|server| f64::from(server.open_connection_count)).sum();
        if open_connection_count == 0.0 { 0.0 } else { metric_values.iter().sum::<f64>() / open_connection_count }
    }
}

/// Returns the value by which each server is compared, which is at least 0. If all servers have the same share, it is
/// the server's value in `metric_values`.
fn server_ranking_values(
    metric_values: &[f64],
    shares: &[f64],
    opened_connections: Option<u64>,
    metric_value_per_connection: f64,
) -> Vec<f64> {
    let largest_share = shares.iter().copied().fold(0.0, f64::max);
    if shares.iter().all(|share| *share == largest_share) {
        return metric_values.to_vec();
    }
    let expected_metric_growth = opened_connections.unwrap_or(0) as f64 * metric_value_per_connection;
    let metric_value_per_share =
        (metric_values.iter().sum::<f64>() + expected_metric_growth) / shares.iter().sum::<f64>();
    metric_values
        .iter()
        .zip(shares)
        .map(|(amount, share)| amount + (largest_share - share) * metric_value_per_share)
        .collect()
}

impl PlacementPolicy for LeastPolicy {
    fn name(&self) -> &'static str {
        match self.metric {
            LoadMetric::Connections => POLICY_NAMES[0],
            LoadMetric::Packets => POLICY_NAMES[1],
            LoadMetric::Bytes => POLICY_NAMES[2],
            LoadMetric::Cpu => POLICY_NAMES[3],
        }
    }

    fn telemetry_level(&self) -> TelemetryLevel {
        self.metric.telemetry_level()
    }

    fn reads_traffic(&self) -> bool {
        self.metric != LoadMetric::Cpu
    }

    fn compute_table(&mut self, pool: &ServerPool, bucket_count: BucketCount, generation: u64) -> PlacementTable {
        let mut table = table_without_candidates(
            pool,
            PlacementRule::LeastAssigned,
            bucket_count,
            generation,
            self.hash_key.clone(),
        );
        self.add_candidates(&mut table, pool);
        table
    }
}

impl LeastPolicy {
    /// Returns a table with candidates but without consistent servers. A load balancer takes candidates from it to
    /// replace those whose loads are too old.
    pub fn build_candidate_table(&self, pool: &ServerPool, bucket_count: BucketCount) -> PlacementTable {
        let mut table = table_with_consistent_servers(
            pool,
            PlacementRule::LeastAssigned,
            bucket_count,
            0,
            self.hash_key.clone(),
            Vec::new(),
        );
        self.add_candidates(&mut table, pool);
        table
    }

    fn add_candidates(&self, table: &mut PlacementTable, pool: &ServerPool) {
        if table.members.is_empty() {
            return;
        }
        let (loads, cost) = self.fixed_point_loads_and_cost(pool);
        // A load balancer counts only its own assignments, but the others assign about as many.
        table.assignment_cost = cost.saturating_mul(pool.load_balancer_count);
        table.core_slots = table.members.iter().map(|member| ServerCore { server: member.server, core: 0 }).collect();
        table.core_slots.truncate(intf::MAX_CORE_SLOTS as usize);
        let mut candidates: Vec<CandidateCore> = pool
            .eligible_servers()
            .enumerate()
            .map(|(position, server)| CandidateCore {
                server: server.id,
                fixed_point_load: loads[position],
                // Beyond the data plane's limit servers share the last slot, which makes them look busier.
                core_slot: position.min(table.core_slots.len() - 1) as u16,
            })
            .collect();
        let candidates_per_bucket = candidates.len().min(self.max_candidates_per_bucket);
        let mut rng = seeded_rng(self.sampling_seed ^ table.generation, CANDIDATE_RNG_STREAM);
        let has_slow_start = pool.eligible_servers().any(|server| server.slow_start_fraction < 1.0);
        for bucket in 0..table.bucket_count.get() {
            if candidates_per_bucket < candidates.len() {
                move_sample_to_front(&mut candidates, candidates_per_bucket, &mut rng);
            }
            let first_candidate_index = table.candidates.len();
            table.candidates.extend_from_slice(&candidates[..candidates_per_bucket]);
            if has_slow_start {
                replace_nonparticipating_candidates(&mut table.candidates[first_candidate_index..], |id| {
                    server_takes_part_in_bucket(pool, id, bucket)
                });
            }
            table.candidates[first_candidate_index..]
                .sort_unstable_by_key(|candidate| (candidate.fixed_point_load, candidate.server));
        }
        table.candidates_per_bucket = candidates_per_bucket as u32;
    }
}

/// Moves a random sample of `sample_size` candidates to the front, by the first steps of a Fisher-Yates shuffle.
fn move_sample_to_front(candidates: &mut [CandidateCore], sample_size: usize, rng: &mut impl rand::Rng) {
    for position in 0..sample_size {
        let swap_position = position + uniform_below(rng, (candidates.len() - position) as u32) as usize;
        candidates.swap(position, swap_position);
    }
}

fn server_takes_part_in_bucket(pool: &ServerPool, id: ServerId, bucket: u32) -> bool {
    let server = pool.servers().binary_search_by_key(&id, |server| server.id).map(|position| &pool.servers()[position]);
    server.is_ok_and(|server| pool.server_takes_part_in_bucket(server, bucket))
}

/// Replaces the candidates that do not take part in the bucket by copies of the others. If none takes part, all remain.
fn replace_nonparticipating_candidates(candidates: &mut [CandidateCore], is_candidate: impl Fn(ServerId) -> bool) {
    let participating_candidates: Vec<CandidateCore> =
        candidates.iter().copied().filter(|candidate| is_candidate(candidate.server)).collect();
    if participating_candidates.is_empty() {
        return;
    }
    for (candidate_slot, candidate) in candidates.iter_mut().zip(participating_candidates.iter().cycle()) {
        *candidate_slot = *candidate;
    }
}

/// Returns the load of one connection as a fixed-point number. A server with `largest_value` connections then has a
/// load of at most 1.0. The result is at least 1, the smallest step.
fn fixed_point_connection_load(largest_value: f64) -> u32 {
    (load_to_fixed_point(1.0) / (largest_value as u32).max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::PlacementTableState;
    use crate::policy::{PoolServer, ServerWeight, TrafficRates};

    fn pool_with_connections(open_connections: &[u32], load_balancer_count: u32) -> ServerPool {
        let build_pool_server = |(position, open_connections): (usize, &u32)| PoolServer {
            open_connection_count: *open_connections,
            ..PoolServer::new((position as u64 + 1).try_into().unwrap())
        };
        ServerPool::new(open_connections.iter().enumerate().map(build_pool_server).collect(), load_balancer_count)
    }

    #[test]
    fn every_server_of_a_small_pool_is_a_candidate_of_each_bucket() {
        let table =
            LeastPolicy::new(1).compute_table(&pool_with_connections(&[40, 3, 20], 2), BucketCount::PAPER_VALUE, 1);
        for bucket in 0..128 {
            let servers: Vec<u16> = table.bucket_candidates(0, bucket).iter().map(|c| c.server.get()).collect();
            assert_eq!(servers, [2, 3, 1]);
        }
        // Server 3 is ahead by 17 connections, of which each of the two load balancers counts 9.
        let load_difference =
            table.bucket_candidates(0, 0)[1].fixed_point_load - table.bucket_candidates(0, 0)[0].fixed_point_load;
        assert_eq!(load_difference.div_ceil(table.assignment_cost), 9);
    }

    #[test]
    fn candidates_of_large_pool_are_sampled_evenly_in_each_table() {
        let mut policy = LeastPolicy::new(3);
        let large_pool = pool_with_connections(&[5; 400], 1);
        let tables =
            [1, 2].map(|generation| policy.compute_table(&large_pool, BucketCount::new(2048).unwrap(), generation));
        assert_ne!(tables[0].candidates, tables[1].candidates);
        let mut candidate_counts = vec![0; 401];
        tables[0].candidates.iter().for_each(|candidate| candidate_counts[usize::from(candidate.server.get())] += 1);
        // 41 are expected, with a standard deviation of 6.4.
        assert!(candidate_counts[1..].iter().all(|count| (15..=75).contains(count)), "{candidate_counts:?}");
        for bucket in 0..2048 {
            let mut bucket_servers: Vec<u16> =
                tables[0].bucket_candidates(0, bucket).iter().map(|c| c.server.get()).collect();
            bucket_servers.dedup();
            assert_eq!(bucket_servers.len(), 8);
        }
        let unsampled_table =
            LeastPolicy::without_sampling(3).compute_table(&large_pool, BucketCount::new(1).unwrap(), 1);
        assert_eq!(unsampled_table.bucket_candidates(0, 0).len(), 400);
    }

    fn connection_counts_after_placements(
        policy: &mut LeastPolicy,
        servers: &[PoolServer],
        new_connection_count: u32,
    ) -> Vec<u32> {
        let pool = ServerPool::new(servers.to_vec(), 1).with_opened_connection_count(new_connection_count.into());
        let table = policy.compute_table(&pool, BucketCount::PAPER_VALUE, 1);
        let mut state = PlacementTableState::for_table(&table);
        let mut open_connections: Vec<u32> = servers.iter().map(|server| server.open_connection_count).collect();
        for hash in 0..new_connection_count {
            let selected_server = table.select_server_by_hash(&mut state, |_| hash).unwrap();
            open_connections[servers.iter().position(|server| server.id == selected_server).unwrap()] += 1;
        }
        open_connections
    }

    #[test]
    fn connection_counts_become_proportional_to_the_weights() {
        for open_connections in [[0, 0, 0], [10, 10, 10], [0, 70, 30]] {
            let weights = [1u64, 2, 7].map(|weight| ServerWeight::new(weight).unwrap());
            let servers: Vec<PoolServer> = (0..3)
                .map(|n| PoolServer {
                    open_connection_count: open_connections[n],
                    weight: weights[n],
                    ..PoolServer::new((n as u64).try_into().unwrap())
                })
                .collect();
            let new_connection_count = 1000 - open_connections.iter().sum::<u32>();
            let connection_counts =
                connection_counts_after_placements(&mut LeastPolicy::new(1), &servers, new_connection_count);
            let are_near_fair_shares =
                connection_counts.iter().zip([100u32, 200, 700]).all(|(count, expected)| count.abs_diff(expected) <= 2);
            assert!(are_near_fair_shares, "{open_connections:?} became {connection_counts:?}");
        }
    }

    #[test]
    fn each_metric_selects_the_server_with_the_lowest_value() {
        let build_pool_server = |id: u64, packets: f64, bytes: f64, load: f64| PoolServer {
            open_connection_count: 10,
            traffic: Some(TrafficRates { packets_per_second: packets, bytes_per_second: bytes }),
            loads: Some(vec![load].into()),
            ..PoolServer::new(id.try_into().unwrap())
        };
        let servers = [
            build_pool_server(1, 10.0, 500.0, 0.9),
            build_pool_server(2, 50.0, 100.0, 0.5),
            build_pool_server(3, 90.0, 900.0, 0.1),
        ];
        for (metric, least) in [(LoadMetric::Packets, 1), (LoadMetric::Bytes, 2), (LoadMetric::Cpu, 3)] {
            let table = LeastPolicy::with_metric(metric, 1).compute_table(
                &ServerPool::new(servers.to_vec(), 1),
                BucketCount::PAPER_VALUE,
                1,
            );
            assert!((0..128).all(|bucket| table.bucket_candidates(0, bucket)[0].server.get() == least), "{metric:?}");
            assert!(table.assignment_cost > 1);
        }
        // Thirty connections bring 150 packets a second, five each.
        let table = LeastPolicy::with_metric(LoadMetric::Packets, 1).compute_table(
            &ServerPool::new(servers.to_vec(), 1),
            BucketCount::PAPER_VALUE,
            1,
        );
        let load_difference =
            table.bucket_candidates(0, 0)[1].fixed_point_load - table.bucket_candidates(0, 0)[0].fixed_point_load;
        assert_eq!(load_difference / table.assignment_cost, 8);
    }

    #[test]
    fn joining_server_gets_only_its_share() {
        let mut servers: Vec<PoolServer> = (0..4u64)
            .map(|n| PoolServer { open_connection_count: 100, ..PoolServer::new(n.try_into().unwrap()) })
            .collect();
        (servers[3].open_connection_count, servers[3].slow_start_fraction) = (0, 0.25);
        let connections_of_joining_server =
            connection_counts_after_placements(&mut LeastPolicy::new(1), &servers, 128)[3];
        // Without slow start, all would go to the new server, whose share is 32 of 128 buckets.
        assert!((20..=44).contains(&connections_of_joining_server), "{connections_of_joining_server}");
    }
}
