//! `coreward-lab bench flood`: cost of packets of open connections on one CPU while another CPU runs a SYN flood
//! through the same program and maps.

mod flooder;
mod memory;

use std::collections::HashSet;
use std::fmt;
use std::os::fd::AsFd as _;

use anyhow::{Context as _, ensure};
use coreward_intf as intf;
use coreward_model::connection_table::{ConnectionIndex, TableSize};
use coreward_model::consistency::Consistency;
use coreward_model::placement::PlacementRule;
use nix::sched::sched_getaffinity;
use nix::unistd::Pid;

use super::MeasurementLength;
use super::balancer::{Balancer, BalancerSetup, FLOW_TABLE_ENTRIES};
use super::interleaved::{RoundTimes, difference, median_of, quartiles};
use super::runner::{Feed, Runner};
use super::workload::{Case, XDP_TX};
use crate::cpus::THIS_THREAD;
use crate::namespace;
use crate::report::{Goal, Report, Table, goal_cells};
use flooder::{Command, FloodCounts, Flooder};
use memory::Memory;

const CONNECTION_COUNT: usize = 1 << 17;

/// Goal for the cost that a flood adds to established packets (%).
const FLOOD_COST_GOAL: Goal = Goal::AtMost(10.0);

/// Consistency mode and state of the program that is flooded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Stateless,
    /// Stateful mode, in which every SYN finds a free entry in the connection table.
    StatefulWithRoom,
    /// Stateful mode, in which no SYN finds a free entry in the connection table.
    StatefulFull,
    /// Baseline, in which every SYN adds an entry to the LRU hash. Once full, it replaces another connection's entry.
    HashTable,
}

impl Victim {
    const ALL: [Victim; 4] = [Victim::Stateless, Victim::StatefulWithRoom, Victim::StatefulFull, Victim::HashTable];

    fn consistency(self) -> Consistency {
        match self {
            Victim::Stateless => Consistency::Stateless,
            Victim::StatefulWithRoom | Victim::StatefulFull => Consistency::Stateful,
            Victim::HashTable => Consistency::HashTable,
        }
    }

    /// Returns the number of entries of the program's connection table.
    fn entries(self) -> u32 {
        match self {
            Victim::StatefulWithRoom => intf::MAX_CONNECTION_TABLE_ENTRIES,
            _ => intf::DEFAULT_CONNECTION_TABLE_ENTRIES,
        }
    }
}

impl fmt::Display for Victim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Victim::Stateless => "stateless",
            Victim::StatefulWithRoom => "stateful, with room",
            Victim::StatefulFull => "stateful, table full",
            Victim::HashTable => "hash-table",
        })
    }
}

/// Measurements of one flooded program.
struct Measured {
    victim: Victim,
    /// Times per packet without a flood (ns), by round: of the empty program, and of the load balancer.
    unloaded: [RoundTimes; 2],
    /// Times per packet during a flood (ns), by round: of the empty program, and of the load balancer.
    flooded: [RoundTimes; 2],
    /// Fraction of the open connections' packets that found the entry of their server during the floods.
    found_fraction: f64,
    flood: FloodCounts,
    /// Number of SYNs that found no free entry.
    without_entry: u64,
    /// Memory of all maps before the first SYN of a flood, and after the last one.
    memory: [Memory; 2],
    /// Number of used entries of the connection table before any flood, and the maximum number after a flood.
    entries_in_use: [usize; 2],
}

/// Measures all programs in a new thread, which is bound to a CPU. Fails without root, with fewer than two CPUs, or
/// when a packet is not treated as expected.
pub fn run(length: &MeasurementLength) -> anyhow::Result<Report> {
    namespace::measure_in_thread("flood", length, measure_all)
}

fn measure_all(length: &MeasurementLength) -> anyhow::Result<Report> {
    let cpus = two_cpus("coreward-lab bench flood")?;
    let flooder = Flooder::start(cpus[1])?;
    crate::cpus::bind_to_cpu(THIS_THREAD, cpus[0])?;
    let measured = Victim::ALL.map(|victim| measure(victim, length, &flooder).with_context(|| victim.to_string()));
    let measured = measured.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    Ok(report(&measured, length, cpus))
}

