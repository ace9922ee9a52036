//! `coreward doctor` finds faults. The test makes each misconfiguration of docs/operations.md, one after the other;
//! doctor must report it and nothing else. `--fix` repairs the faults that are marked so.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use coreward_testbed::addresses::{CONTROLLER_ADDRESS, DEVICE, VIP, load_balancer_address};
use coreward_testbed::fleet::{Fleet, FleetOptions, first_controller_address};
use coreward_testbed::rss_emulation::attach_xdp_pass;
use coreward_testbed::{Namespace, Process, Testbed, TestbedOptions, missing_testbed_rights, skip_if};
use libbpf_rs::{MapHandle, MapType, libbpf_sys};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::eventually;

/// Shell commands for new mount namespaces: /sys of the network namespace, the testbed's BPF file system, and an empty
/// directory for sysctl's drop-in files. None of them is the host's. `$1`: directory to mount at.
const ENTER_NAMESPACES: &str = "set -e; mount --bind /sys/fs/bpf \"$1\"; mount -t sysfs sysfs /sys; \
                     if [ -d /etc/sysctl.d ]; then mount -t tmpfs tmpfs /etc/sysctl.d; fi; ";
const BPF_FILE_SYSTEM: &str = "mount --bind \"$1\" /sys/fs/bpf; ";
/// Shell commands that print doctor's report, then a line with the exit code, then the drop-in file if it exists.
const RUN_DOCTOR: &str =
    "shift; set +e; \"$@\"; code=$?; echo; echo \"exit $code\"; cat /etc/sysctl.d/90-coreward.conf 2>/dev/null; true";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Conditions {
    Plain,
    WithoutBpfFileSystem,
    FewFiles,
    WithoutRights,
}

#[derive(Debug, Clone)]
struct DoctorReport {
    /// Messages of the checks that found a warning or fault, by the name of the check.
    findings: BTreeMap<String, String>,
    fixed: Vec<String>,
    is_success: bool,
    drop_in: String,
}

struct TestEnv {
    testbed: Testbed,
    mount_point: PathBuf,
    nginx: Option<Process>,
    /// Differences from the expected reports, all printed at the end.
    failures: RefCell<Vec<String>>,
}

