//! Policy `bounded-load`, consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA'18). A bucket
//! goes to the next server on the ring with less than [`BALANCE_FACTOR`] times its share of the open connections.
//!
//! Skipping full servers on the ring gives the same table as a ring without them.

use super::consistent_hash::weighted_ring_table;
use super::{LoadMetric, Policy, Pool, TelemetryLevel, independent_hash_key, table_by_bucket};
use crate::ServerId;
use crate::placement::{BucketCount, PlacementTable};
use crate::rss::RssKey;

pub const NAME: &str = "bounded-load";

/// Maximum ratio of a server's connections to its fair share (1 + epsilon in the paper). A value nearer to 1 balances
/// better but moves more buckets.
const BALANCE_FACTOR: f64 = 1.25;

pub struct BoundedLoadPolicy {
    hash_key: RssKey,
}

impl BoundedLoadPolicy {
    pub fn new(seed: u64) -> Self {
        Self { hash_key: independent_hash_key(seed) }
    }
}

impl Policy for BoundedLoadPolicy {
    fn name(&self) -> &'static str {
        NAME
    }

    fn telemetry_level(&self) -> TelemetryLevel {
        LoadMetric::Connections.telemetry_level()
    }

    fn reads_traffic(&self) -> bool {
        true
    }

    fn compute_table(&mut self, pool: &Pool, buckets: BucketCount, generation: u64) -> PlacementTable {
        let shares = pool.new_connection_shares();
        let positions_with_room = positions_below_bound(
            &LoadMetric::Connections.server_loads(pool),
            &LoadMetric::Connections.comparison_shares(pool),
        );
        let servers_on_ring: Vec<(ServerId, f64)> =
            positions_with_room.iter().map(|position| shares[*position]).collect();
        let ring_positions = weighted_ring_table(&servers_on_ring, buckets.get() as usize);
        let positions: Vec<usize> = ring_positions.into_iter().map(|position| positions_with_room[position]).collect();
        table_by_bucket(pool, buckets, generation, self.hash_key.clone(), &positions)
    }
}

/// Returns the positions of the servers below their bound. There is at least one, because the bound includes the next
/// connection (ceil(c m / n) in the paper). `open_connections` has the connections of each server, `shares` its share.
fn positions_below_bound(open_connections: &[f64], shares: &[f64]) -> Vec<usize> {
    let connections_per_share = (open_connections.iter().sum::<f64>() + 1.0) / shares.iter().sum::<f64>();
    (0..open_connections.len())
        .filter(|position| open_connections[*position] < BALANCE_FACTOR * connections_per_share * shares[*position])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PoolServer;
    use crate::policy::consistent_hash::ring_table;

    const BUCKET_COUNT: usize = 1024;

    fn pool_with_connections(open_connections: &[u32]) -> Pool {
        let server = |(position, open_connections): (usize, &u32)| PoolServer {
            open_connections: *open_connections,
            ..PoolServer::new((position as u64 + 1).try_into().unwrap())
        };
        Pool::new(open_connections.iter().enumerate().map(server).collect(), 1)
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
    fn table_of_servers_below_their_bound_equals_the_hash_ring() {
        let ids: Vec<ServerId> = (1..=5).map(|id| ServerId::try_from(id).unwrap()).collect();
        let servers_on_ring: Vec<u16> =
            ring_table(&ids, BUCKET_COUNT).into_iter().map(|position| ids[position].get()).collect();
        assert_eq!(server_by_bucket(&[0; 5]), servers_on_ring);
        assert_eq!(server_by_bucket(&[100, 110, 90, 120, 80]), servers_on_ring);
    }

    #[test]
    fn server_at_its_bound_loses_its_buckets_and_no_other_bucket_moves() {
        let (before, after) = (server_by_bucket(&[100; 5]), server_by_bucket(&[100, 100, 200, 100, 100]));
        assert!(before.contains(&3) && !after.contains(&3));
        assert!(before.iter().zip(&after).all(|(before, after)| before == after || *before == 3));
    }

    #[test]
    fn no_server_exceeds_its_bound_while_connections_open() {
        // With one connection per table, the bound of the paper holds exactly.
        let mut open_connections = [0u32; 7];
        for connection in 0..2_000u32 {
            let bucket = crate::placement::mix_hash(connection) as usize % BUCKET_COUNT;
            open_connections[usize::from(server_by_bucket(&open_connections)[bucket]) - 1] += 1;
            let connection_bound = (BALANCE_FACTOR * f64::from(connection + 1) / 7.0).ceil();
            assert!(
                open_connections.iter().all(|count| f64::from(*count) <= connection_bound),
                "{open_connections:?}, bound {connection_bound}"
            );
        }
    }

    #[test]
    fn single_server_gets_all_buckets() {
        assert!(server_by_bucket(&[1_000_000]).iter().all(|server| *server == 1));
        assert_eq!(positions_below_bound(&[7.0, 7.0], &[1.0, 1.0]), [0, 1]);
    }
}
