//! Verification that the peer's certificate has a trusted authority, a current validity, and an accepted fleet and
//! role. Daemons do not compare the host, because addresses change. Commands do ([`ExpectedControllerHost`]), because a
//! person has chosen the host.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::RwLock;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, PeerIncompatible, RootCertStore,
    SignatureScheme,
};

use crate::certificate::{Certificate, CertificateFingerprint};
use crate::failure::RejectedIdentityError;
use crate::identity::{FleetIdentity, FleetRole, IdentityName};

/// Fingerprints of revoked certificates. All clones share the same set.
#[derive(Debug, Clone, Default)]
pub struct RevocationList(Arc<RwLock<BTreeSet<CertificateFingerprint>>>);

impl RevocationList {
    pub fn replace_fingerprints(&self, fingerprints: impl IntoIterator<Item = CertificateFingerprint>) {
        *self.0.write() = fingerprints.into_iter().collect();
    }

    pub fn contains(&self, fingerprint: &CertificateFingerprint) -> bool {
        self.0.read().contains(fingerprint)
    }
}

/// Host that a controller's certificate must contain when a client connects to the controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExpectedControllerHost {
    Any,
    /// Host in the URL of the request. A certificate without hosts is also accepted.
    Requested,
    /// One of these hosts. The certificate must contain it as a host or as the name in its identity.
    OneOf(Vec<String>),
}

impl ExpectedControllerHost {
    fn check_host(
        &self,
        requested_host: &ServerName<'_>,
        webpki_certificate: &ParsedCertificate<'_>,
        peer_certificate: &Certificate,
        identity: &FleetIdentity,
    ) -> Result<(), RejectedIdentityError> {
        let is_valid_for = |host: &ServerName<'_>| verify_server_name(webpki_certificate, host).is_ok();
        let expected_hosts = match self {
            Self::Any => return Ok(()),
            Self::Requested if peer_certificate.hosts.is_empty() || is_valid_for(requested_host) => return Ok(()),
            Self::Requested => requested_host.to_str().into_owned(),
            Self::OneOf(accepted_hosts) => {
                let is_accepted_host = |text: &String| {
                    identity.name.as_str() == text
                        || ServerName::try_from(text.as_str()).is_ok_and(|host| is_valid_for(&host))
                };
                if accepted_hosts.iter().any(is_accepted_host) {
                    return Ok(());
                }
                accepted_hosts.join(" or ")
            }
        };
        Err(RejectedIdentityError::WrongHost {
            identity: identity.clone(),
            hosts: peer_certificate.hosts.clone(),
            expected: expected_hosts,
        })
    }
}

/// Fleet and roles that the verifier accepts in a peer's certificate.
#[derive(Debug)]
struct AcceptedPeers {
    /// Required fleet of the peer, or `None` if any fleet is accepted.
    fleet: Option<IdentityName>,
    accepted_roles: Vec<FleetRole>,
}

impl AcceptedPeers {
    fn check_certificate(
        &self,
        certificate: &CertificateDer<'_>,
    ) -> Result<(FleetIdentity, Certificate), RejectedIdentityError> {
        let peer_certificate = Certificate::parse_der(certificate).map_err(RejectedIdentityError::NoIdentity)?;
        let identity = peer_certificate
            .identity
            .clone()
            .ok_or_else(|| RejectedIdentityError::NoIdentity(peer_certificate.subject.clone()))?;
        if let Some(own_fleet) = self.fleet.clone().filter(|ours| *ours != identity.fleet) {
            return Err(RejectedIdentityError::OtherFleet { identity, own_fleet });
        }
        if !self.accepted_roles.contains(&identity.role) {
            return Err(RejectedIdentityError::WrongRole { identity, expected: self.accepted_roles.clone() });
        }
        Ok((identity, peer_certificate))
    }
}

fn to_tls_error(accept_error: RejectedIdentityError) -> Error {
    Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(accept_error))))
}

