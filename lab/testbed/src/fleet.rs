//! coreward's own processes in a testbed: a controller, load balancers, an agent per server, each the real daemon with
//! a configuration file of its own, in the namespace where it belongs.
//!
//! Daemons are called `controller`, `rack1` ..., `lb1`, `lb2` ..., `agent-s1`, `agent-s2` ...

mod daemons;
mod files;
mod names;
mod options;
mod ready;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use coreward_tls::Role;
use coreward_tls::authority::{Authority, DAY, Validity};
use nix::sys::signal::Signal;

use crate::addresses::{load_balancer_name, rack_name};
use crate::namespace::Namespace;
use crate::process::{Process, TIMEOUT};
use crate::topology::Testbed;

pub(crate) use daemons::logs;
pub use daemons::{coreward_command, lab_command, operator_command, operator_command_for, unit_capabilities};
pub use files::{bundle, busy_file, certificate_files, certificates, issue};
pub use names::{
    CONTROLLER, CONTROLLER_PORT, agent_name, api_address_of, controller_address, controller_address_of,
    controller_name, rack_listen_address,
};
pub use options::{AdminState, FleetOptions, LoadSource};

use daemons::start_daemon;
use files::{
    configuration, fleet_name, write_agent_file, write_controller_files, write_load_balancer_file, write_rack_file,
};
use names::DaemonName;

/// The running daemons; all end with this value.
#[derive(Debug)]
pub struct Fleet {
    options: FleetOptions,
    pool: BTreeMap<u16, AdminState>,
    controllers: BTreeMap<u16, Process>,
    racks: BTreeMap<u16, Process>,
    load_balancers: BTreeMap<u16, Process>,
    agents: BTreeMap<u16, Process>,
    /// By daemon: another command than [`coreward_command`].
    commands: BTreeMap<String, PathBuf>,
}

impl Fleet {
    /// Starts controller, racks, load balancers and, if there are to be any, an agent for each server of the testbed,
    /// all of them in the pool, and waits until every agent reports and a table is in force. Fails when a daemon cannot
    /// be started or is not ready in time; the error holds its log's last lines.
    pub fn start(testbed: &Testbed, options: FleetOptions) -> anyhow::Result<Self> {
        let pool: BTreeMap<u16, AdminState> =
            testbed.server_numbers().into_iter().map(|number| (number, AdminState::Active)).collect();
        if options.tls {
            Authority::init(&certificates(testbed), &fleet_name()?, 30 * DAY)?;
            issue(testbed, Role::Controller, "controller", &fleet_name()?, Validity::from_now(DAY))?;
        }
        write_controller_files(testbed, &options, &pool)?;
        let mut fleet = Self {
            options,
            pool,
            controllers: BTreeMap::new(),
            racks: BTreeMap::new(),
            load_balancers: BTreeMap::new(),
            agents: BTreeMap::new(),
            commands: BTreeMap::new(),
        };
        for number in 1..=fleet.options.controllers {
            fleet.start_controller(testbed, number)?;
        }
        if fleet.options.applied.is_some() {
            fleet.apply(testbed, &configuration(testbed, "fleet"))?;
        }
        for number in 1..=testbed.options().racks {
            fleet.start_rack(testbed, number)?;
        }
        for number in testbed.load_balancer_numbers() {
            fleet.start_load_balancer(testbed, number)?;
        }
        if fleet.options.agents {
            // An agent that finds its first rack without a controller goes to the next.
            fleet.wait_until(testbed, || fleet.check_racks(testbed))?;
            for number in testbed.server_numbers() {
                fleet.start_agent(testbed, number)?;
            }
        }
        fleet.wait_until_ready(testbed)?;
        Ok(fleet)
    }

    /// Starts the daemon of a load balancer (again, if it was killed). Fails when there is no such load balancer or the
    /// daemon cannot be started.
    pub fn start_load_balancer(&mut self, testbed: &Testbed, number: u16) -> anyhow::Result<()> {
        self.issue_certificate(testbed, Role::Lb, &load_balancer_name(number))?;
        write_load_balancer_file(testbed, &self.options, number)?;
        let daemon = self.start_daemon(testbed, testbed.load_balancer(number)?, "lb", &load_balancer_name(number))?;
        self.load_balancers.insert(number, daemon);
        Ok(())
    }

    /// Adds a load balancer to the testbed, and announces it when it has a table. Returns its number. Fails when it
    /// cannot be made or started, or is not ready in time.
    pub fn add_load_balancer(&mut self, testbed: &mut Testbed) -> anyhow::Result<u16> {
        let number = testbed.add_load_balancer()?;
        self.start_load_balancer(testbed, number)?;
        self.wait_until_ready(testbed)?;
        testbed.announce(&testbed.load_balancer_numbers())?;
        Ok(number)
    }

