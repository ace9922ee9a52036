//! Load balancers that hash connections and use cookies of a few bits (Cheetah, NSDI'20, Appendix B). The methods are
//! `history-tag` and `hash-index`.
//!
//! **History tag.** The load balancer stores the last n configurations of the pool. The cookie (log2(n) bits) names the
//! configuration by which the connection is hashed. After n changes, a tag is reused for another configuration. A
//! connection may be given a newer tag if the later configuration maps it to the same server.
//!
//! **Hash index.** Several hash functions each select a server for a new connection. The connection goes to the least
//! loaded of these servers, and the cookie names the function. It is applied to the current pool or, if the cookie also
//! has a tag, to the tag's configuration.

use std::collections::VecDeque;

use coreward_model::ServerId;
use coreward_model::placement::mix_hash;

use super::balancer::{LoadBalancerSet, PlacedConnection};
use super::buckets::hash_to_bucket;
use super::cluster::{Cluster, server_id};
use super::connections::OpenConnection;
use super::method::HashBucketLayout;
use super::simulated_nanoseconds::Nanoseconds;
use super::{LoadInfo, PccSimulationConfig};

/// Sizes of the fields in a small cookie, and whether its tag is renewed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SmallCookieFields {
    /// Number of bits in the tag, which distinguishes 2^bits pool configurations. With 0, only the current one is used.
    pub tag_bits: u8,
    /// Whether an open connection receives a newer tag when that tag also leads to its server.
    pub renews_tags: bool,
    /// Number of bits in the index, which selects one of 2^bits hash functions.
    pub index_bits: u8,
}

/// Assignment of buckets to the pool's servers, which applies between two pool changes.
#[derive(Debug)]
struct PoolConfiguration {
    /// Time from which the configuration applies.
    applies_from: Nanoseconds,
    /// Server of each bucket. If the vector is shorter than the table, it repeats, because the layout `hash` is
    /// periodic.
    server_by_bucket: Vec<u16>,
}

/// Load balancers with one table of buckets per pool configuration. A connection's stored state is the number of its
/// first configuration, with its hash index in the upper 32 bits.
#[derive(Debug)]
pub struct SmallCookieBalancers {
    cookie_fields: SmallCookieFields,
    layout: HashBucketLayout,
    bucket_count: usize,
    /// Configurations that open connections may still use. The current one is last.
    configurations: VecDeque<PoolConfiguration>,
    /// Number of the oldest configuration in `configurations`, where configurations are counted from 0.
    oldest_configuration_number: u32,
    longest_connection_duration: Nanoseconds,
    /// Number of connections of each server in its last report, or `None` if policies use current counts.
    reported_connection_counts: Option<Vec<u32>>,
}

impl SmallCookieBalancers {
    /// Creates the load balancers of a cluster, in which no connection lasts longer than `longest_connection_duration`.
    pub fn new(
        cookie_fields: SmallCookieFields,
        layout: HashBucketLayout,
        config: &PccSimulationConfig,
        servers: usize,
        longest_connection_duration: Nanoseconds,
    ) -> Self {
        Self {
            cookie_fields,
            layout,
            bucket_count: layout.table_size(config.server_count, config.buckets_per_server),
            configurations: VecDeque::new(),
            oldest_configuration_number: 0,
            longest_connection_duration,
            reported_connection_counts: (config.load_info == LoadInfo::Reported).then(|| vec![0; servers]),
        }
    }

    /// Returns the number of different tags, after which the tags of successive configurations repeat.
    pub fn tag_count(&self) -> u32 {
        1 << self.cookie_fields.tag_bits
    }

    /// Returns whether a connection receives the current tag once this tag also leads to its server.
    #[cfg(test)]
    pub fn renews_tags(&self) -> bool {
        self.cookie_fields.renews_tags
    }

    pub fn current_configuration_number(&self) -> u32 {
        self.oldest_configuration_number + self.configurations.len() as u32 - 1
    }

    /// Returns the server that hash function `index` selects for a connection in configuration `configuration_number`.
    pub fn select_server(&self, configuration_number: u32, identity: u64, index: u32) -> u16 {
        let hash = if index == 0 { identity } else { mix_hash(identity as u32 ^ index.wrapping_mul(0x9e37_79b9)) };
        let servers = &self.stored_configuration(configuration_number).server_by_bucket;
        servers[hash_to_bucket(hash, self.bucket_count) % servers.len()]
    }

    fn stored_configuration(&self, configuration_number: u32) -> &PoolConfiguration {
        &self.configurations[(configuration_number - self.oldest_configuration_number) as usize]
    }

    fn reported_or_current_connection_count(&self, server: u16, cluster: &Cluster) -> u32 {
        self.reported_connection_counts.as_ref().map_or_else(
            || cluster.open_connection_count(server),
            |reported_connections| reported_connections[usize::from(server)],
        )
    }

    /// Returns the connection's tag in configuration `number`, or `None` if the tag no longer leads to the connection's
    /// server. `previous_tag` is the tag in the previous configuration.
    fn find_tag_for_configuration(&self, connection: &OpenConnection, previous_tag: u32, number: u32) -> Option<u32> {
        let index = (connection.stored_state >> 32) as u32;
        let has_same_server = self.select_server(number, connection.identity, index) == connection.server;
        let is_tag_reused = (number - previous_tag).is_multiple_of(self.tag_count());
        match (has_same_server, is_tag_reused) {
            (true, _) if self.cookie_fields.renews_tags || is_tag_reused => Some(number),
            (false, true) => None,
            _ => Some(previous_tag),
        }
    }
}

