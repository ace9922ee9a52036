//! Command `coreward-lab bench xdp`. It measures the cost of `lb.bpf.c` per packet, above an XDP program that does
//! nothing.

mod balancer;
mod established;
pub mod flood;
mod goals;
mod interleaved;
mod operation_times;
mod runner;
pub mod server;
pub mod throughput;
mod workload;

use std::os::fd::AsFd as _;

use anyhow::{Context as _, ensure};

use crate::report::{BenchReport, ReportTable, goal_and_verdict_cells};
use balancer::MeasuredLoadBalancer;
use established::ConnectionCountCosts;
use goals::PacketCostGoals;
use interleaved::{InterleavedProgram, MeasuredProgram, NsByRound, measure_interleaved_programs};
pub use interleaved::{difference_of_fastest_rounds, differences_by_round, median_of_rounds, quartile_range_text};
use runner::{PACKET_COUNT, PacketRunner};
use workload::PacketCase;

/// Number of rounds and packets of a measurement.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct MeasurementLength {
    /// Number of rounds; in each, all programs of a case run one after the other
    #[arg(long, default_value_t = Self::default().rounds, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of packets per program and round
    #[arg(long, default_value_t = Self::default().packets, value_parser = clap::value_parser!(u32).range(1..))]
    packets: u32,
}

impl Default for MeasurementLength {
    fn default() -> Self {
        Self { rounds: 15, packets: PACKET_COUNT as u32 }
    }
}

