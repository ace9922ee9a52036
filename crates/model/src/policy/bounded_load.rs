//! Policy `bounded-load`, consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA'18). A bucket
//! goes to the next server on the ring with less than [`LOAD_BOUND_FACTOR`] times its share of the open connections.
//!
//! Skipping full servers on the ring gives the same table as a ring without them.

use super::consistent_hash::weighted_ring_table;
use super::{
    LoadMetric, PlacementPolicy, ServerPool, TelemetryLevel, hash_key_independent_of_rss, table_with_server_per_bucket,
};
use crate::ServerId;
use crate::placement::{BucketCount, PlacementTable};
use crate::rss::RssKey;

pub const POLICY_NAME: &str = "bounded-load";

/// Maximum ratio of a server's connections to its fair share of them (1 + epsilon in SODA'18). A value nearer to 1
/// balances better but moves more buckets.
const LOAD_BOUND_FACTOR: f64 = 1.25;

pub struct BoundedLoadPolicy {
    hash_key: RssKey,
}

impl BoundedLoadPolicy {
    pub fn new(seed: u64) -> Self {
        Self { hash_key: hash_key_independent_of_rss(seed) }
    }
}

impl PlacementPolicy for BoundedLoadPolicy {
    fn name(&self) -> &'static str {
        POLICY_NAME
    }

    fn telemetry_level(&self) -> TelemetryLevel {
        LoadMetric::Connections.telemetry_level()
    }

    fn reads_traffic(&self) -> bool {
        true
    }

    fn compute_table(&mut self, pool: &ServerPool, bucket_count: BucketCount, generation: u64) -> PlacementTable {
        let shares = pool.new_connection_shares();
        let below_bound_positions = server_positions_below_bound(
            &LoadMetric::Connections.server_loads(pool),
            &LoadMetric::Connections.fair_metric_shares(pool),
        );
        let servers_on_ring: Vec<(ServerId, f64)> =
            below_bound_positions.iter().map(|position| shares[*position]).collect();
        let position_below_bound_by_bucket = weighted_ring_table(&servers_on_ring, bucket_count.get() as usize);
        let server_position_by_bucket: Vec<usize> =
            position_below_bound_by_bucket.into_iter().map(|position| below_bound_positions[position]).collect();
        table_with_server_per_bucket(pool, bucket_count, generation, self.hash_key.clone(), &server_position_by_bucket)
    }
}

/// Returns the positions of the servers below their bound. At least one is below, because the bound includes the next
/// connection (ceil(c m / n) in the paper). The lists have each server's number of connections and share.
fn server_positions_below_bound(open_connection_counts: &[f64], shares: &[f64]) -> Vec<usize> {
    let connections_per_share = (open_connection_counts.iter().sum::<f64>() + 1.0) / shares.iter().sum::<f64>();
    (0..open_connection_counts.len())
        .filter(|position| {
            open_connection_counts[*position] < LOAD_BOUND_FACTOR * connections_per_share * shares[*position]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PoolServer;
    use crate::policy::consistent_hash::ring_table;

    const BUCKET_COUNT: usize = 1024;

    fn pool_with_connections(open_connections: &[u32]) -> ServerPool {
        let build_pool_server = |(position, open_connections): (usize, &u32)| PoolServer {
            open_connection_count: *open_connections,
            ..PoolServer::new((position as u64 + 1).try_into().unwrap())
        };
        ServerPool::new(open_connections.iter().enumerate().map(build_pool_server).collect(), 1)
    }

    fn server_by_bucket(open_connections: &[u32]) -> Vec<u16> {
        let table = BoundedLoadPolicy::new(1).compute_table(
            &pool_with_connections(open_connections),
            BucketCount::new(BUCKET_COUNT as u64).unwrap(),
            1,
        );
        (0..BUCKET_COUNT as u32).map(|bucket| table.bucket_candidates(0, bucket)[0].server.get()).collect()
    }

    #[test]
    fn table_of_servers_below_their_bounds_matches_the_hash_ring() {
        let ids: Vec<ServerId> = (1..=5).map(|id| ServerId::try_from(id).unwrap()).collect();
        let server_ids_on_ring: Vec<u16> =
            ring_table(&ids, BUCKET_COUNT).into_iter().map(|position| ids[position].get()).collect();
        assert_eq!(server_by_bucket(&[0; 5]), server_ids_on_ring);
        assert_eq!(server_by_bucket(&[100, 110, 90, 120, 80]), server_ids_on_ring);
    }

    #[test]
    fn only_buckets_of_the_server_at_its_bound_move() {
        let (servers_below_bound, servers_with_one_at_bound) =
            (server_by_bucket(&[100; 5]), server_by_bucket(&[100, 100, 200, 100, 100]));
        assert!(servers_below_bound.contains(&3) && !servers_with_one_at_bound.contains(&3));
        assert!(
            servers_below_bound
                .iter()
                .zip(&servers_with_one_at_bound)
                .all(|(before, after)| before == after || *before == 3)
        );
    }

    #[test]
    fn no_server_exceeds_its_bound_as_connections_are_opened() {
        // With one connection per table, the bound of the paper holds exactly.
        let mut open_connections = [0u32; 7];
        for connection in 0..2_000u32 {
            let bucket = crate::placement::mix_hash(connection) as usize % BUCKET_COUNT;
            open_connections[usize::from(server_by_bucket(&open_connections)[bucket]) - 1] += 1;
            let connection_bound = (LOAD_BOUND_FACTOR * f64::from(connection + 1) / 7.0).ceil();
            assert!(
                open_connections.iter().all(|count| f64::from(*count) <= connection_bound),
                "{open_connections:?}, bound {connection_bound}"
            );
        }
    }

    #[test]
    fn single_server_gets_all_buckets() {
        assert!(server_by_bucket(&[1_000_000]).iter().all(|server| *server == 1));
        assert_eq!(server_positions_below_bound(&[7.0, 7.0], &[1.0, 1.0]), [0, 1]);
    }
}
