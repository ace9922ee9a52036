//! Peer that calls a daemon, and checks of its permissions.

use std::fmt;
use std::net::SocketAddr;

use tonic::{Request, Status};

use crate::identity::{FleetIdentity, FleetRole};

/// Peer that sends requests to a daemon, with the identity in its certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionCaller {
    pub address: SocketAddr,
    /// Identity in the peer's certificate, or `None` if the peer uses no TLS, or a token instead of a certificate.
    pub identity: Option<FleetIdentity>,
    pub is_encrypted: bool,
}

impl fmt::Display for ConnectionCaller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.identity {
            Some(identity) => write!(f, "{identity} at {}", self.address),
            None => write!(f, "{}", self.address),
        }
    }
}

impl ConnectionCaller {
    /// Returns the peer that sent a request. Fails with INTERNAL if the connection was not accepted by a
    /// [`ConnectionAcceptor`](crate::ConnectionAcceptor).
    pub fn from_request<T>(request: &Request<T>) -> Result<Self, Status> {
        request.extensions().get::<Self>().cloned().ok_or_else(|| Status::internal("a request from nowhere"))
    }

    /// Checks that the peer has one of these roles, and otherwise fails with PERMISSION_DENIED. Permits all peers if
    /// TLS is not used.
    pub fn require_any_role(&self, roles: &[FleetRole]) -> Result<(), Status> {
        match &self.identity {
            None if !self.is_encrypted => Ok(()),
            Some(identity) if roles.contains(&identity.role) => Ok(()),
            _ => {
                let expected_roles: Vec<&str> = roles.iter().map(|role| role.name()).collect();
                let message = format!(
                    "the certificate is for {}: expected {}",
                    self.describe_identity(),
                    expected_roles.join(" or ")
                );
                Err(Status::permission_denied(message))
            }
        }
    }

    /// Checks that the peer's certificate has this role and name, and otherwise fails with PERMISSION_DENIED.
    pub fn require_role_and_name(&self, role: FleetRole, name: &str) -> Result<(), Status> {
        self.require_any_role(&[role])?;
        match &self.identity {
            Some(identity) if identity.name.as_str() != name => {
                let message = format!(
                    "the certificate is for {}, not for {role} {name}: expected its own name",
                    self.describe_identity()
                );
                Err(Status::permission_denied(message))
            }
            _ => Ok(()),
        }
    }

    fn describe_identity(&self) -> String {
        self.identity.as_ref().map_or_else(|| "no identity".to_owned(), FleetIdentity::to_string)
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn test_caller(identity: Option<&str>, is_encrypted: bool) -> ConnectionCaller {
        let identity = identity.map(|uri| uri.parse().unwrap());
        ConnectionCaller { address: SocketAddr::from(([192, 0, 2, 1], 5)), identity, is_encrypted }
    }

    #[test]
    fn agent_may_report_only_for_its_own_server() {
        let agent = test_caller(Some("coreward://prod/agent/s1"), true);
        assert!(agent.require_role_and_name(FleetRole::Agent, "s1").is_ok());
        let error = agent.require_role_and_name(FleetRole::Agent, "s2").unwrap_err();
        assert_eq!(error.code(), Code::PermissionDenied);
        assert_eq!(error.message(), "the certificate is for agent s1, not for agent s2: expected its own name");
        let error = agent.require_role_and_name(FleetRole::Lb, "s1").unwrap_err();
        assert_eq!(error.message(), "the certificate is for agent s1: expected lb");
        assert!(agent.require_any_role(&[FleetRole::Operator, FleetRole::Viewer]).is_err());
    }

    #[test]
    fn connection_without_tls_has_every_permission() {
        assert!(test_caller(None, false).require_role_and_name(FleetRole::Lb, "lb1").is_ok());
        let error = test_caller(None, true).require_any_role(&[FleetRole::Viewer]).unwrap_err();
        assert_eq!(error.message(), "the certificate is for no identity: expected viewer");
    }
}
