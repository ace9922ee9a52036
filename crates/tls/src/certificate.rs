//! Certificates, as parsed from DER.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::CertificateDer;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::identity::{FleetIdentity, IDENTITY_URI_SCHEME};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// Subject's distinguished name, such as `CN=coreward CA`.
    pub subject: String,
    /// Identity of the owner, or `None` for an authority or a certificate that was not issued for coreward.
    pub identity: Option<FleetIdentity>,
    /// Host names and IP addresses that the certificate lists as subject alternative names.
    pub hosts: Vec<String>,
    pub is_authority: bool,
    /// Begin of the validity, as time since 1970.
    pub not_before: Duration,
    /// End of the validity, as time since 1970.
    pub not_after: Duration,
    pub fingerprint: CertificateFingerprint,
}

impl Certificate {
    /// Parses a certificate in DER. Fails if it is malformed or contains several identities.
    pub fn parse_der(der: &CertificateDer<'_>) -> Result<Self, String> {
        let (_, x509_certificate) =
            X509Certificate::from_der(der).map_err(|error| format!("not an X.509 certificate: {error}"))?;
        let subject_alternative_names = x509_certificate
            .subject_alternative_name()
            .map_err(|error| format!("its names cannot be read: {error}"))?;
        let names = subject_alternative_names.map(|names| names.value.general_names.as_slice()).unwrap_or_default();
        let uris = names.iter().filter_map(|name| match name {
            GeneralName::URI(uri) if uri.starts_with(IDENTITY_URI_SCHEME) => Some(*uri),
            _ => None,
        });
        let mut identities = uris.map(str::parse);
        let identity = identities.next().transpose()?;
        if identities.next().is_some() {
            return Err(format!("it has several names that begin with {IDENTITY_URI_SCHEME}: expected one"));
        }
        let to_duration =
            |time: x509_parser::time::ASN1Time| Duration::from_secs(time.timestamp().max(0).unsigned_abs());
        Ok(Self {
            subject: x509_certificate.subject().to_string(),
            identity,
            hosts: names.iter().filter_map(host_name_or_address).collect(),
            is_authority: x509_certificate.is_ca(),
            not_before: to_duration(x509_certificate.validity().not_before),
            not_after: to_duration(x509_certificate.validity().not_after),
            fingerprint: CertificateFingerprint::from_der(der),
        })
    }

    /// Returns the remaining validity at a given time since 1970. It is zero if the certificate has expired.
    pub fn remaining_validity(&self, unix_time: Duration) -> Duration {
        self.not_after.saturating_sub(unix_time)
    }

    /// Returns whether the remaining validity is less than a third of the certificate's whole validity.
    pub fn is_renewal_due(&self, unix_time: Duration) -> bool {
        self.remaining_validity(unix_time) < self.not_after.saturating_sub(self.not_before) / 3
    }
}

fn host_name_or_address(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress([a, b, c, d]) => Some(std::net::Ipv4Addr::new(*a, *b, *c, *d).to_string()),
        GeneralName::IPAddress(bytes) => {
            <[u8; 16]>::try_from(*bytes).ok().map(|bytes| std::net::Ipv6Addr::from(bytes).to_string())
        }
        _ => None,
    }
}

/// SHA-256 fingerprint of a certificate. Its text form equals that of `openssl x509 -fingerprint -sha256`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CertificateFingerprint([u8; 32]);

impl CertificateFingerprint {
    pub fn from_der(der: &CertificateDer<'_>) -> Self {
        Self::sha256(der)
    }

    pub fn sha256(bytes: &[u8]) -> Self {
        // The hash function of rustls makes another dependency unnecessary.
        let cipher_suite =
            rustls::crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256.tls13().expect("a suite of TLS 1.3");
        let hash = cipher_suite.common.hash_provider.hash(bytes);
        let mut bytes = [0; 32];
        bytes.copy_from_slice(hash.as_ref());
        Self(bytes)
    }
}

impl std::fmt::Display for CertificateFingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = String::with_capacity(95);
        for (index, byte) in self.0.iter().enumerate() {
            write!(text, "{}{byte:02X}", if index == 0 { "" } else { ":" })?;
        }
        f.write_str(&text)
    }
}

impl std::str::FromStr for CertificateFingerprint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let hex_digits: Vec<u8> = text.bytes().filter(|byte| *byte != b':').collect();
        let parse_hex_byte = |digit_pair: &[u8]| u8::from_str_radix(std::str::from_utf8(digit_pair).ok()?, 16).ok();
        let bytes: Option<Vec<u8>> = hex_digits.chunks(2).map(parse_hex_byte).collect();
        let bytes =
            bytes.filter(|_| hex_digits.iter().all(u8::is_ascii_hexdigit)).and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or_else(|| {
            format!(
                "fingerprint {text:?}: expected the 32 bytes of a SHA-256 in hexadecimal, as `coreward certs show` \
                     prints them"
            )
        })
    }
}

/// Returns the time since 1970 according to the wall clock.
pub fn unix_now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
