//! Command `coreward-lab bench dispatch`. It measures the cost of `dispatch.bpf.c` per request, above a program that
//! leaves the choice to the kernel.
//!
//! Programs of type sk_reuseport have no test run. Real requests therefore go over the loopback of a network namespace
//! to sockets of this process, and the kernel measures the programs (BPF_ENABLE_STATS). The kernel's two clock reads
//! are part of every time, but not of the differences.

use std::fs::File;
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::PathBuf;

use crate::namespace::{self, run_ip_command};
use crate::report::{BenchReport, MeasurementGoal, ReportTable, goal_and_verdict_cells};
use crate::run_time::{enable_run_time_statistics, read_run_ns_and_count};
use anyhow::{Context as _, ensure};
use coreward_dataplane::dispatch::{self, DispatchOptions, DispatchPolicy, DispatchPrograms, PayloadRequestType};
use coreward_dataplane::reuseport;
use coreward_model::dispatch::OutstandingBoundsByClass;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{Link, MapCore as _, MapFlags};

use crate::xdp::{difference_of_fastest_rounds, differences_by_round, median_of_rounds};

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/empty_reuseport.skel.rs"));
}

/// Options of `coreward-lab bench dispatch`.
#[derive(Debug, Clone, clap::Args)]
pub struct DispatchBenchArgs {
    /// Number of rounds; in each, all programs run one after the other
    #[arg(long, default_value_t = Self::default().rounds, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of requests per program and round
    #[arg(long, default_value_t = Self::default().requests, value_parser = clap::value_parser!(u32).range(64..))]
    requests: u32,
}

impl Default for DispatchBenchArgs {
    fn default() -> Self {
        Self { rounds: 15, requests: 4096 }
    }
}

const WORKER_COUNTS: [usize; 2] = [16, 64];
const CLIENT_COUNT: usize = 61;
const MAX_OUTSTANDING_REQUESTS: u32 = 48;

/// Returns the goal (ns per request) for a policy's fastest rounds with `worker_count` workers, or `None` if it has no
/// goal.
fn goal_for_policy(policy: &str, worker_count: usize) -> Option<MeasurementGoal> {
    (policy == DispatchPolicy::ShortestQueue.name() && worker_count == WORKER_COUNTS[0])
        .then_some(MeasurementGoal::AtMost(90.0))
}

/// Measures the cost of the dispatch programs in a new thread, which enters its own network namespace. Fails without
/// root.
pub fn run_dispatch_bench(args: &DispatchBenchArgs) -> anyhow::Result<BenchReport> {
    namespace::run_measurement_in_new_thread("dispatch", args, measure_dispatch_programs)
}

fn measure_dispatch_programs(args: &DispatchBenchArgs) -> anyhow::Result<BenchReport> {
    namespace::enter_new_network_namespace()?;
    run_ip_command("link set lo up")?;
    let _run_time_statistics = enable_run_time_statistics()?;
    let mut egress_table = ReportTable::new(&["datagram sent, 16 workers", "above empty, ns", "empty, ns"]);
    let mut dispatch_table =
        ReportTable::new(&["policy", "workers", "above empty, ns", "fastest rounds", "goal", "verdict", "empty, ns"]);
    for worker_count in WORKER_COUNTS {
        let services = start_services(worker_count)?;
        let run_ns_by_service_and_round = measure_socket_selection_times(&services, args)?;
        if worker_count == WORKER_COUNTS[0] {
            add_egress_cost_rows(args, &services, &mut egress_table)?;
        }
        add_policy_rows(worker_count, &run_ns_by_service_and_round, &mut dispatch_table);
    }
    let DispatchBenchArgs { rounds, requests } = args;
    Ok(BenchReport {
        name: "dispatch",
        heading: "Which worker gets a request",
        method_description: format!(
            "dispatch.bpf.c runs on datagrams over a loopback, from {CLIENT_COUNT} clients with up to \
             {MAX_OUTSTANDING_REQUESTS} outstanding requests. The kernel's run-time statistics measure it. Values are \
             medians of {rounds} interleaved rounds of {requests} requests. jlq and jbsrq distinguish two types of \
             requests. `(always the same)` only calls the helper that selects a socket."
        ),
        tables: vec![dispatch_table, egress_table],
    })
}

