//! `coreward-bench dispatch`: what `dispatch.bpf.c` costs per request, above a program that leaves the choice to the kernel.
//!
//! Programs of type sk_reuseport cannot be test-run. So real requests go over the loopback of a network namespace to sockets of
//! this process, and the kernel says how long the programs ran (BPF_ENABLE_STATS): its two clock reads are in every figure
//! and not in the differences.

use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::path::PathBuf;

use anyhow::ensure;
use coreward_bench::namespace::{self, ip};
use coreward_bench::report::{Report, Table};
use coreward_dataplane::dispatch::{self, Dispatch, Options, Policy, RequestType};
use coreward_dataplane::reuseport;
use coreward_model::dispatch::ClassBounds;
use libbpf_rs::libbpf_sys;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/empty_reuseport.skel.rs"));
}

/// Options of `coreward-bench dispatch`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Rounds; in each, all programs run one after the other
    #[arg(long, default_value_t = Self::default().rounds, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Requests per program and round
    #[arg(long, default_value_t = Self::default().requests, value_parser = clap::value_parser!(u32).range(64..))]
    requests: u32,
}

impl Default for Args {
    fn default() -> Self {
        Self { rounds: 15, requests: 4096 }
    }
}

const WORKERS: [usize; 2] = [16, 64];
const CLIENTS: usize = 61;
/// Requests that are outstanding at once.
const BURST: u32 = 48;

