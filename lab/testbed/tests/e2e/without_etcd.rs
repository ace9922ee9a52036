//! Two controllers lose their etcd. Then none leads, tables are static, and load balancers mask servers by their own
//! checks. Later the controllers are killed, too. No connection may break.

use std::process::Command;
use std::time::{Duration, SystemTime};

use coreward_etcd::local::LocalEtcdMember;
use coreward_testbed::addresses::CONTROLLER_ADDRESS;
use coreward_testbed::fleet::{Fleet, TestbedFleetOptions, build_operator_command_at_controllers};
use coreward_testbed::nginx::NginxServer;
use coreward_testbed::process::TestbedProcess;
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, Testbed, TestbedOptions, find_missing_testbed_rights, skip_if};
use serde_json::Value;

use crate::support::{
    MIN_CONNECTIONS_FOR_EVERY_SERVER, assert_eventually, assert_server_masked_within, count_broken_connections,
    open_keepalive_connections, try_open_connections,
};

/// Maximum time in which the health check in [`FLEET_DOCUMENT`] detects a fault. It is interval x fall + timeout, plus
/// the daemon's tick. The check's timeout is long to allow for a busy machine.
const MAX_FAULT_DETECTION_TIME: Duration = Duration::from_millis(3 * 200 + 5000 + 100);
const SERVER_COUNT: u16 = 3;
const FLEET_DOCUMENT: &str = "report_interval = \"100ms\"\n[[service]]\nname = \"web0\"\nvip = \
                              \"10.200.0.1:80\"\npolicy = \
                        \"rr\"\n\
                        [service.health]\ncheck = \"tcp\"\ninterval = \"200ms\"\ntimeout = \"5s\"\nrise = 2\nfall = \
                        3\n";

/// Fleet with two controllers and one etcd member. Fields are dropped in the order of their declaration, the testbed
/// last.
struct WithoutEtcdEnv {
    fleet: Fleet,
    etcd_process: Option<TestbedProcess>,
    etcd_member: LocalEtcdMember,
    nginx_servers: Vec<Option<NginxServer>>,
    testbed: Testbed,
}

fn start_etcd(testbed: &Testbed, member: &LocalEtcdMember) -> TestbedProcess {
    let command = member.build_start_command(std::slice::from_ref(member), &testbed.directory());
    testbed.spawn(testbed.controller(), command).expect("etcd cannot be started: `scripts/install run` installs it")
}

