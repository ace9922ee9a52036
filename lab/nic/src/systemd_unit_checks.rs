//! Checks of the Debian packages under systemd: installed, started, reloaded, upgraded, killed by the watchdog,
//! removed.
//!
//! The load balancer has a separate network namespace, because it forwards to a server on the same machine.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use crate::check_tally::CheckTally;
use crate::debian::{DebianMachine, NamedGuestFile};
use crate::guest::QemuGuest;
use crate::packages::FetchedPackages;

const SYSTEMD_GUEST_NAME: &str = "Debian with systemd";
/// Names of the daemons, in the order in which they start.
const DAEMON_NAMES: [&str; 5] = ["controller", "rack", "agent", "lb", "orchestrate"];
/// Maximum time for a package installation, a start of daemons or a reboot in an emulated guest.
const GUEST_OPERATION_TIMEOUT: Duration = Duration::from_secs(300);
/// Maximum time until daemons have reconnected after all of them were restarted.
pub const DAEMON_SETTLE_TIMEOUT: Duration = Duration::from_secs(90);
/// Number of connections that are held open while daemons are reloaded, upgraded and killed.
const OPEN_CONNECTION_COUNT: usize = 8;
/// Number of new connections that are opened before the first change.
const NEW_CONNECTION_COUNT: usize = 20;
/// Pattern for the errors that a confined process gets, in the words of strerror(3).
const PERMISSION_ERROR_PATTERN: &str = "Operation not permitted|Permission denied|Read-only file system";

const NETWORK_SETUP_SCRIPT: &str = "
ip netns add switch
ip netns add lb
ip netns add client
ip -n switch link add br0 type bridge
ip -n switch link set br0 up
port() { # name, namespace, device, address
	ip link add $3 netns $2 numrxqueues 2 numtxqueues 2 type veth peer name $1 netns switch
	ip -n switch link set $1 master br0 up
	ip -n $2 address add $4/24 dev $3
	ip -n $2 link set $3 up
	ip -n $2 link set lo up
	# XDP_TX on veth needs NAPI at the other end; frames of XDP must carry whole checksums.
	ip netns exec switch ethtool -K $1 gro on > /dev/null
	ip netns exec $2 ethtool -K $3 tx off > /dev/null
}
port p-lb lb eth0 10.2.0.1
port p-client client eth0 10.2.0.2
ip netns add server
port p-server server srv0 10.2.0.11
ip -n server link set srv0 netns 1
ip netns delete server
ip address add 10.2.0.11/24 dev srv0
ip address add 10.200.0.1/32 dev lo
ip link set srv0 up
ip -n client route add 10.200.0.1 via 10.2.0.1
";
/// Script that sends a request over a new connection to port $1.
pub const SEND_REQUEST_SCRIPT: &str = "
exec 3<>/dev/tcp/10.200.0.1/$1 || exit 1
printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3
timeout 5 grep -q served <&3
";
/// Script that opens a new connection every 0.1 s and prints whether it was served, until it is killed.
pub const REPEATED_CONNECTIONS_SCRIPT: &str = "
while sleep 0.1; do
	if timeout 10 bash /etc/test-request 80; then echo served; else echo failed; fi
done
";
/// Script that holds $1 connections open. For each line in its FIFO, it sends a request over each connection, and
/// prints the number of answers.
const HOLD_CONNECTIONS_SCRIPT: &str = "
connections=()
for ((number = 0; number < $1; number++)); do
	exec {connection}<>/dev/tcp/10.200.0.1/80 || exit 1
	connections+=($connection)
done
while read -r _ < /run/test-hold.in; do
	answered=0
	for connection in ${connections[@]}; do
		printf 'GET / HTTP/1.1\\r\\nHost: test\\r\\n\\r\\n' >&$connection
		while read -r -t 5 line <&$connection; do
			[[ $line == served ]] && answered=$((answered + 1)) && break
		done
	done
	echo $answered > /run/test-hold.out
