//! Servers in another subnet, behind a router: load balancers encapsulate, servers decapsulate and answer the client
//! directly.

use coreward_model::forwarding::Forwarding;
use coreward_testbed::addresses::load_balancer_address;
use coreward_testbed::fleet::{AdminState, FleetOptions};
use coreward_testbed::{TIMEOUT, TestbedOptions, skip_without_privilege};

use crate::support::{TestEnv, eventually, unbroken};

fn site(instance: &str, forwarding: Forwarding) -> TestEnv {
    let options =
        TestbedOptions { instance: instance.to_owned(), servers: 3, routed_servers: true, ..TestbedOptions::default() };
    let agents_more = format!("decapsulate_from = [\"{}\"]\n", load_balancer_address(1));
    TestEnv::start(
        options,
        FleetOptions { forwarding, agents_more, policy: "rr".to_owned(), ..FleetOptions::default() },
    )
}

fn streams_survive_changes_of_the_pool(instance: &str, forwarding: Forwarding) {
    let mut site = site(instance, forwarding);
    let client = site.streams(20.0);
    site.connections(60);
    site.set(1, Some(AdminState::Draining));
    site.connections(40);
    site.set(1, Some(AdminState::Active));
    site.set(2, Some(AdminState::Draining));
    site.connections(40);
    unbroken(client);
    eventually(*TIMEOUT, "the load balancer reports", || site.counters("established") > 100);
    for counter in ["drop_exceeds_mtu", "drop_server_unresolved", "drop_not_broadcast"] {
        assert_eq!(site.counters(counter), 0, "{counter}");
    }
}

#[test]
fn streams_survive_changes_of_a_routed_pool_by_ipip() {
    if skip_without_privilege("streams_survive_changes_of_a_routed_pool_by_ipip") {
        return;
    }
    streams_survive_changes_of_the_pool("routedipip", Forwarding::Ipip);
}

#[test]
fn streams_survive_changes_of_a_routed_pool_by_gue() {
    if skip_without_privilege("streams_survive_changes_of_a_routed_pool_by_gue") {
        return;
    }
    streams_survive_changes_of_the_pool("routedgue", Forwarding::Gue);
}
