//! Credentials that are read from certificate files, and the TLS configurations that are made from them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::{Resumption, WantsClientCert};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::NoServerSessionStorage;
use rustls::version::TLS13;
use rustls::{ClientConfig, ConfigBuilder, RootCertStore, ServerConfig};

use crate::certificate::Certificate;
use crate::identity::{FleetIdentity, FleetRole, IdentityName};
use crate::verify::{
    ClientCertificatePolicy, ClientCertificateVerifier, ExpectedControllerHost, RevocationList,
    ServerCertificateVerifier,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsCredentialFiles {
    /// Path of the file with the trusted authorities' certificates (PEM).
    pub ca_path: PathBuf,
    /// Path of the file with the daemon's own certificate and its chain (PEM).
    pub certificate_path: PathBuf,
    /// Path of the private key (PEM), which only its owner may be able to read.
    pub key_path: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct CredentialError {
    pub config_key: &'static str,
    /// Text that names the file, the problem and the expected content.
    pub message: String,
}

fn credential_error(config_key: &'static str, path: &Path, problem: impl std::fmt::Display) -> CredentialError {
    CredentialError { config_key, message: format!("{}: {problem}", path.display()) }
}

/// Certificate and key of this process, and the trusted authorities, as read from their files.
#[derive(Debug)]
pub struct Credentials {
    pub identity: FleetIdentity,
    pub own_certificate: Certificate,
    pub authorities: Vec<Certificate>,
    root_certificates: Arc<RootCertStore>,
    certificate_chain: Vec<CertificateDer<'static>>,
    private_key: PrivateKeyDer<'static>,
}

impl Credentials {
    pub fn find_problems(files: &TlsCredentialFiles) -> Vec<CredentialError> {
        let problems = [
            read_authorities(&files.ca_path).err(),
            read_certificate_chain("certificate", &files.certificate_path).err(),
            read_private_key(&files.key_path).err(),
        ];
        let problems: Vec<CredentialError> = problems.into_iter().flatten().collect();
        match problems.is_empty() {
            true => Self::load(files).err().into_iter().collect(),
            false => problems,
        }
    }

    pub fn load(files: &TlsCredentialFiles) -> Result<Self, CredentialError> {
        let (roots, authorities) = read_authorities(&files.ca_path)?;
        let path = &files.certificate_path;
        let certificate_chain = read_certificate_chain("certificate", path)?;
        let own_certificate = Certificate::parse_der(&certificate_chain[0])
            .map_err(|problem| credential_error("certificate", path, problem))?;
        let no_identity_error = || {
            let expected_identity = "expected a URI coreward://FLEET/ROLE/NAME among its subject alternative names";
            credential_error("certificate", path, format!("the first certificate has no identity: {expected_identity}"))
        };
        let identity = own_certificate.identity.clone().ok_or_else(no_identity_error)?;
        let private_key = read_private_key(&files.key_path)?;
        let credentials = Self {
            identity,
            own_certificate,
            authorities,
            root_certificates: Arc::new(roots),
            certificate_chain,
            private_key,
        };
        // This fails unless key and certificate belong together.
        credentials.build_client_config(&[FleetRole::Controller], ExpectedControllerHost::Any, "h2").map_err(
            |error| {
                credential_error("key", &files.key_path, format!("{error}: expected the key of {}", path.display()))
            },
        )?;
        Ok(credentials)
    }

    /// Returns the TLS configuration for connecting to peers of these roles. ALPN offers `protocol`.
    pub fn build_client_config(
        &self,
        expected_roles: &[FleetRole],
        host: ExpectedControllerHost,
        protocol: &str,
    ) -> Result<ClientConfig, rustls::Error> {
        let fleet = Some(self.identity.fleet.clone());
        let builder = client_config_builder(self.root_certificates.clone(), fleet, expected_roles, host)?;
        let config = builder.with_client_auth_cert(self.certificate_chain.clone(), self.private_key.clone_key())?;
        Ok(set_alpn_protocol(config, protocol))
    }

    pub fn build_client_verifier(
        &self,
        accepted_roles: &[FleetRole],
        certificate_policy: ClientCertificatePolicy,
        revocation_list: RevocationList,
    ) -> anyhow::Result<ClientCertificateVerifier> {
        let fleet = self.identity.fleet.clone();
        ClientCertificateVerifier::new(
            self.root_certificates.clone(),
            &crypto_provider(),
            fleet,
            accepted_roles,
            certificate_policy,
            revocation_list,
        )
    }

    /// Returns the TLS configuration for accepting connections from peers of these roles.
    pub fn build_server_config(
        &self,
        accepted_roles: &[FleetRole],
        certificate_policy: ClientCertificatePolicy,
        revocation_list: RevocationList,
        protocols: &[&str],
    ) -> anyhow::Result<ServerConfig> {
        let verifier = self.build_client_verifier(accepted_roles, certificate_policy, revocation_list)?;
        let builder = ServerConfig::builder_with_provider(crypto_provider()).with_protocol_versions(&[&TLS13])?;
        let builder = builder.with_client_cert_verifier(Arc::new(verifier));
        let mut config = builder.with_single_cert(self.certificate_chain.clone(), self.private_key.clone_key())?;
        // Resumption is disabled, because a resumed session would skip the verification of the certificate.
        (config.send_tls13_tickets, config.session_storage) = (0, Arc::new(NoServerSessionStorage {}));
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        Ok(config)
    }
}

fn read_private_key(path: &Path) -> Result<PrivateKeyDer<'static>, CredentialError> {
    let pem = coreward_config::read_secret(path).map_err(|message| CredentialError { config_key: "key", message })?;
    PrivateKeyDer::from_pem_slice(pem.as_bytes())
        .map_err(|error| credential_error("key", path, format!("{error}: expected a private key in PEM")))
}

/// Returns the TLS configuration for connecting, without a client certificate, to peers of these roles in any fleet.
pub fn client_config_without_certificate(
    ca: &Path,
    expected_roles: &[FleetRole],
    host: ExpectedControllerHost,
    protocol: &str,
) -> Result<ClientConfig, CredentialError> {
    let (roots, _) = read_authorities(ca)?;
    let builder = client_config_builder(Arc::new(roots), None, expected_roles, host)
        .map_err(|error| credential_error("ca", ca, error))?;
    Ok(set_alpn_protocol(builder.with_no_client_auth(), protocol))
}

fn client_config_builder(
    roots: Arc<RootCertStore>,
    fleet: Option<IdentityName>,
    expected_roles: &[FleetRole],
    host: ExpectedControllerHost,
) -> Result<ConfigBuilder<ClientConfig, WantsClientCert>, rustls::Error> {
    let provider = crypto_provider();
    let verifier = ServerCertificateVerifier::new(roots, &provider, fleet, expected_roles, host);
    let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13])?;
    Ok(builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier)))
}

