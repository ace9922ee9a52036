//! Prometheus endpoints of a running fleet, which must serve their documented metrics with the values of `coreward
//! status`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

// Link these crates, because they declare metrics.
use coreward_agent as _;
use coreward_control_server as _;
use coreward_lb as _;
use coreward_metrics::metric_declarations::{Component, METRIC_DECLARATIONS};
use coreward_testbed::fleet::TestbedFleetOptions;
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, NetworkNamespace, TestbedOptions, find_missing_testbed_rights, skip_if};
use prometheus_parse::{Scrape, Value};

use crate::support::{FleetTestEnv, assert_eventually, assert_streams_unbroken, fetch_metrics_page};

const DAEMON_METRICS_ADDRESS: &str = "127.0.0.1:9440";

/// Values of the samples on a metrics page, by metric name and labels. The crate `prometheus_parse` parses them.
type MetricSampleValues = BTreeMap<(String, BTreeMap<String, String>), f64>;

fn scrape_metrics(env: &FleetTestEnv, host: &NetworkNamespace) -> Option<MetricSampleValues> {
    let text = fetch_metrics_page(&env.testbed, host, DAEMON_METRICS_ADDRESS).ok()?;
    assert!(text.ends_with("# EOF\n"), "{text}");
    // Remove the end marker, because the parser accepts only Prometheus' own format, which has no end marker.
    let page_lines = text.lines().filter(|line| *line != "# EOF").map(|line| Ok(line.to_owned()));
    let samples = Scrape::parse(page_lines).unwrap().samples;
    assert!(!samples.is_empty(), "{text}");
    let to_number = |value: Value| match value {
        Value::Counter(number) | Value::Gauge(number) | Value::Untyped(number) => Some(number),
        Value::Histogram(classes) => classes.last().map(|last| last.count),
        Value::Summary(_) => None,
    };
    let to_label_map = |labels: &prometheus_parse::Labels| {
        labels.iter().map(|(name, value)| (name.clone(), value.clone())).collect::<BTreeMap<_, _>>()
    };
    Some(
        samples
            .into_iter()
            .filter_map(|sample| {
                Some(((sample.metric.clone(), to_label_map(&sample.labels)), to_number(sample.value)?))
            })
            .collect(),
    )
}

fn sum_samples_with_label(values: &MetricSampleValues, name: &str, label: (&str, &str)) -> f64 {
    let has_label = |labels: &BTreeMap<String, String>| labels.get(label.0).is_some_and(|value| value == label.1);
    values.iter().filter(|((metric, labels), _)| metric == name && has_label(labels)).map(|(_, value)| value).sum()
}

/// Asserts that a component serves all of its documented metrics, except for those that appear only after an event.
fn assert_documented_metrics_are_served(component: Component, values: &MetricSampleValues) {
    let find_documented_metric = |name: &str| {
        METRIC_DECLARATIONS.iter().find(|metric| {
            let name_suffix = name.strip_prefix(metric.name);
            name_suffix.is_some_and(|suffix| ["", "_sum", "_count", "_bucket"].contains(&suffix))
        })
    };
    let served_names: BTreeSet<&str> = values
        .keys()
        .map(|(name, _)| {
            let metric_in_table = find_documented_metric(name).unwrap_or_else(|| panic!("{name} is not in the table"));
            assert!(metric_in_table.components.contains(&component), "{name} is served by {}", component.name());
            metric_in_table.name
        })
        .collect();
    let is_optional = |name: &str| {
        let optional_prefixes = [
            "coreward_dispatch_",
            "coreward_health_",
            "coreward_lb_announced_",
            "coreward_leader",
            "coreward_etcd_",
            "coreward_certificate_",
        ];
        optional_prefixes.iter().any(|prefix| name.starts_with(prefix)) || name == "coreward_reports_rejected_total"
    };
    for metric in
        METRIC_DECLARATIONS.iter().filter(|metric| metric.components.contains(&component) && !is_optional(metric.name))
    {
        assert!(served_names.contains(metric.name), "{} is not served by {}", metric.name, component.name());
    }
}

/// Starts a fleet in which every daemon serves its metrics.
fn start_env() -> FleetTestEnv {
    let metrics_config = format!("metrics = \"{DAEMON_METRICS_ADDRESS}\"\n");
    let testbed_options =
        TestbedOptions { instance_name: "metrics".to_owned(), server_count: 2, ..TestbedOptions::default() };
    let options = TestbedFleetOptions {
        extra_load_balancer_text: metrics_config.clone(),
        extra_agent_text: metrics_config.clone(),
        ..TestbedFleetOptions::default()
    };
    let mut env = FleetTestEnv::start(testbed_options, options);
    // Top-level keys must come before the tables in the file.
    let controller_config_path = env.testbed.directory().join("controller.toml");
    let controller_config = fs::read_to_string(&controller_config_path).unwrap();
    fs::write(&controller_config_path, format!("{metrics_config}{controller_config}")).unwrap();
    env.fleet.kill_daemon("controller").unwrap();
    env.fleet.restart_daemon(&env.testbed, "controller").unwrap();
    env.fleet.wait_until_ready(&env.testbed).unwrap();
    env
}

