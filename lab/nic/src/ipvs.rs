//! Migration of a live pool from keepalived with the kernel's IPVS to coreward, and back.
//!
//! The checks follow docs/deployment.md. Director, load balancer, servers and client each have their own network
//! namespace.

use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};

use crate::check_tally::CheckTally;
use crate::debian::{DebianMachine, NamedGuestFile};
use crate::guest::QemuGuest;
use crate::packages::FetchedPackages;
use crate::systemd_unit_checks::{
    self, DAEMON_SETTLE_TIMEOUT, GuestCheck, retry_until_ok, run_apt_get, start_command_in_namespace,
};

const IPVS_GUEST_NAME: &str = "Debian with IPVS";
/// Number of connections in each group that is held open.
const OPEN_CONNECTION_COUNT: usize = 12;

const NETWORK_SETUP_SCRIPT: &str = "
mkdir -p /var/lib/coreward
ip netns add switch
ip -n switch link add br0 type bridge
ip -n switch link set br0 up
port() { # namespace, address
	ip netns add $1
	ip link add eth0 netns $1 type veth peer name p-$1 netns switch
	ip -n switch link set p-$1 master br0 up
	ip -n $1 address add $2/24 dev eth0
	ip -n $1 link set eth0 up
	ip -n $1 link set lo up
	ip netns exec switch ethtool -K p-$1 gro on > /dev/null
	ip netns exec $1 ethtool -K eth0 tx off > /dev/null
}
port client 10.2.0.2
port director 10.2.0.5
port controller 10.2.0.9
port lb 10.2.0.1
port s1 10.2.0.11
port s2 10.2.0.12
for holder in director s1 s2; do
	ip -n $holder address add 10.200.0.1/32 dev lo
	ip netns exec $holder sysctl -q -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2
done
ip netns exec director sysctl -q -w net.ipv4.ip_forward=1
ip -n client route add 10.200.0.1 via 10.2.0.5
";
const KEEPALIVED_CONFIG: &str = "
virtual_server 10.200.0.1 80 {
	lvs_sched rr
	lvs_method DR
	protocol TCP
	real_server 10.2.0.11 80 {
	}
	real_server 10.2.0.12 80 {
	}
}
";
/// Script that holds a group of connections open. $1 is the name of the group, and $2 the number of its connections.
/// Every fourth connection has no TCP timestamps. For each line in its FIFO, the script sends a request over each
/// connection. It then prints the slowest answer's time in ms, and the number of each connection that its first server
/// did not answer.
const HOLD_CONNECTIONS_SCRIPT: &str = "
connections=()
first=()
ask() {
	printf 'GET / HTTP/1.1\\r\\nHost: test\\r\\n\\r\\n' >&$1
	answer=none
	start=${EPOCHREALTIME/./}
	while read -r -t 5 line <&$1; do
		[[ $line == served-by-* ]] && answer=$line && break
	done
	took=$(((${EPOCHREALTIME/./} - start) / 1000))
	((took > slowest)) && slowest=$took
	[[ $answer == none ]] && bash /etc/test-diagnosis >> /run/test-diagnosis 2>&1
}
for ((number = 0; number < $2; number++)); do
	echo $((number % 4 ? 1 : 0)) > /proc/sys/net/ipv4/tcp_timestamps
	exec {connection}<>/dev/tcp/10.200.0.1/80 || exit 1
	ask $connection
	[[ $answer == none ]] && exit 1
	connections+=($connection)
	first+=($answer)
done
echo 1 > /proc/sys/net/ipv4/tcp_timestamps
mkfifo /run/test-$1.in /run/test-$1.out
while read -r _ < /run/test-$1.in; do
	broken=none
	slowest=0
	for ((number = 0; number < $2; number++)); do
		ask ${connections[number]}
		[[ $answer == ${first[number]} ]] || broken=\"$broken $number:${first[number]}:$answer\"
	done
	echo $slowest $broken > /run/test-$1.out
done
";
/// Script for the diagnosis of late answers. It prints all hosts' states, and packets of connections with
/// unacknowledged data.
const DIAGNOSIS_SCRIPT: &str = "
date
tcp=\"ss -Htn -o state established ( sport = :80 or dport = :80 )\"
for host in client director lb s1 s2; do
	echo \"== $host\"
	ip netns exec $host $tcp -i
	ip -n $host route
	ip -n $host neighbour
	ip netns exec $host nstat -a | grep -iE 'retrans|paws|timeout|reset|InErrors|InDiscards|TSEcr'
