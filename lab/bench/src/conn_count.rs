//! Cost of the agent's count of connections, with real sockets in a network namespace that ends with this process.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Instant;

use crate::cpus::thread_cpu_time;
use crate::default_args::default_args;
use crate::namespace::{self, ip};
use anyhow::{Context as _, ensure};
use coreward_dataplane::sockets::counts::connection_counts;
use coreward_model::statistics::median;

use crate::report::{Report, Table};

/// Options of `coreward-lab bench counting`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Numbers of connections at the server
    #[arg(long, value_delimiter = ',', default_value = "1000,10000,100000")]
    connections: Vec<u32>,
    /// Number of counts
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

impl Default for Args {
    fn default() -> Self {
        default_args()
    }
}

/// Number of connections per client address, which the number of ports limits.
const CONNECTIONS_PER_CLIENT: u32 = 20_000;
const FIRST_PORT: u16 = 10_000;

/// Length of the accept queue. Connections are never accepted, because a process has too few descriptors for them.
const BACKLOG: i32 = 1 << 20;

/// Measures the count of connections in a new thread, because a network namespace belongs to a thread. Fails without
/// root, or when sockets are not available.
pub fn run(args: &Args) -> anyhow::Result<Report> {
    namespace::measure_in_thread("counting", args, measure)
}

fn measure(args: &Args) -> anyhow::Result<Report> {
    namespace::enter_new()?;
    ip("link set lo up")?;
    std::fs::write("/proc/sys/net/core/somaxconn", BACKLOG.to_string()).context("net.core.somaxconn")?;
    let mut table =
        Table::new(&["connections", "one port, ms", "CPU of it, ms", "of 4 services, ms", "CPU of these, ms"]);
    let mut server = Server::start()?;
    for connections in &args.connections {
        server.open(*connections)?;
        let one_port = server.rounds(args.rounds, &[server.address])?;
        let other = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let four_services = server.rounds(args.rounds, &[server.address, other(1), other(2), other(3)])?;
        table.add_row([
            (*connections).into(),
            one_port.0.into(),
            one_port.1.into(),
            four_services.0.into(),
            four_services.1.into(),
        ]);
    }
    Ok(Report {
        name: "counting",
        title: "Counting connections",
        about: format!(
            "Duration of the agent's count of its services' connections, by the kernel's sock_diag(7): medians of {} \
             counts of real sockets (CLOSE-WAIT). For services with one port the kernel skips all other sockets.",
            args.rounds
        ),
        tables: vec![table],
    })
}

/// Listening server, with the connections that clients have opened to it.
struct Server {
    /// Listening socket, kept open as long as the server exists.
    _listener: socket2::Socket,
    address: SocketAddr,
    open_count: u32,
}

impl Server {
    fn start() -> anyhow::Result<Self> {
        let listener = tcp_socket()?;
        listener.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
        listener.listen(BACKLOG)?;
        let address = listener.local_addr()?.as_socket().context("a listening socket without an address")?;
        Ok(Self { _listener: listener, address, open_count: 0 })
    }

    /// Opens connections until the server has `connections` of them; the clients close their ends at once.
    fn open(&mut self, connections: u32) -> anyhow::Result<()> {
        for number in self.open_count..connections {
            let client = tcp_socket()?;
            let from = Ipv4Addr::from(u32::from(Ipv4Addr::new(127, 1, 0, 1)) + number / CONNECTIONS_PER_CLIENT);
            // Explicit ports: the kernel's search for a free port would take most of the time.
            let port = FIRST_PORT + (number % CONNECTIONS_PER_CLIENT) as u16;
            client.bind(&SocketAddr::from((from, port)).into())?;
            client.connect(&self.address.into()).with_context(|| format!("connection {number}"))?;
        }
        self.open_count = connections;
        Ok(())
    }

    /// Counts connections `rounds` times and returns the medians of elapsed time and CPU time per count (ms).
    fn rounds(&self, rounds: u32, services: &[SocketAddr]) -> anyhow::Result<(f64, f64)> {
        let (mut times, mut cpu_times) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let (start, cpu) = (Instant::now(), thread_cpu_time());
            let counted = connection_counts(services)?;
            times.push(start.elapsed().as_secs_f64() * 1e3);
            cpu_times.push((thread_cpu_time() - cpu).as_secs_f64() * 1e3);
            ensure!(
                counted[0] == self.open_count,
                "{} connections were counted: expected {}",
                counted[0],
                self.open_count
            );
        }
        Ok((median(&times).unwrap_or(0.0), median(&cpu_times).unwrap_or(0.0)))
    }
}

fn tcp_socket() -> std::io::Result<socket2::Socket> {
    socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)
}
