//! Test of whether `coreward doctor` finds faults. The test makes each misconfiguration in docs/operations.md, one
//! after the other, and doctor must report it and nothing else. `--fix` must repair the faults that are marked so.

mod controller_checks;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use coreward_testbed::addresses::{CONTROLLER_ADDRESS, FIRST_IPV4_VIP, HOST_DEVICE, load_balancer_address};
use coreward_testbed::fleet::{Fleet, TestbedFleetOptions, first_controller_address};
use coreward_testbed::rss_emulation::attach_xdp_pass_program;
use coreward_testbed::{
    NetworkNamespace, Testbed, TestbedOptions, TestbedProcess, find_missing_testbed_rights, skip_if,
};
use libbpf_rs::{MapHandle, MapType, libbpf_sys};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::assert_eventually;

/// Shell commands that set up a new mount namespace, in which doctor does not use the host's files. The namespace gets
/// the network namespace's /sys, the testbed's BPF file system, and an empty directory for sysctl's drop-in files. `$1`
/// is the mount point.
const ENTER_NAMESPACES_SCRIPT: &str = "set -e; mount --bind /sys/fs/bpf \"$1\"; mount -t sysfs sysfs /sys; \
                     if [ -d /etc/sysctl.d ]; then mount -t tmpfs tmpfs /etc/sysctl.d; fi; ";
const MOUNT_BPF_SCRIPT: &str = "mount --bind \"$1\" /sys/fs/bpf; ";
/// Shell commands that print doctor's report, a line with the exit code, and the drop-in file if it exists.
const RUN_DOCTOR_SCRIPT: &str =
    "shift; set +e; \"$@\"; code=$?; echo; echo \"exit $code\"; cat /etc/sysctl.d/90-coreward.conf 2>/dev/null; true";

#[derive(Clone, Copy, PartialEq, Eq)]
enum DoctorTestConditions {
    Normal,
    WithoutBpfFileSystem,
    LowFileLimit,
    WithoutCapabilities,
}

#[derive(Debug, Clone)]
struct DoctorReport {
    /// Messages of the checks that found a warning or fault, by the name of the check.
    findings: BTreeMap<String, String>,
    fix_messages: Vec<String>,
    is_success: bool,
    sysctl_drop_in: String,
}

struct DoctorTestEnv {
    testbed: Testbed,
    mount_point: PathBuf,
    nginx_process: Option<TestbedProcess>,
    /// Descriptions of differences from the expected reports. They are printed at the end of the test.
    failures: RefCell<Vec<String>>,
}

impl DoctorTestEnv {
    /// Returns the command that runs `coreward doctor` in its own mount namespace.
    fn build_doctor_command(
        &self,
        config: &Path,
        conditions: DoctorTestConditions,
        extra_arguments: &[&str],
    ) -> Command {
        let limit_script = if conditions == DoctorTestConditions::LowFileLimit { "ulimit -n 256; " } else { "" };
        let mount_script = if conditions == DoctorTestConditions::WithoutBpfFileSystem { "" } else { MOUNT_BPF_SCRIPT };
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c"]);
        command.arg(format!("{ENTER_NAMESPACES_SCRIPT}{mount_script}{limit_script}{RUN_DOCTOR_SCRIPT}"));
        command.arg("sh").arg(&self.mount_point);
        if conditions == DoctorTestConditions::WithoutCapabilities {
            command.args(["setpriv", "--bounding-set", "-bpf,-perfmon,-sys_admin"]);
        }
        command.arg(coreward_testbed::fleet::coreward_binary_path().unwrap());
        command.args(["doctor", "--format", "json", "--config"]).arg(config).args(extra_arguments);
        command.stderr(Stdio::null());
        command
    }

