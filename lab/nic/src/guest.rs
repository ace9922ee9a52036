//! Guest, which is a QEMU process with software emulation that is controlled over its second serial line.

use std::fs;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use tempfile::TempDir;

use crate::packages::FetchedPackages;

pub const NIC_QUEUE_COUNT: u16 = 4;
/// MAC address of the guest's `eth0`, which is locally administered. `eth1` has the next address.
pub const FIRST_NIC_MAC: [u8; 6] = [0x02, 0xc0, 0x4e, 0x00, 0x00, 0x01];
/// Name of the tap device of the guest's `eth0`, in the network namespace of this process.
pub const FIRST_TAP_NAME: &str = "nictest0";

const QEMU_MONITOR_SOCKET_NAME: &str = "monitor";

/// Maximum time for the start or the shutdown of a guest on a busy machine.
const GUEST_BOOT_TIMEOUT: Duration = Duration::from_secs(300);
const GUEST_COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NicModel {
    /// virtio-net with RSS, on a tap device with one queue per receive queue.
    Virtio,
    /// Intel 82576, with the driver igb.
    Igb,
    /// VMware's vmxnet3, whose indirection table QEMU shows but does not use.
    Vmxnet3,
}

impl NicModel {
    /// Returns the name of the driver's kernel module, by which results name the NIC.
    pub fn driver_name(self) -> &'static str {
        match self {
            NicModel::Virtio => "virtio_net",
            NicModel::Igb => "igb",
            NicModel::Vmxnet3 => "vmxnet3",
        }
    }

    /// Returns a command that prints each receive queue's number, with counters whose sum grows with every packet.
    ///
    /// On Linux 6.12, virtio has no counters per queue in `ethtool -S`, so its interrupts are counted. igb raises
    /// interrupts of all queues every two seconds (igb_watchdog_task), so its packets are counted.
    pub fn queue_counters_command(self) -> &'static str {
        match self {
            NicModel::Virtio => r"sed -n 's/^ *[0-9]*:\([ 0-9]*\).*-input\.\([0-9]*\)$/\2 \1/p' /proc/interrupts",
            NicModel::Igb => r"ethtool -S eth0 | sed -n 's/^ *rx_queue_\([0-9]*\)_packets: /\1 /p'",
            NicModel::Vmxnet3 => r"sed -n 's/^ *[0-9]*:\([ 0-9]*\).*-rxtx-\([0-9]*\)$/\2 \1/p' /proc/interrupts",
        }
    }

    fn qemu_device_option(self, nic_index: u8) -> String {
        let mut mac_address = FIRST_NIC_MAC;
        mac_address[5] += nic_index;
        let mac_text = mac_address.map(|byte| format!("{byte:02x}")).join(":");
        // Each queue needs two interrupt vectors. The configuration and the control queue need one each.
        let vector_count = 2 * NIC_QUEUE_COUNT + 2;
        match self {
            NicModel::Virtio => {
                format!(
                    "virtio-net-pci,netdev=net{nic_index},mac={mac_text},mq=on,rss=on,hash=on,rx_queue_size=1024,\
                     vectors={vector_count},romfile="
                )
            }
            NicModel::Igb => format!("igb,netdev=net{nic_index},mac={mac_text},romfile="),
            NicModel::Vmxnet3 => format!("vmxnet3,netdev=net{nic_index},mac={mac_text},romfile="),
        }
    }

    fn qemu_netdev_option(self, nic_index: u8) -> String {
        let queues_option = if self == NicModel::Virtio { format!(",queues={NIC_QUEUE_COUNT}") } else { String::new() };
        let tap_prefix = FIRST_TAP_NAME.trim_end_matches('0');
        format!("tap,id=net{nic_index},ifname={tap_prefix}{nic_index},script=no,downscript=no{queues_option}")
    }
}

/// Hardware of a guest, in addition to its serial lines and CPUs.
#[derive(Clone, Copy)]
pub struct GuestHardware<'a> {
    pub nics: &'a [NicModel],
    /// Paths of the images for `/dev/vda` and further disks.
    pub disk_images: &'a [PathBuf],
    pub memory_size: &'a str,
}

impl<'a> GuestHardware<'a> {
    /// Returns hardware with these NICs, without disks, and with the default memory.
    pub fn with_nics(nics: &'a [NicModel]) -> Self {
        Self { nics, disk_images: &[], memory_size: "512M" }
    }

