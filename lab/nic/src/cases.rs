//! Checks of each guest.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};

use crate::agent::{self, Daemons, RssWatchOutput};
use crate::forwarding;
use crate::guest::{Guest, Hardware, Nic, QUEUE_COUNT};
use crate::initrd;
use crate::packages::Packages;
use crate::rss::{self, Measurement};
use crate::tally::Tally;
use crate::wire::{FLOW_COUNT, GuestLink, VIP};

/// Files of the host that all guests need.
pub struct GuestFiles {
    /// Fetched packages with QEMU and the kernels.
    pub packages: Packages,
    /// Path of the `coreward` binary that is tested.
    pub coreward: PathBuf,
    /// Directory for the logs of the guests' consoles.
    pub logs: PathBuf,
}

/// Guest, and the checks that are made of its NIC.
pub struct Case {
    /// Version of the kernel: `6.1` (that of Debian 12) or `6.12`.
    pub kernel: &'static str,
    pub nic: Nic,
    /// Additional arguments on the kernel's command line.
    pub arguments: &'static str,
    checks: Checks,
}

enum Checks {
    /// Checks of RSS and of the agent, in each of these settings of the NIC.
    Settings(&'static [Setting]),
    /// Check of where new connections are placed while a core forwards packets. The guest has two NICs.
    Forwarding,
}

struct Setting {
    name: &'static str,
    /// Shell command in the guest that makes the setting.
    command: &'static str,
    /// Whether the NIC uses the RSS settings that it shows, as measured with the kernels of November 2026
    /// (docs/results.md).
    expects_in_force: bool,
}

/// Maximum time that the BPF verifier takes for all programs, under emulation.
const CHECK_KERNEL_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum time for a command that the user has given.
const USER_COMMAND_TIMEOUT: Duration = Duration::from_secs(600);

const DRIVER_DEFAULT: &str = "as the driver starts";

/// All guests with their checks.
pub const CASES: [Case; 7] = [
    Case {
        kernel: "6.1",
        nic: Nic::Virtio,
        arguments: "",
        checks: Checks::Settings(&[
            Setting { name: DRIVER_DEFAULT, command: "true", expects_in_force: false },
            Setting { name: "table set", command: "ethtool -X eth0 equal 3", expects_in_force: true },
            Setting {
                name: "channels changed",
                command: "ethtool -X eth0 default && ethtool -L eth0 combined 2",
                expects_in_force: false,
            },
        ]),
    },
    Case {
        kernel: "6.12",
        nic: Nic::Virtio,
        arguments: "",
        checks: Checks::Settings(&[
            Setting { name: DRIVER_DEFAULT, command: "true", expects_in_force: true },
            Setting { name: "channels changed", command: "ethtool -L eth0 combined 2", expects_in_force: true },
            Setting {
                name: "hashing off",
                command: "ethtool -K eth0 rxhash on && ethtool -K eth0 rxhash off",
                expects_in_force: false,
            },
        ]),
    },
    Case { kernel: "6.12", nic: Nic::Virtio, arguments: "", checks: Checks::Forwarding },
    // CPUs without a tick, on which membarrier(2) offers no grace periods.
    Case {
        kernel: "6.12",
        nic: Nic::Virtio,
        arguments: "nohz_full=1-3",
        checks: Checks::Settings(&[Setting { name: DRIVER_DEFAULT, command: "true", expects_in_force: true }]),
    },
    Case { kernel: "6.1", nic: Nic::Igb, arguments: "", checks: Checks::Settings(IGB_SETTINGS) },
    Case { kernel: "6.12", nic: Nic::Igb, arguments: "", checks: Checks::Settings(IGB_SETTINGS) },
    Case {
        kernel: "6.1",
        nic: Nic::Vmxnet3,
        arguments: "",
        checks: Checks::Settings(&[Setting { name: DRIVER_DEFAULT, command: "true", expects_in_force: false }]),
    },
];

const IGB_SETTINGS: &[Setting] = &[
    Setting { name: DRIVER_DEFAULT, command: "true", expects_in_force: true },
    Setting { name: "table set", command: "ethtool -X eth0 equal 3", expects_in_force: true },
];

impl Case {
    /// Returns the name of the case, by which users see and select it.
    pub fn name(&self) -> String {
        let and = if self.arguments.is_empty() { String::new() } else { format!(" and {}", self.arguments) };
        let forwards = if matches!(self.checks, Checks::Forwarding) { ", forwarding" } else { "" };
        format!("Linux {} with {}{and}{forwards}", self.kernel, self.nic.driver())
    }

    /// Returns whether the case is selected, because its name contains `text`.
    pub fn is_selected(&self, text: &str) -> bool {
        self.name().contains(text)
    }

