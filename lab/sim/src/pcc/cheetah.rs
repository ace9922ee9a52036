//! Method `cheetah:POLICY`, in which a policy places a new connection and a cookie in every later packet names its
//! server (Cheetah, NSDI'20, Sect. 3.1). Policies, tables and cookies are those of the live load balancer.

use std::net::Ipv4Addr;

use coreward_model::FourTuple;
use coreward_model::cookie::{Cookie, CookieKey, CookieKeyIndex, FleetCookieKeys, decode_cookie, stamp_tsval};
use coreward_model::placement::{BucketCount, PlacementRule, PlacementTable, PlacementTableState};
use coreward_model::policy::{self, LeastPolicy, PlacementPolicy, PoolServer, ServerPool};
use coreward_model::rss::{IndirectionTable, RssConfig, RssKey, seeded_rng};

use super::balancer::{LoadBalancerSet, PlacedConnection};
use super::cluster::{Cluster, MAX_LOAD_BALANCERS, server_id};
use super::connections::OpenConnection;
use super::simulated_nanoseconds::Nanoseconds;
use super::{LoadInfo, PccSimulationConfig};

/// Random stream of [`seeded_rng`] for the fleet's RSS key.
const RNG_STREAM_RSS_KEY: u64 = 202;
const RNG_STREAM_COOKIE_KEYS: u64 = 203;

/// Number of entries in each server's indirection table.
const INDIRECTION_ENTRY_COUNT: usize = 128;

/// Mean of the core loads (0 to 1) given to policies. It is arbitrary, because policies only use ratios of loads.
const ASSUMED_MEAN_CORE_LOAD: f64 = 0.5;

/// Load balancers that place connections by a policy and put the server's id into a cookie, as in Cheetah.
pub struct CheetahBalancers {
    policy: Box<dyn PlacementPolicy>,
    load_info: LoadInfo,
    bucket_count: BucketCount,
    table: PlacementTable,
    /// Table state of each load balancer: its round-robin position and its counts of assigned connections.
    placement_states_by_balancer: Vec<PlacementTableState>,
    table_generation: u64,
    cookie_keys: FleetCookieKeys,
    time_key: CookieKey,
    rss_configs: Vec<RssConfig>,
    cores_per_server: u16,
    /// Number of open connections of each core, ordered by server and then by core.
    core_connection_counts: Vec<u32>,
    /// Position of each server among the table's core slots (`least`) or members (`pow2`), or `usize::MAX` if it has
    /// none.
    table_position_by_server: Vec<usize>,
}

impl CheetahBalancers {
    /// Creates the load balancers of a cluster. `name` must be one of [`policy::policy_names`].
    pub fn new(name: &str, config: &PccSimulationConfig, servers: usize, seed: u64) -> Self {
        let uses_current_counts = config.load_info == LoadInfo::Current && name == LEAST_POLICY_NAME;
        let policy: Box<dyn PlacementPolicy> = match uses_current_counts {
            // The counts of all servers are current, so all servers can be compared without buckets.
            true => Box::new(LeastPolicy::without_sampling(seed)),
            false => policy::create_policy_by_name(name, seed).expect("a method's policy exists"),
        };
        let bucket_count = if uses_current_counts { single_bucket_count() } else { config.bucket_count };
        let rss_key = RssKey::random(&mut seeded_rng(seed, RNG_STREAM_RSS_KEY));
        let server_rss_config = |server: usize| RssConfig {
            key: rss_key.clone(),
            indirection_table: IndirectionTable::draw_balanced_entries(
                server as u64,
                INDIRECTION_ENTRY_COUNT,
                config.cores_per_server,
            )
            .expect("a power of two"),
        };
        let mut rng = seeded_rng(seed, RNG_STREAM_COOKIE_KEYS);
        let cookie_keys = [(); 2].map(|()| CookieKey::random(&mut rng));
        Self {
            policy,
            load_info: config.load_info,
            bucket_count,
            table: PlacementTable::empty(bucket_count),
            placement_states_by_balancer: vec![PlacementTableState::default(); MAX_LOAD_BALANCERS],
            table_generation: 0,
            cookie_keys: FleetCookieKeys { keys: cookie_keys, current_key_index: CookieKeyIndex::First },
            time_key: CookieKey::random(&mut rng),
            rss_configs: (0..servers).map(server_rss_config).collect(),
            cores_per_server: config.cores_per_server,
            core_connection_counts: vec![0; servers * usize::from(config.cores_per_server)],
            table_position_by_server: vec![usize::MAX; servers],
        }
    }

