//! Cookie keys and their rotation.
//!
//! One of the two keys (`current`) stamps cookies, and both are accepted. Any load balancer may receive a stamped
//! packet. A key may therefore stamp only when every load balancer has it, and may be replaced only when no server
//! stamps with it:
//!
//! ```text
//! steady     key[current] stamps; the other key is for older cookies
//! announce: the other key is replaced                    (all have acknowledged the previous state)
//! announced  the new key is distributed, and does not stamp
//! switch:   `current` becomes the other one              (all have acknowledged the new key)
//! steady
//! ```
//!
//! `coreward_controller::rotation` tracks the acknowledgements.

use std::time::Duration;

use coreward_model::cookie::{CookieKey, CookieKeyIndex, FleetCookieKeys};
use rand::Rng;

use crate::clock::round_down_to_seconds;

/// Cookie keys of the fleet, and the phase of their rotation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CookieKeyRing {
    /// Both cookie keys, as load balancers and agents use them.
    pub keys: FleetCookieKeys,
    pub generation: u64,
    /// Time at which the current key began to stamp cookies (whole seconds since 1970, as stored).
    pub current_key_since: Duration,
    pub phase: KeyRotationPhase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyRotationPhase {
    Steady,
    /// The next key is being distributed to load balancers and agents.
    Announced {
        /// Whether the rotation continues without confirmations by disconnected daemons.
        is_forced: bool,
    },
}

impl KeyRotationPhase {
    /// Returns the name of the phase, as in `coreward status`.
    pub fn name(self) -> &'static str {
        match self {
            KeyRotationPhase::Steady => "steady",
            KeyRotationPhase::Announced { .. } => "announced",
        }
    }
}

impl CookieKeyRing {
    pub fn generate(now: Duration, random: &mut impl Rng) -> Self {
        let keys = FleetCookieKeys {
            keys: [CookieKey::random(random), CookieKey::random(random)],
            current_key_index: CookieKeyIndex::First,
        };
        Self { keys, generation: 0, current_key_since: round_down_to_seconds(now), phase: KeyRotationPhase::Steady }
    }

    /// Begins a rotation, by replacing the key that does not stamp with a new random key. If a rotation is already in
    /// progress, the only effect is that `is_forced` makes it a forced one.
    pub fn announce_next_key(&mut self, is_forced: bool, generation: u64, random: &mut impl Rng) {
        match &mut self.phase {
            KeyRotationPhase::Announced { is_forced: was_forced } => *was_forced |= is_forced,
            KeyRotationPhase::Steady => {
                self.keys.keys[self.keys.current_key_index.other_index().get()] = CookieKey::random(random);
                self.generation = generation;
                self.phase = KeyRotationPhase::Announced { is_forced };
            }
        }
    }

    /// Makes the announced key the current one. Does nothing if no key is announced.
    pub fn switch_to_next_key(&mut self, now: Duration, generation: u64) {
        if self.phase == KeyRotationPhase::Steady {
            return;
        }
        self.keys.current_key_index = self.keys.current_key_index.other_index();
        self.generation = generation;
        self.current_key_since = round_down_to_seconds(now);
        self.phase = KeyRotationPhase::Steady;
    }
}
