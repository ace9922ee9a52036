//! `coreward-bench xdp`: what `lb.bpf.c` costs per packet, above an XDP program that does nothing.

mod runner;
mod workload;

use std::os::fd::{AsFd as _, BorrowedFd};

use anyhow::{Context as _, ensure};
use coreward_dataplane::lb::COUNTER_NAMES;
use coreward_model::consistency::Consistency;
use coreward_model::statistics::median;

use crate::report::{Report, Table};
use runner::{PACKETS, Runner};
use workload::{Balancer, Case};

/// How long to measure.
#[derive(clap::Args)]
pub struct Args {
    /// Rounds; in each, all programs of a case run one after the other
    #[arg(long, default_value_t = Self::default().rounds, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Packets per program and round
    #[arg(long, default_value_t = Self::default().packets, value_parser = clap::value_parser!(u32).range(1..))]
    packets: u32,
}

impl Default for Args {
    fn default() -> Self {
        Self { rounds: 15, packets: PACKETS as u32 }
    }
}

impl Args {
    /// So many rounds, each as long as usual.
    pub fn of_rounds(rounds: u32) -> Self {
        Self { rounds, ..Self::default() }
    }
}

/// What packets of open connections cost.
pub struct Cost {
    /// How their server is remembered.
    pub consistency: Consistency,
    /// How many connections there are.
    pub connections: usize,
    /// Above the empty program, round by round.
    pub above_empty_ns: Vec<f64>,
}

/// Measures the cases whose packets are of open connections.
///
/// # Errors
/// As [`run`].
pub fn costs_by_connections(args: &Args, progress: &dyn Fn(usize, usize)) -> anyhow::Result<Vec<Cost>> {
    let cases: Vec<(Case, Consistency, usize)> = Case::all()
        .filter_map(|case| case.open_connections().map(|(consistency, connections)| (case, consistency, connections)))
        .collect();
    let cost = |(done, (case, consistency, connections)): (usize, &(Case, Consistency, usize))| {
        progress(done, cases.len());
        let above_empty_ns = measure(*case, args)?.above_empty_by_round;
        Ok(Cost { consistency: *consistency, connections: *connections, above_empty_ns })
    };
    cases.iter().enumerate().map(cost).collect()
}

/// One case, measured.
struct Measured {
    case: Case,
    /// Medians over the rounds, ns: the empty program, parse and swap MACs, lb.
    medians: [f64; 3],
    /// lb above the empty program, ns: median, and the quartiles over the rounds.
    above_empty: [f64; 3],
    /// The same, round by round.
    above_empty_by_round: Vec<f64>,
    verifier_instructions: u32,
}

/// Measures every case.
///
/// # Errors
/// Without the right to load BPF programs, or when a program does not do what the case expects.
pub fn run(args: &Args) -> anyhow::Result<Report> {
    let measured: Vec<Measured> = Case::all().map(|case| measure(case, args)).collect::<anyhow::Result<_>>()?;
    Ok(report(&measured, args))
}

fn measure(case: Case, args: &Args) -> anyhow::Result<Measured> {
    let balancer = Balancer::new(&case).with_context(|| case.to_string())?;
    let packets = balancer.packets();
    if let Some(frame) = balancer.opening_frame() {
        Runner::new(frame, &packets, false)?.run(balancer.program(), packets.len() as u32)?;
    }
    let runner = Runner::new(balancer.frame(), &packets, case.has_echo())?;
    let programs = [runner.empty.as_fd(), runner.parse_and_swap_macs.as_fd(), balancer.program()];
    let before = balancer.counted();
    let mut rounds: Vec<[f64; 3]> = Vec::new();
    // The first round warms caches and branch predictors, and does not count.
    for round in 0..=args.rounds as usize {
        let mut times = [0.0; 3];
        for step in 0..3 {
            let program = (round + step) % 3;
            times[program] = timed(&runner, programs[program], program == 2, &case, args.packets)?;
        }
        if round > 0 {
            rounds.push(times);
        }
    }
    let expected = u64::from(args.packets) * u64::from(args.rounds + 1);
    let counted = balancer.counted() - before;
    ensure!(
        counted == expected,
        "{case}: {counted} of {expected} packets were counted as {}",
        COUNTER_NAMES[case.counter()]
    );
    let column = |program: usize| median(&rounds.iter().map(|times| times[program]).collect::<Vec<_>>());
    let above: Vec<f64> = rounds.iter().map(|times| times[2] - times[0]).collect();
    Ok(Measured {
        medians: [0, 1, 2].map(|program| column(program).expect("at least one round")),
        above_empty: [0.5, 0.25, 0.75].map(|part| quantile(&above, part)),
        above_empty_by_round: above,
        verifier_instructions: verifier_instructions(balancer.program())?,
        case,
    })
}

fn timed(runner: &Runner, program: BorrowedFd<'_>, is_lb: bool, case: &Case, packets: u32) -> anyhow::Result<f64> {
    let (time, verdict) = runner.run(program, packets)?;
    let expected = if is_lb { case.verdict() } else { workload::XDP_TX };
    ensure!(verdict == expected, "{case}: the last packet's verdict was {verdict}, expected {expected}");
    Ok(time)
}

/// The value below which `part` of the sorted values lie (the nearest one).
fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * part).round() as usize]
}

/// Instructions that the verifier walked through when it loaded the program.
fn verifier_instructions(program: BorrowedFd<'_>) -> anyhow::Result<u32> {
    let id = libbpf_rs::Program::id_from_fd(program).context("the program's id")?;
    let mut programs = libbpf_rs::query::ProgInfoIter::default();
    programs.find(|info| info.id == id).map(|info| info.verified_insns).context("the program is not listed")
}

fn report(measured: &[Measured], args: &Args) -> Report {
    let mut table = Table::new(&[
        "packet",
        "above empty, ns",
        "quartiles",
        "lb, ns",
        "empty, ns",
        "parse + swap MACs, ns",
        "lb / empty",
        "lb / parse + swap",
        "verifier instructions",
    ]);
    for m in measured {
        let [empty, swap, lb] = m.medians;
        let [median, low, high] = m.above_empty;
        table.row([
            m.case.to_string().into(),
            median.into(),
            format!("{low:.1} to {high:.1}").into(),
            lb.into(),
            empty.into(),
            swap.into(),
            (lb / empty).into(),
            (lb / swap).into(),
            m.verifier_instructions.into(),
        ]);
    }
    let about = format!(
        "lb.bpf.c on a fresh packet each time (BPF_PROG_TEST_RUN; the next connection is put into the frame by a program \
         that then calls the measured one). {} rounds of {} packets per program, the three programs of a case one after \
         the other in each round; medians over the rounds. `empty` returns at once; both floors are called in the same \
         way. The frame is in the CPU's cache, as it is behind a NIC that writes there.",
        args.rounds, args.packets
    );
    Report { name: "xdp", title: "The load balancer's program", about, tables: vec![table] }
}