    fn run_doctor(
        &self,
        host: &NetworkNamespace,
        config: &Path,
        conditions: DoctorTestConditions,
        extra_arguments: &[&str],
    ) -> DoctorReport {
        let command = self.build_doctor_command(config, conditions, extra_arguments);
        let output = self.testbed.run_command(host, command).unwrap().stdout;
        let output = String::from_utf8(output).unwrap();
        let (report, exit_text) = output.split_once("\nexit ").unwrap_or_else(|| panic!("{output}"));
        let (exit_code, drop_in) = exit_text.split_once('\n').unwrap();
        let report: Value = serde_json::from_str(report).unwrap_or_else(|error| panic!("{error}: {report}"));
        let findings = report["findings"].as_array().unwrap().iter();
        let to_text = |value: &Value| value.as_str().unwrap().to_owned();
        let doctor_report = DoctorReport {
            findings: findings
                .filter(|finding| finding["severity"] == "warning" || finding["severity"] == "fault")
                .map(|finding| {
                    (
                        to_text(&finding["check"]),
                        format!("{}: {}", to_text(&finding["severity"]), to_text(&finding["found"])),
                    )
                })
                .collect(),
            fix_messages: report["fixed"].as_array().unwrap().iter().map(to_text).collect(),
            is_success: exit_code == "0",
            sysctl_drop_in: drop_in.to_owned(),
        };
        let has_faults = doctor_report.findings.values().any(|finding_text| finding_text.starts_with("fault"));
        assert_eq!(doctor_report.is_success, !has_faults, "the exit code is {exit_code}: {doctor_report:?}");
        doctor_report
    }

    fn run_script(&self, host: &NetworkNamespace, script: &str) {
        let mut command = Command::new("sh");
        command.args(["-ec", script]);
        self.testbed.run_command(host, command).unwrap();
    }

    fn record_failure_unless(&self, is_satisfied: bool, to_message: impl FnOnce() -> String) {
        if !is_satisfied {
            self.failures.borrow_mut().push(to_message());
        }
    }

    fn server_host(&self) -> &NetworkNamespace {
        self.testbed.server(1).unwrap()
    }

    fn run_script_with_private_sysfs(&self, host: &NetworkNamespace, script: &str) {
        let mut command = Command::new("unshare");
        let script_with_mount = format!("mount -t sysfs sysfs /sys; {script}");
        command.args(["--mount", "--propagation", "private", "sh", "-ec", &script_with_mount]);
        self.testbed.run_command(host, command).unwrap();
    }

    /// Starts two nginx workers on both services' ports, each with its own CPU (`has_pinned_workers`) or socket
    /// (`has_reuseport`).
    fn start_nginx(&mut self, has_pinned_workers: bool, has_reuseport: bool) {
        self.stop_nginx();
        let directory = self.testbed.directory().join("doctor-nginx");
        fs::create_dir_all(&directory).unwrap();
        let directory_path = directory.display();
        let affinity_line = if has_pinned_workers { "worker_cpu_affinity auto;" } else { "" };
        let reuseport_option = if has_reuseport { "reuseport" } else { "" };
        let path_lines: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|kind| format!("{kind}_temp_path {directory_path}/{kind};\n"))
            .concat();
        let nginx_config = format!(
            "user root; daemon off; worker_processes 2; {affinity_line} pid {directory_path}/pid; error_log \
             {directory_path}/error.log; \
             events {{}}\n\
             http \
             {{ access_log off; {path_lines} server {{ listen {FIRST_IPV4_VIP}:80 {reuseport_option}; \
             listen {FIRST_IPV4_VIP}:81 {reuseport_option}; }} }}\n"
        );
        let config_path = directory.join("nginx.conf");
        fs::write(&config_path, nginx_config).unwrap();
        let mut command = Command::new("nginx");
        command.arg("-c").arg(&config_path).arg("-e").arg(directory.join("error.log"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let nginx_process = self.testbed.spawn(self.server_host(), command).unwrap();
        let children_path = format!("/proc/{0}/task/{0}/children", nginx_process.pid());
        assert_eventually(Duration::from_secs(30), "nginx has two workers", || {
            fs::read_to_string(&children_path).unwrap_or_default().split_whitespace().count() == 2
        });
        self.nginx_process = Some(nginx_process);
    }

    fn stop_nginx(&mut self) {
        if let Some(mut nginx) = self.nginx_process.take() {
            // Terminate the master regularly, because killing it would leave the workers running.
            nginx.terminate(Duration::from_secs(30)).unwrap();
        }
    }
}

/// Host on which doctor runs, with its configuration file and the report of doctor before any fault.
struct CheckedHost {
    namespace: NetworkNamespace,
    config_path: PathBuf,
    baseline_report: DoctorReport,
}

impl CheckedHost {
    fn new(env: &DoctorTestEnv, host: &NetworkNamespace, config_path: PathBuf) -> Self {
        let baseline_report = env.run_doctor(host, &config_path, DoctorTestConditions::Normal, &[]);
        assert!(baseline_report.is_success, "{}: {baseline_report:?}", config_path.display());
        Self { namespace: host.clone(), config_path, baseline_report }
    }

