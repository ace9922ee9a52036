//! Test of `timestamps = "lb"` with plain Linux servers without an agent, whose answers pass through the load balancer.
//! No connection may break while servers, keys and the load balancer change. The load balancer reports a server whose
//! answers it cannot stamp, with the reason, and that server's connections continue, too.

use std::process::Command;

use coreward_model::consistency::CookieStamper;
use coreward_testbed::addresses::{AddressFamily, HOST_DEVICE};
use coreward_testbed::fleet::{ServerAdminState, TestbedFleetOptions};
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, TestbedOptions, find_missing_testbed_rights, skip_if};
use serde_json::Value;

use crate::support::{FleetTestEnv, assert_eventually, assert_streams_unbroken};

/// Starts one server for each value in `tcp_timestamps`, and sets its net.ipv4.tcp_timestamps to the value. This sysctl
/// also applies to IPv6.
fn start_env(instance: &str, family: AddressFamily, tcp_timestamps: &[&str]) -> FleetTestEnv {
    let options = TestbedOptions {
        instance_name: instance.to_owned(),
        family,
        server_count: tcp_timestamps.len() as u16,
        router_mtu: Some(1500),
        routes_answers_via_load_balancer: true,
        ..TestbedOptions::default()
    };
    let fleet_options = TestbedFleetOptions {
        policy_name: "rr".to_owned(),
        timestamps: CookieStamper::LoadBalancer,
        runs_agents: false,
        ..TestbedFleetOptions::default()
    };
    let env = FleetTestEnv::start(options, fleet_options);
    for (number, value) in (1..).zip(tcp_timestamps) {
        env.testbed.server(number).unwrap().set_sysctls(&[("ipv4/tcp_timestamps", value)]).unwrap();
    }
    env
}

fn query_lb_state(env: &FleetTestEnv) -> Value {
    env.fleet.query_status(&env.testbed).unwrap()["load_balancers"][0]["state"].clone()
}

/// Returns the state of a server's timestamp clock that the load balancer has determined, and the fault of this clock.
fn query_server_clock_state_and_fault(env: &FleetTestEnv, server: &str) -> (String, String) {
    let lb_state = query_lb_state(env);
    let server_clocks = lb_state["server_clocks"].as_array().cloned().unwrap_or_default();
    let server_clock = server_clocks.iter().find(|clock| clock["server"] == server);
    let read_text = |key: &str| server_clock.and_then(|clock| clock[key].as_str()).unwrap_or_default().to_owned();
    (read_text("clock_state"), read_text("problem"))
}

fn set_kernel_ip_forwarding(env: &FleetTestEnv, value: &str) {
    let lb_host = env.testbed.load_balancer(1).unwrap();
    let forwarding_sysctl = match env.testbed.options().family {
        AddressFamily::Ipv4 => format!("ipv4/conf/{HOST_DEVICE}/forwarding"),
        AddressFamily::Ipv6 => "ipv6/conf/all/forwarding".to_owned(),
    };
    lb_host.set_sysctls(&[(&forwarding_sysctl, value)]).unwrap();
}

/// Value of net.ipv4.tcp_timestamps with which the kernel uses one clock for all connections. By default, each
/// connection has its own clock.
const SYSCTL_TIMESTAMPS_WITHOUT_OFFSETS: &str = "2";
const SYSCTL_TIMESTAMPS_WITH_OFFSETS: &str = "1";

/// Opens connections to every server until the load balancer has determined this state for all servers' clocks.
fn open_connections_until_clocks_known(env: &FleetTestEnv, state: &str) {
    let client = env.testbed.client();
    // Use ports below those of later streams.
    client.set_sysctls(&[("ipv4/ip_local_port_range", "2000 9000")]).unwrap();
    let vip = env.testbed.service_address().ip();
    // Several answers on one connection, 200 ms apart, show the rate of its clock.
    let one_connection_script =
        format!("exec 3<>/dev/tcp/{vip}/80; for n in {{1..5}}; do printf x >&3; sleep 0.2; done");
    let connections_script = format!("for n in {{1..40}}; do ({one_connection_script}) & done; wait");
    let servers = env.testbed.server_numbers();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "all clocks are known", || {
        let mut bash_command = Command::new("bash");
        bash_command.args(["-c", &connections_script]);
        env.testbed.run_command(client, bash_command).unwrap();
        servers.iter().all(|number| query_server_clock_state_and_fault(env, &format!("s{number}")).0 == state)
    });
}

