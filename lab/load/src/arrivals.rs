//! Due times of requests.

use clap::ValueEnum;
use coreward_model::rss::seeded_rng;
use coreward_sim::random::exponential;
use rand_xoshiro::Xoshiro256PlusPlus;

/// Distribution of the gaps between requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ArrivalProcess {
    /// Poisson process: gaps are independent and exponential
    Poisson,
    /// All gaps are equal
    Fixed,
}

/// Generator of the due times of requests, in ascending order from 0.
#[derive(Debug)]
pub struct ArrivalSchedule {
    arrivals: ArrivalProcess,
    mean_gap_ns: f64,
    /// Due time of the next request (ns), a float: truncated to ns, 600,000 requests per second would be off by 0.04 %.
    next_due_ns: f64,
    rng: Xoshiro256PlusPlus,
}

impl ArrivalSchedule {
    /// Creates a schedule of `rate` requests per second (above 0). Schedules of one seed differ by their `purpose`.
    pub fn new(arrivals: ArrivalProcess, rate: f64, seed: u64, purpose: u64) -> Self {
        let mut schedule = Self { arrivals, mean_gap_ns: 1e9 / rate, next_due_ns: 0.0, rng: seeded_rng(seed, purpose) };
        schedule.advance();
        schedule
    }

    /// Returns the due time of the next request, in ns since the start of the schedule.
    pub fn next_due_ns(&self) -> u64 {
        self.next_due_ns as u64
    }

    /// Advances the schedule to the following request.
    pub fn advance(&mut self) {
        self.next_due_ns += match self.arrivals {
            ArrivalProcess::Poisson => exponential(&mut self.rng) * self.mean_gap_ns,
            ArrivalProcess::Fixed => self.mean_gap_ns,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gaps(arrivals: ArrivalProcess, rate: f64, seed: u64, count: usize) -> Vec<f64> {
        let mut schedule = ArrivalSchedule::new(arrivals, rate, seed, 1);
        let mut last = 0;
        let gap = |_| {
            let next = schedule.next_due_ns();
            schedule.advance();
            let gap = next - last;
            last = next;
            gap as f64
        };
        (0..count).map(gap).collect()
    }

    #[test]
    fn poisson_gaps_have_mean_and_variance() {
        for (seed, rate) in [(1, 1_000.0), (2, 50_000.0), (3, 700_000.0)] {
            let (count, mean_ns) = (200_000, 1e9 / rate);
            let gaps = gaps(ArrivalProcess::Poisson, rate, seed, count);
            let mean = gaps.iter().sum::<f64>() / count as f64;
            let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / count as f64;
            // Tolerances are four standard errors; for 200,000 exponential gaps these are 0.22 % (mean) and 0.63 %
            // (variance).
            assert!((mean / mean_ns - 1.0).abs() < 0.009, "mean {mean} of {mean_ns}");
            assert!((variance / mean_ns.powi(2) - 1.0).abs() < 0.026, "variance {variance} of {}", mean_ns.powi(2));
        }
    }

    #[test]
    fn arrivals_in_a_window_have_equal_mean_and_variance() {
        // A Poisson process has an index of dispersion of 1; exponential gaps that depend on each other do not.
        let mut counts = vec![0.0; 2_000];
        let mut now = 0.0;
        for gap in gaps(ArrivalProcess::Poisson, 1_000.0, 4, 20_000) {
            now += gap;
            let window = (now / 10e6) as usize;
            if window < counts.len() {
                counts[window] += 1.0;
            }
        }
        let counts = &counts[..1_900];
        let mean = counts.iter().sum::<f64>() / counts.len() as f64;
        let variance = counts.iter().map(|count| (count - mean).powi(2)).sum::<f64>() / counts.len() as f64;
        // 1,900 windows: the ratio's standard error is sqrt(2 / 1900) = 3.2 %.
        assert!((variance / mean - 1.0).abs() < 0.13, "variance {variance}, mean {mean}");
    }

    #[test]
    fn fixed_gaps_keep_the_rate_to_the_nanosecond() {
        let mut schedule = ArrivalSchedule::new(ArrivalProcess::Fixed, 600_000.0, 1, 1);
        (1..600_000).for_each(|_| schedule.advance());
        assert!((999_999_999..=1_000_000_001).contains(&schedule.next_due_ns()), "{}", schedule.next_due_ns());
    }

    #[test]
    fn seed_determines_the_schedule() {
        let gaps = |seed| gaps(ArrivalProcess::Poisson, 1_000.0, seed, 100);
        assert_eq!(gaps(7), gaps(7));
        assert_ne!(gaps(7), gaps(8));
    }
}
