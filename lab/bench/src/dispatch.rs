//! `coreward-lab bench dispatch`: cost of `dispatch.bpf.c` per request, above a program that leaves the choice to the
//! kernel.
//!
//! Programs of type sk_reuseport have no test run. Real requests therefore go over the loopback of a network namespace
//! to sockets of this process, and the kernel measures the programs (BPF_ENABLE_STATS). Its two clock reads are part of
//! every figure, but not of the differences.

use std::fs::File;
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::PathBuf;

use crate::namespace::{self, ip};
use crate::report::{Goal, Report, Table, goal_cells};
use crate::run_time::{enable_statistics, run_time};
use anyhow::{Context as _, ensure};
use coreward_dataplane::dispatch::{self, DispatchPrograms, Options, Policy, RequestType};
use coreward_dataplane::reuseport;
use coreward_model::dispatch::ClassBounds;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{Link, MapCore as _, MapFlags};

use crate::xdp::{difference, fastest_difference, median_of};

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/empty_reuseport.skel.rs"));
}

/// Options of `coreward-lab bench dispatch`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Number of rounds; in each, all programs run one after the other
    #[arg(long, default_value_t = Self::default().rounds, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of requests per program and round
    #[arg(long, default_value_t = Self::default().requests, value_parser = clap::value_parser!(u32).range(64..))]
    requests: u32,
}

impl Default for Args {
    fn default() -> Self {
        Self { rounds: 15, requests: 4096 }
    }
}

const WORKER_COUNTS: [usize; 2] = [16, 64];
const CLIENT_COUNT: usize = 61;
/// Maximum number of requests that are outstanding at once.
const BURST: u32 = 48;

/// Returns the goal (ns) for the fastest rounds of this policy with this number of workers; `None` if it has no goal.
fn goal_of(policy: &str, workers: usize) -> Option<Goal> {
    (policy == Policy::ShortestQueue.name() && workers == WORKER_COUNTS[0]).then_some(Goal::AtMost(90.0))
}

/// Measures the dispatch in a new thread, because a network namespace belongs to a thread. Fails without root.
pub fn run(args: &Args) -> anyhow::Result<Report> {
    namespace::measure_in_thread("dispatch", args, measure)
}

fn measure(args: &Args) -> anyhow::Result<Report> {
    namespace::enter_new()?;
    ip("link set lo up")?;
    let _statistics = enable_statistics()?;
    let mut sent = Table::new(&["datagram sent, 16 workers", "above empty, ns", "empty, ns"]);
    let mut table =
        Table::new(&["policy", "workers", "above empty, ns", "fastest rounds", "goal", "verdict", "empty, ns"]);
    for workers in WORKER_COUNTS {
        let mut services = vec![Service::floor(workers, Floor::Empty)?, Service::floor(workers, Floor::SelectSocket)?];
        let mut names = vec!["(always the same)"];
        for policy in Policy::all() {
            services.push(Service::with_policy(workers, policy)?);
            names.push(policy.name());
        }
        // By service, then by round.
        let mut times = vec![Vec::new(); services.len()];
        for _ in 0..args.rounds {
            for (times, service) in times.iter_mut().zip(&services) {
                times.push(service.run_round(args.requests)?);
            }
        }
        if workers == WORKER_COUNTS[0] {
            egress_rows(args, &services, &mut sent)?;
        }
        let empty = times[0].clone();
        for (name, times) in names.into_iter().zip(&times[1..]) {
            let fastest = fastest_difference(times, &empty);
            let [goal, verdict] = goal_cells(goal_of(name, workers), fastest);
            table.add_row([
                name.into(),
                (workers as u64).into(),
                median_of(&difference(times, &empty)).into(),
                fastest.into(),
                goal,
                verdict,
                median_of(&empty).into(),
            ]);
        }
    }
    let Args { rounds, requests } = args;
    Ok(Report {
        name: "dispatch",
        title: "Which worker gets a request",
        about: format!(
            "dispatch.bpf.c on datagrams over a loopback, {CLIENT_COUNT} clients, up to {BURST} outstanding, by the \
             kernel's run-time statistics: medians of {rounds} rounds of {requests} requests, interleaved, with the \
             datagram's whole path in between. jlq and jbsrq distinguish two types of requests. `(always the same)` \
             only calls the helper that names a socket."
        ),
        tables: vec![table, sent],
    })
}

