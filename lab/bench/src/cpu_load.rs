//! `coreward-lab bench cpu-load`: measured load of a core that only receives packets, compared with the kernel's
//! accounting, and cost of `cpu_load.bpf.c` per event.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::cpus::{self, THIS_THREAD};
use crate::namespace::{self, ip, with_sysfs};
use crate::report::{Report, Table};
use crate::run_time::enable_statistics;
use crate::xdp::throughput::wire::{NapiThread, OWN_MAC, VethPair};
use crate::xdp::{median_of, quartiles};
use anyhow::{Context as _, ensure};
use coreward_dataplane::cpu_load::CpuLoad;
use libbpf_rs::query::ProgInfoIter;
use libbpf_rs::skel::{OpenSkel as _, Skel as _, SkelBuilder as _};

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/empty_tracepoint.skel.rs"));
}

/// Options of `coreward-lab bench cpu-load`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Number of windows per case
    #[arg(long, default_value_t = Self::default().windows, value_parser = clap::value_parser!(u32).range(1..))]
    windows: u32,
    /// Length of a window (ms); the kernel samples 100 to 1,000 times a second
    #[arg(long, default_value_t = Self::default().window_ms, value_parser = clap::value_parser!(u64).range(100..))]
    window_ms: u64,
}

impl Default for Args {
    fn default() -> Self {
        Self { windows: 7, window_ms: 4000 }
    }
}

const SENDER_CPU: usize = 0;
const RECEIVER_CPU: usize = 1;
const FLOOD_DESTINATION: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);

/// Way in which packets reach the receiving CPU, and their rate.
struct Case {
    name: &'static str,
    threaded: bool,
    /// Number of datagrams in a burst, and pause after each burst.
    burst: (usize, Duration),
}

const CASES: [Case; 5] = [
    Case { name: "no packets", threaded: false, burst: (0, Duration::from_millis(1)) },
    Case { name: "softirq, bursts of 16", threaded: false, burst: (16, Duration::from_micros(50)) },
    Case { name: "softirq, bursts of 128", threaded: false, burst: (128, Duration::from_micros(50)) },
    Case { name: "softirq, ksoftirqd, no pause", threaded: false, burst: (64, Duration::ZERO) },
    Case { name: "threaded NAPI, bursts of 128", threaded: true, burst: (128, Duration::from_micros(50)) },
];

/// Measures loads in a new thread, because a network namespace belongs to a thread. Fails without root, or on one CPU.
pub fn run(args: &Args) -> anyhow::Result<Report> {
    let cpus = std::thread::available_parallelism()?.get();
    ensure!(
        cpus > RECEIVER_CPU,
        "coreward-lab bench cpu-load: one CPU sends, another receives: expected 2 CPUs, this has {cpus}"
    );
    namespace::measure_in_thread("cpu-load", args, measure)
}

