//! Certificate authority that the operator keeps in a directory, with its key and certificates.
//!
//! ```text
//! ca.crt                      certificates that all daemons trust (one, or two during a roll-over)
//! authority.crt, .key         authority that currently signs certificates
//! next.crt, .key              next authority, which exists after the first step of a roll-over
//! previous.crt                previous authority, which exists after the second step of a roll-over
//! ```
//!
//! Each step writes the key last. If a step is interrupted, the same command completes it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PublicKeyData as _, SanType,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use time::OffsetDateTime;

use crate::atomic_file_writes::{self, write_public_file, write_secret};
use crate::certificate::{Certificate, unix_now};
use crate::identity::{FleetIdentity, FleetRole, IdentityName};

/// Tolerated difference between two machines' clocks. A certificate's validity begins this much earlier than its issue.
pub const MACHINE_CLOCK_TOLERANCE: Duration = Duration::from_secs(300);
/// One day, the unit in which operators give the validity of certificates.
pub const DAY: Duration = Duration::from_secs(86_400);

/// Certificate authority of a fleet. Its files are in one directory.
pub struct CertificateAuthority {
    directory: PathBuf,
}

/// Period in which a certificate is valid, as times since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CertificateValidity {
    /// Time from which the certificate is valid.
    pub not_before: Duration,
    /// Time at which the certificate expires.
    pub not_after: Duration,
}

impl CertificateValidity {
    /// Returns a validity from [`MACHINE_CLOCK_TOLERANCE`] before the current time until the given duration after it.
    pub fn from_now(duration: Duration) -> Self {
        let now = unix_now();
        Self { not_before: now.saturating_sub(MACHINE_CLOCK_TOLERANCE), not_after: now + duration }
    }
}

/// Certificate and its private key, both in PEM.
pub struct IssuedCertificate {
    pub certificate_pem: String,
    pub key_pem: String,
}

/// Step of the roll-over from one authority to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum AuthorityRolloverStep {
    /// Create the next authority: ca.crt has both, and the old one still signs
    Begin,
    /// Let the next authority sign, after every daemon has the ca.crt of `begin`: ca.crt still has both
    Switch,
    /// Remove the old authority from ca.crt, after every daemon has a certificate of the new one
    Finish,
}

impl CertificateAuthority {
    /// Creates a fleet's certificate authority in a directory that does not contain one.
    pub fn init(directory: &Path, fleet: &IdentityName, validity_duration: Duration) -> anyhow::Result<Self> {
        fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        let authority = Self { directory: directory.to_owned() };
        let key_path = authority.file_path("authority.key");
        ensure!(!key_path.exists(), "{} exists: expected a directory without an authority", key_path.display());
        authority.create_authority_files(
            "authority",
            fleet,
            CertificateValidity::from_now(validity_duration),
            &["authority"],
        )?;
        Ok(authority)
    }

    pub fn open(directory: &Path) -> anyhow::Result<Self> {
        let authority = Self { directory: directory.to_owned() };
        let key_path = authority.file_path("authority.key");
        ensure!(
            key_path.exists(),
            "{} is not there: expected an authority, which `coreward certs init` makes",
            key_path.display()
        );
        Ok(authority)
    }

    fn file_path(&self, file: &str) -> PathBuf {
        self.directory.join(file)
    }

    /// Returns the path of the file with the trusted certificates.
    pub fn ca_path(&self) -> PathBuf {
        self.file_path("ca.crt")
    }

    fn read_file(&self, file: &str) -> anyhow::Result<String> {
        let path = self.file_path(file);
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    }

