//! Environment of a chaos test. It starts and ends faults, and restarts daemons that ended, as systemd would.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use coreward_tls::FleetRole;
use nix::sys::signal::Signal;

use super::byzantine_agent::{ByzantineAgent, FalseReportCounters, FalseReportKind};
use super::etcd::EtcdCluster;
use super::fault::ChaosFault;
use super::invariants::{ProcessResourceUsage, read_resource_usage};
use super::network::NetworkFaults;
use super::tmpfs_disk::TmpfsDisk;
use crate::fleet::{
    FIRST_CONTROLLER_NAME, Fleet, agent_name, controller_address, coreward_binary_path, credential_file_paths,
    rack_controller_listen_address, read_log_tails,
};
use crate::preloaded_faults::PreloadedFaults;
use crate::topology::Testbed;

const NS_PER_SECOND: i64 = 1_000_000_000;
/// Maximum time that a daemon may take to end after SIGTERM.
const DAEMON_EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Fleet of daemons, with the faults that currently affect it.
#[derive(Debug)]
pub struct ChaosTestEnv<'a> {
    testbed: &'a Testbed,
    fleet: Fleet,
    network_faults: NetworkFaults<'a>,
    store_disk: TmpfsDisk,
    preloaded_faults: PreloadedFaults,
    etcd_cluster: Option<EtcdCluster<'a>>,
    failed_etcd_member_number: Option<u16>,
    /// Second executable for upgrades, which alternate between both executables. `None` if upgrades restart the same
    /// one.
    alternate_binary: Option<PathBuf>,
    /// Names of the daemons that currently run the alternate executable.
    alternate_binary_daemons: BTreeSet<String>,
    stopped_daemons: BTreeSet<String>,
    impostors: BTreeMap<u16, RunningImpostor>,
    false_report_counters: Arc<FalseReportCounters>,
    pub violations: Vec<String>,
}

/// Thread of an impostor, and the flag that makes it end.
#[derive(Debug)]
struct RunningImpostor {
    stop_flag: Arc<AtomicBool>,
    thread: JoinHandle<anyhow::Result<()>>,
}

