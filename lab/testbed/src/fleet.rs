//! Processes of coreward in a testbed, which are controllers, rack controllers, load balancers, and an agent per
//! server. Each is the real daemon with its own configuration file, in its host's namespace.
//!
//! Names of daemons: `controller`, `rack1` ..., `lb1`, `lb2` ..., `agent-s1`, `agent-s2` ...

mod daemons;
mod files;
mod fleet_readiness;
mod names;
mod options;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use coreward_tls::FleetRole;
use coreward_tls::authority::{CertificateAuthority, CertificateValidity, DAY};
use nix::sys::signal::Signal;

use crate::addresses::{load_balancer_name, rack_controller_name};
use crate::namespace::NetworkNamespace;
use crate::process::{DEFAULT_WAIT_TIMEOUT, TestbedProcess};
use crate::topology::Testbed;

pub(crate) use daemons::read_log_tails;
pub use daemons::{
    build_operator_command, build_operator_command_at_controllers, coreward_binary_path, lab_binary_path,
    systemd_unit_capabilities,
};
pub use files::{
    certificate_directory, core_load_file_path, credential_directory, credential_file_paths, issue_certificate,
};
pub(crate) use fleet_readiness::as_array_or_empty;
pub use names::{
    CONTROLLER_PORT, FIRST_CONTROLLER_NAME, agent_name, controller_address, controller_api_address, controller_name,
    first_controller_address, rack_controller_listen_address,
};
pub use options::{CoreLoadSource, ServerAdminState, TestbedFleetOptions};

use daemons::start_daemon;
use files::{
    daemon_config_path, testbed_fleet_name, write_agent_file, write_controller_files, write_load_balancer_file,
    write_rack_controller_file,
};
use names::DaemonName;

/// Running daemons of a fleet. Dropping this value kills all of them.
#[derive(Debug)]
pub struct Fleet {
    options: TestbedFleetOptions,
    server_pool: BTreeMap<u16, ServerAdminState>,
    controllers: BTreeMap<u16, TestbedProcess>,
    rack_controllers: BTreeMap<u16, TestbedProcess>,
    load_balancers: BTreeMap<u16, TestbedProcess>,
    agents: BTreeMap<u16, TestbedProcess>,
    /// Executables of daemons that do not run [`coreward_binary_path`], by name of the daemon.
    binary_overrides: BTreeMap<String, PathBuf>,
}

/// Creates the testbed's certificate authority, and issues the controllers' certificate.
fn create_certificate_authority(testbed: &Testbed) -> anyhow::Result<()> {
    let fleet_name = testbed_fleet_name()?;
    CertificateAuthority::init(&certificate_directory(testbed), &fleet_name, 30 * DAY)?;
    issue_certificate(testbed, FleetRole::Controller, "controller", &fleet_name, CertificateValidity::from_now(DAY))?;
    Ok(())
}

impl Fleet {
    /// Starts the controllers, rack controllers, load balancers and, if enabled, an agent for each server in the
    /// testbed. All servers are in the pool. Waits until every agent reports and load balancers use a table. Fails with
    /// the last lines of the logs when a daemon cannot be started or is not ready in time.
    pub fn start(testbed: &Testbed, options: TestbedFleetOptions) -> anyhow::Result<Self> {
        let pool: BTreeMap<u16, ServerAdminState> =
            testbed.server_numbers().into_iter().map(|number| (number, ServerAdminState::Active)).collect();
        if options.uses_tls {
            create_certificate_authority(testbed)?;
        }
        write_controller_files(testbed, &options, &pool)?;
        let mut fleet = Self {
            options,
            server_pool: pool,
            controllers: BTreeMap::new(),
            rack_controllers: BTreeMap::new(),
            load_balancers: BTreeMap::new(),
            agents: BTreeMap::new(),
            binary_overrides: BTreeMap::new(),
        };
        for number in 1..=fleet.options.controller_count {
            fleet.start_controller(testbed, number)?;
        }
        if fleet.options.applied_document.is_some() {
            fleet.apply_document(testbed, &daemon_config_path(testbed, "fleet"))?;
        }
        for number in 1..=testbed.options().rack_controller_count {
            fleet.start_rack_controller(testbed, number)?;
        }
        for number in testbed.load_balancer_numbers() {
            fleet.start_load_balancer(testbed, number)?;
        }
        if fleet.options.runs_agents {
            // Wait first, because an agent would connect to its next rack if its first rack had no controller.
            fleet.wait_until_check_succeeds(testbed, || fleet.check_rack_controllers_connected(testbed))?;
            for number in testbed.server_numbers() {
                fleet.start_agent(testbed, number)?;
            }
        }
        fleet.wait_until_ready(testbed)?;
        Ok(fleet)
    }

