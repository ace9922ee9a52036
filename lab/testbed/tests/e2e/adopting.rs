//! A live pool behind another load balancer is migrated to coreward and back: docs/deployment.md, step by step, with
//! stock nginx. Connections survive all steps.

use std::net::SocketAddrV4;
use std::process::{Command, Stdio};
use std::time::Duration;

use coreward_testbed::addresses::{AddressFamily, SERVICE_ADDRESS, server_address};
use coreward_testbed::baseline_lb::{self, BaselineKind};
use coreward_testbed::fleet::{Fleet, FleetOptions};
use coreward_testbed::http::{Connection, RespondingWorker};
use coreward_testbed::nginx::Nginx;
use coreward_testbed::{Process, Testbed, TestbedOptions, missing_testbed_rights, skip_if};

use crate::support::{count_broken, eventually, eventually_in_force, pause};

const SERVER_COUNT: u16 = 3;
const LIMIT: Duration = Duration::from_secs(10);

struct TestEnv {
    _nginx: Vec<Nginx>,
    testbed: Testbed,
}

impl TestEnv {
    /// Starts servers with nginx behind another load balancer, without agents of coreward.
    fn start_behind(
        kind: BaselineKind,
        instance: &str,
        family: AddressFamily,
    ) -> (baseline_lb::BaselineBalancer, Self) {
        let instance = instance.to_owned();
        let options = TestbedOptions { instance, family, servers: SERVER_COUNT, cores: 1, ..TestbedOptions::default() };
        let testbed = Testbed::create(options).unwrap();
        let nginx = testbed.server_numbers().into_iter().map(|number| testbed.start_nginx(number).unwrap()).collect();
        let other = testbed.start_baseline_balancer(kind).unwrap();
        testbed.route_vips_to_baseline().unwrap();
        (other, Self { _nginx: nginx, testbed })
    }

    /// Opens connections to the service and sends one request on each; every fourth connection has no TCP timestamps.
    fn connect(&self, count: usize) -> HeldConnections {
        let kept = self.testbed.client().within(|| {
            (0..count)
                .map(|index| {
                    let timestamps = if index % 4 == 0 { "0" } else { "1" };
                    std::fs::write("/proc/sys/net/ipv4/tcp_timestamps", timestamps)?;
                    let mut connection = Connection::open_to(self.testbed.service(), None)?;
                    let who = connection.query_worker()?;
                    Ok((connection, who))
                })
                .collect()
        });
        HeldConnections(kept.unwrap())
    }

    /// Starts wrk on keep-alive connections, for a number of seconds.
    fn wrk(&self, seconds: u32) -> Process {
        let mut wrk = Command::new("wrk");
        let page = format!("http://{}/who", self.testbed.service());
        wrk.args(["-t1", "-c8", &format!("-d{seconds}"), "--timeout", "5s", &page]);
        wrk.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        self.testbed.spawn(self.testbed.client(), wrk).unwrap()
    }

    fn fleet(&self, more: &str) -> Fleet {
        let options = FleetOptions { policy: "rr".to_owned(), fleet_text: more.to_owned(), ..FleetOptions::default() };
        Fleet::start(&self.testbed, options).unwrap()
    }

    fn counter(&self, fleet: &Fleet, name: &str) -> u64 {
        let status = fleet.status(&self.testbed).unwrap();
        status["load_balancers"][0]["state"]["counters"][name].as_u64().unwrap_or(0)
    }

    /// Returns the value of net.ipv4.tcp_timestamps on every server.
    fn tcp_timestamps(&self) -> Vec<String> {
        let read = |number| {
            let server = self.testbed.server(number).unwrap();
            server
                .within(|| Ok(std::fs::read_to_string("/proc/sys/net/ipv4/tcp_timestamps")?))
                .unwrap()
                .trim()
                .to_owned()
        };
        self.testbed.server_numbers().into_iter().map(read).collect()
    }

    /// Replaces the additional lines of the fleet's file, and waits until they are in force everywhere.
    fn set(&self, fleet: &mut Fleet, more: &str) {
        let before = fleet.status(&self.testbed).unwrap()["configuration_generation"].as_u64().unwrap();
        fleet.set_fleet_text(&self.testbed, more).unwrap();
        eventually(LIMIT, "the controller reads the fleet's file", || {
            fleet.status(&self.testbed).unwrap()["configuration_generation"].as_u64().unwrap() > before
        });
        eventually_in_force(fleet, &self.testbed);
    }

    /// Runs `coreward DAEMON --config FILE --detach` on a host.
    fn detach(&self, host: &coreward_testbed::Namespace, daemon: &str, file: &str) {
        let mut command = Command::new(coreward_testbed::fleet::coreward_command().unwrap());
        command.arg(daemon).arg("--config").arg(self.testbed.directory().join(format!("{file}.toml"))).arg("--detach");
        self.testbed.run(host, command).unwrap();
    }
}

/// Open connections, each with the worker that answered its first request.
struct HeldConnections(Vec<(Connection, RespondingWorker)>);

impl HeldConnections {
    fn count_broken(&mut self) -> usize {
        count_broken(&mut self.0)
    }

    fn servers(&self) -> std::collections::BTreeSet<u16> {
        self.0.iter().map(|(_, who)| who.server).collect()
    }
}

/// Waits for wrk, checks that it got responses, and returns the lines in which it reports errors.
fn wrk_errors(mut wrk: Process) -> Vec<String> {
    use std::io::Read as _;
    assert!(wrk.wait(Duration::from_secs(40)).unwrap().success());
    let mut text = String::new();
    wrk.child().stdout.take().unwrap().read_to_string(&mut text).unwrap();
    let requests = text.lines().find_map(|line| line.trim().split_once(" requests in")?.0.parse::<u64>().ok());
    assert!(requests.is_some_and(|requests| requests > 1_000), "{text}");
    text.lines().filter(|line| line.contains("errors") || line.contains("Non-2xx")).map(str::to_owned).collect()
}

