//! The table `[tls]` in a daemon's configuration file.

use std::path::PathBuf;

use coreward_config::toml::de::DeValue;
use coreward_config::{FromToml, Reader, Spanned, config_struct, parse_text, serde_json};
use serde_json::{Value, json};

use crate::certificate::Fingerprint;
use crate::credentials::{CredentialFiles, Credentials};
use crate::tls::Tls;

config_struct! {
    /// Own certificate and trusted authorities. Without this table connections are neither encrypted nor authenticated.
    struct TlsTable {
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
impl FromToml for CredentialFiles {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut Reader<'_>) -> Option<Self> {
        let TlsTable { ca, certificate, key } = TlsTable::read(value, reader)?;
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
            reader.report_within(span, problem);
        }
        is_usable.then_some(files)
    }

    fn expected() -> String {
        TlsTable::expected()
    }

    fn schema() -> Value {
        TlsTable::schema()
    }
}

/// Loads the credentials of the table `[tls]`, or returns `None` if the table is absent. Fails if a file is unusable.
pub fn load(files: Option<&CredentialFiles>) -> anyhow::Result<Option<std::sync::Arc<Tls>>> {
    Ok(files.cloned().map(Tls::load).transpose()?)
}

impl FromToml for Fingerprint {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut Reader<'_>) -> Option<Self> {
        parse_text(value, reader, str::parse)
    }

    fn expected() -> String {
        "the SHA-256 of a certificate, as `coreward certs show` prints it".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": "^([0-9A-Fa-f]{2}:?){32}$" })
    }
}
