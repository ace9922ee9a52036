//! Authentication of peers for controllers and racks, with counters of rejections.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use coreward_daemon::add_certificate_expiry_metrics;
use coreward_http::serve::{CertificateIdentity, ConnectionPeer, StreamAcceptor};
use coreward_metrics::metric_declarations::MetricKind::Counter;
use coreward_metrics::metric_declarations::{Component, MetricFamily, declare_family};
use coreward_metrics::metrics;
use coreward_metrics::snapshot::MetricsSnapshot;
use coreward_tls::certificate::CertificateFingerprint;
use coreward_tls::failure::{ConnectionFailureCounters, ConnectionFailureReason, PeerConnectionFailure};
use coreward_tls::verify::RevocationList;
use coreward_tls::{
    AcceptedConnection, AcceptorLimits, ClientCertificatePolicy, ConnectionAcceptor, ConnectionCaller, FleetRole,
    ReloadableTlsCredentials, TlsCredentialFiles,
};
use tokio::net::TcpStream;
use tonic::{Request, Status};

metrics! {
    TLS_HANDSHAKE_FAILURES_TOTAL: MetricFamily<1> = declare_family(
        Counter, "coreward_tls_handshake_failures_total", &["reason"], &[Component::Controller, Component::Rack],
        "Connections that failed at TLS, by reason",
    );
}

/// Security settings of a daemon that accepts connections.
pub struct ListenerConfig<'a> {
    pub listen_address: SocketAddr,
    pub tls: Option<&'a TlsCredentialFiles>,
    pub revoked_certificates: &'a [CertificateFingerprint],
    /// Whether the operator permits connections without TLS, so that a missing `tls` causes no warning.
    pub allow_plaintext: bool,
}

/// Certificates, revocation list and failure counters with which a controller or rack controller authenticates its
/// peers.
pub struct ListenerSecurity {
    /// Certificates and key of this process, or `None` if connections are neither encrypted nor authenticated.
    pub tls: Option<Arc<ReloadableTlsCredentials>>,
    /// Counters of rejected peers, by reason.
    pub failure_counters: Arc<ConnectionFailureCounters>,
    pub revocation_list: RevocationList,
}

impl ListenerSecurity {
    /// Loads the certificates that the configuration names. Fails if they cannot be used.
    pub fn from_config(config: &ListenerConfig<'_>) -> anyhow::Result<Self> {
        if config.tls.is_none() && !config.allow_plaintext && !config.listen_address.ip().is_loopback() {
            tracing::warn!(
                event = "plaintext",
                address = %config.listen_address,
                "without `[tls]` any client can read the cookie keys and report loads: configure `[tls]`, or set \
                 `allow_plaintext`"
            );
        }
        let revocation_list = RevocationList::default();
        revocation_list.replace_fingerprints(config.revoked_certificates.iter().copied());
        Ok(Self {
            tls: coreward_tls::table::load_tls_credentials(config.tls)?,
            failure_counters: Arc::default(),
            revocation_list,
        })
    }

    /// Returns the acceptor for gRPC, which requires a client certificate with one of these roles.
    pub fn grpc_acceptor(&self, accepted_roles: &[FleetRole], limits: AcceptorLimits) -> Arc<ConnectionAcceptor> {
        let failure_counters = self.failure_counters.clone();
        match &self.tls {
            Some(tls) => {
                let (certificate_policy, revoked) = (ClientCertificatePolicy::Required, self.revocation_list.clone());
                ConnectionAcceptor::with_tls(
                    tls.clone(),
                    accepted_roles,
                    certificate_policy,
                    &["h2"],
                    revoked,
                    limits,
                    failure_counters,
                )
            }
            None => ConnectionAcceptor::without_tls(limits, failure_counters),
        }
    }

