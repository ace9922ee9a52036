//! Guest: a QEMU process with software emulation, controlled over its second serial line.

use std::fs;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use tempfile::TempDir;

use crate::packages::Packages;

pub const QUEUE_COUNT: u16 = 4;
/// MAC address of the guest's `eth0`, which is locally administered. `eth1` has the next address.
pub const MAC_ADDRESS: [u8; 6] = [0x02, 0xc0, 0x4e, 0x00, 0x00, 0x01];
/// Name of the tap device of the guest's `eth0`, in the network namespace of this process.
pub const TAP: &str = "nictest0";

/// File name of the QEMU monitor's socket.
const MONITOR: &str = "monitor";

/// Maximum time for a start or a shutdown of a guest on a busy machine.
const BOOT_TIMEOUT: Duration = Duration::from_secs(300);
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nic {
    /// virtio-net with RSS, on a tap with one queue per receive queue.
    Virtio,
    /// Intel 82576, with the driver igb.
    Igb,
    /// VMware's vmxnet3, whose indirection table QEMU shows but does not use.
    Vmxnet3,
}

impl Nic {
    /// Returns the name of the driver's kernel module, which also names the NIC.
    pub fn driver(self) -> &'static str {
        match self {
            Nic::Virtio => "virtio_net",
            Nic::Igb => "igb",
            Nic::Vmxnet3 => "vmxnet3",
        }
    }

    /// Returns a command that prints each receive queue's number, and counters whose sum grows with every packet.
    ///
    /// virtio on Linux 6.12 has no counters per queue in `ethtool -S`, so its interrupts are counted. igb raises
    /// interrupts of all queues every two seconds (igb_watchdog_task), so its packets are counted.
    pub fn counters_command(self) -> &'static str {
        match self {
            Nic::Virtio => r"sed -n 's/^ *[0-9]*:\([ 0-9]*\).*-input\.\([0-9]*\)$/\2 \1/p' /proc/interrupts",
            Nic::Igb => r"ethtool -S eth0 | sed -n 's/^ *rx_queue_\([0-9]*\)_packets: /\1 /p'",
            Nic::Vmxnet3 => r"sed -n 's/^ *[0-9]*:\([ 0-9]*\).*-rxtx-\([0-9]*\)$/\2 \1/p' /proc/interrupts",
        }
    }

    fn qemu_device_option(self, index: u8) -> String {
        let mut mac = MAC_ADDRESS;
        mac[5] += index;
        let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
        // Two interrupt vectors per queue, one for the configuration and one for the control queue.
        let vectors = 2 * QUEUE_COUNT + 2;
        match self {
            Nic::Virtio => {
                format!(
                    "virtio-net-pci,netdev=net{index},mac={mac},mq=on,rss=on,hash=on,rx_queue_size=1024,\
                     vectors={vectors},romfile="
                )
            }
            Nic::Igb => format!("igb,netdev=net{index},mac={mac},romfile="),
            Nic::Vmxnet3 => format!("vmxnet3,netdev=net{index},mac={mac},romfile="),
        }
    }

    fn qemu_netdev_option(self, index: u8) -> String {
        let queues = if self == Nic::Virtio { format!(",queues={QUEUE_COUNT}") } else { String::new() };
        let tap = TAP.trim_end_matches('0');
        format!("tap,id=net{index},ifname={tap}{index},script=no,downscript=no{queues}")
    }
}

/// Hardware of a guest, in addition to its serial lines and CPUs.
#[derive(Clone, Copy)]
pub struct Hardware<'a> {
    pub nics: &'a [Nic],
    /// Paths of the images of `/dev/vda` and further disks.
    pub disks: &'a [PathBuf],
    pub memory: &'a str,
}

impl<'a> Hardware<'a> {
    /// Returns hardware with these NICs, without disks, and with the default memory.
    pub fn with_nics(nics: &'a [Nic]) -> Self {
        Self { nics, disks: &[], memory: "512M" }
    }

