//! Conformance test of stock clients and servers through the load balancer, while tables and pool change. No connection
//! may break, and no packet may be dropped for its timestamp. Retransmissions must be as few as without coreward.
//!
//! The tables change with the cores' loads, because a thread writes random core load files ten times a second. The pool
//! changes because servers drain and return in turn.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use coreward_model::rss::{seeded_rng, uniform_below};

use crate::addresses::{AddressFamily, HOST_DEVICE, server_address};
use crate::counters::{
    self, KernelNetworkCounters, PAWS_ESTABLISHED_DROP_COUNTER, PAWS_OLD_ACK_COUNTER, TIMESTAMP_DROP_COUNTERS,
};
use crate::fleet::{CoreLoadSource, Fleet, ServerAdminState, TestbedFleetOptions, core_load_file_path};
use crate::http::HttpConnection;
use crate::instance;
use crate::namespace::NetworkNamespace;
use crate::network_options::TestbedNetworkOptions;
use crate::nginx::{LARGE_FILE_BYTES, LARGE_FILE_PATH, NginxServer, SLOW_FILE_PATH, WORKER_IDENTITY_PATH};
use crate::topology::{Testbed, TestbedOptions};

/// Options of `coreward-lab testbed conformance`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::Args)]
pub struct ConformanceArgs {
    /// Duration of wrk's requests on keep-alive connections (s)
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub wrk_seconds: u32,
    /// Number of downloads of 1 MB, each by its own curl
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub downloads: u32,
    /// Time for which one connection is idle and another one transfers 4 kB/s (s)
    #[arg(long, default_value_t = 180, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub idle_seconds: u32,
    /// net.ipv4.tcp_syncookies on the servers (2: SYN cookies for every connection)
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=2))]
    pub syncookies: u8,
    #[command(flatten)]
    pub network: TestbedNetworkOptions,
}

/// Results of the conformance test.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct ConformanceOutcome {
    /// Number of wrk's requests that were answered.
    pub wrk_requests: u64,
    /// Number of wrk's errors: connect, read, write and timeout errors, and responses with a status other than 2xx or
    /// 3xx.
    pub wrk_errors: u64,
    pub downloads: u64,
    /// Descriptions of the failed downloads. The first few contain curl's error message.
    pub failed_downloads: Vec<String>,
    /// Response time on the idle connection after its pause (ms), or `Err` with the reason why the connection broke.
    pub idle_connection: Result<u64, String>,
    /// Number of bytes that the busy connection received, or `Err` with the reason why the connection broke or stalled.
    pub busy_connection: Result<u64, String>,
    /// Number of forwarding tables that the load balancer has used during the run, one after the other.
    pub used_tables: u64,
    pub pool_changes: u64,
    /// Load balancer counters that are above 0, by name.
    pub lb_counters: BTreeMap<String, u64>,
    /// Growth of the TCP counters in the run with coreward.
    pub tcp_counters: TcpCounterGrowth,
    /// Growth of the TCP counters in a run under the same load in which the load balancer's kernel only routes packets.
    /// `None` if servers are behind a router, because the kernel cannot route packets for a VIP to them.
    pub tcp_counters_without_coreward: Option<TcpCounterGrowth>,
}

/// Growth of TCP counters during a run, summed over the client and all servers.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct TcpCounterGrowth {
    pub sent_segments: u64,
    pub retransmitted_segments: u64,
    /// Number of retransmitted segments per million segments sent.
    pub retransmitted_ppm: f64,
    /// Number of retransmitted segments that the receiver already had (DSACK, RFC 2883). Their originals were delayed
    /// but not lost.
    pub spurious_retransmissions: u64,
    /// Numbers of segments that servers dropped because of their timestamps, by name of the kernel counter (only those
    /// above 0).
    pub timestamp_drops_at_servers: BTreeMap<String, u64>,
    /// Numbers of segments that PAWS dropped at the client, by name of the kernel counter (only those above 0).
    pub timestamp_drops_at_client: BTreeMap<String, u64>,
    /// Number of pure acknowledgements that arrived after a newer segment of their connection.
    pub reordered_acks: u64,
}

impl ConformanceOutcome {
    /// Returns whether no connection broke, and the timestamp check dropped only segments that were reordered.
    /// Retransmissions are reported, but do not affect this result.
    pub fn has_passed(&self) -> bool {
        self.wrk_errors == 0
            && self.failed_downloads.is_empty()
            && self.idle_connection.is_ok()
            && self.busy_connection.is_ok()
            && self.tcp_counters.has_only_tolerable_timestamp_drops()
    }
}