    /// Boots the guest and runs its checks. With a `command`, prints the output of that command instead. Fails when the
    /// guest does not boot.
    pub fn run(&self, parts: &GuestFiles, command: Option<&str>, tally: &mut Tally) -> Result<()> {
        let start = Instant::now();
        let (mut guest, wire) = self.boot(parts)?;
        let release = guest.run("uname -r")?;
        println!("{}: {} booted in {:.1} s", self.name(), release.trim(), start.elapsed().as_secs_f64());
        if let Some(command) = command {
            let (status, output) = guest.try_run(command, USER_COMMAND_TIMEOUT)?;
            println!("{output}");
            ensure!(status == 0, "`{command}` ended with status {status}");
            return Ok(());
        }
        let settings = match self.checks {
            Checks::Settings(settings) => settings,
            Checks::Forwarding => return forwarding::check(&mut guest, &wire, &self.name(), tally),
        };
        if !self.arguments.is_empty() {
            tally.check(&self.check_name("the kernel took its arguments"), self.check_arguments(&mut guest));
        } else if self.nic == Nic::Virtio {
            tally.check(&self.check_name("every BPF program loads"), check_kernel(&mut guest));
        }
        if self.nic == Nic::Virtio {
            tally.check(&self.check_name("a load balancer has a table in force"), agent::balance(&mut guest));
        }
        for setting in settings {
            self.check_setting(setting, &mut guest, &wire, tally)?;
            // The check runs while the NIC still has the driver's own state: with the table that the agent will
            // restore.
            if setting.name == DRIVER_DEFAULT && self.nic != Nic::Vmxnet3 {
                let managed = self.check_managed_rss(&mut guest, &wire, tally);
                managed.unwrap_or_else(|error| tally.check(&self.check_name("manage_rss"), Err(error)));
            }
        }
        Ok(())
    }

    /// Checks that the kernel uses its additional arguments, because kernels ignore unknown ones.
    fn check_arguments(&self, guest: &mut Guest) -> Result<String> {
        let cpus = guest.run("cat /sys/devices/system/cpu/nohz_full")?.trim().to_owned();
        ensure!(self.arguments == format!("nohz_full={cpus}"), "CPUs with nohz_full: {cpus:?}");
        Ok(format!("CPUs with nohz_full: {cpus}"))
    }

    fn check_name(&self, check: &str) -> String {
        format!("{}: {check}", self.name())
    }

    fn boot(&self, parts: &GuestFiles) -> Result<(Guest, GuestLink)> {
        let modules = ["virtio_pci", "sch_ingress", "cls_bpf", "veth", self.nic.driver()];
        let kernel = parts.packages.kernel_directory(self.kernel);
        let files = [agent::files().to_vec(), forwarding::files()].concat();
        let initrd = initrd::build(&parts.packages, &kernel, &modules, &parts.coreward, &files)?;
        let forwards = matches!(self.checks, Checks::Forwarding);
        let nics = if forwards { vec![self.nic; 2] } else { vec![self.nic] };
        let mark = match (self.arguments.is_empty(), forwards) {
            (_, true) => "-forwarding",
            (true, _) => "",
            (false, _) => "-arguments",
        };
        let console = parts.logs.join(format!("{}-{}{mark}.console", self.nic.driver(), self.kernel));
        let boot =
            || Guest::boot(&parts.packages, &kernel, &initrd, Hardware::with_nics(&nics), self.arguments, &console);
        // QEMU's emulation of several CPUs sometimes fails with an assertion while the guest sets up its PCI devices
        // (system/physmem.c, iotlb_to_section), before the tested programs run.
        let mut guest = boot().or_else(|error| match format!("{error:#}").contains("Assertion") {
            true => {
                println!("{}: QEMU ended by an assertion of its own, once more: {error:#}", self.name());
                boot()
            }
            false => Err(error),
        })?;
        let wire = GuestLink::connect(&parts.packages)?;
        set_up_network(&mut guest)?;
        Ok((guest, wire))
    }

    /// Makes a setting of the NIC, and then checks the NIC's behaviour, the predicted queues and the agent.
    fn check_setting(&self, setting: &Setting, guest: &mut Guest, wire: &GuestLink, tally: &mut Tally) -> Result<()> {
        guest.run(setting.command)?;
        let named = |check: &str| self.check_name(&format!("{}: {check}", setting.name));
        let watching = agent::start_watch(guest);
        let measured = rss::measure(guest, self.nic, wire)?;
        let found = measured.to_string();
        let does =
            if setting.expects_in_force { "the NIC does what it shows" } else { "the NIC does not do what it shows" };
        match (setting.expects_in_force, measured.is_in_force_by_family()) {
            (true, [true, true]) | (false, [false, false]) => tally.check(&named(does), Ok(found)),
            // A point release has fixed the driver, so the check has no meaning.
            (false, [true, true]) => tally.skip(&named(does), "in this kernel it does"),
            _ => tally.check(&named(does), Err(anyhow!(found))),
        }
        let watched = watching.and_then(|()| agent::end_watch(guest));
        tally.check(&named("the agent sees it"), watched.and_then(|watched| check_agreement(&measured, &watched)));
        if setting.expects_in_force {
            let found = self.check_gue(guest, wire);
            tally.check(&named("the outer header of GUE selects the queue"), found);
        }
        Ok(())
    }

