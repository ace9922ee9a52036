//! Clients without TCP timestamps: no cookie can come back, and yet no connection breaks while servers and load
//! balancers come and go one after the other.

use std::time::Duration;

use coreward_testbed::fleet::{AdminState, FleetOptions};
use coreward_testbed::{TestbedOptions, missing_testbed_rights, skip_if};

use crate::support::{TestEnv, assert_unbroken};

fn start_env(instance: &str, load_balancers: u16) -> TestEnv {
    let options =
        TestbedOptions { instance: instance.to_owned(), servers: 5, load_balancers, ..TestbedOptions::default() };
    let mut site = TestEnv::start(options, FleetOptions::default());
    site.testbed.client().set_sysctls(&[("ipv4/tcp_timestamps", "0")]).unwrap();
    site.set_admin_state(5, None);
    site.fleet.wait_until_ready(&site.testbed).unwrap();
    site
}

#[test]
fn flow_table_keeps_connections_while_servers_join_and_leave() {
    skip_if!(missing_testbed_rights());
    let mut site = start_env("nots", 1);
    let client = site.start_streams(150.0);
    for (server, standing) in [
        (5, Some(AdminState::Active)),
        (1, Some(AdminState::Draining)),
        (2, None),
        (1, Some(AdminState::Active)),
        (3, Some(AdminState::Draining)),
    ] {
        site.wait_for_connections(225);
        site.set_admin_state(server, standing);
    }
    assert_unbroken(client);
    assert!(site.counters("flow_table") > 1_000 && site.counters("established") == 0);
}

#[test]
fn load_balancer_without_the_flow_finds_its_server() {
    skip_if!(missing_testbed_rights());
    let mut site = start_env("notslb", 2);
    let client = site.start_streams(150.0);
    site.wait_for_connections(300);
    // The load balancer that takes over knows the server before of a bucket that changed hands once.
    site.set_admin_state(5, Some(AdminState::Active));
    site.wait_for_connections(300);
    site.fleet.kill_load_balancer(&mut site.testbed, 1, Duration::from_millis(150)).unwrap();
    site.wait_for_connections(225);
    assert_eq!(site.fleet.add_load_balancer(&mut site.testbed).unwrap(), 3);
    assert_unbroken(client);
}
