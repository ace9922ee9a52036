//! How often packets may go to all servers: the generic cell rate algorithm (ITU-T I.371, Annex A), one word of state.

/// How many packets are let through. Both in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// One token per interval.
    pub interval_ns: u64,
    /// How far tokens may be taken ahead of time.
    pub burst_ns: u64,
}

/// The state of one service's token bucket.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bucket {
    /// When the last token taken is paid for (ns).
    pub paid_until: u64,
}

impl Bucket {
    /// Whether there is a token; takes it.
    pub fn take(&mut self, rate: Rate, now_ns: u64) -> bool {
        let start = self.paid_until.max(now_ns);
        if start - now_ns > rate.burst_ns {
            return false;
        }
        self.paid_until = start.wrapping_add(rate.interval_ns);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_the_rate() {
        let rate = Rate { interval_ns: 10, burst_ns: 20 };
        let mut bucket = Bucket::default();
        let taken = |bucket: &mut Bucket, now| (0..5).filter(|_| bucket.take(rate, now)).count();
        assert_eq!(taken(&mut bucket, 1000), 3);
        assert_eq!(taken(&mut bucket, 1009), 0);
        assert_eq!(taken(&mut bucket, 1010), 1);
        assert_eq!(taken(&mut bucket, 5000), 3);
    }
}