impl TcpCounterGrowth {
    /// Returns whether reordering alone explains the segments dropped for their timestamps. Servers get the TSvals of
    /// the clients' kernels. Clients get TSvals from coreward, with 65,536 ticks per ms, while Linux accepts segments
    /// at most one tick late. So a reordered segment is sometimes dropped and retransmitted (docs/limits.md). A wrong
    /// TSval would affect far more than one segment in a million.
    fn has_only_tolerable_timestamp_drops(&self) -> bool {
        let is_tolerable_client_drop_count = |(name, count): (&String, &u64)| {
            name == PAWS_ESTABLISHED_DROP_COUNTER && *count <= 1 + self.sent_segments / 1_000_000
        };
        self.timestamp_drops_at_servers.is_empty()
            && self.timestamp_drops_at_client.iter().all(is_tolerable_client_drop_count)
    }
}

/// Runs the conformance test and prints its outcome as JSON. Fails when the setup fails or a connection breaks.
pub fn main(options: ConformanceArgs) -> anyhow::Result<()> {
    let outcome = run_conformance_test(&instance::unique_testbed_name("conformance")?, options)?;
    println!("{}", serde_json::to_string_pretty(&outcome)?);
    ensure!(outcome.has_passed(), "something broke: see above");
    Ok(())
}

/// Read timeout of [`count_busy_connection_bytes`]. It is sufficient because data arrives about once a second at 4
/// kB/s.
const BUSY_CONNECTION_READ_TIMEOUT: Duration = Duration::from_secs(5);
const SERVER_COUNT: u16 = 4;
const DOWNLOADER_COUNT: u32 = 4;
/// Interval between two changes of the server pool. Each change drains or undrains a server.
const POOL_CHANGE_INTERVAL: Duration = Duration::from_millis(700);

/// Runs the conformance test in a new testbed named `instance`. Fails when the setup fails. Broken connections are part
/// of the outcome.
pub fn run_conformance_test(instance: &str, options: ConformanceArgs) -> anyhow::Result<ConformanceOutcome> {
    let testbed = Testbed::create(TestbedOptions {
        instance_name: instance.to_owned(),
        server_count: SERVER_COUNT,
        ..options.network.to_testbed_options()
    })?;
    for number in testbed.server_numbers() {
        let syncookies_value = options.syncookies.to_string();
        testbed.server(number)?.set_sysctls(&[("ipv4/tcp_syncookies", syncookies_value.as_str())])?;
    }
    let _nginx: Vec<NginxServer> =
        testbed.server_numbers().into_iter().map(|number| testbed.start_nginx(number)).collect::<Result<_, _>>()?;
    let is_routed = options.network.forwarding.encapsulates();
    let tcp_without_coreward = (!is_routed).then(|| run_without_coreward(&testbed, options)).transpose()?;
    run_with_coreward(&testbed, options, tcp_without_coreward)
}

/// Runs the load of the test without coreward. The load balancer's kernel routes each connection to a server by a hash
/// (ECMP). The returned counters show the losses and retransmissions that the machine itself causes.
fn run_without_coreward(testbed: &Testbed, options: ConformanceArgs) -> anyhow::Result<TcpCounterGrowth> {
    let set_forwarding_sysctl = |value: &str| match options.network.family {
        AddressFamily::Ipv4 => testbed.load_balancer(1)?.set_sysctls(&[
            ("ipv4/ip_forward", value),
            ("ipv4/fib_multipath_hash_policy", "1"),
            ("ipv4/conf/all/send_redirects", "0"),
            (&format!("ipv4/conf/{HOST_DEVICE}/send_redirects"), "0"),
        ]),
        AddressFamily::Ipv6 => testbed
            .load_balancer(1)?
            .set_sysctls(&[("ipv6/conf/all/forwarding", value), ("ipv6/fib_multipath_hash_policy", "1")]),
    };
    set_forwarding_sysctl("1")?;
    let route_next_hops = testbed.server_numbers().into_iter().flat_map(|number| {
        let hop_address = options.network.family.host_address(server_address(number)).to_string();
        ["nexthop".to_owned(), "via".to_owned(), hop_address, "dev".to_owned(), HOST_DEVICE.to_owned()]
    });
    add_or_delete_vip_route(testbed, "add", route_next_hops)?;
    let counters_before = read_all_kernel_counters(testbed)?;
    count_wrk_requests_and_errors(testbed, options.wrk_seconds)?;
    run_downloads(testbed, options.downloads)?;
    let tcp_counters = compute_tcp_counter_growth(&counters_before, &read_all_kernel_counters(testbed)?);
    add_or_delete_vip_route(testbed, "delete", std::iter::empty())?;
    set_forwarding_sysctl("0")?;
    Ok(tcp_counters)
}

