//! Weighted turns of the rule `RoundRobin`, in which each member occurs as often as its weight, evenly spread.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use coreward_intf as intf;

use super::{ServerPool, table_without_candidates};
use crate::placement::{BucketCount, PlacementRule, PlacementTable};
use crate::rss::RssKey;

/// Returns a round-robin table in which the turns of each server are in proportion to its share. `shares` has a share
/// above 0 for each eligible server, by id.
pub fn weighted_turn_table(
    pool: &ServerPool,
    bucket_count: BucketCount,
    generation: u64,
    key: RssKey,
    shares: &[f64],
) -> PlacementTable {
    let mut table = table_without_candidates(pool, PlacementRule::RoundRobin, bucket_count, generation, key);
    table.members =
        evenly_spread_server_positions(shares).into_iter().map(|position| table.members[position]).collect();
    table
}

/// Number of turns per unit of share, used if some shares are not whole numbers.
const TURNS_PER_UNIT_OF_SHARE: f64 = 64.0;

/// Returns a sequence of positions in `shares`. Each position occurs in proportion to its share, evenly spread.
pub fn evenly_spread_server_positions(shares: &[f64]) -> Vec<usize> {
    let are_whole_numbers = shares.iter().all(|share| share.fract() == 0.0);
    let turns_per_share = if are_whole_numbers { 1.0 } else { TURNS_PER_UNIT_OF_SHARE };
    let turn_counts: Vec<u32> = shares.iter().map(|share| ((share * turns_per_share).round() as u32).max(1)).collect();
    interleaved_server_positions(&reduce_weights_to_table_size(&turn_counts))
}

/// Returns the weights in lowest terms. If their sum exceeds the data plane's table, they are scaled down, but not
/// below 1.
fn reduce_weights_to_table_size(weights: &[u32]) -> Vec<u32> {
    let divisor = weights.iter().copied().fold(0, greatest_common_divisor).max(1);
    let total_turns: u64 = weights.iter().map(|weight| u64::from(weight / divisor)).sum();
    let max_turns = u64::from(intf::MAX_MEMBERS);
    if total_turns <= max_turns {
        return weights.iter().map(|weight| weight / divisor).collect();
    }
    // One turn is reserved for each server that scaling would leave without any.
    let turns_to_share = max_turns - (weights.len() as u64).min(max_turns);
    weights.iter().map(|weight| 1 + (u64::from(weight / divisor) * turns_to_share / total_turns) as u32).collect()
}

