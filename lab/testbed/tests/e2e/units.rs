//! Test of the shipped systemd units without systemd. The real binary runs with the units' command lines, users,
//! capabilities, limits and read-only paths, and with the configuration that the documentation shows.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use coreward_testbed::fleet::coreward_binary_path;
use coreward_testbed::{find_missing_testbed_rights, skip_if};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const UNIT_LOG_TIMEOUT: Duration = Duration::from_secs(60);
/// User id that replaces the user in the unit's `User=`, which may not exist on this machine.
const UNPRIVILEGED_USER_ID: &str = "65534";

/// Shell script that runs a unit's command in a separate root directory. This is an overlay over the machine's root
/// directory that ends with the mount namespace. It contains the binary and the files of /etc/coreward. Only the paths
/// that the unit leaves writable are writable.
///
/// Arguments: directory for the overlay, binary, directory of /etc/coreward's files, state directory or nothing,
/// further writable path or nothing, limit of open files, user, bounding set, command.
const RUN_UNIT_SCRIPT: &str = r#"
set -e
work=$1 binary=$2 files=$3 state=$4 writable=$5 open_files=$6 user=$7 bounding_set=$8
shift 8
mount -t tmpfs -o mode=0755 tmpfs "$work"
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" overlay "$work/root"
root=$work/root
cp "$binary" "$root/usr/bin/coreward"
rm -rf "$root/etc/coreward"
cp -r "$files" "$root/etc/coreward"
chmod -R u=rwX,go=rX "$root/etc/coreward"
mkdir -p "$root/var/lib/${state:-coreward}"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -o remount,ro "$root"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
if [ -n "$state" ]; then
	mount -t tmpfs -o mode=0700 tmpfs "$root/var/lib/$state"
	chown "$user:$user" "$root/var/lib/$state"
fi
[ -z "$writable" ] || [ "$writable" = /sys/fs/bpf ] || exit 9
ip link set lo up
ip link add eth0 type veth peer name eth1
ip link set eth0 up
ip link set eth1 up
ip address add 10.1.1.1/16 dev eth0
umask 0077
exec prlimit --nofile="$open_files" chroot "$root" setpriv --reuid "$user" --regid "$user" --clear-groups \
	--no-new-privs --inh-caps=-all --bounding-set "$bounding_set" "$@"
"#;

struct SystemdUnitText(String);

impl SystemdUnitText {
    fn read_unit(name: &str) -> Self {
        let units_directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd");
        Self(fs::read_to_string(units_directory.join(format!("coreward-{name}.service"))).unwrap())
    }

    fn setting_value(&self, key: &str) -> Option<&str> {
        self.0.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
    }
}

/// Running process of a systemd unit. Dropping this value kills the process, and its namespaces end with it.
struct SystemdUnitProcess {
    child: Child,
    directory: tempfile::TempDir,
}

impl SystemdUnitProcess {
    /// Starts a unit's command. Each of `files` is (name, content), and is a file in /etc/coreward.
    fn start(unit: &str, files: &[(&str, &str)]) -> Self {
        let systemd_unit = SystemdUnitText::read_unit(unit);
        assert_eq!(systemd_unit.setting_value("ProtectSystem"), Some("strict"));
        let directory = tempfile::tempdir().unwrap();
        let path_in_directory = |name: &str| directory.path().join(name);
        for subdirectory in ["overlay", "files"] {
            fs::create_dir(path_in_directory(subdirectory)).unwrap();
        }
        for (name, content) in files {
            fs::write(path_in_directory("files").join(name), content).unwrap();
        }
        let unit_capabilities = systemd_unit.setting_value("CapabilityBoundingSet").unwrap().split_whitespace();
        let bounding_set = unit_capabilities.fold("-all".to_owned(), |capability_set, capability| {
            capability_set + ",+" + &capability.strip_prefix("CAP_").unwrap().to_lowercase()
        });
        let log_file = fs::File::create(path_in_directory("log")).unwrap();
        let mut command = Command::new("unshare");
        // The fallback is systemd's default, DefaultLimitNOFILE=1024:524288.
        let open_file_limit = systemd_unit.setting_value("LimitNOFILE").map_or("1024:".to_owned(), |limit| {
            // If a container has a lower limit, that one stays.
            let (_, hard_limit) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
            limit.parse::<u64>().unwrap().min(hard_limit).to_string()
        });
        command.args(["--mount", "--net", "--pid", "--fork", "--kill-child", "sh", "-c", RUN_UNIT_SCRIPT, "unit"]);
        command.arg(path_in_directory("overlay")).arg(coreward_binary_path().unwrap()).arg(path_in_directory("files"));
        command.args([
            systemd_unit.setting_value("StateDirectory").unwrap_or(""),
            systemd_unit.setting_value("ReadWritePaths").unwrap_or(""),
        ]);
        command.args([
            open_file_limit.as_str(),
            systemd_unit.setting_value("User").map_or("0", |_| UNPRIVILEGED_USER_ID),
            &bounding_set,
        ]);
        command.args(systemd_unit.setting_value("ExecStart").unwrap().split_whitespace());
        let child_process =
            command.stdin(Stdio::null()).stdout(log_file.try_clone().unwrap()).stderr(log_file).spawn().unwrap();
        Self { child: child_process, directory }
    }

