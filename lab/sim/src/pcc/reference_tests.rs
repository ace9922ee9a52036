//! Tests that compare the methods with a reference simulation. It sends a packet of each connection after each change.

use std::collections::{BTreeMap, BTreeSet};

use coreward_model::ServerId;
use coreward_model::cookie::Cookie;
use proptest::prelude::*;

use super::balancer::{LoadBalancerSet, PlacedConnection};
use super::beamer::{BeamerBalancers, SuspensionThresholdControl};
use super::cheetah::CheetahBalancers;
use super::cluster::{Cluster, server_id};
use super::connections::{OpenConnection, OpenConnectionSet};
use super::hashing_balancers::{StatefulHashingBalancers, StatelessHashingBalancers};
use super::mix::ConnectionMix;
use super::simulated_nanoseconds::Nanoseconds;
use super::simulation_loop::{simulate_one_seed, total_server_count};
use super::small_cookies::{SmallCookieBalancers, SmallCookieFields};
use super::{ConnectionArrivalProcess, HashBucketLayout, PccSeedResult, PccSimulationConfig, PlannedClusterChanges};

/// Reference model of the network, which determines the server that a connection's packets reach.
trait ReferenceNetwork<B> {
    /// Updates the model after tables have changed or load balancers have stopped.
    fn update_tables(&mut self, balancer: &B, cluster: &Cluster);

    /// Records the server to which a connection's first packet went.
    fn begin_connection(&mut self, connection: &OpenConnection, cluster: &Cluster);

    /// Sends a packet of the connection through the model, and returns the server that it reaches.
    fn route_packet_to_server(&mut self, connection: &OpenConnection, balancer: &B, cluster: &Cluster) -> u16;
}

/// Balancer that is checked against a reference model. After every change, it also sends a packet of each open
/// connection through the model.
struct CheckedBalancer<B, N> {
    balancer: B,
    reference_network: N,
    /// Open connections by identity, each with the first time at which its packets reached another server, if any.
    connections_and_break_times: BTreeMap<u64, (OpenConnection, Option<Nanoseconds>)>,
}

impl<B: LoadBalancerSet, N: ReferenceNetwork<B>> CheckedBalancer<B, N> {
    fn new(balancer: B, reference_network: N) -> Self {
        Self { balancer, reference_network, connections_and_break_times: BTreeMap::new() }
    }

    fn send_packet_on_each_connection(&mut self, cluster: &Cluster) {
        self.reference_network.update_tables(&self.balancer, cluster);
        for (connection, broken_at) in
            self.connections_and_break_times.values_mut().filter(|(_, broken)| broken.is_none())
        {
            if self.reference_network.route_packet_to_server(connection, &self.balancer, cluster) != connection.server {
                *broken_at = Some(cluster.now);
            }
        }
    }
}

impl<B: LoadBalancerSet, N: ReferenceNetwork<B>> LoadBalancerSet for CheckedBalancer<B, N> {
    fn place_connection(&mut self, identity: u64, cluster: &Cluster) -> PlacedConnection {
        let placement = self.balancer.place_connection(identity, cluster);
        assert!(cluster.is_pool_member(placement.server), "a new connection went to a server that is not in the pool");
        placement
    }

    fn on_connection_opened(&mut self, connection: &OpenConnection, cluster: &Cluster) {
        self.reference_network.begin_connection(connection, cluster);
        self.connections_and_break_times.insert(connection.identity, (connection.clone(), None));
        self.balancer.on_connection_opened(connection, cluster);
        self.send_packet_on_each_connection(cluster);
    }

    fn on_connection_closed(&mut self, connection: &OpenConnection, cluster: &Cluster) {
        self.connections_and_break_times.remove(&connection.identity);
        self.balancer.on_connection_closed(connection, cluster);
        self.send_packet_on_each_connection(cluster);
    }

    fn on_servers_changed(&mut self, cluster: &Cluster) {
        self.balancer.on_servers_changed(cluster);
        self.send_packet_on_each_connection(cluster);
    }

    fn on_load_balancers_changed(&mut self, cluster: &Cluster, connections: &mut OpenConnectionSet) {
        self.balancer.on_load_balancers_changed(cluster, connections);
        self.send_packet_on_each_connection(cluster);
    }

    fn uses_reports(&self) -> bool {
        self.balancer.uses_reports()
    }