#[derive(Debug)]
pub struct ServerCertificateVerifier {
    root_certificates: Arc<RootCertStore>,
    signature_algorithms: WebPkiSupportedAlgorithms,
    accepted_peers: AcceptedPeers,
    expected_host: ExpectedControllerHost,
}

impl ServerCertificateVerifier {
    /// Creates a verifier that accepts certificates with one of `roles` in `fleet`, or in any fleet with `None`.
    pub fn new(
        root_certificates: Arc<RootCertStore>,
        provider: &CryptoProvider,
        fleet: Option<IdentityName>,
        roles: &[FleetRole],
        expected_host: ExpectedControllerHost,
    ) -> Self {
        let signature_algorithms = provider.signature_verification_algorithms;
        Self {
            root_certificates,
            signature_algorithms,
            accepted_peers: AcceptedPeers { fleet, accepted_roles: roles.to_vec() },
            expected_host,
        }
    }
}

/// Defines the signature checks of both verifiers. They accept only TLS 1.3 and the algorithms that the verifier
/// supports.
macro_rules! tls13_signature_checks {
    () => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(PeerIncompatible::Tls12NotOffered.into())
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls13_signature(message, certificate, signature, &self.signature_algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.signature_algorithms.supported_schemes()
        }
    };
}

impl ServerCertVerifier for ServerCertificateVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        requested_host: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let webpki_certificate = ParsedCertificate::try_from(certificate)?;
        let algorithms = self.signature_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(
            &webpki_certificate,
            &self.root_certificates,
            intermediates,
            now,
            algorithms,
        )?;
        let (identity, peer_certificate) = self.accepted_peers.check_certificate(certificate).map_err(to_tls_error)?;
        self.expected_host
            .check_host(requested_host, &webpki_certificate, &peer_certificate, &identity)
            .map_err(to_tls_error)?;
        Ok(ServerCertVerified::assertion())
    }

    tls13_signature_checks!();
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientCertificatePolicy {
    Required,
    /// Optional certificate, because clients may authenticate with a token instead.
    Optional,
}

#[derive(Debug)]
pub struct ClientCertificateVerifier {
    chain_verifier: Arc<dyn ClientCertVerifier>,
    signature_algorithms: WebPkiSupportedAlgorithms,
    accepted_peers: AcceptedPeers,
    revocation_list: RevocationList,
}

impl ClientCertificateVerifier {
    /// Creates a verifier that accepts certificates with one of `roles` in `fleet`, unless they are revoked. Fails if
    /// `roots` is empty.
    pub fn new(
        roots: Arc<RootCertStore>,
        provider: &Arc<CryptoProvider>,
        fleet: IdentityName,
        roles: &[FleetRole],
        certificate_policy: ClientCertificatePolicy,
        revocation_list: RevocationList,
    ) -> anyhow::Result<Self> {
        let builder = WebPkiClientVerifier::builder_with_provider(roots, provider.clone());
        let chain_verifier = match certificate_policy {
            ClientCertificatePolicy::Required => builder.build()?,
            ClientCertificatePolicy::Optional => builder.allow_unauthenticated().build()?,
        };
        let algorithms = provider.signature_verification_algorithms;
        Ok(Self {
            chain_verifier,
            signature_algorithms: algorithms,
            accepted_peers: AcceptedPeers { fleet: Some(fleet), accepted_roles: roles.to_vec() },
            revocation_list,
        })
    }
}

impl ClientCertVerifier for ClientCertificateVerifier {
    fn offer_client_auth(&self) -> bool {
        self.chain_verifier.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.chain_verifier.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain_verifier.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let chain_verified = self.chain_verifier.verify_client_cert(certificate, intermediates, now)?;
        let (identity, peer_certificate) = self.accepted_peers.check_certificate(certificate).map_err(to_tls_error)?;
        if self.revocation_list.contains(&peer_certificate.fingerprint) {
            return Err(to_tls_error(RejectedIdentityError::Revoked(identity)));
        }
        Ok(chain_verified)
    }

    tls13_signature_checks!();
}