/// Adds a row with the cost of the egress program for a response of the service, and one for any other datagram.
fn egress_rows(args: &Args, services: &[Service], table: &mut Table) -> anyhow::Result<()> {
    // The services with `jsq` and `random`; only the first one gets requests.
    let jsq = FLOOR_COUNT + Policy::all().position(|policy| policy == Policy::ShortestQueue).context("no jsq")?;
    let (empty, own, other) = (&services[0].egress, &services[jsq].egress, &services[FLOOR_COUNT].egress);
    let (mut of_service, mut of_others, mut of_empty) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..args.rounds {
        let before = [empty, own, other].map(|program| run_time(program.as_fd()));
        services[jsq].run_round(args.requests)?;
        let after = [empty, own, other].map(|program| run_time(program.as_fd()));
        let mut spent = Vec::new();
        for (before, after) in before.into_iter().zip(after) {
            let (before, after) = (before?, after?);
            spent.push(((after.0 - before.0) as f64, (after.1 - before.1) as f64));
        }
        let each: Vec<f64> = spent.iter().map(|(time, runs)| time / runs).collect();
        // The sockets sent each request and each response; only the responses belong to the service.
        let responses = f64::from(args.requests);
        ensure!(spent[1].1 > responses * 1.5, "{} datagrams for {responses} requests", spent[1].1);
        of_service.push((spent[1].0 - (spent[1].1 - responses) * each[2]) / responses - each[0]);
        of_others.push(each[2] - each[0]);
        of_empty.push(each[0]);
    }
    let empty = median_of(&of_empty);
    table.add_row(["a response of the service".into(), median_of(&of_service).into(), empty.into()]);
    table.add_row(["any other UDP datagram".into(), median_of(&of_others).into(), empty.into()]);
    Ok(())
}

/// Baseline program, to which the cost of the dispatch program is compared.
#[derive(Debug, Clone, Copy)]
enum Floor {
    /// Program that leaves the choice of the socket to the kernel.
    Empty,
    /// Program that always selects the same socket.
    SelectSocket,
}

/// Number of services with a baseline program, which precede the services with a policy.
const FLOOR_COUNT: usize = 2;

/// Service whose workers and clients are sockets of this process.
struct Service {
    address: SocketAddr,
    workers: Vec<UdpSocket>,
    clients: Vec<UdpSocket>,
    program: OwnedFd,
    /// BPF program that runs for each datagram that the sockets send.
    egress: OwnedFd,
    _link: Option<Link>,
    /// Loaded dispatch programs and their pins, kept so that the programs stay attached; `None` for a baseline.
    dispatch: Option<(DispatchPrograms, Pins)>,
}

/// Directory with the pins of the dispatch programs, which are removed when this value is dropped.
struct Pins(PathBuf);

impl Drop for Pins {
    fn drop(&mut self) {
        if let Err(error) = dispatch::remove(&self.0) {
            eprintln!("{}: {error:#}", self.0.display());
        }
    }
}

impl Service {
    fn sockets(workers: usize) -> anyhow::Result<(SocketAddr, Vec<UdpSocket>)> {
        let first = socket((Ipv4Addr::LOCALHOST, 0).into())?;
        let address = first.local_addr()?;
        let mut sockets = vec![first];
        for _ in 1..workers {
            sockets.push(socket(address)?);
        }
        Ok((address, sockets))
    }