/// Starts one service per baseline program, and then one service per policy.
fn start_services(worker_count: usize) -> anyhow::Result<Vec<MeasuredDispatchService>> {
    let mut services = vec![
        MeasuredDispatchService::start_with_baseline(worker_count, BaselineSelectionProgram::LeaveToKernel)?,
        MeasuredDispatchService::start_with_baseline(worker_count, BaselineSelectionProgram::SelectSameSocket)?,
    ];
    for policy in DispatchPolicy::all() {
        services.push(MeasuredDispatchService::start_with_policy(worker_count, policy)?);
    }
    Ok(services)
}

/// Measures all services one after the other in each round. Returns the run times per request (ns) of the programs that
/// select sockets, by service, then by round.
fn measure_socket_selection_times(
    services: &[MeasuredDispatchService],
    args: &DispatchBenchArgs,
) -> anyhow::Result<Vec<Vec<f64>>> {
    let mut run_ns_by_service_and_round = vec![Vec::new(); services.len()];
    for _ in 0..args.rounds {
        for (ns_by_round, service) in run_ns_by_service_and_round.iter_mut().zip(services) {
            ns_by_round.push(service.measure_ns_per_request(args.requests)?);
        }
    }
    Ok(run_ns_by_service_and_round)
}

/// Adds a row for each service of [`start_services`] except the first one, whose times are subtracted from the other
/// times.
fn add_policy_rows(worker_count: usize, run_ns_by_service_and_round: &[Vec<f64>], table: &mut ReportTable) {
    let empty_program_ns = &run_ns_by_service_and_round[0];
    let policy_names = std::iter::once("(always the same)").chain(DispatchPolicy::all().map(|policy| policy.name()));
    for (policy_name, ns_by_round) in policy_names.zip(&run_ns_by_service_and_round[1..]) {
        let fastest_difference_ns = difference_of_fastest_rounds(ns_by_round, empty_program_ns);
        let [goal, verdict] = goal_and_verdict_cells(goal_for_policy(policy_name, worker_count), fastest_difference_ns);
        table.add_row([
            policy_name.into(),
            (worker_count as u64).into(),
            median_of_rounds(&differences_by_round(ns_by_round, empty_program_ns)).into(),
            fastest_difference_ns.into(),
            goal,
            verdict,
            median_of_rounds(empty_program_ns).into(),
        ]);
    }
}

/// Adds a row with the egress program's cost for a response of the service, and a row with its cost for any other
/// datagram.
fn add_egress_cost_rows(
    args: &DispatchBenchArgs,
    services: &[MeasuredDispatchService],
    table: &mut ReportTable,
) -> anyhow::Result<()> {
    // The first program is empty, and the services of the others have the policies `jsq` and `random`. Only the service
    // with `jsq` gets requests.
    let jsq_index = BASELINE_SERVICE_COUNT
        + DispatchPolicy::all().position(|policy| policy == DispatchPolicy::ShortestQueue).context("no jsq")?;
    let programs = [0, jsq_index, BASELINE_SERVICE_COUNT].map(|service_index| &services[service_index].egress_program);
    let (mut own_response_ns, mut other_datagram_ns, mut empty_program_ns) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..args.rounds {
        let run_ns_and_counts =
            measure_run_times_during(&programs, || services[jsq_index].measure_ns_per_request(args.requests))?;
        let ns_per_run: Vec<f64> = run_ns_and_counts.iter().map(|(total_ns, run_count)| total_ns / run_count).collect();
        // The sockets sent both the requests and the responses, but only the responses belong to the service.
        let response_count = f64::from(args.requests);
        ensure!(
            run_ns_and_counts[1].1 > response_count * 1.5,
            "{} datagrams for {response_count} requests",
            run_ns_and_counts[1].1
        );
        own_response_ns.push(
            (run_ns_and_counts[1].0 - (run_ns_and_counts[1].1 - response_count) * ns_per_run[2]) / response_count
                - ns_per_run[0],
        );
        other_datagram_ns.push(ns_per_run[2] - ns_per_run[0]);
        empty_program_ns.push(ns_per_run[0]);
    }
    let median_empty_ns = median_of_rounds(&empty_program_ns);
    table.add_row([
        "a response of the service".into(),
        median_of_rounds(&own_response_ns).into(),
        median_empty_ns.into(),
    ]);
    table.add_row([
        "any other UDP datagram".into(),
        median_of_rounds(&other_datagram_ns).into(),
        median_empty_ns.into(),
    ]);
    Ok(())
}