    fn process_reports(&mut self, cluster: &Cluster) {
        self.balancer.process_reports(cluster);
        self.send_packet_on_each_connection(cluster);
    }

    fn first_break_time(&self, connection: &OpenConnection, cluster: &Cluster) -> Option<Nanoseconds> {
        let first_break_time = self.balancer.first_break_time(connection, cluster);
        assert_eq!(first_break_time, self.connections_and_break_times[&connection.identity].1, "{connection:?}");
        first_break_time
    }
}

/// Network model in which a packet goes to the server that currently has its bucket.
struct BucketHashingNetwork;

impl ReferenceNetwork<StatelessHashingBalancers> for BucketHashingNetwork {
    fn update_tables(&mut self, _: &StatelessHashingBalancers, _: &Cluster) {}

    fn begin_connection(&mut self, _: &OpenConnection, _: &Cluster) {}

    fn route_packet_to_server(
        &mut self,
        connection: &OpenConnection,
        balancer: &StatelessHashingBalancers,
        _: &Cluster,
    ) -> u16 {
        balancer.server_for_connection(connection.identity)
    }
}

/// Network model with daisy chaining, in which a bucket's current server passes unknown packets to the previous one.
#[derive(Default)]
struct DaisyChainingNetwork {
    current_server_by_bucket: Vec<u16>,
    previous_server_by_bucket: Vec<u16>,
}

impl ReferenceNetwork<BeamerBalancers> for DaisyChainingNetwork {
    fn update_tables(&mut self, balancer: &BeamerBalancers, _: &Cluster) {
        let table = balancer.bucket_table();
        if self.current_server_by_bucket.is_empty() {
            self.current_server_by_bucket = vec![u16::MAX; table.len()];
            self.previous_server_by_bucket = self.current_server_by_bucket.clone();
        }
        for bucket in 0..table.len() {
            if self.current_server_by_bucket[bucket] != table.current_server(bucket) {
                self.previous_server_by_bucket[bucket] =
                    std::mem::replace(&mut self.current_server_by_bucket[bucket], table.current_server(bucket));
            }
        }
    }

    fn begin_connection(&mut self, _: &OpenConnection, _: &Cluster) {}

    fn route_packet_to_server(&mut self, connection: &OpenConnection, balancer: &BeamerBalancers, _: &Cluster) -> u16 {
        let bucket = balancer.bucket_table().bucket_of_connection(connection.identity);
        let has_connection = |server: u16| server == connection.server;
        if has_connection(self.current_server_by_bucket[bucket]) {
            self.current_server_by_bucket[bucket]
        } else {
            self.previous_server_by_bucket[bucket]
        }
    }
}

/// Network model in which every load balancer has a connection table.
#[derive(Default)]
struct ConnectionTableNetwork {
    server_by_lb_and_connection: BTreeMap<u8, BTreeMap<u64, u16>>,
}

impl ReferenceNetwork<StatefulHashingBalancers> for ConnectionTableNetwork {
    fn update_tables(&mut self, _: &StatefulHashingBalancers, cluster: &Cluster) {
        let running_load_balancers: BTreeSet<u8> = cluster.load_balancers().iter().copied().collect();
        self.server_by_lb_and_connection.retain(|load_balancer, _| running_load_balancers.contains(load_balancer));
    }

    fn begin_connection(&mut self, connection: &OpenConnection, cluster: &Cluster) {
        let load_balancer = cluster.select_load_balancer_by_hash(connection.identity);
        self.server_by_lb_and_connection
            .entry(load_balancer)
            .or_default()
            .insert(connection.identity, connection.server);
    }

    fn route_packet_to_server(
        &mut self,
        connection: &OpenConnection,
        balancer: &StatefulHashingBalancers,
        cluster: &Cluster,
    ) -> u16 {
        let table = self
            .server_by_lb_and_connection
            .entry(cluster.select_load_balancer_by_hash(connection.identity))
            .or_default();
        *table.entry(connection.identity).or_insert_with(|| balancer.server_for_connection(connection.identity))
    }
}

/// Network model of small cookies. The tag in a packet's cookie selects a pool configuration, and the index a hash
/// function.
#[derive(Default)]
struct TagTableNetwork {
    configuration_number_by_tag: BTreeMap<u32, u32>,
    /// Tag in the last packet of each connection, by the connection's identity.
    tag_by_connection: BTreeMap<u64, u32>,
}

