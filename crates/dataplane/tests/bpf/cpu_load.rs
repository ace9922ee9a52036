//! Busy time by `bpf/cpu_load.bpf.c` against what a thread knows of itself.

use std::time::{Duration, Instant};

use coreward_dataplane::cpu_load::CpuLoad;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

use crate::support::may_load_bpf;

fn clock(id: ClockId) -> Duration {
    clock_gettime(id).unwrap().into()
}

fn now_ns() -> u64 {
    clock(ClockId::CLOCK_MONOTONIC).as_nanos() as u64
}

/// A thread that runs without a pause on one CPU: its CPU must have been busy for at least as long as it ran, and no
/// longer than time went by. Read while it runs: there is no switch to end the stretch.
#[test]
fn a_cpu_is_busy_while_a_task_runs() {
    if !may_load_bpf("a_cpu_is_busy_while_a_task_runs") {
        return;
    }
    let load = CpuLoad::start().unwrap();
    let cpu = nix::sched::sched_getcpu().unwrap();
    let mut only = CpuSet::new();
    only.set(cpu).unwrap();
    sched_setaffinity(Pid::from_raw(0), &only).unwrap();
    // The first switch of this CPU tells the program who runs.
    std::thread::sleep(Duration::from_millis(20));
    for _ in 0..5 {
        // Whatever else runs here between two of these lines: the stretch that is timed contains the one in which the CPU is looked
        // at, which contains the one that the thread knows of.
        let began = now_ns();
        let busy = load.busy_ns(cpu, now_ns());
        let ran = clock(ClockId::CLOCK_THREAD_CPUTIME_ID);
        let spin = Instant::now();
        while spin.elapsed() < Duration::from_millis(60) {}
        let ran_ns = (clock(ClockId::CLOCK_THREAD_CPUTIME_ID) - ran).as_nanos() as u64;
        let busy_ns = load.busy_ns(cpu, now_ns()) - busy;
        let elapsed = now_ns() - began;
        // Time in which a virtual CPU was not there counts for the CPU, not for the thread.
        assert!(busy_ns + 2_000_000 >= ran_ns, "busy for {busy_ns} ns, the thread alone ran for {ran_ns}");
        assert!(busy_ns <= elapsed + 2_000_000, "busy for {busy_ns} ns of {elapsed}");
    }
    assert_eq!(load.busy_ns(100_000, now_ns()), 0, "no such CPU");
}

/// A CPU is never busy for longer than time goes by; and when the kernel says that CPUs idled, ours must say so, too. Not to
/// the nanosecond: the kernel's account (/proc/stat) was found 7 to 25 % off on machines whose virtual CPUs were not always
/// there, so it only tells whether there was idle time to be seen.
#[test]
fn idle_time_does_not_count() {
    if !may_load_bpf("idle_time_does_not_count") {
        return;
    }
    let load = CpuLoad::start().unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let before = idle_ticks();
    let (mut least_busy, mut elapsed_ns) = (f64::INFINITY, 0);
    for _ in 0..20 {
        let read = |now| (0..before.cpus).map(|cpu| load.busy_ns(cpu, now)).collect::<Vec<_>>();
        let began = now_ns();
        let busy_before = read(began);
        std::thread::sleep(Duration::from_millis(100));
        let busy = read(now_ns());
        let elapsed = now_ns() - began;
        for (cpu, (busy, before)) in busy.into_iter().zip(busy_before).enumerate() {
            assert!(busy - before <= elapsed + 2_000_000, "CPU {cpu}: busy for {} ns of {elapsed}", busy - before);
            least_busy = least_busy.min((busy - before) as f64 / elapsed as f64);
        }
        elapsed_ns += elapsed;
    }
    let idle_ns = (idle_ticks().all - before.all) * TICK_NS;
    let idled = idle_ns as f64 / (elapsed_ns * before.cpus as u64) as f64;
    assert!(idled < 0.3 || least_busy < 0.95, "idle for {idled} of the time, but busy for {least_busy} at least");
}

/// The unit of /proc/stat (proc(5)), 10 ms.
const TICK_NS: u64 = 10_000_000;

struct IdleTicks {
    /// CPUs that are online: all that `all` is about, whatever this process may use of them.
    cpus: usize,
    /// Idle and waiting for a disk, all CPUs together.
    all: u64,
}

fn idle_ticks() -> IdleTicks {
    let text = std::fs::read_to_string("/proc/stat").unwrap();
    let mut lines = text.lines();
    let numbers: Vec<u64> = lines.next().unwrap().split_whitespace().skip(1).map(|n| n.parse().unwrap()).collect();
    IdleTicks { cpus: lines.take_while(|line| line.starts_with("cpu")).count(), all: numbers[3] + numbers[4] }
}