impl LoadBalancerSet for SmallCookieBalancers {
    fn place_connection(&mut self, identity: u64, cluster: &Cluster) -> PlacedConnection {
        let current_configuration_number = self.current_configuration_number();
        let candidates = (0..1u32 << self.cookie_fields.index_bits)
            .map(|index| (index, self.select_server(current_configuration_number, identity, index)));
        let least_loaded_candidate =
            candidates.min_by_key(|(_, server)| self.reported_or_current_connection_count(*server, cluster));
        let (index, server) = least_loaded_candidate.expect("there is at least one hash function");
        PlacedConnection {
            server,
            core: 0,
            stored_state: u64::from(index) << 32 | u64::from(current_configuration_number),
        }
    }

    fn on_servers_changed(&mut self, cluster: &Cluster) {
        let ids: Vec<ServerId> = cluster.pool_members().iter().copied().map(server_id).collect();
        let table_size = if self.layout == HashBucketLayout::Striped { ids.len() } else { self.bucket_count };
        let server_indices = self.layout.server_index_by_bucket(&ids, table_size);
        let servers = server_indices.into_iter().map(|position| cluster.pool_members()[position]).collect();
        self.configurations.push_back(PoolConfiguration { applies_from: cluster.now, server_by_bucket: servers });
        // A configuration is stored until the last connection that began in it must have ended.
        while self.configurations.get(1).is_some_and(|next_configuration| {
            next_configuration.applies_from + self.longest_connection_duration < cluster.now
        }) {
            self.configurations.pop_front();
            self.oldest_configuration_number += 1;
        }
    }

    fn uses_reports(&self) -> bool {
        self.cookie_fields.index_bits > 0 && self.reported_connection_counts.is_some()
    }

    fn process_reports(&mut self, cluster: &Cluster) {
        if let Some(reported_connections) = &mut self.reported_connection_counts {
            reported_connections
                .iter_mut()
                .enumerate()
                .for_each(|(server, count)| *count = cluster.open_connection_count(server as u16));
        }
    }

    fn first_break_time(&self, connection: &OpenConnection, _cluster: &Cluster) -> Option<Nanoseconds> {
        let mut last_tag = connection.stored_state as u32;
        for number in last_tag + 1..=self.current_configuration_number() {
            match self.find_tag_for_configuration(connection, last_tag, number) {
                Some(tag) => last_tag = tag,
                None => return Some(self.stored_configuration(number).applies_from),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pcc::{ConnectionArrivalProcess, PlannedClusterChanges, run};

    fn simulate_methods(methods: &[&str], updates_per_minute: f64) -> Vec<crate::pcc::BalancingMethodOutcome> {
        let config = PccSimulationConfig {
            server_count: 40,
            arrivals: ConnectionArrivalProcess::OpenLoop { mean_open_connections: 2_000.0 },
            updates: PlannedClusterChanges::PerMinute { servers: updates_per_minute, load_balancers: 0.0 },
            methods: methods.iter().map(|name| name.parse().unwrap()).collect(),
            seed_count: 1,
            ..PccSimulationConfig::default()
        };
        run(&config).unwrap().methods
    }

    #[test]
    fn cookie_without_bits_has_same_results_as_hashing() {
        for (cookie_method, layout) in [("history-tag:0", "hash"), ("hash-index:0:maglev", "maglev")] {
            let [cookie_outcome, hashing_outcome] = &simulate_methods(&[cookie_method, layout], 40.0)[..] else {
                panic!("two methods")
            };
            assert_eq!(cookie_outcome.runs, hashing_outcome.runs);
            assert!(hashing_outcome.broken_pct.median > 1.0);
        }
    }

    #[test]
    fn additional_tag_bits_reduce_broken_connections_to_zero() {
        // At 20 changes per minute, 150 s have 50 changes, or 86 with 5 standard deviations. Tags of 7 bits outlast
        // every connection.
        let methods = ["history-tag:0", "history-tag:2", "history-tag:4", "history-tag:7", "history-tag-kept:7"];
        let method_outcomes = simulate_methods(&methods, 20.0);
        let [none, two, four, seven, kept] = [0, 1, 2, 3, 4].map(|method| method_outcomes[method].broken_pct.median);
        assert!(none > 1.3 * two && two > 1.3 * four && four > 0.0, "{none} {two} {four}");
        assert_eq!((seven, kept), (0.0, 0.0));
    }

    #[test]
    fn one_index_bit_balances_like_power_of_two_choices() {
        let method_outcomes = simulate_methods(&["hash", "hash-index:1", "cheetah:pow2"], 0.0);
        let [hash, index, pow2] = [0, 1, 2].map(|method| method_outcomes[method].imbalance.median - 1.0);
        assert!((index / pow2 - 1.0).abs() < 0.3 && index < hash / 3.0, "{hash} {index} {pow2}");
        let [index, tagged] = &simulate_methods(&["hash-index:1", "hash-index:1+7"], 20.0)[..] else {
            panic!("two methods")
        };
        assert!(index.broken_pct.median > 1.0);
        assert_eq!(tagged.broken_pct.median, 0.0);
    }
}
