//! Weighted turns: the members of rule `RoundRobin`, each as often as its weight and evenly spread.

use coreward_intf as intf;

use super::{Pool, table_of};
use crate::placement::{BucketCount, PlacementTable, Rule};
use crate::rss::RssKey;

/// A table in which the members have their turns by `shares`: one per eligible server of the pool, by id, above 0.
pub fn weighted_turns(
    pool: &Pool,
    buckets: BucketCount,
    generation: u64,
    key: RssKey,
    shares: &[f64],
) -> PlacementTable {
    let mut table = table_of(pool, Rule::RoundRobin, buckets, generation, key);
    table.members = turns(shares).into_iter().map(|position| table.members[position]).collect();
    table
}

/// Turns per unit of share where shares are no whole numbers.
const STEPS: f64 = 64.0;

/// Positions in `shares`, each as often as its share, evenly spread.
pub fn turns(shares: &[f64]) -> Vec<usize> {
    let whole = shares.iter().all(|share| share.fract() == 0.0);
    let scale = if whole { 1.0 } else { STEPS };
    let weights: Vec<u32> = shares.iter().map(|share| ((share * scale).round() as u32).max(1)).collect();
    interleaved(&fitting(&weights))
}

/// The weights in lowest terms; scaled down, at least to 1, where the turns would not fit the data plane.
fn fitting(weights: &[u32]) -> Vec<u32> {
    let divisor = weights.iter().copied().fold(0, greatest_common_divisor).max(1);
    let total: u64 = weights.iter().map(|weight| u64::from(weight / divisor)).sum();
    let most = u64::from(intf::MAX_MEMBERS);
    if total <= most {
        return weights.iter().map(|weight| weight / divisor).collect();
    }
    // One turn each is kept back for those that scaling would leave with none.
    let shared = most - (weights.len() as u64).min(most);
    weights.iter().map(|weight| 1 + (u64::from(weight / divisor) * shared / total) as u32).collect()
}

fn greatest_common_divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Each position as often as its weight, its k-th turn at (k + 1/2) / weight of the way through the list: between two turns
/// of a server all others have about their share, as with smooth weighted round robin. Light servers of equal weight have
/// theirs one right after the other: those of weight 1 all in the middle.
fn interleaved(weights: &[u32]) -> Vec<usize> {
    let mut turns: Vec<(u64, usize)> = Vec::with_capacity(weights.iter().map(|weight| *weight as usize).sum());
    for (position, weight) in weights.iter().copied().enumerate() {
        // In units of 2^-32 of the list: exact enough to order 16,384 turns, and an integer, so that ties are ties.
        turns.extend((0..weight).map(|turn| (((2 * u64::from(turn) + 1) << 32) / (2 * u64::from(weight)), position)));
    }
    turns.sort_unstable();
    turns.into_iter().map(|(_, position)| position).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn turns(weights: &[u32]) -> Vec<usize> {
        let shares: Vec<f64> = weights.iter().copied().map(f64::from).collect();
        super::turns(&shares)
    }

    #[test]
    fn equal_weights_are_plain_turns_and_others_are_spread() {
        assert_eq!(turns(&[10, 10, 10]), [0, 1, 2]);
        assert_eq!(turns(&[4, 2, 2]), [0, 1, 2, 0]);
        assert_eq!(turns(&[5, 1, 1]), [0, 0, 0, 1, 2, 0, 0]);
        assert_eq!(turns(&[]), Vec::<usize>::new());
        // Half a share of three.
        let half = super::turns(&[1.0, 1.0, 0.5]);
        assert_eq!((half.len(), half.iter().filter(|turn| **turn == 2).count()), (5, 1));
    }

    #[test]
    fn what_does_not_fit_is_scaled_down() {
        let weights: Vec<u32> = (0..2_000).map(|server| if server < 1_000 { 30 } else { 2 }).collect();
        let turns = turns(&weights);
        let of = |server: usize| turns.iter().filter(|turn| **turn == server).count();
        assert!(turns.len() <= intf::MAX_MEMBERS as usize && turns.len() > 15_000, "{}", turns.len());
        assert!((14..=15).contains(&of(3)) && of(1_500) == 1, "{} and {}", of(3), of(1_500));
        assert_eq!(fitting(&[7; 16_384]), [1; 16_384]);
    }

    proptest! {
        /// In a piece of the way of length L a server of weight w has L * w turns, give or take one, and so has each of the
        /// n servers: so that many turns are a piece that is as much as n turns too long or too short.
        #[test]
        fn every_stretch_is_fair(weights in prop::collection::vec(1u32..40, 1..30), from in 0usize..500, length in 1usize..500) {
            let turns = turns(&weights);
            let total = f64::from(weights.iter().sum::<u32>());
            for (server, weight) in weights.iter().enumerate() {
                let had = (from..from + length).filter(|turn| turns[turn % turns.len()] == server).count();
                let share = length as f64 * f64::from(*weight) / total;
                let most = 1.0 + weights.len() as f64 * f64::from(*weight) / total + 1e-6;
                prop_assert!((had as f64 - share).abs() <= most, "server {server}: {had} of {share}, within {most}");
            }
        }
    }
}
