//! Load balancers announce their VIPs by BGP (BIRD), and a router spreads connections over them (ECMP). They are
//! stopped, killed, disconnected and taken out of service, and no connection may break.

use std::fs::{self, File};
use std::process::{Command, Stdio};

use coreward_testbed::addresses::{FIRST_IPV4_VIP, HOST_DEVICE, load_balancer_address};
use coreward_testbed::fleet::{TestbedFleetOptions, coreward_binary_path};
use coreward_testbed::{
    DEFAULT_WAIT_TIMEOUT, NetworkNamespace, TestbedOptions, TestbedProcess, find_missing_testbed_rights, skip_if,
};

use crate::support::{FleetTestEnv, assert_eventually, assert_streams_unbroken, run_command_line};

/// BFD settings for BIRD, with which a neighbour counts as down after 2 s without a packet. A busy machine may stop
/// BIRD for more than 500 ms.
const BFD_CONFIG: &str =
    "protocol bfd { interface \"*\" { min rx interval 100 ms; min tx interval 100 ms; multiplier 20; }; }\n";
const BGP_SESSION_CONFIG: &str =
    "hold time 60; connect retry time 1; connect delay time 1; error wait time 1, 1; bfd on;";
const ROUTER_ADDRESS_TEXT: &str = "10.1.0.3";

fn router_bird_config() -> String {
    format!(
        "router id {ROUTER_ADDRESS_TEXT};\nprotocol device {{ }}\n{BFD_CONFIG}\
         protocol kernel {{ merge paths on; ipv4 {{ import none; export all; }}; }}\n\
         protocol bgp lb {{\n  local {ROUTER_ADDRESS_TEXT} as 65000;\n  neighbor range 10.1.2.0/24 as 65001;\n  \
         dynamic name \"lb\";\n  {BGP_SESSION_CONFIG}\n  ipv4 {{ import all; export none; }};\n}}\n"
    )
}

/// Returns the BIRD configuration that docs/deployment.md gives for a load balancer, with different intervals.
fn load_balancer_bird_config(number: u16) -> String {
    let lb_address = load_balancer_address(number);
    format!(
        "router id {lb_address};\nprotocol device {{ }}\n{BFD_CONFIG}ipv4 table vips;\n\
         protocol kernel coreward {{ kernel table 7400; learn; ipv4 {{ table vips; import all; export none; }}; }}\n\
         protocol bgp router1 {{\n  local {lb_address} as 65001;\n  neighbor {ROUTER_ADDRESS_TEXT} as 65000;\n  \
         {BGP_SESSION_CONFIG}\n  ipv4 {{ table vips; import none; export all; next hop self; }};\n}}\n"
    )
}

fn start_bird_daemon(
    env: &FleetTestEnv,
    namespace: &NetworkNamespace,
    name: &str,
    config_text: &str,
) -> TestbedProcess {
    let bird_file_path = |extension: &str| env.testbed.directory().join(format!("bird-{name}.{extension}"));
    fs::write(bird_file_path("conf"), config_text).unwrap();
    let log_file = File::create(bird_file_path("log")).unwrap();
    let mut command = Command::new("/usr/sbin/bird");
    command.arg("-f").arg("-c").arg(bird_file_path("conf")).arg("-s").arg(bird_file_path("ctl"));
    command.stdin(Stdio::null()).stdout(log_file.try_clone().unwrap()).stderr(log_file);
    let bird_process = env.testbed.spawn(namespace, command);
    bird_process.expect("BIRD cannot be started: `scripts/install run` installs it")
}

/// Returns the numbers of the load balancers that are next hops in the router's route to the VIP.
fn next_hop_load_balancers(env: &FleetTestEnv) -> Vec<u16> {
    let route_output =
        run_command_line(&env.testbed, env.testbed.ecmp_host(), &format!("ip route show {FIRST_IPV4_VIP}/32"));
    let is_next_hop = |number: &u16| {
        let next_hop_text = format!("via {} ", load_balancer_address(*number));
        route_output.contains(&next_hop_text)
    };
    (1..=2).filter(is_next_hop).collect()
}

