//! Groups of servers with equal RSS key, which share buckets because they see the same hash for a connection.

use std::collections::HashMap;

use super::bucket_loads::{BucketLoads, reachable_core, reachable_core_or_mean_load};
use super::normalized_load::NormalizedLoad;
use super::policy_cache::{CachedRssGroup, PolicyCache};
use super::rack_aggregate::RackSummaryAggregate;
use super::{BucketCandidateList, PoolServer, ServerLoads, ServerPool};
use crate::load::load_to_fixed_point;
use crate::placement::{BucketCount, CandidateCore, PlacementTable, ServerCore};
use crate::rss::RssKey;

/// Servers with the same RSS key, which share hash buckets.
#[derive(Debug, Clone, PartialEq)]
pub struct RssGroup<'a> {
    /// RSS key of the group's servers.
    pub key: RssKey,
    /// Servers that have the RSS key, so that the core that each connection reaches is known.
    pub servers: Vec<&'a PoolServer>,
    /// Servers that only share the group's table, because their RSS is unknown or their own group was dropped. In every
    /// bucket, their load is the mean load of their cores.
    pub servers_without_core_loads: Vec<&'a PoolServer>,
}

impl<'a> RssGroup<'a> {
    fn all_servers(&self) -> impl Iterator<Item = &'a PoolServer> {
        self.servers.iter().chain(&self.servers_without_core_loads).copied()
    }

    fn has_group_key(&self, server: &PoolServer) -> bool {
        server.rss.as_ref().is_some_and(|rss| rss.key == self.key)
    }
}

/// Returns the eligible servers by RSS key, in at most `MAX_RSS_GROUPS` groups. The largest group is first, and groups
/// of equal size are in the order of their lowest ids. All other servers are in the first group's
/// `servers_without_core_loads`. `fallback_key` is the key of a pool without known RSS.
pub fn rss_groups<'a>(pool: &'a ServerPool, fallback_key: &RssKey) -> Vec<RssGroup<'a>> {
    let mut groups: Vec<RssGroup<'a>> = Vec::new();
    let mut servers_without_group = Vec::new();
    for server in pool.eligible_servers() {
        let Some(rss) = &server.rss else {
            servers_without_group.push(server);
            continue;
        };
        match groups.iter_mut().find(|group| group.key == rss.key) {
            Some(group) => group.servers.push(server),
            None => groups.push(RssGroup {
                key: rss.key.clone(),
                servers: vec![server],
                servers_without_core_loads: Vec::new(),
            }),
        }
    }
    // The sort is stable, so groups of one size stay in the order of their first id.
    groups.sort_by_key(|group| std::cmp::Reverse(group.servers.len()));
    let kept_group_count = groups.len().min(coreward_intf::MAX_RSS_GROUPS as usize);
    servers_without_group.extend(groups.drain(kept_group_count..).flat_map(|group| group.servers));
    if groups.is_empty() {
        groups.push(RssGroup {
            key: fallback_key.clone(),
            servers: Vec::new(),
            servers_without_core_loads: Vec::new(),
        });
    }
    servers_without_group.sort_by_key(|server| server.id);
    groups[0].servers_without_core_loads = servers_without_group;
    groups
}

/// Returns the number of different RSS keys among the eligible servers.
pub fn rss_key_count(pool: &ServerPool) -> usize {
    let mut keys: Vec<&RssKey> = Vec::new();
    for rss in pool.eligible_servers().filter_map(|server| server.rss.as_ref()) {
        if !keys.contains(&&rss.key) {
            keys.push(&rss.key);
        }
    }
    keys.len()
}

/// Core slots of a table under construction, in the order of their first use.
struct CoreSlots<'a> {
    core_by_slot: &'a mut Vec<ServerCore>,
    slot_by_core: HashMap<ServerCore, u16, foldhash::fast::FixedState>,
}

impl CoreSlots<'_> {
    /// Returns the slot of a core. Beyond the data plane's limit, cores share the last slot. Their counts of
    /// connections then add up, so that they only seem busier.
    fn assign_slot(&mut self, core: ServerCore) -> u16 {
        let slots = &mut *self.core_by_slot;
        *self.slot_by_core.entry(core).or_insert_with(|| {
            if slots.len() < coreward_intf::MAX_CORE_SLOTS as usize {
                slots.push(core);
            }
            (slots.len() - 1) as u16
        })
    }
}