    fn arguments(&self) -> Vec<String> {
        let machine = ["-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-m", self.memory];
        let mut arguments: Vec<String> = machine.map(str::to_owned).to_vec();
        let mut add = |option: &str, value: String| arguments.extend([option.to_owned(), value]);
        for (index, nic) in (0..).zip(self.nics) {
            add("-netdev", nic.qemu_netdev_option(index));
            add("-device", nic.qemu_device_option(index));
        }
        for (index, disk) in self.disks.iter().enumerate() {
            add("-drive", format!("file={},format=raw,if=none,id=disk{index}", disk.display()));
            // MSI-X is off: QEMU 10.0 can end with an assertion about its table (msix_table_mmio_write).
            add("-device", format!("virtio-blk-pci,drive=disk{index},vectors=0"));
        }
        arguments
    }
}

/// Booted guest. Dropping this value kills QEMU, which also removes the tap devices.
pub struct Guest {
    qemu: Child,
    serial: UnixStream,
    /// Output that was received from the serial line, but not processed yet.
    pending: Vec<u8>,
    console: PathBuf,
    /// Directory with the socket of QEMU's monitor.
    monitor_directory: TempDir,
}

/// Connection to the monitor of a QEMU process.
pub struct Monitor(UnixStream);

impl Monitor {
    /// Makes QEMU deliver the packets that wait in its NICs' queues.
    ///
    /// With RSS, `virtio_net_receive_rcu` (hw/net/virtio-net.c) may give a packet to another queue than the tap's. If
    /// that queue is full, the packet waits until the guest refills the tap's queue, which may never happen. `cont`
    /// sets the device's status again, and `virtio_net_set_status` flushes all queues. Fails when QEMU has ended.
    pub fn flush_receive_queues(&mut self) -> Result<()> {
        self.0.write_all(b"stop\ncont\n").context("QEMU's monitor")?;
        // The output is discarded, because it must not fill the socket.
        let mut printed = [0; 4096];
        match self.0.read(&mut printed) {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error).context("QEMU's monitor"),
            _ => Ok(()),
        }
    }
}

impl Guest {
    /// Connects to the monitor of the guest's QEMU. Fails when QEMU has ended.
    pub fn monitor(&self) -> Result<Monitor> {
        let socket = UnixStream::connect(self.monitor_directory.path().join(MONITOR)).context("QEMU's monitor")?;
        socket.set_nonblocking(true)?;
        Ok(Monitor(socket))
    }

