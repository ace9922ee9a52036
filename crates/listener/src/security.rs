//! Who is let in, and what is counted of those who are not; racks have the same.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use coreward_api::serve::{Acceptor, Certified, Peer};
use coreward_daemon::add_expiry;
use coreward_metrics::snapshot::Snapshot;
use coreward_tls::certificate::Fingerprint;
use coreward_tls::failure::{Failure, Failures, Reason};
use coreward_tls::verify::RevocationList;
use coreward_tls::{AcceptedConnection, Caller, ClientCertificates, ConnectionAcceptor, Files, Limits, Role, Tls};
use tokio::net::TcpStream;
use tonic::{Request, Status};

/// What stands in the file of a daemon that parts connect to.
pub struct ListenerConfig<'a> {
    /// Where they connect to.
    pub listen: SocketAddr,
    /// Who the daemon is.
    pub tls: Option<&'a Files>,
    /// Certificates that are refused though they are right.
    pub revoked_certificates: &'a [Fingerprint],
    /// That there is no `tls` is wanted.
    pub allow_plaintext: bool,
}

/// What protects this controller, or rack.
pub struct Security {
    /// Its certificates; `None`: connections are neither encrypted nor authenticated.
    pub tls: Option<Arc<Tls>>,
    /// Who was not let in.
    pub failures: Arc<Failures>,
    /// Certificates that are refused though they are right.
    pub revoked: RevocationList,
}

impl Security {
    /// What a file says of who may come to `listen`. Fails when certificates cannot be used.
    pub fn of(config: &ListenerConfig<'_>) -> anyhow::Result<Self> {
        if config.tls.is_none() && !config.allow_plaintext && !config.listen.ip().is_loopback() {
            tracing::warn!(
                event = "plaintext",
                address = %config.listen,
                "no TLS: any client can read the cookie keys and report for any server: expected `[tls]`, an address \
                 of this host only (127.0.0.1), or `allow_plaintext = true`"
            );
        }
        let revoked = RevocationList::default();
        revoked.set(config.revoked_certificates.iter().copied());
        Ok(Self { tls: coreward_tls::table::load(config.tls)?, failures: Arc::default(), revoked })
    }

    /// For gRPC: without a certificate of one of these roles nobody comes in.
    pub fn gate(&self, accepted: &[Role], limits: Limits) -> Arc<ConnectionAcceptor> {
        let failures = self.failures.clone();
        match &self.tls {
            Some(tls) => {
                let (required, revoked) = (ClientCertificates::Required, self.revoked.clone());
                ConnectionAcceptor::guarded(tls.clone(), accepted, required, &["h2"], revoked, limits, failures)
            }
            None => ConnectionAcceptor::open(limits, failures),
        }
    }

    /// For the API: whoever has no certificate of an operator or a viewer has a token; others are told so by HTTP. An
    /// address of this host needs no encryption.
    pub fn api_door(&self, address: SocketAddr) -> ApiDoor {
        let failures = self.failures.clone();
        let gate = match self.tls.clone().filter(|_| !address.ip().is_loopback()) {
            Some(tls) => {
                let (accepted, revoked) = (ClientCertificates::Accepted, self.revoked.clone());
                ConnectionAcceptor::guarded(
                    tls,
                    &Role::ALL,
                    accepted,
                    &["http/1.1"],
                    revoked,
                    Limits::default(),
                    failures,
                )
            }
            None => ConnectionAcceptor::open(Limits::default(), failures),
        };
        ApiDoor(gate)
    }

    /// Reads certificates again when their files change, for ever.
    pub async fn maintenance_loop(&self) -> std::convert::Infallible {
        match &self.tls {
            Some(tls) => tls.clone().maintenance_loop().await,
            None => std::future::pending().await,
        }
    }

    /// What Prometheus is told.
    pub fn add_metrics(&self, page: &mut Snapshot) {
        self.tls.iter().for_each(|tls| add_expiry(tls, page));
        for (reason, count) in self.failures.counts() {
            page.add("coreward_tls_handshake_failures_total", &[reason.name()], count as f64);
        }
    }
}

#[derive(Clone)]
pub struct ApiDoor(Arc<ConnectionAcceptor>);

impl ApiDoor {
    /// Ends connections whose certificate has expired since, or was revoked, for ever.
    pub async fn maintenance_loop(self) -> std::convert::Infallible {
        self.0.maintenance_loop().await
    }
}

impl Acceptor for ApiDoor {
    type Stream = AcceptedConnection;

    async fn accept(&self, stream: TcpStream, address: SocketAddr) -> io::Result<(AcceptedConnection, Peer)> {
        let admitted = self.0.clone().admit_one(stream, address).await.map_err(io::Error::other)?;
        let caller = admitted.caller();
        let certified = caller.identity.as_ref().zip(admitted.certificate()).and_then(|(identity, certificate)| {
            let role = match identity.role {
                Role::Operator => coreward_api::Role::Operator,
                Role::Viewer => coreward_api::Role::Viewer,
                _ => return None,
            };
            let (fingerprint, not_after) = certificate;
            Some(Certified { role, name: identity.to_string().into(), fingerprint, not_after })
        });
        let peer = Peer { address: address.ip(), certified, encrypted: caller.is_protected };
        Ok((admitted, peer))
    }
}

/// Who asks; what is refused to it is counted and logged.
pub struct AuthenticatedPeer {
    pub caller: Caller,
    security: Arc<Security>,
}

impl AuthenticatedPeer {
    /// Who sends the request. Fails when it did not come through the gate.
    pub fn of<T>(request: &Request<T>, security: &Arc<Security>) -> Result<Self, Status> {
        Ok(Self { caller: Caller::of(request)?, security: security.clone() })
    }

    /// Whether it may do what one of these roles may.
    ///
    /// # Errors
    /// PERMISSION_DENIED, with who it is and what was expected.
    pub fn require(&self, roles: &[Role]) -> Result<(), Status> {
        self.caller.require(roles).inspect_err(|status| self.refused(Reason::WrongRole, status))
    }

    /// Whether it may say that it is `role` called `name`.
    pub fn require_name(&self, role: Role, name: &str) -> Result<(), Status> {
        self.caller.require_name(role, name).inspect_err(|status| self.refused(Reason::WrongName, status))
    }

    fn refused(&self, reason: Reason, status: &Status) {
        self.security.failures.count(&self.caller, &Failure { reason, message: status.message().to_owned() });
    }
}