    /// Returns the server pool from which the policy computes a placement table.
    fn build_server_pool(&self, cluster: &Cluster) -> ServerPool {
        let total_connections: u64 = self.core_connection_counts.iter().map(|count| u64::from(*count)).sum();
        let mean_connections =
            (total_connections as f64 / self.core_connection_counts.len() as f64).max(f64::MIN_POSITIVE);
        let build_pool_server = |number: usize| {
            let core_connections = &self.core_connection_counts[number * usize::from(self.cores_per_server)..]
                [..usize::from(self.cores_per_server)];
            PoolServer {
                is_eligible: cluster.is_pool_member(number as u16),
                loads: Some(
                    core_connections
                        .iter()
                        .map(|count| f64::from(*count) / mean_connections * ASSUMED_MEAN_CORE_LOAD)
                        .collect::<Vec<_>>()
                        .into(),
                ),
                rss: Some(self.rss_configs[number].clone()),
                // Current counts are kept up to date as the table's assigned connections instead.
                open_connection_count: if self.uses_current_connection_counts() {
                    0
                } else {
                    cluster.open_connection_count(number as u16)
                },
                ..PoolServer::new(server_id(number as u16))
            }
        };
        ServerPool::new(
            (0..cluster.total_server_count()).map(build_pool_server).collect(),
            cluster.load_balancers().len() as u32,
        )
    }

    /// Returns whether [`PlacementTableState::assigned_connections_by_core_slot`] holds the current numbers of open
    /// connections.
    fn uses_current_connection_counts(&self) -> bool {
        self.load_info == LoadInfo::Current && self.policy.name() == LEAST_POLICY_NAME
    }

    /// Computes a new placement table for all load balancers. Each keeps its position in the round-robin order.
    fn replace_table(&mut self, cluster: &Cluster) {
        self.table_generation += 1;
        self.table =
            self.policy.compute_table(&self.build_server_pool(cluster), self.bucket_count, self.table_generation);
        if matches!(self.table.rule, PlacementRule::RoundRobin | PlacementRule::PowerOfTwo) {
            // These rules do not use buckets, so one bucket suffices for the next table.
            self.bucket_count = single_bucket_count();
        }
        for state in &mut self.placement_states_by_balancer {
            let round_robin_counter = state.round_robin_counter;
            *state = PlacementTableState { round_robin_counter, ..PlacementTableState::for_table(&self.table) };
        }
        if self.load_info == LoadInfo::Current {
            self.copy_connection_counts_to_table(cluster);
        }
    }

    /// Copies all servers' current open connection counts into the table (`pow2`) or its state (`least`).
    fn copy_connection_counts_to_table(&mut self, cluster: &Cluster) {
        self.table_position_by_server.fill(usize::MAX);
        if self.uses_current_connection_counts() {
            for (slot, core) in self.table.core_slots.iter().enumerate() {
                self.table_position_by_server[usize::from(core.server.get())] = slot;
                self.placement_states_by_balancer[0].assigned_connections_by_core_slot[slot] =
                    cluster.open_connection_count(core.server.get());
            }
        } else if self.table.rule == PlacementRule::PowerOfTwo {
            for (position, member) in self.table.members.iter_mut().enumerate() {
                self.table_position_by_server[usize::from(member.server.get())] = position;
                member.fixed_point_load = cluster.open_connection_count(member.server.get());
            }
        }
    }

    /// Copies a server's current open connection count into the table (`pow2`) or its state (`least`).
    fn update_connection_count(&mut self, server: u16, cluster: &Cluster) {
        let position = self.table_position_by_server[usize::from(server)];
        if position == usize::MAX {
            return;
        }
        match self.table.rule {
            PlacementRule::PowerOfTwo => {
                self.table.members[position].fixed_point_load = cluster.open_connection_count(server)
            }
            _ => {
                self.placement_states_by_balancer[0].assigned_connections_by_core_slot[position] =
                    cluster.open_connection_count(server)
            }
        }
    }

