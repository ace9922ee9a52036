//! The controller's own file, parsed and checked. docs/config.md is the reference for users.

#[cfg(test)]
mod controller_tests;
pub mod etcd;
pub mod file;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use coreward_config::{Secret, Spanned, TomlReader, config_file};
use coreward_listener::security::ListenerConfig;
use coreward_model::rss::RssKey;
use coreward_tls::certificate::CertificateFingerprint;

use etcd::{ControllerListenAddresses, EtcdConfig};
use file::ControllerFile;

pub const DEFAULT_API_ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 7401);

#[derive(Debug, Clone)]
pub struct ControllerConfig {
    /// Address at which the controller listens for agents, load balancers and `coreward status`.
    pub listen_address: SocketAddr,
    pub api_listen_address: SocketAddr,
    pub token_directory: PathBuf,
    pub store: StoreLocation,
    /// Address at which metrics are served for Prometheus, or `None` if none are served.
    pub metrics_listen_address: Option<SocketAddr>,
    /// File with the fleet document, or `None` to use the last applied document in the store.
    pub fleet_file: Option<PathBuf>,
    /// RSS key that agents with `manage_rss = true` set, or `None` for the key in the store.
    pub rss_key: Option<Secret<RssKey>>,
    /// Files of the controller's own certificate, or `None` if connections are neither encrypted nor authenticated.
    pub credential_files: Option<coreward_tls::TlsCredentialFiles>,
    /// Fingerprints of certificates that are rejected although they are valid.
    pub revoked_certificates: Vec<CertificateFingerprint>,
    /// Whether the controller intentionally listens beyond this host without TLS, so that it logs no warning.
    pub allow_plaintext: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreLocation {
    /// Path of a file that only this controller uses.
    Embedded(PathBuf),
    /// etcd, which several controllers share.
    Etcd(EtcdConfig),
}

impl StoreLocation {
    pub fn may_contain_records(&self) -> bool {
        match self {
            Self::Embedded(file) => file.exists(),
            Self::Etcd(_) => true,
        }
    }
}

impl ControllerConfig {
    /// Returns the keys that are read only at the start and whose values differ in `new`.
    pub fn config_keys_needing_restart(&self, new: &Self) -> Vec<&'static str> {
        let changed_keys = [
            ("listen", self.listen_address != new.listen_address),
            ("api", self.api_listen_address != new.api_listen_address),
            ("store", self.store != new.store),
            ("tls", self.credential_files != new.credential_files),
            ("metrics", self.metrics_listen_address != new.metrics_listen_address),
            ("token_directory", self.token_directory != new.token_directory),
            ("allow_plaintext", self.allow_plaintext != new.allow_plaintext),
        ];
        changed_keys.into_iter().filter(|(_, has_changed)| *has_changed).map(|(key, _)| key).collect()
    }

    pub fn listener_config(&self) -> ListenerConfig<'_> {
        let Self { listen_address: listen, credential_files: tls, revoked_certificates, allow_plaintext, .. } = self;
        ListenerConfig {
            listen_address: *listen,
            tls: tls.as_ref(),
            revoked_certificates,
            allow_plaintext: *allow_plaintext,
        }
    }

    fn from_file(file: ControllerFile, reader: &mut TomlReader<'_>) -> Option<Self> {
        let listen_address = file.listen.value;
        let api_listen_address = *file.api.get_ref();
        if file.tls.is_none() && !api_listen_address.ip().is_loopback() {
            let expected_address = "expected `[tls]`, or an address of this host only, as \"127.0.0.1:7401\"";
            reader.report_mistake(
                file.api.span(),
                format!("tokens would pass a network in clear to {api_listen_address}: {expected_address}"),
            );
        }
        let fleet_key_span = file.fleet.as_ref().map(Spanned::span);
        let store_location = etcd::configured_store_location(
            file.store,
            file.etcd,
            ControllerListenAddresses { daemons: listen_address, api: api_listen_address },
            fleet_key_span,
            reader,
        )?;
        let listen_address = listen_address?;
        let token_directory = match (file.token_directory, &store_location) {
            (Some(directory), _) => reader.resolve_path(&directory),
            (None, StoreLocation::Embedded(file)) => file.parent().map(Path::to_owned).unwrap_or_default(),
            (None, StoreLocation::Etcd(_)) => STATE_DIRECTORY.into(),
        };
        Some(Self {
            listen_address,
            api_listen_address,
            token_directory,
            store: store_location,
            metrics_listen_address: file.metrics,
            fleet_file: file.fleet.map(|path| reader.resolve_path(path.get_ref())),
            rss_key: file.rss_key_file,
            credential_files: file.tls,
            revoked_certificates: file.revoked_certificates,
            allow_plaintext: file.allow_plaintext,
        })
    }
}

config_file!(ControllerConfig, ControllerConfig::from_file);

/// State directory of the packaged systemd unit, which is the only directory that the unit may write.
const STATE_DIRECTORY: &str = "/var/lib/coreward";
