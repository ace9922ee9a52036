//! Command `coreward-lab bench flood`, which measures the cost of packets of open connections on one CPU. Meanwhile,
//! another CPU runs a SYN flood through the same program and maps.

mod bpf_map_memory;
mod flooder;

use std::collections::HashSet;
use std::fmt;
use std::os::fd::AsFd as _;

use anyhow::{Context as _, ensure};
use coreward_dataplane::lb::PacketCounters;
use coreward_intf as intf;
use coreward_model::connection_table::{ConnectionIndex, ConnectionTableSize};
use coreward_model::consistency::ConsistencyMode;
use coreward_model::placement::PlacementRule;
use nix::sched::sched_getaffinity;
use nix::unistd::Pid;

use super::MeasurementLength;
use super::balancer::{FLOW_TABLE_ENTRIES, MeasuredLoadBalancer, PlacementSetup};
use super::interleaved::{NsByRound, differences_by_round, median_of_rounds, quartile_range_text};
use super::runner::{PacketGenerator, PacketRunner};
use super::workload::{PacketCase, XDP_TX};
use crate::namespace;
use crate::report::{BenchReport, MeasurementGoal, ReportTable, ReportTableCell, goal_and_verdict_cells};
use crate::thread_cpus::CALLING_THREAD_PID;
use bpf_map_memory::BpfMapMemory;
use flooder::{SynFloodCounts, SynFlooder, SynFlooderCommand};

const CONNECTION_COUNT: usize = 1 << 17;

/// Goal for the cost that a flood adds to established packets (%).
const FLOOD_EXCESS_COST_GOAL: MeasurementGoal = MeasurementGoal::AtMost(10.0);

/// Consistency mode of the flooded program, and state of its connection table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FloodedProgram {
    Stateless,
    /// Stateful mode with a connection table in which every SYN finds a free entry.
    StatefulWithFreeEntries,
    /// Stateful mode with a full connection table, in which no SYN finds a free entry.
    StatefulWithFullTable,
    /// Baseline in which every SYN adds an entry to the LRU hash. Once the hash is full, each new entry replaces the
    /// entry of another connection.
    HashTable,
}

impl FloodedProgram {
    const ALL: [FloodedProgram; 4] = [
        FloodedProgram::Stateless,
        FloodedProgram::StatefulWithFreeEntries,
        FloodedProgram::StatefulWithFullTable,
        FloodedProgram::HashTable,
    ];

    fn consistency(self) -> ConsistencyMode {
        match self {
            FloodedProgram::Stateless => ConsistencyMode::Stateless,
            FloodedProgram::StatefulWithFreeEntries | FloodedProgram::StatefulWithFullTable => {
                ConsistencyMode::Stateful
            }
            FloodedProgram::HashTable => ConsistencyMode::HashTable,
        }
    }

    /// Returns the number of entries in the program's connection table.
    fn connection_table_entry_count(self) -> u32 {
        match self {
            FloodedProgram::StatefulWithFreeEntries => intf::MAX_CONNECTION_TABLE_ENTRIES,
            _ => intf::DEFAULT_CONNECTION_TABLE_ENTRIES,
        }
    }
}

impl fmt::Display for FloodedProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FloodedProgram::Stateless => "stateless",
            FloodedProgram::StatefulWithFreeEntries => "stateful, with room",
            FloodedProgram::StatefulWithFullTable => "stateful, table full",
            FloodedProgram::HashTable => "hash-table",
        })
    }
}

struct SynFloodMeasurement {
    flooded_program: FloodedProgram,
    /// Times per packet without a flood (ns), by round, for the empty program and for the load balancer.
    ns_by_program_without_flood: [NsByRound; 2],
    /// Times per packet during a flood (ns), by round, for the empty program and for the load balancer.
    ns_by_program_in_flood: [NsByRound; 2],
    /// Fraction of the open connections' packets during the floods that found their server.
    found_connection_entry_fraction: f64,
    flood_counts: SynFloodCounts,
    /// Number of SYNs of the floods that found no free connection-table entry.
    syn_count_without_entry: u64,
    /// Memory of all maps before the first SYN of a flood, and after the last one.
    memory_before_and_after: [BpfMapMemory; 2],
    /// Number of used connection-table entries before any flood, and the maximum number after a flood.
    initial_and_max_used_entries: [usize; 2],
}

