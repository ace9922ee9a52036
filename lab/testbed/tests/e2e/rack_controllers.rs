//! Rack controllers between agents and the controller, all with certificates. Connections go to the least loaded
//! server, whichever path its reports take. A server behind a rack controller drains like any other server. Killed rack
//! controllers and controllers break no connection. The controller rejects a rack controller that has another one's
//! certificate or reports for foreign servers, and its error names the rack controller.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use coreward_testbed::chaos::traffic::stream_service_address;
use coreward_testbed::conformance::write_core_busy_times;
use coreward_testbed::fleet::{
    CoreLoadSource, Fleet, TestbedFleetOptions, agent_name, build_operator_command, core_load_file_path,
    credential_directory,
};
use coreward_testbed::nginx::NginxServer;
use coreward_testbed::stream_connections::client::StreamWorkload;
use coreward_testbed::stream_connections::server::StreamServerProcess;
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, Testbed, TestbedOptions, find_missing_testbed_rights, skip_if};
use coreward_tls::FleetRole;
use serde_json::Value;

use crate::support::{
    assert_connections_answered, assert_eventually, assert_streams_unbroken, open_keepalive_connections,
    read_daemon_log, sleep_ms,
};

const CORE_COUNT: u16 = 2;
/// Value of `idle_server_number` with which no server is idle.
const NO_IDLE_SERVER_NUMBER: u16 = 0;
/// Value of `idle_server_number` that ends the thread of [`CoreLoadWriter`].
const STOP_LOAD_WRITER_NUMBER: u16 = u16::MAX;

/// Writer of the servers' core load files. All cores appear nearly always busy, except those of one server.
struct CoreLoadWriter {
    idle_server_number: Arc<AtomicU16>,
    writer_thread: Option<JoinHandle<()>>,
}

