//! A server is drained as an operator does it, with nginx and clients that keep their connections. Remaining
//! connections are counted, none breaks, and no new ones reach the server. A controller that is killed meanwhile does
//! not change this.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use coreward_testbed::fleet::{Fleet, TestbedFleetOptions, coreward_binary_path};
use coreward_testbed::nginx::NginxServer;
use coreward_testbed::process::TestbedProcess;
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, Testbed, TestbedOptions, find_missing_testbed_rights, skip_if};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{
    ConnectionsAndWorkers, assert_connections_answered, assert_eventually, open_connections_at_each_server,
    open_keepalive_connections,
};

/// Fleet of two servers with nginx. Fields are dropped in the order of their declaration, the testbed last.
struct DrainTestEnv {
    fleet: Fleet,
    _nginx_servers: Vec<NginxServer>,
    testbed: Testbed,
}

impl DrainTestEnv {
    fn start(instance: &str) -> Self {
        Self::start_with_options(instance, TestbedFleetOptions::default())
    }

    fn start_with_options(instance: &str, fleet: TestbedFleetOptions) -> Self {
        let options = TestbedOptions { instance_name: instance.to_owned(), server_count: 2, ..Default::default() };
        let testbed = Testbed::create(options).unwrap();
        let nginx_servers =
            testbed.server_numbers().into_iter().map(|number| testbed.start_nginx(number).unwrap()).collect();
        let fleet_options = TestbedFleetOptions { policy_name: "rr".to_owned(), ..fleet };
        let fleet = Fleet::start(&testbed, fleet_options).unwrap();
        Self { fleet, _nginx_servers: nginx_servers, testbed }
    }

    fn is_only_pool_server(&self, server: u16) -> bool {
        open_keepalive_connections(&self.testbed, 10).iter().all(|(_, answerer)| answerer.server_number == server)
    }

    fn build_coreward_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(coreward_binary_path().unwrap());
        command.args(arguments).env("COREWARD_TOKEN_FILE", self.testbed.directory().join("operator.token"));
        command
    }

    /// Runs `coreward` with these arguments. Returns its output, or its error message.
    fn run_coreward(&self, arguments: &[&str]) -> Result<String, String> {
        let output = self.testbed.run_command(self.testbed.controller(), self.build_coreward_command(arguments));
        output.map(|output| String::from_utf8(output.stdout).unwrap()).map_err(|error| format!("{error:#}"))
    }

    /// Starts `coreward` with these arguments in the background. Its output is written to a file.
    fn spawn_coreward(&self, name: &str, arguments: &[&str]) -> BackgroundCommand {
        let output_path = self.testbed.directory().join(format!("{name}.txt"));
        let output_file = File::create(&output_path).unwrap();
        let mut command = self.build_coreward_command(arguments);
        command.stdin(Stdio::null()).stdout(output_file.try_clone().unwrap()).stderr(output_file);
        BackgroundCommand { process: self.testbed.spawn(self.testbed.controller(), command).unwrap(), output_path }
    }

    fn query_server_status(&self, server: &str) -> Value {
        let status = self.fleet.query_status(&self.testbed).unwrap();
        let servers = status["servers"].as_array().unwrap();
        servers.iter().find(|server_entry| server_entry["name"] == server).unwrap().clone()
    }

    fn query_server_state(&self, server: &str) -> String {
        self.query_server_status(server)["state"].as_str().unwrap().to_owned()
    }
}

struct BackgroundCommand {
    process: TestbedProcess,
    output_path: PathBuf,
}

impl BackgroundCommand {
    fn read_output(&self) -> String {
        fs::read_to_string(&self.output_path).unwrap()
    }

    fn wait_for_output(&self, expected_text: &str) {
        let mut output_text = String::new();
        let has_expected_text = || {
            output_text = self.read_output();
            output_text.contains(expected_text)
        };
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, &format!("{expected_text:?}"), has_expected_text);
    }

    /// Waits for the end of the command. Returns whether the command succeeded, and its output.
    fn wait_for_end(&mut self) -> (bool, String) {
        let exit_status = self.process.wait_for_exit(*DEFAULT_WAIT_TIMEOUT).unwrap();
        (exit_status.success(), self.read_output())
    }
}

fn partition_connections_by_server(
    connections: ConnectionsAndWorkers,
    server: u16,
) -> (ConnectionsAndWorkers, ConnectionsAndWorkers) {
    connections.into_iter().partition(|(_, answerer)| answerer.server_number == server)
}

