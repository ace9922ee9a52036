//! A service with an IPv6 VIP over servers that coreward reaches by IPv4. New connections are balanced. No connection
//! may break while the pool changes, or when a load balancer or the controller restarts.

use std::collections::BTreeSet;
use std::net::TcpStream;

use coreward_model::consistency::{ConsistencyMode, CookieStamper};
use coreward_testbed::addresses::{AddressFamily, HOST_DEVICE};
use coreward_testbed::fleet::{ServerAdminState, TestbedFleetOptions};
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, TestbedOptions, find_missing_testbed_rights, skip_if};

use crate::support::{FleetTestEnv, assert_eventually, assert_streams_unbroken, run_command_line};

fn start_ipv6_env(instance: &str, fleet_options: TestbedFleetOptions) -> FleetTestEnv {
    let options = TestbedOptions {
        instance_name: instance.to_owned(),
        server_count: 3,
        family: AddressFamily::Ipv6,
        ..TestbedOptions::default()
    };
    FleetTestEnv::start(options, TestbedFleetOptions { policy_name: "rr".to_owned(), ..fleet_options })
}

/// Returns the numbers of the servers that have accepted connections.
fn find_servers_with_connections(env: &FleetTestEnv) -> BTreeSet<u16> {
    let has_connections = |number: &u16| {
        let server = env.testbed.server(*number).unwrap();
        !run_command_line(&env.testbed, server, "ss -6 -H -t -n state established sport = :80").is_empty()
    };
    env.testbed.server_numbers().into_iter().filter(has_connections).collect()
}

/// Asserts that no connection breaks when the server pool changes and daemons restart under load.
fn assert_connections_survive_pool_changes(env: &mut FleetTestEnv) {
    let stream_client = env.start_streams(150.0);
    env.wait_for_connections(225);
    assert_eq!(find_servers_with_connections(env), BTreeSet::from([1, 2, 3]));
    env.set_admin_state(1, Some(ServerAdminState::Draining));
    env.wait_for_connections(150);
    env.fleet.kill_daemon("lb1").unwrap();
    env.wait_for_connections(75);
    env.fleet.restart_daemon(&env.testbed, "lb1").unwrap();
    env.fleet.wait_until_ready(&env.testbed).unwrap();
    env.fleet.upgrade_daemon(&env.testbed, "controller").unwrap();
    env.fleet.wait_until_ready(&env.testbed).unwrap();
    env.set_admin_state(1, Some(ServerAdminState::Active));
    env.set_admin_state(2, None);
    env.wait_for_connections(150);
    assert_streams_unbroken(stream_client);
}

#[test]
fn ipv6_connections_with_cookies_survive_pool_changes_and_restarts() {
    skip_if!(find_missing_testbed_rights());
    let mut env = start_ipv6_env("ipv6", TestbedFleetOptions::default());
    assert_connections_survive_pool_changes(&mut env);
    assert!(env.sum_lb_counter("established") > 1_000 && env.sum_lb_counter("flow_table") == 0);
}

#[test]
fn ipv6_connections_without_cookies_survive_pool_changes_and_restarts() {
    skip_if!(find_missing_testbed_rights());
    let mut env = start_ipv6_env(
        "ipv6off",
        TestbedFleetOptions { timestamps: CookieStamper::Off, ..TestbedFleetOptions::default() },
    );
    assert_connections_survive_pool_changes(&mut env);
    assert!(env.sum_lb_counter("flow_table") > 1_000 && env.sum_lb_counter("established") == 0);
}

#[test]
fn ipv6_services_are_checked_announced_and_explained() {
    skip_if!(find_missing_testbed_rights());
    let options = TestbedFleetOptions {
        extra_fleet_text: "[service.health]\nport = 7600\ninterval = \"200ms\"\n".to_owned(),
        extra_load_balancer_text: "[announce]\n".to_owned(),
        ..TestbedFleetOptions::default()
    };
    let env = start_ipv6_env("ipv6show", options);
    let lb_host = env.testbed.load_balancer(1).unwrap();
    let vip = env.testbed.service_address();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the VIP is announced", || {
        // List all tables, because the table does not exist before its first route, and `ip` would report that as an
        // error.
        run_command_line(&env.testbed, lb_host, "ip -6 route show table all")
            .contains(&format!("blackhole {} dev lo table 7400 proto 174", vip.ip()))
    });
    let explanation =
        env.run_coreward(&["explain", "--vip", &vip.to_string(), "--client", "[2001:db8::a01:7]:40000"]).unwrap();
    assert!(explanation.contains("have their turns in this order"), "{explanation}");
    let mixed_families_error =
        env.run_coreward(&["explain", "--vip", &vip.to_string(), "--client", "10.1.0.7:40000"]).unwrap_err();
    assert!(mixed_families_error.to_string().contains("different address families"), "{mixed_families_error}");
    // No server listens at the port of the checks.
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "servers are down", || {
        let status = env.fleet.query_status(&env.testbed).unwrap();
        let members = status["services"][0]["members"].as_array().unwrap();
        members.len() == 3 && members.iter().all(|member| member["state"] == "down")
    });
}

