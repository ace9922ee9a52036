//! Who may do what.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a caller may do; each may do what those before may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// See what there is.
    Viewer,
    /// Change it, and see RSS keys.
    Operator,
}

impl Role {
    /// All of them.
    pub const ALL: [Role; 2] = [Role::Viewer, Role::Operator];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Who has proved to be one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Caller {
    /// What it may do.
    pub role: Role,
    /// From where it calls.
    pub address: IpAddr,
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.role, self.address)
    }
}
