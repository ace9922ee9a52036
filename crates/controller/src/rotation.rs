//! Rotation of the cookie keys ([`coreward_fleet::key_ring`]), with the peers' acknowledgements and the due steps.

use std::time::Duration;

use coreward_api::types::{KeyPhase as ShownPhase, Keys};

use super::load_balancers::{LoadBalancer, PEER_LOSS_GRACE_PERIOD};
use super::{ClockReadings, Controller};
use coreward_fleet::fleet::{FleetServer, ServerAdminState};
use coreward_fleet::key_ring::KeyRotationPhase;
use coreward_model::ServerId;

/// Reason why a rotation of the cookie keys cannot currently begin or continue.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyRotationError {
    /// Connections may still use cookies of the key that would be overwritten.
    #[error(
        "the key in force is {} s old: expected at least {} s (`max_connection_lifetime`), as connections that have \
         been silent since before it would break (--force does it all the same)",
        age.as_secs(),
        expected.as_secs()
    )]
    KeyTooYoung { age: Duration, expected: Duration },
    /// Some peers may not use the present keys yet, or may stamp with another key.
    #[error(
        "{} not confirmed configuration {generation}, which brought the keys in force: expected all to (--force \
         continues without those that are not connected: their connections may break)",
        list_with_has_or_have(peers)
    )]
    UnconfirmedPresentKeys {
        /// Peers that have not confirmed this configuration.
        peers: Vec<String>,
        generation: u64,
    },
    /// The next key is being announced to the peers.
    #[error(
        "a rotation is under way: {} not confirmed the next key (configuration {generation})",
        list_with_has_or_have(peers)
    )]
    RotationUnderWay {
        /// Peers that have not confirmed this configuration.
        peers: Vec<String>,
        generation: u64,
    },
}

fn list_with_has_or_have(names: &[String]) -> String {
    format!("{} {}", names.join(", "), if names.len() == 1 { "has" } else { "have" })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyRotationStep {
    Announce {
        /// Whether the announcement does not wait for disconnected peers.
        is_forced: bool,
    },
    Switch,
}

impl KeyRotationStep {
    pub fn describe(self) -> &'static str {
        match self {
            KeyRotationStep::Announce { is_forced: false } => "the next key is being distributed",
            KeyRotationStep::Announce { is_forced: true } => {
                "the next key is being distributed to all that are connected"
            }
            KeyRotationStep::Switch => "the next key stamps from now on",
        }
    }
}

impl Controller {
    /// Returns the rotation step that is due without an operator's command: the switch once all peers have the next
    /// key, or the first step of a scheduled rotation. The error is the reason why the scheduled rotation cannot begin.
    pub fn due_rotation_step(&self, now: ClockReadings) -> Result<Option<KeyRotationStep>, KeyRotationError> {
        let key_ring = &self.fleet.key_ring;
        match key_ring.phase {
            KeyRotationPhase::Announced { is_forced } => {
                Ok(self.unconfirmed_peers(is_forced, now).is_empty().then_some(KeyRotationStep::Switch))
            }
            KeyRotationPhase::Steady => {
                let key_age = now.record_clock_time.saturating_sub(key_ring.current_key_since);
                let is_rotation_due = self.fleet.key_rotation_interval.is_some_and(|interval| key_age >= interval);
                if is_rotation_due { self.announcement_step(false, now).map(Some) } else { Ok(None) }
            }
        }
    }

    /// Returns the first step of a rotation that the operator requests. Fails if a rotation is in progress, or if it
    /// would break connections and `is_forced` is not set.
    pub fn requested_rotation_step(
        &self,
        is_forced: bool,
        now: ClockReadings,
    ) -> Result<KeyRotationStep, KeyRotationError> {
        let key_ring = &self.fleet.key_ring;
        if key_ring.phase == KeyRotationPhase::Steady {
            return self.announcement_step(is_forced, now);
        }
        let unconfirmed_peers = self.unconfirmed_peers(is_forced, now);
        if unconfirmed_peers.is_empty() {
            return Ok(KeyRotationStep::Switch);
        }
        // Connected peers will confirm the key, and a forced rotation does not wait for the others.
        if is_forced && key_ring.phase == (KeyRotationPhase::Announced { is_forced: false }) {
            return Ok(KeyRotationStep::Announce { is_forced: true });
        }
        Err(KeyRotationError::RotationUnderWay { peers: unconfirmed_peers, generation: key_ring.generation })
    }