/// Adds or deletes the load balancer's route to the VIP. `verb` is `add` or `delete`.
fn add_or_delete_vip_route(
    testbed: &Testbed,
    verb: &str,
    route_arguments: impl Iterator<Item = String>,
) -> anyhow::Result<()> {
    let mut command = Command::new("ip");
    command.args(["route", verb, &testbed.service_address().ip().to_string()]).args(route_arguments);
    testbed.run_command(testbed.load_balancer(1)?, command).map(drop)
}

fn run_with_coreward(
    testbed: &Testbed,
    options: ConformanceArgs,
    tcp_without_coreward: Option<TcpCounterGrowth>,
) -> anyhow::Result<ConformanceOutcome> {
    for number in testbed.server_numbers() {
        write_core_busy_times(
            &core_load_file_path(testbed, number),
            &vec![0; usize::from(testbed.options().core_count)],
        )?;
    }
    let mut fleet = Fleet::start(
        testbed,
        TestbedFleetOptions { core_load_source: CoreLoadSource::PacedServer, ..options.network.to_fleet_options() },
    )?;
    let first_table_generation = query_table_generation(&fleet, testbed)?;
    let counters_before = read_all_kernel_counters(testbed)?;
    let (stop_flag, pool_changes) = (AtomicBool::new(false), AtomicU64::new(0));
    let outcome = std::thread::scope(|scope| {
        let _stop_on_drop = SetFlagOnDrop(&stop_flag);
        scope.spawn(|| write_random_core_busy_times(testbed, &stop_flag));
        let drain_thread = scope.spawn(|| drain_servers_in_turn(testbed, &mut fleet, &stop_flag, &pool_changes));
        let outcome = run_clients_and_collect_results(testbed, &options, &stop_flag)?;
        join_thread(drain_thread)?;
        Ok::<_, anyhow::Error>(outcome)
    })?;
    let counters_after = read_all_kernel_counters(testbed)?;
    Ok(ConformanceOutcome {
        used_tables: query_table_generation(&fleet, testbed)? - first_table_generation,
        pool_changes: pool_changes.into_inner(),
        lb_counters: query_load_balancer_counters(&fleet, testbed)?,
        tcp_counters: compute_tcp_counter_growth(&counters_before, &counters_after),
        tcp_counters_without_coreward: tcp_without_coreward,
        ..outcome
    })
}

/// Runs wrk and the downloads, and at the same time an idle and a busy connection. Sets `stop_flag` when all clients
/// have ended or one fails. Returns an outcome with only the clients' results.
fn run_clients_and_collect_results(
    testbed: &Testbed,
    options: &ConformanceArgs,
    stop_flag: &AtomicBool,
) -> anyhow::Result<ConformanceOutcome> {
    std::thread::scope(|scope| {
        let _stop_on_drop = SetFlagOnDrop(stop_flag);
        let idle_duration = Duration::from_secs(options.idle_seconds.into());
        let idle_thread = scope.spawn(move || {
            testbed
                .client()
                .run_within(|| Ok(measure_idle_connection_response_ms(testbed.service_address(), idle_duration)))
        });
        let busy_thread = scope.spawn(move || {
            testbed.client().run_within(|| Ok(count_busy_connection_bytes(testbed.service_address(), idle_duration)))
        });
        let (wrk_requests, wrk_errors) = count_wrk_requests_and_errors(testbed, options.wrk_seconds)?;
        let (downloads, failed_downloads) = run_downloads(testbed, options.downloads)?;
        let idle_result = join_thread(idle_thread)?.map_err(|error| format!("{error:#}"));
        let busy_result = join_thread(busy_thread)?.map_err(|error| format!("{error:#}"));
        Ok(ConformanceOutcome {
            wrk_requests,
            wrk_errors,
            downloads,
            failed_downloads,
            idle_connection: idle_result,
            busy_connection: busy_result,
            used_tables: 0,
            pool_changes: 0,
            lb_counters: BTreeMap::new(),
            tcp_counters: TcpCounterGrowth::default(),
            tcp_counters_without_coreward: None,
        })
    })
}