/// Runs `work`. Returns the run time (ns) and the number of runs of each program in this time.
fn measure_run_times_during(
    programs: &[&OwnedFd],
    work: impl FnOnce() -> anyhow::Result<f64>,
) -> anyhow::Result<Vec<(f64, f64)>> {
    let read_run_times =
        || programs.iter().map(|program| read_run_ns_and_count(program.as_fd())).collect::<anyhow::Result<Vec<_>>>();
    let run_times_before = read_run_times()?;
    work()?;
    let run_times = read_run_times()?.into_iter().zip(run_times_before);
    Ok(run_times.map(|(after, before)| ((after.0 - before.0) as f64, (after.1 - before.1) as f64)).collect())
}

/// Baseline program, with which the dispatch program's cost is compared.
#[derive(Debug, Clone, Copy)]
enum BaselineSelectionProgram {
    /// Program that leaves the choice of the socket to the kernel.
    LeaveToKernel,
    /// Program that always selects the same socket.
    SelectSameSocket,
}

/// Number of services with a baseline program, which precede the services with a policy.
const BASELINE_SERVICE_COUNT: usize = 2;

/// Service whose workers and clients are sockets of this process.
struct MeasuredDispatchService {
    address: SocketAddr,
    worker_sockets: Vec<UdpSocket>,
    client_sockets: Vec<UdpSocket>,
    selection_program: OwnedFd,
    /// BPF program that runs for each datagram that the sockets send.
    egress_program: OwnedFd,
    _egress_link: Option<Link>,
    /// Loaded dispatch programs and their pins, which keep the programs attached, or `None` for a baseline.
    programs_and_pin_directory: Option<(DispatchPrograms, DispatchPinDirectory)>,
}

/// Directory with the dispatch programs' pins, which are removed when this value is dropped.
struct DispatchPinDirectory(PathBuf);

impl Drop for DispatchPinDirectory {
    fn drop(&mut self) {
        if let Err(error) = dispatch::remove_pins_and_programs(&self.0) {
            eprintln!("{}: {error:#}", self.0.display());
        }
    }
}

impl MeasuredDispatchService {
    fn bind_worker_sockets(worker_count: usize) -> anyhow::Result<(SocketAddr, Vec<UdpSocket>)> {
        let first_socket = bind_reuseport_socket((Ipv4Addr::LOCALHOST, 0).into())?;
        let address = first_socket.local_addr()?;
        let mut sockets = vec![first_socket];
        for _ in 1..worker_count {
            sockets.push(bind_reuseport_socket(address)?);
        }
        Ok((address, sockets))
    }

    fn start_with_baseline(worker_count: usize, baseline: BaselineSelectionProgram) -> anyhow::Result<Self> {
        let (address, worker_sockets) = Self::bind_worker_sockets(worker_count)?;
        let mut skeleton_storage = MaybeUninit::uninit();
        let baseline_programs = skeleton::EmptyReuseportSkelBuilder::default().open(&mut skeleton_storage)?.load()?;
        let program = match baseline {
            BaselineSelectionProgram::LeaveToKernel => baseline_programs.progs.empty.as_fd(),
            BaselineSelectionProgram::SelectSameSocket => {
                let socket_descriptor = (worker_sockets[0].as_raw_fd() as u64).to_ne_bytes();
                baseline_programs.maps.only.update(&0u32.to_ne_bytes(), &socket_descriptor, MapFlags::ANY)?;
                baseline_programs.progs.select_socket.as_fd()
            }
        };
        let select_program = program.try_clone_to_owned()?;
        reuseport::attach_to_reuseport_group(select_program.as_fd(), worker_sockets[0].as_fd())?;
        let egress_program = baseline_programs.progs.empty_egress.as_fd().try_clone_to_owned()?;
        let cgroup_directory = File::open(dispatch::cgroup2_mount_point()?)?;
        let egress_link = Some(baseline_programs.progs.empty_egress.attach_cgroup(cgroup_directory.as_raw_fd())?);
        Ok(Self {
            address,
            worker_sockets,
            client_sockets: connect_clients(address)?,
            selection_program: select_program,
            egress_program,
            _egress_link: egress_link,
            programs_and_pin_directory: None,
        })
    }