/// List of the least cores among all inserted ones, ordered by a ranking value, then by load, then by id. CrossRSS
/// selects the strictly smallest load, and the lowest id in ties.
pub struct LeastLoadedCoreList {
    max_core_count: usize,
    values_loads_and_cores: Vec<(f64, f64, ServerCore)>,
}

impl LeastLoadedCoreList {
    /// Returns an empty list for at most `max_core_count` cores, at least 1.
    pub fn new(max_core_count: usize) -> Self {
        Self { max_core_count, values_loads_and_cores: Vec::with_capacity(max_core_count + 1) }
    }

    /// Inserts a core if it belongs in the list, and returns whether it does. Of a thousand cores, only few do.
    pub fn insert_core_if_least(&mut self, ranking_value: f64, load: f64, core: ServerCore) -> bool {
        let is_before_offered_core = |(other_value, other_load, other_core): &(f64, f64, ServerCore)| {
            other_value.total_cmp(&ranking_value).then(other_load.total_cmp(&load)).then(other_core.cmp(&core)).is_lt()
        };
        if self.values_loads_and_cores.len() == self.max_core_count
            && self.values_loads_and_cores.last().is_some_and(is_before_offered_core)
        {
            return false;
        }
        let insert_index = self.values_loads_and_cores.partition_point(is_before_offered_core);
        self.values_loads_and_cores.insert(insert_index, (ranking_value, load, core));
        self.values_loads_and_cores.truncate(self.max_core_count);
        true
    }

    /// Returns the maximum ranking value with which the list still accepts a core.
    pub fn max_accepted_ranking_value(&self) -> f64 {
        let is_full = self.values_loads_and_cores.len() == self.max_core_count;
        self.values_loads_and_cores
            .last()
            .filter(|_| is_full)
            .map_or(f64::INFINITY, |(ranking_value, ..)| *ranking_value)
    }

    /// Returns the least cores in ascending order, each with its load and its ranking value.
    pub fn cores_loads_and_ranking_values(&self) -> impl Iterator<Item = (ServerCore, f64, f64)> {
        self.values_loads_and_cores.iter().map(|(ranking_value, load, core)| (*core, *load, *ranking_value))
    }
}

/// Compared value of cores that take no part in a bucket, so that they come after the cores of all groups. They are
/// used only if their group has no other core. Otherwise a server with its own RSS key would take part in all buckets.
const EXCLUDED_CORE_COMPARED_VALUE: f64 = f64::MAX;

