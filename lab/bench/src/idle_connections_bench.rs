//! Command `coreward-lab bench idle`. It measures the cost of server.bpf.c per request while some connections are idle.
//! After a long idle time, the PAWS clamp applies to a connection (bpf/server/cookie_time.h). Then other connections
//! search for an entry, too.
//!
//! Real connections use the loopback of a network namespace, and the kernel measures the programs' run time
//! (BPF_ENABLE_STATS).

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::namespace::{self, run_ip_command};
use crate::report::{BenchReport, ReportTable};
use crate::run_time::{enable_run_time_statistics, read_run_ns_and_count};
use crate::xdp::{median_of_rounds, quartile_range_text};
use anyhow::{Context as _, ensure};
use coreward_dataplane::server::{ServerProgramOptions, ServerPrograms};
use coreward_dataplane::tc::PacketDirection;
use coreward_intf as intf;
use coreward_model::consistency::ServiceSettings;
use coreward_model::cookie::{CookieKey, CookieKeyIndex, FleetCookieKeys};
use coreward_model::tuple::TransportProtocol;
use coreward_model::{ServerId, ServiceAddress};
use nix::sys::resource::{Resource, getrlimit};

/// Options of `coreward-lab bench idle`.
#[derive(Debug, Clone, clap::Args)]
pub struct IdleBenchArgs {
    /// Number of connections
    #[arg(long, default_value_t = Self::default().connections,
        value_parser = clap::value_parser!(u32).range(100..=20_000))]
    connections: u32,
    /// Number of rounds per case; in each, every connection that is not idle has one request
    #[arg(long, default_value_t = Self::default().rounds, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

impl Default for IdleBenchArgs {
    fn default() -> Self {
        Self { connections: 5_000, rounds: 15 }
    }
}

const SERVICE_ADDRESS: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 80);
const LOOPBACK_INTERFACE_INDEX: u32 = 1;
const CONNECTIONS_PER_IDLE_CONNECTION: usize = 100;
/// Time without packets after which a connection is idle. It is longer than MAX_STEP_MS of bpf/include/server.h.
const CONNECTION_IDLE_TIME: Duration = Duration::from_millis(intf::MAX_STEP_MS as u64 + 1_000);
/// Time between two requests on a connection that is not idle.
const BUSY_REQUEST_INTERVAL: Duration = Duration::from_secs(5);
const SOCKET_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of open files that are not connections, such as BPF maps, programs and the listener.
const NON_CONNECTION_FILE_COUNT: u64 = 100;

/// Sockets of client and server of one connection.
struct ConnectionSockets(TcpStream, TcpStream);

impl ConnectionSockets {
    /// Sends a request of one byte, and then its response of one byte.
    fn exchange_request_and_response(&self) -> anyhow::Result<()> {
        let Self(client, server) = self;
        for (mut sender, mut receiver) in [(client, server), (server, client)] {
            sender.write_all(b"?")?;
            receiver.read_exact(&mut [0])?;
        }
        Ok(())
    }
}

/// Server programs on the loopback interface, and the directory of their pins. Dropping this value detaches them.
struct AttachedServerPrograms(Option<ServerPrograms>, PathBuf);

impl AttachedServerPrograms {
    fn attach_to_loopback() -> anyhow::Result<Self> {
        let pin_directory = PathBuf::from(format!("/sys/fs/bpf/coreward-bench-idle-{}", std::process::id()));
        std::fs::create_dir(&pin_directory).with_context(|| pin_directory.display().to_string())?;
        let mut programs = Self(None, pin_directory.clone());
        let options =
            ServerProgramOptions { interface_index: LOOPBACK_INTERFACE_INDEX, pin_directory, sample_every_syn: false };
        let server_programs = programs.0.insert(ServerPrograms::attach(options)?);
        let cookie_keys = [CookieKey { k0: 1, k1: 2 }, CookieKey { k0: 3, k1: 4 }];
        server_programs.set_cookie_keys(
            &FleetCookieKeys { keys: cookie_keys, current_key_index: CookieKeyIndex::First },
            monotonic_now_ms()?.wrapping_sub(1_000),
        );
        let address = ServiceAddress { vip_and_port: SERVICE_ADDRESS.into(), protocol: TransportProtocol::Tcp };
        server_programs.set_services(&[(address, ServerId::try_from(1)?, ServiceSettings::default())])?;
        Ok(programs)
    }