impl TestEnv {
    fn doctor(&self, host: &Namespace, config: &Path, conditions: Conditions, more: &[&str]) -> DoctorReport {
        let limits = match conditions {
            Conditions::FewFiles => "ulimit -n 256; ",
            _ => "",
        };
        let mounts = if conditions == Conditions::WithoutBpfFileSystem { "" } else { BPF_FILE_SYSTEM };
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            &format!("{ENTER_NAMESPACES}{mounts}{limits}{RUN_DOCTOR}"),
            "sh",
        ]);
        command.arg(&self.mount_point);
        if conditions == Conditions::WithoutRights {
            command.args(["setpriv", "--bounding-set", "-bpf,-perfmon,-sys_admin"]);
        }
        command.arg(coreward_testbed::fleet::coreward_command().unwrap());
        command.args(["doctor", "--format", "json", "--config"]).arg(config).args(more);
        command.stderr(Stdio::null());
        let output = self.testbed.run(host, command).unwrap().stdout;
        let output = String::from_utf8(output).unwrap();
        let (report, rest) = output.split_once("\nexit ").unwrap_or_else(|| panic!("{output}"));
        let (code, drop_in) = rest.split_once('\n').unwrap();
        let report: Value = serde_json::from_str(report).unwrap_or_else(|error| panic!("{error}: {report}"));
        let findings = report["findings"].as_array().unwrap().iter();
        let words = |value: &Value| value.as_str().unwrap().to_owned();
        let printed = DoctorReport {
            findings: findings
                .filter(|finding| finding["severity"] == "warning" || finding["severity"] == "fault")
                .map(|finding| {
                    (words(&finding["check"]), format!("{}: {}", words(&finding["severity"]), words(&finding["found"])))
                })
                .collect(),
            fixed: report["fixed"].as_array().unwrap().iter().map(words).collect(),
            is_success: code == "0",
            drop_in: drop_in.to_owned(),
        };
        let faults = printed.findings.values().any(|found| found.starts_with("fault"));
        assert_eq!(printed.is_success, !faults, "the exit code is {code}: {printed:?}");
        printed
    }

    fn shell(&self, host: &Namespace, script: &str) {
        let mut command = Command::new("sh");
        command.args(["-ec", script]);
        self.testbed.run(host, command).unwrap();
    }

    fn record_unless(&self, holds: bool, otherwise: impl FnOnce() -> String) {
        if !holds {
            self.failures.borrow_mut().push(otherwise());
        }
    }

    fn server(&self) -> &Namespace {
        self.testbed.server(1).unwrap()
    }

    fn shell_with_sys(&self, host: &Namespace, script: &str) {
        let mut command = Command::new("unshare");
        let script = format!("mount -t sysfs sysfs /sys; {script}");
        command.args(["--mount", "--propagation", "private", "sh", "-ec", &script]);
        self.testbed.run(host, command).unwrap();
    }

    /// Starts two nginx workers on both services' ports, each with its own CPU (`pinned`) or socket (`reuseport`).
    fn serve(&mut self, pinned: bool, reuseport: bool) {
        self.stop_serving();
        let directory = self.testbed.directory().join("doctor-nginx");
        fs::create_dir_all(&directory).unwrap();
        let place = directory.display();
        let affinity = if pinned { "worker_cpu_affinity auto;" } else { "" };
        let reuseport = if reuseport { "reuseport" } else { "" };
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|kind| format!("{kind}_temp_path {place}/{kind};\n"))
            .concat();
        let text = format!(
            "user root; daemon off; worker_processes 2; {affinity} pid {place}/pid; error_log {place}/error.log; \
             events {{}}\n\
             http {{ access_log off; {temporary} server {{ listen {VIP}:80 {reuseport}; listen {VIP}:81 {reuseport}; \
             }} }}\n"
        );
        let configuration = directory.join("nginx.conf");
        fs::write(&configuration, text).unwrap();
        let mut command = Command::new("nginx");
        command.arg("-c").arg(&configuration).arg("-e").arg(directory.join("error.log"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let nginx = self.testbed.spawn(self.server(), command).unwrap();
        let children = format!("/proc/{0}/task/{0}/children", nginx.pid());
        eventually(Duration::from_secs(30), "nginx has two workers", || {
            fs::read_to_string(&children).unwrap_or_default().split_whitespace().count() == 2
        });
        self.nginx = Some(nginx);
    }

    fn stop_serving(&mut self) {
        if let Some(mut nginx) = self.nginx.take() {
            // Killing the master would leave the workers running.
            nginx.terminate(Duration::from_secs(30)).unwrap();
        }
    }
}

/// Host with its configuration file, and doctor's report before any fault is injected.
struct CheckedHost {
    host: Namespace,
    config: PathBuf,
    baseline: DoctorReport,
}

impl CheckedHost {
    fn new(env: &TestEnv, host: &Namespace, config: PathBuf) -> Self {
        let baseline = env.doctor(host, &config, Conditions::Plain, &[]);
        assert!(baseline.is_success, "{}: {baseline:?}", config.display());
        Self { host: host.clone(), config, baseline }
    }

    /// Asserts that doctor finds the problem `check` in addition to the baseline, and nothing else.
    fn assert_only_new_finding(&self, env: &TestEnv, what: &str, check: &str, conditions: Conditions, more: &[&str]) {
        let printed = env.doctor(&self.host, &self.config, conditions, more);
        let new: Vec<&String> =
            printed.findings.keys().filter(|name| !self.baseline.findings.contains_key(*name)).collect();
        env.record_unless(new == [check], || {
            format!("{what}: expected {check} alone: {printed:?}; before: {:?}", self.baseline)
        });
        println!("{what}: {check}, {:?}", printed.findings.get(check));
    }

    /// Returns this host with another configuration file: with replacements in the text, and `more` lines.
    fn with_replacements(&self, replace: &[(&str, &str)], more: &str) -> Self {
        let mut text = fs::read_to_string(&self.config).unwrap();
        for (from, to) in replace {
            assert!(text.contains(from), "{from}: {text}");
            text = text.replace(from, to);
        }
        let config = self.config.with_extension("other.toml");
        fs::write(&config, format!("{more}{text}")).unwrap();
        Self { host: self.host.clone(), config, baseline: self.baseline.clone() }
    }

