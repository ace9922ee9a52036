//! `least`: new connections go to the server with the fewest open connections, counting reports and later assignments.
//! `least:packets`, `least:bytes` and `least:cpu` go by packets or bytes per second, or by the load of the cores.
//!
//! The rule is `LeastAssigned` with one connection as the cost; by another metric the cost is an open connection's mean
//! share of the metric. A server with twice the weight x capacity should have twice as much. The rule adds the same
//! cost to every server, so each server is compared by its distance from its share: have - share x (present and
//! expected total per share).
//!
//! In a pool of up to eight servers every server is a candidate of every bucket. A larger pool has eight per bucket,
//! drawn again for every table: the eight with fewest connections would get all new ones and soon be the fullest. The
//! least of eight random ones is within a connection or two of the least of all (Azar et al., "Balanced allocations",
//! 1999: log log n / log 8).

use coreward_intf as intf;

use super::{LoadMetric, Policy, Pool, TelemetryLevel, base_table, independent_key, table_with};
use crate::ServerId;
use crate::load::to_fixed_point;
use crate::placement::{BucketCount, Candidate, PlacementRule, PlacementTable, ServerCore};
use crate::rss::{RssKey, seeded_rng, uniform_below};

/// Names of the policy with each metric: connections, packets, bytes and core loads.
pub const NAMES: [&str; 4] = ["least", "least:packets", "least:bytes", "least:cpu"];

/// Stream of [`seeded_rng`] from which the candidates of each bucket are drawn.
const RNG_STREAM_CANDIDATES: u64 = 7;

/// Policy `least`, which compares servers by one metric.
pub struct LeastByMetric {
    key: RssKey,
    seed: u64,
    metric: LoadMetric,
    candidate_count: usize,
}

impl LeastByMetric {
    /// Returns the policy that compares open connections, with as many candidates as the data plane allows.
    pub fn new(seed: u64) -> Self {
        Self::with_metric(LoadMetric::Connections, seed)
    }

    /// Returns the policy that compares the metric `metric`.
    pub fn with_metric(metric: LoadMetric, seed: u64) -> Self {
        Self { key: independent_key(seed), seed, metric, candidate_count: intf::MAX_CANDIDATES as usize }
    }

    /// Returns the policy with all servers as candidates of every bucket, even in a large pool. For simulations only.
    pub fn without_sampling(seed: u64) -> Self {
        Self { candidate_count: usize::MAX, ..Self::new(seed) }
    }

    /// Returns the load of each eligible server in the table, by id, and the cost of one connection.
    fn loads(&self, pool: &Pool) -> (Vec<u32>, u32) {
        let have = self.metric.server_loads(pool);
        let per_connection = self.per_connection(pool, &have);
        let compared = normalize(&have, &self.metric.comparison_shares(pool), pool.opened_connections, per_connection);
        let most = compared.iter().copied().fold(0.0, f64::max);
        let unit = match self.metric {
            LoadMetric::Connections => f64::from(connection_load(most)),
            _ => f64::from(to_fixed_point(1.0)) / most.max(f64::MIN_POSITIVE),
        };
        let cost = ((per_connection * unit) as u32).clamp(1, to_fixed_point(1.0));
        (compared.iter().map(|load| (load * unit) as u32).collect(), cost)
    }

    /// Returns the mean amount of the metric per open connection.
    fn per_connection(&self, pool: &Pool, have: &[f64]) -> f64 {
        if self.metric == LoadMetric::Connections {
            return 1.0;
        }
        let open: f64 = pool.eligible().map(|server| f64::from(server.open_connections)).sum();
        if open == 0.0 { 0.0 } else { have.iter().sum::<f64>() / open }
    }
}

/// Returns the compared value of each server, never below 0. If all servers have the same share, it is the amount
/// `have`.
fn normalize(have: &[f64], parts: &[f64], opened_connections: Option<u64>, per_connection: f64) -> Vec<f64> {
    let largest = parts.iter().copied().fold(0.0, f64::max);
    if parts.iter().all(|part| *part == largest) {
        return have.to_vec();
    }
    let to_come = opened_connections.unwrap_or(0) as f64 * per_connection;
    let per_part = (have.iter().sum::<f64>() + to_come) / parts.iter().sum::<f64>();
    have.iter().zip(parts).map(|(have, part)| have + (largest - part) * per_part).collect()
}

