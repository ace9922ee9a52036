//! When state is lost or cannot be written, load balancers and agents continue with the state that they have.

use std::fs;
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, SystemTime};

use coreward_testbed::fleet::{Fleet, TestbedFleetOptions, build_operator_command, coreward_binary_path};
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, Testbed, TestbedOptions, find_missing_testbed_rights, skip_if};
use serde_json::Value;

use crate::support::{
    MIN_CONNECTIONS_FOR_EVERY_SERVER, assert_connections_answered, assert_eventually, fetch_metrics_page,
    find_metric_series_value, measure_duration_until_logged, open_keepalive_connections,
};

const LB_METRICS_ADDRESS: &str = "127.0.0.1:9440";

const FLEET_DOCUMENT: &str = "[[server]]\nname = \"s1\"\naddress = \"10.1.1.1\"\n\
                        [[server]]\nname = \"s2\"\naddress = \"10.1.1.2\"\n\
                        [[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\npolicy = \"rr\"\n";
/// Configuration of a service for which load balancers make no tables themselves, because all must choose the same
/// server.
const BUCKET_SERVICE_CONFIG: &str = "[[service]]\nname = \"bucket\"\nvip = \"10.200.0.1:81\"\npolicy = \"hash\"\n\
                         consistency = \"beamer\"\n";

/// Asserts that `status` warns of the loss of the controller's store while the load balancer still has a configuration.
fn assert_lost_store_is_reported(status: &Value) {
    let warning_text = status["warnings"].to_string();
    assert!(warning_text.contains("the store has no document"), "{warning_text}");
    assert!(warning_text.contains("load balancer lb1 had configuration"), "{warning_text}");
}

/// Returns the value of the time series `name` on the metrics page of load balancer 1.
fn fetch_metric_value(testbed: &Testbed, name: &str) -> Option<f64> {
    let page = fetch_metrics_page(testbed, testbed.load_balancer(1).unwrap(), LB_METRICS_ADDRESS).ok()?;
    find_metric_series_value(&page, name)
}

fn fetch_warning_count(testbed: &Testbed) -> Option<f64> {
    fetch_metric_value(testbed, "coreward_lb_warnings{load_balancer=\"lb1\"}")
}

fn can_connect(testbed: &Testbed, vip: &str) -> bool {
    let try_connect = || Ok(TcpStream::connect_timeout(&vip.parse()?, Duration::from_millis(500)).is_ok());
    testbed.client().run_within(try_connect).unwrap()
}

#[test]
fn loss_of_the_store_interrupts_no_service() {
    skip_if!(find_missing_testbed_rights());
    let options =
        TestbedOptions { instance_name: "lost".to_owned(), server_count: 2, core_count: 1, ..Default::default() };
    let testbed = Testbed::create(options).unwrap();
    let _nginx_servers = [1, 2].map(|number| testbed.start_nginx(number).unwrap());
    let options = TestbedFleetOptions {
        steers_connections: false,
        applied_document: Some(FLEET_DOCUMENT.to_owned()),
        ..TestbedFleetOptions::default()
    };
    let mut fleet = Fleet::start(&testbed, options).unwrap();
    let mut connections_before = open_keepalive_connections(&testbed, MIN_CONNECTIONS_FOR_EVERY_SERVER);

    fleet.kill_daemon("controller").unwrap();
    fs::remove_file(testbed.directory().join("controller.redb")).unwrap();
    fleet.restart_daemon(&testbed, "controller").unwrap();
    let query_status = || fleet.query_status(&testbed).unwrap_or_default();
    let read_first_lb = |status: &Value| status["load_balancers"].get(0).cloned().unwrap_or_default();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the load balancer reports to the controller without a store", || {
        read_first_lb(&query_status())["state"].is_object()
    });
    assert_lost_store_is_reported(&query_status());
    let used_generations = read_first_lb(&query_status())["state"]["table_generations"].to_string();
    assert!(used_generations.contains("web"), "{used_generations}");
    open_keepalive_connections(&testbed, MIN_CONNECTIONS_FOR_EVERY_SERVER);
    assert_connections_answered(&mut connections_before);

    // Only an operator can decide that there are no services.
    let empty_document_path = testbed.directory().join("none.toml");
    fs::write(&empty_document_path, "report_interval = \"50ms\"\n").unwrap();
    let apply_command =
        build_operator_command(&testbed, &["apply", "--yes", &empty_document_path.display().to_string()]).unwrap();
    testbed.run_command(testbed.controller(), apply_command).unwrap();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the load balancer has no service", || {
        read_first_lb(&query_status())["state"]["table_generations"].as_object().is_some_and(serde_json::Map::is_empty)
    });
    assert_eq!(query_status()["warnings"].to_string(), "[]");
}

