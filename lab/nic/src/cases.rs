//! Guests of `make test-nic`, and the checks in each of them.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};

use crate::agent::{self, ControllerAndAgent, RssWatchOutput};
use crate::check_tally::CheckTally;
use crate::forwarding;
use crate::guest::{GuestHardware, NIC_QUEUE_COUNT, NicModel, QemuGuest};
use crate::guest_tap::{GuestTap, IPV4_SYN_DESTINATION, MEASURED_FLOW_COUNT};
use crate::initrd;
use crate::packages::FetchedPackages;
use crate::rss::{self, RssMeasurement};

/// Files of the host that all guests need.
pub struct HostTestFiles {
    /// Fetched packages with QEMU and the kernels.
    pub packages: FetchedPackages,
    /// Path of the tested `coreward` binary.
    pub coreward_binary: PathBuf,
    /// Directory for the logs of the guests' consoles.
    pub log_directory: PathBuf,
}

/// Guest, and the checks that are made with its NIC.
pub struct GuestCase {
    /// Version of the kernel, which is `6.1` (as in Debian 12) or `6.12`.
    pub kernel_version: &'static str,
    pub nic: NicModel,
    /// Additional arguments on the kernel's command line.
    pub kernel_arguments: &'static str,
    selected_checks: GuestCheckSelection,
}

enum GuestCheckSelection {
    /// Checks of RSS and of the agent, repeated with each of these NIC settings.
    RssSettings(&'static [NicSetting]),
    /// Check of the servers that get new connections while a core forwards packets. The guest has two NICs.
    Forwarding,
}

struct NicSetting {
    name: &'static str,
    /// Shell command by which the guest applies this setting to its NIC.
    set_up_command: &'static str,
    /// Whether the NIC is expected to use the RSS settings that it shows, as measured with the kernels of November 2026
    /// (docs/results.md).
    is_rss_in_force_expected: bool,
}

/// Maximum time that the BPF verifier may take for all programs in an emulated guest.
const VERIFIER_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum time for a command that the user has given.
const USER_COMMAND_TIMEOUT: Duration = Duration::from_secs(600);

const DRIVER_DEFAULT_SETTING_NAME: &str = "as the driver starts";

pub const GUEST_CASES: [GuestCase; 7] = [
    GuestCase {
        kernel_version: "6.1",
        nic: NicModel::Virtio,
        kernel_arguments: "",
        selected_checks: GuestCheckSelection::RssSettings(&[
            NicSetting { name: DRIVER_DEFAULT_SETTING_NAME, set_up_command: "true", is_rss_in_force_expected: false },
            NicSetting { name: "table set", set_up_command: "ethtool -X eth0 equal 3", is_rss_in_force_expected: true },
            NicSetting {
                name: "channels changed",
                set_up_command: "ethtool -X eth0 default && ethtool -L eth0 combined 2",
                is_rss_in_force_expected: false,
            },
        ]),
    },
    GuestCase {
        kernel_version: "6.12",
        nic: NicModel::Virtio,
        kernel_arguments: "",
        selected_checks: GuestCheckSelection::RssSettings(&[
            NicSetting { name: DRIVER_DEFAULT_SETTING_NAME, set_up_command: "true", is_rss_in_force_expected: true },
            NicSetting {
                name: "channels changed",
                set_up_command: "ethtool -L eth0 combined 2",
                is_rss_in_force_expected: true,
            },
            NicSetting {
                name: "hashing off",
                set_up_command: "ethtool -K eth0 rxhash on && ethtool -K eth0 rxhash off",
                is_rss_in_force_expected: false,
            },
        ]),
    },
    GuestCase {
        kernel_version: "6.12",
        nic: NicModel::Virtio,
        kernel_arguments: "",
        selected_checks: GuestCheckSelection::Forwarding,
    },
    // These CPUs have no timer tick, and membarrier(2) offers no grace periods on such CPUs.
    GuestCase {
        kernel_version: "6.12",
        nic: NicModel::Virtio,
        kernel_arguments: "nohz_full=1-3",
        selected_checks: GuestCheckSelection::RssSettings(&[NicSetting {
            name: DRIVER_DEFAULT_SETTING_NAME,
            set_up_command: "true",
            is_rss_in_force_expected: true,
        }]),
    },
    GuestCase {
        kernel_version: "6.1",
        nic: NicModel::Igb,
        kernel_arguments: "",
        selected_checks: GuestCheckSelection::RssSettings(IGB_SETTINGS),
    },
    GuestCase {
        kernel_version: "6.12",
        nic: NicModel::Igb,
        kernel_arguments: "",
        selected_checks: GuestCheckSelection::RssSettings(IGB_SETTINGS),
    },
    GuestCase {
        kernel_version: "6.1",
        nic: NicModel::Vmxnet3,
        kernel_arguments: "",
        selected_checks: GuestCheckSelection::RssSettings(&[NicSetting {
            name: DRIVER_DEFAULT_SETTING_NAME,
            set_up_command: "true",
            is_rss_in_force_expected: false,
        }]),
    },
];

const IGB_SETTINGS: &[NicSetting] = &[
    NicSetting { name: DRIVER_DEFAULT_SETTING_NAME, set_up_command: "true", is_rss_in_force_expected: true },
    NicSetting { name: "table set", set_up_command: "ethtool -X eth0 equal 3", is_rss_in_force_expected: true },
];

impl GuestCase {
    /// Returns the name by which users see and select the case.
    pub fn name(&self) -> String {
        let arguments_suffix =
            if self.kernel_arguments.is_empty() { String::new() } else { format!(" and {}", self.kernel_arguments) };
        let forwarding_suffix = if self.checks_forwarding() { ", forwarding" } else { "" };
        format!("Linux {} with {}{arguments_suffix}{forwarding_suffix}", self.kernel_version, self.nic.driver_name())
    }

