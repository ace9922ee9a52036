//! Common parts of the end-to-end tests: a fleet of stream servers, connections that continue while the fleet changes,
//! and counters.

#![allow(dead_code, reason = "two executables have it, and each uses a part")]

pub mod load;

use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use coreward_daemon::drop_capabilities;
use coreward_metrics::table::Component;
use coreward_testbed::fleet::{AdminState, Fleet, FleetOptions, LoadSource, operator_command};
use coreward_testbed::http::{Connection, RespondingWorker};
use coreward_testbed::stream::client::{StreamClient, StreamReport, StreamWorkload};
use coreward_testbed::stream::server::StreamServers;
use coreward_testbed::{Namespace, TIMEOUT, Testbed, TestbedOptions, counters};

pub type OpenConnections = Vec<(Connection, RespondingWorker)>;

/// Opens connections and sends one request on each. Returns each connection with the worker that answered.
pub fn open_keepalive_connections(testbed: &Testbed, count: usize) -> OpenConnections {
    try_open(testbed, count).unwrap()
}

pub fn try_open(testbed: &Testbed, count: usize) -> anyhow::Result<OpenConnections> {
    let open = || {
        let mut connection = Connection::open(None)?;
        let answerer = connection.query_worker()?;
        Ok((connection, answerer))
    };
    testbed.client().within(|| (0..count).map(|_| open()).collect())
}

/// Returns the number of connections without an answer, or with an answer from another worker than before.
pub fn count_broken(connections: &mut [(Connection, RespondingWorker)]) -> usize {
    let is_broken = |(connection, first): &mut (Connection, RespondingWorker)| {
        connection.query_worker().map_or(true, |answerer| answerer != *first)
    };
    connections.iter_mut().map(is_broken).filter(|is_broken| *is_broken).count()
}

/// Returns a daemon's log from the byte offset `from` on.
pub fn daemon_log(testbed: &Testbed, daemon: &str, from: usize) -> String {
    let text = std::fs::read_to_string(testbed.directory().join(format!("{daemon}.log"))).unwrap();
    text.get(from..).unwrap_or_default().to_owned()
}

pub fn assert_answered(connections: &mut [(Connection, RespondingWorker)]) {
    for (connection, first) in connections {
        assert_eq!(&connection.query_worker().unwrap(), first);
    }
}

/// Number of connections, of which one of three servers gets none once in 10^7 random runs: 3 * (2/3)^40.
pub const MIN_CONNECTIONS_FOR_EVERY_SERVER: usize = 40;

/// Opens connections until each of these servers has at least `at_least` of them: some servers are drawn more often.
pub fn open_at_each(testbed: &Testbed, servers: &[u16], at_least: usize) -> OpenConnections {
    let mut opened = OpenConnections::new();
    let has =
        |opened: &OpenConnections, server| opened.iter().filter(|(_, answerer)| answerer.server == server).count();
    while servers.iter().any(|server| has(&opened, *server) < at_least) {
        assert!(opened.len() < 400, "of {} connections one of the servers {servers:?} has too few", opened.len());
        opened.append(&mut open_keepalive_connections(testbed, 4));
    }
    opened
}

/// Testbed with a fleet and stream servers. The fields are dropped in this order, the testbed last.
pub struct TestEnv {
    pub fleet: Fleet,
    _servers: StreamServers,
    pub testbed: Testbed,
}

impl TestEnv {
    /// Starts a testbed with one core per server, stream servers and a fleet.
    pub fn start(testbed: TestbedOptions, fleet: FleetOptions) -> Self {
        let testbed = Testbed::create(TestbedOptions { cores: 1, ..testbed }).unwrap();
        let servers = testbed.start_stream_servers().unwrap();
        let fleet = FleetOptions { load_source: LoadSource::PacedServer, steers_connections: false, ..fleet };
        let fleet = Fleet::start(&testbed, fleet).unwrap();
        Self { fleet, _servers: servers, testbed }
    }

