//! The data plane survives its daemons. Each daemon is killed, servers get new MAC addresses, and the pool changes. No
//! connection may break.

use std::net::SocketAddrV4;
use std::process::Command;
use std::time::{Duration, Instant};

use coreward_testbed::addresses::{HOST_DEVICE, SERVICE_ADDRESS};
use coreward_testbed::fleet::{Fleet, ServerAdminState, TestbedFleetOptions};
use coreward_testbed::http::HttpConnection;
use coreward_testbed::nginx::NginxServer;
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, Testbed, TestbedOptions, find_missing_testbed_rights, skip_if};

use crate::support::{assert_connections_answered, assert_eventually, open_keepalive_connections};

struct RobustnessTestEnv {
    testbed: Testbed,
    fleet: Fleet,
    nginx_servers: Vec<NginxServer>,
}

fn start_env(instance: &str, server_count: u16, policy: &str) -> RobustnessTestEnv {
    let options = TestbedOptions { instance_name: instance.to_owned(), server_count, ..Default::default() };
    let testbed = Testbed::create(options).unwrap();
    let nginx_servers =
        testbed.server_numbers().into_iter().map(|number| testbed.start_nginx(number).unwrap()).collect();
    let fleet =
        Fleet::start(&testbed, TestbedFleetOptions { policy_name: policy.to_owned(), ..Default::default() }).unwrap();
    RobustnessTestEnv { testbed, fleet, nginx_servers }
}

impl RobustnessTestEnv {
    fn run_in_client_namespace<T: Send>(&self, action: impl FnOnce() -> T + Send) -> T {
        self.testbed.client().run_within(|| Ok(action())).unwrap()
    }