    /// Asserts that `check` is the only finding that doctor reports in addition to the findings before any fault.
    fn assert_only_new_finding(
        &self,
        env: &DoctorTestEnv,
        description: &str,
        check: &str,
        conditions: DoctorTestConditions,
        extra_arguments: &[&str],
    ) {
        let doctor_report = env.run_doctor(&self.namespace, &self.config_path, conditions, extra_arguments);
        let new_findings: Vec<&String> =
            doctor_report.findings.keys().filter(|name| !self.baseline_report.findings.contains_key(*name)).collect();
        env.record_failure_unless(new_findings == [check], || {
            format!("{description}: expected {check} alone: {doctor_report:?}; before: {:?}", self.baseline_report)
        });
        println!("{description}: {check}, {:?}", doctor_report.findings.get(check));
    }

    /// Returns this host with a modified configuration file. `replacements` has pairs (old text, new text), and
    /// `extra_config` is appended.
    fn with_replaced_config_text(&self, replacements: &[(&str, &str)], extra_config: &str) -> Self {
        let mut config_text = fs::read_to_string(&self.config_path).unwrap();
        for (old_text, new_text) in replacements {
            assert!(config_text.contains(old_text), "{old_text}: {config_text}");
            config_text = config_text.replace(old_text, new_text);
        }
        let other_config_path = self.config_path.with_extension("other.toml");
        fs::write(&other_config_path, format!("{extra_config}{config_text}")).unwrap();
        Self {
            namespace: self.namespace.clone(),
            config_path: other_config_path,
            baseline_report: self.baseline_report.clone(),
        }
    }

    fn assert_no_new_finding(&self, env: &DoctorTestEnv, previous_step: &str) {
        let doctor_report = env.run_doctor(&self.namespace, &self.config_path, DoctorTestConditions::Normal, &[]);
        let collect_check_names = |report: &DoctorReport| report.findings.keys().cloned().collect::<Vec<_>>();
        env.record_failure_unless(
            collect_check_names(&doctor_report) == collect_check_names(&self.baseline_report),
            || format!("after {previous_step}: {doctor_report:?}"),
        );
    }

    /// Injects a fault by a shell script, asserts that doctor detects it, and undoes it by a second script.
    fn assert_fault_detected(&self, env: &DoctorTestEnv, check: &str, inject_script: &str, undo_script: &str) {
        env.run_script(&self.namespace, inject_script);
        self.assert_only_new_finding(env, inject_script, check, DoctorTestConditions::Normal, &[]);
        env.run_script(&self.namespace, undo_script);
        self.assert_no_new_finding(env, inject_script);
    }