    fn assert_no_new_finding(&self, env: &TestEnv, after: &str) {
        let printed = env.doctor(&self.host, &self.config, Conditions::Plain, &[]);
        let names = |printed: &DoctorReport| printed.findings.keys().cloned().collect::<Vec<_>>();
        env.record_unless(names(&printed) == names(&self.baseline), || format!("after {after}: {printed:?}"));
    }

    /// Injects a fault by a shell script, asserts that doctor detects it, and undoes it by another script.
    fn assert_detected(&self, env: &TestEnv, check: &str, inject: &str, undo: &str) {
        env.shell(&self.host, inject);
        self.assert_only_new_finding(env, inject, check, Conditions::Plain, &[]);
        env.shell(&self.host, undo);
        self.assert_no_new_finding(env, inject);
    }

    /// Asserts that doctor detects a fault, and that `--fix` repairs the fault and reports that.
    fn assert_fixed(&self, env: &TestEnv, check: &str, inject: &str, conditions: Conditions) -> DoctorReport {
        self.assert_only_new_finding(env, inject, check, conditions, &[]);
        let printed = env.doctor(&self.host, &self.config, conditions, &["--fix"]);
        env.record_unless(!printed.findings.contains_key(check), || format!("{inject}: not fixed: {printed:?}"));
        let done = !printed.fixed.is_empty() && printed.fixed.iter().all(|line| !line.starts_with("NOT"));
        env.record_unless(done, || format!("{inject}: {printed:?}"));
        println!("{inject}: {}", printed.fixed.join("; "));
        printed
    }
}

/// Starts a testbed with two services, one stamped by servers and one by load balancers, and two workers for each.
fn start_env() -> (TestEnv, Fleet, CheckedHost, CheckedHost, CheckedHost) {
    let options = TestbedOptions { instance: "doctor".to_owned(), servers: 1, cores: 2, ..TestbedOptions::default() };
    let mut testbed = Testbed::create(options).unwrap();
    let by_lb = format!("\n[[service]]\nname = \"old\"\nvip = \"{VIP}:81\"\npolicy = \"rr\"\ntimestamps = \"lb\"\n");
    testbed.server(1).unwrap().set_sysctls(&[("ipv4/tcp_timestamps", "2")]).unwrap();
    let routes =
        [("ipv4/ip_forward", "1"), ("ipv4/conf/all/send_redirects", "0"), ("ipv4/conf/eth0/send_redirects", "0")];
    testbed.load_balancer(1).unwrap().set_sysctls(&routes).unwrap();
    let fleet = FleetOptions { fleet_text: by_lb, runs_agents: false, ..FleetOptions::default() };
    let fleet = Fleet::start(&testbed, fleet).unwrap();
    // A load balancer without a daemon, which doctor checks before the first start.
    let second = testbed.add_load_balancer().unwrap();
    testbed.load_balancer(second).unwrap().set_sysctls(&routes).unwrap();
    let directory = testbed.directory();
    let text = fs::read_to_string(directory.join("lb1.toml")).unwrap().replace("lb1", "lb2");
    fs::write(directory.join("doctor-lb2.toml"), text).unwrap();
    let pins = testbed.pin_directory().join("doctor-s1");
    let agent = format!(
        "server = \"s1\"\ncontroller = \"{}\"\ninterface = \"{DEVICE}\"\npin_directory = \"{}\"\nmanage_timestamps = \
         false\n\
         rss = {{ source = \"testbed\", path = \"{}\" }}\n",
        first_controller_address(),
        pins.display(),
        testbed.emulated_rss_path(1).display(),
    );
    fs::write(directory.join("doctor-s1.toml"), agent).unwrap();
    let mount_point = directory.join("doctor-bpf");
    fs::create_dir_all(&mount_point).unwrap();
    let mut env = TestEnv { testbed, mount_point, nginx: None, failures: RefCell::default() };
    env.serve(true, true);
    let server = CheckedHost::new(&env, env.server(), directory.join("doctor-s1.toml"));
    let balancer =
        CheckedHost::new(&env, env.testbed.load_balancer(second).unwrap(), directory.join("doctor-lb2.toml"));
    let controller = CheckedHost::new(&env, env.testbed.controller(), directory.join("controller.toml"));
    (env, fleet, server, balancer, controller)
}

