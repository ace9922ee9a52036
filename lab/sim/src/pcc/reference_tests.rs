//! Compares the methods with a reference simulation, which sends a packet of every open connection after every change.

use std::collections::{BTreeMap, BTreeSet};

use coreward_model::ServerId;
use coreward_model::cookie::Cookie;
use proptest::prelude::*;

use super::balancer::{Balancer, PlacedConnection};
use super::beamer::{Beamer, ThresholdControl};
use super::cheetah::Cheetah;
use super::clock::Nanoseconds;
use super::cluster::{Cluster, id_of};
use super::connections::{Connection, Connections};
use super::engine::{server_count, simulate};
use super::hashed::{StatefulHashing, StatelessHashing};
use super::mix::Mix;
use super::small_cookies::{CookieFields, SmallCookies};
use super::{Arrivals, Config, HashLayout, SeedOutcome, Updates};

/// Reference model of the network, which decides the server that a connection's packets reach.
trait Network<B> {
    /// Updates the model after tables changed or load balancers stopped.
    fn observe(&mut self, balancer: &B, cluster: &Cluster);

    /// Records the placement of a connection's first packet.
    fn begin(&mut self, connection: &Connection, cluster: &Cluster);

    /// Returns the server that a packet of the connection reaches.
    fn send(&mut self, connection: &Connection, balancer: &B, cluster: &Cluster) -> u16;
}

/// Balancer that also sends the packets of every open connection in the reference model, and compares the results.
struct FollowedConnections<B, N> {
    balancer: B,
    network: N,
    /// Open connections by identity, each with the first time at which its packets reached another server.
    open: BTreeMap<u64, (Connection, Option<Nanoseconds>)>,
}

impl<B: Balancer, N: Network<B>> FollowedConnections<B, N> {
    fn new(balancer: B, network: N) -> Self {
        Self { balancer, network, open: BTreeMap::new() }
    }

    fn send_to_all(&mut self, cluster: &Cluster) {
        self.network.observe(&self.balancer, cluster);
        for (connection, broken) in self.open.values_mut().filter(|(_, broken)| broken.is_none()) {
            if self.network.send(connection, &self.balancer, cluster) != connection.server {
                *broken = Some(cluster.now);
            }
        }
    }
}

impl<B: Balancer, N: Network<B>> Balancer for FollowedConnections<B, N> {
    fn place(&mut self, identity: u64, cluster: &Cluster) -> PlacedConnection {
        let placed = self.balancer.place(identity, cluster);
        assert!(cluster.is_member(placed.server), "a new connection went to a server that is not in the pool");
        placed
    }

    fn connection_opened(&mut self, connection: &Connection, cluster: &Cluster) {
        self.network.begin(connection, cluster);
        self.open.insert(connection.identity, (connection.clone(), None));
        self.balancer.connection_opened(connection, cluster);
        self.send_to_all(cluster);
    }

    fn connection_closed(&mut self, connection: &Connection, cluster: &Cluster) {
        self.open.remove(&connection.identity);
        self.balancer.connection_closed(connection, cluster);
        self.send_to_all(cluster);
    }

    fn servers_changed(&mut self, cluster: &Cluster) {
        self.balancer.servers_changed(cluster);
        self.send_to_all(cluster);
    }

    fn load_balancers_changed(&mut self, cluster: &Cluster, connections: &mut Connections) {
        self.balancer.load_balancers_changed(cluster, connections);
        self.send_to_all(cluster);
    }

    fn takes_reports(&self) -> bool {
        self.balancer.takes_reports()
    }

    fn process_reports(&mut self, cluster: &Cluster) {
        self.balancer.process_reports(cluster);
        self.send_to_all(cluster);
    }

    fn first_break_time(&self, connection: &Connection, cluster: &Cluster) -> Option<Nanoseconds> {
        let reported = self.balancer.first_break_time(connection, cluster);
        assert_eq!(reported, self.open[&connection.identity].1, "{connection:?}");
        reported
    }
}

/// Model in which a packet goes to the current server of its bucket.
struct ByBucket;

impl Network<StatelessHashing> for ByBucket {
    fn observe(&mut self, _: &StatelessHashing, _: &Cluster) {}

    fn begin(&mut self, _: &Connection, _: &Cluster) {}

    fn send(&mut self, connection: &Connection, balancer: &StatelessHashing, _: &Cluster) -> u16 {
        balancer.server_of(connection.identity)
    }
}