fn measure(args: &Args) -> anyhow::Result<Report> {
    let _statistics = enable_statistics()?;
    let mut loads = Table::new(&[
        "packets by",
        "load, %",
        "not idle, %",
        "stolen, %",
        "difference",
        "quartiles",
        "sum, %",
        "events/s",
    ]);
    let mut costs = Table::new(&["packets by", "program, ns", "empty, ns", "above empty, ns", "CPU of it, %"]);
    for case in CASES {
        let windows = measure_case(&case, args)?;
        let column = |value: fn(&WindowResult) -> f64| windows.iter().map(value).collect::<Vec<_>>();
        let difference = column(WindowResult::difference);
        let events = column(|window| window.events_per_second);
        loads.add_row([
            case.name.into(),
            median_of(&column(|window| window.load)).into(),
            median_of(&column(|window| window.kernel.not_idle)).into(),
            median_of(&column(|window| window.kernel.stolen)).into(),
            median_of(&difference).into(),
            quartiles(&difference).into(),
            median_of(&column(|window| window.kernel.sum)).into(),
            (median_of(&events) as u64).into(),
        ]);
        let (program, empty) = (column(|window| window.program_ns), column(|window| window.empty_ns));
        let cpu = column(|window| window.events_per_second * window.program_ns / 1e7);
        costs.add_row([
            case.name.into(),
            median_of(&program).into(),
            median_of(&empty).into(),
            (median_of(&program) - median_of(&empty)).into(),
            median_of(&cpu).into(),
        ]);
    }
    let Args { windows, window_ms } = args;
    Ok(Report {
        name: "cpu-load",
        title: "The load of a core",
        about: format!(
            "UDP datagrams from CPU {SENDER_CPU} to a veth device whose packets are dropped on CPU {RECEIVER_CPU}: by \
             RPS or by a NAPI thread. `load`: by cpu_load.bpf.c. `not idle`, `stolen`, `sum` of all columns: by \
             /proc/stat. Difference, in points: 0 from `not idle` less `stolen` to `not idle`. Without \
             IRQ_TIME_ACCOUNTING the kernel samples all but idle time. Events: task switches, begins and ends of \
             interrupts and softirqs, of all CPUs. `program`: time of one event by the kernel's run-time statistics; \
             `empty`: a program that does nothing. Medians of {windows} windows of {window_ms} ms."
        ),
        tables: vec![loads, costs],
    })
}

/// Measured load and cost of its measurement in one window. Loads are in % of one CPU.
struct WindowResult {
    load: f64,
    kernel: KernelLoad,
    events_per_second: f64,
    program_ns: f64,
    empty_ns: f64,
}

impl WindowResult {
    /// Returns how far the measured load is outside the range of the kernel's accounting, in percentage points.
    fn difference(&self) -> f64 {
        let KernelLoad { not_idle, stolen, .. } = self.kernel;
        self.load - self.load.clamp(not_idle - stolen, not_idle)
    }
}

fn measure_case(case: &Case, args: &Args) -> anyhow::Result<Vec<WindowResult>> {
    namespace::enter_new()?;
    let wire = VethPair::new(0)?;
    let _thread = receive_on(&wire, RECEIVER_CPU, case.threaded)?;
    let load = CpuLoad::start()?;
    let mut storage = MaybeUninit::uninit();
    let mut floor = skeleton::EmptyTracepointSkelBuilder::default().open(&mut storage)?.load()?;
    floor.attach()?;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let flood = scope.spawn(|| flood(case.burst, &done));
        std::thread::sleep(Duration::from_millis(200));
        let windows = (0..args.windows).map(|_| measure_window(&load, Duration::from_millis(args.window_ms))).collect();
        done.store(true, Ordering::Relaxed);
        flood.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        windows
    })
}

fn measure_window(load: &CpuLoad, length: Duration) -> anyhow::Result<WindowResult> {
    let (began, kernel, busy, programs) = (Instant::now(), Ticks::read()?, load.busy_ns(RECEIVER_CPU), run_times());
    std::thread::sleep(length);
    let busy = load.busy_ns(RECEIVER_CPU) - busy;
    let (seconds, kernel) = (began.elapsed().as_secs_f64(), Ticks::read()?.since(&kernel));
    let (mut events, mut time_ns, mut empty_ns) = (0, 0, 0.0);
    for (id, program) in run_times() {
        let before = programs.get(&id).map_or((0, 0), |before| (before.runs, before.time_ns));
        let (runs, time) = (program.runs - before.0, program.time_ns - before.1);
        if program.name == "empty_softirq" {
            empty_ns = time as f64 / runs.max(1) as f64;
        } else {
            (events, time_ns) = (events + runs, time_ns + time);
        }
    }
    ensure!(events > 0, "no events in {length:?}");
    Ok(WindowResult {
        load: busy as f64 / seconds / 1e7,
        kernel: KernelLoad::of(kernel, seconds),
        events_per_second: events as f64 / seconds,
        program_ns: time_ns as f64 / events as f64,
        empty_ns,
    })
}