    fn announcement_step(&self, is_forced: bool, now: ClockReadings) -> Result<KeyRotationStep, KeyRotationError> {
        let key_ring = &self.fleet.key_ring;
        let key_age = now.record_clock_time.saturating_sub(key_ring.current_key_since);
        let required_key_age = self.fleet.max_connection_lifetime;
        if key_age < required_key_age && !is_forced {
            return Err(KeyRotationError::KeyTooYoung { age: key_age, expected: required_key_age });
        }
        let unconfirmed_peers = self.unconfirmed_peers(is_forced, now);
        if unconfirmed_peers.is_empty() {
            Ok(KeyRotationStep::Announce { is_forced })
        } else {
            Err(KeyRotationError::UnconfirmedPresentKeys { peers: unconfirmed_peers, generation: key_ring.generation })
        }
    }

    /// Returns the peers that have not confirmed the present keys. Load balancers on record come first, followed by
    /// agents of servers that stamp cookies.
    fn unconfirmed_peers(&self, ignores_disconnected_peers: bool, now: ClockReadings) -> Vec<String> {
        let find_unconfirmed_agent = |(id, server)| self.unconfirmed_agent(id, server, ignores_disconnected_peers, now);
        let unconfirmed_agents = self.servers_after_id(None).filter_map(find_unconfirmed_agent);
        self.unconfirmed_load_balancers(ignores_disconnected_peers, now).chain(unconfirmed_agents).collect()
    }

    fn unconfirmed_load_balancers(
        &self,
        ignores_disconnected_peers: bool,
        now: ClockReadings,
    ) -> impl Iterator<Item = String> {
        let key_generation = self.fleet.key_ring.generation;
        let is_waited_for = move |balancer: &LoadBalancer| {
            balancer.confirmed_config_generation < key_generation
                && (balancer.is_alive(now) || !ignores_disconnected_peers)
        };
        let unconfirmed_balancers = self.load_balancers.iter().filter(move |(_, balancer)| is_waited_for(balancer));
        unconfirmed_balancers.map(|(name, _)| format!("load balancer {name}"))
    }

    /// Returns a description of the server's agent if it has not confirmed the keys. After the controller's start,
    /// every agent counts as connected. If the server has left, it may be switched off, so its agent counts only if
    /// connected.
    fn unconfirmed_agent(
        &self,
        id: ServerId,
        server: &FleetServer,
        ignores_disconnected_peers: bool,
        now: ClockReadings,
    ) -> Option<String> {
        let agent = self.agent(id);
        if agent.map_or(0, |agent| agent.confirmed_config_generation) >= self.fleet.key_ring.generation
            || !self.fleet.is_stamping_server(id)
        {
            return None;
        }
        let is_starting = now.monotonic_time < PEER_LOSS_GRACE_PERIOD;
        let is_connected = agent.is_some_and(|agent| agent.session.is_some()) || is_starting;
        let is_waited_for =
            is_connected || !(ignores_disconnected_peers || server.admin_state == ServerAdminState::Left);
        is_waited_for.then(|| format!("the agent of {}", server.name))
    }

    /// Returns the wall-clock time (s since 1970) at which the present key came into use, for display.
    fn key_start_unix_s(&self, now: ClockReadings) -> u64 {
        let key_age = now.record_clock_time.saturating_sub(self.fleet.key_ring.current_key_since);
        now.wall_time.saturating_sub(key_age).as_secs()
    }

    /// Returns the state of the keys. Its `pending_peers` lists only load balancers.
    /// [`Controller::agent_delaying_rotation`] returns the agents to add.
    pub fn keys_summary(&self, now: ClockReadings) -> Keys {
        let key_ring = &self.fleet.key_ring;
        Keys {
            current_key: key_ring.keys.current_key_index.get() as u32,
            current_since_unix_s: self.key_start_unix_s(now),
            rotation_phase: match key_ring.phase {
                KeyRotationPhase::Steady => ShownPhase::Steady,
                KeyRotationPhase::Announced { .. } => ShownPhase::Announced,
            },
            configuration_generation: key_ring.generation,
            pending_peers: self.unconfirmed_load_balancers(self.is_announcement_forced(), now).collect(),
            min_key_age_s: self.fleet.max_connection_lifetime.as_secs(),
            rotation_interval_s: self.fleet.key_rotation_interval.map_or(0, |interval| interval.as_secs()),
        }
    }

    pub fn agent_delaying_rotation(&self, id: ServerId, server: &FleetServer, now: ClockReadings) -> Option<String> {
        self.unconfirmed_agent(id, server, self.is_announcement_forced(), now)
    }

    fn is_announcement_forced(&self) -> bool {
        self.fleet.key_ring.phase == (KeyRotationPhase::Announced { is_forced: true })
    }

    #[cfg(test)]
    pub fn keys(&self, now: ClockReadings) -> Keys {
        let mut keys = self.keys_summary(now);
        keys.pending_peers.extend(
            self.servers_after_id(None).filter_map(|(id, server)| self.agent_delaying_rotation(id, server, now)),
        );
        keys
    }
}