impl CoreLoadWriter {
    fn start(testbed: &Testbed) -> Self {
        let core_load_files: Vec<_> =
            testbed.server_numbers().into_iter().map(|n| (n, core_load_file_path(testbed, n))).collect();
        let idle_server_number = Arc::new(AtomicU16::new(NO_IDLE_SERVER_NUMBER));
        let idle_server_in_thread = idle_server_number.clone();
        let writer_thread = std::thread::spawn(move || {
            let (mut busy_ns, mut last_update) = (BTreeMap::new(), Instant::now());
            while idle_server_in_thread.load(Ordering::Relaxed) != STOP_LOAD_WRITER_NUMBER {
                let elapsed_time = last_update.elapsed();
                last_update += elapsed_time;
                for (number, file) in &core_load_files {
                    let core_busy_ns = busy_ns.entry(*number).or_insert(0u64);
                    *core_busy_ns += if idle_server_in_thread.load(Ordering::Relaxed) == *number {
                        0
                    } else {
                        elapsed_time.as_nanos() as u64 / 10 * 9
                    };
                    write_core_busy_times(file, &[*core_busy_ns; CORE_COUNT as usize]).unwrap();
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        Self { idle_server_number, writer_thread: Some(writer_thread) }
    }

    fn set_idle_server(&self, server: u16) {
        self.idle_server_number.store(server, Ordering::Relaxed);
    }
}

impl Drop for CoreLoadWriter {
    fn drop(&mut self) {
        self.set_idle_server(STOP_LOAD_WRITER_NUMBER);
        let _ = self.writer_thread.take().map(JoinHandle::join);
    }
}

/// Fleet with rack controllers. Fields are dropped in the order of their declaration, the testbed last.
struct RackControllersEnv {
    fleet: Fleet,
    load_writer: CoreLoadWriter,
    _nginx_servers: Vec<NginxServer>,
    _stream_servers: StreamServerProcess,
    testbed: Testbed,
}

impl RackControllersEnv {
    /// Starts the environment. `server_racks` lists each server with the rack controllers that its agent uses and the
    /// document allows.
    fn start(instance: &str, server_racks: &[(u16, &[u16])]) -> Self {
        let testbed_options = TestbedOptions {
            instance_name: instance.to_owned(),
            core_count: CORE_COUNT,
            rack_controller_count: 2,
            ..Default::default()
        };
        let server_count = server_racks.len() as u16;
        let testbed = Testbed::create(TestbedOptions { server_count, ..testbed_options }).unwrap();
        let nginx_servers =
            testbed.server_numbers().into_iter().map(|number| testbed.start_nginx(number).unwrap()).collect();
        let stream_load_file_path = |number| testbed.directory().join(format!("streams-s{number}"));
        let stream_servers =
            testbed.start_stream_servers_at_address(stream_service_address(&testbed), stream_load_file_path).unwrap();
        let load_writer = CoreLoadWriter::start(&testbed);
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, "a file of loads", || {
            core_load_file_path(&testbed, server_count).exists()
        });
        let racks_of_servers = server_racks.iter().map(|(server, racks)| (*server, racks.to_vec()));
        let options = TestbedFleetOptions {
            core_load_source: CoreLoadSource::PacedServer,
            steers_connections: false,
            uses_tls: true,
            extra_text_by_server: racks_of_servers
                .clone()
                .map(|(server, racks)| (server, racks_config_line(&racks)))
                .collect(),
            rack_numbers_by_server: racks_of_servers.collect(),
            extra_fleet_text: format!(
                "\n[[service]]\nname = \"streams\"\nvip = \"{}\"\nconsistency = \"stateful\"\n",
                stream_service_address(&testbed)
            ),
            ..Default::default()
        };
        let fleet = Fleet::start(&testbed, options).unwrap();
        Self { fleet, load_writer, _nginx_servers: nginx_servers, _stream_servers: stream_servers, testbed }
    }

    /// Makes all servers except `server` busy, and asserts that all new connections reach `server`.
    fn assert_idle_server_gets_all_connections(&self, server: u16) {
        self.load_writer.set_idle_server(server);
        let all_reach_server = || {
            open_keepalive_connections(&self.testbed, 8).iter().all(|(_, answerer)| answerer.server_number == server)
        };
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, &format!("all new connections go to s{server}"), all_reach_server);
    }

    fn run_coreward(&self, arguments: &[&str]) -> String {
        let command = build_operator_command(&self.testbed, arguments).unwrap();
        String::from_utf8(self.testbed.run_command(self.testbed.controller(), command).unwrap().stdout).unwrap()
    }

    /// Returns, for each reporting server, the rack controller through which its agent is connected, or "" if there is
    /// none.
    fn query_agent_racks(&self) -> BTreeMap<String, String> {
        let Ok(status) = self.fleet.query_status(&self.testbed) else { return BTreeMap::new() };
        let servers = status["servers"].as_array().into_iter().flatten();
        let to_text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let reporting_servers = servers.filter(|server| server["report_state"] == "fresh");
        reporting_servers.map(|server| (to_text(&server["name"]), to_text(&server["rack"]))).collect()
    }

    fn query_agent_rack(&self, server: &str) -> Option<String> {
        self.query_agent_racks().remove(server)
    }

    /// Waits until each agent has reported through one of its rack controllers in `allowed_racks`, not necessarily at
    /// the same time.
    fn wait_for_allowed_racks(&self, allowed_racks: &[&[&str]]) {
        let mut missing_servers: BTreeSet<String> =
            (1..=allowed_racks.len()).map(|number| format!("s{number}")).collect();
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, &format!("agents are connected through {allowed_racks:?}"), || {
            let current_racks = self.query_agent_racks();
            for (number, server_racks) in (1..).zip(allowed_racks) {
                let server = format!("s{number}");
                match current_racks.get(&server) {
                    Some(rack) if server_racks.contains(&rack.as_str()) => missing_servers.remove(&server),
                    // The agent's last report came through another rack controller.
                    Some(_) => missing_servers.insert(server),
                    None => false,
                };
            }
            missing_servers.is_empty()
        });
    }

    /// Waits until the agents are connected through these rack controllers.
    fn wait_for_agent_racks(&self, racks: &[&str]) {
        let allowed_racks: Vec<&[&str]> = racks.iter().map(std::slice::from_ref).collect();
        self.wait_for_allowed_racks(&allowed_racks);
    }

    fn query_connected_rack_names(&self) -> Vec<String> {
        let status = self.fleet.query_status(&self.testbed).unwrap_or_default();
        let racks = status["racks"].as_array().into_iter().flatten();
        racks.map(|rack| rack["name"].as_str().unwrap().to_owned()).collect()
    }

    /// Restarts a rack controller with a foreign certificate, and waits until the controller logs `log_words`. Then
    /// restarts it with its own certificate.
    fn assert_certificate_is_rejected(&mut self, rack: &str, certificate: (FleetRole, &str), log_words: &str) {
        let own_directory = credential_directory(&self.testbed, FleetRole::Rack, rack);
        let backup_directory = self.testbed.directory().join("kept");
        let copy_credential_files = |source_directory: &std::path::Path, target_directory: &std::path::Path| {
            fs::create_dir_all(target_directory).unwrap();
            for file in ["ca.crt", "own.crt", "own.key"] {
                fs::copy(source_directory.join(file), target_directory.join(file)).unwrap();
            }
        };
        self.fleet.kill_daemon(rack).unwrap();
        copy_credential_files(&own_directory, &backup_directory);
        copy_credential_files(&credential_directory(&self.testbed, certificate.0, certificate.1), &own_directory);
        let log_length = read_daemon_log(&self.testbed, "controller", 0).len();
        self.fleet.restart_daemon(&self.testbed, rack).unwrap();
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, log_words, || {
            read_daemon_log(&self.testbed, "controller", log_length).contains(log_words)
        });
        assert!(!self.query_connected_rack_names().iter().any(|name| name == rack));
        // A rack controller with another name is a separate process.
        self.fleet.kill_daemon(rack).unwrap();
        copy_credential_files(&backup_directory, &own_directory);
        self.fleet.restart_daemon(&self.testbed, rack).unwrap();
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, &format!("{rack} is back"), || {
            self.query_connected_rack_names().iter().any(|name| name == rack)
        });
    }
}