    /// Fails when load balancers have counted more packets than the client's host has sent resets, which have no
    /// cookie. The host sends a reset when a busy server repeats a segment after the connection's end.
    pub fn assert_only_resets(&self, counter: &str) {
        let count = self.sum_counter(counter);
        let resets = counters::read(self.testbed.client()).unwrap()["TcpOutRsts"];
        assert!(count <= resets, "{counter}: {count} packets, {resets} resets");
    }

    /// Starts a client that opens connections at this rate until [`assert_unbroken`] ends it.
    pub fn start_streams(&self, per_second: f64) -> StreamClient {
        self.testbed.start_stream_client(&StreamWorkload::endless(per_second), None).unwrap()
    }

    /// Sets the state of a server in the controller's file; `None` removes it. Returns when every component has
    /// confirmed the change, because a connection need not survive two changes at once.
    pub fn set_admin_state(&mut self, server: u16, state: Option<AdminState>) {
        let generation = |env: &Self| env.fleet.status(&env.testbed).ok()?["configuration_generation"].as_u64();
        let before = generation(self);
        let mut pool = self.fleet.pool().clone();
        match state {
            Some(state) => drop(pool.insert(server, state)),
            None => drop(pool.remove(&server)),
        }
        self.fleet.set_pool(&self.testbed, pool).unwrap();
        eventually(*TIMEOUT, "the controller takes the change", || generation(self) > before);
        eventually_in_force(&self.fleet, &self.testbed);
    }

    /// Waits until the client has opened `count` more connections, according to its kernel's counter.
    pub fn wait_for_connections(&self, count: u64) {
        let begun = || counters::read(self.testbed.client()).unwrap()["TcpActiveOpens"];
        let expected = begun() + count;
        eventually(*TIMEOUT, "the client begins connections", || begun() >= expected);
    }

    /// Returns the value of a load balancer's counter, which is reported once a second; 0 before the first report.
    pub fn counter(&self, load_balancer: &str, counter: &str) -> u64 {
        let status = self.fleet.status(&self.testbed).unwrap();
        let balancers = status["load_balancers"].as_array().unwrap();
        let balancer = balancers.iter().find(|balancer| balancer["name"] == load_balancer);
        balancer.and_then(|balancer| balancer["state"]["counters"][counter].as_u64()).unwrap_or(0)
    }

    /// Returns the sum of a counter over all load balancers that exist.
    pub fn sum_counter(&self, counter: &str) -> u64 {
        let numbers = self.testbed.load_balancer_numbers();
        numbers.into_iter().map(|number| self.counter(&format!("lb{number}"), counter)).sum()
    }

    /// Runs `coreward ARGUMENTS` against this testbed's controller and returns the output.
    pub fn coreward(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let command = operator_command(&self.testbed, arguments)?;
        Ok(String::from_utf8(self.testbed.run(self.testbed.controller(), command)?.stdout)?)
    }
}

/// Runs a command, given as one text, in a namespace, and returns its output.
pub fn run(testbed: &Testbed, namespace: &Namespace, command: &str) -> String {
    let words: Vec<&str> = command.split_whitespace().collect();
    let mut program = Command::new(words[0]);
    program.args(&words[1..]);
    String::from_utf8(testbed.run(namespace, program).unwrap().stdout).unwrap()
}

/// Fetches the metrics page that a daemon in this namespace serves at `address`. Fails when it does not answer.
pub fn metrics_page(testbed: &Testbed, host: &Namespace, address: &str) -> anyhow::Result<String> {
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--fail", "--max-time", "10", &format!("http://{address}/metrics")]);
    Ok(String::from_utf8(testbed.run(host, curl)?.stdout)?)
}

