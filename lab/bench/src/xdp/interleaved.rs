//! Interleaved runs of programs, so that changes of the machine affect all of them alike.

use std::os::fd::BorrowedFd;

use anyhow::ensure;
use coreward_model::statistics::median;

use super::balancer::Balancer;
use super::runner::{Feed, Runner};
use super::workload;

/// XDP program whose time is measured.
#[derive(Clone, Copy)]
pub enum Program<'a> {
    /// Baseline program, which returns `XDP_TX` for every packet.
    Floor(BorrowedFd<'a>),
    /// Program of the load balancer, with its expectations of the packets.
    Balancer(&'a Balancer),
}

/// Program that is measured once in each round, with the generator of its packets.
#[derive(Clone, Copy)]
pub struct Turn<'a> {
    pub runner: &'a Runner,
    pub feed: Feed,
    pub program: Program<'a>,
}

impl<'a> Turn<'a> {
    /// Returns a program that is run on varied frames without extra cache lines.
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

    /// Runs packets of all connections through the program before its measurement, because other programs have evicted
    /// its cache lines.
    fn warm_up(&self) -> anyhow::Result<()> {
        match self.program {
            // A new connection cannot be repeated.
            Program::Balancer(balancer) if balancer.case().allocates_entries() => Ok(()),
            _ => self.measure(self.runner.connections() as u32).map(drop),
        }
    }
}

/// Mean times per packet (ns), in the order of the rounds.
pub type RoundTimes = Vec<f64>;

/// Measures all programs one after the other in each round. Returns the times of each program, in the order of the
/// rounds. Fails when a program misbehaves.
pub fn run_interleaved(turns: &[Turn<'_>], rounds: u32, packets: u32) -> anyhow::Result<Vec<RoundTimes>> {
    interleave(turns.len(), rounds, |position| {
        turns[position].warm_up()?;
        turns[position].measure(packets)
    })
}

/// Measures all cases one after the other in each round, in an order that shifts by one per round. Returns the results
/// of each case, in the order of the rounds.
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

/// Returns each of `rounds` minus the same round of `others`.
pub fn difference(rounds: &[f64], others: &[f64]) -> RoundTimes {
    rounds.iter().zip(others).map(|(time, other)| time - other).collect()
}

/// Returns the median of the rounds. Panics when there is none.
pub fn median_of(rounds: &[f64]) -> f64 {
    median(rounds).expect("at least one round")
}

/// Returns the time of the fastest of `rounds` minus that of the fastest of `others`. Disturbances by guests on shared
/// CPUs only make rounds slower. Therefore this is the program's cost, whereas the median includes the machine's load.
pub fn fastest_difference(rounds: &[f64], others: &[f64]) -> f64 {
    let least = |rounds: &[f64]| rounds.iter().copied().fold(f64::INFINITY, f64::min);
    least(rounds) - least(others)
}

/// Returns the lower and the upper quartile with one decimal, as "LOWER to UPPER".
pub fn quartiles(rounds: &[f64]) -> String {
    quartiles_with(rounds, 1)
}

/// Returns the lower and the upper quartile like [`quartiles`], with `digits` decimals.
pub fn quartiles_with(rounds: &[f64], digits: usize) -> String {
    let [low, high] = [0.25, 0.75].map(|part| quantile(rounds, part));
    format!("{low:.digits$} to {high:.digits$}")
}

/// Returns the value nearest to the quantile `part` (0 to 1) of the values.
fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * part).round() as usize]
}
