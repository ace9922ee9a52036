//! Rack controllers between agents and the controller, all with certificates. Connections go to the least loaded
//! server, whichever path its reports take. A server behind a rack drains like any other server. Killed racks and
//! controllers break no connection. The controller rejects a rack that has another rack's certificate, or reports for
//! foreign servers, with an error that names it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use coreward_testbed::chaos::traffic::stream_service;
use coreward_testbed::conformance::write_busy_times;
use coreward_testbed::fleet::{
    Fleet, FleetOptions, LoadSource, agent_name, busy_file, credential_directory, operator_command,
};
use coreward_testbed::nginx::Nginx;
use coreward_testbed::stream::client::StreamWorkload;
use coreward_testbed::stream::server::StreamServers;
use coreward_testbed::{TIMEOUT, Testbed, TestbedOptions, missing_testbed_rights, skip_if};
use coreward_tls::Role;
use serde_json::Value;

use crate::support::{assert_answered, assert_unbroken, daemon_log, eventually, open_keepalive_connections, pause};

const CORE_COUNT: u16 = 2;
/// Server number that no server has: no server is idle.
const NO_SERVER: u16 = 0;
/// Value of `idle_server` that ends the thread of [`LoadWriter`].
const END_LOAD: u16 = u16::MAX;

/// Writer of the servers' core load files: all cores are nearly always busy, except those of one server.
struct LoadWriter {
    idle_server: Arc<AtomicU16>,
    writer_thread: Option<JoinHandle<()>>,
}