fn set_alpn_protocol(mut config: ClientConfig, protocol: &str) -> ClientConfig {
    // A resumed session would skip the verification of the certificate.
    config.resumption = Resumption::disabled();
    config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
    config
}

fn crypto_provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn read_certificate_chain(
    config_key: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, CredentialError> {
    let pem = std::fs::read(path)
        .map_err(|error| credential_error(config_key, path, format!("{error}: expected certificates in PEM")))?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let certificates = certificates
        .map_err(|error| credential_error(config_key, path, format!("{error}: expected certificates in PEM")))?;
    match certificates.is_empty() {
        true => Err(credential_error(config_key, path, "no certificate in it: expected at least one, in PEM")),
        false => Ok(certificates),
    }
}

fn read_authorities(path: &Path) -> Result<(RootCertStore, Vec<Certificate>), CredentialError> {
    let (mut roots, mut authorities) = (RootCertStore::empty(), Vec::new());
    for der in read_certificate_chain("ca", path)? {
        let certificate = Certificate::parse_der(&der).map_err(|problem| credential_error("ca", path, problem))?;
        if !certificate.is_authority {
            let problem =
                format!("{} cannot sign certificates: expected certificates of authorities", certificate.subject);
            return Err(credential_error("ca", path, problem));
        }
        roots.add(der).map_err(|error| credential_error("ca", path, error))?;
        authorities.push(certificate);
    }
    Ok((roots, authorities))
}

pub fn read_certificates(path: &Path) -> anyhow::Result<Vec<Certificate>> {
    let certificate_chain = read_certificate_chain("certificate", path)?;
    let parse_certificate =
        |der| Certificate::parse_der(der).map_err(|problem| credential_error("certificate", path, problem).into());
    certificate_chain.iter().map(parse_certificate).collect()
}