    fn floor(workers: usize, floor: Floor) -> anyhow::Result<Self> {
        let (address, workers) = Self::sockets(workers)?;
        let mut storage = MaybeUninit::uninit();
        let loaded = skeleton::EmptyReuseportSkelBuilder::default().open(&mut storage)?.load()?;
        let program = match floor {
            Floor::Empty => loaded.progs.empty.as_fd(),
            Floor::SelectSocket => {
                let socket = (workers[0].as_raw_fd() as u64).to_ne_bytes();
                loaded.maps.only.update(&0u32.to_ne_bytes(), &socket, MapFlags::ANY)?;
                loaded.progs.select_socket.as_fd()
            }
        };
        let program = program.try_clone_to_owned()?;
        reuseport::attach(program.as_fd(), workers[0].as_fd())?;
        let egress = loaded.progs.empty_egress.as_fd().try_clone_to_owned()?;
        let cgroup = File::open(dispatch::cgroup_root()?)?;
        let link = Some(loaded.progs.empty_egress.attach_cgroup(cgroup.as_raw_fd())?);
        Ok(Self { address, workers, clients: clients(address)?, program, egress, _link: link, dispatch: None })
    }

    fn with_policy(workers: usize, policy: Policy) -> anyhow::Result<Self> {
        let (address, sockets) = Self::sockets(workers)?;
        let by_type = matches!(policy, Policy::LightestQueue | Policy::RankedQueue);
        let long = RequestType { value: *b"l\0\0\0\0\0\0\0", mask: *b"\xff\0\0\0\0\0\0\0", class: 1 };
        let options = Options {
            service: address,
            policy,
            request_id: None,
            type_offset: 0,
            types: if by_type { vec![long] } else { Vec::new() },
            other_class: 0,
            observes_service_times: false,
        };
        let name = format!("coreward-bench-dispatch-{}-{}", std::process::id(), address.port());
        let pins = Pins(PathBuf::from("/sys/fs/bpf").join(name));
        let dispatch = DispatchPrograms::load(&pins.0, &dispatch::cgroup_root()?, &options)?;
        for socket in &sockets {
            dispatch.add_worker(socket.as_fd(), std::process::id())?;
        }
        dispatch.attach(sockets[0].as_fd())?;
        dispatch.set_bounds(|workers| ClassBounds::with_reserved_cores(workers, 2, 1, 4, 0));
        let program = dispatch.program().try_clone_to_owned()?;
        let egress = dispatch.responses_program().try_clone_to_owned()?;
        let (clients, dispatch) = (clients(address)?, Some((dispatch, pins)));
        Ok(Self { address, workers: sockets, clients, program, egress, _link: None, dispatch })
    }

    /// Sends and answers `requests` requests. Returns the mean run time of the selecting program per run (ns).
    fn run_round(&self, requests: u32) -> anyhow::Result<f64> {
        let before = run_time(self.program.as_fd())?;
        for first in (0..requests).step_by(BURST as usize) {
            for number in first..requests.min(first + BURST) {
                let payload = if number % 4 == 0 { b"long request" } else { b"a short one " };
                self.clients[number as usize % CLIENT_COUNT].send(payload)?;
            }
            self.answer();
        }
        let after = run_time(self.program.as_fd())?;
        let runs = after.1 - before.1;
        ensure!(runs >= u64::from(requests) / 2, "{}: {requests} requests, {runs} runs", self.address);
        if let Some((dispatch, _)) = &self.dispatch {
            let dispatched = dispatch.ledger().workers().iter().filter(|worker| worker.dispatched > 0).count();
            ensure!(dispatched > 1, "{}: all requests went to one worker", self.address);
        }
        Ok((after.0 - before.0) as f64 / runs as f64)
    }

    fn answer(&self) {
        let mut buffer = [0; 64];
        for worker in &self.workers {
            while let Ok((length, client)) = worker.recv_from(&mut buffer) {
                // The client does not read: its full buffer drops responses.
                _ = worker.send_to(&buffer[..length], client);
            }
        }
    }
}

fn clients(service: SocketAddr) -> anyhow::Result<Vec<UdpSocket>> {
    let client = |_| {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        socket.connect(service)?;
        Ok(socket)
    };
    (0..CLIENT_COUNT).map(client).collect()
}

/// Binds a nonblocking UDP socket that joins the reuseport group of `address`.
fn socket(address: SocketAddr) -> anyhow::Result<UdpSocket> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, Some(socket2::Protocol::UDP))?;
    socket.set_reuse_port(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}
