//! Servers in another subnet, behind a router: load balancers encapsulate, servers decapsulate and answer the client
//! directly. Families of the service and of the servers' addresses are independent.

use std::time::SystemTime;

use coreward_model::forwarding::Forwarding;
use coreward_testbed::addresses::{AddressFamily, DEVICE};
use coreward_testbed::fleet::{AdminState, FleetOptions};
use coreward_testbed::{TIMEOUT, TestbedOptions, missing_testbed_rights, skip_if};

use crate::support::{TestEnv, assert_unbroken, duration_until_logged, eventually, run};

fn start_env(instance: &str, forwarding: Forwarding, family: AddressFamily, servers_family: AddressFamily) -> TestEnv {
    let options = TestbedOptions {
        instance: instance.to_owned(),
        servers: 3,
        routed_servers: true,
        family,
        ..TestbedOptions::default()
    };
    let policy = "rr".to_owned();
    TestEnv::start(options, FleetOptions { forwarding, servers_family, policy, ..FleetOptions::default() })
}

/// `family`: address family of the service; `servers_family`: of the servers' addresses, and so of the outer headers.
fn streams_survive_changes_of_the_pool(
    instance: &str,
    forwarding: Forwarding,
    family: AddressFamily,
    servers_family: AddressFamily,
) {
    let mut env = start_env(instance, forwarding, family, servers_family);
    let client = env.start_streams(20.0);
    env.wait_for_connections(60);
    env.set_admin_state(1, Some(AdminState::Draining));
    env.wait_for_connections(40);
    env.set_admin_state(1, Some(AdminState::Active));
    env.set_admin_state(2, Some(AdminState::Draining));
    env.wait_for_connections(40);
    assert_unbroken(client);
    eventually(*TIMEOUT, "the load balancer reports", || env.sum_counter("established") > 100);
    for counter in ["drop_exceeds_mtu", "drop_server_unresolved"] {
        assert_eq!(env.sum_counter(counter), 0, "{counter}");
    }
    env.assert_only_resets("drop_not_broadcast");
}

#[test]
fn streams_survive_changes_of_a_routed_pool_by_ipip() {
    skip_if!(missing_testbed_rights());
    streams_survive_changes_of_the_pool("routedipip", Forwarding::Ipip, AddressFamily::Ipv4, AddressFamily::Ipv4);
}

#[test]
fn streams_survive_changes_of_a_routed_pool_by_gue() {
    skip_if!(missing_testbed_rights());
    streams_survive_changes_of_the_pool("routedgue", Forwarding::Gue, AddressFamily::Ipv4, AddressFamily::Ipv4);
}

#[test]
fn ipv6_streams_survive_changes_of_a_routed_ipv6_pool_by_ipip() {
    skip_if!(missing_testbed_rights());
    streams_survive_changes_of_the_pool("routed66ipip", Forwarding::Ipip, AddressFamily::Ipv6, AddressFamily::Ipv6);
}

#[test]
fn ipv6_streams_survive_changes_of_a_routed_ipv6_pool_by_gue() {
    skip_if!(missing_testbed_rights());
    streams_survive_changes_of_the_pool("routed66gue", Forwarding::Gue, AddressFamily::Ipv6, AddressFamily::Ipv6);
}

#[test]
fn ipv6_streams_survive_changes_of_a_routed_ipv4_pool_by_ipip() {
    skip_if!(missing_testbed_rights());
    streams_survive_changes_of_the_pool("routed64ipip", Forwarding::Ipip, AddressFamily::Ipv6, AddressFamily::Ipv4);
}

#[test]
fn ipv6_streams_survive_changes_of_a_routed_ipv4_pool_by_gue() {
    skip_if!(missing_testbed_rights());
    streams_survive_changes_of_the_pool("routed64gue", Forwarding::Gue, AddressFamily::Ipv6, AddressFamily::Ipv4);
}

#[test]
fn streams_survive_changes_of_a_routed_ipv6_pool_by_ipip() {
    skip_if!(missing_testbed_rights());
    streams_survive_changes_of_the_pool("routed46ipip", Forwarding::Ipip, AddressFamily::Ipv4, AddressFamily::Ipv6);
}

#[test]
fn streams_survive_changes_of_a_routed_ipv6_pool_by_gue() {
    skip_if!(missing_testbed_rights());
    streams_survive_changes_of_the_pool("routed46gue", Forwarding::Gue, AddressFamily::Ipv4, AddressFamily::Ipv6);
}

/// Routers have no IPv4 address on this link, as in fabrics with unnumbered links (RFC 8950).
#[test]
fn streams_survive_a_change_to_an_ipv6_next_hop() {
    skip_if!(missing_testbed_rights());
    let env = start_env("routedvia", Forwarding::Ipip, AddressFamily::Ipv4, AddressFamily::Ipv4);
    let client = env.start_streams(20.0);
    env.wait_for_connections(60);
    let (router, balancer) = (env.testbed.server_router().unwrap(), env.testbed.load_balancer(1).unwrap());
    let addresses = run(&env.testbed, router, &format!("ip -6 -oneline address show dev {DEVICE} scope link"));
    let address = addresses.split_whitespace().find_map(|word| word.strip_suffix("/64")).expect(&addresses);
    let changed = SystemTime::now();
    run(&env.testbed, balancer, &format!("ip route replace 10.1.1.0/24 via inet6 {address} dev {DEVICE}"));
    let event = "event=\"next-hops-changed\"";
    eventually(*TIMEOUT, event, || duration_until_logged(&env.testbed, 1, event, changed).is_some());
    env.wait_for_connections(60);
    assert_unbroken(client);
    assert_eq!(env.sum_counter("drop_server_unresolved"), 0);
}
