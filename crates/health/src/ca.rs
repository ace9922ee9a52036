//! Verification of servers' certificates in health checks over HTTPS.

use std::sync::{Arc, OnceLock};

use coreward_model::health::CertificateVerification;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

/// Returns the TLS configuration for health checks, or the reason why certificates cannot be verified.
pub fn build_tls_client_config(verification: &CertificateVerification) -> Result<Arc<ClientConfig>, String> {
    let crypto_provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(crypto_provider.clone());
    let builder = builder.with_safe_default_protocol_versions().map_err(|error| error.to_string())?;
    let config_builder = match verification {
        CertificateVerification::Off => {
            let any_certificate_verifier = Arc::new(AnyCertificateVerifier { crypto_provider });
            builder.dangerous().with_custom_certificate_verifier(any_certificate_verifier)
        }
        CertificateVerification::System => builder.with_root_certificates(load_system_roots()?),
        CertificateVerification::PemAuthorities(pem) => {
            builder.with_root_certificates(Arc::new(parse_authorities(pem)?))
        }
    };
    Ok(Arc::new(config_builder.with_no_client_auth()))
}

fn parse_authorities(pem: &str) -> Result<RootCertStore, String> {
    let mut root_store = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        let certificate = certificate.map_err(|error| format!("`ca`: {error}"))?;
        root_store.add(certificate).map_err(|error| format!("`ca`: {error}"))?;
    }
    if root_store.is_empty() { Err("`ca`: no certificate in it".to_owned()) } else { Ok(root_store) }
}

/// Returns the system's root certificates. They are read only once, so later changes require a restart.
fn load_system_roots() -> Result<Arc<RootCertStore>, String> {
    static SYSTEM_ROOT_CERTIFICATES: OnceLock<Arc<RootCertStore>> = OnceLock::new();
    let roots = SYSTEM_ROOT_CERTIFICATES.get_or_init(|| {
        let native_certificates = rustls_native_certs::load_native_certs();
        for error in &native_certificates.errors {
            tracing::warn!(
                event = "ca-unreadable",
                %error,
                "the load balancer cannot read one of the system's CA certificates: HTTPS checks may find servers down"
            );
        }
        let mut root_store = RootCertStore::empty();
        root_store.add_parsable_certificates(native_certificates.certs);
        Arc::new(root_store)
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
    crypto_provider: Arc<CryptoProvider>,
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
        let algorithms = &self.crypto_provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.crypto_provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.crypto_provider.signature_verification_algorithms.supported_schemes()
    }
}
