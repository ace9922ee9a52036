//! Several controllers on etcd: leaders are killed, or stopped and continued, and etcd loses its own leader. Afterwards
//! every acknowledged change is in force, and no connection has broken.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use coreward_etcd::local::Member;
use coreward_testbed::addresses::CONTROLLER_ADDRESS;
use coreward_testbed::fleet::{
    Fleet, FleetOptions, LoadSource, api_address_of, controller_address_of, coreward_command, operator_command_for,
};
use coreward_testbed::process::Process;
use coreward_testbed::stream::client::StreamWorkload;
use coreward_testbed::stream::server::StreamServers;
use coreward_testbed::{Testbed, TestbedOptions, missing_testbed_rights, skip_if};
use nix::sys::signal::Signal;

use crate::support::{assert_unbroken, eventually, pause};

/// Maximum time until another controller leads: a multiple of the lease, for slow machines.
const TAKEOVER_LIMIT: Duration = Duration::from_secs(90);

/// Fleet with three controllers and three etcd members. The fields are dropped in this order, the testbed last.
struct Datacentre {
    fleet: Fleet,
    /// Processes of controllers 2 and 3; controller 1 belongs to the fleet.
    other_controllers: Vec<Option<Process>>,
    etcd: Vec<Option<Process>>,
    members: Vec<Member>,
    _servers: StreamServers,
    testbed: Testbed,
    document: String,
    changes: u32,
}

fn etcd_table(members: &[Member]) -> String {
    let endpoints: Vec<String> = members.iter().map(Member::endpoint).collect();
    format!("[etcd]\nendpoints = {endpoints:?}\nlease = \"5s\"\n")
}

fn start_controller(testbed: &Testbed, members: &[Member], number: u16) -> Process {
    let file = testbed.directory().join(format!("controller{number}.toml"));
    let (listen, api, tokens) = (controller_address_of(number), api_address_of(number), testbed.directory());
    fs::write(
        &file,
        format!("listen = \"{listen}\"\napi = \"{api}\"\ntoken_directory = {tokens:?}\n{}", etcd_table(members)),
    )
    .unwrap();
    let log = File::create(testbed.directory().join(format!("controller{number}.log"))).unwrap();
    let mut command = Command::new(coreward_command().unwrap());
    command.arg("controller").arg("--config").arg(file);
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    testbed.spawn(testbed.controller(), command).unwrap()
}

fn start_member(testbed: &Testbed, members: &[Member], position: usize) -> Process {
    let command = members[position].command(members, &testbed.directory());
    testbed.spawn(testbed.controller(), command).expect("etcd cannot be started: `scripts/install run` installs it")
}

/// Runs `coreward ARGUMENTS` against this controller; a stopped controller times out after 10 s.
fn run_coreward(testbed: &Testbed, controller: u16, arguments: &[&str]) -> anyhow::Result<()> {
    let command = operator_command_for(testbed, [controller], arguments)?;
    let mut hurried = Command::new("timeout");
    hurried.arg("10").arg(command.get_program()).args(command.get_args());
    hurried.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    testbed.run(testbed.controller(), hurried).map(drop)
}

/// Runs `coreward ARGUMENTS` against the leader of these controllers and returns its output.
fn run_at_leader(
    testbed: &Testbed,
    controllers: impl IntoIterator<Item = u16>,
    arguments: &[&str],
) -> anyhow::Result<String> {
    let command = operator_command_for(testbed, controllers, arguments)?;
    Ok(String::from_utf8(testbed.run(testbed.controller(), command)?.stdout)?)
}

fn fleet_document(servers: u16) -> String {
    let mut text = "report_interval = \"100ms\"\n[[service]]\nname = \"web0\"\nvip = \"10.200.0.1:80\"\n".to_owned();
    for number in 1..=servers {
        text += &format!("[[server]]\nname = \"s{number}\"\naddress = \"10.1.1.{number}\"\n");
    }
    text
}