done
ip netns exec director ipvsadm -Lcn | grep ESTABLISHED
ip netns exec controller coreward status
ports=$(for host in client s1 s2; do
	ip netns exec $host $tcp | awk '$2 > 0 { print $3, $4 }' | sed 's/10.200.0.1:80//; s/.*://'
done | sort -u)
for port in $ports; do
	echo \"== port $port, at the ports of the switch\"
	tcpdump -ttnner /run/test.pcap port $port 2> /dev/null | tail -n 40
done
";
const FLEET_DOCUMENT: &str = "
[[server]]
name = \"s1\"
address = \"10.2.0.11\"

[[server]]
name = \"s2\"
address = \"10.2.0.12\"

[[service]]
name = \"web\"
vip = \"10.200.0.1:80\"
policy = \"rr\"
migrate_from = \"10.2.0.5\"
";
const LB_CONFIG: &str = "
name = \"lb1\"
controller = \"10.2.0.9:7400\"
interface = \"eth0\"
pin_directory = \"/sys/fs/bpf/coreward/lb\"
state_directory = \"/var/lib/coreward/lb\"
";

fn agent_config(server: &str) -> String {
    format!(
        "server = \"{server}\"\ncontroller = \"10.2.0.9:7400\"\ninterface = \"eth0\"\n\
         pin_directory = \"/sys/fs/bpf/coreward/{server}\"\nsteer = \"off\"\n"
    )
}

fn nginx_config(server: &str) -> String {
    format!(
        "user www-data;\nworker_processes 1;\npid /run/nginx-{server}.pid;\nevents {{}}\nhttp {{\n\
         keepalive_timeout 1h;\nkeepalive_requests 1000000;\naccess_log off;\nserver {{\nlisten 10.200.0.1:80;\n\
         location / {{ return 200 \"served-by-{server}\\n\"; }}\n}}\n}}\n"
    )
}

fn ipvs_guest_files() -> Vec<NamedGuestFile> {
    let constant_files = [
        ("etc/test-network", NETWORK_SETUP_SCRIPT),
        ("etc/test-hold", HOLD_CONNECTIONS_SCRIPT),
        ("etc/test-diagnosis", DIAGNOSIS_SCRIPT),
        ("etc/test-request", systemd_unit_checks::SEND_REQUEST_SCRIPT),
        ("etc/test-load", systemd_unit_checks::REPEATED_CONNECTIONS_SCRIPT),
        ("etc/keepalived/test.conf", KEEPALIVED_CONFIG),
        ("etc/coreward/controller.toml", &systemd_unit_checks::controller_config("10.2.0.9")),
        ("etc/coreward/fleet.toml", FLEET_DOCUMENT),
        ("etc/coreward/lb.toml", LB_CONFIG),
    ]
    .map(|(path, content)| (path, content.to_owned()));
    let server_files = [
        ("etc/coreward/s1.toml", agent_config("s1")),
        ("etc/coreward/s2.toml", agent_config("s2")),
        ("etc/test-nginx-s1", nginx_config("s1")),
        ("etc/test-nginx-s2", nginx_config("s2")),
    ];
    constant_files.into_iter().chain(server_files).collect()
}

/// Checks the migration from IPVS, with the packages in the subdirectory `old` of `package_directory`. If `command` is
/// given, runs only that command. Fails when the guest does not boot.
pub fn check_migration_from_ipvs(
    packages: &FetchedPackages,
    cache_directory: &Path,
    package_directory: &Path,
    command: Option<&str>,
    tally: &mut CheckTally,
) -> Result<()> {
    let debian_machine = DebianMachine::new(packages, cache_directory, "ipvs", &ipvs_guest_files(), package_directory)?;
    systemd_unit_checks::run_checks_in_namespaces(IPVS_GUEST_NAME, &debian_machine, &MIGRATION_CHECKS, command, tally)
}

