//! Detects stamped connections that stall, because a device on the path may drop timestamps that run faster than a
//! clock.

/// Number of handshakes after which the detector decides whether to warn.
const HANDSHAKES_PER_STALL_VERDICT: u64 = 200;
/// Fraction of connections that may stall without a warning. It is not 0, because some clients always disappear.
const TOLERATED_STALLED_CONNECTION_FRACTION: f64 = 0.01;

/// Totals of the BPF counters of handshakes and stalls (server.bpf.c).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HandshakeCounters {
    /// Number of stamped SYN-ACKs that were sent for the first time: one for each handshake.
    pub handshake_count: u64,
    /// Number of stalled handshakes: stamped SYN-ACKs that were sent for the fourth time.
    pub stalled_handshake_count: u64,
    /// Number of stalled connections: stamped connections in which one segment was sent for the fifth time.
    pub stalled_connection_count: u64,
}

/// Detector of stalled connections. It compares their number with the number of handshakes, once per 200 handshakes.
#[derive(Debug, Default)]
pub struct ConnectionStallDetector {
    counters_at_window_start: HandshakeCounters,
    stall_warning: Option<String>,
}

impl ConnectionStallDetector {
    /// Returns a detector that ignores the counts in `counters`, which an earlier process has already evaluated.
    pub fn with_baseline(counters: HandshakeCounters) -> Self {
        Self { counters_at_window_start: counters, stall_warning: None }
    }

    /// Evaluates the counters. Returns a warning for `coreward status` if too many connections stalled during the last
    /// 200 or more handshakes that were evaluated.
    pub fn observe_counters(&mut self, counters: HandshakeCounters) -> Option<&str> {
        let handshake_count = counters.handshake_count.saturating_sub(self.counters_at_window_start.handshake_count);
        if handshake_count >= HANDSHAKES_PER_STALL_VERDICT {
            let stalled_handshake_count =
                counters.stalled_handshake_count.saturating_sub(self.counters_at_window_start.stalled_handshake_count);
            let stalled_connection_count = counters
                .stalled_connection_count
                .saturating_sub(self.counters_at_window_start.stalled_connection_count);
            self.stall_warning = ((stalled_handshake_count + stalled_connection_count) as f64
                > TOLERATED_STALLED_CONNECTION_FRACTION * handshake_count as f64)
                .then(|| {
                    format!(
                        "of {handshake_count} stamped connections {stalled_handshake_count} got no answer to four \
                     SYN-ACKs and {stalled_connection_count} none to a segment sent five times: a firewall on the way \
                     may drop their timestamps (the service's timestamps = \"off\" shows whether), or a SYN flood"
                    )
                });
            self.counters_at_window_start = counters;
        }
        self.stall_warning.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stall_warning_requires_more_than_one_percent_stalled_connections() {
        let build_counters = |handshakes, stalled_handshakes, stalled_connections| HandshakeCounters {
            handshake_count: handshakes,
            stalled_handshake_count: stalled_handshakes,
            stalled_connection_count: stalled_connections,
        };
        let mut stall_detector = ConnectionStallDetector::with_baseline(build_counters(1000, 500, 500));
        assert_eq!(stall_detector.observe_counters(build_counters(1100, 600, 500)), None, "the window is not over");
        assert_eq!(stall_detector.observe_counters(build_counters(1200, 501, 501)), None, "one in a hundred");
        let warning = stall_detector.observe_counters(build_counters(1400, 503, 502)).unwrap().to_owned();
        assert!(
            warning.starts_with("of 200 stamped connections 2 got no answer to four SYN-ACKs and 1 none"),
            "{warning}"
        );
        assert_eq!(stall_detector.observe_counters(build_counters(1500, 503, 502)), Some(&warning[..]));
        assert_eq!(stall_detector.observe_counters(build_counters(1700, 503, 502)), None);
    }
}