/// Length of the measurement, and selection of its cases.
#[derive(Default, clap::Args)]
pub struct XdpBenchArgs {
    #[command(flatten)]
    length: MeasurementLength,
    /// Measure only cases whose name contains this text; omits the tables of established connections and operations
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

impl XdpBenchArgs {
    /// Returns the options for `rounds` rounds, with the default number of packets and all cases.
    pub fn with_round_count(rounds: u32) -> Self {
        Self { length: MeasurementLength { rounds, ..MeasurementLength::default() }, only: None }
    }
}

/// Cost of packets on open connections, for one program and one number of connections.
pub struct PacketCostByConnections {
    /// Label of the mode or baseline program in cheetah-5-live.toml.
    pub series_label: String,
    pub connection_count: usize,
    /// Cost per packet minus that of the empty program (ns), in the order of the rounds.
    pub ns_above_empty_program: NsByRound,
}

/// Measures the cost of packets on open connections, by program and number of connections.
pub fn measure_packet_costs_by_connections(
    args: &XdpBenchArgs,
    progress: &dyn Fn(usize, usize),
) -> anyhow::Result<Vec<PacketCostByConnections>> {
    let mut connection_costs = Vec::new();
    for count_costs in established::measure_costs_by_connection_count(args, progress)? {
        let connection_count = count_costs.connection_count;
        let mut add_connection_cost = |series, above_empty| {
            connection_costs.push(PacketCostByConnections {
                series_label: series,
                connection_count,
                ns_above_empty_program: above_empty,
            })
        };
        add_connection_cost("stateless and one more line".to_owned(), count_costs.ns_with_parallel_cache_line);
        for mode_measurement in [count_costs.stateless, count_costs.stateful, count_costs.hash_table] {
            add_connection_cost(mode_measurement.case.consistency().name(), mode_measurement.ns_above_empty_program);
        }
    }
    Ok(connection_costs)
}

struct PacketCaseMeasurement {
    case: PacketCase,
    /// Median time per packet of the empty program (ns).
    empty_program_ns: f64,
    /// Cost of the load balancer per packet minus that of the empty program (ns), in the order of the rounds.
    ns_above_empty_program: NsByRound,
    /// Time per packet in the load balancer's fastest round minus the time per packet in the empty program's fastest
    /// round (ns).
    fastest_ns_above_empty_program: f64,
    /// Time per packet (ns) in the fastest round of the program that parses and swaps MACs, minus that of the empty
    /// program.
    parse_and_swap_ns: f64,
}

impl PacketCaseMeasurement {
    /// Evaluates the times of three programs: the empty one, the one that parses and swaps MACs, and the load balancer.
    fn new(balancer: &MeasuredLoadBalancer, round_times: [&NsByRound; 3]) -> anyhow::Result<Self> {
        Ok(Self {
            case: balancer.case(),
            empty_program_ns: median_of_rounds(round_times[0]),
            ns_above_empty_program: differences_by_round(round_times[2], round_times[0]),
            fastest_ns_above_empty_program: difference_of_fastest_rounds(round_times[2], round_times[0]),
            parse_and_swap_ns: difference_of_fastest_rounds(round_times[1], round_times[0]),
        })
    }
}

/// Measures all selected cases of the bench. Fails without the capabilities to load BPF programs, or when a program
/// does not do what the case expects.
pub fn run_xdp_bench(args: &XdpBenchArgs) -> anyhow::Result<BenchReport> {
    let established_costs = if args.only.is_some() {
        Vec::new()
    } else {
        established::measure_costs_by_connection_count(args, &|_, _| {})?
    };
    let is_selected_case = |case: &PacketCase| args.only.as_ref().is_none_or(|text| case.to_string().contains(text));
    let separate_cases: Vec<PacketCaseMeasurement> = PacketCase::separately_measured_cases()
        .filter(is_selected_case)
        .map(|case| measure_case_separately(case, args).with_context(|| case.to_string()))
        .collect::<anyhow::Result<_>>()?;
    ensure!(!(established_costs.is_empty() && separate_cases.is_empty()), "no case has {:?} in its name", args.only);
    let operation_table =
        if args.only.is_some() { None } else { Some(operation_times::measure_bpf_operations(&args.length)?) };
    Ok(build_xdp_report(&established_costs, &separate_cases, operation_table, args))
}

fn measure_case_separately(case: PacketCase, args: &XdpBenchArgs) -> anyhow::Result<PacketCaseMeasurement> {
    let balancer = MeasuredLoadBalancer::new(case)?;
    let runner = PacketRunner::new(&case.frame_template(), &balancer.shuffled_packet_variations()?, 0)?;
    let programs = [
        MeasuredProgram::Baseline(runner.empty_program.as_fd()),
        MeasuredProgram::Baseline(runner.parse_and_swap_program.as_fd()),
        MeasuredProgram::LoadBalancer(&balancer),
    ];
    let round_times = measure_interleaved_programs(
        &programs.map(|program| InterleavedProgram {
            generator: case.packet_generator(),
            ..InterleavedProgram::new(&runner, program)
        }),
        args.length.rounds,
        args.length.packets,
    )?;
    PacketCaseMeasurement::new(&balancer, [&round_times[0], &round_times[1], &round_times[2]])
}

fn build_xdp_report(
    established_costs: &[ConnectionCountCosts],
    separate_cases: &[PacketCaseMeasurement],
    operation_table: Option<ReportTable>,
    args: &XdpBenchArgs,
) -> BenchReport {
    let cost_goals = PacketCostGoals::new(established_costs, separate_cases);
    let tables = [
        packet_cost_table(established_costs, separate_cases, &cost_goals),
        established::costs_by_connection_count_table(established_costs),
    ];
    BenchReport {
        name: "xdp",
        heading: "The load balancer's program",
        method_description: describe_measurement_method(args, cost_goals.parse_and_swap_ns),
        tables: tables.into_iter().chain(operation_table).collect(),
    }
}

fn packet_cost_table(
    established_costs: &[ConnectionCountCosts],
    separate_cases: &[PacketCaseMeasurement],
    goals: &PacketCostGoals<'_>,
) -> ReportTable {
    let mut table = ReportTable::new(&[
        "packet",
        "above empty, ns",
        "quartiles",
        "fastest rounds",
        "goal",
        "verdict",
        "multiple of parse + swap",
        "empty, ns",
    ]);
    let measurement_of_mode: [fn(&ConnectionCountCosts) -> &PacketCaseMeasurement; 3] =
        [|count_costs| &count_costs.stateless, |of| &of.stateful, |of| &of.hash_table];
    let established_cases =
        measurement_of_mode.into_iter().flat_map(|to_measurement| established_costs.iter().map(to_measurement));
    for measurement in established_cases.chain(separate_cases) {
        let [goal_cell, verdict_cell] =
            goal_and_verdict_cells(goals.goal_for_case(measurement.case), measurement.fastest_ns_above_empty_program);
        table.add_row([
            measurement.case.to_string().into(),
            median_of_rounds(&measurement.ns_above_empty_program).into(),
            quartile_range_text(&measurement.ns_above_empty_program).into(),
            measurement.fastest_ns_above_empty_program.into(),
            goal_cell,
            verdict_cell,
            (measurement.fastest_ns_above_empty_program / goals.parse_and_swap_ns).into(),
            measurement.empty_program_ns.into(),
        ]);
    }
    table
}

fn describe_measurement_method(args: &XdpBenchArgs, parse_and_swap_ns: f64) -> String {
    format!(
        "BPF_PROG_TEST_RUN runs a program that writes the next connection's address, ports and timestamp into the \
         frame, then calls lb.bpf.c. Values are medians of {} interleaved rounds of {} packets. Before each \
         measurement one packet of each connection warms the caches, except where SYNs take table entries. The column \
         `fastest rounds`, to which the goal applies, is the time per packet in the fastest round, minus that of an \
         empty program. The column `multiple of parse + swap` is `fastest rounds` divided by the floor (median over \
         all rows: {parse_and_swap_ns:.1} ns). Packets of open connections come in random order with \
         valid cookies. For open connections the mode `stateful` has a table of {} entries, the mode `hash-table` one \
         of {}. In mode `stateful` the first packet of each connection takes an entry. These entries are freed after \
         each round, or in rows `N entries` after N packets. Freeing leaves cold caches, so the first quarter of the \
         packets after it is not measured. In the last table, a run repeats each operation 64 times.",
        args.length.rounds,
        args.length.packets,
        balancer::CONNECTION_TABLE_ENTRIES,
        balancer::FLOW_TABLE_ENTRIES,
    )
}