/// Returns the line `racks` for a server in the fleet document.
fn racks_config_line(racks: &[u16]) -> String {
    let rack_controller_names: Vec<String> = racks.iter().map(|rack| format!("rack{rack}")).collect();
    format!("racks = {rack_controller_names:?}\n")
}

fn assert_status_shows_racks(env: &RackControllersEnv) {
    let status = env.fleet.query_status(&env.testbed).unwrap();
    let read_rack_values = |key: &str| [0, 1].map(|rack| status["racks"][rack][key].clone());
    assert_eq!(read_rack_values("servers"), [serde_json::json!(["s1", "s2"]), serde_json::json!(["s3", "s4"])]);
    assert_eq!(read_rack_values("permitted_servers"), [Value::from(3), Value::from(3)]);
    let status_output = env.run_coreward(&["status"]);
    assert!(
        status_output.contains("\nrack rack1 (")
            && status_output.contains("may report for 3 of 5 servers\n  servers    s1 s2\n"),
        "{status_output}"
    );
}

/// Asserts that the agent of a server behind a rack controller measures all cores as busy.
fn assert_busy_cores_are_measured(env: &RackControllersEnv) {
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "s1 is seen to be busy", || {
        let status = env.fleet.query_status(&env.testbed).unwrap();
        let s1 = status["servers"].as_array().unwrap().iter().find(|server| server["name"] == "s1").unwrap();
        let core_loads: Vec<f64> =
            s1["core_loads"].as_array().unwrap().iter().map(|load| load.as_f64().unwrap()).collect();
        core_loads.len() == usize::from(CORE_COUNT) && core_loads.iter().all(|load| (0.7..1.1).contains(load))
    });
}

