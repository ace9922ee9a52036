//! Command `coreward-lab bench cpu-load`. It compares the measured load of a core that only receives packets with the
//! kernel's accounting, and measures the cost of `cpu_load.bpf.c` per event.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::namespace::{self, run_ip_command, run_script_with_namespace_sysfs};
use crate::report::{BenchReport, ReportTable, ReportTableCell};
use crate::run_time::enable_run_time_statistics;
use crate::thread_cpus::{self, CALLING_THREAD_PID};
use crate::xdp::throughput::veth_pair::{LOAD_BALANCER_MAC, NapiThread, VethPair};
use crate::xdp::{median_of_rounds, quartile_range_text};
use anyhow::{Context as _, ensure};
use coreward_dataplane::cpu_load::CpuBusyTimeCounter;
use libbpf_rs::query::ProgInfoIter;
use libbpf_rs::skel::{OpenSkel as _, Skel as _, SkelBuilder as _};

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/empty_tracepoint.skel.rs"));
}

/// Options of `coreward-lab bench cpu-load`.
#[derive(Debug, Clone, clap::Args)]
pub struct CpuLoadBenchArgs {
    /// Number of windows per case
    #[arg(long, default_value_t = Self::default().windows, value_parser = clap::value_parser!(u32).range(1..))]
    windows: u32,
    /// Length of a window (ms); the kernel takes its own load samples only every 1 to 10 ms
    #[arg(long, default_value_t = Self::default().window_ms, value_parser = clap::value_parser!(u64).range(100..))]
    window_ms: u64,
}

impl Default for CpuLoadBenchArgs {
    fn default() -> Self {
        Self { windows: 7, window_ms: 4000 }
    }
}

const SENDER_CPU: usize = 0;
const RECEIVER_CPU: usize = 1;
const UNREAD_DESTINATION: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);

/// Way in which packets are sent to the receiving CPU and processed there.
struct PacketReceiveCase {
    name: &'static str,
    uses_threaded_napi: bool,
    /// Number of datagrams in a burst, and the pause after each burst.
    burst_size_and_pause: (usize, Duration),
}

const RECEIVE_CASES: [PacketReceiveCase; 5] = [
    PacketReceiveCase {
        name: "no packets",
        uses_threaded_napi: false,
        burst_size_and_pause: (0, Duration::from_millis(1)),
    },
    PacketReceiveCase {
        name: "softirq, bursts of 16",
        uses_threaded_napi: false,
        burst_size_and_pause: (16, Duration::from_micros(50)),
    },
    PacketReceiveCase {
        name: "softirq, bursts of 128",
        uses_threaded_napi: false,
        burst_size_and_pause: (128, Duration::from_micros(50)),
    },
    PacketReceiveCase {
        name: "softirq, ksoftirqd, no pause",
        uses_threaded_napi: false,
        burst_size_and_pause: (64, Duration::ZERO),
    },
    PacketReceiveCase {
        name: "threaded NAPI, bursts of 128",
        uses_threaded_napi: true,
        burst_size_and_pause: (128, Duration::from_micros(50)),
    },
];

/// Measures loads in a new thread, which enters its own network namespace. Fails without root, or with only one CPU.
pub fn run_cpu_load_bench(args: &CpuLoadBenchArgs) -> anyhow::Result<BenchReport> {
    let cpu_count = std::thread::available_parallelism()?.get();
    ensure!(
        cpu_count > RECEIVER_CPU,
        "coreward-lab bench cpu-load: one CPU sends, another receives: expected 2 CPUs, this has {cpu_count}"
    );
    namespace::run_measurement_in_new_thread("cpu-load", args, measure_cpu_load)
}

