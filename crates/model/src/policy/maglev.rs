//! Policy `maglev`, Maglev hashing (Eisenbud et al., NSDI'16, Sect. 3.4). Servers fill a hash table of buckets in turn,
//! each in an order of its own. Shares are equal to within one bucket, and a change of the pool moves little more than
//! the minimum.

use crate::ServerId;
use crate::placement::mix_hash;

pub const POLICY_NAME: &str = "maglev";

/// Table size in the Maglev paper, a prime about a hundred times the number of servers in a moderate pool. The data
/// plane's tables are smaller ([`BucketCount`](crate::placement::BucketCount)), but simulations can use this size.
pub const MAGLEV_PAPER_TABLE_SIZE: usize = 65_537;

/// Returns, for each of `bucket_count` buckets, its server's position in `servers`, or an empty list without servers.
pub fn maglev_table(servers: &[ServerId], bucket_count: usize) -> Vec<usize> {
    let servers: Vec<_> = servers.iter().map(|server| (*server, 1.0)).collect();
    weighted_maglev_table(&servers, bucket_count)
}

/// Returns the result of [`maglev_table`] for servers with weights. In the Maglev paper, all servers are equal. Here, a
/// server of half the largest weight takes a bucket in every second round.
pub fn weighted_maglev_table(servers: &[(ServerId, f64)], bucket_count: usize) -> Vec<usize> {
    let largest_weight = servers.iter().map(|(_, share)| *share).fold(0.0, f64::max);
    if largest_weight <= 0.0 {
        return Vec::new();
    }
    const FREE_BUCKET: usize = usize::MAX;
    let mut bucket_orders: Vec<MaglevBucketOrder> =
        servers.iter().map(|(server, _)| MaglevBucketOrder::for_server(*server, bucket_count)).collect();
    let mut bucket_counts = vec![0.0; servers.len()];
    let mut server_position_by_bucket = vec![FREE_BUCKET; bucket_count];
    let mut free_bucket_count = bucket_count;
    for round in 1u32.. {
        for (position, order) in bucket_orders.iter_mut().enumerate() {
            if free_bucket_count == 0 {
                return server_position_by_bucket;
            }
            if bucket_counts[position] + 1.0 > f64::from(round) * servers[position].1 / largest_weight {
                continue;
            }
            bucket_counts[position] += 1.0;
            let free_bucket = order
                .find(|bucket| server_position_by_bucket[*bucket] == FREE_BUCKET)
                .expect("an order passes every bucket");
            server_position_by_bucket[free_bucket] = position;
            free_bucket_count -= 1;
        }
    }
    unreachable!("the server of the largest share has a bucket in every round")
}

/// Iterator over buckets in the order in which a server takes them. It starts at an offset and advances by
/// `bucket_skip`, modulo the number of buckets.
struct MaglevBucketOrder {
    next_bucket: usize,
    bucket_skip: usize,
    bucket_count: usize,
}

impl MaglevBucketOrder {
    fn for_server(server: ServerId, bucket_count: usize) -> Self {
        let hash = mix_hash(server.get().into());
        let next_bucket = (hash as u32) as usize % bucket_count;
        // The skip is 1 to size - 1, as published for a prime size. For other sizes, it is the next number that shares
        // no divisor with the size, so that the order passes every bucket.
        let first_skip = (hash >> 32) as usize % (bucket_count - 1).max(1) + 1;
        let skip = (first_skip..first_skip + bucket_count)
            .find(|skip| are_coprime(*skip, bucket_count))
            .expect("1 modulo the size is coprime");
        Self { next_bucket, bucket_skip: skip % bucket_count, bucket_count }
    }
}

impl Iterator for MaglevBucketOrder {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let bucket = self.next_bucket;
        self.next_bucket = (bucket + self.bucket_skip) % self.bucket_count;
        Some(bucket)
    }
}

fn are_coprime(a: usize, b: usize) -> bool {
    if b == 0 { a == 1 } else { are_coprime(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server_ids(count: u64) -> Vec<ServerId> {
        (0..count).map(|id| ServerId::try_from(id * 31 + 5).unwrap()).collect()
    }

    #[test]
    fn bucket_order_visits_every_bucket_once() {
        for size in [1, 2, 7, 128, 1000, 65_537] {
            for server in server_ids(5) {
                let mut is_visited = vec![false; size];
                MaglevBucketOrder::for_server(server, size).take(size).for_each(|bucket| is_visited[bucket] = true);
                assert!(
                    is_visited.iter().all(|is_bucket_visited| *is_bucket_visited),
                    "{size} buckets, server {server}"
                );
            }
        }
    }

    #[test]
    fn bucket_counts_of_servers_differ_by_at_most_one() {
        for (count, size) in [(3, 128), (7, 2048), (468, MAGLEV_PAPER_TABLE_SIZE), (200, 128)] {
            let mut buckets_per_server = vec![0; count as usize];
            maglev_table(&server_ids(count), size).iter().for_each(|position| buckets_per_server[*position] += 1);
            let (min_count, max_count) =
                (buckets_per_server.iter().min().unwrap(), buckets_per_server.iter().max().unwrap());
            assert!(max_count - min_count <= 1, "{count} servers, {size} buckets: {min_count} to {max_count}");
        }
        assert!(maglev_table(&[], 128).is_empty());
    }

    #[test]
    fn bucket_counts_are_proportional_to_weights() {
        let servers_and_shares: Vec<_> = server_ids(30).into_iter().zip([1.0, 3.0, 0.5].into_iter().cycle()).collect();
        let mut buckets_per_server = [0; 30];
        weighted_maglev_table(&servers_and_shares, MAGLEV_PAPER_TABLE_SIZE)
            .iter()
            .for_each(|position| buckets_per_server[*position] += 1);
        let buckets_per_share = MAGLEV_PAPER_TABLE_SIZE as f64 / 45.0;
        for (count, (_, share)) in buckets_per_server.iter().zip(&servers_and_shares) {
            assert!((f64::from(*count) - share * buckets_per_share).abs() <= 2.0, "{count} buckets with share {share}");
        }
    }

    #[test]
    fn removal_of_a_server_moves_few_buckets_of_other_servers() {
        let servers = server_ids(100);
        let table = maglev_table(&servers, MAGLEV_PAPER_TABLE_SIZE);
        let reduced_table = maglev_table(&servers[1..], MAGLEV_PAPER_TABLE_SIZE);
        // Position p of the shorter list is p + 1 of the longer one.
        let unaffected_count = table.iter().filter(|position| **position != 0).count();
        let moved_count =
            table.iter().zip(&reduced_table).filter(|(old, new)| **old != 0 && **old != **new + 1).count();
        // The paper's Fig. 12 has a few per cent at such sizes, but `hash` moves nearly all.
        assert!(moved_count * 20 < unaffected_count, "{moved_count} of {unaffected_count} buckets moved that need not");
    }
}
