//! State that a core-aware policy keeps between tables, so that a table costs only the changes: a table is made every
//! few reports, and each report is of one server.
//!
//! The state follows from the pool: an empty cache gives the same table, only later (the test below).

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::Pool;
use super::bucket_loads::BucketLoads;
use super::loads::{LoadHistogram, ServerClass, ServerLoads};
use super::rack_aggregate::{RackAggregate, RelayedHistograms};
use crate::ServerId;
use crate::load::CoreLoads;
use crate::placement::{BucketCount, weighted_rendezvous};

/// Cache of one core-aware policy, kept from table to table.
#[derive(Debug, Default)]
pub struct PolicyCache {
    pub(super) groups: Vec<CachedGroup>,
    spreads: LoadHistograms,
    relayed: RelayedHistograms,
    consistent: ConsistentChoice,
}

/// Cache of one group of servers with the same RSS key.
#[derive(Debug, Default)]
pub struct CachedGroup {
    /// Loads of the group's servers that report directly to this controller.
    pub bucket_loads: BucketLoads,
    pub rack_aggregate: RackAggregate,
}

impl PolicyCache {
    pub(super) fn spreads(&mut self, pool: &Pool) -> Cow<'_, BTreeMap<ServerClass, LoadHistogram>> {
        self.spreads.update(pool);
        let relayed = self.relayed.update(&pool.racks);
        if relayed.is_empty() {
            return Cow::Borrowed(&self.spreads.by_class);
        }
        if self.spreads.counted.is_empty() {
            return Cow::Borrowed(relayed);
        }
        let mut all = relayed.clone();
        for (class, spread) in &self.spreads.by_class {
            all.entry(*class).or_default().add_all(spread.bins());
        }
        Cow::Owned(all)
    }

    /// Returns the server of each bucket for connections without a cookie, by eligible servers and their weights alone.
    pub(super) fn consistent_servers(&mut self, pool: &Pool, buckets: BucketCount) -> Vec<ServerId> {
        let weights = || pool.eligible().map(|server| (server.id, server.weight.get()));
        let is_same =
            |(known, of): &(Vec<(ServerId, u32)>, BucketCount)| *of == buckets && known.iter().copied().eq(weights());
        if !self.consistent.source.as_ref().is_some_and(is_same) {
            let weights: Vec<(ServerId, u32)> = weights().collect();
            self.consistent.choice = weighted_rendezvous(&weights, buckets);
            self.consistent.source = Some((weights, buckets));
        }
        self.consistent.choice.clone()
    }
}

#[derive(Debug, Default)]
struct ConsistentChoice {
    source: Option<(Vec<(ServerId, u32)>, BucketCount)>,
    choice: Vec<ServerId>,
}

/// Load histograms of the eligible servers that report directly to this controller. They have whole numbers, so that
/// cores can be subtracted again.
#[derive(Debug, Default)]
struct LoadHistograms {
    by_class: BTreeMap<ServerClass, LoadHistogram>,
    /// Servers included in the histograms, by id.
    counted: Vec<CountedServer>,
}

#[derive(Debug)]
struct CountedServer {
    server: ServerId,
    class: ServerClass,
    cores: CoreLoads,
}

impl LoadHistograms {
    fn update(&mut self, pool: &Pool) {
        let mut before = std::mem::take(&mut self.counted).into_iter().peekable();
        for server in pool.eligible() {
            let Some(cores) = server.loads.as_ref().and_then(ServerLoads::cores) else { continue };
            while let Some(gone) = before.next_if(|counted| counted.server < server.id) {
                self.remove(&gone);
            }
            let now = CountedServer { server: server.id, class: server.class(), cores: cores.clone() };
            match before.next_if(|counted| counted.server == server.id) {
                Some(same) if same.class == now.class && same.cores == now.cores => {}
                known => {
                    known.iter().for_each(|known| self.remove(known));
                    let spread = self.by_class.entry(now.class).or_default();
                    now.cores.iter().for_each(|load| spread.add(*load));
                }
            }
            self.counted.push(now);
        }
        before.for_each(|gone| self.remove(&gone));
    }

