//! Number of new connections that a server may take: a token bucket. It grows by [`MAX_SHARE_MULTIPLE`] times the
//! server's fair share of opened connections, and shrinks by the connections that the server got. A server whose bucket
//! is empty gets none.

/// Maximum ratio, in the long run, of a server's new connections to its fair share of them.
pub const MAX_SHARE_MULTIPLE: f64 = 2.0;
/// Size of a full allowance as a time: a joining server may take the connections of this many seconds at once.
const WINDOW_SECONDS: f64 = 10.0;
/// Minimum size of a full allowance (connections). Fewer connections would prove nothing about a server.
const MIN_CONNECTIONS: f64 = 64.0;
/// Weight of the newest second in the moving average of the fair share of connections per second.
const EXPECTED_ALPHA: f64 = 0.1;

/// Number of new connections that one server may still take: the fill level of its token bucket.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Allowance {
    remaining: f64,
    /// Moving average of the server's fair share of new connections per second.
    expected_per_second: f64,
    is_limited: bool,
}

impl Allowance {
    /// Returns the full allowance of a server whose fair share is `expected_per_second` connections per second.
    pub fn full(expected_per_second: f64) -> Self {
        Self { remaining: Self::max_allowance(expected_per_second), expected_per_second, is_limited: false }
    }

    fn max_allowance(expected: f64) -> f64 {
        (MAX_SHARE_MULTIPLE * WINDOW_SECONDS * expected).max(MIN_CONNECTIONS)
    }

    /// Updates the allowance after `seconds` (at most 10) with a fair share of `expected` and `opened` opened
    /// connections.
    pub fn update(&mut self, expected: f64, opened: f64, seconds: f64) {
        self.expected_per_second += EXPECTED_ALPHA * (expected - self.expected_per_second * seconds);
        let most = Self::max_allowance(self.expected_per_second);
        self.remaining = (self.remaining + MAX_SHARE_MULTIPLE * expected - opened).clamp(-most, most);
        self.is_limited = self.remaining < if self.is_limited { most / 2.0 } else { 0.0 };
    }

    /// Returns whether the server may take no new connection now.
    pub fn is_spent(&self) -> bool {
        self.remaining < 0.0
    }

    /// Returns whether the server is limited for taking too many connections, until half of the allowance is refilled.
    pub fn is_limited(&self) -> bool {
        self.is_limited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_is_limited_after_the_window_until_half_is_earned() {
        let mut allowance = Allowance::full(100.0);
        let seconds_until = |allowance: &mut Allowance, opened, limited| {
            (1..100).find(|_| {
                allowance.update(100.0, opened, 1.0);
                allowance.is_limited() == limited
            })
        };
        // The allowance is 2,000. It shrinks by 200 a second, then grows by 100 a second.
        assert_eq!(seconds_until(&mut allowance, 400.0, true), Some(11));
        assert_eq!(seconds_until(&mut allowance, 100.0, false), Some(12));
    }

    #[test]
    fn greedy_server_gets_twice_its_fair_share() {
        let mut allowance = Allowance::full(100.0);
        let mut taken = |seconds: u32| {
            let opened = (0..seconds).map(|_| {
                let opened = if allowance.is_spent() { 0.0 } else { 1_000.0 };
                allowance.update(100.0, opened, 1.0);
                opened
            });
            opened.sum::<f64>()
        };
        taken(60);
        assert_eq!(taken(60), 60.0 * MAX_SHARE_MULTIPLE * 100.0);
    }

    #[test]
    fn update_interval_does_not_change_the_allowance() {
        let (mut whole, mut parts) = (Allowance::full(100.0), Allowance::full(100.0));
        for _ in 0..30 {
            whole.update(200.0, 300.0, 1.0);
            (0..4).for_each(|_| parts.update(50.0, 75.0, 0.25));
        }
        assert!((whole.expected_per_second / parts.expected_per_second - 1.0).abs() < 0.01, "{whole:?} {parts:?}");
        assert!((whole.remaining / parts.remaining - 1.0).abs() < 0.01, "{whole:?} {parts:?}");
    }

    #[test]
    fn twice_the_fair_share_is_allowed_permanently() {
        let mut allowance = Allowance::full(100.0);
        for _ in 0..1_000 {
            allowance.update(100.0, MAX_SHARE_MULTIPLE * 100.0, 1.0);
            assert!(!allowance.is_limited());
        }
    }
}
