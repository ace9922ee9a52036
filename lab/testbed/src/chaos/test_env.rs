//! Test environment: starts and ends faults, and restarts daemons that ended, as systemd would.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use coreward_tls::Role;
use nix::sys::signal::Signal;

use super::byzantine_agent::{ByzantineAgent, FalseReportCounters, FalseReportKind};
use super::disk::TmpfsDisk;
use super::etcd::Etcd;
use super::fault::Fault;
use super::invariants::{ResourceUsage, resource_usage};
use super::network::NetworkFaults;
use crate::fleet::{
    CONTROLLER, Fleet, agent_name, certificate_files, controller_address_of, coreward_command, rack_listen_address,
    read_log_tails,
};
use crate::preload::PreloadedFaults;
use crate::topology::Testbed;

const SECOND_NS: i64 = 1_000_000_000;
/// Maximum time until a daemon ends after SIGTERM.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Fleet of daemons, with the faults that affect it at present.
#[derive(Debug)]
pub struct TestEnv<'a> {
    testbed: &'a Testbed,
    fleet: Fleet,
    network: NetworkFaults<'a>,
    disk: TmpfsDisk,
    preloaded_faults: PreloadedFaults,
    etcd: Option<Etcd<'a>>,
    stopped_etcd: Option<u16>,
    /// Executable with which upgrades alternate; `None`: upgrades restart the same executable.
    alternate_command: Option<PathBuf>,
    /// Names of the daemons that run the alternate executable.
    alternate_daemons: BTreeSet<String>,
    down_daemons: BTreeSet<String>,
    running_impostors: BTreeMap<u16, RunningImpostor>,
    false_reports: Arc<FalseReportCounters>,
    /// Descriptions of the violated invariants.
    pub violations: Vec<String>,
}

/// Thread of an impostor, with the flag that ends it.
#[derive(Debug)]
struct RunningImpostor {
    done: Arc<AtomicBool>,
    thread: JoinHandle<anyhow::Result<()>>,
}