/// Returns the first two CPUs that this process may use. Fails when it may use only one.
pub fn two_cpus(command: &str) -> anyhow::Result<[usize; 2]> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).context("which CPUs this process may use")?;
    let mut cpus = (0..nix::sched::CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    match (cpus.next(), cpus.next()) {
        (Some(first), Some(second)) => Ok([first, second]),
        _ => anyhow::bail!("{command} needs two CPUs, and this process may use one"),
    }
}

fn measure(victim: Victim, length: &MeasurementLength, flooder: &Flooder) -> anyhow::Result<Measured> {
    let case = Case::Established(victim.consistency(), CONNECTION_COUNT);
    // The rule with the most memory writes for a new connection.
    let entries = TableSize::try_from(u64::from(victim.entries()))?;
    let setup = BalancerSetup {
        rule: PlacementRule::LeastAssigned,
        rss_group_count: 1,
        entries,
        flow_entries: FLOW_TABLE_ENTRIES,
    };
    let balancer = Balancer::with_setup(case, setup)?;
    let runner = Runner::new(&case.frame(), &balancer.packets()?, 0)?;
    let open: HashSet<ConnectionIndex> = balancer.entries_by_client().into_values().collect();
    if victim == Victim::StatefulFull {
        fill_table(&balancer, victim, flooder)?;
    }
    let program = balancer.program()?;
    let before = (Memory::of(program.as_fd())?, balancer.entries_in_use(), balancer.counters());
    let mut measured = Measured {
        victim,
        unloaded: Default::default(),
        flooded: Default::default(),
        found_fraction: 0.0,
        flood: FloodCounts::default(),
        without_entry: 0,
        memory: [before.0; 2],
        entries_in_use: [before.1; 2],
    };
    let mut found = 0;
    // The first round warms up and does not count.
    for round in 0..=length.rounds {
        for step in 0..4 {
            let turn = (round + step) % 4;
            let (is_lb, is_flood) = (turn & 1 == 1, turn & 2 == 2);
            let command = if is_flood { Command::Flood(program.try_clone()?) } else { Command::Idle };
            let work = || run_established(&balancer, &runner, is_lb, length.packets);
            let ((time, counted), sent) = flooder.run_during(command, work)?;
            if is_flood {
                measured.flood.syns += sent.syns;
                measured.flood.time += sent.time;
                let in_use = &mut measured.entries_in_use[1];
                *in_use = balancer.entries_in_use().max(*in_use);
            }
            if is_flood && victim == Victim::StatefulWithRoom {
                balancer.free_all_but(&open)?;
            }
            if round > 0 {
                let of = if is_flood { &mut measured.flooded } else { &mut measured.unloaded };
                of[usize::from(is_lb)].push(time);
            }
            if round > 0 && is_flood {
                found += counted;
            }
        }
    }
    let after = balancer.counters();
    let since = |count: fn(&coreward_dataplane::lb::Counters) -> u64| count(&after) - count(&before.2);
    let first = since(|counters| counters.packets[intf::LB_COUNTER_NEW_CONNECTION as usize]);
    ensure!(first == measured.flood.syns, "{first} of {} SYNs were counted as first packets", measured.flood.syns);
    measured.without_entry = since(|counters| counters.events[intf::LB_EVENT_CONNECTION_TABLE_FULL as usize]);
    measured.found_fraction = found as f64 / (f64::from(length.rounds) * f64::from(length.packets));
    measured.memory[1] = Memory::of(program.as_fd())?;
    let must_find = victim != Victim::HashTable;
    ensure!(
        !must_find || measured.found_fraction == 1.0,
        "only {} of the packets found their server",
        measured.found_fraction
    );
    Ok(measured)
}

/// Runs packets of open connections. Returns the mean time per packet (ns), and how many packets found their server.
fn run_established(balancer: &Balancer, runner: &Runner, is_lb: bool, packets: u32) -> anyhow::Result<(f64, u64)> {
    if is_lb {
        balancer.run_and_count(runner, Feed::Packet, CONNECTION_COUNT as u32)?;
        let run = balancer.run_and_count(runner, Feed::Packet, packets)?;
        return Ok((run.mean_ns, run.counted_packets));
    }
    let (time, verdict) = runner.run(Feed::Packet, runner.empty.as_fd(), packets)?;
    ensure!(verdict == XDP_TX, "the empty program's verdict was {verdict}, expected {XDP_TX}");
    Ok((time, 0))
}

