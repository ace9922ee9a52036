//! Common parts of the end-to-end tests, which are a fleet with stream servers, connections that continue while the
//! fleet changes, and counters.

#![allow(dead_code, reason = "two executables have it, and each uses a part")]

pub mod load;

use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use coreward_daemon::drop_capabilities;
use coreward_metrics::metric_declarations::Component;
use coreward_testbed::fleet::{CoreLoadSource, Fleet, ServerAdminState, TestbedFleetOptions, build_operator_command};
use coreward_testbed::http::{HttpConnection, WorkerIdentity};
use coreward_testbed::stream_connections::client::{StreamClientProcess, StreamReport, StreamWorkload};
use coreward_testbed::stream_connections::server::StreamServerProcess;
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, NetworkNamespace, Testbed, TestbedOptions, counters};

pub type ConnectionsAndWorkers = Vec<(HttpConnection, WorkerIdentity)>;

/// Opens connections and sends one request on each. Returns each connection with the worker that answered its request.
pub fn open_keepalive_connections(testbed: &Testbed, connection_count: usize) -> ConnectionsAndWorkers {
    try_open_connections(testbed, connection_count).unwrap()
}

pub fn try_open_connections(testbed: &Testbed, connection_count: usize) -> anyhow::Result<ConnectionsAndWorkers> {
    let open_connection = || {
        let mut connection = HttpConnection::open(None)?;
        let first_worker = connection.query_worker()?;
        Ok((connection, first_worker))
    };
    testbed.client().run_within(|| (0..connection_count).map(|_| open_connection()).collect())
}

/// Sends a request on each connection. Returns the number of connections with no answer, or with an answer from a
/// different worker than before.
pub fn count_broken_connections(connections: &mut [(HttpConnection, WorkerIdentity)]) -> usize {
    let is_broken = |(connection, first_worker): &mut (HttpConnection, WorkerIdentity)| {
        connection.query_worker().map_or(true, |answerer| answerer != *first_worker)
    };
    connections.iter_mut().map(is_broken).filter(|is_broken| *is_broken).count()
}

/// Returns a daemon's log from the byte offset `start_offset` on.
pub fn read_daemon_log(testbed: &Testbed, daemon: &str, start_offset: usize) -> String {
    let text = std::fs::read_to_string(testbed.directory().join(format!("{daemon}.log"))).unwrap();
    text.get(start_offset..).unwrap_or_default().to_owned()
}

pub fn assert_connections_answered(connections: &mut [(HttpConnection, WorkerIdentity)]) {
    for (connection, first_worker) in connections {
        assert_eq!(&connection.query_worker().unwrap(), first_worker);
    }
}

/// Number of connections with which each of three servers almost certainly gets at least one. The probability that a
/// server gets none is about 10^-7 (3 * (2/3)^40).
pub const MIN_CONNECTIONS_FOR_EVERY_SERVER: usize = 40;

/// Opens connections until each of these servers has at least `min_connections_per_server`, because random placement is
/// uneven. Panics after 400 connections.
pub fn open_connections_at_each_server(
    testbed: &Testbed,
    servers: &[u16],
    min_connections_per_server: usize,
) -> ConnectionsAndWorkers {
    let mut open_connections = ConnectionsAndWorkers::new();
    let count_connections = |connections: &ConnectionsAndWorkers, server| {
        connections.iter().filter(|(_, answerer)| answerer.server_number == server).count()
    };
    while servers.iter().any(|server| count_connections(&open_connections, *server) < min_connections_per_server) {
        assert!(
            open_connections.len() < 400,
            "of {} connections one of the servers {servers:?} has too few",
            open_connections.len()
        );
        open_connections.append(&mut open_keepalive_connections(testbed, 4));
    }
    open_connections
}

/// Testbed with a fleet and stream servers. Fields are dropped in the order of their declaration, the testbed last.
pub struct FleetTestEnv {
    pub fleet: Fleet,
    _stream_servers: StreamServerProcess,
    pub testbed: Testbed,
}

impl FleetTestEnv {
    /// Starts a testbed with one core per server, stream servers and a fleet.
    pub fn start(testbed_options: TestbedOptions, fleet: TestbedFleetOptions) -> Self {
        let testbed = Testbed::create(TestbedOptions { core_count: 1, ..testbed_options }).unwrap();
        let stream_servers = testbed.start_stream_servers().unwrap();
        let fleet_options =
            TestbedFleetOptions { core_load_source: CoreLoadSource::PacedServer, steers_connections: false, ..fleet };
        let fleet = Fleet::start(&testbed, fleet_options).unwrap();
        Self { fleet, _stream_servers: stream_servers, testbed }
    }