struct RunTime {
    name: String,
    runs: u64,
    time_ns: u64,
}

/// Returns the run times of the measured BPF programs by program ID. These include programs of an agent on this
/// machine, which have the same names.
fn run_times() -> HashMap<u32, RunTime> {
    const PROGRAMS: [&str; 6] =
        ["task_switch", "interrupt_begin", "interrupt_ends", "softirq_begins", "softirq_ends", "empty_softirq"];
    let program = |info: libbpf_rs::query::ProgramInfo| {
        let name = info.name.to_string_lossy().into_owned();
        // The kernel keeps 15 characters of a name.
        PROGRAMS
            .contains(&&name[..])
            .then_some((info.id, RunTime { name, runs: info.run_cnt, time_ns: info.run_time_ns }))
    };
    ProgInfoIter::default().filter_map(program).collect()
}

/// Makes `cpu` process the packets to [`FLOOD_DESTINATION`], either in a NAPI thread or by RPS.
fn receive_on(wire: &VethPair, cpu: usize, threaded: bool) -> anyhow::Result<Option<NapiThread>> {
    let VethPair { generator_end, tested_end } = wire;
    ip(&format!("address add 10.9.0.1/24 dev {generator_end}"))?;
    ip(&format!("neigh replace {FLOOD_DESTINATION} lladdr {OWN_MAC} dev {generator_end}"))?;
    if threaded {
        // veth uses NAPI once GRO is on.
        let status = Command::new("ethtool").args(["-K", tested_end, "gro", "on"]).status().context("ethtool")?;
        ensure!(status.success(), "ethtool -K {tested_end} gro on: {status}");
        return NapiThread::start(tested_end, cpu).map(Some);
    }
    with_sysfs(&format!("echo {:x} > /sys/class/net/{tested_end}/queues/rx-0/rps_cpus", 1_u64 << cpu))?;
    Ok(None)
}

fn flood((burst, pause): (usize, Duration), done: &AtomicBool) -> anyhow::Result<()> {
    cpus::bind_to_cpu(THIS_THREAD, SENDER_CPU)?;
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    while !done.load(Ordering::Relaxed) {
        for _ in 0..burst {
            // A full queue rejects a datagram; the next datagram is sent.
            _ = socket.send_to(&[0; 64], (FLOOD_DESTINATION, 9));
        }
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }
    Ok(())
}

/// Ticks (10 ms) of [`RECEIVER_CPU`] by state (proc(5)): user, nice, system, idle, iowait, irq, softirq, steal.
struct Ticks([u64; 8]);

impl Ticks {
    fn read() -> anyhow::Result<Self> {
        let text = std::fs::read_to_string("/proc/stat").context("/proc/stat")?;
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("cpu{RECEIVER_CPU} ")));
        let numbers = line.context("/proc/stat: the receiving CPU is offline")?.split_whitespace();
        let numbers: Vec<u64> = numbers.take(8).map(str::parse).collect::<Result<_, _>>()?;
        let numbers =
            numbers.try_into().map_err(|numbers| anyhow::anyhow!("/proc/stat: expected 8 numbers: {numbers:?}"));
        numbers.map(Self)
    }

    fn since(&self, before: &Self) -> Self {
        Self(std::array::from_fn(|kind| self.0[kind].saturating_sub(before.0[kind])))
    }
}

/// Load of [`RECEIVER_CPU`] by the kernel's accounting in /proc/stat (%).
struct KernelLoad {
    not_idle: f64,
    stolen: f64,
    /// Sum of the times in all states, idle included, in % of the elapsed time.
    sum: f64,
}

impl KernelLoad {
    fn of(Ticks(ticks): Ticks, seconds: f64) -> Self {
        let [.., idle, iowait, _irq, _softirq, stolen] = ticks.map(|ticks| ticks as f64 / seconds);
        let sum = ticks.iter().sum::<u64>() as f64 / seconds;
        Self { not_idle: 100.0 - (idle + iowait).min(100.0), stolen, sum }
    }
}
