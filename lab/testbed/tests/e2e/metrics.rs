//! Prometheus endpoints of a running fleet: each serves its documented metrics, with the values of `coreward status`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

// These crates declare metrics.
use coreward_agent as _;
use coreward_control_server as _;
use coreward_lb as _;
use coreward_metrics::table::{Component, METRICS};
use coreward_testbed::fleet::FleetOptions;
use coreward_testbed::{Namespace, TIMEOUT, TestbedOptions, missing_testbed_rights, skip_if};
use prometheus_parse::{Scrape, Value};

use crate::support::{TestEnv, assert_unbroken, eventually, metrics_page};

const ADDRESS: &str = "127.0.0.1:9440";

/// Values of the samples on a metrics page, by name and labels, as a parser of Prometheus' format reads them.
type Values = BTreeMap<(String, BTreeMap<String, String>), f64>;

fn scrape(env: &TestEnv, host: &Namespace) -> Option<Values> {
    let text = metrics_page(&env.testbed, host, ADDRESS).ok()?;
    assert!(text.ends_with("# EOF\n"), "{text}");
    // The parser knows Prometheus' own format, which has no end marker.
    let lines = text.lines().filter(|line| *line != "# EOF").map(|line| Ok(line.to_owned()));
    let samples = Scrape::parse(lines).unwrap().samples;
    assert!(!samples.is_empty(), "{text}");
    let value = |value: Value| match value {
        Value::Counter(number) | Value::Gauge(number) | Value::Untyped(number) => Some(number),
        Value::Histogram(classes) => classes.last().map(|last| last.count),
        Value::Summary(_) => None,
    };
    let labels = |labels: &prometheus_parse::Labels| {
        labels.iter().map(|(name, value)| (name.clone(), value.clone())).collect::<BTreeMap<_, _>>()
    };
    Some(
        samples
            .into_iter()
            .filter_map(|sample| Some(((sample.metric.clone(), labels(&sample.labels)), value(sample.value)?)))
            .collect(),
    )
}

fn sum(values: &Values, name: &str, label: (&str, &str)) -> f64 {
    let of = |labels: &BTreeMap<String, String>| labels.get(label.0).is_some_and(|value| value == label.1);
    values.iter().filter(|((metric, labels), _)| metric == name && of(labels)).map(|(_, value)| value).sum()
}

/// Asserts that a component serves all of its documented metrics, except those of events that have not happened.
fn assert_complete(part: Component, values: &Values) {
    let of_table = |name: &str| {
        METRICS.iter().find(|metric| {
            let suffix = name.strip_prefix(metric.name);
            suffix.is_some_and(|suffix| ["", "_sum", "_count", "_bucket"].contains(&suffix))
        })
    };
    let served: BTreeSet<&str> = values
        .keys()
        .map(|(name, _)| {
            let metric = of_table(name).unwrap_or_else(|| panic!("{name} is not in the table"));
            assert!(metric.components.contains(&part), "{name} is served by {}", part.name());
            metric.name
        })
        .collect();
    let optional = |name: &str| {
        let only_where_used = [
            "coreward_dispatch_",
            "coreward_health_",
            "coreward_lb_announced_",
            "coreward_leader",
            "coreward_etcd_",
            "coreward_certificate_",
        ];
        only_where_used.iter().any(|prefix| name.starts_with(prefix)) || name == "coreward_reports_refused_total"
    };
    for metric in METRICS.iter().filter(|metric| metric.components.contains(&part) && !optional(metric.name)) {
        assert!(served.contains(metric.name), "{} is not served by {}", metric.name, part.name());
    }
}

#[test]
fn endpoints_serve_the_documented_metrics() {
    skip_if!(missing_testbed_rights());
    let key = format!("metrics = \"{ADDRESS}\"\n");
    let testbed = TestbedOptions { instance: "metrics".to_owned(), servers: 2, ..TestbedOptions::default() };
    let options = FleetOptions { load_balancer_text: key.clone(), agent_text: key.clone(), ..FleetOptions::default() };
    let mut env = TestEnv::start(testbed, options);
    // Top-level keys must come before the tables of the file.
    let file = env.testbed.directory().join("controller.toml");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, format!("{key}{text}")).unwrap();
    env.fleet.kill("controller").unwrap();
    env.fleet.restart(&env.testbed, "controller").unwrap();
    env.fleet.wait_until_ready(&env.testbed).unwrap();
    let client = env.start_streams(100.0);
    eventually(*TIMEOUT, "there is traffic", || env.sum_counter("new_connection") > 150);
    assert_unbroken(client);

    let (controller, balancer) = (env.testbed.controller(), env.testbed.load_balancer(1).unwrap());
    let server = env.testbed.server(1).unwrap();
    let whole = |host: &Namespace| scrape(&env, host).unwrap();
    assert_complete(Component::Lb, &whole(balancer));
    assert_complete(Component::Agent, &whole(server));
    // The controller has a load balancer's last report, at most a second old.
    eventually(*TIMEOUT, "the controller has its load balancer's counts", || {
        let (known, printed) = (whole(controller), whole(balancer));
        let first = |values: &Values| sum(values, "coreward_lb_packets_total", ("decision", "new_connection"));
        first(&known) > 0.0 && first(&known) == first(&printed)
    });
    let (known, printed) = (whole(controller), whole(balancer));
    assert_complete(Component::Controller, &known);
    for name in ["coreward_lb_packets_total", "coreward_lb_service_packets_total"] {
        assert!(sum(&printed, name, ("decision", "new_connection")) > 100.0, "{name}");
    }
    assert!(sum(&printed, "coreward_lb_service_forwarded_bytes_total", ("service", "web0")) > 1000.0);
    assert!(sum(&known, "coreward_servers", ("state", "active")) == 2.0, "{known:?}");
    let status = env.fleet.status(&env.testbed).unwrap();
    let refused: u64 = status["refused_reports"]
        .as_object()
        .map_or(0, |reasons| reasons.values().filter_map(|count| count.as_u64()).sum());
    let reported: f64 =
        known.iter().filter(|((name, _), _)| name == "coreward_reports_refused_total").map(|(_, value)| value).sum();
    assert_eq!(reported, refused as f64);
    // The agent, the controller and `status` count the same warnings, including this one.
    server.within(|| Ok(fs::write("/proc/sys/net/ipv4/tcp_timestamps", "0")?)).unwrap();
    let warnings = |host: &Namespace| sum(&whole(host), "coreward_server_warnings", ("server", "s1"));
    eventually(*TIMEOUT, "all count the agent's warning", || {
        let status = env.fleet.status(&env.testbed).unwrap_or_default();
        let servers = status["servers"].as_array().cloned().unwrap_or_default();
        let shown = servers.iter().find(|server| server["name"] == "s1").map(|server| server["warnings"].clone());
        let shown: Vec<String> = serde_json::from_value(shown.unwrap_or_default()).unwrap_or_default();
        let counts = [warnings(server), warnings(controller)];
        shown.iter().any(|warning| warning.contains("tcp_timestamps")) && counts == [shown.len() as f64; 2]
    });
}