    fn server_programs(&self) -> &ServerPrograms {
        self.0.as_ref().expect("attached until it is dropped")
    }

    fn paws_clamped_packet_count(&self) -> u64 {
        self.server_programs().counter(intf::SERVER_COUNTER_TSVAL_CLAMPED)
    }

    /// Returns the total run times of the ingress and the egress program so far (ns).
    fn ingress_and_egress_run_ns(&self) -> anyhow::Result<[u64; 2]> {
        let [ingress_program, egress_program] = [PacketDirection::Ingress, PacketDirection::Egress]
            .map(|direction| self.server_programs().program_for_direction(direction));
        Ok([read_run_ns_and_count(ingress_program)?.0, read_run_ns_and_count(egress_program)?.0])
    }
}

impl Drop for AttachedServerPrograms {
    fn drop(&mut self) {
        let detach_result = self.0.take().map_or(Ok(()), ServerPrograms::detach_and_unpin);
        if let Err(error) = detach_result.and_then(|()| Ok(std::fs::remove_dir(&self.1)?)) {
            eprintln!("{}: {error:#}", self.1.display());
        }
    }
}

/// Returns the time of CLOCK_MONOTONIC (ms), from which the kernel derives its TSvals with `tcp_timestamps=2`.
fn monotonic_now_ms() -> anyhow::Result<u32> {
    let monotonic_time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)?;
    Ok((monotonic_time.tv_sec() as u64 * 1_000 + monotonic_time.tv_nsec() as u64 / 1_000_000) as u32)
}

/// Runs the bench of idle connections in a new thread, which enters its own network namespace. Fails without root.
pub fn run_idle_bench(args: &IdleBenchArgs) -> anyhow::Result<BenchReport> {
    namespace::run_measurement_in_new_thread("idle", args, measure_idle_connections)
}

fn measure_idle_connections(args: &IdleBenchArgs) -> anyhow::Result<BenchReport> {
    namespace::enter_new_network_namespace()?;
    require_open_file_limit(args.connections)?;
    configure_loopback()?;
    let programs = AttachedServerPrograms::attach_to_loopback()?;
    let _run_time_statistics = enable_run_time_statistics()?;
    let connections = open_connections(args.connections)?;
    let idle_connection_count = connections.len() / CONNECTIONS_PER_IDLE_CONNECTION;
    let mut table =
        ReportTable::new(&["idle", "ingress, ns per request", "quartiles", "egress, ns per request", "quartiles "]);
    let idle_start = Instant::now();
    let (idle_connections, busy_connections) = connections.split_at(idle_connection_count);
    measure_and_add_cost_row("none", &programs, busy_connections, args.rounds, &mut table)?;
    while idle_start.elapsed() < CONNECTION_IDLE_TIME {
        std::thread::sleep(BUSY_REQUEST_INTERVAL.min(CONNECTION_IDLE_TIME.saturating_sub(idle_start.elapsed())));
        busy_connections.iter().try_for_each(ConnectionSockets::exchange_request_and_response)?;
    }
    wake_idle_connections(&programs, idle_connections)?;
    measure_and_add_cost_row("1 %", &programs, busy_connections, args.rounds, &mut table)?;
    std::thread::sleep(CONNECTION_IDLE_TIME);
    wake_idle_connections(&programs, &connections)?;
    measure_and_add_cost_row("all", &programs, &connections[idle_connection_count..], args.rounds, &mut table)?;
    Ok(BenchReport {
        name: "idle",
        heading: "Idle connections",
        method_description: format!(
            "server.bpf.c runs at the loopback of a network namespace with {} connections. The kernel's run-time \
             statistics measure it, clock reads included. Request and response have one byte each, and each packet \
             passes both programs. Values are medians of {} rounds, each with a request on 99 % of the connections. In \
             row `1 %` the remaining connections had been idle for more than {} ms before the rounds. In row `all` \
             every connection had been idle that long, so each has its own PAWS clamp entry.",
            args.connections,
            args.rounds,
            intf::MAX_STEP_MS,
        ),
        tables: vec![table],
    })
}

