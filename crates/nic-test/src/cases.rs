//! What is checked in which guest.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::guest::{Guest, Nic};
use crate::initrd;
use crate::packages::Packages;
use crate::rss::{self, Measurement};
use crate::tally::Tally;
use crate::wire::{FLOWS, VIP, Wire};

/// What guests are made of.
pub struct Parts {
    /// QEMU and the kernels.
    pub packages: Packages,
    /// The binary to test.
    pub coreward: PathBuf,
    /// Where the consoles' output goes.
    pub logs: PathBuf,
}

/// A guest to boot, and what is done to its NIC, one after the other.
pub struct Case {
    /// `6.1` (Debian 12's own) or `6.12`.
    pub kernel: &'static str,
    /// Its NIC.
    pub nic: Nic,
    settings: &'static [Setting],
}

/// A state of the NIC.
struct Setting {
    name: &'static str,
    /// What leads there.
    command: &'static str,
    /// Whether the NIC then does what it shows: what was measured with the kernels of November 2026 (docs/nic.md).
    in_force: bool,
}

/// How long a command of the user's may take.
const RUN_LIMIT: Duration = Duration::from_secs(600);

const FRESH: &str = "as the driver starts";

/// All guests.
pub const CASES: [Case; 5] = [
    Case {
        kernel: "6.1",
        nic: Nic::Virtio,
        settings: &[
            Setting { name: FRESH, command: "true", in_force: false },
            Setting { name: "table set", command: "ethtool -X eth0 equal 3", in_force: true },
            Setting {
                name: "channels changed",
                command: "ethtool -X eth0 default && ethtool -L eth0 combined 2",
                in_force: false,
            },
        ],
    },
    Case {
        kernel: "6.12",
        nic: Nic::Virtio,
        settings: &[
            Setting { name: FRESH, command: "true", in_force: true },
            Setting { name: "channels changed", command: "ethtool -L eth0 combined 2", in_force: true },
            Setting {
                name: "hashing off",
                command: "ethtool -K eth0 rxhash on && ethtool -K eth0 rxhash off",
                in_force: false,
            },
        ],
    },
    Case { kernel: "6.1", nic: Nic::Igb, settings: IGB },
    Case { kernel: "6.12", nic: Nic::Igb, settings: IGB },
    Case { kernel: "6.1", nic: Nic::Vmxnet3, settings: &[Setting { name: FRESH, command: "true", in_force: false }] },
];

const IGB: &[Setting] = &[
    Setting { name: FRESH, command: "true", in_force: true },
    Setting { name: "table set", command: "ethtool -X eth0 equal 3", in_force: true },
];

impl Case {
    /// For the user.
    pub fn name(&self) -> String {
        format!("Linux {} with {}", self.kernel, self.nic.driver())
    }

    /// Boots the guest and makes its checks; with a `command`, prints what that prints instead.
    ///
    /// # Errors
    /// When there is no guest to check.
    pub fn run(&self, parts: &Parts, command: Option<&str>, tally: &mut Tally) -> Result<()> {
        let start = Instant::now();
        let (mut guest, wire) = self.boot(parts)?;
        let release = guest.run("uname -r")?;
        println!("{}: {} booted in {:.1} s", self.name(), release.trim(), start.elapsed().as_secs_f64());
        if let Some(command) = command {
            let (status, output) = guest.try_run(command, RUN_LIMIT)?;
            println!("{output}");
            ensure!(status == 0, "`{command}` ended with status {status}");
            return Ok(());
        }
        for setting in self.settings {
            guest.run(setting.command)?;
            let measured = rss::measure(&mut guest, self.nic, &wire)?;
            self.check_setting(setting, &measured, tally);
        }
        Ok(())
    }

    fn boot(&self, parts: &Parts) -> Result<(Guest, Wire)> {
        let modules = ["virtio_pci", "sch_ingress", "cls_bpf", "veth", self.nic.driver()];
        let kernel = parts.packages.kernel(self.kernel);
        let initrd = initrd::build(&parts.packages, &kernel, &modules, &parts.coreward, &[])?;
        let console = parts.logs.join(format!("{}-{}.console", self.nic.driver(), self.kernel));
        let mut guest = Guest::boot(&parts.packages, &kernel, &initrd, self.nic, &console)?;
        let wire = Wire::connect(&parts.packages)?;
        bring_up(&mut guest)?;
        Ok((guest, wire))
    }

    /// Our Toeplitz and the table that ethtool shows, against the queues that the NIC delivered to.
    fn check_setting(&self, setting: &Setting, measured: &Measurement, tally: &mut Tally) {
        let name = format!("{}, {}", self.name(), setting.name);
        let matched = measured.matched();
        let found = format!("{matched} of {FLOWS} flows on the predicted queue");
        match (setting.in_force, matched == FLOWS) {
            (true, true) => tally.check(&format!("{name}: RSS does what it shows"), Ok(found)),
            (true, false) => tally.check(&format!("{name}: RSS does what it shows"), Err(anyhow::anyhow!(found))),
            (false, false) => tally.check(&format!("{name}: RSS does not do what it shows"), Ok(found)),
            // A point release has mended the driver: good, but then this guest shows nothing.
            (false, true) => tally.skip(&format!("{name}: RSS does not do what it shows"), "it does in this kernel"),
        }
    }
}

/// Gives the guest its addresses and waits for the link.
fn bring_up(guest: &mut Guest) -> Result<()> {
    guest.run("ip link set eth0 up")?;
    guest.run(&format!("ip addr add {}/32 dev lo", VIP.ip()))?;
    // No answers: an interrupt of some drivers' queues serves both directions, and only what arrives is counted.
    guest.run("ip route add blackhole default")?;
    let end = Instant::now() + Duration::from_secs(20);
    while guest.run("cat /sys/class/net/eth0/carrier")?.trim() != "1" {
        ensure!(Instant::now() < end, "the guest's NIC has no link after 20 s");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}
