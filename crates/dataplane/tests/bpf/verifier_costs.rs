//! Comparison of the verifier costs of every program and variant with the committed table `bpf/verifier_costs.tsv`.

use std::fmt::Write as _;
use std::path::Path;

use coreward_dataplane::check::{VerifierCost, verifier_costs};

use coreward_dataplane::test_run::{missing_bpf_rights, skip_if};

/// Factor by which a cost may exceed the recorded one. For a larger cost, a new table must be written on purpose.
const LIMIT: f64 = 1.1;
const KERNEL: &str = "kernel ";

/// Returns the kernel's version without its patch level, as the verifier changes with each release.
fn kernel() -> String {
    let release = nix::sys::utsname::uname().unwrap().release().to_string_lossy().into_owned();
    release.splitn(3, '.').take(2).collect::<Vec<_>>().join(".")
}

fn table(costs: &[VerifierCost]) -> String {
    let mut text = format!("{KERNEL}{}\tinstructions\n", kernel());
    for cost in costs {
        writeln!(text, "{}\t{}", cost.program, cost.instructions).unwrap();
    }
    text
}

/// `COREWARD_WRITE_VERIFIER_COSTS=1` writes the table. On other kernels than the table's, programs must only load.
#[test]
fn verifier_costs_do_not_grow() {
    skip_if!(missing_bpf_rights());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bpf/verifier_costs.tsv");
    let costs = verifier_costs().unwrap();
    if std::env::var_os("COREWARD_WRITE_VERIFIER_COSTS").is_some() {
        std::fs::write(&path, table(&costs)).unwrap();
    }
    let known = std::fs::read_to_string(&path).unwrap();
    if !known.starts_with(&format!("{KERNEL}{}\t", kernel())) {
        eprintln!("no verifier costs of kernel {} are recorded: only loaded", kernel());
        return;
    }
    let recorded = |program: &str| {
        let line = known.lines().find_map(|line| line.strip_prefix(program)?.strip_prefix('\t'));
        line.unwrap_or_else(|| panic!("{program} is not in {}: write it again", path.display())).parse::<u32>().unwrap()
    };
    let grown: Vec<String> = costs
        .iter()
        .map(|cost| (cost, recorded(&cost.program)))
        .filter(|(cost, before)| f64::from(cost.instructions) > f64::from(*before) * LIMIT)
        .map(|(cost, before)| format!("{}: {before} -> {}", cost.program, cost.instructions))
        .collect();
    assert!(grown.is_empty(), "verifier costs grew by more than 10 %:\n{}", grown.join("\n"));
}
