//! Migration of a live pool from another load balancer to coreward and back, with stock nginx. The steps are those of
//! docs/deployment.md. Connections must survive all of them.

use std::net::SocketAddrV4;
use std::process::{Command, Stdio};
use std::time::Duration;

use coreward_testbed::addresses::{AddressFamily, SERVICE_ADDRESS, server_address};
use coreward_testbed::baseline_lb::{self, BaselineLbKind};
use coreward_testbed::fleet::{Fleet, TestbedFleetOptions};
use coreward_testbed::http::{HttpConnection, WorkerIdentity};
use coreward_testbed::nginx::NginxServer;
use coreward_testbed::{Testbed, TestbedOptions, TestbedProcess, find_missing_testbed_rights, skip_if};

use crate::support::{assert_eventually, count_broken_connections, sleep_ms, wait_until_configuration_in_force};

const SERVER_COUNT: u16 = 3;
const RELOAD_TIMEOUT: Duration = Duration::from_secs(10);

struct AdoptionTestEnv {
    _nginx_servers: Vec<NginxServer>,
    testbed: Testbed,
}

impl AdoptionTestEnv {
    /// Starts servers with nginx behind a load balancer that is not coreward. No agents run.
    fn start_behind_baseline_lb(
        kind: BaselineLbKind,
        instance: &str,
        family: AddressFamily,
    ) -> (baseline_lb::BaselineLoadBalancer, Self) {
        let instance = instance.to_owned();
        let options = TestbedOptions {
            instance_name: instance,
            family,
            server_count: SERVER_COUNT,
            core_count: 1,
            ..TestbedOptions::default()
        };
        let testbed = Testbed::create(options).unwrap();
        let nginx_servers =
            testbed.server_numbers().into_iter().map(|number| testbed.start_nginx(number).unwrap()).collect();
        let baseline_balancer = testbed.start_baseline_load_balancer(kind).unwrap();
        testbed.route_vips_to_baseline_lb().unwrap();
        (baseline_balancer, Self { _nginx_servers: nginx_servers, testbed })
    }

    /// Opens connections to the service and sends one request on each. Every fourth connection has no TCP timestamps.
    fn open_connections(&self, connection_count: usize) -> OpenHttpConnections {
        let connections_and_workers = self.testbed.client().run_within(|| {
            (0..connection_count)
                .map(|index| {
                    let timestamps_setting = if index % 4 == 0 { "0" } else { "1" };
                    std::fs::write("/proc/sys/net/ipv4/tcp_timestamps", timestamps_setting)?;
                    let mut connection = HttpConnection::open_to(self.testbed.service_address(), None)?;
                    let first_worker = connection.query_worker()?;
                    Ok((connection, first_worker))
                })
                .collect()
        });
        OpenHttpConnections(connections_and_workers.unwrap())
    }

    /// Starts wrk with keep-alive connections, which ends after `seconds` seconds.
    fn start_wrk(&self, seconds: u32) -> TestbedProcess {
        let mut wrk = Command::new("wrk");
        let page_url = format!("http://{}/who", self.testbed.service_address());
        wrk.args(["-t1", "-c8", &format!("-d{seconds}"), "--timeout", "5s", &page_url]);
        wrk.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        self.testbed.spawn(self.testbed.client(), wrk).unwrap()
    }

    fn start_fleet(&self, fleet_text: &str) -> Fleet {
        let options = TestbedFleetOptions {
            policy_name: "rr".to_owned(),
            extra_fleet_text: fleet_text.to_owned(),
            ..TestbedFleetOptions::default()
        };
        Fleet::start(&self.testbed, options).unwrap()
    }

    fn query_load_balancer_counter(&self, fleet: &Fleet, name: &str) -> u64 {
        let status = fleet.query_status(&self.testbed).unwrap();
        status["load_balancers"][0]["state"]["counters"][name].as_u64().unwrap_or(0)
    }

    /// Returns the values of net.ipv4.tcp_timestamps on all servers.
    fn read_tcp_timestamps_settings(&self) -> Vec<String> {
        let read_setting = |number| {
            let server = self.testbed.server(number).unwrap();
            server
                .run_within(|| Ok(std::fs::read_to_string("/proc/sys/net/ipv4/tcp_timestamps")?))
                .unwrap()
                .trim()
                .to_owned()
        };
        self.testbed.server_numbers().into_iter().map(read_setting).collect()
    }