/// Guard that sets a flag when it is dropped, so that other threads end even when one part of the test fails.
pub(crate) struct SetFlagOnDrop<'a>(pub(crate) &'a AtomicBool);

impl Drop for SetFlagOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn join_thread<T>(thread: std::thread::ScopedJoinHandle<'_, anyhow::Result<T>>) -> anyhow::Result<T> {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn query_table_generation(fleet: &Fleet, testbed: &Testbed) -> anyhow::Result<u64> {
    let status = fleet.query_status(testbed)?;
    status["services"][0]["table_generation"].as_u64().context("status names no table generation")
}

fn query_load_balancer_counters(fleet: &Fleet, testbed: &Testbed) -> anyhow::Result<BTreeMap<String, u64>> {
    // Wait, because the load balancer reports its counters only once a second.
    std::thread::sleep(Duration::from_millis(1_500));
    let status = fleet.query_status(testbed)?;
    let counters = status["load_balancers"][0]["state"]["counters"].as_object();
    let counters = counters.context("status names no counters of the load balancer")?.iter();
    let counter_values = counters.filter_map(|(name, count)| Some((name.clone(), count.as_u64()?)));
    Ok(counter_values.filter(|(_, count)| *count > 0).collect())
}

fn client_and_server_namespaces(testbed: &Testbed) -> anyhow::Result<Vec<&NetworkNamespace>> {
    let server_numbers = testbed.server_numbers();
    std::iter::once(Ok(testbed.client()))
        .chain(server_numbers.into_iter().map(|number| testbed.server(number)))
        .collect()
}

fn read_all_kernel_counters(testbed: &Testbed) -> anyhow::Result<Vec<KernelNetworkCounters>> {
    client_and_server_namespaces(testbed)?.into_iter().map(counters::read_kernel_counters).collect()
}

fn compute_tcp_counter_growth(
    counters_before: &[KernelNetworkCounters],
    counters_after: &[KernelNetworkCounters],
) -> TcpCounterGrowth {
    let compute_counter_growth = |name| {
        counters::sum_counter_over_namespaces(counters_after, name)
            - counters::sum_counter_over_namespaces(counters_before, name)
    };
    let retransmitted_segments = compute_counter_growth("TcpRetransSegs");
    let sent_segments = compute_counter_growth("TcpOutSegs");
    TcpCounterGrowth {
        sent_segments,
        retransmitted_segments,
        retransmitted_ppm: retransmitted_segments as f64 / sent_segments.max(1) as f64 * 1e6,
        spurious_retransmissions: compute_counter_growth("TcpExtTCPDSACKRecvSegs"),
        timestamp_drops_at_servers: compute_timestamp_drop_growth(&counters_before[1..], &counters_after[1..]),
        timestamp_drops_at_client: compute_timestamp_drop_growth(&counters_before[..1], &counters_after[..1]),
        reordered_acks: compute_counter_growth(PAWS_OLD_ACK_COUNTER),
    }
}

fn compute_timestamp_drop_growth(
    counters_before: &[KernelNetworkCounters],
    counters_after: &[KernelNetworkCounters],
) -> BTreeMap<String, u64> {
    let compute_counter_growth = |name| {
        (
            String::from(name),
            counters::sum_counter_over_namespaces(counters_after, name)
                - counters::sum_counter_over_namespaces(counters_before, name),
        )
    };
    TIMESTAMP_DROP_COUNTERS.into_iter().map(compute_counter_growth).filter(|(_, count)| *count > 0).collect()
}