    /// Checks that packets in GUE arrive on the queues that their outer headers predict.
    fn check_gue(&self, guest: &mut Guest, wire: &GuestLink) -> Result<String> {
        if self.nic == Nic::Igb {
            // The driver's default omits the ports of UDP.
            guest.run("ethtool -N eth0 rx-flow-hash udp4 sdfn && ethtool -N eth0 rx-flow-hash udp6 sdfn")?;
        }
        let measured = rss::measure_gue(guest, self.nic, wire)?;
        if measured.is_in_force() { Ok(measured.to_string()) } else { Err(anyhow!(measured.to_string())) }
    }

    /// Checks the agent with `manage_rss = true`, from its start to its end.
    fn check_managed_rss(&self, guest: &mut Guest, wire: &GuestLink, tally: &mut Tally) -> Result<()> {
        let named = |check: &str| self.check_name(&format!("manage_rss: {check}"));
        let before = rss::read_rss(guest)?;
        let managed = agent::expected_managed_rss(&before, self.nic == Nic::Virtio, QUEUE_COUNT)?;
        ensure!(managed != before, "the NIC holds already what the agent is to set");
        let daemons = Daemons::start(guest, &managed)?;

        let counted = daemons.counted_syns(guest)?;
        let measured = rss::measure(guest, self.nic, wire)?;
        let found = measured.to_string();
        let set = measured.shown_rss == managed && measured.is_in_force();
        tally.check(&named("key and table are set, and in force"), if set { Ok(found) } else { Err(anyhow!(found)) });
        let seen = daemons.wait_for_matched_syns(guest, counted, FLOW_COUNT.into())?;
        let found = format!("{seen} of {FLOW_COUNT} SYNs by the predicted queue");
        let agrees = if seen == u64::from(FLOW_COUNT) { Ok(found) } else { Err(anyhow!(found)) };
        tally.check(
            &named("the agent counts them"),
            agrees.and_then(|found| {
                daemons.wait_for_warning(guest, false)?;
                Ok(found)
            }),
        );

        if self.nic == Nic::Virtio {
            guest.run("ethtool -K eth0 rxhash on && ethtool -K eth0 rxhash off")?;
            let measured = rss::measure(guest, self.nic, wire)?;
            ensure!(measured.is_in_force_by_family() == [false, false], "hashing is off, and {measured}");
            let noticed = daemons.wait_for_warning(guest, true);
            tally.check(&named("hashing is switched off, and the agent warns"), noticed.map(|()| measured.to_string()));
            guest.run("ethtool -K eth0 rxhash on")?;
        }

        daemons.stop(guest)?;
        let after = rss::read_rss(guest)?;
        let put_back =
            if after == before { Ok("as before".to_owned()) } else { Err(anyhow!("{after:?}, not {before:?}")) };
        tally.check(&named("key and table are put back"), put_back);
        Ok(())
    }
}

/// Runs `coreward check-kernel`, which loads every BPF program and prints `ok` or the verifier's error.
fn check_kernel(guest: &mut Guest) -> Result<String> {
    let (status, printed) = guest.try_run("coreward check-kernel 2>/tmp/check-kernel.log", CHECK_KERNEL_TIMEOUT)?;
    let programs: Vec<&str> = printed.split_whitespace().collect();
    ensure!(status == 0, "{printed}\n{}", guest.run("tail -c 1500 /tmp/check-kernel.log")?);
    ensure!(!programs.is_empty(), "it named no program");
    Ok(programs.join(" "))
}

/// Checks that the agent agrees with a measurement on the key, the table, each flow's predicted and actual queue, and
/// the verdict.
fn check_agreement(measured: &Measurement, watched: &RssWatchOutput) -> Result<String> {
    ensure!(
        watched.shown_rss == measured.shown_rss,
        "it read {:?}, ethtool {:?}",
        watched.shown_rss,
        measured.shown_rss
    );
    for (flow, queue) in &measured.flow_queues {
        let expected = (*flow, rss::predicted_queue(&measured.shown_rss, flow), *queue);
        ensure!(
            watched.syns.contains(&expected),
            "expected (flow, predicted, actual) {expected:?} among {:?}",
            watched.syns
        );
    }
    let verdict = if measured.is_in_force() { "in_force" } else { "not_in_force" };
    ensure!(watched.verdict == verdict, "its verdict is {}, expected {verdict}", watched.verdict);
    Ok(format!("key, table, queues of {FLOW_COUNT} flows, verdict {verdict}"))
}

/// Gives the guest its addresses, and waits until its NIC has a link. Fails after 20 s.
fn set_up_network(guest: &mut Guest) -> Result<()> {
    guest.run("ip link set eth0 up")?;
    guest.run(&format!("ip addr add {}/32 dev lo", VIP.ip()))?;
    // The guest sends no answers: some drivers' interrupts count both directions, and only received packets should
    // count.
    guest.run("ip route add blackhole default")?;
    let end = Instant::now() + Duration::from_secs(20);
    while guest.run("cat /sys/class/net/eth0/carrier")?.trim() != "1" {
        ensure!(Instant::now() < end, "the guest's NIC has no link after 20 s");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}