    fn qemu_arguments(&self) -> Vec<String> {
        let machine_arguments =
            ["-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-m", self.memory_size];
        let mut arguments: Vec<String> = machine_arguments.map(str::to_owned).to_vec();
        let mut add_qemu_option = |option: &str, value: String| arguments.extend([option.to_owned(), value]);
        for (index, nic) in (0..).zip(self.nics) {
            add_qemu_option("-netdev", nic.qemu_netdev_option(index));
            add_qemu_option("-device", nic.qemu_device_option(index));
        }
        for (index, disk) in self.disk_images.iter().enumerate() {
            add_qemu_option("-drive", format!("file={},format=raw,if=none,id=disk{index}", disk.display()));
            // MSI-X is off, because QEMU 10.0 can end with an assertion about its table (msix_table_mmio_write).
            add_qemu_option("-device", format!("virtio-blk-pci,drive=disk{index},vectors=0"));
        }
        arguments
    }
}

/// Booted guest. Dropping this value kills QEMU, which also removes the tap devices.
pub struct QemuGuest {
    qemu: Child,
    serial_line: UnixStream,
    /// Output that has been received from the serial line, but not processed yet.
    unprocessed_output: Vec<u8>,
    console_path: PathBuf,
    /// Directory with the socket of QEMU's monitor.
    monitor_directory: TempDir,
}

/// Returns a command that starts QEMU with this hardware and without its default devices.
fn build_qemu_command(packages: &FetchedPackages, hardware: GuestHardware<'_>) -> Command {
    let mut command = packages.program_command("usr/bin/qemu-system-x86_64");
    for directory in packages.qemu_firmware_directories() {
        command.arg("-L").arg(directory);
    }
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]).args(hardware.qemu_arguments());
    command
}

/// Starts QEMU with `qemu_socket` as its serial line, and writes its error messages to a file in the console's
/// directory. Drops this process's copies of the socket, so that the serial line closes when QEMU ends.
fn spawn_qemu(mut command: Command, qemu_socket: UnixStream, console_path: &Path) -> Result<Child> {
    let qemu_errors = fs::File::create(console_path.with_extension("qemu"))?;
    command
        .stdin(Stdio::from(OwnedFd::from(qemu_socket.try_clone()?)))
        .stdout(Stdio::from(OwnedFd::from(qemu_socket)))
        .stderr(qemu_errors)
        .spawn()
        .context("QEMU does not start")
}

/// Connection to the monitor of a QEMU process.
pub struct QemuMonitor(UnixStream);

impl QemuMonitor {
    /// Makes QEMU deliver the packets that wait in its NICs' queues.
    ///
    /// With RSS, `virtio_net_receive_rcu` (hw/net/virtio-net.c) may give a packet to another queue than the tap's. If
    /// that queue is full, the packet waits until the guest refills the tap's queue, which may never happen. The
    /// monitor's command `cont` sets the device's status again, so that `virtio_net_set_status` flushes all queues.
    /// Fails when QEMU has ended.
    pub fn flush_receive_queues(&mut self) -> Result<()> {
        self.0.write_all(b"stop\ncont\n").context("QEMU's monitor")?;
        // The output is discarded, so that it does not fill the socket.
        let mut discarded_output = [0; 4096];
        match self.0.read(&mut discarded_output) {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error).context("QEMU's monitor"),
            _ => Ok(()),
        }
    }
}

impl QemuGuest {
    /// Connects to the monitor of the guest's QEMU. Fails when QEMU has ended.
    pub fn connect_monitor(&self) -> Result<QemuMonitor> {
        let socket = UnixStream::connect(self.monitor_directory.path().join(QEMU_MONITOR_SOCKET_NAME))
            .context("QEMU's monitor")?;
        socket.set_nonblocking(true)?;
        Ok(QemuMonitor(socket))
    }