    /// Starts a load balancer's daemon, or restarts it after it was killed. Fails when the load balancer does not exist
    /// or the daemon cannot be started.
    pub fn start_load_balancer(&mut self, testbed: &Testbed, number: u16) -> anyhow::Result<()> {
        self.issue_certificate(testbed, FleetRole::Lb, &load_balancer_name(number))?;
        write_load_balancer_file(testbed, &self.options, number)?;
        let lb_daemon =
            self.start_daemon(testbed, testbed.load_balancer(number)?, "lb", &load_balancer_name(number))?;
        self.load_balancers.insert(number, lb_daemon);
        Ok(())
    }

    /// Adds a load balancer to the testbed, announces its routes once it has a table, and returns its number. Fails
    /// when it cannot be created or started, or is not ready in time.
    pub fn add_load_balancer(&mut self, testbed: &mut Testbed) -> anyhow::Result<u16> {
        let number = testbed.add_load_balancer()?;
        self.start_load_balancer(testbed, number)?;
        self.wait_until_ready(testbed)?;
        testbed.route_vips_to_load_balancers(&testbed.load_balancer_numbers())?;
        Ok(number)
    }

    /// Kills a load balancer and removes its host, as in a power failure. After `detection_time`, the VIPs are routed
    /// to the other load balancers. Fails when the load balancer does not exist or is the last one.
    pub fn kill_load_balancer(
        &mut self,
        testbed: &mut Testbed,
        number: u16,
        detection_time: Duration,
    ) -> anyhow::Result<()> {
        testbed.remove_load_balancer(number)?;
        self.load_balancers.remove(&number);
        std::thread::sleep(detection_time);
        testbed.route_vips_to_load_balancers(&testbed.load_balancer_numbers())
    }

    /// Restarts a load balancer without any state, as after a kernel crash. Packets to it are lost until it has tables
    /// again. Fails when the load balancer does not exist, or is not ready in time.
    pub fn reboot_load_balancer(&mut self, testbed: &Testbed, number: u16) -> anyhow::Result<()> {
        self.kill_daemon(&load_balancer_name(number))?;
        testbed.remove_load_balancer_pins(number)?;
        self.start_load_balancer(testbed, number)?;
        self.wait_until_ready(testbed)
    }

    /// Stops a daemon gracefully and starts a new process that continues with its state, as in an upgrade. Fails when
    /// the daemon does not exist, stop or start.
    pub fn upgrade_daemon(&mut self, testbed: &Testbed, name: &str) -> anyhow::Result<()> {
        let exit_status = self.daemon_process(name)?.terminate(*DEFAULT_WAIT_TIMEOUT)?;
        ensure!(exit_status.success(), "{name} ended with {exit_status}");
        self.restart_daemon(testbed, name)
    }

    /// Starts a server's agent, or restarts it after it was killed. Fails when the server does not exist or the agent
    /// cannot be started.
    pub fn start_agent(&mut self, testbed: &Testbed, number: u16) -> anyhow::Result<()> {
        self.issue_certificate(testbed, FleetRole::Agent, &format!("s{number}"))?;
        write_agent_file(testbed, &self.options, number)?;
        let agent = self.start_daemon(testbed, testbed.server(number)?, "agent", &format!("agent-s{number}"))?;
        self.agents.insert(number, agent);
        Ok(())
    }

