//! Model of which servers are drained by command, according to the controller's acknowledgements.
//!
//! A drain is not part of the document. It outlives restarts, changes of the leader and new documents, but it ends when
//! its server leaves the document.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Maximum time until an unanswered command takes effect. A stopped controller may execute it after SIGCONT.
const MAX_DRAIN_COMMAND_DELAY: Duration = Duration::from_secs(3);

/// Expected drain state of each server, by server number. A server without an entry is not drained.
#[derive(Debug, Default)]
pub struct ExpectedServerDrains(BTreeMap<u16, ExpectedDrainState>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpectedDrainState {
    Drained,
    /// It is unknown whether the server is drained, because the controller did not answer a request at this time. The
    /// request was to drain, undrain or remove the server.
    UncertainSince(Instant),
}

impl ExpectedServerDrains {
    pub fn possibly_drained_servers(&self) -> BTreeSet<u16> {
        self.0.keys().copied().collect()
    }

    pub fn is_drain_uncertain(&self, server: u16) -> bool {
        matches!(self.0.get(&server), Some(ExpectedDrainState::UncertainSince(_)))
    }

    /// Records a request to drain or undrain a server, and whether the controller acknowledged it.
    pub fn record_drain_request(&mut self, server: u16, is_drain: bool, is_acknowledged: bool) {
        match (is_acknowledged, is_drain) {
            (false, _) => drop(self.0.insert(server, ExpectedDrainState::UncertainSince(Instant::now()))),
            (true, true) => drop(self.0.insert(server, ExpectedDrainState::Drained)),
            (true, false) => drop(self.0.remove(&server)),
        }
    }

    /// Records that a fleet document was sent and whether the controller acknowledged it. The document contains exactly
    /// `servers`.
    pub fn record_sent_document(&mut self, servers: &BTreeSet<u16>, is_acknowledged: bool) {
        if is_acknowledged {
            self.0.retain(|server, _| servers.contains(server));
        } else {
            let removed_servers = self.0.iter_mut().filter(|(server, _)| !servers.contains(server));
            removed_servers
                .for_each(|(_, drain_state)| *drain_state = ExpectedDrainState::UncertainSince(Instant::now()));
        }
    }

    /// Returns descriptions of all differences between the controller's status and the expected drains. After
    /// `MAX_DRAIN_COMMAND_DELAY`, an uncertain state is replaced by the state in `status`.
    pub fn find_status_differences(&mut self, status: &Value) -> Vec<String> {
        let mut violations = Vec::new();
        for server in status["servers"].as_array().into_iter().flatten() {
            let server_number = server["name"].as_str().and_then(|name| name.strip_prefix('s')?.parse().ok());
            let Some(number) = server_number else { continue };
            let is_drained = server["drain"]["origin"] == "command";
            match self.0.get(&number) {
                Some(ExpectedDrainState::UncertainSince(since)) if since.elapsed() < MAX_DRAIN_COMMAND_DELAY => {}
                Some(ExpectedDrainState::UncertainSince(_)) => self.record_drain_request(number, is_drained, true),
                Some(ExpectedDrainState::Drained) if !is_drained => {
                    violations.push(format!("a drain is lost: that of s{number} was acknowledged"));
                    self.0.remove(&number);
                }
                None if is_drained => {
                    violations.push(format!("s{number} is drained without a command, or its end is lost"));
                    self.0.insert(number, ExpectedDrainState::Drained);
                }
                Some(ExpectedDrainState::Drained) | None => {}
            }
        }
        violations
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn build_status_with_drains(drains: &[(u16, &str)]) -> Value {
        let server =
            |(number, origin): &(u16, &str)| json!({ "name": format!("s{number}"), "drain": { "origin": origin } });
        json!({ "servers": drains.iter().map(server).collect::<Vec<_>>() })
    }

    #[test]
    fn only_acknowledged_drains_are_expected() {
        let mut expected_drains = ExpectedServerDrains::default();
        expected_drains.record_drain_request(1, true, true);
        assert_eq!(
            expected_drains.find_status_differences(&build_status_with_drains(&[(1, "command"), (2, "document")])),
            [""; 0]
        );
        assert_eq!(
            expected_drains.find_status_differences(&build_status_with_drains(&[(1, "document")])).len(),
            1,
            "lost"
        );
        assert_eq!(
            expected_drains.find_status_differences(&build_status_with_drains(&[(1, "document")])),
            [""; 0],
            "which is reported once"
        );
        assert_eq!(
            expected_drains.find_status_differences(&build_status_with_drains(&[(2, "command")])).len(),
            1,
            "without a command"
        );
        expected_drains.record_drain_request(2, false, true);
        assert_eq!(expected_drains.find_status_differences(&build_status_with_drains(&[(2, "document")])), [""; 0]);
    }

    #[test]
    fn unanswered_drain_leaves_drain_state_uncertain() {
        let mut expected_drains = ExpectedServerDrains::default();
        expected_drains.record_drain_request(1, true, false);
        for drain_source in ["command", "document"] {
            assert_eq!(
                expected_drains.find_status_differences(&build_status_with_drains(&[(1, drain_source)])),
                [""; 0]
            );
        }
        assert!(expected_drains.is_drain_uncertain(1) && expected_drains.possibly_drained_servers().contains(&1));
        expected_drains.0.insert(1, ExpectedDrainState::UncertainSince(Instant::now() - MAX_DRAIN_COMMAND_DELAY));
        assert_eq!(expected_drains.find_status_differences(&build_status_with_drains(&[(1, "command")])), [""; 0]);
        assert!(!expected_drains.is_drain_uncertain(1));
        assert_eq!(expected_drains.find_status_differences(&build_status_with_drains(&[(1, "document")])).len(), 1);
    }

    #[test]
    fn server_removed_from_the_document_is_no_longer_drained() {
        let mut expected_drains = ExpectedServerDrains::default();
        (1..=2).for_each(|server| expected_drains.record_drain_request(server, true, true));
        expected_drains.record_sent_document(&[1].into(), false);
        assert!(expected_drains.is_drain_uncertain(2) && !expected_drains.is_drain_uncertain(1));
        expected_drains.record_sent_document(&[1].into(), true);
        assert_eq!(expected_drains.possibly_drained_servers(), [1].into());
    }
}
