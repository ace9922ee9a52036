//! Output of findings as text and JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::checks::DoctorCheck;
use crate::facts::MachineFacts;
use crate::finding::{Finding, FindingSeverity};

fn count_findings_with_severity(findings: &[(&DoctorCheck, Finding)], severity: FindingSeverity) -> usize {
    findings.iter().filter(|(_, finding)| finding.severity == severity).count()
}

/// Returns one line about a check: its name, its roles, whether `--fix` can repair its findings, and the expected
/// state.
pub fn describe_check(check: &DoctorCheck) -> String {
    let role_names: Vec<&str> = check.roles.iter().map(|role| role.name()).collect();
    let fix_note = if check.is_fixable { " (--fix)" } else { "" };
    format!("{:<16} {}{fix_note}: {}", check.name, role_names.join(", "), check.expectation)
}

pub fn check_to_json(check: &DoctorCheck) -> Value {
    let role_names: Vec<&str> = check.roles.iter().map(|role| role.name()).collect();
    json!({ "check": check.name, "roles": role_names, "fix": check.is_fixable, "expects": check.expectation })
}

/// Returns the report as text. `repair_reports` contains sentences about the repairs that were executed.
pub fn format_report(
    facts: &MachineFacts,
    findings: &[(&'static DoctorCheck, Finding)],
    repair_reports: &[String],
) -> String {
    let mut text = String::new();
    for line in repair_reports {
        let _ = writeln!(text, "fix      {line}");
    }
    for (check, finding) in findings {
        let _ = writeln!(text, "{:<8} {:<16} {}", finding.severity.name(), check.name, finding.observation);
        if finding.severity >= FindingSeverity::Warning {
            let _ = writeln!(text, "{:<25} why: {}", "", finding.consequence);
            for remedy in &finding.remedies {
                let fix_note = if remedy.automatic_fix.is_some() { "  (--fix does this)" } else { "" };
                let _ = writeln!(text, "{:<25} remedy: {}{fix_note}", "", remedy.shell_command);
            }
        }
    }
    let count_findings = |severity| count_findings_with_severity(findings, severity);
    let _ = write!(
        text,
        "{}: {} ok, {} unknown, {} warnings, {} faults",
        facts.role.name(),
        count_findings(FindingSeverity::Ok),
        count_findings(FindingSeverity::Unknown),
        count_findings(FindingSeverity::Warning),
        count_findings(FindingSeverity::Fault)
    );
    text
}

pub fn report_to_json(
    facts: &MachineFacts,
    findings: &[(&'static DoctorCheck, Finding)],
    repair_reports: &[String],
) -> Value {
    let remedies_to_json = |finding: &Finding| -> Vec<Value> {
        let step_to_json = |remedy: &crate::finding::RemedyStep| {
            json!({ "command": remedy.shell_command,
            "fix": remedy.automatic_fix.is_some() })
        };
        finding.remedies.iter().map(step_to_json).collect()
    };
    let findings: Vec<Value> = findings
        .iter()
        .map(|(check, finding)| {
            json!({
                "check": check.name,
                "severity": finding.severity,
                "found": finding.observation,
                "why": finding.consequence,
                "remedy": remedies_to_json(finding),
            })
        })
        .collect();
    let interface = &facts.settings.interface;
    json!({ "role": facts.role.name(), "interface": interface, "fixed": repair_reports, "findings": findings })
}
