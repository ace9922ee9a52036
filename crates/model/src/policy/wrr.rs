//! `wrr`: new connections go to the servers in turn, each as often as it has cores.

use super::turns::weighted_turns;
use super::{Policy, Pool, PoolServer, independent_key};
use crate::placement::{BucketCount, PlacementTable};
use crate::rss::RssKey;

pub const NAME: &str = "wrr";

pub struct WeightedRoundRobin {
    key: RssKey,
}

impl WeightedRoundRobin {
    pub fn new(seed: u64) -> Self {
        Self { key: independent_key(seed) }
    }
}

impl Policy for WeightedRoundRobin {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads_loads(&self) -> bool {
        false
    }

    fn place(&mut self, pool: &Pool, buckets: BucketCount, generation: u64) -> PlacementTable {
        weighted_turns(pool, buckets, generation, self.key.clone(), &weights(pool))
    }
}

/// The number of cores of each eligible server; one that nothing is known of counts as the mean of the others.
fn weights(pool: &Pool) -> Vec<u32> {
    let known: Vec<f64> = pool.eligible().filter_map(PoolServer::core_count).map(f64::from).collect();
    let mean = crate::statistics::mean(&known).map_or(1, |mean| mean.round() as u32);
    pool.eligible().map(|server| server.core_count().unwrap_or(mean).max(1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rss::{IndirectionTable, Rss};

    #[test]
    fn cores_are_known_by_load_or_by_table() {
        let server = |id: u64, loads: Option<Vec<f64>>, cores: Option<u16>| PoolServer {
            id: id.try_into().unwrap(),
            eligible: true,
            loads,
            rss: cores.map(|cores| Rss {
                key: RssKey::microsoft(),
                indirection_table: IndirectionTable::balanced(id, 128, cores).unwrap(),
            }),
            open_connections: 0,
        };
        let by_load = server(1, Some(vec![0.5; 8]), Some(4));
        let pool = Pool::new(vec![by_load.clone(), server(2, None, Some(4)), server(3, None, None)], 1);
        assert_eq!(weights(&pool), [8, 4, 6]);
        assert_eq!(weights(&Pool::new(vec![server(3, None, None)], 1)), [1]);

        let pool = Pool::new(vec![by_load, server(2, None, Some(4))], 1);
        let table = WeightedRoundRobin::new(1).place(&pool, BucketCount::PUBLISHED, 1);
        assert_eq!(table.members.iter().map(|member| member.server.get()).collect::<Vec<_>>(), [1, 2, 1]);
    }
}