/// Measures, in a thread of its own: the namespace is the thread's.
///
/// # Errors
/// Without root.
pub fn run(args: &Args) -> anyhow::Result<Report> {
    ensure!(nix::unistd::geteuid().is_root(), "coreward-bench dispatch loads BPF programs: run it as root");
    let args = args.clone();
    std::thread::spawn(move || measure(&args)).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn measure(args: &Args) -> anyhow::Result<Report> {
    namespace::enter_new()?;
    ip("link set lo up")?;
    let _statistics = enable_statistics()?;
    let mut table = Table::new(&["policy", "workers", "above empty, ns", "fastest rounds", "program, ns", "empty, ns"]);
    for workers in WORKERS {
        let mut services = vec![Service::empty(workers)?];
        for policy in Policy::all() {
            services.push(Service::dispatched(workers, policy)?);
        }
        // By service, round by round.
        let mut times = vec![Vec::new(); services.len()];
        for _ in 0..args.rounds {
            for (times, service) in times.iter_mut().zip(&services) {
                times.push(service.round(args.requests)?);
            }
        }
        let empty = times[0].clone();
        for (policy, times) in Policy::all().zip(&times[1..]) {
            let above = times.iter().zip(&empty).map(|(time, empty)| time - empty).collect();
            let fastest = |times: &[f64]| times.iter().copied().fold(f64::INFINITY, f64::min);
            table.row([
                policy.name().into(),
                (workers as u64).into(),
                median(above).into(),
                (fastest(times) - fastest(&empty)).into(),
                median(times.clone()).into(),
                median(empty.clone()).into(),
            ]);
        }
    }
    let Args { rounds, requests } = args;
    Ok(Report {
        name: "dispatch",
        title: "Which worker gets a request",
        about: format!(
            "dispatch.bpf.c on real datagrams over a loopback, {CLIENTS} clients, up to {BURST} outstanding, by the \
             kernel's run-time statistics: medians of {rounds} rounds of {requests} requests, interleaved. Between two runs \
             the whole path of a datagram runs, so caches are as warm as they are in life. jlq and jbsrq tell two types of \
             requests apart."
        ),
        tables: vec![table],
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A service with as many workers as sockets, all of them here.
struct Service {
    address: SocketAddr,
    workers: Vec<UdpSocket>,
    clients: Vec<UdpSocket>,
    program: OwnedFd,
    /// Kept at work.
    dispatch: Option<(Dispatch, Pins)>,
}

/// Removed at the end.
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

    fn empty(workers: usize) -> anyhow::Result<Self> {
        let (address, workers) = Self::sockets(workers)?;
        let mut storage = MaybeUninit::uninit();
        let loaded = skeleton::EmptyReuseportSkelBuilder::default().open(&mut storage)?.load()?;
        let program = loaded.progs.empty.as_fd().try_clone_to_owned()?;
        reuseport::attach(program.as_fd(), workers[0].as_fd())?;
        Ok(Self { address, workers, clients: clients(address)?, program, dispatch: None })
    }

    fn dispatched(workers: usize, policy: Policy) -> anyhow::Result<Self> {
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
            learn: false,
        };
        let name = format!("coreward-bench-dispatch-{}-{}", std::process::id(), address.port());
        let pins = Pins(PathBuf::from("/sys/fs/bpf").join(name));
        let dispatch = Dispatch::load(&pins.0, &dispatch::cgroup_root()?, &options)?;
        for socket in &sockets {
            dispatch.add_worker(socket.as_fd(), std::process::id())?;
        }
        dispatch.attach(sockets[0].as_fd())?;
        dispatch.set_bounds(|workers| ClassBounds::reserving(workers, 2, 1, 4, 0));
        let program = dispatch.program().try_clone_to_owned()?;
        Ok(Self { address, workers: sockets, clients: clients(address)?, program, dispatch: Some((dispatch, pins)) })
    }

    /// How long the program ran per request (ns).
    fn round(&self, requests: u32) -> anyhow::Result<f64> {
        let before = run_time(self.program.as_fd())?;
        for first in (0..requests).step_by(BURST as usize) {
            for number in first..requests.min(first + BURST) {
                let payload = if number % 4 == 0 { b"long request" } else { b"a short one " };
                self.clients[number as usize % CLIENTS].send(payload)?;
            }
            self.answer();
        }
        let after = run_time(self.program.as_fd())?;
        let runs = after.1 - before.1;
        ensure!(runs >= u64::from(requests) / 2, "{}: {requests} requests, {runs} runs", self.address);
        if let Some((dispatch, _)) = &self.dispatch {
            let dispatched = dispatch.books().workers().iter().filter(|worker| worker.dispatched > 0).count();
            ensure!(dispatched > 1, "{}: all requests went to one worker", self.address);
        }
        Ok((after.0 - before.0) as f64 / runs as f64)
    }

    fn answer(&self) {
        let mut buffer = [0; 64];
        for worker in &self.workers {
            while let Ok((length, client)) = worker.recv_from(&mut buffer) {
                // The client does not read: its full buffer drops what nobody wants.
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
    (0..CLIENTS).map(client).collect()
}

/// One of a group.
fn socket(address: SocketAddr) -> anyhow::Result<UdpSocket> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, Some(socket2::Protocol::UDP))?;
    socket.set_reuse_port(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// The kernel counts how long programs run, as long as this is open.
fn enable_statistics() -> anyhow::Result<OwnedFd> {
    // SAFETY: takes no pointers.
    let result = unsafe { libbpf_sys::bpf_enable_stats(libbpf_sys::BPF_STATS_RUN_TIME) };
    ensure!(result >= 0, "BPF_ENABLE_STATS: {}", std::io::Error::from_raw_os_error(-result));
    // SAFETY: a new descriptor that nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(result) })
}

/// How long a program has run (ns), and how often.
fn run_time(program: BorrowedFd<'_>) -> anyhow::Result<(u64, u64)> {
    let mut info = libbpf_sys::bpf_prog_info::default();
    let mut length = size_of_val(&info) as u32;
    // SAFETY: the pointer is of a struct of that length, which lives until the call returns.
    let result =
        unsafe { libbpf_sys::bpf_obj_get_info_by_fd(program.as_raw_fd(), (&raw mut info).cast(), &raw mut length) };
    ensure!(result == 0, "BPF_OBJ_GET_INFO_BY_FD: {}", std::io::Error::from_raw_os_error(-result));
    Ok((info.run_time_ns, info.run_cnt))
}