    fn checks_forwarding(&self) -> bool {
        matches!(self.selected_checks, GuestCheckSelection::Forwarding)
    }

    /// Returns whether the case's name contains `text`, so that the case is selected.
    pub fn name_contains(&self, text: &str) -> bool {
        self.name().contains(text)
    }

    /// Boots the guest and runs its checks. If `command` is given, prints that command's output instead. Fails when the
    /// guest does not boot.
    pub fn boot_and_check(
        &self,
        test_files: &HostTestFiles,
        command: Option<&str>,
        tally: &mut CheckTally,
    ) -> Result<()> {
        let start = Instant::now();
        let (mut guest, guest_tap) = self.boot_guest(test_files)?;
        let kernel_release = guest.run_successfully("uname -r")?;
        println!("{}: {} booted in {:.1} s", self.name(), kernel_release.trim(), start.elapsed().as_secs_f64());
        if let Some(command) = command {
            let (exit_status, output) = guest.try_run(command, USER_COMMAND_TIMEOUT)?;
            println!("{output}");
            ensure!(exit_status == 0, "`{command}` ended with status {exit_status}");
            return Ok(());
        }
        let nic_settings = match self.selected_checks {
            GuestCheckSelection::RssSettings(settings) => settings,
            GuestCheckSelection::Forwarding => {
                return forwarding::check_connection_placement(&mut guest, &guest_tap, &self.name(), tally);
            }
        };
        self.check_kernel_and_load_balancer(&mut guest, tally);
        for setting in nic_settings {
            self.check_nic_setting(setting, &mut guest, &guest_tap, tally)?;
            // The check needs the NIC in the driver's own state, with the indirection table that the agent will
            // restore.
            if setting.name == DRIVER_DEFAULT_SETTING_NAME && self.nic != NicModel::Vmxnet3 {
                let managed_rss_result = self.check_managed_rss(&mut guest, &guest_tap, tally);
                managed_rss_result
                    .unwrap_or_else(|error| tally.record_result(&self.full_check_name("manage_rss"), Err(error)));
            }
        }
        Ok(())
    }