/// Writes the busy times of a paced server's cores (ns) into its core load file. Fails when the file cannot be written.
pub fn write_core_busy_times(path: &Path, busy_times_ns: &[u64]) -> anyhow::Result<()> {
    let file_bytes: Vec<u8> = busy_times_ns.iter().flat_map(|core_busy_ns| core_busy_ns.to_le_bytes()).collect();
    // Write in place and as one block, because readers have the file open.
    let mut busy_file = std::fs::File::options().write(true).create(true).truncate(false).open(path)?;
    busy_file.write_all(&file_bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// Adds a random time to every core's busy time ten times a second and writes the results, until `stop_flag` is set.
pub(crate) fn write_random_core_busy_times(testbed: &Testbed, stop_flag: &AtomicBool) -> anyhow::Result<()> {
    const CORE_BUSY_TIME_WRITE_INTERVAL: Duration = Duration::from_millis(100);
    let mut rng = seeded_rng(testbed.options().rss_key_seed, 5);
    let core_count = usize::from(testbed.options().core_count);
    let server_numbers = testbed.server_numbers();
    let mut busy_times_ns = vec![0u64; server_numbers.len() * core_count];
    while !stop_flag.load(Ordering::Relaxed) {
        for core_busy_ns in &mut busy_times_ns {
            *core_busy_ns += u64::from(uniform_below(&mut rng, CORE_BUSY_TIME_WRITE_INTERVAL.as_nanos() as u32));
        }
        for (number, server_busy_ns) in server_numbers.iter().zip(busy_times_ns.chunks(core_count)) {
            write_core_busy_times(&core_load_file_path(testbed, *number), server_busy_ns)?;
        }
        std::thread::sleep(CORE_BUSY_TIME_WRITE_INTERVAL);
    }
    Ok(())
}

/// Drains and undrains the servers one after the other, until `stop_flag` is set.
fn drain_servers_in_turn(
    testbed: &Testbed,
    fleet: &mut Fleet,
    stop_flag: &AtomicBool,
    pool_changes: &AtomicU64,
) -> anyhow::Result<()> {
    let server_numbers = testbed.server_numbers();
    for step in 0.. {
        if stop_flag.load(Ordering::Relaxed) {
            break;
        }
        let mut pool = fleet.server_pool().clone();
        let server_number = server_numbers[step / 2 % server_numbers.len()];
        pool.insert(server_number, if step % 2 == 0 { ServerAdminState::Draining } else { ServerAdminState::Active });
        fleet.set_server_pool(testbed, pool)?;
        pool_changes.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(POOL_CHANGE_INTERVAL);
    }
    Ok(())
}

/// Leaves a connection idle for `idle_duration`, and returns the response time of the next request (ms).
fn measure_idle_connection_response_ms(service: SocketAddr, idle_duration: Duration) -> anyhow::Result<u64> {
    let mut connection = HttpConnection::open_to(service, None)?;
    let worker_before_silence = connection.query_worker().context("before the silence")?;
    std::thread::sleep(idle_duration);
    let start = Instant::now();
    // Send several requests, because the PAWS clamp limits the first steps of TSval.
    for _ in 0..5 {
        let worker_after_silence =
            connection.query_worker().with_context(|| format!("after {idle_duration:?} of silence"))?;
        ensure!(
            worker_before_silence == worker_after_silence,
            "answered by {worker_before_silence:?} before the silence, by {worker_after_silence:?} after it"
        );
    }
    Ok(start.elapsed().as_millis() as u64)
}

/// Reads a slow response for `duration` on a busy connection. Returns the number of bytes received.
fn count_busy_connection_bytes(service: SocketAddr, duration: Duration) -> anyhow::Result<u64> {
    let mut stream = HttpConnection::open_to(service, None)?.request_file(SLOW_FILE_PATH)?;
    stream.set_read_timeout(Some(BUSY_CONNECTION_READ_TIMEOUT))?;
    let (end, mut received, mut buffer) = (Instant::now() + duration, 0u64, [0; 65_536]);
    while Instant::now() < end {
        let read_length = stream.read(&mut buffer).with_context(|| format!("stalled after {received} bytes"))?;
        if read_length == 0 && received >= LARGE_FILE_BYTES as u64 {
            break;
        }
        ensure!(read_length > 0, "closed after {received} bytes");
        received += read_length as u64;
    }
    Ok(received)
}

/// Runs wrk for `seconds` seconds. Returns the number of requests and the number of errors.
fn count_wrk_requests_and_errors(testbed: &Testbed, seconds: u32) -> anyhow::Result<(u64, u64)> {
    let mut command = Command::new("wrk");
    command.args(["--threads", "1", "--connections", "64", "--timeout", "10s", "--duration"]);
    command.arg(format!("{seconds}s")).arg(format!("http://{}{WORKER_IDENTITY_PATH}", testbed.service_address()));
    let output = testbed.run_command(testbed.client(), command)?;
    parse_wrk_counts(&String::from_utf8(output.stdout)?)
}

/// Returns the numbers of requests and errors in wrk's output. If the output mentions no errors, their number is 0.
pub(crate) fn parse_wrk_counts(text: &str) -> anyhow::Result<(u64, u64)> {
    let request_count = text.lines().find_map(|line| line.trim().split_once(" requests in ")?.0.parse().ok());
    let sum_of_numbers = |line: &str| -> u64 {
        line.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse::<u64>().ok()).sum()
    };
    let error_counts = text.lines().map(str::trim).filter_map(|line| {
        let error_text = line.strip_prefix("Socket errors:").or_else(|| line.strip_prefix("Non-2xx or 3xx responses:"));
        error_text.map(sum_of_numbers)
    });
    Ok((request_count.with_context(|| format!("wrk printed no requests: {text}"))?, error_counts.sum()))
}

/// Downloads a file `count` times. Returns the number of complete downloads, and the error messages of failed ones.
fn run_downloads(testbed: &Testbed, count: u32) -> anyhow::Result<(u64, Vec<String>)> {
    let (remaining_downloads, complete_downloads) = (AtomicU64::new(count.into()), AtomicU64::new(0));
    let download_errors = std::sync::Mutex::new(Vec::new());
    let claim_download = || {
        remaining_downloads
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |remaining_count| remaining_count.checked_sub(1))
            .is_ok()
    };
    std::thread::scope(|scope| {
        for _ in 0..DOWNLOADER_COUNT {
            scope.spawn(|| {
                while claim_download() {
                    match download_once(testbed, &[]) {
                        Ok(()) => drop(complete_downloads.fetch_add(1, Ordering::Relaxed)),
                        Err(error) => download_errors.lock().expect("no downloader panics").push(format!("{error:#}")),
                    }
                }
            });
        }
    });
    let failures = download_errors.into_inner().expect("no downloader panics");
    Ok((complete_downloads.into_inner(), failures))
}

