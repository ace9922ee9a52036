//! Weighted turns: the members of rule `RoundRobin`, each as often as its weight and evenly spread.

use coreward_intf as intf;

use super::{Pool, table_of};
use crate::placement::{BucketCount, Member, PlacementTable, Rule};
use crate::rss::RssKey;

/// A table in which the members have their turns by `weights`: one per eligible server of the pool, by id, each 1 or more.
pub fn weighted_turns(
    pool: &Pool,
    buckets: BucketCount,
    generation: u64,
    key: RssKey,
    weights: &[u32],
) -> PlacementTable {
    let mut table = table_of(pool, Rule::RoundRobin, buckets, generation, key);
    table.members = interleaved(&table.members, &fitting(weights));
    table
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

/// Each member as often as its weight, its k-th turn at (k + 1/2) / weight of the way through the list: between two turns
/// of a server all others have about their share, as with smooth weighted round robin.
fn interleaved(members: &[Member], weights: &[u32]) -> Vec<Member> {
    let mut turns: Vec<(u64, usize)> = Vec::with_capacity(weights.iter().map(|weight| *weight as usize).sum());
    for (position, weight) in weights.iter().copied().enumerate() {
        // In units of 2^-32 of the list: exact enough to order 16,384 turns, and an integer, so that ties are ties.
        turns.extend((0..weight).map(|turn| (((2 * u64::from(turn) + 1) << 32) / (2 * u64::from(weight)), position)));
    }
    turns.sort_unstable();
    turns.into_iter().map(|(_, position)| members[position]).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ServerId;

    fn members(count: usize) -> Vec<Member> {
        (0..count as u64).map(|id| Member { server: ServerId::try_from(id).unwrap(), load: 0 }).collect()
    }

    fn turns(weights: &[u32]) -> Vec<u16> {
        interleaved(&members(weights.len()), &fitting(weights)).iter().map(|member| member.server.get()).collect()
    }

    #[test]
    fn equal_weights_are_plain_turns_and_others_are_spread() {
        assert_eq!(turns(&[10, 10, 10]), [0, 1, 2]);
        assert_eq!(turns(&[4, 2, 2]), [0, 1, 2, 0]);
        assert_eq!(turns(&[5, 1, 1]), [0, 0, 0, 1, 2, 0, 0]);
        assert_eq!(turns(&[]), Vec::<u16>::new());
    }

    #[test]
    fn what_does_not_fit_is_scaled_down() {
        let weights: Vec<u32> = (0..2_000).map(|server| if server < 1_000 { 30 } else { 2 }).collect();
        let turns = turns(&weights);
        let of = |server: u16| turns.iter().filter(|turn| **turn == server).count();
        assert!(turns.len() <= intf::MAX_MEMBERS as usize && turns.len() > 15_000, "{}", turns.len());
        assert!((14..=15).contains(&of(3)) && of(1_500) == 1, "{} and {}", of(3), of(1_500));
        assert_eq!(fitting(&[7; 16_384]), [1; 16_384]);
    }

    proptest! {
        /// Every server has its weight's share of any stretch of turns, give or take two.
        #[test]
        fn every_stretch_is_fair(weights in prop::collection::vec(1u32..40, 1..30), from in 0usize..500, length in 1usize..500) {
            let turns = turns(&weights);
            let total = f64::from(weights.iter().sum::<u32>());
            for (server, weight) in weights.iter().enumerate() {
                let had = (from..from + length).filter(|turn| usize::from(turns[turn % turns.len()]) == server).count();
                let share = length as f64 * f64::from(*weight) / total;
                prop_assert!((had as f64 - share).abs() <= 2.0, "server {server}: {had} of {share}");
            }
        }
    }
}