impl Policy for LeastByMetric {
    fn name(&self) -> &'static str {
        match self.metric {
            LoadMetric::Connections => NAMES[0],
            LoadMetric::Packets => NAMES[1],
            LoadMetric::Bytes => NAMES[2],
            LoadMetric::Cpu => NAMES[3],
        }
    }

    fn telemetry_level(&self) -> TelemetryLevel {
        self.metric.telemetry_level()
    }

    fn reads_traffic(&self) -> bool {
        self.metric != LoadMetric::Cpu
    }

    fn compute_table(&mut self, pool: &Pool, buckets: BucketCount, generation: u64) -> PlacementTable {
        let mut table = base_table(pool, PlacementRule::LeastAssigned, buckets, generation, self.key.clone());
        self.add_candidates(&mut table, pool);
        table
    }
}

impl LeastByMetric {
    /// Returns a table with candidates but without consistent servers. With it, a load balancer replaces candidates
    /// whose loads are too old.
    pub fn candidate_table(&self, pool: &Pool, buckets: BucketCount) -> PlacementTable {
        let mut table = table_with(pool, PlacementRule::LeastAssigned, buckets, 0, self.key.clone(), Vec::new());
        self.add_candidates(&mut table, pool);
        table
    }

    fn add_candidates(&self, table: &mut PlacementTable, pool: &Pool) {
        if table.members.is_empty() {
            return;
        }
        let (loads, cost) = self.loads(pool);
        // A load balancer counts only its own assignments; other load balancers assign about as many.
        table.assignment_cost = cost.saturating_mul(pool.load_balancer_count);
        table.core_slots = table.members.iter().map(|member| ServerCore { server: member.server, core: 0 }).collect();
        table.core_slots.truncate(intf::MAX_CORE_SLOTS as usize);
        let mut all: Vec<Candidate> = pool
            .eligible()
            .enumerate()
            .map(|(position, server)| Candidate {
                server: server.id,
                load: loads[position],
                // Beyond the data plane's limit servers share the last slot, which makes them look busier.
                core_slot: position.min(table.core_slots.len() - 1) as u16,
            })
            .collect();
        let per_bucket = all.len().min(self.candidate_count);
        let mut rng = seeded_rng(self.seed ^ table.generation, RNG_STREAM_CANDIDATES);
        let joining = pool.eligible().any(|server| server.slow_start_fraction < 1.0);
        for bucket in 0..table.bucket_count.get() {
            if per_bucket < all.len() {
                // The start of a shuffle by Fisher and Yates.
                for position in 0..per_bucket {
                    let other = position + uniform_below(&mut rng, (all.len() - position) as u32) as usize;
                    all.swap(position, other);
                }
            }
            let start = table.candidates.len();
            table.candidates.extend_from_slice(&all[..per_bucket]);
            if joining {
                replace_excluded(&mut table.candidates[start..], |id| is_candidate(pool, id, bucket));
            }
            table.candidates[start..].sort_unstable_by_key(|candidate| (candidate.load, candidate.server));
        }
        table.candidates_per_bucket = per_bucket as u32;
    }
}

fn is_candidate(pool: &Pool, id: ServerId, bucket: u32) -> bool {
    let server = pool.servers().binary_search_by_key(&id, |server| server.id).map(|position| &pool.servers()[position]);
    server.is_ok_and(|server| pool.is_candidate(server, bucket))
}

/// Replaces the candidates that do not take part in the bucket by others of the list. If none takes part, all stay.
fn replace_excluded(candidates: &mut [Candidate], is_candidate: impl Fn(ServerId) -> bool) {
    let staying: Vec<Candidate> =
        candidates.iter().copied().filter(|candidate| is_candidate(candidate.server)).collect();
    if staying.is_empty() {
        return;
    }
    for (place, candidate) in candidates.iter_mut().zip(staying.iter().cycle()) {
        *place = *candidate;
    }
}

