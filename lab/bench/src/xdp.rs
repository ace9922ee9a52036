//! `coreward-lab bench xdp`: cost of `lb.bpf.c` per packet, above an XDP program that does nothing.

mod balancer;
mod established;
pub mod flood;
mod goals;
mod interleaved;
mod runner;
pub mod server;
pub mod throughput;
mod units;
mod workload;

use std::os::fd::AsFd as _;

use anyhow::{Context as _, ensure};

use crate::report::{Report, Table, goal_cells};
use balancer::Balancer;
use established::ConnectionCountResult;
use goals::Goals;
use interleaved::{Program, RoundTimes, Turn, run_interleaved};
pub use interleaved::{difference, fastest_difference, median_of, quartiles};
use runner::{PACKET_COUNT, Runner};
use workload::Case;

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
pub struct Args {
    #[command(flatten)]
    length: MeasurementLength,
    /// Measure only cases whose name contains this text, without the cases of established connections
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

impl Args {
    /// Returns the options of `rounds` rounds, with the default number of packets and all cases.
    pub fn for_rounds(rounds: u32) -> Self {
        Self { length: MeasurementLength { rounds, ..MeasurementLength::default() }, only: None }
    }
}

/// Cost of the packets of open connections, for one program and number of connections.
pub struct Cost {
    /// Mode or baseline program, named by its label in cheetah-5-live.toml.
    pub series: String,
    pub connections: usize,
    /// Cost above the empty program (ns), in the order of the rounds.
    pub above_empty: RoundTimes,
}

/// Measures the cost of packets of open connections, by program and number of connections.
pub fn costs_by_connections(args: &Args, progress: &dyn Fn(usize, usize)) -> anyhow::Result<Vec<Cost>> {
    let mut costs = Vec::new();
    for measured in established::measure(args, progress)? {
        let connections = measured.connections;
        let mut cost = |series, above_empty| costs.push(Cost { series, connections, above_empty });
        cost("stateless and one more line".to_owned(), measured.with_line);
        for mode in [measured.stateless, measured.stateful, measured.hash_table] {
            cost(mode.case.consistency().name(), mode.above_empty);
        }
    }
    Ok(costs)
}

/// Measured times of one case.
struct Measured {
    case: Case,
    /// Median time of the empty program (ns).
    empty: f64,
    /// Cost of the load balancer above the empty program (ns), in the order of the rounds.
    above_empty: RoundTimes,
    /// Difference between the fastest rounds of the load balancer and of the empty program (ns).
    fastest: f64,
    /// Difference between the fastest rounds of parsing and swapping MACs and of the empty program (ns).
    floor: f64,
}

impl Measured {
    /// Evaluates the times of three programs: the empty one, the one that parses and swaps MACs, and the load balancer.
    fn new(balancer: &Balancer, times: [&RoundTimes; 3]) -> anyhow::Result<Self> {
        Ok(Self {
            case: balancer.case(),
            empty: median_of(times[0]),
            above_empty: difference(times[2], times[0]),
            fastest: fastest_difference(times[2], times[0]),
            floor: fastest_difference(times[1], times[0]),
        })
    }
}

/// Measures all selected cases. Fails without the capabilities to load BPF programs, or when a program does not do what
/// the case expects.
pub fn run(args: &Args) -> anyhow::Result<Report> {
    let established = if args.only.is_some() { Vec::new() } else { established::measure(args, &|_, _| {})? };
    let is_selected = |case: &Case| args.only.as_ref().is_none_or(|text| case.to_string().contains(text));
    let alone: Vec<Measured> = Case::measured_alone()
        .filter(is_selected)
        .map(|case| measure_alone(case, args).with_context(|| case.to_string()))
        .collect::<anyhow::Result<_>>()?;
    ensure!(!(established.is_empty() && alone.is_empty()), "no case has {:?} in its name", args.only);
    let units = if args.only.is_some() { None } else { Some(units::measure(&args.length)?) };
    Ok(report(&established, &alone, units, args))
}

fn measure_alone(case: Case, args: &Args) -> anyhow::Result<Measured> {
    let balancer = Balancer::new(case)?;
    let runner = Runner::new(&case.frame(), &balancer.packets()?, 0)?;
    let turns = [
        Program::Floor(runner.empty.as_fd()),
        Program::Floor(runner.parse_and_swap_macs.as_fd()),
        Program::Balancer(&balancer),
    ];
    let times = run_interleaved(
        &turns.map(|program| Turn { feed: case.feed(), ..Turn::new(&runner, program) }),
        args.length.rounds,
        args.length.packets,
    )?;
    Measured::new(&balancer, [&times[0], &times[1], &times[2]])
}

fn report(established: &[ConnectionCountResult], alone: &[Measured], units: Option<Table>, args: &Args) -> Report {
    let goals = Goals::new(established, alone);
    let tables = [costs(established, alone, &goals), established::table(established)];
    Report {
        name: "xdp",
        title: "The load balancer's program",
        about: about(args, goals.floor),
        tables: tables.into_iter().chain(units).collect(),
    }
}

fn costs(established: &[ConnectionCountResult], alone: &[Measured], goals: &Goals<'_>) -> Table {
    let mut table = Table::new(&[
        "packet",
        "above empty, ns",
        "quartiles",
        "fastest rounds",
        "goal",
        "verdict",
        "multiple of parse + swap",
        "empty, ns",
    ]);
    let modes: [fn(&ConnectionCountResult) -> &Measured; 3] =
        [|of| &of.stateless, |of| &of.stateful, |of| &of.hash_table];
    let by_mode = modes.into_iter().flat_map(|mode| established.iter().map(mode));
    for m in by_mode.chain(alone) {
        let [goal, verdict] = goal_cells(goals.goal_of(m.case), m.fastest);
        table.add_row([
            m.case.to_string().into(),
            median_of(&m.above_empty).into(),
            quartiles(&m.above_empty).into(),
            m.fastest.into(),
            goal,
            verdict,
            (m.fastest / goals.floor).into(),
            m.empty.into(),
        ]);
    }
    table
}

fn about(args: &Args, floor: f64) -> String {
    format!(
        "lb.bpf.c on a fresh packet each time (BPF_PROG_TEST_RUN; a program puts the next connection into the frame \
         and calls the measured one). {} rounds of {} packets per program, interleaved, after a warm-up by all \
         connections; medians over the rounds. `fastest rounds`: the fastest of lb above the fastest of `empty`, \
         compared with the goal. `multiple of parse + swap`: `fastest rounds` divided by that of `parse + swap MACs` \
         (median of all cases: {floor:.1} ns). The frame is in the CPU's cache. Packets of open connections come in \
         random order with valid cookies. stateful has a table of {} entries, hash-table one of {}. A first packet of \
         stateful takes an entry. All are freed between the rounds, or after the given number; the first quarter \
         after that is not measured (cold caches). The last table has single operations, 64 in a row.",
        args.length.rounds,
        args.length.packets,
        balancer::CONNECTION_TABLE_ENTRIES,
        balancer::FLOW_TABLE_ENTRIES,
    )
}