/// Repeats a query until it returns a value, because temporarily no controller or no etcd member leads.
fn wait_for_some<T>(what: &str, ask: impl Fn() -> Option<T>) -> T {
    let mut answer = None;
    eventually(TAKEOVER_LIMIT, what, || {
        answer = ask();
        answer.is_some()
    });
    answer.expect("it is there")
}

impl Datacentre {
    fn start(instance: &str) -> Self {
        let options = TestbedOptions {
            instance: instance.to_owned(),
            servers: 3,
            load_balancers: 2,
            cores: 1,
            ..TestbedOptions::default()
        };
        let testbed = Testbed::create(options).unwrap();
        let servers = testbed.start_stream_servers().unwrap();
        let members = Member::cluster(3, CONTROLLER_ADDRESS.into(), 2379);
        let etcd = (0..3).map(|position| Some(start_member(&testbed, &members, position))).collect();
        let document = fleet_document(3);
        // The first document is applied before load balancers and agents start.
        let mut first = start_controller(&testbed, &members, 1);
        let file = testbed.directory().join("applied.toml");
        fs::write(&file, &document).unwrap();
        let applied = || run_at_leader(&testbed, [1], &["apply", "--yes", &file.display().to_string()]);
        eventually(TAKEOVER_LIMIT, "the first document is in force", || applied().is_ok());
        first.terminate(TAKEOVER_LIMIT).unwrap();
        let options = FleetOptions {
            load_source: LoadSource::PacedServer,
            steers_connections: false,
            shared_store_config: Some(etcd_table(&members)),
            other_controllers: [2, 3].map(controller_address_of).into(),
            ..FleetOptions::default()
        };
        let fleet = Fleet::start(&testbed, options).unwrap();
        let other_controllers = [2, 3].map(|number| Some(start_controller(&testbed, &members, number))).into();
        Self { fleet, other_controllers, etcd, members, _servers: servers, testbed, document, changes: 1 }
    }

    /// Applies a changed document repeatedly until a controller acknowledges it. Returns that controller's number.
    fn apply(&mut self) -> u16 {
        self.changes += 1;
        let weight = format!("weight = {}\nname = \"s1\"", self.changes);
        let document = fleet_document(3).replacen("name = \"s1\"", &weight, 1);
        let file: PathBuf = self.testbed.directory().join("applied.toml");
        fs::write(&file, &document).unwrap();
        let end = Instant::now() + TAKEOVER_LIMIT;
        let mut refusals = Vec::new();
        while Instant::now() < end {
            for number in 1..=3 {
                match run_coreward(&self.testbed, number, &["apply", "--yes", &file.display().to_string()]) {
                    Ok(()) => {
                        self.document = document;
                        return number;
                    }
                    Err(error) => refusals.push(error.to_string()),
                }
            }
            pause(100);
        }
        panic!("no controller took a change within {TAKEOVER_LIMIT:?}: {refusals:#?}");
    }

    fn signal(&mut self, number: u16, signal: Signal) {
        let process = match number {
            1 => self.fleet.daemon("controller").unwrap(),
            _ => self.other_controllers[usize::from(number) - 2].as_mut().expect("it runs"),
        };
        process.signal(signal).unwrap();
    }

    /// Kills a controller by SIGKILL.
    fn kill(&mut self, number: u16) {
        match number {
            1 => self.fleet.kill("controller").unwrap(),
            _ => drop(self.other_controllers[usize::from(number) - 2].take().expect("it runs")),
        }
    }

    /// Starts a controller again after it was killed.
    fn restart(&mut self, number: u16) {
        match number {
            1 => self.fleet.restart(&self.testbed, "controller").unwrap(),
            _ => {
                self.other_controllers[usize::from(number) - 2] =
                    Some(start_controller(&self.testbed, &self.members, number))
            }
        }
    }

    fn server_ids(&self) -> Option<Vec<(String, u64)>> {
        let status = self.status()?;
        let servers = status["servers"].as_array()?.iter();
        servers.map(|server| Some((server["name"].as_str()?.to_owned(), server["id"].as_u64()?))).collect()
    }