    /// Asserts that doctor detects a fault, and that doctor's option `--fix` repairs the fault and reports the repair.
    fn assert_fault_fixed(
        &self,
        env: &DoctorTestEnv,
        check: &str,
        inject_script: &str,
        conditions: DoctorTestConditions,
    ) -> DoctorReport {
        self.assert_only_new_finding(env, inject_script, check, conditions, &[]);
        let doctor_report = env.run_doctor(&self.namespace, &self.config_path, conditions, &["--fix"]);
        env.record_failure_unless(!doctor_report.findings.contains_key(check), || {
            format!("{inject_script}: not fixed: {doctor_report:?}")
        });
        let is_fixed = !doctor_report.fix_messages.is_empty()
            && doctor_report.fix_messages.iter().all(|line| !line.starts_with("NOT"));
        env.record_failure_unless(is_fixed, || format!("{inject_script}: {doctor_report:?}"));
        println!("{inject_script}: {}", doctor_report.fix_messages.join("; "));
        doctor_report
    }
}

/// Starts a testbed with two services and two workers for each. Servers write the cookies of one service, and load
/// balancers write those of the other.
fn start_env() -> (DoctorTestEnv, Fleet, CheckedHost, CheckedHost, CheckedHost) {
    let options = TestbedOptions {
        instance_name: "doctor".to_owned(),
        server_count: 1,
        core_count: 2,
        ..TestbedOptions::default()
    };
    let mut testbed = Testbed::create(options).unwrap();
    let lb_stamped_service =
        format!("\n[[service]]\nname = \"old\"\nvip = \"{FIRST_IPV4_VIP}:81\"\npolicy = \"rr\"\ntimestamps = \"lb\"\n");
    testbed.server(1).unwrap().set_sysctls(&[("ipv4/tcp_timestamps", "2")]).unwrap();
    let server_routes =
        [("ipv4/ip_forward", "1"), ("ipv4/conf/all/send_redirects", "0"), ("ipv4/conf/eth0/send_redirects", "0")];
    testbed.load_balancer(1).unwrap().set_sysctls(&server_routes).unwrap();
    let fleet_options = TestbedFleetOptions {
        extra_fleet_text: lb_stamped_service,
        runs_agents: false,
        ..TestbedFleetOptions::default()
    };
    let fleet = Fleet::start(&testbed, fleet_options).unwrap();
    // Add a load balancer without a daemon, which doctor checks before the daemon's first start.
    let second_lb = testbed.add_load_balancer().unwrap();
    testbed.load_balancer(second_lb).unwrap().set_sysctls(&server_routes).unwrap();
    let directory = testbed.directory();
    let second_lb_config = fs::read_to_string(directory.join("lb1.toml")).unwrap().replace("lb1", "lb2");
    fs::write(directory.join("doctor-lb2.toml"), second_lb_config).unwrap();
    let pin_directory = testbed.pin_directory().join("doctor-s1");
    let agent_config = format!(
        "server = \"s1\"\ncontroller = \"{}\"\ninterface = \"{HOST_DEVICE}\"\npin_directory = \
         \"{}\"\nmanage_timestamps = \
         false\n\
         rss = {{ source = \"testbed\", path = \"{}\" }}\n",
        first_controller_address(),
        pin_directory.display(),
        testbed.emulated_rss_pin_path(1).display(),
    );
    fs::write(directory.join("doctor-s1.toml"), agent_config).unwrap();
    let mount_point = directory.join("doctor-bpf");
    fs::create_dir_all(&mount_point).unwrap();
    let mut env = DoctorTestEnv { testbed, mount_point, nginx_process: None, failures: RefCell::default() };
    env.start_nginx(true, true);
    let server_host = CheckedHost::new(&env, env.server_host(), directory.join("doctor-s1.toml"));
    let lb_host =
        CheckedHost::new(&env, env.testbed.load_balancer(second_lb).unwrap(), directory.join("doctor-lb2.toml"));
    let controller_host = CheckedHost::new(&env, env.testbed.controller(), directory.join("controller.toml"));
    (env, fleet, server_host, lb_host, controller_host)
}

#[test]
fn doctor_names_every_injected_misconfiguration() {
    skip_if!(find_missing_testbed_rights());
    let (mut env, mut fleet, server, balancer, controller) = start_env();
    check_server_addresses(&env, &server);
    check_server_kernel(&env, &server);
    check_server_workers(&mut env, &server);
    check_load_balancer(&env, &balancer);
    check_load_balancer_addresses(&env, &balancer);
    controller_checks::check_controller_settings(&env, &controller);

    // Running daemons must not cause a fault either.
    let doctor_report = env.run_doctor(
        env.testbed.load_balancer(1).unwrap(),
        &env.testbed.directory().join("lb1.toml"),
        DoctorTestConditions::Normal,
        &[],
    );
    assert!(doctor_report.is_success, "{doctor_report:?}");
    fleet.start_agent(&env.testbed, 1).unwrap();
    let agent_config_path = env.testbed.directory().join("agent-s1.toml");
    let state_pin = env.testbed.pin_directory().join("agent-s1/server/state");
    assert_eventually(Duration::from_secs(30), "the agent has pinned its state", || state_pin.exists());
    let doctor_report = env.run_doctor(env.server_host(), &agent_config_path, DoctorTestConditions::Normal, &[]);
    assert!(doctor_report.is_success, "{doctor_report:?}");
    check_frames_dropped_by_veth(&env);
    let failures = env.failures.take();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    env.stop_nginx();
    fleet.daemon_process("controller").unwrap().send_signal(Signal::SIGTERM).unwrap();
}

/// Checks doctor's report when a switch drops the frames that a running load balancer sends by XDP. This check must be
/// the last one, because the driver's counter keeps its value.
fn check_frames_dropped_by_veth(env: &DoctorTestEnv) {
    env.run_script(env.testbed.switch(), "ip link set dev lb1 xdp off; ethtool -K lb1 gro off");
    let lb_config_path = env.testbed.directory().join("lb1.toml");
    let can_connect = || {
        let service_address = coreward_testbed::addresses::SERVICE_ADDRESS.into();
        Ok(std::net::TcpStream::connect_timeout(&service_address, Duration::from_millis(300)).is_ok())
    };
    assert_eventually(Duration::from_secs(30), "frames are dropped and named", || {
        assert!(
            !env.testbed.client().run_within(can_connect).unwrap(),
            "a connection through a switch that takes no frames"
        );
        let doctor_report =
            env.run_doctor(env.testbed.load_balancer(1).unwrap(), &lb_config_path, DoctorTestConditions::Normal, &[]);
        doctor_report.findings.contains_key("xdp-send")
    });
    // With GRO alone, veth accepts the frames and delivers none.
    env.run_script(env.testbed.switch(), "ethtool -K lb1 gro on");
    let report =
        env.run_doctor(env.testbed.load_balancer(1).unwrap(), &lb_config_path, DoctorTestConditions::Normal, &[]);
    let is_missing_xdp_program_reported =
        report.findings.get("xdp-send").is_some_and(|finding_text| finding_text.contains("has no XDP program"));
    env.record_failure_unless(is_missing_xdp_program_reported, || {
        format!("GRO alone at the other end of a veth: {report:?}")
    });
}

fn check_server_addresses(env: &DoctorTestEnv, server: &CheckedHost) {
    let add_vip_command = format!("ip address add {FIRST_IPV4_VIP}/32 dev lo");
    server.assert_fault_detected(
        env,
        "vip",
        &format!("ip address delete {FIRST_IPV4_VIP}/32 dev lo"),
        &add_vip_command,
    );
    let vip_on_device_command = format!("ip address add {FIRST_IPV4_VIP}/32 dev {HOST_DEVICE}");
    server.assert_fault_detected(
        env,
        "vip",
        &vip_on_device_command,
        &format!("ip address delete {FIRST_IPV4_VIP}/32 dev {HOST_DEVICE}"),
    );
    for (check, name, correct_value) in [("arp-ignore", "arp_ignore", "1"), ("arp-announce", "arp_announce", "2")] {
        let set_sysctl_command =
            |device: &str, value: &str| format!("echo {value} > /proc/sys/net/ipv4/conf/{device}/{name}");
        env.run_script(&server.namespace, &set_sysctl_command("all", "0"));
        let doctor_report =
            server.assert_fault_fixed(env, check, &set_sysctl_command("all", "0"), DoctorTestConditions::Normal);
        if Path::new("/etc/sysctl.d").is_dir() {
            env.record_failure_unless(
                doctor_report
                    .sysctl_drop_in
                    .contains(&format!("\nnet.ipv4.conf.{HOST_DEVICE}.{name} = {correct_value}\n")),
                || format!("{doctor_report:?}"),
            );
        }
        env.run_script(
            &server.namespace,
            &format!("{}; {}", set_sysctl_command("all", correct_value), set_sysctl_command(HOST_DEVICE, "0")),
        );
        server.assert_no_new_finding(env, name);
    }
}

fn check_steering(env: &DoctorTestEnv, server: &CheckedHost) {
    let steering_command = format!("echo 3 > /sys/class/net/{HOST_DEVICE}/queues/rx-0/rps_cpus");
    if std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1) {
        env.run_script_with_private_sysfs(&server.namespace, &steering_command);
        server.assert_fault_fixed(env, "rps", &steering_command, DoctorTestConditions::Normal);
        server.assert_no_new_finding(env, &steering_command);
        server.assert_fault_detected(
            env,
            "queues",
            &format!("ethtool -L {HOST_DEVICE} rx 1"),
            &format!("ethtool -L {HOST_DEVICE} rx 2"),
        );
    }
}

