//! Test of several controllers on etcd. Leaders are killed, or stopped and continued, and etcd loses its own leader.
//! Afterwards no acknowledged change may be lost, and no connection may have broken.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use coreward_etcd::local::LocalEtcdMember;
use coreward_testbed::addresses::CONTROLLER_ADDRESS;
use coreward_testbed::fleet::{
    CoreLoadSource, Fleet, TestbedFleetOptions, build_operator_command_at_controllers, controller_address,
    controller_api_address, coreward_binary_path,
};
use coreward_testbed::process::TestbedProcess;
use coreward_testbed::stream_connections::client::StreamWorkload;
use coreward_testbed::stream_connections::server::StreamServerProcess;
use coreward_testbed::{Testbed, TestbedOptions, find_missing_testbed_rights, skip_if};
use nix::sys::signal::Signal;

use crate::support::{assert_eventually, assert_streams_unbroken, sleep_ms};

/// Maximum time until another controller becomes the leader. It is a multiple of the lease's duration, to allow for
/// slow machines.
const LEADER_TAKEOVER_TIMEOUT: Duration = Duration::from_secs(90);

/// Fleet with three controllers and three etcd members. Fields are dropped in the order of their declaration, the
/// testbed last.
struct HighAvailabilityEnv {
    fleet: Fleet,
    /// Processes of controllers 2 and 3. The process of controller 1 belongs to the fleet.
    other_controller_processes: Vec<Option<TestbedProcess>>,
    etcd_processes: Vec<Option<TestbedProcess>>,
    etcd_members: Vec<LocalEtcdMember>,
    _stream_servers: StreamServerProcess,
    testbed: Testbed,
    applied_document: String,
    change_count: u32,
}

fn etcd_config_table(members: &[LocalEtcdMember]) -> String {
    let endpoints: Vec<String> = members.iter().map(LocalEtcdMember::endpoint).collect();
    format!("[etcd]\nendpoints = {endpoints:?}\nlease = \"5s\"\n")
}

fn start_controller(testbed: &Testbed, members: &[LocalEtcdMember], number: u16) -> TestbedProcess {
    let config_path = testbed.directory().join(format!("controller{number}.toml"));
    let (listen, api, token_directory) =
        (controller_address(number), controller_api_address(number), testbed.directory());
    fs::write(
        &config_path,
        format!(
            "listen = \"{listen}\"\napi = \"{api}\"\ntoken_directory = {token_directory:?}\n{}",
            etcd_config_table(members)
        ),
    )
    .unwrap();
    let log_file = File::create(testbed.directory().join(format!("controller{number}.log"))).unwrap();
    let mut command = Command::new(coreward_binary_path().unwrap());
    command.arg("controller").arg("--config").arg(config_path);
    command.stdin(Stdio::null()).stdout(log_file.try_clone().unwrap()).stderr(log_file);
    testbed.spawn(testbed.controller(), command).unwrap()
}

fn start_etcd_member(testbed: &Testbed, members: &[LocalEtcdMember], member_index: usize) -> TestbedProcess {
    let command = members[member_index].build_start_command(members, &testbed.directory());
    testbed.spawn(testbed.controller(), command).expect("etcd cannot be started: `scripts/install run` installs it")
}

/// Runs `coreward` with these arguments against one controller. The timeout of 10 s applies if the controller is
/// stopped.
fn run_coreward_at_controller(testbed: &Testbed, controller: u16, arguments: &[&str]) -> anyhow::Result<()> {
    let command = build_operator_command_at_controllers(testbed, [controller], arguments)?;
    let mut command_with_timeout = Command::new("timeout");
    command_with_timeout.arg("10").arg(command.get_program()).args(command.get_args());
    command_with_timeout.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    testbed.run_command(testbed.controller(), command_with_timeout).map(drop)
}

/// Runs `coreward` with these arguments against the leader of these controllers, and returns its output.
fn run_coreward_at_leader(
    testbed: &Testbed,
    controllers: impl IntoIterator<Item = u16>,
    arguments: &[&str],
) -> anyhow::Result<String> {
    let command = build_operator_command_at_controllers(testbed, controllers, arguments)?;
    Ok(String::from_utf8(testbed.run_command(testbed.controller(), command)?.stdout)?)
}

fn fleet_document_text(server_count: u16) -> String {
    let mut document =
        "report_interval = \"100ms\"\n[[service]]\nname = \"web0\"\nvip = \"10.200.0.1:80\"\n".to_owned();
    for number in 1..=server_count {
        document += &format!("[[server]]\nname = \"s{number}\"\naddress = \"10.1.1.{number}\"\n");
    }
    document
}