impl LoadWriter {
    fn start(testbed: &Testbed) -> Self {
        let files: Vec<_> = testbed.server_numbers().into_iter().map(|n| (n, busy_file(testbed, n))).collect();
        let idle_server = Arc::new(AtomicU16::new(NO_SERVER));
        let reported = idle_server.clone();
        let writing = std::thread::spawn(move || {
            let (mut busy_ns, mut before) = (BTreeMap::new(), Instant::now());
            while reported.load(Ordering::Relaxed) != END_LOAD {
                let passed = before.elapsed();
                before += passed;
                for (number, file) in &files {
                    let busy = busy_ns.entry(*number).or_insert(0u64);
                    *busy +=
                        if reported.load(Ordering::Relaxed) == *number { 0 } else { passed.as_nanos() as u64 / 10 * 9 };
                    write_busy_times(file, &[*busy; CORE_COUNT as usize]).unwrap();
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        Self { idle_server, writer_thread: Some(writing) }
    }

    fn set_idle(&self, server: u16) {
        self.idle_server.store(server, Ordering::Relaxed);
    }
}

impl Drop for LoadWriter {
    fn drop(&mut self) {
        self.set_idle(END_LOAD);
        let _ = self.writer_thread.take().map(JoinHandle::join);
    }
}

/// Fleet with rack controllers. The fields are dropped in this order, the testbed last.
struct TestEnv {
    fleet: Fleet,
    loads: LoadWriter,
    _nginx: Vec<Nginx>,
    _streams: StreamServers,
    testbed: Testbed,
}

impl TestEnv {
    /// `server_racks`: rack controllers that the agent of a server uses, as the document allows.
    fn start(instance: &str, server_racks: &[(u16, &[u16])]) -> Self {
        let testbed =
            TestbedOptions { instance: instance.to_owned(), cores: CORE_COUNT, racks: 2, ..Default::default() };
        let servers = server_racks.len() as u16;
        let testbed = Testbed::create(TestbedOptions { servers, ..testbed }).unwrap();
        let nginx = testbed.server_numbers().into_iter().map(|number| testbed.start_nginx(number).unwrap()).collect();
        let busy_of_streams = |number| testbed.directory().join(format!("streams-s{number}"));
        let streams = testbed.start_stream_servers_at(stream_service(&testbed), busy_of_streams).unwrap();
        let loads = LoadWriter::start(&testbed);
        eventually(*TIMEOUT, "a file of loads", || busy_file(&testbed, servers).exists());
        let server_racks = server_racks.iter().map(|(server, racks)| (*server, racks.to_vec()));
        let options = FleetOptions {
            load_source: LoadSource::PacedServer,
            steers_connections: false,
            tls: true,
            server_lines: server_racks.clone().map(|(server, racks)| (server, racks_key(&racks))).collect(),
            server_racks: server_racks.collect(),
            fleet_text: format!(
                "\n[[service]]\nname = \"streams\"\nvip = \"{}\"\nconsistency = \"stateful\"\n",
                stream_service(&testbed)
            ),
            ..Default::default()
        };
        let fleet = Fleet::start(&testbed, options).unwrap();
        Self { fleet, loads, _nginx: nginx, _streams: streams, testbed }
    }

    /// Makes one server the only idle one, and asserts that all new connections reach it.
    fn assert_all_reach(&self, server: u16) {
        self.loads.set_idle(server);
        let all = || open_keepalive_connections(&self.testbed, 8).iter().all(|(_, answerer)| answerer.server == server);
        eventually(*TIMEOUT, &format!("all new connections go to s{server}"), all);
    }

    fn coreward(&self, arguments: &[&str]) -> String {
        let command = operator_command(&self.testbed, arguments).unwrap();
        String::from_utf8(self.testbed.run(self.testbed.controller(), command).unwrap().stdout).unwrap()
    }

    /// Returns the rack controller through which each reporting server's agent is connected; "": none.
    fn agent_racks(&self) -> BTreeMap<String, String> {
        let Ok(status) = self.fleet.status(&self.testbed) else { return BTreeMap::new() };
        let servers = status["servers"].as_array().into_iter().flatten();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let reporting = servers.filter(|server| server["reports"] == "fresh");
        reporting.map(|server| (text(&server["name"]), text(&server["rack"]))).collect()
    }

    fn agent_rack(&self, server: &str) -> Option<String> {
        self.agent_racks().remove(server)
    }

    /// Waits until each agent has reported through a rack controller in `allowed`, not necessarily at the same time.
    fn wait_for_racks_in(&self, allowed: &[&[&str]]) {
        let mut missing: BTreeSet<String> = (1..=allowed.len()).map(|number| format!("s{number}")).collect();
        eventually(*TIMEOUT, &format!("agents are connected through {allowed:?}"), || {
            let racks = self.agent_racks();
            for (number, allowed) in (1..).zip(allowed) {
                let server = format!("s{number}");
                match racks.get(&server) {
                    Some(rack) if allowed.contains(&rack.as_str()) => missing.remove(&server),
                    // The agent's last report came through another rack.
                    Some(_) => missing.insert(server),
                    None => false,
                };
            }
            missing.is_empty()
        });
    }

    /// Waits until the agents are connected through these rack controllers.
    fn wait_for_racks(&self, racks: &[&str]) {
        let allowed: Vec<&[&str]> = racks.iter().map(std::slice::from_ref).collect();
        self.wait_for_racks_in(&allowed);
    }

    fn rack_names(&self) -> Vec<String> {
        let status = self.fleet.status(&self.testbed).unwrap_or_default();
        let racks = status["racks"].as_array().into_iter().flatten();
        racks.map(|rack| rack["name"].as_str().unwrap().to_owned()).collect()
    }

    /// Starts a rack controller with a foreign certificate until the controller logs these words, then with its own
    /// one.
    fn assert_rejected(&mut self, rack: &str, certificate: (Role, &str), words: &str) {
        let own = credential_directory(&self.testbed, Role::Rack, rack);
        let kept = self.testbed.directory().join("kept");
        let copy = |from: &std::path::Path, to: &std::path::Path| {
            fs::create_dir_all(to).unwrap();
            for file in ["ca.crt", "own.crt", "own.key"] {
                fs::copy(from.join(file), to.join(file)).unwrap();
            }
        };
        self.fleet.kill(rack).unwrap();
        copy(&own, &kept);
        copy(&credential_directory(&self.testbed, certificate.0, certificate.1), &own);
        let from = daemon_log(&self.testbed, "controller", 0).len();
        self.fleet.restart(&self.testbed, rack).unwrap();
        eventually(*TIMEOUT, words, || daemon_log(&self.testbed, "controller", from).contains(words));
        assert!(!self.rack_names().iter().any(|name| name == rack));
        // A rack with another name is a separate process.
        self.fleet.kill(rack).unwrap();
        copy(&kept, &own);
        self.fleet.restart(&self.testbed, rack).unwrap();
        eventually(*TIMEOUT, &format!("{rack} is back"), || self.rack_names().iter().any(|name| name == rack));
    }
}

/// Returns the line `racks` of a server in the fleet's file.
fn racks_key(racks: &[u16]) -> String {
    let names: Vec<String> = racks.iter().map(|rack| format!("rack{rack}")).collect();
    format!("racks = {names:?}\n")
}

#[test]
fn racks_and_controller_restart_without_broken_connections() {
    skip_if!(missing_testbed_rights());
    let mut env = TestEnv::start("racks", &[(1, &[1]), (2, &[1, 2]), (3, &[2]), (4, &[2, 1]), (5, &[])]);
    env.wait_for_racks(&["rack1", "rack1", "rack2", "rack2", ""]);
    for server in 1..=5 {
        env.assert_all_reach(server);
    }
    let status = env.fleet.status(&env.testbed).unwrap();
    let racks = |key: &str| [0, 1].map(|rack| status["racks"][rack][key].clone());
    assert_eq!(racks("servers"), [serde_json::json!(["s1", "s2"]), serde_json::json!(["s3", "s4"])]);
    assert_eq!(racks("permitted_servers"), [Value::from(3), Value::from(3)]);
    let text = env.coreward(&["status"]);
    assert!(
        text.contains("\nrack rack1 (") && text.contains("may report for 3 of 5 servers\n  servers    s1 s2\n"),
        "{text}"
    );
    // The agent of a server behind a rack measures that every core is busy.
    eventually(*TIMEOUT, "s1 is seen to be busy", || {
        let status = env.fleet.status(&env.testbed).unwrap();
        let s1 = status["servers"].as_array().unwrap().iter().find(|server| server["name"] == "s1").unwrap();
        let loads: Vec<f64> = s1["core_load"].as_array().unwrap().iter().map(|load| load.as_f64().unwrap()).collect();
        loads.len() == usize::from(CORE_COUNT) && loads.iter().all(|load| (0.7..1.1).contains(load))
    });

    drain(&env);

    env.loads.set_idle(NO_SERVER);
    let mut kept = open_keepalive_connections(&env.testbed, 20);
    let streams = StreamWorkload::endless(40.0);
    let streams = env.testbed.start_stream_client_at(stream_service(&env.testbed), 1..4, &streams, None).unwrap();
    pause(2_000);
    env.fleet.kill("rack1").unwrap();
    let killed = Instant::now();
    env.wait_for_racks(&["", "rack2", "rack2", "rack2", ""]);
    println!("rack1's agents report again after {:?}", killed.elapsed());
    env.assert_all_reach(1);
    env.assert_all_reach(2);
    env.fleet.restart(&env.testbed, "rack1").unwrap();
    eventually(*TIMEOUT, "rack1 is back", || env.rack_names() == ["rack1", "rack2"]);
    // No agent had to change its rack.
    env.wait_for_racks(&["", "rack2", "rack2", "rack2", ""]);

    env.fleet.kill("controller").unwrap();
    pause(1_000);
    env.fleet.restart(&env.testbed, "controller").unwrap();
    let restarted = Instant::now();
    env.wait_for_racks_in(&[&["", "rack1"], &["", "rack1", "rack2"], &["", "rack2"], &["", "rack1", "rack2"], &[""]]);
    eventually(*TIMEOUT, "the racks are back", || env.rack_names() == ["rack1", "rack2"]);
    println!("all report {:?} after the controller's restart", restarted.elapsed());
    for server in [3, 5, 2] {
        env.assert_all_reach(server);
    }
    assert_answered(&mut kept);
    assert_unbroken(streams);
    assert_answered(&mut kept);
}

/// Drains a server behind a rack controller by `coreward drain --wait`, which counts its connections and ends with the
/// last one.
fn drain(env: &TestEnv) {
    env.assert_all_reach(2);
    let mut leaving = open_keepalive_connections(&env.testbed, 3);
    assert!(leaving.iter().all(|(_, answerer)| answerer.server == 2));
    let printed = env.testbed.directory().join("drain.txt");
    let file = File::create(&printed).unwrap();
    let mut command: Command = operator_command(&env.testbed, &["drain", "s2", "--wait", "--timeout", "2m"]).unwrap();
    command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
    let mut waiting = env.testbed.spawn(env.testbed.controller(), command).unwrap();
    let says = |words: &str| eventually(*TIMEOUT, words, || fs::read_to_string(&printed).unwrap().contains(words));
    says("s2 is draining: 3 connections remain\n");
    let elsewhere = open_keepalive_connections(&env.testbed, 8);
    assert!(elsewhere.iter().all(|(_, answerer)| answerer.server != 2));
    assert_answered(&mut leaving);
    leaving.truncate(1);
    says("s2 is draining: 1 connection remains\n");
    leaving.clear();
    let ended = waiting.wait(*TIMEOUT).unwrap();
    let printed = fs::read_to_string(&printed).unwrap();
    assert!(ended.success() && printed.ends_with("s2 is drained: no connection remains\n"), "{printed}");
    env.coreward(&["undrain", "s2"]);
    env.assert_all_reach(2);
}

#[test]
fn rack_reports_for_its_own_servers_only() {
    skip_if!(missing_testbed_rights());
    let mut env = TestEnv::start("rackswho", &[(1, &[1]), (2, &[2])]);
    env.assert_rejected(
        "rack1",
        (Role::Rack, "rack2"),
        "the certificate is for rack rack2, not for rack rack1: expected its own name",
    );
    env.assert_rejected(
        "rack1",
        (Role::Agent, "s1"),
        "reason=\"wrong_role\" error=the certificate is for agent s1: expected rack",
    );

    // The agent of s2 connects through rack1, which the document does not permit for s2.
    env.fleet.kill(&agent_name(2)).unwrap();
    let mut options = env.fleet.options().clone();
    options.server_racks.insert(2, vec![1]);
    env.fleet.set_options(&env.testbed, options.clone()).unwrap();
    let [controller, agent] = ["controller", "agent-s2"].map(|daemon| daemon_log(&env.testbed, daemon, 0).len());
    env.fleet.restart(&env.testbed, &agent_name(2)).unwrap();
    let words = r#"may not report for server \"s2\": expected rack \"rack2\", or its agent itself"#;
    eventually(*TIMEOUT, words, || daemon_log(&env.testbed, "controller", controller).contains(words));
    eventually(*TIMEOUT, words, || daemon_log(&env.testbed, "agent-s2", agent).contains(words));
    eventually(*TIMEOUT, "s2 is connected directly", || env.agent_rack("s2").is_some_and(|rack| rack.is_empty()));
    let refused = &env.fleet.status(&env.testbed).unwrap()["refused_reports"]["foreign_rack"];
    assert!(refused.as_u64().unwrap() >= 1, "{refused}");
    env.assert_all_reach(2);

    // A new document disconnects agents that it forbids.
    eventually(*TIMEOUT, "s1 is connected through its rack", || {
        if env.agent_rack("s1").is_some_and(|rack| rack == "rack1") {
            return true;
        }
        // The agent bypassed its rack while the rack had no certificate.
        env.fleet.upgrade(&env.testbed, &agent_name(1)).unwrap();
        pause(2_000);
        false
    });
    let from = daemon_log(&env.testbed, "controller", 0).len();
    options.server_lines.insert(1, racks_key(&[]));
    env.fleet.set_options(&env.testbed, options).unwrap();
    let words = r#"may not report for server \"s1\": expected its agent itself"#;
    eventually(*TIMEOUT, words, || daemon_log(&env.testbed, "controller", from).contains(words));
    eventually(*TIMEOUT, "s1 is connected directly", || env.agent_rack("s1").is_some_and(|rack| rack.is_empty()));
    env.assert_all_reach(1);
}
