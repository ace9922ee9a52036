//! Network namespaces, with the processes in them and their removal.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};
use nix::sched::{CloneFlags, setns};

/// Directory in which `ip netns` creates the files of named network namespaces.
const NETNS_DIRECTORY: &str = "/run/netns";

/// Network namespace created by `ip netns add`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkNamespace {
    name: String,
}

impl NetworkNamespace {
    pub(crate) fn new(name: String) -> Self {
        Self { name }
    }

    /// Returns the name of the namespace, as `ip netns` shows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the path of the namespace for `nsenter --net=PATH`. Unlike `ip netns exec`, nsenter keeps bpffs mounted.
    pub fn namespace_file_path(&self) -> PathBuf {
        Path::new(NETNS_DIRECTORY).join(&self.name)
    }

    /// Runs `action` in a new thread inside the namespace. The caller's thread stays in its own. Fails when the
    /// namespace does not exist or cannot be entered, or when `action` fails.
    pub fn run_within<T: Send>(&self, action: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
        let namespace_file = self.open_file()?;
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                setns(namespace_file.as_fd(), CloneFlags::CLONE_NEWNET)
                    .with_context(|| format!("cannot enter network namespace {}", self.name))?;
                action()
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Sets sysctls of this namespace. `settings` has pairs (path, value), and each value is written to
    /// `/proc/sys/net/PATH`. Fails with the sysctl's path when a sysctl cannot be written.
    pub fn set_sysctls(&self, settings: &[(&str, &str)]) -> anyhow::Result<()> {
        self.run_within(|| {
            for (path, value) in settings {
                let sysctl_path = Path::new("/proc/sys/net").join(path);
                std::fs::write(&sysctl_path, value)
                    .with_context(|| format!("cannot set {} to {value}", sysctl_path.display()))?;
            }
            Ok(())
        })
    }

    /// Returns the MAC address of a device in this namespace. Fails when the device does not exist.
    pub fn read_device_mac_address(&self, device: &str) -> anyhow::Result<String> {
        self.run_within(|| {
            let mut address_entries = nix::ifaddrs::getifaddrs()?.filter(|entry| entry.interface_name == device);
            let mac = address_entries.find_map(|entry| entry.address?.as_link_addr()?.addr());
            let mac = mac.with_context(|| format!("device {device} of {} has no MAC address", self.name))?;
            Ok(mac.map(|byte| format!("{byte:02x}")).join(":"))
        })
    }

    pub(crate) fn open_file(&self) -> anyhow::Result<File> {
        File::open(self.namespace_file_path()).with_context(|| format!("cannot open network namespace {}", self.name))
    }

    /// Kills all processes in the namespace, then removes the namespace with all its devices.
    pub(crate) fn remove(&self) -> anyhow::Result<()> {
        self.kill_processes()?;
        run_ip_batch(None, &format!("netns delete {}\n", self.name))
    }

    /// Kills every process in this namespace. Processes are identified by their namespace, not by names or pids.
    fn kill_processes(&self) -> anyhow::Result<()> {
        use std::os::unix::fs::MetadataExt as _;
        let Ok(namespace_metadata) = self.open_file()?.metadata() else { return Ok(()) };
        let is_in_namespace = |pid: &str| {
            std::fs::metadata(format!("/proc/{pid}/ns/net")).is_ok_and(|process_metadata| {
                (process_metadata.dev(), process_metadata.ino()) == (namespace_metadata.dev(), namespace_metadata.ino())
            })
        };
        // Search repeatedly, because a process may fork during the search. Later iterations find its children.
        for _ in 0..10 {
            let mut has_process = false;
            for entry in std::fs::read_dir("/proc")?.flatten() {
                let Ok(name) = entry.file_name().into_string() else { continue };
                let Ok(pid) = name.parse::<i32>() else { continue };
                if is_in_namespace(&name) && !is_zombie_process(pid) {
                    has_process = true;
                    kill_process_if(pid, || is_in_namespace(&name));
                }
            }
            if !has_process {
                return Ok(());
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        bail!("processes in network namespace {} do not end", self.name)
    }
}

fn is_zombie_process(pid: i32) -> bool {
    let process_stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state is the first word after the command's name, which ends with the last parenthesis.
    process_stat.rsplit_once(')').is_none_or(|(_, stat_fields)| stat_fields.trim_start().starts_with(['Z', 'X']))
}

/// Sends SIGKILL to process `pid` if `must_be_killed` returns true. A pidfd prevents the pid's reuse between the check
/// and the signal.
fn kill_process_if(pid: i32, must_be_killed: impl Fn() -> bool) {
    // SAFETY: pidfd_open takes two integers and returns a new descriptor or -1.
    let pidfd_number = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if pidfd_number < 0 {
        return;
    }
    // SAFETY: the descriptor is new and owned by nothing else.
    let pidfd = unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(pidfd_number as i32) };
    if must_be_killed() {
        use std::os::fd::AsRawFd as _;
        let null_siginfo = std::ptr::null_mut::<libc::siginfo_t>();
        // SAFETY: the descriptor is open, and a null siginfo means "as kill() would fill it".
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), libc::SIGKILL, null_siginfo, 0) };
    }
}

/// Returns the network namespaces whose names start with `prefix`.
pub(crate) fn list_namespaces_with_prefix(prefix: &str) -> Vec<NetworkNamespace> {
    let directory_entries = std::fs::read_dir(NETNS_DIRECTORY).into_iter().flatten().flatten();
    let names = directory_entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(prefix)).map(NetworkNamespace::new).collect()
}

/// Runs a batch of `ip` commands in `namespace`, or in this process's namespace if it is `None`.
pub(crate) fn run_ip_batch(namespace: Option<&NetworkNamespace>, commands: &str) -> anyhow::Result<()> {
    use io::Write as _;
    let mut ip = Command::new("ip");
    if let Some(namespace) = namespace {
        ip.args(["-n", namespace.name()]);
    }
    ip.args(["-batch", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut ip_process = ip.spawn().context("cannot run ip (Debian package iproute2)")?;
    ip_process.stdin.take().expect("stdin is piped").write_all(commands.as_bytes())?;
    let output = ip_process.wait_with_output()?;
    if !output.status.success() {
        let namespace_note = namespace.map_or(String::new(), |namespace| format!(" in namespace {}", namespace.name()));
        bail!("ip{namespace_note}: {} in this batch:\n{commands}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