fn measure_cpu_load(args: &CpuLoadBenchArgs) -> anyhow::Result<BenchReport> {
    let _run_time_statistics = enable_run_time_statistics()?;
    let mut load_table = ReportTable::new(&[
        "packets by",
        "load, %",
        "not idle, %",
        "stolen, %",
        "difference",
        "quartiles",
        "sum, %",
        "events/s",
    ]);
    let mut cost_table =
        ReportTable::new(&["packets by", "program, ns", "empty, ns", "above empty, ns", "CPU of it, %"]);
    for case in RECEIVE_CASES {
        let windows = measure_receive_case(&case, args)?;
        load_table.add_row(cpu_load_row(case.name, &windows));
        cost_table.add_row(program_cost_row(case.name, &windows));
    }
    let CpuLoadBenchArgs { windows, window_ms } = args;
    Ok(BenchReport {
        name: "cpu-load",
        heading: "The load of a core",
        method_description: format!(
            "CPU {SENDER_CPU} sends UDP datagrams to a veth device, and CPU {RECEIVER_CPU} drops them, by RPS or in a \
             NAPI thread. The column `load` is measured by cpu_load.bpf.c. The columns `not idle`, `stolen` and `sum` \
             (of all states) are from /proc/stat. The column `difference` is by how many percentage points `load` is \
             outside the range from (`not idle` - `stolen`) to `not idle`. Without IRQ_TIME_ACCOUNTING the kernel \
             measures only idle time exactly, and samples all other states. Events are task switches, and starts and \
             ends of interrupts and softirqs, on all CPUs. The columns `program` and `empty` are the run times of \
             cpu_load.bpf.c and of an empty program per event (kernel's run-time statistics). Values are medians of \
             {windows} windows of {window_ms} ms."
        ),
        tables: vec![load_table, cost_table],
    })
}

/// Measured load of the receiving CPU (% of one CPU) in one window, with the cost of the measurement.
struct CpuLoadWindow {
    measured_load_pct: f64,
    kernel_load: KernelCpuLoad,
    kernel_events_per_second: f64,
    program_ns_per_event: f64,
    empty_program_ns_per_event: f64,
}

impl CpuLoadWindow {
    /// Returns how far (percentage points) the measured load is outside the kernel's range, which is the busy time
    /// without and with stolen time. The result is negative below the range.
    fn distance_from_kernel_load_pct(&self) -> f64 {
        let KernelCpuLoad { not_idle_pct, stolen_pct, .. } = self.kernel_load;
        self.measured_load_pct - self.measured_load_pct.clamp(not_idle_pct - stolen_pct, not_idle_pct)
    }
}

fn values_by_window(windows: &[CpuLoadWindow], to_value: fn(&CpuLoadWindow) -> f64) -> Vec<f64> {
    windows.iter().map(to_value).collect()
}

fn median_of_windows(windows: &[CpuLoadWindow], to_value: fn(&CpuLoadWindow) -> f64) -> f64 {
    median_of_rounds(&values_by_window(windows, to_value))
}

fn cpu_load_row(case_name: &str, windows: &[CpuLoadWindow]) -> [ReportTableCell; 8] {
    let distances_pct = values_by_window(windows, CpuLoadWindow::distance_from_kernel_load_pct);
    [
        case_name.into(),
        median_of_windows(windows, |window| window.measured_load_pct).into(),
        median_of_windows(windows, |window| window.kernel_load.not_idle_pct).into(),
        median_of_windows(windows, |window| window.kernel_load.stolen_pct).into(),
        median_of_rounds(&distances_pct).into(),
        quartile_range_text(&distances_pct).into(),
        median_of_windows(windows, |window| window.kernel_load.sum_over_states_pct).into(),
        (median_of_windows(windows, |window| window.kernel_events_per_second) as u64).into(),
    ]
}

fn program_cost_row(case_name: &str, windows: &[CpuLoadWindow]) -> [ReportTableCell; 5] {
    let program_ns_per_event = median_of_windows(windows, |window| window.program_ns_per_event);
    let empty_program_ns_per_event = median_of_windows(windows, |window| window.empty_program_ns_per_event);
    let program_cpu_pct =
        median_of_windows(windows, |window| window.kernel_events_per_second * window.program_ns_per_event / 1e7);
    [
        case_name.into(),
        program_ns_per_event.into(),
        empty_program_ns_per_event.into(),
        (program_ns_per_event - empty_program_ns_per_event).into(),
        program_cpu_pct.into(),
    ]
}

