//! Clients without TCP timestamps: no cookie can come back, and yet no connection breaks while servers and load balancers
//! come and go one after the other.

use std::time::Duration;

use coreward_testbed::fleet::{AdminState, FleetOptions};
use coreward_testbed::{TestbedOptions, missing_testbed_rights, skip_if};

use crate::support::{TestEnv, unbroken};

fn site(instance: &str, load_balancers: u16) -> TestEnv {
    let options =
        TestbedOptions { instance: instance.to_owned(), servers: 5, load_balancers, ..TestbedOptions::default() };
    let mut site = TestEnv::start(options, FleetOptions::default());
    site.testbed.client().set_sysctls(&[("ipv4/tcp_timestamps", "0")]).unwrap();
    site.set(5, None);
    site.fleet.wait_until_ready(&site.testbed).unwrap();
    site
}

#[test]
fn flow_table_keeps_connections_while_servers_join_and_leave() {
    skip_if!(missing_testbed_rights());
    let mut site = site("nots", 1);
    let client = site.streams(150.0);
    for (server, standing) in [
        (5, Some(AdminState::Active)),
        (1, Some(AdminState::Draining)),
        (2, None),
        (1, Some(AdminState::Active)),
        (3, Some(AdminState::Draining)),
    ] {
        site.connections(225);
        site.set(server, standing);
    }
    unbroken(client);
    assert!(site.counters("flow_table") > 1_000 && site.counters("established") == 0);
}

#[test]
fn load_balancer_without_the_flow_finds_its_server() {
    skip_if!(missing_testbed_rights());
    let mut site = site("notslb", 2);
    let client = site.streams(150.0);
    site.connections(300);
    // The load balancer that takes over knows the server before of a bucket that changed hands once.
    site.set(5, Some(AdminState::Active));
    site.connections(300);
    site.fleet.kill_load_balancer(&mut site.testbed, 1, Duration::from_millis(150)).unwrap();
    site.connections(225);
    assert_eq!(site.fleet.add_load_balancer(&mut site.testbed).unwrap(), 3);
    unbroken(client);
}
