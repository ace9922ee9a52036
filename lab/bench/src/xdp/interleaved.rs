//! Interleaves the runs of several programs, so that changes of the machine affect all of them alike.

use std::os::fd::BorrowedFd;

use anyhow::ensure;
use coreward_model::statistics::median;

use super::balancer::MeasuredLoadBalancer;
use super::runner::{PacketGenerator, PacketRunner};
use super::workload;

/// XDP program whose time is measured.
#[derive(Clone, Copy)]
pub enum MeasuredProgram<'a> {
    /// Baseline program, which returns `XDP_TX` for every packet.
    Baseline(BorrowedFd<'a>),
    /// Program of the load balancer, with the results that its case expects.
    LoadBalancer(&'a MeasuredLoadBalancer),
}

/// Program that is measured once in each round, with the generator of its packets.
#[derive(Clone, Copy)]
pub struct InterleavedProgram<'a> {
    pub runner: &'a PacketRunner,
    pub generator: PacketGenerator,
    pub program: MeasuredProgram<'a>,
}

impl<'a> InterleavedProgram<'a> {
    /// Returns a program whose packets are variations of the runner's frame, without loads of extra cache lines.
    pub fn new(runner: &'a PacketRunner, program: MeasuredProgram<'a>) -> Self {
        Self { runner, generator: PacketGenerator::VariedFrame, program }
    }

    fn measure_ns_per_packet(&self, packet_count: u32) -> anyhow::Result<f64> {
        match self.program {
            MeasuredProgram::LoadBalancer(balancer) => {
                balancer.run_packet_batches(self.runner, self.generator, packet_count)
            }
            MeasuredProgram::Baseline(program) => {
                let (mean_ns, xdp_verdict) =
                    self.runner.choose_program_and_run(self.generator, program, packet_count)?;
                ensure!(
                    xdp_verdict == workload::XDP_TX,
                    "a floor's verdict was {xdp_verdict}, expected {}",
                    workload::XDP_TX
                );
                Ok(mean_ns)
            }
        }
    }

    /// Runs packets of all connections through the program before its measurement, because other programs have evicted
    /// its data from the caches.
    fn warm_up_caches(&self) -> anyhow::Result<()> {
        match self.program {
            // The SYN of a new connection cannot be repeated.
            MeasuredProgram::LoadBalancer(balancer) if balancer.case().takes_connection_entries() => Ok(()),
            _ => self.measure_ns_per_packet(self.runner.connection_count() as u32).map(drop),
        }
    }
}

/// Mean times per packet (ns), in the order of the rounds.
pub type NsByRound = Vec<f64>;

/// Measures all programs one after the other in each round. Returns the times of each program, in the order of the
/// rounds. Fails when a program returns an unexpected result.
pub fn measure_interleaved_programs(
    programs: &[InterleavedProgram<'_>],
    rounds: u32,
    packet_count: u32,
) -> anyhow::Result<Vec<NsByRound>> {
    interleave_measurements(programs.len(), rounds, |program_index| {
        programs[program_index].warm_up_caches()?;
        programs[program_index].measure_ns_per_packet(packet_count)
    })
}

/// Measures all cases one after the other in each round, in an order that shifts by one per round. Returns the results
/// of each case, in the order of the rounds.
pub fn interleave_measurements<T>(
    case_count: usize,
    rounds: u32,
    mut measure: impl FnMut(usize) -> anyhow::Result<T>,
) -> anyhow::Result<Vec<Vec<T>>> {
    let mut results: Vec<Vec<T>> = (0..case_count).map(|_| Vec::new()).collect();
    // The first round only warms branch predictors and is not counted.
    for round in 0..=rounds as usize {
        for step in 0..case_count {
            let case_index = (round + step) % case_count;
            let result = measure(case_index)?;
            if round > 0 {
                results[case_index].push(result);
            }
        }
    }
    Ok(results)
}

/// Returns the value in `rounds` minus the value in `subtracted_rounds` for each round.
pub fn differences_by_round(rounds: &[f64], subtracted_rounds: &[f64]) -> NsByRound {
    rounds.iter().zip(subtracted_rounds).map(|(ns, subtracted_ns)| ns - subtracted_ns).collect()
}

/// Returns the median of the values of all rounds. Panics when there are no rounds.
pub fn median_of_rounds(rounds: &[f64]) -> f64 {
    median(rounds).expect("at least one round")
}

/// Returns the time of the fastest of `rounds` minus that of the fastest of `subtracted_rounds`. Other guests on shared
/// CPUs can only slow rounds down, so this difference is the program's cost. The median would include the machine's
/// load.
pub fn difference_of_fastest_rounds(rounds: &[f64], subtracted_rounds: &[f64]) -> f64 {
    let fastest_round = |rounds: &[f64]| rounds.iter().copied().fold(f64::INFINITY, f64::min);
    fastest_round(rounds) - fastest_round(subtracted_rounds)
}

/// Returns the lower and the upper quartile of the rounds' values, with one decimal, as "LOWER to UPPER".
pub fn quartile_range_text(rounds: &[f64]) -> String {
    quartile_range_text_with_decimals(rounds, 1)
}

/// Returns the text of [`quartile_range_text`], but with `decimal_count` decimals.
pub fn quartile_range_text_with_decimals(rounds: &[f64], decimal_count: usize) -> String {
    let [lower_quartile, upper_quartile] = [0.25, 0.75].map(|fraction| element_nearest_to_quantile(rounds, fraction));
    format!("{lower_quartile:.decimal_count$} to {upper_quartile:.decimal_count$}")
}

/// Returns the quantile `fraction` (0 to 1) of `values`, without interpolation between elements.
fn element_nearest_to_quantile(values: &[f64], fraction: f64) -> f64 {
    let mut sorted_values = values.to_vec();
    sorted_values.sort_by(f64::total_cmp);
    sorted_values[((sorted_values.len() - 1) as f64 * fraction).round() as usize]
}