/// Measures all programs under a flood in a new thread, which is bound to a CPU. Fails without root, with fewer than
/// two CPUs, or when a packet is not treated as expected.
pub fn run_flood_bench(length: &MeasurementLength) -> anyhow::Result<BenchReport> {
    namespace::run_measurement_in_new_thread("flood", length, measure_flooded_programs)
}

fn measure_flooded_programs(length: &MeasurementLength) -> anyhow::Result<BenchReport> {
    let cpus = first_two_allowed_cpus("coreward-lab bench flood")?;
    let flooder = SynFlooder::start(cpus[1])?;
    crate::thread_cpus::bind_to_cpu(CALLING_THREAD_PID, cpus[0])?;
    let measurements = FloodedProgram::ALL.map(|flooded_program| {
        measure_flooded_program(flooded_program, length, &flooder).with_context(|| flooded_program.to_string())
    });
    let measurements = measurements.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    Ok(build_flood_report(&measurements, length, cpus))
}

/// Returns the first two CPUs that this process may use. Fails when it may use only one.
pub fn first_two_allowed_cpus(command: &str) -> anyhow::Result<[usize; 2]> {
    let allowed_cpus = sched_getaffinity(Pid::from_raw(0)).context("which CPUs this process may use")?;
    let mut allowed_cpu_numbers =
        (0..nix::sched::CpuSet::count()).filter(|cpu| allowed_cpus.is_set(*cpu).unwrap_or(false));
    match (allowed_cpu_numbers.next(), allowed_cpu_numbers.next()) {
        (Some(first_cpu), Some(second_cpu)) => Ok([first_cpu, second_cpu]),
        _ => anyhow::bail!("{command} needs two CPUs, and this process may use one"),
    }
}

/// Load balancer to be flooded, with packets of its open connections.
struct SynFloodTarget {
    balancer: MeasuredLoadBalancer,
    runner: PacketRunner,
    /// Indices of the connection-table entries that are used before the first flood.
    open_connection_indices: HashSet<ConnectionIndex>,
}

impl SynFloodTarget {
    fn new(flooded_program: FloodedProgram) -> anyhow::Result<Self> {
        let case = PacketCase::EstablishedConnections(flooded_program.consistency(), CONNECTION_COUNT);
        let setup = PlacementSetup {
            // This placement rule writes more memory for a new connection than any other.
            placement_rule: PlacementRule::LeastAssigned,
            rss_group_count: 1,
            connection_table_size: ConnectionTableSize::try_from(u64::from(
                flooded_program.connection_table_entry_count(),
            ))?,
            flow_table_entry_count: FLOW_TABLE_ENTRIES,
        };
        let balancer = MeasuredLoadBalancer::with_setup(case, setup)?;
        let runner = PacketRunner::new(&case.frame_template(), &balancer.shuffled_packet_variations()?, 0)?;
        let open_connections = balancer.connection_indexes_by_client().into_values().collect();
        Ok(Self { balancer, runner, open_connection_indices: open_connections })
    }

    fn read_map_memory(&self) -> anyhow::Result<BpfMapMemory> {
        BpfMapMemory::read_for_program(self.balancer.duplicate_program_descriptor()?.as_fd())
    }

    /// Runs packets of open connections through the load balancer (if `measures_lb`) or the empty program. Meanwhile
    /// the other CPU floods the load balancer (if `floods_lb`), or runs the empty program on the same SYNs. Returns the
    /// results of [`run_established_packets`] and the number of SYNs.
    fn run_packets_with_flooder(
        &self,
        flooder: &SynFlooder,
        measures_lb: bool,
        floods_lb: bool,
        packet_count: u32,
    ) -> anyhow::Result<((f64, u64), SynFloodCounts)> {
        let command = if floods_lb {
            SynFlooderCommand::SynsThroughProgram(self.balancer.duplicate_program_descriptor()?)
        } else {
            SynFlooderCommand::SynsThroughEmptyProgram
        };
        flooder.run_during_flood(command, || {
            run_established_packets(&self.balancer, &self.runner, measures_lb, packet_count)
        })
    }
}

