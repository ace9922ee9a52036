//! coreward's own processes in a testbed: a controller, load balancers, an agent per server, each the real daemon with
//! a configuration file of its own, in the namespace where it belongs.
//!
//! Daemons are called `controller`, `lb1`, `lb2` ..., `agent-s1`, `agent-s2` ...

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use coreward_model::consistency::{Consistency, Timestamps};
use coreward_tls::authority::{Authority, DAY, Validity};
use coreward_tls::{Identity, Name, Role};
use nix::sys::signal::Signal;

use crate::namespace::Namespace;
use crate::preload::Preload;
use crate::process::Process;
use crate::topology::{CONTROLLER_ADDRESS, DEVICE, Testbed, load_balancer_name, server_address};

/// The controller's port.
pub const CONTROLLER_PORT: u16 = 7400;

/// Who asks, where all have certificates.
const OPERATOR: &str = "testbed";
/// The port of the first controller's HTTP API; those of others follow.
const API_PORT: u16 = 7500;

/// How a fleet is set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetOptions {
    /// Policy of every service.
    pub policy: String,
    /// How packets of every service find their server.
    pub consistency: Consistency,
    /// Who stamps cookies, for every service.
    pub timestamps: Timestamps,
    /// Time between two reports.
    pub report_interval_ms: u32,
    /// Whether tables are made once per report interval, as in the simulator, and not as soon as a report comes.
    pub tables_by_interval: bool,
    /// Where agents find the load of a server's cores.
    pub load: LoadSource,
    /// Whether agents steer connections to the workers of their cores.
    pub steer: bool,
    /// Whether servers have agents; without them nobody reports, and only load balancers can stamp.
    pub agents: bool,
    /// What else is to stand in the fleet's file, as it is: more services, for one.
    pub more: String,
    /// What else is to stand in load balancers' files.
    pub more_of_load_balancers: String,
    /// The same for the file of every agent.
    pub agents_more: String,
    /// Whether daemons run with no more rights than their systemd units leave them.
    pub confined: bool,
    /// What stands in the controller's file in place of a store of its own and the fleet's file.
    pub shared_store: Option<String>,
    /// Where other controllers listen, for the files of agents and load balancers.
    pub other_controllers: Vec<String>,
    /// The fleet's document, put in force by `coreward apply`; `None`: it stands in a file of the controller's, which
    /// [`Fleet::set_pool`] writes.
    pub applied: Option<String>,
    /// Where the controller keeps its records; `None`: in the testbed's directory.
    pub store: Option<PathBuf>,
    /// How many controllers there are. Several keep their records in etcd, and the document is `applied`.
    pub controllers: u16,
    /// Where etcd's members are, for several controllers.
    pub etcd: Vec<String>,
    /// By which every daemon has a wall clock of its own, and a disk that can be full for it alone; `None`: they have the machine's.
    pub preload: Option<Preload>,
    /// Whether all parts have certificates of an authority of the testbed's own; otherwise they talk in plain.
    pub tls: bool,
}

impl Default for FleetOptions {
    fn default() -> Self {
        Self {
            policy: "crossrss".to_owned(),
            consistency: Consistency::default(),
            timestamps: Timestamps::default(),
            report_interval_ms: 100,
            tables_by_interval: false,
            load: LoadSource::Cpu,
            steer: true,
            agents: true,
            more: String::new(),
            more_of_load_balancers: String::new(),
            agents_more: String::new(),
            confined: false,
            shared_store: None,
            other_controllers: Vec::new(),
            applied: None,
            store: None,
            controllers: 1,
            etcd: Vec::new(),
            preload: None,
            tls: false,
        }
    }
}

impl FleetOptions {
    /// As it stands in the files of agents and load balancers.
    fn controllers(&self) -> String {
        let mut all: Vec<String> = (1..=self.controllers).map(controller_address_of).collect();
        all.extend(self.other_controllers.iter().cloned());
        format!("{all:?}")
    }
}

