//! Command `coreward-lab bench flood`, which measures the cost of packets of open connections on one CPU. Meanwhile,
//! another CPU runs a SYN flood through the same program and maps.

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
use super::balancer::{CaseLoadBalancer, FLOW_TABLE_ENTRIES, PlacementSetup};
use super::interleaved::{NsByRound, differences_by_round, median_of_rounds, quartile_range};
use super::runner::{PacketGenerator, PacketRunner};
use super::workload::{PacketCase, XDP_TX};
use crate::cpus::THIS_THREAD;
use crate::namespace;
use crate::report::{Goal, Report, Table, goal_cells};
use flooder::{FloodCounts, Flooder, FlooderCommand};
use memory::MapMemory;

const CONNECTION_COUNT: usize = 1 << 17;

/// Goal for the cost that a flood adds to established packets (%).
const FLOOD_EXCESS_GOAL: Goal = Goal::AtMost(10.0);

/// Consistency mode and state of the program that is flooded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FloodedProgram {
    Stateless,
    /// Stateful mode with a connection table in which every SYN finds a free entry.
    StatefulWithRoom,
    /// Stateful mode with a full connection table, in which no SYN finds a free entry.
    StatefulFull,
    /// Baseline in which every SYN adds an entry to the LRU hash. Once the hash is full, it replaces another
    /// connection's entry.
    HashTable,
}

impl FloodedProgram {
    const ALL: [FloodedProgram; 4] = [
        FloodedProgram::Stateless,
        FloodedProgram::StatefulWithRoom,
        FloodedProgram::StatefulFull,
        FloodedProgram::HashTable,
    ];

    fn consistency(self) -> Consistency {
        match self {
            FloodedProgram::Stateless => Consistency::Stateless,
            FloodedProgram::StatefulWithRoom | FloodedProgram::StatefulFull => Consistency::Stateful,
            FloodedProgram::HashTable => Consistency::HashTable,
        }
    }

    /// Returns the number of entries in the program's connection table.
    fn connection_table_entries(self) -> u32 {
        match self {
            FloodedProgram::StatefulWithRoom => intf::MAX_CONNECTION_TABLE_ENTRIES,
            _ => intf::DEFAULT_CONNECTION_TABLE_ENTRIES,
        }
    }
}

impl fmt::Display for FloodedProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FloodedProgram::Stateless => "stateless",
            FloodedProgram::StatefulWithRoom => "stateful, with room",
            FloodedProgram::StatefulFull => "stateful, table full",
            FloodedProgram::HashTable => "hash-table",
        })
    }
}

struct FloodMeasurement {
    flooded_program: FloodedProgram,
    /// Times per packet without a flood (ns), by round, for the empty program and for the load balancer.
    ns_without_flood: [NsByRound; 2],
    /// Times per packet during a flood (ns), by round, for the empty program and for the load balancer.
    ns_in_flood: [NsByRound; 2],
    /// Fraction of the open connections' packets that found their server's entry during the floods.
    found_entry_fraction: f64,
    flood_counts: FloodCounts,
    /// Number of SYNs that found no free entry.
    syns_without_entry: u64,
    /// Memory of all maps before the first SYN of a flood, and after the last one.
    memory_before_and_after: [MapMemory; 2],
    /// Number of used connection-table entries before any flood, and the maximum number after a flood.
    used_entries_before_and_max: [usize; 2],
}

/// Measures all programs in a new thread, which is bound to a CPU. Fails without root, with fewer than two CPUs, or
/// when a packet is not treated as expected.
pub fn run(length: &MeasurementLength) -> anyhow::Result<Report> {
    namespace::measure_in_thread("flood", length, measure_programs)
}

fn measure_programs(length: &MeasurementLength) -> anyhow::Result<Report> {
    let cpus = first_two_cpus("coreward-lab bench flood")?;
    let flooder = Flooder::start(cpus[1])?;
    crate::cpus::bind_to_cpu(THIS_THREAD, cpus[0])?;
    let measurements = FloodedProgram::ALL
        .map(|flooded_program| measure(flooded_program, length, &flooder).with_context(|| flooded_program.to_string()));
    let measurements = measurements.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    Ok(build_report(&measurements, length, cpus))
}

/// Returns the first two CPUs that this process may use. Fails when it may use only one.
pub fn first_two_cpus(command: &str) -> anyhow::Result<[usize; 2]> {
    let allowed_cpus = sched_getaffinity(Pid::from_raw(0)).context("which CPUs this process may use")?;
    let mut allowed_cpu_numbers =
        (0..nix::sched::CpuSet::count()).filter(|cpu| allowed_cpus.is_set(*cpu).unwrap_or(false));
    match (allowed_cpu_numbers.next(), allowed_cpu_numbers.next()) {
        (Some(first_cpu), Some(second_cpu)) => Ok([first_cpu, second_cpu]),
        _ => anyhow::bail!("{command} needs two CPUs, and this process may use one"),
    }
}

