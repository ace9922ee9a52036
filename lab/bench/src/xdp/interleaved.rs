//! Programs that run in turns, so that what changes on the machine meanwhile touches all of them alike.

use std::os::fd::BorrowedFd;

use anyhow::ensure;
use coreward_model::statistics::median;

use super::balancer::Balancer;
use super::runner::{Feed, Runner};
use super::workload;

/// Measured program.
#[derive(Clone, Copy)]
pub enum Program<'a> {
    /// One that only returns `XDP_TX`.
    Floor(BorrowedFd<'a>),
    /// The load balancer's.
    Balancer(&'a Balancer),
}

/// Part of each round.
#[derive(Clone, Copy)]
pub struct Turn<'a> {
    pub runner: &'a Runner,
    pub feed: Feed,
    pub program: Program<'a>,
}

impl<'a> Turn<'a> {
    /// On fresh packets, with nothing besides.
    pub fn new(runner: &'a Runner, program: Program<'a>) -> Self {
        Self { runner, feed: Feed::Packet, program }
    }

    fn measure(&self, packets: u32) -> anyhow::Result<f64> {
        match self.program {
            Program::Balancer(balancer) => balancer.run(self.runner, self.feed, packets),
            Program::Floor(program) => {
                let (time, verdict) = self.runner.run(self.feed, program, packets)?;
                ensure!(verdict == workload::XDP_TX, "a floor's verdict was {verdict}, expected {}", workload::XDP_TX);
                Ok(time)
            }
        }
    }

    /// Before it is measured each program sees all connections once: other programs have used the caches meanwhile.
    fn warm_up(&self) -> anyhow::Result<()> {
        match self.program {
            // A first packet occurs once.
            Program::Balancer(balancer) if balancer.case().allocates_entries() => Ok(()),
            _ => self.measure(self.runner.connections() as u32).map(drop),
        }
    }
}

/// Time per packet (ns), round by round.
pub type Rounds = Vec<f64>;

/// Measures programs one after the other in each round. Returns what each took in each round. Fails when a program does
/// not do what is expected of it.
pub fn run_interleaved(turns: &[Turn<'_>], rounds: u32, packets: u32) -> anyhow::Result<Vec<Rounds>> {
    interleave(turns.len(), rounds, |position| {
        turns[position].warm_up()?;
        turns[position].measure(packets)
    })
}

/// Measures cases by their positions, one after the other in each round, in an order that shifts by one from round to
/// round. Returns the results of each case by round.
pub fn interleave<T>(
    cases: usize,
    rounds: u32,
    mut measure: impl FnMut(usize) -> anyhow::Result<T>,
) -> anyhow::Result<Vec<Vec<T>>> {
    let mut results: Vec<Vec<T>> = (0..cases).map(|_| Vec::new()).collect();
    // The first round warms branch predictors and does not count.
    for round in 0..=rounds as usize {
        for step in 0..cases {
            let position = (round + step) % cases;
            let result = measure(position)?;
            if round > 0 {
                results[position].push(result);
            }
        }
    }
    Ok(results)
}

/// Difference of `rounds` from `others`, round by round.
pub fn difference(rounds: &[f64], others: &[f64]) -> Rounds {
    rounds.iter().zip(others).map(|(time, other)| time - other).collect()
}

/// Median of at least one round.
pub fn median_of(rounds: &[f64]) -> f64 {
    median(rounds).expect("at least one round")
}

/// Returns the fastest round's time above the fastest of the others. Disturbances only make rounds slower: with shared
/// CPUs (hyperthreads of other guests) this is the cost of the program, and the median includes the machine.
pub fn fastest_difference(rounds: &[f64], others: &[f64]) -> f64 {
    let least = |rounds: &[f64]| rounds.iter().copied().fold(f64::INFINITY, f64::min);
    least(rounds) - least(others)
}

/// Lower and upper quartile.
pub fn quartiles(rounds: &[f64]) -> String {
    quartiles_with(rounds, 1)
}

/// [`quartiles`] with this number of decimals.
pub fn quartiles_with(rounds: &[f64], digits: usize) -> String {
    let [low, high] = [0.25, 0.75].map(|part| quantile(rounds, part));
    format!("{low:.digits$} to {high:.digits$}")
}

/// The value below which `part` of the values lie (the nearest one).
fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * part).round() as usize]
}