    /// Asserts that this counter of the load balancers is at most the number of resets that the client has sent. A
    /// reset has no cookie. The host sends a reset when a busy server repeats a segment after the connection's end.
    pub fn assert_counter_within_reset_count(&self, counter: &str) {
        let counted_packet_count = self.sum_lb_counter(counter);
        let sent_reset_count = counters::read_kernel_counters(self.testbed.client()).unwrap()["TcpOutRsts"];
        assert!(
            counted_packet_count <= sent_reset_count,
            "{counter}: {counted_packet_count} packets, {sent_reset_count} resets"
        );
    }

    /// Starts a stream client that opens connections at the given rate until [`assert_streams_unbroken`] ends it.
    pub fn start_streams(&self, connections_per_second: f64) -> StreamClientProcess {
        self.testbed.start_stream_client(&StreamWorkload::endless(connections_per_second), None).unwrap()
    }

    /// Sets a server's state in the controller's file, or removes the server if `state` is `None`. Returns after every
    /// component has confirmed the change, because a connection need not survive two changes at once.
    pub fn set_admin_state(&mut self, server: u16, state: Option<ServerAdminState>) {
        let query_generation =
            |env: &Self| env.fleet.query_status(&env.testbed).ok()?["configuration_generation"].as_u64();
        let generation_before = query_generation(self);
        let mut pool = self.fleet.server_pool().clone();
        match state {
            Some(state) => drop(pool.insert(server, state)),
            None => drop(pool.remove(&server)),
        }
        self.fleet.set_server_pool(&self.testbed, pool).unwrap();
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the controller takes the change", || {
            query_generation(self) > generation_before
        });
        wait_until_configuration_in_force(&self.fleet, &self.testbed);
    }

    /// Waits until the client has opened `connection_count` more connections, according to its kernel's counter.
    pub fn wait_for_connections(&self, connection_count: u64) {
        let read_opened_connection_count =
            || counters::read_kernel_counters(self.testbed.client()).unwrap()["TcpActiveOpens"];
        let expected_connection_count = read_opened_connection_count() + connection_count;
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the client begins connections", || {
            read_opened_connection_count() >= expected_connection_count
        });
    }

    /// Returns the value of a load balancer's counter, which is reported once a second, or 0 before the first report.
    pub fn query_load_balancer_counter(&self, load_balancer: &str, counter: &str) -> u64 {
        let status = self.fleet.query_status(&self.testbed).unwrap();
        let balancers = status["load_balancers"].as_array().unwrap();
        let balancer = balancers.iter().find(|balancer| balancer["name"] == load_balancer);
        balancer.and_then(|balancer| balancer["state"]["counters"][counter].as_u64()).unwrap_or(0)
    }

    /// Returns the sum of a counter over all existing load balancers.
    pub fn sum_lb_counter(&self, counter: &str) -> u64 {
        let lb_numbers = self.testbed.load_balancer_numbers();
        lb_numbers.into_iter().map(|number| self.query_load_balancer_counter(&format!("lb{number}"), counter)).sum()
    }

    /// Runs `coreward` with these arguments against this testbed's controller, and returns the output.
    pub fn run_coreward(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let command = build_operator_command(&self.testbed, arguments)?;
        Ok(String::from_utf8(self.testbed.run_command(self.testbed.controller(), command)?.stdout)?)
    }
}

/// Runs a command line in a namespace, and returns its output. Quotes are not supported.
pub fn run_command_line(testbed: &Testbed, namespace: &NetworkNamespace, command: &str) -> String {
    let command_words: Vec<&str> = command.split_whitespace().collect();
    let mut program_command = Command::new(command_words[0]);
    program_command.args(&command_words[1..]);
    String::from_utf8(testbed.run_command(namespace, program_command).unwrap().stdout).unwrap()
}

/// Fetches the metrics page that a daemon in this namespace serves at `address`. Fails when it does not answer.
pub fn fetch_metrics_page(testbed: &Testbed, host: &NetworkNamespace, address: &str) -> anyhow::Result<String> {
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--fail", "--max-time", "10", &format!("http://{address}/metrics")]);
    Ok(String::from_utf8(testbed.run_command(host, curl)?.stdout)?)
}

