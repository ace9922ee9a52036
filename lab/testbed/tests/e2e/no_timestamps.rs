//! Clients without TCP timestamps cannot return a cookie. Still no connection may break while servers and load
//! balancers come and go one after the other.

use std::time::Duration;

use coreward_testbed::fleet::{ServerAdminState, TestbedFleetOptions};
use coreward_testbed::{TestbedOptions, find_missing_testbed_rights, skip_if};

use crate::support::{FleetTestEnv, assert_streams_unbroken};

fn start_env(instance: &str, load_balancer_count: u16) -> FleetTestEnv {
    let options = TestbedOptions {
        instance_name: instance.to_owned(),
        server_count: 5,
        load_balancer_count,
        ..TestbedOptions::default()
    };
    let mut env = FleetTestEnv::start(options, TestbedFleetOptions::default());
    env.testbed.client().set_sysctls(&[("ipv4/tcp_timestamps", "0")]).unwrap();
    env.set_admin_state(5, None);
    env.fleet.wait_until_ready(&env.testbed).unwrap();
    env
}

#[test]
fn flow_table_keeps_connections_while_servers_join_and_leave() {
    skip_if!(find_missing_testbed_rights());
    let mut env = start_env("nots", 1);
    let stream_client = env.start_streams(150.0);
    for (server, admin_state) in [
        (5, Some(ServerAdminState::Active)),
        (1, Some(ServerAdminState::Draining)),
        (2, None),
        (1, Some(ServerAdminState::Active)),
        (3, Some(ServerAdminState::Draining)),
    ] {
        env.wait_for_connections(225);
        env.set_admin_state(server, admin_state);
    }
    assert_streams_unbroken(stream_client);
    assert!(env.sum_lb_counter("flow_table") > 1_000 && env.sum_lb_counter("established") == 0);
}

#[test]
fn load_balancer_without_flow_entry_finds_the_server() {
    skip_if!(find_missing_testbed_rights());
    let mut env = start_env("notslb", 2);
    let stream_client = env.start_streams(150.0);
    env.wait_for_connections(300);
    // The table of the load balancer that takes over contains the previous server of a bucket that has moved once.
    env.set_admin_state(5, Some(ServerAdminState::Active));
    env.wait_for_connections(300);
    env.fleet.kill_load_balancer(&mut env.testbed, 1, Duration::from_millis(150)).unwrap();
    env.wait_for_connections(225);
    assert_eq!(env.fleet.add_load_balancer(&mut env.testbed).unwrap(), 3);
    assert_streams_unbroken(stream_client);
}
