//! Clients and servers in VLANs at access ports of a bridge, for which load balancers read, replace, insert and remove
//! tags.

use coreward_model::consistency::{ConsistencyMode, CookieStamper};
use coreward_model::forwarding::ForwardingMode;
use coreward_testbed::addresses::{AddressFamily, HOST_DEVICE};
use coreward_testbed::fleet::{ServerAdminState, TestbedFleetOptions};
use coreward_testbed::topology::TestbedVlans;
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, TestbedOptions, find_missing_testbed_rights, skip_if};
use serde_json::Value;

use crate::support::{FleetTestEnv, assert_eventually, assert_streams_unbroken, run_command_line};

fn start_env(
    instance: &str,
    vlans: (u16, &[u16]),
    family: AddressFamily,
    fleet_options: TestbedFleetOptions,
) -> FleetTestEnv {
    let options = TestbedOptions {
        instance_name: instance.to_owned(),
        server_count: 3,
        family,
        vlans: Some(TestbedVlans { vip_vlan: vlans.0, server_vlans: vlans.1.to_vec() }),
        ..TestbedOptions::default()
    };
    FleetTestEnv::start(options, TestbedFleetOptions { policy_name: "rr".to_owned(), ..fleet_options })
}

/// Asserts that no connection breaks when the server pool changes and the load balancer's daemon restarts under load.
fn assert_connections_survive_pool_changes(env: &mut FleetTestEnv) {
    let stream_client = env.start_streams(100.0);
    env.wait_for_connections(150);
    env.set_admin_state(1, Some(ServerAdminState::Draining));
    env.wait_for_connections(100);
    env.fleet.kill_daemon("lb1").unwrap();
    env.wait_for_connections(50);
    env.fleet.restart_daemon(&env.testbed, "lb1").unwrap();
    env.fleet.wait_until_ready(&env.testbed).unwrap();
    env.set_admin_state(1, Some(ServerAdminState::Active));
    env.set_admin_state(2, None);
    env.wait_for_connections(100);
    assert_streams_unbroken(stream_client);
}

#[test]
fn connections_with_cookies_cross_vlans_and_survive_pool_changes() {
    skip_if!(find_missing_testbed_rights());
    // In frames to servers 1 and 3 the tag is replaced, and frames to server 2 have none.
    let mut env = start_env("vlan", (10, &[20, 0]), AddressFamily::Ipv4, TestbedFleetOptions::default());
    assert_connections_survive_pool_changes(&mut env);
    assert!(env.sum_lb_counter("established") > 500 && env.sum_lb_counter("flow_table") == 0);
    let status_text = env.run_coreward(&["status"]).unwrap();
    assert!(status_text.contains("  VLAN       10\n") && status_text.contains("  10.1.1.1 VLAN 20  "), "{status_text}");
    let explain_arguments = ["explain", "--vip", "10.200.0.1:80", "--client", "192.0.2.7:40312", "--format", "json"];
    let explanation = env.run_coreward(&explain_arguments).unwrap();
    let explained_servers = serde_json::from_str::<Value>(&explanation).unwrap()["servers"].clone();
    let server = explained_servers.as_array().unwrap().iter().find(|server| server["name"] == "s1");
    assert_eq!(server.unwrap()["vlan"], 20, "{explanation}");
    // A frame cannot reach servers in two VLANs, so nothing is broadcast.
    assert_eq!(env.sum_lb_counter("broadcast"), 0);
    env.assert_counter_within_reset_count("drop_not_broadcast");
}

#[test]
fn untagged_clients_reach_ipv6_servers_in_other_vlans() {
    skip_if!(find_missing_testbed_rights());
    let fleet_options =
        TestbedFleetOptions { server_address_family: AddressFamily::Ipv6, ..TestbedFleetOptions::default() };
    let mut env = start_env("vlan6", (0, &[20, 30]), AddressFamily::Ipv6, fleet_options);
    assert_connections_survive_pool_changes(&mut env);
    assert!(env.sum_lb_counter("established") > 500);
}

/// Tests daisy chaining, which needs all servers in one VLAN because it sends packets to another server's MAC address.
#[test]
fn daisy_chained_connections_in_one_vlan_survive_pool_changes() {
    skip_if!(find_missing_testbed_rights());
    let (consistency, timestamps) = (ConsistencyMode::Beamer, CookieStamper::Off);
    let fleet_options = TestbedFleetOptions { consistency, timestamps, ..TestbedFleetOptions::default() };
    let mut env = start_env("vlanchain", (10, &[10]), AddressFamily::Ipv4, fleet_options);
    assert_connections_survive_pool_changes(&mut env);
}

#[test]
fn encapsulated_packets_have_the_tag_of_the_servers_vlan() {
    skip_if!(find_missing_testbed_rights());
    let fleet_options = TestbedFleetOptions { forwarding: ForwardingMode::Gue, ..TestbedFleetOptions::default() };
    let mut env = start_env("vlangue", (10, &[20]), AddressFamily::Ipv4, fleet_options);
    assert_connections_survive_pool_changes(&mut env);
    assert!(env.sum_lb_counter("established") > 500);
    assert_eq!(env.sum_lb_counter("drop_exceeds_mtu"), 0);
}

#[test]
fn frames_keep_tags_and_missing_vlan_device_is_reported() {
    skip_if!(find_missing_testbed_rights());
    let env = start_env("vlanfault", (10, &[20]), AddressFamily::Ipv4, TestbedFleetOptions::default());
    let lb_host = env.testbed.load_balancer(1).unwrap();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the driver leaves tags in frames", || {
        run_command_line(&env.testbed, lb_host, &format!("ethtool -k {HOST_DEVICE}")).contains("rx-vlan-offload: off")
    });
    let missing_device_warning = "has no device for VLAN 10: expected one with an address there";
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the status names the VLAN", || {
        env.fleet.query_status(&env.testbed).unwrap().to_string().contains(missing_device_warning)
    });
}
