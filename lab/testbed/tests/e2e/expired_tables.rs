//! Placement tables expire while no controller runs, so the load balancer places new connections by its own counts.

use std::time::SystemTime;

use coreward_testbed::fleet::{Fleet, TestbedFleetOptions};
use coreward_testbed::nginx::NginxServer;
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, Testbed, TestbedOptions, find_missing_testbed_rights, skip_if};

use crate::support::{
    ConnectionsAndWorkers, assert_connections_answered, assert_eventually, fetch_metrics_page,
    find_metric_series_value, measure_duration_until_logged, open_keepalive_connections, sleep_ms,
};

/// Fleet document in which s3 has half of the total weight. Under `crossrss`, all new connections in a bucket go to one
/// server until the next table.
const FLEET_DOCUMENT: &str = r#"
table_lifetime = "1s"
[[server]]
name = "s1"
address = "10.1.1.1"
[[server]]
name = "s2"
address = "10.1.1.2"
[[server]]
name = "s3"
address = "10.1.1.3"
weight = 2
[[service]]
name = "web0"
vip = "10.200.0.1:80"
policy = "crossrss"
[service.health]
check = "tcp"
interval = "200ms"
timeout = "500ms"
"#;
const LB_METRICS_ADDRESS: &str = "127.0.0.1:9464";

/// Fleet of three servers with nginx. Fields are dropped in the order of their declaration, the testbed last.
struct ExpiredTablesEnv {
    fleet: Fleet,
    nginx_servers: Vec<Option<NginxServer>>,
    testbed: Testbed,
}

impl ExpiredTablesEnv {
    fn start() -> Self {
        let options = TestbedOptions {
            instance_name: "expired".to_owned(),
            server_count: 3,
            core_count: 1,
            ..TestbedOptions::default()
        };
        let testbed = Testbed::create(options).unwrap();
        let nginx_servers =
            testbed.server_numbers().into_iter().map(|n| Some(testbed.start_nginx(n).unwrap())).collect();
        let options = TestbedFleetOptions {
            steers_connections: false,
            applied_document: Some(FLEET_DOCUMENT.to_owned()),
            extra_load_balancer_text: format!("metrics = \"{LB_METRICS_ADDRESS}\"\n"),
            ..TestbedFleetOptions::default()
        };
        let fleet = Fleet::start(&testbed, options).unwrap();
        Self { fleet, nginx_servers, testbed }
    }

    /// Waits until the load balancer's metrics show that `table_count` of its tables have expired.
    fn wait_for_expired_tables(&self, table_count: f64) {
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, &format!("{table_count} expired tables"), || {
            let page = fetch_metrics_page(&self.testbed, self.testbed.load_balancer(1).unwrap(), LB_METRICS_ADDRESS);
            page.is_ok_and(|page| find_metric_series_value(&page, "coreward_lb_expired_tables") == Some(table_count))
        });
    }
}

/// Opens connections over three seconds, in which the load balancer makes several tables of its own.
fn open_connections_slowly(testbed: &Testbed, connection_count: usize) -> ConnectionsAndWorkers {
    let open_next_connections = |_| {
        sleep_ms(3000 / connection_count as u64);
        open_keepalive_connections(testbed, 1)
    };
    (0..connection_count).flat_map(open_next_connections).collect()
}

fn count_connections_per_server(connections: &ConnectionsAndWorkers) -> [usize; 3] {
    [1, 2, 3].map(|server| connections.iter().filter(|(_, answerer)| answerer.server_number == server).count())
}

#[test]
fn load_balancer_places_connections_by_own_counts_after_table_expiry() {
    skip_if!(find_missing_testbed_rights());
    let mut env = ExpiredTablesEnv::start();
    env.wait_for_expired_tables(0.0);
    env.fleet.kill_daemon("controller").unwrap();
    env.wait_for_expired_tables(1.0);
    let mut connections = open_connections_slowly(&env.testbed, 80);
    println!("expired: {:?}", count_connections_per_server(&connections));
    let is_near = |counts: [usize; 3], expected: [usize; 3]| {
        counts.iter().zip(expected).all(|(count, expected)| count.abs_diff(expected) <= 6)
    };
    assert!(
        is_near(count_connections_per_server(&connections), [20, 20, 40]),
        "{:?}",
        count_connections_per_server(&connections)
    );

    // A server that is down gets no connections. When it is up again, it gets its share, because it has the fewest open
    // connections.
    let stop_time = SystemTime::now();
    env.nginx_servers[1] = None;
    connections.retain(|(_, answerer)| answerer.server_number != 2);
    let log_words = "event=\"server-masked\" server=\"s2\" service=\"web0\"";
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, log_words, || {
        measure_duration_until_logged(&env.testbed, 1, log_words, stop_time).is_some()
    });
    connections.append(&mut open_connections_slowly(&env.testbed, 30));
    println!("s2 down: {:?}", count_connections_per_server(&connections));
    assert!(
        is_near(count_connections_per_server(&connections), [30, 0, 60]),
        "{:?}",
        count_connections_per_server(&connections)
    );

    // The next daemon process does not find a controller either.
    env.fleet.kill_daemon("lb1").unwrap();
    env.nginx_servers[1] = Some(env.testbed.start_nginx(2).unwrap());
    env.fleet.restart_daemon(&env.testbed, "lb1").unwrap();
    env.wait_for_expired_tables(1.0);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "s2 gets connections", || {
        count_connections_per_server(&open_keepalive_connections(&env.testbed, 8))[1] > 0
    });
    connections.append(&mut open_connections_slowly(&env.testbed, 30));
    println!("s2 back: {:?}", count_connections_per_server(&connections));
    assert!(
        is_near(count_connections_per_server(&connections), [30, 30, 60]),
        "{:?}",
        count_connections_per_server(&connections)
    );

    env.fleet.restart_daemon(&env.testbed, "controller").unwrap();
    env.wait_for_expired_tables(0.0);
    assert_connections_answered(&mut connections);
}
