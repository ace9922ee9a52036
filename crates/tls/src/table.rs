//! `[tls]` in a daemon's file.

use std::path::PathBuf;

use coreward_config::toml::de::DeValue;
use coreward_config::{Form, Reader, Spanned, parsed, serde_json, table};
use serde_json::{Value, json};

use crate::certificate::Fingerprint;
use crate::material::Files;
use crate::tls::Tls;

table! {
    /// Certificates: who this part is, and whom it believes. Without this table connections are neither encrypted nor
    /// authenticated.
    pub struct Table {
        /// File with the authorities' certificates (PEM), relative to this one; several while one takes over from another.
        ca: Spanned<PathBuf>,
        /// File with this part's own certificate, and what leads from it to an authority (PEM).
        certificate: Spanned<PathBuf>,
        /// File with the key to it (PEM), readable by its owner only.
        key: Spanned<PathBuf>,
    }
}

impl Table {
    /// The files, if TLS can use them; what is wrong is on the reader's list.
    pub fn check_within(self, reader: &mut Reader<'_>) -> Option<Files> {
        let files = Files {
            ca: reader.beside(self.ca.get_ref()),
            certificate: reader.beside(self.certificate.get_ref()),
            key: reader.beside(self.key.get_ref()),
        };
        let unusable = match crate::material::Material::load(&files) {
            Ok(_) => return Some(files),
            Err(unusable) => unusable,
        };
        let span = match unusable.key {
            "ca" => self.ca.span(),
            "key" => self.key.span(),
            _ => self.certificate.span(),
        };
        reader.mistake(span, unusable);
        None
    }
}

/// Loads what `[tls]` names; without it nothing.
///
/// # Errors
/// When a file cannot be used.
pub fn load(files: Option<&Files>) -> anyhow::Result<Option<std::sync::Arc<Tls>>> {
    Ok(files.cloned().map(Tls::load).transpose()?)
}

impl Form for Fingerprint {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut Reader<'_>) -> Option<Self> {
        parsed(value, reader, str::parse)
    }

    fn expected() -> String {
        "the SHA-256 of a certificate, as `coreward certs show` prints it".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": "^([0-9A-Fa-f]{2}:?){32}$" })
    }
}