/// Returns the value of a series on a metrics page. `name`: name of the series with its labels.
pub fn series(page: &str, name: &str) -> Option<f64> {
    page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

/// Waits until every component has confirmed the current configuration.
pub fn eventually_in_force(fleet: &Fleet, testbed: &Testbed) {
    eventually(*TIMEOUT, "every part confirms the configuration", || {
        let Ok(status) = fleet.status(testbed) else { return false };
        let (Some(servers), Some(balancers)) = (status["servers"].as_array(), status["load_balancers"].as_array())
        else {
            return false;
        };
        let expected = status["configuration_generation"].as_u64();
        let of_agents = servers.iter().filter(|_| fleet.options().runs_agents);
        let of_servers = of_agents.map(|server| &server["configuration_generation"]);
        let of_balancers = balancers.iter().map(|balancer| &balancer["state"]["configuration_generation"]);
        of_servers.chain(of_balancers).all(|generation| generation.as_u64() >= expected)
    });
}

/// Returns the time from `since` to the next line with these words in a load balancer's log; `None`: no such line yet.
pub fn duration_until_logged(
    testbed: &Testbed,
    load_balancer: u16,
    words: &str,
    since: SystemTime,
) -> Option<Duration> {
    let log = testbed.directory().join(format!("lb{load_balancer}.log"));
    let log = std::fs::read_to_string(log).unwrap();
    let lines = log.lines().filter(|line| line.contains(words));
    let times = lines.map(|line| humantime::parse_rfc3339(line.split_whitespace().next().unwrap()).unwrap());
    times.filter_map(|time| time.duration_since(since).ok()).min()
}

/// Asserts that every load balancer masks the server `name` of service `web0` within `limit` after its end at `died`.
pub fn assert_masked_within(limit: Duration, testbed: &Testbed, name: &str, died: SystemTime) {
    let words = format!("event=\"server-masked\" server=\"{name}\" service=\"web0\"");
    for balancer in testbed.load_balancer_numbers() {
        let masked = || duration_until_logged(testbed, balancer, &words, died);
        eventually(*TIMEOUT, &words, || masked().is_some());
        println!("lb{balancer}: masked after {:?}, expected within {limit:?}", masked().unwrap());
        assert!(masked().unwrap() <= limit, "lb{balancer}");
    }
}

pub fn pause(milliseconds: u64) {
    std::thread::sleep(Duration::from_millis(milliseconds));
}

pub fn eventually(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + limit;
    while !holds() {
        assert!(Instant::now() < end, "{what}: not within {limit:?}");
        pause(50);
    }
}

/// Ends a stream client after its connections have experienced the last change. Asserts that there were many
/// connections, and that none broke or stalled. Returns the report.
pub fn assert_unbroken(client: StreamClient) -> StreamReport {
    pause(2_000);
    let report = client.end(*TIMEOUT).unwrap();
    let total = report.total();
    println!("{total:?}, open at the end: {}", report.open_at_end);
    assert_eq!(total.broken.total(), 0, "{:?}", report.seconds);
    // Half of the requests last less than half a second, a quarter more than 20 s. In a long run most new requests are
    // short.
    let long = total.opened.min(3_000) / 20;
    assert!(total.completed > total.opened / 3 && report.open_at_end > long, "{total:?}");
    report
}

/// Returns the value of a field in /proc/PID/status of a process.
pub fn process_status(pid: u32, field: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    status.lines().find_map(|line| line.strip_prefix(field)).unwrap().trim().to_owned()
}

/// Returns the effective capabilities of a process, as a bit mask.
pub fn effective_capabilities(pid: u32) -> u64 {
    u64::from_str_radix(&process_status(pid, "CapEff:"), 16).unwrap()
}

/// Returns the capabilities that a daemon retains, as a bit mask.
pub fn retained_capabilities(daemon: Component) -> u64 {
    capability_mask(drop_capabilities::retained_capabilities(daemon).iter().copied())
}

pub fn capability_mask(capabilities: impl IntoIterator<Item = caps::Capability>) -> u64 {
    capabilities.into_iter().fold(0, |mask, capability| mask | capability.bitmask())
}

/// Sends requests, each on its own connection.
pub fn send_requests(testbed: &Testbed, count: usize) {
    drop(open_keepalive_connections(testbed, count));
}