    /// The power of a load balancer fails: daemon, data plane and everything pinned are gone. The routers notice after
    /// `noticed`; until then what they send there is lost. Fails when there is no such load balancer.
    pub fn kill_load_balancer(&mut self, testbed: &mut Testbed, number: u16, noticed: Duration) -> anyhow::Result<()> {
        testbed.remove_load_balancer(number)?;
        self.load_balancers.remove(&number);
        std::thread::sleep(noticed);
        testbed.announce(&testbed.load_balancer_numbers())
    }

    /// Restarts a load balancer without any state, as after a crash of its kernel; packets to it are lost until it has
    /// its tables again. Fails when there is no such load balancer, or it is not ready in time.
    pub fn reboot_load_balancer(&mut self, testbed: &Testbed, number: u16) -> anyhow::Result<()> {
        self.kill(&load_balancer_name(number))?;
        testbed.forget_load_balancer(number)?;
        self.start_load_balancer(testbed, number)?;
        self.wait_until_ready(testbed)
    }

    /// A daemon ends in order, and a new process takes over what it left, as when another version is installed. Fails
    /// when there is none of that name, or it does not end or start.
    pub fn upgrade(&mut self, testbed: &Testbed, name: &str) -> anyhow::Result<()> {
        let status = self.daemon(name)?.terminate(*TIMEOUT)?;
        ensure!(status.success(), "{name} ended with {status}");
        self.restart(testbed, name)
    }

    /// Starts the agent of a server (again, if it was killed). Fails when there is no such server or the daemon cannot
    /// be started.
    pub fn start_agent(&mut self, testbed: &Testbed, number: u16) -> anyhow::Result<()> {
        self.issue_certificate(testbed, Role::Agent, &format!("s{number}"))?;
        write_agent_file(testbed, &self.options, number)?;
        let agent = self.start_daemon(testbed, testbed.server(number)?, "agent", &format!("agent-s{number}"))?;
        self.agents.insert(number, agent);
        Ok(())
    }

    /// A certificate for a daemon that has none.
    fn issue_certificate(&self, testbed: &Testbed, role: Role, name: &str) -> anyhow::Result<()> {
        if self.options.tls && !bundle(testbed, role, name).exists() {
            issue(testbed, role, name, &fleet_name()?, Validity::from_now(DAY))?;
        }
        Ok(())
    }

    /// Writes the controller's file with this pool and lets it read it again. Fails when the file cannot be written or
    /// the controller has ended.
    pub fn set_pool(&mut self, testbed: &Testbed, pool: BTreeMap<u16, AdminState>) -> anyhow::Result<()> {
        write_controller_files(testbed, &self.options, &pool)?;
        self.pool = pool;
        self.daemon(&controller_name(1))?.signal(Signal::SIGHUP)
    }

    /// Restarts a daemon with another binary of coreward, which it has from then on; `None`: with this one. Fails when
    /// there is none of that name, or it does not end or start.
    pub fn replace_binary(&mut self, testbed: &Testbed, name: &str, binary: Option<&Path>) -> anyhow::Result<()> {
        self.set_command(name, binary.map_or_else(coreward_command, |binary| Ok(binary.to_owned()))?);
        self.upgrade(testbed, name)
    }

    /// From its next start on, the daemon of that name runs this command: another version.
    pub fn set_command(&mut self, name: &str, command: PathBuf) {
        self.commands.insert(name.to_owned(), command);
    }

    fn start_controller(&mut self, testbed: &Testbed, number: u16) -> anyhow::Result<()> {
        let name = controller_name(number);
        let controller = self.start_daemon(testbed, testbed.controller(), "controller", &name)?;
        self.controllers.insert(number, controller);
        Ok(())
    }

    fn start_rack(&mut self, testbed: &Testbed, number: u16) -> anyhow::Result<()> {
        let name = rack_name(number);
        self.issue_certificate(testbed, Role::Rack, &name)?;
        write_rack_file(testbed, &self.options, number)?;
        let rack = self.start_daemon(testbed, testbed.rack(number)?, "rack", &name)?;
        self.racks.insert(number, rack);
        Ok(())
    }

