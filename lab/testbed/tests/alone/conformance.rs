//! Short run of `coreward-lab testbed conformance`, with the same parts for seconds instead of minutes.

use coreward_model::forwarding::ForwardingMode;
use coreward_testbed::addresses::AddressFamily;
use coreward_testbed::conformance::{ConformanceArgs, run_conformance_test};
use coreward_testbed::network_options::TestbedNetworkOptions;
use coreward_testbed::{find_missing_testbed_rights, skip_if};

fn assert_conformance_run_passes(instance: &str, syncookies: u8, network: TestbedNetworkOptions) {
    let options = ConformanceArgs { wrk_seconds: 8, downloads: 200, idle_seconds: 40, syncookies, network };
    let outcome = run_conformance_test(instance, options).unwrap();
    println!("{outcome:#?}");
    assert!(outcome.has_passed(), "{outcome:#?}");
    assert!(outcome.used_tables > 50 && outcome.pool_changes > 10, "{outcome:#?}");
}

#[test]
fn stock_clients_and_servers_have_no_errors() {
    skip_if!(find_missing_testbed_rights());
    assert_conformance_run_passes("conform", 1, TestbedNetworkOptions::default());
}

#[test]
fn stock_clients_have_no_errors_with_syn_cookies() {
    skip_if!(find_missing_testbed_rights());
    assert_conformance_run_passes("cookies", 2, TestbedNetworkOptions::default());
}

#[test]
fn stock_ipv6_clients_and_servers_have_no_errors() {
    skip_if!(find_missing_testbed_rights());
    assert_conformance_run_passes(
        "conform6",
        1,
        TestbedNetworkOptions { family: AddressFamily::Ipv6, ..TestbedNetworkOptions::default() },
    );
}

#[test]
fn stock_clients_and_routed_ipv6_servers_have_no_errors() {
    skip_if!(find_missing_testbed_rights());
    assert_conformance_run_passes(
        "conformgue",
        1,
        TestbedNetworkOptions { forwarding: ForwardingMode::Gue, family: AddressFamily::Ipv6 },
    );
}