impl ReferenceNetwork<SmallCookieBalancers> for TagTableNetwork {
    fn update_tables(&mut self, balancer: &SmallCookieBalancers, _: &Cluster) {
        self.configuration_number_by_tag.insert(
            balancer.current_configuration_number() % balancer.tag_count(),
            balancer.current_configuration_number(),
        );
    }

    fn begin_connection(&mut self, connection: &OpenConnection, _: &Cluster) {
        self.tag_by_connection.insert(connection.identity, connection.stored_state as u32);
    }

    fn route_packet_to_server(
        &mut self,
        connection: &OpenConnection,
        balancer: &SmallCookieBalancers,
        _: &Cluster,
    ) -> u16 {
        let (identity, index) = (connection.identity, (connection.stored_state >> 32) as u32);
        let tag = self.tag_by_connection.get_mut(&identity).unwrap();
        let reached_server =
            balancer.select_server(self.configuration_number_by_tag[&(*tag % balancer.tag_count())], identity, index);
        let keeps_server =
            balancer.select_server(balancer.current_configuration_number(), identity, index) == reached_server;
        if balancer.renews_tags() && keeps_server {
            *tag = balancer.current_configuration_number();
        }
        reached_server
    }
}

/// Network model in which every packet carries the id of its server.
struct CookieNetwork;

impl ReferenceNetwork<CheetahBalancers> for CookieNetwork {
    fn update_tables(&mut self, _: &CheetahBalancers, _: &Cluster) {}

    fn begin_connection(&mut self, _: &OpenConnection, _: &Cluster) {}

    fn route_packet_to_server(&mut self, connection: &OpenConnection, balancer: &CheetahBalancers, _: &Cluster) -> u16 {
        match balancer.decoded_cookie(connection) {
            Cookie::Server(server) => server.get(),
            Cookie::TableIndex(_) => panic!("the cookie of a stateless load balancer has an id"),
        }
    }
}

/// Returns the configuration of a small cluster whose servers and load balancers change frequently.
fn build_churning_cluster_config(servers: usize, load_balancers: usize) -> PccSimulationConfig {
    PccSimulationConfig {
        server_count: servers,
        arrivals: ConnectionArrivalProcess::OpenLoop { mean_open_connections: 60.0 },
        updates: PlannedClusterChanges::PerMinute { servers: 60.0, load_balancers: 30.0 },
        measured_minutes: 1.0,
        load_balancer_count: load_balancers,
        buckets_per_server: 4,
        keeps_per_second_counts: true,
        ..PccSimulationConfig::default()
    }
}

