//! A server is drained as an operator does it, with nginx and clients that keep their connections. Remaining
//! connections are counted, none breaks, and no new ones reach the server. A controller that is killed meanwhile
//! changes none of that.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use coreward_testbed::fleet::{Fleet, FleetOptions, coreward_command};
use coreward_testbed::nginx::Nginx;
use coreward_testbed::process::Process;
use coreward_testbed::{TIMEOUT, Testbed, TestbedOptions, missing_testbed_rights, skip_if};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{OpenConnections, assert_answered, eventually, open_at_each, open_keepalive_connections};

/// Fleet of two servers with nginx. The fields are dropped in this order, the testbed last.
struct TestEnv {
    fleet: Fleet,
    _nginx: Vec<Nginx>,
    testbed: Testbed,
}

impl TestEnv {
    fn start(instance: &str) -> Self {
        Self::start_with(instance, FleetOptions::default())
    }

    fn start_with(instance: &str, fleet: FleetOptions) -> Self {
        let options = TestbedOptions { instance: instance.to_owned(), servers: 2, ..Default::default() };
        let testbed = Testbed::create(options).unwrap();
        let nginx = testbed.server_numbers().into_iter().map(|number| testbed.start_nginx(number).unwrap()).collect();
        let fleet = FleetOptions { policy: "rr".to_owned(), ..fleet };
        let fleet = Fleet::start(&testbed, fleet).unwrap();
        Self { fleet, _nginx: nginx, testbed }
    }

    fn is_only_server(&self, server: u16) -> bool {
        open_keepalive_connections(&self.testbed, 10).iter().all(|(_, answerer)| answerer.server == server)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(coreward_command().unwrap());
        command.args(arguments).env("COREWARD_TOKEN_FILE", self.testbed.directory().join("operator.token"));
        command
    }

    /// Runs `coreward ARGUMENTS`. Returns its output, or its error message.
    fn coreward(&self, arguments: &[&str]) -> Result<String, String> {
        let output = self.testbed.run(self.testbed.controller(), self.command(arguments));
        output.map(|output| String::from_utf8(output.stdout).unwrap()).map_err(|error| format!("{error:#}"))
    }

    /// Starts `coreward ARGUMENTS` in the background, with its output in a file.
    fn spawn_coreward(&self, name: &str, arguments: &[&str]) -> BackgroundCommand {
        let printed = self.testbed.directory().join(format!("{name}.txt"));
        let file = File::create(&printed).unwrap();
        let mut command = self.command(arguments);
        command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
        BackgroundCommand { process: self.testbed.spawn(self.testbed.controller(), command).unwrap(), printed }
    }

    fn server_status(&self, server: &str) -> Value {
        let status = self.fleet.status(&self.testbed).unwrap();
        let servers = status["servers"].as_array().unwrap();
        servers.iter().find(|known| known["name"] == server).unwrap().clone()
    }

    fn state(&self, server: &str) -> String {
        self.server_status(server)["state"].as_str().unwrap().to_owned()
    }
}

struct BackgroundCommand {
    process: Process,
    printed: PathBuf,
}

impl BackgroundCommand {
    fn output(&self) -> String {
        fs::read_to_string(&self.printed).unwrap()
    }

    fn wait_for_output(&self, words: &str) {
        let mut printed = String::new();
        let has = || {
            printed = self.output();
            printed.contains(words)
        };
        eventually(*TIMEOUT, &format!("{words:?}"), has);
    }

    /// Waits for the end of the command. Returns whether it succeeded, and its output.
    fn wait(&mut self) -> (bool, String) {
        let ended = self.process.wait(*TIMEOUT).unwrap();
        (ended.success(), self.output())
    }
}

fn partition_by_server(connections: OpenConnections, server: u16) -> (OpenConnections, OpenConnections) {
    connections.into_iter().partition(|(_, answerer)| answerer.server == server)
}

