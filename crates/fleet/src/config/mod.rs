//! The fleet's document, parsed into something that holds together.
//!
//! docs/config.md is the reference for users. What one value must be is described in [`file`]; what concerns several
//! values is checked in [`check`] and [`mode`]. Every mistake points at the line of the value that is wrong.
//! [`difference`] says what one document of the fleet changes in another.

mod check;
mod difference;
pub mod file;
mod health;
mod mode;
mod racks;
#[cfg(test)]
mod tests;
mod transfer;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use coreward_config::{Diagnostic, Diagnostics, Source, Span};
use coreward_model::ServerId;
use coreward_model::consistency::ServiceMode;
use coreward_model::health::{Check, WhenAllDown};
use coreward_model::load::Alpha;
use coreward_model::placement::BucketCount;
use coreward_model::policy::{Capacity, Weight};
use coreward_model::tuple::ServiceAddress;

pub use difference::{Change, difference};
use file::FleetFile;

/// 10 Hz, as published (CrossRSS, CoNEXT'20).
pub const DEFAULT_REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// A cookie lives as long as its connection; a day covers all but the rarest.
pub const DEFAULT_RETIRE_AFTER: Duration = Duration::from_secs(86_400);

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
    pub fn load(path: &Path) -> Result<Self, Diagnostics> {
        Self::parse(&Source::read(path)?)
    }

    /// A document that an operator gives. One without a single key is refused: a file that an editor has just cut off, or a
    /// full disk left empty, would end all services at the next SIGHUP.
    ///
    /// # Errors
    /// Everything in it that is wrong.
    pub fn parse(source: &Source) -> Result<Self, Diagnostics> {
        let is_empty = source.keys().is_empty() && source.syntax_errors().is_empty();
        if is_empty {
            let message =
                "nothing in it: expected [[server]] and [[service]], or some other key where none of these is wanted";
            return Err(Diagnostic::of_file(source.path(), message).into());
        }
        Self::on_record(source)
    }

    /// What the store holds: nothing before the first document is applied.
    ///
    /// # Errors
    /// Everything in it that is wrong.
    pub fn on_record(source: &Source) -> Result<Self, Diagnostics> {
        source.read_as(|file: FleetFile, reader| Some(check::check(file, reader)))
    }

    /// The document.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Returns errors that only show when the document is put together with the records, by place and message.
    pub fn mistakes(&self, wrong: Vec<(Span, String)>) -> Diagnostics {
        Diagnostics::at(&self.source, wrong)
    }
}
