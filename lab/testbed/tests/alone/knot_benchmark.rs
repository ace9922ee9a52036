//! Test of Knot DNS from Debian, with and without `coreward dispatch`. Every query is answered, whatever selects the
//! worker.

use std::path::Path;
use std::process::Command;

use anyhow::Context as _;
use coreward_testbed::fleet::lab_binary_path;
use coreward_testbed::knot_benchmark::knot;
use coreward_testbed::{find_missing_testbed_rights, skip_if};

#[test]
fn knotd_answers_every_dispatched_query() -> anyhow::Result<()> {
    let missing_knotd_reason = || format!("{} is missing (Debian package knot)", knot::KNOTD_PATH);
    skip_if!(
        find_missing_testbed_rights().or_else(|| (!Path::new(knot::KNOTD_PATH).exists()).then(missing_knotd_reason)),
        Ok(())
    );
    let options = ["--policies", "kernel,rr,jsq", "--workers", "3", "--rate", "300", "--seconds", "1", "--runs", "1"];
    let mut command = Command::new(lab_binary_path()?);
    command.args(["testbed", "knot-benchmark", "--format", "json"]).args(options);
    // Allow any lateness, because the test asserts counts, which a busy machine does not change.
    let output = command.env("COREWARD_MAX_LATENESS_US", "1e9").output()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let comparison: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let policies = comparison["policies"].as_array().context("policies")?;
    assert_eq!(policies.len(), 3);
    for policy_result in policies {
        assert_eq!(policy_result["lost"], 0, "{policy_result}");
        // Arrivals are a Poisson process, so 300 are expected with a standard deviation of 17.
        let answered_rps = policy_result["answered_rps"]["median"].as_f64().context("answered_rps")?;
        assert!((200.0..400.0).contains(&answered_rps), "{policy_result}");
    }
    Ok(())
}
