//! Measures the cost of the agent's connection count, with real sockets in a network namespace that ends with this
//! process.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Instant;

use crate::default_args::parse_default_args;
use crate::namespace::{self, run_ip_command};
use crate::thread_cpus::thread_cpu_time;
use anyhow::{Context as _, ensure};
use coreward_dataplane::sockets::counts::count_connections;
use coreward_model::statistics::median;

use crate::report::{BenchReport, ReportTable};

/// Options of `coreward-lab bench counting`.
#[derive(Debug, Clone, clap::Args)]
pub struct CountingBenchArgs {
    /// Numbers of connections at the server
    #[arg(long, value_delimiter = ',', default_value = "1000,10000,100000")]
    connections: Vec<u32>,
    /// Number of counts
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

impl Default for CountingBenchArgs {
    fn default() -> Self {
        parse_default_args()
    }
}

/// Number of connections from each client address, which is limited by the number of ports.
const CONNECTIONS_PER_CLIENT: u32 = 20_000;
const FIRST_CLIENT_PORT: u16 = 10_000;

/// Length of the accept queue. All connections stay in it, because a process has too few file descriptors to accept
/// them.
const ACCEPT_BACKLOG: i32 = 1 << 20;

/// Measures the connection count in a new thread, which enters its own network namespace. Fails without root, or when
/// sockets are not available.
pub fn run_connection_counting_bench(args: &CountingBenchArgs) -> anyhow::Result<BenchReport> {
    namespace::run_measurement_in_new_thread("counting", args, measure_connection_counting)
}

fn measure_connection_counting(args: &CountingBenchArgs) -> anyhow::Result<BenchReport> {
    namespace::enter_new_network_namespace()?;
    run_ip_command("link set lo up")?;
    std::fs::write("/proc/sys/net/core/somaxconn", ACCEPT_BACKLOG.to_string()).context("net.core.somaxconn")?;
    let mut table =
        ReportTable::new(&["connections", "one port, ms", "CPU of it, ms", "of 4 services, ms", "CPU of these, ms"]);
    let mut server = ConnectionSink::start()?;
    for connection_count in &args.connections {
        server.open_connections_up_to(*connection_count)?;
        let one_port_times_ms = server.measure_median_counting_times_ms(args.rounds, &[server.address])?;
        let unused_service_address = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let four_services_times_ms = server.measure_median_counting_times_ms(
            args.rounds,
            &[server.address, unused_service_address(1), unused_service_address(2), unused_service_address(3)],
        )?;
        table.add_row([
            (*connection_count).into(),
            one_port_times_ms.0.into(),
            one_port_times_ms.1.into(),
            four_services_times_ms.0.into(),
            four_services_times_ms.1.into(),
        ]);
    }
    Ok(BenchReport {
        name: "counting",
        heading: "Counting connections",
        method_description: format!(
            "The agent counts its services' connections by the kernel's sock_diag(7). Durations are medians of {} \
             counts of real sockets in state CLOSE-WAIT. If all services have one port, the kernel skips all other \
             sockets.",
            args.rounds
        ),
        tables: vec![table],
    })
}

/// Listening server, with the number of connections that clients have opened to it.
struct ConnectionSink {
    /// Listening socket, which stays open as long as the server exists.
    _listener: socket2::Socket,
    address: SocketAddr,
    open_connection_count: u32,
}

impl ConnectionSink {
    fn start() -> anyhow::Result<Self> {
        let listener = new_tcp_socket()?;
        listener.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
        listener.listen(ACCEPT_BACKLOG)?;
        let address = listener.local_addr()?.as_socket().context("a listening socket without an address")?;
        Ok(Self { _listener: listener, address, open_connection_count: 0 })
    }

    /// Opens connections until the server has `target_count` of them. The clients close their sockets at once, but the
    /// server's stay open in CLOSE-WAIT.
    fn open_connections_up_to(&mut self, target_count: u32) -> anyhow::Result<()> {
        for connection_index in self.open_connection_count..target_count {
            let client = new_tcp_socket()?;
            let client_address =
                Ipv4Addr::from(u32::from(Ipv4Addr::new(127, 1, 0, 1)) + connection_index / CONNECTIONS_PER_CLIENT);
            // The ports are explicit, because the kernel's search for a free port would take most of the time.
            let client_port = FIRST_CLIENT_PORT + (connection_index % CONNECTIONS_PER_CLIENT) as u16;
            client.bind(&SocketAddr::from((client_address, client_port)).into())?;
            client.connect(&self.address.into()).with_context(|| format!("connection {connection_index}"))?;
        }
        self.open_connection_count = target_count;
        Ok(())
    }

    /// Counts connections `rounds` times and returns the medians of elapsed time and CPU time per count (ms).
    fn measure_median_counting_times_ms(&self, rounds: u32, services: &[SocketAddr]) -> anyhow::Result<(f64, f64)> {
        let (mut elapsed_ms, mut cpu_ms) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let (start, cpu_time_before) = (Instant::now(), thread_cpu_time());
            let counted_connections = count_connections(services)?;
            elapsed_ms.push(start.elapsed().as_secs_f64() * 1e3);
            cpu_ms.push((thread_cpu_time() - cpu_time_before).as_secs_f64() * 1e3);
            ensure!(
                counted_connections[0] == self.open_connection_count,
                "{} connections were counted: expected {}",
                counted_connections[0],
                self.open_connection_count
            );
        }
        Ok((median(&elapsed_ms).unwrap_or(0.0), median(&cpu_ms).unwrap_or(0.0)))
    }
}

fn new_tcp_socket() -> std::io::Result<socket2::Socket> {
    socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)
}