fn check_packet_filters(env: &DoctorTestEnv, server: &CheckedHost) {
    let add_chain_command = "nft add table ip doctor; nft 'add chain ip doctor input { type filter hook input priority \
                 0; policy accept; }'";
    let delete_table_command = "nft delete table ip doctor";
    let track_connections_command =
        format!("{add_chain_command}; nft add rule ip doctor input ct state established accept");
    server.assert_fault_detected(env, "conntrack", &track_connections_command, delete_table_command);
    let accept_controller_command = format!("nft add rule ip doctor input ip saddr {CONTROLLER_ADDRESS} accept");
    let drop_all_command = "nft 'add chain ip doctor input { type filter hook input priority 0; policy drop; }'";
    server.assert_fault_detected(
        env,
        "firewall",
        &format!("{add_chain_command}; {accept_controller_command}; {drop_all_command}"),
        delete_table_command,
    );
}

fn check_pins(env: &DoctorTestEnv, server: &CheckedHost) {
    let state_pin = env.testbed.pin_directory().join("doctor-s1/server/state");
    fs::create_dir_all(state_pin.parent().unwrap()).unwrap();
    let options =
        libbpf_sys::bpf_map_create_opts { sz: size_of::<libbpf_sys::bpf_map_create_opts>() as _, ..Default::default() };
    let mut old_state_map = MapHandle::create(MapType::Array, Some("state"), 4, 64, 1, &options).unwrap();
    old_state_map.pin(&state_pin).unwrap();
    server.assert_only_new_finding(
        env,
        "a map of 64 bytes is pinned as the server's state",
        "pins",
        DoctorTestConditions::Normal,
        &[],
    );
    fs::remove_file(&state_pin).unwrap();
    server.assert_no_new_finding(env, "pins");
}

