//! Schedules that decide when each request is due.

use clap::ValueEnum;
use coreward_model::rss::seeded_rng;
use coreward_sim::random::draw_exponential;
use rand_xoshiro::Xoshiro256PlusPlus;

/// Distribution of the gaps between requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RequestArrivalProcess {
    /// Poisson process: gaps are independent and exponential
    Poisson,
    /// All gaps are equal
    Fixed,
}

/// Generator of the times at which requests are due, in ascending order from 0.
#[derive(Debug)]
pub struct RequestArrivalSchedule {
    arrival_process: RequestArrivalProcess,
    mean_gap_ns: f64,
    /// Due time of the next request (ns). It is a float, because truncation to whole ns would change a rate of 600,000
    /// requests per second by 0.04 %.
    next_due_ns: f64,
    rng: Xoshiro256PlusPlus,
}

impl RequestArrivalSchedule {
    /// Creates a schedule with `requests_per_second`, which must be above 0. Schedules with the same `seed` differ if
    /// they differ in `rng_stream`.
    pub fn new(arrivals: RequestArrivalProcess, requests_per_second: f64, seed: u64, rng_stream: u64) -> Self {
        let mut schedule = Self {
            arrival_process: arrivals,
            mean_gap_ns: 1e9 / requests_per_second,
            next_due_ns: 0.0,
            rng: seeded_rng(seed, rng_stream),
        };
        schedule.advance_to_next_request();
        schedule
    }

    /// Returns the due time of the next request, in ns since the start of the schedule.
    pub fn next_due_ns(&self) -> u64 {
        self.next_due_ns as u64
    }

    /// Advances the schedule to the following request.
    pub fn advance_to_next_request(&mut self) {
        self.next_due_ns += match self.arrival_process {
            RequestArrivalProcess::Poisson => draw_exponential(&mut self.rng) * self.mean_gap_ns,
            RequestArrivalProcess::Fixed => self.mean_gap_ns,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrival_gaps_ns(
        arrivals: RequestArrivalProcess,
        requests_per_second: f64,
        seed: u64,
        gap_count: usize,
    ) -> Vec<f64> {
        let mut schedule = RequestArrivalSchedule::new(arrivals, requests_per_second, seed, 1);
        let mut last_due_ns = 0;
        let compute_next_gap = |_| {
            let due_ns = schedule.next_due_ns();
            schedule.advance_to_next_request();
            let gap_ns = due_ns - last_due_ns;
            last_due_ns = due_ns;
            gap_ns as f64
        };
        (0..gap_count).map(compute_next_gap).collect()
    }

    #[test]
    fn poisson_gaps_have_the_mean_and_variance_of_an_exponential_distribution() {
        for (seed, rate) in [(1, 1_000.0), (2, 50_000.0), (3, 700_000.0)] {
            let (count, mean_ns) = (200_000, 1e9 / rate);
            let gaps = arrival_gaps_ns(RequestArrivalProcess::Poisson, rate, seed, count);
            let mean = gaps.iter().sum::<f64>() / count as f64;
            let variance = gaps.iter().map(|gap_ns| (gap_ns - mean).powi(2)).sum::<f64>() / count as f64;
            // The tolerances are four standard errors. 200,000 exponential gaps have standard errors of 0.22 % (mean)
            // and 0.63 % (variance).
            assert!((mean / mean_ns - 1.0).abs() < 0.009, "mean {mean} of {mean_ns}");
            assert!((variance / mean_ns.powi(2) - 1.0).abs() < 0.026, "variance {variance} of {}", mean_ns.powi(2));
        }
    }

    #[test]
    fn numbers_of_poisson_arrivals_per_window_have_equal_mean_and_variance() {
        // A Poisson process has an index of dispersion of 1, unlike a process whose exponential gaps depend on each
        // other.
        let mut arrival_counts_by_window = vec![0.0; 2_000];
        let mut arrival_ns = 0.0;
        for gap_ns in arrival_gaps_ns(RequestArrivalProcess::Poisson, 1_000.0, 4, 20_000) {
            arrival_ns += gap_ns;
            let window_index = (arrival_ns / 10e6) as usize;
            if window_index < arrival_counts_by_window.len() {
                arrival_counts_by_window[window_index] += 1.0;
            }
        }
        let complete_window_counts = &arrival_counts_by_window[..1_900];
        let mean = complete_window_counts.iter().sum::<f64>() / complete_window_counts.len() as f64;
        let variance = complete_window_counts.iter().map(|count| (count - mean).powi(2)).sum::<f64>()
            / complete_window_counts.len() as f64;
        // The tolerance is four standard errors. The ratio's standard error is sqrt(2 / 1900) = 3.2 % for 1,900
        // windows.
        assert!((variance / mean - 1.0).abs() < 0.13, "variance {variance}, mean {mean}");
    }

    #[test]
    fn sum_of_fixed_gaps_has_an_error_of_at_most_one_nanosecond() {
        let mut schedule = RequestArrivalSchedule::new(RequestArrivalProcess::Fixed, 600_000.0, 1, 1);
        (1..600_000).for_each(|_| schedule.advance_to_next_request());
        assert!((999_999_999..=1_000_000_001).contains(&schedule.next_due_ns()), "{}", schedule.next_due_ns());
    }

    #[test]
    fn equal_seeds_give_equal_schedules_and_other_seeds_do_not() {
        let gaps_of_seed = |seed| arrival_gaps_ns(RequestArrivalProcess::Poisson, 1_000.0, seed, 100);
        assert_eq!(gaps_of_seed(7), gaps_of_seed(7));
        assert_ne!(gaps_of_seed(7), gaps_of_seed(8));
    }
}
