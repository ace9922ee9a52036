//! Figures of `coreward dispatch` and `coreward orchestrate` at a reduced size. Every measurement must be made, and
//! every request must be answered.

use std::path::Path;
use std::process::Command;

use coreward_sim::figure::result::FigureResult;
use coreward_testbed::fleet::lab_binary_path;
use coreward_testbed::{find_missing_testbed_rights, skip_if};

fn run_figure(arguments: &[&str]) -> anyhow::Result<FigureResult> {
    let mut command = Command::new(lab_binary_path()?);
    command.arg("figure").args(arguments).args(["--runs", "1", "--format", "json"]);
    // Allow any lateness, because the tests assert counts, which a busy machine does not change.
    let output = command.env("COREWARD_MAX_LATENESS_US", "1e9").output()?;
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Asserts that the figure has `panel_count` panels, each with the curves `expected_labels`, and that no value is below
/// `minimum`.
fn assert_figure_is_complete(result: &FigureResult, panel_count: usize, expected_labels: &[&str], minimum: f64) {
    assert_eq!(result.table.panels.len(), panel_count);
    for panel in &result.table.panels {
        let curve_labels: Vec<&str> = panel.curves.iter().map(|curve| curve.label.as_str()).collect();
        assert_eq!(curve_labels, expected_labels, "{}", panel.title);
        let cell_counts: Vec<usize> = panel.curves.iter().map(|curve| curve.cells.len()).collect();
        assert!(
            cell_counts[0] > 0 && cell_counts.iter().all(|count| *count == cell_counts[0]),
            "{}: {cell_counts:?}",
            panel.title
        );
        let mut cells = panel.curves.iter().flat_map(|curve| &curve.cells);
        assert!(cells.all(|table_cell| table_cell.spread.median >= minimum), "{panel:?}");
    }
}

#[test]
fn live_request_figure_is_complete() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let series = ["random", "jsq", "jsq (simulated)", "jlq"];
    let result = run_figure(&["turbo-9-live", "--seconds", "0.4", "--points", "30,40", "--series", &series.join(",")])?;
    // Peaks are 0 when the first point exceeds the bound. No request is answered before its service time is over.
    assert_figure_is_complete(&result, 2, &series, 0.0);
    let panel_curves = &result.table.panels[0].curves;
    assert!(
        panel_curves.iter().flat_map(|curve| &curve.cells).all(|table_cell| table_cell.spread.median >= 1.0),
        "{panel_curves:?}"
    );
    // Claims about a load of 70 % have no values to check.
    assert_eq!(result.claims.len(), 2);
    assert!(
        result.provenance.command.ends_with("--seconds 0.4 --series 'random,jsq,jsq (simulated),jlq' --points 30,40")
    );
    Ok(())
}

#[test]
fn live_service_class_figure_is_complete() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let result = run_figure(&["ringleader-classes-live", "--seconds", "0.5", "--series", "jbsrq,jbsrq (simulated)"])?;
    assert_figure_is_complete(&result, 3, &["jbsrq", "jbsrq (simulated)"], 1.0);
    Ok(())
}

#[test]
fn live_orchestrator_figure_is_complete() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let series = ["RingLeader", "RingLeader (simulated)"];
    // The value is a load of 80 %, as in the bars.
    let options = ["--seconds", "0.5", "--points", "1.312824", "--series", &series.join(",")];
    let result = run_figure(&[&["ringleader-bimodal-live"], &options[..]].concat())?;
    assert_figure_is_complete(&result, 4, &series, 1.0);
    assert_eq!(result.claims.len(), 2, "those without coreward dispatch");
    Ok(())
}

#[test]
fn live_rocksdb_figure_is_complete() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    if !Path::new("/usr/lib/x86_64-linux-gnu/librocksdb.so.7.8").exists() {
        println!("SKIPPED rocksdb_is_measured_live: needs Debian package librocksdb7.8");
        return Ok(());
    }
    let result = run_figure(&["ringleader-rocksdb-live", "--seconds", "0.5", "--points", "7.12764"])?;
    assert_figure_is_complete(&result, 2, &["RingLeader", "RingLeader (simulated)"], 1.0);
    Ok(())
}

#[test]
fn live_core_assignment_figure_is_complete() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let result = run_figure(&["ringleader-cores-live", "--seconds", "1.5", "--points", "20"])?;
    let allocator_labels = ["software allocator (15 cores + 1)", "software allocator (16 cores + 1)"];
    assert_figure_is_complete(&result, 2, &[&["shared", "hybrid", "dedicated"], &allocator_labels[..]].concat(), 1.0);
    assert_eq!(result.claims.len(), 4);
    Ok(())
}
