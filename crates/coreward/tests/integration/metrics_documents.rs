//! Names of metrics; docs/metrics.md and the dashboard against their declarations.

use std::collections::BTreeSet;

use coreward_metrics::table::{METRICS, Metric, MetricKind};
use serde_json::Value;

// The daemons that declare metrics.
use coreward_agent as _;
use coreward_control_server as _;
use coreward_lb as _;
use coreward_orchestrator as _;
use coreward_rack as _;

fn one_line(item: &str) -> String {
    item.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn documented_metrics_equal_the_table() {
    let text = include_str!("../../../../docs/metrics.md");
    let section = text.split("## All metrics").nth(1).unwrap();
    let rows: Vec<String> = section.split("\n* ").skip(1).map(one_line).collect();
    let mut metrics: Vec<&Metric> = METRICS.iter().copied().collect();
    metrics.sort_by_key(|metric| metric.name);
    let expected: Vec<String> = metrics
        .iter()
        .map(|metric| {
            let parts: Vec<&str> = metric.components.iter().map(|part| part.name()).collect();
            let labels = format!("by {}", metric.labels.join(", "));
            let kind = matches!(metric.kind, MetricKind::Histogram).then_some("histogram");
            let notes: Vec<&str> = kind.into_iter().chain((!metric.labels.is_empty()).then_some(&*labels)).collect();
            let notes = if notes.is_empty() { String::new() } else { format!("{}; ", notes.join(", ")) };
            format!("`{}` ({notes}{}): {}", metric.name, parts.join(", "), metric.help)
        })
        .collect();
    for (found, expected) in rows.iter().zip(&expected) {
        assert_eq!(found, expected);
    }
    assert_eq!(rows.len(), expected.len());
}

#[test]
fn metric_names_follow_prometheus_conventions() {
    for metric in METRICS {
        assert!(metric.name.starts_with("coreward_"), "{}", metric.name);
        let is_plain =
            |name: &str| name.chars().all(|letter| letter.is_ascii_lowercase() || "_0123456789".contains(letter));
        assert!(is_plain(metric.name) && metric.labels.iter().all(|label| is_plain(label)), "{}", metric.name);
        assert_eq!(metric.name.ends_with("_total"), metric.kind == MetricKind::Counter, "{}", metric.name);
        assert_eq!(METRICS.iter().filter(|other| other.name == metric.name).count(), 1, "{}", metric.name);
        for unit in ["_ms", "_milliseconds", "_ns", "_percent", "_kb"] {
            assert!(!metric.name.contains(unit), "{}: expected base units", metric.name);
        }
    }
}

fn names(expression: &str) -> BTreeSet<&str> {
    let words = expression.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    words.filter(|word| word.starts_with("coreward_")).collect()
}

fn queries(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                match member.as_str() {
                    Some(text) if name == "expr" || name == "query" => found.push(text.to_owned()),
                    _ => queries(member, found),
                }
            }
        }
        Value::Array(members) => members.iter().for_each(|member| queries(member, found)),
        _ => {}
    }
}

#[test]
fn every_query_of_the_dashboard_names_a_metric_and_its_labels() {
    let dashboard: Value = serde_json::from_str(include_str!("../../../../contrib/grafana/coreward.json")).unwrap();
    let mut found = Vec::new();
    queries(&dashboard, &mut found);
    let expressions: Vec<&String> = found.iter().filter(|query| query.contains("coreward_")).collect();
    assert!(expressions.len() > 15, "{expressions:?}");
    for expression in expressions {
        for name in names(expression) {
            let metric = METRICS.iter().find(|metric| {
                let suffix = name.strip_prefix(metric.name);
                let histogram = metric.kind == MetricKind::Histogram;
                suffix.is_some_and(|suffix| if histogram { suffix == "_bucket" } else { suffix.is_empty() })
            });
            assert!(metric.is_some(), "{name} in {expression}");
        }
        let metrics: Vec<_> = METRICS.iter().filter(|metric| expression.contains(metric.name)).collect();
        let grouped = expression.split("by (").skip(1).filter_map(|rest| rest.split(')').next());
        for label in grouped.flat_map(|labels| labels.split(", ")).filter(|label| !["le", "instance"].contains(label)) {
            assert!(metrics.iter().any(|metric| metric.labels.contains(&label)), "{label} in {expression}");
        }
    }
}