#[test]
fn servers_without_an_agent_join_and_leave_without_breaking_connections() {
    skip_if!(find_missing_testbed_rights());
    assert_connections_survive_fleet_changes("lbts", AddressFamily::Ipv4, SYSCTL_TIMESTAMPS_WITHOUT_OFFSETS, "known");
}

#[test]
fn servers_without_an_agent_join_and_leave_without_breaking_ipv6_connections() {
    skip_if!(find_missing_testbed_rights());
    assert_connections_survive_fleet_changes("lbts6", AddressFamily::Ipv6, SYSCTL_TIMESTAMPS_WITHOUT_OFFSETS, "known");
}

#[test]
fn plain_linux_servers_join_and_leave_without_breaking_connections() {
    skip_if!(find_missing_testbed_rights());
    assert_connections_survive_fleet_changes(
        "lbtsplain",
        AddressFamily::Ipv4,
        SYSCTL_TIMESTAMPS_WITH_OFFSETS,
        "per-connection",
    );
}

/// Returns how many packets of established connections had their server found by cookie, and how many by flow table.
fn query_packet_counts_by_decision(env: &FleetTestEnv) -> [u64; 2] {
    let stamped_services = query_lb_state(env)["stamped_services"].clone();
    ["cookie_packets", "flow_table_packets"].map(|decision| stamped_services[0][decision].as_u64().unwrap())
}

/// Asserts that cookies determined the server of at least 99 % of the packets of established connections since
/// `packet_counts_before`.
fn assert_packets_decided_by_cookie(env: &FleetTestEnv, packet_counts_before: [u64; 2]) {
    let packet_counts_after = query_packet_counts_by_decision(env);
    let [by_cookie, by_flow_table] =
        [0, 1].map(|decision| packet_counts_after[decision] - packet_counts_before[decision]);
    println!("{by_cookie} packets by the cookie, {by_flow_table} by the flow table");
    assert!(by_cookie > 1_000 && by_flow_table <= by_cookie / 100, "{by_cookie} by the cookie, {by_flow_table} not");
    let vip = env.testbed.service_address().to_string();
    let client_address = if vip.starts_with('[') { "[2001:db8::7]:40312" } else { "192.0.2.7:40312" };
    let explain_output = env.run_coreward(&["explain", "--vip", &vip, "--client", client_address]).unwrap();
    assert!(explain_output.contains(" % of its established packets by the cookie."), "{explain_output}");
}

/// Restarts the load balancer without its state. Its kernel must not route unknown packets until the load balancer is
/// ready.
fn reboot_load_balancer(env: &mut FleetTestEnv) {
    set_kernel_ip_forwarding(env, "0");
    env.fleet.reboot_load_balancer(&env.testbed, 1).unwrap();
    env.wait_for_connections(150);
    set_kernel_ip_forwarding(env, "1");
    // The load balancer's counters restart at 0 as well.
    for counter in ["established", "reply_stamped"] {
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, counter, || env.sum_lb_counter(counter) > 1_000);
    }
}

/// Asserts that no connection breaks while servers join and leave, keys change, and the load balancer restarts.
fn assert_connections_survive_fleet_changes(
    instance: &str,
    family: AddressFamily,
    tcp_timestamps: &str,
    expected_clock_state: &str,
) {
    let mut env = start_env(instance, family, &[tcp_timestamps; 5]);
    // Make all connections stamped, because a load balancer that loses its state breaks those that are not.
    open_connections_until_clocks_known(&env, expected_clock_state);
    env.set_admin_state(5, None);
    env.fleet.wait_until_ready(&env.testbed).unwrap();
    let packet_counts_before = query_packet_counts_by_decision(&env);
    let stream_client = env.start_streams(150.0);
    env.wait_for_connections(300);
    env.set_admin_state(1, Some(ServerAdminState::Draining));
    env.wait_for_connections(75);
    env.set_admin_state(5, Some(ServerAdminState::Active));
    env.wait_for_connections(75);
    assert_packets_decided_by_cookie(&env, packet_counts_before);
    env.fleet.kill_daemon("lb1").unwrap();
    env.wait_for_connections(30);
    env.fleet.restart_daemon(&env.testbed, "lb1").unwrap();
    env.wait_for_connections(75);
    env.set_admin_state(2, None);
    env.wait_for_connections(75);
    env.run_coreward(&["keys", "rotate", "--force"]).unwrap();
    env.fleet.upgrade_daemon(&env.testbed, "lb1").unwrap();
    env.wait_for_connections(150);
    env.set_admin_state(1, Some(ServerAdminState::Active));
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "replies are stamped", || {
        env.query_load_balancer_counter("lb1", "reply_stamped") > 1_000
    });
    env.wait_for_connections(75);
    reboot_load_balancer(&mut env);
    for server in ["s1", "s3", "s4", "s5"] {
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, server, || {
            query_server_clock_state_and_fault(&env, server) == (expected_clock_state.to_owned(), String::new())
        });
    }
    assert_streams_unbroken(stream_client);
}