/// Model with daisy chaining: the bucket's current server, or its previous one if the current one lacks the connection.
#[derive(Default)]
struct DaisyChained {
    current_servers: Vec<u16>,
    previous_servers: Vec<u16>,
}

impl Network<Beamer> for DaisyChained {
    fn observe(&mut self, balancer: &Beamer, _: &Cluster) {
        let table = balancer.table();
        if self.current_servers.is_empty() {
            self.current_servers = vec![u16::MAX; table.len()];
            self.previous_servers = self.current_servers.clone();
        }
        for bucket in 0..table.len() {
            if self.current_servers[bucket] != table.server(bucket) {
                self.previous_servers[bucket] =
                    std::mem::replace(&mut self.current_servers[bucket], table.server(bucket));
            }
        }
    }

    fn begin(&mut self, _: &Connection, _: &Cluster) {}

    fn send(&mut self, connection: &Connection, balancer: &Beamer, _: &Cluster) -> u16 {
        let bucket = balancer.table().bucket(connection.identity);
        let knows = |server: u16| server == connection.server;
        if knows(self.current_servers[bucket]) { self.current_servers[bucket] } else { self.previous_servers[bucket] }
    }
}

/// Model with a connection table in every load balancer.
#[derive(Default)]
struct ConnectionTables {
    tables: BTreeMap<u8, BTreeMap<u64, u16>>,
}

impl Network<StatefulHashing> for ConnectionTables {
    fn observe(&mut self, _: &StatefulHashing, cluster: &Cluster) {
        let running: BTreeSet<u8> = cluster.load_balancers().iter().copied().collect();
        self.tables.retain(|load_balancer, _| running.contains(load_balancer));
    }

    fn begin(&mut self, connection: &Connection, cluster: &Cluster) {
        let load_balancer = cluster.load_balancer(connection.identity);
        self.tables.entry(load_balancer).or_default().insert(connection.identity, connection.server);
    }

    fn send(&mut self, connection: &Connection, balancer: &StatefulHashing, cluster: &Cluster) -> u16 {
        let table = self.tables.entry(cluster.load_balancer(connection.identity)).or_default();
        *table.entry(connection.identity).or_insert_with(|| balancer.server_of(connection.identity))
    }
}

/// Model with a table per tag; every connection has a tag and an index.
#[derive(Default)]
struct TablesByTag {
    configurations: BTreeMap<u32, u32>,
    /// Tag in the last packet of each connection, by identity.
    tags: BTreeMap<u64, u32>,
}

impl Network<SmallCookies> for TablesByTag {
    fn observe(&mut self, balancer: &SmallCookies, _: &Cluster) {
        self.configurations.insert(balancer.current_number() % balancer.tag_count(), balancer.current_number());
    }

    fn begin(&mut self, connection: &Connection, _: &Cluster) {
        self.tags.insert(connection.identity, connection.stored_state as u32);
    }

    fn send(&mut self, connection: &Connection, balancer: &SmallCookies, _: &Cluster) -> u16 {
        let (identity, index) = (connection.identity, (connection.stored_state >> 32) as u32);
        let tag = self.tags.get_mut(&identity).unwrap();
        let reached = balancer.server(self.configurations[&(*tag % balancer.tag_count())], identity, index);
        let fresher = balancer.server(balancer.current_number(), identity, index) == reached;
        if balancer.renews_tags() && fresher {
            *tag = balancer.current_number();
        }
        reached
    }
}

/// Model in which every packet contains the id of its server.
struct ByCookie;

impl Network<Cheetah> for ByCookie {
    fn observe(&mut self, _: &Cheetah, _: &Cluster) {}

    fn begin(&mut self, _: &Connection, _: &Cluster) {}

    fn send(&mut self, connection: &Connection, balancer: &Cheetah, _: &Cluster) -> u16 {
        match balancer.cookie_of(connection) {
            Cookie::Server(server) => server.get(),
            Cookie::TableIndex(_) => panic!("the cookie of a stateless load balancer has an id"),
        }
    }
}

/// Returns the configuration of a small cluster whose servers and load balancers change all the time.
fn churning_cluster(servers: usize, load_balancers: usize) -> Config {
    Config {
        servers,
        arrivals: Arrivals::Open { connections: 60.0 },
        updates: Updates::PerMinute { servers: 60.0, load_balancers: 30.0 },
        minutes: 1.0,
        load_balancers,
        buckets_per_server: 4,
        by_second: true,
        ..Config::default()
    }
}