#[test]
fn drain_ends_when_the_last_connection_closes() {
    skip_if!(find_missing_testbed_rights());
    let mut env = DrainTestEnv::start("drained");
    let (mut connections_to_s1, mut connections_to_s2) =
        partition_connections_by_server(open_connections_at_each_server(&env.testbed, &[1, 2], 2), 1);
    let open_connection_count = connections_to_s1.len();
    let mut waiting_command = env.spawn_coreward("wait", &["drain", "s1", "--wait", "--timeout", "2m"]);
    waiting_command.wait_for_output(&format!("s1 is draining: {open_connection_count} connections remain\n"));
    assert!(env.is_only_pool_server(2));

    env.fleet.kill_daemon("controller").unwrap();
    waiting_command
        .wait_for_output("the drain is on record, what remains is not known: no controller answers at 127.0.0.1:7401");
    assert_connections_answered(&mut connections_to_s1);
    connections_to_s1.truncate(1);
    env.fleet.restart_daemon(&env.testbed, "controller").unwrap();
    waiting_command.wait_for_output("s1 is draining: 1 connection remains\n");
    env.fleet.wait_until_ready(&env.testbed).unwrap();
    assert_eq!(env.query_server_state("s1"), "draining");
    assert!(env.is_only_pool_server(2));
    assert_connections_answered(&mut connections_to_s1);
    assert_connections_answered(&mut connections_to_s2);
    assert!(waiting_command.process.try_wait().unwrap().is_none(), "{}", waiting_command.read_output());
    connections_to_s1.clear();
    let (is_success, output) = waiting_command.wait_for_end();
    assert!(is_success && output.ends_with("s1 is drained: no connection remains\n"), "{output}");

    // s1 is drained, so s2 is the last server of web0 and cannot be drained.
    let rejection = env.run_coreward(&["drain", "s2"]).unwrap_err();
    assert!(rejection.contains("no other server of web0 takes new connections"), "{rejection}");
    assert_eq!(
        env.run_coreward(&["drain", "s1"]).unwrap(),
        "s1 is drained: no connection remains\n",
        "it is so already"
    );
    assert!(env.run_coreward(&["undrain", "s1"]).unwrap().starts_with("s1 is "));
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "server 1 is back", || !env.is_only_pool_server(2));
    assert_connections_answered(&mut connections_to_s2);
}

#[test]
fn interrupted_or_timed_out_wait_leaves_the_server_drained() {
    skip_if!(find_missing_testbed_rights());
    let mut env = DrainTestEnv::start("drainend");
    let (mut connections_to_s1, _connections_to_s2) =
        partition_connections_by_server(open_connections_at_each_server(&env.testbed, &[1], 2), 1);
    let mut interrupted_command = env.spawn_coreward("interrupted", &["drain", "s1", "--service", "web0", "--wait"]);
    // The agent has counted by now, so the short timeout below covers only a query.
    interrupted_command.wait_for_output(&format!(" {} connections remain\n", connections_to_s1.len()));
    interrupted_command.process.send_signal(Signal::SIGINT).unwrap();
    let (is_success, output) = interrupted_command.wait_for_end();
    assert!(
        !is_success && output.ends_with("interrupted; s1 stays drained: `coreward undrain s1` ends that\n"),
        "{output}"
    );
    let mut timed_out_command = env.spawn_coreward("impatient", &["drain", "s1", "--wait", "--timeout", "6s"]);
    let (is_success, output) = timed_out_command.wait_for_end();
    let expected_output_end = format!(
        "coreward: {} connections remain after 6s; s1 stays drained: `coreward undrain s1` ends that\n",
        connections_to_s1.len()
    );
    assert!(!is_success && output.ends_with(&expected_output_end), "{output}");
    // Without an agent no connections are counted.
    env.fleet.kill_daemon("agent-s1").unwrap();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the report of s1 is stale", || {
        env.query_server_status("s1")["report_state"] != "fresh"
    });
    let mut command_without_counts = env.spawn_coreward("uncounted", &["drain", "s1", "--wait", "--timeout", "5s"]);
    let (is_success, output) = command_without_counts.wait_for_end();
    assert!(
        !is_success && output.contains("(waiting for its agent, which does not report) after 5s; s1 stays drained"),
        "{output}"
    );
    assert_eq!(env.query_server_state("s1"), "draining");
    assert!(env.is_only_pool_server(2));
    assert_connections_answered(&mut connections_to_s1);
    let top_output = env.run_coreward(&["top", "--once"]).unwrap();
    assert!(top_output.lines().any(|line| line.starts_with("s1 ") && line.contains("draining")), "{top_output}");
    assert!(top_output.contains("! s1: draining: by `coreward drain`"), "{top_output}");
}

/// Returns those lines of the controller's log that have the event `event`, as JSON objects.
fn read_logged_events(env: &DrainTestEnv, event: &str) -> Vec<Value> {
    let log_text = fs::read_to_string(env.testbed.directory().join("controller.log")).unwrap();
    let log_objects = log_text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    log_objects.filter(|line| line["event"] == event).collect()
}

/// Asserts that SIGUSR1 enables debug logs, and that SIGUSR2 restores the log level with which the daemon started.
fn assert_signals_change_log_level(env: &mut DrainTestEnv) {
    let log_path = env.testbed.directory().join("lb1.log");
    let read_lb_log = || fs::read_to_string(&log_path).unwrap();
    let lb_daemon = env.fleet.daemon_process("lb1").unwrap();
    lb_daemon.send_signal(Signal::SIGUSR1).unwrap();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "debug lines", || read_lb_log().contains("\"level\":\"DEBUG\""));
    lb_daemon.send_signal(Signal::SIGUSR2).unwrap();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the level of the start", || {
        read_lb_log().contains("\"log_level\":\"as at the start\"")
    });
    let log_after_restore = read_lb_log();
    let (_, log_at_start_level) = log_after_restore.split_once("\"log_level\":\"as at the start\"").unwrap();
    assert!(!log_at_start_level.contains("DEBUG"), "{log_at_start_level}");
}