impl<'a> TestEnv<'a> {
    /// Creates an environment without faults. Fails when the switch rejects the packet filter rules.
    pub fn new(
        testbed: &'a Testbed,
        fleet: Fleet,
        disk: TmpfsDisk,
        preloaded_faults: PreloadedFaults,
        etcd: Option<Etcd<'a>>,
        alternate_command: Option<PathBuf>,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            testbed,
            fleet,
            network: NetworkFaults::new(testbed)?,
            disk,
            preloaded_faults,
            etcd,
            stopped_etcd: None,
            alternate_command,
            alternate_daemons: BTreeSet::new(),
            down_daemons: BTreeSet::new(),
            running_impostors: BTreeMap::new(),
            false_reports: Arc::default(),
            violations: Vec::new(),
        })
    }

    pub fn false_reports(&self) -> &FalseReportCounters {
        &self.false_reports
    }

    /// Injects a fault. Fails when the fault cannot be injected.
    pub fn begin_fault(&mut self, fault: &Fault) -> anyhow::Result<()> {
        match fault {
            Fault::Kill(daemon) => self.kill(daemon),
            Fault::Stop(daemon) => self.fleet.daemon(daemon)?.signal(Signal::SIGSTOP),
            Fault::Upgrade(daemon) => self.upgrade(daemon),
            Fault::Partition { from, to, is_bidirectional } => self.network.drop_packets(from, to, *is_bidirectional),
            Fault::Link(port) => self.network.set_link(port, false),
            Fault::Disk { fails_every_write: true } => self.preloaded_faults.set_disk_full(CONTROLLER, true),
            Fault::Disk { fails_every_write: false } => self.disk.fill(),
            Fault::Etcd { is_leader, member_number, is_stopped } => {
                self.begin_etcd(*is_leader, *member_number, *is_stopped)
            }
            Fault::Clock { daemon, offset_s } => self.preloaded_faults.set_clock(daemon, offset_s * SECOND_NS),
            Fault::ByzantineAgent(server) => self.start_false_reports(*server, FalseReportKind::FullControl),
        }
        .with_context(|| fault.to_string())
    }

    /// Removes a fault. Fails when the fault cannot be removed.
    pub fn end_fault(&mut self, fault: &Fault) -> anyhow::Result<()> {
        match fault {
            Fault::Kill(daemon) => {
                self.start(daemon);
                Ok(())
            }
            Fault::Stop(daemon) => self.fleet.daemon(daemon)?.signal(Signal::SIGCONT),
            Fault::Upgrade(_) => Ok(()),
            Fault::Partition { .. } => self.network.restore(),
            Fault::Link(port) => self.network.set_link(port, true),
            Fault::Disk { fails_every_write: true } => self.preloaded_faults.set_disk_full(CONTROLLER, false),
            Fault::Disk { fails_every_write: false } => self.disk.remove_filler(),
            Fault::Etcd { is_stopped, .. } => self.end_etcd(*is_stopped),
            Fault::Clock { daemon, .. } => self.preloaded_faults.set_clock(daemon, 0),
            Fault::ByzantineAgent(server) => self.stop_false_reports(*server),
        }
        .with_context(|| format!("the end of: {fault}"))
    }

    /// Restarts daemons that have ended unexpectedly. Fails when the kernel does not know one of the processes.
    pub fn restart_ended_daemons(&mut self) -> anyhow::Result<()> {
        for daemon in self.fleet.daemons() {
            if self.down_daemons.contains(&daemon) {
                continue;
            }
            if let Some(status) = self.fleet.daemon(&daemon)?.try_wait()? {
                self.violations.push(format!("{daemon} ended by itself ({status}):\n{}", read_log_tails(self.testbed)));
                self.start(&daemon);
            }
        }
        Ok(())
    }

    /// Kills all controllers at once and restarts them. Fails when a controller cannot be killed.
    pub fn restart_controllers(&mut self) -> anyhow::Result<()> {
        let controllers = self.controllers();
        controllers.iter().try_for_each(|controller| self.kill(controller))?;
        controllers.iter().for_each(|controller| self.start(controller));
        Ok(())
    }

    /// Returns the current resource usage of each daemon, by name. Fails when a daemon has ended.
    pub fn resource_usage(&mut self) -> anyhow::Result<BTreeMap<String, ResourceUsage>> {
        let daemons = self.fleet.daemons().into_iter();
        daemons.map(|name| Ok((name.clone(), resource_usage(self.fleet.daemon(&name)?.pid())?))).collect()
    }

    fn controllers(&self) -> Vec<String> {
        self.fleet.daemons().into_iter().filter(|daemon| daemon.starts_with(CONTROLLER)).collect()
    }

    fn kill(&mut self, daemon: &str) -> anyhow::Result<()> {
        self.down_daemons.insert(daemon.to_owned());
        if self.fleet.daemon(daemon)?.try_wait()?.is_some() {
            return Ok(());
        }
        self.fleet.kill(daemon)
    }

    /// Starts a daemon. If it ends immediately, [`TestEnv::restart_ended_daemons`] detects that.
    fn start(&mut self, daemon: &str) {
        self.down_daemons.remove(daemon);
        if let Err(error) = self.fleet.restart(self.testbed, daemon) {
            tracing::debug!(event = "not-started", daemon, error = format!("{error:#}"), "cannot start a daemon");
        }
    }

    fn upgrade(&mut self, daemon: &str) -> anyhow::Result<()> {
        let status = self.fleet.daemon(daemon)?.terminate(END_LIMIT)?;
        ensure!(status.success(), "{daemon} ended with {status}: {}", read_log_tails(self.testbed));
        if let Some(other) = self.alternate_command.clone() {
            let is_other = self.alternate_daemons.remove(daemon);
            if !is_other {
                self.alternate_daemons.insert(daemon.to_owned());
            }
            self.fleet.set_command(daemon, if is_other { coreward_command()? } else { other });
        }
        self.start(daemon);
        Ok(())
    }

    fn begin_etcd(&mut self, leader: bool, number: u16, stop: bool) -> anyhow::Result<()> {
        let etcd = self.etcd.as_mut().context("a fleet without etcd")?;
        let number = if leader { etcd.leader()? } else { number };
        self.stopped_etcd = Some(number);
        if stop { etcd.signal(number, Signal::SIGSTOP) } else { etcd.kill(number) }
    }

    fn end_etcd(&mut self, stop: bool) -> anyhow::Result<()> {
        let (Some(etcd), Some(number)) = (&mut self.etcd, self.stopped_etcd.take()) else { return Ok(()) };
        if stop { etcd.signal(number, Signal::SIGCONT) } else { etcd.restart(number) }
    }

    /// Kills the server's agent and starts an impostor instead of it. Fails when the agent cannot be killed.
    pub fn start_false_reports(&mut self, server: u16, kind: FalseReportKind) -> anyhow::Result<()> {
        self.kill(&agent_name(server))?;
        let mut controllers = Vec::new();
        for number in 1..=self.controllers().len() {
            controllers.push(controller_address_of(number as u16).parse()?);
        }
        for rack in 1..=self.testbed.options().racks {
            controllers.push(rack_listen_address(rack).parse()?);
        }
        let stolen_files = certificate_files(self.testbed, Role::Agent, &format!("s{server}"));
        let impostor = ByzantineAgent { server, stolen_files, controllers, kind };
        let (machine, false_reports) = (self.testbed.server(server)?.clone(), self.false_reports.clone());
        let done = Arc::new(AtomicBool::new(false));
        let is_done = done.clone();
        let thread = std::thread::spawn(move || impostor.run(&machine, &false_reports, &is_done));
        self.running_impostors.insert(server, RunningImpostor { done, thread });
        Ok(())
    }

    /// Ends the impostor and restarts the server's agent. Fails when the impostor has failed.
    pub fn stop_false_reports(&mut self, server: u16) -> anyhow::Result<()> {
        if let Some(RunningImpostor { done, thread }) = self.running_impostors.remove(&server) {
            done.store(true, Ordering::Relaxed);
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        self.start(&agent_name(server));
        Ok(())
    }
}

impl Drop for TestEnv<'_> {
    fn drop(&mut self) {
        for RunningImpostor { done, .. } in self.running_impostors.values() {
            done.store(true, Ordering::Relaxed);
        }
    }
}
