//! Certificates for the processes of a bench, signed by a temporary authority.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use coreward_tls::authority::{Authority, DAY, Validity};
use coreward_tls::{CredentialFiles, Identity, Name, Role};

/// Temporary certificate authority, which stores itself and all issued certificates in one directory.
pub struct TestCertificateAuthority {
    directory: PathBuf,
    authority: Authority,
    fleet_name: Name,
}

impl TestCertificateAuthority {
    /// Creates the authority in `directory`. Fails when the directory cannot be written.
    pub fn new(directory: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        let fleet_name: Name = "bench".parse().map_err(anyhow::Error::msg)?;
        let authority = Authority::init(directory, &fleet_name, 2 * DAY)?;
        Ok(Self { directory: directory.to_owned(), authority, fleet_name })
    }

    /// Issues a certificate for a daemon of this role and name. Fails when it cannot be written.
    pub fn issue(&self, role: Role, name: &str) -> anyhow::Result<CredentialFiles> {
        let identity =
            Identity { fleet: self.fleet_name.clone(), role, name: name.parse().map_err(anyhow::Error::msg)? };
        let credential_directory = self.directory.join(format!("{role}-{name}"));
        self.authority
            .issue(&identity, &[], Validity::from_now(DAY))?
            .write_files(&credential_directory, &self.authority)?;
        let credential_path = |file_name: &str| credential_directory.join(file_name);
        Ok(CredentialFiles {
            ca_path: credential_path("ca.crt"),
            certificate_path: credential_path("own.crt"),
            key_path: credential_path("own.key"),
        })
    }

    /// Issues a certificate, and returns the `[tls]` table for it in a daemon's file. Fails when it cannot be written.
    pub fn issue_as_tls_table(&self, role: Role, name: &str) -> anyhow::Result<String> {
        let CredentialFiles { ca_path: ca, certificate_path: certificate, key_path: key } = self.issue(role, name)?;
        Ok(format!("[tls]\nca = {ca:?}\ncertificate = {certificate:?}\nkey = {key:?}\n"))
    }
}