/// Fills a table with the `candidates_per_bucket` least loaded cores of every bucket of every group.
pub fn fill_table_candidates(
    table: &mut PlacementTable,
    groups: &[RssGroup<'_>],
    bucket_count: BucketCount,
    pool: &ServerPool,
    candidates_per_bucket: usize,
    cache: &mut PolicyCache,
) {
    let reachable_cores = ReachableCores::new(pool, bucket_count);
    let has_no_loads = !pool.has_loads();
    let mut core_slots = CoreSlots { core_by_slot: &mut table.core_slots, slot_by_core: HashMap::default() };
    table.rss_key_by_group = groups.iter().map(|group| group.key.clone()).collect();
    table.candidates_per_bucket = candidates_per_bucket as u32;
    table.candidates.reserve(groups.len() * bucket_count.get() as usize * candidates_per_bucket);
    cache.groups.resize_with(groups.len(), CachedRssGroup::default);
    for (group, cached_group) in groups.iter().zip(&mut cache.groups) {
        let local_servers =
            LocalServers::new(&reachable_cores, group, &mut cached_group.bucket_loads, candidates_per_bucket);
        let rack_cores =
            RackCandidateCores::new(&reachable_cores, group, &mut cached_group.rack_aggregate, candidates_per_bucket);
        for bucket in 0..bucket_count.get() {
            let bucket_cores = if has_no_loads {
                reachable_cores.rotated_cores_of_bucket(group, bucket)
            } else {
                reachable_cores.find_least_loaded_cores(&local_servers, &rack_cores, bucket, candidates_per_bucket)
            };
            for position in 0..candidates_per_bucket {
                let (core, ranking_value) = bucket_cores[position.min(bucket_cores.len() - 1)];
                let core_slot = core_slots.assign_slot(core);
                table.candidates.push(CandidateCore {
                    server: core.server,
                    fixed_point_load: load_to_fixed_point(ranking_value),
                    core_slot,
                });
            }
        }
    }
}

/// Servers of a group whose loads are not in a rack's summary.
struct LocalServers<'a, 'g> {
    group: &'g RssGroup<'a>,
    servers: Vec<&'a PoolServer>,
    /// Whether some of the servers are in slow start, and so take part in some buckets only.
    has_slow_start: bool,
    /// Target load and relative speed of each server ([`NormalizedLoad::target_load_and_relative_speed`]), or an empty
    /// list if all servers are alike.
    target_loads_and_speeds: Vec<(f64, f64)>,
    bucket_loads: &'g BucketLoads,
}

impl<'a, 'g> LocalServers<'a, 'g> {
    fn new(
        cores: &ReachableCores<'_>,
        group: &'g RssGroup<'a>,
        bucket_loads: &'g mut BucketLoads,
        needed_core_count: usize,
    ) -> Self {
        let servers: Vec<&PoolServer> = group
            .all_servers()
            .filter(|server| !has_loads_in_rack_summary(server) || !group.has_group_key(server))
            .collect();
        let has_slow_start = servers.iter().any(|server| server.slow_start_fraction < 1.0);
        // The cores that a bucket keeps are in the order of loads alone.
        let kept_least_core_count =
            if cores.normalized_load.has_uniform_servers() && !has_slow_start { needed_core_count } else { 0 };
        bucket_loads.update_loads(&servers, &group.key, cores.bucket_count, cores.neutral_load, kept_least_core_count);
        let target_load_and_speed =
            |server: &&PoolServer| cores.normalized_load.target_load_and_relative_speed(server.server_class());
        let target_loads_and_speeds = if cores.normalized_load.has_uniform_servers() {
            Vec::new()
        } else {
            servers.iter().map(target_load_and_speed).collect()
        };
        Self { group, servers, has_slow_start, target_loads_and_speeds, bucket_loads }
    }
}

/// Cores of a group whose loads come from racks' summaries.
struct RackCandidateCores<'a, 'g> {
    candidate_lists: Vec<&'a BucketCandidateList>,
    /// Least loaded cores of all racks, or `None` if cores are compared by another value than their load.
    rack_aggregate: Option<&'g RackSummaryAggregate>,
}

impl<'a, 'g> RackCandidateCores<'a, 'g> {
    fn new(
        cores: &ReachableCores<'a>,
        group: &RssGroup<'_>,
        rack_aggregate: &'g mut RackSummaryAggregate,
        needed_core_count: usize,
    ) -> Self {
        let candidate_lists: Vec<&BucketCandidateList> = cores.pool.candidate_lists_with_key(&group.key).collect();
        let is_compared_by_load = cores.normalized_load.has_uniform_servers() && !candidate_lists.is_empty();
        if is_compared_by_load {
            rack_aggregate.update_summaries(
                &cores.pool.rack_summaries,
                &group.key,
                cores.bucket_count,
                needed_core_count,
            );
        }
        Self { candidate_lists, rack_aggregate: is_compared_by_load.then_some(rack_aggregate) }
    }
}

/// Cores that the connections of each bucket reach, with their loads.
struct ReachableCores<'a> {
    pool: &'a ServerPool,
    bucket_count: BucketCount,
    neutral_load: f64,
    normalized_load: NormalizedLoad,
    /// Eligible servers whose cores are in racks' summaries, by id.
    server_in_rack_by_id: Vec<Option<&'a PoolServer>>,
}

impl<'a> ReachableCores<'a> {
    fn new(pool: &'a ServerPool, bucket_count: BucketCount) -> Self {
        let mut server_in_rack_by_id = Vec::new();
        let mut servers_in_racks =
            pool.eligible_servers().filter(|server| has_loads_in_rack_summary(server)).peekable();
        if servers_in_racks.peek().is_some() {
            let highest_id = pool.servers.last().map_or(0, |server| usize::from(server.id.get()));
            server_in_rack_by_id.resize(highest_id + 1, None);
        }
        for server in servers_in_racks {
            server_in_rack_by_id[usize::from(server.id.get())] = Some(server);
        }
        Self {
            pool,
            bucket_count,
            neutral_load: pool.neutral_load(),
            normalized_load: NormalizedLoad::for_pool(pool),
            server_in_rack_by_id,
        }
    }