    fn start_with_policy(worker_count: usize, policy: DispatchPolicy) -> anyhow::Result<Self> {
        let (address, worker_sockets) = Self::bind_worker_sockets(worker_count)?;
        let uses_request_types = matches!(policy, DispatchPolicy::LightestQueue | DispatchPolicy::RankedQueue);
        let long_request_type = PayloadRequestType {
            payload_value: *b"l\0\0\0\0\0\0\0",
            payload_mask: *b"\xff\0\0\0\0\0\0\0",
            priority_class: 1,
        };
        let options = DispatchOptions {
            service_address: address,
            policy,
            request_id_position: None,
            type_offset: 0,
            request_types: if uses_request_types { vec![long_request_type] } else { Vec::new() },
            default_priority_class: 0,
            measures_service_times: false,
        };
        let pin_directory_name = format!("coreward-bench-dispatch-{}-{}", std::process::id(), address.port());
        let pin_directory = DispatchPinDirectory(PathBuf::from("/sys/fs/bpf").join(pin_directory_name));
        let dispatch_programs = DispatchPrograms::load(&pin_directory.0, &dispatch::cgroup2_mount_point()?, &options)?;
        for socket in &worker_sockets {
            dispatch_programs.add_worker(socket.as_fd(), std::process::id())?;
        }
        dispatch_programs.attach_to_socket_group(worker_sockets[0].as_fd())?;
        dispatch_programs
            .set_request_limits(|workers| OutstandingBoundsByClass::with_reserved_cores(workers, 2, 1, 4, 0));
        let select_program = dispatch_programs.selection_program_fd().try_clone_to_owned()?;
        let egress_program = dispatch_programs.response_program_fd().try_clone_to_owned()?;
        let (client_sockets, dispatch_and_pins) = (connect_clients(address)?, Some((dispatch_programs, pin_directory)));
        Ok(Self {
            address,
            worker_sockets,
            client_sockets,
            selection_program: select_program,
            egress_program,
            _egress_link: None,
            programs_and_pin_directory: dispatch_and_pins,
        })
    }

    /// Sends and answers `request_count` requests. Returns the mean run time of the program that selects the socket
    /// (ns).
    fn measure_ns_per_request(&self, request_count: u32) -> anyhow::Result<f64> {
        let run_time_before = read_run_ns_and_count(self.selection_program.as_fd())?;
        for burst_start in (0..request_count).step_by(MAX_OUTSTANDING_REQUESTS as usize) {
            for request_index in burst_start..request_count.min(burst_start + MAX_OUTSTANDING_REQUESTS) {
                let payload = if request_index % 4 == 0 { b"long request" } else { b"a short one " };
                self.client_sockets[request_index as usize % CLIENT_COUNT].send(payload)?;
            }
            self.answer_waiting_requests();
        }
        let run_time_after = read_run_ns_and_count(self.selection_program.as_fd())?;
        let run_count = run_time_after.1 - run_time_before.1;
        ensure!(
            run_count >= u64::from(request_count) / 2,
            "{}: {request_count} requests, {run_count} runs",
            self.address
        );
        if let Some((dispatch_programs, _)) = &self.programs_and_pin_directory {
            let used_worker_count = dispatch_programs
                .ledger()
                .worker_request_counts()
                .iter()
                .filter(|worker| worker.dispatched_requests > 0)
                .count();
            ensure!(used_worker_count > 1, "{}: all requests went to one worker", self.address);
        }
        Ok((run_time_after.0 - run_time_before.0) as f64 / run_count as f64)
    }

    fn answer_waiting_requests(&self) {
        let mut buffer = [0; 64];
        for worker_socket in &self.worker_sockets {
            while let Ok((length, client_address)) = worker_socket.recv_from(&mut buffer) {
                // The client does not read responses, so its full buffer drops them.
                _ = worker_socket.send_to(&buffer[..length], client_address);
            }
        }
    }
}

fn connect_clients(service_address: SocketAddr) -> anyhow::Result<Vec<UdpSocket>> {
    let connect_client = |_| {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        socket.connect(service_address)?;
        Ok(socket)
    };
    (0..CLIENT_COUNT).map(connect_client).collect()
}

/// Binds a nonblocking UDP socket that joins the reuseport group of `address`.
fn bind_reuseport_socket(address: SocketAddr) -> anyhow::Result<UdpSocket> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, Some(socket2::Protocol::UDP))?;
    socket.set_reuse_port(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}