/// Downloads a file once with curl and the additional curl `options`. Fails when the download is incomplete.
pub(crate) fn download_once(testbed: &Testbed, options: &[&str]) -> anyhow::Result<()> {
    let mut command = Command::new("curl");
    command.args(options);
    command.args(["--silent", "--show-error", "--fail", "--max-time", "30", "--output", "/dev/null"]);
    command
        .args(["--write-out", "%{size_download}"])
        .arg(format!("http://{}{LARGE_FILE_PATH}", testbed.service_address()));
    let output = testbed.run_command(testbed.client(), command)?;
    let downloaded_bytes = String::from_utf8_lossy(&output.stdout);
    if downloaded_bytes != LARGE_FILE_BYTES.to_string() {
        bail!("{downloaded_bytes} bytes instead of {LARGE_FILE_BYTES}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_drops_of_reordered_segments_are_tolerated() {
        let build_drop_counts = |name: &str, count| BTreeMap::from([(name.to_owned(), count)]);
        let counters_without_drops = TcpCounterGrowth { sent_segments: 2_500_000, ..TcpCounterGrowth::default() };
        assert!(counters_without_drops.has_only_tolerable_timestamp_drops());
        let build_client_drops = |name, count| TcpCounterGrowth {
            timestamp_drops_at_client: build_drop_counts(name, count),
            ..counters_without_drops.clone()
        };
        assert!(build_client_drops(PAWS_ESTABLISHED_DROP_COUNTER, 3).has_only_tolerable_timestamp_drops());
        assert!(!build_client_drops(PAWS_ESTABLISHED_DROP_COUNTER, 4).has_only_tolerable_timestamp_drops());
        assert!(!build_client_drops("TcpExtTSEcrRejected", 1).has_only_tolerable_timestamp_drops());
        let server_drops = TcpCounterGrowth {
            timestamp_drops_at_servers: build_drop_counts(PAWS_ESTABLISHED_DROP_COUNTER, 1),
            ..counters_without_drops
        };
        assert!(!server_drops.has_only_tolerable_timestamp_drops());
    }

    #[test]
    fn wrk_socket_and_status_errors_are_counted() {
        let output_without_errors = "  120 requests in 2.00s, 3.00MB read\nRequests/sec: 60\n";
        assert_eq!(parse_wrk_counts(output_without_errors).unwrap(), (120, 0));
        let output_with_errors = "  120 requests in 2.00s, 3.00MB read\n  Socket errors: connect 1, read 20, write 0, \
                                  timeout 3\n  Non-2xx or 3xx responses: 7\n";
        assert_eq!(parse_wrk_counts(output_with_errors).unwrap(), (120, 31));
        assert!(parse_wrk_counts("unable to connect").is_err());
    }
}