    /// Replaces the additional lines in the fleet document, and waits until all components apply the new document.
    fn set_extra_fleet_text_and_wait(&self, fleet: &mut Fleet, fleet_text: &str) {
        let generation_before =
            fleet.query_status(&self.testbed).unwrap()["configuration_generation"].as_u64().unwrap();
        fleet.set_extra_fleet_text(&self.testbed, fleet_text).unwrap();
        assert_eventually(RELOAD_TIMEOUT, "the controller reads the fleet's file", || {
            fleet.query_status(&self.testbed).unwrap()["configuration_generation"].as_u64().unwrap() > generation_before
        });
        wait_until_configuration_in_force(fleet, &self.testbed);
    }

    /// Runs `coreward` on a host to detach `daemon`, with the daemon's configuration file and `--detach`.
    fn detach_daemon(&self, host: &coreward_testbed::NetworkNamespace, daemon: &str, config_name: &str) {
        let mut command = Command::new(coreward_testbed::fleet::coreward_binary_path().unwrap());
        command
            .arg(daemon)
            .arg("--config")
            .arg(self.testbed.directory().join(format!("{config_name}.toml")))
            .arg("--detach");
        self.testbed.run_command(host, command).unwrap();
    }
}

/// Open connections, each with the worker that answered its first request.
struct OpenHttpConnections(Vec<(HttpConnection, WorkerIdentity)>);

impl OpenHttpConnections {
    fn count_broken_connections(&mut self) -> usize {
        count_broken_connections(&mut self.0)
    }

    fn server_numbers(&self) -> std::collections::BTreeSet<u16> {
        self.0.iter().map(|(_, worker)| worker.server_number).collect()
    }
}

fn assert_no_connection_broken<const N: usize>(connections: [&mut OpenHttpConnections; N], moment: &str) {
    assert_eq!(connections.map(OpenHttpConnections::count_broken_connections), [0; N], "{moment}");
}

/// Waits for the end of wrk and asserts that it got responses. Returns those lines of its output that report errors.
fn wait_for_wrk_error_lines(mut wrk: TestbedProcess) -> Vec<String> {
    use std::io::Read as _;
    assert!(wrk.wait_for_exit(Duration::from_secs(40)).unwrap().success());
    let mut wrk_output = String::new();
    wrk.child().stdout.take().unwrap().read_to_string(&mut wrk_output).unwrap();
    let request_count =
        wrk_output.lines().find_map(|line| line.trim().split_once(" requests in")?.0.parse::<u64>().ok());
    assert!(request_count.is_some_and(|requests| requests > 1_000), "{wrk_output}");
    wrk_output.lines().filter(|line| line.contains("errors") || line.contains("Non-2xx")).map(str::to_owned).collect()
}

fn format_migrate_from_line(family: AddressFamily) -> String {
    format!("migrate_from = \"{}\"\n", family.host_address(baseline_lb::BASELINE_LB_ADDRESS))
}

fn format_migrate_to_line(family: AddressFamily) -> String {
    format!("migrate_to = \"{}\"\n", family.host_address(baseline_lb::BASELINE_LB_ADDRESS))
}

#[test]
fn live_pool_migrates_from_ipvs_and_back() {
    skip_if!(find_missing_testbed_rights());
    assert_migration_from_director_and_back("adoptdr", AddressFamily::Ipv4);
}

#[test]
fn live_ipv6_pool_migrates_from_ipvs_and_back() {
    skip_if!(find_missing_testbed_rights());
    assert_migration_from_director_and_back("adoptdr6", AddressFamily::Ipv6);
}

fn assert_migration_from_director_and_back(instance: &str, family: AddressFamily) {
    let (director, env) =
        AdoptionTestEnv::start_behind_baseline_lb(BaselineLbKind::DirectServerReturn, instance, family);
    let wrk_process = env.start_wrk(9);
    let mut connections_before_agents = env.open_connections(40);
    assert_eq!(env.read_tcp_timestamps_settings(), ["1"; SERVER_COUNT as usize]);

    // Agents start first, then the load balancer, which gets no packets yet.
    let mut fleet = env.start_fleet(&format_migrate_from_line(family));
    assert_no_connection_broken([&mut connections_before_agents], "when the agents came");
    let mut connections_before_move = env.open_connections(40);

    env.testbed.route_vips_to_load_balancers(&[1]).unwrap();
    assert_no_connection_broken([&mut connections_before_agents, &mut connections_before_move], "when the VIP moved");
    let mut coreward_connections = env.open_connections(40);
    assert_eq!(coreward_connections.server_numbers().len(), usize::from(SERVER_COUNT));
    assert_eventually(RELOAD_TIMEOUT, "connections of before pass the director", || {
        env.query_load_balancer_counter(&fleet, "to_other_balancer") > 0
            && env.query_load_balancer_counter(&fleet, "established") > 0
    });
    sleep_ms(500);
    assert_no_connection_broken(
        [&mut connections_before_agents, &mut connections_before_move, &mut coreward_connections],
        "after earlier connections had passed the director",
    );
    assert_eq!(wait_for_wrk_error_lines(wrk_process), Vec::<String>::new());

    // Connections from before the agents end here. Connections that came through the director since then have cookies
    // and no longer need the director.
    drop(connections_before_agents);
    connections_before_move.0.retain(|(connection, _)| connection.has_timestamps().unwrap());
    env.set_extra_fleet_text_and_wait(&mut fleet, "");
    drop(director);
    assert_no_connection_broken(
        [&mut connections_before_move, &mut coreward_connections],
        "when the director was gone",
    );
    assert_migration_to_new_director(&env, fleet, family, [connections_before_move, coreward_connections]);
}