fn check_server_kernel(env: &DoctorTestEnv, server: &CheckedHost) {
    let rp_filter_sysctl = format!("conf/{HOST_DEVICE}/rp_filter");
    for (check, sysctl, correct_value) in
        [("rp-filter", rp_filter_sysctl.as_str(), 0), ("tcp-timestamps", "tcp_timestamps", 2)]
    {
        let build_set_command = |value: u8| format!("echo {value} > /proc/sys/net/ipv4/{sysctl}");
        server.assert_fault_detected(env, check, &build_set_command(1), &build_set_command(correct_value));
    }
    check_steering(env, server);
    check_packet_filters(env, server);
    check_pins(env, server);
    let unused_address = format!("{CONTROLLER_ADDRESS}:7399");
    server.assert_only_new_finding(
        env,
        "a port at which no controller listens",
        "controller",
        DoctorTestConditions::Normal,
        &["--controller", &unused_address],
    );
}

fn check_server_workers(env: &mut DoctorTestEnv, server: &CheckedHost) {
    env.stop_nginx();
    server.assert_only_new_finding(env, "no process listens", "listeners", DoctorTestConditions::Normal, &[]);
    env.start_nginx(true, false);
    server.assert_only_new_finding(env, "sockets without SO_REUSEPORT", "listeners", DoctorTestConditions::Normal, &[]);
    // On a machine with one CPU every worker is pinned.
    if std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1) {
        env.start_nginx(false, true);
        server.assert_only_new_finding(
            env,
            "workers that are not pinned",
            "workers",
            DoctorTestConditions::Normal,
            &[],
        );
    }
    env.start_nginx(true, true);
    server.assert_no_new_finding(env, "workers");
    let pid_file = env.testbed.directory().join("polling.pid");
    let poll_command = "timeout 60 taskset -c 0 sh -c 'while :; do :; done'";
    let inject_command = format!("{poll_command} > /dev/null 2>&1 & echo $! > {}", pid_file.display());
    server.assert_fault_detected(env, "polling", &inject_command, &format!("kill $(cat {})", pid_file.display()));
}