    /// Checks that the kernel uses its additional arguments, if there are any. With virtio-net, also checks the load
    /// balancer and, without such arguments, every BPF program.
    fn check_kernel_and_load_balancer(&self, guest: &mut QemuGuest, tally: &mut CheckTally) {
        if !self.kernel_arguments.is_empty() {
            tally.record_result(
                &self.full_check_name("the kernel took its arguments"),
                self.check_kernel_arguments(guest),
            );
        } else if self.nic == NicModel::Virtio {
            tally.record_result(&self.full_check_name("every BPF program loads"), check_bpf_programs(guest));
        }
        if self.nic == NicModel::Virtio {
            tally.record_result(
                &self.full_check_name("a load balancer has a table in force"),
                agent::run_load_balancer_until_ready(guest),
            );
        }
    }

    /// Checks that the kernel uses its additional arguments. Kernels ignore unknown arguments without an error.
    fn check_kernel_arguments(&self, guest: &mut QemuGuest) -> Result<String> {
        let tickless_cpus = guest.run_successfully("cat /sys/devices/system/cpu/nohz_full")?.trim().to_owned();
        ensure!(
            self.kernel_arguments == format!("nohz_full={tickless_cpus}"),
            "CPUs with nohz_full: {tickless_cpus:?}"
        );
        Ok(format!("CPUs with nohz_full: {tickless_cpus}"))
    }

    fn full_check_name(&self, check: &str) -> String {
        format!("{}: {check}", self.name())
    }

    fn console_file_name(&self) -> String {
        let suffix = match (self.kernel_arguments.is_empty(), self.checks_forwarding()) {
            (_, true) => "-forwarding",
            (true, _) => "",
            (false, _) => "-arguments",
        };
        format!("{}-{}{suffix}.console", self.nic.driver_name(), self.kernel_version)
    }

    fn boot_guest(&self, test_files: &HostTestFiles) -> Result<(QemuGuest, GuestTap)> {
        let kernel_modules = ["virtio_pci", "sch_ingress", "cls_bpf", "veth", self.nic.driver_name()];
        let kernel_directory = test_files.packages.kernel_directory(self.kernel_version);
        let guest_files =
            [agent::agent_guest_config_files().to_vec(), forwarding::forwarding_guest_config_files()].concat();
        let initrd = initrd::build_guest_initrd(
            &test_files.packages,
            &kernel_directory,
            &kernel_modules,
            &test_files.coreward_binary,
            &guest_files,
        )?;
        let nics = if self.checks_forwarding() { vec![self.nic; 2] } else { vec![self.nic] };
        let console_path = test_files.log_directory.join(self.console_file_name());
        let boot_once = || {
            QemuGuest::boot(
                &test_files.packages,
                &kernel_directory,
                &initrd,
                GuestHardware::with_nics(&nics),
                self.kernel_arguments,
                &console_path,
            )
        };
        // QEMU's emulation of several CPUs sometimes fails with an assertion (system/physmem.c, iotlb_to_section). This
        // happens while the guest sets up its PCI devices, before the tested programs run, so a second attempt is made.
        let mut guest = boot_once().or_else(|error| match format!("{error:#}").contains("Assertion") {
            true => {
                println!("{}: QEMU ended by an assertion of its own, once more: {error:#}", self.name());
                boot_once()
            }
            false => Err(error),
        })?;
        let guest_tap = GuestTap::set_up_tap(&test_files.packages)?;
        set_up_guest_network(&mut guest)?;
        Ok((guest, guest_tap))
    }

