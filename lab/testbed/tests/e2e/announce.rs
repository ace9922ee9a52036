//! Load balancers announce their VIPs by BGP (BIRD), and a router spreads connections over them (ECMP). They are
//! stopped, killed, disconnected and taken out of service, and no connection breaks.

use std::fs::{self, File};
use std::process::{Command, Stdio};

use coreward_testbed::addresses::{DEVICE, VIP, load_balancer_address};
use coreward_testbed::fleet::{FleetOptions, coreward_command};
use coreward_testbed::{Namespace, Process, TIMEOUT, TestbedOptions, missing_testbed_rights, skip_if};

use crate::support::{TestEnv, assert_unbroken, eventually, run};

/// BFD declares a neighbour down after 2 s without a packet: a busy machine may stop BIRD for longer than 500 ms.
const BFD_CONFIG: &str =
    "protocol bfd { interface \"*\" { min rx interval 100 ms; min tx interval 100 ms; multiplier 20; }; }\n";
const BGP_SESSION_CONFIG: &str =
    "hold time 60; connect retry time 1; connect delay time 1; error wait time 1, 1; bfd on;";
const ROUTER: &str = "10.1.0.3";

fn router_file() -> String {
    format!(
        "router id {ROUTER};\nprotocol device {{ }}\n{BFD_CONFIG}\
         protocol kernel {{ merge paths on; ipv4 {{ import none; export all; }}; }}\n\
         protocol bgp lb {{\n  local {ROUTER} as 65000;\n  neighbor range 10.1.2.0/24 as 65001;\n  dynamic name \
         \"lb\";\n  \
         {BGP_SESSION_CONFIG}\n  ipv4 {{ import all; export none; }};\n}}\n"
    )
}

/// Returns the BIRD configuration of a load balancer in docs/deployment.md, with other times.
fn load_balancer_file(number: u16) -> String {
    let address = load_balancer_address(number);
    format!(
        "router id {address};\nprotocol device {{ }}\n{BFD_CONFIG}ipv4 table vips;\n\
         protocol kernel coreward {{ kernel table 7400; learn; ipv4 {{ table vips; import all; export none; }}; }}\n\
         protocol bgp router1 {{\n  local {address} as 65001;\n  neighbor {ROUTER} as 65000;\n  \
         {BGP_SESSION_CONFIG}\n  ipv4 {{ table vips; import none; export all; next hop self; }};\n}}\n"
    )
}

fn start_bird(env: &TestEnv, namespace: &Namespace, name: &str, text: &str) -> Process {
    let file = |extension: &str| env.testbed.directory().join(format!("bird-{name}.{extension}"));
    fs::write(file("conf"), text).unwrap();
    let log = File::create(file("log")).unwrap();
    let mut command = Command::new("/usr/sbin/bird");
    command.arg("-f").arg("-c").arg(file("conf")).arg("-s").arg(file("ctl"));
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    let bird = env.testbed.spawn(namespace, command);
    bird.expect("BIRD cannot be started: `scripts/install run` installs it")
}

/// Returns the numbers of the load balancers to which the router sends connections for the VIP.
fn next_hops(env: &TestEnv) -> Vec<u16> {
    let route = run(&env.testbed, env.testbed.ecmp_host(), &format!("ip route show {VIP}/32"));
    let is_hop = |number: &u16| {
        let hop = format!("via {} ", load_balancer_address(*number));
        route.contains(&hop)
    };
    (1..=2).filter(is_hop).collect()
}

#[test]
fn announced_load_balancers_join_and_leave_without_broken_connections() {
    skip_if!(missing_testbed_rights());
    let options = TestbedOptions {
        instance: "announce".to_owned(),
        servers: 3,
        load_balancers: 2,
        router_mtu: Some(1500),
        ..TestbedOptions::default()
    };
    // A multiple of the time that BIRD and the router need to withdraw a route. After it the test checks their routes.
    let more = "[announce]\ndrain = \"10s\"\n".to_owned();
    let mut env = TestEnv::start(
        options,
        FleetOptions { policy: "rr".to_owned(), load_balancer_text: more, ..FleetOptions::default() },
    );
    let mut birds = vec![start_bird(&env, env.testbed.ecmp_host(), "router", &router_file())];
    for number in [1, 2] {
        let namespace = env.testbed.load_balancer(number).unwrap();
        birds.push(start_bird(&env, namespace, &format!("lb{number}"), &load_balancer_file(number)));
    }
    eventually(*TIMEOUT, "both announce the VIP", || next_hops(&env) == [1, 2]);
    // This is the testbed's own route for all VIPs.
    run(&env.testbed, env.testbed.ecmp_host(), "ip route delete 10.200.0.0/24");
    let client = env.start_streams(100.0);
    env.wait_for_connections(100);

    // On a regular stop, packets no longer arrive when the process ends.
    env.fleet.daemon("lb2").unwrap().terminate(*TIMEOUT).unwrap();
    assert_eq!(next_hops(&env), [1]);
    env.fleet.restart(&env.testbed, "lb2").unwrap();
    eventually(*TIMEOUT, "it announces the VIP again", || next_hops(&env) == [1, 2]);

    // The daemon is killed: data plane and announcements continue.
    env.fleet.kill("lb1").unwrap();
    env.wait_for_connections(150);
    assert_eq!(next_hops(&env), [1, 2]);
    env.fleet.restart(&env.testbed, "lb1").unwrap();
    env.fleet.wait_until_ready(&env.testbed).unwrap();

    // The link fails.
    let second = env.testbed.load_balancer(2).unwrap();
    run(&env.testbed, second, &format!("ip link set {DEVICE} down"));
    eventually(*TIMEOUT, "the router has noticed", || next_hops(&env) == [1]);
    run(&env.testbed, second, &format!("ip link set {DEVICE} up"));
    eventually(*TIMEOUT, "it announces the VIP again", || next_hops(&env) == [1, 2]);

    // Taking the load balancer out of service withdraws the VIP first, then detaches the program.
    env.fleet.kill("lb1").unwrap();
    let mut detach = Command::new(coreward_command().unwrap());
    detach.args(["lb", "--detach", "--config"]).arg(env.testbed.directory().join("lb1.toml"));
    env.testbed.run(env.testbed.load_balancer(1).unwrap(), detach).unwrap();
    assert_eq!(next_hops(&env), [2]);
    eventually(*TIMEOUT, "it forwards connections", || env.counter("lb2", "established") > 0);
    assert_unbroken(client);
}