fn simulate_with_reference_checks<B: LoadBalancerSet, N: ReferenceNetwork<B>>(
    config: &PccSimulationConfig,
    seed: u64,
    balancer: B,
    network: N,
) -> PccSeedResult {
    let outcome =
        simulate_one_seed(config, &ConnectionMix::for_web_server(), seed, CheckedBalancer::new(balancer, network));
    assert!(outcome.ended_connections > 50 && outcome.cluster_update_count > 30, "{outcome:?}");
    let completed_connections: u64 = outcome.per_second_counts.iter().map(|second| second.completed_connections).sum();
    assert_eq!(completed_connections, outcome.ended_connections - outcome.broken_connections);
    outcome
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn bucket_table_breaks_same_connections_as_reference(seed: u64, servers in 2usize..12, layout in 0usize..3) {
        let config = build_churning_cluster_config(servers, 2);
        let layout = [HashBucketLayout::Striped, HashBucketLayout::Ring, HashBucketLayout::Maglev][layout];
        let balancers = StatelessHashingBalancers::new(layout, &config);
        let run = simulate_with_reference_checks(&config, seed, balancers, BucketHashingNetwork);
        prop_assert!(run.broken_connections > 0);
    }

    #[test]
    fn daisy_chaining_breaks_same_connections_as_reference(
        seed: u64, servers in 2usize..12, threshold in proptest::option::of(0.05f64..1.0)
    ) {
        let config = build_churning_cluster_config(servers, 2);
        let suspension_start_time = 20_000_000_000;
        let threshold_control =
            threshold.map(|allowed_load_excess_fraction| SuspensionThresholdControl {
                allowed_load_excess_fraction,
                suspension_start_time,
            });
        let beamer = BeamerBalancers::new(threshold_control, &config, seed);
        simulate_with_reference_checks(&config, seed, beamer, DaisyChainingNetwork::default());
    }

    #[test]
    fn connection_table_breaks_same_connections_as_reference(
        seed: u64,
        servers in 2usize..12,
        load_balancers in 1usize..5,
    ) {
        let config = build_churning_cluster_config(servers, load_balancers);
        simulate_with_reference_checks(&config, seed, StatefulHashingBalancers::new(HashBucketLayout::Striped, &config),
            ConnectionTableNetwork::default());
    }

    #[test]
    fn small_cookie_breaks_same_connections_as_reference(
        seed: u64, servers in 2usize..12, layout in 0usize..3, tag_bits in 0u8..6, renews_tags: bool,
        index_bits in 0u8..3
    ) {
        let config = build_churning_cluster_config(servers, 2);
        let layout = [HashBucketLayout::Striped, HashBucketLayout::Ring, HashBucketLayout::Maglev][layout];
        let (fields, mix) = (SmallCookieFields { tag_bits, renews_tags, index_bits }, ConnectionMix::for_web_server());
        let cookies =
            SmallCookieBalancers::new(fields, layout, &config, total_server_count(&config), mix.longest_duration());
        simulate_with_reference_checks(&config, seed, cookies, TagTableNetwork::default());
    }

    #[test]
    fn cookie_breaks_same_connections_as_reference(
        seed: u64, servers in 2usize..12, policy in proptest::sample::select(coreward_model::policy::policy_names())
    ) {
        let config =
            PccSimulationConfig {
                cores_per_server: 3,
                report_interval_ms: 500,
                ..build_churning_cluster_config(servers, 3)
            };
        let balancers = CheetahBalancers::new(policy, &config, total_server_count(&config), seed);
        let run = simulate_with_reference_checks(&config, seed, balancers,
            CookieNetwork);
        prop_assert_eq!(run.broken_connections, 0);
    }
}

/// Balancer which checks that its policy (`least` or `pow2`, the second field) uses current connection counts.
struct CheckedCheetahBalancers(CheetahBalancers, &'static str);

impl LoadBalancerSet for CheckedCheetahBalancers {
    fn place_connection(&mut self, identity: u64, cluster: &Cluster) -> PlacedConnection {
        let placement = self.0.place_connection(identity, cluster);
        let (server_connections, min_connections) = (
            cluster.open_connection_count(placement.server),
            cluster.pool_members().iter().map(|member| cluster.open_connection_count(*member)).min(),
        );
        if self.1 == "least" {
            assert_eq!(Some(server_connections), min_connections);
        } else {
            let candidate_servers: [ServerId; 2] = self.0.power_of_two_candidates(identity);
            assert!(candidate_servers.contains(&server_id(placement.server)));
            assert_eq!(
                Some(server_connections),
                candidate_servers.iter().map(|server| cluster.open_connection_count(server.get())).min()
            );
        }
        placement
    }

    fn on_connection_opened(&mut self, connection: &OpenConnection, cluster: &Cluster) {
        self.0.on_connection_opened(connection, cluster);
    }

    fn on_connection_closed(&mut self, connection: &OpenConnection, cluster: &Cluster) {
        self.0.on_connection_closed(connection, cluster);
    }

    fn on_servers_changed(&mut self, cluster: &Cluster) {
        self.0.on_servers_changed(cluster);
        assert!(!self.0.uses_reports());
    }

    fn first_break_time(&self, connection: &OpenConnection, cluster: &Cluster) -> Option<Nanoseconds> {
        self.0.first_break_time(connection, cluster)
    }
}

/// Checks that the policies `least` and `pow2` use current connection counts if the configuration allows it.
#[test]
fn least_and_pow2_policies_use_current_connection_counts() {
    let config = PccSimulationConfig {
        arrivals: ConnectionArrivalProcess::OpenLoop { mean_open_connections: 2_000.0 },
        ..build_churning_cluster_config(40, 2)
    };
    for policy in ["least", "pow2"] {
        let balancer =
            CheckedCheetahBalancers(CheetahBalancers::new(policy, &config, total_server_count(&config), 1), policy);
        let run = simulate_one_seed(&config, &ConnectionMix::for_web_server(), 1, balancer);
        assert!(run.ended_connections > 2_000 && run.broken_connections == 0);
    }
}
