//! Veth pair for live frames. They are redirected into one end, and the XDP program under test is attached to the other
//! end.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use nix::unistd::Pid;

use crate::namespace;
use crate::thread_cpus;
pub use crate::xdp::workload::LOAD_BALANCER_MAC;

/// Pair of veth devices, which is removed with its network namespace.
pub struct VethPair {
    /// Name of the device into which frames are redirected, and on which they return.
    pub generator_device_name: String,
    /// Name of the device to which the program under test is attached.
    pub tested_device_name: String,
}

/// Number of frames that a device has received, and CPU time of its NAPI thread, since they were created.
#[derive(Debug, Clone, Copy)]
pub struct NapiUsage {
    pub received_frame_count: u64,
    /// CPU time that the NAPI thread has used (ns).
    pub cpu_ns: u64,
}

impl NapiUsage {
    /// Returns the received frames and the used CPU time since `earlier_usage`.
    pub fn difference_since(self, earlier_usage: Self) -> Self {
        Self {
            received_frame_count: self.received_frame_count - earlier_usage.received_frame_count,
            cpu_ns: self.cpu_ns - earlier_usage.cpu_ns,
        }
    }
}

impl VethPair {
    /// Creates veth pair `number` in the calling thread's network namespace. The tested end has the MAC address to
    /// which the frames are sent. Fails without root.
    pub fn new(number: usize) -> anyhow::Result<Self> {
        // Device names are unique per process, because a device's name also identifies its NAPI thread across all
        // namespaces.
        let device_name = |end_letter| format!("b{}{end_letter}{number}", std::process::id());
        let veth_pair = Self { generator_device_name: device_name('g'), tested_device_name: device_name('t') };
        let Self { generator_device_name: generator_end, tested_device_name: tested_end } = &veth_pair;
        namespace::run_ip_command(&format!(
            "link add {generator_end} type veth peer name {tested_end} address {LOAD_BALANCER_MAC}"
        ))?;
        for end in [generator_end, tested_end] {
            // Without IPv6, the kernel sends no packets by itself.
            namespace::run_ip_command(&format!("link set {end} addrgenmode none"))?;
            namespace::run_ip_command(&format!("link set {end} up"))?;
        }
        Ok(veth_pair)
    }

    pub fn generator_interface_index(&self) -> anyhow::Result<u32> {
        nix::net::if_::if_nametoindex(self.generator_device_name.as_str())
            .with_context(|| self.generator_device_name.clone())
    }

    pub fn tested_interface_index(&self) -> anyhow::Result<u32> {
        nix::net::if_::if_nametoindex(self.tested_device_name.as_str()).with_context(|| self.tested_device_name.clone())
    }
}

/// NAPI thread of a network device that has an XDP program.
pub struct NapiThread {
    device_name: String,
    thread_id: Pid,
}

impl NapiThread {
    /// Enables threaded NAPI for the device and binds its thread to a CPU. veth uses NAPI once it has an XDP program.
    /// Fails when the kernel has no threaded NAPI for the device, or the CPU does not exist.
    pub fn start(device: &str, cpu: usize) -> anyhow::Result<Self> {
        namespace::run_script_with_namespace_sysfs(&format!("echo 1 > /sys/class/net/{device}/threaded"))
            .with_context(|| format!("threaded NAPI for {device}"))?;
        let thread_id = find_thread_by_prefix(&format!("napi/{device}-"))?;
        thread_cpus::bind_to_cpu(thread_id, cpu)?;
        raise_thread_priority(thread_id)?;
        Ok(Self { device_name: device.to_owned(), thread_id })
    }

    /// Waits until the thread sleeps, because it has processed all received frames, and returns its usage. Fails when
    /// the thread or the device is gone.
    pub fn read_usage_when_idle(&self) -> anyhow::Result<NapiUsage> {
        while self.read_thread_state()? != "S" {
            std::thread::sleep(Duration::from_micros(100));
        }
        let schedstat_path = format!("/proc/{}/schedstat", self.thread_id);
        let schedstat = fs::read_to_string(&schedstat_path).with_context(|| schedstat_path.clone())?;
        let cpu_ns = schedstat.split_whitespace().next().and_then(|time| time.parse().ok());
        Ok(NapiUsage {
            received_frame_count: read_received_frame_count(&self.device_name)?,
            cpu_ns: cpu_ns.with_context(|| format!("{schedstat_path}: {schedstat:?}"))?,
        })
    }

    fn read_thread_state(&self) -> anyhow::Result<String> {
        let stat_path = format!("/proc/{}/stat", self.thread_id);
        let stat_line = fs::read_to_string(&stat_path).with_context(|| stat_path.clone())?;
        let fields_after_name = stat_line.rsplit_once(')').map_or("", |(_, text_after_name)| text_after_name);
        Ok(fields_after_name.split_whitespace().next().unwrap_or_default().to_owned())
    }
}

/// Gives a thread the highest priority (nice value -20), so that it gets most of its CPU's time.
pub fn raise_thread_priority(thread: Pid) -> anyhow::Result<()> {
    let exit_status =
        Command::new("renice").args(["-n", "-20", "-p", &thread.to_string()]).stdout(Stdio::null()).status();
    let exit_status = exit_status.context("renice(1)")?;
    ensure!(exit_status.success(), "renice of thread {thread}: {exit_status}");
    Ok(())
}

fn find_thread_by_prefix(prefix: &str) -> anyhow::Result<Pid> {
    for entry in fs::read_dir("/proc").context("/proc")?.flatten() {
        let Some(thread_id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let thread_name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if thread_name.starts_with(prefix) {
            return Ok(Pid::from_raw(thread_id));
        }
    }
    anyhow::bail!("no thread named {prefix}...")
}

/// Returns the number of frames that a device in the calling thread's network namespace has received.
fn read_received_frame_count(device: &str) -> anyhow::Result<u64> {
    let device_statistics = fs::read_to_string("/proc/thread-self/net/dev").context("/proc/thread-self/net/dev")?;
    let device_columns =
        device_statistics.lines().find_map(|line| line.trim_start().strip_prefix(device)?.strip_prefix(':'));
    // The first two columns are received bytes and received packets.
    let packet_count = device_columns.and_then(|numbers| numbers.split_whitespace().nth(1)?.parse().ok());
    packet_count.with_context(|| format!("/proc/thread-self/net/dev: no packets of {device}"))
}