    /// Boots a guest, and waits until its init is ready. `arguments` are appended to the kernel's command line; its
    /// output goes to the file `console`. Fails when QEMU ends or the guest is not ready within `BOOT_TIMEOUT`, with
    /// the last lines of the console.
    pub fn boot(
        packages: &Packages,
        kernel: &Path,
        initrd: &[u8],
        hardware: Hardware<'_>,
        arguments: &str,
        console: &Path,
    ) -> Result<Self> {
        // An unnamed file needs no cleanup. QEMU opens it through this process, which outlives QEMU.
        let mut initrd_file = tempfile::tempfile()?;
        initrd_file.write_all(initrd)?;
        let (serial, theirs) = UnixStream::pair()?;
        let mut command = packages.command("usr/bin/qemu-system-x86_64");
        for folder in packages.firmware() {
            command.arg("-L").arg(folder);
        }
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]).args(hardware.arguments());
        let monitor_directory = tempfile::tempdir()?;
        let socket = monitor_directory.path().join(MONITOR);
        command.args(["-monitor", &format!("unix:{},server=on,wait=off", socket.display())]);
        command.args(["-smp", &QUEUE_COUNT.to_string()]).arg("-kernel").arg(kernel.join("vmlinuz"));
        command.args(["-initrd", &format!("/proc/{}/fd/{}", std::process::id(), initrd_file.as_raw_fd())]);
        command.args(["-append", &format!("console=ttyS0 panic=-1 mitigations=off random.trust_cpu=on {arguments}")]);
        command.args(["-serial", &format!("file:{}", console.display()), "-serial", "stdio"]);
        let complaints = fs::File::create(console.with_extension("qemu"))?;
        let qemu = command
            .stdin(Stdio::from(OwnedFd::from(theirs.try_clone()?)))
            .stdout(Stdio::from(OwnedFd::from(theirs)))
            .stderr(complaints)
            .spawn()
            .context("QEMU does not start")?;
        // Closes the other end of the serial line in `command`, so that QEMU's end closes the line.
        drop(command);
        let mut guest = Self { qemu, serial, pending: Vec::new(), console: console.to_path_buf(), monitor_directory };
        guest.lines_until("@ready", BOOT_TIMEOUT)?;
        Ok(guest)
    }

    /// Shuts the guest down, and waits for its end. Fails when QEMU does not end within `BOOT_TIMEOUT`.
    pub fn power_off(mut self) -> Result<()> {
        self.serial.write_all(b"poweroff\n").context("the guest is gone")?;
        let end = Instant::now() + BOOT_TIMEOUT;
        while self.qemu.try_wait()?.is_none() {
            if Instant::now() > end {
                bail!("the guest is still there {} s after `poweroff`; {}", BOOT_TIMEOUT.as_secs(), self.last_output());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Runs a command (one line of shell) in the guest and returns its output. Fails when the command fails (with its
    /// output), or does not end within a minute.
    pub fn run(&mut self, command: &str) -> Result<String> {
        let (status, output) = self.try_run(command, COMMAND_TIMEOUT)?;
        if status != 0 {
            bail!("`{command}` in the guest: status {status}: {}", output.trim());
        }
        Ok(output)
    }

    /// Runs a command that may fail, like [`Guest::run`]. Returns its exit status and output. Fails when the command
    /// does not end within `limit`, or the guest is gone.
    pub fn try_run(&mut self, command: &str, limit: Duration) -> Result<(i32, String)> {
        assert!(!command.contains('\n'), "the guest reads one line a command");
        self.serial.write_all(format!("{command}\n").as_bytes()).context("the guest is gone")?;
        let (output, last) = self.lines_until("@end ", limit).with_context(|| format!("`{command}`"))?;
        let status = last.trim_start_matches("@end ").trim().parse().with_context(|| format!("status {last:?}"))?;
        Ok((status, output))
    }

    /// Returns the output up to a line that starts with `marker`, and that line. Fails after `limit`.
    fn lines_until(&mut self, marker: &str, limit: Duration) -> Result<(String, String)> {
        let end = Instant::now() + limit;
        let mut output = String::new();
        loop {
            while let Some(length) = self.pending.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=length).collect();
                let line = String::from_utf8_lossy(&line).into_owned();
                if line.starts_with(marker) {
                    return Ok((output, line));
                }
                output += &line;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("no answer from the guest in {} s; {}", limit.as_secs(), self.last_output());
            }
            self.serial.set_read_timeout(Some(left))?;
            let mut buffer = [0; 4096];
            match self.serial.read(&mut buffer) {
                Ok(0) => bail!("the guest is gone; {}", self.last_output()),
                Ok(length) => self.pending.extend_from_slice(&buffer[..length]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("the serial line"),
            }
        }
    }

    /// Returns the last output of QEMU and of the guest's kernel, as text for an error.
    fn last_output(&self) -> String {
        let tail = |path: &Path| {
            let text = fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
            text.lines().rev().take(8).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("\n  ")
        };
        let [qemu, console] = [tail(&self.console.with_extension("qemu")), tail(&self.console)];
        format!("QEMU: {qemu:?}; its console ({}) ended with:\n  {console}", self.console.display())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Errors mean that QEMU has already ended.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}
