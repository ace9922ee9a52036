//! Health checks by the load balancers. A server that is down gets no new connections and keeps its established ones. A
//! load balancer that reaches no server marks none down.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use coreward_testbed::fleet::{Fleet, TestbedFleetOptions};
use coreward_testbed::http::HttpConnection;
use coreward_testbed::nginx::NginxServer;
use coreward_testbed::{Testbed, TestbedOptions, find_missing_testbed_rights, skip_if};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::Value;

use crate::support::{
    MIN_CONNECTIONS_FOR_EVERY_SERVER, assert_connections_answered, assert_eventually, assert_server_masked_within,
    open_keepalive_connections, read_daemon_log, sleep_ms,
};

const STATE_CHANGE_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time in which the health check of [`HEALTH_CHECK_CONFIG`] detects a fault. It is interval x fall + timeout,
/// plus the daemon's tick. The check's timeout is long to allow for a busy machine.
const MAX_FAULT_DETECTION_TIME: Duration = Duration::from_millis(3 * 200 + 5000 + 100);

const HEALTH_CHECK_CONFIG: &str = "slow_start = \"1s\"\n[service.health]\ncheck = \"http\"\npath = \"/healthz\"\n\
    interval = \"200ms\"\n\
    timeout = \"5s\"\nrise = 2\nfall = 3\n";

struct HealthTestEnv {
    fleet: Fleet,
    nginx_servers: Vec<Option<NginxServer>>,
    testbed: Testbed,
}

impl HealthTestEnv {
    fn start(instance: &str, load_balancer_count: u16, fleet_text: &str) -> Self {
        let options = TestbedOptions {
            instance_name: instance.to_owned(),
            server_count: 3,
            core_count: 1,
            load_balancer_count,
            ..Default::default()
        };
        let testbed = Testbed::create(options).unwrap();
        let nginx_servers =
            testbed.server_numbers().into_iter().map(|n| Some(testbed.start_nginx(n).unwrap())).collect();
        for number in 1..=3 {
            fs::write(health_file_path(&testbed, number), "well\n").unwrap();
        }
        let options = TestbedFleetOptions {
            policy_name: "rr".to_owned(),
            extra_fleet_text: fleet_text.to_owned(),
            steers_connections: false,
            ..Default::default()
        };
        let fleet = Fleet::start(&testbed, options).unwrap();
        Self { fleet, nginx_servers, testbed }
    }

    /// Makes a server's health endpoint report the server as healthy or not.
    fn set_server_health(&self, number: u16, is_healthy: bool) {
        let health_file = health_file_path(&self.testbed, number);
        if is_healthy { fs::write(health_file, "well\n").unwrap() } else { fs::remove_file(health_file).unwrap() }
    }

    fn query_status(&self) -> Value {
        self.fleet.query_status(&self.testbed).unwrap()
    }

    fn query_server_state_and_reason(&self, number: u16) -> (String, String) {
        let status = self.query_status();
        let server_name = format!("s{number}");
        let server = status["servers"].as_array().unwrap().iter().find(|server| server["name"] == server_name).unwrap();
        let read_text = |key: &str| server[key].as_str().unwrap().to_owned();
        (read_text("state"), read_text("state_reason"))
    }

    fn wait_for_server_state(&self, number: u16, state: &str) -> Duration {
        let start = Instant::now();
        assert_eventually(STATE_CHANGE_TIMEOUT, &format!("s{number} is {state}"), || {
            self.query_server_state_and_reason(number).0 == state
        });
        start.elapsed()
    }

    /// Waits until every load balancer has checked the health of every server.
    fn wait_until_servers_checked(&self) {
        assert_eventually(STATE_CHANGE_TIMEOUT, "every load balancer has checked every server", || {
            let status = self.query_status();
            let members = status["services"][0]["members"].as_array().unwrap().clone();
            let lb_count = self.testbed.load_balancer_numbers().len();
            members.iter().all(|member| {
                let member_checks = member["health_checks"].as_array().unwrap();
                member_checks.len() == lb_count && member_checks.iter().all(|check| check["is_up"] == true)
            })
        });
    }

    /// Waits until each of these servers gets new connections and no other server does.
    fn wait_until_only_servers_reached(&self, servers: &[u16]) {
        assert_eventually(STATE_CHANGE_TIMEOUT, &format!("new connections go to {servers:?}"), || {
            self.find_servers_with_new_connections() == servers
        });
    }

