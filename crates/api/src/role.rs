//! Roles and identities of the API's callers.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Role of an API caller. Each role includes the rights of the roles listed above it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// A viewer may read the status.
    Viewer,
    /// An operator may also change the fleet, and read RSS keys.
    Operator,
}

impl Role {
    /// All roles, from the one with the fewest rights to the one with the most.
    pub const ALL: [Role; 2] = [Role::Viewer, Role::Operator];

    /// Returns the lower-case name of the role, as in JSON.
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

/// Authenticated caller of the API.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Caller {
    /// Role of the caller.
    pub role: Role,
    /// IP address of the caller.
    pub address: IpAddr,
    /// Identity by which the caller has the role: the name in a certificate, a token's role and id, or a session.
    pub principal: Arc<str>,
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.principal, self.address)
    }
}