    /// Issues a certificate for a daemon, unless it already has one.
    fn issue_certificate(&self, testbed: &Testbed, role: FleetRole, name: &str) -> anyhow::Result<()> {
        if self.options.uses_tls && !credential_directory(testbed, role, name).exists() {
            issue_certificate(testbed, role, name, &testbed_fleet_name()?, CertificateValidity::from_now(DAY))?;
        }
        Ok(())
    }

    /// Writes a new server pool into the controller's file, and makes the controller reload it. Fails when the file
    /// cannot be written or the controller has ended.
    pub fn set_server_pool(&mut self, testbed: &Testbed, pool: BTreeMap<u16, ServerAdminState>) -> anyhow::Result<()> {
        write_controller_files(testbed, &self.options, &pool)?;
        self.server_pool = pool;
        self.daemon_process(&controller_name(1))?.send_signal(Signal::SIGHUP)
    }

    /// Restarts a daemon with the executable `binary`, or with the default one if it is `None`. Later restarts use the
    /// same executable. Fails when the daemon does not exist, stop or start.
    pub fn restart_daemon_with_binary(
        &mut self,
        testbed: &Testbed,
        name: &str,
        binary: Option<&Path>,
    ) -> anyhow::Result<()> {
        self.set_daemon_binary(name, binary.map_or_else(coreward_binary_path, |binary| Ok(binary.to_owned()))?);
        self.upgrade_daemon(testbed, name)
    }

    /// Sets the executable that the daemon `name` runs from its next start, for example another version of coreward.
    pub fn set_daemon_binary(&mut self, name: &str, binary: PathBuf) {
        self.binary_overrides.insert(name.to_owned(), binary);
    }

    fn start_controller(&mut self, testbed: &Testbed, number: u16) -> anyhow::Result<()> {
        let name = controller_name(number);
        let controller = self.start_daemon(testbed, testbed.controller(), "controller", &name)?;
        self.controllers.insert(number, controller);
        Ok(())
    }

    fn start_rack_controller(&mut self, testbed: &Testbed, number: u16) -> anyhow::Result<()> {
        let name = rack_controller_name(number);
        self.issue_certificate(testbed, FleetRole::Rack, &name)?;
        write_rack_controller_file(testbed, &self.options, number)?;
        let rack_controller = self.start_daemon(testbed, testbed.rack_controller(number)?, "rack", &name)?;
        self.rack_controllers.insert(number, rack_controller);
        Ok(())
    }

