//! Times of requests.

use clap::ValueEnum;
use coreward_model::rss::seeded_rng;
use coreward_sim::random::exponential;
use rand_xoshiro::Xoshiro256PlusPlus;

/// Distribution of the gaps between requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Arrivals {
    /// Poisson process: independent, exponential gaps
    Poisson,
    /// Equal gaps
    Fixed,
}

/// The moments at which requests are due, one after the other, from 0 on.
#[derive(Debug)]
pub struct Schedule {
    arrivals: Arrivals,
    mean_gap_ns: f64,
    /// Fractions of a nanosecond add up: at 600,000 requests a second they would be 0.04 % of the rate.
    next_ns: f64,
    rng: Xoshiro256PlusPlus,
}

impl Schedule {
    /// `rate` requests a second, above 0. `purpose`: no two schedules of a seed share random numbers.
    pub fn new(arrivals: Arrivals, rate: f64, seed: u64, purpose: u64) -> Self {
        let mut schedule = Self { arrivals, mean_gap_ns: 1e9 / rate, next_ns: 0.0, rng: seeded_rng(seed, purpose) };
        schedule.advance();
        schedule
    }

    /// Time of the next request (ns since the start).
    pub fn next_ns(&self) -> u64 {
        self.next_ns as u64
    }

    /// On to the one after it.
    pub fn advance(&mut self) {
        self.next_ns += match self.arrivals {
            Arrivals::Poisson => exponential(&mut self.rng) * self.mean_gap_ns,
            Arrivals::Fixed => self.mean_gap_ns,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gaps(arrivals: Arrivals, rate: f64, seed: u64, count: usize) -> Vec<f64> {
        let mut schedule = Schedule::new(arrivals, rate, seed, 1);
        let mut last = 0;
        let gap = |_| {
            let next = schedule.next_ns();
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
            let gaps = gaps(Arrivals::Poisson, rate, seed, count);
            let mean = gaps.iter().sum::<f64>() / count as f64;
            let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / count as f64;
            // Standard errors of 200,000 exponential gaps: 0.22 % of the mean, 0.63 % of the variance. Four of them.
            assert!((mean / mean_ns - 1.0).abs() < 0.009, "mean {mean} of {mean_ns}");
            assert!((variance / mean_ns.powi(2) - 1.0).abs() < 0.026, "variance {variance} of {}", mean_ns.powi(2));
        }
    }

    #[test]
    fn arrivals_in_a_window_have_equal_mean_and_variance() {
        // Index of dispersion 1 is what sets a Poisson process apart from gaps that only look right one by one.
        let mut counts = vec![0.0; 2_000];
        let mut now = 0.0;
        for gap in gaps(Arrivals::Poisson, 1_000.0, 4, 20_000) {
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
        let mut schedule = Schedule::new(Arrivals::Fixed, 600_000.0, 1, 1);
        (1..600_000).for_each(|_| schedule.advance());
        assert!((999_999_999..=1_000_000_001).contains(&schedule.next_ns()), "{}", schedule.next_ns());
    }

    #[test]
    fn seed_determines_the_schedule() {
        let gaps = |seed| gaps(Arrivals::Poisson, 1_000.0, seed, 100);
        assert_eq!(gaps(7), gaps(7));
        assert_ne!(gaps(7), gaps(8));
    }
}