/// Names and functions of the checks. Each check starts in the state that the previous one has left.
const MIGRATION_CHECKS: [(&str, GuestCheck); 4] = [
    ("keepalived's virtual server balances", check_service_through_keepalived),
    ("coreward adopts the pool, and no connection breaks", check_pool_adoption),
    ("coreward hands the pool back, and no connection breaks", check_pool_hand_back),
    ("coreward is removed, and no connection breaks", check_coreward_removal),
];

/// Opens a group of connections, and waits until all of them are open.
fn open_connection_group(guest: &mut QemuGuest, group: &str) -> Result<()> {
    start_command_in_namespace(
        guest,
        &format!("test-{group}"),
        "client",
        &format!("bash /etc/test-hold {group} {OPEN_CONNECTION_COUNT}"),
    )?;
    let readiness_command = format!("test -p /run/test-{group}.out");
    retry_until_ok(DAEMON_SETTLE_TIMEOUT, || guest.run_successfully(&readiness_command))
        .with_context(|| format!("connections {group}"))
        .map(drop)
}

/// Checks that no connection of the groups was broken, and that no new connection failed. Returns the slowest answer's
/// time in ms.
fn check_held_connections(guest: &mut QemuGuest, groups: &[&str]) -> Result<u64> {
    let mut slowest_answer_ms = 0;
    for group in groups {
        let command = format!("sh -c 'echo > /run/test-{group}.in; cat /run/test-{group}.out'");
        let (_, check_output) = guest.try_run(&command, DAEMON_SETTLE_TIMEOUT)?;
        let (slowest_text, broken_connections) = check_output.trim().split_once(' ').context(check_output.clone())?;
        if broken_connections != "none" {
            println!("{}", guest.run_successfully("cat /run/test-diagnosis")?);
            bail!(
                "of connections {group} (number:server:answered by): {broken_connections}; the slowest answer took \
                 {slowest_text} ms"
            );
        }
        slowest_answer_ms = slowest_answer_ms.max(slowest_text.parse()?);
    }
    let failed_connection_count = guest.run_successfully("grep -c failed /run/test-load || true")?;
    ensure!(failed_connection_count.trim() == "0", "{} new connections failed", failed_connection_count.trim());
    Ok(slowest_answer_ms)
}

fn check_and_summarize_held_connections(guest: &mut QemuGuest, groups: &[&str]) -> Result<String> {
    let slowest_answer_ms = check_held_connections(guest, groups)?;
    let served_connection_count = guest.run_successfully("grep -c served /run/test-load")?;
    let held_connection_count = groups.len() * OPEN_CONNECTION_COUNT;
    Ok(format!(
        "0 broken of {held_connection_count} held connections (slowest answer {slowest_answer_ms} ms) and {} new ones",
        served_connection_count.trim()
    ))
}

fn check_status_contains(guest: &mut QemuGuest, pattern: &str) -> Result<()> {
    guest.run_successfully(&format!("ip netns exec controller coreward status | grep -qE '{pattern}'")).map(drop)
}

fn check_service_through_keepalived(guest: &mut QemuGuest) -> Result<String> {
    for server in ["s1", "s2"] {
        let command = format!("nginx -c /etc/test-nginx-{server} -g 'daemon off;'").replace('\'', "\"");
        start_command_in_namespace(guest, &format!("test-nginx-{server}"), server, &command)?;
    }
    start_command_in_namespace(
        guest,
        "test-keepalived",
        "director",
        "keepalived -n -C -l -f /etc/keepalived/test.conf",
    )?;
    let request_command = "ip netns exec client timeout 10 bash /etc/test-request 80";
    retry_until_ok(DAEMON_SETTLE_TIMEOUT, || guest.run_successfully(request_command))?;
    start_command_in_namespace(guest, "test-dump", "switch", "tcpdump -U -i any -s 120 -w /run/test.pcap port 80")?;
    start_command_in_namespace(guest, "test-load", "client", "bash /etc/test-load")?;
    open_connection_group(guest, "oldest")?;
    let ipvs_table = guest.run_successfully("ip netns exec director ipvsadm -Ln")?;
    ensure!(ipvs_table.contains("10.2.0.11:80") && ipvs_table.contains("10.2.0.12:80"), "ipvsadm: {ipvs_table}");
    check_and_summarize_held_connections(guest, &["oldest"])
}