    /// Returns the cookie that a load balancer decodes from later packets of the connection.
    pub fn decoded_cookie(&self, connection: &OpenConnection) -> Cookie {
        decode_cookie(&self.cookie_keys, &identity_to_four_tuple(connection.identity), connection.stored_state as u32)
    }

    /// Returns the two servers that the rule `PowerOfTwo` compares when it places a connection.
    #[cfg(test)]
    pub fn power_of_two_candidates(&self, identity: u64) -> [coreward_model::ServerId; 2] {
        use coreward_model::placement::{draw_two_numbers_below, mix_hash};
        let hash = self.table.rss_key_by_group[0].toeplitz_hash(&identity_to_four_tuple(identity).bytes());
        let (first, second) = draw_two_numbers_below(mix_hash(hash), self.table.members.len() as u32);
        [first, second].map(|position| self.table.members[position as usize].server)
    }

    fn rss_core(&self, server: u16, tuple: &FourTuple) -> u16 {
        if self.cores_per_server == 1 {
            return 0;
        }
        let rss_config = &self.rss_configs[usize::from(server)];
        rss_config.indirection_table.queue_for_hash(rss_config.key.toeplitz_hash(&tuple.bytes()))
    }

    fn connection_core_index(&self, connection: &OpenConnection) -> usize {
        usize::from(connection.server) * usize::from(self.cores_per_server) + usize::from(connection.core)
    }
}

/// Name of the only policy that has another implementation for current connection counts, which compares all servers.
const LEAST_POLICY_NAME: &str = "least";

fn single_bucket_count() -> BucketCount {
    BucketCount::new(1).expect("a power of two")
}

fn identity_to_four_tuple(identity: u64) -> FourTuple {
    let client = (Ipv4Addr::from(identity as u32), (identity >> 32) as u16);
    FourTuple::ipv4(client, (Ipv4Addr::new(10, 200, 0, 1), 80))
}

impl LoadBalancerSet for CheetahBalancers {
    fn place_connection(&mut self, identity: u64, cluster: &Cluster) -> PlacedConnection {
        let tuple = identity_to_four_tuple(identity);
        // With current counts, all load balancers have the same information, so one placement state serves all.
        let load_balancer = if self.uses_current_connection_counts() {
            0
        } else {
            cluster.select_load_balancer_by_hash(identity).into()
        };
        let server = self
            .table
            .select_server(&mut self.placement_states_by_balancer[load_balancer], &tuple)
            .expect("the pool is never empty");
        let cookie = stamp_tsval(
            &self.cookie_keys,
            &self.time_key,
            &tuple,
            Cookie::Server(server),
            (cluster.now / 1_000_000) as u32,
        );
        PlacedConnection {
            server: server.get(),
            core: self.rss_core(server.get(), &tuple),
            stored_state: cookie.into(),
        }
    }

    fn on_connection_opened(&mut self, connection: &OpenConnection, cluster: &Cluster) {
        let core_index = self.connection_core_index(connection);
        self.core_connection_counts[core_index] += 1;
        self.update_connection_count(connection.server, cluster);
    }

    fn on_connection_closed(&mut self, connection: &OpenConnection, cluster: &Cluster) {
        let core_index = self.connection_core_index(connection);
        self.core_connection_counts[core_index] -= 1;
        self.update_connection_count(connection.server, cluster);
    }

    fn on_servers_changed(&mut self, cluster: &Cluster) {
        self.replace_table(cluster);
    }

    fn uses_reports(&self) -> bool {
        let has_current_loads = self.uses_current_connection_counts() || self.table.rule == PlacementRule::PowerOfTwo;
        self.policy.reads_loads() && !(self.load_info == LoadInfo::Current && has_current_loads)
    }

    fn process_reports(&mut self, cluster: &Cluster) {
        self.replace_table(cluster);
    }

    /// Returns the current time if the connection's cookie contains a different server, or `None` if it contains the
    /// connection's own. All load balancers decode the cookie in the same way.
    fn first_break_time(&self, connection: &OpenConnection, cluster: &Cluster) -> Option<Nanoseconds> {
        (self.decoded_cookie(connection) != Cookie::Server(server_id(connection.server))).then_some(cluster.now)
    }
}
