//! `awrr`: weighted round robin whose weights follow the reported loads (Barbette et al., Cheetah, NSDI'20, Sect. 4.1).
//! A server of mean load has 10 turns, an idle one 20, one far above the mean 2, each times the server's weight.

use super::wrr_schedule::weighted_turn_table;
use super::{Policy, Pool, independent_key};
use crate::placement::{BucketCount, PlacementTable};
use crate::rss::RssKey;
use crate::statistics::mean;

pub const NAME: &str = "awrr";

/// Number of turns of a server of mean load.
const MEAN_TURNS: f64 = 10.0;
/// Bounds of the number of turns, as published: 2, and 3 N (with the published alpha no load reaches 3 N).
const TURNS_MIN: f64 = 2.0;
const TURNS_MAX: f64 = 3.0 * MEAN_TURNS;
/// Smoothing factor of the weights: with 0 they follow the loads at once, with 1 never.
const ALPHA: f64 = 0.5;

pub struct AdaptiveWeightedRoundRobin {
    key: RssKey,
}

impl AdaptiveWeightedRoundRobin {
    pub fn new(seed: u64) -> Self {
        Self { key: independent_key(seed) }
    }
}

impl Policy for AdaptiveWeightedRoundRobin {
    fn name(&self) -> &'static str {
        NAME
    }

    fn compute_table(&mut self, pool: &Pool, buckets: BucketCount, generation: u64) -> PlacementTable {
        let neutral = pool.neutral_load();
        let loads: Vec<f64> = pool.eligible().map(|server| server.mean_load(neutral)).collect();
        let average = mean(&loads).unwrap_or(0.0);
        let by_load = loads.iter().map(|load| f64::from(turns(*load, average)));
        let shares: Vec<f64> = by_load.zip(pool.shares()).map(|(turns, (_, share))| turns * share).collect();
        weighted_turn_table(pool, buckets, generation, self.key.clone(), &shares)
    }
}

/// Returns a server's turns N_i = round(10 L_avg / ((1 - a) L_i + a L_avg)), for its load L_i and smoothing a. (The
/// paper's typesetting shows the fraction as an exponent; its text, "a perfectly balanced system would give N = 10",
/// and its bounds only fit a factor.)
fn turns(load: f64, average: f64) -> u32 {
    if average <= 0.0 {
        return MEAN_TURNS as u32;
    }
    let turns = MEAN_TURNS * average / ((1.0 - ALPHA) * load + ALPHA * average);
    turns.round().clamp(TURNS_MIN, TURNS_MAX) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_follow_the_load() {
        assert_eq!([0.0, 0.25, 0.5, 1.0].map(|load| turns(load, 0.5)), [20, 13, 10, 7]);
        assert_eq!(turns(1.0, 0.01), 2);
        assert_eq!(turns(0.0, 0.0), 10);
    }
}
