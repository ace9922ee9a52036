//! What an operator writes: the controller's own file, and the fleet's document, each parsed into something that holds
//! together.
//!
//! docs/config.md is the reference for users. What one value must be is described in [`file`]; what concerns several
//! values is checked in [`check`] and [`mode`]. Every mistake points at the line of the value that is wrong.
//! [`difference`] says what one document of the fleet changes in another.

mod check;
#[cfg(test)]
mod controller_tests;
mod difference;
pub mod etcd;
pub mod file;
mod health;
mod mode;
mod racks;
#[cfg(test)]
mod tests;
mod transfer;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use coreward_config::{Mistake, Mistakes, Secret, Source, Span, Spanned};
use coreward_model::ServerId;
use coreward_model::consistency::ServiceMode;
use coreward_model::health::{Check, WhenAllDown};
use coreward_model::load::Alpha;
use coreward_model::placement::BucketCount;
use coreward_model::policy::{Capacity, Weight};
use coreward_model::rss::RssKey;
use coreward_model::tuple::ServiceAddress;
use coreward_tls::certificate::Fingerprint;

pub use difference::{Change, difference};
use etcd::{EtcdConfig, Listens};
use file::{ControllerFile, FleetFile};

use coreward_listener::security::Door;

/// 10 Hz, as published (CrossRSS, CoNEXT'20).
pub const DEFAULT_REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// Where the API is.
pub const DEFAULT_API: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 7401);

/// A cookie lives as long as its connection; a day covers all but the rarest.
pub const DEFAULT_RETIRE_AFTER: Duration = Duration::from_secs(86_400);

/// What the controller itself is told.
#[derive(Debug, Clone)]
pub struct ControllerConfig {
    /// Where agents, load balancers and `coreward status` connect to.
    pub listen: SocketAddr,
    /// Where the HTTP API is.
    pub api: SocketAddr,
    /// Where its tokens are.
    pub token_directory: PathBuf,
    /// Where everything is that must survive.
    pub store: StorePlace,
    /// Where metrics are served for Prometheus; `None`: nowhere.
    pub metrics: Option<SocketAddr>,
    /// The fleet's document; `None`: what was applied last, which the store keeps.
    pub fleet: Option<PathBuf>,
    /// The key that agents with `manage_rss = true` set; `None`: the one that the store drew.
    pub rss_key: Option<Secret<RssKey>>,
    /// Who it is; `None`: connections are neither encrypted nor authenticated.
    pub tls: Option<coreward_tls::Files>,
    /// Certificates that are refused though they are right.
    pub denied_certificates: Vec<Fingerprint>,
    /// Whether nobody needs to be told that it listens beyond this host without TLS.
    pub allow_plaintext: bool,
}

/// Where everything is that must survive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StorePlace {
    /// In a file of this controller's own.
    Embedded(PathBuf),
    /// In etcd, which it shares with others.
    Etcd(EtcdConfig),
}

impl StorePlace {
    /// Whether a controller may have been there before.
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
    pub fn door(&self) -> Door<'_> {
        let Self { listen, tls, denied_certificates, allow_plaintext, .. } = self;
        Door { listen: *listen, tls: tls.as_ref(), denied_certificates, allow_plaintext: *allow_plaintext }
    }

    /// # Errors
    /// When the file cannot be read; everything in it that is wrong.
    pub fn load(path: &Path) -> Result<Self, Mistakes> {
        Self::parse(&Source::read(path)?)
    }

    /// # Errors
    /// Everything in it that is wrong.
    pub fn parse(source: &Source) -> Result<Self, Mistakes> {
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
                (None, StorePlace::Embedded(file)) => file.parent().map(Path::to_owned).unwrap_or_default(),
                (None, StorePlace::Etcd(_)) => STATE_DIRECTORY.into(),
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
                denied_certificates: file.denied_certificates,
                allow_plaintext: file.allow_plaintext,
            })
        })
    }
}

/// The state directory of the packaged unit, which leaves the controller nothing else to write.
const STATE_DIRECTORY: &str = "/var/lib/coreward";