/// Returns the value of a time series on a metrics page. `name` is the name of the series with its labels.
pub fn find_metric_series_value(page: &str, name: &str) -> Option<f64> {
    page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

/// Waits until every component has confirmed the current configuration.
pub fn wait_until_configuration_in_force(fleet: &Fleet, testbed: &Testbed) {
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "every part confirms the configuration", || {
        let Ok(status) = fleet.query_status(testbed) else { return false };
        let (Some(servers), Some(balancers)) = (status["servers"].as_array(), status["load_balancers"].as_array())
        else {
            return false;
        };
        let expected_generation = status["configuration_generation"].as_u64();
        let servers_with_agents = servers.iter().filter(|_| fleet.options().runs_agents);
        let server_generations = servers_with_agents.map(|server| &server["configuration_generation"]);
        let balancer_generations = balancers.iter().map(|balancer| &balancer["state"]["configuration_generation"]);
        server_generations.chain(balancer_generations).all(|generation| generation.as_u64() >= expected_generation)
    });
}

/// Returns the time from `start_time` to the next line with `log_words` in a load balancer's log, or `None` if
/// there is no such line yet.
pub fn measure_duration_until_logged(
    testbed: &Testbed,
    load_balancer: u16,
    log_words: &str,
    start_time: SystemTime,
) -> Option<Duration> {
    let log_path = testbed.directory().join(format!("lb{load_balancer}.log"));
    let log_text = std::fs::read_to_string(log_path).unwrap();
    let matching_lines = log_text.lines().filter(|line| line.contains(log_words));
    let line_times =
        matching_lines.map(|line| humantime::parse_rfc3339(line.split_whitespace().next().unwrap()).unwrap());
    line_times.filter_map(|time| time.duration_since(start_time).ok()).min()
}

/// Asserts that every load balancer masks the server `name` of service `web0` at most `limit` after the server stopped
/// at `stop_time`.
pub fn assert_server_masked_within(limit: Duration, testbed: &Testbed, name: &str, stop_time: SystemTime) {
    let log_words = format!("event=\"server-masked\" server=\"{name}\" service=\"web0\"");
    for balancer in testbed.load_balancer_numbers() {
        let measure_masking_delay = || measure_duration_until_logged(testbed, balancer, &log_words, stop_time);
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, &log_words, || measure_masking_delay().is_some());
        println!("lb{balancer}: masked after {:?}, expected within {limit:?}", measure_masking_delay().unwrap());
        assert!(measure_masking_delay().unwrap() <= limit, "lb{balancer}");
    }
}

pub fn sleep_ms(milliseconds: u64) {
    std::thread::sleep(Duration::from_millis(milliseconds));
}

pub fn assert_eventually(limit: Duration, description: &str, mut is_satisfied: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !is_satisfied() {
        assert!(Instant::now() < deadline, "{description}: not within {limit:?}");
        sleep_ms(50);
    }
}

/// Ends a stream client after the last change has affected its connections, and returns its report. Asserts that there
/// were many connections, and that none broke or stalled.
pub fn assert_streams_unbroken(client: StreamClientProcess) -> StreamReport {
    sleep_ms(2_000);
    let report = client.terminate_and_report(*DEFAULT_WAIT_TIMEOUT).unwrap();
    let sums = report.total_counts();
    println!("{sums:?}, open at the end: {}", report.open_at_end);
    assert_eq!(sums.broken.total_count(), 0, "{:?}", report.seconds);
    // Half of the requests last less than half a second, a quarter more than 20 s. In a long run most new requests are
    // short.
    let min_open_connection_count = sums.opened.min(3_000) / 20;
    assert!(sums.completed > sums.opened / 3 && report.open_at_end > min_open_connection_count, "{sums:?}");
    report
}

/// Returns the value of a field in a process's /proc/PID/status.
pub fn read_process_status_field(pid: u32, field: &str) -> String {
    let status_text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    status_text.lines().find_map(|line| line.strip_prefix(field)).unwrap().trim().to_owned()
}

/// Returns the effective capabilities of a process, as a bit mask.
pub fn read_effective_capabilities(pid: u32) -> u64 {
    u64::from_str_radix(&read_process_status_field(pid, "CapEff:"), 16).unwrap()
}

/// Returns the capabilities that a daemon retains after its start, as a bit mask.
pub fn retained_capability_mask(daemon: Component) -> u64 {
    to_capability_mask(drop_capabilities::retained_capabilities(daemon).iter().copied())
}

pub fn to_capability_mask(capabilities: impl IntoIterator<Item = caps::Capability>) -> u64 {
    capabilities.into_iter().fold(0, |mask, capability| mask | capability.bitmask())
}

/// Sends `request_count` requests to the service, each on its own connection.
pub fn send_requests(testbed: &Testbed, request_count: usize) {
    drop(open_keepalive_connections(testbed, request_count));
}