impl<'a> ChaosTestEnv<'a> {
    /// Creates an environment without faults. Fails when the switch rejects the packet filter rules.
    pub fn new(
        testbed: &'a Testbed,
        fleet: Fleet,
        disk: TmpfsDisk,
        preloaded_faults: PreloadedFaults,
        etcd: Option<EtcdCluster<'a>>,
        alternate_binary: Option<PathBuf>,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            testbed,
            fleet,
            network_faults: NetworkFaults::new(testbed)?,
            store_disk: disk,
            preloaded_faults,
            etcd_cluster: etcd,
            failed_etcd_member_number: None,
            alternate_binary,
            alternate_binary_daemons: BTreeSet::new(),
            stopped_daemons: BTreeSet::new(),
            impostors: BTreeMap::new(),
            false_report_counters: Arc::default(),
            violations: Vec::new(),
        })
    }

    pub fn false_report_counters(&self) -> &FalseReportCounters {
        &self.false_report_counters
    }

    pub fn begin_fault(&mut self, fault: &ChaosFault) -> anyhow::Result<()> {
        match fault {
            ChaosFault::KillDaemon(daemon) => self.kill_daemon(daemon),
            ChaosFault::StopDaemon(daemon) => self.fleet.daemon_process(daemon)?.send_signal(Signal::SIGSTOP),
            ChaosFault::UpgradeDaemon(daemon) => self.upgrade_daemon(daemon),
            ChaosFault::Partition { sender_port, receiver_port, is_bidirectional } => {
                self.network_faults.drop_packets(sender_port, receiver_port, *is_bidirectional)
            }
            ChaosFault::LinkDown(port) => self.network_faults.set_port_link(port, false),
            ChaosFault::DiskFull { fails_every_write: true } => {
                self.preloaded_faults.set_disk_full(FIRST_CONTROLLER_NAME, true)
            }
            ChaosFault::DiskFull { fails_every_write: false } => self.store_disk.fill(),
            ChaosFault::EtcdFailure { hits_leader: is_leader, member_number, is_stopped } => {
                self.begin_etcd_fault(*is_leader, *member_number, *is_stopped)
            }
            ChaosFault::ClockOffset { daemon, offset_s } => {
                self.preloaded_faults.set_clock_offset(daemon, offset_s * NS_PER_SECOND)
            }
            ChaosFault::ByzantineAgent(server) => self.start_false_reports(*server, FalseReportKind::AllKinds),
        }
        .with_context(|| fault.to_string())
    }

    pub fn end_fault(&mut self, fault: &ChaosFault) -> anyhow::Result<()> {
        match fault {
            ChaosFault::KillDaemon(daemon) => {
                self.start_daemon(daemon);
                Ok(())
            }
            ChaosFault::StopDaemon(daemon) => self.fleet.daemon_process(daemon)?.send_signal(Signal::SIGCONT),
            ChaosFault::UpgradeDaemon(_) => Ok(()),
            ChaosFault::Partition { .. } => self.network_faults.stop_dropping_packets(),
            ChaosFault::LinkDown(port) => self.network_faults.set_port_link(port, true),
            ChaosFault::DiskFull { fails_every_write: true } => {
                self.preloaded_faults.set_disk_full(FIRST_CONTROLLER_NAME, false)
            }
            ChaosFault::DiskFull { fails_every_write: false } => self.store_disk.remove_filler(),
            ChaosFault::EtcdFailure { is_stopped, .. } => self.end_etcd_fault(*is_stopped),
            ChaosFault::ClockOffset { daemon, .. } => self.preloaded_faults.set_clock_offset(daemon, 0),
            ChaosFault::ByzantineAgent(server) => self.stop_false_reports(*server),
        }
        .with_context(|| format!("the end of: {fault}"))
    }

    /// Restarts the daemons that have ended unexpectedly. Fails when the state of a process cannot be read.
    pub fn restart_ended_daemons(&mut self) -> anyhow::Result<()> {
        for daemon in self.fleet.daemon_names() {
            if self.stopped_daemons.contains(&daemon) {
                continue;
            }
            if let Some(status) = self.fleet.daemon_process(&daemon)?.try_wait()? {
                self.violations.push(format!("{daemon} ended by itself ({status}):\n{}", read_log_tails(self.testbed)));
                self.start_daemon(&daemon);
            }
        }
        Ok(())
    }

    /// Kills all controllers at once and restarts them all. Fails when a controller cannot be killed.
    pub fn restart_controllers(&mut self) -> anyhow::Result<()> {
        let controller_names = self.controller_names();
        controller_names.iter().try_for_each(|controller| self.kill_daemon(controller))?;
        controller_names.iter().for_each(|controller| self.start_daemon(controller));
        Ok(())
    }

    /// Returns the current resource usage of each daemon, by daemon name. Fails when a daemon has ended.
    pub fn measure_resource_usage(&mut self) -> anyhow::Result<BTreeMap<String, ProcessResourceUsage>> {
        let daemons = self.fleet.daemon_names().into_iter();
        daemons.map(|name| Ok((name.clone(), read_resource_usage(self.fleet.daemon_process(&name)?.pid())?))).collect()
    }

    fn controller_names(&self) -> Vec<String> {
        self.fleet.daemon_names().into_iter().filter(|daemon| daemon.starts_with(FIRST_CONTROLLER_NAME)).collect()
    }

    fn kill_daemon(&mut self, daemon: &str) -> anyhow::Result<()> {
        self.stopped_daemons.insert(daemon.to_owned());
        if self.fleet.daemon_process(daemon)?.try_wait()?.is_some() {
            return Ok(());
        }
        self.fleet.kill_daemon(daemon)
    }

    /// Starts a daemon. If it ends immediately, [`ChaosTestEnv::restart_ended_daemons`] detects and restarts it later.
    fn start_daemon(&mut self, daemon: &str) {
        self.stopped_daemons.remove(daemon);
        if let Err(error) = self.fleet.restart_daemon(self.testbed, daemon) {
            tracing::debug!(event = "not-started", daemon, error = format!("{error:#}"), "cannot start a daemon");
        }
    }

    fn upgrade_daemon(&mut self, daemon: &str) -> anyhow::Result<()> {
        let exit_status = self.fleet.daemon_process(daemon)?.terminate(DAEMON_EXIT_TIMEOUT)?;
        ensure!(exit_status.success(), "{daemon} ended with {exit_status}: {}", read_log_tails(self.testbed));
        if let Some(alternate_executable) = self.alternate_binary.clone() {
            let ran_alternate_binary = self.alternate_binary_daemons.remove(daemon);
            if !ran_alternate_binary {
                self.alternate_binary_daemons.insert(daemon.to_owned());
            }
            self.fleet.set_daemon_binary(
                daemon,
                if ran_alternate_binary { coreward_binary_path()? } else { alternate_executable },
            );
        }
        self.start_daemon(daemon);
        Ok(())
    }

    fn begin_etcd_fault(&mut self, hits_leader: bool, number: u16, is_stopped: bool) -> anyhow::Result<()> {
        let etcd_cluster = self.etcd_cluster.as_mut().context("a fleet without etcd")?;
        let member_number = if hits_leader { etcd_cluster.query_leader_number()? } else { number };
        self.failed_etcd_member_number = Some(member_number);
        if is_stopped {
            etcd_cluster.send_signal(member_number, Signal::SIGSTOP)
        } else {
            etcd_cluster.kill_member(member_number)
        }
    }

    fn end_etcd_fault(&mut self, is_stopped: bool) -> anyhow::Result<()> {
        let (Some(etcd), Some(number)) = (&mut self.etcd_cluster, self.failed_etcd_member_number.take()) else {
            return Ok(());
        };
        if is_stopped { etcd.send_signal(number, Signal::SIGCONT) } else { etcd.restart_member(number) }
    }

    /// Kills the server's agent and starts an impostor in its place. Fails when the agent cannot be killed.
    pub fn start_false_reports(&mut self, server: u16, kind: FalseReportKind) -> anyhow::Result<()> {
        self.kill_daemon(&agent_name(server))?;
        let mut controller_addresses = Vec::new();
        for number in 1..=self.controller_names().len() {
            controller_addresses.push(controller_address(number as u16).parse()?);
        }
        for rack in 1..=self.testbed.options().rack_controller_count {
            controller_addresses.push(rack_controller_listen_address(rack).parse()?);
        }
        let stolen_credentials = credential_file_paths(self.testbed, FleetRole::Agent, &format!("s{server}"));
        let impostor =
            ByzantineAgent { server_number: server, stolen_credentials, controller_addresses, report_kind: kind };
        let (server_namespace, false_reports) =
            (self.testbed.server(server)?.clone(), self.false_report_counters.clone());
        let stop_flag = Arc::new(AtomicBool::new(false));
        let thread_stop_flag = stop_flag.clone();
        let impostor_thread = std::thread::spawn(move || {
            impostor.run_until_stopped(&server_namespace, &false_reports, &thread_stop_flag)
        });
        self.impostors.insert(server, RunningImpostor { stop_flag, thread: impostor_thread });
        Ok(())
    }

    /// Ends the impostor and restarts the server's real agent. Fails when the impostor has failed.
    pub fn stop_false_reports(&mut self, server: u16) -> anyhow::Result<()> {
        if let Some(RunningImpostor { stop_flag, thread }) = self.impostors.remove(&server) {
            stop_flag.store(true, Ordering::Relaxed);
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        self.start_daemon(&agent_name(server));
        Ok(())
    }
}

impl Drop for ChaosTestEnv<'_> {
    fn drop(&mut self) {
        for RunningImpostor { stop_flag, .. } in self.impostors.values() {
            stop_flag.store(true, Ordering::Relaxed);
        }
    }
}