fn start_env() -> FleetTestEnv {
    let options = TestbedOptions {
        instance_name: "announce".to_owned(),
        server_count: 3,
        load_balancer_count: 2,
        router_mtu: Some(1500),
        ..TestbedOptions::default()
    };
    // The drain time is a multiple of what BIRD and the router need to withdraw a route. After it the test checks their
    // routes.
    let announce_config = "[announce]\ndrain = \"10s\"\n".to_owned();
    FleetTestEnv::start(
        options,
        TestbedFleetOptions {
            policy_name: "rr".to_owned(),
            extra_load_balancer_text: announce_config,
            ..TestbedFleetOptions::default()
        },
    )
}

/// Starts the routing daemon BIRD on the router and on both load balancers.
fn start_bird_daemons(env: &FleetTestEnv) -> Vec<TestbedProcess> {
    let mut bird_processes = vec![start_bird_daemon(env, env.testbed.ecmp_host(), "router", &router_bird_config())];
    for number in [1, 2] {
        let lb_namespace = env.testbed.load_balancer(number).unwrap();
        bird_processes.push(start_bird_daemon(
            env,
            lb_namespace,
            &format!("lb{number}"),
            &load_balancer_bird_config(number),
        ));
    }
    bird_processes
}

#[test]
fn announced_load_balancers_join_and_leave_without_breaking_connections() {
    skip_if!(find_missing_testbed_rights());
    let mut env = start_env();
    let _bird_processes = start_bird_daemons(&env);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "both announce the VIP", || next_hop_load_balancers(&env) == [1, 2]);
    // Delete the testbed's own route for all VIPs.
    run_command_line(&env.testbed, env.testbed.ecmp_host(), "ip route delete 10.200.0.0/24");
    let stream_client = env.start_streams(100.0);
    env.wait_for_connections(100);

    // After a regular stop, packets no longer arrive when the process ends.
    env.fleet.daemon_process("lb2").unwrap().terminate(*DEFAULT_WAIT_TIMEOUT).unwrap();
    assert_eq!(next_hop_load_balancers(&env), [1]);
    env.fleet.restart_daemon(&env.testbed, "lb2").unwrap();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "it announces the VIP again", || next_hop_load_balancers(&env) == [1, 2]);

    // The daemon is killed, but its data plane and announcements continue.
    env.fleet.kill_daemon("lb1").unwrap();
    env.wait_for_connections(150);
    assert_eq!(next_hop_load_balancers(&env), [1, 2]);
    env.fleet.restart_daemon(&env.testbed, "lb1").unwrap();
    env.fleet.wait_until_ready(&env.testbed).unwrap();

    // The link fails.
    let second_lb = env.testbed.load_balancer(2).unwrap();
    run_command_line(&env.testbed, second_lb, &format!("ip link set {HOST_DEVICE} down"));
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the router has noticed", || next_hop_load_balancers(&env) == [1]);
    run_command_line(&env.testbed, second_lb, &format!("ip link set {HOST_DEVICE} up"));
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "it announces the VIP again", || next_hop_load_balancers(&env) == [1, 2]);

    // Taking the load balancer out of service withdraws the VIP first, then detaches the program.
    env.fleet.kill_daemon("lb1").unwrap();
    let mut detach_command = Command::new(coreward_binary_path().unwrap());
    detach_command.args(["lb", "--detach", "--config"]).arg(env.testbed.directory().join("lb1.toml"));
    env.testbed.run_command(env.testbed.load_balancer(1).unwrap(), detach_command).unwrap();
    assert_eq!(next_hop_load_balancers(&env), [2]);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "it forwards connections", || {
        env.query_load_balancer_counter("lb2", "established") > 0
    });
    assert_streams_unbroken(stream_client);
}
