//! Policy `awrr`, weighted round robin whose weights follow the reported loads (Cheetah, NSDI'20, Sect. 4.1). A server
//! of mean load has 10 turns, an idle one 20, and one far above the mean 2, each times the server's weight.

use super::wrr_schedule::weighted_turn_table;
use super::{PlacementPolicy, ServerPool, hash_key_independent_of_rss};
use crate::placement::{BucketCount, PlacementTable};
use crate::rss::RssKey;
use crate::statistics::mean;

pub const POLICY_NAME: &str = "awrr";

/// Number of turns that a server with mean load gets (N in Cheetah, NSDI'20, Sect. 4.1).
const TURNS_AT_MEAN_LOAD: f64 = 10.0;
/// Minimum number of turns in Cheetah's paper. The maximum is 3 N. With the paper's alpha, no load reaches it.
const MIN_SERVER_TURNS: f64 = 2.0;
const MAX_SERVER_TURNS: f64 = 3.0 * TURNS_AT_MEAN_LOAD;
/// Weight of the mean load in the smoothed load of a server. With 0, the turns follow the loads at once, and with 1,
/// they never do.
const MEAN_LOAD_WEIGHT: f64 = 0.5;

pub struct AdaptiveWeightedRoundRobin {
    hash_key: RssKey,
}

impl AdaptiveWeightedRoundRobin {
    pub fn new(seed: u64) -> Self {
        Self { hash_key: hash_key_independent_of_rss(seed) }
    }
}

impl PlacementPolicy for AdaptiveWeightedRoundRobin {
    fn name(&self) -> &'static str {
        POLICY_NAME
    }

    fn compute_table(&mut self, pool: &ServerPool, bucket_count: BucketCount, generation: u64) -> PlacementTable {
        let neutral_load = pool.neutral_load();
        let loads: Vec<f64> = pool.eligible_servers().map(|server| server.mean_load(neutral_load)).collect();
        let average_load = mean(&loads).unwrap_or(0.0);
        let turn_counts = loads.iter().map(|load| f64::from(adaptive_turn_count(*load, average_load)));
        let shares: Vec<f64> =
            turn_counts.zip(pool.new_connection_shares()).map(|(turn_count, (_, share))| turn_count * share).collect();
        weighted_turn_table(pool, bucket_count, generation, self.hash_key.clone(), &shares)
    }
}

/// Returns a server's turns N_i = round(10 L_avg / ((1 - a) L_i + a L_avg)), for its load L_i and smoothing a. (In the
/// paper's typesetting, the fraction is an exponent. Only as a factor does it fit the text, "a perfectly balanced
/// system would give N = 10", and the bounds.)
fn adaptive_turn_count(load: f64, average_load: f64) -> u32 {
    if average_load <= 0.0 {
        return TURNS_AT_MEAN_LOAD as u32;
    }
    let turn_count =
        TURNS_AT_MEAN_LOAD * average_load / ((1.0 - MEAN_LOAD_WEIGHT) * load + MEAN_LOAD_WEIGHT * average_load);
    turn_count.round().clamp(MIN_SERVER_TURNS, MAX_SERVER_TURNS) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_with_less_load_gets_more_turns() {
        assert_eq!([0.0, 0.25, 0.5, 1.0].map(|load| adaptive_turn_count(load, 0.5)), [20, 13, 10, 7]);
        assert_eq!(adaptive_turn_count(1.0, 0.01), 2);
        assert_eq!(adaptive_turn_count(0.0, 0.0), 10);
    }
}