fn check<B: Balancer, N: Network<B>>(config: &Config, seed: u64, balancer: B, network: N) -> SeedOutcome {
    let run = simulate(config, &Mix::web_server(), seed, FollowedConnections::new(balancer, network));
    assert!(run.ended > 50 && run.updates > 30, "{run:?}");
    let by_second: u64 = run.second_counts.iter().map(|second| second.completed).sum();
    assert_eq!(by_second, run.ended - run.broken);
    run
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn bucket_tables_equal_the_reference(seed: u64, servers in 2usize..12, layout in 0usize..3) {
        let config = churning_cluster(servers, 2);
        let layout = [HashLayout::Striped, HashLayout::Ring, HashLayout::Maglev][layout];
        let run = check(&config, seed, StatelessHashing::new(layout, &config), ByBucket);
        prop_assert!(run.broken > 0);
    }

    #[test]
    fn daisy_chaining_equals_the_reference(
        seed: u64, servers in 2usize..12, threshold in proptest::option::of(0.05f64..1.0)
    ) {
        let config = churning_cluster(servers, 2);
        let control = threshold.map(|threshold| ThresholdControl { threshold, start: 20_000_000_000 });
        check(&config, seed, Beamer::new(control, &config, seed), DaisyChained::default());
    }

    #[test]
    fn connection_tables_equal_the_reference(seed: u64, servers in 2usize..12, load_balancers in 1usize..5) {
        let config = churning_cluster(servers, load_balancers);
        check(&config, seed, StatefulHashing::new(HashLayout::Striped, &config), ConnectionTables::default());
    }

    #[test]
    fn small_cookies_equal_the_reference(
        seed: u64, servers in 2usize..12, layout in 0usize..3, tag_bits in 0u8..6, renews_tags: bool,
        index_bits in 0u8..3
    ) {
        let config = churning_cluster(servers, 2);
        let layout = [HashLayout::Striped, HashLayout::Ring, HashLayout::Maglev][layout];
        let (fields, mix) = (CookieFields { tag_bits, renews_tags, index_bits }, Mix::web_server());
        let cookies = SmallCookies::new(fields, layout, &config, server_count(&config), mix.longest_duration());
        check(&config, seed, cookies, TablesByTag::default());
    }

    #[test]
    fn cookies_equal_the_reference(
        seed: u64, servers in 2usize..12, policy in proptest::sample::select(coreward_model::policy::names())
    ) {
        let config = Config { cores: 3, report_ms: 500, ..churning_cluster(servers, 3) };
        let run = check(&config, seed, Cheetah::new(policy, &config, server_count(&config), seed), ByCookie);
        prop_assert_eq!(run.broken, 0);
    }
}

/// Tests that the policies use current counts when these are available.
#[test]
fn least_and_pow2_use_present_counts() {
    struct Checked(Cheetah, &'static str);

    impl Balancer for Checked {
        fn place(&mut self, identity: u64, cluster: &Cluster) -> PlacedConnection {
            let placed = self.0.place(identity, cluster);
            let (chosen, least) = (
                cluster.open_connections(placed.server),
                cluster.members().iter().map(|m| cluster.open_connections(*m)).min(),
            );
            if self.1 == "least" {
                assert_eq!(Some(chosen), least);
            } else {
                let drawn: [ServerId; 2] = self.0.drawn_servers(identity);
                assert!(drawn.contains(&id_of(placed.server)));
                assert_eq!(Some(chosen), drawn.iter().map(|server| cluster.open_connections(server.get())).min());
            }
            placed
        }

        fn connection_opened(&mut self, connection: &Connection, cluster: &Cluster) {
            self.0.connection_opened(connection, cluster);
        }

        fn connection_closed(&mut self, connection: &Connection, cluster: &Cluster) {
            self.0.connection_closed(connection, cluster);
        }

        fn servers_changed(&mut self, cluster: &Cluster) {
            self.0.servers_changed(cluster);
            assert!(!self.0.takes_reports());
        }

        fn first_break_time(&self, connection: &Connection, cluster: &Cluster) -> Option<Nanoseconds> {
            self.0.first_break_time(connection, cluster)
        }
    }

    let config = Config { arrivals: Arrivals::Open { connections: 2_000.0 }, ..churning_cluster(40, 2) };
    for policy in ["least", "pow2"] {
        let balancer = Checked(Cheetah::new(policy, &config, server_count(&config), 1), policy);
        let run = simulate(&config, &Mix::web_server(), 1, balancer);
        assert!(run.ended > 2_000 && run.broken == 0);
    }
}
