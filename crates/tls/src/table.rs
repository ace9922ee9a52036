//! The table `[tls]` in a daemon's configuration file.

use std::path::PathBuf;

use coreward_config::toml::de::DeValue;
use coreward_config::{FromToml, Spanned, TomlReader, config_struct, parse_toml_string, serde_json};
use serde_json::{Value, json};

use crate::certificate::CertificateFingerprint;
use crate::credentials::{Credentials, TlsCredentialFiles};
use crate::tls::ReloadableTlsCredentials;

config_struct! {
    /// Own certificate and trusted authorities. Without this table connections are neither encrypted nor authenticated.
    struct TlsConfigTable {
        /// File with the authorities' certificates (PEM), relative to this file; several during the replacement of an
        /// authority.
        ca: Spanned<PathBuf>,
        /// File with the daemon's own certificate and the chain to an authority (PEM).
        certificate: Spanned<PathBuf>,
        /// File with the key of the certificate (PEM), readable by its owner only.
        key: Spanned<PathBuf>,
    }
}

/// Reads `[tls]` and checks that its files are usable, even if other keys of the configuration are wrong.
impl FromToml for TlsCredentialFiles {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        let TlsConfigTable { ca, certificate, key } = TlsConfigTable::read(value, reader)?;
        let files = Self {
            ca_path: reader.resolve_path(ca.get_ref()),
            certificate_path: reader.resolve_path(certificate.get_ref()),
            key_path: reader.resolve_path(key.get_ref()),
        };
        let problems = Credentials::find_problems(&files);
        let is_usable = problems.is_empty();
        for problem in problems {
            let span = match problem.config_key {
                "ca" => ca.span(),
                "key" => key.span(),
                _ => certificate.span(),
            };
            reader.report_mistake_within_value(span, problem);
        }
        is_usable.then_some(files)
    }

    fn describe_valid_values() -> String {
        TlsConfigTable::describe_valid_values()
    }

    fn schema() -> Value {
        TlsConfigTable::schema()
    }
}

/// Loads the credentials of the table `[tls]`, or returns `None` if the table is absent. Fails if a file is unusable.
pub fn load_tls_credentials(
    files: Option<&TlsCredentialFiles>,
) -> anyhow::Result<Option<std::sync::Arc<ReloadableTlsCredentials>>> {
    Ok(files.cloned().map(ReloadableTlsCredentials::load_from_files).transpose()?)
}

impl FromToml for CertificateFingerprint {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        parse_toml_string(value, reader, str::parse)
    }

    fn describe_valid_values() -> String {
        "the SHA-256 of a certificate, as `coreward certs show` prints it".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": "^([0-9A-Fa-f]{2}:?){32}$" })
    }
}