#[test]
fn drain_ends_when_last_connection_closes() {
    skip_if!(missing_testbed_rights());
    let mut env = TestEnv::start("drained");
    let (mut leaving, mut staying) = partition_by_server(open_at_each(&env.testbed, &[1, 2], 2), 1);
    let remain = leaving.len();
    let mut waiting = env.spawn_coreward("wait", &["drain", "s1", "--wait", "--timeout", "2m"]);
    waiting.wait_for_output(&format!("s1 is draining: {remain} connections remain\n"));
    assert!(env.is_only_server(2));

    env.fleet.kill("controller").unwrap();
    waiting
        .wait_for_output("the drain is on record, what remains is not known: no controller answers at 127.0.0.1:7401");
    assert_answered(&mut leaving);
    leaving.truncate(1);
    env.fleet.restart(&env.testbed, "controller").unwrap();
    waiting.wait_for_output("s1 is draining: 1 connection remains\n");
    env.fleet.wait_until_ready(&env.testbed).unwrap();
    assert_eq!(env.state("s1"), "draining");
    assert!(env.is_only_server(2));
    assert_answered(&mut leaving);
    assert_answered(&mut staying);
    assert!(waiting.process.try_wait().unwrap().is_none(), "{}", waiting.output());
    leaving.clear();
    let (is_success, printed) = waiting.wait();
    assert!(is_success && printed.ends_with("s1 is drained: no connection remains\n"), "{printed}");

    // s1 is drained, so s2 is the last server of web0 and cannot be drained.
    let refused = env.coreward(&["drain", "s2"]).unwrap_err();
    assert!(refused.contains("no other server of web0 takes new connections"), "{refused}");
    assert_eq!(env.coreward(&["drain", "s1"]).unwrap(), "s1 is drained: no connection remains\n", "it is so already");
    assert!(env.coreward(&["undrain", "s1"]).unwrap().starts_with("s1 is "));
    eventually(*TIMEOUT, "server 1 is back", || !env.is_only_server(2));
    assert_answered(&mut staying);
}

#[test]
fn ended_wait_leaves_the_server_drained() {
    skip_if!(missing_testbed_rights());
    let mut env = TestEnv::start("drainend");
    let (mut of_1, _of_2) = partition_by_server(open_at_each(&env.testbed, &[1], 2), 1);
    let mut interrupted = env.spawn_coreward("interrupted", &["drain", "s1", "--service", "web0", "--wait"]);
    // The agent has counted, so the short timeout below covers only a query.
    interrupted.wait_for_output(&format!(" {} connections remain\n", of_1.len()));
    interrupted.process.signal(Signal::SIGINT).unwrap();
    let (is_success, printed) = interrupted.wait();
    assert!(
        !is_success && printed.ends_with("interrupted; s1 stays drained: `coreward undrain s1` ends that\n"),
        "{printed}"
    );
    let mut impatient = env.spawn_coreward("impatient", &["drain", "s1", "--wait", "--timeout", "6s"]);
    let (is_success, printed) = impatient.wait();
    let end = format!(
        "coreward: {} connections remain after 6s; s1 stays drained: `coreward undrain s1` ends that\n",
        of_1.len()
    );
    assert!(!is_success && printed.ends_with(&end), "{printed}");
    // Without an agent no connections are counted.
    env.fleet.kill("agent-s1").unwrap();
    eventually(*TIMEOUT, "the report of s1 is stale", || env.server_status("s1")["reports"] != "fresh");
    let mut uncounted = env.spawn_coreward("uncounted", &["drain", "s1", "--wait", "--timeout", "5s"]);
    let (is_success, printed) = uncounted.wait();
    assert!(
        !is_success && printed.contains("(waiting for its agent, which does not report) after 5s; s1 stays drained"),
        "{printed}"
    );
    assert_eq!(env.state("s1"), "draining");
    assert!(env.is_only_server(2));
    assert_answered(&mut of_1);
    let top = env.coreward(&["top", "--once"]).unwrap();
    assert!(top.lines().any(|line| line.starts_with("s1 ") && line.contains("draining")), "{top}");
    assert!(top.contains("! s1: draining: by `coreward drain`"), "{top}");
}

/// Returns the lines of the controller's log with an event, as JSON objects.
fn logged_events(env: &TestEnv, event: &str) -> Vec<Value> {
    let log = fs::read_to_string(env.testbed.directory().join("controller.log")).unwrap();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["event"] == event).collect()
}