/// The servers and services, and what holds for all of them.
#[derive(Debug, Clone)]
pub struct FleetConfig {
    /// Time between two reports of an agent.
    pub report_interval: Duration,
    /// When tables are made.
    pub tables: TableTiming,
    /// Time for which load balancers use a table that depends on loads while no controller leads.
    pub table_lifetime: Duration,
    /// Weight of the newest report.
    pub alpha: Alpha,
    /// How long a cookie may live: the id of a server that left, and a key that stamps no more, are kept that long.
    pub retire_after: Duration,
    /// How often the cookie keys are rotated; `None`: when somebody says so.
    pub key_rotation: Option<Duration>,
    /// The racks that may connect; `None`: any.
    pub racks: Option<BTreeSet<String>>,
    /// The load balancers that may; `None`: any.
    pub load_balancers: Option<BTreeSet<String>>,
    /// Names, addresses and ids are each used once.
    pub servers: Vec<ServerConfig>,
    /// Names and VIPs are each used once.
    pub services: Vec<ServiceConfig>,
    source: Source,
}

/// One `[[server]]`.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// What agents and operators call it.
    pub name: String,
    /// Where load balancers reach it.
    pub address: IpAddr,
    /// Its id where the operator chose one, and where in the document.
    pub id: Option<(ServerId, Span)>,
    /// Whether it takes new connections.
    pub state: ServerState,
    /// Its part of new connections.
    pub weight: Weight,
    /// How much it can do; `None`: by its cores.
    pub capacity: Option<Capacity>,
    /// Through which racks its agent may speak; `None`: through the fleet's.
    pub racks: Option<BTreeSet<String>>,
    /// Where in the document it stands.
    pub span: Span,
}

/// When a service's table is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableTiming {
    /// As soon as a report, or whatever else it is made of, has changed.
    OnChange,
    /// Once per report interval, as published (CrossRSS, CoNEXT'20) and as the simulator does.
    Interval,
}

/// What an operator wants of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerState {
    /// Takes new connections.
    Active,
    /// Only established connections reach it.
    Draining,
}

/// A load balancer that has some of a service's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OtherBalancer {
    /// Where it is reached, in the load balancers' own network.
    pub address: IpAddr,
    /// It gets the first packets from now on; otherwise it had the service before.
    pub handed_over: bool,
}

/// One `[[service]]`.
#[derive(Debug, Clone)]
pub struct ServiceConfig {
    /// What operators call it.
    pub name: String,
    /// What clients connect to.
    pub address: ServiceAddress,
    /// How packets find their server; without a transfer, whose id the document does not know.
    pub mode: ServiceMode,
    /// Whom the service is adopted from or handed over to.
    pub other_balancer: Option<OtherBalancer>,
    /// A name out of `coreward_model::policy::names()`.
    pub policy: &'static str,
    /// How long the share of a server that joins grows.
    pub slow_start: Duration,
    /// Number of buckets.
    pub buckets: BucketCount,
    /// How its servers are checked; `None`: they are not.
    pub check: Option<Check>,
    /// What becomes of new connections when all of its servers are down.
    pub when_all_down: WhenAllDown,
    /// Positions in [`FleetConfig::servers`].
    pub servers: Vec<usize>,
    /// Where in the document it stands.
    pub span: Span,
}

impl FleetConfig {
    /// # Errors
    /// When the file cannot be read; everything in it that is wrong.
    pub fn load(path: &Path) -> Result<Self, Mistakes> {
        Self::parse(&Source::read(path)?)
    }

    /// A document that an operator gives. One without a single key is refused: a file that an editor has just cut off, or a
    /// full disk left empty, would end all services at the next SIGHUP.
    ///
    /// # Errors
    /// Everything in it that is wrong.
    pub fn parse(source: &Source) -> Result<Self, Mistakes> {
        let is_empty = source.keys().is_empty() && source.syntax_errors().is_empty();
        if is_empty {
            let message =
                "nothing in it: expected [[server]] and [[service]], or some other key where none of these is wanted";
            return Err(Mistake::of_file(source.path(), message).into());
        }
        Self::on_record(source)
    }

    /// What the store holds: nothing before the first document is applied.
    ///
    /// # Errors
    /// Everything in it that is wrong.
    pub fn on_record(source: &Source) -> Result<Self, Mistakes> {
        source.read_as(|file: FleetFile, reader| Some(check::check(file, reader)))
    }

    /// The document.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Mistakes that only show when the document is put together with what is on record: the places, and the words.
    pub fn mistakes(&self, wrong: Vec<(Span, String)>) -> Mistakes {
        Mistakes::at(&self.source, wrong)
    }
}