    /// Returns the least loaded cores that take part in the bucket, each with its ranking value.
    fn find_least_loaded_cores(
        &self,
        local_servers: &LocalServers<'_, '_>,
        rack_cores: &RackCandidateCores<'_, '_>,
        bucket: u32,
        max_core_count: usize,
    ) -> Vec<(ServerCore, f64)> {
        let mut least_cores = LeastLoadedCoreList::new(max_core_count);
        self.insert_local_cores(local_servers, bucket, &mut least_cores);
        self.insert_rack_cores(rack_cores, bucket, &mut least_cores);
        if least_cores.values_loads_and_cores.is_empty() {
            for server in local_servers.group.all_servers() {
                let (core, load) = self.reachable_core_and_load(local_servers.group, server, bucket);
                least_cores.insert_core_if_least(
                    EXCLUDED_CORE_COMPARED_VALUE,
                    load,
                    ServerCore { server: server.id, core },
                );
            }
        }
        least_cores.cores_loads_and_ranking_values().map(|(core, _, ranking_value)| (core, ranking_value)).collect()
    }

    fn insert_rack_cores(
        &self,
        rack_cores: &RackCandidateCores<'_, '_>,
        bucket: u32,
        least_cores: &mut LeastLoadedCoreList,
    ) {
        // The rack may not know yet that a server takes no new connections, or only some.
        let participating_server = |core: &ServerCore| {
            let server = self.server_in_rack_by_id.get(usize::from(core.server.get())).copied().flatten();
            server.filter(|server| self.pool.server_takes_part_in_bucket(server, bucket))
        };
        if let Some(rack_aggregate) = rack_cores.rack_aggregate {
            let ranked_cores = rack_aggregate.least_loaded_cores(bucket);
            let mut participating_cores =
                ranked_cores.iter().filter(|ranked_core| participating_server(&ranked_core.core).is_some());
            if participating_cores.clone().count() >= least_cores.max_core_count
                || rack_aggregate.is_complete_core_list(ranked_cores)
            {
                participating_cores.all(|ranked_core| {
                    least_cores.insert_core_if_least(ranked_core.load, ranked_core.load, ranked_core.core)
                });
                return;
            }
        }
        for list in &rack_cores.candidate_lists {
            for (core, load) in list.candidates_of_bucket(bucket) {
                let Some(server) = participating_server(core) else { continue };
                if !least_cores.insert_core_if_least(
                    self.normalized_load.core_ranking_value(server.server_class(), *load),
                    *load,
                    *core,
                ) {
                    break;
                }
            }
        }
    }

    fn insert_local_cores(
        &self,
        local_servers: &LocalServers<'_, '_>,
        bucket: u32,
        least_cores: &mut LeastLoadedCoreList,
    ) {
        if let Some(ranked_cores) = local_servers.bucket_loads.least_loaded_cores(bucket) {
            ranked_cores.iter().all(|ranked_core| {
                least_cores.insert_core_if_least(ranked_core.load, ranked_core.load, ranked_core.core)
            });
            return;
        }
        let computed_loads: Vec<f64>;
        let loads = match local_servers.bucket_loads.loads_by_server(bucket) {
            Some(loads) => loads,
            None => {
                computed_loads = local_servers
                    .servers
                    .iter()
                    .map(|server| self.reachable_core_and_load(local_servers.group, server, bucket).1)
                    .collect();
                &computed_loads
            }
        };
        let mut largest_accepted_value = least_cores.max_accepted_ranking_value();
        for (position, load) in loads.iter().enumerate() {
            let target_load_and_speed = local_servers.target_loads_and_speeds.get(position);
            let ranking_value = target_load_and_speed
                .map_or(*load, |level| self.normalized_load.ranking_value_for_target_load(*level, *load));
            if ranking_value > largest_accepted_value
                || local_servers.has_slow_start
                    && !self.pool.server_takes_part_in_bucket(local_servers.servers[position], bucket)
            {
                continue;
            }
            least_cores.insert_core_if_least(
                ranking_value,
                *load,
                reachable_core(local_servers.servers[position], &local_servers.group.key, bucket),
            );
            largest_accepted_value = least_cores.max_accepted_ranking_value();
        }
    }

    /// Returns the bucket's cores, which have equal loads, rotated so that each server comes first in equally many
    /// buckets.
    fn rotated_cores_of_bucket(&self, group: &RssGroup<'_>, bucket: u32) -> Vec<(ServerCore, f64)> {
        let core_and_load_at = |server: &PoolServer| {
            let (core, load) = self.reachable_core_and_load(group, server, bucket);
            (
                ServerCore { server: server.id, core },
                self.normalized_load.core_ranking_value(server.server_class(), load),
            )
        };
        let mut bucket_cores: Vec<(ServerCore, f64)> =
            self.servers_in_bucket(group, bucket).map(core_and_load_at).collect();
        if bucket_cores.is_empty() {
            bucket_cores =
                group.all_servers().map(|server| (core_and_load_at(server).0, EXCLUDED_CORE_COMPARED_VALUE)).collect();
        }
        bucket_cores.sort_by_key(|(core, _)| *core);
        let first_index = bucket as usize % bucket_cores.len();
        bucket_cores.rotate_left(first_index);
        bucket_cores
    }

