//! Several load balancers behind ECMP are added, restarted, upgraded, rebooted and killed under load while the pool
//! changes. No connection may break.

use std::time::Duration;

use coreward_model::consistency::ConsistencyMode;
use coreward_testbed::addresses::AddressFamily;
use coreward_testbed::fleet::{ServerAdminState, TestbedFleetOptions};
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, TestbedOptions, find_missing_testbed_rights, skip_if};

use crate::support::{FleetTestEnv, assert_eventually, assert_streams_unbroken};

const FAILURE_DETECTION_TIME: Duration = Duration::from_millis(150);

fn start_env(instance: &str, consistency: ConsistencyMode, family: AddressFamily) -> FleetTestEnv {
    let options = TestbedOptions {
        instance_name: instance.to_owned(),
        server_count: 4,
        load_balancer_count: 2,
        family,
        ..TestbedOptions::default()
    };
    FleetTestEnv::start(
        options,
        TestbedFleetOptions { consistency, policy_name: "rr".to_owned(), ..TestbedFleetOptions::default() },
    )
}

/// Asserts that no connection breaks when servers and load balancers are drained, added, killed and removed.
fn assert_connections_survive_lb_changes(env: &mut FleetTestEnv) {
    let stream_client = env.start_streams(150.0);
    env.wait_for_connections(225);
    // From here on, `rr` selects other servers for most connections. So packets that are placed by a rule instead of by
    // a cookie reach the wrong server.
    env.set_admin_state(1, Some(ServerAdminState::Draining));
    env.wait_for_connections(75);
    assert_eq!(env.fleet.add_load_balancer(&mut env.testbed).unwrap(), 3);
    env.wait_for_connections(75);
    for daemon in ["lb1", "lb3"] {
        env.fleet.kill_daemon(daemon).unwrap();
        env.wait_for_connections(30);
        env.fleet.restart_daemon(&env.testbed, daemon).unwrap();
    }
    env.fleet.wait_until_ready(&env.testbed).unwrap();
    env.fleet.upgrade_daemon(&env.testbed, "lb2").unwrap();
    env.wait_for_connections(75);
    env.fleet.reboot_load_balancer(&env.testbed, 2).unwrap();
    env.wait_for_connections(75);
    env.set_admin_state(2, None);
    env.wait_for_connections(75);
    env.fleet.kill_load_balancer(&mut env.testbed, 1, FAILURE_DETECTION_TIME).unwrap();
    assert_streams_unbroken(stream_client);
}

#[test]
fn load_balancers_join_and_leave_without_breaking_connections() {
    skip_if!(find_missing_testbed_rights());
    let mut env = start_env("lbs", ConsistencyMode::Stateless, AddressFamily::Ipv4);
    assert_connections_survive_lb_changes(&mut env);
    for daemon in ["lb2", "lb3"] {
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, daemon, || env.query_load_balancer_counter(daemon, "established") > 0);
    }
}

#[test]
fn connections_survive_lost_connection_tables() {
    skip_if!(find_missing_testbed_rights());
    assert_lost_tables_break_no_connection("lbsfull", AddressFamily::Ipv4);
}

/// Tests IPv6 connections whose packets change to another load balancer, as after a client draws a new flow label.
#[test]
fn ipv6_connections_survive_lost_connection_tables() {
    skip_if!(find_missing_testbed_rights());
    assert_lost_tables_break_no_connection("lbsfull6", AddressFamily::Ipv6);
}

fn assert_lost_tables_break_no_connection(instance: &str, family: AddressFamily) {
    let mut env = start_env(instance, ConsistencyMode::Stateful, family);
    assert_connections_survive_lb_changes(&mut env);
    // Some packets must have reached a load balancer that does not own the entry. Others must have been broadcast after
    // the owner was gone.
    for counter in ["connection_table", "to_owner", "broadcast_owner_lost"] {
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, counter, || env.sum_lb_counter(counter) > 0);
    }
}
