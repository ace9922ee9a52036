//! Policy `consistent-hash`, a ring with many points of each server, where a bucket goes to the next point (Karger et
//! al., STOC'97). A change of the pool moves the minimum of buckets, but the shares are uneven.

use crate::ServerId;
use crate::placement::mix_hash;

pub const POLICY_NAME: &str = "consistent-hash";

/// Number of points of each server on the ring. The standard deviation of the servers' shares is 1 / sqrt(64) = 12.5 %.
/// With 468 servers and 70,000 connections, the fullest server is about twice as far above the mean as with a uniform
/// hash. Cheetah shows the same (NSDI'20, Fig. 2b), but does not give its number of points.
const RING_POINTS_PER_SERVER: u32 = 64;

/// Returns, for each of `bucket_count` buckets evenly spaced on the ring, the server of the next point, as its position
/// in `servers`. Returns an empty list without servers.
pub fn ring_table(servers: &[ServerId], bucket_count: usize) -> Vec<usize> {
    let servers: Vec<_> = servers.iter().map(|server| (*server, 1.0)).collect();
    weighted_ring_table(&servers, bucket_count)
}

/// Returns the result of [`ring_table`] for servers with weights. A server of weight 2 has twice as many points as one
/// of weight 1, and points of other servers do not change.
pub fn weighted_ring_table(servers: &[(ServerId, f64)], bucket_count: usize) -> Vec<usize> {
    let mut ring_points: Vec<(u64, usize)> = Vec::with_capacity(servers.len() * RING_POINTS_PER_SERVER as usize);
    for (position, (server, share)) in servers.iter().enumerate() {
        let server_point_count = ((f64::from(RING_POINTS_PER_SERVER) * share).round() as u32).max(1);
        ring_points
            .extend((0..server_point_count).map(|point| (mix_hash(point << 16 | u32::from(server.get())), position)));
    }
    ring_points.sort_unstable();
    let Some(first_point) = ring_points.first().copied() else { return Vec::new() };
    let mut next_point_index = 0;
    let server_position_of_bucket = |bucket: usize| {
        let bucket_point = ((bucket as u128) << 64) / bucket_count as u128;
        while ring_points.get(next_point_index).is_some_and(|(point, _)| u128::from(*point) < bucket_point) {
            next_point_index += 1;
        }
        ring_points.get(next_point_index).map_or(first_point.1, |(_, position)| *position)
    };
    (0..bucket_count).map(server_position_of_bucket).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server_ids(count: u64) -> Vec<ServerId> {
        (1..=count).map(|id| ServerId::try_from(id).unwrap()).collect()
    }

    #[test]
    fn removal_of_a_server_moves_only_its_own_buckets() {
        let servers = server_ids(50);
        let (table, reduced_table) = (ring_table(&servers, 2048), ring_table(&servers[1..], 2048));
        assert!(table.iter().zip(&reduced_table).all(|(old, new)| *old == 0 || *old == new + 1));
    }

    #[test]
    fn server_with_twice_the_weight_has_about_twice_the_buckets() {
        let servers_and_shares: Vec<_> =
            server_ids(100).into_iter().map(|id| (id, if id.get() <= 50 { 2.0 } else { 1.0 })).collect();
        let table = weighted_ring_table(&servers_and_shares, 1 << 16);
        let heavy_bucket_count = table.iter().filter(|position| **position < 50).count();
        assert!((heavy_bucket_count as f64 / 65_536.0 - 2.0 / 3.0).abs() < 0.02, "{heavy_bucket_count}");
    }

    #[test]
    fn deviation_of_bucket_counts_matches_the_number_of_points() {
        let (count, size) = (1_000, 1 << 20);
        let mut buckets_per_server = vec![0u32; count as usize];
        ring_table(&server_ids(count), size).iter().for_each(|position| buckets_per_server[*position] += 1);
        let mean_bucket_count = size as f64 / count as f64;
        let sum_of_squares: f64 =
            buckets_per_server.iter().map(|share| (f64::from(*share) / mean_bucket_count - 1.0).powi(2)).sum();
        let relative_deviation = (sum_of_squares / count as f64).sqrt();
        // The distances between points are exponential, and a share is the sum of 64, which gives 1 / sqrt(64).
        assert!((relative_deviation - 0.125).abs() < 0.01, "{relative_deviation}");
        assert!(ring_table(&[], 128).is_empty());
    }
}
