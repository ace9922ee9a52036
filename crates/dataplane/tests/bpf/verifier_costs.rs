//! Comparison of the verifier costs of all programs and variants with the committed table `bpf/verifier_costs.tsv`.

use std::fmt::Write as _;
use std::path::Path;

use coreward_dataplane::verifier_check::{VerifierCost, measure_verifier_costs};

use coreward_dataplane::test_run::{missing_bpf_rights, skip_if};

/// Largest allowed ratio of a program's verifier cost to its recorded cost. Larger costs need a new table of recorded
/// costs.
const MAX_VERIFIER_COST_RATIO: f64 = 1.1;
const KERNEL_VERSION_LINE_PREFIX: &str = "kernel ";

/// Returns the kernel's version without its patch level, because the verifier changes with each release.
fn kernel_version() -> String {
    let kernel_release = nix::sys::utsname::uname().unwrap().release().to_string_lossy().into_owned();
    kernel_release.splitn(3, '.').take(2).collect::<Vec<_>>().join(".")
}

fn format_costs(costs: &[VerifierCost]) -> String {
    let mut table_text = format!("{KERNEL_VERSION_LINE_PREFIX}{}\tinstructions\n", kernel_version());
    for cost in costs {
        writeln!(table_text, "{}\t{}", cost.variant_and_program_names, cost.verified_instructions).unwrap();
    }
    table_text
}

/// Asserts that no program's verifier cost exceeds the recorded one by more than [`MAX_VERIFIER_COST_RATIO`]. With
/// `COREWARD_WRITE_VERIFIER_COSTS=1`, the test first writes the table. If the table is of another kernel version,
/// checks only that the programs load.
#[test]
fn verifier_costs_do_not_grow() {
    skip_if!(missing_bpf_rights());
    let table_path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bpf/verifier_costs.tsv");
    let current_costs = measure_verifier_costs().unwrap();
    if std::env::var_os("COREWARD_WRITE_VERIFIER_COSTS").is_some() {
        std::fs::write(&table_path, format_costs(&current_costs)).unwrap();
    }
    let recorded_table = std::fs::read_to_string(&table_path).unwrap();
    if !recorded_table.starts_with(&format!("{KERNEL_VERSION_LINE_PREFIX}{}\t", kernel_version())) {
        eprintln!("no verifier costs of kernel {} are recorded: only loaded", kernel_version());
        return;
    }
    let find_recorded_cost = |program: &str| {
        let line = recorded_table.lines().find_map(|line| line.strip_prefix(program)?.strip_prefix('\t'));
        line.unwrap_or_else(|| panic!("{program} is not in {}: write it again", table_path.display()))
            .parse::<u32>()
            .unwrap()
    };
    let increased_costs: Vec<String> = current_costs
        .iter()
        .map(|cost| (cost, find_recorded_cost(&cost.variant_and_program_names)))
        .filter(|(cost, recorded_instructions)| {
            f64::from(cost.verified_instructions) > f64::from(*recorded_instructions) * MAX_VERIFIER_COST_RATIO
        })
        .map(|(cost, recorded_instructions)| {
            format!("{}: {recorded_instructions} -> {}", cost.variant_and_program_names, cost.verified_instructions)
        })
        .collect();
    assert!(increased_costs.is_empty(), "verifier costs grew by more than 10 %:\n{}", increased_costs.join("\n"));
}
