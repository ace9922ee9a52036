//! Policy `wrr`, by which new connections go to the servers in turn, each as often as its weight times its capacity.
//! The default capacity is the number of cores.

use super::wrr_schedule::weighted_turn_table;
use super::{PlacementPolicy, ServerPool, hash_key_independent_of_rss};
use crate::placement::{BucketCount, PlacementTable};
use crate::rss::RssKey;

pub const POLICY_NAME: &str = "wrr";

pub struct WeightedRoundRobinPolicy {
    hash_key: RssKey,
}

impl WeightedRoundRobinPolicy {
    pub fn new(seed: u64) -> Self {
        Self { hash_key: hash_key_independent_of_rss(seed) }
    }
}

impl PlacementPolicy for WeightedRoundRobinPolicy {
    fn name(&self) -> &'static str {
        POLICY_NAME
    }

    fn reads_loads(&self) -> bool {
        false
    }

    fn depends_on_capacity(&self) -> bool {
        true
    }

    fn compute_table(&mut self, pool: &ServerPool, bucket_count: BucketCount, generation: u64) -> PlacementTable {
        weighted_turn_table(pool, bucket_count, generation, self.hash_key.clone(), &fair_shares_by_capacity(pool))
    }
}

fn fair_shares_by_capacity(pool: &ServerPool) -> Vec<f64> {
    pool.new_connection_shares()
        .into_iter()
        .zip(pool.server_capacities())
        .map(|((_, share), capacity)| share * capacity)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{PoolServer, ServerCapacity, ServerLoads, ServerWeight};
    use crate::rss::{IndirectionTable, RssConfig};

    #[test]
    fn core_count_is_taken_from_reported_loads_or_indirection_table() {
        let build_pool_server = |id: u64, loads: Option<Vec<f64>>, cores: Option<u16>| PoolServer {
            loads: loads.map(ServerLoads::from),
            rss: cores.map(|cores| RssConfig {
                key: RssKey::microsoft_verification_key(),
                indirection_table: IndirectionTable::draw_balanced_entries(id, 128, cores).unwrap(),
            }),
            ..PoolServer::new(id.try_into().unwrap())
        };
        let server_with_loads = build_pool_server(1, Some(vec![0.5; 8]), Some(4));
        let pool = ServerPool::new(
            vec![server_with_loads.clone(), build_pool_server(2, None, Some(4)), build_pool_server(3, None, None)],
            1,
        );
        assert_eq!(fair_shares_by_capacity(&pool), [8.0, 4.0, 6.0]);
        assert_eq!(fair_shares_by_capacity(&ServerPool::new(vec![build_pool_server(3, None, None)], 1)), [1.0]);
        let configured_server = PoolServer {
            weight: ServerWeight::new(3).unwrap(),
            capacity: Some(ServerCapacity::new(2.5).unwrap()),
            slow_start_fraction: 0.5,
            ..server_with_loads.clone()
        };
        assert_eq!(fair_shares_by_capacity(&ServerPool::new(vec![configured_server], 1)), [3.75]);

        // Only the server itself reports its number of cores.
        let server_with_false_report = build_pool_server(4, Some(vec![0.0; 4096]), None);
        let pool = ServerPool::new(
            vec![
                build_pool_server(1, None, Some(4)),
                build_pool_server(2, None, Some(4)),
                build_pool_server(3, None, Some(4)),
                server_with_false_report,
            ],
            1,
        );
        assert_eq!(fair_shares_by_capacity(&pool), [4.0, 4.0, 4.0, 32.0]);

        let pool = ServerPool::new(vec![server_with_loads, build_pool_server(2, None, Some(4))], 1);
        let table = WeightedRoundRobinPolicy::new(1).compute_table(&pool, BucketCount::PAPER_VALUE, 1);
        assert_eq!(table.members.iter().map(|member| member.server.get()).collect::<Vec<_>>(), [1, 2, 1]);
    }
}
