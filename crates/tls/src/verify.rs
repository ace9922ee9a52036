//! Verification that the peer's certificate has a trusted authority, a current validity, and an accepted fleet and
//! role. Daemons do not compare the host, because addresses change. Commands do ([`ExpectedHost`]), because a person
//! has chosen the host.

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

use crate::certificate::{Certificate, Fingerprint};
use crate::failure::AcceptError;
use crate::identity::{Identity, Name, Role};

/// Fingerprints of revoked certificates. All clones share one list.
#[derive(Debug, Clone, Default)]
pub struct RevocationList(Arc<RwLock<BTreeSet<Fingerprint>>>);

impl RevocationList {
    pub fn set(&self, fingerprints: impl IntoIterator<Item = Fingerprint>) {
        *self.0.write() = fingerprints.into_iter().collect();
    }

    pub fn contains(&self, fingerprint: &Fingerprint) -> bool {
        self.0.read().contains(fingerprint)
    }
}

/// Host for which a controller's certificate must be valid when a client connects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExpectedHost {
    Any,
    /// The host in the request's URL. A certificate that names no hosts is accepted, too.
    Requested,
    /// One of these names, which the certificate contains as a host or as its identity's name.
    OneOf(Vec<String>),
}

impl ExpectedHost {
    fn check_host(
        &self,
        requested_host: &ServerName<'_>,
        webpki_certificate: &ParsedCertificate<'_>,
        peer_certificate: &Certificate,
        identity: &Identity,
    ) -> Result<(), AcceptError> {
        let is_valid_for = |host: &ServerName<'_>| verify_server_name(webpki_certificate, host).is_ok();
        let expected_hosts = match self {
            Self::Any => return Ok(()),
            Self::Requested if peer_certificate.hosts.is_empty() || is_valid_for(requested_host) => return Ok(()),
            Self::Requested => requested_host.to_str().into_owned(),
            Self::OneOf(accepted_hosts) => {
                let is_accepted = |text: &String| {
                    identity.name.as_str() == text
                        || ServerName::try_from(text.as_str()).is_ok_and(|host| is_valid_for(&host))
                };
                if accepted_hosts.iter().any(is_accepted) {
                    return Ok(());
                }
                accepted_hosts.join(" or ")
            }
        };
        Err(AcceptError::WrongHost {
            identity: identity.clone(),
            hosts: peer_certificate.hosts.clone(),
            expected: expected_hosts,
        })
    }
}

/// Fleet and roles that a peer's certificate may have.
#[derive(Debug)]
struct AcceptedPeers {
    /// Required fleet of the peer, or `None` if any fleet is accepted.
    fleet: Option<Name>,
    roles: Vec<Role>,
}

impl AcceptedPeers {
    fn check_certificate(&self, certificate: &CertificateDer<'_>) -> Result<(Identity, Certificate), AcceptError> {
        let peer_certificate = Certificate::read(certificate).map_err(AcceptError::NoIdentity)?;
        let identity = peer_certificate
            .identity
            .clone()
            .ok_or_else(|| AcceptError::NoIdentity(peer_certificate.subject.clone()))?;
        if let Some(own_fleet) = self.fleet.clone().filter(|ours| *ours != identity.fleet) {
            return Err(AcceptError::OtherFleet { identity, own_fleet });
        }
        if !self.roles.contains(&identity.role) {
            return Err(AcceptError::WrongRole { identity, expected: self.roles.clone() });
        }
        Ok((identity, peer_certificate))
    }
}

fn to_tls_error(accept_error: AcceptError) -> Error {
    Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(accept_error))))
}

#[derive(Debug)]
pub struct ServerVerifier {
    roots: Arc<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
    accepted_peers: AcceptedPeers,
    expected_host: ExpectedHost,
}

impl ServerVerifier {
    /// Creates a verifier that accepts certificates of `roles` in `fleet`, or in any fleet if `fleet` is `None`.
    pub fn new(
        roots: Arc<RootCertStore>,
        provider: &CryptoProvider,
        fleet: Option<Name>,
        roles: &[Role],
        expected_host: ExpectedHost,
    ) -> Self {
        let algorithms = provider.signature_verification_algorithms;
        Self { roots, algorithms, accepted_peers: AcceptedPeers { fleet, roles: roles.to_vec() }, expected_host }
    }
}

/// Defines both verifiers' signature checks, which accept only TLS 1.3 and use `self.algorithms`.
macro_rules! signatures_of_tls13 {
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
            verify_tls13_signature(message, certificate, signature, &self.algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.algorithms.supported_schemes()
        }
    };
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        requested_host: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let webpki_certificate = ParsedCertificate::try_from(certificate)?;
        let algorithms = self.algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&webpki_certificate, &self.roots, intermediates, now, algorithms)?;
        let (identity, peer_certificate) = self.accepted_peers.check_certificate(certificate).map_err(to_tls_error)?;
        self.expected_host
            .check_host(requested_host, &webpki_certificate, &peer_certificate, &identity)
            .map_err(to_tls_error)?;
        Ok(ServerCertVerified::assertion())
    }

    signatures_of_tls13!();
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientCertificatePolicy {
    Required,
    /// A certificate is optional, because clients may authenticate with a token instead.
    Optional,
}

#[derive(Debug)]
pub struct ClientVerifier {
    chain_verifier: Arc<dyn ClientCertVerifier>,
    algorithms: WebPkiSupportedAlgorithms,
    accepted_peers: AcceptedPeers,
    revocation_list: RevocationList,
}

impl ClientVerifier {
    /// Creates a verifier that accepts certificates of `roles` in `fleet` unless revoked. Fails if `roots` is empty.
    pub fn new(
        roots: Arc<RootCertStore>,
        provider: &Arc<CryptoProvider>,
        fleet: Name,
        roles: &[Role],
        certificates: ClientCertificatePolicy,
        revocation_list: RevocationList,
    ) -> anyhow::Result<Self> {
        let builder = WebPkiClientVerifier::builder_with_provider(roots, provider.clone());
        let chain_verifier = match certificates {
            ClientCertificatePolicy::Required => builder.build()?,
            ClientCertificatePolicy::Optional => builder.allow_unauthenticated().build()?,
        };
        let algorithms = provider.signature_verification_algorithms;
        Ok(Self {
            chain_verifier,
            algorithms,
            accepted_peers: AcceptedPeers { fleet: Some(fleet), roles: roles.to_vec() },
            revocation_list,
        })
    }
}

impl ClientCertVerifier for ClientVerifier {
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
            return Err(to_tls_error(AcceptError::Revoked(identity)));
        }
        Ok(chain_verified)
    }

    signatures_of_tls13!();
}
