//! State of the cookie keys, without the secrets.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// State of the cookie keys: the stamping key, and the progress of a rotation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Keys {
    /// Index of the stamping key: 0 or 1.
    #[schema(maximum = 1)]
    pub current: u32,
    /// Time at which the stamping key came into force (seconds since 1970).
    pub current_since_unix_s: u64,
    /// Phase of the key rotation.
    pub phase: KeyPhase,
    /// Generation of the configuration with the present keys.
    pub generation: u64,
    /// Peers that have not confirmed this generation: "load balancer lb2", "the agent of s3".
    pub waiting_for: Vec<String>,
    /// Minimum age of the present key (s) for a rotation without `force`.
    pub shortest_life_s: u64,
    /// Interval of scheduled rotations (s); 0: no schedule.
    pub rotation_interval_s: u64,
}

/// Phase of a key rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum KeyPhase {
    /// No rotation is in progress.
    Steady,
    /// The next key is being distributed, and stamps nothing yet.
    Announced,
}

impl fmt::Display for KeyPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Steady => "steady",
            Self::Announced => "announced",
        })
    }
}

/// Request to rotate the cookie keys.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RotateKeys {
    /// Do not wait for peers that have not confirmed the keys, nor for the present key's minimum age: connections may
    /// break.
    #[serde(default)]
    pub force: bool,
}