    /// Opens connections, and returns the numbers of the servers that got at least one of them.
    fn find_servers_with_new_connections(&self) -> Vec<u16> {
        let mut server_numbers: Vec<u16> = open_keepalive_connections(&self.testbed, MIN_CONNECTIONS_FOR_EVERY_SERVER)
            .into_iter()
            .map(|(_, answerer)| answerer.server_number)
            .collect();
        server_numbers.sort_unstable();
        server_numbers.dedup();
        server_numbers
    }

    fn read_load_balancer_log(&self, load_balancer: u16) -> String {
        read_daemon_log(&self.testbed, &format!("lb{load_balancer}"), 0)
    }

    /// Returns the current lengths of both load balancers' logs (bytes).
    fn read_log_lengths(&self) -> [usize; 2] {
        [1, 2].map(|number| self.read_load_balancer_log(number).len())
    }

    /// Waits until each of the two load balancers has logged `log_words` after its byte offset in `log_offsets`.
    fn wait_for_log_words(&self, log_offsets: [usize; 2], log_words: &str) {
        assert_eventually(STATE_CHANGE_TIMEOUT, log_words, || {
            (1..).zip(log_offsets).all(|(number, log_offset)| {
                self.read_load_balancer_log(number).get(log_offset..).is_some_and(|log| log.contains(log_words))
            })
        });
    }

    /// Returns the number of packets that load balancer 1 has dropped because no server was eligible.
    fn query_dropped_packet_count(&self) -> u64 {
        let status = self.query_status();
        status["load_balancers"][0]["state"]["counters"]["drop_no_eligible_server"].as_u64().unwrap_or(0)
    }

    fn is_new_connection_dropped(&self) -> bool {
        let fails_to_connect = || {
            let address = coreward_testbed::addresses::SERVICE_ADDRESS.into();
            Ok(std::net::TcpStream::connect_timeout(&address, Duration::from_millis(300)).is_err())
        };
        self.testbed.client().run_within(fails_to_connect).unwrap()
    }

    fn run_ip_command(&self, load_balancer: u16, arguments: &[&str]) {
        let mut command = Command::new("ip");
        command.args(arguments);
        self.testbed.run_command(self.testbed.load_balancer(load_balancer).unwrap(), command).unwrap();
    }
}

fn health_file_path(testbed: &Testbed, number: u16) -> PathBuf {
    testbed.directory().join(format!("nginx-s{number}")).join("www").join("healthz")
}

/// Asserts that servers stay active when one load balancer cannot reach any of them.
fn assert_unreachable_servers_stay_active(env: &HealthTestEnv) {
    env.run_ip_command(2, &["route", "add", "blackhole", "10.1.1.0/24"]);
    assert_eventually(STATE_CHANGE_TIMEOUT, "load balancer 2 reaches no server", || {
        let status = env.query_status();
        let members = status["services"][0]["members"].as_array().unwrap().clone();
        let is_checked_by_one = |member: &Value| {
            member["health_checks"].as_array().unwrap().iter().filter(|check| check["is_up"] == false).count() == 1
        };
        members.iter().all(is_checked_by_one)
    });
    sleep_ms(500);
    assert!(
        (1..=3).all(|number| env.query_server_state_and_reason(number).0 == "active"),
        "{}",
        env.query_status()["servers"]
    );
    // The verdicts of load balancers that reach servers still count.
    env.set_server_health(3, false);
    env.wait_for_server_state(3, "down");
    env.wait_until_only_servers_reached(&[1, 2]);
    env.set_server_health(3, true);
    env.wait_for_server_state(3, "active");
    env.run_ip_command(2, &["route", "del", "blackhole", "10.1.1.0/24"]);
    env.wait_until_servers_checked();
}