    fn explain_connection(&self, source: SocketAddrV4) -> serde_json::Value {
        let (vip, client) = (SERVICE_ADDRESS.to_string(), source.to_string());
        let explain_arguments = ["explain", "--format", "json", "--vip", &vip, "--client", &client];
        let command = coreward_testbed::fleet::build_operator_command(&self.testbed, &explain_arguments).unwrap();
        let output = self.testbed.run_command(self.testbed.controller(), command).unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

#[test]
fn killed_daemons_break_no_connection_and_resume_their_work() {
    skip_if!(find_missing_testbed_rights());
    let mut env = start_env("kill", 2, "crossrss");
    let mut connections = open_keepalive_connections(&env.testbed, 20);
    for daemon in ["controller", "lb1", "agent-s1", "agent-s2"] {
        env.fleet.kill_daemon(daemon).unwrap();
        assert_connections_answered(&mut connections);
        // The pinned program also accepts new connections.
        connections.extend(open_keepalive_connections(&env.testbed, 5));
        env.fleet.restart_daemon(&env.testbed, daemon).unwrap();
        env.fleet.wait_until_ready(&env.testbed).unwrap();
        assert_connections_answered(&mut connections);
        connections.extend(open_keepalive_connections(&env.testbed, 5));
    }
    // All daemons are killed at once.
    for daemon in ["agent-s1", "agent-s2", "lb1", "controller"] {
        env.fleet.kill_daemon(daemon).unwrap();
    }
    assert_connections_answered(&mut connections);
    connections.extend(open_keepalive_connections(&env.testbed, 5));
    for daemon in ["controller", "lb1", "agent-s1", "agent-s2"] {
        env.fleet.restart_daemon(&env.testbed, daemon).unwrap();
    }
    env.fleet.wait_until_ready(&env.testbed).unwrap();
    assert_connections_answered(&mut connections);
}

#[test]
fn server_with_a_new_mac_address_is_resolved_again() {
    skip_if!(find_missing_testbed_rights());
    let env = start_env("mac", 1, "hash");
    let mut connections = open_keepalive_connections(&env.testbed, 3);
    let mut command = Command::new("ip");
    command.args(["link", "set", "dev", HOST_DEVICE, "address", "02:00:00:00:00:77"]);
    env.testbed.run_command(env.testbed.server(1).unwrap(), command).unwrap();
    // The client may keep its own neighbour entry for the server. It would matter only for packets from client to
    // server, and there are none.
    let start = Instant::now();
    assert_connections_answered(&mut connections);
    open_keepalive_connections(&env.testbed, 3);
    // ARP takes seconds, and TCP sends again at growing intervals.
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

#[test]
fn draining_server_keeps_connections_and_gets_no_new_ones() {
    skip_if!(find_missing_testbed_rights());
    let mut env = start_env("drain", 2, "rr");
    let mut connections = open_keepalive_connections(&env.testbed, 20);
    assert!(connections.iter().any(|(_, answerer)| answerer.server_number == 1));
    let mut pool = env.fleet.server_pool().clone();
    pool.insert(1, ServerAdminState::Draining);
    env.fleet.set_server_pool(&env.testbed, pool.clone()).unwrap();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "server 1 drains", || {
        open_keepalive_connections(&env.testbed, 10).iter().all(|(_, answerer)| answerer.server_number == 2)
    });
    assert_connections_answered(&mut connections);
    // The server is removed from the file, but its connections stay.
    pool.remove(&1);
    env.fleet.set_server_pool(&env.testbed, pool.clone()).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert_connections_answered(&mut connections);
    assert!(open_keepalive_connections(&env.testbed, 10).iter().all(|(_, answerer)| answerer.server_number == 2));
    // The server returns to the pool.
    pool.insert(1, ServerAdminState::Active);
    env.fleet.set_server_pool(&env.testbed, pool).unwrap();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "server 1 is back", || {
        open_keepalive_connections(&env.testbed, 10).iter().any(|(_, answerer)| answerer.server_number == 1)
    });
    assert_connections_answered(&mut connections);
}

#[test]
fn explain_predicts_the_serving_server_and_core() {
    skip_if!(find_missing_testbed_rights());
    let env = start_env("explain", 3, "hash");
    let worker_pids: Vec<Vec<u32>> = env.nginx_servers.iter().map(NginxServer::worker_pids).collect();
    let client_address = env.testbed.client_ipv4_address(0);
    // Wait, because an agent searches for workers once a second.
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "connections are steered at every server", || {
        open_keepalive_connections(&env.testbed, 8);
        let status = env.fleet.query_status(&env.testbed).unwrap();
        let is_steering =
            |server: &serde_json::Value| server["counters"]["steered"].as_u64().is_some_and(|count| count > 0);
        status["servers"].as_array().unwrap().iter().all(is_steering)
    });
    // Use ports that the kernel has not drawn for those connections (net.ipv4.ip_local_port_range).
    for port in 20_300..20_332 {
        let source_address = SocketAddrV4::new(client_address, port);
        let explanation = env.explain_connection(source_address);
        let answering_worker =
            env.run_in_client_namespace(|| HttpConnection::open(Some(source_address)).unwrap().query_worker().unwrap());
        assert_eq!(
            explanation["chosen_server"],
            format!("s{}", answering_worker.server_number),
            "{source_address}: {explanation}"
        );
        let explained_servers = explanation["servers"].as_array().unwrap();
        let chosen_server =
            explained_servers.iter().find(|server| server["name"] == explanation["chosen_server"]).unwrap();
        // With `steer = "order"`, the k-th worker serves what RSS sends to core k.
        let core_index = chosen_server["core"].as_u64().unwrap() as usize;
        assert_eq!(
            worker_pids[usize::from(answering_worker.server_number) - 1][core_index],
            answering_worker.worker_pid,
            "{source_address}: {explanation}"
        );
    }
}

#[test]
fn error_of_a_missing_interface_contains_its_name() {
    skip_if!(find_missing_testbed_rights());
    let options = TestbedOptions { instance_name: "noif".to_owned(), server_count: 0, ..Default::default() };
    let testbed = Testbed::create(options).unwrap();
    let config_path = testbed.directory().join("lb.toml");
    let lb_config = format!(
        "name = \"lb\"\ncontroller = \"10.1.0.2:7400\"\ninterface = \"eth7\"\npin_directory = \"{}\"\n",
        testbed.load_balancer_pin_directory(1).display()
    );
    std::fs::write(&config_path, lb_config).unwrap();
    let mut command = Command::new(coreward_testbed::fleet::coreward_binary_path().unwrap());
    command.arg("lb").arg("--config").arg(&config_path);
    let error = testbed.run_command(testbed.load_balancer(1).unwrap(), command).unwrap_err().to_string();
    assert!(error.contains("eth7") && error.contains("does not exist"), "{error}");
}
