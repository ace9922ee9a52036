//! The load balancers that are connected, and what they last said.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use coreward_wire::v1;

use super::Now;

/// A server that no load balancer can reach for so long gets no new connections. Shorter gaps are the data plane's: a
/// first packet then goes to another member.
pub const UNREACHABLE_AFTER: Duration = Duration::from_secs(3);

/// Those that are connected, by session.
#[derive(Debug, Default)]
pub struct LoadBalancers {
    connected: BTreeMap<u64, LoadBalancer>,
    sessions: u64,
}

/// One of them.
#[derive(Debug)]
pub struct LoadBalancer {
    /// Its name in its own file.
    pub name: String,
    /// What it last said, and when (since the controller's start).
    pub state: Option<(v1::LoadBalancerState, Duration)>,
    /// Since when it has not known a server's MAC address, by server name.
    unresolved_since: HashMap<String, Duration>,
}

impl LoadBalancers {
    /// One has connected. The number names its session.
    pub fn hello(&mut self, name: String) -> u64 {
        self.sessions += 1;
        self.connected.insert(self.sessions, LoadBalancer { name, state: None, unresolved_since: HashMap::new() });
        self.sessions
    }

    /// It says what it sees.
    pub fn state(&mut self, session: u64, state: v1::LoadBalancerState, now: Now) {
        if let Some(connected) = self.connected.get_mut(&session) {
            let since = |server: &String| connected.unresolved_since.get(server).copied().unwrap_or(now.monotonic);
            connected.unresolved_since =
                state.unresolved_servers.iter().map(|server| (server.clone(), since(server))).collect();
            connected.state = Some((state, now.monotonic));
        }
    }

    /// It has disconnected.
    pub fn goodbye(&mut self, session: u64) {
        self.connected.remove(&session);
    }

    /// Whether none of those that said what they see has reached the server for [`UNREACHABLE_AFTER`].
    pub fn cannot_reach(&self, server: &str, now: Now) -> bool {
        let for_long = |balancer: &LoadBalancer| {
            let since = balancer.unresolved_since.get(server);
            since.is_some_and(|since| now.monotonic.saturating_sub(*since) >= UNREACHABLE_AFTER)
        };
        let mut speaking = self.connected.values().filter(|balancer| balancer.state.is_some()).peekable();
        speaking.peek().is_some() && speaking.all(for_long)
    }

    /// How many are connected: each gets its share of the new connections.
    pub fn count(&self) -> usize {
        self.connected.len()
    }

    /// All of them in the order in which they connected.
    pub fn iter(&self) -> impl Iterator<Item = &LoadBalancer> {
        self.connected.values()
    }
}