#[test]
fn changes_are_reported_as_json_in_the_audit_and_in_the_log() {
    skip_if!(missing_testbed_rights());
    let mut env = TestEnv::start_with("drainjson", FleetOptions { json_logs: true, ..FleetOptions::default() });
    let (mut leaving, _staying) = partition_by_server(open_at_each(&env.testbed, &[1], 1), 1);
    let json = |text: String| serde_json::from_str::<Value>(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let drained = json(env.coreward(&["drain", "s1", "--format", "json"]).unwrap());
    assert_eq!((&drained["server"], &drained["state"]), (&"s1".into(), &"draining".into()), "{drained}");
    assert_eq!(drained["drained"]["by"], "command", "{drained}");
    assert_answered(&mut leaving);
    leaving.clear();
    // The output is one object with the final state.
    let waited = json(env.coreward(&["drain", "s1", "--wait", "--timeout", "1m", "--format", "json"]).unwrap());
    assert_eq!((&waited["server"], &waited["remaining"]), (&"s1".into(), &0.into()), "{waited}");
    let undrained = json(env.coreward(&["undrain", "s1", "--format", "json"]).unwrap());
    assert_eq!(undrained["drained"], Value::Null, "{undrained}");

    let audit = json(env.coreward(&["audit", "--format", "json"]).unwrap());
    let actions: Vec<&str> =
        audit["entries"].as_array().unwrap().iter().map(|e| e["action"].as_str().unwrap()).collect();
    assert_eq!(actions.iter().filter(|action| ["drain", "undrain"].contains(action)).count(), 2, "{audit}");
    let lines = env.coreward(&["audit"]).unwrap();
    assert!(lines.lines().any(|line| line.contains("undrain s1")), "{lines}");

    // Each event has its id in the log.
    eventually(*TIMEOUT, "both events are logged", || logged_events(&env, "server-drain").len() == 2);
    let logged = logged_events(&env, "server-drain");
    assert!(logged[0]["id"].as_u64().unwrap() < logged[1]["id"].as_u64().unwrap(), "{logged:?}");
    assert!(logged.iter().all(|line| line["name"] == "s1" && line["level"] == "INFO"), "{logged:?}");

    // SIGUSR1 enables debug logs.
    let controller = env.fleet.daemon("lb1").unwrap();
    controller.signal(Signal::SIGUSR1).unwrap();
    let log = || fs::read_to_string(env.testbed.directory().join("lb1.log")).unwrap();
    eventually(*TIMEOUT, "debug lines", || log().contains("\"level\":\"DEBUG\""));
    env.fleet.daemon("lb1").unwrap().signal(Signal::SIGUSR2).unwrap();
    let log = || fs::read_to_string(env.testbed.directory().join("lb1.log")).unwrap();
    eventually(*TIMEOUT, "the level of the start", || log().contains("\"log_level\":\"as at the start\""));
    let after = log();
    let (_, after) = after.split_once("\"log_level\":\"as at the start\"").unwrap();
    assert!(!after.contains("DEBUG"), "{after}");
}

#[test]
fn apply_waits_until_every_daemon_has_the_document() {
    skip_if!(missing_testbed_rights());
    let document = "[[server]]\nname = \"s1\"\naddress = \"10.1.1.1\"\n[[server]]\nname = \"s2\"\n\
                    address = \"10.1.1.2\"\n[[service]]\nname = \"web0\"\nvip = \"10.200.0.1:80\"\npolicy = \"rr\"\n";
    let mut env = TestEnv::start_with(
        "applywait",
        FleetOptions { applied_document: Some(document.to_owned()), ..FleetOptions::default() },
    );
    let file = env.testbed.directory().join("next.toml");
    let apply = |env: &TestEnv, more: &str, timeout: &str| {
        fs::write(&file, format!("{more}{document}")).unwrap();
        env.coreward(&["apply", file.to_str().unwrap(), "--yes", "--wait", "--timeout", timeout])
    };
    apply(&env, "buckets = 256\n", "1m").unwrap();
    let status = env.fleet.status(&env.testbed).unwrap();
    let generation = &status["configuration_generation"];
    let balancers = status["load_balancers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|balancer| &balancer["state"]["configuration_generation"]);
    let servers = status["servers"].as_array().unwrap().iter().map(|server| &server["configuration_generation"]);
    assert!(balancers.chain(servers).all(|acknowledged| acknowledged == generation), "{status}");
    // A load balancer that cannot answer is named.
    env.fleet.kill("lb1").unwrap();
    let missing = || apply(&env, "buckets = 64\n", "2s").unwrap_err();
    let error = missing();
    assert!(error.contains("lb1") || error.contains("lb lb1"), "{error}");
}