impl SynFloodMeasurement {
    /// Returns a measurement before its first round. Its memory and used entries are those of the target at present.
    fn from_state_before_flood(flooded_program: FloodedProgram, target: &SynFloodTarget) -> anyhow::Result<Self> {
        Ok(Self {
            flooded_program,
            ns_by_program_without_flood: Default::default(),
            ns_by_program_in_flood: Default::default(),
            found_connection_entry_fraction: 0.0,
            flood_counts: SynFloodCounts::default(),
            syn_count_without_entry: 0,
            memory_before_and_after: [target.read_map_memory()?; 2],
            initial_and_max_used_entries: [target.balancer.used_table_entry_count(); 2],
        })
    }

    /// Adds a flood to the totals, with the number of connection-table entries in use after it.
    fn add_flood_counts(&mut self, flood_counts: SynFloodCounts, used_entry_count: usize) {
        self.flood_counts.syn_count += flood_counts.syn_count;
        self.flood_counts.cpu_seconds += flood_counts.cpu_seconds;
        let [_, max_used_entries] = &mut self.initial_and_max_used_entries;
        *max_used_entries = used_entry_count.max(*max_used_entries);
    }

    /// Runs all rounds of a measurement. Returns how many packets of open connections found their server during the
    /// floods.
    fn run_measurement_rounds(
        &mut self,
        target: &SynFloodTarget,
        length: &MeasurementLength,
        flooder: &SynFlooder,
    ) -> anyhow::Result<u64> {
        let mut packets_that_found_server = 0;
        // The first round only warms up and is not counted.
        for (round, step) in (0..=length.rounds).flat_map(|round| (0..4).map(move |step| (round, step))) {
            let combination = (round + step) % 4;
            let (measures_lb, floods_lb) = (combination & 1 == 1, combination & 2 == 2);
            let ((mean_ns, counted_packets), flood_counts) =
                target.run_packets_with_flooder(flooder, measures_lb, floods_lb, length.packets)?;
            if floods_lb {
                self.add_flood_counts(flood_counts, target.balancer.used_table_entry_count());
            }
            if floods_lb && self.flooded_program == FloodedProgram::StatefulWithFreeEntries {
                target.balancer.free_connections_except(&target.open_connection_indices)?;
            }
            if round > 0 {
                let round_times =
                    if floods_lb { &mut self.ns_by_program_in_flood } else { &mut self.ns_by_program_without_flood };
                round_times[usize::from(measures_lb)].push(mean_ns);
            }
            if round > 0 && floods_lb {
                packets_that_found_server += counted_packets;
            }
        }
        Ok(packets_that_found_server)
    }
}

fn measure_flooded_program(
    flooded_program: FloodedProgram,
    length: &MeasurementLength,
    flooder: &SynFlooder,
) -> anyhow::Result<SynFloodMeasurement> {
    let target = SynFloodTarget::new(flooded_program)?;
    if flooded_program == FloodedProgram::StatefulWithFullTable {
        fill_connection_table(&target.balancer, flooded_program, flooder)?;
    }
    let counters_before = target.balancer.case_packet_counters();
    let mut measurement = SynFloodMeasurement::from_state_before_flood(flooded_program, &target)?;
    let packets_that_found_server = measurement.run_measurement_rounds(&target, length, flooder)?;
    measurement.syn_count_without_entry = count_syns_without_entry(
        &counters_before,
        &target.balancer.case_packet_counters(),
        measurement.flood_counts.syn_count,
    )?;
    measurement.found_connection_entry_fraction =
        packets_that_found_server as f64 / (f64::from(length.rounds) * f64::from(length.packets));
    measurement.memory_before_and_after[1] = target.read_map_memory()?;
    let must_find_servers = flooded_program != FloodedProgram::HashTable;
    ensure!(
        !must_find_servers || measurement.found_connection_entry_fraction == 1.0,
        "only {} of the packets found their server",
        measurement.found_connection_entry_fraction
    );
    Ok(measurement)
}