fn measure_receive_case(case: &PacketReceiveCase, args: &CpuLoadBenchArgs) -> anyhow::Result<Vec<CpuLoadWindow>> {
    namespace::enter_new_network_namespace()?;
    let veth_pair = VethPair::new(0)?;
    let _napi_thread = configure_receiving_cpu(&veth_pair, RECEIVER_CPU, case.uses_threaded_napi)?;
    let busy_time_counter = CpuBusyTimeCounter::start()?;
    let mut skeleton_storage = MaybeUninit::uninit();
    let mut empty_programs = skeleton::EmptyTracepointSkelBuilder::default().open(&mut skeleton_storage)?.load()?;
    empty_programs.attach()?;
    let should_stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| send_datagram_bursts(case.burst_size_and_pause, &should_stop));
        std::thread::sleep(Duration::from_millis(200));
        let windows = (0..args.windows)
            .map(|_| measure_load_window(&busy_time_counter, Duration::from_millis(args.window_ms)))
            .collect();
        should_stop.store(true, Ordering::Relaxed);
        sender.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        windows
    })
}

fn measure_load_window(busy_time_counter: &CpuBusyTimeCounter, length: Duration) -> anyhow::Result<CpuLoadWindow> {
    let (start, kernel_ticks_before, busy_ns_before, run_times_before) = (
        Instant::now(),
        ReceiverCpuTicks::read_proc_stat()?,
        busy_time_counter.cpu_busy_ns(RECEIVER_CPU),
        run_times_by_program_id(),
    );
    std::thread::sleep(length);
    let receiver_busy_ns = busy_time_counter.cpu_busy_ns(RECEIVER_CPU) - busy_ns_before;
    let (seconds, kernel_ticks) =
        (start.elapsed().as_secs_f64(), ReceiverCpuTicks::read_proc_stat()?.elapsed_since(&kernel_ticks_before));
    let (mut event_count, mut run_ns_sum, mut empty_ns) = (0, 0, 0.0);
    for (id, program) in run_times_by_program_id() {
        let run_count_and_ns_before = run_times_before
            .get(&id)
            .map_or((0, 0), |run_time_before| (run_time_before.run_count, run_time_before.total_run_ns));
        let (run_count, run_ns) =
            (program.run_count - run_count_and_ns_before.0, program.total_run_ns - run_count_and_ns_before.1);
        if program.program_name == "empty_softirq" {
            empty_ns = run_ns as f64 / run_count.max(1) as f64;
        } else {
            (event_count, run_ns_sum) = (event_count + run_count, run_ns_sum + run_ns);
        }
    }
    ensure!(event_count > 0, "no events in {length:?}");
    Ok(CpuLoadWindow {
        measured_load_pct: receiver_busy_ns as f64 / seconds / 1e7,
        kernel_load: KernelCpuLoad::from_ticks(kernel_ticks, seconds),
        kernel_events_per_second: event_count as f64 / seconds,
        program_ns_per_event: run_ns_sum as f64 / event_count as f64,
        empty_program_ns_per_event: empty_ns,
    })
}

struct BpfProgramRunTime {
    program_name: String,
    run_count: u64,
    total_run_ns: u64,
}

/// Returns the run times of all BPF programs that have the measured programs' names, by program ID. They include the
/// programs of an agent that runs on this machine.
fn run_times_by_program_id() -> HashMap<u32, BpfProgramRunTime> {
    const MEASURED_PROGRAM_NAMES: [&str; 6] =
        ["task_switch", "interrupt_begin", "interrupt_ends", "softirq_begins", "softirq_ends", "empty_softirq"];
    let run_time_if_measured = |info: libbpf_rs::query::ProgramInfo| {
        let name = info.name.to_string_lossy().into_owned();
        // The kernel keeps only 15 characters of a name.
        MEASURED_PROGRAM_NAMES.contains(&&name[..]).then_some((
            info.id,
            BpfProgramRunTime { program_name: name, run_count: info.run_cnt, total_run_ns: info.run_time_ns },
        ))
    };
    ProgInfoIter::default().filter_map(run_time_if_measured).collect()
}