    fn servers_in_bucket<'g>(&self, group: &'g RssGroup<'_>, bucket: u32) -> impl Iterator<Item = &'g PoolServer> {
        group.all_servers().filter(move |server| self.pool.server_takes_part_in_bucket(server, bucket))
    }

    fn reachable_core_and_load(&self, group: &RssGroup<'_>, server: &PoolServer, bucket: u32) -> (u16, f64) {
        let rss = server.rss.as_ref().filter(|rss| rss.key == group.key);
        reachable_core_or_mean_load(server, rss, bucket, self.bucket_count, self.neutral_load)
    }
}

fn has_loads_in_rack_summary(server: &PoolServer) -> bool {
    matches!(server.loads, Some(ServerLoads::Aggregated { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ServerId;
    use crate::placement::{PlacementRule, PlacementTableState};
    use crate::policy::crossrss::core_aware_table;
    use crate::rss::{IndirectionTable, RssConfig};

    const SERVER_COUNT: u64 = 4;

    /// Returns a pool whose last server is idle, has an RSS key of its own, and takes part in some buckets only.
    fn pool_with_two_rss_groups(has_loads: bool, slow_start_fraction: f64) -> ServerPool {
        let servers = (0..SERVER_COUNT).map(|number| {
            let is_last = number == SERVER_COUNT - 1;
            let key = RssKey::new(&[if is_last { 0xaa } else { 0x6d }; 40]).unwrap();
            let indirection_table = IndirectionTable::new(&[0, 1]).unwrap();
            PoolServer {
                loads: has_loads.then(|| vec![if is_last { 0.0 } else { 0.5 }; 2].into()),
                rss: Some(RssConfig { key, indirection_table }),
                slow_start_fraction: if is_last { slow_start_fraction } else { 1.0 },
                ..PoolServer::new(ServerId::try_from(number).unwrap())
            }
        });
        ServerPool::new(servers.collect(), 1)
    }

    /// Returns the last server's fraction of all connections.
    fn last_server_connection_fraction(pool: &ServerPool, rule: PlacementRule, candidates_per_bucket: usize) -> f64 {
        const CONNECTION_COUNT: u32 = 20_000;
        let (key, mut cache) = (RssKey::new(&[1; 40]).unwrap(), PolicyCache::default());
        let bucket_count = BucketCount::new(1024).unwrap();
        let table = core_aware_table(pool, bucket_count, 1, &key, rule, |_, _| candidates_per_bucket, &mut cache);
        assert_eq!(table.rss_key_by_group.len(), 2);
        let mut state = PlacementTableState::for_table(&table);
        let last_server = ServerId::try_from(SERVER_COUNT - 1).unwrap();
        let connections_of_last_server = (0..CONNECTION_COUNT).filter(|number| {
            let hash_for_group = |group: usize| number.wrapping_mul(0x9e37_79b1).rotate_left(11 * group as u32);
            table.select_server_by_hash(&mut state, hash_for_group) == Some(last_server)
        });
        connections_of_last_server.count() as f64 / f64::from(CONNECTION_COUNT)
    }

    #[test]
    fn slow_start_server_with_own_rss_key_gets_its_share() {
        for (rule, per_bucket) in [(PlacementRule::Table, 1), (PlacementRule::LeastAssigned, 3)] {
            assert!(
                last_server_connection_fraction(&pool_with_two_rss_groups(true, 1.0), rule, per_bucket) > 0.99,
                "{rule:?}"
            );
            for ramp in [0.0, 0.25, 0.5] {
                let connection_fraction =
                    last_server_connection_fraction(&pool_with_two_rss_groups(true, ramp), rule, per_bucket);
                assert!((connection_fraction - ramp).abs() < 0.05, "{rule:?}: {connection_fraction} of {ramp}");
            }
        }
        let fraction =
            last_server_connection_fraction(&pool_with_two_rss_groups(false, 0.25), PlacementRule::LeastAssigned, 3);
        assert!(fraction < 0.25, "without loads: {fraction}");
    }
}
