//! New cookie keys under load must break no connection, including those that began two keys ago.

use std::time::Duration;

use coreward_testbed::fleet::{ServerAdminState, TestbedFleetOptions};
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, TestbedOptions, find_missing_testbed_rights, skip_if};

use crate::support::{FleetTestEnv, assert_eventually, assert_streams_unbroken, wait_until_configuration_in_force};

#[test]
fn key_rotation_breaks_no_connection() {
    skip_if!(find_missing_testbed_rights());
    let options = TestbedOptions {
        instance_name: "keys".to_owned(),
        server_count: 4,
        load_balancer_count: 2,
        ..TestbedOptions::default()
    };
    let mut env = FleetTestEnv::start(
        options,
        TestbedFleetOptions { policy_name: "rr".to_owned(), ..TestbedFleetOptions::default() },
    );
    let stream_client = env.start_streams(150.0);
    env.wait_for_connections(300);
    let stamps_with_new_key = |env: &FleetTestEnv, key: u32| {
        env.run_coreward(&["keys", "show"]).unwrap().contains(&format!("key {key} stamps"))
    };
    assert!(stamps_with_new_key(&env, 0));
    env.set_admin_state(1, Some(ServerAdminState::Draining));
    for (key, upgraded_daemon) in [(1, "lb1"), (0, "agent-s1")] {
        // Force the rotation, because it follows the previous one sooner than is safe for idle connections. These are
        // not idle.
        env.run_coreward(&["keys", "rotate", "--force"]).unwrap();
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the other key stamps", || stamps_with_new_key(&env, key));
        wait_until_configuration_in_force(&env.fleet, &env.testbed);
        // Agents stamp with a new key a second later.
        env.wait_for_connections(225);
        env.fleet.upgrade_daemon(&env.testbed, upgraded_daemon).unwrap();
    }
    env.fleet.kill_load_balancer(&mut env.testbed, 1, Duration::from_millis(150)).unwrap();
    assert_streams_unbroken(stream_client);
}