#[test]
fn drains_are_reported_as_json_in_the_audit_and_in_the_log() {
    skip_if!(find_missing_testbed_rights());
    let mut env = DrainTestEnv::start_with_options(
        "drainjson",
        TestbedFleetOptions { uses_json_logs: true, ..TestbedFleetOptions::default() },
    );
    let (mut connections_to_s1, _connections_to_s2) =
        partition_connections_by_server(open_connections_at_each_server(&env.testbed, &[1], 1), 1);
    let parse_json =
        |text: String| serde_json::from_str::<Value>(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let drain_report = parse_json(env.run_coreward(&["drain", "s1", "--format", "json"]).unwrap());
    assert_eq!((&drain_report["server"], &drain_report["state"]), (&"s1".into(), &"draining".into()), "{drain_report}");
    assert_eq!(drain_report["drain"]["origin"], "command", "{drain_report}");
    assert_connections_answered(&mut connections_to_s1);
    connections_to_s1.clear();
    // The output is one object with the final state.
    let wait_report =
        parse_json(env.run_coreward(&["drain", "s1", "--wait", "--timeout", "1m", "--format", "json"]).unwrap());
    assert_eq!(
        (&wait_report["server"], &wait_report["remaining_connections"]),
        (&"s1".into(), &0.into()),
        "{wait_report}"
    );
    let undrain_report = parse_json(env.run_coreward(&["undrain", "s1", "--format", "json"]).unwrap());
    assert_eq!(undrain_report["drain"], Value::Null, "{undrain_report}");

    let audit_report = parse_json(env.run_coreward(&["audit", "--format", "json"]).unwrap());
    let audit_actions: Vec<&str> =
        audit_report["entries"].as_array().unwrap().iter().map(|e| e["action"].as_str().unwrap()).collect();
    assert_eq!(
        audit_actions.iter().filter(|action| ["drain", "undrain"].contains(action)).count(),
        2,
        "{audit_report}"
    );
    let audit_lines = env.run_coreward(&["audit"]).unwrap();
    assert!(audit_lines.lines().any(|line| line.contains("undrain s1")), "{audit_lines}");

    // Each event has its id in the log.
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "both events are logged", || {
        read_logged_events(&env, "server-drain-changed").len() == 2
    });
    let drain_events = read_logged_events(&env, "server-drain-changed");
    assert!(drain_events[0]["id"].as_u64().unwrap() < drain_events[1]["id"].as_u64().unwrap(), "{drain_events:?}");
    assert!(drain_events.iter().all(|line| line["name"] == "s1" && line["level"] == "INFO"), "{drain_events:?}");

    assert_signals_change_log_level(&mut env);
}

#[test]
fn apply_waits_until_every_daemon_has_the_document() {
    skip_if!(find_missing_testbed_rights());
    let fleet_document = "[[server]]\nname = \"s1\"\naddress = \"10.1.1.1\"\n[[server]]\nname = \"s2\"\n\
                    address = \"10.1.1.2\"\n[[service]]\nname = \"web0\"\nvip = \"10.200.0.1:80\"\npolicy = \"rr\"\n";
    let mut env = DrainTestEnv::start_with_options(
        "applywait",
        TestbedFleetOptions { applied_document: Some(fleet_document.to_owned()), ..TestbedFleetOptions::default() },
    );
    let document_path = env.testbed.directory().join("next.toml");
    let apply_and_wait = |env: &DrainTestEnv, extra_config: &str, timeout: &str| {
        fs::write(&document_path, format!("{extra_config}{fleet_document}")).unwrap();
        env.run_coreward(&["apply", document_path.to_str().unwrap(), "--yes", "--wait", "--timeout", timeout])
    };
    apply_and_wait(&env, "buckets = 256\n", "1m").unwrap();
    let status = env.fleet.query_status(&env.testbed).unwrap();
    let generation = &status["configuration_generation"];
    let lb_generations = status["load_balancers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|balancer| &balancer["state"]["configuration_generation"]);
    let server_generations =
        status["servers"].as_array().unwrap().iter().map(|server| &server["configuration_generation"]);
    assert!(
        lb_generations.chain(server_generations).all(|applied_generation| applied_generation == generation),
        "{status}"
    );
    // The error names a load balancer that cannot answer.
    env.fleet.kill_daemon("lb1").unwrap();
    let apply_without_lb = || apply_and_wait(&env, "buckets = 64\n", "2s").unwrap_err();
    let error = apply_without_lb();
    assert!(error.contains("lb1") || error.contains("lb lb1"), "{error}");
}
