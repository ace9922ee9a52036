//! Short run of `coreward-lab testbed dispatch-soak`: the same faults, for seconds instead of minutes.

use coreward_testbed::dispatch_soak::{DispatchSoakArgs, run};
use coreward_testbed::{missing_testbed_rights, skip_if};

#[test]
fn outstanding_counts_stay_exact() {
    skip_if!(missing_testbed_rights());
    let outcome = run("dsoak", DispatchSoakArgs { seconds: 24, seed: 2, settle_ms: 60_000 }).unwrap();
    println!("{outcome:#?}");
    assert!(outcome.violations.is_empty(), "{:#?}", outcome.violations);
    let made = &outcome.faults;
    assert!(made.kills > 0 && made.floods > 0 && made.spoofed > 0, "{made:?}");
    assert!(made.upgrades > 0 && made.detachments + made.restarts > 0, "{made:?}");
    assert!(outcome.load_requests > 10_000, "{}", outcome.load_requests);
}
