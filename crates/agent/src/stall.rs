//! Detection of stalled stamped connections: a device on the path may drop timestamps that run faster than a clock.

/// Number of handshakes in the window of one verdict.
const HANDSHAKES_PER_VERDICT: u64 = 200;
/// Fraction of connections that may stall without a warning: clients disappear all the time.
const TOLERATED_FRACTION: f64 = 0.01;

/// Totals of counters in server.bpf.c.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HandshakeCounters {
    /// Number of stamped SYN-ACKs that were sent for the first time.
    pub handshakes: u64,
    /// Number of stamped SYN-ACKs that were sent for the fourth time.
    pub stalled_handshakes: u64,
    /// Number of stamped connections in which a segment was sent for the fifth time.
    pub stalled_connections: u64,
}

/// Detector of stamped connections that stall, which compares stalls with handshakes, in windows of 200 handshakes.
#[derive(Debug, Default)]
pub struct StallDetector {
    /// Counters at the start of the current window.
    window_start: HandshakeCounters,
    warning: Option<String>,
}

impl StallDetector {
    /// Returns a detector that ignores what was counted before `counts`, by an earlier process.
    pub fn from(counts: HandshakeCounters) -> Self {
        Self { window_start: counts, warning: None }
    }

    /// Evaluates the counters. Returns the warning of the last complete window, as text for `coreward status`.
    pub fn observe(&mut self, counts: HandshakeCounters) -> Option<&str> {
        let handshakes = counts.handshakes.saturating_sub(self.window_start.handshakes);
        if handshakes >= HANDSHAKES_PER_VERDICT {
            let shaking = counts.stalled_handshakes.saturating_sub(self.window_start.stalled_handshakes);
            let talking = counts.stalled_connections.saturating_sub(self.window_start.stalled_connections);
            self.warning = ((shaking + talking) as f64 > TOLERATED_FRACTION * handshakes as f64).then(|| {
                format!(
                    "of {handshakes} stamped connections {shaking} got no answer to four SYN-ACKs and {talking} none \
                     to \
                     a segment sent five times: a firewall on the way may drop their timestamps (the service's \
                     timestamps = \"off\" shows whether), or a SYN flood"
                )
            });
            self.window_start = counts;
        }
        self.warning.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stall_warning_needs_more_than_one_percent() {
        let counts = |handshakes, stalled_handshakes, stalled_connections| HandshakeCounters {
            handshakes,
            stalled_handshakes,
            stalled_connections,
        };
        let mut verifier = StallDetector::from(counts(1000, 500, 500));
        assert_eq!(verifier.observe(counts(1100, 600, 500)), None, "the window is not over");
        assert_eq!(verifier.observe(counts(1200, 501, 501)), None, "one in a hundred");
        let warning = verifier.observe(counts(1400, 503, 502)).unwrap().to_owned();
        assert!(
            warning.starts_with("of 200 stamped connections 2 got no answer to four SYN-ACKs and 1 none"),
            "{warning}"
        );
        assert_eq!(verifier.observe(counts(1500, 503, 502)), Some(&warning[..]));
        assert_eq!(verifier.observe(counts(1700, 503, 502)), None);
    }
}