/// Asserts that agents whose rack controller does not run report to a different one or directly to the controller.
fn assert_agents_report_without_rack_controller(env: &mut RackControllersEnv) {
    env.fleet.kill_daemon("rack1").unwrap();
    let kill_time = Instant::now();
    env.wait_for_agent_racks(&["", "rack2", "rack2", "rack2", ""]);
    println!("rack1's agents report again after {:?}", kill_time.elapsed());
    env.assert_idle_server_gets_all_connections(1);
    env.assert_idle_server_gets_all_connections(2);
    env.fleet.restart_daemon(&env.testbed, "rack1").unwrap();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "rack1 is back", || {
        env.query_connected_rack_names() == ["rack1", "rack2"]
    });
    // No agent had to change its rack controller.
    env.wait_for_agent_racks(&["", "rack2", "rack2", "rack2", ""]);
}

/// Restarts the controller, and waits until every agent reports through an allowed rack controller or directly.
fn restart_controller(env: &mut RackControllersEnv) {
    env.fleet.kill_daemon("controller").unwrap();
    sleep_ms(1_000);
    env.fleet.restart_daemon(&env.testbed, "controller").unwrap();
    let restart_time = Instant::now();
    env.wait_for_allowed_racks(&[
        &["", "rack1"],
        &["", "rack1", "rack2"],
        &["", "rack2"],
        &["", "rack1", "rack2"],
        &[""],
    ]);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the racks are back", || {
        env.query_connected_rack_names() == ["rack1", "rack2"]
    });
    println!("all report {:?} after the controller's restart", restart_time.elapsed());
}

#[test]
fn rack_and_controller_restarts_break_no_connection() {
    skip_if!(find_missing_testbed_rights());
    let mut env = RackControllersEnv::start("racks", &[(1, &[1]), (2, &[1, 2]), (3, &[2]), (4, &[2, 1]), (5, &[])]);
    env.wait_for_agent_racks(&["rack1", "rack1", "rack2", "rack2", ""]);
    for server in 1..=5 {
        env.assert_idle_server_gets_all_connections(server);
    }
    assert_status_shows_racks(&env);
    assert_busy_cores_are_measured(&env);
    assert_drain_waits_for_connections(&env);

    env.load_writer.set_idle_server(NO_IDLE_SERVER_NUMBER);
    let mut connections_before = open_keepalive_connections(&env.testbed, 20);
    let stream_workload = StreamWorkload::endless(40.0);
    let stream_client = env
        .testbed
        .start_stream_client_at_address(stream_service_address(&env.testbed), 1..4, &stream_workload, None)
        .unwrap();
    sleep_ms(2_000);
    assert_agents_report_without_rack_controller(&mut env);

    restart_controller(&mut env);
    for server in [3, 5, 2] {
        env.assert_idle_server_gets_all_connections(server);
    }
    assert_connections_answered(&mut connections_before);
    assert_streams_unbroken(stream_client);
    assert_connections_answered(&mut connections_before);
}

/// Asserts that `coreward drain --wait` for a server behind a rack controller ends when the server's last connection
/// closes.
fn assert_drain_waits_for_connections(env: &RackControllersEnv) {
    env.assert_idle_server_gets_all_connections(2);
    let mut drained_connections = open_keepalive_connections(&env.testbed, 3);
    assert!(drained_connections.iter().all(|(_, answerer)| answerer.server_number == 2));
    let output_path = env.testbed.directory().join("drain.txt");
    let output_file = File::create(&output_path).unwrap();
    let mut command: Command =
        build_operator_command(&env.testbed, &["drain", "s2", "--wait", "--timeout", "2m"]).unwrap();
    command.stdin(Stdio::null()).stdout(output_file.try_clone().unwrap()).stderr(output_file);
    let mut drain_process = env.testbed.spawn(env.testbed.controller(), command).unwrap();
    let wait_for_output = |expected_text: &str| {
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, expected_text, || {
            fs::read_to_string(&output_path).unwrap().contains(expected_text)
        })
    };
    wait_for_output("s2 is draining: 3 connections remain\n");
    let other_connections = open_keepalive_connections(&env.testbed, 8);
    assert!(other_connections.iter().all(|(_, answerer)| answerer.server_number != 2));
    assert_connections_answered(&mut drained_connections);
    drained_connections.truncate(1);
    wait_for_output("s2 is draining: 1 connection remains\n");
    drained_connections.clear();
    let exit_status = drain_process.wait_for_exit(*DEFAULT_WAIT_TIMEOUT).unwrap();
    let output_text = fs::read_to_string(&output_path).unwrap();
    assert!(exit_status.success() && output_text.ends_with("s2 is drained: no connection remains\n"), "{output_text}");
    env.run_coreward(&["undrain", "s2"]);
    env.assert_idle_server_gets_all_connections(2);
}

