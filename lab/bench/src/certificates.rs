//! Certificates for the processes of a bench, signed by a temporary authority.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use coreward_tls::authority::{CertificateAuthority, CertificateValidity, DAY};
use coreward_tls::{FleetIdentity, FleetRole, IdentityName, TlsCredentialFiles};

/// Temporary certificate authority, which stores itself and all issued certificates in one directory.
pub struct TestCertificateAuthority {
    directory: PathBuf,
    authority: CertificateAuthority,
    fleet_name: IdentityName,
}

impl TestCertificateAuthority {
    /// Creates the authority in `directory`. Fails when the directory cannot be written.
    pub fn new(directory: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        let fleet_name: IdentityName = "bench".parse().map_err(anyhow::Error::msg)?;
        let authority = CertificateAuthority::init(directory, &fleet_name, 2 * DAY)?;
        Ok(Self { directory: directory.to_owned(), authority, fleet_name })
    }

    /// Issues a certificate for a daemon of this role and name. Fails when it cannot be written.
    pub fn issue_certificate(&self, role: FleetRole, name: &str) -> anyhow::Result<TlsCredentialFiles> {
        let identity =
            FleetIdentity { fleet: self.fleet_name.clone(), role, name: name.parse().map_err(anyhow::Error::msg)? };
        let credential_directory = self.directory.join(format!("{role}-{name}"));
        self.authority
            .issue_certificate(&identity, &[], CertificateValidity::from_now(DAY))?
            .write_files(&credential_directory, &self.authority)?;
        let credential_path = |file_name: &str| credential_directory.join(file_name);
        Ok(TlsCredentialFiles {
            ca_path: credential_path("ca.crt"),
            certificate_path: credential_path("own.crt"),
            key_path: credential_path("own.key"),
        })
    }

    /// Issues a certificate, and returns the `[tls]` table for it in a daemon's file. Fails when it cannot be written.
    pub fn issue_certificate_as_toml(&self, role: FleetRole, name: &str) -> anyhow::Result<String> {
        let TlsCredentialFiles { ca_path: ca, certificate_path: certificate, key_path: key } =
            self.issue_certificate(role, name)?;
        Ok(format!("[tls]\nca = {ca:?}\ncertificate = {certificate:?}\nkey = {key:?}\n"))
    }
}