#[test]
fn down_server_gets_no_new_connections_and_returns_by_slow_start() {
    skip_if!(find_missing_testbed_rights());
    // The slow start is long enough that a poll every half second finds the state `joining`.
    let mut env =
        HealthTestEnv::start("health", 2, &HEALTH_CHECK_CONFIG.replace("slow_start = \"1s\"", "slow_start = \"5s\""));
    env.wait_until_servers_checked();
    let mut connections = open_keepalive_connections(&env.testbed, MIN_CONNECTIONS_FOR_EVERY_SERVER);
    env.wait_until_only_servers_reached(&[1, 2, 3]);

    // The server responds, but reports that it is unhealthy.
    env.set_server_health(1, false);
    let detection_time = env.wait_for_server_state(1, "down");
    println!("found after {detection_time:?}, expected within {MAX_FAULT_DETECTION_TIME:?}");
    assert!(
        env.query_server_state_and_reason(1).1.contains("answers 404 Not Found: expected 200-399"),
        "{:?}",
        env.query_server_state_and_reason(1)
    );
    env.wait_until_only_servers_reached(&[2, 3]);
    assert_connections_answered(&mut connections);
    env.set_server_health(1, true);
    env.wait_for_server_state(1, "joining");
    env.wait_for_server_state(1, "active");
    env.wait_until_only_servers_reached(&[1, 2, 3]);
    assert_connections_answered(&mut connections);
    connections.retain(|(_, answerer)| answerer.server_number != 2);

    // The machine is up, but no process listens.
    env.nginx_servers[1] = None;
    env.wait_for_server_state(2, "down");
    assert!(
        env.query_server_state_and_reason(2).1.contains("connection refused"),
        "{:?}",
        env.query_server_state_and_reason(2)
    );
    env.wait_until_only_servers_reached(&[1, 3]);
    env.nginx_servers[1] = Some(env.testbed.start_nginx(2).unwrap());
    env.wait_for_server_state(2, "active");
    env.wait_until_servers_checked();

    assert_unreachable_servers_stay_active(&env);
    assert_connections_answered(&mut connections);
}

#[test]
fn service_fails_open_or_drops_when_all_servers_are_down() {
    skip_if!(find_missing_testbed_rights());
    let mut env = HealthTestEnv::start("alldown", 1, HEALTH_CHECK_CONFIG);
    env.wait_until_servers_checked();
    let mut connections = open_keepalive_connections(&env.testbed, 6);
    (1..=3).for_each(|number| env.set_server_health(number, false));
    assert_eventually(STATE_CHANGE_TIMEOUT, "the service fails open", || {
        env.query_status()["services"][0]["failing_open"] == true
    });
    env.wait_until_only_servers_reached(&[1, 2, 3]);
    assert_eq!(env.query_dropped_packet_count(), 0);

    let options = TestbedFleetOptions {
        extra_fleet_text: format!("when_all_down = \"drop\"\n{HEALTH_CHECK_CONFIG}"),
        ..env.fleet.options().clone()
    };
    env.fleet.set_fleet_options(&env.testbed, options).unwrap();
    assert_eventually(STATE_CHANGE_TIMEOUT, "first packets are dropped", || env.is_new_connection_dropped());
    assert_eventually(STATE_CHANGE_TIMEOUT, "they are counted", || env.query_dropped_packet_count() > 0);
    assert_connections_answered(&mut connections);
    env.set_server_health(2, true);
    assert_eventually(STATE_CHANGE_TIMEOUT, "the one that is well gets all", || {
        env.query_server_state_and_reason(2).0 == "active"
    });
    env.wait_until_only_servers_reached(&[2]);
    assert_connections_answered(&mut connections);

    // The load balancer masks servers without a controller, too.
    env.fleet.kill_daemon("controller").unwrap();
    env.set_server_health(2, false);
    assert_eventually(STATE_CHANGE_TIMEOUT, "first packets are dropped without a controller", || {
        env.is_new_connection_dropped()
    });
    assert_connections_answered(&mut connections);
    env.set_server_health(2, true);
    wait_until_only_servers_answer(&env, &[2]);
}

/// Opens new connections. For each, returns the number of the answering server, or `None` if the connection is refused
/// or gets no answer.
fn find_answering_servers(env: &HealthTestEnv) -> Vec<Option<u16>> {
    let query_server = || {
        HttpConnection::open(None)
            .and_then(|mut connection| connection.query_worker())
            .ok()
            .map(|worker| worker.server_number)
    };
    env.testbed
        .client()
        .run_within(|| Ok((0..MIN_CONNECTIONS_FOR_EVERY_SERVER).map(|_| query_server()).collect()))
        .unwrap()
}

/// Waits until new connections go to exactly these servers, and none fails.
fn wait_until_only_servers_answer(env: &HealthTestEnv, servers: &[u16]) {
    assert_eventually(STATE_CHANGE_TIMEOUT, &format!("new connections go to {servers:?}, and none fails"), || {
        let mut responding_servers = find_answering_servers(env);
        responding_servers.sort_unstable();
        responding_servers.dedup();
        responding_servers == servers.iter().copied().map(Some).collect::<Vec<_>>()
    });
}