#[test]
fn every_injected_misconfiguration_is_named() {
    skip_if!(missing_testbed_rights());
    let (mut env, mut fleet, server, balancer, controller) = start_env();
    check_server_addresses(&env, &server);
    check_server_kernel(&env, &server);
    check_server_workers(&mut env, &server);
    check_load_balancer(&env, &balancer);
    check_load_balancer_addresses(&env, &balancer);
    check_controller_settings(&env, &controller);

    // Running daemons cause no fault either.
    let at_work = env.doctor(
        env.testbed.load_balancer(1).unwrap(),
        &env.testbed.directory().join("lb1.toml"),
        Conditions::Plain,
        &[],
    );
    assert!(at_work.is_success, "{at_work:?}");
    fleet.start_agent(&env.testbed, 1).unwrap();
    let agent = env.testbed.directory().join("agent-s1.toml");
    let pins = env.testbed.pin_directory().join("agent-s1/server/state");
    eventually(Duration::from_secs(30), "the agent has pinned its state", || pins.exists());
    let at_work = env.doctor(env.server(), &agent, Conditions::Plain, &[]);
    assert!(at_work.is_success, "{at_work:?}");
    check_frames_dropped_by_veth(&env);
    let failures = env.failures.take();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    env.stop_serving();
    fleet.daemon("controller").unwrap().signal(Signal::SIGTERM).unwrap();
}

/// Checks a running load balancer whose switch drops the frames sent by XDP. It must be the last check, because the
/// driver's counter keeps its value.
fn check_frames_dropped_by_veth(env: &TestEnv) {
    env.shell(env.testbed.switch(), "ip link set dev lb1 xdp off; ethtool -K lb1 gro off");
    let config = env.testbed.directory().join("lb1.toml");
    let connect = || {
        let address = coreward_testbed::addresses::SERVICE_ADDRESS.into();
        Ok(std::net::TcpStream::connect_timeout(&address, Duration::from_millis(300)).is_ok())
    };
    eventually(Duration::from_secs(30), "frames are dropped and named", || {
        assert!(!env.testbed.client().within(connect).unwrap(), "a connection through a switch that takes no frames");
        let report = env.doctor(env.testbed.load_balancer(1).unwrap(), &config, Conditions::Plain, &[]);
        report.findings.contains_key("xdp-send")
    });
    // With GRO alone, veth accepts the frames and delivers none.
    env.shell(env.testbed.switch(), "ethtool -K lb1 gro on");
    let report = env.doctor(env.testbed.load_balancer(1).unwrap(), &config, Conditions::Plain, &[]);
    let found = report.findings.get("xdp-send").is_some_and(|found| found.contains("has no XDP program"));
    env.record_unless(found, || format!("GRO alone at the other end of a veth: {report:?}"));
}

fn check_server_addresses(env: &TestEnv, server: &CheckedHost) {
    let add = format!("ip address add {VIP}/32 dev lo");
    server.assert_detected(env, "vip", &format!("ip address delete {VIP}/32 dev lo"), &add);
    let on_device = format!("ip address add {VIP}/32 dev {DEVICE}");
    server.assert_detected(env, "vip", &on_device, &format!("ip address delete {VIP}/32 dev {DEVICE}"));
    for (check, name, right) in [("arp-ignore", "arp_ignore", "1"), ("arp-announce", "arp_announce", "2")] {
        let set = |device: &str, value: &str| format!("echo {value} > /proc/sys/net/ipv4/conf/{device}/{name}");
        env.shell(&server.host, &set("all", "0"));
        let printed = server.assert_fixed(env, check, &set("all", "0"), Conditions::Plain);
        if Path::new("/etc/sysctl.d").is_dir() {
            env.record_unless(
                printed.drop_in.contains(&format!("\nnet.ipv4.conf.{DEVICE}.{name} = {right}\n")),
                || format!("{printed:?}"),
            );
        }
        env.shell(&server.host, &format!("{}; {}", set("all", right), set(DEVICE, "0")));
        server.assert_no_new_finding(env, name);
    }
}