/// Repeats a query until it returns a value. It returns none while no controller or no etcd member is the leader.
fn retry_until_some<T>(description: &str, query: impl Fn() -> Option<T>) -> T {
    let mut query_result = None;
    assert_eventually(LEADER_TAKEOVER_TIMEOUT, description, || {
        query_result = query();
        query_result.is_some()
    });
    query_result.expect("it is there")
}

/// Applies the first fleet document with a controller that is started only for this purpose.
fn apply_first_document(testbed: &Testbed, etcd_members: &[LocalEtcdMember], document: &str) {
    let mut first_controller = start_controller(testbed, etcd_members, 1);
    let document_path = testbed.directory().join("applied.toml");
    fs::write(&document_path, document).unwrap();
    let apply_document =
        || run_coreward_at_leader(testbed, [1], &["apply", "--yes", &document_path.display().to_string()]);
    assert_eventually(LEADER_TAKEOVER_TIMEOUT, "the first document is in force", || apply_document().is_ok());
    first_controller.terminate(LEADER_TAKEOVER_TIMEOUT).unwrap();
}

impl HighAvailabilityEnv {
    fn start(instance: &str) -> Self {
        let options = TestbedOptions {
            instance_name: instance.to_owned(),
            server_count: 3,
            load_balancer_count: 2,
            core_count: 1,
            ..TestbedOptions::default()
        };
        let testbed = Testbed::create(options).unwrap();
        let stream_servers = testbed.start_stream_servers().unwrap();
        let etcd_members = LocalEtcdMember::local_cluster_members(3, CONTROLLER_ADDRESS.into(), 2379);
        let etcd_processes =
            (0..3).map(|position| Some(start_etcd_member(&testbed, &etcd_members, position))).collect();
        let applied_document = fleet_document_text(3);
        // Apply the first document before load balancers and agents start.
        apply_first_document(&testbed, &etcd_members, &applied_document);
        let options = TestbedFleetOptions {
            core_load_source: CoreLoadSource::PacedServer,
            steers_connections: false,
            shared_store_config: Some(etcd_config_table(&etcd_members)),
            external_controller_addresses: [2, 3].map(controller_address).into(),
            ..TestbedFleetOptions::default()
        };
        let fleet = Fleet::start(&testbed, options).unwrap();
        let other_controller_processes =
            [2, 3].map(|number| Some(start_controller(&testbed, &etcd_members, number))).into();
        Self {
            fleet,
            other_controller_processes,
            etcd_processes,
            etcd_members,
            _stream_servers: stream_servers,
            testbed,
            applied_document,
            change_count: 1,
        }
    }

    /// Changes the fleet document, and sends it repeatedly until a controller acknowledges it. Returns that
    /// controller's number.
    fn apply_document_until_acknowledged(&mut self) -> u16 {
        self.change_count += 1;
        let changed_weight = format!("weight = {}\nname = \"s1\"", self.change_count);
        let changed_document = fleet_document_text(3).replacen("name = \"s1\"", &changed_weight, 1);
        let document_path: PathBuf = self.testbed.directory().join("applied.toml");
        fs::write(&document_path, &changed_document).unwrap();
        let deadline = Instant::now() + LEADER_TAKEOVER_TIMEOUT;
        let mut rejections = Vec::new();
        while Instant::now() < deadline {
            for number in 1..=3 {
                match run_coreward_at_controller(
                    &self.testbed,
                    number,
                    &["apply", "--yes", &document_path.display().to_string()],
                ) {
                    Ok(()) => {
                        self.applied_document = changed_document;
                        return number;
                    }
                    Err(error) => rejections.push(error.to_string()),
                }
            }
            sleep_ms(100);
        }
        panic!("no controller took a change within {LEADER_TAKEOVER_TIMEOUT:?}: {rejections:#?}");
    }

    fn send_signal(&mut self, number: u16, signal: Signal) {
        let process = match number {
            1 => self.fleet.daemon_process("controller").unwrap(),
            _ => self.other_controller_processes[usize::from(number) - 2].as_mut().expect("it runs"),
        };
        process.send_signal(signal).unwrap();
    }

    fn kill_controller(&mut self, number: u16) {
        match number {
            1 => self.fleet.kill_daemon("controller").unwrap(),
            _ => drop(self.other_controller_processes[usize::from(number) - 2].take().expect("it runs")),
        }
    }

    /// Kills the leading etcd member, and restarts it after a controller has acknowledged a change.
    fn apply_change_without_etcd_leader(&mut self) {
        let leader_index = retry_until_some("one of three members leads", || self.query_etcd_leader_index());
        let mut killed_member = self.etcd_processes[leader_index].take().unwrap();
        killed_member.send_signal(Signal::SIGKILL).unwrap();
        killed_member.wait_for_exit(LEADER_TAKEOVER_TIMEOUT).unwrap();
        self.apply_document_until_acknowledged();
        self.etcd_processes[leader_index] = Some(start_etcd_member(&self.testbed, &self.etcd_members, leader_index));
    }