    /// Boots a guest, and waits until its init is ready. `kernel_arguments` are appended to the kernel's command line,
    /// and the kernel's output goes to the file `console_path`. Fails with the console's last lines when QEMU ends, or
    /// when the guest is not ready within `GUEST_BOOT_TIMEOUT`.
    pub fn boot(
        packages: &FetchedPackages,
        kernel_directory: &Path,
        initrd: &[u8],
        hardware: GuestHardware<'_>,
        kernel_arguments: &str,
        console_path: &Path,
    ) -> Result<Self> {
        // An unnamed file needs no cleanup. QEMU opens it through this process, which outlives QEMU.
        let mut initrd_file = tempfile::tempfile()?;
        initrd_file.write_all(initrd)?;
        let (serial_line, qemu_socket) = UnixStream::pair()?;
        let mut command = build_qemu_command(packages, hardware);
        let monitor_directory = tempfile::tempdir()?;
        let monitor_socket = monitor_directory.path().join(QEMU_MONITOR_SOCKET_NAME);
        command.args(["-monitor", &format!("unix:{},server=on,wait=off", monitor_socket.display())]);
        command.args(["-smp", &NIC_QUEUE_COUNT.to_string()]).arg("-kernel").arg(kernel_directory.join("vmlinuz"));
        command.args(["-initrd", &format!("/proc/{}/fd/{}", std::process::id(), initrd_file.as_raw_fd())]);
        command.args([
            "-append",
            &format!("console=ttyS0 panic=-1 mitigations=off random.trust_cpu=on {kernel_arguments}"),
        ]);
        command.args(["-serial", &format!("file:{}", console_path.display()), "-serial", "stdio"]);
        let mut guest = Self {
            qemu: spawn_qemu(command, qemu_socket, console_path)?,
            serial_line,
            unprocessed_output: Vec::new(),
            console_path: console_path.to_path_buf(),
            monitor_directory,
        };
        guest.read_until_marker("@ready", GUEST_BOOT_TIMEOUT)?;
        Ok(guest)
    }

    /// Shuts the guest down, and waits for its end. Fails when QEMU does not end within `GUEST_BOOT_TIMEOUT`.
    pub fn power_off(mut self) -> Result<()> {
        self.serial_line.write_all(b"poweroff\n").context("the guest is gone")?;
        let deadline = Instant::now() + GUEST_BOOT_TIMEOUT;
        while self.qemu.try_wait()?.is_none() {
            if Instant::now() > deadline {
                bail!(
                    "the guest is still there {} s after `poweroff`; {}",
                    GUEST_BOOT_TIMEOUT.as_secs(),
                    self.last_output()
                );
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Runs a command (one line of shell) in the guest and returns its output. Fails with the output when the command
    /// fails, or when it does not end within a minute.
    pub fn run_successfully(&mut self, command: &str) -> Result<String> {
        let (exit_status, output) = self.try_run(command, GUEST_COMMAND_TIMEOUT)?;
        if exit_status != 0 {
            bail!("`{command}` in the guest: status {exit_status}: {}", output.trim());
        }
        Ok(output)
    }

    /// Runs a command that may fail, and returns its exit status and output. Fails when the command does not end within
    /// `timeout`, or the guest is gone.
    pub fn try_run(&mut self, command: &str, timeout: Duration) -> Result<(i32, String)> {
        assert!(!command.contains('\n'), "the guest reads one line a command");
        self.serial_line.write_all(format!("{command}\n").as_bytes()).context("the guest is gone")?;
        let (output, end_line) = self.read_until_marker("@end ", timeout).with_context(|| format!("`{command}`"))?;
        let exit_status =
            end_line.trim_start_matches("@end ").trim().parse().with_context(|| format!("status {end_line:?}"))?;
        Ok((exit_status, output))
    }

    /// Returns the output before the next line that starts with `marker`, and that line. Fails after `timeout`.
    fn read_until_marker(&mut self, marker: &str, timeout: Duration) -> Result<(String, String)> {
        let deadline = Instant::now() + timeout;
        let mut output = String::new();
        loop {
            while let Some(length) = self.unprocessed_output.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unprocessed_output.drain(..=length).collect();
                let line = String::from_utf8_lossy(&line).into_owned();
                if line.starts_with(marker) {
                    return Ok((output, line));
                }
                output += &line;
            }
            let remaining_time = deadline.saturating_duration_since(Instant::now());
            if remaining_time.is_zero() {
                bail!("no answer from the guest in {} s; {}", timeout.as_secs(), self.last_output());
            }
            self.serial_line.set_read_timeout(Some(remaining_time))?;
            let mut buffer = [0; 4096];
            match self.serial_line.read(&mut buffer) {
                Ok(0) => bail!("the guest is gone; {}", self.last_output()),
                Ok(length) => self.unprocessed_output.extend_from_slice(&buffer[..length]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("the serial line"),
            }
        }
    }

    /// Returns the last output of QEMU and of the guest's kernel, as text for an error message.
    fn last_output(&self) -> String {
        let tail_of_file = |path: &Path| {
            let file_text =
                fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
            file_text.lines().rev().take(8).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("\n  ")
        };
        let [qemu_tail, console_tail] =
            [tail_of_file(&self.console_path.with_extension("qemu")), tail_of_file(&self.console_path)];
        format!("QEMU: {qemu_tail:?}; its console ({}) ended with:\n  {console_tail}", self.console_path.display())
    }
}

impl Drop for QemuGuest {
    fn drop(&mut self) {
        // An error means that QEMU has already ended.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}