    /// Applies the fleet document in the file `document` as soon as one of the controllers is the leader.
    fn apply_document(&self, testbed: &Testbed, document: &Path) -> anyhow::Result<()> {
        let deadline = Instant::now() + *DEFAULT_WAIT_TIMEOUT;
        loop {
            match self.run_operator_command(testbed, &["apply", "--yes", &document.display().to_string()]) {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// Runs `coreward` with these arguments against the leading controller, and returns its output.
    fn run_operator_command(&self, testbed: &Testbed, arguments: &[&str]) -> anyhow::Result<Vec<u8>> {
        let command = build_operator_command_at_controllers(testbed, self.controllers.keys().copied(), arguments)?;
        Ok(testbed.run_command(testbed.controller(), command)?.stdout)
    }

    fn start_daemon(
        &self,
        testbed: &Testbed,
        namespace: &NetworkNamespace,
        daemon: &str,
        name: &str,
    ) -> anyhow::Result<TestbedProcess> {
        let command =
            self.binary_overrides.get(name).map_or_else(coreward_binary_path, |command| Ok(command.clone()))?;
        start_daemon(testbed, namespace, daemon, name, &self.options, &command)
    }

    /// Returns the names of all daemons (controllers, rack controllers, load balancers and agents).
    pub fn daemon_names(&self) -> Vec<String> {
        let load_balancer_names = self.load_balancers.keys().map(|number| load_balancer_name(*number));
        let agent_names = self.agents.keys().map(|number| agent_name(*number));
        let controller_names = self.controllers.keys().map(|number| controller_name(*number));
        let rack_controller_names = self.rack_controllers.keys().map(|number| rack_controller_name(*number));
        controller_names.chain(rack_controller_names).chain(load_balancer_names).chain(agent_names).collect()
    }

    pub fn options(&self) -> &TestbedFleetOptions {
        &self.options
    }

    /// Writes the controller's configuration file with new `options`, and makes the controller reload it. Fails when
    /// the file cannot be written or the controller has ended.
    pub fn set_fleet_options(&mut self, testbed: &Testbed, options: TestbedFleetOptions) -> anyhow::Result<()> {
        self.options = options;
        self.set_server_pool(testbed, self.server_pool.clone())
    }

    /// Replaces [`TestbedFleetOptions::extra_fleet_text`] in the fleet's file and makes the controller reload it. Fails
    /// when the file cannot be written or the controller has ended.
    pub fn set_extra_fleet_text(&mut self, testbed: &Testbed, extra_fleet_text: &str) -> anyhow::Result<()> {
        self.set_fleet_options(
            testbed,
            TestbedFleetOptions { extra_fleet_text: extra_fleet_text.to_owned(), ..self.options.clone() },
        )
    }

    /// Returns the administrative states of the servers in the controller's file, by server number.
    pub fn server_pool(&self) -> &BTreeMap<u16, ServerAdminState> {
        &self.server_pool
    }

    /// Returns the process of a daemon by name. Fails when the daemon does not exist.
    pub fn daemon_process(&mut self, name: &str) -> anyhow::Result<&mut TestbedProcess> {
        let daemon_slot = match DaemonName::parse(name)? {
            DaemonName::Controller(number) => self.controllers.get_mut(&number),
            DaemonName::RackController(number) => self.rack_controllers.get_mut(&number),
            DaemonName::LoadBalancer(number) => self.load_balancers.get_mut(&number),
            DaemonName::Agent(number) => self.agents.get_mut(&number),
        };
        daemon_slot.with_context(|| format!("there is no daemon {name}"))
    }

    /// Kills a daemon by SIGKILL. Fails when the daemon does not exist.
    pub fn kill_daemon(&mut self, name: &str) -> anyhow::Result<()> {
        let daemon = self.daemon_process(name)?;
        daemon.send_signal(Signal::SIGKILL)?;
        daemon.wait_for_exit(*DEFAULT_WAIT_TIMEOUT).map(drop)
    }

    /// Restarts a killed daemon. Fails when the daemon does not exist or cannot be started.
    pub fn restart_daemon(&mut self, testbed: &Testbed, name: &str) -> anyhow::Result<()> {
        match DaemonName::parse(name)? {
            DaemonName::Controller(number) => self.start_controller(testbed, number),
            DaemonName::RackController(number) => self.start_rack_controller(testbed, number),
            DaemonName::LoadBalancer(number) => self.start_load_balancer(testbed, number),
            DaemonName::Agent(number) => self.start_agent(testbed, number),
        }
    }

    /// Returns the output of `coreward status --format json`. Fails when the controller does not answer.
    pub fn query_status(&self, testbed: &Testbed) -> anyhow::Result<serde_json::Value> {
        Ok(serde_json::from_slice(&self.run_operator_command(testbed, &["status", "--format", "json"])?)?)
    }

    /// Waits until every active server in the pool that has an agent reports, and all load balancers' tables have all
    /// servers that accept new connections. Fails after [`DEFAULT_WAIT_TIMEOUT`] with the last lines of the daemons'
    /// logs.
    pub fn wait_until_ready(&self, testbed: &Testbed) -> anyhow::Result<()> {
        self.wait_until_check_succeeds(testbed, || self.check_ready(testbed))
    }

    fn wait_until_check_succeeds(
        &self,
        testbed: &Testbed,
        check: impl Fn() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + *DEFAULT_WAIT_TIMEOUT;
        while let Err(error) = check() {
            ensure!(Instant::now() < deadline, "the fleet is not ready: {error:#}\n{}", read_log_tails(testbed));
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}
