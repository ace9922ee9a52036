//! The controller's file: what an operator writes, parsed into a [`Config`] that holds together.
//!
//! docs/config.md is the reference for users. What one value must be is checked where it is read ([`file`]); what
//! concerns several values is checked in [`check`] and [`mode`]. Every error points at the line of the value that is wrong.

mod check;
mod file;
mod mode;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coreward_config::{ConfigError, Source};
use coreward_model::ServerId;
use coreward_model::consistency::ServiceMode;
use coreward_model::load::Alpha;
use coreward_model::placement::BucketCount;
use coreward_model::policy::{Capacity, Weight};
use coreward_model::rss::RssKey;
use coreward_model::tuple::ServiceAddress;

/// 10 Hz, as published (CrossRSS, CoNEXT'20).
pub const DEFAULT_REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// A cookie lives as long as its connection; a day covers all but the rarest.
pub const DEFAULT_RETIRE_AFTER: Duration = Duration::from_secs(86_400);

/// What the controller is told.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where agents, load balancers and `coreward status` connect to.
    pub listen: SocketAddr,
    /// The file with everything that must survive.
    pub store: PathBuf,
    /// Time between two reports of an agent, and between two tables.
    pub report_interval: Duration,
    /// Weight of the newest report.
    pub alpha: Alpha,
    /// The key that agents with `manage_rss = true` set; `None`: the one that the store drew.
    pub rss_key: Option<RssKey>,
    /// How long a cookie may live: the id of a server that left, and a key that stamps no more, are kept that long.
    pub retire_after: Duration,
    /// How often the cookie keys are rotated; `None`: when somebody says so.
    pub key_rotation: Option<Duration>,
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
    /// Its id where the operator chose one, and where in the file.
    pub id: Option<(ServerId, Span)>,
    /// Whether it takes new connections.
    pub state: ServerState,
    /// Its part of new connections.
    pub weight: Weight,
    /// How much it can do; `None`: by its cores.
    pub capacity: Option<Capacity>,
    /// Where in the file it stands.
    pub span: Span,
}

/// Bytes of the configuration file.
pub type Span = Range<usize>;

/// What an operator wants of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ServerState {
    /// Takes new connections.
    Active,
    /// Only established connections reach it.
    Draining,
}

/// One `[[service]]`.
#[derive(Debug, Clone)]
pub struct ServiceConfig {
    /// What operators call it.
    pub name: String,
    /// What clients connect to.
    pub address: ServiceAddress,
    /// How packets find their server.
    pub mode: ServiceMode,
    /// A name out of `coreward_model::policy::names()`.
    pub policy: &'static str,
    /// How long the share of a server that joins grows.
    pub slow_start: Duration,
    /// Number of buckets.
    pub buckets: BucketCount,
    /// Positions in [`Config::servers`].
    pub servers: Vec<usize>,
    /// Where in the file it stands.
    pub span: Span,
}

impl Config {
    /// # Errors
    /// When the file cannot be read or something in it is wrong.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        Self::parse(Source::read(path)?)
    }

    /// # Errors
    /// When something in it is wrong.
    pub fn parse(source: Source) -> Result<Self, ConfigError> {
        check::check(source)
    }

    /// An error that points into the file.
    pub fn error(&self, span: &Span, message: &str) -> ConfigError {
        self.source.error(span.clone(), message)
    }
}
