//! State that a core-aware policy keeps between tables, so that a table costs only the changes. A table is made every
//! few reports, and each report is of one server.
//!
//! The state follows from the pool, so an empty cache gives the same table, only later (see the test below).

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::ServerPool;
use super::bucket_loads::BucketLoads;
use super::loads::{LoadHistogram, ServerLoadClass, ServerLoads};
use super::rack_aggregate::{RackLoadHistograms, RackSummaryAggregate};
use crate::ServerId;
use crate::load::CoreLoads;
use crate::placement::{BucketCount, weighted_rendezvous_table};

#[derive(Debug, Default)]
pub struct PolicyCache {
    pub(super) groups: Vec<CachedRssGroup>,
    local_histograms: LocalLoadHistograms,
    rack_histograms: RackLoadHistograms,
    cached_consistent_servers: CachedConsistentServers,
}

/// Cache of one group of servers with the same RSS key.
#[derive(Debug, Default)]
pub struct CachedRssGroup {
    /// Loads of the group's servers that report directly to this controller.
    pub bucket_loads: BucketLoads,
    pub rack_aggregate: RackSummaryAggregate,
}

impl PolicyCache {
    pub(super) fn core_load_histogram_by_class(
        &mut self,
        pool: &ServerPool,
    ) -> Cow<'_, BTreeMap<ServerLoadClass, LoadHistogram>> {
        self.local_histograms.update_histograms(pool);
        let rack_histograms = self.rack_histograms.update_histograms(&pool.rack_summaries);
        if rack_histograms.is_empty() {
            return Cow::Borrowed(&self.local_histograms.histogram_by_class);
        }
        if self.local_histograms.counted_servers.is_empty() {
            return Cow::Borrowed(rack_histograms);
        }
        let mut all_histograms = rack_histograms.clone();
        for (class, histogram) in &self.local_histograms.histogram_by_class {
            all_histograms.entry(*class).or_default().add_bins(histogram.bins());
        }
        Cow::Owned(all_histograms)
    }

    /// Returns the server to which each bucket sends connections without a cookie. The result depends only on the
    /// eligible servers and their weights.
    pub(super) fn consistent_server_by_bucket(
        &mut self,
        pool: &ServerPool,
        bucket_count: BucketCount,
    ) -> Vec<ServerId> {
        let server_weights = || pool.eligible_servers().map(|server| (server.id, server.weight.get()));
        let are_weights_unchanged = |(known_weights, known_buckets): &(Vec<(ServerId, u32)>, BucketCount)| {
            *known_buckets == bucket_count && known_weights.iter().copied().eq(server_weights())
        };
        if !self.cached_consistent_servers.weights_and_bucket_count.as_ref().is_some_and(are_weights_unchanged) {
            let weights: Vec<(ServerId, u32)> = server_weights().collect();
            self.cached_consistent_servers.server_by_bucket = weighted_rendezvous_table(&weights, bucket_count);
            self.cached_consistent_servers.weights_and_bucket_count = Some((weights, bucket_count));
        }
        self.cached_consistent_servers.server_by_bucket.clone()
    }
}

#[derive(Debug, Default)]
struct CachedConsistentServers {
    weights_and_bucket_count: Option<(Vec<(ServerId, u32)>, BucketCount)>,
    server_by_bucket: Vec<ServerId>,
}

/// Load histograms of the eligible servers that report directly to this controller. The histograms have whole numbers,
/// so that cores can be subtracted exactly.
#[derive(Debug, Default)]
struct LocalLoadHistograms {
    histogram_by_class: BTreeMap<ServerLoadClass, LoadHistogram>,
    /// Servers whose cores are included in the histograms, by id.
    counted_servers: Vec<CountedServer>,
}

#[derive(Debug)]
struct CountedServer {
    server: ServerId,
    class: ServerLoadClass,
    core_loads: CoreLoads,
}

impl LocalLoadHistograms {
    fn update_histograms(&mut self, pool: &ServerPool) {
        let mut previous_servers = std::mem::take(&mut self.counted_servers).into_iter().peekable();
        for server in pool.eligible_servers() {
            let Some(cores) = server.loads.as_ref().and_then(ServerLoads::core_loads) else { continue };
            while let Some(removed_server) =
                previous_servers.next_if(|counted_server| counted_server.server < server.id)
            {
                self.remove_server(&removed_server);
            }
            let current_server =
                CountedServer { server: server.id, class: server.server_class(), core_loads: cores.clone() };
            match previous_servers.next_if(|counted_server| counted_server.server == server.id) {
                Some(unchanged_server)
                    if unchanged_server.class == current_server.class
                        && unchanged_server.core_loads == current_server.core_loads => {}
                previous_server => {
                    previous_server.iter().for_each(|counted_server| self.remove_server(counted_server));
                    let histogram = self.histogram_by_class.entry(current_server.class).or_default();
                    current_server.core_loads.iter().for_each(|load| histogram.add_core(*load));
                }
            }
            self.counted_servers.push(current_server);
        }
        previous_servers.for_each(|removed_server| self.remove_server(&removed_server));
    }

