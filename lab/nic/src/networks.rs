//! Checks of networks whose drivers development machines may lack: bonds, VLAN devices and the kernel's own tunnels.
//!
//! Load balancer, servers, client and controller each have their own network namespace.

use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};

use crate::check_tally::CheckTally;
use crate::debian::{DebianMachine, NamedGuestFile};
use crate::guest::QemuGuest;
use crate::packages::FetchedPackages;
use crate::systemd_unit_checks::{self, DAEMON_SETTLE_TIMEOUT, GuestCheck, retry_until_ok, run_apt_get};

const NETWORKS_GUEST_NAME: &str = "Debian with bonds, VLANs and tunnels";
/// Number of connections that are opened in each check.
const CONNECTIONS_PER_NETWORK_CHECK: usize = 20;

/// Script that sets up the network. Server s1 is in VLAN 20, and so are the second devices of client and controller.
/// Server s2 decapsulates packets by its kernel's tunnel devices.
const NETWORK_SETUP_SCRIPT: &str = "
mkdir -p /var/lib/coreward
ip netns add switch
ip -n switch link add br0 type bridge
ip -n switch link set br0 up
link() { # namespace, device, name at the switch
	ip link add $2 netns $1 type veth peer name $3 netns switch
	# XDP_TX on veth needs NAPI at the other end; frames of XDP must carry whole checksums.
	ip netns exec switch ethtool -K $3 gro on > /dev/null
	ip netns exec $1 ethtool -K $2 tx off > /dev/null
}
port() { # namespace, address
	ip netns add $1
	ip -n $1 link set lo up
	link $1 eth0 p-$1
	ip -n switch link set p-$1 master br0 up
	ip -n $1 link set eth0 up
	[ -z \"$2\" ] || ip -n $1 address add $2/24 dev eth0
}
tagged() { # namespace, address
	ip -n $1 link add link eth0 name eth0.20 type vlan id 20
	ip -n $1 address add $2/24 dev eth0.20
	ip -n $1 link set eth0.20 up
}
bond() { # namespace, device, its links
	ip -n $1 link add $2 type bond mode 802.3ad miimon 100 lacp_rate fast xmit_hash_policy layer3+4
	for link in $3; do
		ip -n $1 link set $link down
		ip -n $1 link set $link master $2
	done
	ip -n $1 link set $2 up
}
port client 10.2.0.2
tagged client 10.3.0.2
port controller 10.2.0.9
tagged controller 10.3.0.9
port s1 ''
tagged s1 10.3.0.11
port s2 10.2.0.12
ip netns add lb
ip -n lb link set lo up
link lb link0 p-lb0
link lb link1 p-lb1
bond switch bond1 'p-lb0 p-lb1'
ip -n switch link set bond1 master br0
bond lb bond0 'link0 link1'
ip -n lb address add 10.2.0.1/24 dev bond0
ip -n s1 route add 10.2.0.2 via 10.3.0.2
ip -n s1 route add 10.2.0.9 via 10.3.0.9
for server in s1 s2; do
	ip netns exec $server sysctl -q -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2
	for vip in 10.200.0.1 10.200.0.2 10.200.0.3; do
		ip -n $server address add $vip/32 dev lo
		ip -n client route replace $vip via 10.2.0.1
	done
done
# tunl0 takes IP-in-IP packets to any address of the server, fou those in UDP, with the rest left to tunl0.
ip -n s2 link set tunl0 up
ip netns exec s2 ip fou add port 6080 gue
ip netns exec s2 sysctl -q -w net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.tunl0.rp_filter=0
";
const FLEET_DOCUMENT: &str = "
[[server]]
name = \"s1\"
address = \"10.3.0.11\"
vlan = 20

[[server]]
name = \"s2\"
address = \"10.2.0.12\"

[[service]]
name = \"tagged\"
vip = \"10.200.0.1:80\"
servers = [\"s1\"]
policy = \"rr\"

[[service]]
name = \"by-ipip\"
vip = \"10.200.0.2:80\"
servers = [\"s2\"]
policy = \"rr\"
forwarding = \"ipip\"
consistency = \"hash-table\"

[[service]]
name = \"by-gue\"
vip = \"10.200.0.3:80\"
servers = [\"s2\"]
policy = \"rr\"
forwarding = \"gue\"
consistency = \"hash-table\"
";
const LB_CONFIG: &str = "
name = \"lb1\"
controller = \"10.2.0.9:7400\"
interface = \"bond0\"
pin_directory = \"/sys/fs/bpf/coreward/lb\"
xdp_mode = \"native\"
";
const AGENT_CONFIG: &str = "
server = \"s1\"
controller = \"10.2.0.9:7400\"
interface = \"eth0.20\"
pin_directory = \"/sys/fs/bpf/coreward/s1\"
steer = \"off\"
";

fn nginx_config(server: &str) -> String {
    format!(
        "user www-data;\nworker_processes 1;\npid /run/nginx-{server}.pid;\nevents {{}}\nhttp {{\naccess_log off;\n\
         server {{\nlisten 80;\nlocation / {{ return 200 \"served by {server}\\n\"; }}\n}}\n}}\n"
    )
}

/// Script that opens connections one by one, with two requests each. $1 is the VIP, and $2 the number of connections.
const OPEN_CONNECTIONS_SCRIPT: &str = "
for ((number = 0; number < $2; number++)); do
	exec 3<>/dev/tcp/$1/80 || exit 1
	for request in 1 2; do
		printf 'GET / HTTP/1.1\\r\\nHost: test\\r\\n\\r\\n' >&3
		while :; do
			read -r -t 10 line <&3 || exit 1
			[[ $line == served* ]] && break
		done
	done
	exec 3>&-
done
echo $line
";

fn network_guest_files() -> Vec<NamedGuestFile> {
    [
        ("etc/test-network", NETWORK_SETUP_SCRIPT.to_owned()),
        ("etc/test-request", OPEN_CONNECTIONS_SCRIPT.to_owned()),
        ("etc/coreward/controller.toml", systemd_unit_checks::controller_config("10.2.0.9")),
        ("etc/coreward/fleet.toml", FLEET_DOCUMENT.to_owned()),
        ("etc/coreward/lb.toml", LB_CONFIG.to_owned()),
        ("etc/coreward/s1.toml", AGENT_CONFIG.to_owned()),
        ("etc/test-nginx-s1", nginx_config("s1")),
        ("etc/test-nginx-s2", nginx_config("s2")),
    ]
    .into()
}

/// Checks bonds, VLANs and tunnels, with the packages in the subdirectory `old` of `package_directory`. If `command` is
/// given, runs only that command. Fails when the guest does not boot.
pub fn check_networks(
    packages: &FetchedPackages,
    cache_directory: &Path,
    package_directory: &Path,
    command: Option<&str>,
    tally: &mut CheckTally,
) -> Result<()> {
    let debian_machine =
        DebianMachine::new(packages, cache_directory, "networks", &network_guest_files(), package_directory)?;
    systemd_unit_checks::run_checks_in_namespaces(NETWORKS_GUEST_NAME, &debian_machine, &NETWORK_CHECKS, command, tally)
}

/// Names and functions of the checks. Each check starts in the state that the previous one has left.
const NETWORK_CHECKS: [(&str, GuestCheck); 5] = [
    ("the daemons start, with native XDP on a bond by LACP", start_daemons),
    ("a server with a VLAN device serves, and stamps its packets", check_vlan_server),
    ("the kernel's ipip device decapsulates", check_ipip_decapsulation),
    ("the kernel's fou port decapsulates", check_gue_decapsulation),
    ("a link of the bond fails, and the other one serves", check_link_failures),
];

fn start_daemons(guest: &mut QemuGuest) -> Result<String> {
    run_apt_get(guest, "install /root/debs/old/coreward_*.deb")?;
    let daemons = [
        ("controller", "controller", "coreward controller --config /etc/coreward/controller.toml"),
        ("lb", "lb", "coreward lb --config /etc/coreward/lb.toml"),
        ("s1", "s1", "coreward agent --config /etc/coreward/s1.toml"),
    ];
    for (unit, host, command) in daemons {
        systemd_unit_checks::start_command_in_namespace(guest, &format!("coreward-{unit}"), host, command)?;
    }
    for server in ["s1", "s2"] {
        let command = format!("nginx -c /etc/test-nginx-{server} -g \"daemon off;\"");
        systemd_unit_checks::start_command_in_namespace(guest, &format!("test-nginx-{server}"), server, &command)?;
    }
    retry_until_ok(DAEMON_SETTLE_TIMEOUT, || {
        let status = fetch_fleet_status(guest)?;
        let lb_status = status.split("\n\n").find(|section| section.starts_with("load balancer lb1: XDP native"));
        let is_load_balancer_ready = |balancer: &str| !balancer.contains("  ! ") && balancer.contains(", tagged ");
        ensure!(lb_status.is_some_and(is_load_balancer_ready), "{status}");
        Ok(())
    })?;
    let bond_status = guest.run_successfully("ip netns exec lb cat /proc/net/bonding/bond0")?;
    let bond_port_count = bond_status.lines().find_map(|line| line.trim().strip_prefix("Number of ports: "));
    ensure!(bond_port_count == Some("2"), "LACP has not aggregated both links: {bond_status}");
    Ok("2 links aggregated".to_owned())
}

fn fetch_fleet_status(guest: &mut QemuGuest) -> Result<String> {
    guest.run_successfully("ip netns exec controller coreward status")
}

/// Opens connections to a VIP and sends requests. Fails unless the server with the name `server` answers.
fn send_requests_and_check_server(guest: &mut QemuGuest, vip: &str, server: &str) -> Result<()> {
    let command =
        format!("ip netns exec client timeout 60 bash /etc/test-request {vip} {CONNECTIONS_PER_NETWORK_CHECK}");
    let last_answer = retry_until_ok(DAEMON_SETTLE_TIMEOUT, || guest.run_successfully(&command))
        .with_context(|| format!("requests to {vip}"))?;
    ensure!(last_answer.trim() == format!("served by {server}"), "answered by {last_answer:?}, expected {server}");
    Ok(())
}

/// Returns the number of packets for which the load balancer has made the forwarding decision `name`.
fn read_decision_packet_count(guest: &mut QemuGuest, name: &str) -> Result<u64> {
    let status_text = fetch_fleet_status(guest)?;
    let mut status_words = status_text.split([' ', ',', '\n']).filter(|status_word| !status_word.is_empty());
    let packet_count = status_words.find(|status_word| *status_word == name).and_then(|_| status_words.next());
    packet_count.and_then(|count| count.parse().ok()).with_context(|| format!("no packet by {name}: {status_text}"))
}

fn check_vlan_server(guest: &mut QemuGuest) -> Result<String> {
    send_requests_and_check_server(guest, "10.200.0.1", "s1")?;
    // A daemon reports its counters only once a second. Cookies show that the agent's programs see the VLAN's packets.
    let cookie_packet_count =
        retry_until_ok(DAEMON_SETTLE_TIMEOUT, || match read_decision_packet_count(guest, "established")? {
            count if count >= CONNECTIONS_PER_NETWORK_CHECK as u64 => Ok(count),
            count => bail!("{count} packets by their cookie"),
        })?;
    Ok(format!("{CONNECTIONS_PER_NETWORK_CHECK} connections, {cookie_packet_count} packets by their cookie"))
}

fn check_ipip_decapsulation(guest: &mut QemuGuest) -> Result<String> {
    check_decapsulation(guest, "10.200.0.2")
}

fn check_gue_decapsulation(guest: &mut QemuGuest) -> Result<String> {
    check_decapsulation(guest, "10.200.0.3")
}

fn check_decapsulation(guest: &mut QemuGuest, vip: &str) -> Result<String> {
    let initial_packet_count = read_tunnel_packet_count(guest)?;
    send_requests_and_check_server(guest, vip, "s2")?;
    let decapsulated_packet_count = read_tunnel_packet_count(guest)? - initial_packet_count;
    ensure!(
        decapsulated_packet_count >= 4 * CONNECTIONS_PER_NETWORK_CHECK as u64,
        "tunl0 received {decapsulated_packet_count} packets of {CONNECTIONS_PER_NETWORK_CHECK} connections"
    );
    Ok(format!("{CONNECTIONS_PER_NETWORK_CHECK} connections, {decapsulated_packet_count} packets by tunl0"))
}

fn read_tunnel_packet_count(guest: &mut QemuGuest) -> Result<u64> {
    let packet_count = guest.run_successfully("ip netns exec s2 cat /sys/class/net/tunl0/statistics/rx_packets")?;
    packet_count.trim().parse().with_context(|| packet_count.clone())
}

fn check_link_failures(guest: &mut QemuGuest) -> Result<String> {
    guest.run_successfully("ip -n switch link set p-lb0 down")?;
    send_requests_and_check_server(guest, "10.200.0.1", "s1")?;
    guest.run_successfully("ip -n switch link set p-lb0 up && ip -n switch link set p-lb1 down")?;
    send_requests_and_check_server(guest, "10.200.0.1", "s1")?;
    Ok(format!("{CONNECTIONS_PER_NETWORK_CHECK} connections with each link alone"))
}
