//! Busy times from `bpf/server/cpu_load.bpf.c`, compared with a thread's CPU time and with the kernel's /proc/stat.

use std::net::{Ipv4Addr, UdpSocket};
use std::ops::Sub;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coreward_dataplane::clock::monotonic_ns;
use coreward_dataplane::cpu_load::CpuLoad;
use nix::sched::{CloneFlags, CpuSet, sched_setaffinity, unshare};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

use crate::support::{missing_bpf_rights, skip_if};

fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}

fn pin_thread(cpu: usize) {
    let mut only = CpuSet::new();
    only.set(cpu).unwrap();
    sched_setaffinity(Pid::from_raw(0), &only).unwrap();
}

/// The busy time is read while the task is running, before a task switch ends the measured period.
#[test]
fn cpu_is_busy_while_a_task_runs() {
    skip_if!(missing_bpf_rights());
    let load = CpuLoad::start().unwrap();
    let cpu = nix::sched::sched_getcpu().unwrap();
    pin_thread(cpu);
    // A CPU counts as idle until its first switch.
    std::thread::sleep(Duration::from_millis(20));
    for _ in 0..5 {
        // Other tasks may run between two of these lines, so each measured period contains the next period.
        let began = monotonic_ns();
        let busy = load.busy_ns(cpu);
        let ran = thread_time();
        let spin = Instant::now();
        while spin.elapsed() < Duration::from_millis(60) {}
        let ran_ns = (thread_time() - ran).as_nanos() as u64;
        let busy_ns = load.busy_ns(cpu) - busy;
        let elapsed = monotonic_ns() - began;
        // Stolen time of a virtual CPU counts for the CPU, not for the thread.
        assert!(busy_ns + 2_000_000 >= ran_ns, "busy for {busy_ns} ns, the thread alone ran for {ran_ns}");
        assert!(busy_ns <= elapsed + 2_000_000, "busy for {busy_ns} ns of {elapsed}");
    }
    assert_eq!(load.busy_ns(100_000), 0, "no such CPU");
}

/// The counted time is compared with the kernel's idle time in /proc/stat. On machines with stolen time the latter was
/// 7 to 25 % off, so it only decides whether the CPUs were idle at all.
#[test]
fn idle_time_does_not_count() {
    skip_if!(missing_bpf_rights());
    let load = CpuLoad::start().unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let before = cpu_ticks();
    let (mut least_busy, mut elapsed_ns) = (f64::INFINITY, 0);
    for _ in 0..20 {
        let read = || (0..before.len()).map(|cpu| load.busy_ns(cpu)).collect::<Vec<_>>();
        let began = monotonic_ns();
        let busy_before = read();
        std::thread::sleep(Duration::from_millis(100));
        let busy = read();
        let elapsed = monotonic_ns() - began;
        for (cpu, (busy, before)) in busy.into_iter().zip(busy_before).enumerate() {
            assert!(busy - before <= elapsed + 2_000_000, "CPU {cpu}: busy for {} ns of {elapsed}", busy - before);
            least_busy = least_busy.min((busy - before) as f64 / elapsed as f64);
        }
        elapsed_ns += elapsed;
    }
    let idle_ticks: u64 = cpu_ticks().iter().zip(&before).map(|(after, before)| (*after - *before).idle).sum();
    let idled = (idle_ticks * TICK_NS) as f64 / (elapsed_ns * before.len() as u64) as f64;
    assert!(idled < 0.3 || least_busy < 0.95, "idle for {idled} of the time, but busy for {least_busy} at least");
}