impl WithoutEtcdEnv {
    fn start() -> Self {
        let options = TestbedOptions {
            instance_name: "noetcd".to_owned(),
            server_count: SERVER_COUNT,
            load_balancer_count: 2,
            core_count: 1,
            ..TestbedOptions::default()
        };
        let testbed = Testbed::create(options).unwrap();
        let nginx_servers =
            testbed.server_numbers().into_iter().map(|n| Some(testbed.start_nginx(n).unwrap())).collect();
        let etcd_member = LocalEtcdMember::local_cluster_members(1, CONTROLLER_ADDRESS.into(), 2379).remove(0);
        let etcd_process = Some(start_etcd(&testbed, &etcd_member));
        let mut fleet_document = FLEET_DOCUMENT.to_owned();
        for number in 1..=SERVER_COUNT {
            fleet_document += &format!("[[server]]\nname = \"s{number}\"\naddress = \"10.1.1.{number}\"\n");
        }
        let options = TestbedFleetOptions {
            steers_connections: false,
            controller_count: 2,
            etcd_endpoints: vec![etcd_member.endpoint()],
            leader_lease_s: 5,
            applied_document: Some(fleet_document),
            ..TestbedFleetOptions::default()
        };
        let fleet = Fleet::start(&testbed, options).unwrap();
        let env = Self { fleet, etcd_process, etcd_member, nginx_servers, testbed };
        env.wait_until_only_servers_answer(&[1, 2, 3]);
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, "every load balancer has checked every server", || {
            let service_members = env.query_status()["services"][0]["members"].as_array().unwrap().clone();
            let is_up = |member: &Value| {
                let member_checks = member["health_checks"].as_array().unwrap().clone();
                member_checks.len() == 2 && member_checks.iter().all(|check| check["is_up"] == true)
            };
            service_members.len() == usize::from(SERVER_COUNT) && service_members.iter().all(is_up)
        });
        env
    }

    fn kill_etcd(&mut self) {
        self.etcd_process.take().expect("it runs").child().kill().unwrap();
    }

    fn restart_etcd(&mut self) {
        self.etcd_process = Some(start_etcd(&self.testbed, &self.etcd_member));
    }

    fn run_coreward(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let command = build_operator_command_at_controllers(&self.testbed, 1..=2, arguments)?;
        Ok(String::from_utf8(self.testbed.run_command(self.testbed.controller(), command)?.stdout)?)
    }

    fn query_status(&self) -> Value {
        let mut status_text = String::new();
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, "a leader answers", || {
            status_text = self.run_coreward(&["status", "--format", "json"]).unwrap_or_default();
            !status_text.is_empty()
        });
        serde_json::from_str(&status_text).unwrap()
    }

    /// Returns the number of controllers whose HTTP API reports that they are the leader.
    fn count_leaders(&self) -> usize {
        let query_health = |number: u16| {
            let mut curl = Command::new("curl");
            let api_address = coreward_testbed::fleet::controller_api_address(number);
            let viewer_token = std::fs::read_to_string(self.testbed.directory().join("viewer.token")).unwrap();
            curl.args(["-s", "-m", "2", "-H", &format!("Authorization: Bearer {}", viewer_token.trim())]);
            curl.arg(format!("http://{api_address}/v1/health"));
            let output = self.testbed.run_command(self.testbed.controller(), curl).unwrap();
            serde_json::from_slice::<Value>(&output.stdout).unwrap()
        };
        (1..=2).map(query_health).filter(|health| health["state"] != "following").count()
    }

    /// Stops a server, and asserts that every load balancer masks it within the health checks' detection time.
    fn stop_server_and_assert_masked(&mut self, number: u16) {
        let stop_time = SystemTime::now();
        self.nginx_servers[usize::from(number) - 1] = None;
        assert_server_masked_within(MAX_FAULT_DETECTION_TIME, &self.testbed, &format!("s{number}"), stop_time);
    }

    /// Waits until new connections go to exactly these servers, and none fails.
    fn wait_until_only_servers_answer(&self, servers: &[u16]) {
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, &format!("new connections go to {servers:?}, and none fails"), || {
            let Ok(connections) = try_open_connections(&self.testbed, MIN_CONNECTIONS_FOR_EVERY_SERVER) else {
                return false;
            };
            let answering_servers: std::collections::BTreeSet<u16> =
                connections.iter().map(|(_, answerer)| answerer.server_number).collect();
            answering_servers.into_iter().eq(servers.iter().copied())
        });
    }
}

#[test]
fn connections_continue_without_etcd_and_controllers() {
    skip_if!(find_missing_testbed_rights());
    let mut env = WithoutEtcdEnv::start();
    let mut connections = open_keepalive_connections(&env.testbed, MIN_CONNECTIONS_FOR_EVERY_SERVER);
    assert_eq!(env.count_leaders(), 1);

    env.kill_etcd();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "no controller leads", || env.count_leaders() == 0);
    assert!(env.run_coreward(&["drain", "s1"]).is_err());
    env.stop_server_and_assert_masked(2);
    env.wait_until_only_servers_answer(&[1, 3]);
    connections.retain(|(_, answerer)| answerer.server_number != 2);
    assert_eq!(count_broken_connections(&mut connections), 0, "without a leader");
    env.nginx_servers[1] = Some(env.testbed.start_nginx(2).unwrap());
    env.wait_until_only_servers_answer(&[1, 2, 3]);

    env.restart_etcd();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "one controller leads", || env.count_leaders() == 1);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "changes are made again", || env.run_coreward(&["drain", "s1"]).is_ok());
    env.wait_until_only_servers_answer(&[2, 3]);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "and undone", || env.run_coreward(&["undrain", "s1"]).is_ok());
    env.wait_until_only_servers_answer(&[1, 2, 3]);
    assert_eq!(count_broken_connections(&mut connections), 0, "with etcd back");

    let mut connections = open_keepalive_connections(&env.testbed, MIN_CONNECTIONS_FOR_EVERY_SERVER);
    env.kill_etcd();
    for controller in ["controller", "controller2"] {
        env.fleet.kill_daemon(controller).unwrap();
    }
    env.stop_server_and_assert_masked(3);
    env.wait_until_only_servers_answer(&[1, 2]);
    connections.retain(|(_, answerer)| answerer.server_number != 3);
    assert_eq!(count_broken_connections(&mut connections), 0, "without controllers and etcd");
}