fn migrate_from(family: AddressFamily) -> String {
    format!("migrate_from = \"{}\"\n", family.address(baseline_lb::BASELINE_ADDRESS))
}

fn migrate_to(family: AddressFamily) -> String {
    format!("migrate_to = \"{}\"\n", family.address(baseline_lb::BASELINE_ADDRESS))
}

#[test]
fn live_pool_migrates_from_a_director_and_back() {
    skip_if!(missing_testbed_rights());
    migrate_from_a_director_and_back("adoptdr", AddressFamily::Ipv4);
}

#[test]
fn live_ipv6_pool_migrates_from_a_director_and_back() {
    skip_if!(missing_testbed_rights());
    migrate_from_a_director_and_back("adoptdr6", AddressFamily::Ipv6);
}

fn migrate_from_a_director_and_back(instance: &str, family: AddressFamily) {
    let (director, env) = TestEnv::start_behind(BaselineKind::Director, instance, family);
    let wrk = env.wrk(9);
    let mut oldest = env.connect(40);
    assert_eq!(env.tcp_timestamps(), ["1"; SERVER_COUNT as usize]);

    // Agents start first, then the load balancer, which gets no packets yet.
    let mut fleet = env.fleet(&migrate_from(family));
    assert_eq!(oldest.count_broken(), 0, "when the agents came");
    let mut older = env.connect(40);

    env.testbed.route_vips_to_load_balancers(&[1]).unwrap();
    assert_eq!((oldest.count_broken(), older.count_broken()), (0, 0), "when the VIP moved");
    let mut ours = env.connect(40);
    assert_eq!(ours.servers().len(), usize::from(SERVER_COUNT));
    eventually(LIMIT, "connections of before pass the director", || {
        env.counter(&fleet, "to_other_balancer") > 0 && env.counter(&fleet, "established") > 0
    });
    pause(500);
    assert_eq!((oldest.count_broken(), older.count_broken(), ours.count_broken()), (0, 0, 0));
    assert_eq!(wrk_errors(wrk), Vec::<String>::new());

    // Connections from before the agents end here. Connections that came through the director since then have cookies
    // and no longer need the director.
    drop(oldest);
    older.0.retain(|(connection, _)| connection.has_timestamps().unwrap());
    env.set(&mut fleet, "");
    drop(director);
    assert_eq!((older.count_broken(), ours.count_broken()), (0, 0), "when the director was gone");

    // The service moves back to a new director without any state.
    let wrk = env.wrk(9);
    let _director = env.testbed.start_baseline_balancer(BaselineKind::Director).unwrap();
    env.set(&mut fleet, &migrate_to(family));
    assert_eq!(env.tcp_timestamps(), ["1"; SERVER_COUNT as usize], "new connections are not stamped");
    let mut newer = env.connect(40);
    pause(500);
    assert_eq!(
        (older.count_broken(), ours.count_broken(), newer.count_broken()),
        (0, 0, 0),
        "while it was handed over"
    );
    assert_eq!(wrk_errors(wrk), Vec::<String>::new());
    // All of the service's old connections have ended.
    drop((older, ours));
    env.testbed.route_vips_to_baseline().unwrap();
    assert_eq!(newer.count_broken(), 0, "when the VIP moved back");
    let mut newest = env.connect(40);
    drop(fleet);
    env.detach(env.testbed.load_balancer(1).unwrap(), "lb", "lb1");
    for number in env.testbed.server_numbers() {
        env.detach(env.testbed.server(number).unwrap(), "agent", &format!("agent-s{number}"));
    }
    assert_eq!((newer.count_broken(), newest.count_broken()), (0, 0), "when nothing of coreward was left");
    assert_eq!(env.tcp_timestamps(), ["1"; SERVER_COUNT as usize]);
}

#[test]
fn vip_migrates_from_haproxy_and_back() {
    skip_if!(missing_testbed_rights());
    let (_haproxy, env) = TestEnv::start_behind(BaselineKind::Proxy, "adoptproxy", AddressFamily::Ipv4);
    let mut theirs = env.connect(40);
    // As with plain DNS, clients connect to servers' own addresses.
    let own = SocketAddrV4::new(server_address(1), SERVICE_ADDRESS.port());
    let mut direct = HeldConnections(
        env.testbed
            .client()
            .within(|| {
                let mut connection = Connection::open_to(own.into(), None)?;
                let who = connection.query_worker()?;
                Ok(vec![(connection, who)])
            })
            .unwrap(),
    );
    let mut fleet = env.fleet(&migrate_from(AddressFamily::Ipv4));
    env.testbed.route_vips_to_load_balancers(&[1]).unwrap();
    assert_eq!((theirs.count_broken(), direct.count_broken()), (0, 0), "when the VIP moved");
    let mut ours = env.connect(40);
    assert_eq!(ours.servers().len(), usize::from(SERVER_COUNT));
    env.set(&mut fleet, &migrate_to(AddressFamily::Ipv4));
    let mut theirs_again = env.connect(40);
    pause(500);
    assert_eq!(
        (theirs.count_broken(), ours.count_broken(), theirs_again.count_broken()),
        (0, 0, 0),
        "while it was handed over"
    );
    drop(ours);
    env.testbed.route_vips_to_baseline().unwrap();
    assert_eq!(
        (theirs.count_broken(), theirs_again.count_broken(), direct.count_broken()),
        (0, 0, 0),
        "when the VIP moved back"
    );
}