/// A UDP flood from one CPU is received by RPS in softirqs on another CPU, which is idle otherwise. The busy time must
/// agree with the kernel's idle time, which is measured; the other columns of /proc/stat are samples (docs/cost.md).
/// The tolerance is for interrupts without a tracepoint.
#[test]
fn receiving_packets_counts_as_busy() {
    skip_if!(missing_bpf_rights());
    skip_if!((cpu_ticks().len() < 2).then_some("needs 2 CPUs"));
    const SENDER: usize = 0;
    const RECEIVER: usize = 1;
    // The network namespace is that of a new thread, and ends with it.
    std::thread::spawn(|| {
        flooded_device(RECEIVER);
        let load = CpuLoad::start().unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| flood(SENDER, &done));
            std::thread::sleep(Duration::from_millis(100));
            let (began, ticks, busy) = (monotonic_ns(), cpu_ticks()[RECEIVER], load.busy_ns(RECEIVER));
            std::thread::sleep(Duration::from_secs(3));
            let busy = load.busy_ns(RECEIVER) - busy;
            let ticks = cpu_ticks()[RECEIVER] - ticks;
            done.store(true, Ordering::Relaxed);
            let elapsed = (monotonic_ns() - began) as f64;
            let share = |ticks: u64| (ticks * TICK_NS) as f64 / elapsed;
            let (ours, kernel, stolen) = (busy as f64 / elapsed, 1.0 - share(ticks.idle), share(ticks.stolen));
            println!("busy: {ours:.3}, by the kernel {kernel:.3}, of it stolen {stolen:.3}");
            assert!(kernel > 0.1, "the flood did not reach CPU {RECEIVER}");
            assert!(ours > kernel - stolen - 0.1, "busy for {ours:.3}, by the kernel {kernel:.3}, stolen {stolen:.3}");
            assert!(ours < kernel + 0.1, "busy for {ours:.3} of the time, by the kernel {kernel:.3}");
        });
    })
    .join()
    .unwrap();
}

const FLOODED: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);

/// Moves this thread into a new network namespace that receives packets to [`FLOODED_ADDRESS`] on `cpu` and drops them.
fn flooded_device(cpu: usize) {
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    // /sys shows the network namespace in which it was mounted.
    let script = format!(
        "set -e
        ip link add flood0 type veth peer name flood1 address 02:00:00:00:00:02
        ip address add 10.9.0.1/24 dev flood0
        ip link set flood0 up && ip link set flood1 up
        ip neigh replace {FLOODED} lladdr 02:00:00:00:00:02 dev flood0
        mount -t sysfs none /sys
        echo {mask:x} > /sys/class/net/flood1/queues/rx-0/rps_cpus",
        mask = 1_u64 << cpu,
    );
    assert!(Command::new("unshare").args(["--mount", "sh", "-c", &script]).status().unwrap().success());
}

fn flood(cpu: usize, done: &AtomicBool) {
    pin_thread(cpu);
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    while !done.load(Ordering::Relaxed) {
        // An error means that the queue was full for one datagram.
        _ = socket.send_to(&[0; 64], (FLOODED, 9));
    }
}

/// Length of a tick, the unit of times in /proc/stat (proc(5)): 10 ms in ns.
const TICK_NS: u64 = 10_000_000;

#[derive(Clone, Copy)]
struct CpuTicks {
    /// Number of ticks in which the CPU was idle or waited for a disk.
    idle: u64,
    stolen: u64,
}

impl Sub for CpuTicks {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        // iowait may decrease (proc(5)).
        Self { idle: self.idle.saturating_sub(before.idle), stolen: self.stolen - before.stolen }
    }
}

fn cpu_ticks() -> Vec<CpuTicks> {
    let text = std::fs::read_to_string("/proc/stat").unwrap();
    let lines = text.lines().skip(1).take_while(|line| line.starts_with("cpu"));
    let ticks = |line: &str| {
        let numbers: Vec<u64> = line.split_whitespace().skip(1).map(|number| number.parse().unwrap()).collect();
        let [_user, _nice, _system, idle, iowait, _irq, _softirq, stolen, ..] = numbers[..] else { panic!("{line:?}") };
        CpuTicks { idle: idle + iowait, stolen }
    };
    lines.map(ticks).collect()
}