#[test]
#[ignore = "takes seven minutes"]
fn hundred_thousand_connections_to_plain_linux_servers_continue() {
    skip_if!(find_missing_testbed_rights());
    let mut env = start_env("lbtslong", AddressFamily::Ipv4, &[SYSCTL_TIMESTAMPS_WITH_OFFSETS; 5]);
    open_connections_until_clocks_known(&env, "per-connection");
    let packet_counts_before = query_packet_counts_by_decision(&env);
    let stream_client = env.start_streams(250.0);
    for round in 0..20 {
        let (drained_server, removed_server) = (1 + round % 5, 1 + (round + 2) % 5);
        env.set_admin_state(drained_server, Some(ServerAdminState::Draining));
        env.wait_for_connections(1_250);
        env.set_admin_state(removed_server, None);
        env.wait_for_connections(1_250);
        env.set_admin_state(drained_server, Some(ServerAdminState::Active));
        if round % 5 == 0 {
            env.run_coreward(&["keys", "rotate", "--force"]).unwrap();
        }
        env.wait_for_connections(1_250);
        env.set_admin_state(removed_server, Some(ServerAdminState::Active));
        env.wait_for_connections(1_250);
    }
    assert_packets_decided_by_cookie(&env, packet_counts_before);
    let report = assert_streams_unbroken(stream_client);
    assert!(report.total_counts().opened >= 100_000, "{:?}", report.total_counts());
}

/// Asserts that a load balancer reports a missing setting if its kernel does not route packets.
fn assert_missing_forwarding_is_reported(env: &FleetTestEnv) {
    assert_eq!(query_lb_state(env)["warnings"], Value::Array(Vec::new()));
    set_kernel_ip_forwarding(env, "0");
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "that it does not route is shown", || {
        query_lb_state(env)["warnings"][0]
            .as_str()
            .is_some_and(|warning| warning.contains("forwarding is 0: expected 1"))
    });
}

#[test]
fn server_with_unusable_clock_is_reported_and_keeps_connections() {
    skip_if!(find_missing_testbed_rights());
    // One server has no timestamps, and one of the other servers drains.
    let mut env = start_env(
        "lbtsown",
        AddressFamily::Ipv4,
        &["0", SYSCTL_TIMESTAMPS_WITH_OFFSETS, SYSCTL_TIMESTAMPS_WITHOUT_OFFSETS, SYSCTL_TIMESTAMPS_WITHOUT_OFFSETS],
    );
    let stream_client = env.start_streams(150.0);
    env.wait_for_connections(375);
    env.set_admin_state(4, Some(ServerAdminState::Draining));
    env.wait_for_connections(75);
    env.set_admin_state(1, None);
    env.wait_for_connections(75);
    env.fleet.kill_daemon("lb1").unwrap();
    env.fleet.restart_daemon(&env.testbed, "lb1").unwrap();
    env.wait_for_connections(75);
    env.set_admin_state(1, Some(ServerAdminState::Active));
    let query_clock_state = |server| query_server_clock_state_and_fault(&env, server).0;
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the clocks are known", || {
        [query_clock_state("s1"), query_clock_state("s2"), query_clock_state("s3"), query_clock_state("s4")]
            == ["no-timestamps", "per-connection", "known", "known"]
    });
    let state_and_fault = query_server_clock_state_and_fault(&env, "s1");
    assert!(state_and_fault.1.contains("expected net.ipv4.tcp_timestamps = 1 or 2"), "{state_and_fault:?}");
    let status_output = env.run_coreward(&["status"]).unwrap();
    assert!(status_output.contains("clocks     web0: 3 of 4 servers'"), "{status_output}");
    assert!(status_output.contains("! s1 of web0 is not stamped: "), "{status_output}");
    for counter in ["flow_table", "reply_unchanged"] {
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, counter, || env.sum_lb_counter(counter) > 1_000);
    }

    // With the right setting, the server's new connections are stamped.
    env.testbed.server(1).unwrap().set_sysctls(&[("ipv4/tcp_timestamps", SYSCTL_TIMESTAMPS_WITH_OFFSETS)]).unwrap();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the clock of s1 is known", || {
        query_server_clock_state_and_fault(&env, "s1").0 == "per-connection"
    });
    assert_streams_unbroken(stream_client);
    assert_missing_forwarding_is_reported(&env);
}