#[test]
fn configuration_is_saved_as_soon_as_disk_has_space() {
    skip_if!(find_missing_testbed_rights());
    let options =
        TestbedOptions { instance_name: "unsaved".to_owned(), server_count: 2, core_count: 1, ..Default::default() };
    let testbed = Testbed::create(options).unwrap();
    let load_balancer_text = format!("metrics = \"{LB_METRICS_ADDRESS}\"\n");
    let options = TestbedFleetOptions {
        steers_connections: false,
        extra_load_balancer_text: load_balancer_text,
        ..TestbedFleetOptions::default()
    };
    let mut fleet = Fleet::start(&testbed, options).unwrap();
    let saved_configuration_path = testbed.directory().join("lb1.configuration");
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the configuration is saved", || saved_configuration_path.exists());

    // The load balancer writes a new file at this path, and then renames it.
    let obstacle_path = testbed.directory().join("lb1.new");
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "no write is under way", || fs::create_dir(&obstacle_path).is_ok());
    let configuration_before = fs::read(&saved_configuration_path).unwrap();
    let mut pool = fleet.server_pool().clone();
    pool.remove(&2);
    fleet.set_server_pool(&testbed, pool).unwrap();
    let query_lb_warnings = |fleet: &Fleet| {
        let status = fleet.query_status(&testbed).unwrap_or_default();
        status["load_balancers"][0]["state"]["warnings"].to_string()
    };
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "status has the failure", || {
        query_lb_warnings(&fleet).contains("the configuration is not saved")
    });
    assert_eq!(fs::read(&saved_configuration_path).unwrap(), configuration_before);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the metric counts the failure", || {
        fetch_warning_count(&testbed).unwrap() == 1.0
    });

    fs::remove_dir(&obstacle_path).unwrap();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the write is retried", || {
        fs::read(&saved_configuration_path).unwrap() != configuration_before
    });
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the failure is over", || {
        query_lb_warnings(&fleet) == "[]" && fetch_warning_count(&testbed).unwrap() == 0.0
    });
}

/// Restarts the load balancer without its pinned BPF objects, as after a reboot.
fn restart_load_balancer_without_pins(testbed: &Testbed, fleet: &mut Fleet) {
    fleet.kill_daemon("lb1").unwrap();
    let mut detach_command = Command::new(coreward_binary_path().unwrap());
    detach_command.args(["lb", "--detach", "--config"]).arg(testbed.directory().join("lb1.toml"));
    testbed.run_command(testbed.load_balancer(1).unwrap(), detach_command).unwrap();
    fleet.restart_daemon(testbed, "lb1").unwrap();
}

#[test]
fn rebooted_load_balancer_takes_new_connections_without_a_controller() {
    skip_if!(find_missing_testbed_rights());
    let options =
        TestbedOptions { instance_name: "unpinned".to_owned(), server_count: 2, core_count: 1, ..Default::default() };
    let testbed = Testbed::create(options).unwrap();
    let _nginx_servers = [1, 2].map(|number| testbed.start_nginx(number).unwrap());
    let load_balancer_text = format!("metrics = \"{LB_METRICS_ADDRESS}\"\n");
    let applied_document = Some(format!("table_lifetime = \"1s\"\n{FLEET_DOCUMENT}{BUCKET_SERVICE_CONFIG}"));
    let options = TestbedFleetOptions {
        steers_connections: false,
        applied_document,
        extra_load_balancer_text: load_balancer_text,
        ..TestbedFleetOptions::default()
    };
    let mut fleet = Fleet::start(&testbed, options).unwrap();
    let saved_configuration_path = testbed.directory().join("lb1.configuration");
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the configuration is saved", || saved_configuration_path.exists());
    let mut connections_before = open_keepalive_connections(&testbed, MIN_CONNECTIONS_FOR_EVERY_SERVER);
    fleet.kill_daemon("controller").unwrap();

    restart_load_balancer_without_pins(&testbed, &mut fleet);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the MAC addresses are known", || {
        fetch_metric_value(&testbed, "coreward_lb_unresolved_servers{load_balancer=\"lb1\"}") == Some(0.0)
    });
    assert_connections_answered(&mut connections_before);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the load balancer makes a table", || {
        can_connect(&testbed, "10.200.0.1:80")
    });
    open_keepalive_connections(&testbed, MIN_CONNECTIONS_FOR_EVERY_SERVER);
    assert_eq!(fetch_metric_value(&testbed, "coreward_lb_expired_tables"), Some(1.0));
    assert!(!can_connect(&testbed, "10.200.0.1:81"), "a new connection by bucket without a table");
    let dropped_packets_before = fetch_metric_value(
        &testbed,
        "coreward_lb_service_drops_total{service=\"bucket\",reason=\"no_eligible_server\"}",
    );
    assert!(dropped_packets_before.is_some_and(|dropped_packets| dropped_packets > 0.0), "{dropped_packets_before:?}");

    fs::remove_file(&saved_configuration_path).unwrap();
    let restart_time = SystemTime::now();
    restart_load_balancer_without_pins(&testbed, &mut fleet);
    let warning_words = "no configuration: packets for VIPs pass to this machine";
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, warning_words, || {
        measure_duration_until_logged(&testbed, 1, warning_words, restart_time).is_some()
    });
    assert_eq!(fetch_warning_count(&testbed), Some(1.0));

    fleet.restart_daemon(&testbed, "controller").unwrap();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "a configuration", || fetch_warning_count(&testbed) == Some(0.0));
    open_keepalive_connections(&testbed, MIN_CONNECTIONS_FOR_EVERY_SERVER);
}