/// Asserts that the controller disconnects an agent when a new document forbids the agent's rack controller.
fn assert_forbidden_agent_is_disconnected(env: &mut RackControllersEnv, mut options: TestbedFleetOptions) {
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "s1 is connected through its rack", || {
        if env.query_agent_rack("s1").is_some_and(|rack| rack == "rack1") {
            return true;
        }
        // The agent bypassed its rack controller while that had no certificate.
        env.fleet.upgrade_daemon(&env.testbed, &agent_name(1)).unwrap();
        sleep_ms(2_000);
        false
    });
    let log_length = read_daemon_log(&env.testbed, "controller", 0).len();
    options.extra_text_by_server.insert(1, racks_config_line(&[]));
    env.fleet.set_fleet_options(&env.testbed, options).unwrap();
    let rejection_words = r#"may not report for server \"s1\": expected its agent itself"#;
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, rejection_words, || {
        read_daemon_log(&env.testbed, "controller", log_length).contains(rejection_words)
    });
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "s1 is connected directly", || {
        env.query_agent_rack("s1").is_some_and(|rack| rack.is_empty())
    });
    env.assert_idle_server_gets_all_connections(1);
}

#[test]
fn rack_controller_reports_only_for_its_own_servers() {
    skip_if!(find_missing_testbed_rights());
    let mut env = RackControllersEnv::start("rackswho", &[(1, &[1]), (2, &[2])]);
    env.assert_certificate_is_rejected(
        "rack1",
        (FleetRole::Rack, "rack2"),
        "the certificate is for rack rack2, not for rack rack1: expected its own name",
    );
    env.assert_certificate_is_rejected(
        "rack1",
        (FleetRole::Agent, "s1"),
        "reason=\"wrong_role\" error=the certificate is for agent s1: expected rack",
    );

    // The agent of s2 connects through rack1, which the document does not permit for s2.
    env.fleet.kill_daemon(&agent_name(2)).unwrap();
    let mut options = env.fleet.options().clone();
    options.rack_numbers_by_server.insert(2, vec![1]);
    env.fleet.set_fleet_options(&env.testbed, options.clone()).unwrap();
    let [controller_log_length, agent_log_length] =
        ["controller", "agent-s2"].map(|daemon| read_daemon_log(&env.testbed, daemon, 0).len());
    env.fleet.restart_daemon(&env.testbed, &agent_name(2)).unwrap();
    let rejection_words = r#"may not report for server \"s2\": expected rack \"rack2\", or its agent itself"#;
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, rejection_words, || {
        read_daemon_log(&env.testbed, "controller", controller_log_length).contains(rejection_words)
    });
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, rejection_words, || {
        read_daemon_log(&env.testbed, "agent-s2", agent_log_length).contains(rejection_words)
    });
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "s2 is connected directly", || {
        env.query_agent_rack("s2").is_some_and(|rack| rack.is_empty())
    });
    let rejected_reports = &env.fleet.query_status(&env.testbed).unwrap()["rejected_reports"]["foreign_rack"];
    assert!(rejected_reports.as_u64().unwrap() >= 1, "{rejected_reports}");
    env.assert_idle_server_gets_all_connections(2);

    assert_forbidden_agent_is_disconnected(&mut env, options);
}