/// Where an agent finds the load of the cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadSource {
    /// Busy time of the machine's CPUs.
    Cpu,
    /// The busy file of the paced server ([`busy_file`]): the emulated cores.
    PacedServer,
}

/// What the controller's file says of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Takes new connections.
    Active,
    /// Keeps what it has.
    Draining,
}

/// The running daemons; all end with this value.
#[derive(Debug)]
pub struct Fleet {
    options: FleetOptions,
    pool: BTreeMap<u16, Standing>,
    controllers: BTreeMap<u16, Process>,
    load_balancers: BTreeMap<u16, Process>,
    agents: BTreeMap<u16, Process>,
    /// By daemon: another command than [`coreward_command`].
    commands: BTreeMap<String, PathBuf>,
}

/// Where the paced server of a server publishes the busy time of its workers.
pub fn busy_file(testbed: &Testbed, number: u16) -> PathBuf {
    testbed.directory().join(format!("busy-s{number}"))
}

/// The `coreward` command: this program, or, from a test, the one built beside it.
///
/// # Errors
/// When there is none.
pub fn coreward_command() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    if own.file_name().is_some_and(|name| name == "coreward") {
        return Ok(own);
    }
    let beside =
        own.ancestors().skip(1).take(2).map(|directory| directory.join("coreward")).find(|path| path.is_file());
    beside.with_context(|| format!("no coreward beside {}: `make build` makes it", own.display()))
}

