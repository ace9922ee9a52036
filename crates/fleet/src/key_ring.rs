//! The cookie keys and their rotation.
//!
//! There are two keys; one of them, `current`, stamps new TSvals, and both are accepted. A packet that a server stamps is read
//! by any load balancer, so a key may stamp only when every load balancer holds it, and may be overwritten only when nobody
//! stamps with it. Hence two phases:
//!
//! ```text
//! steady     key[current] stamps; the other key is of before, for cookies that are still about
//!   announce: the other key becomes a new one              (everybody holds what was there, and stamps with `current`)
//! announced  the new key is on its way to everybody, and stamps nothing
//!   switch:   `current` becomes the other one              (everybody holds the new key)
//! steady
//! ```
//!
//! Who has confirmed what, the controller knows (`coreward_controller::rotation`).

use std::time::Duration;

use coreward_model::cookie::{CookieKey, FleetKeys, KeyIndex};
use rand::Rng;

use crate::records::whole_seconds;

/// The keys, and how far their rotation is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRing {
    /// What everybody is told.
    pub keys: FleetKeys,
    /// Of the configuration that brought them as they are.
    pub generation: u64,
    /// Since when the current key stamps (whole seconds since 1970, as the store keeps them).
    pub current_since: Duration,
    /// How far the rotation is.
    pub phase: KeyPhase,
}

/// How far a rotation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyPhase {
    /// Nothing is going on.
    Steady,
    /// The next key has been sent to everybody.
    Announced {
        /// It goes on without those that are not connected.
        forced: bool,
    },
}

impl KeyPhase {
    /// The name as `coreward status` shows it.
    pub fn name(self) -> &'static str {
        match self {
            KeyPhase::Steady => "steady",
            KeyPhase::Announced { .. } => "announced",
        }
    }
}

impl KeyRing {
    /// Of a fleet that has just been born.
    pub fn draw(now: Duration, random: &mut impl Rng) -> Self {
        let keys = FleetKeys { keys: [CookieKey::random(random), CookieKey::random(random)], current: KeyIndex::First };
        Self { keys, generation: 0, current_since: whole_seconds(now), phase: KeyPhase::Steady }
    }

    /// The next key takes the place of the one that stamps no more; under way already, `forced` may be added.
    pub fn announce(&mut self, forced: bool, generation: u64, random: &mut impl Rng) {
        match &mut self.phase {
            KeyPhase::Announced { forced: already } => *already |= forced,
            KeyPhase::Steady => {
                self.keys.keys[self.keys.current.other().get()] = CookieKey::random(random);
                self.generation = generation;
                self.phase = KeyPhase::Announced { forced };
            }
        }
    }

    /// The key that was announced stamps from now on. Nothing happens when none was.
    pub fn switch(&mut self, now: Duration, generation: u64) {
        if self.phase == KeyPhase::Steady {
            return;
        }
        self.keys.current = self.keys.current.other();
        self.generation = generation;
        self.current_since = whole_seconds(now);
        self.phase = KeyPhase::Steady;
    }
}
