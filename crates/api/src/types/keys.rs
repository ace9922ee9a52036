//! State of the cookie keys, without the secrets.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// State of the cookie keys and of their rotation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Keys {
    /// Index of the key that stamps new cookies, which is 0 or 1.
    #[schema(maximum = 1)]
    pub current_key: u32,
    /// Time at which the present key began to stamp cookies (seconds since 1970).
    pub current_since_unix_s: u64,
    /// Phase of the key rotation.
    pub rotation_phase: KeyPhase,
    /// Generation of the configuration that contains the present keys.
    pub configuration_generation: u64,
    /// Load balancers and agents that have not confirmed `configuration_generation`, such as "load balancer lb2" or
    /// "the agent of s3".
    pub pending_peers: Vec<String>,
    /// Minimum age of the present key (s) for a rotation without `force`.
    pub min_key_age_s: u64,
    /// Interval between scheduled rotations (s), or 0 if none are scheduled.
    pub rotation_interval_s: u64,
}

/// Phase of a key rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum KeyPhase {
    /// No rotation is in progress.
    Steady,
    /// The next key is being distributed but does not stamp cookies yet.
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
    /// Whether to rotate without waiting for peers that have not confirmed the keys, and for the present key's minimum
    /// age. Connections may break.
    #[serde(default)]
    pub force: bool,
}