/// Asserts that load balancer 1 has raised its limit of open files to the maximum.
fn assert_open_file_limit_is_raised(env: &mut HealthTestEnv) {
    let limits_text =
        fs::read_to_string(format!("/proc/{}/limits", env.fleet.daemon_process("lb1").unwrap().pid())).unwrap();
    let open_file_limits: Vec<&str> =
        limits_text.lines().find(|line| line.starts_with("Max open files")).unwrap().split_whitespace().collect();
    assert_eq!(open_file_limits[3], open_file_limits[4], "soft and hard limit of open files: {limits_text}");
}

#[test]
fn down_server_gets_no_new_connections_without_a_controller() {
    skip_if!(find_missing_testbed_rights());
    // This is the load balancer's initial limit, which it raises to the maximum that it may have.
    let (soft_limit, hard_limit) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard_limit.min(1024), hard_limit).unwrap();
    let mut env = HealthTestEnv::start("static", 2, HEALTH_CHECK_CONFIG);
    setrlimit(Resource::RLIMIT_NOFILE, soft_limit, hard_limit).unwrap();
    env.wait_until_servers_checked();
    assert_open_file_limit_is_raised(&mut env);

    // Only load balancer 2 does not reach server 3. There is no majority, so the controller changes nothing.
    env.testbed.route_vips_to_load_balancers(&[2]).unwrap();
    env.run_ip_command(2, &["route", "add", "blackhole", "10.1.1.3/32"]);
    wait_until_only_servers_answer(&env, &[1, 2]);
    assert_eq!(env.query_server_state_and_reason(3).0, "active", "the other one reaches it");
    env.run_ip_command(2, &["route", "del", "blackhole", "10.1.1.3/32"]);
    wait_until_only_servers_answer(&env, &[1, 2, 3]);
    env.testbed.route_vips_to_load_balancers(&[1, 2]).unwrap();

    let mut connections = open_keepalive_connections(&env.testbed, MIN_CONNECTIONS_FOR_EVERY_SERVER);
    env.fleet.kill_daemon("controller").unwrap();
    let stop_time = SystemTime::now();
    env.nginx_servers[1] = None;
    wait_until_only_servers_answer(&env, &[1, 3]);
    assert_server_masked_within(MAX_FAULT_DETECTION_TIME, &env.testbed, "s2", stop_time);
    connections.retain(|(_, answerer)| answerer.server_number != 2);
    assert_connections_answered(&mut connections);
    // All servers are down, and none is masked, because the load balancer may be at fault.
    let log_lengths_before = env.read_log_lengths();
    (1..=3).for_each(|number| env.set_server_health(number, false));
    env.wait_for_log_words(log_lengths_before, "event=\"server-unmasked\" server=\"s2\" service=\"web0\"");
    assert_eventually(STATE_CHANGE_TIMEOUT, "s1 and s3 get new connections", || {
        let responding_servers = find_answering_servers(&env);
        responding_servers.contains(&Some(1)) && responding_servers.contains(&Some(3))
    });
    (1..=3).for_each(|number| env.set_server_health(number, true));
    env.nginx_servers[1] = Some(env.testbed.start_nginx(2).unwrap());
    wait_until_only_servers_answer(&env, &[1, 2, 3]);
    assert_connections_answered(&mut connections);
}

#[test]
fn load_balancer_restarted_without_a_controller_continues_its_checks() {
    skip_if!(find_missing_testbed_rights());
    let mut env = HealthTestEnv::start("restarted", 1, HEALTH_CHECK_CONFIG);
    env.wait_until_servers_checked();
    let mut connections = open_keepalive_connections(&env.testbed, MIN_CONNECTIONS_FOR_EVERY_SERVER);
    env.fleet.kill_daemon("controller").unwrap();
    let stop_time = SystemTime::now();
    env.nginx_servers[1] = None;
    wait_until_only_servers_answer(&env, &[1, 3]);
    assert_server_masked_within(MAX_FAULT_DETECTION_TIME, &env.testbed, "s2", stop_time);
    connections.retain(|(_, answerer)| answerer.server_number == 1);

    env.fleet.kill_daemon("lb1").unwrap();
    env.fleet.restart_daemon(&env.testbed, "lb1").unwrap();
    // A server that recovers gets new connections again, and a server that goes down after it gets none.
    env.nginx_servers[1] = Some(env.testbed.start_nginx(2).unwrap());
    wait_until_only_servers_answer(&env, &[1, 2, 3]);
    env.nginx_servers[2] = None;
    wait_until_only_servers_answer(&env, &[1, 2]);
    assert_connections_answered(&mut connections);
}