    /// Creates an authority's key and certificate. Then writes the certificates of `authority_names` to ca.crt.
    fn create_authority_files(
        &self,
        name: &str,
        fleet: &IdentityName,
        validity: CertificateValidity,
        authority_names: &[&str],
    ) -> anyhow::Result<()> {
        let key_pair = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::OrganizationName, fleet.as_str());
        params.distinguished_name.push(DnType::CommonName, format!("coreward authority of {fleet}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        (params.not_before, params.not_after) = (to_date_time(validity.not_before)?, to_date_time(validity.not_after)?);
        let certificate = params.self_signed(&key_pair)?;
        write_public_file(&self.file_path(&format!("{name}.crt")), &certificate.pem())?;
        self.write_ca_file(authority_names)?;
        write_secret(&self.file_path(&format!("{name}.key")), key_pair.serialize_pem())
    }

    /// Replaces the content of ca.crt by the certificates of the named authorities.
    fn write_ca_file(&self, authority_names: &[&str]) -> anyhow::Result<()> {
        let certificates: anyhow::Result<Vec<String>> =
            authority_names.iter().map(|name| self.read_file(&format!("{name}.crt"))).collect();
        write_public_file(&self.ca_path(), &certificates?.concat())
    }

    pub fn fleet_name(&self) -> anyhow::Result<IdentityName> {
        let certificate_der = CertificateDer::from_pem_slice(self.read_file("authority.crt")?.as_bytes())?;
        let (_, x509_certificate) = x509_parser::parse_x509_certificate(&certificate_der)?;
        let organization = x509_certificate.subject().iter_organization().next().and_then(|name| name.as_str().ok());
        let name =
            organization.context("authority.crt names no fleet (O): expected one that `coreward certs init` made")?;
        name.parse().map_err(anyhow::Error::msg)
    }

    /// Issues a certificate with a new key. Fails if the authority would expire before the certificate.
    pub fn issue_certificate(
        &self,
        identity: &FleetIdentity,
        addresses: &[String],
        validity: CertificateValidity,
    ) -> anyhow::Result<IssuedCertificate> {
        let authority_pem = self.read_file("authority.crt")?;
        let authority_certificate = Certificate::parse_der(&CertificateDer::from_pem_slice(authority_pem.as_bytes())?)
            .map_err(anyhow::Error::msg)?;
        ensure!(
            validity.not_after <= authority_certificate.not_after,
            "the authority ends before this certificate would: expected at most {} days, or `coreward certs roll-over`",
            authority_certificate.remaining_validity(unix_now()).as_secs() / DAY.as_secs()
        );
        let authority_key = self.read_key("authority.key")?;
        ensure!(
            self.is_certificate_of_key(&authority_key, "authority.crt")?,
            "authority.crt is no certificate of authority.key: expected `coreward certs roll-over switch` again, where \
             that was interrupted"
        );
        let issuer = Issuer::from_ca_cert_pem(&authority_pem, authority_key)?;
        let key_pair = KeyPair::generate()?;
        let mut params = CertificateParams::new(addresses.to_vec())?;
        params.distinguished_name.push(DnType::OrganizationName, identity.fleet.as_str());
        params.distinguished_name.push(DnType::CommonName, identity.to_string());
        params.subject_alt_names.push(SanType::URI(Ia5String::try_from(identity.identity_uri())?));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        if matches!(identity.role, FleetRole::Controller | FleetRole::Rack) {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
        }
        params.use_authority_key_identifier_extension = true;
        (params.not_before, params.not_after) = (to_date_time(validity.not_before)?, to_date_time(validity.not_after)?);
        let certificate = params.signed_by(&key_pair, &issuer)?;
        Ok(IssuedCertificate { certificate_pem: certificate.pem(), key_pem: key_pair.serialize_pem() })
    }

    /// Executes one step of the authority's replacement. Fails if another step must come next.
    pub fn perform_rollover_step(
        &self,
        step: AuthorityRolloverStep,
        validity_duration: Duration,
    ) -> anyhow::Result<()> {
        let authority_file_exists = |file: &str| self.file_path(file).exists();
        match step {
            AuthorityRolloverStep::Begin => {
                ensure!(!authority_file_exists("next.key"), "next.key exists: expected `switch`, the second step");
                ensure!(
                    !authority_file_exists("previous.crt"),
                    "previous.crt exists: expected `finish`, the last step of the roll-over before"
                );
                self.create_authority_files(
                    "next",
                    &self.fleet_name()?,
                    CertificateValidity::from_now(validity_duration),
                    &["authority", "next"],
                )
            }
            AuthorityRolloverStep::Switch => {
                ensure!(
                    authority_file_exists("next.key") || !authority_file_exists("previous.crt"),
                    "previous.crt exists, and no next.key: the new authority signs already: expected `finish`, the \
                     last step"
                );
                ensure!(authority_file_exists("next.key"), "next.key is not there: expected `begin`, the first step");
                self.switch_to_next_authority()
            }
            AuthorityRolloverStep::Finish => {
                ensure!(!authority_file_exists("next.key"), "next.key exists: expected `switch`, the second step");
                ensure!(
                    authority_file_exists("previous.crt"),
                    "previous.crt is not there: expected `switch`, the second step"
                );
                self.write_ca_file(&["authority"])?;
                atomic_file_writes::remove_durably(&self.file_path("previous.crt"))
            }
        }
    }

    /// Makes the next authority sign all new certificates. Continues an earlier attempt that was interrupted.
    fn switch_to_next_authority(&self) -> anyhow::Result<()> {
        let next_key = self.read_key("next.key")?;
        if !self.is_certificate_of_key(&next_key, "authority.crt")? {
            ensure!(
                self.is_certificate_of_key(&next_key, "next.crt")?,
                "next.crt is no certificate of next.key: expected those of `begin`, the first step: remove both, and \
                 begin again"
            );
            write_public_file(&self.file_path("previous.crt"), &self.read_file("authority.crt")?)?;
            atomic_file_writes::rename_durably(&self.file_path("next.crt"), &self.file_path("authority.crt"))?;
        }
        self.write_ca_file(&["authority", "previous"])?;
        atomic_file_writes::rename_durably(&self.file_path("next.key"), &self.file_path("authority.key"))
    }

    fn read_key(&self, file: &str) -> anyhow::Result<KeyPair> {
        let pem = coreward_config::read_secret(&self.file_path(file)).map_err(anyhow::Error::msg)?;
        KeyPair::from_pem(&pem).with_context(|| self.file_path(file).display().to_string())
    }

    fn is_certificate_of_key(&self, key: &KeyPair, certificate_file: &str) -> anyhow::Result<bool> {
        let certificate_der = CertificateDer::from_pem_slice(self.read_file(certificate_file)?.as_bytes())?;
        let (_, x509_certificate) = x509_parser::parse_x509_certificate(&certificate_der)?;
        Ok(x509_certificate.public_key().raw == key.subject_public_key_info())
    }
}

fn to_date_time(since_1970: Duration) -> anyhow::Result<OffsetDateTime> {
    Ok(OffsetDateTime::from_unix_timestamp(since_1970.as_secs().try_into()?)?)
}

impl IssuedCertificate {
    /// Writes the files ca.crt, own.crt and own.key to a directory.
    pub fn write_files(&self, directory: &Path, authority: &CertificateAuthority) -> anyhow::Result<()> {
        fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        write_public_file(&directory.join("ca.crt"), &authority.read_file("ca.crt")?)?;
        write_secret(&directory.join("own.key"), &self.key_pem)?;
        write_public_file(&directory.join("own.crt"), &self.certificate_pem)
    }
}