/// Asserts that the controller's metrics and `coreward status` have the same count of rejected reports.
fn assert_rejected_reports_are_counted(env: &FleetTestEnv, controller_samples: &MetricSampleValues) {
    let status = env.fleet.query_status(&env.testbed).unwrap();
    let rejected_report_count: u64 = status["rejected_reports"]
        .as_object()
        .map_or(0, |reasons| reasons.values().filter_map(|count| count.as_u64()).sum());
    let rejected_report_count_in_metrics: f64 = controller_samples
        .iter()
        .filter(|((name, _), _)| name == "coreward_reports_rejected_total")
        .map(|(_, value)| value)
        .sum();
    assert_eq!(rejected_report_count_in_metrics, rejected_report_count as f64);
}

/// Asserts that the agent, the controller and `status` have the same count of warnings, including one that this test
/// causes.
fn assert_warnings_are_counted(env: &FleetTestEnv) {
    let (controller, server) = (env.testbed.controller(), env.testbed.server(1).unwrap());
    server.run_within(|| Ok(fs::write("/proc/sys/net/ipv4/tcp_timestamps", "0")?)).unwrap();
    let count_warnings = |host: &NetworkNamespace| {
        sum_samples_with_label(&scrape_metrics(env, host).unwrap(), "coreward_server_warnings", ("server", "s1"))
    };
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "all count the agent's warning", || {
        let status = env.fleet.query_status(&env.testbed).unwrap_or_default();
        let servers = status["servers"].as_array().cloned().unwrap_or_default();
        let status_warnings =
            servers.iter().find(|server| server["name"] == "s1").map(|server| server["warnings"].clone());
        let status_warnings: Vec<String> =
            serde_json::from_value(status_warnings.unwrap_or_default()).unwrap_or_default();
        let warning_counts = [count_warnings(server), count_warnings(controller)];
        status_warnings.iter().any(|warning| warning.contains("tcp_timestamps"))
            && warning_counts == [status_warnings.len() as f64; 2]
    });
}

#[test]
fn endpoints_serve_the_documented_metrics() {
    skip_if!(find_missing_testbed_rights());
    let env = start_env();
    let stream_client = env.start_streams(100.0);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "there is traffic", || env.sum_lb_counter("new_connection") > 150);
    assert_streams_unbroken(stream_client);

    let (controller, balancer) = (env.testbed.controller(), env.testbed.load_balancer(1).unwrap());
    let server = env.testbed.server(1).unwrap();
    let scrape_all = |host: &NetworkNamespace| scrape_metrics(&env, host).unwrap();
    assert_documented_metrics_are_served(Component::Lb, &scrape_all(balancer));
    assert_documented_metrics_are_served(Component::Agent, &scrape_all(server));
    // Wait, because the controller has a load balancer's last report, which is at most a second old.
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the controller has its load balancer's counts", || {
        let (controller_samples, lb_samples) = (scrape_all(controller), scrape_all(balancer));
        let sum_new_connections = |values: &MetricSampleValues| {
            sum_samples_with_label(values, "coreward_lb_packets_total", ("decision", "new_connection"))
        };
        sum_new_connections(&controller_samples) > 0.0
            && sum_new_connections(&controller_samples) == sum_new_connections(&lb_samples)
    });
    let (controller_samples, lb_samples) = (scrape_all(controller), scrape_all(balancer));
    assert_documented_metrics_are_served(Component::Controller, &controller_samples);
    for name in ["coreward_lb_packets_total", "coreward_lb_service_packets_total"] {
        assert!(sum_samples_with_label(&lb_samples, name, ("decision", "new_connection")) > 100.0, "{name}");
    }
    assert!(
        sum_samples_with_label(&lb_samples, "coreward_lb_service_forwarded_bytes_total", ("service", "web0")) > 1000.0
    );
    assert!(
        sum_samples_with_label(&controller_samples, "coreward_servers", ("state", "active")) == 2.0,
        "{controller_samples:?}"
    );
    assert_rejected_reports_are_counted(&env, &controller_samples);
    assert_warnings_are_counted(&env);
}
