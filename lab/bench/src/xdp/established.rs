//! Measures packets of open connections in all modes, for several numbers of connections. Also measures a cache miss's
//! cost.

use std::os::fd::AsFd as _;

use anyhow::Context as _;
use coreward_model::connection_table::ConnectionTableSize;
use coreward_model::consistency::ConsistencyMode;

use super::balancer::{CONNECTION_TABLE_ENTRIES, MeasuredLoadBalancer};
use super::interleaved::{
    InterleavedProgram, MeasuredProgram, NsByRound, differences_by_round, measure_interleaved_programs,
    median_of_rounds, quartile_range_text,
};
use super::runner::{PACKET_COUNT, PacketGenerator, PacketRunner};
use super::workload::{PacketCase, random_client_addresses};
use super::{PacketCaseMeasurement, XdpBenchArgs};
use crate::report::ReportTable;

/// Numbers of open connections for which all modes are measured.
const CONNECTION_COUNTS: [usize; 4] = [1, 1 << 14, 1 << 17, PACKET_COUNT];

/// Costs per packet of all modes with one number of open connections.
pub struct ConnectionCountCosts {
    pub connection_count: usize,
    pub stateless: PacketCaseMeasurement,
    pub stateful: PacketCaseMeasurement,
    pub hash_table: PacketCaseMeasurement,
    /// Cost of the stateless program above the empty one (ns), while the generator also loads a cache line.
    pub ns_with_parallel_cache_line: NsByRound,
    /// Cost of the stateless program above the empty one (ns), with a wait for a cache line from memory.
    pub ns_after_awaited_cache_line: NsByRound,
}

pub fn measure_costs_by_connection_count(
    args: &XdpBenchArgs,
    progress: &dyn Fn(usize, usize),
) -> anyhow::Result<Vec<ConnectionCountCosts>> {
    let measure_with_progress = |(done_count, connection_count): (usize, &usize)| {
        progress(done_count, CONNECTION_COUNTS.len());
        measure_costs_with_connections(*connection_count, args)
            .with_context(|| format!("{connection_count} connections"))
    };
    CONNECTION_COUNTS.iter().enumerate().map(measure_with_progress).collect()
}

fn measure_costs_with_connections(
    connection_count: usize,
    args: &XdpBenchArgs,
) -> anyhow::Result<ConnectionCountCosts> {
    let open_balancer =
        |consistency| MeasuredLoadBalancer::new(PacketCase::EstablishedConnections(consistency, connection_count));
    let stateless = open_balancer(ConsistencyMode::Stateless)?;
    let stateful = open_balancer(ConsistencyMode::Stateful)?;
    let hash_table = open_balancer(ConsistencyMode::HashTable)?;
    let create_runner = |balancer: &MeasuredLoadBalancer| {
        PacketRunner::new(&balancer.case().frame_template(), &balancer.shuffled_packet_variations()?, 0)
    };
    let (stateful_runner, hash_table_runner) = (create_runner(&stateful)?, create_runner(&hash_table)?);
    let stateless_runner = create_runner_with_cache_lines(&stateless, &stateful)?;
    let stateless_program = InterleavedProgram::new(&stateless_runner, MeasuredProgram::LoadBalancer(&stateless));
    let round_times = measure_interleaved_programs(
        &[
            InterleavedProgram::new(
                &stateless_runner,
                MeasuredProgram::Baseline(stateless_runner.empty_program.as_fd()),
            ),
            InterleavedProgram::new(
                &stateless_runner,
                MeasuredProgram::Baseline(stateless_runner.parse_and_swap_program.as_fd()),
            ),
            stateless_program,
            InterleavedProgram { generator: PacketGenerator::WithParallelCacheLine, ..stateless_program },
            InterleavedProgram { generator: PacketGenerator::AfterAwaitedCacheLine, ..stateless_program },
            InterleavedProgram::new(&stateful_runner, MeasuredProgram::LoadBalancer(&stateful)),
            InterleavedProgram::new(&hash_table_runner, MeasuredProgram::LoadBalancer(&hash_table)),
        ],
        args.length.rounds,
        args.length.packets,
    )?;
    let [empty_ns, swap_ns, stateless_ns, parallel_line_ns, after_line_ns, stateful_ns, hash_table_ns] =
        &round_times[..]
    else {
        unreachable!("seven")
    };
    Ok(ConnectionCountCosts {
        connection_count,
        stateless: PacketCaseMeasurement::new(&stateless, [empty_ns, swap_ns, stateless_ns])?,
        stateful: PacketCaseMeasurement::new(&stateful, [empty_ns, swap_ns, stateful_ns])?,
        hash_table: PacketCaseMeasurement::new(&hash_table, [empty_ns, swap_ns, hash_table_ns])?,
        ns_with_parallel_cache_line: differences_by_round(parallel_line_ns, empty_ns),
        ns_after_awaited_cache_line: differences_by_round(after_line_ns, empty_ns),
    })
}

/// Creates a runner that generates the stateless mode's packets. For each packet, it can also load the cache line of
/// the connection's entry in the stateful mode's table.
fn create_runner_with_cache_lines(
    stateless: &MeasuredLoadBalancer,
    stateful: &MeasuredLoadBalancer,
) -> anyhow::Result<PacketRunner> {
    let (entry_by_client, table_size) =
        (stateful.connection_indexes_by_client(), ConnectionTableSize::try_from(CONNECTION_TABLE_ENTRIES)?);
    let mut packets = stateless.shuffled_packet_variations()?;
    for (packet, client) in packets.iter_mut().zip(random_client_addresses(stateless.case().connection_count())) {
        packet.line_index = entry_by_client[&client.into()].position(table_size);
    }
    PacketRunner::new(&stateless.case().frame_template(), &packets, CONNECTION_TABLE_ENTRIES as u32)
}

/// Returns a table with the cost of one cache miss, and the stateful modes' extra costs over the stateless mode.
pub fn costs_by_connection_count_table(costs: &[ConnectionCountCosts]) -> ReportTable {
    let mut table = ReportTable::new(&[
        "connections",
        "stateless, ns",
        "stateful above stateless",
        "quartiles",
        "one more random cache line, in parallel",
        "its quartiles",
        "the same, awaited first",
        "its quartiles ",
        "hash-table above stateless",
    ]);
    for count_costs in costs {
        let stateless_ns = &count_costs.stateless.ns_above_empty_program;
        let stateful_excess_ns = differences_by_round(&count_costs.stateful.ns_above_empty_program, stateless_ns);
        let hash_table_excess_ns = differences_by_round(&count_costs.hash_table.ns_above_empty_program, stateless_ns);
        let parallel_cache_line_ns = differences_by_round(&count_costs.ns_with_parallel_cache_line, stateless_ns);
        let awaited_cache_line_ns = differences_by_round(&count_costs.ns_after_awaited_cache_line, stateless_ns);
        table.add_row([
            (count_costs.connection_count as u64).into(),
            median_of_rounds(stateless_ns).into(),
            median_of_rounds(&stateful_excess_ns).into(),
            quartile_range_text(&stateful_excess_ns).into(),
            median_of_rounds(&parallel_cache_line_ns).into(),
            quartile_range_text(&parallel_cache_line_ns).into(),
            median_of_rounds(&awaited_cache_line_ns).into(),
            quartile_range_text(&awaited_cache_line_ns).into(),
            median_of_rounds(&hash_table_excess_ns).into(),
        ]);
    }
    table
}