fn greatest_common_divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Returns a sequence in which each position occurs as often as its weight. After any number of turns, each position
/// has had its share of them, with an error below one turn. The schedule is R. Tijdeman's ("The chairman assignment
/// problem", Discrete Mathematics 32, 1980). His bound of the error for n servers is 1 - d, with d = 1 / (2n - 2).
///
/// For a server of share r, the bound permits turn k (from 0) only from (k + d) / r to (k + 1 - d) / r turns. Among
/// the servers whose next turn is permitted, the one with the earliest end comes next. A schedule within the bound
/// exists, and this rule finds one.
fn interleaved_server_positions(weights: &[u32]) -> Vec<usize> {
    if weights.len() == 1 {
        return vec![0; weights[0] as usize];
    }
    let total_turns: u64 = weights.iter().copied().map(u64::from).sum();
    // 1 / d, and a turn's time in turns of the whole list, as a dividend (at most 2^14 * 2^15 * 2^14) and a divisor.
    let fractions_per_turn = (2 * weights.len() as u64).saturating_sub(2);
    let turn_fraction =
        |position: usize, parts: u64| (parts * total_turns, u64::from(weights[position]) * fractions_per_turn);
    let earliest_turn = |position: usize, turn_index: u64| {
        let (dividend, divisor) = turn_fraction(position, turn_index * fractions_per_turn + 1);
        dividend.div_ceil(divisor)
    };
    let latest_turn = |position: usize, turn_index: u64| {
        let (dividend, divisor) = turn_fraction(position, (turn_index + 1) * fractions_per_turn - 1);
        dividend / divisor
    };

    let mut future_turns_by_earliest: BinaryHeap<_> =
        (0..weights.len()).map(|position| Reverse((earliest_turn(position, 0), position, 0))).collect();
    let mut eligible_turns_by_latest = BinaryHeap::new();
    let mut positions_by_turn = Vec::with_capacity(total_turns as usize);
    for current_turn in 1..=total_turns {
        while future_turns_by_earliest.peek().is_some_and(|Reverse((earliest, ..))| *earliest <= current_turn) {
            let Reverse((_, position, turn_index)) = future_turns_by_earliest.pop().expect("just seen");
            eligible_turns_by_latest.push(Reverse((latest_turn(position, turn_index), position, turn_index)));
        }
        let Reverse((_, position, turn_index)) =
            eligible_turns_by_latest.pop().expect("someone's turn: the schedule exists, and has no gap");
        positions_by_turn.push(position);
        future_turns_by_earliest.push(Reverse((earliest_turn(position, turn_index + 1), position, turn_index + 1)));
    }
    positions_by_turn
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn server_positions_for_weights(weights: &[u32]) -> Vec<usize> {
        let shares: Vec<f64> = weights.iter().copied().map(f64::from).collect();
        super::evenly_spread_server_positions(&shares)
    }

    #[test]
    fn equal_weights_alternate_and_unequal_weights_interleave() {
        assert_eq!(server_positions_for_weights(&[10, 10, 10]), [0, 1, 2]);
        assert_eq!(server_positions_for_weights(&[4, 2, 2]), [0, 1, 0, 2]);
        assert_eq!(server_positions_for_weights(&[5, 1, 1]), [0, 0, 1, 0, 0, 2, 0]);
        assert_eq!(server_positions_for_weights(&[3]), [0]);
        assert_eq!(server_positions_for_weights(&[]), Vec::<usize>::new());
        // The third server has half a share.
        let turns_with_half_share = super::evenly_spread_server_positions(&[1.0, 1.0, 0.5]);
        assert_eq!(
            (turns_with_half_share.len(), turns_with_half_share.iter().filter(|position| **position == 2).count()),
            (5, 1)
        );
    }

    #[test]
    fn oversized_weights_are_scaled_down() {
        let weights: Vec<u32> = (0..2_000).map(|server| if server < 1_000 { 30 } else { 2 }).collect();
        let scaled_turns = server_positions_for_weights(&weights);
        let count_server_turns = |server: usize| scaled_turns.iter().filter(|position| **position == server).count();
        assert!(
            scaled_turns.len() <= intf::MAX_MEMBERS as usize && scaled_turns.len() > 15_000,
            "{}",
            scaled_turns.len()
        );
        assert!(
            (14..=15).contains(&count_server_turns(3)) && count_server_turns(1_500) == 1,
            "{} and {}",
            count_server_turns(3),
            count_server_turns(1_500)
        );
        assert_eq!(reduce_weights_to_table_size(&[7; 16_384]), [1; 16_384]);
    }

    proptest! {
        /// In any window of turns, also across the end of the list, each server is within two turns of its share.
        #[test]
        fn every_window_of_turns_has_fair_shares(
            weights in prop::collection::vec(1u32..40, 1..30), first_turn in 0usize..500, window_turns in 1usize..500
        ) {
            let positions_by_turn = server_positions_for_weights(&weights);
            let total_weight = f64::from(weights.iter().sum::<u32>());
            for (server, weight) in weights.iter().enumerate() {
                let is_turn_of_server =
                    |turn_index: &usize| positions_by_turn[turn_index % positions_by_turn.len()] == server;
                let turns_in_window = (first_turn..first_turn + window_turns).filter(is_turn_of_server).count();
                let fair_share = window_turns as f64 * f64::from(*weight) / total_weight;
                prop_assert!((turns_in_window as f64 - fair_share).abs() < 2.0,
                    "server {server}: {turns_in_window} of {fair_share}");
            }
        }
    }
}