    fn remove(&mut self, counted: &CountedServer) {
        if let Some(spread) = self.by_class.get_mut(&counted.class) {
            counted.cores.iter().for_each(|load| spread.remove(*load));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::crossrss::CrossRss;
    use super::super::{Capacity, CrossRssPlus, Policy, PoolServer, Weight};
    use super::*;
    use crate::rss::{IndirectionTable, RssConfig, RssKey, seeded_rng};

    prop_compose! {
        /// Values are of few kinds, so that much stays the same from one table to the next.
        fn server()(
            eligible in prop::bool::weighted(0.9),
            loads in prop::option::weighted(
                0.9,
                prop::collection::vec((0u32..12).prop_map(|tenths| f64::from(tenths) / 10.0), 0..4),
            ),
            rss in prop::option::weighted(0.9, (0u64..3, 0u64..2)),
            weight in prop_oneof![5 => Just(1u64), 1 => Just(3)],
            slow_start_fraction in prop_oneof![5 => Just(1.0), 1 => Just(0.4)],
            capacity in prop::option::weighted(0.2, Just(6.0)),
            fresh: bool,
        ) -> PoolServer {
            let rss = rss.map(|(key, table)| RssConfig {
                key: RssKey::random(&mut seeded_rng(key, 99)),
                indirection_table: IndirectionTable::independent(table, 32, 3).unwrap(),
            });
            PoolServer {
                eligible,
                loads: loads.map(ServerLoads::from),
                rss,
                weight: Weight::new(weight).unwrap(),
                slow_start_fraction,
                capacity: capacity.map(|capacity| Capacity::new(capacity).unwrap()),
                has_new_load: fresh,
                ..PoolServer::new(ServerId::try_from(0).unwrap())
            }
        }
    }

    prop_compose! {
        /// Servers that changed since the previous table, or left it (`None`).
        fn change()(
            changed in prop::collection::vec((0usize..12, prop::option::weighted(0.9, server())), 0..4),
            bits in prop_oneof![9 => Just(5u32), 1 => 0u32..8],
            opened in 0u64..500,
        ) -> (Vec<(usize, Option<PoolServer>)>, BucketCount, u64) {
            (changed, BucketCount::new(1 << bits).unwrap(), opened)
        }
    }

    proptest! {
        #[test]
        fn cached_policy_state_equals_a_new_one(
            begin in prop::collection::vec(server(), 0..12),
            changes in prop::collection::vec(change(), 1..8),
        ) {
            let mut servers: Vec<Option<PoolServer>> = begin.into_iter().map(Some).collect();
            servers.resize(12, None);
            let (mut plus, mut plus_anew) = (CrossRssPlus::new(7), CrossRssPlus::new(7));
            let mut published = CrossRss::new(7);
            for (generation, (changed, buckets, opened)) in (1..).zip(changes) {
                changed.into_iter().for_each(|(position, server)| servers[position] = server);
                let with_id = |(position, server): (usize, &Option<PoolServer>)| {
                    Some(PoolServer { id: ServerId::try_from(position as u64 * 7).unwrap(), ..server.clone()? })
                };
                let pool = Pool::new(servers.iter().enumerate().filter_map(with_id).collect(), 2);
                let pool = pool.with_opened_connections(opened);
                plus_anew.cache = PolicyCache::default();
                let anew = plus_anew.compute_table(&pool, buckets, generation);
                prop_assert_eq!(plus.compute_table(&pool, buckets, generation), anew);
                let anew = CrossRss::new(7).compute_table(&pool, buckets, generation);
                prop_assert_eq!(published.compute_table(&pool, buckets, generation), anew);
            }
        }
    }
}