    /// Returns the acceptor for the HTTP API. Clients without an operator's or a viewer's certificate need a token, and
    /// otherwise get an HTTP error. Connections to a loopback address are not encrypted.
    pub fn api_acceptor(&self, address: SocketAddr) -> ApiAcceptor {
        let failure_counters = self.failure_counters.clone();
        let acceptor = match self.tls.clone().filter(|_| !address.ip().is_loopback()) {
            Some(tls) => {
                let (certificate_policy, revoked) = (ClientCertificatePolicy::Optional, self.revocation_list.clone());
                ConnectionAcceptor::with_tls(
                    tls,
                    &FleetRole::ALL,
                    certificate_policy,
                    &["http/1.1"],
                    revoked,
                    AcceptorLimits::default(),
                    failure_counters,
                )
            }
            None => ConnectionAcceptor::without_tls(AcceptorLimits::default(), failure_counters),
        };
        ApiAcceptor(acceptor)
    }

    /// Reloads the certificates whenever their files change. Never returns.
    pub async fn reload_changed_certificates(&self) -> std::convert::Infallible {
        match &self.tls {
            Some(tls) => tls.clone().reload_credentials_on_change().await,
            None => std::future::pending().await,
        }
    }

    pub fn add_metrics(&self, snapshot: &mut MetricsSnapshot) {
        self.tls.iter().for_each(|tls| add_certificate_expiry_metrics(tls, snapshot));
        for (reason, count) in self.failure_counters.failure_counts_by_reason() {
            snapshot.add_value(&TLS_HANDSHAKE_FAILURES_TOTAL, [reason.name()], count as f64);
        }
    }
}

#[derive(Clone)]
pub struct ApiAcceptor(Arc<ConnectionAcceptor>);

impl ApiAcceptor {
    /// Closes connections whose certificates have expired or are revoked. Never returns.
    pub async fn close_invalid_connections_loop(self) -> std::convert::Infallible {
        self.0.close_invalid_connections_periodically().await
    }
}

impl StreamAcceptor for ApiAcceptor {
    type Stream = AcceptedConnection;

    async fn accept(&self, stream: TcpStream, address: SocketAddr) -> io::Result<(AcceptedConnection, ConnectionPeer)> {
        let connection = self.0.clone().admit_connection(stream, address).await.map_err(io::Error::other)?;
        let caller = connection.caller();
        let certificate_identity =
            caller.identity.as_ref().zip(connection.certificate_fingerprint_and_expiry()).and_then(
                |(identity, certificate)| {
                    let role = match identity.role {
                        FleetRole::Operator => coreward_api::Role::Operator,
                        FleetRole::Viewer => coreward_api::Role::Viewer,
                        _ => return None,
                    };
                    let (fingerprint, not_after) = certificate;
                    Some(CertificateIdentity { role, name: identity.to_string().into(), fingerprint, not_after })
                },
            );
        let peer = ConnectionPeer {
            address: address.ip(),
            certificate: certificate_identity,
            is_connection_encrypted: caller.is_encrypted,
        };
        Ok((connection, peer))
    }
}

/// Peer that sent a request. If the peer is rejected, this is counted and logged.
pub struct AuthenticatedPeer {
    pub caller: ConnectionCaller,
    security: Arc<ListenerSecurity>,
}

impl AuthenticatedPeer {
    /// Returns the peer that sent a request. Fails if the connection did not come through the acceptor.
    pub fn from_request<T>(request: &Request<T>, security: &Arc<ListenerSecurity>) -> Result<Self, Status> {
        Ok(Self { caller: ConnectionCaller::from_request(request)?, security: security.clone() })
    }

    /// Checks that the peer has one of these roles. The PERMISSION_DENIED error names the peer and the required roles.
    pub fn require_any_role(&self, roles: &[FleetRole]) -> Result<(), Status> {
        self.caller
            .require_any_role(roles)
            .inspect_err(|status| self.count_connection_failure(ConnectionFailureReason::WrongRole, status))
    }

    pub fn require_role_and_name(&self, role: FleetRole, name: &str) -> Result<(), Status> {
        self.caller
            .require_role_and_name(role, name)
            .inspect_err(|status| self.count_connection_failure(ConnectionFailureReason::WrongName, status))
    }

    fn count_connection_failure(&self, reason: ConnectionFailureReason, status: &Status) {
        self.security.failure_counters.count_and_log(
            &self.caller,
            &PeerConnectionFailure { reason, failure_description: status.message().to_owned() },
        );
    }
}