fn check_load_balancer(env: &DoctorTestEnv, balancer: &CheckedHost) {
    balancer.assert_only_new_finding(env, "ulimit -n 256", "open-files", DoctorTestConditions::LowFileLimit, &[]);
    balancer.assert_only_new_finding(
        env,
        "no CAP_BPF, no CAP_PERFMON",
        "rights",
        DoctorTestConditions::WithoutCapabilities,
        &[],
    );
    balancer.assert_fault_fixed(
        env,
        "bpf-file-system",
        "no BPF file system",
        DoctorTestConditions::WithoutBpfFileSystem,
    );
    balancer.assert_only_new_finding(
        env,
        "an interface that is not there",
        "interface",
        DoctorTestConditions::Normal,
        &["--interface", "nonexistent0"],
    );
    attach_xdp_pass_program(&balancer.namespace, HOST_DEVICE).unwrap();
    balancer.assert_only_new_finding(env, "another XDP program", "xdp", DoctorTestConditions::Normal, &[]);
    env.run_script(&balancer.namespace, &format!("ip link set dev {HOST_DEVICE} xdp off"));
    balancer.assert_no_new_finding(env, "xdp");
    // Remove the switch's XDP program first, because veth rejects such an MTU with a program at either end.
    env.run_script(env.testbed.switch(), "ip link set dev lb2 xdp off");
    env.run_script(&balancer.namespace, &format!("ip link set dev {HOST_DEVICE} mtu 9000"));
    let native_mode_host = balancer.with_replaced_config_text(&[], "xdp_mode = \"native\"\n");
    native_mode_host.assert_only_new_finding(env, "an MTU of 9000", "mtu", DoctorTestConditions::Normal, &[]);
    env.run_script(&balancer.namespace, &format!("ip link set dev {HOST_DEVICE} mtu 1500"));
    balancer.assert_no_new_finding(env, "mtu");
}

fn check_load_balancer_addresses(env: &DoctorTestEnv, balancer: &CheckedHost) {
    let sysctl_directory = format!("/proc/sys/net/ipv4/conf/{HOST_DEVICE}");
    let delete_address_command = format!("ip address delete {FIRST_IPV4_VIP}/32 dev {HOST_DEVICE}");
    balancer.assert_fault_detected(
        env,
        "vip",
        &format!("ip address add {FIRST_IPV4_VIP}/32 dev {HOST_DEVICE}"),
        &delete_address_command,
    );
    let own_address = load_balancer_address(2);
    let narrow_prefix_command = format!(
        "ip address delete {own_address}/16 dev {HOST_DEVICE}; ip address add {own_address}/24 dev {HOST_DEVICE}; ip \
         route add {CONTROLLER_ADDRESS} dev {HOST_DEVICE}"
    );
    let wide_prefix_command = format!(
        "ip route delete {CONTROLLER_ADDRESS}; ip address delete {own_address}/24 dev {HOST_DEVICE}; ip address add \
         {own_address}/16 dev {HOST_DEVICE}"
    );
    balancer.assert_fault_detected(env, "segment", &narrow_prefix_command, &wide_prefix_command);
    balancer.assert_fault_detected(
        env,
        "forwarding",
        &format!("echo 0 > {sysctl_directory}/forwarding"),
        &format!("echo 1 > {sysctl_directory}/forwarding"),
    );
    balancer.assert_fault_detected(
        env,
        "rp-filter",
        &format!("echo 1 > {sysctl_directory}/rp_filter"),
        &format!("echo 0 > {sysctl_directory}/rp_filter"),
    );
    let redirects_command = "echo 1 > /proc/sys/net/ipv4/conf/all/send_redirects";
    env.run_script(&balancer.namespace, redirects_command);
    balancer.assert_fault_fixed(env, "send-redirects", redirects_command, DoctorTestConditions::Normal);
    balancer.assert_no_new_finding(env, redirects_command);
}