/// Makes `cpu` process the packets to [`UNREAD_DESTINATION`], either in a NAPI thread or by RPS.
fn configure_receiving_cpu(
    veth_pair: &VethPair,
    cpu: usize,
    uses_threaded_napi: bool,
) -> anyhow::Result<Option<NapiThread>> {
    let VethPair { generator_device_name: generator_end, tested_device_name: tested_end } = veth_pair;
    run_ip_command(&format!("address add 10.9.0.1/24 dev {generator_end}"))?;
    run_ip_command(&format!("neigh replace {UNREAD_DESTINATION} lladdr {LOAD_BALANCER_MAC} dev {generator_end}"))?;
    if uses_threaded_napi {
        // veth uses NAPI only with GRO.
        let status = Command::new("ethtool").args(["-K", tested_end, "gro", "on"]).status().context("ethtool")?;
        ensure!(status.success(), "ethtool -K {tested_end} gro on: {status}");
        return NapiThread::start(tested_end, cpu).map(Some);
    }
    run_script_with_namespace_sysfs(&format!(
        "echo {:x} > /sys/class/net/{tested_end}/queues/rx-0/rps_cpus",
        1_u64 << cpu
    ))?;
    Ok(None)
}

fn send_datagram_bursts((burst_size, pause): (usize, Duration), should_stop: &AtomicBool) -> anyhow::Result<()> {
    thread_cpus::bind_to_cpu(CALLING_THREAD_PID, SENDER_CPU)?;
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    while !should_stop.load(Ordering::Relaxed) {
        for _ in 0..burst_size {
            // A full queue rejects a datagram, which is then skipped.
            _ = socket.send_to(&[0; 64], (UNREAD_DESTINATION, 9));
        }
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }
    Ok(())
}

/// Time of [`RECEIVER_CPU`] by state (proc(5)), in ticks of 10 ms: user, nice, system, idle, iowait, irq, softirq,
/// steal.
struct ReceiverCpuTicks([u64; 8]);

impl ReceiverCpuTicks {
    fn read_proc_stat() -> anyhow::Result<Self> {
        let proc_stat = std::fs::read_to_string("/proc/stat").context("/proc/stat")?;
        let receiver_line = proc_stat.lines().find_map(|line| line.strip_prefix(&format!("cpu{RECEIVER_CPU} ")));
        let columns = receiver_line.context("/proc/stat: the receiving CPU is offline")?.split_whitespace();
        let tick_counts: Vec<u64> = columns.take(8).map(str::parse).collect::<Result<_, _>>()?;
        let ticks =
            tick_counts.try_into().map_err(|numbers| anyhow::anyhow!("/proc/stat: expected 8 numbers: {numbers:?}"));
        ticks.map(Self)
    }

    fn elapsed_since(&self, earlier_ticks: &Self) -> Self {
        Self(std::array::from_fn(|kind| self.0[kind].saturating_sub(earlier_ticks.0[kind])))
    }
}

/// Load of [`RECEIVER_CPU`] by the kernel's accounting in /proc/stat (%).
struct KernelCpuLoad {
    not_idle_pct: f64,
    stolen_pct: f64,
    /// Sum of the times in all states, including idle, in % of the elapsed time.
    sum_over_states_pct: f64,
}

impl KernelCpuLoad {
    fn from_ticks(ReceiverCpuTicks(ticks): ReceiverCpuTicks, seconds: f64) -> Self {
        let [.., idle, iowait, _irq, _softirq, stolen_pct] = ticks.map(|ticks| ticks as f64 / seconds);
        let sum_over_states_pct = ticks.iter().sum::<u64>() as f64 / seconds;
        Self { not_idle_pct: 100.0 - (idle + iowait).min(100.0), stolen_pct, sum_over_states_pct }
    }
}