#[test]
fn ipv6_servers_are_resolved_by_neighbour_discovery() {
    skip_if!(find_missing_testbed_rights());
    let mut env = start_ipv6_env(
        "ipv6nds",
        TestbedFleetOptions { server_address_family: AddressFamily::Ipv6, ..TestbedFleetOptions::default() },
    );
    assert_connections_survive_pool_changes(&mut env);
    let is_s3_unresolved = |env: &FleetTestEnv| {
        let status = env.fleet.query_status(&env.testbed).unwrap();
        status["load_balancers"][0]["state"]["unresolved_servers"] == serde_json::json!(["s3"])
    };
    let server = env.testbed.server(3).unwrap();
    run_command_line(&env.testbed, server, &format!("ip link set {HOST_DEVICE} down"));
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the load balancer misses the server", || is_s3_unresolved(&env));
}

#[test]
fn daemons_reach_the_controller_and_each_other_by_ipv6() {
    skip_if!(find_missing_testbed_rights());
    let fleet_options = TestbedFleetOptions {
        control_address_family: AddressFamily::Ipv6,
        server_address_family: AddressFamily::Ipv6,
        consistency: ConsistencyMode::Stateful,
        ..TestbedFleetOptions::default()
    };
    let family = AddressFamily::Ipv6;
    let options = TestbedOptions {
        instance_name: "ipv6control".to_owned(),
        server_count: 3,
        load_balancer_count: 2,
        family,
        ..TestbedOptions::default()
    };
    let mut env = FleetTestEnv::start(options, TestbedFleetOptions { policy_name: "rr".to_owned(), ..fleet_options });
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "load balancers find each other", || {
        let status = env.fleet.query_status(&env.testbed).unwrap();
        let balancers = status["load_balancers"].as_array().unwrap();
        let has_no_unresolved_peer =
            |balancer: &serde_json::Value| balancer["state"]["unresolved_load_balancers"] == serde_json::json!([]);
        balancers.len() == 2 && balancers.iter().all(has_no_unresolved_peer)
    });
    assert_connections_survive_pool_changes(&mut env);
}

/// Tests health checks of servers that listen only on the VIP, over IPv6.
#[test]
fn ipv6_servers_are_checked_at_the_vip() {
    skip_if!(find_missing_testbed_rights());
    let health_config = "[service.health]\ninterval = \"200ms\"\nfall = 2\n".to_owned();
    let env = start_ipv6_env(
        "ipv6vip",
        TestbedFleetOptions {
            extra_fleet_text: health_config,
            server_address_family: AddressFamily::Ipv6,
            ..TestbedFleetOptions::default()
        },
    );
    let has_checks = |server: &str, is_up: bool| {
        let status = env.fleet.query_status(&env.testbed).unwrap();
        let members = status["services"][0]["members"].as_array().unwrap().clone();
        let is_expected_member =
            |member: &serde_json::Value| member["server"] == server && member["health_checks"][0]["is_up"] == is_up;
        members.iter().any(is_expected_member)
    };
    for server in ["s1", "s2", "s3"] {
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, "checks of every server succeed", || has_checks(server, true));
    }
    let vip = env.testbed.service_address().ip();
    run_command_line(&env.testbed, env.testbed.server(3).unwrap(), &format!("ip -6 address delete {vip}/128 dev lo"));
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "checks of the server without the VIP fail", || has_checks("s3", false));
    assert!(has_checks("s1", true));
}

/// Tests that a VIP on `lo` needs no setting, because Linux answers neighbour solicitations only for addresses of the
/// receiving device.
#[test]
fn server_does_not_answer_neighbour_solicitations_for_a_vip_on_lo() {
    skip_if!(find_missing_testbed_rights());
    let env = start_ipv6_env("ipv6nd", TestbedFleetOptions::default());
    let vip = env.testbed.service_address();
    let client = env.testbed.client();
    let server = env.testbed.server(1).unwrap();
    // The client sends a solicitation for the VIP, as a neighbour would.
    run_command_line(&env.testbed, client, &format!("ip -6 route add {}/128 dev {HOST_DEVICE}", vip.ip()));
    let can_connect =
        || client.run_within(|| Ok(TcpStream::connect_timeout(&vip, *DEFAULT_WAIT_TIMEOUT).is_ok())).unwrap();
    assert!(!can_connect(), "a server answers for the VIP on lo");
    run_command_line(&env.testbed, server, &format!("ip -6 address add {}/128 dev {HOST_DEVICE} nodad", vip.ip()));
    run_command_line(&env.testbed, client, "ip -6 neighbour flush all");
    assert!(can_connect(), "the server does not answer for the VIP on its device");
}
