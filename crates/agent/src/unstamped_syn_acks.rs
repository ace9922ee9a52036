//! Detects services whose workers are in another network namespace of this server (containers behind DNAT or a bridge).
//! Their packets are stamped like others only if their kernel adds no offset to TSvals. This depends on
//! net.ipv4.tcp_timestamps, which each network namespace has separately and the agent sets only in its own.

use std::time::{Duration, Instant};

use coreward_model::consistency::{ConsistencyMode, CookieStamper};
use coreward_wire::AgentService;

/// Time for which the warning remains after the last unstamped SYN-ACK.
const UNSTAMPED_SYN_ACK_WARNING_DURATION: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub struct UnstampedSynAckMonitor {
    last_syn_ack_count: u64,
    last_increase_time: Option<Instant>,
}

impl UnstampedSynAckMonitor {
    /// Returns a monitor that ignores the SYN-ACKs that were counted before, up to `syn_ack_count`.
    pub fn with_baseline(syn_ack_count: u64) -> Self {
        Self { last_syn_ack_count: syn_ack_count, last_increase_time: None }
    }

    /// Evaluates the total number of unstamped SYN-ACKs. Returns a warning for `coreward status` if it has grown
    /// recently.
    pub fn observe_count(&mut self, syn_ack_count: u64, now: Instant) -> Option<String> {
        if syn_ack_count > self.last_syn_ack_count {
            (self.last_syn_ack_count, self.last_increase_time) = (syn_ack_count, Some(now));
        }
        self.last_increase_time
            .is_some_and(|increased_at| now.duration_since(increased_at) < UNSTAMPED_SYN_ACK_WARNING_DURATION)
            .then(|| {
                format!(
                    "{syn_ack_count} SYN-ACKs came from another network namespace (a container?) whose \
                 net.ipv4.tcp_timestamps is not 2: their connections are not stamped and break when the pool changes; \
                 expected 2 there (`docker run --sysctl`)"
                )
            })
    }
}

/// Returns a text about the features that a service lacks if its SYN-ACKs are unstamped, or `None` if it lacks none.
pub fn describe_lost_features(service: &AgentService) -> Option<String> {
    let mode = service.settings;
    let limitation_text = match mode.consistency {
        _ if mode.migration.is_some() => "connections at the other load balancer break (migration)",
        ConsistencyMode::Beamer => "connections break when their bucket changes hands (`consistency = \"beamer\"`)",
        _ if mode.has_cookies() && mode.timestamps == CookieStamper::Off => {
            "connections without a flow-table entry break when their bucket changes hands (`timestamps = \"off\"`)"
        }
        ConsistencyMode::Stateful => "connections are stateless (`consistency = \"stateful\"`)",
        _ => return None,
    };
    Some(format!(
        "service {:?} answers from another network namespace (DNAT or a bridge), whose sockets are not visible: \
         {limitation_text}; expected `consistency = \"stateless\"` with `timestamps = \"server\"`, or workers in the \
         server's own namespace (`docker run --network host`)",
        service.name
    ))
}

#[cfg(test)]
mod tests {
    use coreward_model::ServiceAddress;
    use coreward_model::consistency::ServiceSettings;
    use coreward_model::tuple::TransportProtocol;

    use super::*;

    #[test]
    fn features_lost_by_missing_stamps_are_described() {
        let lost_features_of = |consistency, timestamps| {
            let address =
                ServiceAddress { vip_and_port: "10.200.0.1:80".parse().unwrap(), protocol: TransportProtocol::Tcp };
            let mode = ServiceSettings { consistency, timestamps, ..ServiceSettings::default() };
            let server_id = 3.try_into().unwrap();
            describe_lost_features(&AgentService { name: "web".to_owned(), address, server_id, settings: mode })
                .unwrap_or_default()
        };
        for (consistency, timestamps, expected) in [
            (ConsistencyMode::Stateless, CookieStamper::Server, ""),
            (ConsistencyMode::HashTable, CookieStamper::Server, ""),
            (ConsistencyMode::None, CookieStamper::Server, ""),
            (ConsistencyMode::Stateful, CookieStamper::Server, "connections are stateless"),
            (ConsistencyMode::Stateless, CookieStamper::Off, "timestamps = \"off\""),
            (ConsistencyMode::Beamer, CookieStamper::Server, "consistency = \"beamer\""),
        ] {
            let limitation_text = lost_features_of(consistency, timestamps);
            assert!(
                limitation_text.contains(expected) && limitation_text.is_empty() == expected.is_empty(),
                "{consistency:?}: {limitation_text}"
            );
        }
    }

    #[test]
    fn warning_ends_a_minute_after_the_last_unstamped_syn_ack() {
        let start_time = Instant::now();
        let mut monitor = UnstampedSynAckMonitor::with_baseline(7);
        assert_eq!(monitor.observe_count(7, start_time), None);
        assert!(monitor.observe_count(9, start_time).unwrap().starts_with("9 SYN-ACKs"));
        assert!(monitor.observe_count(9, start_time + Duration::from_secs(59)).is_some());
        assert_eq!(monitor.observe_count(9, start_time + Duration::from_secs(61)), None);
    }
}