done
";
const NGINX_CONFIG: &str = "
user www-data;
worker_processes 2;
worker_cpu_affinity auto;
pid /run/nginx.pid;
events {}
http {
	keepalive_timeout 1h;
	server {
		listen 10.200.0.1:80 reuseport;
		listen 10.200.0.1:8080 reuseport;
		location / { return 200 \"served\\n\"; }
	}
}
";
const FLEET_DOCUMENT: &str = "
[[server]]
name = \"s1\"
address = \"10.2.0.11\"

[[service]]
name = \"web\"
vip = \"10.200.0.1:80\"
";
const RACK_CONFIG: &str = "
name = \"rack1\"
listen = \"10.2.0.11:7410\"
controller = \"10.2.0.11:7400\"
allow_plaintext = true
";
const AGENT_CONFIG: &str = "
server = \"s1\"
controller = [\"10.2.0.11:7410\", \"10.2.0.11:7400\"]
interface = \"srv0\"
pin_directory = \"/sys/fs/bpf/coreward/agent\"
";
const LB_CONFIG: &str = "
name = \"lb1\"
controller = \"10.2.0.11:7400\"
interface = \"eth0\"
pin_directory = \"/sys/fs/bpf/coreward/lb\"
";
const ORCHESTRATE_CONFIG: &str = "
memory = \"/run/coreward-orchestrate/cores\"
cores = 2
metrics = \"127.0.0.1:7440\"

[[service]]
listen = \"10.2.0.11:400\"
";

/// Returns the configuration file for a controller that listens on this address.
pub fn controller_config(address: &str) -> String {
    format!(
        "listen = \"{address}:7400\"\napi = \"127.0.0.1:7401\"\nstore = \"/var/lib/coreward/controller.redb\"\n\
         fleet = \"fleet.toml\"\nallow_plaintext = true\n"
    )
}

fn systemd_guest_files() -> Vec<NamedGuestFile> {
    [
        ("etc/test-network", NETWORK_SETUP_SCRIPT),
        ("etc/test-request", SEND_REQUEST_SCRIPT),
        ("etc/test-load", REPEATED_CONNECTIONS_SCRIPT),
        ("etc/test-hold", HOLD_CONNECTIONS_SCRIPT),
        ("etc/nginx/nginx.conf", NGINX_CONFIG),
        ("etc/coreward/controller.toml", &controller_config("10.2.0.11")),
        ("etc/coreward/fleet.toml", FLEET_DOCUMENT),
        ("etc/coreward/rack.toml", RACK_CONFIG),
        ("etc/coreward/agent.toml", AGENT_CONFIG),
        ("etc/coreward/lb.toml", LB_CONFIG),
        ("etc/coreward/orchestrate.toml", ORCHESTRATE_CONFIG),
        ("etc/systemd/system/coreward-lb.service.d/test.conf", "[Service]\nNetworkNamespacePath=/run/netns/lb\n"),
    ]
    .map(|(path, content)| (path, content.to_owned()))
    .to_vec()
}

/// Checks the Debian packages in the subdirectories `old` and `new` of `package_directory`. If `command` is given, only
/// runs it. Fails when the guest does not boot.
pub fn check_debian_packages(
    packages: &FetchedPackages,
    cache_directory: &Path,
    package_directory: &Path,
    command: Option<&str>,
    tally: &mut CheckTally,
) -> Result<()> {
    let debian_machine =
        DebianMachine::new(packages, cache_directory, "units", &systemd_guest_files(), package_directory)?;
    let start = Instant::now();
    let mut guest = debian_machine.boot()?;
    println!(
        "{SYSTEMD_GUEST_NAME}: {} booted in {:.1} s",
        guest.run_successfully("uname -r")?.trim(),
        start.elapsed().as_secs_f64()
    );
    guest.run_successfully("mkdir /root/debs && tar -C /root/debs -xf /dev/vdb")?;
    if let Some(command) = command {
        let (exit_status, output) = guest.try_run(command, GUEST_OPERATION_TIMEOUT)?;
        println!("{output}");
        ensure!(exit_status == 0, "`{command}` ended with status {exit_status}");
        return Ok(());
    }
    if run_checks_until_failure(SYSTEMD_GUEST_NAME, &FIRST_BOOT_CHECKS, &mut guest, tally) {
        guest.power_off()?;
        run_checks_until_failure(SYSTEMD_GUEST_NAME, &SECOND_BOOT_CHECKS, &mut debian_machine.boot()?, tally);
    }
    Ok(())
}

/// Runs the checks in a guest whose hosts are network namespaces, and which does not run Debian's nginx unit. If
/// `command` is given, only runs it.
pub fn run_checks_in_namespaces(
    name: &str,
    debian_machine: &DebianMachine<'_>,
    checks: &[(&str, GuestCheck)],
    command: Option<&str>,
    tally: &mut CheckTally,
) -> Result<()> {
    let mut guest = debian_machine.boot()?;
    guest.run_successfully("mkdir /root/debs && tar -C /root/debs -xf /dev/vdb && systemctl disable --now -q nginx")?;
    match command {
        Some(command) => println!("{}", guest.run_successfully(command)?),
        None => drop(run_checks_until_failure(name, checks, &mut guest, tally)),
    }
    Ok(())
}

/// Runs the checks until one fails. Returns whether all have passed.
pub fn run_checks_until_failure(
    name: &str,
    checks: &[(&str, GuestCheck)],
    guest: &mut QemuGuest,
    tally: &mut CheckTally,
) -> bool {
    for (check_name, run_check) in checks {
        let start = Instant::now();
        let result =
            run_check(guest).map(|measured_text| format!("{measured_text} ({:.1} s)", start.elapsed().as_secs_f64()));
        let has_failed = result.is_err();
        tally.record_result(&format!("{name}: {check_name}"), result);
        if has_failed {
            println!("{}", collect_unit_states_and_journal(guest));
            return false;
        }
    }
    true
}

/// Function that makes one check in a guest and returns the measured values as text.
pub type GuestCheck = fn(&mut QemuGuest) -> Result<String>;

/// Names and functions of the checks. Each check starts in the state that the previous one has left.
const FIRST_BOOT_CHECKS: [(&str, GuestCheck); 9] = [
    ("installing starts nothing", check_package_installation),
    ("the units start", check_unit_start),
    ("the units are confined", check_confinement),
    ("the orchestrator accepts requests", check_orchestrator_requests),
    ("the orchestrator accepts requests by AF_XDP", check_orchestrator_with_af_xdp),
    ("connections reach the server", check_new_connections),
    ("a reload is obeyed, a wrong file rejected", check_daemon_reload),
    ("an upgrade restarts the daemons, and no connection breaks", check_package_upgrade),
    ("the watchdog restarts hung daemons, and no connection breaks", check_watchdog),
];

const SECOND_BOOT_CHECKS: [(&str, GuestCheck); 3] = [
    ("the units start at boot", check_start_at_boot),
    ("the orchestrator accepts requests after it", check_orchestrator_requests),
    ("removing ends the daemons, not the forwarding", check_package_removal),
];

fn unit_name(daemon: &str) -> String {
    format!("coreward-{daemon}.service")
}

/// Returns the values of a daemon unit's properties, in the order of `properties`.
fn read_unit_properties<const N: usize>(
    guest: &mut QemuGuest,
    daemon: &str,
    properties: [&str; N],
) -> Result<[String; N]> {
    let mut property_values = Vec::new();
    for property in properties {
        property_values.push(
            guest
                .run_successfully(&format!("systemctl show --value -p {property} {}", unit_name(daemon)))?
                .trim()
                .to_owned(),
        );
    }
    property_values.try_into().map_err(|values| anyhow::anyhow!("properties of {daemon}: {values:?}"))
}

fn query_main_pid(guest: &mut QemuGuest, daemon: &str) -> Result<u32> {
    let [active_state, pid] = read_unit_properties(guest, daemon, ["ActiveState", "MainPID"])?;
    ensure!(active_state == "active" && pid != "0", "{} is {active_state}, its process {pid}", unit_name(daemon));
    pid.parse().with_context(|| format!("MainPID {pid:?}"))
}

fn query_main_pids(guest: &mut QemuGuest) -> Result<Vec<u32>> {
    DAEMON_NAMES.iter().map(|daemon| query_main_pid(guest, daemon)).collect()
}

/// Starts a command as a transient systemd unit in the network namespace of `host`.
pub fn start_command_in_namespace(guest: &mut QemuGuest, unit: &str, host: &str, command: &str) -> Result<()> {
    let unit_options = format!("-p NetworkNamespacePath=/run/netns/{host} -p StandardOutput=truncate:/run/{unit}");
    guest.run_successfully(&format!("systemd-run -q --unit {unit} {unit_options} {command}")).map(drop)
}

/// Repeats `check` until it passes, and returns its value. Fails with the last error once `timeout` has elapsed.
pub fn retry_until_ok<T>(timeout: Duration, mut check: impl FnMut() -> Result<T>) -> Result<T> {
    let deadline = Instant::now() + timeout;
    loop {
        match check() {
            Ok(value) => return Ok(value),
            Err(error) if Instant::now() > deadline => {
                return Err(error.context(format!("after {} s", timeout.as_secs())));
            }
            Err(_) => sleep(Duration::from_millis(500)),
        }
    }
}

/// Returns the state of each daemon's unit, and the journal's latest messages about these units.
fn collect_unit_states_and_journal(guest: &mut QemuGuest) -> String {
    const UNIT_STATE_COMMANDS: [&str; 3] = [
        "systemctl show -p Id,ActiveState,SubState,Result,NRestarts,MainPID,ExecMainStatus 'coreward-*'",
        "journalctl --no-pager -q -b _PID=1 -p notice -n 30",
        "journalctl --no-pager -q -b -o short-monotonic -n 60 -u 'coreward-*' -u 'test-*'",
    ];
    UNIT_STATE_COMMANDS
        .map(|command| guest.run_successfully(command).unwrap_or_else(|error| format!("no journal: {error:#}")))
        .join("\n")
}

pub fn run_apt_get(guest: &mut QemuGuest, arguments: &str) -> Result<String> {
    let command = format!("DEBIAN_FRONTEND=noninteractive apt-get -q -y {arguments} 2>&1");
    let (exit_status, output) = guest.try_run(&command, GUEST_OPERATION_TIMEOUT)?;
    ensure!(exit_status == 0, "`{command}` ended with status {exit_status}: {output}");
    Ok(output)
}

fn check_package_installation(guest: &mut QemuGuest) -> Result<String> {
    guest.run_successfully("systemctl restart nginx")?;
    run_apt_get(guest, "install /root/debs/old/*.deb")?;
    for daemon in DAEMON_NAMES {
        let [active_state, enabled_state] = read_unit_properties(guest, daemon, ["ActiveState", "UnitFileState"])?;
        ensure!(
            (active_state.as_str(), enabled_state.as_str()) == ("inactive", "disabled"),
            "{daemon}: {active_state}, {enabled_state}"
        );
    }
    Ok(guest.run_successfully("dpkg-query -W -f '${Package} ${Version} ' 'coreward*'")?.trim().to_owned())
}

fn check_unit_start(guest: &mut QemuGuest) -> Result<String> {
    for daemon in DAEMON_NAMES {
        let (exit_status, output) =
            guest.try_run(&format!("systemctl enable --now {} 2>&1", unit_name(daemon)), GUEST_OPERATION_TIMEOUT)?;
        ensure!(exit_status == 0, "{daemon}: {output}");
    }
    let pids = query_main_pids(guest)?;
    retry_until_ok(DAEMON_SETTLE_TIMEOUT, || send_request(guest, 80))?;
    Ok(format!("processes {pids:?}"))
}

fn send_request(guest: &mut QemuGuest, port: u16) -> Result<()> {
    guest.run_successfully(&format!("ip netns exec client timeout 10 bash /etc/test-request {port}")).map(drop)
}

/// Checks how the kernel actually confines each daemon's process, whatever the daemon's unit file demands.
fn check_confinement(guest: &mut QemuGuest) -> Result<String> {
    let systemd_warnings =
        guest.run_successfully("journalctl --no-pager -q -b _PID=1 -p warning -o cat | grep coreward || true")?;
    ensure!(systemd_warnings.trim().is_empty(), "systemd complains: {systemd_warnings}");
    guest.run_successfully("touch /home/visible")?;
    let mut capability_counts = Vec::new();
    for daemon in DAEMON_NAMES {
        let capability_count = check_daemon_confinement(guest, daemon).with_context(|| unit_name(daemon))?;
        capability_counts.push(format!("{daemon} {capability_count}"));
    }
    Ok(format!("capabilities: {}", capability_counts.join(", ")))
}

/// Checks the confinement of one daemon. Returns the number of capabilities in its bounding set.
fn check_daemon_confinement(guest: &mut QemuGuest, daemon: &str) -> Result<usize> {
    let pid = query_main_pid(guest, daemon)?;
    let [unit_capabilities, user] = read_unit_properties(guest, daemon, ["CapabilityBoundingSet", "User"])?;
    let process_status = guest.run_successfully(&format!("cat /proc/{pid}/status"))?;
    let read_status_field = |name: &str| {
        let value = process_status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        value.with_context(|| format!("process {pid} has no field {name} in {process_status:?}"))
    };
    ensure!(
        read_status_field("NoNewPrivs:")? == "1",
        "process {pid} may gain privileges, expected NoNewPrivs 1: {process_status}"
    );
    ensure!(
        read_status_field("Seccomp:")? == "2",
        "process {pid} has no system call filter, expected Seccomp 2: {process_status}"
    );
    let bounding_capability_count = u64::from_str_radix(read_status_field("CapBnd:")?, 16)
        .with_context(|| process_status.clone())?
        .count_ones() as usize;
    let expected_capability_count = unit_capabilities.split_whitespace().count();
    ensure!(
        bounding_capability_count == expected_capability_count,
        "{bounding_capability_count} capabilities, expected {expected_capability_count} ({unit_capabilities}): \
         {process_status}"
    );
    for capability_set in ["CapInh:", "CapAmb:"] {
        let is_capability_set_empty = u64::from_str_radix(read_status_field(capability_set)?, 16) == Ok(0);
        ensure!(
            is_capability_set_empty,
            "{capability_set} is not empty, but the daemon drops what it inherits: {process_status}"
        );
    }
    ensure!(
        user.is_empty() == read_status_field("Uid:")?.starts_with('0'),
        "expected user {user:?}, found {process_status}"
    );
    check_forbidden_commands(guest, daemon, pid)?;
    Ok(bounding_capability_count)
}

/// Checks that the mount namespace of a daemon's process protects the system's files and hides those of users.
fn check_forbidden_commands(guest: &mut QemuGuest, daemon: &str, pid: u32) -> Result<()> {
    for forbidden_command in ["touch /usr/probe", "touch /etc/coreward/probe", "ls /home/visible"] {
        let (exit_status, output) =
            guest.try_run(&format!("nsenter -t {pid} -m {forbidden_command} 2>&1"), DAEMON_SETTLE_TIMEOUT)?;
        ensure!(exit_status != 0, "process {pid} may {forbidden_command}: {output}");
        // nsenter also fails if the process has ended, because there is no namespace to enter then.
        let current_pid = query_main_pid(guest, daemon)?;
        ensure!(current_pid == pid, "process {pid} became {current_pid} meanwhile");
    }
    Ok(())
}

/// Checks that the orchestrator receives a request to a service whose port is below 1024. The request then waits,
/// because there is no worker.
fn check_orchestrator_requests(guest: &mut QemuGuest) -> Result<String> {
    guest.run_successfully("printf request > /dev/udp/10.2.0.11/400")?;
    wait_for_orchestrator_metric(guest, "coreward_orchestrate_waiting_requests{service=\"0\"}")
}

/// Waits until a metric of the orchestrator is not 0, and returns its line on the metrics page.
fn wait_for_orchestrator_metric(guest: &mut QemuGuest, metric: &str) -> Result<String> {
    let metrics_command =
        "exec 3<>/dev/tcp/127.0.0.1/7440; printf \"GET /metrics HTTP/1.0\\r\\n\\r\\n\" >&3; timeout 5 cat <&3";
    retry_until_ok(DAEMON_SETTLE_TIMEOUT, || {
        let metrics_page = guest.run_successfully(&format!("bash -c '{metrics_command}'"))?;
        let metric_line = metrics_page.lines().find(|line| line.starts_with(metric));
        let metric_line = metric_line.with_context(|| format!("no {metric} in {metrics_page:?}"))?;
        ensure!(!metric_line.ends_with(" 0.0"), "{metric_line}");
        Ok(metric_line.to_owned())
    })
}

/// Checks that the orchestrator receives requests by AF_XDP, with the drop-in from the package's examples.
fn check_orchestrator_with_af_xdp(guest: &mut QemuGuest) -> Result<String> {
    guest.run_successfully(
        "directory=/etc/systemd/system/coreward-orchestrate.service.d; mkdir -p $directory && cp \
         /usr/share/doc/coreward-orchestrate/examples/orchestrate-af-xdp.conf $directory/af-xdp.conf && sed -i '1i \
         intake = \"af-xdp\"\\ninterface = \"srv0\"' /etc/coreward/orchestrate.toml && systemctl daemon-reload && \
         systemctl restart coreward-orchestrate",
    )?;
    wait_for_orchestrator_metric(guest, "coreward_orchestrate_intake{mode=\"af-xdp\"}")?;
    guest.run_successfully("ip netns exec client bash -c 'printf request > /dev/udp/10.2.0.11/400'")?;
    wait_for_orchestrator_metric(guest, "coreward_orchestrate_intake_datagrams_total{outcome=\"received\"}")
}

fn check_new_connections(guest: &mut QemuGuest) -> Result<String> {
    for connection_index in 0..NEW_CONNECTION_COUNT {
        send_request(guest, 80).with_context(|| format!("connection {connection_index}"))?;
    }
    // Finding the service's workers needs the capabilities of the agent's unit.
    let check_no_steering_warning = || guest.run_successfully("! coreward status | grep '! s1: 10.200.0.1:80'");
    retry_until_ok(DAEMON_SETTLE_TIMEOUT, check_no_steering_warning)?;
    let unit_options = "-p NetworkNamespacePath=/run/netns/client -p StandardOutput=truncate:/run/test-load";
    guest.run_successfully(&format!("systemd-run -q --unit test-load {unit_options} bash /etc/test-load"))?;
    guest.run_successfully("mkfifo /run/test-hold.in /run/test-hold.out")?;
    let unit_options = "-p NetworkNamespacePath=/run/netns/client";
    guest.run_successfully(&format!(
        "systemd-run -q --unit test-hold {unit_options} bash /etc/test-hold {OPEN_CONNECTION_COUNT}"
    ))?;
    check_held_connections(guest)
}

/// Sends requests over the held connections. Fails unless these requests, and all new connections so far, were served.
fn check_held_connections(guest: &mut QemuGuest) -> Result<String> {
    let answered_request_count =
        guest.run_successfully("timeout 50 sh -c 'echo > /run/test-hold.in; cat /run/test-hold.out'")?;
    ensure!(
        answered_request_count.trim() == OPEN_CONNECTION_COUNT.to_string(),
        "{} of {OPEN_CONNECTION_COUNT} held connections were served",
        answered_request_count.trim()
    );
    let [served_result, failed_result] = ["served", "failed"].map(|outcome| {
        guest
            .run_successfully(&format!("grep -c {outcome} /run/test-load || true"))
            .map(|count| count.trim().to_owned())
    });
    let (served_count, failed_count) = (served_result?, failed_result?);
    ensure!(
        failed_count == "0" && served_count != "0",
        "{failed_count} new connections failed, {served_count} were served"
    );
    Ok(format!("{OPEN_CONNECTION_COUNT} held connections, {served_count} new ones, 0 failed"))
}

fn check_daemon_reload(guest: &mut QemuGuest) -> Result<String> {
    let pids_before = query_main_pids(guest)?;
    let added_service_toml =
        "[[service]]\\nname = \"more\"\\nvip = \"10.200.0.1:8080\"\\nconsistency = \"stateful\"\\n";
    guest.run_successfully(&format!(
        "printf '{added_service_toml}' >> /etc/coreward/fleet.toml && systemctl reload coreward-controller"
    ))?;
    retry_until_ok(DAEMON_SETTLE_TIMEOUT, || send_request(guest, 8080)).context("the service that was added")?;
    let (exit_status, _) = guest.try_run(
        "echo wrong >> /etc/coreward/controller.toml; systemctl reload coreward-controller",
        DAEMON_SETTLE_TIMEOUT,
    )?;
    ensure!(exit_status != 0, "a wrong controller.toml was taken");
    guest.run_successfully(
        "sed -i '/^wrong$/d' /etc/coreward/controller.toml && systemctl reload coreward-controller",
    )?;
    let added_dispatch_toml = "[[dispatch.service]]\\nlisten = \"0.0.0.0:5353\"\\npolicy = \"jsq\"\\n";
    guest.run_successfully(&format!(
        "printf '{added_dispatch_toml}' >> /etc/coreward/agent.toml && systemctl reload coreward-agent"
    ))?;
    retry_until_ok(DAEMON_SETTLE_TIMEOUT, || {
        guest.run_successfully("journalctl -q -o cat -u coreward-agent | grep -i dispatch")
    })?;
    let pids_after = query_main_pids(guest)?;
    ensure!(pids_after == pids_before, "the processes were {pids_before:?}, now {pids_after:?}");
    check_held_connections(guest)
}

fn check_package_upgrade(guest: &mut QemuGuest) -> Result<String> {
    let pids_before = query_main_pids(guest)?;
    run_apt_get(guest, "install /root/debs/new/*.deb")?;
    let pids_after = query_main_pids(guest)?;
    ensure!(
        pids_before.iter().zip(&pids_after).all(|(old, new)| old != new),
        "the processes were {pids_before:?}, now {pids_after:?}"
    );
    send_request(guest, 8080)?;
    let connection_summary = check_held_connections(guest)?;
    let version = guest.run_successfully("dpkg-query -W -f '${Version}' coreward-lb")?;
    Ok(format!("{}: {connection_summary}", version.trim()))
}

fn check_watchdog(guest: &mut QemuGuest) -> Result<String> {
    for daemon in DAEMON_NAMES {
        let pid = query_main_pid(guest, daemon)?;
        guest.run_successfully(&format!("kill -STOP {pid}"))?;
        retry_until_ok(DAEMON_SETTLE_TIMEOUT, || {
            let current_pid = query_main_pid(guest, daemon)?;
            if current_pid == pid {
                bail!("{daemon} is still process {pid}");
            }
            Ok(())
        })?;
        guest.run_successfully(&format!(
            "journalctl -q -o cat -b -u {} | grep -q 'Watchdog timeout'",
            unit_name(daemon)
        ))?;
        check_held_connections(guest).with_context(|| format!("after {daemon}"))?;
    }
    check_no_permission_errors(guest)?;
    check_held_connections(guest)
}

/// Checks that no daemon has logged a permission error since the guest was booted.
fn check_no_permission_errors(guest: &mut QemuGuest) -> Result<()> {
    let denial_messages = guest.run_successfully(&format!(
        "journalctl -q -o cat -u 'coreward-*' | grep -E '{PERMISSION_ERROR_PATTERN}' || true"
    ))?;
    ensure!(denial_messages.trim().is_empty(), "the daemons were denied: {denial_messages}");
    Ok(())
}

fn check_start_at_boot(guest: &mut QemuGuest) -> Result<String> {
    let pids = retry_until_ok(DAEMON_SETTLE_TIMEOUT, || query_main_pids(guest))?;
    retry_until_ok(DAEMON_SETTLE_TIMEOUT, || send_request(guest, 80))?;
    Ok(format!("processes {pids:?}"))
}

fn check_package_removal(guest: &mut QemuGuest) -> Result<String> {
    check_no_permission_errors(guest)?;
    run_apt_get(guest, &format!("remove {}", DAEMON_NAMES.map(|daemon| format!("coreward-{daemon}")).join(" ")))?;
    for daemon in DAEMON_NAMES {
        let (exit_status, _) =
            guest.try_run(&format!("systemctl is-active {}", unit_name(daemon)), DAEMON_SETTLE_TIMEOUT)?;
        ensure!(exit_status != 0, "{daemon} is active");
    }
    send_request(guest, 80).context("after the removal")?;
    guest.run_successfully("nsenter --net=/run/netns/lb coreward lb --config /etc/coreward/lb.toml --detach")?;
    ensure!(send_request(guest, 80).is_err(), "the load balancer forwards after --detach");
    guest.run_successfully("coreward agent --config /etc/coreward/agent.toml --detach")?;
    Ok("forwarded until --detach".to_owned())
}
