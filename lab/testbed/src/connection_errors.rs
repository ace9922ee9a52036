//! Connection failures as clients observe them.

use std::io;
use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

/// Time without expected data after which a client counts its connection as timed out (ns). TCP has retransmitted at
/// least seven times by then. The time is long, because bursts of broadcasts on one busy CPU delayed connections by
/// more than 10 s (docs/limits.md).
pub const CONNECTION_DATA_TIMEOUT_NS: u64 = 30_000_000_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct BrokenConnectionCounts {
    /// Number of refused connections. The server that got the SYN had no listening socket.
    pub refused: u64,
    /// Number of established connections that ended with an RST, for example after a packet to a wrong server.
    pub reset: u64,
    /// Number of connections that expected data but got none for [`CONNECTION_DATA_TIMEOUT_NS`], or that TCP timed out.
    pub timed_out: u64,
    /// Number of connections that ended with a FIN before the last response.
    pub closed_early: u64,
    /// Number of connections that got a response to a different request, or from another server or core than before.
    pub wrong_answer: u64,
    /// Number of connections with other errors, such as a missing route.
    pub other_errors: u64,
}

impl BrokenConnectionCounts {
    pub fn total_count(&self) -> u64 {
        let Self { refused, reset, timed_out, closed_early, wrong_answer, other_errors: other } = self;
        refused + reset + timed_out + closed_early + wrong_answer + other
    }
    /// Counts a failed connection by the kind of its failure. Logs an unexpected failure with the index of the
    /// connection.
    pub(crate) fn count_failure(&mut self, failure: &ConnectionFailure, connection_index: usize) {
        let failure_count = match failure {
            ConnectionFailure::ClosedEarly => &mut self.closed_early,
            ConnectionFailure::WrongAnswer => &mut self.wrong_answer,
            ConnectionFailure::Io(error) => match error.kind() {
                io::ErrorKind::ConnectionRefused => &mut self.refused,
                io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => &mut self.reset,
                io::ErrorKind::TimedOut => &mut self.timed_out,
                _ => {
                    tracing::warn!(
                        event = "connection-failed",
                        index = connection_index,
                        %error,
                        "a connection has failed with an unexpected error: the test counts it in `other_errors`"
                    );
                    &mut self.other_errors
                }
            },
        };
        *failure_count += 1;
    }
}

impl AddAssign for BrokenConnectionCounts {
    fn add_assign(&mut self, other: Self) {
        self.refused += other.refused;
        self.reset += other.reset;
        self.timed_out += other.timed_out;
        self.closed_early += other.closed_early;
        self.wrong_answer += other.wrong_answer;
        self.other_errors += other.other_errors;
    }
}

#[derive(Debug)]
pub(crate) enum ConnectionFailure {
    Io(io::Error),
    ClosedEarly,
    WrongAnswer,
}

impl From<io::Error> for ConnectionFailure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}
