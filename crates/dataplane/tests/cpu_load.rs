//! Busy time by `bpf/cpu_load.bpf.c` against what a thread knows of itself.

mod support;

use std::time::{Duration, Instant};

use coreward_dataplane::cpu_load::CpuLoad;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
use support::may_load_bpf;

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
        let (busy, ran) = (load.busy_ns(cpu, now_ns()), clock(ClockId::CLOCK_THREAD_CPUTIME_ID));
        let began = now_ns();
        let spin = Instant::now();
        while spin.elapsed() < Duration::from_millis(60) {}
        let ran_ns = (clock(ClockId::CLOCK_THREAD_CPUTIME_ID) - ran).as_nanos() as u64;
        let end = now_ns();
        let busy_ns = load.busy_ns(cpu, end) - busy;
        // Time in which a virtual CPU was not there counts for the CPU, not for the thread.
        assert!(busy_ns + 2_000_000 >= ran_ns, "busy for {busy_ns} ns, the thread alone ran for {ran_ns}");
        let elapsed = end - began;
        assert!(busy_ns <= elapsed + 2_000_000, "busy for {busy_ns} ns of {elapsed}");
    }
    assert_eq!(load.busy_ns(100_000, now_ns()), 0, "no such CPU");
}

/// One that nothing is pinned to idles now and then, even on a busy machine.
#[test]
fn idle_time_does_not_count() {
    if !may_load_bpf("idle_time_does_not_count") {
        return;
    }
    let load = CpuLoad::start().unwrap();
    let cpus = std::thread::available_parallelism().unwrap().get();
    std::thread::sleep(Duration::from_millis(50));
    let sum = |now| (0..cpus).map(|cpu| load.busy_ns(cpu, now)).sum::<u64>();
    let (before, began) = (sum(now_ns()), now_ns());
    let idle_before = idle_ticks();
    std::thread::sleep(Duration::from_secs(1));
    let (busy, elapsed) = (sum(now_ns()) - before, (now_ns() - began) * cpus as u64);
    let idle = Duration::from_millis((idle_ticks() - idle_before) * 10).as_nanos() as u64;
    // The kernel's own account of idle time, in ticks, must fit.
    assert!(busy + idle < elapsed + elapsed / 4, "busy {busy} and idle {idle} of {elapsed} ns");
    assert!(busy + idle > elapsed / 2, "busy {busy} and idle {idle} of {elapsed} ns");
}

/// Idle and waiting for a disk, all CPUs together (proc(5), /proc/stat, in units of 10 ms).
fn idle_ticks() -> u64 {
    let text = std::fs::read_to_string("/proc/stat").unwrap();
    let numbers: Vec<u64> =
        text.lines().next().unwrap().split_whitespace().skip(1).map(|n| n.parse().unwrap()).collect();
    numbers[3] + numbers[4]
}
