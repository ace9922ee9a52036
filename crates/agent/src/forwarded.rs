//! Services whose workers are in another network namespace of this server (containers behind DNAT or a bridge). Their packets are
//! stamped on their way out like others, if their kernel's TSvals have no offset: net.ipv4.tcp_timestamps is one of each network
//! namespace, and the agent sets that of its own.

use std::time::{Duration, Instant};

/// The warning goes when for so long no SYN-ACK was left alone.
const REMEMBERED: Duration = Duration::from_secs(60);

/// Watches the counter of SYN-ACKs that could not be stamped.
#[derive(Debug)]
pub struct Forwarded {
    counted: u64,
    grew_at: Option<Instant>,
}

impl Forwarded {
    /// What an earlier process has counted is over.
    pub fn from(counted: u64) -> Self {
        Self { counted, grew_at: None }
    }

    /// Takes the counter as it stands (absolute). What is wrong, in words for `coreward status`.
    pub fn observe(&mut self, counted: u64, now: Instant) -> Option<String> {
        if counted > self.counted {
            (self.counted, self.grew_at) = (counted, Some(now));
        }
        self.grew_at.is_some_and(|at| now.duration_since(at) < REMEMBERED).then(|| {
            format!(
                "{counted} SYN-ACKs came from another network namespace (a container?) whose net.ipv4.tcp_timestamps is not 2: \
                 their connections are not stamped and break when the pool changes; expected 2 there (`docker run --sysctl`)"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_ends_a_minute_after_the_last_one() {
        let start = Instant::now();
        let mut forwarded = Forwarded::from(7);
        assert_eq!(forwarded.observe(7, start), None);
        assert!(forwarded.observe(9, start).unwrap().starts_with("9 SYN-ACKs"));
        assert!(forwarded.observe(9, start + Duration::from_secs(59)).is_some());
        assert_eq!(forwarded.observe(9, start + Duration::from_secs(61)), None);
    }
}
