//! Policy `hash`, which knows no loads. Bucket i, selected by the load balancer's own hash, goes to server i mod n.
//! With unequal shares, servers take buckets in weighted turns.

use super::wrr_schedule::evenly_spread_server_positions;
use crate::ServerId;

pub const POLICY_NAME: &str = "hash";

/// Returns the server of each of `bucket_count` buckets, as a position among `server_count` servers. The list is empty
/// without servers.
pub fn modulo_table(server_count: usize, bucket_count: usize) -> Vec<usize> {
    if server_count == 0 { Vec::new() } else { (0..bucket_count).map(|bucket| bucket % server_count).collect() }
}

/// Returns the result of [`modulo_table`] for servers with weights, to which the buckets are assigned in weighted
/// turns.
pub fn weighted_modulo_table(servers: &[(ServerId, f64)], bucket_count: usize) -> Vec<usize> {
    let shares: Vec<f64> = servers.iter().map(|(_, share)| *share).collect();
    let server_turns = evenly_spread_server_positions(&shares);
    modulo_table(server_turns.len(), bucket_count).into_iter().map(|turn_index| server_turns[turn_index]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_weights_give_a_modulo_table_and_others_proportional_buckets() {
        let build_table = |shares: &[f64], size: usize| {
            let servers: Vec<_> =
                shares.iter().enumerate().map(|(id, share)| (ServerId::try_from(id as u64).unwrap(), *share)).collect();
            weighted_modulo_table(&servers, size)
        };
        assert_eq!(build_table(&[7.0, 7.0, 7.0], 7), modulo_table(3, 7));
        let unequal_table = build_table(&[3.0, 1.0], 128);
        assert_eq!(unequal_table.iter().filter(|position| **position == 0).count(), 96);
        assert!(build_table(&[], 128).is_empty());
    }
}
