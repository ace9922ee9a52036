//! Addresses of controllers, and credentials of callers.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use coreward_tls::TlsCredentialFiles;

/// URL of a controller's HTTP API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerUrl {
    is_https: bool,
    /// Host and port of the controller, as written in the URL.
    pub(super) host_and_port: String,
}

/// Error for a text that is not the URL of a controller's API.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?}: expected the address and port of a controller's API on this host, as \"127.0.0.1:7401\", or \
     \"https://HOST:PORT\""
)]
pub struct InvalidControllerUrl(String);

impl FromStr for ControllerUrl {
    type Err = InvalidControllerUrl;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid_url_error = || InvalidControllerUrl(text.to_owned());
        let trimmed_url = text.trim_end_matches('/');
        if let Some(authority) = trimmed_url.strip_prefix("https://") {
            let (host, port) = authority.rsplit_once(':').ok_or_else(invalid_url_error)?;
            let is_host = !host.is_empty() && !host.contains(['/', '@', '?', '#', ' ']);
            let is_port = port.parse::<u16>().is_ok_and(|port| port > 0);
            return if is_host && is_port {
                Ok(Self { is_https: true, host_and_port: authority.to_owned() })
            } else {
                Err(invalid_url_error())
            };
        }
        let address: SocketAddr =
            trimmed_url.strip_prefix("http://").unwrap_or(trimmed_url).parse().map_err(|_| invalid_url_error())?;
        // Without TLS, the token would cross a network unencrypted.
        if address.ip().is_loopback() { Ok(address.into()) } else { Err(invalid_url_error()) }
    }
}

impl From<SocketAddr> for ControllerUrl {
    /// Returns the URL `http://ADDRESS:PORT` of a controller, without TLS.
    fn from(address: SocketAddr) -> Self {
        Self { is_https: false, host_and_port: address.to_string() }
    }
}

impl ControllerUrl {
    /// Returns whether the URL is `https://`, so that connections use TLS.
    pub fn is_https(&self) -> bool {
        self.is_https
    }

    /// Returns the host without the port. An IPv6 address has no brackets.
    pub(super) fn host(&self) -> &str {
        let host = self.host_and_port.rsplit_once(':').map_or(self.host_and_port.as_str(), |(host, _)| host);
        host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
    }
}

impl fmt::Display for ControllerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_https { "https://" } else { "" })?;
        f.write_str(&self.host_and_port)
    }
}

/// Credential by which a caller proves its role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ApiCredential {
    /// Token in a file that only its owner can read.
    Token {
        /// Path of the token file.
        file: PathBuf,
        /// Path of the file (PEM) with the authorities that may sign a controller's certificate. `https://` requires
        /// it.
        ca: Option<PathBuf>,
    },
    /// Certificate that identifies its owner as an operator or a viewer. It requires `https://`.
    Certificate(TlsCredentialFiles),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_urls_are_parsed_and_invalid_urls_rejected() {
        for (text, displayed_url, host) in [
            ("127.0.0.1:7401", "127.0.0.1:7401", "127.0.0.1"),
            ("http://127.0.0.1:7401/", "127.0.0.1:7401", "127.0.0.1"),
            ("[::1]:7401", "[::1]:7401", "::1"),
            ("https://controller.example:7401", "https://controller.example:7401", "controller.example"),
            ("https://192.0.2.1:7401/", "https://192.0.2.1:7401", "192.0.2.1"),
            ("https://[2001:db8::1]:7401", "https://[2001:db8::1]:7401", "2001:db8::1"),
        ] {
            let url: ControllerUrl = text.parse().unwrap();
            assert_eq!((url.to_string().as_str(), url.is_https()), (displayed_url, text.starts_with("https")));
            assert_eq!(url.host(), host);
        }
        for text in [
            "",
            "127.0.0.1",
            "192.0.2.1:7401",
            "http://192.0.2.1:7401",
            "https://x",
            "https://x:0",
            "https://:1",
            "ftp://x:1",
        ] {
            let error = text.parse::<ControllerUrl>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("{text:?}: expected")), "{error}");
        }
    }
}