    /// Applies a setting of the NIC, and then checks the NIC's behaviour, the predicted queues and the agent.
    fn check_nic_setting(
        &self,
        setting: &NicSetting,
        guest: &mut QemuGuest,
        guest_tap: &GuestTap,
        tally: &mut CheckTally,
    ) -> Result<()> {
        guest.run_successfully(setting.set_up_command)?;
        let setting_check_name = |check: &str| self.full_check_name(&format!("{}: {check}", setting.name));
        let watch_start_result = agent::start_rss_agent(guest);
        let measurement = rss::measure_flow_queues(guest, self.nic, guest_tap)?;
        let measurement_text = measurement.to_string();
        let check_text = if setting.is_rss_in_force_expected {
            "the NIC does what it shows"
        } else {
            "the NIC does not do what it shows"
        };
        match (setting.is_rss_in_force_expected, measurement.are_families_in_force()) {
            (true, [true, true]) | (false, [false, false]) => {
                tally.record_result(&setting_check_name(check_text), Ok(measurement_text))
            }
            // A point release of the kernel has fixed the driver, so the check has no meaning.
            (false, [true, true]) => tally.record_skipped(&setting_check_name(check_text), "in this kernel it does"),
            _ => tally.record_result(&setting_check_name(check_text), Err(anyhow!(measurement_text))),
        }
        let watch_output = watch_start_result.and_then(|()| agent::wait_for_rss_watch_output(guest));
        tally.record_result(
            &setting_check_name("the agent sees it"),
            watch_output.and_then(|watch_output| check_agent_agrees_with_measurement(&measurement, &watch_output)),
        );
        if setting.is_rss_in_force_expected {
            let gue_result = self.check_predicted_gue_queues(guest, guest_tap);
            tally.record_result(&setting_check_name("the outer header of GUE selects the queue"), gue_result);
        }
        Ok(())
    }

    /// Checks that GUE packets arrive on the queues that their outer headers predict.
    fn check_predicted_gue_queues(&self, guest: &mut QemuGuest, guest_tap: &GuestTap) -> Result<String> {
        if self.nic == NicModel::Igb {
            // By default, the driver does not hash the ports of UDP.
            guest
                .run_successfully("ethtool -N eth0 rx-flow-hash udp4 sdfn && ethtool -N eth0 rx-flow-hash udp6 sdfn")?;
        }
        let measurement = rss::measure_gue_flow_queues(guest, self.nic, guest_tap)?;
        if measurement.is_in_force() { Ok(measurement.to_string()) } else { Err(anyhow!(measurement.to_string())) }
    }

    /// Checks the agent with `manage_rss = true`, from its start to its end.
    fn check_managed_rss(&self, guest: &mut QemuGuest, guest_tap: &GuestTap, tally: &mut CheckTally) -> Result<()> {
        let rss_before = rss::read_rss(guest)?;
        let managed_rss = agent::expected_managed_rss(&rss_before, self.nic == NicModel::Virtio, NIC_QUEUE_COUNT)?;
        ensure!(managed_rss != rss_before, "the NIC holds already what the agent is to set");
        let daemons = ControllerAndAgent::start(guest, &managed_rss)?;

        let counts_before = daemons.fetch_syn_match_counts(guest)?;
        let measurement = rss::measure_flow_queues(guest, self.nic, guest_tap)?;
        let measurement_text = measurement.to_string();
        let is_managed_in_force = measurement.shown_rss == managed_rss && measurement.is_in_force();
        tally.record_result(
            &self.managed_rss_check_name("key and table are set, and in force"),
            if is_managed_in_force { Ok(measurement_text) } else { Err(anyhow!(measurement_text)) },
        );
        let matched_syns = daemons.wait_and_count_matched_syns(guest, counts_before, MEASURED_FLOW_COUNT.into())?;
        let matched_text = format!("{matched_syns} of {MEASURED_FLOW_COUNT} SYNs by the predicted queue");
        let count_result = if matched_syns == u64::from(MEASURED_FLOW_COUNT) {
            daemons.wait_for_rss_warning(guest, false).map(|()| matched_text)
        } else {
            Err(anyhow!(matched_text))
        };
        tally.record_result(&self.managed_rss_check_name("the agent counts them"), count_result);

        if self.nic == NicModel::Virtio {
            self.check_warning_without_hashing(&daemons, guest, guest_tap, tally)?;
        }

        daemons.stop(guest)?;
        let rss_after = rss::read_rss(guest)?;
        let restore_result = if rss_after == rss_before {
            Ok("as before".to_owned())
        } else {
            Err(anyhow!("{rss_after:?}, not {rss_before:?}"))
        };
        tally.record_result(&self.managed_rss_check_name("key and table are put back"), restore_result);
        Ok(())
    }