/// Raises the limit of open files. Fails when the hard limit is too low for both sockets of each connection.
fn require_open_file_limit(connection_count: u32) -> anyhow::Result<()> {
    coreward_control_server::server::raise_open_file_limit();
    let (file_limit, needed_file_count) =
        (getrlimit(Resource::RLIMIT_NOFILE)?.0, 2 * u64::from(connection_count) + NON_CONNECTION_FILE_COUNT);
    ensure!(
        needed_file_count <= file_limit,
        "{connection_count} connections need {needed_file_count} open files, but the limit is {file_limit}: raise the \
         hard limit (`ulimit -Hn`), or measure fewer with --connections"
    );
    Ok(())
}

fn configure_loopback() -> anyhow::Result<()> {
    run_ip_command("link set lo up")?;
    run_ip_command(&format!("address add {}/32 dev lo", SERVICE_ADDRESS.0))?;
    std::fs::write("/proc/sys/net/ipv4/tcp_timestamps", "2").context("net.ipv4.tcp_timestamps")
}

fn open_connections(connection_count: u32) -> anyhow::Result<Vec<ConnectionSockets>> {
    let address = SocketAddr::from(SERVICE_ADDRESS);
    let listener = TcpListener::bind(address)?;
    let open_connection = |_| {
        let client = TcpStream::connect_timeout(&address, SOCKET_TIMEOUT)?;
        let (server, _) = listener.accept()?;
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(SOCKET_TIMEOUT))?;
            stream.set_nodelay(true)?;
        }
        let connection = ConnectionSockets(client, server);
        connection.exchange_request_and_response()?;
        Ok(connection)
    };
    (0..connection_count).map(open_connection).collect()
}

/// Sends a request on each idle connection. Fails if the PAWS clamp then applied to fewer packets than there are
/// connections.
fn wake_idle_connections(
    programs: &AttachedServerPrograms,
    idle_connections: &[ConnectionSockets],
) -> anyhow::Result<()> {
    let clamped_packet_count_before = programs.paws_clamped_packet_count();
    idle_connections.iter().try_for_each(ConnectionSockets::exchange_request_and_response)?;
    let clamped_packet_count = programs.paws_clamped_packet_count() - clamped_packet_count_before;
    ensure!(
        clamped_packet_count >= idle_connections.len() as u64,
        "{} connections were idle, {clamped_packet_count} packets are held",
        idle_connections.len()
    );
    Ok(())
}

fn measure_and_add_cost_row(
    name: &str,
    programs: &AttachedServerPrograms,
    busy_connections: &[ConnectionSockets],
    rounds: u32,
    table: &mut ReportTable,
) -> anyhow::Result<()> {
    let mut run_ns_by_direction = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        let run_ns_before = programs.ingress_and_egress_run_ns()?;
        busy_connections.iter().try_for_each(ConnectionSockets::exchange_request_and_response)?;
        let run_ns_after = programs.ingress_and_egress_run_ns()?;
        for (ns_by_round, (ns_before, ns_after)) in
            run_ns_by_direction.iter_mut().zip(run_ns_before.into_iter().zip(run_ns_after))
        {
            ns_by_round.push((ns_after - ns_before) as f64 / busy_connections.len() as f64);
        }
    }
    let [ingress_ns_by_round, egress_ns_by_round] = run_ns_by_direction;
    table.add_row([
        name.into(),
        median_of_rounds(&ingress_ns_by_round).into(),
        quartile_range_text(&ingress_ns_by_round).into(),
        median_of_rounds(&egress_ns_by_round).into(),
        quartile_range_text(&egress_ns_by_round).into(),
    ]);
    Ok(())
}
