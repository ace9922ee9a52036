//! Short run of `coreward-lab testbed chaos`, with the same faults and clients for seconds instead of minutes.

use coreward_testbed::chaos::{ChaosArgs, run_chaos_test};
use coreward_testbed::network_options::TestbedNetworkOptions;
use coreward_testbed::{find_missing_testbed_rights, skip_if};

#[test]
fn faults_break_no_connection_and_lose_no_configuration_change() {
    skip_if!(find_missing_testbed_rights());
    let options = ChaosArgs {
        seconds: 20,
        seed: 1,
        faults: Vec::new(),
        config_changes: 30,
        controllers: 1,
        racks: 2,
        network: TestbedNetworkOptions::default(),
        upgrade_binary: None,
        json: false,
    };
    let outcome = run_chaos_test("chaostest", &options).unwrap();
    println!("{outcome}");
    assert!(outcome.has_passed());
    assert!(outcome.fault_counts.values().sum::<u64>() >= 3, "{:?}", outcome.fault_counts);
    assert!(outcome.write_counts.acknowledged_changes > 10 && outcome.observations.status_checks > 3, "{outcome}");
    assert!(outcome.write_counts.acknowledged_drains > 0, "{outcome}");
    let traffic = &outcome.traffic;
    assert!(
        [traffic.downloads, traffic.requests, traffic.short_connections, traffic.kept_connections, traffic.streams]
            .iter()
            .all(|count| count.successful > 0)
    );
}
