//! Fleet's document, parsed and checked; docs/config.md is the reference.
//!
//! [`file`], [`service`] and [`address`] describe single values, [`service`] and [`check`] check combinations. Every
//! mistake has the location of the invalid value. [`difference`] compares two documents.

mod address;
mod check;
mod difference;
pub mod file;
mod health;
#[cfg(test)]
mod ipv6_tests;
mod racks;
mod service;
#[cfg(test)]
mod tests;
mod transfer;
mod unique;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use coreward_config::{Diagnostic, Diagnostics, Source, Span};
use coreward_model::ServerId;
use coreward_model::consistency::ServiceMode;
use coreward_model::health::{HealthCheck, WhenAllDown};
use coreward_model::load::Alpha;
use coreward_model::placement::BucketCount;
use coreward_model::policy::{Capacity, Weight};
use coreward_model::tuple::ServiceAddress;
use coreward_model::vlan::Vlan;

pub use difference::{Change, difference};
use file::FleetFile;

/// 10 Hz, as published (CrossRSS, CoNEXT'20).
pub const DEFAULT_REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// A cookie lives as long as its connection; a day covers nearly all connections.
pub const DEFAULT_MAX_CONNECTION_LIFETIME: Duration = Duration::from_secs(86_400);

#[derive(Debug, Clone)]
pub struct FleetConfig {
    pub report_interval: Duration,
    pub table_updates: TableTiming,
    /// Lifetime of load-dependent tables without a leader.
    pub table_lifetime: Duration,
    pub alpha: Alpha,
    /// Longest life of a cookie: the ids of former servers and the previous key are kept for this time.
    pub max_connection_lifetime: Duration,
    /// Interval of key rotations; `None`: by command only.
    pub key_rotation: Option<Duration>,
    /// Racks that may connect; `None`: any.
    pub racks: Option<BTreeSet<String>>,
    /// Load balancers that may connect; `None`: any.
    pub load_balancers: Option<BTreeSet<String>>,
    /// Servers, with unique names, addresses and ids.
    pub servers: Vec<ServerConfig>,
    /// Services, with unique names and VIPs.
    pub services: Vec<ServiceConfig>,
    source: Source,
}

#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Name for agents and operators.
    pub name: String,
    /// Address for load balancers.
    pub address: IpAddr,
    /// Id chosen by the operator, with its location.
    pub id: Option<(ServerId, Span)>,
    pub state: ServerState,
    /// Share of new connections.
    pub weight: Weight,
    /// Capacity; `None`: the number of the server's cores.
    pub capacity: Option<Capacity>,
    /// VLAN of frames from load balancers to the server.
    pub vlan: Vlan,
    /// Racks that may report for it; `None`: the fleet's racks.
    pub racks: Option<BTreeSet<String>>,
    /// Location in the document.
    pub span: Span,
}

/// Trigger of a service's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableTiming {
    /// After a change of a report, or of another input.
    OnChange,
    /// Once per report interval, as published (CrossRSS, CoNEXT'20) and as the simulator does.
    Interval,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerState {
    /// Takes new connections.
    Active,
    /// Only established connections reach it.
    Draining,
}

/// Load balancer that serves a part of a service's connections during a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OtherBalancer {
    pub address: IpAddr,
    /// Whether new connections go to the other load balancer (`migrate_to`), or the service came from it
    /// (`migrate_from`).
    pub is_handed_over: bool,
}

#[derive(Debug, Clone)]
pub struct ServiceConfig {
    pub name: String,
    pub address: ServiceAddress,
    /// Consistency mode. The transfer in it has no id yet, because the document has none.
    pub mode: ServiceMode,
    /// Load balancer that the service is adopted from or handed over to.
    pub other_balancer: Option<OtherBalancer>,
    /// Name from `coreward_model::policy::names()`.
    pub policy: &'static str,
    pub slow_start: Duration,
    pub buckets: BucketCount,
    /// Health check of the service's servers, if any.
    pub check: Option<HealthCheck>,
    /// Treatment of new connections when all servers are down.
    pub when_all_down: WhenAllDown,
    /// Positions in [`FleetConfig::servers`].
    pub servers: Vec<usize>,
    /// Location in the document.
    pub span: Span,
}

impl FleetConfig {
    /// Reads and parses the file.
    pub fn load(path: &Path) -> Result<Self, Diagnostics> {
        Self::parse(&Source::read(path)?)
    }

    /// Parses an operator's document. Rejects one without any key: a file that an editor has just truncated, or a full
    /// disk left empty, would end all services at the next SIGHUP.
    pub fn parse(source: &Source) -> Result<Self, Diagnostics> {
        let is_empty = source.keys().is_empty() && source.syntax_errors().is_empty();
        if is_empty {
            let message = "nothing in it: expected [[server]] and [[service]], or another key if there are none";
            return Err(Diagnostic::for_file(source.path(), message).into());
        }
        Self::parse_stored(source)
    }

    /// Parses the stored document, which is empty before the first one is applied.
    pub fn parse_stored(source: &Source) -> Result<Self, Diagnostics> {
        source.read_as(|file: FleetFile, reader| Some(check::check(file, reader)))
    }

    /// Returns the document's text.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Returns mistakes found by comparison with the records, sorted by location and message.
    pub fn diagnostics(&self, wrong: Vec<(Span, String)>) -> Diagnostics {
        Diagnostics::at(&self.source, wrong)
    }
}