    fn read_log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    /// Waits until the process's log contains `expected_text`. Fails unless the process then continues to run.
    fn wait_for_log(&mut self, expected_text: &str) {
        let deadline = Instant::now() + UNIT_LOG_TIMEOUT;
        while !self.read_log().contains(expected_text) {
            let exit_status = self.child.try_wait().unwrap();
            assert!(
                exit_status.is_none() && Instant::now() < deadline,
                "no {expected_text:?} ({exit_status:?}): {}",
                self.read_log()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        // Wait, because a forbidden operation fails soon after the start.
        std::thread::sleep(Duration::from_millis(500));
        let exit_status = self.child.try_wait().unwrap();
        assert!(exit_status.is_none(), "it has ended ({exit_status:?}): {}", self.read_log());
        for error_text in ["Read-only file system", "Permission denied", "Operation not permitted", "stays as it is"] {
            assert!(!self.read_log().contains(error_text), "{}", self.read_log());
        }
    }
}

/// Directory of a daemon's pinned BPF objects, which is removed when this value is dropped, even if the test fails.
struct PinDirectory(String);

impl PinDirectory {
    fn new(daemon: &str) -> Self {
        Self(format!("/sys/fs/bpf/coreward-test-{}-{daemon}", std::process::id()))
    }
}

impl Drop for PinDirectory {
    fn drop(&mut self) {
        // Ignore an error, because without pins the directory does not exist.
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Drop for SystemdUnitProcess {
    fn drop(&mut self) {
        // Kill the namespace's first process first, because after its change of user it does not die with its parent.
        // An error means that it has already ended.
        let id = self.child.id();
        let children_pids = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
        for child in children_pids.split_whitespace().filter_map(|child| child.parse().ok()) {
            let _ = kill(Pid::from_raw(child), Signal::SIGKILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn every_unit_starts_with_only_its_own_capabilities() {
    skip_if!(find_missing_testbed_rights());
    let [lb_pins, agent_pins] = ["lb", "agent"].map(PinDirectory::new);
    let controller_config = "listen = \"10.1.1.1:7400\"\n";
    let single_controller_config = format!("{controller_config}store = \"/var/lib/coreward/controller.redb\"\n");
    SystemdUnitProcess::start("controller", &[("controller.toml", &single_controller_config)])
        .wait_for_log("event=\"listening\" address=10.1.1.1:7400");
    // The file in docs/deployment.md has no token_directory, and no etcd answers here.
    let etcd_controller_config = format!("{controller_config}\n[etcd]\nendpoints = [\"http://10.1.0.5:2379\"]\n");
    SystemdUnitProcess::start("controller", &[("controller.toml", &etcd_controller_config)])
        .wait_for_log("event=\"listening\" address=10.1.1.1:7400");
    let rack_controller_config = "name = \"rack1\"\nlisten = \"10.1.1.1:7500\"\ncontroller = \"10.1.0.1:7400\"\n";
    SystemdUnitProcess::start("rack", &[("rack.toml", rack_controller_config)])
        .wait_for_log("event=\"listening\" address=10.1.1.1:7500");
    let lb_config = format!(
        "name = \"lb1\"\ncontroller = \"10.1.0.1:7400\"\ninterface = \"eth0\"\npin_directory = \"{}\"\n",
        lb_pins.0
    );
    SystemdUnitProcess::start("lb", &[("lb.toml", &lb_config)])
        .wait_for_log("event=\"program-attached\" load_balancer=\"lb1\" interface=\"eth0\"");
    let agent_config = format!(
        "server = \"s1\"\ncontroller = \"10.1.0.1:7400\"\ninterface = \"eth0\"\npin_directory = \"{}\"\n",
        agent_pins.0
    );
    SystemdUnitProcess::start("agent", &[("agent.toml", &agent_config)])
        .wait_for_log("the agent has attached its BPF programs event=\"programs-attached\"");
    for pins in [lb_pins, agent_pins] {
        fs::remove_dir_all(&pins.0).unwrap();
    }
}