    fn managed_rss_check_name(&self, check: &str) -> String {
        self.full_check_name(&format!("manage_rss: {check}"))
    }

    /// Switches hashing off, checks that an agent with `manage_rss = true` warns, and switches hashing on again.
    fn check_warning_without_hashing(
        &self,
        daemons: &ControllerAndAgent,
        guest: &mut QemuGuest,
        guest_tap: &GuestTap,
        tally: &mut CheckTally,
    ) -> Result<()> {
        guest.run_successfully("ethtool -K eth0 rxhash on && ethtool -K eth0 rxhash off")?;
        let measurement = rss::measure_flow_queues(guest, self.nic, guest_tap)?;
        ensure!(measurement.are_families_in_force() == [false, false], "hashing is off, and {measurement}");
        let warning_result = daemons.wait_for_rss_warning(guest, true);
        tally.record_result(
            &self.managed_rss_check_name("hashing is switched off, and the agent warns"),
            warning_result.map(|()| measurement.to_string()),
        );
        guest.run_successfully("ethtool -K eth0 rxhash on")?;
        Ok(())
    }
}

/// Runs `coreward check-kernel`, which loads every BPF program and prints `ok` or the verifier's error.
fn check_bpf_programs(guest: &mut QemuGuest) -> Result<String> {
    let (exit_status, program_listing) =
        guest.try_run("coreward check-kernel 2>/tmp/check-kernel.log", VERIFIER_TIMEOUT)?;
    let program_names: Vec<&str> = program_listing.split_whitespace().collect();
    ensure!(exit_status == 0, "{program_listing}\n{}", guest.run_successfully("tail -c 1500 /tmp/check-kernel.log")?);
    ensure!(!program_names.is_empty(), "it named no program");
    Ok(program_names.join(" "))
}

/// Checks that the agent's output agrees with a measurement: key, table, verdict, and each flow's predicted and actual
/// queue.
fn check_agent_agrees_with_measurement(measurement: &RssMeasurement, watch_output: &RssWatchOutput) -> Result<String> {
    ensure!(
        watch_output.shown_rss == measurement.shown_rss,
        "it read {:?}, ethtool {:?}",
        watch_output.shown_rss,
        measurement.shown_rss
    );
    for (flow, queue) in &measurement.flow_queues {
        let expected_syn = (*flow, rss::predicted_queue(&measurement.shown_rss, flow), *queue);
        ensure!(
            watch_output.predicted_and_actual_queues.contains(&expected_syn),
            "expected (flow, predicted, actual) {expected_syn:?} among {:?}",
            watch_output.predicted_and_actual_queues
        );
    }
    let expected_verdict = if measurement.is_in_force() { "in_force" } else { "not_in_force" };
    ensure!(
        watch_output.verdict == expected_verdict,
        "its verdict is {}, expected {expected_verdict}",
        watch_output.verdict
    );
    Ok(format!("key, table, queues of {MEASURED_FLOW_COUNT} flows, verdict {expected_verdict}"))
}

/// Gives the guest its addresses, and waits until its NIC has a link. Fails after 20 s.
fn set_up_guest_network(guest: &mut QemuGuest) -> Result<()> {
    guest.run_successfully("ip link set eth0 up")?;
    guest.run_successfully(&format!("ip addr add {}/32 dev lo", IPV4_SYN_DESTINATION.ip()))?;
    // The guest sends no answers. Some drivers' interrupts count both directions, but only received packets should
    // count.
    guest.run_successfully("ip route add blackhole default")?;
    let deadline = Instant::now() + Duration::from_secs(20);
    while guest.run_successfully("cat /sys/class/net/eth0/carrier")?.trim() != "1" {
        ensure!(Instant::now() < deadline, "the guest's NIC has no link after 20 s");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}
