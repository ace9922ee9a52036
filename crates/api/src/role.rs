//! Who may do what.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

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
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Caller {
    /// What it may do.
    pub role: Role,
    /// From where it calls.
    pub address: IpAddr,
    /// What has proved it: the name in a certificate, a token's role and id, or a session.
    pub who: Arc<str>,
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.who, self.address)
    }
}