    fn status(&self) -> Option<serde_json::Value> {
        let text = run_at_leader(&self.testbed, 1..=3, &["status", "--format", "json"]).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// Returns the names of the servers that are drained by `coreward drain`.
    fn drained(&self) -> Vec<String> {
        let status = wait_for_some("a controller leads", || self.status());
        let servers = status["servers"].as_array().unwrap().iter();
        let drained = servers.filter(|server| server["state_reason"] == "by `coreward drain`");
        drained.map(|server| server["name"].as_str().unwrap().to_owned()).collect()
    }

    fn all_daemons_are_connected(&self) -> bool {
        self.status().is_some_and(|status| {
            let reporting = |server: &&serde_json::Value| server["reports"] == "fresh";
            let connected = |balancer: &&serde_json::Value| balancer["connected"] == true;
            status["servers"].as_array().unwrap().iter().filter(reporting).count() == 3
                && status["load_balancers"].as_array().unwrap().iter().filter(connected).count() == 2
        })
    }

    /// Returns the index of the leading etcd member.
    fn etcd_leader(&self) -> Option<usize> {
        let endpoints: Vec<String> = self.members.iter().map(Member::endpoint).collect();
        let mut command = Command::new("etcdctl");
        command.args(["--endpoints", &endpoints.join(","), "endpoint", "status", "--write-out", "json"]);
        command.env("ETCDCTL_API", "3");
        let output = self.testbed.run(self.testbed.controller(), command).ok()?;
        let states: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
        let leads = |state: &serde_json::Value| state["Status"]["leader"] == state["Status"]["header"]["member_id"];
        let leader = states.as_array()?.iter().find(|state| leads(state))?;
        endpoints.iter().position(|endpoint| leader["Endpoint"] == endpoint.as_str())
    }
}

#[test]
fn acknowledged_changes_survive_leader_changes() {
    skip_if!(missing_testbed_rights());
    let mut env = Datacentre::start("ha");
    let ids = wait_for_some("a controller leads", || env.server_ids());
    let client = env.testbed.start_stream_client(&StreamWorkload::endless(100.0), None).unwrap();
    let first = env.apply();
    let drained = wait_for_some("s3 is drained", || run_at_leader(&env.testbed, 1..=3, &["drain", "s3"]).ok());
    assert!(drained.starts_with("s3 is drain"), "{drained}");

    // The leader is killed.
    env.kill(first);
    let second = env.apply();
    assert_ne!(second, first);
    assert_eq!(env.drained(), ["s3"], "the drain is on record");
    env.restart(first);

    // The leader is stopped for longer than its lease, and continues when another controller leads.
    env.signal(second, Signal::SIGSTOP);
    let third = env.apply();
    assert_ne!(third, second);
    env.signal(second, Signal::SIGCONT);
    for _ in 0..20 {
        let woken = run_at_leader(&env.testbed, [second], &["fleet", "show"]);
        assert!(woken.is_err(), "controller {second} no longer leads");
        pause(20);
    }

    // etcd loses its own leader.
    let member = wait_for_some("one of three members leads", || env.etcd_leader());
    let mut killed = env.etcd[member].take().unwrap();
    killed.signal(Signal::SIGKILL).unwrap();
    killed.wait(TAKEOVER_LIMIT).unwrap();
    env.apply();
    env.etcd[member] = Some(start_member(&env.testbed, &env.members, member));

    eventually(TAKEOVER_LIMIT, "agents and load balancers are back", || env.all_daemons_are_connected());
    let shown = wait_for_some("a controller leads", || run_at_leader(&env.testbed, 1..=3, &["fleet", "show"]).ok());
    // The first line of the output is the generation; the document follows.
    assert!(shown.trim().ends_with(env.document.trim()), "{shown}");
    assert_eq!(wait_for_some("a controller leads", || env.server_ids()), ids);
    assert_eq!(env.drained(), ["s3"]);
    assert_unbroken(client);
}