    fn remove_server(&mut self, counted_server: &CountedServer) {
        if let Some(histogram) = self.histogram_by_class.get_mut(&counted_server.class) {
            counted_server.core_loads.iter().for_each(|load| histogram.remove_core(*load));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::crossrss::CrossRssPolicy;
    use super::super::{CrossRssPlusPolicy, PlacementPolicy, PoolServer, ServerCapacity, ServerWeight};
    use super::*;
    use crate::rss::{IndirectionTable, RssConfig, RssKey, seeded_rng};

    prop_compose! {
        /// Generates a server from few possible values, so that many values stay the same from one table to the next.
        fn any_pool_server()(
            is_eligible in prop::bool::weighted(0.9),
            loads in prop::option::weighted(
                0.9,
                prop::collection::vec((0u32..12).prop_map(|tenths| f64::from(tenths) / 10.0), 0..4),
            ),
            rss in prop::option::weighted(0.9, (0u64..3, 0u64..2)),
            weight in prop_oneof![5 => Just(1u64), 1 => Just(3)],
            slow_start_fraction in prop_oneof![5 => Just(1.0), 1 => Just(0.4)],
            capacity in prop::option::weighted(0.2, Just(6.0)),
            has_new_load: bool,
        ) -> PoolServer {
            let rss = rss.map(|(key, table)| RssConfig {
                key: RssKey::random(&mut seeded_rng(key, 99)),
                indirection_table: IndirectionTable::draw_independent_entries(table, 32, 3).unwrap(),
            });
            PoolServer {
                is_eligible,
                loads: loads.map(ServerLoads::from),
                rss,
                weight: ServerWeight::new(weight).unwrap(),
                slow_start_fraction,
                capacity: capacity.map(|capacity| ServerCapacity::new(capacity).unwrap()),
                has_new_load,
                ..PoolServer::new(ServerId::try_from(0).unwrap())
            }
        }
    }

    prop_compose! {
        /// Generates the servers that changed since the previous table, or left the pool (`None`).
        fn any_pool_change()(
            changed_servers in prop::collection::vec(
                (0usize..12, prop::option::weighted(0.9, any_pool_server())), 0..4,
            ),
            bits in prop_oneof![9 => Just(5u32), 1 => 0u32..8],
            opened_connections in 0u64..500,
        ) -> (Vec<(usize, Option<PoolServer>)>, BucketCount, u64) {
            (changed_servers, BucketCount::new(1 << bits).unwrap(), opened_connections)
        }
    }

    proptest! {
        #[test]
        fn tables_computed_with_and_without_cache_are_equal(
            initial_servers in prop::collection::vec(any_pool_server(), 0..12),
            changes in prop::collection::vec(any_pool_change(), 1..8),
        ) {
            let mut servers: Vec<Option<PoolServer>> = initial_servers.into_iter().map(Some).collect();
            servers.resize(12, None);
            let (mut plus_policy, mut uncached_policy) = (CrossRssPlusPolicy::new(7), CrossRssPlusPolicy::new(7));
            let mut crossrss_policy = CrossRssPolicy::new(7);
            for (generation, (changed_servers, buckets, opened_connections)) in (1..).zip(changes) {
                changed_servers.into_iter().for_each(|(position, server)| servers[position] = server);
                let server_with_id = |(position, server): (usize, &Option<PoolServer>)| {
                    Some(PoolServer { id: ServerId::try_from(position as u64 * 7).unwrap(), ..server.clone()? })
                };
                let pool = ServerPool::new(servers.iter().enumerate().filter_map(server_with_id).collect(), 2);
                let pool = pool.with_opened_connection_count(opened_connections);
                uncached_policy.cache = PolicyCache::default();
                let table_without_cache = uncached_policy.compute_table(&pool, buckets, generation);
                prop_assert_eq!(plus_policy.compute_table(&pool, buckets, generation), table_without_cache);
                let table_without_cache = CrossRssPolicy::new(7).compute_table(&pool, buckets, generation);
                prop_assert_eq!(crossrss_policy.compute_table(&pool, buckets, generation), table_without_cache);
            }
        }
    }
}
