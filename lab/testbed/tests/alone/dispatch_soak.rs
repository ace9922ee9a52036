//! Short run of `coreward-lab testbed dispatch-soak`, with the same faults for seconds instead of minutes.

use coreward_testbed::dispatch_soak::{DispatchSoakArgs, run_soak_test};
use coreward_testbed::{find_missing_testbed_rights, skip_if};

#[test]
fn dispatch_counters_are_exact_under_faults() {
    skip_if!(find_missing_testbed_rights());
    let outcome = run_soak_test("dsoak", DispatchSoakArgs { seconds: 24, seed: 2, settle_ms: 60_000 }).unwrap();
    println!("{outcome:#?}");
    assert!(outcome.violations.is_empty(), "{:#?}", outcome.violations);
    let injected_faults = &outcome.fault_counts;
    assert!(
        injected_faults.worker_kills > 0 && injected_faults.floods > 0 && injected_faults.spoofed_responses > 0,
        "{injected_faults:?}"
    );
    assert!(
        injected_faults.daemon_restarts > 0 && injected_faults.detachments + injected_faults.server_restarts > 0,
        "{injected_faults:?}"
    );
    assert!(outcome.load_requests > 10_000, "{}", outcome.load_requests);
}
