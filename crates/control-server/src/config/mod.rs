//! The controller's own file, parsed into something that holds together. docs/config.md is the reference for users.

#[cfg(test)]
mod controller_tests;
pub mod etcd;
pub mod file;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use coreward_config::{Diagnostics, Secret, Source, Spanned};
use coreward_listener::security::ListenerConfig;
use coreward_model::rss::RssKey;
use coreward_tls::certificate::Fingerprint;

use etcd::{EtcdConfig, Listens};
use file::ControllerFile;

pub const DEFAULT_API: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 7401);

/// What the controller itself is told.
#[derive(Debug, Clone)]
pub struct ControllerConfig {
    /// Where agents, load balancers and `coreward status` connect to.
    pub listen: SocketAddr,
    pub api: SocketAddr,
    pub token_directory: PathBuf,
    /// Where everything is that must survive.
    pub store: StoreLocation,
    /// Where metrics are served for Prometheus; `None`: nowhere.
    pub metrics: Option<SocketAddr>,
    /// The fleet's document; `None`: what was applied last, which the store keeps.
    pub fleet: Option<PathBuf>,
    /// The key that agents with `manage_rss = true` set; `None`: the one that the store drew.
    pub rss_key: Option<Secret<RssKey>>,
    /// Who it is; `None`: connections are neither encrypted nor authenticated.
    pub tls: Option<coreward_tls::Files>,
    /// Certificates that are refused though they are right.
    pub revoked_certificates: Vec<Fingerprint>,
    /// Whether nobody needs to be told that it listens beyond this host without TLS.
    pub allow_plaintext: bool,
}

/// Where everything is that must survive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreLocation {
    /// In a file of this controller's own.
    Embedded(PathBuf),
    /// In etcd, which it shares with others.
    Etcd(EtcdConfig),
}

impl StoreLocation {
    pub fn may_hold_records(&self) -> bool {
        match self {
            Self::Embedded(file) => file.exists(),
            Self::Etcd(_) => true,
        }
    }
}

impl ControllerConfig {
    /// Keys that have another value in `new`, and are read at the start only.
    pub fn restart_keys(&self, new: &Self) -> Vec<&'static str> {
        let keys = [
            ("listen", self.listen != new.listen),
            ("api", self.api != new.api),
            ("store", self.store != new.store),
            ("tls", self.tls != new.tls),
            ("metrics", self.metrics != new.metrics),
            ("token_directory", self.token_directory != new.token_directory),
            ("allow_plaintext", self.allow_plaintext != new.allow_plaintext),
        ];
        keys.into_iter().filter(|(_, changed)| *changed).map(|(key, _)| key).collect()
    }

    /// Who may come.
    pub fn listener_config(&self) -> ListenerConfig<'_> {
        let Self { listen, tls, revoked_certificates, allow_plaintext, .. } = self;
        ListenerConfig { listen: *listen, tls: tls.as_ref(), revoked_certificates, allow_plaintext: *allow_plaintext }
    }

    /// Fails when the file cannot be read; the error lists every mistake.
    pub fn load(path: &Path) -> Result<Self, Diagnostics> {
        Self::parse(&Source::read(path)?)
    }

    /// The error lists every mistake.
    pub fn parse(source: &Source) -> Result<Self, Diagnostics> {
        source.read_as(|file: ControllerFile, reader| {
            let listen = file.listen.value;
            let api = *file.api.get_ref();
            if file.tls.is_none() && !api.ip().is_loopback() {
                let expected = "expected `[tls]`, or an address of this host only, as \"127.0.0.1:7401\"";
                reader.mistake(file.api.span(), format!("tokens would pass a network in clear to {api}: {expected}"));
            }
            let fleet = file.fleet.as_ref().map(Spanned::span);
            let store = etcd::store_place(file.store, file.etcd, Listens { parts: listen, api }, fleet, reader)?;
            let listen = listen?;
            let token_directory = match (file.token_directory, &store) {
                (Some(directory), _) => reader.beside(&directory),
                (None, StoreLocation::Embedded(file)) => file.parent().map(Path::to_owned).unwrap_or_default(),
                (None, StoreLocation::Etcd(_)) => STATE_DIRECTORY.into(),
            };
            Some(Self {
                listen,
                api,
                token_directory,
                store,
                metrics: file.metrics,
                fleet: file.fleet.map(|path| reader.beside(path.get_ref())),
                rss_key: file.rss_key_file,
                tls: file.tls,
                revoked_certificates: file.revoked_certificates,
                allow_plaintext: file.allow_plaintext,
            })
        })
    }
}

/// The state directory of the packaged unit, which leaves the controller nothing else to write.
const STATE_DIRECTORY: &str = "/var/lib/coreward";