fn check_pool_adoption(guest: &mut QemuGuest) -> Result<String> {
    run_apt_get(guest, "install /root/debs/old/coreward_*.deb")?;
    start_command_in_namespace(
        guest,
        "coreward-controller",
        "controller",
        "coreward controller --config /etc/coreward/controller.toml",
    )?;
    for server in ["s1", "s2"] {
        let command = format!("coreward agent --config /etc/coreward/{server}.toml");
        start_command_in_namespace(guest, &format!("coreward-{server}"), server, &command)?;
    }
    for server in ["s1", "s2"] {
        retry_until_ok(DAEMON_SETTLE_TIMEOUT, || check_status_contains(guest, &format!("{server} .*active")))?;
        wait_for_timestamps_setting(guest, server, "2")?;
    }
    check_held_connections(guest, &["oldest"]).context("after the agents' start")?;
    open_connection_group(guest, "older")?;
    start_command_in_namespace(guest, "coreward-lb", "lb", "coreward lb --config /etc/coreward/lb.toml")?;
    let readiness_command = "ip netns exec controller coreward status | sed -n '/^load balancer lb1: XDP/,/^$/p' > \
                             /run/status; grep -q '^  tables     web ' /run/status && ! grep '^  !' /run/status";
    retry_until_ok(DAEMON_SETTLE_TIMEOUT, || guest.run_successfully(readiness_command))
        .with_context(|| read_status_or_error(guest))?;
    guest.run_successfully("ip -n client route replace 10.200.0.1 via 10.2.0.1")?;
    check_held_connections(guest, &["oldest", "older"]).context("after the VIP's move")?;
    open_connection_group(guest, "ours")?;
    retry_until_ok(DAEMON_SETTLE_TIMEOUT, || check_status_contains(guest, "to_other_balancer [1-9]"))
        .with_context(|| read_status_or_error(guest))?;
    check_and_summarize_held_connections(guest, &["oldest", "older", "ours"])
}

/// Returns the output of `coreward status` or its error, for use in messages.
fn read_status_or_error(guest: &mut QemuGuest) -> String {
    guest.run_successfully("ip netns exec controller coreward status").unwrap_or_else(|error| format!("{error:#}"))
}

/// Waits until a server's setting net.ipv4.tcp_timestamps has this value.
fn wait_for_timestamps_setting(guest: &mut QemuGuest, server: &str, expected_value: &str) -> Result<()> {
    let read_command = format!("ip netns exec {server} sysctl -n net.ipv4.tcp_timestamps");
    retry_until_ok(DAEMON_SETTLE_TIMEOUT, || match guest.run_successfully(&read_command)?.trim() {
        actual_value if actual_value == expected_value => Ok(()),
        actual_value => bail!("net.ipv4.tcp_timestamps of {server} is {actual_value}, expected {expected_value}"),
    })
}

fn check_pool_hand_back(guest: &mut QemuGuest) -> Result<String> {
    guest.run_successfully(
        "sed -i s/migrate_from/migrate_to/ /etc/coreward/fleet.toml && systemctl kill -s HUP coreward-controller",
    )?;
    for server in ["s1", "s2"] {
        wait_for_timestamps_setting(guest, server, "1")?;
    }
    check_held_connections(guest, &["oldest", "older", "ours"]).context("after `migrate_to`")?;
    open_connection_group(guest, "newest")?;
    check_held_connections(guest, &["oldest", "older", "ours", "newest"])?;
    // Connections that coreward opened must end before the VIP moves.
    guest.run_successfully("systemctl stop test-ours")?;
    guest.run_successfully("ip -n client route replace 10.200.0.1 via 10.2.0.5")?;
    check_and_summarize_held_connections(guest, &["oldest", "older", "newest"])
}

fn check_coreward_removal(guest: &mut QemuGuest) -> Result<String> {
    // Connections with stamped timestamps must end before the agents detach.
    guest.run_successfully("systemctl stop test-older coreward-lb coreward-s1 coreward-s2 coreward-controller")?;
    guest.run_successfully("nsenter --net=/run/netns/lb coreward lb --config /etc/coreward/lb.toml --detach")?;
    for server in ["s1", "s2"] {
        guest.run_successfully(&format!(
            "nsenter --net=/run/netns/{server} coreward agent --config /etc/coreward/{server}.toml --detach"
        ))?;
    }
    check_and_summarize_held_connections(guest, &["oldest", "newest"])
}