/// Returns the number of the floods' SYNs that found no free entry. Fails unless each SYN was counted as a first
/// packet.
fn count_syns_without_entry(
    counters_before: &PacketCounters,
    counters_after: &PacketCounters,
    syn_count: u64,
) -> anyhow::Result<u64> {
    let new_connection_counter = intf::LB_COUNTER_NEW_CONNECTION as usize;
    let new_connection_count = counters_after.packets_by_outcome[new_connection_counter]
        - counters_before.packets_by_outcome[new_connection_counter];
    ensure!(
        new_connection_count == syn_count,
        "{new_connection_count} of {syn_count} SYNs were counted as first packets"
    );
    let table_full_event = intf::LB_EVENT_CONNECTION_TABLE_FULL as usize;
    Ok(counters_after.event_counts[table_full_event] - counters_before.event_counts[table_full_event])
}

/// Runs packets of open connections. Returns the mean time per packet (ns), and the number of packets that found their
/// server.
fn run_established_packets(
    balancer: &MeasuredLoadBalancer,
    runner: &PacketRunner,
    measures_lb: bool,
    packet_count: u32,
) -> anyhow::Result<(f64, u64)> {
    if measures_lb {
        balancer.run_and_count_packets(runner, PacketGenerator::VariedFrame, CONNECTION_COUNT as u32)?;
        let run_result = balancer.run_and_count_packets(runner, PacketGenerator::VariedFrame, packet_count)?;
        return Ok((run_result.mean_ns_per_packet, run_result.counted_packet_count));
    }
    let (mean_ns, xdp_verdict) =
        runner.choose_program_and_run(PacketGenerator::VariedFrame, runner.empty_program.as_fd(), packet_count)?;
    ensure!(xdp_verdict == XDP_TX, "the empty program's verdict was {xdp_verdict}, expected {XDP_TX}");
    Ok((mean_ns, 0))
}

/// Floods the program with SYNs until no entry of the connection table is free. Fails if this takes more than 10 s.
fn fill_connection_table(
    balancer: &MeasuredLoadBalancer,
    flooded_program: FloodedProgram,
    flooder: &SynFlooder,
) -> anyhow::Result<()> {
    let entry_count = flooded_program.connection_table_entry_count() as usize;
    for _ in 0..100 {
        flooder.run_during_flood(
            SynFlooderCommand::SynsThroughProgram(balancer.duplicate_program_descriptor()?),
            || {
                std::thread::sleep(std::time::Duration::from_millis(100));
                Ok(())
            },
        )?;
        if balancer.used_table_entry_count() == entry_count {
            return Ok(());
        }
    }
    anyhow::bail!("{} of {entry_count} entries are in use after a flood of 10 s", balancer.used_table_entry_count())
}

/// Returns, for each round, the percentage by which its value in `rounds` exceeds its value in `base_rounds`.
fn excess_percent_by_round(rounds: &[f64], base_rounds: &[f64]) -> NsByRound {
    rounds.iter().zip(base_rounds).map(|(ns, base_ns)| (ns / base_ns - 1.0) * 100.0).collect()
}

const FLOOD_COST_COLUMNS: [&str; 12] = [
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
];

const FLOOD_MEMORY_COLUMNS: [&str; 8] = [
    "memory",
    "connection table: entries in use before",
    "most in use after a flood",
    "free then",
    "entries of hash tables before",
    "after",
    "kernel memory of all maps before, KiB",
    "after ",
];

