//! Servers in another subnet, behind a router. Load balancers encapsulate packets, and servers decapsulate them and
//! answer the client directly. The address families of the service and of the servers are independent.

use std::time::SystemTime;

use coreward_model::forwarding::ForwardingMode;
use coreward_testbed::addresses::{AddressFamily, HOST_DEVICE};
use coreward_testbed::fleet::{ServerAdminState, TestbedFleetOptions};
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, TestbedOptions, find_missing_testbed_rights, skip_if};

use crate::support::{
    FleetTestEnv, assert_eventually, assert_streams_unbroken, measure_duration_until_logged, run_command_line,
};

fn start_env(
    instance: &str,
    forwarding: ForwardingMode,
    family: AddressFamily,
    servers_family: AddressFamily,
) -> FleetTestEnv {
    let options = TestbedOptions {
        instance_name: instance.to_owned(),
        server_count: 3,
        has_server_router: true,
        family,
        ..TestbedOptions::default()
    };
    let policy = "rr".to_owned();
    FleetTestEnv::start(
        options,
        TestbedFleetOptions {
            forwarding,
            server_address_family: servers_family,
            policy_name: policy,
            ..TestbedFleetOptions::default()
        },
    )
}

/// Asserts that no stream breaks when the server pool changes. `family` is the service's address family.
/// `servers_family` is that of the servers' addresses and of the outer headers.
fn assert_streams_survive_pool_changes(
    instance: &str,
    forwarding: ForwardingMode,
    family: AddressFamily,
    servers_family: AddressFamily,
) {
    let mut env = start_env(instance, forwarding, family, servers_family);
    let stream_client = env.start_streams(20.0);
    env.wait_for_connections(60);
    env.set_admin_state(1, Some(ServerAdminState::Draining));
    env.wait_for_connections(40);
    env.set_admin_state(1, Some(ServerAdminState::Active));
    env.set_admin_state(2, Some(ServerAdminState::Draining));
    env.wait_for_connections(40);
    assert_streams_unbroken(stream_client);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the load balancer reports", || env.sum_lb_counter("established") > 100);
    for counter in ["drop_exceeds_mtu", "drop_server_unresolved"] {
        assert_eq!(env.sum_lb_counter(counter), 0, "{counter}");
    }
    env.assert_counter_within_reset_count("drop_not_broadcast");
}

#[test]
fn streams_in_ipip_survive_routed_pool_changes() {
    skip_if!(find_missing_testbed_rights());
    assert_streams_survive_pool_changes("routedipip", ForwardingMode::Ipip, AddressFamily::Ipv4, AddressFamily::Ipv4);
}

#[test]
fn streams_in_gue_survive_routed_pool_changes() {
    skip_if!(find_missing_testbed_rights());
    assert_streams_survive_pool_changes("routedgue", ForwardingMode::Gue, AddressFamily::Ipv4, AddressFamily::Ipv4);
}

#[test]
fn ipv6_streams_in_ipip_survive_routed_ipv6_pool_changes() {
    skip_if!(find_missing_testbed_rights());
    assert_streams_survive_pool_changes("routed66ipip", ForwardingMode::Ipip, AddressFamily::Ipv6, AddressFamily::Ipv6);
}

#[test]
fn ipv6_streams_in_gue_survive_routed_ipv6_pool_changes() {
    skip_if!(find_missing_testbed_rights());
    assert_streams_survive_pool_changes("routed66gue", ForwardingMode::Gue, AddressFamily::Ipv6, AddressFamily::Ipv6);
}

#[test]
fn ipv6_streams_in_ipip_survive_routed_ipv4_pool_changes() {
    skip_if!(find_missing_testbed_rights());
    assert_streams_survive_pool_changes("routed64ipip", ForwardingMode::Ipip, AddressFamily::Ipv6, AddressFamily::Ipv4);
}

#[test]
fn ipv6_streams_in_gue_survive_routed_ipv4_pool_changes() {
    skip_if!(find_missing_testbed_rights());
    assert_streams_survive_pool_changes("routed64gue", ForwardingMode::Gue, AddressFamily::Ipv6, AddressFamily::Ipv4);
}

#[test]
fn ipv4_streams_in_ipip_survive_routed_ipv6_pool_changes() {
    skip_if!(find_missing_testbed_rights());
    assert_streams_survive_pool_changes("routed46ipip", ForwardingMode::Ipip, AddressFamily::Ipv4, AddressFamily::Ipv6);
}

#[test]
fn ipv4_streams_in_gue_survive_routed_ipv6_pool_changes() {
    skip_if!(find_missing_testbed_rights());
    assert_streams_survive_pool_changes("routed46gue", ForwardingMode::Gue, AddressFamily::Ipv4, AddressFamily::Ipv6);
}

/// Tests streams over a link on which the router has no IPv4 address, as in fabrics with unnumbered links (RFC 8950).
#[test]
fn streams_survive_a_change_to_an_ipv6_next_hop() {
    skip_if!(find_missing_testbed_rights());
    let env = start_env("routedvia", ForwardingMode::Ipip, AddressFamily::Ipv4, AddressFamily::Ipv4);
    let stream_client = env.start_streams(20.0);
    env.wait_for_connections(60);
    let (router, balancer) = (env.testbed.server_router().unwrap(), env.testbed.load_balancer(1).unwrap());
    let link_local_addresses =
        run_command_line(&env.testbed, router, &format!("ip -6 -oneline address show dev {HOST_DEVICE} scope link"));
    let link_local_address = link_local_addresses
        .split_whitespace()
        .find_map(|token| token.strip_suffix("/64"))
        .expect(&link_local_addresses);
    let change_time = SystemTime::now();
    run_command_line(
        &env.testbed,
        balancer,
        &format!("ip route replace 10.1.1.0/24 via inet6 {link_local_address} dev {HOST_DEVICE}"),
    );
    let next_hop_event = "event=\"next-hops-changed\"";
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, next_hop_event, || {
        measure_duration_until_logged(&env.testbed, 1, next_hop_event, change_time).is_some()
    });
    env.wait_for_connections(60);
    assert_streams_unbroken(stream_client);
    assert_eq!(env.sum_lb_counter("drop_server_unresolved"), 0);
}
