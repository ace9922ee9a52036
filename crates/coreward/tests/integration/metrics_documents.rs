//! Tests that metrics' names follow the rules, and that docs/metrics.md and the dashboard match their declarations.

use std::collections::BTreeSet;

use coreward_metrics::metric_declarations::{METRIC_DECLARATIONS, MetricDeclaration, MetricKind};
use serde_json::Value;

// These crates declare metrics, so they must be linked.
use coreward_agent as _;
use coreward_control_server as _;
use coreward_lb as _;
use coreward_orchestrator as _;
use coreward_rack as _;

fn collapse_whitespace(item_text: &str) -> String {
    item_text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn metrics_document_lists_exactly_the_declared_metrics() {
    let document_text = include_str!("../../../../docs/metrics.md");
    let section = document_text.split("## All metrics").nth(1).unwrap();
    let documented_metrics: Vec<String> = section.split("\n* ").skip(1).map(collapse_whitespace).collect();
    let mut metrics: Vec<&MetricDeclaration> = METRIC_DECLARATIONS.iter().copied().collect();
    metrics.sort_by_key(|metric| metric.name);
    let declared_metrics: Vec<String> = metrics
        .iter()
        .map(|metric| {
            let component_names: Vec<&str> = metric.components.iter().map(|component| component.name()).collect();
            let labels_text = format!("by {}", metric.labels.join(", "));
            let kind = matches!(metric.kind, MetricKind::Histogram).then_some("histogram");
            let notes: Vec<&str> =
                kind.into_iter().chain((!metric.labels.is_empty()).then_some(&*labels_text)).collect();
            let notes = if notes.is_empty() { String::new() } else { format!("{}; ", notes.join(", ")) };
            format!("`{}` ({notes}{}): {}", metric.name, component_names.join(", "), metric.help)
        })
        .collect();
    for (documented_metric, expected) in documented_metrics.iter().zip(&declared_metrics) {
        assert_eq!(documented_metric, expected);
    }
    assert_eq!(documented_metrics.len(), declared_metrics.len());
}

#[test]
fn metric_names_follow_prometheus_conventions() {
    for metric in METRIC_DECLARATIONS {
        assert!(metric.name.starts_with("coreward_"), "{}", metric.name);
        let is_plain_identifier =
            |name: &str| name.chars().all(|letter| letter.is_ascii_lowercase() || "_0123456789".contains(letter));
        assert!(
            is_plain_identifier(metric.name) && metric.labels.iter().all(|label| is_plain_identifier(label)),
            "{}",
            metric.name
        );
        assert_eq!(metric.name.ends_with("_total"), metric.kind == MetricKind::Counter, "{}", metric.name);
        assert_eq!(METRIC_DECLARATIONS.iter().filter(|other| other.name == metric.name).count(), 1, "{}", metric.name);
        for unit in ["_ms", "_milliseconds", "_ns", "_percent", "_kb"] {
            assert!(!metric.name.contains(unit), "{}: expected base units", metric.name);
        }
    }
}

fn find_metric_names(expression: &str) -> BTreeSet<&str> {
    let identifiers = expression.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    identifiers.filter(|identifier| identifier.starts_with("coreward_")).collect()
}

fn collect_queries(value: &Value, queries: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                match member.as_str() {
                    Some(text) if name == "expr" || name == "query" => queries.push(text.to_owned()),
                    _ => collect_queries(member, queries),
                }
            }
        }
        Value::Array(members) => members.iter().for_each(|member| collect_queries(member, queries)),
        _ => {}
    }
}

#[test]
fn dashboard_queries_use_declared_metrics_and_labels() {
    let dashboard: Value = serde_json::from_str(include_str!("../../../../contrib/grafana/coreward.json")).unwrap();
    let mut queries = Vec::new();
    collect_queries(&dashboard, &mut queries);
    let expressions: Vec<&String> = queries.iter().filter(|query| query.contains("coreward_")).collect();
    assert!(expressions.len() > 15, "{expressions:?}");
    for expression in expressions {
        for name in find_metric_names(expression) {
            let metric = METRIC_DECLARATIONS.iter().find(|metric| {
                let suffix = name.strip_prefix(metric.name);
                let is_histogram = metric.kind == MetricKind::Histogram;
                suffix.is_some_and(|suffix| if is_histogram { suffix == "_bucket" } else { suffix.is_empty() })
            });
            assert!(metric.is_some(), "{name} in {expression}");
        }
        let metrics: Vec<_> = METRIC_DECLARATIONS.iter().filter(|metric| expression.contains(metric.name)).collect();
        let group_by_lists = expression.split("by (").skip(1).filter_map(|rest| rest.split(')').next());
        for label in
            group_by_lists.flat_map(|labels| labels.split(", ")).filter(|label| !["le", "instance"].contains(label))
        {
            assert!(metrics.iter().any(|metric| metric.labels.contains(&label)), "{label} in {expression}");
        }
    }
}