fn check_server_kernel(env: &TestEnv, server: &CheckedHost) {
    let conf = format!("/proc/sys/net/ipv4/conf/{DEVICE}");
    server.assert_detected(
        env,
        "rp-filter",
        &format!("echo 1 > {conf}/rp_filter"),
        &format!("echo 0 > {conf}/rp_filter"),
    );
    let timestamps = "/proc/sys/net/ipv4/tcp_timestamps";
    server.assert_detected(env, "tcp-timestamps", &format!("echo 1 > {timestamps}"), &format!("echo 2 > {timestamps}"));

    let steer = format!("echo 3 > /sys/class/net/{DEVICE}/queues/rx-0/rps_cpus");
    if std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1) {
        env.shell_with_sys(&server.host, &steer);
        server.assert_fixed(env, "rps", &steer, Conditions::Plain);
        server.assert_no_new_finding(env, &steer);
        server.assert_detected(
            env,
            "queues",
            &format!("ethtool -L {DEVICE} rx 1"),
            &format!("ethtool -L {DEVICE} rx 2"),
        );
    }
    let chain = "nft add table ip doctor; nft 'add chain ip doctor input \
                 { type filter hook input priority 0; policy accept; }'";
    let remove = "nft delete table ip doctor";
    let track = format!("{chain}; nft add rule ip doctor input ct state established accept");
    server.assert_detected(env, "conntrack", &track, remove);
    let lets_in = format!("nft add rule ip doctor input ip saddr {CONTROLLER_ADDRESS} accept");
    let drop = "nft 'add chain ip doctor input { type filter hook input priority 0; policy drop; }'";
    server.assert_detected(env, "firewall", &format!("{chain}; {lets_in}; {drop}"), remove);

    let state = env.testbed.pin_directory().join("doctor-s1/server/state");
    fs::create_dir_all(state.parent().unwrap()).unwrap();
    let options =
        libbpf_sys::bpf_map_create_opts { sz: size_of::<libbpf_sys::bpf_map_create_opts>() as _, ..Default::default() };
    let mut older = MapHandle::create(MapType::Array, Some("state"), 4, 64, 1, &options).unwrap();
    older.pin(&state).unwrap();
    server.assert_only_new_finding(
        env,
        "a map of 64 bytes is pinned as the server's state",
        "pins",
        Conditions::Plain,
        &[],
    );
    fs::remove_file(&state).unwrap();
    server.assert_no_new_finding(env, "pins");
    let nobody = format!("{CONTROLLER_ADDRESS}:7399");
    server.assert_only_new_finding(
        env,
        "a port at which no controller listens",
        "controller",
        Conditions::Plain,
        &["--controller", &nobody],
    );
}

fn check_server_workers(env: &mut TestEnv, server: &CheckedHost) {
    env.stop_serving();
    server.assert_only_new_finding(env, "no process listens", "listeners", Conditions::Plain, &[]);
    env.serve(true, false);
    server.assert_only_new_finding(env, "sockets without SO_REUSEPORT", "listeners", Conditions::Plain, &[]);
    // On a machine with one CPU every worker is pinned.
    if std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1) {
        env.serve(false, true);
        server.assert_only_new_finding(env, "workers that are not pinned", "workers", Conditions::Plain, &[]);
    }
    env.serve(true, true);
    server.assert_no_new_finding(env, "workers");
    let pid = env.testbed.directory().join("polling.pid");
    let polls = "timeout 60 taskset -c 0 sh -c 'while :; do :; done'";
    let inject = format!("{polls} > /dev/null 2>&1 & echo $! > {}", pid.display());
    server.assert_detected(env, "polling", &inject, &format!("kill $(cat {})", pid.display()));
}

fn check_load_balancer(env: &TestEnv, balancer: &CheckedHost) {
    balancer.assert_only_new_finding(env, "ulimit -n 256", "open-files", Conditions::FewFiles, &[]);
    balancer.assert_only_new_finding(env, "no CAP_BPF, no CAP_PERFMON", "rights", Conditions::WithoutRights, &[]);
    balancer.assert_fixed(env, "bpf-file-system", "no BPF file system", Conditions::WithoutBpfFileSystem);
    balancer.assert_only_new_finding(
        env,
        "an interface that is not there",
        "interface",
        Conditions::Plain,
        &["--interface", "nonexistent0"],
    );
    attach_xdp_pass(&balancer.host, DEVICE).unwrap();
    balancer.assert_only_new_finding(env, "another XDP program", "xdp", Conditions::Plain, &[]);
    env.shell(&balancer.host, &format!("ip link set dev {DEVICE} xdp off"));
    balancer.assert_no_new_finding(env, "xdp");
    // With an XDP program at either end, veth rejects such an MTU.
    env.shell(env.testbed.switch(), "ip link set dev lb2 xdp off");
    env.shell(&balancer.host, &format!("ip link set dev {DEVICE} mtu 9000"));
    let native = balancer.with_replacements(&[], "xdp_mode = \"native\"\n");
    native.assert_only_new_finding(env, "an MTU of 9000", "mtu", Conditions::Plain, &[]);
    env.shell(&balancer.host, &format!("ip link set dev {DEVICE} mtu 1500"));
    balancer.assert_no_new_finding(env, "mtu");
}