    fn restart_controller(&mut self, number: u16) {
        match number {
            1 => self.fleet.restart_daemon(&self.testbed, "controller").unwrap(),
            _ => {
                self.other_controller_processes[usize::from(number) - 2] =
                    Some(start_controller(&self.testbed, &self.etcd_members, number))
            }
        }
    }

    fn query_server_ids(&self) -> Option<Vec<(String, u64)>> {
        let status = self.query_status()?;
        let servers = status["servers"].as_array()?.iter();
        servers.map(|server| Some((server["name"].as_str()?.to_owned(), server["id"].as_u64()?))).collect()
    }

    fn query_status(&self) -> Option<serde_json::Value> {
        let text = run_coreward_at_leader(&self.testbed, 1..=3, &["status", "--format", "json"]).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// Returns the names of the servers that `coreward status` shows as drained by `coreward drain`.
    fn query_servers_drained_by_command(&self) -> Vec<String> {
        let status = retry_until_some("a controller leads", || self.query_status());
        let servers = status["servers"].as_array().unwrap().iter();
        let drained_servers = servers.filter(|server| server["state_reason"] == "by `coreward drain`");
        drained_servers.map(|server| server["name"].as_str().unwrap().to_owned()).collect()
    }

    fn are_all_daemons_connected(&self) -> bool {
        self.query_status().is_some_and(|status| {
            let is_reporting = |server: &&serde_json::Value| server["report_state"] == "fresh";
            let is_connected = |balancer: &&serde_json::Value| balancer["connected"] == true;
            status["servers"].as_array().unwrap().iter().filter(is_reporting).count() == 3
                && status["load_balancers"].as_array().unwrap().iter().filter(is_connected).count() == 2
        })
    }

    fn query_etcd_leader_index(&self) -> Option<usize> {
        let endpoints: Vec<String> = self.etcd_members.iter().map(LocalEtcdMember::endpoint).collect();
        let mut command = Command::new("etcdctl");
        command.args(["--endpoints", &endpoints.join(","), "endpoint", "status", "--write-out", "json"]);
        command.env("ETCDCTL_API", "3");
        let output = self.testbed.run_command(self.testbed.controller(), command).ok()?;
        let member_states: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
        let is_leader = |state: &serde_json::Value| state["Status"]["leader"] == state["Status"]["header"]["member_id"];
        let leader_state = member_states.as_array()?.iter().find(|state| is_leader(state))?;
        endpoints.iter().position(|endpoint| leader_state["Endpoint"] == endpoint.as_str())
    }
}

#[test]
fn acknowledged_changes_survive_leader_changes() {
    skip_if!(find_missing_testbed_rights());
    let mut env = HighAvailabilityEnv::start("ha");
    let initial_server_ids = retry_until_some("a controller leads", || env.query_server_ids());
    let stream_client = env.testbed.start_stream_client(&StreamWorkload::endless(100.0), None).unwrap();
    let first_leader = env.apply_document_until_acknowledged();
    let drain_output =
        retry_until_some("s3 is drained", || run_coreward_at_leader(&env.testbed, 1..=3, &["drain", "s3"]).ok());
    assert!(drain_output.starts_with("s3 is drain"), "{drain_output}");

    // The leader is killed.
    env.kill_controller(first_leader);
    let second_leader = env.apply_document_until_acknowledged();
    assert_ne!(second_leader, first_leader);
    assert_eq!(env.query_servers_drained_by_command(), ["s3"], "the drain is on record");
    env.restart_controller(first_leader);

    // The leader is stopped for longer than its lease, and continues when another controller leads.
    env.send_signal(second_leader, Signal::SIGSTOP);
    let third_leader = env.apply_document_until_acknowledged();
    assert_ne!(third_leader, second_leader);
    env.send_signal(second_leader, Signal::SIGCONT);
    for _ in 0..20 {
        let former_leader_result = run_coreward_at_leader(&env.testbed, [second_leader], &["fleet", "show"]);
        assert!(former_leader_result.is_err(), "controller {second_leader} no longer leads");
        sleep_ms(20);
    }

    env.apply_change_without_etcd_leader();
    assert_eventually(LEADER_TAKEOVER_TIMEOUT, "agents and load balancers are back", || {
        env.are_all_daemons_connected()
    });
    let shown_document =
        retry_until_some("a controller leads", || run_coreward_at_leader(&env.testbed, 1..=3, &["fleet", "show"]).ok());
    // The first line of the output is the generation, and the document follows.
    assert!(shown_document.trim().ends_with(env.applied_document.trim()), "{shown_document}");
    assert_eq!(retry_until_some("a controller leads", || env.query_server_ids()), initial_server_ids);
    assert_eq!(env.query_servers_drained_by_command(), ["s3"]);
    assert_streams_unbroken(stream_client);
}