/// Asserts that no connection breaks while the service moves back to a new IPVS director, which has no connection
/// state.
fn assert_migration_to_new_director(
    env: &AdoptionTestEnv,
    mut fleet: Fleet,
    family: AddressFamily,
    mut connections_before: [OpenHttpConnections; 2],
) {
    let wrk_process = env.start_wrk(9);
    let _new_director = env.testbed.start_baseline_load_balancer(BaselineLbKind::DirectServerReturn).unwrap();
    env.set_extra_fleet_text_and_wait(&mut fleet, &format_migrate_to_line(family));
    assert_eq!(env.read_tcp_timestamps_settings(), ["1"; SERVER_COUNT as usize], "new connections are not stamped");
    let mut connections_during_handover = env.open_connections(40);
    sleep_ms(500);
    assert_no_connection_broken(connections_before.each_mut(), "while it was handed over");
    assert_no_connection_broken([&mut connections_during_handover], "while it was handed over");
    assert_eq!(wait_for_wrk_error_lines(wrk_process), Vec::<String>::new());
    // All of the service's old connections end here.
    drop(connections_before);
    env.testbed.route_vips_to_baseline_lb().unwrap();
    assert_no_connection_broken([&mut connections_during_handover], "when the VIP moved back");
    let mut connections_after_handover = env.open_connections(40);
    drop(fleet);
    env.detach_daemon(env.testbed.load_balancer(1).unwrap(), "lb", "lb1");
    for number in env.testbed.server_numbers() {
        env.detach_daemon(env.testbed.server(number).unwrap(), "agent", &format!("agent-s{number}"));
    }
    assert_no_connection_broken(
        [&mut connections_during_handover, &mut connections_after_handover],
        "when nothing of coreward was left",
    );
    assert_eq!(env.read_tcp_timestamps_settings(), ["1"; SERVER_COUNT as usize]);
}

#[test]
fn vip_migrates_from_haproxy_and_back() {
    skip_if!(find_missing_testbed_rights());
    let (_haproxy, env) =
        AdoptionTestEnv::start_behind_baseline_lb(BaselineLbKind::TcpProxy, "adoptproxy", AddressFamily::Ipv4);
    let mut haproxy_connections = env.open_connections(40);
    // As with plain DNS, these clients connect to servers' own addresses.
    let server_own_address = SocketAddrV4::new(server_address(1), SERVICE_ADDRESS.port());
    let mut direct_connections = OpenHttpConnections(
        env.testbed
            .client()
            .run_within(|| {
                let mut connection = HttpConnection::open_to(server_own_address.into(), None)?;
                let first_worker = connection.query_worker()?;
                Ok(vec![(connection, first_worker)])
            })
            .unwrap(),
    );
    let mut fleet = env.start_fleet(&format_migrate_from_line(AddressFamily::Ipv4));
    env.testbed.route_vips_to_load_balancers(&[1]).unwrap();
    assert_no_connection_broken([&mut haproxy_connections, &mut direct_connections], "when the VIP moved");
    let mut coreward_connections = env.open_connections(40);
    assert_eq!(coreward_connections.server_numbers().len(), usize::from(SERVER_COUNT));
    env.set_extra_fleet_text_and_wait(&mut fleet, &format_migrate_to_line(AddressFamily::Ipv4));
    let mut connections_after_handback = env.open_connections(40);
    sleep_ms(500);
    assert_no_connection_broken(
        [&mut haproxy_connections, &mut coreward_connections, &mut connections_after_handback],
        "while it was handed over",
    );
    drop(coreward_connections);
    env.testbed.route_vips_to_baseline_lb().unwrap();
    assert_no_connection_broken(
        [&mut haproxy_connections, &mut connections_after_handback, &mut direct_connections],
        "when the VIP moved back",
    );
}