fn check_load_balancer_addresses(env: &TestEnv, balancer: &CheckedHost) {
    let conf = format!("/proc/sys/net/ipv4/conf/{DEVICE}");
    let delete = format!("ip address delete {VIP}/32 dev {DEVICE}");
    balancer.assert_detected(env, "vip", &format!("ip address add {VIP}/32 dev {DEVICE}"), &delete);
    let own = load_balancer_address(2);
    let narrow = format!(
        "ip address delete {own}/16 dev {DEVICE}; ip address add {own}/24 dev {DEVICE}; ip route add \
         {CONTROLLER_ADDRESS} dev {DEVICE}"
    );
    let wide = format!(
        "ip route delete {CONTROLLER_ADDRESS}; ip address delete {own}/24 dev {DEVICE}; ip address add {own}/16 dev \
         {DEVICE}"
    );
    balancer.assert_detected(env, "segment", &narrow, &wide);
    balancer.assert_detected(
        env,
        "forwarding",
        &format!("echo 0 > {conf}/forwarding"),
        &format!("echo 1 > {conf}/forwarding"),
    );
    balancer.assert_detected(
        env,
        "rp-filter",
        &format!("echo 1 > {conf}/rp_filter"),
        &format!("echo 0 > {conf}/rp_filter"),
    );
    let redirects = "echo 1 > /proc/sys/net/ipv4/conf/all/send_redirects";
    env.shell(&balancer.host, redirects);
    balancer.assert_fixed(env, "send-redirects", redirects, Conditions::Plain);
    balancer.assert_no_new_finding(env, redirects);
}

fn check_controller_settings(env: &TestEnv, controller: &CheckedHost) {
    let store = env.testbed.directory().join("controller.redb");
    let readable = format!("chmod 644 {}", store.display());
    env.shell(&controller.host, &readable);
    controller.assert_fixed(env, "store", &readable, Conditions::Plain);
    controller.assert_no_new_finding(env, &readable);
    let missing = store.with_file_name("no/controller.redb");
    let elsewhere = controller.with_replacements(&[(store.to_str().unwrap(), missing.to_str().unwrap())], "");
    elsewhere.assert_only_new_finding(env, "the store's directory is missing", "store", Conditions::Plain, &[]);
    check_store_on_another_disk(env, controller, &store);
    let listen = [(first_controller_address(), "192.0.2.1:7400")];
    let elsewhere = controller.with_replacements(&[(&listen[0].0, listen[0].1)], "");
    elsewhere.assert_only_new_finding(env, "an address of another machine", "listen", Conditions::Plain, &[]);
}

fn check_store_on_another_disk(env: &TestEnv, controller: &CheckedHost, store: &Path) {
    let disk = Disk::mount(env.testbed.directory().join("doctor-disk"));
    let on_disk = disk.0.join("controller.redb");
    fs::copy(store, &on_disk).unwrap();
    let controller = controller.with_replacements(&[(store.to_str().unwrap(), on_disk.to_str().unwrap())], "");
    controller.assert_no_new_finding(env, "a store on another disk");
    let fill = disk.0.join("fill");
    let full = format!("cat /dev/zero > {0} 2> /dev/null || test -s {0}", fill.display());
    controller.assert_detected(env, "store", &full, &format!("rm {}", fill.display()));
    let remount = |mode: &str| format!("mount -o remount,{mode} {}", disk.0.display());
    controller.assert_detected(env, "store", &remount("ro"), &remount("rw"));
}

/// Small file system of 16 MiB, which is unmounted when dropped.
struct Disk(PathBuf);

impl Disk {
    fn mount(place: PathBuf) -> Self {
        fs::create_dir_all(&place).unwrap();
        let options = Some("size=16m,mode=700");
        mount(Some("tmpfs"), &place, Some("tmpfs"), MsFlags::empty(), options).unwrap();
        Self(place)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        umount2(&self.0, MntFlags::MNT_DETACH).unwrap();
    }
}