/// Floods the program until no entry of the connection table is free. Fails after 10 s.
fn fill_table(balancer: &Balancer, victim: Victim, flooder: &Flooder) -> anyhow::Result<()> {
    let entries = victim.entries() as usize;
    for _ in 0..100 {
        flooder.run_during(Command::Flood(balancer.program()?), || {
            std::thread::sleep(std::time::Duration::from_millis(100));
            Ok(())
        })?;
        if balancer.entries_in_use() == entries {
            return Ok(());
        }
    }
    anyhow::bail!("{} of {entries} entries are in use after a flood of 10 s", balancer.entries_in_use())
}

/// Returns by how many percent each of `rounds` exceeds the same round of `others`.
fn excess_percent(rounds: &[f64], others: &[f64]) -> RoundTimes {
    rounds.iter().zip(others).map(|(time, other)| (time / other - 1.0) * 100.0).collect()
}

fn report(measured: &[Measured], length: &MeasurementLength, cpus: [usize; 2]) -> Report {
    let mut cost = Table::new(&[
        "established packets",
        "ns",
        "in a flood, ns",
        "more, %",
        "quartiles",
        "goal",
        "verdict",
        "more above empty, %",
        "quartiles ",
        "found their server, %",
        "SYNs per second, millions",
        "SYNs without a free entry, %",
    ]);
    let mut memory = Table::new(&[
        "memory",
        "connection table: entries in use before",
        "most in use after a flood",
        "free then",
        "entries of hash tables before",
        "after",
        "kernel memory of all maps before, KiB",
        "after ",
    ]);
    for m in measured {
        let of_packet = excess_percent(&m.flooded[1], &m.unloaded[1]);
        let [quiet, flooded] = [&m.unloaded, &m.flooded].map(|of| difference(&of[1], &of[0]));
        let above_empty = excess_percent(&flooded, &quiet);
        let [goal, verdict] = goal_cells(Some(FLOOD_COST_GOAL), median_of(&of_packet));
        cost.add_row([
            m.victim.to_string().into(),
            median_of(&m.unloaded[1]).into(),
            median_of(&m.flooded[1]).into(),
            median_of(&of_packet).into(),
            quartiles(&of_packet).into(),
            goal,
            verdict,
            median_of(&above_empty).into(),
            quartiles(&above_empty).into(),
            (m.found_fraction * 100.0).into(),
            (m.flood.syns as f64 / m.flood.time / 1e6).into(),
            (m.without_entry as f64 / m.flood.syns as f64 * 100.0).into(),
        ]);
        let [in_use, after] = m.entries_in_use.map(|entries| entries as u64);
        memory.add_row([
            m.victim.to_string().into(),
            in_use.into(),
            after.into(),
            (u64::from(m.victim.entries()) - after).into(),
            m.memory[0].hash_entries.into(),
            m.memory[1].hash_entries.into(),
            (m.memory[0].bytes / 1024).into(),
            (m.memory[1].bytes / 1024).into(),
        ]);
    }
    let Memory { array_count, hash_count, .. } = measured[0].memory[1];
    let about = format!(
        "CPU {} runs lb.bpf.c on packets of {CONNECTION_COUNT} open connections in random order. CPU {} runs the same \
         program with the same maps on SYNs of new clients, as fast as it can, on another receive queue; rule \
         least_assigned. Without flood it runs the empty program on the same SYNs. {} rounds of {} packets, with and \
         without flood in turns; medians over the rounds. {}. Memory: {array_count} of the \
         maps are arrays of fixed size, {hash_count} are hash tables, whose entries are counted.",
        cpus[0],
        cpus[1],
        length.rounds,
        length.packets,
        topology(cpus),
    );
    Report { name: "flood", title: "A SYN flood", about, tables: vec![cost, memory] }
}

/// Returns a sentence on whether the two CPUs share a core, as the kernel (also of a virtual machine) reports it.
fn topology(cpus: [usize; 2]) -> String {
    let siblings = |cpu: usize| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        std::fs::read_to_string(path).map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
    };
    let virtual_machine = std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains(" hypervisor"));
    let note = if virtual_machine { " (by /sys; in a virtual machine that may be wrong)" } else { "" };
    let [left, right] = cpus.map(siblings);
    format!("CPU {} shares its core with CPUs {left}, CPU {} with {right}{note}", cpus[0], cpus[1])
}