    /// Puts a document in force as soon as a controller leads.
    fn apply(&self, testbed: &Testbed, document: &Path) -> anyhow::Result<()> {
        let end = Instant::now() + *TIMEOUT;
        loop {
            match self.query_controller(testbed, &["apply", "--yes", &document.display().to_string()]) {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() > end => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// Output of `coreward ARGUMENTS`, of the controller that leads.
    fn query_controller(&self, testbed: &Testbed, arguments: &[&str]) -> anyhow::Result<Vec<u8>> {
        let command = operator_command_for(testbed, self.controllers.keys().copied(), arguments)?;
        Ok(testbed.run(testbed.controller(), command)?.stdout)
    }

    fn start_daemon(
        &self,
        testbed: &Testbed,
        namespace: &Namespace,
        daemon: &str,
        name: &str,
    ) -> anyhow::Result<Process> {
        let command = self.commands.get(name).map_or_else(coreward_command, |command| Ok(command.clone()))?;
        start_daemon(testbed, namespace, daemon, name, &self.options, &command)
    }

    /// The names of all daemons: controllers', then racks', load balancers', agents'.
    pub fn daemons(&self) -> Vec<String> {
        let load_balancers = self.load_balancers.keys().map(|number| load_balancer_name(*number));
        let agents = self.agents.keys().map(|number| agent_name(*number));
        let controllers = self.controllers.keys().map(|number| controller_name(*number));
        let racks = self.racks.keys().map(|number| rack_name(*number));
        controllers.chain(racks).chain(load_balancers).chain(agents).collect()
    }

    pub fn options(&self) -> &FleetOptions {
        &self.options
    }

    /// Writes the controller's file with these options, and reloads it. Fails when the file cannot be written or the
    /// controller has ended.
    pub fn set_options(&mut self, testbed: &Testbed, options: FleetOptions) -> anyhow::Result<()> {
        self.options = options;
        self.set_pool(testbed, self.pool.clone())
    }

    /// Writes the fleet's file with this in the place of [`FleetOptions::more`] and lets the controller read it again.
    /// Fails when the file cannot be written or the controller has ended.
    pub fn set_fleet_text(&mut self, testbed: &Testbed, more: &str) -> anyhow::Result<()> {
        self.set_options(testbed, FleetOptions { fleet_text: more.to_owned(), ..self.options.clone() })
    }

    /// The pool as the controller's file has it.
    pub fn pool(&self) -> &BTreeMap<u16, AdminState> {
        &self.pool
    }

    /// The daemon of that name. Fails when there is none.
    pub fn daemon(&mut self, name: &str) -> anyhow::Result<&mut Process> {
        let daemon = match DaemonName::parse(name)? {
            DaemonName::Controller(number) => self.controllers.get_mut(&number),
            DaemonName::Rack(number) => self.racks.get_mut(&number),
            DaemonName::LoadBalancer(number) => self.load_balancers.get_mut(&number),
            DaemonName::Agent(number) => self.agents.get_mut(&number),
        };
        daemon.with_context(|| format!("there is no daemon {name}"))
    }

    /// Kills a daemon with SIGKILL. Fails when there is none of that name.
    pub fn kill(&mut self, name: &str) -> anyhow::Result<()> {
        let daemon = self.daemon(name)?;
        daemon.signal(Signal::SIGKILL)?;
        daemon.wait(*TIMEOUT).map(drop)
    }

    /// Starts a killed daemon again. Fails when there is none of that name, or it cannot be started.
    pub fn restart(&mut self, testbed: &Testbed, name: &str) -> anyhow::Result<()> {
        match DaemonName::parse(name)? {
            DaemonName::Controller(number) => self.start_controller(testbed, number),
            DaemonName::Rack(number) => self.start_rack(testbed, number),
            DaemonName::LoadBalancer(number) => self.start_load_balancer(testbed, number),
            DaemonName::Agent(number) => self.start_agent(testbed, number),
        }
    }

    /// `coreward status --format json`. Fails when the controller does not answer.
    pub fn status(&self, testbed: &Testbed) -> anyhow::Result<serde_json::Value> {
        Ok(serde_json::from_slice(&self.query_controller(testbed, &["status", "--format", "json"])?)?)
    }

    /// Waits until every active server of the pool reports, if it has an agent, and the load balancers' tables have all
    /// servers that take new connections. Fails when that takes longer than [`TIMEOUT`]; the error holds the last lines
    /// of the daemons' logs.
    pub fn wait_until_ready(&self, testbed: &Testbed) -> anyhow::Result<()> {
        self.wait_until(testbed, || self.check_ready(testbed))
    }

    fn wait_until(&self, testbed: &Testbed, check: impl Fn() -> anyhow::Result<()>) -> anyhow::Result<()> {
        let end = Instant::now() + *TIMEOUT;
        while let Err(missing) = check() {
            ensure!(Instant::now() < end, "the fleet is not ready: {missing:#}\n{}", logs(testbed));
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}