impl SynFloodMeasurement {
    fn packet_cost_row(&self) -> [ReportTableCell; 12] {
        let excess_pct = excess_percent_by_round(&self.ns_by_program_in_flood[1], &self.ns_by_program_without_flood[1]);
        let [ns_above_empty_without_flood, ns_above_empty_in_flood] =
            [&self.ns_by_program_without_flood, &self.ns_by_program_in_flood]
                .map(|ns_by_program| differences_by_round(&ns_by_program[1], &ns_by_program[0]));
        let excess_above_empty_pct = excess_percent_by_round(&ns_above_empty_in_flood, &ns_above_empty_without_flood);
        let [goal_cell, verdict_cell] =
            goal_and_verdict_cells(Some(FLOOD_EXCESS_COST_GOAL), median_of_rounds(&excess_pct));
        let syn_count = self.flood_counts.syn_count as f64;
        [
            self.flooded_program.to_string().into(),
            median_of_rounds(&self.ns_by_program_without_flood[1]).into(),
            median_of_rounds(&self.ns_by_program_in_flood[1]).into(),
            median_of_rounds(&excess_pct).into(),
            quartile_range_text(&excess_pct).into(),
            goal_cell,
            verdict_cell,
            median_of_rounds(&excess_above_empty_pct).into(),
            quartile_range_text(&excess_above_empty_pct).into(),
            (self.found_connection_entry_fraction * 100.0).into(),
            (syn_count / self.flood_counts.cpu_seconds / 1e6).into(),
            (self.syn_count_without_entry as f64 / syn_count * 100.0).into(),
        ]
    }

    fn map_memory_row(&self) -> [ReportTableCell; 8] {
        let [entries_before, max_entries_after] = self.initial_and_max_used_entries.map(|entries| entries as u64);
        let [memory_before, memory_after] = self.memory_before_and_after;
        [
            self.flooded_program.to_string().into(),
            entries_before.into(),
            max_entries_after.into(),
            (u64::from(self.flooded_program.connection_table_entry_count()) - max_entries_after).into(),
            memory_before.hash_map_entry_count.into(),
            memory_after.hash_map_entry_count.into(),
            (memory_before.kernel_bytes / 1024).into(),
            (memory_after.kernel_bytes / 1024).into(),
        ]
    }
}

fn build_flood_report(
    measurements: &[SynFloodMeasurement],
    length: &MeasurementLength,
    cpus: [usize; 2],
) -> BenchReport {
    let mut cost_table = ReportTable::new(&FLOOD_COST_COLUMNS);
    let mut memory_table = ReportTable::new(&FLOOD_MEMORY_COLUMNS);
    for measurement in measurements {
        cost_table.add_row(measurement.packet_cost_row());
        memory_table.add_row(measurement.map_memory_row());
    }
    let method = describe_measurement_method(length, cpus, &measurements[0].memory_before_and_after[1]);
    BenchReport {
        name: "flood",
        heading: "A SYN flood",
        method_description: method,
        tables: vec![cost_table, memory_table],
    }
}

fn describe_measurement_method(length: &MeasurementLength, cpus: [usize; 2], memory: &BpfMapMemory) -> String {
    let BpfMapMemory { array_map_count: array_count, hash_map_count: hash_count, .. } = memory;
    format!(
        "CPU {} runs lb.bpf.c on packets of {CONNECTION_COUNT} open connections in random order. Meanwhile CPU {} acts \
         as a second receive queue in a SYN flood. It runs the same program, with the same maps, on SYNs of new \
         clients. Each SYN goes to the least loaded candidate core (rule `least_assigned`). In rounds without a flood, \
         CPU {} runs an empty program on the same SYNs. Rounds with and without a flood alternate. Values are medians \
         of {} rounds of each kind, with {} packets per round. {}. The program's maps are {array_count} arrays of \
         fixed size and {hash_count} hash tables, whose entries the second table counts.",
        cpus[0],
        cpus[1],
        cpus[1],
        length.rounds,
        length.packets,
        describe_cpu_topology(cpus),
    )
}

/// Returns a sentence that states whether the two CPUs share a core. In a virtual machine, this is the kernel's view.
fn describe_cpu_topology(cpus: [usize; 2]) -> String {
    let read_thread_siblings = |cpu: usize| {
        std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")).ok()
    };
    let core_relation = match cpus.map(read_thread_siblings) {
        [Some(first_siblings), Some(second_siblings)] if first_siblings == second_siblings => "share a core",
        [Some(_), Some(_)] => "are on different cores",
        _ => "may share a core",
    };
    let is_virtual_machine = std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains(" hypervisor"));
    let virtual_machine_note = if is_virtual_machine { " (in a virtual machine this may be wrong)" } else { "" };
    format!("According to /sys, CPUs {} and {} {core_relation}{virtual_machine_note}", cpus[0], cpus[1])
}