fn measure(
    flooded_program: FloodedProgram,
    length: &MeasurementLength,
    flooder: &Flooder,
) -> anyhow::Result<FloodMeasurement> {
    let case = PacketCase::Established(flooded_program.consistency(), CONNECTION_COUNT);
    // This placement rule writes more memory for a new connection than any other.
    let connection_table_size = TableSize::try_from(u64::from(flooded_program.connection_table_entries()))?;
    let setup = PlacementSetup {
        placement_rule: PlacementRule::LeastAssigned,
        rss_group_count: 1,
        connection_table_size,
        flow_table_entries: FLOW_TABLE_ENTRIES,
    };
    let balancer = CaseLoadBalancer::with_setup(case, setup)?;
    let runner = PacketRunner::new(&case.frame_template(), &balancer.packets()?, 0)?;
    let open_connections: HashSet<ConnectionIndex> = balancer.entries_by_client().into_values().collect();
    if flooded_program == FloodedProgram::StatefulFull {
        fill_connection_table(&balancer, flooded_program, flooder)?;
    }
    let program = balancer.program()?;
    let state_before = (MapMemory::of(program.as_fd())?, balancer.used_entry_count(), balancer.counters());
    let mut measurement = FloodMeasurement {
        flooded_program,
        ns_without_flood: Default::default(),
        ns_in_flood: Default::default(),
        found_entry_fraction: 0.0,
        flood_counts: FloodCounts::default(),
        syns_without_entry: 0,
        memory_before_and_after: [state_before.0; 2],
        used_entries_before_and_max: [state_before.1; 2],
    };
    let mut found_packets = 0;
    // The first round only warms up and is not counted.
    for round in 0..=length.rounds {
        for step in 0..4 {
            let combination = (round + step) % 4;
            let (is_lb, is_flood) = (combination & 1 == 1, combination & 2 == 2);
            let command = if is_flood {
                FlooderCommand::SynsThroughProgram(program.try_clone()?)
            } else {
                FlooderCommand::SynsThroughEmptyProgram
            };
            let work = || run_established_packets(&balancer, &runner, is_lb, length.packets);
            let ((mean_ns, counted_packets), flood_counts) = flooder.run_during(command, work)?;
            if is_flood {
                measurement.flood_counts.syn_count += flood_counts.syn_count;
                measurement.flood_counts.cpu_seconds += flood_counts.cpu_seconds;
                let max_used_entries = &mut measurement.used_entries_before_and_max[1];
                *max_used_entries = balancer.used_entry_count().max(*max_used_entries);
            }
            if is_flood && flooded_program == FloodedProgram::StatefulWithRoom {
                balancer.free_all_but(&open_connections)?;
            }
            if round > 0 {
                let round_times =
                    if is_flood { &mut measurement.ns_in_flood } else { &mut measurement.ns_without_flood };
                round_times[usize::from(is_lb)].push(mean_ns);
            }
            if round > 0 && is_flood {
                found_packets += counted_packets;
            }
        }
    }
    let counters_after = balancer.counters();
    let counted_since_start = |to_count: fn(&coreward_dataplane::lb::PacketCounters) -> u64| {
        to_count(&counters_after) - to_count(&state_before.2)
    };
    let new_connection_count =
        counted_since_start(|counters| counters.packets_by_outcome[intf::LB_COUNTER_NEW_CONNECTION as usize]);
    ensure!(
        new_connection_count == measurement.flood_counts.syn_count,
        "{new_connection_count} of {} SYNs were counted as first packets",
        measurement.flood_counts.syn_count
    );
    measurement.syns_without_entry =
        counted_since_start(|counters| counters.event_counts[intf::LB_EVENT_CONNECTION_TABLE_FULL as usize]);
    measurement.found_entry_fraction = found_packets as f64 / (f64::from(length.rounds) * f64::from(length.packets));
    measurement.memory_before_and_after[1] = MapMemory::of(program.as_fd())?;
    let must_find_servers = flooded_program != FloodedProgram::HashTable;
    ensure!(
        !must_find_servers || measurement.found_entry_fraction == 1.0,
        "only {} of the packets found their server",
        measurement.found_entry_fraction
    );
    Ok(measurement)
}

/// Runs packets of open connections. Returns the mean time per packet (ns), and how many packets found their server.
fn run_established_packets(
    balancer: &CaseLoadBalancer,
    runner: &PacketRunner,
    is_lb: bool,
    packet_count: u32,
) -> anyhow::Result<(f64, u64)> {
    if is_lb {
        balancer.run_and_count(runner, PacketGenerator::VariedFrame, CONNECTION_COUNT as u32)?;
        let run_result = balancer.run_and_count(runner, PacketGenerator::VariedFrame, packet_count)?;
        return Ok((run_result.mean_ns, run_result.counted_packets));
    }
    let (mean_ns, xdp_verdict) =
        runner.choose_and_run(PacketGenerator::VariedFrame, runner.empty_program.as_fd(), packet_count)?;
    ensure!(xdp_verdict == XDP_TX, "the empty program's verdict was {xdp_verdict}, expected {XDP_TX}");
    Ok((mean_ns, 0))
}

