//! Packets of open connections: all modes interleaved, by the number of connections, and the cost of one cache miss.

use std::os::fd::AsFd as _;

use anyhow::Context as _;
use coreward_model::connection_table::TableSize;
use coreward_model::consistency::Consistency;

use super::balancer::{Balancer, CONNECTION_TABLE_ENTRIES};
use super::interleaved::{Program, RoundTimes, Turn, difference, median_of, quartiles, run_interleaved};
use super::runner::{Feed, PACKET_COUNT, Runner};
use super::workload::{Case, clients};
use super::{Args, Measured};
use crate::report::Table;

/// Numbers of open connections for which all modes are measured.
const CONNECTION_COUNTS: [usize; 4] = [1, 1 << 14, 1 << 17, PACKET_COUNT];

/// Costs of all modes with the same number of open connections.
pub struct ConnectionCountResult {
    pub connections: usize,
    pub stateless: Measured,
    pub stateful: Measured,
    pub hash_table: Measured,
    /// Cost of the stateless program above the empty one (ns), while one more cache line is loaded in parallel.
    pub with_line: RoundTimes,
    /// Cost of the stateless program above the empty one (ns), when it must first wait for one more cache line.
    pub after_line: RoundTimes,
}

pub fn measure(args: &Args, progress: &dyn Fn(usize, usize)) -> anyhow::Result<Vec<ConnectionCountResult>> {
    let measure = |(done, connections): (usize, &usize)| {
        progress(done, CONNECTION_COUNTS.len());
        measure_with(*connections, args).with_context(|| format!("{connections} connections"))
    };
    CONNECTION_COUNTS.iter().enumerate().map(measure).collect()
}

fn measure_with(connections: usize, args: &Args) -> anyhow::Result<ConnectionCountResult> {
    let balancer = |consistency| Balancer::new(Case::Established(consistency, connections));
    let stateless = balancer(Consistency::Stateless)?;
    let stateful = balancer(Consistency::Stateful)?;
    let hash_table = balancer(Consistency::HashTable)?;
    let runner = |of: &Balancer| Runner::new(&of.case().frame(), &of.packets()?, 0);
    let (for_stateful, for_hash_table) = (runner(&stateful)?, runner(&hash_table)?);
    let (places, size) = (stateful.entries_by_client(), TableSize::try_from(CONNECTION_TABLE_ENTRIES)?);
    let mut packets = stateless.packets()?;
    for (packet, client) in packets.iter_mut().zip(clients(connections)) {
        packet.line_index = places[&client.into()].position(size);
    }
    let usual = Runner::new(&stateless.case().frame(), &packets, CONNECTION_TABLE_ENTRIES as u32)?;
    let by_cookie = Turn::new(&usual, Program::Balancer(&stateless));
    let times = run_interleaved(
        &[
            Turn::new(&usual, Program::Floor(usual.empty.as_fd())),
            Turn::new(&usual, Program::Floor(usual.parse_and_swap_macs.as_fd())),
            by_cookie,
            Turn { feed: Feed::WithLine, ..by_cookie },
            Turn { feed: Feed::AfterLine, ..by_cookie },
            Turn::new(&for_stateful, Program::Balancer(&stateful)),
            Turn::new(&for_hash_table, Program::Balancer(&hash_table)),
        ],
        args.length.rounds,
        args.length.packets,
    )?;
    let [empty, swap, by_cookie, with_line, after_line, by_index, by_hash] = &times[..] else { unreachable!("seven") };
    Ok(ConnectionCountResult {
        connections,
        stateless: Measured::new(&stateless, [empty, swap, by_cookie])?,
        stateful: Measured::new(&stateful, [empty, swap, by_index])?,
        hash_table: Measured::new(&hash_table, [empty, swap, by_hash])?,
        with_line: difference(with_line, empty),
        after_line: difference(after_line, empty),
    })
}

/// Returns a table with the cost of one cache miss, and the extra costs of the stateful modes over the stateless one.
pub fn table(measured: &[ConnectionCountResult]) -> Table {
    let mut table = Table::new(&[
        "connections",
        "stateless, ns",
        "stateful above it",
        "quartiles",
        "one random 64-byte line of so many, during the packet's work",
        "its quartiles",
        "the same, before the packet's work",
        "its quartiles ",
        "hash-table above it",
    ]);
    for of in measured {
        let stateless = &of.stateless.above_empty;
        let stateful = difference(&of.stateful.above_empty, stateless);
        let hash_table = difference(&of.hash_table.above_empty, stateless);
        let with_line = difference(&of.with_line, stateless);
        let after_line = difference(&of.after_line, stateless);
        table.add_row([
            (of.connections as u64).into(),
            median_of(stateless).into(),
            median_of(&stateful).into(),
            quartiles(&stateful).into(),
            median_of(&with_line).into(),
            quartiles(&with_line).into(),
            median_of(&after_line).into(),
            quartiles(&after_line).into(),
            median_of(&hash_table).into(),
        ]);
    }
    table
}
