//! Verification of servers' certificates.

use std::sync::{Arc, OnceLock};

use coreward_model::health::CertificateVerification;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

/// Returns the TLS client configuration for health checks, or the reason why no certificate can be verified.
pub fn client_config(verification: &CertificateVerification) -> Result<Arc<ClientConfig>, String> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone());
    let builder = builder.with_safe_default_protocol_versions().map_err(|error| error.to_string())?;
    let builder = match verification {
        CertificateVerification::Off => {
            let verifier = Arc::new(AnyCertificateVerifier { provider });
            builder.dangerous().with_custom_certificate_verifier(verifier)
        }
        CertificateVerification::System => builder.with_root_certificates(system_roots()?),
        CertificateVerification::Authorities(pem) => builder.with_root_certificates(Arc::new(parse_authorities(pem)?)),
    };
    Ok(Arc::new(builder.with_no_client_auth()))
}

fn parse_authorities(pem: &str) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        let certificate = certificate.map_err(|error| format!("`ca`: {error}"))?;
        roots.add(certificate).map_err(|error| format!("`ca`: {error}"))?;
    }
    if roots.is_empty() { Err("`ca`: no certificate in it".to_owned()) } else { Ok(roots) }
}

/// Returns the system's root certificates. They are read once: a change of the system's list needs a restart.
fn system_roots() -> Result<Arc<RootCertStore>, String> {
    static SYSTEM: OnceLock<Arc<RootCertStore>> = OnceLock::new();
    let roots = SYSTEM.get_or_init(|| {
        let loaded = rustls_native_certs::load_native_certs();
        for error in &loaded.errors {
            tracing::warn!(
                event = "ca-unreadable",
                %error,
                "the load balancer cannot read an authority of this system: HTTPS checks may reject servers"
            );
        }
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(loaded.certs);
        Arc::new(roots)
    });
    match roots.is_empty() {
        true => {
            Err("this system trusts no authority (Debian package ca-certificates), and there is no `ca`".to_owned())
        }
        false => Ok(roots.clone()),
    }
}

/// Verifier that accepts any certificate, provided that the server has the certificate's private key.
#[derive(Debug)]
struct AnyCertificateVerifier {
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for AnyCertificateVerifier {
    fn verify_server_cert(
        &self,
        _certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