/// Returns the load of one connection in fixed point: the fullest server then has at most 1.0. The result is at least
/// the smallest step.
fn connection_load(most: f64) -> u32 {
    (to_fixed_point(1.0) / (most as u32).max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::PlacementState;
    use crate::policy::{PoolServer, TrafficRates, Weight};

    fn pool(open: &[u32], load_balancers: u32) -> Pool {
        let server = |(position, open): (usize, &u32)| PoolServer {
            open_connections: *open,
            ..PoolServer::new((position as u64 + 1).try_into().unwrap())
        };
        Pool::new(open.iter().enumerate().map(server).collect(), load_balancers)
    }

    #[test]
    fn small_pool_is_not_sampled() {
        let table = LeastByMetric::new(1).compute_table(&pool(&[40, 3, 20], 2), BucketCount::PUBLISHED, 1);
        for bucket in 0..128 {
            let servers: Vec<u16> = table.candidates_of(0, bucket).iter().map(|c| c.server.get()).collect();
            assert_eq!(servers, [2, 3, 1]);
        }
        // Server 3 is ahead by 17 connections; each of the two load balancers counts 9 of them.
        let distance = table.candidates_of(0, 0)[1].load - table.candidates_of(0, 0)[0].load;
        assert_eq!(distance.div_ceil(table.assignment_cost), 9);
    }

    #[test]
    fn large_pool_is_sampled_evenly_for_every_table() {
        let mut policy = LeastByMetric::new(3);
        let servers = pool(&[5; 400], 1);
        let tables =
            [1, 2].map(|generation| policy.compute_table(&servers, BucketCount::new(2048).unwrap(), generation));
        assert_ne!(tables[0].candidates, tables[1].candidates);
        let mut stands = vec![0; 401];
        tables[0].candidates.iter().for_each(|candidate| stands[usize::from(candidate.server.get())] += 1);
        // 41 expected, a standard deviation of 6.4.
        assert!(stands[1..].iter().all(|count| (15..=75).contains(count)), "{stands:?}");
        for bucket in 0..2048 {
            let mut of_bucket: Vec<u16> = tables[0].candidates_of(0, bucket).iter().map(|c| c.server.get()).collect();
            of_bucket.dedup();
            assert_eq!(of_bucket.len(), 8);
        }
        let all = LeastByMetric::without_sampling(3).compute_table(&servers, BucketCount::new(1).unwrap(), 1);
        assert_eq!(all.candidates_of(0, 0).len(), 400);
    }

    fn counts_after(policy: &mut LeastByMetric, servers: &[PoolServer], connections: u32) -> Vec<u32> {
        let pool = Pool::new(servers.to_vec(), 1).with_opened_connections(connections.into());
        let table = policy.compute_table(&pool, BucketCount::PUBLISHED, 1);
        let mut state = PlacementState::for_table(&table);
        let mut open: Vec<u32> = servers.iter().map(|server| server.open_connections).collect();
        for hash in 0..connections {
            let chosen = table.choose_by_hash(&mut state, |_| hash).unwrap();
            open[servers.iter().position(|server| server.id == chosen).unwrap()] += 1;
        }
        open
    }

    #[test]
    fn connections_converge_to_shares_by_weight() {
        for open in [[0, 0, 0], [10, 10, 10], [0, 70, 30]] {
            let weights = [1u64, 2, 7].map(|weight| Weight::new(weight).unwrap());
            let servers: Vec<PoolServer> = (0..3)
                .map(|n| PoolServer {
                    open_connections: open[n],
                    weight: weights[n],
                    ..PoolServer::new((n as u64).try_into().unwrap())
                })
                .collect();
            let total = 1000 - open.iter().sum::<u32>();
            let after = counts_after(&mut LeastByMetric::new(1), &servers, total);
            let near = after.iter().zip([100u32, 200, 700]).all(|(count, expected)| count.abs_diff(expected) <= 2);
            assert!(near, "{open:?} became {after:?}");
        }
    }

    #[test]
    fn load_metrics_differ() {
        let server = |id: u64, packets: f64, bytes: f64, load: f64| PoolServer {
            open_connections: 10,
            traffic: Some(TrafficRates { packets, bytes }),
            loads: Some(vec![load].into()),
            ..PoolServer::new(id.try_into().unwrap())
        };
        let servers = [server(1, 10.0, 500.0, 0.9), server(2, 50.0, 100.0, 0.5), server(3, 90.0, 900.0, 0.1)];
        for (measure, least) in [(LoadMetric::Packets, 1), (LoadMetric::Bytes, 2), (LoadMetric::Cpu, 3)] {
            let table = LeastByMetric::with_metric(measure, 1).compute_table(
                &Pool::new(servers.to_vec(), 1),
                BucketCount::PUBLISHED,
                1,
            );
            assert!((0..128).all(|bucket| table.candidates_of(0, bucket)[0].server.get() == least), "{measure:?}");
            assert!(table.assignment_cost > 1);
        }
        // Thirty connections bring 150 packets a second, five each.
        let table = LeastByMetric::with_metric(LoadMetric::Packets, 1).compute_table(
            &Pool::new(servers.to_vec(), 1),
            BucketCount::PUBLISHED,
            1,
        );
        let distance = table.candidates_of(0, 0)[1].load - table.candidates_of(0, 0)[0].load;
        assert_eq!(distance / table.assignment_cost, 8);
    }

    #[test]
    fn joining_server_gets_only_its_share() {
        let mut servers: Vec<PoolServer> =
            (0..4u64).map(|n| PoolServer { open_connections: 100, ..PoolServer::new(n.try_into().unwrap()) }).collect();
        (servers[3].open_connections, servers[3].slow_start_fraction) = (0, 0.25);
        let joined = counts_after(&mut LeastByMetric::new(1), &servers, 128)[3];
        // Without slow start all would go to the new server; its share is 32 of 128 buckets.
        assert!((20..=44).contains(&joined), "{joined}");
    }
}
