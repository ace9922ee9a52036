//! Fleet document, parsed and checked. docs/config.md is its reference.
//!
//! [`file`], [`service`] and [`address`] describe single values, while [`service`] and [`check`] check combinations of
//! values. Every mistake has the location of the invalid value. [`difference`] compares two documents.

mod address;
mod check;
mod difference;
pub mod file;
mod health;
#[cfg(test)]
mod ipv6_tests;
mod racks;
mod service;
mod service_migration;
#[cfg(test)]
mod tests;
mod unique_values;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use coreward_config::{ConfigDiagnostic, Diagnostics, Span, TomlSource};
use coreward_model::ServerId;
use coreward_model::consistency::ServiceSettings;
use coreward_model::health::{AllServersDownTreatment, HealthCheck};
use coreward_model::load::SmoothingWeight;
use coreward_model::placement::BucketCount;
use coreward_model::policy::{ServerCapacity, ServerWeight};
use coreward_model::tuple::ServiceAddress;
use coreward_model::vlan::Vlan;

pub use difference::{FleetDocumentChange, list_changes};
use file::FleetFile;

/// Default interval between reports of an agent, for 10 reports per second as in the CrossRSS paper (CoNEXT'20).
pub const DEFAULT_REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// Default of `max_connection_lifetime`. A cookie lives as long as its connection, which is nearly always less than a
/// day.
pub const DEFAULT_MAX_CONNECTION_LIFETIME: Duration = Duration::from_secs(86_400);

#[derive(Debug, Clone)]
pub struct FleetConfig {
    pub report_interval: Duration,
    pub table_timing: PlacementTableTiming,
    /// Time for which tables that depend on loads remain in use while no controller leads.
    pub table_lifetime: Duration,
    pub load_ewma_alpha: SmoothingWeight,
    /// Maximum lifetime of a cookie. For this time, ids of former servers and the previous key are kept.
    pub max_connection_lifetime: Duration,
    /// Interval between key rotations, or `None` if keys are rotated only by command.
    pub key_rotation_interval: Option<Duration>,
    /// Names of the racks that may connect, or `None` if any rack may.
    pub allowed_racks: Option<BTreeSet<String>>,
    /// Names of the load balancers that may connect, or `None` if any load balancer may.
    pub allowed_load_balancers: Option<BTreeSet<String>>,
    /// Servers, with unique names, addresses and ids.
    pub servers: Vec<FleetServerConfig>,
    /// Services, with unique names and VIPs.
    pub services: Vec<FleetServiceConfig>,
    source: TomlSource,
}

#[derive(Debug, Clone)]
pub struct FleetServerConfig {
    /// Name by which agents and operators identify the server.
    pub name: String,
    /// Address at which load balancers reach the server.
    pub address: IpAddr,
    /// Id that the operator chose, with its location in the document, or `None` if an id is to be drawn at random.
    pub id: Option<(ServerId, Span)>,
    pub drain_state: ServerDrainState,
    /// Share of new connections relative to other servers.
    pub weight: ServerWeight,
    /// Capacity, where 1 is that of a typical core, or `None` to use the number of the server's cores.
    pub capacity: Option<ServerCapacity>,
    /// VLAN of the frames that load balancers send to the server.
    pub vlan: Vlan,
    /// Names of the racks that may report for the server, or `None` for the fleet's allowed racks.
    pub allowed_racks: Option<BTreeSet<String>>,
    /// Location of the server in the document.
    pub span: Span,
}

/// Trigger of new placement tables for a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlacementTableTiming {
    /// A table is computed as soon as a report or another input changes.
    OnChange,
    /// Tables are computed once per report interval, as in the CrossRSS paper (CoNEXT'20) and the simulator.
    Interval,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerDrainState {
    /// The server takes new connections.
    Active,
    /// The server keeps its established connections, but takes no new ones.
    Draining,
}

/// Other load balancer of a migration, which serves a part of the service's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigrationLoadBalancer {
    pub address: IpAddr,
    /// Whether new connections go to the other load balancer (`migrate_to`). Otherwise the other load balancer had the
    /// service before (`migrate_from`).
    pub takes_new_connections: bool,
}

#[derive(Debug, Clone)]
pub struct FleetServiceConfig {
    pub name: String,
    pub address: ServiceAddress,
    /// Consistency mode of the service. Its migration is not set, because the document has no id of the other load
    /// balancer.
    pub settings: ServiceSettings,
    /// Load balancer from which the service is adopted, or to which it is handed over.
    pub other_balancer: Option<MigrationLoadBalancer>,
    /// Name of the placement policy, one of `coreward_model::policy::policy_names()`.
    pub policy_name: &'static str,
    pub slow_start_duration: Duration,
    pub bucket_count: BucketCount,
    /// Health check of the service's servers, or `None` if they are not checked.
    pub health_check: Option<HealthCheck>,
    /// Treatment of new connections when all servers are down.
    pub when_all_down: AllServersDownTreatment,
    /// Positions of the service's servers in [`FleetConfig::servers`].
    pub server_positions: Vec<usize>,
    /// Location of the service in the document.
    pub span: Span,
}

impl FleetConfig {
    /// Reads and parses the fleet document in this file.
    pub fn load(path: &Path) -> Result<Self, Diagnostics> {
        Self::parse(&TomlSource::read(path)?)
    }

    /// Parses an operator's document. Rejects a document without any key. An editor that has just truncated the file,
    /// or a full disk, can leave it empty. All services would otherwise end at the next SIGHUP.
    pub fn parse(source: &TomlSource) -> Result<Self, Diagnostics> {
        let is_empty = source.top_level_keys().is_empty() && source.syntax_errors().is_empty();
        if is_empty {
            let message = "nothing in it: expected [[server]] and [[service]], or another key if there are none";
            return Err(ConfigDiagnostic::for_file(source.path(), message).into());
        }
        Self::parse_stored(source)
    }

    /// Parses the stored document, which is empty until the first document is applied.
    pub fn parse_stored(source: &TomlSource) -> Result<Self, Diagnostics> {
        source.read_as(|file: FleetFile, reader| Some(check::check_and_convert_fleet(file, reader)))
    }

    pub fn source(&self) -> &TomlSource {
        &self.source
    }

    /// Returns diagnostics for mistakes that were found by comparison with the fleet's records. They are sorted by
    /// location and message.
    pub fn diagnostics_for_mistakes(&self, mistakes: Vec<(Span, String)>) -> Diagnostics {
        Diagnostics::from_mistakes(&self.source, mistakes)
    }
}
