//! The cookie keys, without the secrets: those never leave the controller but to those who need them.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Which key stamps, and how far a rotation is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Keys {
    /// Which of the two stamps: 0 or 1.
    #[schema(maximum = 1)]
    pub current: u32,
    /// Since when (seconds since 1970).
    pub current_since_unix_s: u64,
    /// Whether a rotation is under way.
    pub phase: KeyPhase,
    /// Generation of the configuration that brought the keys as they are now.
    pub generation: u64,
    /// Who has not confirmed it: "load balancer lb2", "the agent of s3".
    pub waiting_for: Vec<String>,
    /// A rotation that is not forced begins when the present key is that old (s).
    pub shortest_life_s: u64,
    /// The fleet's schedule (s); 0: none.
    pub rotation_interval_s: u64,
}

/// Whether a rotation is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum KeyPhase {
    /// Nothing is going on.
    Steady,
    /// The next key is on its way to everybody, and stamps nothing yet.
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

/// That the cookie keys are to be rotated.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RotateKeys {
    /// Without those who have not confirmed what is in force, and however new the present key is: connections may break.
    #[serde(default)]
    pub force: bool,
}