impl Fleet {
    /// Starts controller, load balancers and, if there are to be any, an agent for each server of the testbed, all of them
    /// in the pool, and waits until every agent reports and a table is in force.
    ///
    /// # Errors
    /// When a daemon cannot be started or is not ready in time; the error holds its log's last lines.
    pub fn start(testbed: &Testbed, options: FleetOptions) -> anyhow::Result<Self> {
        let pool: BTreeMap<u16, Standing> =
            testbed.server_numbers().into_iter().map(|number| (number, Standing::Active)).collect();
        if options.tls {
            Authority::init(&certificates(testbed), &fleet_name()?, 30 * DAY)?;
            issue(testbed, Role::Controller, "controller", &fleet_name()?, Validity::from_now(DAY))?;
            issue(testbed, Role::Operator, OPERATOR, &fleet_name()?, Validity::from_now(DAY))?;
        }
        write_controller_files(testbed, &options, &pool)?;
        let mut fleet = Self {
            options,
            pool,
            controllers: BTreeMap::new(),
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
        for number in testbed.load_balancer_numbers() {
            fleet.start_load_balancer(testbed, number)?;
        }
        if fleet.options.agents {
            for number in testbed.server_numbers() {
                fleet.start_agent(testbed, number)?;
            }
        }
        fleet.wait_until_ready(testbed)?;
        Ok(fleet)
    }

    /// Starts the daemon of a load balancer (again, if it was killed).
    ///
    /// # Errors
    /// When there is no such load balancer or the daemon cannot be started.
    pub fn start_load_balancer(&mut self, testbed: &Testbed, number: u16) -> anyhow::Result<()> {
        self.certify(testbed, Role::Lb, &load_balancer_name(number))?;
        write_load_balancer_file(testbed, &self.options, number)?;
        let daemon = self.start_daemon(testbed, testbed.load_balancer(number)?, "lb", &load_balancer_name(number))?;
        self.load_balancers.insert(number, daemon);
        Ok(())
    }

    /// Adds a load balancer to the testbed, and announces it when it has a table. Returns its number.
    ///
    /// # Errors
    /// When it cannot be made or started, or is not ready in time.
    pub fn add_load_balancer(&mut self, testbed: &mut Testbed) -> anyhow::Result<u16> {
        let number = testbed.add_load_balancer()?;
        self.start_load_balancer(testbed, number)?;
        self.wait_until_ready(testbed)?;
        testbed.announce(&testbed.load_balancer_numbers())?;
        Ok(number)
    }

    /// The power of a load balancer fails: daemon, data plane and everything pinned are gone. The routers notice after
    /// `noticed`; until then what they send there is lost.
    ///
    /// # Errors
    /// When there is no such load balancer.
    pub fn kill_load_balancer(&mut self, testbed: &mut Testbed, number: u16, noticed: Duration) -> anyhow::Result<()> {
        testbed.remove_load_balancer(number)?;
        self.load_balancers.remove(&number);
        std::thread::sleep(noticed);
        testbed.announce(&testbed.load_balancer_numbers())
    }

    /// A load balancer starts anew with nothing in its memory, as after a crash of its kernel; packets to it are lost
    /// until it has its tables again.
    ///
    /// # Errors
    /// When there is no such load balancer, or it is not ready in time.
    pub fn reboot_load_balancer(&mut self, testbed: &Testbed, number: u16) -> anyhow::Result<()> {
        self.kill(&load_balancer_name(number))?;
        testbed.forget_load_balancer(number)?;
        self.start_load_balancer(testbed, number)?;
        self.wait_until_ready(testbed)
    }

    /// A daemon ends in order, and a new process takes over what it left, as when another version is installed.
    ///
    /// # Errors
    /// When there is none of that name, or it does not end or start.
    pub fn upgrade(&mut self, testbed: &Testbed, name: &str) -> anyhow::Result<()> {
        let status = self.daemon(name)?.terminate(Duration::from_secs(5))?;
        ensure!(status.success(), "{name} ended with {status}");
        self.restart(testbed, name)
    }

    /// Starts the agent of a server (again, if it was killed).
    ///
    /// # Errors
    /// When there is no such server or the daemon cannot be started.
    pub fn start_agent(&mut self, testbed: &Testbed, number: u16) -> anyhow::Result<()> {
        self.certify(testbed, Role::Agent, &format!("s{number}"))?;
        write_agent_file(testbed, &self.options, number)?;
        let agent = self.start_daemon(testbed, testbed.server(number)?, "agent", &format!("agent-s{number}"))?;
        self.agents.insert(number, agent);
        Ok(())
    }

    /// A certificate for a daemon that has none.
    fn certify(&self, testbed: &Testbed, role: Role, name: &str) -> anyhow::Result<()> {
        if self.options.tls && !bundle(testbed, role, name).exists() {
            issue(testbed, role, name, &fleet_name()?, Validity::from_now(DAY))?;
        }
        Ok(())
    }

    /// Writes the controller's file with this pool and lets it read it again.
    ///
    /// # Errors
    /// When the file cannot be written or the controller has ended.
    pub fn set_pool(&mut self, testbed: &Testbed, pool: BTreeMap<u16, Standing>) -> anyhow::Result<()> {
        write_controller_files(testbed, &self.options, &pool)?;
        self.pool = pool;
        self.daemon(&controller_name(1))?.signal(Signal::SIGHUP)
    }

    /// Restarts a daemon with another binary of coreward, which it has from then on; `None`: with this one.
    ///
    /// # Errors
    /// When there is none of that name, or it does not end or start.
    pub fn exchange(&mut self, testbed: &Testbed, name: &str, binary: Option<&Path>) -> anyhow::Result<()> {
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

    /// Puts a document in force as soon as a controller leads.
    fn apply(&self, testbed: &Testbed, document: &Path) -> anyhow::Result<()> {
        let end = Instant::now() + Duration::from_secs(15);
        loop {
            match self.ask(testbed, &["apply", "--yes", &document.display().to_string()]) {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() > end => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// What `coreward ARGUMENTS` prints, of the first controller that does not refuse.
    fn ask(&self, testbed: &Testbed, arguments: &[&str]) -> anyhow::Result<Vec<u8>> {
        let mut refused = None;
        for number in self.controllers.keys() {
            let mut command = Command::new(coreward_command()?);
            command.args(arguments).args(["--controller", &controller_address_of(*number)]);
            if self.options.tls {
                let bundle = bundle(testbed, Role::Operator, OPERATOR);
                for (option, file) in [("--ca", "ca.crt"), ("--certificate", "own.crt"), ("--key", "own.key")] {
                    command.arg(option).arg(bundle.join(file));
                }
            }
            match testbed.run(testbed.controller(), command) {
                Ok(output) => return Ok(output.stdout),
                Err(error) => refused = Some(error),
            }
        }
        Err(refused.context("a fleet without a controller")?)
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

    /// The names of all daemons: controllers', then load balancers', then agents'.
    pub fn daemons(&self) -> Vec<String> {
        let load_balancers = self.load_balancers.keys().map(|number| load_balancer_name(*number));
        let agents = self.agents.keys().map(|number| agent_name(*number));
        let controllers = self.controllers.keys().map(|number| controller_name(*number));
        controllers.chain(load_balancers).chain(agents).collect()
    }

    /// How it was set up.
    pub fn options(&self) -> &FleetOptions {
        &self.options
    }

    /// Writes the controller's file with what else these say, and lets it read it again.
    ///
    /// # Errors
    /// When the file cannot be written or the controller has ended.
    pub fn set_options(&mut self, testbed: &Testbed, options: FleetOptions) -> anyhow::Result<()> {
        self.options = options;
        self.set_pool(testbed, self.pool.clone())
    }

    /// Writes the fleet's file with this in the place of [`FleetOptions::more`] and lets the controller read it again.
    ///
    /// # Errors
    /// When the file cannot be written or the controller has ended.
    pub fn set_more(&mut self, testbed: &Testbed, more: &str) -> anyhow::Result<()> {
        self.set_options(testbed, FleetOptions { more: more.to_owned(), ..self.options.clone() })
    }

    /// The pool as the controller's file has it.
    pub fn pool(&self) -> &BTreeMap<u16, Standing> {
        &self.pool
    }

    /// The daemon of that name.
    ///
    /// # Errors
    /// When there is none.
    pub fn daemon(&mut self, name: &str) -> anyhow::Result<&mut Process> {
        let daemon = match DaemonName::parse(name)? {
            DaemonName::Controller(number) => self.controllers.get_mut(&number),
            DaemonName::LoadBalancer(number) => self.load_balancers.get_mut(&number),
            DaemonName::Agent(number) => self.agents.get_mut(&number),
        };
        daemon.with_context(|| format!("there is no daemon {name}"))
    }

    /// Kills a daemon with SIGKILL.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn kill(&mut self, name: &str) -> anyhow::Result<()> {
        let daemon = self.daemon(name)?;
        daemon.signal(Signal::SIGKILL)?;
        daemon.wait(Duration::from_secs(5)).map(drop)
    }

    /// Starts a killed daemon again.
    ///
    /// # Errors
    /// When there is none of that name, or it cannot be started.
    pub fn restart(&mut self, testbed: &Testbed, name: &str) -> anyhow::Result<()> {
        match DaemonName::parse(name)? {
            DaemonName::Controller(number) => self.start_controller(testbed, number),
            DaemonName::LoadBalancer(number) => self.start_load_balancer(testbed, number),
            DaemonName::Agent(number) => self.start_agent(testbed, number),
        }
    }

    /// What `coreward status --format json` says.
    ///
    /// # Errors
    /// When the controller does not answer.
    pub fn status(&self, testbed: &Testbed) -> anyhow::Result<serde_json::Value> {
        Ok(serde_json::from_slice(&self.ask(testbed, &["status", "--format", "json"])?)?)
    }

    /// Waits until every active server of the pool reports, if it has an agent, and the load balancer has a table.
    ///
    /// # Errors
    /// When that takes longer than ten seconds; the error holds the last lines of the daemons' logs.
    pub fn wait_until_ready(&self, testbed: &Testbed) -> anyhow::Result<()> {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let status = self.status(testbed);
            if status.as_ref().is_ok_and(|status| self.is_ready(status)) {
                return Ok(());
            }
            if Instant::now() > end {
                bail!("the fleet is not ready: {status:?}\n{}", logs(testbed));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn is_ready(&self, status: &serde_json::Value) -> bool {
        let servers = status["servers"].as_array().map_or(&[][..], Vec::as_slice);
        let reporting = servers.iter().filter(|server| server["reports"] == "fresh").count();
        let active =
            self.pool.values().filter(|standing| **standing == Standing::Active && self.options.agents).count();
        let balancers = status["load_balancers"].as_array().map_or(&[][..], Vec::as_slice);
        let resolved = |number: &u16| {
            let name = load_balancer_name(*number);
            let state = balancers.iter().find(|balancer| balancer["name"] == name).map(|balancer| &balancer["state"]);
            state.is_some_and(|state| {
                state["unresolved_servers"].as_array().is_none_or(Vec::is_empty)
                    && state["table_generations"].as_object().is_some_and(|tables| !tables.is_empty())
            })
        };
        reporting >= active && self.load_balancers.keys().all(resolved)
    }
}

const AGENT_PREFIX: &str = "agent-s";
/// The first controller's name; those of others have a number.
pub const CONTROLLER: &str = "controller";

/// The name of the agent of server `number`.
pub fn agent_name(number: u16) -> String {
    format!("{AGENT_PREFIX}{number}")
}

/// Which daemon a name means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DaemonName {
    Controller(u16),
    LoadBalancer(u16),
    Agent(u16),
}

impl DaemonName {
    fn parse(name: &str) -> anyhow::Result<Self> {
        let number = |prefix: &str| name.strip_prefix(prefix).and_then(|number| number.parse().ok());
        match name {
            CONTROLLER => Some(Self::Controller(1)),
            _ => number(CONTROLLER)
                .map(Self::Controller)
                .or_else(|| number("lb").map(Self::LoadBalancer))
                .or_else(|| number(AGENT_PREFIX).map(Self::Agent)),
        }
        .with_context(|| format!("no daemon {name:?}: expected controller, lbN or agent-sN"))
    }
}

/// The last lines of every daemon's log.
pub(crate) fn logs(testbed: &Testbed) -> String {
    let mut all = String::new();
    let files = fs::read_dir(testbed.directory()).into_iter().flatten().flatten().map(|entry| entry.path());
    for path in files.filter(|path| path.extension().is_some_and(|extension| extension == "log")) {
        let text = fs::read_to_string(&path).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let last = lines[lines.len().saturating_sub(10)..].join("\n");
        let _ = writeln!(all, "-- {}:\n{last}", path.display());
    }
    all
}

/// Where the first controller listens.
pub fn controller_address() -> String {
    controller_address_of(1)
}

/// Where controller `number` listens, counted from 1.
pub fn controller_address_of(number: u16) -> String {
    format!("{CONTROLLER_ADDRESS}:{}", CONTROLLER_PORT + number - 1)
}

/// The name of controller `number`: the first is just `controller`.
pub fn controller_name(number: u16) -> String {
    if number == 1 { CONTROLLER.to_owned() } else { format!("{CONTROLLER}{number}") }
}

fn configuration(testbed: &Testbed, daemon: &str) -> PathBuf {
    testbed.directory().join(format!("{daemon}.toml"))
}

/// `daemon`: sub-command of coreward; `name`: of its files.
/// The capabilities that the daemon's systemd unit leaves it, as in `CAP_BPF CAP_NET_ADMIN`.
///
/// # Errors
/// When there is no such daemon.
pub fn unit_capabilities(daemon: &str) -> anyhow::Result<Vec<&'static str>> {
    let unit = match daemon {
        "controller" => include_str!("../../packaging/systemd/coreward-controller.service"),
        "lb" => include_str!("../../packaging/systemd/coreward-lb.service"),
        "agent" => include_str!("../../packaging/systemd/coreward-agent.service"),
        other => bail!("{other:?} has no unit: expected controller, lb or agent"),
    };
    let line = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    Ok(line.context("a unit without CapabilityBoundingSet")?.split_whitespace().collect())
}

/// setpriv(1) does with the bounding set what systemd does.
fn confined_command(daemon: &str, coreward: &Path) -> anyhow::Result<Command> {
    let mut bounding_set = "-all".to_owned();
    for capability in unit_capabilities(daemon)? {
        let name = capability.strip_prefix("CAP_").context("a capability that does not begin with CAP_")?;
        write!(bounding_set, ",+{}", name.to_lowercase())?;
    }
    let mut command = Command::new("setpriv");
    command.args(["--no-new-privs", "--bounding-set", &bounding_set]).arg(coreward);
    Ok(command)
}

fn start_daemon(
    testbed: &Testbed,
    namespace: &Namespace,
    daemon: &str,
    name: &str,
    options: &FleetOptions,
    coreward: &Path,
) -> anyhow::Result<Process> {
    let log_path = testbed.directory().join(format!("{name}.log"));
    let log = File::options().create(true).append(true).open(&log_path)?;
    let mut command = if options.confined { confined_command(daemon, coreward)? } else { Command::new(coreward) };
    if let Some(preload) = &options.preload {
        preload.give(name, &mut command)?;
    }
    command.arg(daemon).arg("--config").arg(configuration(testbed, name));
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let mut process = testbed.spawn(namespace, command)?;
    // A configuration that is wrong shows at once.
    std::thread::sleep(Duration::from_millis(20));
    let ended = process.try_wait()?;
    ensure!(ended.is_none(), "{name} ended: {}", fs::read_to_string(&log_path).unwrap_or_default().trim());
    Ok(process)
}

fn write_controller_files(
    testbed: &Testbed,
    options: &FleetOptions,
    pool: &BTreeMap<u16, Standing>,
) -> anyhow::Result<()> {
    let store = options.store.clone().unwrap_or_else(|| testbed.directory().join("controller.redb"));
    let listen = format!("listen = \"{}\"\n", controller_address());
    let mut text = format!("{listen}store = \"{}\"\n", store.display());
    if let Some(document) = &options.applied {
        for number in 1..=options.controllers {
            if !options.etcd.is_empty() {
                let (listen, endpoints) = (controller_address_of(number), &options.etcd);
                // All of them are on one machine.
                let api = API_PORT + number - 1;
                text = format!(
                    "listen = \"{listen}\"\napi = \"127.0.0.1:{api}\"\n\n[etcd]\nendpoints = {endpoints:?}\nlease = \"2s\"\n"
                );
            }
            write(&configuration(testbed, &controller_name(number)), &text)?;
        }
        return write(&configuration(testbed, "fleet"), document);
    }
    ensure!(options.controllers == 1, "several controllers and a file of the fleet: expected `applied`");
    let text = match &options.shared_store {
        Some(shared) => listen + shared,
        None => text + "fleet = \"fleet.toml\"\n",
    };
    let text = match options.tls {
        true => text + &tls_table(testbed, Role::Controller, "controller"),
        false => text,
    };
    write(&configuration(testbed, "controller"), &text)?;
    let mut text = format!("report_interval = \"{}ms\"\n", options.report_interval_ms);
    if options.tables_by_interval {
        text += "tables = \"interval\"\n";
    }
    for (number, standing) in pool {
        let state = if *standing == Standing::Active { "active" } else { "draining" };
        let address = server_address(*number);
        write!(text, "\n[[server]]\nname = \"s{number}\"\naddress = \"{address}\"\nstate = \"{state}\"\n")?;
    }
    for (index, vip) in testbed.vips().enumerate() {
        let policy = &options.policy;
        write!(text, "\n[[service]]\nname = \"web{index}\"\nvip = \"{vip}:80\"\npolicy = \"{policy}\"\n")?;
        if options.consistency != Consistency::default() {
            writeln!(text, "consistency = \"{}\"", options.consistency.name())?;
        }
        if options.timestamps != Timestamps::default() {
            writeln!(text, "timestamps = \"{}\"", options.timestamps.name())?;
        }
    }
    text += &options.more;
    write(&configuration(testbed, "fleet"), &text)
}

fn write_load_balancer_file(testbed: &Testbed, options: &FleetOptions, number: u16) -> anyhow::Result<()> {
    let name = load_balancer_name(number);
    let text = format!(
        "name = \"{name}\"\ncontroller = {}\ninterface = \"{DEVICE}\"\npin_directory = \"{}\"\n{}",
        options.controllers(),
        testbed.load_balancer_pin_directory(number).display(),
        options.more_of_load_balancers.clone() + &tls_table_if(options.tls, testbed, Role::Lb, &name),
    );
    write(&configuration(testbed, &name), &text)
}

fn write_agent_file(testbed: &Testbed, options: &FleetOptions, number: u16) -> anyhow::Result<()> {
    let load = match options.load {
        LoadSource::Cpu => "{ source = \"cpu\" }".to_owned(),
        LoadSource::PacedServer => {
            format!("{{ source = \"published\", path = \"{}\" }}", busy_file(testbed, number).display())
        }
    };
    let steer = if options.steer { "order" } else { "off" };
    let text = format!(
        "server = \"s{number}\"\ncontroller = {}\ninterface = \"{DEVICE}\"\npin_directory = \"{}\"\n\
         manage_rss = true\nmanage_timestamps = true\nsteer = \"{steer}\"\nload = {load}\n\
         rss = {{ source = \"testbed\", path = \"{}\" }}\n{}",
        options.controllers(),
        testbed.pin_directory().join(format!("agent-s{number}")).display(),
        testbed.emulated_rss(number).display(),
        tls_table_if(options.tls, testbed, Role::Agent, &format!("s{number}")) + &options.agents_more,
    );
    write(&configuration(testbed, &format!("agent-s{number}")), &text)
}

fn fleet_name() -> anyhow::Result<Name> {
    "testbed".parse().map_err(anyhow::Error::msg)
}

/// Where the testbed's authority is.
pub fn certificates(testbed: &Testbed) -> PathBuf {
    testbed.directory().join("certs")
}

/// Where the certificate and key of somebody are.
pub fn bundle(testbed: &Testbed, role: Role, name: &str) -> PathBuf {
    certificates(testbed).join(format!("{role}-{name}"))
}

/// Writes ca.crt, own.crt and own.key of somebody, signed by the testbed's authority. Gives the directory.
///
/// # Errors
/// When there is no authority, or files cannot be written.
pub fn issue(testbed: &Testbed, role: Role, name: &str, fleet: &Name, validity: Validity) -> anyhow::Result<PathBuf> {
    let authority = Authority::open(&certificates(testbed))?;
    let identity = Identity { fleet: fleet.clone(), role, name: name.parse().map_err(anyhow::Error::msg)? };
    let directory = bundle(testbed, role, name);
    authority.issue(&identity, &[], validity)?.write(&directory, &authority)?;
    Ok(directory)
}

fn tls_table(testbed: &Testbed, role: Role, name: &str) -> String {
    let file = |file: &str| bundle(testbed, role, name).join(file).display().to_string();
    format!("[tls]\nca = {:?}\ncertificate = {:?}\nkey = {:?}\n", file("ca.crt"), file("own.crt"), file("own.key"))
}

fn tls_table_if(tls: bool, testbed: &Testbed, role: Role, name: &str) -> String {
    if tls { tls_table(testbed, role, name) } else { String::new() }
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
