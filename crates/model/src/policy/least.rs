//! `least`: to the server with fewest open connections, by the reports and by what was assigned since.
//!
//! Rule `LeastAssigned` with one connection as the cost. In a pool of up to eight servers every server stands for every
//! bucket. In a larger one eight stand for each, drawn anew with every table: the eight of fewest connections would get
//! all that is new between two reports and soon be the fullest, while the least of eight drawn at random is as good as
//! the least of all to within a connection or two (Azar et al., "Balanced allocations", 1999: log log n / log 8).

use coreward_intf as intf;

use super::{Policy, Pool, independent_key, table_of};
use crate::load::fixed_point;
use crate::placement::{BucketCount, Candidate, Core, PlacementTable, Rule};
use crate::rss::{RssKey, seeded_rng, uniform_below};

pub const NAME: &str = "least";

/// [`seeded_rng`]'s stream for the servers of each bucket.
const PURPOSE_CANDIDATES: u64 = 7;

/// The least of some servers by open connections.
pub struct Least {
    key: RssKey,
    seed: u64,
    candidates: usize,
}

impl Least {
    /// The policy as the registry has it, within what the data plane can look at.
    pub fn new(seed: u64) -> Self {
        Self { key: independent_key(seed), seed, candidates: intf::MAX_CANDIDATES as usize }
    }

    /// The least of all servers, however many: for simulations only.
    pub fn of_all(seed: u64) -> Self {
        Self { candidates: usize::MAX, ..Self::new(seed) }
    }
}

impl Policy for Least {
    fn name(&self) -> &'static str {
        NAME
    }

    fn place(&mut self, pool: &Pool, buckets: BucketCount, generation: u64) -> PlacementTable {
        let mut table = table_of(pool, Rule::LeastAssigned, buckets, generation, self.key.clone());
        if table.members.is_empty() {
            return table;
        }
        let unit = load_of_one(pool);
        // Every load balancer sees only its own assignments; the others' are about as many.
        table.assignment_cost = unit * pool.load_balancers;
        table.core_slots = table.members.iter().map(|member| Core { server: member.server, core: 0 }).collect();
        table.core_slots.truncate(intf::MAX_CORE_SLOTS as usize);
        let mut all: Vec<Candidate> = pool
            .eligible()
            .enumerate()
            .map(|(position, server)| Candidate {
                server: server.id,
                load: server.open_connections.saturating_mul(unit),
                // Beyond the data plane's limit servers share the last slot, which makes them look busier.
                core_slot: position.min(table.core_slots.len() - 1) as u16,
            })
            .collect();
        let per_bucket = all.len().min(self.candidates);
        let mut rng = seeded_rng(self.seed ^ generation, PURPOSE_CANDIDATES);
        for _ in 0..buckets.get() {
            if per_bucket < all.len() {
                // The start of a shuffle by Fisher and Yates.
                for position in 0..per_bucket {
                    let other = position + uniform_below(&mut rng, (all.len() - position) as u32) as usize;
                    all.swap(position, other);
                }
            }
            let start = table.candidates.len();
            table.candidates.extend_from_slice(&all[..per_bucket]);
            table.candidates[start..].sort_unstable_by_key(|candidate| (candidate.load, candidate.server));
        }
        table.candidates_per_bucket = per_bucket as u32;
        table
    }
}

/// What one connection counts: a part of 1.0 such that the fullest server is at most 1.0, at least the smallest step.
fn load_of_one(pool: &Pool) -> u32 {
    let most = pool.eligible().map(|server| server.open_connections).max().unwrap_or(0);
    (fixed_point(1.0) / most.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PoolServer;

    fn pool(open: &[u32], load_balancers: u32) -> Pool {
        let server = |(position, open): (usize, &u32)| PoolServer {
            id: (position as u64 + 1).try_into().unwrap(),
            eligible: true,
            loads: None,
            rss: None,
            open_connections: *open,
        };
        Pool::new(open.iter().enumerate().map(server).collect(), load_balancers)
    }

    #[test]
    fn a_small_pool_is_known_whole() {
        let table = Least::new(1).place(&pool(&[40, 3, 20], 2), BucketCount::PUBLISHED, 1);
        for bucket in 0..128 {
            let servers: Vec<u16> = table.candidates_of(0, bucket).iter().map(|c| c.server.get()).collect();
            assert_eq!(servers, [2, 3, 1]);
        }
        // With two load balancers the 17 connections that server 3 is ahead are 9 of one's own.
        let distance = table.candidates_of(0, 0)[1].load - table.candidates_of(0, 0)[0].load;
        assert_eq!(distance.div_ceil(table.assignment_cost), 9);
    }

    #[test]
    fn a_large_pool_is_sampled_evenly_and_anew_with_every_table() {
        let mut policy = Least::new(3);
        let servers = pool(&[5; 400], 1);
        let tables = [1, 2].map(|generation| policy.place(&servers, BucketCount::new(2048).unwrap(), generation));
        assert_ne!(tables[0].candidates, tables[1].candidates);
        let mut stands = vec![0; 401];
        tables[0].candidates.iter().for_each(|candidate| stands[usize::from(candidate.server.get())] += 1);
        // 41 expected, a standard deviation of 6.4.
        assert!(stands[1..].iter().all(|count| (15..=75).contains(count)), "{stands:?}");
        for bucket in 0..2048 {
            let mut of_bucket: Vec<u16> = tables[0].candidates_of(0, bucket).iter().map(|c| c.server.get()).collect();
            of_bucket.dedup();
            assert_eq!(of_bucket.len(), 8);
        }
        let all = Least::of_all(3).place(&servers, BucketCount::new(1).unwrap(), 1);
        assert_eq!(all.candidates_of(0, 0).len(), 400);
    }
}