/// Floods the program until no entry of the connection table is free. Fails after 10 s.
fn fill_connection_table(
    balancer: &CaseLoadBalancer,
    flooded_program: FloodedProgram,
    flooder: &Flooder,
) -> anyhow::Result<()> {
    let entry_count = flooded_program.connection_table_entries() as usize;
    for _ in 0..100 {
        flooder.run_during(FlooderCommand::SynsThroughProgram(balancer.program()?), || {
            std::thread::sleep(std::time::Duration::from_millis(100));
            Ok(())
        })?;
        if balancer.used_entry_count() == entry_count {
            return Ok(());
        }
    }
    anyhow::bail!("{} of {entry_count} entries are in use after a flood of 10 s", balancer.used_entry_count())
}

/// Returns by how many percent each of `rounds` exceeds the same round in `base_rounds`.
fn excess_percent(rounds: &[f64], base_rounds: &[f64]) -> NsByRound {
    rounds.iter().zip(base_rounds).map(|(ns, base_ns)| (ns / base_ns - 1.0) * 100.0).collect()
}

fn build_report(measurements: &[FloodMeasurement], length: &MeasurementLength, cpus: [usize; 2]) -> Report {
    let mut cost_table = Table::new(&[
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
    let mut memory_table = Table::new(&[
        "memory",
        "connection table: entries in use before",
        "most in use after a flood",
        "free then",
        "entries of hash tables before",
        "after",
        "kernel memory of all maps before, KiB",
        "after ",
    ]);
    for measurement in measurements {
        let excess_pct = excess_percent(&measurement.ns_in_flood[1], &measurement.ns_without_flood[1]);
        let [ns_above_empty_without_flood, ns_above_empty_in_flood] =
            [&measurement.ns_without_flood, &measurement.ns_in_flood]
                .map(|ns_by_program| differences_by_round(&ns_by_program[1], &ns_by_program[0]));
        let excess_above_empty_pct = excess_percent(&ns_above_empty_in_flood, &ns_above_empty_without_flood);
        let [goal_cell, verdict_cell] = goal_cells(Some(FLOOD_EXCESS_GOAL), median_of_rounds(&excess_pct));
        cost_table.add_row([
            measurement.flooded_program.to_string().into(),
            median_of_rounds(&measurement.ns_without_flood[1]).into(),
            median_of_rounds(&measurement.ns_in_flood[1]).into(),
            median_of_rounds(&excess_pct).into(),
            quartile_range(&excess_pct).into(),
            goal_cell,
            verdict_cell,
            median_of_rounds(&excess_above_empty_pct).into(),
            quartile_range(&excess_above_empty_pct).into(),
            (measurement.found_entry_fraction * 100.0).into(),
            (measurement.flood_counts.syn_count as f64 / measurement.flood_counts.cpu_seconds / 1e6).into(),
            (measurement.syns_without_entry as f64 / measurement.flood_counts.syn_count as f64 * 100.0).into(),
        ]);
        let [entries_before, max_entries_after] = measurement.used_entries_before_and_max.map(|entries| entries as u64);
        memory_table.add_row([
            measurement.flooded_program.to_string().into(),
            entries_before.into(),
            max_entries_after.into(),
            (u64::from(measurement.flooded_program.connection_table_entries()) - max_entries_after).into(),
            measurement.memory_before_and_after[0].hash_map_entry_count.into(),
            measurement.memory_before_and_after[1].hash_map_entry_count.into(),
            (measurement.memory_before_and_after[0].kernel_bytes / 1024).into(),
            (measurement.memory_before_and_after[1].kernel_bytes / 1024).into(),
        ]);
    }
    let MapMemory { array_map_count: array_count, hash_map_count: hash_count, .. } =
        measurements[0].memory_before_and_after[1];
    let method = format!(
        "CPU {} runs lb.bpf.c on packets of {CONNECTION_COUNT} open connections in random order. Meanwhile CPU {} \
         floods the same program and maps, as another receive queue, with SYNs of new clients by the rule \
         least_assigned. Without flood it runs the empty program on the same SYNs. Values are medians over {} rounds \
         of {} packets with and without flood in turns. {}. {array_count} maps are arrays of fixed size, and \
         {hash_count} are hash tables, whose entries are counted.",
        cpus[0],
        cpus[1],
        length.rounds,
        length.packets,
        describe_cpu_topology(cpus),
    );
    Report { name: "flood", heading: "A SYN flood", method, tables: vec![cost_table, memory_table] }
}

/// Returns a sentence on whether the two CPUs share a core, as the kernel reports it (also in a virtual machine).
fn describe_cpu_topology(cpus: [usize; 2]) -> String {
    let thread_siblings = |cpu: usize| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        std::fs::read_to_string(path).map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
    };
    let is_virtual_machine = std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains(" hypervisor"));
    let note = if is_virtual_machine { " (in a virtual machine this may be wrong)" } else { "" };
    let [first_siblings, second_siblings] = cpus.map(thread_siblings);
    format!(
        "By /sys CPU {}'s core consists of CPUs {first_siblings}, and CPU {}'s of CPUs {second_siblings}{note}",
        cpus[0], cpus[1]
    )
}
